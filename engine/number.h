/* The numbers of the calculator, which behave as Python's do: int of any size, float, and the two oddities
 * that its character filter lets through, `()` and `...`.  Plain values that own their memory; any thread.
 *
 * Operations return false for what Python raises an exception for, and for integers beyond NUMBER_MAX_BITS;
 * that is checked before GMP is asked for anything, because GMP ends the process when it gets no memory. */
#ifndef COP_NUMBER_H
#define COP_NUMBER_H

#include <gmp.h>

#include "kernels/base.h"

/* Widest integer in between, about 315,000 decimal digits. */
#define NUMBER_MAX_BITS (1 << 20)
/* Most digits of an integer that is read or printed: CPython's sys.get_int_max_str_digits(). */
#define NUMBER_MAX_DIGITS 4300

typedef enum number_kind { NUMBER_NONE, NUMBER_INT, NUMBER_FLOAT, NUMBER_TUPLE, NUMBER_ELLIPSIS } number_kind;

typedef struct number {
    number_kind kind;
    double f; /* FLOAT */
    mpz_t i;  /* INT: initialized; else not */
} number;

/* Free what a number owns and make it NONE; a zeroed one is NONE already. */
void number_free(number *x);

/* A literal of `n` bytes: digits with at most one point.  `scratch` holds at least n + 32 bytes.  *out is
 * NONE before. False for integers that are too long or have leading zeros (`007`). */
bool number_parse(number *out, const char *literal, size_t n, char *scratch);

/* *x = +*x or -*x. */
bool number_sign(number *x, bool negative);

/* *x = *x op *y, where op is '+', '-', '*', '/' or 'd' for the floor division `//`.  Takes *y (NONE
 * afterwards). */
bool number_binary(number *x, char op, number *y);

/* str(x) as a new string (mem_free); *out is NULL, with COP_OK, for an integer of too many digits. */
cop_status number_text(const number *x, char **out, cop_error *err);

#endif
