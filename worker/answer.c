/* Finds answers in samples and compares them as decimals.
 *
 * Numbers are never converted to double: 0.1 + 0.2 is not 0.3 here, and 2^53 + 1 is not 2^53. */
#include "worker/answer.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SPACE " \t\r\n\v\f"
#define MAX_EXPONENT_DIGITS 15 /* keeps sums of exponents and lengths far within int64_t */

static bool is_digit(char c) { return c >= '0' && c <= '9'; }
static bool is_word(char c) { return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

/* ---- Reading numbers. */

/* A number as it stands in a text: sign, mantissa of digits, commas and a point, exponent. */
typedef struct decimal {
    const char *mantissa;
    size_t n_mantissa; /* bytes */
    int64_t exponent;  /* of "e", else 0 */
    bool negative;
} decimal;

static size_t count_digits(const char *text, size_t n) {
    size_t i = 0;
    while (i < n && is_digit(text[i])) i++;
    return i;
}

/* Bytes of "7", "1234" or "1,234,567" at the start of text; a comma belongs to it only where groups of
 * exactly three digits follow one to three. */
static size_t scan_whole(const char *text, size_t n) {
    size_t used = count_digits(text, n);
    if (used == 0 || used > 3) return used;
    while (used < n && text[used] == ',' && count_digits(text + used + 1, n - used - 1) == 3) used += 4;
    return used;
}

/* Bytes of "e-05" at the start of text, 0 if there is none or it is beyond all measure. */
static size_t scan_exponent(const char *text, size_t n, int64_t *exponent) {
    size_t i = 1;
    *exponent = 0;
    if (n < 2 || (text[0] != 'e' && text[0] != 'E')) return 0;
    bool negative = text[i] == '-';
    if (negative || text[i] == '+') i++;
    size_t end = i + count_digits(text + i, n - i);
    if (end == i || (end < n && is_word(text[end]))) return 0;
    while (i < end && text[i] == '0') i++;
    if (end - i > MAX_EXPONENT_DIGITS) return 0;
    for (; i < end; i++) *exponent = *exponent * 10 + (text[i] - '0');
    if (negative) *exponent = -*exponent;
    return end;
}

/* Bytes of the number at the start of text, 0 if there is none. */
static size_t scan_number(const char *text, size_t n, decimal *out) {
    size_t start = n > 0 && (text[0] == '-' || text[0] == '+');
    size_t end = start + scan_whole(text + start, n - start);
    if (end < n && text[end] == '.') {
        size_t decimals = count_digits(text + end + 1, n - end - 1);
        if (decimals > 0) end += 1 + decimals;
    }
    if (end == start) return 0;
    *out = (decimal){.mantissa = text + start, .n_mantissa = end - start, .negative = text[0] == '-'};
    return end + scan_exponent(text + end, n - end, &out->exponent);
}

/* Whether a number may start at text[i]: not inside a word or a number; and a sign does not where it joins
 * two things ("9-4", "(1+2)-3"). */
static bool may_start(const char *text, size_t i) {
    if (i == 0) return true;
    char before = text[i - 1], c = text[i];
    if (is_digit(c)) return !is_word(before);
    return !is_word(before) && before != '.' && before != ')' && before != ']';
}

/* The last number in text: where it starts, and its bytes in *n_number; NULL if there is none. */
static const char *last_number(const char *text, size_t n, size_t *n_number) {
    const char *last = NULL;
    for (size_t i = 0; i < n;) {
        decimal number;
        size_t used = may_start(text, i) ? scan_number(text + i, n - i, &number) : 0;
        if (used > 0) last = text + i, *n_number = used;
        i += used > 0 ? used : 1;
    }
    return last;
}

/* Take the space off both ends. */
static const char *trim(const char *text, size_t *n) {
    size_t space = 0;
    while (space < *n && strchr(SPACE, text[space]) && text[space]) space++;
    while (*n > space && strchr(SPACE, text[*n - 1]) && text[*n - 1]) --*n;
    *n -= space;
    return text + space;
}

/* ---- Comparing numbers. */

/* A decimal without what does not count: its digits from the first to the last that is not 0 stand in
 * [first, end) with commas and a point between them, and the first is worth 10^power.  Zero has no digits. */
typedef struct significant {
    const char *first, *end;
    int64_t power;
    bool negative;
} significant;

static significant significant_of(const decimal *d) {
    const char *end = d->mantissa + d->n_mantissa, *first = end, *last = end;
    int64_t place = 0, first_place = 0,
            whole = -1; /* digits so far; before the first that counts; the point */
    for (const char *c = d->mantissa; c < end; c++) {
        if (*c == '.') whole = place;
        if (!is_digit(*c)) continue;
        if (*c != '0') {
            if (first == end) first = c, first_place = place;
            last = c;
        }
        place++;
    }
    if (first == end) return (significant){0};
    if (whole < 0) whole = place;
    return (significant){first, last + 1, whole - first_place + d->exponent, d->negative};
}

/* The next digit at or after *c; '\0' at the end. */
static char next_digit(const char **c, const char *end) {
    while (*c < end && !is_digit(**c)) ++*c;
    return *c < end ? *(*c)++ : '\0';
}

static bool decimal_equal(const decimal *x, const decimal *y) {
    significant a = significant_of(x), b = significant_of(y);
    if (a.power != b.power || a.negative != b.negative) return false;
    for (;;) {
        char digit = next_digit(&a.first, a.end);
        if (digit != next_digit(&b.first, b.end)) return false;
        if (!digit) return true;
    }
}

bool answer_equal(const char *a, const char *b) {
    size_t n_a = strlen(a), n_b = strlen(b);
    a = trim(a, &n_a), b = trim(b, &n_b);
    decimal x, y;
    if (n_a > 0 && n_b > 0 && scan_number(a, n_a, &x) == n_a && scan_number(b, n_b, &y) == n_b)
        return decimal_equal(&x, &y);
    return n_a == n_b && memcmp(a, b, n_a) == 0;
}

/* The shortest "d.ddde+xx" that reads as f, with a point whatever the locale has. */
static void real_text(char out[40], double f) {
    for (int decimals = 0; decimals <= 16; decimals++) {
        snprintf(out, 40, "%.*e", decimals, f);
        if (strtod(out, NULL) == f) break;
    }
    char *point = out + strspn(out, "-") + 1;
    size_t n = strcspn(point, "0123456789e");
    if (n == 0) return;
    *point = '.';
    memmove(point + 1, point + n, strlen(point + n) + 1);
}

double answer_reward(const char *answer, const json_t *expected) {
    char digits[40];
    const char *want = digits;
    if (json_is_string(expected))
        want = json_string_value(expected);
    else if (json_is_integer(expected))
        snprintf(digits, sizeof digits, "%" PRId64, (int64_t)json_integer_value(expected));
    else if (json_is_real(expected))
        real_text(digits, json_real_value(expected));
    else
        return NAN;
    return answer && answer_equal(answer, want) ? 1 : 0;
}

/* ---- Samples. */

static bool is_special(const tokenizer *t, int32_t id) {
    for (int s = 0; s < TOKEN_N_SPECIALS; s++)
        if (id == tokenizer_special(t, (token_special)s)) return true;
    return false;
}

/* Replace *out by n bytes of text, without its commas if it is a number. */
static cop_status replace(char **out, const char *text, size_t n, bool is_number, cop_error *err) {
    char *copy = mem_alloc(n + 1, 1);
    if (!copy) return cop_fail(err, COP_ENOMEM, "could not allocate an answer of %zu bytes", n);
    size_t used = 0;
    for (size_t i = 0; i < n; i++)
        if (!is_number || text[i] != ',') copy[used++] = text[i];
    copy[used] = '\0';
    mem_free(*out);
    *out = copy;
    return COP_OK;
}

/* Replace *out by what a run of ordinary tokens answers, if it does. */
static cop_status answer_of_run(char **out, const tokenizer *t, const int32_t *tokens, size_t n,
                                bool is_result, cop_error *err) {
    char *bytes;
    size_t n_text, n_number = 0;
    COP_TRY(tokenizer_decode(t, tokens, n, &bytes, &n_text, err), err, "could not read a sample's answer");
    cop_status status = COP_OK;
    decimal number;
    if (is_result) {
        const char *text = trim(bytes, &n_text);
        bool is_number = n_text > 0 && scan_number(text, n_text, &number) == n_text;
        status = replace(out, text, n_text, is_number, err);
    } else {
        const char *last = last_number(bytes, n_text, &n_number);
        if (last) status = replace(out, last, n_number, true, err);
    }
    mem_free(bytes);
    return status;
}

/* Special tokens cut a sample into runs; what stands before a run and after it tells what it is. */
cop_status answer_of_sample(char **out, const tokenizer *t, const int32_t *tokens, const uint8_t *mask,
                            size_t n, cop_error *err) {
    int32_t call = tokenizer_special(t, TOKEN_PYTHON_START);
    int32_t result = tokenizer_special(t, TOKEN_OUTPUT_START), end = tokenizer_special(t, TOKEN_OUTPUT_END);
    cop_status status = COP_OK;
    *out = NULL;
    for (size_t start = 0, i = 0; i <= n && status == COP_OK; i++) {
        if (i < n && !is_special(t, tokens[i])) continue;
        bool is_call = start > 0 && tokens[start - 1] == call;
        bool is_forced = start > 0 && tokens[start - 1] == result && !mask[start - 1];
        bool is_whole = i < n && tokens[i] == end; /* one that a limit cut would be another number */
        if (i > start && !is_call && (!is_forced || is_whole))
            status = answer_of_run(out, t, tokens + start, i - start, is_forced, err);
        start = i + 1;
    }
    if (status != COP_OK) mem_free(*out), *out = NULL;
    return status;
}

/* ---- Pass@k. */

cop_status pass_init(pass_counts *p, size_t n, cop_error *err) {
    *p = (pass_counts){.n = n, .n_passed = mem_zalloc(n, sizeof *p->n_passed)};
    if (p->n_passed) return COP_OK;
    *p = (pass_counts){0};
    return cop_fail(err, COP_ENOMEM, "could not allocate the counts of pass@1 to pass@%zu", n);
}

void pass_free(pass_counts *p) {
    mem_free(p->n_passed);
    *p = (pass_counts){0};
}

void pass_add(pass_counts *p, const double *rewards, size_t n) {
    if (n == 0 || isnan(rewards[0])) return;
    p->n_prompts++;
    bool passed = false;
    for (size_t i = 0; i < p->n; i++) {
        passed = passed || (i < n && rewards[i] >= 1);
        p->n_passed[i] += passed;
    }
}

double pass_at(const pass_counts *p, size_t k) {
    assert(k >= 1 && k <= p->n);
    return p->n_prompts > 0 ? (double)p->n_passed[k - 1] / (double)p->n_prompts : 0;
}
