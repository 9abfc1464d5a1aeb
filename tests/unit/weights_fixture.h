/* Sets of weights for the engine's tests: two of one shape for each case, prompts, engines that judge what
 * was drawn by scoring it again, and a history of updates that tells what a sample's runs have to be. calc-d4
 * and an earlier state of it (calculator), and gen-F (windows) with random weights beside it. */
#ifndef COP_WEIGHTS_FIXTURE_H
#define COP_WEIGHTS_FIXTURE_H

#include "engine_fixture.h"

#include "engine/engine_internal.h"

enum { N_PROMPTS = 4, N = 4, LONG = 300, MOST = 90, SETS = 2 };

/* Set 0 is the one that an engine is opened with; other NULL: random weights of its architecture. */
static const struct {
    const char *model, *other;
    precision profile;
} cases[] = {{"calc-d4", "calc-d4-early", PRECISION_BF16},
             {"calc-d4", "calc-d4-early", PRECISION_F32},
             {"gen-F", NULL, PRECISION_F32}};
enum { N_CASES = sizeof cases / sizeof cases[0] };

static uint32_t random_state;
static inline uint32_t random_below(uint32_t n) {
    random_state = random_state * 1664525u + 1013904223u;
    return (random_state >> 8) % n;
}

static inline engine_options options(int c) {
    engine_options o = engine_defaults();
    o.profile = cases[c].profile;
    o.n_threads = 1;
    o.kv_memory = 64 << 20;
    return o;
}

static inline size_t page_bytes(int c) {
    size_t element = cases[c].profile == PRECISION_BF16 ? 2 : 4;
    fixture f = fixture_open(cases[c].model, options(c));
    const arch *a = engine_arch(f.e);
    size_t n = 2 * (size_t)(a->n_layers * a->n_kv_heads * a->head_dim) * KV_PAGE_TOKENS * element;
    fixture_close(&f);
    return n;
}

/* ---- Prompts: one of calc-d4's chats, 300 tokens, 63 and 64 tokens (the edges of a page). */

static int32_t tokens[N_PROMPTS][LONG];
static const size_t lengths[N_PROMPTS] = {26, LONG, 63, 64};

static inline void make_prompts(int c) {
    json_t *lines = load_lines("tests/golden/rollout_greedy.jsonl");
    size_t n;
    int32_t *chat = ids_of(json_object_get(json_array_get(lines, 0), "prompt"), &n);
    assert_int_equal(n, lengths[0]);
    random_state = 12345;
    for (int p = 0; p < N_PROMPTS; p++) {
        for (size_t i = 0; i < lengths[p]; i++)
            tokens[p][i] = p == 0 && cases[c].other ? chat[i] : (int32_t)random_below(990);
    }
    free(chat);
    json_decref(lines);
}

/* ---- Sets of weights. */

static inline checkpoint *checkpoint_of(const char *model) {
    char path[256];
    snprintf(path, sizeof path, "tests/models/%s", model);
    checkpoint *c;
    cop_error err;
    checkpoint_options o = checkpoint_defaults();
    if (checkpoint_open(&c, path, &o, &err) != COP_OK) fail_msg("%s", err.message);
    return c;
}

static inline weights *load_set(engine *e, int c, int set) {
    weights *w;
    cop_error err;
    if (set == 1 && !cases[c].other) {
        assert_int_equal(weights_open_random(&w, e->k, &e->a, 5, &err), COP_OK);
        return w;
    }
    checkpoint *from = checkpoint_of(set == 0 ? cases[c].model : cases[c].other);
    if (weights_open(&w, e->k, from, &err) != COP_OK) fail_msg("%s", err.message);
    checkpoint_close(from);
    return w;
}

/* An engine that never had other weights than this set. */
static inline fixture open_set(int c, int set, engine_options o) {
    fixture f = {0};
    cop_error err;
    if (set == 0 || cases[c].other) return fixture_open(set == 0 ? cases[c].model : cases[c].other, o);
    f = fixture_open(cases[c].model, o);
    engine *e;
    assert_int_equal(engine_open_random(&e, engine_arch(f.e), 5, &o, &err), COP_OK);
    engine_close(f.e);
    f.e = e;
    return f;
}

/* The engines that score again what was drawn. */
static fixture judges[SETS];
static inline void open_judges(int c) {
    make_prompts(c);
    for (int i = 0; i < SETS; i++) judges[i] = open_set(c, i, options(c));
}
static inline void close_judges(void) {
    for (int i = 0; i < SETS; i++) fixture_close(&judges[i]);
}
static inline int set_named(const char *digest) {
    for (int i = 0; i < SETS; i++) {
        if (!strcmp(engine_weights(judges[i].e)->digest, digest)) return i;
    }
    fail_msg("no set is called %s", digest);
    return 0;
}

/* What an engine was told so far: update i + 1 of it is entry i. */
typedef struct update {
    int set;
    weights_policy policy;
} update;
static struct {
    update updates[512];
    int n;
} history;

static inline void use(engine *e, int c, int set, weights_policy policy) {
    assert_true(history.n < 512);
    history.updates[history.n++] = (update){set, policy};
    engine_use_weights(e, load_set(e, c, set), (uint64_t)history.n, policy);
    assert_int_equal(engine_weights(e)->version, history.n);
    assert_int_equal(set_named(engine_weights(e)->digest), set);
}

/* ---- Rollouts. */

static inline rollout_prompt prompt_of(int p) {
    return (rollout_prompt){.tokens = tokens[p], .n_tokens = lengths[p], .seed = 42 + ((uint64_t)p << 33)};
}

static inline rollout_sampling sampling(const fixture *f) {
    rollout_sampling s = rollout_sampling_defaults();
    s.max_tokens = MOST;
    s.temperature = 0.9;
    s.top_k = 50;
    s.logprobs = s.model_logprobs = true;
    s.calculator = f->tok && engine_arch(f->e)->vocab == 1024 && engine_has_calculator(f->e);
    s.has_stop_tokens = true; /* none: all run to their full length */
    return s;
}

static inline rollout_spec all_prompts(const fixture *f, rollout_prompt prompts[N_PROMPTS]) {
    for (int p = 0; p < N_PROMPTS; p++) prompts[p] = prompt_of(p);
    return (rollout_spec){.prompts = prompts, .n_prompts = N_PROMPTS, .n = N, .sampling = sampling(f)};
}

/* Every prompt's samples on an engine opened with that set. */
static inline outcome baseline(int c, int set) {
    fixture f = open_set(c, set, options(c));
    rollout_prompt prompts[N_PROMPTS];
    rollout_spec spec = all_prompts(&f, prompts);
    outcome o = outcome_of(f.e, &spec);
    fixture_close(&f);
    return o;
}

/* The log-probabilities of a sample's tokens under a set; `before` are those of its prompt and prefix. */
static inline const float *judge(const sample *s, const int32_t *before, size_t n_before, int set) {
    static scores got[SETS];
    int32_t whole[512];
    memcpy(whole, before, n_before * sizeof *whole);
    memcpy(whole + n_before, s->tokens, (size_t)s->n * sizeof *whole);
    got[set] = scores_of(judges[set].e, whole, n_before + (size_t)s->n, 0, 1.0);
    return got[set].logprobs + n_before;
}

/* Update u moves a row on `set` to other weights: true if its K and V are then of one set again. */
static inline bool follow(const update *u, int *set, bool pure) {
    if (u->policy == WEIGHTS_FINISH || u->set == *set) return pure;
    *set = u->set;
    return u->policy != WEIGHTS_KEEP;
}

typedef struct verdict {
    int n_checked, n_kept, n_differ; /* tokens: checked; drawn with kept K and V; of these, with other bits */
} verdict;

/* A sample's runs are what the updates since its start make of them, and each has the bits of its weights,
 * unless it was drawn with K and V that were kept. */
static inline verdict check_runs(const sample *s, const int32_t *before, size_t n_before) {
    verdict v = {0};
    if (s->n == 0) return v;
    const float *expected[SETS] = {judge(s, before, n_before, 0), judge(s, before, n_before, 1)};
    int set = set_named(s->runs[0].label.digest), version = (int)s->runs[0].label.version;
    assert_int_equal(set, version == 0 ? 0 : history.updates[version - 1].set);
    bool pure = true;
    for (int r = 0; r < s->n_runs; r++) {
        int end = r + 1 < s->n_runs ? s->runs[r + 1].start : s->n, to = (int)s->runs[r].label.version;
        assert_true(r == 0 || to > version);
        for (; version < to; version++) pure = follow(&history.updates[version], &set, pure);
        assert_int_equal(set_named(s->runs[r].label.digest), set);
        for (int i = s->runs[r].start; i < end; i++) {
            bool differs = s->mask[i] && memcmp(&s->model_logprobs[i], &expected[set][i], 4);
            if (differs && pure)
                fail_msg("token %d of %d, run %d of %d under version %d: %.9g, but its weights score %.9g", i,
                         s->n, r, s->n_runs, to, s->model_logprobs[i], expected[set][i]);
            v.n_checked += s->mask[i] && pure;
            v.n_kept += s->mask[i] && !pure;
            v.n_differ += differs;
        }
    }
    return v;
}

static inline verdict check_outcome(const outcome *o) {
    verdict sum = {0};
    for (int i = 0; i < N_PROMPTS * N; i++) {
        const sample *s = &o->samples[i];
        if (!s->tokens) continue;
        verdict v = check_runs(s, tokens[s->prompt], lengths[s->prompt]);
        sum.n_checked += v.n_checked;
        sum.n_kept += v.n_kept;
        sum.n_differ += v.n_differ;
    }
    return sum;
}

static inline engine_status status_of(const engine *e) {
    engine_status s;
    engine_read_status(e, &s);
    assert_int_equal(s.pages_used + s.pages_cached + s.pages_free, s.pages_total);
    assert_true(s.pages_shared <= s.pages_used);
    return s;
}

static inline void assert_nothing_is_left(const engine *e) {
    engine_status s = status_of(e);
    assert_int_equal(s.pages_used + s.rows + s.queued + s.waiting_requests, 0);
    assert_int_equal(engine_n_weights(e), 1);
}

static inline void run_steps(engine *e, int n) {
    for (int i = 0; i < n; i++) assert_true(engine_step(e));
}

#endif
