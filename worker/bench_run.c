/* Running a load step by step.
 *
 *   submit | prefill step(s) ... first tokens drawn | step | step | .. | last tokens drawn
 *          |<------------ first_token ------------->|<----------- decode ------------->|
 *
 * Only engine_step() is timed, not what is asked of the engine in between. */
#include "worker/bench_run.h"

#include <assert.h>
#include <stdlib.h>

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double bench_median(double *values, int n) {
    assert(n >= 1);
    qsort(values, (size_t)n, sizeof *values, compare);
    return (values[(n - 1) / 2] + values[n / 2]) / 2;
}

/* Pages that the samples hold at their end, and one more for the prompt's last page, of which each sample has
 * a copy. */
static uint64_t pages_needed(const bench_load *l) {
    uint64_t all = ((uint64_t)l->n_tokens + (uint64_t)l->n_decode + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
    uint64_t full = (uint64_t)l->n_tokens / KV_PAGE_TOKENS, n = (uint64_t)l->n;
    if (l->separate) return n * all;
    return full + n * (all - full) + (n > 1 && l->n_tokens % KV_PAGE_TOKENS != 0);
}

cop_status bench_fits(const engine *e, const bench_load *l, cop_error *err) {
    engine_status s;
    engine_read_status(e, &s);
    int64_t length = (int64_t)l->n_tokens + l->n_decode;
    if (length > engine_context(e))
        return cop_fail(err, COP_ETOOLONG,
                        "cannot decode %d tokens after a prompt of %d: the context is %d tokens", l->n_decode,
                        l->n_tokens, engine_context(e));
    if (pages_needed(l) > s.pages_total)
        return cop_fail(err, COP_ETOOLARGE,
                        "cannot run %d samples at once: they need %llu KV pages, and there are %llu: raise "
                        "--kv-memory",
                        l->n, (unsigned long long)pages_needed(l), (unsigned long long)s.pages_total);
    return COP_OK;
}

/* ---- Events: only the end matters. */

typedef struct ending {
    bool over;
    cop_error failure;
} ending;

static void on_sample(void *context, const sample_result *s) { (void)context, (void)s; }

static void on_done(void *context, const rollout_totals *t) {
    (void)t;
    ((ending *)context)->over = true;
}

static void on_failed(void *context, const cop_error *e) {
    ((ending *)context)->over = true;
    ((ending *)context)->failure = *e;
}

/* ---- Steps. */

static cop_status submit(engine *e, const bench_load *l, ending *end, cop_error *err) {
    size_t n_prompts = l->separate ? (size_t)l->n : 1;
    rollout_prompt *prompts = mem_zalloc(n_prompts, sizeof *prompts);
    if (!prompts) return cop_fail(err, COP_ENOMEM, "could not allocate %zu prompts", n_prompts);
    for (size_t i = 0; i < n_prompts; i++)
        prompts[i] = (rollout_prompt){.tokens = l->tokens, .n_tokens = (size_t)l->n_tokens, .seed = i};
    rollout_sampling sampling = rollout_sampling_defaults();
    sampling.max_tokens = l->n_decode;
    sampling.temperature = l->temperature;
    sampling.top_k = l->top_k;
    sampling.has_stop_tokens = true; /* none: all samples are equally long */
    rollout_spec spec = {.prompts = prompts,
                         .n_prompts = n_prompts,
                         .n = l->separate ? 1 : (uint32_t)l->n,
                         .sampling = sampling,
                         .events = {end, on_sample, on_done, on_failed}};
    cop_status status = engine_submit(e, &spec, NULL, err);
    mem_free(prompts);
    return status;
}

/* One step; the seconds that it took. */
static double timed_step(engine *e) {
    double before = clock_seconds();
    engine_step(e);
    return clock_seconds() - before;
}

static void run_prompt(engine *e, const bench_load *l, const ending *end, bench_timing *out) {
    engine_status s;
    do {
        out->first_token += timed_step(e);
        engine_read_status(e, &s);
    } while (!end->over && s.rows < (uint64_t)l->n);
}

static void run_steps(engine *e, const bench_load *l, const ending *end, double *steps, bench_timing *out) {
    engine_status before, after;
    int n_steps = 0;
    engine_read_status(e, &before);
    while (!end->over) {
        assert(n_steps < l->n_decode);
        steps[n_steps] = timed_step(e);
        out->decode += steps[n_steps++];
    }
    engine_read_status(e, &after);
    out->sample = after.seconds_sample - before.seconds_sample;
    if (n_steps > 0) out->step = bench_median(steps, n_steps);
    assert(end->failure.status != COP_OK || n_steps == l->n_decode - 1);
}

cop_status bench_run(engine *e, const bench_load *l, bench_timing *out, cop_error *err) {
    assert(l->n >= 1 && l->n_tokens >= 1 && l->n_decode >= 1);
    *out = (bench_timing){0};
    cop_status status = bench_fits(e, l, err);
    if (status != COP_OK) return status;
    double *steps = mem_alloc((size_t)l->n_decode, sizeof *steps);
    if (!steps) return cop_fail(err, COP_ENOMEM, "could not allocate the times of %d steps", l->n_decode);
    ending end = {0};
    double start = clock_seconds();
    status = submit(e, l, &end, err);
    out->first_token = clock_seconds() - start;
    if (status == COP_OK) {
        run_prompt(e, l, &end, out);
        run_steps(e, l, &end, steps, out);
        if (end.failure.status != COP_OK) {
            *err = end.failure;
            status = end.failure.status;
        }
    }
    mem_free(steps);
    return status;
}
