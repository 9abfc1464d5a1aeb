/* UTF-8 decoding with maximal invalid subparts. */
#include "engine/utf8.h"

#include <assert.h>
#include <string.h>

#include "engine/tokenizer.h"

/* What a lead byte says: how many bytes follow, and the range of the first of them.  Later ones are 80..BF.
 * The range is what excludes overlong forms (E0, F0), surrogates (ED) and code points above U+10FFFF (F4). */
typedef struct lead {
    int n_more; /* 0: not a lead byte */
    uint8_t low, high;
} lead;

static lead read_lead(uint8_t b) {
    if (b >= 0xC2 && b <= 0xDF) return (lead){1, 0x80, 0xBF};
    if (b >= 0xE0 && b <= 0xEF) return (lead){2, b == 0xE0 ? 0xA0 : 0x80, b == 0xED ? 0x9F : 0xBF};
    if (b >= 0xF0 && b <= 0xF4) return (lead){3, b == 0xF0 ? 0x90 : 0x80, b == 0xF4 ? 0x8F : 0xBF};
    return (lead){0, 0, 0};
}

bool utf8_read(const char *bytes, size_t n, uint32_t *code, size_t *len) {
    assert(n > 0);
    const uint8_t *b = (const uint8_t *)bytes;
    *len = 1;
    *code = b[0];
    if (b[0] < 0x80) return true;
    lead l = read_lead(b[0]);
    uint32_t c = b[0] & (0x3Fu >> l.n_more);
    *code = 0xFFFD;
    if (l.n_more == 0) return false;
    for (int i = 1; i <= l.n_more; i++) {
        uint8_t low = i == 1 ? l.low : 0x80, high = i == 1 ? l.high : 0xBF;
        if ((size_t)i >= n || b[i] < low || b[i] > high) return false;
        c = c << 6 | (b[i] & 0x3F);
        *len = (size_t)i + 1;
    }
    *code = c;
    return true;
}

size_t utf8_valid_prefix(const char *bytes, size_t n) {
    size_t pos = 0, len;
    uint32_t code;
    while (pos < n && utf8_read(bytes + pos, n - pos, &code, &len)) pos += len;
    return pos;
}

/* Copy with replacements to `to`, or only count where `to` is NULL.  Returns the bytes of the repaired text.
 */
static size_t repair_into(char *to, const char *bytes, size_t n) {
    size_t n_text = 0, len;
    uint32_t code;
    for (size_t pos = 0; pos < n; pos += len) {
        bool valid = utf8_read(bytes + pos, n - pos, &code, &len);
        size_t n_copy = valid ? len : sizeof UTF8_REPLACEMENT - 1;
        if (to) memcpy(to + n_text, valid ? bytes + pos : UTF8_REPLACEMENT, n_copy);
        n_text += n_copy;
    }
    return n_text;
}

cop_status utf8_repair(const char *bytes, size_t n, char **text, size_t *n_text, cop_error *err) {
    *text = NULL;
    *n_text = 0;
    size_t want = repair_into(NULL, bytes, n); /* at most 3 n, and no object is as large as SIZE_MAX / 3 */
    char *copy = mem_alloc(want + 1, 1);
    if (!copy) return cop_fail(err, COP_ENOMEM, "could not repair text of %zu bytes: out of memory", n);
    repair_into(copy, bytes, n);
    copy[want] = '\0';
    *text = copy;
    *n_text = want;
    return COP_OK;
}
