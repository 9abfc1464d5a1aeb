/* Drawing and scoring tokens.
 *
 * One draw, in the order of PROTOCOL.md:
 *   absent ids out -> top_k -> weights w = exp(y - max) in 2^-40 fixed point -> top_p -> min_p -> noise and
 * argmax Truncated rows are drawn from a copy in which dropped logits are -inf: exp makes them +0 in every
 * sum, and they win no argmax, so one path serves all.  Integers decide what is kept, so no order of
 * summation enters it. */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/math.h"
#include "kernels/cpu/order.h"

#include <assert.h>
#include <string.h>

#define FIXED_ONE 0x1p40

/* log-softmax at `value`, both already scaled by the temperature. */
static float log_probability(float value, float max, float sum) { return (value - max) - cop_log(sum); }

static int32_t first_of(const float *z, int vocab, float value) {
    int32_t id = 0;
    while (id < vocab - 1 && z[id] != value) id++;
    return id;
}

typedef struct job {
    k_ctx *k;
    const k_draw *draws;
    k_drawn *drawn;
    const k_target *targets;
    float *logprobs;
    const float *logits;
    int vocab, stride;
} job;

static const float *row_of(const job *j, int row) { return j->logits + (size_t)row * (size_t)j->stride; }

/* ---- Truncation. */

/* The ids that are not yet dropped, in order of id. */
static int candidates(cpu_scratch *s, int vocab) {
    int n = 0;
    for (int32_t id = 0; id < vocab; id++)
        if (s->masked[id] > -INFINITY) s->order[n++] = order_pack(s->masked[id], id);
    return n;
}

/* exp(y - max) of the n candidates, as they stand, into s->spare. */
static const float *weigh(const k_ctx *k, const k_draw *d, cpu_scratch *s, int n, float max) {
    uint32_t *words = (uint32_t *)s->spare;
    for (int i = 0; i < n; i++) words[i] = cop_bits(s->masked[order_id(s->order[i])] * d->inv_temp - max);
    k->ops->map(CPU_EXP, words, (size_t)n);
    return (const float *)s->spare;
}

static uint64_t fixed(float weight) { return (uint64_t)((double)weight * FIXED_ONE); }

/* How many of the sorted candidates top_p keeps: the shortest run that reaches its share, at least one. */
static int nucleus(const float *weights, int n, double top_p) {
    uint64_t total = 0, sum = 0;
    for (int i = 0; i < n; i++) total += fixed(weights[i]);
    double share = top_p * (double)total;
    int kept = 0;
    while (kept < n) {
        sum += fixed(weights[kept++]);
        if ((double)sum >= share) break;
    }
    return kept;
}

/* The best weight is exp(0), exactly FIXED_ONE. */
static int above_min_p(uint64_t *order, const float *weights, int n, double min_p) {
    int kept = 0;
    for (int i = 0; i < n; i++)
        if ((double)fixed(weights[i]) >= min_p * FIXED_ONE) order[kept++] = order[i];
    return kept;
}

/* Cut s->masked, whose greatest logit scaled is `max`, down to what the draw keeps.  Returns the number kept,
 * which lie in s->order (best first, unless only min_p is on), or -1 where nothing is cut. */
static int truncate_row(const k_ctx *k, const k_draw *d, cpu_scratch *s, int vocab, float max) {
    bool nucleus_on = d->top_p < 1.0;
    if (d->top_k <= 0 && !nucleus_on && d->min_p <= 0.0) return -1;
    int n = candidates(s, vocab);
    if (d->top_k > 0 && d->top_k < n) {
        order_select(s->order, n, d->top_k);
        n = d->top_k;
    }
    if (nucleus_on || d->top_k > 0) order_sort(s->order, s->spare, n);
    if (nucleus_on || d->min_p > 0.0) {
        const float *weights = weigh(k, d, s, n, max);
        if (nucleus_on) n = nucleus(weights, n, d->top_p);
        if (d->min_p > 0.0) n = above_min_p(s->order, weights, n, d->min_p);
    }
    /* Keep the logits of those aside while the row is cleared. */
    for (int i = 0; i < n; i++) s->spare[i] = cop_bits(s->masked[order_id(s->order[i])]);
    for (int i = 0; i < vocab; i++) s->masked[i] = -INFINITY;
    for (int i = 0; i < n; i++) s->masked[order_id(s->order[i])] = cop_float((uint32_t)s->spare[i]);
    return n;
}

static void mask_absent(const k_draw *d, cpu_scratch *s, const float *z, int vocab) {
    memcpy(s->masked, z, (size_t)vocab * sizeof *z);
    for (int i = 0; i < d->n_absent; i++)
        if (d->absent[i] >= 0 && d->absent[i] < vocab) s->masked[d->absent[i]] = -INFINITY;
}

/* ---- One draw. */

static void draw_one(const job *j, const k_draw *d, k_drawn *out, cpu_scratch *s) {
    const cpu_ops *ops = j->k->ops;
    const float *z = row_of(j, d->row);
    *out = (k_drawn){.token = -1};
    float max;
    if (!ops->max(&max, z, j->vocab) || !isfinite(max) || !isfinite(max * d->inv_temp)) return;
    float model_max = max, model_sum = ops->exp_sum(z, j->vocab, 1.0f, max);

    bool greedy = d->inv_temp == 0.0f;
    bool masked = d->n_absent > 0 || d->top_k > 0 || d->top_p < 1.0 || d->min_p > 0.0;
    const float *from = z;
    int n_kept = -1;
    if (masked) {
        mask_absent(d, s, z, j->vocab);
        from = s->masked;
        ops->max(&max, from, j->vocab);
        if (!isfinite(max) || !isfinite(max * d->inv_temp)) return; /* nothing is left */
        if (!greedy) n_kept = truncate_row(j->k, d, s, j->vocab, max * d->inv_temp);
    }
    if (greedy) {
        out->token = first_of(from, j->vocab, max);
        s->order[0] = order_pack(max, out->token);
        n_kept = 1;
    } else {
        cpu_noise noise = {{d->key[0], d->key[1]}, d->index, d->sample, d->prompt_hash};
        bool plain = !masked && d->inv_temp == 1.0f; /* the model's own distribution: one sum serves both */
        float sum = plain ? model_sum : ops->exp_sum(from, j->vocab, d->inv_temp, max * d->inv_temp);
        out->token = ops->draw(from, j->vocab, d->inv_temp, &noise);
        out->logprob = log_probability(z[out->token] * d->inv_temp, max * d->inv_temp, sum);
    }
    out->model_logprob = log_probability(z[out->token], model_max, model_sum);
    if (!d->kept || d->top_k <= 0) return;
    out->n_kept = n_kept;
    for (int i = 0; i < n_kept; i++) d->kept[i] = order_id(s->order[i]);
}

static void draw_part(const void *p, int first, int end, int thread) {
    const job *j = p;
    for (int i = first; i < end; i++) draw_one(j, &j->draws[i], &j->drawn[i], &j->k->scratch[thread]);
}

/* Scratch for a vocabulary; a failure is kept for k_sync. */
static bool reserved(k_ctx *k, int vocab) {
    cop_error err = {0};
    if (k_reserve(k, vocab, &err) == COP_OK) return true;
    if (k->failure.status == COP_OK) k->failure = err;
    return false;
}

void k_sample(k_ctx *k, k_drawn *out, const k_draw *draws, int n, const float *logits, int vocab,
              int stride) {
    assert(vocab >= 1 && vocab <= stride);
    for (int i = 0; i < n; i++) out[i] = (k_drawn){.token = -1};
    if (n <= 0 || !reserved(k, vocab)) return;
    job j = {.k = k, .draws = draws, .drawn = out, .logits = logits, .vocab = vocab, .stride = stride};
    cpu_spread(k, draw_part, &j, n, 16.0 * n * vocab);
}

/* ---- Scores. */

static bool score_one(const job *j, const k_target *t, float *logprob, cpu_scratch *s) {
    const cpu_ops *ops = j->k->ops;
    const float *z = row_of(j, t->row);
    float max;
    if (!ops->max(&max, z, j->vocab) || !isfinite(max) || !isfinite(max * t->inv_temp)) return false;
    max = max * t->inv_temp;
    float sum = ops->exp_sum(z, j->vocab, t->inv_temp, max);
    if (t->token >= 0) *logprob = log_probability(z[t->token] * t->inv_temp, max, sum);
    if (t->top <= 0) return true;
    for (int32_t id = 0; id < j->vocab; id++) s->order[id] = order_pack(z[id], id);
    order_select(s->order, j->vocab, t->top);
    order_sort(s->order, s->spare, t->top);
    for (int i = 0; i < t->top; i++) {
        t->top_ids[i] = order_id(s->order[i]);
        t->top_logprobs[i] = log_probability(z[t->top_ids[i]] * t->inv_temp, max, sum);
    }
    return true;
}

static void score_part(const void *p, int first, int end, int thread) {
    const job *j = p;
    for (int i = first; i < end; i++) {
        assert(j->targets[i].token < j->vocab && j->targets[i].top <= j->vocab &&
               j->targets[i].inv_temp > 0.0f);
        if (!score_one(j, &j->targets[i], &j->logprobs[i], &j->k->scratch[thread]))
            j->k->scratch[thread].failed = true;
    }
}

bool k_score(k_ctx *k, float *logprobs, const k_target *targets, int n, const float *logits, int vocab,
             int stride) {
    assert(vocab >= 1 && vocab <= stride);
    if (n <= 0) return true;
    if (!reserved(k, vocab)) return false;
    for (int i = 0; i < k_threads(k); i++) k->scratch[i].failed = false;
    job j = {
        .k = k, .targets = targets, .logprobs = logprobs, .logits = logits, .vocab = vocab, .stride = stride};
    cpu_spread(k, score_part, &j, n, 16.0 * n * vocab);
    bool ok = true;
    for (int i = 0; i < k_threads(k); i++) ok = ok && !k->scratch[i].failed;
    return ok;
}
