/* `coppice bench`: how fast a model, or one of its shape, runs here, and how far that is from what the
 * machine can do. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/shape.h"
#include "engine/work.h"
#include "worker/bench_run.h"
#include "worker/commands.h"
#include "worker/open_model.h"

static int run(int argc, char **argv);

const command command_bench = {
    .name = "bench",
    .arguments = "",
    .summary = "how fast a model runs here, against what the machine can do",
    .details = "Prefills a prompt of pseudo-random tokens and decodes it for each number of samples. MBU is "
               "the share of the machine's read bandwidth that a step has to use (each matrix once, a shared "
               "prompt's keys and values once, each sample's own), MFU the share of its peak of "
               "multiply-adds. Both peaks are measured right before and after each run, with the same "
               "threads.\nColumns: tokens/s of all samples together, after their first token; per step, the "
               "median; sampling, the share of decoding that draws tokens and computes log-probabilities; "
               "memory, what is resident after the line's runs (what earlier lines touched stays resident)."
               "\n--shape dN stands for nanochat's newest generation with N layers.",
    .example = "coppice bench --shape d6 --samples 1,8 --decode-tokens 32",
    .run = run,
};

enum { MAX_ENTRIES = 64, MAX_SAMPLES = 4096, FORK_SAMPLES = 8, MAX_REPEAT = 99, PROMPT_SEED = 1 };

typedef struct choices {
    const char *shape, *samples;
    int64_t prompt_tokens, decode_tokens, repeat, top_k;
    double temperature;
    bool separate, fork, json;
    int n[MAX_ENTRIES]; /* the list of --samples */
    int n_entries;
} choices;

/* Medians over the repeats. */
typedef struct figures {
    bench_timing time;
    work possible;        /* what the machine could have done at most while it decoded */
    double prefill_flops; /* and before the first token */
} figures;

/* What is told of one entry of --samples. */
typedef struct entry {
    int n;
    figures run;
    work work; /* that all decode steps together must do */
    size_t memory_bytes;
} entry;

typedef struct bench {
    engine *engine;
    const choices *c;
    const char *name; /* of the model or shape */
    int32_t *tokens;  /* [prompt_tokens] */
    size_t element_bytes;
    k_peaks peak, last; /* the best so far, and that of just now */
    figures prefill;
    entry entries[MAX_ENTRIES];
    double fork_speedup;
} bench;

/* ---- Measuring. */

static bench_load load_of(const bench *b, int n, int n_decode, bool separate) {
    return (bench_load){.tokens = b->tokens,
                        .n_tokens = (int)b->c->prompt_tokens,
                        .n_decode = n_decode,
                        .n = n,
                        .separate = separate,
                        .temperature = b->c->temperature,
                        .top_k = (int)b->c->top_k};
}

static double larger(double a, double b) { return a > b ? a : b; }

static k_peaks larger_peaks(k_peaks a, k_peaks b) {
    return (k_peaks){.bandwidth = larger(a.bandwidth, b.bandwidth), .flops = larger(a.flops, b.flops)};
}

/* The better of what the machine does just now and of what it did when this was called last.  Other work
 * lowers both a run and the peaks beside it, and comes and goes within seconds. */
static cop_status peaks_around(bench *b, k_peaks *out, cop_error *err) {
    k_peaks before = b->last;
    cop_status status = engine_measure(b->engine, &b->last, err);
    b->peak = larger_peaks(b->peak, b->last);
    *out = larger_peaks(before, b->last);
    return status;
}

static cop_status run_repeats(bench *b, const bench_load *l, figures *out, cop_error *err) {
    enum { FIRST_TOKEN, DECODE, STEP, SAMPLE, BYTES, FLOPS, PREFILL_FLOPS, N_FIGURES };
    double f[N_FIGURES][MAX_REPEAT], median[N_FIGURES];
    int n = (int)b->c->repeat;
    for (int i = 0; i < n; i++) {
        bench_timing t;
        k_peaks peaks;
        cop_status status = bench_run(b->engine, l, &t, err);
        if (status == COP_OK) status = peaks_around(b, &peaks, err);
        if (status != COP_OK) return status;
        f[FIRST_TOKEN][i] = t.first_token;
        f[DECODE][i] = t.decode;
        f[STEP][i] = t.step;
        f[SAMPLE][i] = t.sample;
        f[BYTES][i] = t.decode * peaks.bandwidth;
        f[FLOPS][i] = t.decode * peaks.flops;
        f[PREFILL_FLOPS][i] = t.first_token * peaks.flops;
    }
    for (int i = 0; i < N_FIGURES; i++) median[i] = bench_median(f[i], n);
    *out = (figures){.time = {median[FIRST_TOKEN], median[DECODE], median[STEP], median[SAMPLE]},
                     .possible = {.bytes = median[BYTES], .flops = median[FLOPS]},
                     .prefill_flops = median[PREFILL_FLOPS]};
    return COP_OK;
}

/* What all decode steps of a load must cost at least. */
static work work_of_load(const bench *b, const bench_load *l) {
    work all = {0};
    for (int i = 0; i + 1 < l->n_decode; i++) {
        work w = work_of_decode(engine_arch(b->engine), b->element_bytes, l->n, l->n_tokens + i,
                                l->separate ? 0 : l->n_tokens);
        all.bytes += w.bytes;
        all.flops += w.flops;
    }
    return all;
}

static size_t resident_bytes(void) {
    size_t pages = 0;
    FILE *f = fopen("/proc/self/statm", "re");
    if (f && fscanf(f, "%*u %zu", &pages) != 1) pages = 0;
    if (f) fclose(f);
    return pages * (size_t)sysconf(_SC_PAGESIZE);
}

static cop_status measure_prefill(bench *b, cop_error *err) {
    bench_load l = load_of(b, 1, 1, false);
    return run_repeats(b, &l, &b->prefill, err);
}

static cop_status measure_entry(bench *b, entry *e, int n, cop_error *err) {
    bench_load l = load_of(b, n, (int)b->c->decode_tokens, b->c->separate);
    cop_status status = run_repeats(b, &l, &e->run, err);
    e->n = n;
    e->work = work_of_load(b, &l);
    e->memory_bytes = resident_bytes();
    return status;
}

/* Eight calls with one sample, each of which computes the prompt, over one with eight. */
static cop_status measure_fork(bench *b, cop_error *err) {
    bench_load one = load_of(b, 1, (int)b->c->decode_tokens, false);
    bench_load all = load_of(b, FORK_SAMPLES, (int)b->c->decode_tokens, false);
    double ratios[MAX_REPEAT];
    for (int i = 0; i < (int)b->c->repeat; i++) {
        bench_timing t;
        double calls = 0;
        cop_status status = COP_OK;
        for (int j = 0; j < FORK_SAMPLES && status == COP_OK; j++) {
            status = bench_run(b->engine, &one, &t, err);
            calls += t.first_token + t.decode;
        }
        if (status == COP_OK) status = bench_run(b->engine, &all, &t, err);
        if (status != COP_OK) return status;
        ratios[i] = calls / (t.first_token + t.decode);
    }
    b->fork_speedup = bench_median(ratios, (int)b->c->repeat);
    return COP_OK;
}

/* Refuse at once what would fail after minutes. */
static cop_status check_loads(const bench *b, cop_error *err) {
    cop_status status = COP_OK;
    for (int i = 0; i < b->c->n_entries && status == COP_OK; i++) {
        bench_load l = load_of(b, b->c->n[i], (int)b->c->decode_tokens, b->c->separate);
        status = bench_fits(b->engine, &l, err);
    }
    bench_load fork = load_of(b, FORK_SAMPLES, (int)b->c->decode_tokens, false);
    if (status == COP_OK && b->c->fork) status = bench_fits(b->engine, &fork, err);
    return status;
}

static cop_status measure(bench *b, cop_error *err) {
    bench_load warm = load_of(b, 1, 2, false);
    bench_timing t;
    cop_status status = check_loads(b, err);
    if (status == COP_OK) status = bench_run(b->engine, &warm, &t, err);
    if (status == COP_OK) status = engine_measure(b->engine, &b->last, err);
    b->peak = b->last;
    if (status == COP_OK) status = measure_prefill(b, err);
    for (int i = 0; i < b->c->n_entries && status == COP_OK; i++)
        status = measure_entry(b, &b->entries[i], b->c->n[i], err);
    if (status == COP_OK && b->c->fork) status = measure_fork(b, err);
    return status;
}

/* ---- Telling. */

/* Percents of what the machine can do. */
static double mbu(const entry *e) { return 100 * e->work.bytes / e->run.possible.bytes; }
static double mfu(const entry *e) { return 100 * e->work.flops / e->run.possible.flops; }
static double prefill_mfu(const bench *b) {
    return 100 * work_prefill_flops(engine_arch(b->engine), (int)b->c->prompt_tokens) /
           b->prefill.prefill_flops;
}

static double prefill_rate(const bench *b) {
    return (double)b->c->prompt_tokens / b->prefill.time.first_token;
}
static double decode_rate(const bench *b, const entry *e) {
    return (double)e->n * (double)(b->c->decode_tokens - 1) / e->run.time.decode;
}
static double sample_percent(const entry *e) { return 100 * e->run.time.sample / e->run.time.decode; }

static json_t *json_of_entry(const bench *b, const entry *e) {
    return json_pack("{s:i, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:I}", "batch_size", e->n, "ttft_sec",
                     e->run.time.first_token, "tpot_sec", e->run.time.step, "tok_per_sec", decode_rate(b, e),
                     "mbu_percent", mbu(e), "mfu_percent", mfu(e), "sample_percent", sample_percent(e),
                     "decode_bytes", e->work.bytes, "decode_flops", e->work.flops, "memory_bytes",
                     (json_int_t)e->memory_bytes);
}

static bool print_json(const bench *b) {
    const choices *c = b->c;
    json_t *sweep = json_array();
    for (int i = 0; i < c->n_entries; i++) json_array_append_new(sweep, json_of_entry(b, &b->entries[i]));
    json_t *prefill =
        json_pack("{s:I, s:f, s:f, s:f}", "tokens", (json_int_t)c->prompt_tokens, "ttft_sec",
                  b->prefill.time.first_token, "tok_per_sec", prefill_rate(b), "mfu_percent", prefill_mfu(b));
    json_t *all =
        json_pack("{s:s, s:I, s:s, s:s, s:i, s:I, s:I, s:f, s:I, s:I, s:b, s:f, s:f, s:o, s:o}",
                  c->shape ? "shape" : "model", b->name, "parameters",
                  (json_int_t)work_parameters(engine_arch(b->engine)), "numerics", engine_numerics(b->engine),
                  "isa", engine_isa(b->engine), "threads", engine_threads(b->engine), "prompt_tokens",
                  (json_int_t)c->prompt_tokens, "decode_tokens", (json_int_t)c->decode_tokens, "temperature",
                  c->temperature, "top_k", (json_int_t)c->top_k, "repeat", (json_int_t)c->repeat, "separate",
                  (int)c->separate, "peak_bandwidth_bytes_per_sec", b->peak.bandwidth, "peak_flops_per_sec",
                  b->peak.flops, "prefill", prefill, "sweep", sweep);
    if (all && c->fork) json_object_set_new(all, "fork_speedup", json_real(b->fork_speedup));
    bool ok =
        all && json_dumpf(all, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9)) == 0 && putchar('\n') >= 0;
    json_decref(all);
    return ok && fflush(stdout) == 0;
}

static bool print_table(const bench *b) {
    const choices *c = b->c;
    printf("%s: %.1f million parameters, %s, %s, %d thread%s\n", b->name,
           (double)work_parameters(engine_arch(b->engine)) / 1e6, engine_numerics(b->engine),
           engine_isa(b->engine), engine_threads(b->engine), engine_threads(b->engine) == 1 ? "" : "s");
    printf("this machine reads %.1f GB/s and multiplies and adds at %.1f GFLOP/s\n", b->peak.bandwidth / 1e9,
           b->peak.flops / 1e9);
    printf("prompt of %d tokens%s, %d decoded, temperature %g, top-k %d, median of %d\n\n",
           (int)c->prompt_tokens, c->separate ? " for each sample" : "", (int)c->decode_tokens,
           c->temperature, (int)c->top_k, (int)c->repeat);
    printf("%7s  %11s  %9s  %9s  %8s  %7s  %8s  %10s\n", "samples", "first token", "per step", "tokens/s",
           "MBU", "MFU", "sampling", "memory");
    printf("%7s  %9.3f s  %9s  %9.1f  %8s  %5.1f %%\n", "prefill", b->prefill.time.first_token, "",
           prefill_rate(b), "", prefill_mfu(b));
    for (int i = 0; i < c->n_entries; i++) {
        const entry *e = &b->entries[i];
        printf("%7d  %9.3f s  %6.2f ms  %9.1f  %6.1f %%  %5.1f %%  %6.1f %%  %6.0f MiB\n", e->n,
               e->run.time.first_token, 1e3 * e->run.time.step, decode_rate(b, e), mbu(e), mfu(e),
               sample_percent(e), (double)e->memory_bytes / (1 << 20));
    }
    if (c->fork)
        printf("\n%d samples of one prompt in one call: %.2f times as fast as %d calls\n", FORK_SAMPLES,
               b->fork_speedup, FORK_SAMPLES);
    return fflush(stdout) == 0 && !ferror(stdout);
}

/* ---- The command line. */

static int usage_error(const char *message) {
    fprintf(stderr, "coppice: %s\n", message);
    return 2;
}

/* "1,8,32" to c->n. */
static bool parse_samples(choices *c) {
    const char *list = c->samples;
    for (c->n_entries = 0; c->n_entries < MAX_ENTRIES;) {
        char *end;
        if (*list < '0' || *list > '9') return false;
        long n = strtol(list, &end, 10);
        if (n < 1 || n > MAX_SAMPLES) return false;
        c->n[c->n_entries++] = (int)n;
        if (!*end) return true;
        if (*end != ',') return false;
        list = end + 1;
    }
    return false;
}

/* -1, or the exit status of a usage error. */
static int check_choices(choices *c, const model_options *m) {
    model_options none = model_options_defaults();
    if (!c->shape == !m->model)
        return usage_error(c->shape ? "give either --model or --shape, not both"
                                    : "nothing to measure: use --model PATH or --shape d12");
    if (c->shape && (m->step != none.step || m->tokenizer || m->softcap != 0 || m->window_pattern ||
                     m->rope_table || m->sequence_len || m->short_window))
        return usage_error("--shape takes no option that tells how a checkpoint is to be read");
    if (c->temperature != 0 && c->temperature < 0.001)
        return usage_error("--temperature is 0, or 0.001 to 100");
    if (parse_samples(c)) return -1;
    fprintf(stderr,
            "coppice: --samples \"%s\" is not a list of up to %d numbers from 1 to %d, such as 1,8,32\n",
            c->samples, MAX_ENTRIES, MAX_SAMPLES);
    return 2;
}

static cop_status open_engine(bench *b, const model_options *m, cop_error *err) {
    engine_options o = model_engine_options(m);
    o.hold_rows = true;
    o.no_prefix_cache = true; /* every run computes its prompts */
    o.max_rows = FORK_SAMPLES;
    for (int i = 0; i < b->c->n_entries; i++)
        if (b->c->n[i] > o.max_rows) o.max_rows = b->c->n[i];
    b->element_bytes = o.profile == PRECISION_BF16 ? 2 : 4;
    if (!b->c->shape) {
        checkpoint *c;
        checkpoint_options options = model_checkpoint_options(m);
        COP_TRY(checkpoint_open(&c, m->model, &options, err), err, "open model \"%s\"", m->model);
        cop_status status = engine_open(&b->engine, c, NULL, &o, err);
        checkpoint_close(c);
        if (status != COP_OK) cop_error_prefix(err, "open model \"%s\"", m->model);
        return status;
    }
    arch a;
    cop_status status = shape_arch(&a, b->c->shape, err);
    if (status != COP_OK) return status;
    COP_TRY(engine_open_random(&b->engine, &a, 1, &o, err), err, "make a model of shape %s", b->c->shape);
    return COP_OK;
}

/* Any valid ids do: a linear congruential generator (Knuth's MMIX). */
static cop_status make_prompt(bench *b, cop_error *err) {
    size_t n = (size_t)b->c->prompt_tokens;
    b->tokens = mem_alloc(n, sizeof *b->tokens);
    if (!b->tokens) return cop_fail(err, COP_ENOMEM, "could not allocate a prompt of %zu tokens", n);
    uint64_t x = PROMPT_SEED;
    for (size_t i = 0; i < n; i++) {
        x = x * 6364136223846793005u + 1442695040888963407u;
        b->tokens[i] = (int32_t)((x >> 33) % (uint64_t)engine_arch(b->engine)->vocab);
    }
    return COP_OK;
}

static int run_bench(const choices *c, const model_options *m) {
    cop_error err;
    bench b = {.c = c, .name = c->shape ? c->shape : m->model};
    cop_status status = open_engine(&b, m, &err);
    if (status == COP_OK) status = make_prompt(&b, &err);
    if (status == COP_OK) status = measure(&b, &err);
    if (status == COP_OK && !(c->json ? print_json(&b) : print_table(&b)))
        status = cop_fail(&err, COP_EIO, "could not write the figures");
    mem_free(b.tokens);
    engine_close(b.engine);
    return status == COP_OK ? 0 : tell_error(&err, 1);
}

static int run(int argc, char **argv) {
    model_options m = model_options_defaults();
    choices c = {.samples = "1,8,32",
                 .prompt_tokens = 100,
                 .decode_tokens = 64,
                 .repeat = 3,
                 .temperature = 1,
                 .top_k = 50};
    option_spec rows[MODEL_OPTION_ROWS + 10] = {
        {.name = "shape",
         .kind = OPTION_STRING,
         .value = &c.shape,
         .arg = "dN",
         .help = "random weights instead of a model: d1 to d48"},
        {.name = "prompt-tokens",
         .kind = OPTION_INT,
         .value = &c.prompt_tokens,
         .arg = "N",
         .help = "length of the prompt",
         .min = 1,
         .max = 1 << 24},
        {.name = "decode-tokens",
         .kind = OPTION_INT,
         .value = &c.decode_tokens,
         .arg = "N",
         .help = "tokens of each sample, at least 2",
         .min = 2,
         .max = 1 << 24},
        {.name = "samples",
         .kind = OPTION_STRING,
         .value = &c.samples,
         .arg = "LIST",
         .help = "samples side by side, one line each"},
        {.name = "separate",
         .kind = OPTION_FLAG,
         .value = &c.separate,
         .help = "a prompt for each sample, same tokens, nothing shared"},
        {.name = "fork",
         .kind = OPTION_FLAG,
         .value = &c.fork,
         .help = "also compare eight calls for a sample with one for eight, prefill included"},
        {.name = "repeat",
         .kind = OPTION_INT,
         .value = &c.repeat,
         .arg = "R",
         .help = "measure R times and tell medians",
         .min = 1,
         .max = MAX_REPEAT},
        {.name = "temperature",
         .kind = OPTION_REAL,
         .value = &c.temperature,
         .arg = "T",
         .help = "0 takes the best token",
         .max = 100},
        {.name = "top-k",
         .kind = OPTION_INT,
         .value = &c.top_k,
         .arg = "K",
         .help = "keep the K best; 0: off",
         .max = INT32_MAX},
        {.name = "json",
         .kind = OPTION_FLAG,
         .value = &c.json,
         .help = "one JSON document instead of the table"},
    };
    int n_args, n_rows = 10 + model_option_rows(&m, true, rows + 10);
    int status = options_parse(&command_bench, rows, n_rows, argc, argv, 0, &n_args);
    if (status < 0) status = check_choices(&c, &m);
    return status < 0 ? run_bench(&c, &m) : status;
}
