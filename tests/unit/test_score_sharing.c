/* Sequences of a score that begin alike are computed once, and score as each alone; under one set of weights.
 */
#include "weights_fixture.h"

/* ---- Scores. */

enum { SEQUENCES = 12, MOST_TOP = 3, LONGEST = 330 };

/* Everything that is told of a sequence. */
typedef struct told {
    bool was;
    float logprobs[LONGEST], top_logprobs[LONGEST * MOST_TOP], next_logprobs[MOST_TOP];
    int32_t top_ids[LONGEST * MOST_TOP], next_ids[MOST_TOP];
} told;
typedef struct score_run {
    told *of; /* [n_sequences] */
    int n_done;
    weights_label label;
} score_run;

static void tell_scored(void *context, size_t i, const score_result *s) {
    told *t = &((score_run *)context)->of[i];
    assert_false(t->was);
    t->was = true;
    memcpy(t->logprobs, s->logprobs, s->n * sizeof(float));
    if (s->top == 0) return;
    size_t n = s->n * (size_t)s->top;
    memcpy(t->top_logprobs, s->top_logprobs, n * sizeof(float));
    memcpy(t->top_ids, s->top_ids, n * sizeof(int32_t));
    memcpy(t->next_logprobs, s->next_logprobs, (size_t)s->top * sizeof(float));
    memcpy(t->next_ids, s->next_ids, (size_t)s->top * sizeof(int32_t));
}
static void tell_scores_done(void *context, const weights_label *w) {
    ((score_run *)context)->n_done++;
    ((score_run *)context)->label = *w;
}

static engine_job *start_score(engine *e, score_run *to, const int32_t *const *ids, const size_t *n,
                               size_t n_sequences, int top, double temperature) {
    *to = (score_run){.of = calloc(n_sequences, sizeof(told))};
    score_spec spec = {.sequences = ids,
                       .lengths = n,
                       .n_sequences = n_sequences,
                       .top = top,
                       .temperature = temperature,
                       .context = to,
                       .scored = tell_scored,
                       .done = tell_scores_done,
                       .failed = on_scores_failed};
    cop_error err;
    engine_job *j;
    assert_int_equal(engine_submit_score(e, &spec, &j, &err), COP_OK);
    return j;
}

/* Sequences that begin alike, by random lengths about the edges of pages. */
static void make_family(int32_t ids[SEQUENCES][LONGEST], size_t n[SEQUENCES]) {
    for (int i = 0; i < SEQUENCES; i++) {
        const uint32_t edges[] = {1, 63, 64, 65, 66, 128, 129, 130, 193, 300};
        uint32_t common = i == 0 ? 0 : edges[random_below(10)] + random_below(2);
        n[i] = random_below(3) ? 1 + random_below(LONGEST) : edges[random_below(10)];
        for (uint32_t t = 0; t < LONGEST; t++)
            ids[i][t] = t < common ? ids[i - 1][t] : (int32_t)random_below(990);
    }
}

static void sequences_that_share_score_as_alone(void **state) {
    (void)state;
    static int32_t ids[SEQUENCES][LONGEST];
    size_t n[SEQUENCES], bytes[N_CASES];
    for (int c = 0; c < N_CASES; c++) bytes[c] = page_bytes(c);
    for (uint32_t seed = 0; seed < 12; seed++) {
        int c = (int)seed % N_CASES, top = seed % 2 ? MOST_TOP : 0;
        double temperature = seed % 4 < 2 ? 1.0 : 0.7;
        random_state = seed;
        make_family(ids, n);
        const int budgets[] = {3, 30, 100, 512}, spans[] = {0, 1, 10};
        engine_options plain = options(c), o = plain;
        plain.no_prefix_cache = true;
        o.step_tokens = budgets[random_below(4)];
        o.span_tokens = spans[random_below(3)];
        o.kv_memory = (6 + random_below(8)) * bytes[c];
        o.no_prefix_cache = random_below(4) == 0;
        fixture alone = open_set(c, 0, plain), f = open_set(c, 0, o);
        const int32_t *at[SEQUENCES];
        score_run all;
        for (int i = 0; i < SEQUENCES; i++) at[i] = ids[i];
        start_score(f.e, &all, at, n, SEQUENCES, top, temperature);
        run_all(f.e);
        for (int i = 0; i < SEQUENCES; i++) {
            score_run one;
            start_score(alone.e, &one, &at[i], &n[i], 1, top, temperature);
            run_all(alone.e);
            assert_memory_equal(&all.of[i], one.of, sizeof(told));
            free(one.of);
        }
        assert_nothing_is_left(f.e);
        free(all.of);
        fixture_close(&alone), fixture_close(&f);
    }
}

/* 16 sequences of 300 tokens that differ in the last one, in steps of 30: 10 for the first, and 15 times the
 * last 44 tokens. */
static void what_sequences_share_is_computed_once(void **state) {
    (void)state;
    static int32_t ids[16][LONG];
    make_prompts(0);
    const int32_t *at[16];
    size_t n[16];
    for (int i = 0; i < 16; i++) {
        memcpy(ids[i], tokens[1], sizeof ids[i]);
        ids[i][LONG - 1] = i;
        at[i] = ids[i];
        n[i] = LONG;
    }
    engine_options o = options(0);
    o.step_tokens = 30;
    fixture f = open_set(0, 0, o);
    score_run all;
    start_score(f.e, &all, at, n, 16, 0, 1.0);
    run_all(f.e);
    assert_in_range(status_of(f.e).steps, (299 + 15 * 43) / 30, (299 + 15 * 43) / 30 + 2);
    free(all.of);
    fixture_close(&f);
}

static void a_score_ends_under_the_weights_it_began_with(void **state) {
    (void)state;
    open_judges(0);
    static int32_t ids[SEQUENCES][LONGEST];
    const int32_t *at[SEQUENCES];
    size_t n[SEQUENCES];
    random_state = 7;
    make_family(ids, n);
    for (int i = 0; i < SEQUENCES; i++) at[i] = ids[i];
    engine_options o = options(0);
    o.step_tokens = 40;
    fixture f = open_set(0, 0, o);
    score_run first, second, expected[SETS];
    history.n = 0;
    start_score(f.e, &first, at, n, SEQUENCES, 2, 1.0);
    run_steps(f.e, 10);
    use(f.e, 0, 1, WEIGHTS_ABORT); /* which is for rows only */
    assert_int_equal(engine_n_weights(f.e), 2);
    run_steps(f.e, 3);
    use(f.e, 0, 1, WEIGHTS_KEEP); /* a label only */
    start_score(f.e, &second, at, n, SEQUENCES, 2, 1.0);
    run_steps(f.e, 10);
    use(f.e, 0, 1, WEIGHTS_KEEP);
    run_all(f.e);
    for (int i = 0; i < SETS; i++) {
        start_score(judges[i].e, &expected[i], at, n, SEQUENCES, 2, 1.0);
        run_all(judges[i].e);
    }
    assert_memory_equal(first.of, expected[0].of, SEQUENCES * sizeof(told));
    assert_memory_equal(second.of, expected[1].of, SEQUENCES * sizeof(told));
    assert_int_equal(first.label.version, 0);
    assert_int_equal(set_named(first.label.digest), 0);
    assert_int_equal(second.label.version, 2);
    assert_int_equal(set_named(second.label.digest), 1);
    assert_nothing_is_left(f.e);
    free(first.of), free(second.of), free(expected[0].of), free(expected[1].of);
    fixture_close(&f);
    close_judges();
}

/* Nothing of it has started: it waits behind a prompt that takes whole steps. */
static void a_score_that_waits_begins_under_the_weights_in_use(void **state) {
    (void)state;
    open_judges(0);
    const int32_t *ids = tokens[2];
    engine_options o = options(0);
    o.step_tokens = 40;
    fixture f = open_set(0, 0, o);
    rollout_prompt p = prompt_of(1);
    rollout_spec spec = {.prompts = &p, .n_prompts = 1, .n = 1, .sampling = sampling(&f)};
    outcome before;
    score_run got, expected;
    history.n = 0;
    outcome_start(&before, f.e, &spec, NULL);
    start_score(f.e, &got, &ids, &lengths[2], 1, 2, 1.0);
    run_steps(f.e, 2);
    assert_int_equal(status_of(f.e).waiting_requests, 1);
    use(f.e, 0, 1, WEIGHTS_FINISH);
    assert_int_equal(engine_n_weights(f.e), 1);
    run_all(f.e);
    start_score(judges[1].e, &expected, &ids, &lengths[2], 1, 2, 1.0);
    run_all(judges[1].e);
    assert_memory_equal(got.of, expected.of, sizeof(told));
    assert_int_equal(got.label.version, 1);
    assert_nothing_is_left(f.e);
    free(got.of), free(expected.of);
    outcome_free(&before, 1);
    fixture_close(&f);
    close_judges();
}

/* A score of the old set computes the tokens of a prompt of the new one, whose pages it cannot give. */
static void nothing_waits_for_pages_of_another_set(void **state) {
    (void)state;
    open_judges(0);
    const int32_t *ids = tokens[1];
    engine_options o = options(0);
    o.span_tokens = 10;
    fixture f = open_set(0, 0, o);
    score_run score;
    rollout_prompt p = prompt_of(1);
    rollout_spec spec = {.prompts = &p, .n_prompts = 1, .n = 1, .sampling = sampling(&f)};
    outcome got;
    history.n = 0;
    start_score(f.e, &score, &ids, &lengths[1], 1, 0, 1.0);
    run_steps(f.e, 1);
    use(f.e, 0, 1, WEIGHTS_FINISH);
    outcome_start(&got, f.e, &spec, NULL);
    for (uint64_t n = 1; n <= 10; n++) {
        run_steps(f.e, 1);
        assert_int_equal(status_of(f.e).prefilled_tokens, 10 * n);
    }
    run_all(f.e);
    assert_int_equal(score.n_done + got.n_done, 2);
    assert_nothing_is_left(f.e);
    free(score.of);
    outcome_free(&got, 1);
    fixture_close(&f);
    close_judges();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sequences_that_share_score_as_alone),
        cmocka_unit_test(what_sequences_share_is_computed_once),
        cmocka_unit_test(a_score_ends_under_the_weights_it_began_with),
        cmocka_unit_test(a_score_that_waits_begins_under_the_weights_in_use),
        cmocka_unit_test(nothing_waits_for_pages_of_another_set),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
