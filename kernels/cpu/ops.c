/* The operations of a forward pass: what they do per row, cut among the threads.
 *
 * Each part writes rows, columns or heads of its own and reads nothing that another part writes, so the cut
 * changes no bit.  The order of additions inside a row is that of the ops table. */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/math.h"

#include <assert.h>
#include <stdatomic.h>
#include <string.h>

#define WORTH_WAKING 30000.0 /* operations; some ten microseconds */
#define ITEMS_PER_THREAD 4   /* at least, where there is enough to cut, so that threads finish together */

typedef struct spread {
    cpu_part *part;
    const void *job;
    int n_items;
} spread;

static void spread_run(void *arg, int index, int n) {
    const spread *s = arg;
    int first = (int)((int64_t)s->n_items * index / n), end = (int)((int64_t)s->n_items * (index + 1) / n);
    if (first < end) s->part(s->job, first, end, index);
}

void cpu_spread(k_ctx *k, cpu_part *part, const void *job, int n_items, double work) {
    if (n_items <= 0) return;
    cpu_flush_denormals(); /* the caller may be any thread, and may have called a library that resets it */
    spread s = {part, job, n_items};
    if (n_items == 1 || work < WORTH_WAKING)
        part(job, 0, n_items, 0);
    else
        threads_run(k->threads, spread_run, &s);
}

static float table_value(const k_table *t, size_t at) {
    return t->bf16 ? cop_widen(((const uint16_t *)t->data)[at]) : ((const float *)t->data)[at];
}

static void table_row(float *out, const k_table *t, int32_t id) {
    assert(id >= 0 && id < t->n_rows);
    size_t at = (size_t)id * (size_t)t->dim;
    for (int i = 0; i < t->dim; i++) out[i] = table_value(t, at + (size_t)i);
}

/* ---- k_embed. */

typedef struct embed {
    k_ctx *k;
    float *x;
    const k_table *wte;
    const k_batch *b;
    int dim;
    float eps;
    const k_matrix *gate;
    int channels;
    float lambda;
} embed;

/* gate . round(e[0:channels]), by rule 1. */
static float smear_gate(const embed *a, const float *e) {
    float sum = 0.0f, x[2 * CPU_CHUNK_PAIRS];
    for (int first = 0; first < a->channels; first += 2 * CPU_CHUNK_PAIRS) {
        int n = a->channels - first < 2 * CPU_CHUNK_PAIRS ? a->channels - first : 2 * CPU_CHUNK_PAIRS;
        for (int i = 0; i < n; i++) x[i] = a->gate->bf16 ? cop_round_bf16(e[first + i]) : e[first + i];
        sum = sum + cpu_chain(a->gate, 0, first / (2 * CPU_CHUNK_PAIRS), x);
    }
    return sum;
}

static void embed_part(const void *job, int first, int end, int thread) {
    (void)thread;
    const embed *a = job;
    const cpu_ops *ops = a->k->ops;
    for (int t = first; t < end; t++) {
        float *x = a->x + (size_t)t * (size_t)a->dim;
        bool smeared = a->gate && a->channels > 0 && a->b->pos[t] > 0;
        float r_prev = 0.0f;
        if (smeared) { /* the row serves as room for the other embedding's norm */
            table_row(x, a->wte, a->b->prev[t]);
            r_prev = ops->inverse_rms(x, a->dim, a->eps);
        }
        table_row(x, a->wte, a->b->ids[t]);
        ops->scale(x, x, ops->inverse_rms(x, a->dim, a->eps), a->dim, false);
        if (!smeared) continue;
        float g = a->lambda * cop_sigmoid(smear_gate(a, x));
        size_t prev = (size_t)a->b->prev[t] * (size_t)a->dim;
        for (int i = 0; i < a->dim; i++) {
            float e_prev = table_value(a->wte, prev + (size_t)i) * r_prev;
            x[i] = x[i] + g * e_prev;
        }
    }
}

void k_embed(k_ctx *k, float *x, const k_table *wte, const k_batch *b, int dim, float eps,
             const k_matrix *gate, int channels, float lambda) {
    assert(dim == wte->dim);
    assert(!gate || (gate->n_in == channels && gate->n_out == 1 && channels <= dim));
    embed a = {k, x, wte, b, dim, eps, gate, channels, lambda};
    cpu_spread(k, embed_part, &a, b->n, 4.0 * b->n * dim);
}

/* ---- k_mix_norm, k_gather_norm. */

typedef struct norm {
    k_ctx *k;
    float *h, *x;
    const float *x0;
    const int32_t *index;
    float resid, x0_lambda, eps;
    int dim;
} norm;

static void norm_part(const void *job, int first, int end, int thread) {
    (void)thread;
    const norm *a = job;
    const cpu_ops *ops = a->k->ops;
    for (int t = first; t < end; t++) {
        size_t at = (size_t)(a->index ? a->index[t] : t) * (size_t)a->dim;
        float *x = a->x + at;
        if (a->x0) ops->mix(x, a->x0 + at, a->resid, a->x0_lambda, a->dim);
        ops->scale(a->h + (size_t)t * (size_t)a->dim, x, ops->inverse_rms(x, a->dim, a->eps), a->dim,
                   a->k->profile == PRECISION_BF16);
    }
}

void k_mix_norm(k_ctx *k, float *h, float *x, const float *x0, float resid, float x0_lambda, int n, int dim,
                float eps) {
    norm a = {k, h, x, x0, NULL, resid, x0_lambda, eps, dim};
    cpu_spread(k, norm_part, &a, n, 2.0 * n * dim);
}

void k_gather_norm(k_ctx *k, float *h, const float *x, const int32_t *index, int n, int dim, float eps) {
    norm a = {k, h, (float *)x, NULL, index, 1.0f, 0.0f, eps, dim}; /* without x0, x is only read */
    cpu_spread(k, norm_part, &a, n, 2.0 * n * dim);
}

/* ---- k_gemm: items are some tiles of outputs for a panel of rows, taken by whoever is free: threads rarely
 * are equally fast for long.  Nobody waits between products. */

typedef struct gemms {
    k_ctx *k;
    const k_product *products;
    int n_products, n;
    int n_panels; /* that share the rows evenly */
    atomic_int next;
} gemms;

/* Tiles of an item: few enough that no thread is left with much to do in the end, but whole blocks of
 * `at_once`. */
static int tiles_of_item(int n_tiles, int at_once, int n_threads) {
    int share = n_tiles / n_threads, n = share / ITEMS_PER_THREAD;
    if (n >= at_once) return n - n % at_once;
    if (share >= at_once) return at_once;
    return share > 0 ? share : 1;
}

static void gemms_run(void *arg, int index, int n_threads) {
    gemms *a = arg;
    const cpu_gemm_body *gemm = a->k->ops->gemm;
    int at_once = gemm->tiles[a->n < 3 ? a->n - 1 : 2];
    cpu_inputs inputs = {.room = a->k->scratch[index].packed};
    int item = atomic_fetch_add(&a->next, 1), before = 0;
    for (int i = 0; i < a->n_products; i++) {
        const k_product *p = &a->products[i];
        cpu_gemm g = {p->y, p->w, p->x, p->x_stride, p->epilogue, &inputs};
        int n_tiles = p->w->tiles, size = tiles_of_item(n_tiles, at_once, n_threads);
        int per_panel = (n_tiles + size - 1) / size;
        for (; item - before < a->n_panels * per_panel; item = atomic_fetch_add(&a->next, 1)) {
            int panel = (item - before) / per_panel, tile = (item - before) % per_panel * size;
            int row = (int)((int64_t)a->n * panel / a->n_panels);
            int row_end = (int)((int64_t)a->n * (panel + 1) / a->n_panels);
            gemm->run(&g, tile, tile + size < n_tiles ? tile + size : n_tiles, row, row_end);
        }
        before += a->n_panels * per_panel;
    }
}

void k_gemms(k_ctx *k, const k_product *products, int n_products, int n) {
    gemms a = {k, products, n_products, n, (n + CPU_PANEL_ROWS - 1) / CPU_PANEL_ROWS, 0};
    double work = 0;
    if (n <= 0) return;
    for (int i = 0; i < n_products; i++) {
        assert(products[i].x_stride >= products[i].w->n_in);
        work += (double)n * products[i].w->n_out * products[i].w->n_in;
    }
    cpu_flush_denormals();
    if (work < WORTH_WAKING)
        gemms_run(&a, 0, 1);
    else
        threads_run(k->threads, gemms_run, &a);
}

void k_gemm(k_ctx *k, float *y, const k_matrix *w, const float *x, int x_stride, int n, k_epilogue epilogue) {
    k_gemms(k, &(k_product){y, w, x, x_stride, epilogue}, 1, n);
}

/* ---- k_qkv_store. */

typedef struct qkv {
    k_ctx *k;
    const k_qkv *a;
    const k_rope *rope;
    const k_batch *b;
    const k_kv *kv;
} qkv;

static void turn_and_norm(const qkv *s, float *x, int32_t pos) {
    const cpu_ops *ops = s->k->ops;
    int half = s->rope->half;
    const float *cosines = s->rope->data + (size_t)pos * 2 * (size_t)half;
    ops->rotate(x, cosines, cosines + half, half);
    ops->scale(x, x, ops->inverse_rms(x, 2 * half, s->a->eps), 2 * half, false);
    if (s->a->qk_scale != 1.0f) ops->scale(x, x, s->a->qk_scale, 2 * half, false);
}

/* v = v + (factor * sigmoid(gate)) * ve: three roundings. */
static void add_value_embedding(const qkv *s, float *v, int t, int head) {
    const k_qkv *a = s->a;
    int n_kv = s->kv->n_kv_heads, dim = s->kv->head_dim;
    int32_t id = s->b->ids[t];
    assert(id >= 0 && id < a->ve->n_rows);
    float g = a->gate_factor * cop_sigmoid(a->gate[(size_t)t * (size_t)n_kv + (size_t)head]);
    size_t size = a->ve->bf16 ? sizeof(uint16_t) : sizeof(float);
    size_t at = (size_t)id * (size_t)a->ve->dim + (size_t)head * (size_t)dim;
    s->k->ops->add_scaled(v, (const char *)a->ve->data + at * size, g, dim, a->ve->bf16);
}

static void *page_of(const qkv *s, int t) {
    const k_kv *kv = s->kv;
    size_t row = (size_t)s->b->table[t] * (size_t)s->b->page_stride;
    int32_t number = s->b->pages[row + (size_t)(s->b->pos[t] / KV_PAGE_TOKENS)];
    return (char *)kv->arena +
           (size_t)number * k_page_bytes(s->k, kv->n_layers, kv->n_kv_heads, kv->head_dim);
}

/* A token's value of a head is a row in its page. */
static void store_value(const qkv *s, int t, int head, const float *v) {
    int dim = s->kv->head_dim, slot = s->b->pos[t] % KV_PAGE_TOKENS;
    size_t at = cpu_value_offset(s->kv, s->a->layer, head) + (size_t)slot * (size_t)dim;
    if (s->k->profile == PRECISION_BF16)
        s->k->ops->narrow((uint16_t *)page_of(s, t) + at, v, dim);
    else
        memcpy((float *)page_of(s, t) + at, v, (size_t)dim * sizeof *v);
}

/* A token's key of a head is a column. */
static void store_key(const qkv *s, int t, int head, const float *key) {
    int dim = s->kv->head_dim, slot = s->b->pos[t] % KV_PAGE_TOKENS;
    size_t at = cpu_key_offset(s->kv, s->a->layer, head) + (size_t)slot;
    if (s->k->profile == PRECISION_BF16) {
        uint16_t *out = (uint16_t *)page_of(s, t) + at, half[K_MAX_HEAD_DIM];
        s->k->ops->narrow(half, key, dim);
        for (int d = 0; d < dim; d++) out[d * KV_PAGE_TOKENS] = half[d];
    } else {
        float *out = (float *)page_of(s, t) + at;
        for (int d = 0; d < dim; d++) out[d * KV_PAGE_TOKENS] = key[d];
    }
}

/* Keys are stored head after head, so that the columns of one page meet in the cache. */
static void qkv_part(const void *job, int first, int end, int thread) {
    (void)thread;
    const qkv *s = job;
    size_t dim = (size_t)s->kv->head_dim, n_kv = (size_t)s->kv->n_kv_heads;
    for (int last; first < end; first = last) {
        last = end - first < KV_PAGE_TOKENS ? end : first + KV_PAGE_TOKENS;
        for (int t = first; t < last; t++) {
            int32_t pos = s->b->pos[t];
            assert(pos >= 0 && pos < s->rope->n_pos);
            float *q = s->a->q + (size_t)t * (size_t)s->a->n_heads * dim;
            float *key = s->a->k + (size_t)t * n_kv * dim, *v = s->a->v + (size_t)t * n_kv * dim;
            for (int h = 0; h < s->a->n_heads; h++, q += dim) turn_and_norm(s, q, pos);
            for (int h = 0; h < s->kv->n_kv_heads; h++, key += dim, v += dim) {
                turn_and_norm(s, key, pos);
                if (s->a->ve && s->a->gate) add_value_embedding(s, v, t, h);
                store_value(s, t, h, v);
            }
        }
        for (size_t h = 0; h < n_kv; h++)
            for (int t = first; t < last; t++)
                store_key(s, t, (int)h, s->a->k + ((size_t)t * n_kv + h) * dim);
    }
}

void k_qkv_store(k_ctx *k, const k_qkv *a, const k_rope *rope, const k_batch *b, const k_kv *kv) {
    assert(rope->half * 2 == kv->head_dim && kv->head_dim <= K_MAX_HEAD_DIM);
    assert(!a->ve || a->ve->dim == kv->n_kv_heads * kv->head_dim);
    qkv s = {k, a, rope, b, kv};
    cpu_spread(k, qkv_part, &s, b->n, 4.0 * b->n * (a->n_heads + 2 * kv->n_kv_heads) * kv->head_dim);
}

size_t k_page_bytes(const k_ctx *k, int n_layers, int n_kv_heads, int head_dim) {
    k_kv kv = {NULL, n_layers, n_kv_heads, head_dim};
    return cpu_page_elements(&kv) * (k->profile == PRECISION_BF16 ? sizeof(uint16_t) : sizeof(float));
}

void k_page_copy(k_ctx *k, const k_kv *kv, int to, int from, int n_tokens) {
    assert(n_tokens >= 0 && n_tokens <= KV_PAGE_TOKENS);
    size_t size = k->profile == PRECISION_BF16 ? sizeof(uint16_t) : sizeof(float);
    size_t bytes = cpu_page_elements(kv) * size, dim = (size_t)kv->head_dim;
    char *out = (char *)kv->arena + (size_t)to * bytes;
    const char *in = (const char *)kv->arena + (size_t)from * bytes;
    for (int layer = 0; layer < kv->n_layers; layer++)
        for (int h = 0; h < kv->n_kv_heads; h++) {
            size_t keys = cpu_key_offset(kv, layer, h) * size, values = cpu_value_offset(kv, layer, h) * size;
            for (size_t d = 0; d < dim; d++, keys += KV_PAGE_TOKENS * size)
                memcpy(out + keys, in + keys, (size_t)n_tokens * size);
            memcpy(out + values, in + values, (size_t)n_tokens * dim * size);
        }
}

/* ---- k_attention: items are gangs of queries for some kv heads, taken by whoever is free, the later
 * positions (which cost more) first. */

typedef struct attend {
    k_ctx *k;
    cpu_attention a;
    int n_queries, gang; /* queries of a kv head, of a gang */
    int n_gangs, n_cuts; /* the kv heads are cut in n_cuts */
    atomic_int next;
} attend;

/* Whether token t shares most of its pages with the one before: the one in the middle tells. */
static bool shares_pages(const cpu_attention *a, int t) {
    const k_batch *b = a->b;
    int32_t pos = b->pos[t], low = pos > a->window ? pos - a->window : 0;
    size_t middle = (size_t)(low / KV_PAGE_TOKENS + pos / KV_PAGE_TOKENS) / 2,
           stride = (size_t)b->page_stride;
    return middle <= (size_t)(b->pos[t - 1] / KV_PAGE_TOKENS) &&
           b->pages[(size_t)b->table[t] * stride + middle] ==
               b->pages[(size_t)b->table[t - 1] * stride + middle];
}

/* Queries from `first` on that are worth a walk together.  What shares little is better done head after head
 * of one token, as it lies in memory. */
static int run_end(const attend *s, int first, int end) {
    int group = s->a.n_heads / s->a.kv->n_kv_heads, i = first;
    do i = (i / group + 1) * group;
    while (i < end && shares_pages(&s->a, i / group));
    return i < end ? i : end;
}

static void attend_run(void *arg, int index, int n) {
    (void)n;
    attend *s = arg;
    int n_kv = s->a.kv->n_kv_heads;
    for (int item; (item = atomic_fetch_add(&s->next, 1)) < s->n_gangs * s->n_cuts;) {
        int first = (s->n_gangs - 1 - item / s->n_cuts) * s->gang, cut = item % s->n_cuts;
        int end = s->n_queries - first < s->gang ? s->n_queries : first + s->gang;
        for (int next; first < end; first = next) {
            next = run_end(s, first, end);
            for (int h = n_kv * cut / s->n_cuts; h < n_kv * (cut + 1) / s->n_cuts; h++)
                s->k->ops->attention(&s->a, h, first, next, s->k->scratch[index].attention);
        }
    }
}

/* Cut the work so that all threads have some: gangs are to be large, since they share the reading of pages,
 * so heads are cut first. */
static void cut_attention(attend *s, int n_threads) {
    int n_kv = s->a.kv->n_kv_heads, items = n_threads > 1 ? ITEMS_PER_THREAD * n_threads : 1;
    int gangs = (items + n_kv - 1) / n_kv, least = (s->n_queries + CPU_GANG - 1) / CPU_GANG;
    if (gangs < least) gangs = least;
    s->gang = (s->n_queries + gangs - 1) / gangs;
    s->n_gangs = (s->n_queries + s->gang - 1) / s->gang;
    s->n_cuts = (items + s->n_gangs - 1) / s->n_gangs;
    if (s->n_cuts > n_kv) s->n_cuts = n_kv;
}

void k_attention(k_ctx *k, float *out, const float *q, const k_batch *b, const k_kv *kv, int n_heads,
                 int layer, int32_t window) {
    assert(window >= 0 && n_heads % kv->n_kv_heads == 0 && kv->head_dim <= K_MAX_HEAD_DIM);
    if (b->n <= 0) return;
    attend s = {.k = k,
                .a = {out, q, b, kv, k_page_bytes(k, kv->n_layers, kv->n_kv_heads, kv->head_dim), n_heads,
                      layer, window, k->profile == PRECISION_BF16, 1.0f / sqrtf((float)kv->head_dim)},
                .n_queries = b->n * (n_heads / kv->n_kv_heads)};
    cut_attention(&s, k_threads(k));
    double keys = 0;
    for (int t = 0; t < b->n; t++) keys += b->pos[t] < window ? b->pos[t] + 1 : window + 1.0;
    cpu_flush_denormals();
    if (keys * n_heads * kv->head_dim < WORTH_WAKING)
        attend_run(&s, 0, 1);
    else
        threads_run(k->threads, attend_run, &s);
}

/* ---- Element-wise. */

#define PIECE 4096 /* elements that a part takes at a time */

typedef struct elements {
    k_ctx *k;
    float *x;
    const float *y;
    float scale;
    size_t n;
    int n_cols, stride;
} elements;

static int pieces(size_t n) {
    assert(n / PIECE < INT32_MAX);
    return (int)(n / PIECE + (n % PIECE != 0));
}

static void sub_part(const void *job, int first, int end, int thread) {
    (void)thread;
    const elements *a = job;
    size_t from = (size_t)first * PIECE, to = (size_t)end * PIECE < a->n ? (size_t)end * PIECE : a->n;
    a->k->ops->sub_scaled(a->x + from, a->y + from, a->scale, to - from);
}

void k_sub_scaled(k_ctx *k, float *x, const float *y, float scale, size_t n) {
    elements a = {.k = k, .x = x, .y = y, .scale = scale, .n = n};
    cpu_spread(k, sub_part, &a, pieces(n), (double)n);
}

void k_copy(k_ctx *k, float *to, const float *from, size_t n) {
    (void)k;
    if (n) memcpy(to, from, n * sizeof *to);
}

static void softcap_part(const void *job, int first, int end, int thread) {
    (void)thread;
    const elements *a = job;
    int per_row = pieces((size_t)a->n_cols);
    for (int i = first; i < end; i++) {
        int at = i % per_row * PIECE, n = a->n_cols - at < PIECE ? a->n_cols - at : PIECE;
        a->k->ops->softcap(a->x + (size_t)(i / per_row) * (size_t)a->stride + (size_t)at, n, a->scale);
    }
}

void k_softcap(k_ctx *k, float *logits, int n, int n_cols, int stride, float cap) {
    assert(n_cols <= stride);
    elements a = {.k = k, .x = logits, .scale = cap, .n_cols = n_cols, .stride = stride};
    cpu_spread(k, softcap_part, &a, n * pieces((size_t)n_cols), 16.0 * n * n_cols);
}
