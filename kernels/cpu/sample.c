/* Drawing and scoring (rules 7 and 8, PROTOCOL "Truncation").
 *
 * A candidate is one u64, ordered like the total order (logit descending, id ascending):
 *
 *     63          32 31           0
 *     [ ~rank(logit) |     id     ]     rank: the bits of the logit, mapped so that greater floats are
 * greater integers
 */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/math.h"
#include "kernels/cpu/scalar.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* ---- Scratch. */

static bool grow(k_ctx *k, void **p, size_t n, size_t size) {
    void *grown = mem_alloc_aligned(n, size);
    if (!grown) {
        if (k->failure.status == COP_OK)
            cop_fail(&k->failure, COP_ENOMEM, "could not allocate the scratch of a step");
        return false;
    }
    mem_free(*p);
    *p = grown;
    return true;
}

bool cpu_scratch_row(k_ctx *k, int dim) {
    for (int i = 0; i < threads_count(k->threads); i++) {
        cpu_scratch *s = &k->scratch[i];
        if (s->n_row >= (size_t)dim) continue;
        if (!grow(k, (void **)&s->row, (size_t)dim, sizeof *s->row)) return false;
        s->n_row = (size_t)dim;
    }
    return true;
}

bool cpu_scratch_vocab(k_ctx *k, int vocab) {
    for (int i = 0; i < threads_count(k->threads); i++) {
        cpu_scratch *s = &k->scratch[i];
        if (s->n_vocab >= (size_t)vocab) continue;
        s->n_vocab = 0;
        if (!grow(k, (void **)&s->masked, (size_t)vocab, sizeof *s->masked)) return false;
        if (!grow(k, (void **)&s->order, (size_t)vocab, sizeof *s->order)) return false;
        s->n_vocab = (size_t)vocab;
    }
    return true;
}

void cpu_scratch_free(cpu_scratch *s) {
    mem_free(s->row);
    mem_free(s->masked);
    mem_free(s->order);
}

/* ---- The total order. */

static uint64_t candidate(float logit, int32_t id) {
    uint32_t u = cop_bits(logit + 0.0f); /* -0 ranks as +0: they are equal */
    uint32_t rank = u & 0x80000000u ? ~u : u | 0x80000000u;
    return (uint64_t)~rank << 32 | (uint32_t)id;
}

static int compare(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* Bring the k best of order[0 .. n) to the front, sorted: a heap of the k best so far, its worst on top. */
static void sift(uint64_t *heap, int n, int i) {
    for (;;) {
        int child = 2 * i + 1;
        if (child >= n) return;
        if (child + 1 < n && heap[child + 1] > heap[child]) child++;
        if (heap[child] <= heap[i]) return;
        uint64_t t = heap[i];
        heap[i] = heap[child];
        heap[child] = t;
        i = child;
    }
}

static void select_best(uint64_t *order, int n, int k) {
    if (k < n) {
        for (int i = k / 2 - 1; i >= 0; i--) sift(order, k, i);
        for (int i = k; i < n; i++) {
            if (order[i] >= order[0]) continue;
            order[0] = order[i];
            sift(order, k, 0);
        }
    }
    qsort(order, (size_t)k, sizeof *order, compare);
}

static int32_t id_of(uint64_t candidate_bits) { return (int32_t)(uint32_t)candidate_bits; }

/* ---- Truncation. */

/* exp(y - best) in 2^-40 fixed point, cut off. */
static uint64_t weight_of(float logit, float inv_temp, float best) {
    return (uint64_t)(cop_exp(logit * inv_temp - best) * 0x1p40f);
}

/* Drop what top_p and min_p leave out of the n candidates, best first; returns how many stay, in order. */
static int cut(const k_draw *d, uint64_t *order, int n, const float *logits) {
    float best = logits[id_of(order[0])] * d->inv_temp;
    uint64_t total = 0, sum = 0;
    for (int i = 0; i < n; i++) total += weight_of(logits[id_of(order[i])], d->inv_temp, best);
    int run = d->top_p < 1.0 ? 0 : n;
    for (bool reached = run == n; !reached && run < n; run++) {
        sum += weight_of(logits[id_of(order[run])], d->inv_temp, best);
        reached = (double)sum >= d->top_p * (double)total;
    }
    int kept = 0;
    for (int i = 0; i < run; i++) {
        double w = (double)weight_of(logits[id_of(order[i])], d->inv_temp, best);
        if (w >= d->min_p * 0x1p40) order[kept++] = order[i];
    }
    return kept;
}

/* The candidates that may be drawn into s->order, best first if sorted is needed; returns how many. s->masked
 * gets their logits, -inf elsewhere. */
static int truncate(const k_draw *d, const float *logits, int vocab, cpu_scratch *s) {
    memcpy(s->masked, logits, (size_t)vocab * sizeof *logits);
    for (int i = 0; i < d->n_absent; i++) s->masked[d->absent[i]] = -INFINITY;
    bool cuts = d->top_p < 1.0 || d->min_p > 0.0;
    int top_k = d->top_k > 0 && d->top_k < vocab ? d->top_k : 0;
    if (!cuts && !top_k && !d->kept) return vocab;
    int n = 0;
    for (int32_t id = 0; id < vocab; id++) {
        if (s->masked[id] != -INFINITY) s->order[n++] = candidate(s->masked[id], id);
    }
    int k = d->top_k > 0 && d->top_k < n ? d->top_k : n;
    select_best(s->order, n, k);
    if (cuts) k = cut(d, s->order, k, logits);
    for (int i = 0; i < vocab; i++) s->masked[i] = -INFINITY;
    for (int i = 0; i < k; i++) s->masked[id_of(s->order[i])] = logits[id_of(s->order[i])];
    return k;
}

/* ---- Drawing. */

static float log_softmax(const cpu_ops *ops, const float *x, int n, float scale, float at) {
    float max;
    ops->max(&max, x, n);
    max = max * scale;
    return (at * scale - max) - cop_log(ops->exp_sum(x, n, scale, max));
}

static int32_t best_of(const float *x, int n) {
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++) {
        if (x[i] > x[best]) best = i;
    }
    return best;
}

/* Few candidates: their noise alone. */
static int32_t draw_listed(const uint64_t *order, int n, const float *x, float scale,
                           const cpu_noise *noise) {
    int32_t best = -1;
    float best_score = -INFINITY;
    for (int i = 0; i < n; i++) {
        int32_t id = id_of(order[i]);
        float score = fmaf(x[id], scale, cpu_noise_of(noise, id));
        if (best >= 0 && (score < best_score || (score == best_score && id > best))) continue;
        best = id;
        best_score = score;
    }
    return best;
}

static void draw_one(const k_ctx *k, k_drawn *out, const k_draw *d, const float *logits, int vocab,
                     cpu_scratch *s) {
    const cpu_ops *ops = k->ops;
    *out = (k_drawn){.token = -1};
    float max;
    if (!ops->max(&max, logits, vocab)) return;
    int n = d->inv_temp > 0 ? truncate(d, logits, vocab, s) : 0;
    if (d->inv_temp > 0) {
        cpu_noise noise = {{d->key[0], d->key[1]}, d->index, d->sample, d->prompt_hash};
        out->token = n < vocab ? draw_listed(s->order, n, s->masked, d->inv_temp, &noise)
                               : ops->draw(s->masked, vocab, d->inv_temp, &noise);
        out->logprob = log_softmax(ops, s->masked, vocab, d->inv_temp, logits[out->token]);
    } else {
        memcpy(s->masked, logits, (size_t)vocab * sizeof *logits);
        for (int i = 0; i < d->n_absent; i++) s->masked[d->absent[i]] = -INFINITY;
        out->token = best_of(s->masked, vocab);
        out->logprob = 0.0f;
        s->order[0] = (uint32_t)out->token;
        n = 1;
    }
    out->model_logprob = log_softmax(ops, logits, vocab, 1.0f, logits[out->token]);
    if (!d->kept) return;
    out->n_kept = n;
    for (int i = 0; i < n; i++) d->kept[i] = id_of(s->order[i]);
}

typedef struct sample_job {
    const k_ctx *k;
    k_drawn *out;
    const k_draw *draws;
    const float *logits;
    int vocab, stride;
} sample_job;

static void sample_part(const void *job, int first, int end, int thread) {
    const sample_job *j = job;
    for (int i = first; i < end; i++) {
        const float *row = j->logits + (size_t)j->draws[i].row * (size_t)j->stride;
        draw_one(j->k, &j->out[i], &j->draws[i], row, j->vocab, &j->k->scratch[thread]);
    }
}

void k_sample(k_ctx *k, k_drawn *out, const k_draw *draws, int n, const float *logits, int vocab,
              int stride) {
    if (n == 0) return;
    if (!cpu_scratch_vocab(k, vocab)) {
        for (int i = 0; i < n; i++) out[i] = (k_drawn){.token = 0}; /* k_sync() tells the failure */
        return;
    }
    sample_job j = {k, out, draws, logits, vocab, stride};
    cpu_spread(k, sample_part, &j, n, 60.0 * n * vocab);
}

/* ---- Scoring. */

typedef struct score_job {
    const k_ctx *k;
    float *logprobs;
    const k_target *targets;
    const float *logits;
    int vocab, stride;
} score_job;

static bool score_one(const k_ctx *k, float *logprob, const k_target *t, const float *logits, int vocab,
                      cpu_scratch *s) {
    const cpu_ops *ops = k->ops;
    float max;
    if (!ops->max(&max, logits, vocab)) return false;
    max = max * t->inv_temp;
    float log_sum = cop_log(ops->exp_sum(logits, vocab, t->inv_temp, max));
    if (t->token >= 0) *logprob = (logits[t->token] * t->inv_temp - max) - log_sum;
    if (t->top == 0) return true;
    assert(t->top <= vocab);
    for (int32_t id = 0; id < vocab; id++) s->order[id] = candidate(logits[id], id);
    select_best(s->order, vocab, t->top);
    for (int i = 0; i < t->top; i++) {
        t->top_ids[i] = id_of(s->order[i]);
        t->top_logprobs[i] = (logits[t->top_ids[i]] * t->inv_temp - max) - log_sum;
    }
    return true;
}

static void score_part(const void *job, int first, int end, int thread) {
    const score_job *j = job;
    for (int i = first; i < end; i++) {
        const float *row = j->logits + (size_t)j->targets[i].row * (size_t)j->stride;
        if (!score_one(j->k, &j->logprobs[i], &j->targets[i], row, j->vocab, &j->k->scratch[thread]))
            j->k->scratch[thread].bad = true;
    }
}

bool k_score(k_ctx *k, float *logprobs, const k_target *targets, int n, const float *logits, int vocab,
             int stride) {
    if (n == 0 || !cpu_scratch_vocab(k, vocab)) return true; /* k_sync() tells a failure */
    score_job j = {k, logprobs, targets, logits, vocab, stride};
    for (int i = 0; i < threads_count(k->threads); i++) k->scratch[i].bad = false;
    cpu_spread(k, score_part, &j, n, 40.0 * n * vocab);
    bool bad = false;
    for (int i = 0; i < threads_count(k->threads); i++) bad = bad || k->scratch[i].bad;
    return !bad;
}
