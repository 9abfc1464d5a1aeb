/* What `coppice bench` stands on: random weights, the machine's peaks, rows that go on in step, timed
 * rollouts. */
#include "engine_fixture.h"
#include "kernel_test.h"

#include <math.h>

#include "engine/shape.h"
#include "engine/weights.h"
#include "kernels/cpu/cpu.h"
#include "worker/bench_run.h"

static k_ctx *open_backend(precision profile, int n_threads) {
    k_ctx *k;
    cop_error err;
    if (k_open(&k, profile, n_threads, false, &err) != COP_OK) fail_msg("%s", err.message);
    return k;
}

static arch small_arch(void) {
    arch a;
    cop_error err;
    if (shape_arch(&a, "d2", &err) != COP_OK) fail_msg("%s", err.message);
    return a;
}

static weights *random_weights(k_ctx *k, const arch *a, uint64_t seed) {
    weights *w;
    cop_error err;
    if (weights_open_random(&w, k, a, seed, &err) != COP_OK) fail_msg("%s", err.message);
    return w;
}

static bool same_matrix(const k_matrix *a, const k_matrix *b) {
    return k_matrix_bytes(a) == k_matrix_bytes(b) && !memcmp(a->data, b->data, k_matrix_bytes(a));
}

/* ---- Random weights. */

static void random_weights_are_a_function_of_the_seed(void **state) {
    (void)state;
    k_ctx *k = open_backend(PRECISION_F32, 1);
    arch a = small_arch();
    weights *one = random_weights(k, &a, 1), *again = random_weights(k, &a, 1),
            *two = random_weights(k, &a, 2);
    assert_true(same_matrix(one->lm_head, again->lm_head));
    assert_true(same_matrix(one->layers[1].mlp_out, again->layers[1].mlp_out));
    assert_false(same_matrix(one->layers[1].mlp_out, two->layers[1].mlp_out));
    assert_false(same_matrix(one->layers[0].q, one->layers[1].q)); /* each tensor has its own */
    assert_false(same_matrix(one->layers[0].k, one->layers[0].v));
    assert_string_equal(one->digest, "random-0000000000000001");
    weights_close(one);
    weights_close(again);
    weights_close(two);
    k_close(k);
}

static void random_weights_have_the_scale_that_is_said(void **state) {
    (void)state;
    k_ctx *k = open_backend(PRECISION_F32, 1);
    arch a = small_arch();
    weights *w = random_weights(k, &a, 1);
    const float *x = w->embed->data;
    double sum = 0, squares = 0;
    size_t n = (size_t)a.vocab * (size_t)a.dim;
    for (size_t i = 0; i < n; i++) {
        assert_true(fabsf(x[i]) <= 1.7321f);
        sum += (double)x[i];
        squares += (double)x[i] * (double)x[i];
    }
    assert_true(fabs(sum / (double)n) < 0.01);
    assert_true(fabs(squares / (double)n - 1) < 0.01);
    for (size_t i = 2; i < 1000; i += 2) assert_true(x[i] != x[0] && x[i] != x[i + 1]);
    weights_close(w);
    k_close(k);
}

static void random_weights_survive_every_single_allocation_failure(void **state) {
    (void)state;
    arch a = small_arch();
    a.vocab = a.rows = 64;
    bool fired = true;
    for (long n = 0; fired; n++) {
        long live = mem_live();
        k_ctx *k = open_backend(PRECISION_BF16, 1);
        weights *w;
        cop_error err;
        mem_fail_after(n);
        cop_status status = weights_open_random(&w, k, &a, 1, &err);
        fired = mem_fail_stop();
        assert_int_equal(status, fired ? COP_ENOMEM : COP_OK);
        assert_int_equal(w == NULL, fired);
        weights_close(w);
        k_close(k);
        assert_int_equal(mem_live(), live);
    }
}

static void what_does_not_fit_the_machine_is_refused_before_it_is_touched(void **state) {
    (void)state;
    k_ctx *k = open_backend(PRECISION_F32, 1);
    arch a = small_arch();
    a.vocab = a.rows = INT32_MAX; /* terabytes */
    weights *w;
    cop_error err;
    assert_int_equal(weights_open_random(&w, k, &a, 1, &err), COP_ENOMEM);
    assert_null(w);
    assert_non_null(strstr(err.message, "MiB are free"));
    k_close(k);
}

/* ---- Peaks. */

static const char *const sets[] = {"scalar", "avx2", "avx512", "avx512bf16"};
enum { N_SETS = sizeof sets / sizeof sets[0] };

static void peaks_are_measured_with_every_instruction_set(void **state) {
    (void)state;
    for (int i = 0; i < N_SETS; i++) {
        k_ctx *k = open_isa(sets[i], PRECISION_BF16, 2);
        k_peaks p;
        cop_error err;
        if (!k) continue; /* this machine lacks it */
        long live = mem_live();
        assert_int_equal(k_measure(k, &p, &err), COP_OK);
        assert_int_equal(mem_live(), live);
        assert_true(isfinite(p.bandwidth) && p.bandwidth > 1e6);
        assert_true(isfinite(p.flops) && p.flops > 1e6);
        k_close(k);
    }
}

static void measuring_reads_all_words_and_counts_what_it_burns(void **state) {
    (void)state;
    uint32_t *words = mem_alloc_aligned(CPU_PROBE_BLOCK, 1), sum = 0;
    size_t n = CPU_PROBE_BLOCK / sizeof *words;
    for (size_t i = 0; i < n; i++) sum += words[i] = (uint32_t)i * 0x9e3779b9u;
    for (int i = 0; i < N_SETS; i++) {
        k_ctx *k = open_isa(sets[i], PRECISION_BF16, 1);
        if (!k) continue;
        const cpu_probe *probe = k->ops->probe;
        float sink = 0;
        assert_true(probe->read(words, n) == sum);
        double few = probe->burn(&sink, 1600), more = probe->burn(&sink, 3200);
        assert_true(few > 0 && more == 2 * few);
        assert_true(isfinite(sink) && sink > 0);
        k_close(k);
    }
    mem_free(words);
}

static void a_measurement_without_memory_is_told(void **state) {
    (void)state;
    k_ctx *k = open_backend(PRECISION_BF16, 1);
    long live = mem_live();
    for (long n = 0; n < 2; n++) {
        k_peaks p;
        cop_error err;
        mem_fail_after(n);
        assert_int_equal(k_measure(k, &p, &err), COP_ENOMEM);
        assert_true(mem_fail_stop());
        assert_int_equal(mem_live(), live);
    }
    k_close(k);
}

/* ---- Rollouts. */

static engine_options options(bool hold) {
    engine_options o = engine_defaults();
    o.n_threads = 1;
    o.kv_memory = 8 << 20;
    o.max_rows = 16;
    o.step_tokens = 64;
    o.hold_rows = hold;
    o.no_prefix_cache = true;
    return o;
}

static int32_t prompt_tokens[150];

static bench_load load_of(int n_tokens, int n_decode, int n, bool separate) {
    for (int i = 0; i < 150; i++) prompt_tokens[i] = (i * 31 + 7) % 900;
    return (bench_load){.tokens = prompt_tokens,
                        .n_tokens = n_tokens,
                        .n_decode = n_decode,
                        .n = n,
                        .separate = separate,
                        .temperature = 1,
                        .top_k = 50};
}

/* Rows start in order; without being held, the first would be done long before the last prompt is. */
static void held_rows_decode_in_step_and_draw_the_same_tokens(void **state) {
    (void)state;
    outcome got[2];
    for (int hold = 0; hold < 2; hold++) {
        fixture f = fixture_open("calc-d4", options(hold));
        rollout_prompt prompts[4];
        load_of(1, 1, 1, false);
        for (size_t i = 0; i < 4; i++)
            prompts[i] = (rollout_prompt){.tokens = prompt_tokens, .n_tokens = 150, .seed = i};
        rollout_spec spec = {
            .prompts = prompts, .n_prompts = 4, .n = 1, .sampling = rollout_sampling_defaults()};
        spec.sampling.max_tokens = 5;
        spec.sampling.has_stop_tokens = spec.sampling.model_logprobs = true;
        outcome_start(&got[hold], f.e, &spec, NULL);
        engine_status s;
        int n_finished_early = 0;
        do {
            if (!engine_step(f.e)) break;
            engine_read_status(f.e, &s);
            if (s.queued > 0) n_finished_early = got[hold].n_samples;
        } while (true);
        assert_int_equal(n_finished_early, hold ? 0 : n_finished_early);
        assert_true(hold || n_finished_early > 0);
        assert_int_equal(got[hold].n_done, 1);
        fixture_close(&f);
    }
    for (int i = 0; i < 4; i++) assert_same(&got[0].samples[i], &got[1].samples[i], "held");
    outcome_free(&got[0], 4);
    outcome_free(&got[1], 4);
}

static void a_run_times_the_prompt_and_every_step(void **state) {
    (void)state;
    fixture f = fixture_open("calc-d4", options(true));
    for (int separate = 0; separate < 2; separate++) {
        engine_status before, after;
        bench_load l = load_of(150, 6, 4, separate);
        bench_timing t;
        cop_error err;
        engine_read_status(f.e, &before);
        if (bench_run(f.e, &l, &t, &err) != COP_OK) fail_msg("%s", err.message);
        engine_read_status(f.e, &after);
        assert_int_equal(after.sampled_tokens - before.sampled_tokens, 4 * 6);
        assert_int_equal(after.prefilled_tokens - before.prefilled_tokens, separate ? 4 * 150 : 150);
        assert_int_equal(after.pages_used, 0);
        assert_true(t.first_token > 0 && t.step > 0 && t.sample > 0);
        assert_true(t.sample <= t.decode && t.step <= t.decode);
    }
    bench_load l = load_of(150, 1, 1, false); /* nothing but the prompt */
    bench_timing t;
    cop_error err;
    assert_int_equal(bench_run(f.e, &l, &t, &err), COP_OK);
    assert_true(t.first_token > 0 && t.decode == 0 && t.step == 0);
    fixture_close(&f);
}

static void loads_that_would_wait_for_room_are_refused(void **state) {
    (void)state;
    engine_options o = options(true);
    o.kv_memory = 6 * 65536; /* six pages of calc-d4 in bf16 */
    fixture f = fixture_open("calc-d4", o);
    bench_timing t;
    cop_error err;
    /* 150 tokens are two full pages and a part: with 5 more, three samples hold 2 + 3 pages, and the prompt
     * one. */
    bench_load l = load_of(150, 5, 3, false);
    assert_int_equal(bench_run(f.e, &l, &t, &err), COP_OK);
    l.n = 4;
    assert_int_equal(bench_run(f.e, &l, &t, &err), COP_ETOOLARGE);
    l = load_of(150, 5, 2, true);
    assert_int_equal(bench_run(f.e, &l, &t, &err), COP_OK);
    l.n = 3;
    assert_int_equal(bench_run(f.e, &l, &t, &err), COP_ETOOLARGE);
    l = load_of(100, engine_context(f.e), 1, false);
    assert_int_equal(bench_run(f.e, &l, &t, &err), COP_ETOOLONG);
    fixture_close(&f);
}

static void medians_lie_in_the_middle(void **state) {
    (void)state;
    double odd[] = {5, 1, 9}, even[] = {4, 1, 2, 100}, one[] = {7};
    assert_true(bench_median(odd, 3) == 5);
    assert_true(bench_median(even, 4) == 3);
    assert_true(bench_median(one, 1) == 7);
}

/* Random weights give a distribution to draw from, not one token for ever. */
static void a_random_model_draws_different_tokens(void **state) {
    (void)state;
    arch a = small_arch();
    engine *e;
    cop_error err;
    engine_options o = options(true);
    o.profile = PRECISION_BF16;
    if (engine_open_random(&e, &a, 1, &o, &err) != COP_OK) fail_msg("%s", err.message);
    load_of(1, 1, 1, false);
    rollout_prompt p = {.tokens = prompt_tokens, .n_tokens = 20, .seed = 3};
    rollout_spec spec = {.prompts = &p, .n_prompts = 1, .n = 4, .sampling = rollout_sampling_defaults()};
    spec.sampling.max_tokens = 8;
    outcome got = outcome_of(e, &spec);
    int n_different = 0;
    for (int i = 0; i < 4; i++)
        for (int t = 0; t < 8; t++) {
            float logprob = got.samples[i].logprobs[t];
            assert_true(isfinite(logprob) && logprob < -2 && logprob > -20);
            n_different += got.samples[i].tokens[t] != got.samples[0].tokens[0];
        }
    assert_true(n_different >= 30);
    outcome_free(&got, 1);
    engine_close(e);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_weights_are_a_function_of_the_seed),
        cmocka_unit_test(random_weights_have_the_scale_that_is_said),
        cmocka_unit_test(random_weights_survive_every_single_allocation_failure),
        cmocka_unit_test(what_does_not_fit_the_machine_is_refused_before_it_is_touched),
        cmocka_unit_test(peaks_are_measured_with_every_instruction_set),
        cmocka_unit_test(measuring_reads_all_words_and_counts_what_it_burns),
        cmocka_unit_test(a_measurement_without_memory_is_told),
        cmocka_unit_test(held_rows_decode_in_step_and_draw_the_same_tokens),
        cmocka_unit_test(a_run_times_the_prompt_and_every_step),
        cmocka_unit_test(loads_that_would_wait_for_room_are_refused),
        cmocka_unit_test(medians_lie_in_the_middle),
        cmocka_unit_test(a_random_model_draws_different_tokens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
