/* Python's int and float over GMP and C doubles. */
#include "engine/number.h"

#include <assert.h>
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void number_free(number *x) {
    if (x->kind == NUMBER_INT) mpz_clear(x->i);
    x->kind = NUMBER_NONE;
}

/* ---- Literals.  strtod is never shown a decimal point, because which character that is depends on the
 * locale: the digits go in as an integer with an exponent. */

static double parse_float(const char *literal, size_t n, char *scratch) {
    size_t used = 0, decimals = 0;
    for (size_t i = 0; i < n; i++) {
        if (literal[i] == '.')
            decimals = n - 1 - i;
        else
            scratch[used++] = literal[i];
    }
    snprintf(scratch + used, 32, "e-%zu", decimals);
    return strtod(scratch, NULL); /* too large: infinity, as in Python */
}

static bool parse_int(mpz_t out, const char *literal, size_t n, char *scratch) {
    size_t zeros = strspn(literal, "0");
    if (zeros >= n) { /* any number of zeros is 0 */
        mpz_init(out);
        return true;
    }
    if (zeros > 0 || n > NUMBER_MAX_DIGITS) return false;
    memcpy(scratch, literal, n);
    scratch[n] = '\0';
    int bad = mpz_init_set_str(out, scratch, 10);
    assert(!bad);
    return true;
}

bool number_parse(number *out, const char *literal, size_t n, char *scratch) {
    assert(out->kind == NUMBER_NONE && n > 0);
    if (memchr(literal, '.', n)) {
        *out = (number){.kind = NUMBER_FLOAT, .f = parse_float(literal, n, scratch)};
        return true;
    }
    if (!parse_int(out->i, literal, n, scratch)) return false;
    out->kind = NUMBER_INT;
    return true;
}

/* ---- From int to float. */

/* *out = |q| * 2^exponent, rounded to nearest, ties to even.  sticky: the true value is a little above |q|,
 * less than one unit of q.  False if it is beyond the largest double. */
static bool round_to_double(double *out, const mpz_t q, long exponent, bool sticky) {
    if (mpz_sgn(q) == 0) return *out = 0, true;
    long n_bits = (long)mpz_sizeinbase(q, 2);
    long top = n_bits + exponent; /* the value is in [2^(top-1), 2^top) */
    if (top > 1024) return false;
    long precision = top + 1074 < 53 ? top + 1074 : 53; /* fewer bits among the subnormals */
    if (precision < 0) return *out = 0, true;
    long drop = n_bits - precision;
    if (drop <= 0) {
        assert(!sticky);
        *out = ldexp((double)mpz_get_ui(q), (int)exponent);
        return true;
    }
    mpz_t kept;
    mpz_init(kept);
    mpz_tdiv_q_2exp(kept, q, (mp_bitcnt_t)drop);
    uint64_t m = mpz_get_ui(kept);
    mpz_clear(kept);
    bool half = mpz_tstbit(q, (mp_bitcnt_t)drop - 1);
    bool beyond = sticky || mpz_scan1(q, 0) < (mp_bitcnt_t)drop - 1;
    if (half && (beyond || m % 2 == 1)) m++;
    *out = ldexp((double)m, (int)(exponent + drop));
    return !isinf(*out);
}

static bool int_to_double(double *out, const mpz_t i) {
    mpz_t size; /* tstbit and scan1 see negative numbers as two's complement */
    mpz_init(size);
    mpz_abs(size, i);
    bool ok = round_to_double(out, size, 0, false);
    mpz_clear(size);
    if (mpz_sgn(i) < 0) *out = -*out;
    return ok;
}

/* *out = a / b, rounded once.  0 / -5 is -0.0. */
static bool int_true_divide(double *out, const mpz_t a, const mpz_t b) {
    if (mpz_sgn(b) == 0) return false;
    bool negative = (mpz_sgn(a) < 0) != (mpz_sgn(b) < 0);
    /* Scale so that the quotient has 66 or 67 bits: more than a double holds, and the remainder is the sticky
     * bit. */
    long shift = 66 - ((long)mpz_sizeinbase(a, 2) - (long)mpz_sizeinbase(b, 2));
    mpz_t q, r, divisor;
    mpz_inits(q, r, divisor, NULL);
    mpz_abs(q, a);
    mpz_abs(divisor, b);
    if (shift > 0)
        mpz_mul_2exp(q, q, (mp_bitcnt_t)shift);
    else
        mpz_mul_2exp(divisor, divisor, (mp_bitcnt_t)-shift);
    mpz_tdiv_qr(q, r, q, divisor);
    bool ok = round_to_double(out, q, -shift, mpz_sgn(r) != 0);
    mpz_clears(q, r, divisor, NULL);
    if (negative) *out = -*out;
    return ok;
}

/* ---- Operators. */

/* The largest whole number not above a / b, from the exact remainder, so that (a // b) * b + a % b is a as
 * nearly as doubles allow. */
static double float_floor_divide(double a, double b) {
    double remainder = fmod(a, b);
    double quotient = (a - remainder) / b;
    if (remainder != 0 && (b < 0) != (remainder < 0)) quotient -= 1;
    if (quotient == 0) return copysign(0, a / b);
    double whole = floor(quotient);
    return quotient - whole > 0.5 ? whole + 1 : whole;
}

static bool float_binary(number *x, char op, double a, double b) {
    double f;
    switch (op) {
    case '+': f = a + b; break;
    case '-': f = a - b; break;
    case '*': f = a * b; break;
    default:
        if (b == 0) return false;
        f = op == '/' ? a / b : float_floor_divide(a, b);
    }
    number_free(x);
    *x = (number){.kind = NUMBER_FLOAT, .f = f};
    return true;
}

static bool int_binary(number *x, char op, const number *y) {
    size_t bits_x = mpz_sizeinbase(x->i, 2), bits_y = mpz_sizeinbase(y->i, 2);
    double f;
    switch (op) {
    case '+':
    case '-':
        if (bits_x >= NUMBER_MAX_BITS || bits_y >= NUMBER_MAX_BITS) return false;
        (op == '+' ? mpz_add : mpz_sub)(x->i, x->i, y->i);
        return true;
    case '*':
        if (bits_x + bits_y > NUMBER_MAX_BITS) return false;
        mpz_mul(x->i, x->i, y->i);
        return true;
    case 'd':
        if (mpz_sgn(y->i) == 0) return false;
        mpz_fdiv_q(x->i, x->i, y->i);
        return true;
    default:
        if (!int_true_divide(&f, x->i, y->i)) return false;
        number_free(x);
        *x = (number){.kind = NUMBER_FLOAT, .f = f};
        return true;
    }
}

static bool to_double(double *out, const number *x) {
    if (x->kind == NUMBER_INT) return int_to_double(out, x->i);
    *out = x->f;
    return x->kind == NUMBER_FLOAT;
}

/* () + () and () * n, which is () for every n that is an index. */
static bool tuple_binary(number *x, char op, const number *y) {
    bool both = x->kind == NUMBER_TUPLE && y->kind == NUMBER_TUPLE;
    const number *times = x->kind == NUMBER_TUPLE ? y : x;
    bool ok = (op == '+' && both) || (op == '*' && times->kind == NUMBER_INT && mpz_fits_slong_p(times->i));
    if (!ok) return false;
    number_free(x);
    x->kind = NUMBER_TUPLE;
    return true;
}

bool number_binary(number *x, char op, number *y) {
    bool ok;
    double a, b;
    if (x->kind == NUMBER_INT && y->kind == NUMBER_INT)
        ok = int_binary(x, op, y);
    else if (x->kind == NUMBER_TUPLE || y->kind == NUMBER_TUPLE)
        ok = tuple_binary(x, op, y);
    else
        ok = to_double(&a, x) && to_double(&b, y) && float_binary(x, op, a, b);
    number_free(y);
    return ok;
}

bool number_sign(number *x, bool negative) {
    if (x->kind == NUMBER_INT && negative) mpz_neg(x->i, x->i);
    if (x->kind == NUMBER_FLOAT && negative) x->f = -x->f;
    return x->kind == NUMBER_INT || x->kind == NUMBER_FLOAT;
}

/* ---- Text. */

enum { MAX_DIGITS = 17 }; /* enough for every double to survive the round trip */

/* One more in the last place; 999 becomes 1000 with the exponent one up, its zeros cut. */
static void increment(char *digits, int *exponent) {
    size_t i = strlen(digits);
    while (i > 0 && digits[i - 1] == '9') digits[--i] = '\0';
    if (i > 0) {
        digits[i - 1]++;
    } else {
        strcpy(digits, "1");
        ++*exponent;
    }
}

/* Do these digits, read as d.ddd * 10^exponent, give v? */
static bool reads_as(const char *digits, int exponent, double v) {
    char text[48];
    snprintf(text, sizeof text, "%se%d", digits, exponent - (int)strlen(digits) + 1);
    return strtod(text, NULL) == v;
}

/* The shortest digits d.ddd * 10^exponent that read as v (finite, not negative), the nearest to v among
 * those. Just above a power of two doubles are twice as far apart as below: there the nearest decimal, if it
 * lies below, may read as another double when the next one up does not. */
static void shortest_digits(double v, char digits[MAX_DIGITS + 1], int *exponent) {
    int unused;
    bool lopsided = frexp(v, &unused) == 0.5;
    for (int n = 1;; n++) {
        char text[48];
        snprintf(text, sizeof text, "%.*e", n - 1, v);
        char *e = strchr(text, 'e');
        int used = 0;
        for (char *c = text; c < e; c++)
            if (isdigit((unsigned char)*c)) digits[used++] = *c; /* skips the locale's decimal point */
        digits[used] = '\0';
        *exponent = atoi(e + 1);
        if (n == MAX_DIGITS || reads_as(digits, *exponent, v)) break;
        if (!lopsided) continue;
        increment(digits, exponent);
        if (reads_as(digits, *exponent, v)) break;
    }
    for (size_t i = strlen(digits); i > 1 && digits[i - 1] == '0'; i--) digits[i - 1] = '\0';
}

/* repr(v): the shortest digits, with an exponent from 1e16 on and below 1e-4. */
static void format_float(double v, char *text, size_t size) {
    if (isnan(v) || isinf(v)) {
        snprintf(text, size, "%s", isnan(v) ? "nan" : v < 0 ? "-inf" : "inf");
        return;
    }
    const char *sign = signbit(v) ? "-" : "";
    char digits[MAX_DIGITS + 1];
    int exponent;
    shortest_digits(fabs(v), digits, &exponent);
    int n = (int)strlen(digits), n_whole = exponent + 1;
    if (exponent < -4 || exponent >= 16)
        snprintf(text, size, "%s%c%s%se%c%02d", sign, digits[0], n > 1 ? "." : "", digits + 1,
                 exponent < 0 ? '-' : '+', abs(exponent));
    else if (n_whole <= 0)
        snprintf(text, size, "%s0.%.*s%s", sign, -n_whole, "000", digits);
    else if (n_whole >= n)
        snprintf(text, size, "%s%s%.*s.0", sign, digits, n_whole - n, "000000000000000");
    else
        snprintf(text, size, "%s%.*s.%s", sign, n_whole, digits, digits + n_whole);
}

static cop_status int_text(const mpz_t i, char **out, cop_error *err) {
    size_t n = mpz_sizeinbase(i, 10); /* exact, or one too many */
    if (n > NUMBER_MAX_DIGITS + 1) return COP_OK;
    char *text = mem_alloc(n + 2, 1);
    if (!text) return cop_fail(err, COP_ENOMEM, "could not print an integer of %zu digits: out of memory", n);
    mpz_get_str(text, 10, i);
    if (strlen(text) - (*text == '-') > NUMBER_MAX_DIGITS)
        mem_free(text);
    else
        *out = text;
    return COP_OK;
}

cop_status number_text(const number *x, char **out, cop_error *err) {
    *out = NULL;
    if (x->kind == NUMBER_INT) return int_text(x->i, out, err);
    char text[40];
    if (x->kind == NUMBER_FLOAT)
        format_float(x->f, text, sizeof text);
    else
        snprintf(text, sizeof text, "%s", x->kind == NUMBER_TUPLE ? "()" : "Ellipsis");
    *out = mem_strdup(text);
    return *out ? COP_OK : cop_fail(err, COP_ENOMEM, "could not keep the result: out of memory");
}
