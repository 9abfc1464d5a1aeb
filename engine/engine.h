/* The engine: a model, its page pool and all rows.  Rollouts and scores go in, events come out while
 * engine_step() runs.
 *
 * A step is one forward pass over a ragged batch: every running row's next token or forced span, and chunks
 * of prompts, up to `step_tokens`.  A prompt is computed once; its samples fork its pages.  Full pages are
 * kept, while nobody else needs their memory, and found again by later requests that begin with the same
 * tokens.  A sample is a pure function of weights, prompt tokens and id, sampling, seed and sample index
 * (PROTOCOL.md "Determinism").
 *
 * Requests are served in the order of submission.  When pages run out, the youngest of what runs gives its
 * own back and is computed again later, so all that is accepted gets to its end.
 *
 * New weights may come while rows run.  They are read on another thread and put into use between two steps;
 * then each step is one pass per set of weights that something still runs on.
 *
 * One thread uses an engine, but for engine_load_*(); events are called from engine_step(), engine_cancel(),
 * engine_submit(), engine_abort_rows() and engine_use_weights() on that thread and must not call back into
 * the engine. */
#ifndef COP_ENGINE_H
#define COP_ENGINE_H

#include "engine/checkpoint.h"
#include "engine/stop.h"
#include "engine/tokenizer.h"
#include "kernels/backend.h"

typedef struct engine_options {
    precision profile;
    int n_threads;        /* 0: cpu_count() */
    bool pin;             /* bind each to a core; the thread that steps is bound at its first step */
    size_t kv_memory;     /* bytes for pages; 0: a quarter of the free memory */
    int context;          /* 0: the model's; else at most that */
    int max_rows;         /* rows that hold pages at once */
    int step_tokens;      /* prompt and forced tokens in a step */
    int span_tokens;      /* most tokens of one sequence in a step; 0: step_tokens */
    size_t output_memory; /* bytes that running rows may need for what they tell of each token; 0: 256 MiB */
    bool no_prefix_cache; /* pages are not found again by later requests */
    bool hold_rows; /* rows wait while any prompt is computed; they then go on in step (for measuring) */
} engine_options;
engine_options engine_defaults(void);

/* ---- What a set of weights is called. */
typedef struct weights_label {
    uint64_t version; /* 0: the set that the engine was opened with */
    char digest[33];  /* 32 hex digits, equal for equal tensors and architecture (PROTOCOL.md "Weights") */
} weights_label;

/* Tokens from index `start` on, up to the next run or the end, were drawn (or forced) under these weights. */
typedef struct weights_run {
    int32_t start;
    weights_label label;
} weights_run;

/* ---- A rollout. */
typedef enum sample_finish { FINISH_STOP, FINISH_LENGTH, FINISH_CANCELLED } sample_finish;

typedef struct rollout_sampling {
    int max_tokens, min_tokens;
    double temperature;
    int top_k;
    double top_p, min_p;
    const int32_t *stop_tokens; /* valid if has_stop_tokens; else the model's (assistant_end, bos) */
    int n_stop_tokens;
    bool has_stop_tokens;
    const stop_string *stop_strings; /* [n_stop_strings], at most STOP_MAX_STRINGS; they need a tokenizer */
    int n_stop_strings;
    bool calculator; /* run the calculator where the model calls it */
    bool logprobs, model_logprobs, entropy, kept;
} rollout_sampling;
rollout_sampling rollout_sampling_defaults(void);

typedef struct rollout_prompt {
    const int32_t *tokens; /* [n_tokens], at least one */
    size_t n_tokens;
    const char *id; /* [n_id] bytes, part of the identity; NULL: none */
    size_t n_id;
    uint64_t seed;
    bool has_sample; /* generate just sample index `sample`; the rollout's n is 1 */
    uint32_t sample;
    const int32_t *prefix; /* [n_prefix] the start of that sample's completion; may be empty */
    size_t n_prefix;
    uint32_t enough; /* once so many of its samples ended by stop or length, cancel the others; 0: never */
} rollout_prompt;

typedef struct tool_call {
    int32_t at; /* index in tokens of the token that closed the call */
    bool ok;    /* the tool gave an answer */
} tool_call;

/* One finished sample.  Pointers are valid during the event only. */
typedef struct sample_result {
    uint32_t prompt, sample; /* index of the prompt in the rollout, of the sample in the prompt */
    uint64_t seed;
    int n_tokens; /* new ones: a prefix is not repeated */
    const int32_t *tokens;
    const uint8_t *mask;                    /* 1 sampled, 0 forced */
    const float *logprobs, *model_logprobs; /* NULL if not asked for; 1.0 at forced tokens */
    const float *entropy;                   /* likewise */
    const int32_t *kept_ids;                /* NULL if not asked for */
    const uint32_t *kept_offsets;           /* [n_tokens + 1] */
    const tool_call *tool_calls;
    int n_tool_calls;
    const weights_run *weights; /* [n_weights] they cover the tokens; none where there are none */
    int n_weights;
    sample_finish finish;
    int32_t stop;            /* the stop token that was hit, or -1 */
    stop_string stop_string; /* the stop string that was hit; bytes NULL: none */
} sample_result;

typedef struct rollout_totals { /* cached_tokens: of the prompt tokens, once per prompt; forks not counted */
    uint64_t samples, prompt_tokens, cached_tokens, sampled_tokens, forced_tokens;
    double seconds; /* since engine_submit */
} rollout_totals;

/* What a rollout tells.  sample() once for each sample, then done(); or failed(), after which nothing
 * follows. */
typedef struct rollout_events {
    void *context;
    void (*sample)(void *context, const sample_result *s);
    void (*done)(void *context, const rollout_totals *t);
    void (*failed)(void *context, const cop_error *e);
} rollout_events;

typedef struct rollout_spec {
    const rollout_prompt *prompts;
    size_t n_prompts;
    uint32_t n; /* samples per prompt */
    rollout_sampling sampling;
    rollout_events events;
} rollout_spec;

/* ---- A score. */
typedef struct score_result { /* pointers valid during the event only */
    size_t n;
    const float *logprobs;      /* [n], entry 0 is 1.0 */
    int top;                    /* 0: the rest is NULL */
    const int32_t *top_ids;     /* [n, top]; row 0 is -1 */
    const float *top_logprobs;  /* [n, top]; row 0 is 1.0 */
    const int32_t *next_ids;    /* [top] */
    const float *next_logprobs; /* [top] */
} score_result;
typedef struct score_spec {
    const int32_t *const *sequences; /* [n_sequences] */
    const size_t *lengths;           /* each at least 1 */
    size_t n_sequences;
    int top;
    double temperature;
    void *context;
    void (*scored)(void *context, size_t sequence, const score_result *s); /* in any order */
    void (*done)(void *context, const weights_label *w); /* under which all of it was scored */
    void (*failed)(void *context, const cop_error *e);
} score_spec;

/* ---- The engine. */
typedef struct engine engine;
typedef struct engine_job engine_job; /* a rollout or a score in flight */

/* Load the weights of `c` and make the pool.  `t` may be NULL (then no tools); both are borrowed: `t` until
 * engine_close(), `c` only for the call.
 * Errors: COP_EIO (the file changed), COP_ENOMEM, COP_EINVAL (context, threads), COP_EFORMAT (non-finite
 * weights); *out is then NULL. */
cop_status engine_open(engine **out, checkpoint *c, const tokenizer *t, const engine_options *o,
                       cop_error *err);
/* The same with random weights of an architecture and no tokenizer, to measure speed with
 * (weights_open_random). */
cop_status engine_open_random(engine **out, const arch *a, uint64_t seed, const engine_options *o,
                              cop_error *err);
void engine_close(engine *e); /* jobs in flight end without events */

/* Take a rollout or a score; everything in the spec is copied.  *job (may be NULL) stays valid until done()
 * or failed(). A spec is judged whole before anything starts; err->key is a path such as "prompts[3].tokens".
 * Errors: COP_EINVAL (ids outside the vocabulary, a prefix that its own tool calls contradict, no tool
 * tokens...), COP_EUNSUPPORTED (stop strings without a tokenizer), COP_ETOOLONG, COP_ETOOLARGE, COP_ENOMEM;
 * then no event is called. */
cop_status engine_submit(engine *e, const rollout_spec *spec, engine_job **job, cop_error *err);
cop_status engine_submit_score(engine *e, const score_spec *spec, engine_job **job, cop_error *err);

/* End a job: a rollout's unfinished samples come as FINISH_CANCELLED with what they have, then done(); a
 * score's done(). */
void engine_cancel(engine *e, engine_job *job);

/* End a job without any event: nobody is interested any more. */
void engine_abandon(engine *e, engine_job *job);

/* Start nothing more of a job, and nothing behind it waits for that; false: go on, before what came later and
 * has not started.  Samples that run already run to their end. */
void engine_park(engine *e, engine_job *job, bool parked);

/* Whether something of a job that was never parked has been started: until then it only waits. */
bool engine_job_started(const engine_job *job);

/* Run one step, if there is work.  False: there was nothing to do, only parked jobs are left, or the engine
 * is paused and nothing may go on.  A failure of the backend fails the jobs concerned. */
bool engine_step(engine *e);

/* What may go on from now on. */
typedef enum engine_pause_mode {
    ENGINE_RUN,    /* everything: not paused */
    ENGINE_FINISH, /* samples and scored sequences that have started; nothing new starts */
    ENGINE_HOLD    /* nothing: rows keep their pages and wait */
} engine_pause_mode;
void engine_pause(engine *e, engine_pause_mode mode);
/* No sample or scored sequence that has started is without its end. */
bool engine_is_quiet(const engine *e);
/* Rows in flight end now, as FINISH_CANCELLED with what they have; samples that have not started still do. */
void engine_abort_rows(engine *e);

/* ---- New weights. */

/* What becomes of rows in flight when other weights come into use.  Samples that have not started start under
 * the new ones, whatever the policy; a score ends under those with which its first sequence began. */
typedef enum weights_policy {
    WEIGHTS_FINISH,    /* they end under the weights that they run on */
    WEIGHTS_KEEP,      /* they go on under the new ones, with the K and V that they have (but for rows that
                          have drawn nothing yet): such a row is never preempted and none of its pages is found
                          again; where the pool is full of them, the youngest ends as FINISH_CANCELLED */
    WEIGHTS_RECOMPUTE, /* they go on under the new ones, all K and V computed again */
    WEIGHTS_ABORT      /* they end as FINISH_CANCELLED, to be continued with `prefix` */
} weights_policy;

typedef struct weights weights;

/* Tensors on their way, one after the other in order of name (bytes).  One thread at a time. */
typedef struct weights_source {
    void *context;
    /* *out: the next tensor, valid until the next call; NULL after the last. */
    cop_status (*next)(void *context, const tensor_info **out, cop_error *err);
    /* Elements [first, first + n) of it, as they are, in order: each is asked for once. */
    cop_status (*read)(void *context, size_t first, size_t n, void *to, cop_error *err);
    /* After the last one: whether all was as it should be.  tensors_digest: XXH3-128 in 32 hex digits of what
     * the set's digest covers before the architecture. */
    cop_status (*finish)(void *context, const char *tensors_digest, cop_error *err);
} weights_source;

/* Read and pack a set of weights for this engine's model: the same tensors, of the same shapes; dtypes may be
 * others. Any thread, one at a time, while the engine runs; only engine_close() must come later.  *out is to
 * be given to engine_use_weights() or engine_drop_weights().  _path: a checkpoint as checkpoint_open() takes
 * it, or any .pt file; where the meta file of a model_*.pt is beside it, the architecture must be the same.
 * It is read once: nothing of it stays open.  within: the directory, without symbolic links in its path, in
 * which both files must lie wherever links lead; NULL: they may lie anywhere (else COP_EINVAL).
 * Errors: COP_EFORMAT (a tensor is missing, unknown or misshaped, its name in the message; another
 * architecture), COP_EMODEL (a number is not finite), COP_ENOMEM, COP_EIO (the file changed meanwhile;
 * loading was stopped), COP_EUNSUPPORTED (the engine's own weights are random), and those of the source or of
 * checkpoint_open(); *out is then NULL, and nothing changed. */
cop_status engine_load_weights(engine *e, const weights_source *s, weights **out, cop_error *err);
cop_status engine_load_path(engine *e, const char *path, const char *within, weights **out, cop_error *err);
/* True: what is being loaded ends soon, with COP_EIO, and so does every later load, until false is told.  Any
 * thread. */
void engine_stop_loading(engine *e, bool stop);
void engine_drop_weights(engine *e, weights *w); /* any thread; NULL does nothing */
const char *engine_weights_digest(const weights *w);

/* Take `w` into use under this version, from the next step on.  If its digest is that of the set in use, only
 * the version changes: of the label of what is drawn from now on, but for rows that WEIGHTS_FINISH lets end.
 */
void engine_use_weights(engine *e, weights *w, uint64_t version, weights_policy policy);
/* Those in use.  Engine thread; valid until the next change. */
const weights_label *engine_weights(const engine *e);
/* Sets in memory: 1 and those that something still runs on.  Any thread. */
int engine_n_weights(const engine *e);

/* Where the step is that runs now, to tell which one does not come back.  Any thread. */
typedef struct engine_place {
    const char *operation; /* a literal; NULL: no step runs */
    int layer;             /* from 0; -1: of no layer */
    int n_rows, n_tokens;  /* sequences and tokens of the batch; 0 before it is collected */
    uint64_t step;         /* from 1 */
} engine_place;
engine_place engine_where(const engine *e);

/* Facts.  Any thread may read what never changes: these. */
const arch *engine_arch(const engine *e);
const char *engine_numerics(const engine *e); /* "cop1-bf16", "cop1-f32" */
const char *engine_isa(const engine *e);
int engine_threads(const engine *e);
int engine_context(const engine *e);
bool engine_has_calculator(const engine *e); /* the model has the tool tokens and there is a tokenizer */

typedef struct engine_status {
    uint64_t rows;             /* that hold pages */
    uint64_t queued;           /* samples and sequences that have not started */
    uint64_t waiting_requests; /* of which nothing has started */
    uint64_t pages_total;      /* = used (owned by what is in flight) + cached (reclaimed on demand) + free */
    uint64_t pages_used, pages_cached, pages_free;
    uint64_t pages_shared; /* of the used, with more than one owner */
    uint64_t requests, samples, prompt_tokens, sampled_tokens, forced_tokens, steps;
    uint64_t prefilled_tokens; /* of prompts, really computed: again after a preemption counts again */
    uint64_t cached_tokens;    /* of prompts, found computed */
    uint64_t preemptions;      /* times that something gave its pages back to be computed again */
    double seconds_forward;    /* in forward passes, logits included */
    double seconds_sample;     /* in drawing tokens, with their log-probabilities */
} engine_status;
void engine_read_status(const engine *e, engine_status *s); /* engine thread only */

/* What this machine does at most, with the engine's threads and instruction set: k_measure().  No step may
 * run. */
cop_status engine_measure(engine *e, k_peaks *out, cop_error *err);

#endif
