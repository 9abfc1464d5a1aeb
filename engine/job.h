/* What the engine keeps of a rollout or a score while it is in flight: a copy of its spec, and how far it is.
 * Internal to the engine; engine thread only. */
#ifndef COP_JOB_H
#define COP_JOB_H

#include "engine/row.h"
#include "engine/task.h"

/* A sample that has started, or one with a prefix that has not. */
typedef struct live_row {
    task task; /* while listed */
    row row;
    struct prompt *prompt;
    uint32_t index;         /* of the sample among its prompt's */
    const weights *weights; /* on which it runs; NULL until it starts */
    bool kept; /* its K and V are of more than one set: they cannot be computed again, nor found */
} live_row;

/* One prompt of a rollout.  It is computed once; its samples start in order of index from its pages, and it
 * keeps them until the last has started.
 *
 *   listed    computing ............... ready | start 0 | start 1 ..  start n-1 | dropped
 *   pages     none, or some of the cache's
 *
 * Each sample shares its full pages.  A last page that is not full is copied for each but the last sample,
 * which takes it over.
 *
 * Its pages are of the weights in use: it gives them back when others come.
 *
 * With a prefix it has one sample, whose row was made when it was submitted; it is never listed itself, but
 * that row is, and computes the prompt's tokens before its own. */
typedef struct prompt {
    task task; /* while listed */
    engine_job *job;
    int32_t *tokens;
    int n_tokens;
    uint64_t seed;
    uint32_t first_sample; /* index of the first (or only) sample */
    uint32_t hash;         /* fourth counter word of the noise */
    int limit;             /* most tokens of a completion */
    live_row *prepared;    /* the row of a prompt with a prefix, until it starts; NULL: none */
    uint32_t enough;       /* samples that need to end by stop or length; 0: all */
    uint32_t n_ended;      /* samples that did */

    sequence seq;
    uint32_t n_started;
    int slot;   /* while listed: where the logits of its last token go */
    bool ready; /* all tokens computed, logits there */
    int n_seen; /* tokens [0, n_seen) were computed, or counted as cached */
} prompt;

/* Enough of its samples have ended: none of the others goes on, and they are cancelled by the next sweep. */
static inline bool prompt_settled(const prompt *p) { return p->enough > 0 && p->n_ended >= p->enough; }

/* One sequence of a score. */
typedef struct scored {
    task task; /* while listed */
    engine_job *job;
    int32_t *tokens;
    int n_tokens;
    sequence seq;    /* without its last token if nothing asks what follows that */
    int n_scored;    /* tokens whose logits were used, or those of the sequence before: more than are computed
                        after its pages were given back */
    int n_shared;    /* whole pages of tokens that score as in the sequence before; 0 in the first one */
    float *logprobs; /* [n_tokens] */
    int32_t *top_ids, *next_ids;
    float *top_logprobs, *next_logprobs;
} scored;

typedef enum job_kind { JOB_ROLLOUT, JOB_SCORE } job_kind;

struct engine_job {
    engine_job *next; /* in order of arrival */
    job_kind kind;
    bool over;         /* nothing more is computed for it; removed at the end of the step */
    bool silent;       /* no event when it is removed */
    bool parked;       /* nothing more of it is listed or started */
    cop_error failure; /* status COP_OK: it ends with done() */
    double start;      /* seconds, monotonic */
    size_t cursor;     /* first prompt or sequence that was never listed; 0: nothing has started */
    size_t n_open;     /* samples or sequences without their event */
    bool settles;      /* a prompt of it became settled in this step */

    prompt *prompts; /* [n_prompts] */
    size_t n_prompts;
    uint32_t n; /* samples of each */
    rollout_sampling sampling;
    int32_t *stop_tokens;   /* what sampling.stop_tokens and rules point to */
    stop_set *stop_strings; /* what rules point to; NULL: none */
    row_rules rules;
    rollout_events events;
    rollout_totals totals;

    scored *scores; /* [n_scores] */
    size_t n_scores;
    score_spec score;       /* sequences and lengths NULL */
    const weights *weights; /* of a score: under which; NULL until a sequence starts */
    weights_label label;    /* of that */
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
/* Free it; its sequences have given their pages back. */
void job_close(engine_job *j);

#endif
