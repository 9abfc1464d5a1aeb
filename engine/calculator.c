/* The calculator tool.
 *
 * nanochat hands the text to Python's eval behind two character filters.  What those let through is small
 * enough to be parsed here, without recursion: arithmetic by operator precedence with one frame per open
 * parenthesis, and strings with `.count(`.  Where Python raises, the answer is "no output"; so evaluation
 * stops at the first thing that is wrong, be it syntax, a type, a zero divisor or a limit.
 *
 * Python would answer more than is done here, and these give "no output": other methods and attributes, bytes
 * literals, and, among strings, names, keywords (`not`, `or`, `if`, `in`), numbers and tuples. */
#include "engine/calculator.h"

#include <ctype.h>
#include <fenv.h>
#include <stdio.h>
#include <string.h>

#include "engine/number.h"

enum {
    MAX_PARENTHESES = 200, /* CPython: "too many nested parentheses" */
    MAX_OPERATORS = 2990,  /* on a path of the syntax tree; CPython's compiler gives up there, a little less
                              when called  from deep inside a program */
};

/* The expression without commas.  `text` is NUL-terminated; `scratch` has room for n + 32 bytes. */
typedef struct source {
    char *text, *scratch;
    size_t n, pos;
} source;

static char peek(const source *s) { return s->text[s->pos]; }

static void skip_spaces(source *s) {
    while (peek(s) == ' ') s->pos++;
}

/* ---- Arithmetic. */

/* A number with the operators of its longest path, which bounds time as CPython's limit does. */
typedef struct operand {
    number value;
    int depth;
} operand;

/* What is pending at one level of parentheses: a sum, in it a product, in it signs.  Operators of 0 are
 * absent. */
typedef struct frame {
    operand sum, product;
    char sum_op, product_op;
    int n_signs;
    bool negative;
} frame;

typedef struct arithmetic {
    source *s;
    int n_open;
    frame frames[MAX_PARENTHESES + 1];
} arithmetic;

static bool is_number_start(const source *s) {
    char c = peek(s);
    return isdigit((unsigned char)c) || (c == '.' && isdigit((unsigned char)s->text[s->pos + 1]));
}

/* Digits with at most one point; a second point is left for the caller, who will not like it. */
static bool read_number(source *s, number *out) {
    const char *start = s->text + s->pos;
    size_t n = strspn(start, "0123456789");
    if (start[n] == '.') n += 1 + strspn(start + n + 1, "0123456789");
    s->pos += n;
    return number_parse(out, start, n, s->scratch);
}

/* Read signs and "(" up to a number, "()" or "...".  False where no operand can start. */
static bool read_operand(arithmetic *a, operand *x) {
    source *s = a->s;
    for (;; s->pos++) {
        skip_spaces(s);
        frame *f = &a->frames[a->n_open];
        if (is_number_start(s)) return read_number(s, &x->value);
        if (!strncmp(s->text + s->pos, "...", 3)) {
            s->pos += 3;
            x->value.kind = NUMBER_ELLIPSIS;
            return true;
        }
        if (peek(s) == '+' || peek(s) == '-') {
            if (++f->n_signs > MAX_OPERATORS) return false;
            f->negative ^= peek(s) == '-';
        } else if (peek(s) == '(') {
            if (a->n_open == MAX_PARENTHESES) return false;
            a->frames[++a->n_open] = (frame){0};
        } else if (peek(s) == ')') {
            /* "()": only straight after its "(", with nothing pending inside. */
            if (a->n_open == 0 || f->sum_op || f->product_op || f->n_signs) return false;
            a->n_open--;
            s->pos++;
            x->value.kind = NUMBER_TUPLE;
            return true;
        } else {
            return false;
        }
    }
}

/* *x = *left op *x; *left is taken. */
static bool combine(operand *left, char op, operand *x) {
    bool ok = number_binary(&left->value, op, &x->value);
    int depth = (left->depth > x->depth ? left->depth : x->depth) + 1;
    *x = (operand){.value = left->value, .depth = depth};
    left->value.kind = NUMBER_NONE;
    return ok && depth <= MAX_OPERATORS;
}

/* The operand is complete: apply its signs and the product to its left. */
static bool finish_factor(frame *f, operand *x) {
    if (f->n_signs && !number_sign(&x->value, f->negative)) return false;
    x->depth += f->n_signs;
    f->n_signs = 0;
    f->negative = false;
    if (x->depth > MAX_OPERATORS) return false;
    char op = f->product_op;
    f->product_op = 0;
    return !op || combine(&f->product, op, x);
}

static bool finish_sum(frame *f, operand *x) {
    char op = f->sum_op;
    f->sum_op = 0;
    return !op || combine(&f->sum, op, x);
}

/* After an operand: close parentheses and take one operator.  *more is false at the end, where *x is the
 * result. */
static bool read_operator(arithmetic *a, operand *x, bool *more) {
    source *s = a->s;
    *more = true;
    for (;;) {
        frame *f = &a->frames[a->n_open];
        skip_spaces(s);
        char c = peek(s);
        if (!finish_factor(f, x)) return false;
        if (c == '*' || c == '/') {
            s->pos++;
            f->product_op = c;
            if (c == '/' && peek(s) == '/') s->pos++, f->product_op = 'd';
            f->product = *x;
            x->value.kind = NUMBER_NONE;
            return true;
        }
        if (!finish_sum(f, x)) return false;
        if (c == '+' || c == '-') {
            s->pos++;
            f->sum_op = c;
            f->sum = *x;
            x->value.kind = NUMBER_NONE;
            return true;
        }
        if (c != ')') {
            *more = false;
            return s->pos == s->n &&
                   a->n_open == 0; /* a number, a name or a call does not follow an operand */
        }
        if (a->n_open == 0) return false;
        a->n_open--;
        s->pos++;
    }
}

static cop_status eval_arithmetic(source *s, char **result, cop_error *err) {
    arithmetic a;
    a.s = s;
    a.n_open = 0;
    a.frames[0] = (frame){0};
    bool more = true, ok = true;
    operand x = {0};
    while (ok && more) {
        x = (operand){0};
        ok = read_operand(&a, &x) && read_operator(&a, &x, &more);
    }
    cop_status status = ok ? number_text(&x.value, result, err) : COP_OK;
    number_free(&x.value);
    for (int i = 0; i <= a.n_open; i++) {
        number_free(&a.frames[i].sum.value);
        number_free(&a.frames[i].product.value);
    }
    return status;
}

/* ---- Strings. */

typedef enum item_kind { ITEM_STRING, ITEM_METHOD, ITEM_COUNT } item_kind;

/* STRING: the bytes.  METHOD: the string whose .count it is.  COUNT: how often. */
typedef struct item {
    item_kind kind;
    const char *bytes;
    size_t n;
} item;

/* An open parenthesis: around an expression, or of a call to the count of `receiver`. */
typedef struct open_paren {
    bool is_call;
    item receiver;
} open_paren;

static bool is_word(char c) { return isalnum((unsigned char)c) || c == '_'; }

/* Read one literal and append its bytes at *end.  Backslashes are filtered out, so raw strings are like
 * others and so are f-strings, which need braces to be special. */
static bool read_literal(source *s, char **end) {
    static const char *const prefixes[] = {"", "r", "u", "f", "rf", "fr"};
    const char *start = s->text + s->pos;
    size_t n_prefix = 0;
    while (is_word(start[n_prefix])) n_prefix++;
    bool known = false;
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++)
        known |= strlen(prefixes[i]) == n_prefix && !strncasecmp(start, prefixes[i], n_prefix);
    const char *body = start + n_prefix;
    if (!known || (*body != '\'' && *body != '"')) return false;
    char quote[] = {*body, *body, *body, '\0'};
    if (strncmp(body, quote, 3) != 0) quote[1] = '\0';
    size_t n_quote = strlen(quote);
    body += n_quote;
    const char *end_of_text = s->text + s->n;
    const char *stop = memchr(body, *quote, (size_t)(end_of_text - body));
    while (stop && strncmp(stop, quote, n_quote) != 0)
        stop = memchr(stop + 1, *quote, (size_t)(end_of_text - stop - 1));
    if (!stop) return false;
    memcpy(*end, body, (size_t)(stop - body));
    *end += stop - body;
    s->pos = (size_t)(stop + n_quote - s->text);
    return true;
}

/* Adjacent literals are one string. */
static bool read_string(source *s, char **end, item *x) {
    char *start = *end;
    do {
        if (!read_literal(s, end)) return false;
        skip_spaces(s);
    } while (is_word(peek(s)) || peek(s) == '\'' || peek(s) == '"');
    *x = (item){.kind = ITEM_STRING, .bytes = start, .n = (size_t)(*end - start)};
    return true;
}

/* ".count", not followed by more of a name. */
static bool read_attribute(source *s, item *x) {
    s->pos++;
    skip_spaces(s);
    if (strncmp(s->text + s->pos, "count", 5) != 0 || is_word(s->text[s->pos + 5])) return false;
    s->pos += 5;
    bool ok = x->kind == ITEM_STRING;
    x->kind = ITEM_METHOD;
    return ok;
}

/* Occurrences that do not overlap; the empty string is found before, between and after all characters. */
static size_t count(const item *text, const item *part) {
    if (part->n == 0) return text->n + 1;
    const char *at = text->bytes, *end = text->bytes + text->n;
    size_t n = 0;
    while ((at = memmem(at, (size_t)(end - at), part->bytes, part->n))) n++, at += part->n;
    return n;
}

static bool close_paren(const open_paren *open, item *x) {
    if (!open->is_call) return true;
    if (x->kind != ITEM_STRING) return false;
    *x = (item){.kind = ITEM_COUNT, .n = count(&open->receiver, x)};
    return true;
}

/* Parse and evaluate; false for everything that gives no output. */
static bool eval_string(source *s, item *x) {
    open_paren open[MAX_PARENTHESES];
    int n_open = 0;
    char *end = s->scratch;
    for (;;) {
        skip_spaces(s);
        while (peek(s) == '(') {
            if (n_open == MAX_PARENTHESES) return false;
            open[n_open++] = (open_paren){0};
            s->pos++;
            skip_spaces(s);
        }
        if (!read_string(s, &end, x)) return false;
        bool in_call = false;
        while (!in_call) {
            skip_spaces(s);
            if (s->pos == s->n) return n_open == 0 && x->kind != ITEM_METHOD;
            if (peek(s) == '.') {
                if (!read_attribute(s, x)) return false;
            } else if (peek(s) == '(') {
                if (x->kind != ITEM_METHOD || n_open == MAX_PARENTHESES) return false;
                open[n_open++] = (open_paren){.is_call = true, .receiver = *x};
                s->pos++;
                in_call = true;
            } else if (peek(s) != ')' || n_open == 0 || !close_paren(&open[--n_open], x)) {
                return false;
            } else {
                s->pos++;
            }
        }
    }
}

static cop_status eval_strings(source *s, char **result, cop_error *err) {
    item x;
    if (!eval_string(s, &x)) return COP_OK;
    size_t n = x.kind == ITEM_STRING ? x.n : 24;
    *result = mem_alloc(n + 1, 1);
    if (!*result) return cop_fail(err, COP_ENOMEM, "could not keep the result: out of memory");
    if (x.kind == ITEM_COUNT) {
        snprintf(*result, n + 1, "%zu", x.n);
    } else {
        memcpy(*result, x.bytes, n);
        (*result)[n] = '\0';
    }
    return COP_OK;
}

/* ---- nanochat's filters. */

static bool is_arithmetic(const source *s) {
    return strspn(s->text, "0123456789*+-/.() ") == s->n && !strstr(s->text, "**");
}

static bool is_harmless_string(const source *s) {
    static const char *const refused[] = {
        "__",     "import", "exec", "eval",    "compile", "open",    "file",   "input", "globals",
        "locals", "vars",   "dir",  "getattr", "setattr", "delattr", "hasattr"}; /* raw_input has input */
    for (size_t i = 0; i < s->n; i++)
        if (!is_word(s->text[i]) && (!s->text[i] || !strchr("'\"(). ", s->text[i]))) return false;
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        if (strcasestr(s->text, refused[i])) return false;
    return strstr(s->text, ".count(") != NULL;
}

cop_status calculator_eval(const char *expr, size_t n, char **result, cop_error *err) {
    *result = NULL;
    fenv_t caller; /* the engine's thread flushes denormals; Python does not */
    fegetenv(&caller);
    fesetenv(FE_DFL_ENV);
    source s = {0};
    s.text = n < SIZE_MAX ? mem_alloc(n + 1, 1) : NULL;
    s.scratch = n < SIZE_MAX - 32 ? mem_alloc(n + 32, 1) : NULL;
    cop_status status = COP_OK;
    if (!s.text || !s.scratch) {
        status = cop_fail(err, COP_ENOMEM, "could not keep an expression of %zu bytes: out of memory", n);
        goto out;
    }
    for (size_t i = 0; i < n; i++)
        if (expr[i] != ',') s.text[s.n++] = expr[i];
    s.text[s.n] = '\0';
    if (is_arithmetic(&s))
        status = eval_arithmetic(&s, result, err);
    else if (is_harmless_string(&s))
        status = eval_strings(&s, result, err);
out:
    fesetenv(&caller);
    mem_free(s.text);
    mem_free(s.scratch);
    return status;
}
