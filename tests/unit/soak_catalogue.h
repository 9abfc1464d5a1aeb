/* For test_soak.c: requests to choose from, and what each must answer.
 *
 * A catalogue belongs to one model and profile: prompts (chats, chats after a common header, pieces of one
 * stem of tokens that end at and beside the edges of pages), samplings, scores.  What a sample must be is
 * computed once, alone, by a plain engine: one thread, all of the pool, the best instruction set. */
#ifndef COP_SOAK_CATALOGUE_H
#define COP_SOAK_CATALOGUE_H

#include "engine_fixture.h"

enum {
    N_PROMPTS = 16,
    N_SAMPLINGS = 10,
    N_INDICES = 8, /* sample indices */
    N_SCORINGS = 3,
    LONGEST_PROMPT = 300,
    LONGEST_COMPLETION = 100,
    MOST_TOP = 5
};

/* What scoring a prompt told, copied. */
typedef struct score_copy {
    size_t n;
    int top;
    float *logprobs, *top_logprobs, *next_logprobs;
    int32_t *top_ids, *next_ids;
} score_copy;

typedef struct catalogue {
    const char *model;
    precision profile;
    fixture plain; /* zeroed until it is first needed */
    int32_t tokens[N_PROMPTS][LONGEST_PROMPT];
    size_t n_tokens[N_PROMPTS];
    int32_t stop_tokens[64];
    rollout_sampling samplings[N_SAMPLINGS];
    sample *samples[N_PROMPTS][N_SAMPLINGS][N_INDICES]; /* NULL: not computed yet */
    score_copy scores[N_PROMPTS][N_SCORINGS];           /* n 0: not computed yet */
} catalogue;

static const struct {
    int top;
    double temperature;
} scorings[N_SCORINGS] = {{0, 1.0}, {MOST_TOP, 0.7}, {1, 1.0}};

static inline engine_options catalogue_plain_options(const catalogue *c) {
    engine_options o = engine_defaults();
    o.profile = c->profile;
    o.n_threads = 1;
    o.kv_memory = 16 << 20;
    o.no_prefix_cache = true;
    return o;
}

static inline size_t catalogue_page_bytes(const catalogue *c) {
    const arch *a = engine_arch(c->plain.e);
    size_t element = c->profile == PRECISION_BF16 ? 2 : 4;
    return 2 * (size_t)(a->n_layers * a->n_kv_heads * a->head_dim) * KV_PAGE_TOKENS * element;
}

/* ---- Filling it. */

static inline void append_ids(catalogue *c, int p, const json_t *ids) {
    int vocab = engine_arch(c->plain.e)->vocab;
    for (size_t i = 0; i < json_array_size(ids) && c->n_tokens[p] < LONGEST_PROMPT; i++)
        c->tokens[p][c->n_tokens[p]++] = (int32_t)json_integer_value(json_array_get(ids, i)) % vocab;
}

static inline void catalogue_fill_prompts(catalogue *c) {
    static const size_t stem_lengths[] = {1, 63, 64, 65, 128, 150, 150, LONGEST_PROMPT};
    json_t *lines = load_lines("tests/golden/rollout_greedy.jsonl");
    for (int p = 0; p < 8; p++) { /* from the fifth on after two other conversations */
        for (size_t i = 20; p >= 4 && i < 22; i++) {
            append_ids(c, p, json_object_get(json_array_get(lines, i), "prompt"));
            append_ids(c, p, json_object_get(json_array_get(lines, i), "tokens"));
        }
        append_ids(c, p, json_object_get(json_array_get(lines, (size_t)p), "prompt"));
    }
    json_decref(lines);
    for (int p = 8; p < N_PROMPTS; p++) {
        uint32_t x = 12345;
        c->n_tokens[p] = stem_lengths[p - 8];
        for (size_t i = 0; i < c->n_tokens[p]; i++) {
            x = x * 1664525u + 1013904223u;
            if (p == 14 && i == 140) x++; /* a branch of the stem */
            c->tokens[p][i] = (int32_t)(x >> 8) % 990;
        }
    }
}

static inline void catalogue_fill_samplings(catalogue *c) {
    for (int i = 0; i < 64; i++) c->stop_tokens[i] = 15 * i;
    bool calculator = engine_has_calculator(c->plain.e);
    rollout_sampling s = rollout_sampling_defaults(), *to = c->samplings;
    s.calculator = calculator;
    s.model_logprobs = true;
    for (int i = 0; i < N_SAMPLINGS; i++) to[i] = s;
    to[0].max_tokens = 40, to[0].top_k = 50;
    to[1].max_tokens = 96, to[1].temperature = 0; /* calls the calculator, answers, stops */
    to[2].max_tokens = 30, to[2].top_p = 0.9, to[2].top_k = 20, to[2].kept = true, to[2].temperature = 0.9;
    to[3].max_tokens = 90, to[3].temperature = 2, to[3].min_p = 0.01, to[3].has_stop_tokens = true;
    to[4].max_tokens = LONGEST_COMPLETION, to[4].min_tokens = 5, to[4].temperature = 5;
    to[4].has_stop_tokens = true, to[4].stop_tokens = c->stop_tokens, to[4].n_stop_tokens = 64;
    to[5].max_tokens = 1;
    to[6].max_tokens = 64, to[6].temperature = 1.3, to[6].logprobs = to[6].model_logprobs = false;
    to[8].max_tokens = 50, to[8].temperature = 1.5, to[8].entropy = true, to[8].min_tokens = 3;
    static const stop_string strings[] = {{"2", 1}, {" is", 3}, {"<|output_end|>", 14}};
    to[8].stop_strings = strings, to[8].n_stop_strings = 3;
    to[9].max_tokens = 20, to[9].top_k = 9, to[9].entropy = true, to[9].logprobs = false;
    to[7].max_tokens = 66, to[7].min_tokens = 20, to[7].kept = true, to[7].top_k = 5, to[7].temperature = 3;
}

static inline void catalogue_open(catalogue *c) {
    if (c->plain.e) return;
    c->plain = fixture_open(c->model, catalogue_plain_options(c));
    catalogue_fill_prompts(c);
    catalogue_fill_samplings(c);
}

static inline void catalogue_close(catalogue *c) {
    for (int p = 0; p < N_PROMPTS; p++) {
        for (int s = 0; s < N_SAMPLINGS; s++) {
            for (int i = 0; i < N_INDICES; i++) {
                if (!c->samples[p][s][i]) continue;
                outcome o = {.samples = c->samples[p][s][i], .n = 1};
                outcome_free(&o, 1);
            }
        }
        for (int s = 0; s < N_SCORINGS; s++) {
            score_copy *k = &c->scores[p][s];
            free(k->logprobs), free(k->top_logprobs), free(k->next_logprobs);
            free(k->top_ids), free(k->next_ids);
        }
    }
    fixture_close(&c->plain);
}

/* ---- What must come. */

/* Prompt `p`, without sample and prefix. */
static inline rollout_prompt catalogue_prompt(const catalogue *c, int p) {
    bool has_id = p % 2;
    return (rollout_prompt){.tokens = c->tokens[p],
                            .n_tokens = c->n_tokens[p],
                            .id = has_id ? "id" : NULL,
                            .n_id = has_id ? 2 : 0,
                            .seed = 42 + ((uint64_t)p << 33)};
}

/* Sample `index` of prompt p under sampling s, whole.  Borrowed. */
static inline const sample *catalogue_sample(catalogue *c, int p, int s, uint32_t index) {
    sample **at = &c->samples[p][s][index];
    if (*at) return *at;
    rollout_prompt prompt = catalogue_prompt(c, p);
    prompt.has_sample = true;
    prompt.sample = index;
    rollout_spec spec = {.prompts = &prompt, .n_prompts = 1, .n = 1, .sampling = c->samplings[s]};
    *at = outcome_of(c->plain.e, &spec).samples;
    return *at;
}

static inline void copy_score(void *context, size_t sequence, const score_result *s) {
    score_copy *to = context;
    size_t top = (size_t)s->top;
    assert_int_equal(sequence, 0);
    *to = (score_copy){.n = s->n, .top = s->top};
    to->logprobs = copy_of(s->logprobs, s->n * sizeof(float));
    to->top_ids = copy_of(s->top_ids, s->n * top * sizeof(int32_t));
    to->top_logprobs = copy_of(s->top_logprobs, s->n * top * sizeof(float));
    to->next_ids = copy_of(s->next_ids, top * sizeof(int32_t));
    to->next_logprobs = copy_of(s->next_logprobs, top * sizeof(float));
}
static inline void ignore_done(void *context, const weights_label *w) { (void)context, (void)w; }

/* Prompt p under scoring s.  Borrowed. */
static inline const score_copy *catalogue_score(catalogue *c, int p, int s) {
    score_copy *to = &c->scores[p][s];
    if (to->n > 0) return to;
    const int32_t *ids = c->tokens[p];
    score_spec spec = {.sequences = &ids,
                       .lengths = &c->n_tokens[p],
                       .n_sequences = 1,
                       .top = scorings[s].top,
                       .temperature = scorings[s].temperature,
                       .context = to,
                       .scored = copy_score,
                       .done = ignore_done,
                       .failed = on_scores_failed};
    cop_error err;
    if (engine_submit_score(c->plain.e, &spec, NULL, &err) != COP_OK) fail_msg("%s", err.message);
    run_all(c->plain.e);
    assert_int_equal(to->n, c->n_tokens[p]);
    return to;
}

#endif
