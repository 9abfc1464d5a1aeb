/* New weights while rollouts run: what each policy makes of the rows in flight, told by their runs and
 * checked by scoring every run again under its weights; pages of one set never serve another. */
#include "weights_fixture.h"

/* Start everything, and change to set 1 when `rows` samples run and have a few tokens. */
static outcome *changed_on_the_way(fixture *f, int c, uint64_t rows, weights_policy policy) {
    outcome *o = malloc(sizeof *o);
    rollout_prompt prompts[N_PROMPTS];
    rollout_spec spec = all_prompts(f, prompts);
    history.n = 0;
    outcome_start(o, f->e, &spec, NULL);
    while (status_of(f->e).rows < rows) run_steps(f->e, 1);
    run_steps(f->e, 20);
    assert_int_equal(engine_n_weights(f->e), 1);
    use(f->e, c, 1, policy);
    return o;
}

static void end_outcome(outcome *o) {
    outcome_free(o, N_PROMPTS);
    free(o);
}

/* ---- One change, by policy. */

static void finish_lets_rows_end_under_the_old_set(void **state) {
    (void)state;
    for (int c = 0; c < N_CASES; c++) {
        open_judges(c);
        outcome expected[SETS] = {baseline(c, 0), baseline(c, 1)};
        engine_options o = options(c);
        o.max_rows = 10; /* the other 6 start later */
        fixture f = open_set(c, 0, o);
        outcome *got = changed_on_the_way(&f, c, 10, WEIGHTS_FINISH);
        assert_int_equal(engine_n_weights(f.e), 2);
        run_all(f.e);
        int n_of[SETS] = {0};
        for (int i = 0; i < N_PROMPTS * N; i++) {
            const sample *s = &got->samples[i];
            assert_int_equal(s->n_runs, 1);
            int set = set_named(s->runs[0].label.digest);
            assert_int_equal(s->runs[0].label.version, set);
            assert_same(s, &expected[set].samples[i], "beside other weights");
            n_of[set]++;
        }
        assert_int_equal(n_of[0], 10);
        assert_int_equal(n_of[1], 6);
        assert_int_equal(status_of(f.e).preemptions, 1); /* of the prompt that had samples to start */
        assert_nothing_is_left(f.e);
        end_outcome(got);
        for (int i = 0; i < SETS; i++) outcome_free(&expected[i], N_PROMPTS);
        fixture_close(&f);
        close_judges();
    }
}

/* Where a row is, by the order of the list; -1: no row. */
static int index_of(const engine *e, int i) {
    return e->tasks[i]->kind == TASK_ROW ? row_index(&task_row(e->tasks[i])->row) : -1;
}

static void rows_of_both_sets_move_in_each_step(void **state) {
    (void)state;
    open_judges(0);
    fixture f = open_set(0, 0, options(0));
    outcome *got = changed_on_the_way(&f, 0, 16, WEIGHTS_FINISH), later;
    rollout_prompt p = prompt_of(2);
    rollout_spec spec = {.prompts = &p, .n_prompts = 1, .n = 2, .sampling = sampling(&f)};
    outcome_start(&later, f.e, &spec, NULL);
    while (status_of(f.e).rows < 18) run_steps(f.e, 1);
    for (int n = 0; n < 20; n++) {
        int before[18];
        assert_int_equal(f.e->n_tasks, 18);
        for (int i = 0; i < 18; i++) before[i] = index_of(f.e, i);
        run_steps(f.e, 1);
        for (int i = 0; i < 18; i++) assert_in_range(index_of(f.e, i), before[i] + 1, MOST);
    }
    assert_int_equal(engine_n_weights(f.e), 2);
    run_all(f.e);
    end_outcome(got);
    outcome_free(&later, 1);
    fixture_close(&f);
    close_judges();
}

/* Neither one that was replaced before the next token, nor the last. */
static void a_set_that_drew_nothing_is_not_named(void **state) {
    (void)state;
    open_judges(0);
    fixture f = open_set(0, 0, options(0));
    outcome *got = changed_on_the_way(&f, 0, 16, WEIGHTS_KEEP);
    use(f.e, 0, 0, WEIGHTS_RECOMPUTE);
    use(f.e, 0, 1, WEIGHTS_KEEP);
    engine_abort_rows(f.e);
    assert_int_equal(got->n_samples, 16);
    for (int i = 0; i < 16; i++) {
        assert_int_equal(got->samples[i].n_runs, 1);
        assert_int_equal(got->samples[i].runs[0].label.version, 0);
    }
    run_all(f.e);
    end_outcome(got);
    fixture_close(&f);
    close_judges();
}

static void recompute_goes_on_under_the_new_set(void **state) {
    (void)state;
    for (int c = 0; c < N_CASES; c++) {
        open_judges(c);
        fixture f = open_set(c, 0, options(c));
        outcome *got = changed_on_the_way(&f, c, 16, WEIGHTS_RECOMPUTE);
        assert_int_equal(engine_n_weights(f.e), 1); /* nothing runs on the old one */
        run_all(f.e);
        for (int i = 0; i < N_PROMPTS * N; i++) {
            assert_int_equal(got->samples[i].n_runs, 2);
            assert_int_equal(got->samples[i].finish, FINISH_LENGTH);
        }
        assert_true(check_outcome(got).n_checked > 16 * 40);
        assert_true(!cases[c].other || got->totals.forced_tokens > 0);
        assert_nothing_is_left(f.e);
        end_outcome(got);
        fixture_close(&f);
        close_judges();
    }
}

static void keep_goes_on_with_what_it_has(void **state) {
    (void)state;
    for (int c = 0; c < N_CASES; c++) {
        open_judges(c);
        fixture f = open_set(c, 0, options(c));
        outcome *got = changed_on_the_way(&f, c, 16, WEIGHTS_KEEP);
        assert_int_equal(engine_n_weights(f.e), 1);
        run_all(f.e);
        verdict v = check_outcome(got);
        assert_true(v.n_checked >= 16 * 10);
        assert_true(v.n_kept > 16 * 20 && v.n_differ > v.n_kept / 2);
        assert_int_equal(status_of(f.e).preemptions, 0);
        /* Its pages are found by nobody: the same prompts and completions are computed from the start. */
        uint64_t cached = status_of(f.e).cached_tokens;
        for (int p = 0; p < N_PROMPTS; p++) {
            const sample *s = &got->samples[p * N];
            int32_t turn[LONG + MOST];
            memcpy(turn, tokens[p], lengths[p] * sizeof *turn);
            memcpy(turn + lengths[p], s->tokens, (size_t)s->n * sizeof *turn);
            rollout_prompt begin = {.tokens = turn, .n_tokens = lengths[p] + (size_t)s->n, .seed = 3};
            rollout_spec spec = {.prompts = &begin, .n_prompts = 1, .n = 1, .sampling = sampling(&f)};
            spec.sampling.max_tokens = 5;
            outcome alone, again = outcome_of(f.e, &spec);
            alone = outcome_of(judges[1].e, &spec);
            assert_same(&again.samples[0], &alone.samples[0], "after kept rows");
            outcome_free(&again, 1), outcome_free(&alone, 1);
        }
        assert_int_equal(status_of(f.e).cached_tokens, cached);
        end_outcome(got);
        fixture_close(&f);
        close_judges();
    }
}

/* Half of what it continues is computed: of that nothing is kept, since no run could tell it. */
static void a_row_that_has_drawn_nothing_keeps_nothing(void **state) {
    (void)state;
    open_judges(0);
    engine_options o = options(0);
    o.step_tokens = 40;
    fixture f = open_set(0, 0, o);
    rollout_prompt p = prompt_of(2);
    p.has_sample = true;
    p.prefix = tokens[3];
    p.n_prefix = lengths[3];
    rollout_spec spec = {.prompts = &p, .n_prompts = 1, .n = 1, .sampling = sampling(&f)};
    spec.sampling.calculator = false; /* a prefix of any tokens would contradict its answers */
    outcome got, expected = outcome_of(judges[1].e, &spec);
    history.n = 0;
    outcome_start(&got, f.e, &spec, NULL);
    run_steps(f.e, 2);
    assert_int_equal(status_of(f.e).rows, 1);
    use(f.e, 0, 1, WEIGHTS_KEEP);
    run_all(f.e);
    assert_same(&got.samples[0], &expected.samples[0], "changed before its first token");
    assert_int_equal(got.samples[0].n_runs, 1);
    assert_int_equal(got.samples[0].runs[0].label.version, 1);
    assert_nothing_is_left(f.e);
    outcome_free(&got, 1), outcome_free(&expected, 1);
    fixture_close(&f);
    close_judges();
}

/* What was cut off goes on under the new weights as it would on an engine that never had others. */
static void continue_aborted(fixture *f, const sample *s) {
    rollout_prompt begin = prompt_of((int)s->prompt);
    begin.has_sample = true;
    begin.sample = s->index;
    begin.prefix = s->tokens;
    begin.n_prefix = (size_t)s->n;
    rollout_spec spec = {.prompts = &begin, .n_prompts = 1, .n = 1, .sampling = sampling(f)};
    outcome got = outcome_of(f->e, &spec), expected;
    expected = outcome_of(judges[1].e, &spec);
    assert_same(&got.samples[0], &expected.samples[0], "continued under new weights");
    int32_t before[LONG + MOST];
    memcpy(before, tokens[s->prompt], lengths[s->prompt] * sizeof *before);
    memcpy(before + lengths[s->prompt], s->tokens, (size_t)s->n * sizeof *before);
    check_runs(&got.samples[0], before, lengths[s->prompt] + (size_t)s->n);
    outcome_free(&got, 1), outcome_free(&expected, 1);
}

static void abort_ends_rows_and_starts_the_others(void **state) {
    (void)state;
    for (int c = 0; c < N_CASES; c++) {
        open_judges(c);
        outcome expected = baseline(c, 1);
        engine_options o = options(c);
        o.max_rows = 10;
        fixture f = open_set(c, 0, o);
        outcome *got = changed_on_the_way(&f, c, 10, WEIGHTS_ABORT);
        assert_int_equal(got->n_samples, 10); /* told at once */
        assert_int_equal(engine_n_weights(f.e), 1);
        run_all(f.e);
        int n_cancelled = 0;
        for (int i = 0; i < N_PROMPTS * N; i++) {
            const sample *s = &got->samples[i];
            if (s->finish == FINISH_CANCELLED) {
                n_cancelled++;
                assert_true(s->n >= 20);
                assert_int_equal(s->runs[0].label.version, 0);
            } else {
                assert_same(s, &expected.samples[i], "started after the change");
            }
        }
        assert_int_equal(n_cancelled, 10);
        check_outcome(got);
        for (int i = 0; i < N_PROMPTS * N; i++) {
            if (got->samples[i].finish == FINISH_CANCELLED) continue_aborted(&f, &got->samples[i]);
        }
        assert_nothing_is_left(f.e);
        end_outcome(got);
        outcome_free(&expected, N_PROMPTS);
        fixture_close(&f);
        close_judges();
    }
}

static void aborting_rows_needs_no_new_weights(void **state) {
    (void)state;
    open_judges(0);
    outcome expected = baseline(0, 0);
    engine_options o = options(0);
    o.max_rows = 10;
    fixture f = open_set(0, 0, o);
    rollout_prompt prompts[N_PROMPTS];
    rollout_spec spec = all_prompts(&f, prompts);
    outcome got;
    history.n = 0;
    outcome_start(&got, f.e, &spec, NULL);
    while (status_of(f.e).rows < 10) run_steps(f.e, 1);
    run_steps(f.e, 10);
    engine_abort_rows(f.e);
    assert_int_equal(got.n_samples, 10);
    assert_true(engine_is_quiet(f.e));
    run_all(f.e);
    for (int i = 0; i < N_PROMPTS * N; i++) {
        if (got.samples[i].finish != FINISH_CANCELLED)
            assert_same(&got.samples[i], &expected.samples[i], "not aborted");
    }
    check_outcome(&got);
    assert_int_equal(got.n_done, 1);
    assert_nothing_is_left(f.e);
    outcome_free(&got, N_PROMPTS), outcome_free(&expected, N_PROMPTS);
    fixture_close(&f);
    close_judges();
}

/* ---- Equal bytes. */

static void an_equal_digest_changes_the_label_only(void **state) {
    (void)state;
    open_judges(0);
    outcome expected = baseline(0, 0);
    for (weights_policy policy = WEIGHTS_FINISH; policy <= WEIGHTS_ABORT; policy++) {
        fixture f = open_set(0, 0, options(0));
        rollout_prompt prompts[N_PROMPTS];
        rollout_spec spec = all_prompts(&f, prompts);
        outcome got;
        history.n = 0;
        outcome_start(&got, f.e, &spec, NULL);
        while (status_of(f.e).rows < 16) run_steps(f.e, 1);
        for (int i = 0; i < 100; i++) { /* some with no token between them */
            use(f.e, 0, 0, policy);
            assert_int_equal(engine_n_weights(f.e), 1);
            if (i % 3 == 0) engine_step(f.e);
        }
        run_all(f.e);
        for (int i = 0; i < N_PROMPTS * N; i++) {
            const sample *s = &got.samples[i];
            assert_same(s, &expected.samples[i], "the same weights again");
            if (policy == WEIGHTS_FINISH) {
                assert_int_equal(s->n_runs, 1);
                assert_int_equal(s->runs[0].label.version, 0);
            } else {
                assert_true(s->n_runs > 30);
                assert_int_equal(s->runs[s->n_runs - 1].label.version, 100);
            }
        }
        assert_int_equal(status_of(f.e).preemptions, 0);
        assert_int_equal(status_of(f.e).prefilled_tokens, 26 + 300 + 63 + 64);
        outcome again = outcome_of(f.e, &spec); /* pages are still found */
        assert_int_equal(again.totals.cached_tokens, 256);
        assert_int_equal(again.samples[0].runs[0].label.version, 100);
        outcome_free(&again, N_PROMPTS), outcome_free(&got, N_PROMPTS);
        fixture_close(&f);
    }
    outcome_free(&expected, N_PROMPTS);
    close_judges();
}

/* ---- Pages. */

static void pages_of_one_set_never_serve_another(void **state) {
    (void)state;
    for (int c = 0; c < N_CASES; c++) {
        open_judges(c);
        outcome expected[SETS] = {baseline(c, 0), baseline(c, 1)};
        fixture f = open_set(c, 0, options(c));
        rollout_prompt prompts[N_PROMPTS];
        rollout_spec spec = all_prompts(&f, prompts);
        history.n = 0;
        for (int i = 0; i < 7; i++) { /* by 0 1 0 1 1 0 0 */
            int set = i < 4 ? i % 2 : i == 4;
            if (i > 0) use(f.e, c, set, WEIGHTS_KEEP);
            assert_int_equal(engine_n_weights(f.e), 1);
            outcome got = outcome_of(f.e, &spec);
            assert_int_equal(got.totals.cached_tokens, i == 4 || i == 6 ? 256 : 0);
            for (int s = 0; s < N_PROMPTS * N; s++)
                assert_same(&got.samples[s], &expected[set].samples[s], "after other weights");
            outcome_free(&got, N_PROMPTS);
        }
        for (int i = 0; i < SETS; i++) outcome_free(&expected[i], N_PROMPTS);
        fixture_close(&f);
        close_judges();
    }
}

/* 16 samples of 320 tokens, which are 5 pages, in steps that hold less than the begin, or all of it. */
static void recomputing_samples_compute_their_prompt_once(void **state) {
    (void)state;
    open_judges(0);
    int32_t begin[320];
    for (int i = 0; i < 320; i++) begin[i] = (i * 37 + 5) % 900;
    const int budgets[] = {48, 100, 512, 6000};
    for (int i = 0; i < 4; i++) {
        engine_options o = options(0);
        o.step_tokens = budgets[i];
        fixture f = open_set(0, 0, o);
        rollout_prompt p = {.tokens = begin, .n_tokens = 320, .seed = 9};
        rollout_spec spec = {.prompts = &p, .n_prompts = 1, .n = 16, .sampling = sampling(&f)};
        outcome got;
        history.n = 0;
        outcome_start(&got, f.e, &spec, NULL);
        while (status_of(f.e).rows < 16) run_steps(f.e, 1);
        run_steps(f.e, 30);
        assert_int_equal(status_of(f.e).prefilled_tokens, 320);
        use(f.e, 0, 1, WEIGHTS_RECOMPUTE);
        run_all(f.e);
        assert_int_equal(status_of(f.e).prefilled_tokens, 2 * 320);
        for (int s = 0; s < 16; s++) assert_true(check_runs(&got.samples[s], begin, 320).n_checked > 50);
        outcome_free(&got, 1);
        fixture_close(&f);
    }
    close_judges();
}

/* Four prompts of 5 pages that begin with the same 3, at once on an engine that knows none. */
static void prompts_that_begin_alike_compute_that_once(void **state) {
    (void)state;
    int32_t begin[4][320];
    rollout_prompt p[4];
    for (int i = 0; i < 4; i++) {
        for (int t = 0; t < 320; t++) begin[i][t] = t < 200 ? (t * 37 + 5) % 900 : (t * 41 + 7 * i) % 900;
        p[i] = (rollout_prompt){.tokens = begin[i], .n_tokens = 320, .seed = 9};
    }
    outcome expected = {0};
    const int budgets[] = {512, 48, 1000};
    for (int i = 0; i < 3; i++) {
        engine_options o = options(0);
        o.step_tokens = budgets[i];
        o.no_prefix_cache = i == 0;
        fixture f = open_set(0, 0, o);
        rollout_spec spec = {.prompts = p, .n_prompts = 4, .n = N, .sampling = sampling(&f)};
        outcome got = outcome_of(f.e, &spec);
        engine_status s = status_of(f.e);
        assert_int_equal(s.prefilled_tokens, i == 0 ? 4 * 320 : 4 * 320 - 3 * 192);
        assert_int_equal(s.cached_tokens, i == 0 ? 0 : 3 * 192);
        assert_int_equal(got.totals.cached_tokens, s.cached_tokens);
        for (int n = 0; n < 16 && i > 0; n++) assert_same(&got.samples[n], &expected.samples[n], "together");
        if (i == 0)
            expected = got;
        else
            outcome_free(&got, 4);
        fixture_close(&f);
    }
    outcome_free(&expected, 4);
}

/* Two prompts that differ in their first token only have no page in common, also where a step ends with one.
 */
static void prompts_that_differ_before_a_page_do_not_wait(void **state) {
    (void)state;
    make_prompts(0);
    int32_t other[LONG];
    memcpy(other, tokens[1], sizeof other);
    other[0]++;
    engine_options o = options(0);
    enum { SPAN = KV_PAGE_TOKENS / 4 };
    o.span_tokens = SPAN;
    fixture f = open_set(0, 0, o);
    rollout_prompt p[2] = {prompt_of(1), prompt_of(1)};
    p[1].tokens = other;
    rollout_spec spec = {.prompts = p, .n_prompts = 2, .n = 1, .sampling = sampling(&f)};
    outcome got;
    outcome_start(&got, f.e, &spec, NULL);
    for (uint64_t n = 1; n <= LONG / SPAN; n++) {
        run_steps(f.e, 1);
        assert_int_equal(status_of(f.e).prefilled_tokens, 2 * SPAN * n);
    }
    run_all(f.e);
    outcome_free(&got, 2);
    fixture_close(&f);
}

/* ---- Kept rows and too few pages. */

static void kept_rows_that_fill_the_pool_end_one_by_one(void **state) {
    (void)state;
    open_judges(1);
    size_t bytes = page_bytes(1);
    for (int n_pages = 8; n_pages <= 16; n_pages += 2) {
        engine_options o = options(1);
        o.kv_memory = (size_t)n_pages * bytes;
        fixture f = open_set(1, 0, o);
        outcome got, after;
        rollout_prompt p = prompt_of(2), q = prompt_of(1);
        rollout_spec spec = {.prompts = &p, .n_prompts = 1, .n = 6, .sampling = sampling(&f)};
        spec.sampling.max_tokens = 300;
        history.n = 0;
        outcome_start(&got, f.e, &spec, NULL);
        for (int i = 0; i < 20; i++) engine_step(f.e);
        use(f.e, 1, 1, WEIGHTS_KEEP);
        spec = (rollout_spec){.prompts = &q, .n_prompts = 1, .n = 3, .sampling = sampling(&f)};
        outcome_start(&after, f.e, &spec, NULL);
        run_all(f.e);
        assert_int_equal(got.n_done + after.n_done, 2);
        int n_cancelled = 0;
        for (int i = 0; i < 6; i++) {
            const sample *s = &got.samples[i];
            assert_true(s->finish == FINISH_CANCELLED || s->n == 300);
            n_cancelled += s->finish == FINISH_CANCELLED;
            check_runs(s, p.tokens, p.n_tokens);
        }
        assert_true(n_cancelled > 0 && got.samples[0].finish == FINISH_LENGTH);
        for (int i = 0; i < 3; i++) { /* it was never kept, and lost nothing */
            assert_int_equal(after.samples[i].finish, FINISH_LENGTH);
            assert_true(check_runs(&after.samples[i], q.tokens, q.n_tokens).n_checked == MOST);
        }
        assert_nothing_is_left(f.e);
        outcome_free(&got, 1), outcome_free(&after, 1);
        fixture_close(&f);
    }
    close_judges();
}

/* An older row has all of its 6 pages, of 10, and moves.  Beside it two rows fill 2 pages each, of the 4 that
 * they need: then they stand still, and none ends for the other, since its pages are soon enough for both. */
static void kept_rows_wait_for_what_moves_before_them(void **state) {
    (void)state;
    open_judges(0);
    enum { FULL = 2 * KV_PAGE_TOKENS + 1 - 63 }; /* tokens after which a row needs its third page */
    engine_options o = options(0);
    o.kv_memory = 10 * page_bytes(0);
    fixture f = open_set(0, 0, o);
    rollout_prompt p = prompt_of(1), q = prompt_of(2);
    rollout_spec spec = {.prompts = &p, .n_prompts = 1, .n = 1, .sampling = sampling(&f)};
    spec.sampling.max_tokens = 84;
    spec.sampling.calculator = false; /* rows move by a token in each step */
    outcome older, got;
    history.n = 0;
    outcome_start(&older, f.e, &spec, NULL);
    while (status_of(f.e).rows < 1) run_steps(f.e, 1);
    spec.prompts = &q;
    spec.n = 2;
    spec.sampling.max_tokens = 160;
    outcome_start(&got, f.e, &spec, NULL);
    while (status_of(f.e).rows < 3) run_steps(f.e, 1);
    use(f.e, 0, 1, WEIGHTS_KEEP);
    while (!older.n_done) {
        assert_int_equal(f.e->n_tasks, 3);
        run_steps(f.e, 1);
    }
    for (int i = 0; i < 2; i++) assert_int_equal(index_of(f.e, i), FULL);
    run_all(f.e);
    for (int i = 0; i < 2; i++) assert_int_equal(got.samples[i].finish, FINISH_LENGTH);
    assert_int_equal(older.samples[0].finish, FINISH_LENGTH);
    assert_nothing_is_left(f.e);
    outcome_free(&older, 1), outcome_free(&got, 1);
    fixture_close(&f);
    close_judges();
}

/* The youngest gives more pages than the oldest needs: with what is left it does not go on. */
static void a_kept_row_that_ended_is_not_computed_again(void **state) {
    (void)state;
    open_judges(0);
    engine_options o = options(0);
    o.kv_memory = 9 * page_bytes(0);
    o.step_tokens = 30;
    fixture f = open_set(0, 0, o);
    rollout_prompt p[2] = {prompt_of(2), prompt_of(1)};
    rollout_spec spec = {.prompts = p, .n_prompts = 2, .n = 1, .sampling = sampling(&f)};
    spec.sampling.max_tokens = 200;
    outcome got;
    history.n = 0;
    outcome_start(&got, f.e, &spec, NULL);
    while (status_of(f.e).rows < 2) run_steps(f.e, 1);
    use(f.e, 0, 1, WEIGHTS_KEEP);
    run_all(f.e);
    assert_int_equal(got.n_samples, 2);
    assert_int_equal(got.samples[0].finish, FINISH_LENGTH);
    assert_int_equal(got.samples[1].finish, FINISH_CANCELLED);
    assert_in_range(got.samples[1].n, 384 - 300,
                    384 - 300 + 1); /* its six pages are full, and it stood still */
    assert_int_equal(status_of(f.e).prefilled_tokens, 63 + 300);
    assert_nothing_is_left(f.e);
    outcome_free(&got, 2);
    fixture_close(&f);
    close_judges();
}

static void a_run_that_finds_no_memory_fails_its_rollout(void **state) {
    (void)state;
    open_judges(0);
    fixture f = open_set(0, 0, options(0));
    rollout_prompt prompts[N_PROMPTS];
    rollout_spec spec = all_prompts(&f, prompts);
    outcome got, other;
    outcome_start(&got, f.e, &spec, NULL);
    while (status_of(f.e).rows < 16) run_steps(f.e, 1);
    spec.n = 1;
    outcome_start(&other, f.e, &spec, NULL);
    weights *w = load_set(f.e, 0, 1);
    mem_fail_after(0);
    engine_use_weights(f.e, w, 1, WEIGHTS_RECOMPUTE);
    assert_true(mem_fail_stop());
    assert_int_equal(got.n_failed, 1);
    assert_int_equal(got.error.status, COP_ENOMEM);
    run_all(f.e);
    assert_int_equal(got.n_samples + got.n_done, 0);
    assert_int_equal(other.n_done, 1);
    assert_nothing_is_left(f.e);
    outcome_free(&got, N_PROMPTS), outcome_free(&other, N_PROMPTS);
    fixture_close(&f);
    close_judges();
}

/* ---- Sets in memory. */

static void a_set_is_freed_when_nothing_runs_on_it(void **state) {
    (void)state;
    open_judges(0);
    fixture f = open_set(0, 0, options(0));
    rollout_prompt prompts[N_PROMPTS];
    rollout_spec spec = all_prompts(&f, prompts);
    outcome warm = outcome_of(f.e, &spec);
    outcome_free(&warm, N_PROMPTS);
    long live = mem_live();
    outcome got[3];
    history.n = 0;
    for (int i = 0; i < 3; i++) { /* an update in the middle of each: 3 sets at once */
        spec.n = 2;
        outcome_start(&got[i], f.e, &spec, NULL);
        run_steps(f.e, 10);
        assert_int_equal(engine_n_weights(f.e), i + 1);
        if (i < 2) use(f.e, 0, 1 - i, WEIGHTS_FINISH);
    }
    engine_cancel(f.e, f.e->jobs); /* the first rollout, all that ran on the first set */
    assert_int_equal(engine_n_weights(f.e), 2);
    use(f.e, 0, 1, WEIGHTS_RECOMPUTE); /* also rows on older sets */
    assert_int_equal(engine_n_weights(f.e), 1);
    run_all(f.e);
    for (int i = 0; i < 3; i++) {
        int set = i == 1, last = got[i].samples[0].n_runs - 1;
        assert_int_equal(set_named(got[i].samples[0].runs[0].label.digest), set);
        if (i > 0) assert_int_equal(set_named(got[i].samples[0].runs[last].label.digest), 1);
        for (int s = 0; s < 2 * N_PROMPTS; s++) {
            const sample *one = &got[i].samples[s];
            if (one->tokens) check_runs(one, tokens[one->prompt], lengths[one->prompt]);
        }
        outcome_free(&got[i], N_PROMPTS);
    }
    assert_nothing_is_left(f.e);
    assert_int_equal(mem_live(), live);
    fixture_close(&f);
    close_judges();
    assert_int_equal(mem_live(), 0);
}

/* An engine that is closed with several sets in use frees them all. */
static void closing_frees_all_sets(void **state) {
    (void)state;
    open_judges(0);
    fixture f = open_set(0, 0, options(0));
    outcome *got = changed_on_the_way(&f, 0, 16, WEIGHTS_FINISH);
    assert_int_equal(engine_n_weights(f.e), 2);
    fixture_close(&f);
    end_outcome(got);
    close_judges();
    assert_int_equal(mem_live(), 0);
}

/* ---- All of it at once. */

typedef struct flight {
    outcome got;
    engine_job *job;
    bool flying, cancelled;
} flight;
enum { FLIGHTS = 4 };

static void land(flight *l) {
    for (int i = 0; i < N_PROMPTS * N; i++) assert_non_null(l->got.samples[i].tokens);
    outcome_free(&l->got, N_PROMPTS);
    *l = (flight){.flying = false};
}

static engine_options random_options(int c, size_t bytes) {
    const int budgets[] = {3, 30, 100, 512}, spans[] = {0, 1, 10};
    engine_options o = options(c);
    o.kv_memory = (7 + random_below(20)) * bytes;
    o.step_tokens = budgets[random_below(4)];
    o.span_tokens = spans[random_below(3)];
    o.max_rows = 2 + (int)random_below(30);
    o.no_prefix_cache = random_below(4) == 0;
    return o;
}

/* Something that the trainer does at this moment. */
static void disturb(fixture *f, int c, flight flights[FLIGHTS]) {
    const weights_policy policies[] = {WEIGHTS_FINISH, WEIGHTS_FINISH,    WEIGHTS_KEEP,
                                       WEIGHTS_KEEP,   WEIGHTS_RECOMPUTE, WEIGHTS_ABORT};
    flight *l = &flights[random_below(FLIGHTS)];
    switch (random_below(12)) {
    case 0: engine_abort_rows(f->e); break;
    case 1:
        if (l->flying && !l->got.n_done) engine_cancel(f->e, l->job);
        break;
    case 2:
    case 3: engine_pause(f->e, (engine_pause_mode)random_below(3)); break;
    default: use(f->e, c, (int)random_below(SETS), policies[random_below(6)]);
    }
}

static verdict random_changes(int c, size_t bytes) {
    engine_options o = random_options(c, bytes);
    fixture f = open_set(c, 0, o);
    static flight flights[FLIGHTS];
    memset(flights, 0, sizeof flights);
    rollout_prompt prompts[N_PROMPTS];
    rollout_spec spec = all_prompts(&f, prompts);
    history.n = 0;
    verdict sum = {0};
    int n_flown = 0;
    for (long n = 0;; n++) {
        flight *l = &flights[n_flown % FLIGHTS];
        if (n_flown < 2 * FLIGHTS && random_below(60) == 0 && !l->flying) {
            outcome_start(&l->got, f.e, &spec, &l->job);
            l->flying = true;
            n_flown++;
        }
        if (random_below(25) == 0 && history.n < 60) disturb(&f, c, flights);
        bool more = engine_step(f.e);
        status_of(f.e);
        for (int i = 0; i < FLIGHTS; i++) {
            if (!flights[i].flying || !flights[i].got.n_done) continue;
            verdict v = check_outcome(&flights[i].got);
            sum.n_checked += v.n_checked;
            sum.n_kept += v.n_kept;
            land(&flights[i]);
        }
        if (!more && f.e->pause != ENGINE_RUN && random_below(10) == 0) engine_pause(f.e, ENGINE_RUN);
        if (!more && n_flown == 2 * FLIGHTS && !f.e->jobs) break;
        if (n > 100000) fail_msg("it does not come to an end");
    }
    assert_nothing_is_left(f.e);
    fixture_close(&f);
    return sum;
}

static void random_changes_are_told_as_they_were(void **state) {
    (void)state;
    for (int c = 0; c < N_CASES; c++) {
        size_t bytes = page_bytes(c);
        open_judges(c);
        verdict sum = {0};
        for (uint32_t seed = 0; seed < 2; seed++) {
            random_state = 1000 * (uint32_t)c + seed;
            verdict v = random_changes(c, bytes);
            sum.n_checked += v.n_checked;
            sum.n_kept += v.n_kept;
        }
        assert_true(sum.n_checked > 1000 && sum.n_kept > 50);
        close_judges();
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(finish_lets_rows_end_under_the_old_set),
        cmocka_unit_test(rows_of_both_sets_move_in_each_step),
        cmocka_unit_test(a_set_that_drew_nothing_is_not_named),
        cmocka_unit_test(recompute_goes_on_under_the_new_set),
        cmocka_unit_test(keep_goes_on_with_what_it_has),
        cmocka_unit_test(a_row_that_has_drawn_nothing_keeps_nothing),
        cmocka_unit_test(abort_ends_rows_and_starts_the_others),
        cmocka_unit_test(aborting_rows_needs_no_new_weights),
        cmocka_unit_test(an_equal_digest_changes_the_label_only),
        cmocka_unit_test(pages_of_one_set_never_serve_another),
        cmocka_unit_test(recomputing_samples_compute_their_prompt_once),
        cmocka_unit_test(prompts_that_begin_alike_compute_that_once),
        cmocka_unit_test(prompts_that_differ_before_a_page_do_not_wait),
        cmocka_unit_test(kept_rows_that_fill_the_pool_end_one_by_one),
        cmocka_unit_test(kept_rows_wait_for_what_moves_before_them),
        cmocka_unit_test(a_kept_row_that_ended_is_not_computed_again),
        cmocka_unit_test(a_run_that_finds_no_memory_fails_its_rollout),
        cmocka_unit_test(a_set_is_freed_when_nothing_runs_on_it),
        cmocka_unit_test(closing_frees_all_sets),
        cmocka_unit_test(random_changes_are_told_as_they_were),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
