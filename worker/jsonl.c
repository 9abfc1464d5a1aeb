/* JSON Lines: reading with bounds, one answer per line. */
#include "worker/jsonl.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define EXACT_IN_DOUBLE (UINT64_C(1) << 53)

/* ---- Numbers. */

json_t *json_u64(uint64_t value) {
    if (value <= EXACT_IN_DOUBLE) return json_integer((json_int_t)value);
    char digits[24];
    snprintf(digits, sizeof digits, "%" PRIu64, value);
    return json_string(digits);
}

bool json_u64_get(const json_t *value, uint64_t *out) {
    if (json_is_integer(value)) {
        json_int_t v = json_integer_value(value);
        if (v < 0) return false;
        *out = (uint64_t)v;
        return true;
    }
    if (!json_is_string(value)) return false;
    const char *digits = json_string_value(value);
    size_t n = json_string_length(value);
    if (n == 0 || strspn(digits, "0123456789") != n) return false; /* a NUL inside also fails here */
    errno = 0;
    unsigned long long v = strtoull(digits, NULL, 10);
    if (errno) return false;
    *out = v;
    return true;
}

/* ---- Output. */

bool jsonl_print(FILE *out, json_t *object) {
    if (json_dumpf(object, out, JSON_REAL_PRECISION(9)) != 0) return false;
    return fputc('\n', out) != EOF && !ferror(out);
}

/* A reader at the other end of a terminal, pipe or socket waits for each answer. */
static bool is_interactive(FILE *out) {
    int fd = fileno(out);
    struct stat st;
    return fd >= 0 && (isatty(fd) || (fstat(fd, &st) == 0 && (S_ISFIFO(st.st_mode) || S_ISSOCK(st.st_mode))));
}

/* Print what is wrong with line `number`.  Bytes of the input may be in the message, cut anywhere: where they
 * are not UTF-8, everything beyond ASCII becomes "?". */
bool jsonl_print_error(FILE *out, uint64_t number, const cop_error *err) {
    char text[sizeof err->key + sizeof err->message + 2];
    snprintf(text, sizeof text, "%s%s%s", err->key, err->key[0] ? ": " : "", err->message);
    json_t *message = json_string(text);
    if (!message) {
        for (char *c = text; *c; c++)
            if (*c & 0x80) *c = '?';
        message = json_string(text);
    }
    json_t *object = json_pack("{s:I, s:o}", "line", (json_int_t)number, "error", message);
    bool ok = object ? jsonl_print(out, object)
                     : fprintf(out, "{\"line\": %" PRIu64 ", \"error\": \"out of memory\"}\n", number) > 0;
    json_decref(object);
    return ok;
}

cop_status jsonl_refuse(cop_error *err, const char *key, const char *why) {
    cop_fail(err, COP_EINVAL, "%s", why);
    if (err) snprintf(err->key, sizeof err->key, "%s", key);
    return COP_EINVAL;
}

/* ---- Input. */

/* Read the next line.  False at the end of the input.  *status tells whether the line was kept: COP_ETOOLARGE
 * beyond JSONL_MAX_LINE and COP_ENOMEM skip the rest of it. */
static bool read_line(jsonl_reader *line, cop_status *status) {
    FILE *in = line->in;
    line->n = 0;
    *status = COP_OK;
    int c = getc_unlocked(in);
    if (c == EOF) return false;
    line->number++;
    for (; c != EOF && c != '\n'; c = getc_unlocked(in)) {
        if (*status != COP_OK) continue;
        if (line->n == JSONL_MAX_LINE)
            *status = COP_ETOOLARGE;
        else if (!mem_grow((void **)&line->bytes, &line->cap, line->n + 1, 1))
            *status = COP_ENOMEM;
        else
            line->bytes[line->n++] = (char)c;
    }
    return true;
}

static bool is_blank(const jsonl_reader *line) {
    for (size_t i = 0; i < line->n; i++)
        if (!strchr(" \t\r", line->bytes[i]) || !line->bytes[i]) return false;
    return true;
}

/* Parse one line.  *out is a new reference to an object, or NULL on failure. */
static cop_status parse_line(const jsonl_reader *line, json_t **out, cop_error *err) {
    json_error_t why;
    json_t *value =
        json_loadb(line->bytes, line->n, JSON_DECODE_ANY | JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &why);
    *out = NULL;
    if (!value) return cop_fail(err, COP_EFORMAT, "invalid JSON in column %d: %s", why.column, why.text);
    if (!json_is_object(value)) {
        json_decref(value);
        return cop_fail(err, COP_EFORMAT, "a line must be a JSON object");
    }
    *out = value;
    return COP_OK;
}

/* The object of a line; `kept` is what reading it gave. */
static cop_status object_of(const jsonl_reader *line, cop_status kept, json_t **out, cop_error *err) {
    *out = NULL;
    if (kept == COP_ETOOLARGE)
        return cop_fail(err, kept, "the line is longer than %d MiB", JSONL_MAX_LINE >> 20);
    if (kept != COP_OK) return cop_fail(err, kept, "could not keep the line: out of memory");
    return parse_line(line, out, err);
}

/* From the line to its answer in *out. */
static cop_status answer_line(const jsonl_reader *line, cop_status kept, jsonl_fn fn, void *context,
                              json_t **out, cop_error *err) {
    json_t *object;
    *out = NULL;
    cop_status status = object_of(line, kept, &object, err);
    if (status != COP_OK) return status;
    status = fn(context, object, line->number, out, err);
    json_decref(object);
    return status;
}

cop_status jsonl_next(jsonl_reader *r, json_t **out, cop_error *err) {
    cop_status kept;
    *out = NULL;
    while (read_line(r, &kept)) {
        if (kept == COP_OK && is_blank(r)) continue;
        COP_TRY(object_of(r, kept, out, err), err, "line %" PRIu64, r->number);
        return COP_OK;
    }
    if (ferror(r->in)) return cop_fail(err, COP_EIO, "could not read the input: %s", strerror(errno));
    return COP_OK;
}

void jsonl_reader_free(jsonl_reader *r) {
    mem_free(r->bytes);
    *r = (jsonl_reader){.in = r->in};
}

int jsonl_run(FILE *in, FILE *out, jsonl_fn fn, void *context) {
    jsonl_reader line = {.in = in};
    bool interactive = is_interactive(out), all_good = true, written = true;
    cop_status kept;
    while (written && read_line(&line, &kept)) {
        if (kept == COP_OK && is_blank(&line)) continue;
        cop_error err = {0};
        json_t *answer = NULL;
        if (answer_line(&line, kept, fn, context, &answer, &err) == COP_OK) {
            if (answer) written = jsonl_print(out, answer);
        } else {
            all_good = false;
            written = jsonl_print_error(out, line.number, &err);
        }
        json_decref(answer);
        if (interactive && fflush(out) != 0) written = false;
    }
    jsonl_reader_free(&line);
    if (fflush(out) != 0) written = false;
    if (!written) fprintf(stderr, "coppice: could not write the output: %s\n", strerror(errno));
    if (ferror(in)) fprintf(stderr, "coppice: could not read the input: %s\n", strerror(errno));
    return all_good && written && !ferror(in) ? 0 : 1;
}
