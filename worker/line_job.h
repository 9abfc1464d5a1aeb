/* An input line of `coppice generate` on its way through the threads: read, generated, written.  It is owned
 * by whoever holds it. */
#ifndef COP_LINE_JOB_H
#define COP_LINE_JOB_H

#include <jansson.h>

#include "engine/engine.h"
#include "proto/shard.h"
#include "worker/input.h"
#include "worker/queue.h"

typedef struct line_job {
    queue_item item;
    bool last;      /* no line: the input ends here, or an error stopped it */
    uint64_t order; /* among the lines of this run, from 0 */
    uint64_t line;  /* of the whole input, from 0 */
    char *id;       /* [n_id] the line's own, or its number */
    size_t n_id;
    wire_buffer input; /* the line as MessagePack; empty: it was no object */
    json_t *answer;    /* its `answer` field; NULL: none */
    token_list tokens; /* the prompt's */
    uint64_t seed;
    wire_buffer record;    /* of an earlier run, complete: there is nothing left to do; empty: none */
    cop_error error;       /* why nothing was generated; COP_OK: nothing is wrong */
    reply_sample *samples; /* [n] by index; made with sample_copy() */
    uint32_t n;            /* samples of the line */
    size_t n_read_bytes;   /* that it held when it was read */
    size_t n_bytes;        /* the same, and what its samples hold */
    /* The input up to and with this line, of which `n_lines` were read: */
    uint64_t n_lines;
    char digest[INPUT_DIGEST_CHARS];
} line_job;

/* What reading a line takes. */
typedef struct line_rules {
    const tokenizer *tokenizer; /* NULL: only `tokens` */
    int vocab;
    uint64_t seed; /* of lines without their own */
    uint32_t n;
} line_rules;

/* A job for a line of the input, numbered by it.  What is wrong with the line stands in its `error`; NULL
 * only without memory. */
line_job *line_job_open(const line_rules *rules, const input_line *line);
void line_job_free(line_job *j); /* NULL does nothing */

/* Whether an error belongs to its line, and the run goes on without it; else it stops the run. */
bool line_error_stays(const cop_error *err);

/* The encoded record: samples as they are kept (sample i if keeps[i]; NULL: all), rewards[0 .. n) or NULL.
 * False without memory. */
bool line_job_encode(wire_buffer *out, const line_job *j, const bool *keeps, const double *rewards);

#endif
