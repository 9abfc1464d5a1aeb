/* The engine's own laws: loading survives every failing allocation, limits are told, prompts are shared, jobs
 * end. */
#include "engine_fixture.h"

static engine_options options(void) {
    engine_options o = engine_defaults();
    o.n_threads = 1;
    o.kv_memory = 8 << 20;
    o.max_rows = 64;
    return o;
}

static int32_t tokens[400];

static rollout_spec spec_of(rollout_prompt *p, size_t n_tokens, uint32_t n, int max_tokens) {
    for (int i = 0; i < 400; i++) tokens[i] = (i * 31 + 7) % 900;
    *p = (rollout_prompt){.tokens = tokens, .n_tokens = n_tokens, .seed = 5};
    rollout_sampling s = rollout_sampling_defaults();
    s.max_tokens = max_tokens;
    s.has_stop_tokens = true;
    return (rollout_spec){.prompts = p, .n_prompts = 1, .n = n, .sampling = s};
}

static void loading_survives_every_single_allocation_failure(void **state) {
    (void)state;
    const char *path = "tests/models/calc-d4";
    tokenizer *t; /* its own loading has such a test in test_tokenizer.c */
    cop_error opening;
    assert_int_equal(tokenizer_open(&t, path, &opening), COP_OK);
    long live = mem_live();
    for (long n = 0;; n++) {
        checkpoint *c = NULL;
        engine *e = NULL;
        cop_error err;
        checkpoint_options co = checkpoint_defaults();
        engine_options o = options();
        mem_fail_after(n);
        cop_status status = checkpoint_open(&c, path, &co, &err);
        if (status == COP_OK) status = engine_open(&e, c, t, &o, &err);
        bool fired = mem_fail_stop();
        engine_close(e);
        checkpoint_close(c);
        assert_int_equal(mem_live(), live);
        assert_int_equal(status, fired ? COP_ENOMEM : COP_OK);
        if (!fired) break;
    }
    tokenizer_close(t);
}

static void a_row_that_never_fits_is_too_large_and_a_long_prompt_too_long(void **state) {
    (void)state;
    engine_options o = options();
    o.kv_memory = 3 * 65536; /* three pages of calc-d4 in bf16 */
    fixture f = fixture_open("calc-d4", o);
    engine_status s;
    engine_read_status(f.e, &s);
    assert_int_equal(s.pages_total, 3);
    rollout_prompt p;
    cop_error err;
    rollout_spec spec = spec_of(&p, 100, 1, 92); /* exactly three pages */
    outcome got = outcome_of(f.e, &spec);
    assert_int_equal(got.samples[0].n, 92);
    outcome_free(&got, 1);
    spec = spec_of(&p, 100, 1, 93);
    assert_int_equal(engine_submit(f.e, &spec, NULL, &err), COP_ETOOLARGE);
    assert_string_equal(err.key, "prompts[0].tokens");
    fixture_close(&f);

    o = options();
    o.context = 128;
    f = fixture_open("calc-d4", o);
    spec = spec_of(&p, 128, 1, 5);
    assert_int_equal(engine_submit(f.e, &spec, NULL, &err), COP_ETOOLONG);
    spec = spec_of(&p, 127, 1, 5); /* room for one more: it ends as length */
    got = outcome_of(f.e, &spec);
    assert_int_equal(got.samples[0].n, 1);
    assert_int_equal(got.samples[0].finish, FINISH_LENGTH);
    outcome_free(&got, 1);
    fixture_close(&f);
}

static void wrong_ids_are_refused_with_their_key(void **state) {
    (void)state;
    fixture f = fixture_open("calc-d4", options());
    rollout_prompt p;
    cop_error err;
    rollout_spec spec = spec_of(&p, 10, 1, 5);
    tokens[3] = 1024;
    assert_int_equal(engine_submit(f.e, &spec, NULL, &err), COP_EINVAL);
    assert_string_equal(err.key, "prompts[0].tokens");
    spec = spec_of(&p, 10, 1, 5);
    const int32_t stop = -1;
    spec.sampling.stop_tokens = &stop;
    spec.sampling.n_stop_tokens = 1;
    assert_int_equal(engine_submit(f.e, &spec, NULL, &err), COP_EINVAL);
    assert_string_equal(err.key, "stop_tokens");
    assert_false(engine_step(f.e)); /* nothing was started */
    fixture_close(&f);
}

static void a_prompt_is_computed_once_and_its_full_pages_are_shared(void **state) {
    (void)state;
    fixture f = fixture_open("calc-d4", options());
    rollout_prompt p;
    rollout_spec spec = spec_of(&p, 200, 8, 30);
    outcome got;
    outcome_start(&got, f.e, &spec, NULL);
    engine_step(f.e);
    engine_step(f.e);
    engine_status s;
    engine_read_status(f.e, &s);
    assert_int_equal(s.rows, 8);
    assert_int_equal(s.prefilled_tokens, 200);
    assert_int_equal(s.pages_shared, 3);   /* floor(200 / 64) */
    assert_int_equal(s.pages_used, 3 + 8); /* and a tail for each row */
    run_all(f.e);
    engine_read_status(f.e, &s);
    assert_int_equal(s.prefilled_tokens, 200);
    assert_int_equal(s.sampled_tokens, 8 * 30);
    assert_int_equal(s.pages_used, 0);
    assert_int_equal(got.totals.prompt_tokens, 200);
    outcome_free(&got, 1);
    fixture_close(&f);
}

static void samples_wait_in_order_when_pages_or_rows_are_short(void **state) {
    (void)state;
    engine_options o = options();
    o.max_rows = 3;
    fixture f = fixture_open("calc-d4", o);
    rollout_prompt p;
    rollout_spec spec = spec_of(&p, 70, 10, 20);
    outcome got;
    outcome_start(&got, f.e, &spec, NULL);
    engine_status s;
    while (engine_step(f.e)) {
        engine_read_status(f.e, &s);
        assert_in_range(s.rows, 0, 3);
    }
    assert_int_equal(got.n_samples, 10);
    outcome_free(&got, 1);
    fixture_close(&f);
}

static void rows_whose_outputs_do_not_fit_wait_and_tell_the_same(void **state) {
    (void)state;
    rollout_prompt p;
    rollout_spec spec = spec_of(&p, 70, 10, 20);
    spec.sampling.top_k = 50;
    spec.sampling.kept = spec.sampling.model_logprobs = true;
    size_t row_bytes = 20 * (4 + 1 + 4 + 4 + 4 * 50 + 4);
    const size_t rooms[] = {0, 3 * row_bytes + row_bytes / 2, row_bytes - 1};
    const uint64_t most_rows[] = {10, 3, 1};
    outcome got[3];
    for (int i = 0; i < 3; i++) {
        engine_options o = options();
        o.output_memory = rooms[i];
        fixture f = fixture_open("calc-d4", o);
        outcome_start(&got[i], f.e, &spec, NULL);
        uint64_t most = 0;
        engine_status s;
        while (engine_step(f.e)) {
            engine_read_status(f.e, &s);
            if (s.rows > most) most = s.rows;
        }
        assert_int_equal(most, most_rows[i]);
        assert_int_equal(got[i].n_samples, 10);
        fixture_close(&f);
    }
    for (int i = 1; i < 3; i++) {
        for (int n = 0; n < 10; n++)
            assert_same(&got[0].samples[n], &got[i].samples[n], "less room for outputs");
    }
    for (int i = 0; i < 3; i++) outcome_free(&got[i], 1);
}

/* ---- Order. */

typedef struct arrivals {
    int job;
    struct order *all;
} arrivals;
typedef struct order {
    int at[100]; /* job * 100 + prompt * 10 + sample */
    int n, n_done;
} order;

static void note_sample(void *context, const sample_result *s) {
    const arrivals *a = context;
    assert_int_equal(s->n_tokens, 180);
    a->all->at[a->all->n++] = a->job * 100 + (int)s->prompt * 10 + (int)s->sample;
}
static void note_done(void *context, const rollout_totals *t) {
    (void)t;
    ((arrivals *)context)->all->n_done++;
}

/* All are equally long, so whoever is overtaken or gives way to a younger one would end too late. */
static void what_came_first_ends_first_however_few_pages_there_are(void **state) {
    (void)state;
    const size_t lengths[3] = {200, 20, 128};
    uint64_t n_preemptions = 0;
    for (size_t n_pages = 6; n_pages <= 34; n_pages += 4) {
        engine_options o = options();
        o.kv_memory = n_pages * 65536; /* pages of calc-d4 in bf16 */
        o.step_tokens = 50;
        o.no_prefix_cache = n_pages % 8 == 2;
        fixture f = fixture_open("calc-d4", o);
        order all = {.n = 0};
        arrivals jobs[3];
        for (int j = 0; j < 3; j++) {
            rollout_prompt prompts[3];
            rollout_spec spec = spec_of(&prompts[0], 20, 3, 180);
            for (int p = 0; p < 3; p++)
                prompts[p] = (rollout_prompt){
                    .tokens = tokens + j, .n_tokens = lengths[(p + j) % 3], .seed = (uint64_t)p};
            spec.n_prompts = 3;
            spec.prompts = prompts;
            jobs[j] = (arrivals){j, &all};
            spec.events = (rollout_events){&jobs[j], note_sample, note_done, NULL};
            cop_error err;
            assert_int_equal(engine_submit(f.e, &spec, NULL, &err), COP_OK);
            for (int i = 0; i < 7; i++) engine_step(f.e);
        }
        run_all(f.e);
        assert_int_equal(all.n_done, 3);
        assert_int_equal(all.n, 27);
        for (int i = 1; i < all.n; i++) assert_true(all.at[i] > all.at[i - 1]);
        engine_status s;
        engine_read_status(f.e, &s);
        n_preemptions += s.preemptions;
        assert_int_equal(s.pages_used, 0);
        fixture_close(&f);
    }
    assert_true(n_preemptions > 20);
}

/* Five pages hold one sample, and not even a copy of its prompt's last page. */
static void a_pool_of_one_sample_runs_one_after_the_other(void **state) {
    (void)state;
    for (int cached = 0; cached < 2; cached++) {
        engine_options o = options();
        o.kv_memory = 5 * 65536;
        o.no_prefix_cache = !cached;
        fixture f = fixture_open("calc-d4", o);
        rollout_prompt p;
        rollout_spec spec = spec_of(&p, 200, 3, 120);
        outcome got = outcome_of(f.e, &spec);
        engine_status s;
        engine_read_status(f.e, &s);
        assert_int_equal(s.preemptions, 2); /* the prompt's, by the first and the second sample */
        assert_int_equal(s.prefilled_tokens, cached ? 200 + 2 * 8 : 3 * 200);
        outcome_free(&got, 1);
        fixture_close(&f);
    }
}

/* A start leaves rows the page that each needs next, so that it does not at once cost it its own. */
static void what_starts_takes_no_page_that_rows_need_next(void **state) {
    (void)state;
    engine_options o = options();
    o.kv_memory = 6 * 65536;
    fixture f = fixture_open("calc-d4", o);
    rollout_prompt p;
    outcome got[2];
    rollout_spec spec = spec_of(&p, 60, 3, 60); /* three rows grow from a page to two */
    outcome_start(&got[0], f.e, &spec, NULL);
    engine_step(f.e);
    spec = spec_of(&p, 120, 1, 60);
    p.tokens = tokens + 1;
    outcome_start(&got[1], f.e, &spec, NULL);
    run_all(f.e);
    engine_status s;
    engine_read_status(f.e, &s);
    assert_int_equal(s.preemptions, 0);
    assert_int_equal(s.samples, 4);
    outcome_free(&got[0], 1), outcome_free(&got[1], 1);
    fixture_close(&f);
}

static void a_long_prompt_holds_up_no_row(void **state) {
    (void)state;
    engine_options o = options();
    o.step_tokens = 16;
    fixture f = fixture_open("calc-d4", o);
    rollout_prompt p;
    rollout_spec spec = spec_of(&p, 10, 5, 20);
    outcome rows, late;
    outcome_start(&rows, f.e, &spec, NULL);
    engine_step(f.e); /* all start, with their first token */
    spec = spec_of(&p, 400, 2, 5);
    outcome_start(&late, f.e, &spec, NULL);
    for (int i = 1; i < 19; i++) engine_step(f.e);
    assert_int_equal(rows.n_samples, 0);
    engine_step(f.e);
    assert_int_equal(rows.n_samples, 5);
    engine_status s;
    engine_read_status(f.e, &s);
    assert_int_equal(s.prefilled_tokens, 10 + 19 * 16); /* the budget is the prompt's */
    run_all(f.e);
    assert_int_equal(late.n_samples, 2);
    outcome_free(&rows, 1), outcome_free(&late, 1);
    fixture_close(&f);
}

/* A budget of a token, all of which an older row's forced answers take. */
static void a_forced_answer_holds_up_no_other_row(void **state) {
    (void)state;
    engine_options o = options();
    o.step_tokens = 1;
    fixture f = fixture_open("calc-d4", o);
    json_t *lines = load_lines("tests/golden/rollout_greedy.jsonl");
    size_t n;
    int32_t *chat = ids_of(json_object_get(json_array_get(lines, 0), "prompt"), &n);
    rollout_prompt caller = {.tokens = chat, .n_tokens = n, .seed = 1}, p;
    rollout_spec other = spec_of(&p, 1, 1, 60),
                 calls = {
                     .prompts = &caller, .n_prompts = 1, .n = 1, .sampling = rollout_sampling_defaults()};
    calls.sampling.temperature = 0;
    calls.sampling.calculator = true;
    outcome first, second;
    outcome_start(&first, f.e, &calls, NULL);
    outcome_start(&second, f.e, &other, NULL);
    engine_status s = {.rows = 0};
    for (int i = 0; s.rows < 2; i++) {
        assert_true(i < 100);
        engine_step(f.e);
        engine_read_status(f.e, &s);
    }
    for (int i = 1; i < 59; i++) engine_step(f.e);
    assert_int_equal(second.n_samples, 0);
    engine_step(f.e);
    assert_int_equal(second.n_samples, 1);
    run_all(f.e);
    assert_true(first.samples[0].n_calls > 0 && first.samples[0].calls[0].ok);
    outcome_free(&first, 1), outcome_free(&second, 1);
    free(chat);
    json_decref(lines);
    fixture_close(&f);
}

static void status_tells_what_waits(void **state) {
    (void)state;
    engine_options o = options();
    o.max_rows = 3;
    fixture f = fixture_open("calc-d4", o);
    rollout_prompt p;
    rollout_spec spec = spec_of(&p, 20, 5, 30);
    outcome got[2];
    engine_job *jobs[2];
    engine_status s;
    for (int i = 0; i < 2; i++) outcome_start(&got[i], f.e, &spec, &jobs[i]);
    engine_read_status(f.e, &s);
    assert_int_equal(s.queued, 10);
    assert_int_equal(s.waiting_requests, 2);
    engine_step(f.e);
    engine_read_status(f.e, &s);
    assert_int_equal(s.rows, 3);
    assert_int_equal(s.queued, 7);
    assert_int_equal(s.waiting_requests, 1);
    engine_cancel(f.e, jobs[0]);
    engine_read_status(f.e, &s);
    assert_int_equal(s.queued, 5);
    assert_int_equal(s.waiting_requests, 1);
    engine_cancel(f.e, jobs[1]);
    engine_read_status(f.e, &s);
    assert_int_equal(s.queued + s.waiting_requests + s.rows + s.pages_used, 0);
    for (int i = 0; i < 2; i++) outcome_free(&got[i], 1);
    fixture_close(&f);
}

/* A score begun before its pages were taken goes on where it was. */
static void a_score_that_gave_its_pages_back_tells_the_same(void **state) {
    (void)state;
    engine_options o = options();
    o.step_tokens = 4;
    o.kv_memory = 12 * 65536;
    fixture f = fixture_open("calc-d4", o);
    rollout_prompt p;
    rollout_spec spec = spec_of(&p, 60, 3, 120); /* from 3 pages to 9 */
    scores want = scores_of(f.e, tokens, 330, 5, 0.8), got = {.top = 5};
    outcome rows;
    outcome_start(&rows, f.e, &spec, NULL);
    for (int i = 0; i < 60 / 4; i++) engine_step(f.e);
    const int32_t *ids = tokens;
    size_t n = 330; /* 6 pages */
    score_spec score = {.sequences = &ids,
                        .lengths = &n,
                        .n_sequences = 1,
                        .top = 5,
                        .temperature = 0.8,
                        .context = &got,
                        .scored = on_scored,
                        .done = on_scores_done,
                        .failed = on_scores_failed};
    cop_error err;
    assert_int_equal(engine_submit_score(f.e, &score, NULL, &err), COP_OK);
    run_all(f.e);
    assert_int_equal(rows.n_samples, 3);
    assert_int_equal(got.n_done, 1);
    assert_memory_equal(got.logprobs, want.logprobs, n * sizeof(float));
    assert_memory_equal(got.next_logprobs, want.next_logprobs, sizeof want.next_logprobs);
    engine_status s;
    engine_read_status(f.e, &s);
    assert_int_equal(s.preemptions, 1);
    outcome_free(&rows, 1);
    fixture_close(&f);
}

static void cancelling_tells_what_there_is(void **state) {
    (void)state;
    fixture f = fixture_open("calc-d4", options());
    rollout_prompt p;
    rollout_spec spec = spec_of(&p, 70, 100, 50); /* more than 64 rows: some have not started */
    spec.sampling.kept = true;
    spec.sampling.top_k = 5;
    outcome got;
    engine_job *job;
    outcome_start(&got, f.e, &spec, &job);
    for (int i = 0; i < 10; i++) engine_step(f.e);
    engine_cancel(f.e, job);
    assert_int_equal(got.n_samples, 100);
    assert_int_equal(got.n_done, 1);
    for (int i = 0; i < 100; i++) {
        assert_int_equal(got.samples[i].finish, FINISH_CANCELLED);
        assert_int_equal(got.samples[i].n > 0, i < 64);
        assert_int_equal(got.samples[i].kept_offsets[got.samples[i].n], 5 * got.samples[i].n);
    }
    engine_status s;
    engine_read_status(f.e, &s);
    assert_int_equal(s.pages_used, 0);
    assert_int_equal(s.rows, 0);
    assert_false(engine_step(f.e));
    outcome_free(&got, 1);

    outcome_start(&got, f.e, &spec, &job); /* abandoned: not a word */
    for (int i = 0; i < 3; i++) engine_step(f.e);
    engine_abandon(f.e, job);
    assert_int_equal(got.n_samples + got.n_done + got.n_failed, 0);
    engine_read_status(f.e, &s);
    assert_int_equal(s.pages_used, 0);
    free(got.samples);
    fixture_close(&f);
}

static void stop_tokens_end_a_sample_and_min_tokens_holds_them_back(void **state) {
    (void)state;
    fixture f = fixture_open("calc-d4", options());
    rollout_prompt p;
    rollout_spec spec = spec_of(&p, 20, 4, 40);
    int32_t stops[512];
    for (int i = 0; i < 512; i++) stops[i] = 2 * i; /* every second id */
    spec.sampling.stop_tokens = stops;
    spec.sampling.n_stop_tokens = 512;
    spec.sampling.min_tokens = 7;
    spec.sampling.temperature = 5;
    outcome got = outcome_of(f.e, &spec);
    for (int i = 0; i < 4; i++) {
        const sample *s = &got.samples[i];
        assert_true(s->n > 7);
        for (int t = 0; t + 1 < s->n; t++) assert_int_equal(s->tokens[t] % 2, 1);
        assert_int_equal(s->finish, FINISH_STOP);
        assert_int_equal(s->stop, s->tokens[s->n - 1]);
        assert_int_equal(s->stop % 2, 0);
    }
    outcome_free(&got, 1);
    fixture_close(&f);
}

static void kept_ids_hold_the_token_and_are_best_first(void **state) {
    (void)state;
    fixture f = fixture_open("calc-d4", options());
    rollout_prompt p;
    rollout_spec spec = spec_of(&p, 20, 3, 30);
    spec.sampling.kept = true;
    spec.sampling.top_k = 12;
    spec.sampling.top_p = 0.9;
    spec.sampling.temperature = 2;
    outcome got = outcome_of(f.e, &spec);
    for (int i = 0; i < 3; i++) {
        const sample *s = &got.samples[i];
        for (int t = 0; t < s->n; t++) {
            bool held = false;
            uint32_t from = s->kept_offsets[t], to = s->kept_offsets[t + 1];
            assert_in_range(to - from, 1, 12);
            for (uint32_t k = from; k < to; k++) held = held || s->kept_ids[k] == s->tokens[t];
            assert_true(held);
            if (to - from == 1) assert_true(s->logprobs[t] == 0.0f);
        }
    }
    outcome_free(&got, 1);
    fixture_close(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(loading_survives_every_single_allocation_failure),
        cmocka_unit_test(a_row_that_never_fits_is_too_large_and_a_long_prompt_too_long),
        cmocka_unit_test(wrong_ids_are_refused_with_their_key),
        cmocka_unit_test(a_prompt_is_computed_once_and_its_full_pages_are_shared),
        cmocka_unit_test(samples_wait_in_order_when_pages_or_rows_are_short),
        cmocka_unit_test(rows_whose_outputs_do_not_fit_wait_and_tell_the_same),
        cmocka_unit_test(what_came_first_ends_first_however_few_pages_there_are),
        cmocka_unit_test(a_pool_of_one_sample_runs_one_after_the_other),
        cmocka_unit_test(what_starts_takes_no_page_that_rows_need_next),
        cmocka_unit_test(a_long_prompt_holds_up_no_row),
        cmocka_unit_test(a_forced_answer_holds_up_no_other_row),
        cmocka_unit_test(status_tells_what_waits),
        cmocka_unit_test(a_score_that_gave_its_pages_back_tells_the_same),
        cmocka_unit_test(cancelling_tells_what_there_is),
        cmocka_unit_test(stop_tokens_end_a_sample_and_min_tokens_holds_them_back),
        cmocka_unit_test(kept_ids_hold_the_token_and_are_best_first),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
