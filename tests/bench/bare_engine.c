/* The engine alone on the rows of a `coppice generate`: all prompts are read and tokenized before the clock
 * starts, and no sample is kept.
 *
 *     bare_engine MODEL PROMPTS.jsonl N SEED MAX_TOKENS THREADS
 *
 * prints seconds and tokens of one run (tests/bench/generate_rate.py compares). */
#include <stdio.h>
#include <stdlib.h>

#include "worker/line_job.h"
#include "worker/open_model.h"

static void fail(const cop_error *err) {
    fprintf(stderr, "%s\n", err->message);
    exit(1);
}

static void count_sample(void *context, const sample_result *s) { *(long *)context += s->n_tokens; }
static void ignore_done(void *context, const rollout_totals *t) { (void)context, (void)t; }
static void tell_failed(void *context, const cop_error *err) {
    (void)context;
    fail(err);
}

static line_job **read_lines(const char *path, const line_rules *rules, size_t *n) {
    cop_error err;
    input_file *in;
    input_line line;
    line_job **jobs = NULL;
    size_t cap = 0;
    bool more = true;
    if (input_open(&in, path, &err) != COP_OK) fail(&err);
    for (*n = 0; more;) {
        if (input_next(in, &line, &more, &err) != COP_OK) fail(&err);
        if (!more) break;
        if (!mem_grow((void **)&jobs, &cap, *n + 1, sizeof *jobs)) exit(1);
        jobs[*n] = line_job_open(rules, &line);
        if (jobs[*n]->error.status != COP_OK) fail(&jobs[*n]->error);
        ++*n;
    }
    input_close(in);
    return jobs;
}

int main(int argc, char **argv) {
    cop_error err;
    open_model model;
    model_options m = model_options_defaults();
    if (argc != 7) return 2;
    m.model = argv[1];
    m.threads = atoi(argv[6]);
    if (open_model_init(&model, &m, &err) != COP_OK) fail(&err);
    line_rules rules = {model.tokenizer, engine_arch(model.engine)->vocab, strtoull(argv[4], NULL, 10),
                        (uint32_t)atoi(argv[3])};
    size_t n;
    line_job **jobs = read_lines(argv[2], &rules, &n);
    long n_tokens = 0;
    rollout_spec spec = {.n_prompts = 1,
                         .n = rules.n,
                         .sampling = rollout_sampling_defaults(),
                         .events = {&n_tokens, count_sample, ignore_done, tell_failed}};
    spec.sampling.max_tokens = atoi(argv[5]);
    spec.sampling.calculator = engine_has_calculator(model.engine);
    double start = clock_seconds();
    for (size_t i = 0; i < n; i++) {
        const line_job *j = jobs[i];
        rollout_prompt p = {
            .tokens = j->tokens.ids, .n_tokens = j->tokens.n, .id = j->id, .n_id = j->n_id, .seed = j->seed};
        spec.prompts = &p;
        if (engine_submit(model.engine, &spec, NULL, &err) != COP_OK) fail(&err);
    }
    while (engine_step(model.engine)) continue;
    printf("%.4f %ld\n", clock_seconds() - start, n_tokens);
    for (size_t i = 0; i < n; i++) line_job_free(jobs[i]);
    mem_free(jobs);
    open_model_free(&model);
    return 0;
}
