/* The parts of the engine share this: engine.c (life, submitting), admission.c (what may start), plan.c (how
 * far each task moves, and who gives way), step.c (one pass), finish.c (events and ends).  Internal; engine
 * thread only. */
#ifndef COP_ENGINE_INTERNAL_H
#define COP_ENGINE_INTERNAL_H

#include <assert.h>

#include "engine/forward.h"
#include "engine/job.h"
#include "engine/reload.h"
#include "engine/where.h"

enum {
    MAX_LOGITS = 128, /* rows of logits computed at a time */
    MAX_PROMPTS = 64, /* listed at a time; each has a row of logits */
};

/* What a task stands for; it must be of that kind. */
static inline prompt *task_prompt(const task *t) {
    assert(t->kind == TASK_PROMPT);
    return (prompt *)t;
}
static inline live_row *task_row(const task *t) {
    assert(t->kind == TASK_ROW);
    return (live_row *)t;
}
static inline scored *task_scored(const task *t) {
    assert(t->kind == TASK_SCORE);
    return (scored *)t;
}
engine_job *task_job(const task *t);
sequence *task_sequence(const task *t);

/* What a task has in the batch of a step. */
typedef struct span {
    task *task;
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
    weights_label label; /* of w */
    reload_model reload;
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
    task **tasks;     /* [n_tasks] oldest first (task.h); rows of one prompt are neighbours */
    int n_tasks;
    int n_rows;          /* of them rows, at most o.max_rows */
    float *first_logits; /* [MAX_PROMPTS, vocab] backend memory: of the last tokens of prompts, by slot */
    bool slot_used[MAX_PROMPTS];

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

/* Let go on what waits, start samples of prompts that are ready (with their first token drawn), and list new
 * prompts and sequences: by age, as long as there is room.  What ends by that stays listed until the sweep.
 */
void admission_run(engine *e);

/* ---- plan.c */

/* Set n_step of each task, and provide the pages for it. */
void plan_step(engine *e);
/* Let a task wait: it gives its pages back. */
void plan_preempt(engine *e, task *t);

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
/* Drop what is over: finished rows and sequences, prompts whose samples have all started, jobs that ended;
 * tell the end of those. */
void finish_sweep(engine *e);

#endif
