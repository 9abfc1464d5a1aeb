/* What the machine can do at most: the read bandwidth of memory and the rate of fused multiply-adds, by all
 * threads of the backend and with its instruction set.  Bodies: cpu_probe in cpu.h.
 *
 * Other work on the machine only ever lowers a figure, so each is the best of many short tries. */
#include "kernels/cpu/cpu.h"

#include <assert.h>
#include <math.h>
#include <string.h>
#include <unistd.h>

#define READ_BYTES ((size_t)256 << 20) /* the least that is read in a try */
#define TRY_SECONDS 0.1                /* tries go on for so long */
#define LEAST_TRIES 5
#define BURN_ROUNDS 200000 /* milliseconds with AVX2 */
#define SCALAR_CHAINS 8
#define SCALAR_ROUNDS_PART 16 /* without vectors a round takes so much longer */

/* ---- Bodies without vectors. */

static uint32_t read_scalar(const uint32_t *words, size_t n) {
    uint32_t sum[4] = {0};
    assert(n % 4 == 0);
    for (size_t i = 0; i < n; i += 4)
        for (int j = 0; j < 4; j++) sum[j] += words[i + (size_t)j];
    return sum[0] + sum[1] + sum[2] + sum[3];
}

/* x = x * 0.5 + 1 goes to 2: neither overflow nor denormals slow it down. */
static double burn_scalar(float *sink, int n_rounds) {
    float chain[SCALAR_CHAINS];
    int n = n_rounds / SCALAR_ROUNDS_PART;
    for (int j = 0; j < SCALAR_CHAINS; j++) chain[j] = (float)j + *sink;
    for (int i = 0; i < n; i++)
        for (int j = 0; j < SCALAR_CHAINS; j++) chain[j] = fmaf(chain[j], 0.5f, 1.0f);
    for (int j = 0; j < SCALAR_CHAINS; j++) *sink += chain[j];
    return 2.0 * SCALAR_CHAINS * n;
}

const cpu_probe cpu_probe_scalar = {.read = read_scalar, .burn = burn_scalar};

/* ---- A try by all threads. */

/* What one thread reports, in a cache line of its own. */
typedef struct report {
    _Alignas(64) double flops;
    uint32_t sum; /* of what was read: it keeps the reads from being left out */
    float sink;
} report;

typedef struct probe {
    const cpu_probe *body;
    char *buffer;
    size_t part_bytes; /* of each thread */
    report *reports;   /* [threads] */
} probe;

static void fill(void *arg, int index, int n) {
    const probe *p = arg;
    (void)n;
    memset(p->buffer + (size_t)index * p->part_bytes, 1, p->part_bytes);
}

static void read_part(void *arg, int index, int n) {
    const probe *p = arg;
    (void)n;
    const void *part = p->buffer + (size_t)index * p->part_bytes;
    p->reports[index].sum += p->body->read(part, p->part_bytes / sizeof(uint32_t));
}

static void burn_part(void *arg, int index, int n) {
    const probe *p = arg;
    (void)n;
    p->reports[index].flops = p->body->burn(&p->reports[index].sink, BURN_ROUNDS);
}

/* The shortest time that fn takes. */
static double best_seconds(k_ctx *k, threads_fn *fn, probe *p) {
    double start = clock_seconds(), best = INFINITY;
    for (int i = 0; i < LEAST_TRIES || clock_seconds() - start < TRY_SECONDS; i++) {
        double before = clock_seconds();
        threads_run(k->threads, fn, p);
        double seconds = clock_seconds() - before;
        if (seconds < best) best = seconds;
    }
    return best;
}

/* ---- The measurement. */

/* Much more than the last-level cache, as far as it tells its size and there is memory. */
static size_t bytes_to_read(void) {
    size_t bytes = READ_BYTES;
#ifdef _SC_LEVEL3_CACHE_SIZE
    long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
    size_t most = mem_available() / 4;
    if (cache > 0 && (size_t)cache * 4 > bytes) bytes = (size_t)cache * 4 < most ? (size_t)cache * 4 : bytes;
#endif
    return bytes;
}

cop_status k_measure(k_ctx *k, k_peaks *out, cop_error *err) {
    size_t n = (size_t)k_threads(k);
    size_t part = bytes_to_read() / n / CPU_PROBE_BLOCK * CPU_PROBE_BLOCK;
    *out = (k_peaks){0};
    probe p = {.body = k->ops->probe, .part_bytes = part};
    p.buffer = k_alloc(k, n, part);
    p.reports = k_alloc(k, n, sizeof *p.reports);
    cop_status status = COP_OK;
    if (p.buffer && p.reports) {
        memset(p.reports, 0, n * sizeof *p.reports);
        cpu_flush_denormals();
        threads_run(k->threads, fill, &p);
        out->bandwidth = (double)part * (double)n / best_seconds(k, read_part, &p);
        double seconds = best_seconds(k, burn_part, &p);
        for (size_t i = 0; i < n; i++) out->flops += p.reports[i].flops / seconds;
    } else {
        status = cop_fail(err, COP_ENOMEM, "could not allocate %zu bytes to measure memory with", n * part);
    }
    k_free(k, p.buffer);
    k_free(k, p.reports);
    return status;
}
