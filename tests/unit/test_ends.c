/* How samples end, seen from the engine: stop strings, enough of them, a model that computes NaN; and the
 * entropy that comes with them. */
#include "engine_fixture.h"

#include <math.h>

#include "engine/engine_internal.h"

static const int32_t question[] = {1015, 1016, 431, 261, 32, 55, 42, 56, 63, 1017, 1018}; /* What is 7*8? */
enum { N_QUESTION = sizeof question / sizeof question[0], VOCAB = 1024 };

static fixture open_model(int max_rows, size_t kv_memory) {
    engine_options o = engine_defaults();
    o.n_threads = 1;
    o.max_rows = max_rows;
    o.kv_memory = kv_memory;
    return fixture_open("calc-d4", o);
}

/* One prompt, everything per token asked for, no stop tokens, hot enough for samples to differ. */
static rollout_spec spec_of(rollout_prompt *p, uint32_t n, int max_tokens) {
    *p = (rollout_prompt){.tokens = question, .n_tokens = N_QUESTION, .seed = 5};
    rollout_sampling s = rollout_sampling_defaults();
    s.max_tokens = max_tokens;
    s.temperature = 1.5;
    s.has_stop_tokens = s.model_logprobs = s.entropy = true;
    return (rollout_spec){.prompts = p, .n_prompts = 1, .n = n, .sampling = s};
}

static rollout_prompt continuing(const sample *s, size_t cut) {
    return (rollout_prompt){.tokens = question,
                            .n_tokens = N_QUESTION,
                            .seed = 5,
                            .has_sample = true,
                            .sample = s->index,
                            .prefix = s->tokens,
                            .n_prefix = cut};
}

/* ---- Stop strings. */

static size_t find(const char *text, const char *string) { return (size_t)(strstr(text, string) - text); }

/* How many of the tokens it takes for `n_bytes` of their text. */
static int tokens_for(const tokenizer *t, const sample *s, size_t n_bytes) {
    size_t sum = 0, n;
    for (int i = 0; i < s->n; i++) {
        tokenizer_bytes(t, s->tokens[i], &n);
        sum += n;
        if (sum >= n_bytes) return i + 1;
    }
    fail_msg("the sample has %zu bytes, not %zu", sum, n_bytes);
    return 0;
}

/* Any piece of a sample's text ends it where the piece first ends; whatever cut of it is continued too. */
static void a_stop_string_ends_a_sample_wherever_it_is_cut(void **state) {
    (void)state;
    fixture f = open_model(16, 8 << 20);
    rollout_prompt p;
    cop_error err;
    rollout_spec spec = spec_of(&p, 3, 24);
    spec.sampling.calculator = true;
    outcome whole = outcome_of(f.e, &spec);
    for (int i = 0; i < 3; i++) {
        const sample *s = &whole.samples[i];
        char *text;
        size_t n_text;
        assert_int_equal(tokenizer_decode(f.tok, s->tokens, (size_t)s->n, &text, &n_text, &err), COP_OK);
        for (size_t at = 0; at + 6 <= n_text; at += 5) {
            char piece[7] = {0};
            memcpy(piece, text + at, 6);
            if (strlen(piece) < 6) continue;
            int n_want = tokens_for(f.tok, s, find(text, piece) + 6);
            const stop_string strings[] = {{"~never~", 7}, {piece, 6}};
            spec = spec_of(&p, 3, 24);
            spec.sampling.calculator = true;
            spec.sampling.stop_strings = strings;
            spec.sampling.n_stop_strings = 2;
            outcome got = outcome_of(f.e, &spec);
            const sample *ended = &got.samples[i];
            assert_int_equal(ended->n, n_want);
            assert_int_equal(ended->finish, FINISH_STOP);
            assert_int_equal(ended->stop, -1);
            assert_string_equal(ended->stop_string, piece);
            assert_memory_equal(ended->tokens, s->tokens, (size_t)n_want * 4);
            assert_memory_equal(ended->logprobs, s->logprobs, (size_t)n_want * 4);
            for (int cut = 0; cut < n_want; cut += 3) {
                p = continuing(ended, (size_t)cut);
                spec.n = 1;
                outcome rest = outcome_of(f.e, &spec);
                assert_same_from(&rest.samples[0], ended, cut, piece);
                outcome_free(&rest, 1);
            }
            p = continuing(ended, (size_t)n_want);
            spec.n = 1;
            assert_int_equal(engine_submit(f.e, &spec, NULL, &err), COP_EINVAL);
            assert_string_equal(err.key, "prompts[0].prefix");
            outcome_free(&got, 1);
        }
        mem_free(text);
    }
    outcome_free(&whole, 1);
    fixture_close(&f);
}

static void stop_strings_need_a_tokenizer(void **state) {
    (void)state;
    cop_error err;
    engine *e;
    checkpoint *c;
    checkpoint_options co = checkpoint_defaults();
    engine_options o = engine_defaults();
    o.kv_memory = 8 << 20;
    assert_int_equal(checkpoint_open(&c, "tests/models/calc-d4", &co, &err), COP_OK);
    assert_int_equal(engine_open(&e, c, NULL, &o, &err), COP_OK);
    checkpoint_close(c);
    rollout_prompt p;
    rollout_spec spec = spec_of(&p, 1, 4);
    const stop_string x = {"x", 1};
    spec.sampling.stop_strings = &x;
    spec.sampling.n_stop_strings = 1;
    assert_int_equal(engine_submit(e, &spec, NULL, &err), COP_EUNSUPPORTED);
    assert_string_equal(err.key, "stop");
    engine_close(e);
}

/* ---- Enough. */

static int count_finish(const outcome *o, sample_finish finish, uint32_t at) {
    int n = 0;
    for (uint32_t i = at * o->n; i < (at + 1) * o->n; i++) n += o->samples[i].finish == finish;
    return n;
}

/* Every sample of a prompt as far as it came is the one of an undisturbed rollout. */
static void expect_heads(const outcome *got, const outcome *whole, uint32_t at) {
    for (uint32_t i = at * got->n; i < (at + 1) * got->n; i++) {
        const sample *a = &got->samples[i], *b = &whole->samples[i];
        assert_true(a->n <= b->n);
        assert_memory_equal(a->tokens, b->tokens, (size_t)a->n * 4);
        assert_memory_equal(a->logprobs, b->logprobs, (size_t)a->n * 4);
        assert_memory_equal(a->entropy, b->entropy, (size_t)a->n * 4);
        if (a->finish != FINISH_CANCELLED) assert_same(a, b, "a sample that ended");
        if (a->kept_offsets) assert_int_equal(a->kept_offsets[a->n], b->kept_offsets[a->n]);
    }
}

static void once_enough_have_ended_the_others_are_cancelled(void **state) {
    (void)state;
    static const struct {
        int max_rows;
        size_t kv_memory; /* calc-d4 has pages of 64 KiB */
        uint32_t enough;
    } cases[] = {{64, 8 << 20, 3}, {64, 8 << 20, 1}, {8, 8 << 20, 20}, {64, 4 * 65536, 5}, {3, 2 * 65536, 2}};
    enum { N = 40 };
    int32_t stops[VOCAB / 8];
    for (int i = 0; i < VOCAB / 8; i++) stops[i] = 8 * i + 1;
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        fixture f = open_model(cases[c].max_rows, cases[c].kv_memory);
        rollout_prompt p[3];
        rollout_spec spec = spec_of(&p[0], N, 30);
        spec.sampling.stop_tokens = stops;
        spec.sampling.n_stop_tokens = c % 2 ? 0 : VOCAB / 8; /* 0: all end by length */
        spec.sampling.kept = true;
        spec.sampling.top_k = 200;
        spec.sampling.temperature = 5;
        spec.prompts = p;
        spec.n_prompts = 3;
        for (int i = 1; i < 3; i++) p[i] = p[0], p[i].id = i == 1 ? "b" : "c", p[i].n_id = 1;
        outcome whole = outcome_of(f.e, &spec);
        p[0].enough = cases[c].enough;
        p[2].enough = N + 1; /* more than there are: no effect */
        outcome got = outcome_of(f.e, &spec);
        assert_int_equal(count_finish(&got, FINISH_CANCELLED, 0), N - (int)cases[c].enough);
        int n_empty = 0;
        for (int i = 0; i < N; i++) n_empty += got.samples[i].n == 0;
        assert_true(cases[c].max_rows >= N || n_empty > 0); /* some never started */
        for (uint32_t i = 0; i < 3; i++) expect_heads(&got, &whole, i);
        for (uint32_t i = 1; i < 3; i++) assert_int_equal(count_finish(&got, FINISH_CANCELLED, i), 0);
        engine_status s;
        engine_read_status(f.e, &s);
        assert_int_equal(s.pages_used + s.rows + s.queued, 0);
        outcome_free(&whole, 3);
        outcome_free(&got, 3);
        fixture_close(&f);
    }
}

/* ---- Entropy. */

typedef struct distribution {
    int32_t ids[VOCAB];
    float logprobs[VOCAB];
} distribution;

static void on_next(void *context, size_t which, const score_result *s) {
    (void)which;
    distribution *d = context;
    memcpy(d->ids, s->next_ids, sizeof d->ids);
    memcpy(d->logprobs, s->next_logprobs, sizeof d->logprobs);
}
static void on_next_done(void *context, const weights_label *w) { (void)context, (void)w; }

/* All log-probabilities, best first, of what comes after the tokens. */
static void next_of(distribution *d, engine *e, const int32_t *ids, size_t n, double temperature) {
    score_spec spec = {.sequences = &ids,
                       .lengths = &n,
                       .n_sequences = 1,
                       .top = VOCAB,
                       .temperature = temperature,
                       .context = d,
                       .scored = on_next,
                       .done = on_next_done,
                       .failed = on_scores_failed};
    cop_error err;
    assert_int_equal(engine_submit_score(e, &spec, NULL, &err), COP_OK);
    run_all(e);
}

static void the_entropy_is_that_of_the_distribution_drawn_from(void **state) {
    (void)state;
    fixture f = open_model(16, 8 << 20);
    for (int top_k = 0; top_k <= 40; top_k += 40) {
        rollout_prompt p;
        rollout_spec spec = spec_of(&p, 2, 16);
        spec.sampling.calculator = true;
        spec.sampling.top_k = top_k;
        outcome got = outcome_of(f.e, &spec);
        for (int i = 0; i < 2; i++) {
            const sample *s = &got.samples[i];
            int32_t ids[N_QUESTION + 16];
            memcpy(ids, question, sizeof question);
            memcpy(ids + N_QUESTION, s->tokens, (size_t)s->n * 4);
            for (int t = 0; t < s->n; t++) {
                if (!s->mask[t]) assert_true(s->entropy[t] == 1.0f);
                if (!s->mask[t]) continue;
                distribution d;
                next_of(&d, f.e, ids, (size_t)(N_QUESTION + t), 1.5);
                double total = 0, entropy = 0;
                int n = top_k ? top_k : VOCAB;
                for (int j = 0; j < n; j++) total += exp((double)d.logprobs[j]);
                for (int j = 0; j < n; j++) {
                    double log_p = (double)d.logprobs[j] - log(total);
                    entropy -= exp(log_p) * log_p;
                }
                if (fabs(s->entropy[t] - entropy) > 1e-5)
                    fail_msg("top_k %d, token %d: entropy %.9g, not %.9g", top_k, t, s->entropy[t], entropy);
            }
        }
        outcome_free(&got, 1);
    }
    rollout_prompt p;
    rollout_spec spec = spec_of(&p, 1, 16);
    spec.sampling.temperature = 0;
    outcome got = outcome_of(f.e, &spec);
    for (int t = 0; t < got.samples[0].n; t++) assert_true(got.samples[0].entropy[t] == 0.0f);
    outcome_free(&got, 1);
    fixture_close(&f);
}

/* ---- NaN. */

enum { POISON = 900 }; /* the embedding of this id is made NaN: what comes after it has no logits */

static void poison(engine *e) {
    float nan_row[K_MAX_HEAD_DIM * 4];
    assert_true(e->a.dim <= (int)(sizeof nan_row / sizeof nan_row[0]));
    for (int i = 0; i < e->a.dim; i++) nan_row[i] = NAN;
    k_table_pack(e->k, e->w->embed, POISON, 1, nan_row);
}

typedef struct score_end {
    int n_scored, n_done, n_failed;
    cop_error error;
} score_end;
static void on_score(void *context, size_t which, const score_result *s) {
    (void)which, (void)s;
    ((score_end *)context)->n_scored++;
}
static void on_score_done(void *context, const weights_label *w) {
    (void)w;
    ((score_end *)context)->n_done++;
}
static void on_score_failed(void *context, const cop_error *e) {
    ((score_end *)context)->n_failed++;
    ((score_end *)context)->error = *e;
}

static void submit_score(engine *e, score_end *end, const int32_t *const *sequences, const size_t *lengths,
                         size_t n, int top) {
    *end = (score_end){0};
    score_spec spec = {.sequences = sequences,
                       .lengths = lengths,
                       .n_sequences = n,
                       .top = top,
                       .temperature = 1,
                       .context = end,
                       .scored = on_score,
                       .done = on_score_done,
                       .failed = on_score_failed};
    cop_error err;
    assert_int_equal(engine_submit_score(e, &spec, NULL, &err), COP_OK);
}

static void nan_fails_the_request_that_meets_it_alone(void **state) {
    (void)state;
    fixture f = open_model(64, 8 << 20);
    rollout_prompt good, bad, mid;
    rollout_spec good_spec = spec_of(&good, 4, 20), bad_spec = spec_of(&bad, 4, 20),
                 mid_spec = spec_of(&mid, 1, 20);
    outcome alone = outcome_of(f.e, &good_spec);
    poison(f.e);

    const int32_t bad_prompt[] = {1015, POISON, 40}, prefix[] = {300, 301, POISON, 302};
    bad.tokens = bad_prompt;
    bad.n_tokens = 3;
    mid.has_sample = true;
    mid.prefix = prefix;
    mid.n_prefix = 4;
    const int32_t *const bad_sequences[] = {question, bad_prompt}, *const good_sequences[] = {question,
                                                                                              question};
    const size_t bad_lengths[] = {N_QUESTION, 3}, good_lengths[] = {N_QUESTION, 5},
                 last_lengths[] = {N_QUESTION, 2};
    outcome got, failed, failed_mid;
    score_end good_score, bad_score, last_score, passed_score;
    outcome_start(&failed, f.e, &bad_spec, NULL);
    outcome_start(&got, f.e, &good_spec, NULL);
    outcome_start(&failed_mid, f.e, &mid_spec, NULL);
    submit_score(f.e, &bad_score, bad_sequences, bad_lengths, 2, 0);
    submit_score(f.e, &good_score, good_sequences, good_lengths, 2, 3);
    submit_score(f.e, &last_score, bad_sequences, last_lengths, 2, 3); /* only what follows it is asked for */
    submit_score(f.e, &passed_score, bad_sequences, last_lengths, 2, 0); /* nothing after it is asked for */
    run_all(f.e);

    assert_int_equal(failed.n_failed, 1);
    assert_int_equal(failed.n_samples + failed.n_done, 0);
    assert_int_equal(failed.error.status, COP_EMODEL);
    assert_int_equal(failed_mid.n_failed, 1);
    assert_int_equal(failed_mid.error.status, COP_EMODEL);
    assert_int_equal(bad_score.n_failed, 1);
    assert_int_equal(bad_score.error.status, COP_EMODEL);
    assert_int_equal(last_score.n_failed, 1);
    assert_int_equal(passed_score.n_done, 1);
    assert_int_equal(good_score.n_done, 1);
    assert_int_equal(good_score.n_scored, 2);
    assert_int_equal(got.n_done, 1);
    for (int i = 0; i < 4; i++) assert_same(&got.samples[i], &alone.samples[i], "beside NaN");
    engine_status s;
    engine_read_status(f.e, &s);
    assert_int_equal(s.pages_used + s.rows + s.queued, 0);
    outcome_free(&alone, 1);
    outcome_free(&got, 1);
    outcome_free(&failed, 1);
    outcome_free(&failed_mid, 1);
    fixture_close(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_stop_string_ends_a_sample_wherever_it_is_cut),
        cmocka_unit_test(stop_strings_need_a_tokenizer),
        cmocka_unit_test(once_enough_have_ended_the_others_are_cancelled),
        cmocka_unit_test(the_entropy_is_that_of_the_distribution_drawn_from),
        cmocka_unit_test(nan_fails_the_request_that_meets_it_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
