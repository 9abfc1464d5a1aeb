/* A draw first lists candidates: a superset of what is kept that is closed upwards in the order, found by a
 * bar that the logits must reach.  Whole blocks below the bar are passed over.  Then the candidates are cut
 * down exactly, by integers alone: no order of summation enters what is kept. */
#include "kernels/cpu/truncate.h"
#include "kernels/cpu/math.h"
#include "kernels/cpu/order.h"

#include <assert.h>
#include <float.h>

/* Logits reach a bar if fp32(z * scale) - max >= least.  As fp32 operations are monotone, a block holds one
 * that does exactly if its greatest does. */
typedef struct bar {
    float scale, max, least;
} bar;

static bool reaches(float z, bar b) { return z * b.scale - b.max >= b.least; }

static int list(const cpu_row *r, bar b, uint64_t *items) {
    const float *z = r->z;
    int n = 0;
    for (int32_t first = 0; first < r->n; first += CPU_MAX_BLOCK) {
        if (!reaches(r->blocks[first / CPU_MAX_BLOCK], b)) continue;
        int32_t end = r->n - first < CPU_MAX_BLOCK ? r->n : first + CPU_MAX_BLOCK;
        for (int32_t id = first; id < end; id++) { /* no branch that a flat row could mislead */
            items[n] = order_pack(z[id], id);
            n += reaches(z[id], b);
        }
    }
    return n;
}

/* ---- top_k. */

/* The count-th greatest of the maxima of blocks: as many values reach it.  -inf where there are fewer. */
static float block_bar(const cpu_row *r, int count, uint64_t *items) {
    int n_blocks = (r->n + CPU_MAX_BLOCK - 1) / CPU_MAX_BLOCK;
    if (count > n_blocks) return -INFINITY;
    for (int b = 0; b < n_blocks; b++) items[b] = order_pack(r->blocks[b], b);
    order_select(items, n_blocks, count);
    float least = INFINITY;
    for (int i = 0; i < count; i++) least = fminf(least, r->blocks[order_id(items[i])]);
    return least;
}

/* The `count` best of the values from `least` on; returns how many there are. */
static int list_best(const cpu_row *r, int count, float least, cpu_scratch *s) {
    bar b = {1.0f, 0.0f, fmaxf(least, block_bar(r, count, s->order))};
    int n = list(r, b, s->order);
    if (n <= count) return n;
    order_select(s->order, n, count);
    return count;
}

void truncate_best(const cpu_row *r, int count, cpu_scratch *s) {
    assert(count >= 1 && count <= r->n);
    list_best(r, count, -INFINITY, s);
}

/* ---- top_p and min_p. */

static uint64_t fixed(float weight) { return (uint64_t)(int64_t)((double)weight * CPU_FIXED_ONE); }

/* A bar that every id with a weight from `least` on reaches.  The margin covers the errors of exp and log
 * many times. */
static bar weight_bar(float scale, float max, double least) {
    return (bar){scale, max, cop_log((float)least) - 0.01f};
}

/* The weights that top_p has to reach; at least one id is kept, whose weight is CPU_FIXED_ONE. */
static double share_of(double top_p, uint64_t total) { return fmax(top_p * (double)total, 1.0); }

/* All n ids below half of the n-th part of what is not in the share cannot make up the difference: the
 * nucleus lies above.  Weights below half a unit are 0. */
static bar nucleus_bar(const cpu_row *r, float scale, float max, uint64_t total, double share) {
    double least = fmax(((double)total - share) / (2.0 * r->n), 0.5);
    return weight_bar(scale, max, least / CPU_FIXED_ONE);
}

static void weigh(const k_ctx *k, const cpu_row *r, float scale, float max, cpu_scratch *s, int n) {
    const uint64_t *items = s->order;
    float *weights = s->weights;
    for (int i = 0; i < n; i++) weights[i] = r->z[order_id(items[i])] * scale - max;
    k->ops->map(CPU_EXP, (uint32_t *)weights, (size_t)n);
}

/* Of n candidates keep the run that reaches the share. */
static int keep_nucleus(cpu_scratch *s, int n, double share) {
    uint64_t *items = s->order, last = order_reach(items, s->spare, n, share);
    float *weights = s->weights;
    int kept = 0;
    for (int i = 0; i < n; i++) {
        bool keep = items[i] <= last;
        items[kept] = items[i];
        weights[kept] = weights[i];
        kept += keep;
    }
    return kept;
}

/* The best weight is exp(0), exactly CPU_FIXED_ONE. */
static int keep_min_p(cpu_scratch *s, int n, double min_p) {
    uint64_t *items = s->order;
    float *weights = s->weights;
    int kept = 0;
    for (int i = 0; i < n; i++) {
        bool keep = (double)fixed(weights[i]) >= min_p * CPU_FIXED_ONE;
        items[kept] = items[i];
        weights[kept] = weights[i];
        kept += keep;
    }
    return kept;
}

/* The weights in fixed point, into s->spare; their sum. */
static uint64_t fix(cpu_scratch *s, int n) {
    const float *weights = s->weights;
    uint64_t *out = s->spare, sum = 0;
    for (int i = 0; i < n; i++) sum += out[i] = fixed(weights[i]);
    return sum;
}

/* List the candidates of a draw; where they do not hold every weight, `total` becomes the sum of all. */
static int list_candidates(const k_ctx *k, const k_draw *d, const cpu_row *r, float max, uint64_t *total,
                           cpu_scratch *s) {
    if (d->top_k > 0) return list_best(r, d->top_k, -FLT_MAX, s);
    bar b;
    if (d->top_p < 1.0) {
        *total = k->ops->fixed_sum(r->z, r->n, d->inv_temp, max);
        b = nucleus_bar(r, d->inv_temp, max, *total, share_of(d->top_p, *total));
    } else {
        b = weight_bar(d->inv_temp, max, fmax(d->min_p, 0.5 / CPU_FIXED_ONE));
    }
    return list(r, b, s->order);
}

int truncate_row(const k_ctx *k, const k_draw *d, const cpu_row *r, cpu_scratch *s) {
    assert(truncates(d) && d->min_p <= 1.0);
    float max = r->max * d->inv_temp;
    uint64_t total = 0;
    int n = list_candidates(k, d, r, max, &total, s);
    weigh(k, r, d->inv_temp, max, s, n);
    if (d->top_p < 1.0) {
        uint64_t listed = fix(s, n);
        n = keep_nucleus(s, n, share_of(d->top_p, total ? total : listed));
    }
    return d->min_p > 0.0 ? keep_min_p(s, n, d->min_p) : n;
}
