/* The parts of the engine share this: engine.c (life, submitting), admission.c (who may start), step.c (one
 * pass), finish.c (events and ends).  Internal; engine thread only. */
#ifndef COP_ENGINE_INTERNAL_H
#define COP_ENGINE_INTERNAL_H

#include "engine/forward.h"
#include "engine/job.h"
#include "engine/where.h"

enum {
    MAX_LOGITS = 128, /* rows of logits computed at a time */
};

typedef struct live_row {
    row row;
    prompt *prompt;
    uint32_t index; /* of the sample among its prompt's */
} live_row;

/* What one sequence has in the batch of a step. */
typedef enum span_kind { SPAN_PROMPT, SPAN_ROW, SPAN_SCORE } span_kind;
typedef struct span {
    span_kind kind;
    sequence *seq;
    void *owner;  /* prompt, live_row or scored */
    int first, n; /* tokens [first, first + n) of the batch */
} span;

/* A token of the batch whose logits are needed. */
typedef struct want {
    const span *span;
    int32_t token; /* of the batch */
} want;

struct engine {
    k_ctx *k;
    arch a;
    weights *w;
    forward *f;
    const tokenizer *tokenizer;
    engine_options o;
    int context;
    bool bound; /* the backend knows which thread steps */
    char numerics[16];

    kv_pool pool;
    k_kv kv;
    job_limits limits;
    int32_t stop_tokens[2];

    engine_job *jobs; /* in order of arrival */
    live_row **rows;  /* [n_rows], in order of start: rows of one prompt are neighbours */
    int n_rows;
    int n_promised;   /* samples that are granted and not started */
    prompt **prompts; /* [n_prompts] admitted */
    size_t n_prompts, cap_prompts;
    scored **scores; /* [n_scores] granted */
    size_t n_scores, cap_scores;

    /* The step: all [max_tokens]. */
    int max_tokens, page_stride;
    int32_t *ids, *prev, *pos, *table, *pages, *index;
    span *spans;
    want *wants;
    live_row **drawing;
    k_draw *draws;
    k_drawn *drawn;
    k_target *targets;
    float *target_logprobs;

    engine_status totals; /* the counters of it */
    where where;
};

/* ---- admission.c */

/* Reserve pages for what waits, first come, first served, and bring its prompts in. */
void admission_grant(engine *e);
/* Start the granted samples of prompts that are ready: fork, draw the first token. */
void admission_start(engine *e);
/* Give back the pages of a prompt that all samples have left, or whose job is over. */
void admission_release(engine *e, prompt *p);

/* ---- step.c */

/* How a row's next token is drawn, from that row of the logits. */
k_draw step_draw(const live_row *r, int logits_row);
/* Draw for e->drawing[0 .. n) as e->draws says, and let the rows go on. */
void step_draw_rows(engine *e, int n, const float *logits);

/* ---- finish.c */

/* Tell a sample: a row's, or one that never started (r NULL). */
void finish_sample(engine *e, prompt *p, uint32_t index, const row *r);
void finish_scored(scored *s);
/* The job is over, with this error. */
void finish_failed(engine_job *j, const cop_error *err);
/* Drop what is over: finished rows, prompts whose samples have all started, jobs that ended; tell their end.
 */
void finish_sweep(engine *e);

#endif
