/* Splitting text into the pieces that BPE works on: nanochat's regular expression, written by hand
 * (NANOCHAT.md 3.1). Pure functions; any thread. */
#ifndef COP_SPLIT_H
#define COP_SPLIT_H

#include "engine/unicode_tables.h"
#include "kernels/base.h"

/* The class of a code point.  It matters for the split alone: letters and numbers by General_Category of
 * Unicode 16.0, spaces by White_Space, the rest (marks too) is "other". */
unicode_class split_class(uint32_t code);

/* Recognize `n` bytes of a tokenizer's pat_str.  *max_numbers is how many numbers stay together: 1, 2 or 3.
 * Errors: COP_EUNSUPPORTED for any other pattern, named in the message. */
cop_status split_pattern(const char *pattern, size_t n, int *max_numbers, cop_error *err);

/* The bytes, at least 1, of the piece at the start of `n` > 0 bytes of valid UTF-8 which begin where a piece
 * begins and run to the end of the text.  All pieces of a text together cost time proportional to its length.
 */
size_t split_piece(const char *text, size_t n, int max_numbers);

#endif
