/* Opening a model and running rollouts to their end, for the engine's tests. */
#ifndef COP_ENGINE_FIXTURE_H
#define COP_ENGINE_FIXTURE_H

#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "engine/engine.h"

typedef struct fixture {
    tokenizer *tok;
    engine *e;
} fixture;

static inline fixture fixture_open(const char *model, engine_options o) {
    char path[256];
    snprintf(path, sizeof path, "tests/models/%s", model);
    fixture f = {0};
    cop_error err;
    checkpoint *c;
    checkpoint_options options = checkpoint_defaults();
    if (checkpoint_open(&c, path, &options, &err) != COP_OK) fail_msg("%s", err.message);
    if (tokenizer_open(&f.tok, path, &err) != COP_OK) fail_msg("%s", err.message);
    if (engine_open(&f.e, c, f.tok, &o, &err) != COP_OK) fail_msg("%s", err.message);
    checkpoint_close(c);
    return f;
}

static inline void fixture_close(fixture *f) {
    engine_close(f->e);
    tokenizer_close(f->tok);
}

/* A sample, copied out of its event. */
typedef struct sample {
    int n, n_calls, stop;
    uint32_t prompt, index;
    sample_finish finish;
    int32_t *tokens;
    uint8_t *mask;
    float *logprobs, *model_logprobs, *entropy;
    char *stop_string; /* NUL-terminated; NULL: none */
    int32_t *kept_ids;
    uint32_t *kept_offsets;
    tool_call *calls;
    weights_run *runs;
    int n_runs;
} sample;

typedef struct outcome {
    sample *samples; /* [prompt * n + index], in any order of arrival */
    uint32_t n;      /* of each prompt */
    int n_samples, n_done, n_failed;
    rollout_totals totals;
    cop_error error;
} outcome;

static inline void *copy_of(const void *p, size_t bytes) {
    void *copy = malloc(bytes + 1);
    if (p) memcpy(copy, p, bytes);
    return copy;
}

static inline void on_sample(void *context, const sample_result *s) {
    outcome *o = context;
    size_t n = (size_t)s->n_tokens;
    sample *to = &o->samples[s->prompt * o->n + (o->n == 1 ? 0 : s->sample)];
    assert_null(to->tokens);                             /* once only */
    assert_int_equal(s->n_weights > 0, s->n_tokens > 0); /* runs cover the tokens */
    for (int i = 0; i < s->n_weights; i++) {
        assert_true(s->weights[i].start < s->n_tokens);
        assert_true(i == 0 ? s->weights[0].start == 0 : s->weights[i].start > s->weights[i - 1].start);
    }
    *to = (sample){.n = s->n_tokens,
                   .n_calls = s->n_tool_calls,
                   .stop = s->stop,
                   .prompt = s->prompt,
                   .index = s->sample,
                   .finish = s->finish};
    to->tokens = copy_of(s->tokens, n * 4);
    to->mask = copy_of(s->mask, n);
    to->logprobs = copy_of(s->logprobs, n * 4);
    to->model_logprobs = copy_of(s->model_logprobs, n * 4);
    to->entropy = copy_of(s->entropy, n * 4);
    if (s->stop_string.bytes) {
        to->stop_string = copy_of(s->stop_string.bytes, s->stop_string.n);
        to->stop_string[s->stop_string.n] = '\0';
    }
    to->calls = copy_of(s->tool_calls, (size_t)s->n_tool_calls * sizeof *to->calls);
    to->runs = copy_of(s->weights, (size_t)s->n_weights * sizeof *to->runs);
    to->n_runs = s->n_weights;
    if (s->kept_offsets) {
        to->kept_offsets = copy_of(s->kept_offsets, (n + 1) * 4);
        to->kept_ids = copy_of(s->kept_ids, s->kept_offsets[n] * 4);
    }
    o->n_samples++;
}
static inline void on_done(void *context, const rollout_totals *t) {
    ((outcome *)context)->n_done++;
    ((outcome *)context)->totals = *t;
}
static inline void on_failed(void *context, const cop_error *e) {
    ((outcome *)context)->n_failed++;
    ((outcome *)context)->error = *e;
}

static inline void outcome_start(outcome *o, engine *e, rollout_spec *spec, engine_job **job) {
    *o = (outcome){.n = spec->n, .samples = calloc(spec->n_prompts * spec->n, sizeof(sample))};
    spec->events = (rollout_events){o, on_sample, on_done, on_failed};
    cop_error err;
    if (engine_submit(e, spec, job, &err) != COP_OK) fail_msg("%s: %s", err.key, err.message);
}

static inline void run_all(engine *e) {
    for (long n = 0; engine_step(e); n++) {
        if (n > 200000) fail_msg("the engine does not come to an end");
    }
}

static inline outcome outcome_of(engine *e, rollout_spec *spec) {
    outcome *o = malloc(sizeof *o); /* events hold its address until the rollout is over */
    outcome_start(o, e, spec, NULL);
    run_all(e);
    if (o->n_failed) fail_msg("%s", o->error.message);
    assert_int_equal(o->n_done, 1);
    assert_int_equal(o->n_samples, spec->n_prompts * spec->n);
    outcome result = *o;
    free(o);
    return result;
}

static inline void outcome_free(outcome *o, size_t n_prompts) {
    for (size_t i = 0; i < n_prompts * o->n; i++) {
        sample *s = &o->samples[i];
        free(s->tokens), free(s->mask), free(s->logprobs), free(s->model_logprobs), free(s->calls);
        free(s->entropy), free(s->stop_string);
        free(s->kept_ids), free(s->kept_offsets), free(s->runs);
    }
    free(o->samples);
}

/* Bit for bit: sample `b` from `skip` on is the whole of sample `a`. */
static inline void assert_same_from(const sample *a, const sample *b, int skip, const char *what) {
    if (a->n != b->n - skip) fail_msg("%s: %d tokens, not %d", what, a->n, b->n - skip);
    size_t n = (size_t)a->n;
    for (int i = 0; i < a->n; i++) {
        if (a->tokens[i] != b->tokens[skip + i])
            fail_msg("%s: token %d is %d, not %d", what, i, a->tokens[i], b->tokens[skip + i]);
        if (memcmp(&a->logprobs[i], &b->logprobs[skip + i], 4))
            fail_msg("%s: logprob %d is %.9g, not %.9g", what, i, a->logprobs[i], b->logprobs[skip + i]);
        if (memcmp(&a->model_logprobs[i], &b->model_logprobs[skip + i], 4))
            fail_msg("%s: model logprob %d is %.9g, not %.9g", what, i, a->model_logprobs[i],
                     b->model_logprobs[skip + i]);
    }
    assert_memory_equal(a->mask, b->mask + skip, n);
    assert_int_equal(a->finish, b->finish);
    assert_int_equal(a->stop, b->stop);
    assert_string_equal(a->stop_string ? a->stop_string : "", b->stop_string ? b->stop_string : "");
}
#define assert_same(a, b, what) assert_same_from(a, b, 0, what)

/* ---- Scoring. */

/* What scoring one sequence told, at most 512 tokens of it; the next ids and log-probabilities if top > 0. */
typedef struct scores {
    float logprobs[512];
    int32_t next_ids[5];
    float next_logprobs[5];
    int top, n_done;
} scores;

static inline void on_scored(void *context, size_t sequence, const score_result *s) {
    scores *to = context;
    (void)sequence;
    assert_true(s->n <= 512);
    memcpy(to->logprobs, s->logprobs, s->n * sizeof(float));
    if (to->top == 0) return;
    memcpy(to->next_ids, s->next_ids, (size_t)to->top * sizeof *to->next_ids);
    memcpy(to->next_logprobs, s->next_logprobs, (size_t)to->top * sizeof *to->next_logprobs);
}
static inline void on_scores_done(void *context, const weights_label *w) {
    (void)w;
    ((scores *)context)->n_done++;
}
static inline void on_scores_failed(void *context, const cop_error *e) {
    (void)context;
    fail_msg("%s", e->message);
}

/* top: 0 to 5. */
static inline scores scores_of(engine *e, const int32_t *ids, size_t n, int top, double temperature) {
    scores s = {.top = top};
    score_spec spec = {.sequences = &ids,
                       .lengths = &n,
                       .n_sequences = 1,
                       .top = top,
                       .temperature = temperature,
                       .context = &s,
                       .scored = on_scored,
                       .done = on_scores_done,
                       .failed = on_scores_failed};
    cop_error err;
    if (engine_submit_score(e, &spec, NULL, &err) != COP_OK) fail_msg("%s", err.message);
    run_all(e);
    assert_int_equal(s.n_done, 1);
    return s;
}

/* ---- Reference files. */

static inline json_t *load_lines(const char *path) {
    FILE *f = fopen(path, "r");
    if (!f) fail_msg("could not open %s: run from the root of the tree", path);
    json_t *all = json_array(), *line;
    while ((line = json_loadf(f, JSON_DISABLE_EOF_CHECK | JSON_ALLOW_NUL, NULL)))
        json_array_append_new(all, line);
    fclose(f);
    assert_true(json_array_size(all) > 0);
    return all;
}

/* An array of whole numbers as ids; free it. */
static inline int32_t *ids_of(const json_t *array, size_t *n) {
    *n = json_array_size(array);
    int32_t *ids = malloc((*n + 1) * sizeof *ids);
    for (size_t i = 0; i < *n; i++) ids[i] = (int32_t)json_integer_value(json_array_get(array, i));
    return ids;
}

#endif
