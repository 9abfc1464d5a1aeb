/* What the scheduler costs: 16 prompts x 4 samples of very different lengths as one rollout, against the same
 * rows as one ideal batch; and how long a short prompt waits behind a thousand long ones.
 *
 *     make build/release/mixed_batch && build/release/mixed_batch [THREADS]
 *
 * calc-d4 in bf16, prompts of 4 to 480 tokens, temperature 5 and 20 stop tokens of 1024, so that completions
 * have about 50 tokens, some 1, some over 200.
 *
 * Ideal: all prompts are computed first, in full steps, and then all 64 rows decode together, each step with
 * whoever is left; for each step the fastest of the repeats counts, so that the ideal is also one without
 * noise.  Actual: the rollout as it is run, the fastest of the repeats.  Both draw the same tokens.  Only
 * ratios of one run on an idle machine mean something. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"

enum { N_PROMPTS = 16, N = 4, MOST_STEPS = 4096, REPEATS = 7, LONG_ONES = 1000, LONG = 300 };

static int32_t tokens[N_PROMPTS][512], stop_tokens[20];

static void fail(const cop_error *err) {
    fprintf(stderr, "%s\n", err->message);
    exit(1);
}

static engine *open_engine(int n_threads, bool hold_rows) {
    const char *path = "tests/models/calc-d4";
    cop_error err;
    checkpoint *c;
    checkpoint_options co = checkpoint_defaults();
    engine_options o = engine_defaults();
    o.n_threads = n_threads;
    o.kv_memory = (size_t)512 << 20;
    o.hold_rows = hold_rows;
    engine *e;
    if (checkpoint_open(&c, path, &co, &err) != COP_OK) fail(&err);
    if (engine_open(&e, c, NULL, &o, &err) != COP_OK) fail(&err);
    checkpoint_close(c);
    return e;
}

static void count_sample(void *context, const sample_result *s) { *(long *)context += s->n_tokens; }
static void ignore_done(void *context, const rollout_totals *t) { (void)context, (void)t; }
static void tell_failed(void *context, const cop_error *err) {
    (void)context;
    fail(err);
}

static rollout_spec mixed_spec(rollout_prompt prompts[N_PROMPTS], long *n_tokens) {
    for (int p = 0; p < N_PROMPTS; p++)
        prompts[p] =
            (rollout_prompt){.tokens = tokens[p], .n_tokens = (size_t)(4 + p * p * 2 + p), .seed = 7};
    rollout_sampling s = rollout_sampling_defaults();
    s.max_tokens = 400;
    s.temperature = 5;
    s.has_stop_tokens = true;
    s.stop_tokens = stop_tokens;
    s.n_stop_tokens = 20;
    return (rollout_spec){.prompts = prompts,
                          .n_prompts = N_PROMPTS,
                          .n = N,
                          .sampling = s,
                          .events = {n_tokens, count_sample, ignore_done, tell_failed}};
}

/* One run; its seconds.  best[i]: the fastest that step i ever was; NULL: not wanted. */
static double run_mixed(engine *e, double *best, long *n_tokens) {
    rollout_prompt prompts[N_PROMPTS];
    cop_error err;
    *n_tokens = 0;
    rollout_spec spec = mixed_spec(prompts, n_tokens);
    double start = clock_seconds(), last = start;
    if (engine_submit(e, &spec, NULL, &err) != COP_OK) fail(&err);
    for (int i = 0; engine_step(e); i++) {
        double now = clock_seconds();
        if (best && i < MOST_STEPS && (best[i] == 0 || now - last < best[i])) best[i] = now - last;
        last = now;
    }
    return last - start;
}

static void measure_mixed(int n_threads) {
    static double steps[MOST_STEPS];
    long n_tokens, n_ideal;
    double actual = 1e9, ideal = 0;
    engine *e = open_engine(n_threads, false), *held = open_engine(n_threads, true);
    for (int i = 0; i < REPEATS; i++) {
        double seconds = run_mixed(e, NULL, &n_tokens);
        if (seconds < actual) actual = seconds;
        run_mixed(held, steps, &n_ideal);
    }
    for (int i = 0; i < MOST_STEPS; i++) ideal += steps[i];
    if (n_tokens != n_ideal) fprintf(stderr, "%ld tokens, but %ld in the ideal batch\n", n_tokens, n_ideal);
    printf("16 prompts x 4: %ld tokens in %.3f s (%.0f tokens/s); ideal %.3f s: %.1f %% of it\n", n_tokens,
           actual, (double)n_tokens / actual, ideal, 100 * ideal / actual);
    engine_close(held);
    engine_close(e);
}

/* ---- One short prompt behind a thousand long ones. */

typedef struct ending {
    double at;
    long n_tokens;
} ending;
static void end_sample(void *context, const sample_result *s) {
    ((ending *)context)->n_tokens += s->n_tokens;
}
static void end_done(void *context, const rollout_totals *t) {
    (void)t;
    ((ending *)context)->at = clock_seconds();
}

static void submit_short(engine *e, ending *end) {
    rollout_prompt p = {.tokens = tokens[1], .n_tokens = 10, .seed = 1};
    rollout_spec spec = {.prompts = &p,
                         .n_prompts = 1,
                         .n = 1,
                         .sampling = rollout_sampling_defaults(),
                         .events = {end, end_sample, end_done, tell_failed}};
    spec.sampling.max_tokens = 16;
    spec.sampling.has_stop_tokens = true;
    cop_error err;
    if (engine_submit(e, &spec, NULL, &err) != COP_OK) fail(&err);
}

static void measure_wait(int n_threads) {
    engine *e = open_engine(n_threads, false);
    static rollout_prompt prompts[LONG_ONES];
    static int32_t long_tokens[LONG_ONES][LONG];
    for (int i = 0; i < LONG_ONES; i++) {
        for (int t = 0; t < LONG; t++) long_tokens[i][t] = (t * 31 + i * 7 + 1) % 900;
        prompts[i] = (rollout_prompt){.tokens = long_tokens[i], .n_tokens = LONG, .seed = (uint64_t)i};
    }
    ending alone = {0}, all = {0}, behind = {0};
    double start = clock_seconds();
    submit_short(e, &alone);
    while (engine_step(e)) continue;
    printf("a short prompt alone: %.3f s\n", alone.at - start);
    rollout_spec spec = {.prompts = prompts,
                         .n_prompts = LONG_ONES,
                         .n = 1,
                         .sampling = rollout_sampling_defaults(),
                         .events = {&all, end_sample, end_done, tell_failed}};
    spec.sampling.max_tokens = 100;
    spec.sampling.has_stop_tokens = true;
    cop_error err;
    start = clock_seconds();
    if (engine_submit(e, &spec, NULL, &err) != COP_OK) fail(&err);
    submit_short(e, &behind);
    while (engine_step(e)) continue;
    printf("behind %d prompts of %d tokens, 100 tokens each: %.3f s; they took %.3f s\n", LONG_ONES, LONG,
           behind.at - start, all.at - start);
    engine_close(e);
}

int main(int argc, char **argv) {
    int n_threads = argc > 1 ? atoi(argv[1]) : 0;
    for (int p = 0; p < N_PROMPTS; p++) {
        for (int t = 0; t < 512; t++) tokens[p][t] = (t * 31 + p * 71 + 7) % 900;
    }
    for (int i = 0; i < 20; i++) stop_tokens[i] = 50 * i;
    measure_mixed(n_threads);
    measure_wait(n_threads);
    return 0;
}
