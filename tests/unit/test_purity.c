/* A sample is a pure function of weights, prompt, sampling, seed and index: whatever runs beside it, however
 * the work is cut, every bit stays, log-probabilities included.  On gen-F (windows of 128, sequence_len 256)
 * and calc-d4 (calculator), with prompts and completions that reach past windows, pages, chunks and splits.
 */
#include "engine_fixture.h"

enum { N_PROMPTS = 4, N = 4, LONG = 300 };

static const struct {
    const char *model;
    precision profile;
} cases[] = {{"calc-d4", PRECISION_BF16},
             {"calc-d4", PRECISION_F32},
             {"gen-F", PRECISION_BF16},
             {"gen-F", PRECISION_F32}};
enum { N_CASES = sizeof cases / sizeof cases[0] };

static engine_options options(precision p) {
    engine_options o = engine_defaults();
    o.profile = p;
    o.n_threads = 1;
    o.kv_memory = 64 << 20;
    return o;
}

/* Prompts: one of calc-d4's chats, 300 tokens, 63 and 64 tokens (the edges of a page). */
static int32_t tokens[N_PROMPTS][LONG];
static const size_t lengths[N_PROMPTS] = {26, LONG, 63, 64};

static int make_prompts(void **state) {
    (void)state;
    json_t *lines = load_lines("tests/golden/rollout_greedy.jsonl");
    size_t n;
    int32_t *chat = ids_of(json_object_get(json_array_get(lines, 0), "prompt"), &n);
    assert_int_equal(n, lengths[0]);
    uint32_t x = 12345;
    for (int p = 0; p < N_PROMPTS; p++) {
        for (size_t i = 0; i < lengths[p]; i++) {
            x = x * 1664525u + 1013904223u;
            tokens[p][i] = p == 0 && chat[i] < 1001 ? chat[i] : (int32_t)(x >> 8) % 990;
        }
    }
    free(chat);
    json_decref(lines);
    return 0;
}

static rollout_prompt prompt_of(int p) {
    static const char *const ids[N_PROMPTS] = {NULL, "b", "c", "d"};
    return (rollout_prompt){.tokens = tokens[p],
                            .n_tokens = lengths[p],
                            .id = ids[p],
                            .n_id = ids[p] ? 1 : 0,
                            .seed = 42 + ((uint64_t)p << 33)};
}

static rollout_sampling sampling(const fixture *f) {
    rollout_sampling s = rollout_sampling_defaults();
    s.max_tokens = 90;
    s.temperature = 0.9;
    s.top_k = 50;
    s.logprobs = s.model_logprobs = true;
    s.calculator = engine_has_calculator(f->e);
    s.has_stop_tokens = true; /* none: all run to their full length */
    return s;
}

static rollout_spec all_prompts(const fixture *f, rollout_prompt prompts[N_PROMPTS]) {
    for (int p = 0; p < N_PROMPTS; p++) prompts[p] = prompt_of(p);
    return (rollout_spec){.prompts = prompts, .n_prompts = N_PROMPTS, .n = N, .sampling = sampling(f)};
}

static void assert_all_same(const outcome *got, const outcome *want, const char *what) {
    for (int i = 0; i < N_PROMPTS * N; i++) assert_same(&got->samples[i], &want->samples[i], what);
}

/* The same rollout on an engine that cuts the work in another way; its counters. */
static engine_status with_options(int c, const outcome *want, engine_options o, const char *isa,
                                  const char *what) {
    if (isa) setenv("COPPICE_ISA", isa, 1);
    fixture f = fixture_open(cases[c].model, o);
    unsetenv("COPPICE_ISA");
    rollout_prompt prompts[N_PROMPTS];
    rollout_spec spec = all_prompts(&f, prompts);
    outcome got = outcome_of(f.e, &spec);
    assert_all_same(&got, want, what);
    engine_status s;
    engine_read_status(f.e, &s);
    assert_int_equal(s.pages_used, 0); /* everything was given back */
    outcome_free(&got, N_PROMPTS);
    fixture_close(&f);
    return s;
}

static outcome baseline(fixture *f, int c) {
    *f = fixture_open(cases[c].model, options(cases[c].profile));
    rollout_prompt prompts[N_PROMPTS];
    rollout_spec spec = all_prompts(f, prompts);
    return outcome_of(f->e, &spec);
}

static void however_the_work_is_cut(void **state) {
    (void)state;
    for (int c = 0; c < N_CASES; c++) {
        fixture f;
        outcome want = baseline(&f, c);
        const int spans[] = {1, 7, 64};
        for (int i = 0; i < 3; i++) {
            engine_options o = options(cases[c].profile);
            o.span_tokens = spans[i];
            with_options(c, &want, o, NULL, "prefill and forced spans in pieces");
        }
        engine_options o = options(cases[c].profile);
        o.n_threads = 2;
        with_options(c, &want, o, NULL, "two threads");
        o.n_threads = 3;
        o.step_tokens = 50;
        with_options(c, &want, o, NULL, "small steps");
        o = options(cases[c].profile);
        o.max_rows = 3;
        with_options(c, &want, o, NULL, "three rows at once");
        outcome_free(&want, N_PROMPTS);
        fixture_close(&f);
    }
}

static void scalar_and_avx2_agree(void **state) {
    (void)state;
    for (int c = 0; c < N_CASES; c++) {
        fixture f;
        outcome want = baseline(&f, c);
        with_options(c, &want, options(cases[c].profile), "scalar", "scalar");
        outcome_free(&want, N_PROMPTS);
        fixture_close(&f);
    }
}

static size_t page_bytes(const fixture *f, int c) {
    const arch *a = engine_arch(f->e);
    size_t element = cases[c].profile == PRECISION_BF16 ? 2 : 4;
    return 2 * (size_t)(a->n_layers * a->n_kv_heads * a->head_dim) * KV_PAGE_TOKENS * element;
}

/* ceil((300 + 90) / 64) = 7 pages is the least: the long prompt's last page cannot even be copied. */
static void pools_too_small_for_all_change_nothing(void **state) {
    (void)state;
    const size_t n_pages[] = {7, 9, 17, 24};
    for (int c = 0; c < N_CASES; c++) {
        fixture f;
        outcome want = baseline(&f, c);
        for (int i = 0; i < 4; i++) {
            engine_options o = options(cases[c].profile);
            o.kv_memory = n_pages[i] * page_bytes(&f, c);
            o.no_prefix_cache = (i + c) % 2;
            o.step_tokens = i == 1 ? 100 : o.step_tokens; /* it is taken while the long prompt is computed */
            engine_status s = with_options(c, &want, o, NULL, "few pages");
            assert_int_equal(s.pages_total, n_pages[i]);
            assert_true(s.preemptions > 0);
        }
        outcome_free(&want, N_PROMPTS);
        fixture_close(&f);
    }
}

/* ---- The prefix cache. */

static void warm_cold_and_no_cache_agree(void **state) {
    (void)state;
    for (int c = 0; c < N_CASES; c++) {
        fixture f;
        outcome want = baseline(&f, c);
        assert_int_equal(want.totals.cached_tokens, 0);
        rollout_prompt prompts[N_PROMPTS];
        rollout_spec spec = all_prompts(&f, prompts);
        outcome warm = outcome_of(f.e, &spec);
        /* All full pages but one that holds the last token: of 26, 300, 63 and 64 tokens. */
        assert_int_equal(warm.totals.cached_tokens, 0 + 256 + 0 + 0);
        engine_status s;
        engine_read_status(f.e, &s);
        assert_int_equal(s.cached_tokens, 256);
        assert_int_equal(s.prefilled_tokens, 2 * (26 + 300 + 63 + 64) - 256);
        assert_true(s.pages_cached > 0);
        assert_int_equal(s.pages_used + s.pages_cached + s.pages_free, s.pages_total);
        assert_all_same(&warm, &want, "warm");
        outcome_free(&warm, N_PROMPTS);
        engine_options o = options(cases[c].profile);
        o.no_prefix_cache = true;
        s = with_options(c, &want, o, NULL, "no cache");
        assert_int_equal(s.pages_cached + s.cached_tokens, 0);
        outcome_free(&want, N_PROMPTS);
        fixture_close(&f);
    }
}

/* A later turn begins with a prompt and its completion, whose full pages are known too. */
static void a_turn_after_a_completion_is_cached_and_pure(void **state) {
    (void)state;
    for (int c = 0; c < N_CASES; c++) {
        fixture f;
        outcome first = baseline(&f, c), got[2];
        int32_t turn[LONG + 90 + 10];
        size_t n = lengths[1];
        memcpy(turn, tokens[1], n * sizeof *turn);
        memcpy(turn + n, first.samples[N + 2].tokens, 90 * sizeof *turn);
        memcpy(turn + n + 90, tokens[0], 10 * sizeof *turn);
        rollout_prompt prompt = {.tokens = turn, .n_tokens = n + 100, .seed = 3};
        rollout_spec spec = {.prompts = &prompt, .n_prompts = 1, .n = 2, .sampling = sampling(&f)};
        for (int warm = 0; warm < 2; warm++) {
            fixture fresh = fixture_open(cases[c].model, options(cases[c].profile));
            got[warm] = outcome_of(warm ? f.e : fresh.e, &spec);
            assert_int_equal(got[warm].totals.cached_tokens, warm ? 384 : 0); /* of 390 - 1 computed ones */
            fixture_close(&fresh);
        }
        for (int i = 0; i < 2; i++) assert_same(&got[1].samples[i], &got[0].samples[i], "a later turn");
        outcome_free(&got[0], 1), outcome_free(&got[1], 1);
        outcome_free(&first, N_PROMPTS);
        fixture_close(&f);
    }
}

static void samples_depend_on_their_index_and_not_on_n(void **state) {
    (void)state;
    for (int c = 0; c < N_CASES; c++) {
        fixture f;
        outcome want = baseline(&f, c);
        for (int p = 0; p < N_PROMPTS; p += 3) {
            rollout_prompt prompt = prompt_of(p);
            rollout_spec spec = {.prompts = &prompt, .n_prompts = 1, .n = 64, .sampling = sampling(&f)};
            outcome got = outcome_of(f.e, &spec);
            for (int i = 0; i < N; i++) assert_same(&got.samples[i], &want.samples[p * N + i], "n = 64");
            outcome_free(&got, 1);
            prompt.has_sample = true; /* and alone */
            prompt.sample = 3;
            spec.n = 1;
            got = outcome_of(f.e, &spec);
            assert_int_equal(got.samples[0].index, 3);
            assert_same(&got.samples[0], &want.samples[p * N + 3], "alone");
            outcome_free(&got, 1);
        }
        outcome_free(&want, N_PROMPTS);
        fixture_close(&f);
    }
}

static void company_and_order_change_nothing(void **state) {
    (void)state;
    for (int c = 0; c < N_CASES; c++) {
        fixture f;
        outcome want = baseline(&f, c);
        /* 40 other rows are half way when it starts, and more follow. */
        int32_t other[70];
        for (int i = 0; i < 70; i++) other[i] = (i * 37 + 5) % 900;
        rollout_prompt prompts[N_PROMPTS], company = {.tokens = other, .n_tokens = 70, .seed = 9};
        rollout_spec spec = all_prompts(&f, prompts), beside = spec;
        beside.prompts = &company;
        beside.n_prompts = 1;
        beside.n = 40;
        beside.sampling.max_tokens = 60;
        outcome first, second, got;
        outcome_start(&first, f.e, &beside, NULL);
        for (int i = 0; i < 20; i++) engine_step(f.e);
        /* The prompts the other way round. */
        for (int p = 0; p < N_PROMPTS; p++) prompts[p] = prompt_of(N_PROMPTS - 1 - p);
        outcome_start(&got, f.e, &spec, NULL);
        for (int i = 0; i < 5; i++) engine_step(f.e);
        outcome_start(&second, f.e, &beside, NULL);
        run_all(f.e);
        assert_int_equal(got.n_done + first.n_done + second.n_done, 3);
        for (int p = 0; p < N_PROMPTS; p++) {
            for (int i = 0; i < N; i++)
                assert_same(&got.samples[p * N + i], &want.samples[(N_PROMPTS - 1 - p) * N + i],
                            "in company");
        }
        for (int i = 0; i < 40; i++) assert_same(&first.samples[i], &second.samples[i], "the company");
        outcome_free(&got, N_PROMPTS), outcome_free(&first, 1), outcome_free(&second, 1);
        outcome_free(&want, N_PROMPTS);
        fixture_close(&f);
    }
}

/* The same tokens in the same place after others are another page. */
static void a_page_after_another_beginning_is_not_taken(void **state) {
    (void)state;
    for (int c = 0; c < N_CASES; c++) {
        fixture f;
        outcome first = baseline(&f, c), got[2];
        int32_t other[LONG];
        memcpy(other, tokens[1], sizeof other);
        memcpy(other, tokens[3], 64 * sizeof *other);
        other[63] ^= 1; /* so that it is none of the known beginnings */
        rollout_prompt prompt = {.tokens = other, .n_tokens = LONG, .seed = 3};
        rollout_spec spec = {.prompts = &prompt, .n_prompts = 1, .n = 2, .sampling = sampling(&f)};
        for (int warm = 0; warm < 2; warm++) {
            fixture fresh = fixture_open(cases[c].model, options(cases[c].profile));
            got[warm] = outcome_of(warm ? f.e : fresh.e, &spec);
            assert_int_equal(got[warm].totals.cached_tokens, 0);
            fixture_close(&fresh);
        }
        for (int i = 0; i < 2; i++) assert_same(&got[1].samples[i], &got[0].samples[i], "another beginning");
        outcome_free(&got[0], 1), outcome_free(&got[1], 1);
        outcome_free(&first, N_PROMPTS);
        fixture_close(&f);
    }
}

/* ---- All of it at once: jobs that arrive and are cancelled at random steps, in engines of random size. */

static uint32_t random_state;
static uint32_t random_below(uint32_t n) {
    random_state = random_state * 1664525u + 1013904223u;
    return (random_state >> 8) % n;
}

typedef enum flight_kind { FLIGHT_ALL, FLIGHT_SAMPLES, FLIGHT_CONTINUED, FLIGHT_SCORE } flight_kind;
typedef struct flight {
    flight_kind kind;
    int p, i, cut; /* its prompt, the sample that is continued or scored, how much of that is given */
    engine_job *job;
    bool flying, cancelled;
    outcome got;
    scores scored;
} flight;

static bool has_ended(const flight *l) {
    return l->kind == FLIGHT_SCORE ? l->scored.n_done > 0 : l->got.n_done + l->got.n_failed > 0;
}

static void fly_score(const fixture *f, flight *l, const outcome *want) {
    static int32_t whole[LONG + 100];
    const int32_t *ids = whole;
    const sample *s = &want->samples[l->p * N + l->i];
    size_t n = lengths[l->p] + (size_t)s->n;
    memcpy(whole, tokens[l->p], lengths[l->p] * sizeof *whole);
    memcpy(whole + lengths[l->p], s->tokens, (size_t)s->n * sizeof *whole);
    score_spec spec = {.sequences = &ids,
                       .lengths = &n,
                       .n_sequences = 1,
                       .temperature = 1,
                       .context = &l->scored,
                       .scored = on_scored,
                       .done = on_scores_done,
                       .failed = on_scores_failed};
    cop_error err;
    assert_int_equal(engine_submit_score(f->e, &spec, &l->job, &err), COP_OK);
}

static void fly(const fixture *f, flight *l, const outcome *want) {
    *l = (flight){.kind = (flight_kind)random_below(4),
                  .p = (int)random_below(N_PROMPTS),
                  .i = (int)random_below(N),
                  .flying = true};
    if (l->kind == FLIGHT_SCORE) {
        fly_score(f, l, want);
        return;
    }
    rollout_prompt prompts[N_PROMPTS];
    rollout_spec spec = all_prompts(f, prompts);
    if (l->kind != FLIGHT_ALL) {
        prompts[0] = prompt_of(l->p);
        spec.n_prompts = 1;
        spec.n = 1 + random_below(N);
    }
    if (l->kind == FLIGHT_CONTINUED) {
        const sample *s = &want->samples[l->p * N + l->i];
        l->cut = (int)random_below((uint32_t)s->n + 1);
        spec.n = 1;
        prompts[0].has_sample = true;
        prompts[0].sample = (uint32_t)l->i;
        prompts[0].prefix = s->tokens;
        prompts[0].n_prefix = (size_t)l->cut;
    }
    outcome_start(&l->got, f->e, &spec, &l->job);
}

/* Whatever was told has the bits of the baseline; what was cancelled, those of its beginning. */
static void land(flight *l, const outcome *want) {
    if (l->kind == FLIGHT_SCORE) {
        const sample *s = &want->samples[l->p * N + l->i];
        for (int t = 0; t < s->n && !l->cancelled; t++) {
            if (s->mask[t])
                assert_memory_equal(&l->scored.logprobs[lengths[l->p] + (size_t)t], &s->model_logprobs[t], 4);
        }
        return;
    }
    size_t n_prompts = l->kind == FLIGHT_ALL ? N_PROMPTS : 1;
    for (size_t i = 0; i < n_prompts * l->got.n; i++) {
        sample *s = &l->got.samples[i];
        if (!s->tokens) continue; /* abandoned before */
        size_t p = l->kind == FLIGHT_ALL ? s->prompt : (size_t)l->p;
        sample part = want->samples[p * N + s->index];
        if (s->finish == FINISH_CANCELLED) {
            assert_true(l->cancelled && s->n <= part.n - l->cut);
            part.n = l->cut + s->n;
            part.finish = FINISH_CANCELLED;
        }
        assert_same_from(s, &part, l->cut, "all at once");
    }
    outcome_free(&l->got, n_prompts);
}

static engine_options random_options(int c, size_t bytes) {
    const int budgets[] = {3, 30, 100, 512}, spans[] = {0, 1, 10};
    engine_options o = options(cases[c].profile);
    o.kv_memory = (7 + random_below(8)) * bytes;
    o.step_tokens = budgets[random_below(4)];
    o.span_tokens = spans[random_below(3)];
    o.max_rows = 2 + (int)random_below(30);
    o.no_prefix_cache = random_below(3) == 0;
    return o;
}

static void check_status(const fixture *f, const engine_options *o) {
    engine_status s;
    engine_read_status(f->e, &s);
    assert_int_equal(s.pages_used + s.pages_cached + s.pages_free, s.pages_total);
    assert_true(s.pages_shared <= s.pages_used);
    assert_true(s.rows <= (uint64_t)o->max_rows);
    assert_true(!o->no_prefix_cache || s.pages_cached == 0);
}

/* Cancel or abandon a flight that has not ended. */
static void call_off(const fixture *f, flight *l) {
    l->cancelled = true;
    if (random_below(2)) {
        engine_cancel(f->e, l->job);
        assert_true(has_ended(l));
    } else {
        engine_abandon(f->e, l->job);
        assert_false(has_ended(l));
        l->flying = false;
    }
}

static engine_status random_traffic(int c, const outcome *want, size_t bytes, int *n_called_off) {
    enum { FLIGHTS = 12 };
    static flight flights[FLIGHTS];
    engine_options o = random_options(c, bytes);
    fixture f = fixture_open(cases[c].model, o);
    int n_flown = 0, n_steps = 0;
    for (bool works = true; works || n_flown < FLIGHTS; n_steps++) {
        if (n_flown < FLIGHTS && random_below(8) == 0) fly(&f, &flights[n_flown++], want);
        flight *l = &flights[random_below(FLIGHTS)];
        if (l < flights + n_flown && l->flying && !has_ended(l) && random_below(400) == 0) {
            call_off(&f, l);
            ++*n_called_off;
        }
        works = engine_step(f.e);
        check_status(&f, &o);
        if (n_steps > 100000) fail_msg("it does not come to an end");
    }
    for (int i = 0; i < FLIGHTS; i++) {
        assert_true(has_ended(&flights[i]) || !flights[i].flying);
        land(&flights[i], want);
    }
    engine_status s;
    engine_read_status(f.e, &s);
    assert_int_equal(s.pages_used + s.rows + s.queued + s.waiting_requests, 0);
    fixture_close(&f);
    return s;
}

static void random_traffic_changes_nothing(void **state) {
    (void)state;
    for (int c = 0; c < N_CASES; c++) {
        fixture f;
        outcome want = baseline(&f, c);
        uint64_t n_preemptions = 0, n_cached = 0;
        int n_called_off = 0;
        for (uint32_t seed = 0; seed < 5; seed++) {
            random_state = 100 * (uint32_t)c + seed;
            engine_status s = random_traffic(c, &want, page_bytes(&f, c), &n_called_off);
            n_preemptions += s.preemptions;
            n_cached += s.cached_tokens;
        }
        assert_true(n_preemptions > 10 && n_cached > 0 && n_called_off > 0);
        outcome_free(&want, N_PROMPTS);
        fixture_close(&f);
    }
}

/* ---- Scoring. */

static void score_sample(fixture *f, const sample *s, int p, double temperature, const float *want,
                         const char *what) {
    int32_t whole[LONG + 100];
    memcpy(whole, tokens[p], lengths[p] * sizeof *whole);
    memcpy(whole + lengths[p], s->tokens, (size_t)s->n * sizeof *whole);
    size_t n = lengths[p] + (size_t)s->n;
    scores got = scores_of(f->e, whole, n, 0, temperature);
    for (int i = 0; i < s->n; i++) {
        if (s->mask[i] && memcmp(&got.logprobs[lengths[p] + (size_t)i], &want[i], 4))
            fail_msg("%s: token %d scores %.9g, the rollout said %.9g", what, i,
                     got.logprobs[lengths[p] + (size_t)i], want[i]);
    }
}

static void a_rollout_scores_as_it_was_sampled(void **state) {
    (void)state;
    for (int c = 0; c < N_CASES; c++) {
        fixture f;
        outcome want = baseline(&f, c);
        for (int i = 0; i < N_PROMPTS * N; i += 3)
            score_sample(&f, &want.samples[i], i / N, 1.0, want.samples[i].model_logprobs, "model_logprobs");
        outcome_free(&want, N_PROMPTS);

        rollout_prompt prompts[N_PROMPTS]; /* nothing cut: at its temperature also those of `logprobs` */
        rollout_spec spec = all_prompts(&f, prompts);
        spec.sampling.top_k = 0;
        spec.sampling.temperature = 1.3;
        want = outcome_of(f.e, &spec);
        for (int i = 0; i < N_PROMPTS * N; i += 5)
            score_sample(&f, &want.samples[i], i / N, 1.3, want.samples[i].logprobs,
                         "logprobs at its temperature");
        outcome_free(&want, N_PROMPTS);
        fixture_close(&f);
    }
}

/* ---- Continuing. */

static void continued(fixture *f, const sample *whole, int p, rollout_sampling s) {
    for (int cut = 0; cut <= whole->n; cut++) {
        if (cut == whole->n && whole->finish == FINISH_STOP) break; /* nothing to continue */
        rollout_prompt prompt = prompt_of(p);
        prompt.has_sample = true;
        prompt.sample = whole->index;
        prompt.prefix = whole->tokens;
        prompt.n_prefix = (size_t)cut;
        rollout_spec spec = {.prompts = &prompt, .n_prompts = 1, .n = 1, .sampling = s};
        outcome got = outcome_of(f->e, &spec);
        assert_same_from(&got.samples[0], whole, cut, "continued");
        int told = 0;
        for (int i = 0; i < whole->n_calls; i++) {
            if (whole->calls[i].at < cut) continue;
            assert_true(told < got.samples[0].n_calls);
            assert_int_equal(got.samples[0].calls[told++].at, whole->calls[i].at - cut);
        }
        assert_int_equal(got.samples[0].n_calls, told);
        outcome_free(&got, 1);
    }
}

static void a_rollout_cut_anywhere_and_continued_is_the_whole_one(void **state) {
    (void)state;
    for (int c = 0; c < N_CASES; c++) {
        fixture f;
        outcome want = baseline(&f, c);
        for (int p = 0; p < N_PROMPTS; p++) continued(&f, &want.samples[p * N + 1], p, sampling(&f));
        outcome_free(&want, N_PROMPTS);
        fixture_close(&f);
    }
}

static void tool_answers_cut_anywhere_are_continued_too(void **state) {
    (void)state;
    fixture f = fixture_open("calc-d4", options(PRECISION_BF16));
    json_t *lines = load_lines("tests/golden/rollout_greedy.jsonl");
    int n_calls = 0;
    for (size_t i = 0; i < 4; i++) {
        size_t n;
        int32_t *chat = ids_of(json_object_get(json_array_get(lines, i), "prompt"), &n);
        memcpy(tokens[1], chat, n * sizeof *chat); /* borrow the long prompt's place */
        rollout_prompt prompt = {
            .tokens = chat, .n_tokens = n, .id = "b", .n_id = 1, .seed = 42 + ((uint64_t)1 << 33)};
        rollout_sampling s = rollout_sampling_defaults();
        s.logprobs = s.model_logprobs = s.calculator = true;
        s.max_tokens = 96;
        rollout_spec spec = {.prompts = &prompt, .n_prompts = 1, .n = 1, .sampling = s};
        outcome whole = outcome_of(f.e, &spec);
        n_calls += whole.samples[0].n_calls;
        for (int cut = 0; cut < whole.samples[0].n; cut++) {
            rollout_prompt part = prompt;
            part.has_sample = true;
            part.prefix = whole.samples[0].tokens;
            part.n_prefix = (size_t)cut;
            spec.prompts = &part;
            outcome got = outcome_of(f.e, &spec);
            assert_same_from(&got.samples[0], &whole.samples[0], cut, "continued");
            outcome_free(&got, 1);
        }
        outcome_free(&whole, 1);
        free(chat);
    }
    assert_true(n_calls >= 4);
    json_decref(lines);
    fixture_close(&f);
}

static void seeds_prompts_and_samples_share_no_noise(void **state) {
    (void)state;
    fixture f = fixture_open("gen-F", options(PRECISION_F32));
    rollout_sampling s = sampling(&f);
    s.temperature = 100; /* nearly uniform: the noise decides */
    s.top_k = 0;
    s.max_tokens = 64;
    /* The same tokens under two seeds, two ids, and two indices. */
    rollout_prompt prompts[3] = {prompt_of(3), prompt_of(3), prompt_of(3)};
    prompts[1].seed++;
    prompts[2].id = "e";
    rollout_spec spec = {.prompts = prompts, .n_prompts = 3, .n = 2, .sampling = s};
    outcome o = outcome_of(f.e, &spec);
    for (int i = 0; i < 6; i++) {
        for (int j = 0; j < i; j++) {
            int equal = 0;
            for (int t = 0; t < 64; t++) equal += o.samples[i].tokens[t] == o.samples[j].tokens[t];
            assert_in_range(equal, 0, 3); /* 64 draws of 1001: 0.06 expected */
        }
    }
    outcome_free(&o, 3);
    fixture_close(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(however_the_work_is_cut),
        cmocka_unit_test(scalar_and_avx2_agree),
        cmocka_unit_test(pools_too_small_for_all_change_nothing),
        cmocka_unit_test(warm_cold_and_no_cache_agree),
        cmocka_unit_test(a_turn_after_a_completion_is_cached_and_pure),
        cmocka_unit_test(samples_depend_on_their_index_and_not_on_n),
        cmocka_unit_test(company_and_order_change_nothing),
        cmocka_unit_test(a_page_after_another_beginning_is_not_taken),
        cmocka_unit_test(random_traffic_changes_nothing),
        cmocka_unit_test(a_rollout_scores_as_it_was_sampled),
        cmocka_unit_test(a_rollout_cut_anywhere_and_continued_is_the_whole_one),
        cmocka_unit_test(tool_answers_cut_anywhere_are_continued_too),
        cmocka_unit_test(seeds_prompts_and_samples_share_no_noise),
    };
    return cmocka_run_group_tests(tests, make_prompts, NULL);
}
