/* Command lines: one table-driven parser, and the help text that follows from the same table. */
#include "worker/options.h"

#include <assert.h>
#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HELP_COLUMN = 28, HELP_WIDTH = 100, NAME_BYTES = 64 };

/* ---- Suggestions. */

static int smaller(int a, int b) { return a < b ? a : b; }

/* Edits (insert, delete, replace, swap neighbours) that turn a into b; only the first NAME_BYTES - 1 bytes
 * count. */
static int edit_distance(const char *a, const char *b) {
    int n_a = smaller((int)strnlen(a, NAME_BYTES), NAME_BYTES - 1);
    int n_b = smaller((int)strnlen(b, NAME_BYTES), NAME_BYTES - 1);
    int cost[3][NAME_BYTES]; /* rows i - 2, i - 1 and i of the usual table, in turn */
    for (int j = 0; j <= n_b; j++) cost[0][j] = j;
    for (int i = 1; i <= n_a; i++) {
        int *row = cost[i % 3], *above = cost[(i + 2) % 3], *above2 = cost[(i + 1) % 3];
        row[0] = i;
        for (int j = 1; j <= n_b; j++) {
            row[j] = smaller(above[j - 1] + (a[i - 1] != b[j - 1]), smaller(above[j], row[j - 1]) + 1);
            bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
            if (swapped) row[j] = smaller(row[j], above2[j - 2] + 1);
        }
    }
    return cost[n_a % 3][n_b];
}

/* The fewest edits that are too many to guess that something else was meant. */
static int too_far(const char *wrong) {
    int n = smaller((int)strnlen(wrong, NAME_BYTES), NAME_BYTES - 1);
    int near = n / 3 > 2 ? n / 3 : 2;
    return smaller(n, near + 1);
}

const char *nearest_name(const char *wrong, const char *const names[], int n) {
    const char *best = NULL;
    int best_cost = too_far(wrong);
    for (int i = 0; i < n; i++) {
        int cost = edit_distance(wrong, names[i]);
        if (cost < best_cost) best_cost = cost, best = names[i];
    }
    return best;
}

/* Tell of an unknown option, with the dashes that it had, and which one may have been meant.  Returns 2. */
static int unknown_option(const command *c, const option_spec *options, int n_options, const char *dashes,
                          const char *wrong) {
    const char *best = nearest_name(wrong, (const char *const[]){"help"}, 1);
    for (int i = 0; i < n_options; i++) {
        const char *pair[] = {best ? best : options[i].name, options[i].name};
        best = nearest_name(wrong, pair, 2);
    }
    fprintf(stderr, "coppice %s: unknown option \"%s%s\": ", c->name, dashes, wrong);
    if (best)
        fprintf(stderr, "did you mean \"--%s\"?\n", best);
    else
        fprintf(stderr, "`coppice %s --help` lists them\n", c->name);
    return 2;
}

/* ---- Help. */

/* Print `text` word by word within HELP_WIDTH; lines after the first start at column `indent`, `column` is
 * where the cursor stands.  Line feeds in the text are kept.  Ends the line. */
static void print_wrapped(FILE *out, const char *text, int column, int indent) {
    bool line_start = true;
    while (*text) {
        if (*text == '\n') {
            fputc('\n', out);
            text++, column = 0, line_start = true;
            continue;
        }
        if (*text == ' ') {
            text++;
            continue;
        }
        int n = (int)strcspn(text, " \n");
        if (!line_start && column + 1 + n > HELP_WIDTH) {
            fputc('\n', out);
            column = 0, line_start = true;
        }
        if (column < indent) column += fprintf(out, "%*s", indent - column, "");
        if (!line_start) column += fprintf(out, " ");
        column += fprintf(out, "%.*s", n, text);
        text += n, line_start = false;
    }
    fputc('\n', out);
}

static bool has_range(const option_spec *o) { return o->min != 0 || o->max != 0; }
static bool in_range(const option_spec *o, double v) { return !has_range(o) || (v >= o->min && v <= o->max); }

/* "64K" */
static void format_bytes(size_t v, char *text, size_t size) {
    int unit = 0;
    while (v && v % 1024 == 0 && unit < 3) v /= 1024, unit++;
    snprintf(text, size, "%zu%.*s", v, unit > 0, &" KMG"[unit]);
}

/* " (default: ...)" for one option.  A default outside the range, NULL and 0 bytes mean "not given": the help
 * text explains those, and nothing is shown. */
static void format_default(const option_spec *o, char *text, size_t size) {
    text[0] = '\0';
    if (o->given) return; /* what happens without it is no value */
    switch (o->kind) {
    case OPTION_FLAG:
    case OPTION_LIST: return;
    case OPTION_STRING: {
        const char *s = *(const char **)o->value;
        if (s) snprintf(text, size, " (default: %s)", s);
        return;
    }
    case OPTION_INT: {
        int64_t v = *(int64_t *)o->value;
        if (in_range(o, (double)v)) snprintf(text, size, " (default: %lld)", (long long)v);
        return;
    }
    case OPTION_U64:
        snprintf(text, size, " (default: %llu)", (unsigned long long)*(uint64_t *)o->value);
        return;
    case OPTION_REAL: {
        double v = *(double *)o->value;
        if (in_range(o, v)) snprintf(text, size, " (default: %g)", v);
        return;
    }
    case OPTION_BYTES: {
        size_t v = *(size_t *)o->value;
        char bytes[32];
        format_bytes(v, bytes, sizeof bytes);
        if (v) snprintf(text, size, " (default: %s)", bytes);
        return;
    }
    }
}

static void print_option(FILE *out, const option_spec *o) {
    int column =
        o->letter ? fprintf(out, "  -%c, --%s", o->letter, o->name) : fprintf(out, "  --%s", o->name);
    if (o->kind != OPTION_FLAG) column += fprintf(out, " %s", o->arg ? o->arg : "VALUE");
    if (column >= HELP_COLUMN) {
        fputc('\n', out);
        column = 0;
    }
    char shown[256], text[1024];
    format_default(o, shown, sizeof shown);
    snprintf(text, sizeof text, "%s%s", o->help, shown);
    print_wrapped(out, text, column, HELP_COLUMN);
}

static void print_help(FILE *out, const command *c, const option_spec *options, int n_options) {
    fprintf(out, "usage: coppice %s [options]%s%s\n\n", c->name, *c->arguments ? " " : "", c->arguments);
    print_wrapped(out, c->summary, 0, 0);
    if (c->details && *c->details) {
        fputc('\n', out);
        print_wrapped(out, c->details, 0, 0);
    }
    fprintf(out, "\noptions:\n");
    for (int i = 0; i < n_options; i++) print_option(out, &options[i]);
    print_option(out,
                 &(option_spec){.name = "help", .letter = 'h', .kind = OPTION_FLAG, .help = "show this"});
    if (c->example && *c->example) fprintf(out, "\nexample:\n  %s\n", c->example);
}

/* ---- Values. */

/* What a right value is, for messages: "a whole number from 1 to 64". */
static void format_expected(const option_spec *o, char *text, size_t size) {
    switch (o->kind) {
    case OPTION_FLAG: snprintf(text, size, "given without a value"); return;
    case OPTION_STRING: snprintf(text, size, "one of %s", o->arg); return;
    case OPTION_LIST: snprintf(text, size, "given at most %d times", OPTION_LIST_MAX); return;
    case OPTION_U64:
        snprintf(text, size, "a whole number from 0 to %llu", (unsigned long long)UINT64_MAX);
        return;
    case OPTION_BYTES: {
        char min[32], max[32];
        format_bytes((size_t)o->min, min, sizeof min);
        format_bytes((size_t)o->max, max, sizeof max);
        if (has_range(o))
            snprintf(text, size, "a number of bytes from %s to %s, such as 64K, 512M or 4G", min, max);
        else
            snprintf(text, size, "a number of bytes such as 4096, 64K, 512M or 4G");
        return;
    }
    case OPTION_INT:
    case OPTION_REAL: {
        const char *what = o->kind == OPTION_INT ? "a whole number" : "a number";
        if (!has_range(o))
            snprintf(text, size, "%s", what);
        else if (isinf(o->max))
            snprintf(text, size, "%s of at least %.15g", what, o->min);
        else
            snprintf(text, size, "%s from %.15g to %.15g", what, o->min, o->max);
        return;
    }
    }
}

/* True if `name` is one of the alternatives of "bf16|f32". */
static bool is_choice(const char *choices, const char *name) {
    size_t n = strlen(name);
    while (true) {
        size_t n_choice = strcspn(choices, "|");
        if (n == n_choice && !memcmp(choices, name, n)) return true;
        if (!choices[n_choice]) return false;
        choices += n_choice + 1;
    }
}

static bool parse_u64(const char *text, const char **end, uint64_t *out) {
    if (!isdigit((unsigned char)*text)) return false; /* strtoull takes spaces and signs */
    errno = 0;
    char *stop;
    unsigned long long v = strtoull(text, &stop, 10);
    if (errno) return false;
    *out = v, *end = stop;
    return true;
}

static bool parse_int(const option_spec *o, const char *text) {
    const char *digits = text + (*text == '-');
    if (!isdigit((unsigned char)*digits)) return false;
    errno = 0;
    char *stop;
    long long v = strtoll(text, &stop, 10);
    if (errno || *stop || !in_range(o, (double)v)) return false;
    *(int64_t *)o->value = v;
    return true;
}

static bool parse_real(const option_spec *o, const char *text) {
    if (!*text || strspn(text, "0123456789.eE+-") != strlen(text))
        return false; /* no nan, inf, hex, spaces */
    char *stop;
    double v = strtod(text, &stop);
    if (stop == text || *stop || !isfinite(v) || !in_range(o, v)) return false;
    *(double *)o->value = v;
    return true;
}

static bool parse_bytes(const option_spec *o, const char *text) {
    uint64_t v;
    const char *end;
    if (!parse_u64(text, &end, &v)) return false;
    static const char units[] = "KMG";
    const char *unit = *end ? strchr(units, *end) : NULL;
    if (*end && (!unit || end[1])) return false;
    int shift = unit ? 10 * (int)(unit - units + 1) : 0;
    if (v > SIZE_MAX >> shift || !in_range(o, (double)(v << shift))) return false;
    *(size_t *)o->value = (size_t)v << shift;
    return true;
}

static bool append(option_list *list, const char *text) {
    if (list->n == OPTION_LIST_MAX) return false;
    list->items[list->n++] = text;
    return true;
}

static bool parse_value(const option_spec *o, const char *text) {
    const char *end;
    uint64_t v;
    switch (o->kind) {
    case OPTION_FLAG: return false;
    case OPTION_STRING:
        if (o->arg && strchr(o->arg, '|') && !is_choice(o->arg, text)) return false;
        *(const char **)o->value = text;
        return true;
    case OPTION_INT: return parse_int(o, text);
    case OPTION_U64:
        if (!parse_u64(text, &end, &v) || *end) return false;
        *(uint64_t *)o->value = v;
        return true;
    case OPTION_REAL: return parse_real(o, text);
    case OPTION_BYTES: return parse_bytes(o, text);
    case OPTION_LIST: return append(o->value, text);
    }
    return false;
}

/* ---- The command line. */

/* One pass over argv.  `at` is the argument being looked at, positional ones are moved to the front. */
typedef struct parser {
    const command *c;
    const option_spec *options;
    int n_options, argc, at;
    char **argv;
} parser;

/* Set an option.  `attached` is the text after "=" (or after a letter), or NULL: then the next argument is
 * the value. Returns -1, or exit status 2 when told. */
static int set_option(parser *p, const option_spec *o, const char *attached) {
    const char *value = attached;
    if (o->kind == OPTION_FLAG && !attached) {
        *(bool *)o->value = true;
    } else {
        if (o->kind != OPTION_FLAG && !value) {
            if (p->at + 1 >= p->argc) {
                fprintf(stderr, "coppice %s: option \"--%s\" needs a value: %s\n", p->c->name, o->name,
                        o->arg ? o->arg : "VALUE");
                return 2;
            }
            value = p->argv[++p->at];
        }
        if (!parse_value(o, value)) {
            char expected[256];
            format_expected(o, expected, sizeof expected);
            fprintf(stderr, "coppice %s: option \"--%s\" cannot be \"%s\": it is %s\n", p->c->name, o->name,
                    value, expected);
            return 2;
        }
    }
    if (o->given) *o->given = true;
    return -1;
}

static int parse_long(parser *p, const char *text) {
    size_t n = strcspn(text, "=");
    const char *attached = text[n] == '=' ? text + n + 1 : NULL;
    for (int i = 0; i < p->n_options; i++) {
        const option_spec *o = &p->options[i];
        if (strlen(o->name) == n && !memcmp(o->name, text, n)) return set_option(p, o, attached);
    }
    char name[NAME_BYTES];
    snprintf(name, sizeof name, "%.*s", n < sizeof name ? (int)n : (int)sizeof name - 1, text);
    return unknown_option(p->c, p->options, p->n_options, "--", name);
}

static int parse_letter(parser *p, const char *text) {
    for (int i = 0; i < p->n_options; i++) {
        const option_spec *o = &p->options[i];
        if (o->letter && o->letter == text[0]) return set_option(p, o, text[1] ? text + 1 : NULL);
    }
    return unknown_option(p->c, p->options, p->n_options, "-", text);
}

/* "-x" and "--x" are options; "-", "-5" and "-(1)" are not. */
static bool is_option(const char *text) {
    return text[0] == '-' && (text[1] == '-' || isalpha((unsigned char)text[1]));
}

int options_parse(const command *c, const option_spec *options, int n_options, int argc, char **argv,
                  int max_args, int *n_args) {
    assert(c && n_options >= 0 && argc >= 1 && max_args >= 0);
    parser p = {.c = c, .options = options, .n_options = n_options, .argc = argc, .argv = argv};
    bool options_over = false;
    *n_args = 0;
    for (p.at = 1; p.at < argc; p.at++) {
        char *text = argv[p.at];
        if (!options_over && is_option(text)) {
            if (!strcmp(text, "--help") || !strcmp(text, "-h")) {
                print_help(stdout, c, options, n_options);
                return 0;
            }
            options_over = !strcmp(text, "--");
            int status = options_over     ? -1
                         : text[1] == '-' ? parse_long(&p, text + 2)
                                          : parse_letter(&p, text + 1);
            if (status >= 0) return status;
        } else if (*n_args < max_args) {
            argv[1 + (*n_args)++] = text;
        } else {
            fprintf(stderr, "coppice %s: unexpected argument \"%s\": at most %d can be given\n", c->name,
                    text, max_args);
            return 2;
        }
    }
    return -1;
}

/* ---- Models. */

model_options model_options_defaults(void) { return (model_options){.step = -1, .precision = "bf16"}; }

int tokenizer_option_rows(model_options *m, option_spec *rows) {
    const option_spec own[] = {
        {.name = "model",
         .kind = OPTION_STRING,
         .value = &m->model,
         .arg = "PATH",
         .help = "checkpoint directory: model_*.pt and meta_*.json as nanochat writes them"},
        {.name = "step",
         .kind = OPTION_INT,
         .value = &m->step,
         .arg = "N",
         .min = 0,
         .max = INFINITY,
         .help = "the checkpoint of this training step; default: the newest"},
        {.name = "tokenizer",
         .kind = OPTION_STRING,
         .value = &m->tokenizer,
         .arg = "PATH",
         .help = "tokenizer.pkl or the directory that holds it; default: found as nanochat lays it out"},
    };
    _Static_assert(sizeof own / sizeof *own == TOKENIZER_OPTION_ROWS, "as many as the header says");
    memcpy(rows, own, sizeof own);
    return TOKENIZER_OPTION_ROWS;
}

int model_option_rows(model_options *m, bool computes, option_spec *rows) {
    const option_spec overrides[] = {
        {.name = "softcap",
         .kind = OPTION_REAL,
         .value = &m->softcap,
         .arg = "X",
         .min = 0.001,
         .max = 1e6,
         .help = "softcap of the logits; default: as detected"},
        {.name = "window-pattern",
         .kind = OPTION_STRING,
         .value = &m->window_pattern,
         .arg = "PATTERN",
         .help = "attention windows by layer, such as SSSL; default: as detected"},
        {.name = "rope-table",
         .kind = OPTION_STRING,
         .value = &m->rope_table,
         .arg = "bf16|fp32",
         .help = "precision of the rotary table; default: as detected"},
        {.name = "sequence-len",
         .kind = OPTION_INT,
         .value = &m->sequence_len,
         .arg = "N",
         .min = 1,
         .max = INT_MAX,
         .help = "tokens of a training sequence; default: the meta file's"},
        {.name = "short-window",
         .kind = OPTION_INT,
         .value = &m->short_window,
         .arg = "N",
         .min = 1,
         .max = INT_MAX,
         .help = "tokens that a short window (S) sees; default: as the generation says"},
    };
    const option_spec computing[] = {
        {.name = "precision",
         .kind = OPTION_STRING,
         .value = &m->precision,
         .arg = "bf16|f32",
         .help = "precision profile"},
        {.name = "threads",
         .kind = OPTION_INT,
         .value = &m->threads,
         .arg = "N",
         .min = 1,
         .max = 4096,
         .help = "threads that compute; default: the cores it may use"},
        {.name = "pin",
         .kind = OPTION_FLAG,
         .value = &m->pin,
         .help = "bind each computing thread to a core of its own; for a machine that runs nothing else"},
        {.name = "context",
         .kind = OPTION_INT,
         .value = &m->context,
         .arg = "N",
         .min = 1,
         .max = INT_MAX,
         .help = "longest sequence in tokens; default: the model's"},
        {.name = "kv-memory",
         .kind = OPTION_BYTES,
         .value = &m->kv_memory,
         .arg = "BYTES",
         .help = "memory for keys and values, such as 4G; default: a quarter of the free memory"},
    };
    enum {
        N_READS = TOKENIZER_OPTION_ROWS + sizeof overrides / sizeof *overrides,
        N_COMPUTING = sizeof computing / sizeof *computing
    };
    _Static_assert(N_READS + N_COMPUTING <= MODEL_OPTION_ROWS, "the table of the caller has room");
    memcpy(rows + tokenizer_option_rows(m, rows), overrides, sizeof overrides);
    if (computes) memcpy(rows + N_READS, computing, sizeof computing);
    return computes ? N_READS + N_COMPUTING : N_READS;
}

checkpoint_options model_checkpoint_options(const model_options *m) {
    return (checkpoint_options){
        .step = m->step,
        .tokenizer = m->tokenizer,
        .softcap = (float)m->softcap,
        .window_pattern = m->window_pattern,
        .rope_table = m->rope_table,
        .sequence_len = (int)m->sequence_len,
        .short_window = (int)m->short_window,
    };
}

int tell_error(const cop_error *err, int status) {
    fprintf(stderr, "coppice: %s%s%s\n", err->key, err->key[0] ? ": " : "", err->message);
    return status;
}
