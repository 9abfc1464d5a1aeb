/* UTF-8: is it valid, and where may it be cut.  Inside proto/ only. */
#ifndef WIRE_WIRE_UTF8_H
#define WIRE_WIRE_UTF8_H

#include "proto/wire.h"

/* Whether n bytes are UTF-8 as RFC 3629 defines it: no overlong forms, no surrogates, nothing above U+10FFFF.
 */
bool wire_utf8_valid(const char *bytes, size_t n);

/* The longest prefix of valid UTF-8 that has at most `limit` bytes and ends between two characters. */
size_t wire_utf8_cut(const char *bytes, size_t n, size_t limit);

/* Text from outside, made fit for an error message: its first 64 bytes, NUL-terminated, control characters as
 * '?'. */
typedef struct wire_quoted {
    char text[80];
} wire_quoted;
wire_quoted wire_quote(wire_text text); /* of valid UTF-8 */

#endif
