/* The calculator tool: what nanochat's use_calculator answers, without Python (NANOCHAT.md 2.1).
 *
 * Arithmetic over + - * / // ( ) with integers of any size (up to 4300 digits, as CPython's str does) and
 * doubles, and 'text'.count('x').  No signals, no globals; any thread.  Time and memory are bounded by the
 * expression's length and by the size limit on integers, which is checked before GMP is asked for anything.
 */
#ifndef COP_CALCULATOR_H
#define COP_CALCULATOR_H

#include "kernels/base.h"

/* Evaluate `n` bytes.  On COP_OK *result is a NUL-terminated string (mem_free) or NULL for "no output", which
 * is what a wrong, refused or too large expression gives.  The only error is COP_ENOMEM. */
cop_status calculator_eval(const char *expr, size_t n, char **result, cop_error *err);

#endif
