/* UTF-8, one lead byte at a time.  The ranges of the second byte (RFC 3629, section 4) rule out overlong
 * forms, surrogates and what lies above U+10FFFF. */
#include "proto/wire_utf8.h"

#include <string.h>

/* The length of the character that starts at s, with n bytes left; 0 if it is not one. */
static size_t character(const unsigned char *s, size_t n) {
    unsigned char lead = s[0], low = 0x80, high = 0xBF;
    size_t length;
    if (lead < 0x80) return 1;
    if (lead >= 0xC2 && lead <= 0xDF)
        length = 2;
    else if ((lead & 0xF0) == 0xE0)
        length = 3;
    else if (lead >= 0xF0 && lead <= 0xF4)
        length = 4;
    else
        return 0;
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
    if (n < length || s[1] < low || s[1] > high) return 0;
    for (size_t i = 2; i < length; i++) {
        if ((s[i] & 0xC0) != 0x80) return 0;
    }
    return length;
}

bool wire_utf8_valid(const char *bytes, size_t n) {
    const unsigned char *s = (const unsigned char *)bytes;
    for (size_t i = 0; i < n;) {
        size_t length = character(s + i, n - i);
        if (!length) return false;
        i += length;
    }
    return true;
}

size_t wire_utf8_cut(const char *bytes, size_t n, size_t limit) {
    if (n <= limit) return n;
    while (limit > 0 && ((unsigned char)bytes[limit] & 0xC0) == 0x80) limit--;
    return limit;
}

wire_quoted wire_quote(wire_text text) {
    wire_quoted q = {0};
    size_t n = wire_utf8_cut(text.bytes, text.n, 64);
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)text.bytes[i];
        q.text[i] = c < 0x20 || c == 0x7F ? '?' : (char)c;
    }
    if (n < text.n) memcpy(q.text + n, "...", 3);
    return q;
}
