/* The parts of the engine share this: engine.c (life, submitting), admission.c (what may start), plan.c (how
 * far each task moves, and who gives way), step.c (the passes), finish.c (events and ends), new_weights.c
 * (pausing, and what becomes of rows when weights change).  Internal; engine thread only. */
#ifndef COP_ENGINE_INTERNAL_H
#define COP_ENGINE_INTERNAL_H

#include <assert.h>
#include <stdatomic.h>

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
const weights *task_weights(const engine *e, const task *t); /* on what it is computed */
static inline bool task_is_kept(const task *t) { return t->kind == TASK_ROW && task_row(t)->kept; }
/* Tokens that need not be computed if the cache has them: not those whose logits are needed. */
int task_restorable(const task *t);
prompt *task_whose(const task *t); /* the prompt that a prompt or row computes samples of */
/* How many of that prompt's tokens it has computed. */
static inline int task_prompt_computed(const task *t) {
    int n = task_sequence(t)->n_computed, n_prompt = task_whose(t)->n_tokens;
    return n < n_prompt ? n : n_prompt;
}

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
    weights *w;          /* in use; w->next ..: older sets that something still runs on */
    weights_label label; /* of w */
    reload_model reload;
    atomic_int n_weights;
    engine_pause_mode pause;
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

/* Let a task take further pages that the cache has for it by now. */
void admission_restore(engine *e, task *t);

/* ---- plan.c */

/* Set n_step of each task, and provide the pages for it. */
void plan_step(engine *e);
/* Let a task wait: it gives its pages back. */
void plan_preempt(engine *e, task *t);
/* Whether a task goes on while the engine is paused as it is. */
static inline bool plan_goes_on(const engine *e, const task *t) {
    return e->pause == ENGINE_RUN || (e->pause == ENGINE_FINISH && t->kind != TASK_PROMPT);
}

/* ---- step.c */

/* How a row's next token is drawn, from that row of the logits. */
k_draw step_draw(const live_row *r, int logits_row);
/* Draw for e->drawing[0 .. n) as e->draws says, and let the rows go on. */
void step_draw_rows(engine *e, int n, const float *logits);

/* ---- finish.c */

/* Tell a sample: a row's, or one that never started (r NULL). */
void finish_sample(engine *e, prompt *p, uint32_t index, const row *r);
/* A running row ends here, as FINISH_CANCELLED. */
void finish_cancelled(engine *e, live_row *r);
void finish_scored(scored *s);
/* The job is over, with this error. */
void finish_failed(engine_job *j, const cop_error *err);
/* Drop what is over: finished rows and sequences, prompts whose samples have all started, jobs that ended;
 * tell the end of those. */
void finish_sweep(engine *e);

/* ---- new_weights.c */

/* Close the older sets that nothing runs on any more; `all` of all sets. */
void weights_sweep(engine *e, bool all);

#endif
