/* Drawing and scoring tokens.
 *
 * One draw, in the order of PROTOCOL.md:
 *   absent ids out -> top_k -> weights w = exp(y - max) in 2^-40 fixed point -> top_p -> min_p -> noise
 *
 * The token is the argmax over logits and noise.  Sum and noise run over the vocabulary, with -inf at ids
 * that are dropped: those add +0 to the sum and win no argmax.  Where few are kept, running over these in
 * order of id therefore gives the same bits. */
#include "kernels/cpu/math.h"
#include "kernels/cpu/order.h"
#include "kernels/cpu/scalar.h"
#include "kernels/cpu/truncate.h"

#include <assert.h>
#include <string.h>

#define SPARSE 8 /* walk over the kept ids alone if they are at most the 8th part: each costs more so */

/* log-softmax at `value`, both already scaled by the temperature.  Adding 0 makes -0 a +0: which zero the
 * maximum is depends on the instruction set. */
static float log_probability(float value, float max, float sum) {
    return (value - max) - cop_log(sum) + 0.0f;
}

/* -sum p ln p, where p = e^y / sum and `terms` is the sum of e^y y. */
static float entropy_of(float terms, float sum) { return cop_log(sum) - terms / sum; }

typedef struct job {
    k_ctx *k;
    const k_draw *draws;
    k_drawn *drawn;
    const k_target *targets;
    float *logprobs;
    const float *logits;
    int vocab, stride;
} job;

/* Look through n logits that will be multiplied by `scale`; false where that leaves no distribution. */
static bool read_row(cpu_row *r, const cpu_ops *ops, const float *z, int n, float scale, cpu_scratch *s) {
    *r = (cpu_row){.z = z, .blocks = s->blocks, .n = n};
    if (!ops->block_max(s->blocks, z, n)) return false;
    ops->max(&r->max, s->blocks, (n + CPU_MAX_BLOCK - 1) / CPU_MAX_BLOCK);
    return isfinite(r->max) && isfinite(r->max * scale);
}

static bool read_job_row(cpu_row *r, const job *j, int row, float scale, cpu_scratch *s) {
    return read_row(r, j->k->ops, j->logits + (size_t)row * (size_t)j->stride, j->vocab, scale, s);
}

/* ---- One draw. */

/* Let the row be a copy of itself without the ids that are absent. */
static bool mask_absent(cpu_row *r, const cpu_ops *ops, const k_draw *d, cpu_scratch *s) {
    memcpy(s->masked, r->z, (size_t)r->n * sizeof *r->z);
    for (int i = 0; i < d->n_absent; i++)
        if (d->absent[i] >= 0 && d->absent[i] < r->n) s->masked[d->absent[i]] = -INFINITY;
    return read_row(r, ops, s->masked, r->n, d->inv_temp, s);
}

static int32_t first_best(const cpu_row *r) {
    int32_t id = 0;
    for (int b = 0; r->blocks[b] != r->max; b++) id += CPU_MAX_BLOCK;
    while (r->z[id] != r->max) id++;
    return id;
}

/* Let the row be a copy of itself in which all but the n kept ids are -inf. */
static void mask_dropped(cpu_row *r, cpu_scratch *s, int n) {
    int32_t id = 0;
    for (int i = 0; i < n; i++) {
        int32_t kept = order_id(s->order[i]);
        while (id < kept) s->masked[id++] = -INFINITY;
        s->masked[id++] = r->z[kept];
    }
    while (id < r->n) s->masked[id++] = -INFINITY;
    r->z = s->masked;
}

/* Rule 7 over kept ids alone: their terms [n], each in its id's tile and lane. */
static float sum_kept(const cpu_scratch *s, const float *terms, int n) {
    float sum = 0.0f;
    for (int i = 0; i < n;) {
        int32_t tile = order_id(s->order[i]) / CPU_SOFTMAX_TILE;
        float lanes[CPU_LANES] = {0};
        for (; i < n && order_id(s->order[i]) / CPU_SOFTMAX_TILE == tile; i++) {
            float *lane = &lanes[order_id(s->order[i]) % CPU_LANES];
            *lane = *lane + terms[i];
        }
        sum = sum + cpu_lane_tree(lanes);
    }
    return sum;
}

/* The terms of the entropy of n kept ids, into s->spare. */
static const float *entropy_kept(const k_draw *d, const cpu_row *r, float max, cpu_scratch *s, int n) {
    float *terms = (float *)s->spare;
    for (int i = 0; i < n; i++) {
        float y = r->z[order_id(s->order[i])] * d->inv_temp - max;
        terms[i] = cop_entropy_term(s->weights[i], y);
    }
    return terms;
}

/* The noise of n kept ids, into s->spare. */
static const float *noise_kept(const cpu_ops *ops, const k_draw *d, cpu_scratch *s, int n) {
    uint32_t *noise = (uint32_t *)s->spare, counter[4] = {0, d->index, d->sample, d->prompt_hash}, words[4];
    for (int i = 0; i < n; i++) {
        uint32_t id = (uint32_t)order_id(s->order[i]);
        if (i == 0 || id / 4 != counter[0]) {
            counter[0] = id / 4;
            cop_philox(counter, d->key, words);
        }
        noise[i] = words[id % 4];
    }
    ops->map(CPU_GUMBEL, noise, (size_t)n);
    return (const float *)noise;
}

static int32_t draw_kept(const cpu_ops *ops, const k_draw *d, const cpu_row *r, cpu_scratch *s, int n) {
    const float *noise = noise_kept(ops, d, s, n);
    int32_t best = -1;
    float best_score = -INFINITY;
    for (int i = 0; i < n; i++) {
        int32_t id = order_id(s->order[i]);
        float score = fmaf(r->z[id], d->inv_temp, noise[i]);
        if (!(score > best_score)) continue;
        best_score = score;
        best = id;
    }
    return best;
}

static void list_kept(const k_draw *d, k_drawn *out, cpu_scratch *s, int n) {
    if (!d->kept || d->top_k <= 0) return;
    order_sort(s->order, s->spare, n);
    for (int i = 0; i < n; i++) d->kept[i] = order_id(s->order[i]);
    out->n_kept = n;
}

static void draw_one(const job *j, const k_draw *d, k_drawn *out, cpu_scratch *s) {
    const cpu_ops *ops = j->k->ops;
    cpu_row whole;
    *out = (k_drawn){.token = -1};
    if (!read_job_row(&whole, j, d->row, d->inv_temp, s)) return;
    cpu_row r = whole;
    if (d->n_absent > 0 && !mask_absent(&r, ops, d, s)) return; /* nothing is left */

    float model_sum = d->want_model ? ops->exp_sum(whole.z, whole.n, 1.0f, whole.max) : 0.0f;
    float max = r.max * d->inv_temp, sum = 1.0f, terms = 0.0f;
    int n = whole.n;
    if (d->inv_temp == 0.0f) { /* all is on one id */
        out->token = first_best(&r);
        s->order[0] = order_pack(r.max, out->token);
        n = 1;
    } else if (truncates(d) && (n = truncate_row(j->k, d, &r, s)) <= r.n / SPARSE) {
        out->token = draw_kept(ops, d, &r, s, n);
        sum = sum_kept(s, s->weights, n);
        if (d->want_entropy) terms = sum_kept(s, entropy_kept(d, &r, max, s, n), n);
    } else {
        if (n < r.n) mask_dropped(&r, s, n);
        cpu_noise noise = {{d->key[0], d->key[1]}, d->index, d->sample, d->prompt_hash};
        bool as_model = d->want_model && r.z == whole.z && d->inv_temp == 1.0f; /* one sum serves both */
        out->token = ops->draw(r.z, r.n, d->inv_temp, &noise);
        sum = as_model ? model_sum : ops->exp_sum(r.z, r.n, d->inv_temp, max);
        if (d->want_entropy) terms = ops->entropy_sum(r.z, r.n, d->inv_temp, max);
    }
    list_kept(d, out, s, n);
    out->logprob = log_probability(r.z[out->token] * d->inv_temp, max, sum);
    out->entropy = d->want_entropy ? entropy_of(terms, sum) : 1.0f;
    out->model_logprob = d->want_model ? log_probability(r.z[out->token], whole.max, model_sum) : 1.0f;
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

static void score_one(const job *j, const k_target *t, float *logprob, cpu_scratch *s) {
    cpu_row r;
    *logprob = NAN;
    if (!read_job_row(&r, j, t->row, t->inv_temp, s)) return;
    float max = r.max * t->inv_temp;
    float sum = j->k->ops->exp_sum(r.z, r.n, t->inv_temp, max);
    *logprob = t->token >= 0 ? log_probability(r.z[t->token] * t->inv_temp, max, sum) : 1.0f;
    if (t->top <= 0) return;
    truncate_best(&r, t->top, s);
    order_sort(s->order, s->spare, t->top);
    for (int i = 0; i < t->top; i++) {
        t->top_ids[i] = order_id(s->order[i]);
        t->top_logprobs[i] = log_probability(r.z[t->top_ids[i]] * t->inv_temp, max, sum);
    }
}

static void score_part(const void *p, int first, int end, int thread) {
    const job *j = p;
    for (int i = first; i < end; i++) {
        assert(j->targets[i].token < j->vocab && j->targets[i].top <= j->vocab &&
               j->targets[i].inv_temp > 0.0f);
        score_one(j, &j->targets[i], &j->logprobs[i], &j->k->scratch[thread]);
    }
}

bool k_score(k_ctx *k, float *logprobs, const k_target *targets, int n, const float *logits, int vocab,
             int stride) {
    assert(vocab >= 1 && vocab <= stride);
    for (int i = 0; i < n; i++) logprobs[i] = NAN;
    if (n <= 0) return true;
    if (!reserved(k, vocab)) return false;
    job j = {
        .k = k, .targets = targets, .logprobs = logprobs, .logits = logits, .vocab = vocab, .stride = stride};
    cpu_spread(k, score_part, &j, n, 16.0 * n * vocab);
    bool ok = true;
    for (int i = 0; i < n; i++) ok = ok && !isnan(logprobs[i]);
    return ok;
}
