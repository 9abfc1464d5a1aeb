/* The engine against what nanochat's own code and an independent oracle answer (tests/golden/README.md). */
#include "engine_fixture.h"

#include <math.h>

static engine_options options(precision p) {
    engine_options o = engine_defaults();
    o.profile = p;
    o.n_threads = 1;
    o.kv_memory = 64 << 20;
    return o;
}

/* ---- score.jsonl of each generation. */

static void score_model(const char *model) {
    fixture f = fixture_open(model, options(PRECISION_F32));
    char path[256];
    snprintf(path, sizeof path, "tests/models/%s/score.jsonl", model);
    json_t *lines = load_lines(path), *line;
    size_t i;
    float worst = 0;
    json_array_foreach(lines, i, line) {
        size_t n;
        int32_t *ids = ids_of(json_object_get(line, "tokens"), &n);
        scores s = scores_of(f.e, ids, n, 5, 1.0);
        assert_true(s.logprobs[0] == 1.0f);
        json_t *want = json_object_get(line, "logprobs");
        assert_int_equal(json_array_size(want), n - 1);
        for (size_t t = 1; t < n; t++) {
            float gap = fabsf(s.logprobs[t] - (float)json_number_value(json_array_get(want, t - 1)));
            worst = gap > worst ? gap : worst;
            if (!(gap <= 3e-4f))
                fail_msg("%s line %zu token %zu: %.6f is %.6f off", model, i, t, s.logprobs[t], gap);
        }
        for (size_t t = 0; t < 5; t++) {
            assert_int_equal(s.next_ids[t],
                             json_integer_value(json_array_get(json_object_get(line, "top_ids"), t)));
            float gap = (float)(json_number_value(json_array_get(json_object_get(line, "top_logits"), 0)) -
                                json_number_value(json_array_get(json_object_get(line, "top_logits"), t)));
            if (fabsf(s.next_logprobs[0] - s.next_logprobs[t] - gap) > 3e-4f)
                fail_msg("%s line %zu: top logit %zu", model, i, t);
        }
        free(ids);
    }
    print_message("%s: off by at most %.2g\n", model, worst);
    json_decref(lines);
    fixture_close(&f);
}

static void every_generation_scores_as_its_own_code(void **state) {
    (void)state;
    const char *models[] = {"gen-A", "gen-Apad", "gen-B", "gen-C", "gen-D", "gen-E", "gen-F"};
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++) score_model(models[i]);
}

/* ---- Rollouts. */

static outcome one_rollout(fixture *f, const json_t *line, rollout_sampling s, rollout_prompt p) {
    size_t n;
    int32_t *prompt = ids_of(json_object_get(line, "prompt"), &n);
    p.tokens = prompt;
    p.n_tokens = n;
    s.logprobs = s.model_logprobs = true;
    s.calculator = true;
    rollout_spec spec = {.prompts = &p, .n_prompts = 1, .n = 1, .sampling = s};
    outcome o = outcome_of(f->e, &spec);
    free(prompt);
    return o;
}

static bool tokens_equal(const sample *s, const json_t *line) {
    const json_t *tokens = json_object_get(line, "tokens"), *mask = json_object_get(line, "mask");
    if ((size_t)s->n != json_array_size(tokens)) return false;
    for (int i = 0; i < s->n; i++) {
        if (s->tokens[i] != json_integer_value(json_array_get(tokens, (size_t)i))) return false;
        if (s->mask[i] != json_integer_value(json_array_get(mask, (size_t)i))) return false;
    }
    return true;
}

/* The greatest gap to the reference's log-probabilities of every token, as `score` sees the whole sequence.
 */
static void gaps_of(fixture *f, const json_t *line, double *sampled, size_t *n_sampled, double *all,
                    size_t *n_all, float *worst) {
    size_t n, n_tokens;
    int32_t *prompt = ids_of(json_object_get(line, "prompt"), &n),
            *tokens = ids_of(json_object_get(line, "tokens"), &n_tokens);
    int32_t *whole = malloc((n + n_tokens) * sizeof *whole);
    memcpy(whole, prompt, n * sizeof *whole);
    memcpy(whole + n, tokens, n_tokens * sizeof *whole);
    size_t length = n + n_tokens;
    scores s = scores_of(f->e, whole, length, 5, 1.0);
    const json_t *want = json_object_get(line, "logprobs"), *mask = json_object_get(line, "mask");
    assert_int_equal(json_array_size(want), length - 1);
    for (size_t t = 1; t < length; t++) {
        float gap = fabsf(s.logprobs[t] - (float)json_number_value(json_array_get(want, t - 1)));
        *worst = gap > *worst ? gap : *worst;
        *all += gap;
        ++*n_all;
        if (t < n || !json_integer_value(json_array_get(mask, t - n))) continue;
        *sampled += gap;
        ++*n_sampled;
    }
    free(prompt), free(tokens), free(whole);
}

static void greedy(precision p) {
    fixture f = fixture_open("calc-d4", options(p));
    json_t *lines = load_lines("tests/golden/rollout_greedy.jsonl"), *line;
    double sampled = 0, all = 0;
    size_t i, n_sampled = 0, n_all = 0, n_checked = 0;
    float worst = 0;
    json_array_foreach(lines, i, line) {
        rollout_sampling s = rollout_sampling_defaults();
        s.temperature = 0;
        s.max_tokens = 96;
        if (p == PRECISION_F32 || json_number_value(json_object_get(line, "min_margin")) > 0.01) {
            outcome o = one_rollout(&f, line, s, (rollout_prompt){0});
            if (!tokens_equal(o.samples, line)) fail_msg("line %zu: other tokens or another mask", i);
            const char *finish = json_string_value(json_object_get(line, "finish"));
            assert_string_equal(o.samples->finish == FINISH_STOP ? "stop" : "length", finish);
            outcome_free(&o, 1);
            n_checked++;
        }
        gaps_of(&f, line, &sampled, &n_sampled, &all, &n_all, &worst);
    }
    print_message("%s: %zu rollouts; log-probs off by %.2g (sampled), %.2g (all), %.2g at most\n",
                  engine_numerics(f.e), n_checked, sampled / (double)n_sampled, all / (double)n_all, worst);
    assert_true(n_checked > 40);
    if (p == PRECISION_F32) {
        assert_true(worst <= 3e-4f);
    } else {
        assert_true(sampled / (double)n_sampled <= 1e-4);
        assert_true(all / (double)n_all <= 0.03);
    }
    json_decref(lines);
    fixture_close(&f);
}

static void greedy_rollouts_are_nanochats_in_f32(void **state) {
    (void)state;
    greedy(PRECISION_F32);
}

static void greedy_rollouts_are_nanochats_in_bf16(void **state) {
    (void)state;
    greedy(PRECISION_BF16);
}

static void sampled_rollouts_are_the_oracles(void **state) {
    (void)state;
    fixture f = fixture_open("calc-d4-early", options(PRECISION_F32));
    json_t *lines = load_lines("tests/golden/rollout_sampled.jsonl"), *line;
    size_t i, n_checked = 0;
    json_array_foreach(lines, i, line) {
        if (json_number_value(json_object_get(line, "min_margin")) <= 0.001) continue;
        rollout_sampling s = rollout_sampling_defaults();
        s.temperature = json_number_value(json_object_get(line, "temperature"));
        s.top_k = (int)json_integer_value(json_object_get(line, "top_k"));
        s.top_p = json_number_value(json_object_get(line, "top_p"));
        s.min_p = json_number_value(json_object_get(line, "min_p"));
        s.max_tokens = (int)json_integer_value(json_object_get(line, "max_tokens"));
        const char *id = json_string_value(json_object_get(line, "id"));
        rollout_prompt p = {.id = id,
                            .n_id = id ? strlen(id) : 0,
                            .has_sample = true,
                            .seed = strtoull(json_string_value(json_object_get(line, "seed")), NULL, 10),
                            .sample = (uint32_t)json_integer_value(json_object_get(line, "sample"))};
        outcome o = one_rollout(&f, line, s, p);
        if (!tokens_equal(o.samples, line)) fail_msg("line %zu: other tokens or another mask", i);
        assert_string_equal(o.samples->finish == FINISH_STOP ? "stop" : "length",
                            json_string_value(json_object_get(line, "finish")));
        for (int t = 0; t < o.samples->n; t++) {
            const char *keys[] = {"logprobs", "model_logprobs"};
            const float *got[] = {o.samples->logprobs, o.samples->model_logprobs};
            for (int j = 0; j < 2; j++) {
                double want = json_number_value(json_array_get(json_object_get(line, keys[j]), (size_t)t));
                if (!(fabs(got[j][t] - want) <= 3e-4))
                    fail_msg("line %zu %s %d: %.6f, not %.6f", i, keys[j], t, got[j][t], want);
            }
        }
        outcome_free(&o, 1);
        n_checked++;
    }
    print_message("%zu of %zu rollouts\n", n_checked, json_array_size(lines));
    assert_true(n_checked > 100);
    json_decref(lines);
    fixture_close(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_generation_scores_as_its_own_code),
        cmocka_unit_test(greedy_rollouts_are_nanochats_in_f32),
        cmocka_unit_test(greedy_rollouts_are_nanochats_in_bf16),
        cmocka_unit_test(sampled_rollouts_are_the_oracles),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
