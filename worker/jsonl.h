/* JSON Lines in, JSON Lines out: one output line per input line.  A bad line gives {"line": n, "error":
 * "..."} (n counts from 1) and exit status 1 at the end; the run goes on. */
#ifndef COP_JSONL_H
#define COP_JSONL_H

#include <jansson.h>
#include <stdio.h>

#include "worker/input.h"

/* Bytes of the longest line that is read; a longer one is a bad line. */
#define JSONL_MAX_LINE (64 << 20)

/* One line's work: from the parsed object make the output object (a new reference in *out).  On failure *out
 * is NULL and err is filled; err->key is part of the message that is printed.
 * number: of the line, from 1.  COP_OK with *out NULL prints nothing for it now. */
typedef cop_status (*jsonl_fn)(void *context, json_t *line, uint64_t number, json_t **out, cop_error *err);

/* Run fn over every line of the input `path` ("-": stdin) that is not blank, writing to `out`, flushed line
 * by line if `out` is a terminal or a pipe.  Returns the exit status: 0, or 1 if any line failed, the input
 * could not be opened or read to its end, or out could not be written; stderr tells the latter ones. */
int jsonl_run(const char *path, FILE *out, jsonl_fn fn, void *context);

/* The object of a line that is not blank: a JSON object with unique keys.  *out is a new reference, NULL on
 * failure: a line that was skipped (its status), COP_EFORMAT.  Any thread. */
cop_status jsonl_parse(const input_line *line, json_t **out, cop_error *err);

/* Print one object as a line: floats with 9 digits, no spaces lost, UTF-8 as it is.  False if it could not be
 * written. */
bool jsonl_print(FILE *out, json_t *object);

/* What a jsonl_fn returns for a wrong value: COP_EINVAL with the key. */
cop_status jsonl_refuse(cop_error *err, const char *key, const char *why);

/* Print {"line": number, "error": ...}, the key before the message.  False if it could not be written. */
bool jsonl_print_error(FILE *out, uint64_t number, const cop_error *err);

/* A u64 as JSON: a number up to 2^53, else a decimal string; and back (either form).  json_u64_get is false
 * for anything that is not a whole number within u64. */
json_t *json_u64(uint64_t value);
bool json_u64_get(const json_t *value, uint64_t *out);

#endif
