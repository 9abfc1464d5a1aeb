/* One sample being generated: the state machine that decides what each token means (NANOCHAT 2.1).
 *
 * It knows nothing of batches, pages of others or logits: tokens go in one by one with row_draw() or, for a
 * prefix, row_replay(); forced tokens that a tool call asks for are appended at once.  `tokens`, `mask` and
 * the log-probability arrays always have one length.  Engine thread only. */
#ifndef COP_ROW_H
#define COP_ROW_H

#include "engine/engine.h"
#include "engine/sequence.h"

/* What all rows of a rollout share.  Immutable while rows exist. */
typedef struct row_rules {
    const tokenizer *tokenizer; /* may be NULL if !calculator and there are no stop strings */
    bool calculator;
    int32_t python_start, python_end, output_start, output_end; /* used if calculator */
    const int32_t *stop_tokens;                                 /* [n_stop_tokens] */
    int n_stop_tokens;
    const stop_set *stop_strings; /* NULL: none */
    int min_tokens;               /* completion indices below it: stop strings do not end the sample */
    bool logprobs, model_logprobs, entropy;
    int kept; /* ids kept per drawn token at most; 0: not recorded */
} row_rules;

typedef enum row_state { ROW_RUNNING, ROW_STOPPED, ROW_FULL, ROW_CANCELLED } row_state;

typedef struct row {
    sequence seq; /* head: the prompt; tail: the completion, a prefix included */
    const row_rules *rules;
    int limit;    /* most tokens of the completion */
    int n_prefix; /* of them, given by the caller */
    uint8_t *mask;
    float *logprobs, *model_logprobs, *entropy;
    int32_t *kept_ids;
    uint32_t *kept_offsets; /* [limit + 1] */
    uint32_t n_kept;
    tool_call *calls;
    size_t n_calls, cap_calls;
    row_state state;
    int32_t stop;     /* the stop token that was hit, or -1 */
    int stop_string;  /* the index of the stop string that was hit, or -1 */
    stop_match match; /* where the completion's bytes stand in the stop strings */
    bool in_python;
    int expr_at;       /* in_python: index in the completion of the expression's first token */
    token_list forced; /* a tool's answer that was not fed yet, from forced_at on */
    size_t forced_at;
    uint64_t n_drawn, n_forced;
    weights_run *runs; /* [n_runs] starts count from the end of the prefix */
    size_t n_runs, cap_runs;
} row;

/* A row after prompt[0, n_prompt), with room for `limit` >= 0 tokens; with limit 0 it is ROW_FULL at once.
 * `prompt` and `rules` are borrowed.  On failure the row is zeroed. */
cop_status row_init(row *r, const row_rules *rules, const int32_t *prompt, int n_prompt, int limit,
                    cop_error *err);
void row_free(row *r, kv_pool *pool);

/* Bytes of what a row of `limit` tokens tells, at most: all of its arrays. */
size_t row_output_bytes(const row_rules *rules, int limit);

/* Tokens of the completion so far, a prefix included: the index of the next one. */
static inline int row_index(const row *r) { return r->seq.n - r->seq.n_head; }

/* Feed the caller's prefix, then force what is missing of an open tool answer.  COP_EINVAL if the prefix
 * contradicts the state machine: a stop token or string, not the tool's answer after a call, longer than the
 * limit. */
cop_status row_replay(row *r, const int32_t *prefix, size_t n_prefix, cop_error *err);

/* Where the sampler writes the kept ids of the next token ([rules->kept]), or NULL if they are not recorded.
 */
int32_t *row_kept_room(row *r);

/* Append a drawn token, the first n_kept ids of row_kept_room() with it, and whatever it forces. */
cop_status row_draw(row *r, const k_drawn *d, cop_error *err);

/* What is appended from now on comes under these weights.  Never fails the first time. */
cop_status row_relabel(row *r, const weights_label *label, cop_error *err);

/* A running row ends here, as FINISH_CANCELLED. */
void row_cancel(row *r);

/* What the sample looks like now: new tokens only.  Points into the row. */
void row_result(const row *r, sample_result *out);

#endif
