/* Scores, continued samples and prompts that need few of their samples, side by side, while weights change
 * and clients come, pause, stop reading and go: whatever ends tells the bits of the weights that it names. */
#include "weights_fixture.h"

enum { SEQUENCES = 4, FLIGHTS = 5, FLIGHTS_IN_ALL = 15, PREFIX = 70 };

typedef enum flight_kind { FLY_SCORE, FLY_CONTINUED, FLY_ENOUGH, FLIGHT_KINDS } flight_kind;

typedef struct flight {
    flight_kind kind;
    bool flying, parked, cancelled;
    engine_job *job;
    int n_done;
    outcome got; /* of a rollout */
    /* Of a score: */
    int32_t ids[SEQUENCES][LONG];
    size_t lengths[SEQUENCES];
    float logprobs[SEQUENCES][LONG];
    int n_scored;
    weights_label label;
} flight;

/* ---- What comes. */

static void tell_scored(void *context, size_t i, const score_result *s) {
    flight *l = context;
    assert_int_equal(s->n, l->lengths[i]);
    memcpy(l->logprobs[i], s->logprobs, s->n * sizeof(float));
    l->n_scored++;
}

static void tell_scores_done(void *context, const weights_label *w) {
    flight *l = context;
    l->label = *w;
    l->n_done++;
}

/* Sequences that begin alike, by a page or more. */
static void start_score(engine *e, flight *l) {
    const int32_t *at[SEQUENCES];
    for (int i = 0; i < SEQUENCES; i++) {
        l->lengths[i] = 1 + random_below(LONG);
        uint32_t common = i == 0 ? 0 : 50 + random_below(150);
        for (uint32_t t = 0; t < LONG; t++)
            l->ids[i][t] = t < common ? l->ids[i - 1][t] : (int32_t)random_below(990);
        at[i] = l->ids[i];
    }
    score_spec spec = {.sequences = at,
                       .lengths = l->lengths,
                       .n_sequences = SEQUENCES,
                       .temperature = 1.0,
                       .context = l,
                       .scored = tell_scored,
                       .done = tell_scores_done,
                       .failed = on_scores_failed};
    cop_error err;
    assert_int_equal(engine_submit_score(e, &spec, &l->job, &err), COP_OK);
}

/* Continued samples begin with other prompts' tokens; or two of four samples are enough. */
static void start_rollout(fixture *f, flight *l) {
    rollout_prompt prompts[N_PROMPTS];
    rollout_spec spec = all_prompts(f, prompts);
    for (int p = 0; p < N_PROMPTS; p++) {
        if (l->kind == FLY_ENOUGH) {
            prompts[p].enough = 2;
            continue;
        }
        prompts[p].has_sample = true;
        prompts[p].sample = 3;
        prompts[p].prefix = tokens[1];
        prompts[p].n_prefix = PREFIX;
    }
    if (l->kind == FLY_CONTINUED) {
        spec.n = 1;
        spec.sampling.calculator = false; /* a prefix of any tokens would contradict its answers */
    }
    outcome_start(&l->got, f->e, &spec, &l->job);
}

static void start(fixture *f, flight *l) {
    *l = (flight){.kind = (flight_kind)random_below(FLIGHT_KINDS), .flying = true};
    if (l->kind == FLY_SCORE)
        start_score(f->e, l);
    else
        start_rollout(f, l);
}

/* ---- What ends. */

static void check_score(const flight *l) {
    if (l->n_scored < SEQUENCES) {
        assert_true(l->cancelled);
        return;
    }
    int set = set_named(l->label.digest), version = (int)l->label.version;
    assert_int_equal(set, version == 0 ? 0 : history.updates[version - 1].set);
    for (int i = 0; i < SEQUENCES; i++) {
        scores expected = scores_of(judges[set].e, l->ids[i], l->lengths[i], 0, 1.0);
        assert_memory_equal(l->logprobs[i], expected.logprobs, l->lengths[i] * sizeof(float));
    }
}

static int check_rollout(const flight *l) {
    int n_checked = 0, n_ended[N_PROMPTS] = {0};
    for (int i = 0; i < N_PROMPTS * (int)l->got.n; i++) {
        const sample *s = &l->got.samples[i];
        assert_non_null(s->tokens);
        int32_t before[LONG + PREFIX];
        size_t n = lengths[s->prompt], n_prefix = l->kind == FLY_CONTINUED ? PREFIX : 0;
        memcpy(before, tokens[s->prompt], n * sizeof *before);
        memcpy(before + n, tokens[1], n_prefix * sizeof *before);
        n_checked += check_runs(s, before, n + n_prefix).n_checked;
        n_ended[s->prompt] += s->finish != FINISH_CANCELLED;
    }
    for (int p = 0; p < N_PROMPTS && l->kind == FLY_ENOUGH; p++) assert_in_range(n_ended[p], 0, 2);
    return n_checked;
}

/* The tokens that could be checked. */
static int land(flight *l) {
    int n = 0;
    if (l->kind == FLY_SCORE) {
        check_score(l);
    } else {
        n = check_rollout(l);
        outcome_free(&l->got, N_PROMPTS);
    }
    l->flying = false;
    return n;
}

static bool has_ended(const flight *l) { return l->kind == FLY_SCORE ? l->n_done > 0 : l->got.n_done > 0; }

/* ---- What happens meanwhile. */

static void abandon(engine *e, flight *l) {
    engine_abandon(e, l->job);
    assert_false(has_ended(l));
    if (l->kind != FLY_SCORE) outcome_free(&l->got, N_PROMPTS);
    l->flying = false;
}

static void disturb(fixture *f, int c, flight *l) {
    bool flies = l->flying && !has_ended(l);
    switch (random_below(16)) {
    case 0: engine_abort_rows(f->e); break;
    case 1:
        if (!flies) break;
        l->cancelled = true;
        engine_cancel(f->e, l->job);
        assert_true(has_ended(l));
        break;
    case 2:
        if (flies) abandon(f->e, l);
        break;
    case 3:
    case 4:
    case 5:
        if (!flies) break;
        l->parked = !l->parked;
        engine_park(f->e, l->job, l->parked);
        break;
    case 6:
    case 7: engine_pause(f->e, (engine_pause_mode)random_below(3)); break;
    default: use(f->e, c, (int)random_below(SETS), (weights_policy)random_below(4));
    }
}

/* Everything that stands still goes on. */
static void let_go(engine *e, flight flights[FLIGHTS]) {
    engine_pause(e, ENGINE_RUN);
    for (int i = 0; i < FLIGHTS; i++) {
        flight *l = &flights[i];
        if (!l->flying || has_ended(l) || !l->parked) continue;
        l->parked = false;
        engine_park(e, l->job, false);
    }
}

static engine_options random_options(int c, size_t bytes) {
    const int budgets[] = {3, 30, 100, 512}, spans[] = {0, 1, 10};
    engine_options o = options(c);
    o.kv_memory = (8 + random_below(16)) * bytes; /* the longest sample needs 8 */
    o.step_tokens = budgets[random_below(4)];
    o.span_tokens = spans[random_below(3)];
    o.max_rows = 2 + (int)random_below(12);
    o.no_prefix_cache = random_below(4) == 0;
    return o;
}

static int random_mix(int c, size_t bytes) {
    fixture f = open_set(c, 0, random_options(c, bytes));
    static flight flights[FLIGHTS];
    memset(flights, 0, sizeof flights);
    history.n = 0;
    int n_flown = 0, n_checked = 0;
    for (long n = 0;; n++) {
        flight *l = &flights[random_below(FLIGHTS)];
        if (n_flown < FLIGHTS_IN_ALL && random_below(40) == 0 && !l->flying) {
            start(&f, l);
            n_flown++;
        }
        if (random_below(20) == 0 && history.n < 80) disturb(&f, c, &flights[random_below(FLIGHTS)]);
        bool more = engine_step(f.e);
        status_of(f.e);
        for (int i = 0; i < FLIGHTS; i++) {
            if (flights[i].flying && has_ended(&flights[i])) n_checked += land(&flights[i]);
        }
        if (more) continue;
        if (n_flown == FLIGHTS_IN_ALL && !f.e->jobs) break;
        if (random_below(10) == 0) let_go(f.e, flights);
        if (n > 100000) fail_msg("it does not come to an end");
    }
    assert_nothing_is_left(f.e);
    fixture_close(&f);
    return n_checked;
}

static void what_ends_has_the_bits_of_its_weights(void **state) {
    (void)state;
    for (int c = 0; c < N_CASES; c++) {
        size_t bytes = page_bytes(c);
        int n_checked = 0;
        open_judges(c);
        for (uint32_t seed = 0; seed < 2; seed++) {
            random_state = 7000 + 100 * (uint32_t)c + seed;
            n_checked += random_mix(c, bytes);
        }
        assert_true(n_checked > 500);
        close_judges();
    }
    assert_int_equal(mem_live(), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_ends_has_the_bits_of_its_weights),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
