/* A step in which nothing starts, ends or calls a tool allocates nothing: mem_count() stands still. */
#include "engine_fixture.h"

enum { SAMPLES = 5, MOST = 60 };

static engine_options options(int n_threads) {
    engine_options o = engine_defaults();
    o.n_threads = n_threads;
    o.kv_memory = 16 << 20;
    o.max_rows = 64;
    o.step_tokens = 48;
    return o;
}

static const int32_t *some_tokens(void) {
    static int32_t tokens[500];
    for (int i = 0; i < 500; i++) tokens[i] = (i * 31 + 7) % 900;
    return tokens;
}

static engine_status status_of(const engine *e) {
    engine_status s;
    engine_read_status(e, &s);
    return s;
}

/* Step until something starts or ends; fail if an earlier step allocated.  Returns the number of steps. */
static int steps_without_allocation(engine *e, const char *what) {
    engine_status before = status_of(e);
    for (int n = 0;; n++) {
        long count = mem_count();
        bool more = engine_step(e);
        engine_status now = status_of(e);
        if (!more || now.rows != before.rows || now.samples != before.samples || now.queued != before.queued)
            return n;
        if (mem_count() != count) fail_msg("%s: %ld allocations in step %d", what, mem_count() - count, n);
    }
}

static void step_until_rows(engine *e, uint64_t n_rows) {
    for (int i = 0; status_of(e).rows < n_rows; i++) {
        assert_true(i < 100);
        engine_step(e);
    }
}

/* Every array that a step can fill. */
static rollout_spec full_spec(const rollout_prompt *p, size_t n_prompts) {
    rollout_sampling s = rollout_sampling_defaults();
    s.max_tokens = s.min_tokens = MOST; /* no sample ends early */
    s.has_stop_tokens = false;
    s.temperature = 1.3;
    s.top_k = 40;
    s.top_p = 0.95;
    s.min_p = 0.001;
    s.kept = s.logprobs = s.model_logprobs = true;
    return (rollout_spec){.prompts = p, .n_prompts = n_prompts, .n = SAMPLES, .sampling = s};
}

static void decode_steps_allocate_nothing(void **state) {
    (void)state;
    for (int n_threads = 1; n_threads <= 3; n_threads += 2) {
        fixture f = fixture_open("calc-d4", options(n_threads));
        rollout_prompt p[2] = {{.tokens = some_tokens(), .n_tokens = 30, .seed = 5},
                               {.tokens = some_tokens(), .n_tokens = 40, .seed = 6}};
        rollout_spec spec = full_spec(p, 2);
        outcome got;
        outcome_start(&got, f.e, &spec, NULL);
        step_until_rows(f.e, 2 * SAMPLES);
        assert_true(steps_without_allocation(f.e, "decode") > MOST - 10);
        run_all(f.e);
        assert_int_equal(got.n_samples, 2 * SAMPLES);
        outcome_free(&got, 2);
        fixture_close(&f);
    }
}

/* The end of the call is a stop token that min_tokens holds back, so the call is open all the time. */
static void decode_steps_within_a_call_allocate_nothing(void **state) {
    (void)state;
    fixture f = fixture_open("calc-d4", options(1));
    int32_t start = tokenizer_special(f.tok, TOKEN_PYTHON_START),
            end = tokenizer_special(f.tok, TOKEN_PYTHON_END);
    assert_true(start >= 0);
    rollout_prompt p = {.tokens = some_tokens(),
                        .n_tokens = 30,
                        .seed = 5,
                        .has_sample = true,
                        .prefix = &start,
                        .n_prefix = 1};
    rollout_spec spec = full_spec(&p, 1);
    spec.n = 1;
    spec.sampling.calculator = true;
    spec.sampling.has_stop_tokens = true;
    spec.sampling.stop_tokens = &end;
    spec.sampling.n_stop_tokens = 1;
    outcome got;
    outcome_start(&got, f.e, &spec, NULL);
    step_until_rows(f.e, 1);
    engine_step(f.e);
    assert_true(steps_without_allocation(f.e, "within a call") > MOST - 10);
    run_all(f.e);
    assert_int_equal(got.samples[0].n_calls, 0);
    outcome_free(&got, 1);
    fixture_close(&f);
}

static void prefill_steps_allocate_nothing(void **state) {
    (void)state;
    fixture f = fixture_open("calc-d4", options(1));
    rollout_prompt p = {.tokens = some_tokens(), .n_tokens = 500, .seed = 5};
    rollout_spec spec = full_spec(&p, 1);
    outcome got;
    outcome_start(&got, f.e, &spec, NULL);
    engine_step(f.e); /* it is admitted */
    assert_true(steps_without_allocation(f.e, "prefill") > 500 / 48 - 3);
    run_all(f.e);
    outcome_free(&got, 1);
    fixture_close(&f);
}

static void score_steps_allocate_nothing(void **state) {
    (void)state;
    for (int top = 0; top <= 5; top += 5) {
        fixture f = fixture_open("calc-d4", options(1));
        const int32_t *ids = some_tokens();
        size_t n = 500;
        scores s = {.top = 0};
        score_spec spec = {.sequences = &ids,
                           .lengths = &n,
                           .n_sequences = 1,
                           .top = top,
                           .temperature = 0.7,
                           .context = &s,
                           .scored = on_scored,
                           .done = on_scores_done,
                           .failed = on_scores_failed};
        cop_error err;
        assert_int_equal(engine_submit_score(f.e, &spec, NULL, &err), COP_OK);
        engine_step(f.e); /* it is granted */
        int n_steps = 0;
        for (long count = mem_count(); engine_step(f.e) && s.n_done == 0; n_steps++)
            assert_int_equal(mem_count(), count);
        assert_true(n_steps > 500 / 48 - 3);
        assert_int_equal(s.n_done, 1);
        fixture_close(&f);
    }
}

/* A few pages: rows give theirs back and get them again, and a job waits for its turn all the time. */
static void steps_short_of_pages_allocate_nothing(void **state) {
    (void)state;
    for (int has_prefix = 0; has_prefix < 2; has_prefix++) {
        engine_options o = options(1);
        o.kv_memory = 8 * 65536; /* pages of calc-d4 in bf16 */
        fixture f = fixture_open("calc-d4", o);
        int32_t prefix = 7;
        rollout_prompt p = {.tokens = some_tokens(), .n_tokens = 100, .seed = 5}, q = p;
        q.tokens += 3;
        q.has_sample = true;
        q.prefix = &prefix;
        q.n_prefix = (size_t)has_prefix;
        rollout_spec spec = full_spec(&p, 1);
        spec.sampling.max_tokens = spec.sampling.min_tokens = 150;
        outcome got, waiting;
        outcome_start(&got, f.e, &spec, NULL);
        for (int i = 0; i < 3; i++) engine_step(f.e); /* all that can start has */
        spec.n = 1;
        spec.prompts = &q;
        outcome_start(&waiting, f.e, &spec, NULL);
        assert_true(steps_without_allocation(f.e, "few pages") > 20);
        run_all(f.e);
        assert_true(status_of(f.e).preemptions > 0);
        assert_int_equal(got.n_samples + waiting.n_samples, SAMPLES + 1);
        outcome_free(&got, 1), outcome_free(&waiting, 1);
        fixture_close(&f);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(decode_steps_allocate_nothing),
        cmocka_unit_test(decode_steps_within_a_call_allocate_nothing),
        cmocka_unit_test(prefill_steps_allocate_nothing),
        cmocka_unit_test(score_steps_allocate_nothing),
        cmocka_unit_test(steps_short_of_pages_allocate_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
