/* Random work on engines with random options: whatever runs beside a sample and however the work is cut,
 * every bit of it is that of the same sample computed alone by a plain engine, each sample and each end is
 * told once, and afterwards every page is free.
 *
 * An episode opens an engine and lets rollouts and scores arrive at random moments; some are cancelled or
 * abandoned on the way, some rollouts continue a prefix.  The engine is paused, and other weights come, at
 * once followed by the old ones: whatever the policies, a sample keeps its bits by that, but may be cut
 * short.  It depends on its seed alone, which every failure tells:
 *
 *     SEED=12345 SOAK_SECONDS=1 build/release/tests/test_soak
 *
 * begins with that episode and starts new ones for so many seconds; `make soak` runs ten minutes.  Without
 * both, the same few episodes run every time, which hold something of everything. */
#include "soak_catalogue.h"

#include "engine/engine_internal.h"

enum { MOST_PROMPTS = 4, MOST_LIVE = 12, PATIENCE_STEPS = 50000, FIRST_SEED = 1, EPISODES = 6 };

static catalogue catalogues[] = {
    {.model = "calc-d4", .profile = PRECISION_BF16}, {.model = "calc-d4", .profile = PRECISION_F32},
    {.model = "gen-A", .profile = PRECISION_BF16},   {.model = "gen-Apad", .profile = PRECISION_F32},
    {.model = "gen-B", .profile = PRECISION_F32},    {.model = "gen-C", .profile = PRECISION_BF16},
    {.model = "gen-D", .profile = PRECISION_BF16},   {.model = "gen-E", .profile = PRECISION_F32},
    {.model = "gen-F", .profile = PRECISION_BF16},   {.model = "gen-F", .profile = PRECISION_F32}};
enum { N_CATALOGUES = sizeof catalogues / sizeof catalogues[0] };

/* What was seen, to tell and to be sure that the soak did what it is for. */
static struct {
    long episodes, rollouts, scores, samples, continued, cancelled, cut_short, abandoned, waits, tokens;
    long changes, pauses;
    long settled;                        /* samples cancelled because enough had ended */
    long stopped;                        /* by a string */
    uint64_t preemptions, cached_tokens; /* of the engines */
} seen;

/* The episode that runs, for messages. */
static char episode_text[256];
#define wrong(format, ...) fail_msg("%s: " format, episode_text, __VA_ARGS__)

/* ---- Chance. */

static uint64_t chance_state;

/* splitmix64 */
static uint64_t chance(void) {
    uint64_t z = chance_state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}
static int below(int n) { return (int)(chance() % (uint64_t)n); }
static bool once_in(int n) { return below(n) == 0; }
#define one_of(array) (array)[below((int)(sizeof(array) / sizeof(array)[0]))]

/* ---- What is in flight. */

typedef struct flight {
    catalogue *c;
    engine_job *job;
    bool scoring, cancelled, abandoned, ended;
    bool changed;                         /* by weights that may have cut its samples short */
    int n_prompts, prompts[MOST_PROMPTS]; /* of the catalogue; a score has one */
    int sampling;                         /* or which scoring */
    uint32_t n;
    bool alone; /* just sample `index`, from `cut` on */
    uint32_t index;
    int cut;
    bool told[MOST_PROMPTS][N_INDICES];
    uint32_t enough; /* samples of each prompt that have to end; 0: all */
    uint32_t n_ended[MOST_PROMPTS];
    int n_told;
} flight;

static void check_floats(const float *got, const float *expected, int n, const char *what) {
    for (int i = 0; i < n; i++) {
        if (memcmp(&got[i], &expected[i], sizeof *got))
            wrong("%s %d is %.9g, not %.9g", what, i, got[i], expected[i]);
    }
}

static void check_kept(const sample_result *got, const sample *expected, int skip) {
    const uint32_t *offsets = expected->kept_offsets + skip;
    for (int i = 0; i <= got->n_tokens; i++) {
        if (got->kept_offsets[i] != offsets[i] - offsets[0])
            wrong("kept offset %d is %u, not %u", i, got->kept_offsets[i], offsets[i] - offsets[0]);
    }
    for (uint32_t i = 0; i < got->kept_offsets[got->n_tokens]; i++) {
        if (got->kept_ids[i] != expected->kept_ids[offsets[0] + i])
            wrong("kept id %u is %d, not %d", i, got->kept_ids[i], expected->kept_ids[offsets[0] + i]);
    }
}

static void check_calls(const sample_result *got, const sample *expected, int skip) {
    int n = 0;
    for (int i = 0; i < expected->n_calls; i++) {
        int at = expected->calls[i].at - skip;
        if (at < 0 || at >= got->n_tokens) continue;
        if (n >= got->n_tool_calls || got->tool_calls[n].at != at ||
            got->tool_calls[n].ok != expected->calls[i].ok)
            wrong("tool call %d differs", n);
        n++;
    }
    if (n != got->n_tool_calls) wrong("%d tool calls, not %d", got->n_tool_calls, n);
}

/* The sample is `expected` from `skip` on; one that was cut short, the beginning of that. */
static void check_sample(const sample_result *got, const sample *expected, int skip, bool cut_short) {
    int n = got->n_tokens, n_expected = expected->n - skip;
    if (cut_short ? n > n_expected : n != n_expected) wrong("%d tokens, not %d", n, n_expected);
    for (int i = 0; i < n; i++) {
        if (got->tokens[i] != expected->tokens[skip + i])
            wrong("token %d is %d, not %d", i, got->tokens[i], expected->tokens[skip + i]);
        if (got->mask[i] != expected->mask[skip + i]) wrong("mask %d is %d", i, got->mask[i]);
    }
    if (!cut_short && !!got->stop_string.bytes != !!expected->stop_string)
        wrong("%s stop string", got->stop_string.bytes ? "a" : "no");
    if (got->stop_string.bytes && (got->stop_string.n != strlen(expected->stop_string) ||
                                   memcmp(got->stop_string.bytes, expected->stop_string, got->stop_string.n)))
        wrong("stop string \"%.*s\", not \"%s\"", (int)got->stop_string.n, got->stop_string.bytes,
              expected->stop_string);
    if (!cut_short && (got->finish != expected->finish || got->stop != expected->stop))
        wrong("finish %d at %d, not %d at %d", got->finish, got->stop, expected->finish, expected->stop);
    if (got->logprobs) check_floats(got->logprobs, expected->logprobs + skip, n, "logprob");
    if (got->model_logprobs)
        check_floats(got->model_logprobs, expected->model_logprobs + skip, n, "model logprob");
    if (got->entropy) check_floats(got->entropy, expected->entropy + skip, n, "entropy");
    if (got->kept_offsets) check_kept(got, expected, skip);
    check_calls(got, expected, skip);
}

static void soak_sample(void *context, const sample_result *s) {
    flight *f = context;
    if (f->abandoned || f->ended) wrong("a sample after %s", f->ended ? "the end" : "it was abandoned");
    const rollout_sampling *asked = &f->c->samplings[f->sampling];
    if (asked->logprobs != !!s->logprobs || asked->model_logprobs != !!s->model_logprobs ||
        asked->entropy != !!s->entropy || asked->kept != !!s->kept_offsets)
        wrong("arrays that %s", "were not asked for, or the other way round");
    bool mine = s->prompt < (uint32_t)f->n_prompts && (f->alone ? s->sample == f->index : s->sample < f->n);
    if (!mine) wrong("prompt %u, sample %u: nobody asked for it", s->prompt, s->sample);
    bool *told = &f->told[s->prompt][s->sample];
    if (*told) wrong("prompt %u, sample %u was told twice", s->prompt, s->sample);
    *told = true;
    f->n_told++;
    bool settled = f->enough > 0 && f->n_ended[s->prompt] >= f->enough;
    bool cut_short = (f->cancelled || f->changed || settled) && s->finish == FINISH_CANCELLED;
    f->n_ended[s->prompt] += s->finish != FINISH_CANCELLED;
    seen.settled += settled && s->finish == FINISH_CANCELLED;
    seen.stopped += s->stop_string.bytes != NULL;
    check_sample(s, catalogue_sample(f->c, f->prompts[s->prompt], f->sampling, s->sample), f->cut, cut_short);
    seen.samples++;
    seen.continued += f->cut > 0;
    seen.cut_short += cut_short && s->n_tokens > 0;
    seen.tokens += s->n_tokens;
}

static void soak_score(void *context, size_t index, const score_result *s) {
    flight *f = context;
    if (f->abandoned || f->ended || f->n_told > 0 || index != 0) wrong("%s", "a score that nobody awaits");
    const score_copy *expected = catalogue_score(f->c, f->prompts[0], f->sampling);
    if (s->n != expected->n || s->top != expected->top) wrong("%zu scores of top %d", s->n, s->top);
    int n = (int)s->n, top = s->top;
    check_floats(s->logprobs, expected->logprobs, n, "score");
    if (top > 0) {
        check_floats(s->top_logprobs, expected->top_logprobs, n * top, "top logprob");
        check_floats(s->next_logprobs, expected->next_logprobs, top, "next logprob");
        if (memcmp(s->top_ids, expected->top_ids, (size_t)(n * top) * sizeof *s->top_ids) ||
            memcmp(s->next_ids, expected->next_ids, (size_t)top * sizeof *s->next_ids))
            wrong("%s", "other best ids");
    }
    f->n_told++;
    seen.scores++;
}

static void soak_end(flight *f) {
    if (f->abandoned || f->ended) wrong("an end after %s", f->ended ? "the end" : "it was abandoned");
    if (f->n_told != f->n_prompts * (int)f->n && !(f->scoring && f->cancelled))
        wrong("the end after %d of %d", f->n_told, f->n_prompts * (int)f->n);
    for (int p = 0; f->enough > 0 && !f->cancelled && !f->changed && p < f->n_prompts; p++) {
        if (f->n_ended[p] < f->enough) wrong("%u samples ended, enough are %u", f->n_ended[p], f->enough);
    }
    f->ended = true;
}
static void soak_done(void *context, const rollout_totals *t) {
    (void)t;
    soak_end(context);
}
static void soak_scores_done(void *context, const weights_label *w) {
    (void)w;
    soak_end(context);
}
static void soak_failed(void *context, const cop_error *e) {
    (void)context;
    wrong("%s", e->message);
}

/* ---- Arrivals. */

static void submit_score(engine *e, flight *f) {
    f->scoring = true;
    f->n_prompts = 1;
    f->n = 1;
    f->prompts[0] = below(N_PROMPTS);
    f->sampling = below(N_SCORINGS);
    const int32_t *ids = f->c->tokens[f->prompts[0]];
    score_spec spec = {.sequences = &ids,
                       .lengths = &f->c->n_tokens[f->prompts[0]],
                       .n_sequences = 1,
                       .top = scorings[f->sampling].top,
                       .temperature = scorings[f->sampling].temperature,
                       .context = f,
                       .scored = soak_score,
                       .done = soak_scores_done,
                       .failed = soak_failed};
    cop_error err;
    if (engine_submit_score(e, &spec, &f->job, &err) != COP_OK) wrong("%s", err.message);
}

/* One sample by its index, perhaps from somewhere within it. */
static void ask_for_one(flight *f, rollout_prompt *p) {
    f->alone = p->has_sample = true;
    f->index = p->sample = (uint32_t)below(N_INDICES);
    f->n = 1;
    if (once_in(3)) return;
    const sample *whole = catalogue_sample(f->c, f->prompts[0], f->sampling, f->index);
    f->cut = below(whole->n + 1);
    if (f->cut == whole->n && whole->finish == FINISH_STOP) f->cut--; /* nothing follows a stop */
    p->prefix = whole->tokens;
    p->n_prefix = (size_t)f->cut;
}

static void submit_rollout(engine *e, flight *f) {
    rollout_prompt prompts[MOST_PROMPTS];
    f->n_prompts = 1 + (once_in(2) ? below(MOST_PROMPTS) : 0);
    f->n = (uint32_t)(1 + below(N_INDICES));
    f->sampling = below(N_SAMPLINGS);
    for (int i = 0; i < f->n_prompts; i++) {
        f->prompts[i] = below(N_PROMPTS);
        prompts[i] = catalogue_prompt(f->c, f->prompts[i]);
    }
    if (f->n_prompts == 1 && once_in(2)) ask_for_one(f, prompts);
    if (f->n > 1 && once_in(3)) f->enough = (uint32_t)(1 + below((int)f->n));
    for (int i = 0; i < f->n_prompts; i++) prompts[i].enough = f->enough;
    rollout_spec spec = {.prompts = prompts,
                         .n_prompts = (size_t)f->n_prompts,
                         .n = f->n,
                         .sampling = f->c->samplings[f->sampling],
                         .events = {f, soak_sample, soak_done, soak_failed}};
    cop_error err;
    if (engine_submit(e, &spec, &f->job, &err) != COP_OK) wrong("%s: %s", err.key, err.message);
    seen.rollouts++;
}

static flight *submit(engine *e, catalogue *c) {
    flight *f = calloc(1, sizeof *f);
    f->c = c;
    if (once_in(6))
        submit_score(e, f);
    else
        submit_rollout(e, f);
    return f;
}

/* End one early: told, or without a word. */
static void interrupt(engine *e, flight *f) {
    if (once_in(3)) {
        f->abandoned = true;
        engine_abandon(e, f->job);
        seen.abandoned++;
        return;
    }
    f->cancelled = true;
    engine_cancel(e, f->job);
    if (!f->ended) wrong("%s", "cancelled, but no end was told");
    seen.cancelled++;
}

/* ---- New weights. */

static weights *load_own(engine *e, const catalogue *c) {
    char path[256];
    snprintf(path, sizeof path, "tests/models/%s", c->model);
    checkpoint *from;
    weights *w;
    cop_error err;
    checkpoint_options o = checkpoint_defaults();
    if (checkpoint_open(&from, path, &o, &err) != COP_OK) wrong("%s", err.message);
    if (weights_open(&w, e->k, from, &err) != COP_OK) wrong("%s", err.message);
    checkpoint_close(from);
    return w;
}

/* Other weights, and at once the old ones again.  No row may be left to end on the others. */
static void change_weights(engine *e, const catalogue *c, flight **live, int n_live) {
    weights *other;
    cop_error err;
    if (weights_open_random(&other, e->k, &e->a, chance(), &err) != COP_OK) wrong("%s", err.message);
    weights *sets[] = {other, load_own(e, c)};
    bool moved = false; /* rows, to the others */
    for (int i = 0; i < 2; i++) {
        weights_policy policy = (weights_policy)below(4);
        if (moved && policy == WEIGHTS_FINISH) policy = WEIGHTS_RECOMPUTE;
        moved = policy == WEIGHTS_KEEP || policy == WEIGHTS_RECOMPUTE;
        for (int l = 0; l < n_live && (policy == WEIGHTS_ABORT || policy == WEIGHTS_KEEP); l++)
            live[l]->changed = true; /* where pages run out, kept rows end */
        engine_use_weights(e, sets[i], engine_weights(e)->version + 1, policy);
    }
    seen.changes++;
}

/* Now and then the engine is paused for some steps. */
static void pause_or_go_on(engine *e) {
    if (once_in(e->pause == ENGINE_RUN ? 150 : 10)) engine_pause(e, (engine_pause_mode)below(3));
    seen.pauses += e->pause != ENGINE_RUN;
}

/* ---- Episodes. */

static const char *random_isa(void) {
    static const char *const names[] = {"scalar", "avx2", "avx512", "avx512bf16"};
    const char *name = one_of(names);
    cpu_isa isa;
    setenv("COPPICE_ISA", name, 1);
    bool has = cpu_isa_pick(&isa, NULL) == COP_OK;
    unsetenv("COPPICE_ISA");
    return has ? name : NULL;
}

static fixture random_engine(catalogue *c, uint64_t seed) {
    static const int steps[] = {1, 2, 7, 50, 64, 65, 200, 512};
    int most_pages = (LONGEST_PROMPT + LONGEST_COMPLETION + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
    engine_options o = engine_defaults();
    o.profile = c->profile;
    o.n_threads = once_in(3) ? 2 + below(2) : 1;
    o.step_tokens = once_in(2) ? one_of(steps) : 1 + below(512);
    o.span_tokens = once_in(2) ? 0 : once_in(2) ? one_of(steps) : 1 + below(512);
    o.max_rows = 1 + below(once_in(3) ? 4 : 64);
    int n_pages = most_pages + below(once_in(3) ? 100 : 10);
    o.no_prefix_cache = once_in(3);
    o.output_memory = once_in(3) ? 1 + (size_t)below(30000) : 0;
    o.kv_memory = (size_t)n_pages * catalogue_page_bytes(c);
    const char *isa = random_isa();
    snprintf(episode_text, sizeof episode_text,
             "SEED=%llu %s %s: %d threads, steps of %d, spans of %d, %d rows, %d pages, outputs %zu, prefix "
             "cache %s, isa %s",
             (unsigned long long)seed, c->model, c->profile == PRECISION_BF16 ? "bf16" : "f32", o.n_threads,
             o.step_tokens, o.span_tokens, o.max_rows, n_pages, o.output_memory,
             o.no_prefix_cache ? "off" : "on", isa ? isa : "best");
    if (isa) setenv("COPPICE_ISA", isa, 1);
    fixture f = fixture_open(c->model, o);
    unsetenv("COPPICE_ISA");
    engine_status s;
    engine_read_status(f.e, &s);
    assert_int_equal(s.pages_total, n_pages);
    return f;
}

static void check_idle(engine *e) {
    engine_status s;
    engine_read_status(e, &s);
    if (s.pages_used || s.rows || s.queued)
        wrong("%d pages, %d rows and %d samples are left", (int)s.pages_used, (int)s.rows, (int)s.queued);
    if (engine_n_weights(e) != 1) wrong("%d sets of weights are left", engine_n_weights(e));
    if (engine_step(e)) wrong("%s", "there is still something to do");
    seen.preemptions += s.preemptions;
    seen.cached_tokens += s.cached_tokens;
}

/* Drop those that ended; the number that is left. */
static int sweep(flight **live, int n) {
    int kept = 0;
    for (int i = 0; i < n; i++) {
        if (live[i]->ended || live[i]->abandoned)
            free(live[i]);
        else
            live[kept++] = live[i];
    }
    return kept;
}

static void run_episode(uint64_t seed) {
    chance_state = seed;
    catalogue *c = &catalogues[once_in(3) ? below(2) : below(N_CATALOGUES)];
    catalogue_open(c);
    fixture f = random_engine(c, seed);
    flight *live[MOST_LIVE];
    int n_live = 0, most_live = 1 + below(MOST_LIVE), n_left = 1 + below(12);
    int pause = 1 + below(once_in(2) ? 4 : 40); /* steps between arrivals, on average */
    for (int silence = 0; n_left > 0 || n_live > 0; silence++) {
        while (n_left > 0 && n_live < most_live && (n_live == 0 || once_in(pause))) {
            live[n_live++] = submit(f.e, c);
            n_left--;
        }
        if (n_live > 0 && once_in(200)) interrupt(f.e, live[below(n_live)]);
        if (once_in(100)) change_weights(f.e, c, live, n_live);
        pause_or_go_on(f.e);
        long told = seen.samples + seen.scores;
        engine_step(f.e);
        engine_status s;
        engine_read_status(f.e, &s);
        seen.waits += s.queued > 0 && s.rows > 0;
        if (told != seen.samples + seen.scores) silence = 0;
        if (silence > PATIENCE_STEPS) wrong("nothing came for %d steps", silence);
        n_live = sweep(live, n_live);
    }
    engine_pause(f.e, ENGINE_RUN);
    check_idle(f.e);
    fixture_close(&f);
    seen.episodes++;
}

static void tell_progress(uint64_t seed, double seconds) {
    print_message(
        "%.0f s: next SEED=%llu; %ld episodes, %ld rollouts, %ld scores; %ld samples of %ld tokens "
        "compared, %ld continued, %ld cut short, %ld not needed, %ld stopped by a string; %ld cancelled, "
        "%ld abandoned, weights changed %ld times; %llu preemptions, "
        "%llu tokens cached\n",
        seconds, (unsigned long long)seed, seen.episodes, seen.rollouts, seen.scores, seen.samples,
        seen.tokens, seen.continued, seen.cut_short, seen.settled, seen.stopped, seen.cancelled,
        seen.abandoned, seen.changes, (unsigned long long)seen.preemptions,
        (unsigned long long)seen.cached_tokens);
}

static void every_sample_is_as_if_it_were_alone(void **state) {
    (void)state;
    const char *seed_text = getenv("SEED"), *seconds_text = getenv("SOAK_SECONDS");
    uint64_t seed = seed_text ? strtoull(seed_text, NULL, 10) : FIRST_SEED;
    double limit = seconds_text ? atof(seconds_text) : 0, start = clock_seconds(), next_told = 60, now;
    do {
        run_episode(seed++);
        now = clock_seconds() - start;
        if (now > next_told) {
            tell_progress(seed, now);
            next_told += 60;
        }
    } while (seconds_text ? now < limit : seen.episodes < EPISODES);
    tell_progress(seed, now);
    if (seed_text || seconds_text) return; /* by chance: need not hold everything */
    assert_true(seen.samples > 50 && seen.scores > 0 && seen.continued > 0 && seen.cut_short > 0);
    assert_true(seen.abandoned > 0 && seen.waits > 0 && seen.preemptions > 0 && seen.cached_tokens > 0);
    assert_true(seen.settled > 0 && seen.stopped > 0 && seen.changes > 0 && seen.pauses > 0);
}

static int close_catalogues(void **state) {
    (void)state;
    for (int i = 0; i < N_CATALOGUES; i++) {
        if (catalogues[i].plain.e) catalogue_close(&catalogues[i]);
    }
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_sample_is_as_if_it_were_alone)};
    return cmocka_run_group_tests(tests, NULL, close_catalogues);
}
