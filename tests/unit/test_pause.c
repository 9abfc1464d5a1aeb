/* A paused engine: what has started ends or stands still, and nothing new starts; weights change meanwhile.
 */
#include "weights_fixture.h"

/* ---- Pausing. */

/* Two prompts, of 63 and 300 tokens, with six samples of 200. */
static rollout_spec two_prompts(const fixture *f, rollout_prompt prompts[2]) {
    prompts[0] = prompt_of(2);
    prompts[1] = prompt_of(1);
    rollout_spec spec = {.prompts = prompts, .n_prompts = 2, .n = 6, .sampling = sampling(f)};
    spec.sampling.max_tokens = 200;
    return spec;
}

/* Rows that have started and lost their pages, or never had any. */
static int n_without_pages(const engine *e) {
    int n = 0;
    for (int i = 0; i < e->n_tasks; i++) {
        const task *t = e->tasks[i];
        n += t->kind == TASK_ROW && task_sequence(t)->n_computed == 0;
    }
    return n;
}

static void paused_rows_finish_and_nothing_starts(void **state) {
    (void)state;
    size_t bytes = page_bytes(0);
    make_prompts(0);
    rollout_prompt prompts[2];
    fixture plain = open_set(0, 0, options(0));
    rollout_spec spec = two_prompts(&plain, prompts);
    outcome expected = outcome_of(plain.e, &spec);
    int n_waited = 0, n_prompts = 0;
    for (int step = 1; step < 700; step += 29) {
        engine_options o = options(0);
        o.max_rows = 7;
        o.kv_memory = (size_t)(8 + step % 5) * bytes;
        o.step_tokens = 60;
        fixture f = open_set(0, 0, o);
        outcome got;
        outcome_start(&got, f.e, &spec, NULL);
        run_steps(f.e, step);
        int n_rows = f.e->n_rows, n_before = got.n_samples;
        uint64_t queued = status_of(f.e).queued;
        n_waited += n_without_pages(f.e);
        n_prompts += f.e->n_tasks - n_rows;
        assert_int_equal(engine_is_quiet(f.e), n_rows == 0);
        engine_pause(f.e, ENGINE_FINISH);
        run_all(f.e);
        assert_true(engine_is_quiet(f.e));
        assert_int_equal(got.n_samples, n_before + n_rows);
        assert_int_equal(status_of(f.e).queued, queued);
        assert_false(engine_step(f.e));
        engine_pause(f.e, ENGINE_RUN);
        run_all(f.e);
        assert_int_equal(got.n_done, 1);
        for (int i = 0; i < 2 * 6; i++) assert_same(&got.samples[i], &expected.samples[i], "paused");
        assert_nothing_is_left(f.e);
        outcome_free(&got, 2);
        fixture_close(&f);
    }
    assert_true(n_waited > 0 && n_prompts > 0);
    outcome_free(&expected, 2);
    fixture_close(&plain);
}

/* A prompt of 300 tokens, computed one by one, takes the pages of a younger row, which then waits.  Paused in
 * that state, the row gets them back: it has started, and the prompt has not. */
static void a_paused_prompt_gives_way_to_a_row(void **state) {
    (void)state;
    make_prompts(0);
    engine_options o = options(0);
    o.span_tokens = 1;
    o.kv_memory = 8 * page_bytes(0);
    fixture f = open_set(0, 0, o), plain = open_set(0, 0, options(0));
    rollout_prompt a = prompt_of(1), b = prompt_of(0);
    b.has_sample = true;
    b.prefix = tokens[1];
    b.n_prefix = 2;
    rollout_spec first = {.prompts = &a, .n_prompts = 1, .n = 1, .sampling = sampling(&f)};
    rollout_spec second = {.prompts = &b, .n_prompts = 1, .n = 1, .sampling = sampling(&f)};
    second.sampling.max_tokens = 300;
    outcome expected[2] = {outcome_of(plain.e, &first), outcome_of(plain.e, &second)}, got[2];
    outcome_start(&got[0], f.e, &first, NULL);
    outcome_start(&got[1], f.e, &second, NULL);
    while (status_of(f.e).preemptions == 0) run_steps(f.e, 1);
    assert_int_equal(n_without_pages(f.e), 1);
    uint64_t prefilled = status_of(f.e).prefilled_tokens;
    engine_pause(f.e, ENGINE_FINISH);
    run_all(f.e);
    assert_int_equal(got[1].n_done, 1);
    assert_in_range(status_of(f.e).prefilled_tokens, prefilled, prefilled + lengths[0]); /* the row's again */
    engine_pause(f.e, ENGINE_RUN);
    run_all(f.e);
    for (int i = 0; i < 2; i++) {
        assert_same(&got[i].samples[0], &expected[i].samples[0], "paused");
        outcome_free(&got[i], 1), outcome_free(&expected[i], 1);
    }
    assert_nothing_is_left(f.e);
    fixture_close(&f), fixture_close(&plain);
}

/* What is submitted to a paused engine waits: a prompt, a sample with a prefix, a score. */
static void what_comes_while_paused_waits(void **state) {
    (void)state;
    for (engine_pause_mode mode = ENGINE_FINISH; mode <= ENGINE_HOLD; mode++) {
        make_prompts(0);
        engine_options o = options(0);
        o.step_tokens = 100;
        fixture f = open_set(0, 0, o);
        engine_pause(f.e, mode);
        rollout_prompt prompts[N_PROMPTS], p = prompt_of(2);
        rollout_spec spec = all_prompts(&f, prompts);
        outcome got, continued;
        outcome_start(&got, f.e, &spec, NULL);
        p.has_sample = true;
        p.prefix = tokens[1];
        p.n_prefix = 7;
        spec = (rollout_spec){.prompts = &p, .n_prompts = 1, .n = 1, .sampling = sampling(&f)};
        outcome_start(&continued, f.e, &spec, NULL);
        const int32_t *ids = tokens[1];
        size_t n = lengths[1];
        scores told = {.top = 0};
        score_spec score = {.sequences = &ids,
                            .lengths = &n,
                            .n_sequences = 1,
                            .temperature = 1,
                            .context = &told,
                            .scored = on_scored,
                            .done = on_scores_done,
                            .failed = on_scores_failed};
        cop_error err;
        assert_int_equal(engine_submit_score(f.e, &score, NULL, &err), COP_OK);
        for (int i = 0; i < 5; i++) assert_false(engine_step(f.e));
        assert_int_equal(status_of(f.e).waiting_requests, 3);
        assert_int_equal(status_of(f.e).pages_used, 0);
        assert_true(engine_is_quiet(f.e));
        engine_pause(f.e, ENGINE_RUN);
        run_steps(f.e, 1);
        engine_pause(f.e, mode); /* some of the second prompt is computed */
        outcome late;
        outcome_start(&late, f.e, &spec, NULL);
        run_all(f.e);
        assert_int_equal(status_of(f.e).prefilled_tokens, 100);
        engine_pause(f.e, ENGINE_RUN);
        run_all(f.e);
        assert_int_equal(got.n_done + continued.n_done + late.n_done + told.n_done, 4);
        assert_nothing_is_left(f.e);
        outcome_free(&got, N_PROMPTS), outcome_free(&continued, 1), outcome_free(&late, 1);
        fixture_close(&f);
    }
}

static void a_held_engine_stands_still_and_can_be_changed(void **state) {
    (void)state;
    for (engine_pause_mode mode = ENGINE_FINISH; mode <= ENGINE_HOLD; mode++) {
        open_judges(0);
        engine_options o = options(0);
        o.max_rows = 12;
        fixture f = open_set(0, 0, o);
        rollout_prompt prompts[N_PROMPTS];
        rollout_spec spec = all_prompts(&f, prompts);
        outcome got[4];
        engine_job *jobs[4];
        history.n = 0;
        spec.n = 1;
        for (int i = 0; i < 4; i++) outcome_start(&got[i], f.e, &spec, &jobs[i]);
        run_steps(f.e, 12);
        assert_int_equal(status_of(f.e).rows, 12);
        engine_pause(f.e, mode);
        if (mode == ENGINE_HOLD) {
            uint64_t steps = status_of(f.e).steps, used = status_of(f.e).pages_used;
            for (int i = 0; i < 3; i++) assert_false(engine_step(f.e));
            assert_int_equal(status_of(f.e).steps, steps);
            assert_int_equal(status_of(f.e).pages_used, used);
        }
        assert_false(engine_is_quiet(f.e));
        engine_cancel(f.e, jobs[0]);
        assert_int_equal(got[0].n_done, 1);
        engine_abandon(f.e, jobs[1]);
        engine_park(f.e, jobs[3], true); /* nothing of it has started */
        use(f.e, 0, 1, WEIGHTS_RECOMPUTE);
        assert_int_equal(engine_n_weights(f.e), 1);
        if (mode == ENGINE_HOLD) assert_false(engine_step(f.e));
        if (mode == ENGINE_FINISH) run_all(f.e);
        assert_int_equal(got[2].n_samples, mode == ENGINE_FINISH ? 4 : 0);
        use(f.e, 0, 0, WEIGHTS_RECOMPUTE);
        engine_pause(f.e, ENGINE_RUN);
        engine_park(f.e, jobs[3], false);
        run_all(f.e);
        assert_int_equal(got[2].n_done + got[3].n_done, 2);
        for (int i = 0; i < 4; i++) {
            for (int s = 0; s < N_PROMPTS; s++) {
                const sample *one = &got[i].samples[s];
                if (one->tokens) check_runs(one, tokens[one->prompt], lengths[one->prompt]);
                if (i == 3) assert_int_equal(one->runs[0].label.version, 2);
            }
            outcome_free(&got[i], N_PROMPTS);
        }
        assert_nothing_is_left(f.e);
        fixture_close(&f);
        close_judges();
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(paused_rows_finish_and_nothing_starts),
        cmocka_unit_test(a_paused_prompt_gives_way_to_a_row),
        cmocka_unit_test(what_comes_while_paused_waits),
        cmocka_unit_test(a_held_engine_stands_still_and_can_be_changed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
