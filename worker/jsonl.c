/* JSON Lines: parsing with bounds, one answer per line. */
#include "worker/jsonl.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "worker/options.h"

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

cop_status jsonl_parse(const input_line *line, json_t **out, cop_error *err) {
    *out = NULL;
    if (line->status == COP_ETOOLARGE)
        return cop_fail(err, line->status, "the line is longer than %d MiB", JSONL_MAX_LINE >> 20);
    if (line->status != COP_OK) return cop_fail(err, line->status, "could not keep the line: out of memory");
    json_error_t why;
    json_t *value =
        json_loadb(line->bytes, line->n, JSON_DECODE_ANY | JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &why);
    if (!value) return cop_fail(err, COP_EFORMAT, "invalid JSON in column %d: %s", why.column, why.text);
    if (!json_is_object(value)) {
        json_decref(value);
        return cop_fail(err, COP_EFORMAT, "a line must be a JSON object");
    }
    *out = value;
    return COP_OK;
}

/* ---- Running. */

/* From the line to its answer in *out. */
static cop_status answer_line(const input_line *line, jsonl_fn fn, void *context, json_t **out,
                              cop_error *err) {
    *out = NULL;
    json_t *object;
    cop_status status = jsonl_parse(line, &object, err);
    if (status != COP_OK) return status;
    status = fn(context, object, line->number + 1, out, err);
    json_decref(object);
    return status;
}

/* Answer every line.  The status is the input's. */
static cop_status answer_lines(input_file *in, FILE *out, jsonl_fn fn, void *context, bool *all_good,
                               bool *written, cop_error *err) {
    bool interactive = is_interactive(out), more;
    input_line line;
    cop_status status = COP_OK;
    while (*written && (status = input_next(in, &line, &more, err)) == COP_OK && more) {
        if (line.blank) continue;
        cop_error why = {0};
        json_t *answer = NULL;
        if (answer_line(&line, fn, context, &answer, &why) == COP_OK) {
            if (answer) *written = jsonl_print(out, answer);
        } else {
            *all_good = false;
            *written = jsonl_print_error(out, line.number + 1, &why);
        }
        json_decref(answer);
        if (interactive && fflush(out) != 0) *written = false;
    }
    return status;
}

int jsonl_run(const char *path, FILE *out, jsonl_fn fn, void *context) {
    cop_error err;
    input_file *in;
    bool all_good = true, written = true;
    cop_status status = input_open(&in, path, &err);
    if (status == COP_OK) status = answer_lines(in, out, fn, context, &all_good, &written, &err);
    if (fflush(out) != 0) written = false;
    if (!written) fprintf(stderr, "coppice: could not write the output: %s\n", strerror(errno));
    input_close(in);
    if (status != COP_OK) return tell_error(&err, 1);
    return all_good && written ? 0 : 1;
}
