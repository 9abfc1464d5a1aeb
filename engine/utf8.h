/* UTF-8, strictly: no surrogates, no overlong forms, nothing above U+10FFFF.  Pure functions; any thread.
 * utf8_repair() is in tokenizer.h. */
#ifndef COP_UTF8_H
#define COP_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define UTF8_REPLACEMENT "\xEF\xBF\xBD" /* U+FFFD */

/* Read one code point from the start of `n` > 0 bytes.  True: *code is the code point and *len its bytes, 1
 * to 4. False: the bytes are not valid; *len is the length, 1 to 3, of the maximal invalid subpart (Unicode
 * 16, section 3.9), that is, of what one U+FFFD stands for.  *code is then U+FFFD. */
bool utf8_read(const char *bytes, size_t n, uint32_t *code, size_t *len);

/* How many of the first bytes are valid: n if all are. */
size_t utf8_valid_prefix(const char *bytes, size_t n);

#endif
