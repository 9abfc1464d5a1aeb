/* What the engine keeps of a rollout or a score while it is in flight: a copy of its spec, and how far it is.
 * Internal to the engine; engine thread only. */
#ifndef COP_JOB_H
#define COP_JOB_H

#include "engine/row.h"

/* One prompt of a rollout.  Samples are granted (their pages reserved), started (forked) and finished in
 * order of index.
 *
 *            grant 0   grant 1 ..           all granted: the next prompt's turn
 *   pages    prefill ................ ready | start 0 | start 1 .. start n-1: pages go to the last row
 */
typedef struct prompt {
    engine_job *job;
    int32_t *tokens;
    int n_tokens;
    uint64_t seed;
    uint32_t first_sample; /* index of the first (or only) sample */
    uint32_t hash;         /* fourth counter word of the noise */
    int limit;             /* most tokens of a completion */
    row *prepared;         /* the row of a prompt with a prefix, replayed when it was submitted; NULL: none */

    sequence seq;  /* while admitted */
    float *logits; /* [vocab] backend memory, of the last token; while admitted */
    uint32_t n_granted, n_started;
    bool admitted; /* holds pages */
    bool ready;    /* all tokens computed, logits there */
    bool tight;    /* the pool is too small to keep the last page while a row runs: one row at a time takes it
                      over */
} prompt;

/* One sequence of a score. */
typedef struct scored {
    engine_job *job;
    int32_t *tokens;
    int n_tokens;
    sequence seq;    /* while granted: without its last token if nothing asks what follows that */
    float *logprobs; /* [n_tokens] */
    int32_t *top_ids, *next_ids;
    float *top_logprobs, *next_logprobs;
    bool granted; /* holds pages */
} scored;

typedef enum job_kind { JOB_ROLLOUT, JOB_SCORE } job_kind;

struct engine_job {
    engine_job *next; /* in order of arrival */
    job_kind kind;
    bool over;         /* nothing more is computed for it; removed at the end of the step */
    bool silent;       /* no event when it is removed */
    bool parked;       /* nothing more of it is granted */
    cop_error failure; /* status COP_OK: it ends with done() */
    double start;      /* seconds, monotonic */
    size_t cursor;     /* first prompt or sequence that is not granted in full */
    size_t n_open;     /* samples or sequences without their event */

    prompt *prompts; /* [n_prompts] */
    size_t n_prompts;
    uint32_t n; /* samples of each */
    rollout_sampling sampling;
    int32_t *stop_tokens; /* what sampling.stop_tokens and rules point to */
    row_rules rules;
    rollout_events events;
    rollout_totals totals;

    scored *scores; /* [n_scores] */
    size_t n_scores;
    score_spec score; /* sequences and lengths NULL */
};

/* What a spec is judged against. */
typedef struct job_limits {
    int vocab, context, n_pages;
    const tokenizer *tokenizer;
    bool has_calculator;
    const int32_t *stop_tokens; /* the model's */
    int n_stop_tokens;
} job_limits;

/* Check and copy a spec.  Errors as engine_submit(); *out is then NULL. */
cop_status job_open_rollout(engine_job **out, const rollout_spec *spec, const job_limits *limits,
                            cop_error *err);
cop_status job_open_score(engine_job **out, const score_spec *spec, const job_limits *limits, cop_error *err);
/* Free it; sequences that hold pages must have been freed with the pool before. */
void job_close(engine_job *j);

#endif
