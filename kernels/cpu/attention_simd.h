/* Attention over the primitives of simd_*.h: attention_scalar.c explains the order.  Included once per
 * instruction set, with
 *
 *   ATTENTION_VECTORS(rows)  vectors of keys or of dimensions that a block of that many queries takes at once
 * then ATTENTION_NAME        the function
 *
 * A gang of queries walks the chunks of its pages upwards.
 *
 *   chunk           0  1  2  3 | 4  5       Queries whose page tables name the same page for a chunk are
 *   query 0, page   7  2  9  4 | 0          worked on together, up to ROWS at a time, so that the page is
 *   query 1         7  2  9  5 |            read from memory once for the gang and widened once per block:
 *   query 2         7  2  3  8 | 1  6       here all three share two chunks, the first two a third.
 *
 * Every sum belongs to one query, and its order is the scalar one, so who shares a block changes no bit.
 * Scores have lanes over keys, outputs lanes over the head's dimensions: each lane is the scalar chain. */
#include "kernels/cpu/math_simd.h"
#include "kernels/cpu/simd_ops.h"

#include <assert.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define ROWS 4         /* most queries of a block */
#define MOST_VECTORS 8 /* of any block */
#define WEIGHTS (ROWS * KV_PAGE_TOKENS)

typedef float four __attribute__((vector_size(16))); /* one lane per query of a block */
_Static_assert(sizeof(four) == ROWS * sizeof(float), "a lane per row");

typedef struct state {
    float m, l;
    float *o; /* [dim] */
} state;

typedef struct query {
    const float *q;
    float *out;
    const int32_t *pages;
    int32_t low, pos; /* the visible positions, both included */
    int32_t page;     /* of the chunk at hand; -1: not visible, or done */
    state part;       /* of the split at hand */
    state total;      /* of the splits before it */
    bool has_total;
} query;

/* The chunk at hand as one kv head sees it. */
typedef struct chunk {
    int32_t first; /* position of its first key */
    const void *keys, *values;
    int dim;
    float scale;
} chunk;

INLINE vf load(const void *p, size_t at, bool bf16) {
    return bf16 ? v_widen((const uint16_t *)p + at) : v_load((const float *)p + at);
}

INLINE float element(const void *p, size_t at, bool bf16) {
    return bf16 ? cop_widen(((const uint16_t *)p)[at]) : ((const float *)p)[at];
}

/* ---- What a block does per key and dimension: one function for each number of queries and dtype. */

/* Scores of the keys [from, to) of a chunk, and perhaps more of it, for n queries. */
INLINE void score(float scores[][KV_PAGE_TOKENS], const float *const q[], const chunk *c, int from, int to,
                  int n, bool bf16) {
    const int width =
        ATTENTION_VECTORS(n) * V_LANES < KV_PAGE_TOKENS ? ATTENTION_VECTORS(n) : KV_PAGE_TOKENS / V_LANES;
    const float *x[ROWS];
    for (int r = 0; r < n; r++) x[r] = q[r];
    for (int at = from - from % (width * V_LANES); at < to; at += width * V_LANES) {
        vf sum[ROWS * MOST_VECTORS];
#pragma GCC unroll 16
        for (int i = 0; i < n * width; i++) sum[i] = v_zero();
        for (int d = 0; d < c->dim; d++) {
            vf key[MOST_VECTORS];
#pragma GCC unroll 8
            for (int j = 0; j < width; j++)
                key[j] = load(c->keys, (size_t)d * KV_PAGE_TOKENS + (size_t)(at + V_LANES * j), bf16);
#pragma GCC unroll 4
            for (int r = 0; r < n; r++) {
                vf element_of_q = v_broadcast(x[r] + d);
#pragma GCC unroll 8
                for (int j = 0; j < width; j++)
                    sum[r * width + j] = v_fma(element_of_q, key[j], sum[r * width + j]);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < n; r++)
#pragma GCC unroll 8
            for (int j = 0; j < width; j++)
                v_store(&scores[r][at + V_LANES * j], v_mul(sum[r * width + j], v_set(c->scale)));
    }
}

/* o[r] = o[r] * keep[r], then o[r] += p * v of the keys [from, to), for width * V_LANES dimensions.  The
 * weight of key i for query r is p[i * ROWS + r]. */
INLINE void add_columns(float *const o[], const float *keep, const float *p, const chunk *c, int from, int to,
                        int at, int n, int width, bool bf16) {
    vf sum[ROWS * MOST_VECTORS];
#pragma GCC unroll 4
    for (int r = 0; r < n; r++)
#pragma GCC unroll 8
        for (int j = 0; j < width; j++)
            sum[r * width + j] = v_mul(v_load(o[r] + at + V_LANES * j), v_set(keep[r]));
    for (int i = from; i < to; i++) {
        vf value[MOST_VECTORS];
#pragma GCC unroll 8
        for (int j = 0; j < width; j++)
            value[j] = load(c->values, (size_t)i * (size_t)c->dim + (size_t)(at + V_LANES * j), bf16);
#pragma GCC unroll 4
        for (int r = 0; r < n; r++) {
            vf weight = v_broadcast(p + i * ROWS + r);
#pragma GCC unroll 8
            for (int j = 0; j < width; j++) sum[r * width + j] = v_fma(weight, value[j], sum[r * width + j]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < n; r++)
#pragma GCC unroll 8
        for (int j = 0; j < width; j++) v_store(o[r] + at + V_LANES * j, sum[r * width + j]);
}

INLINE void add_values(float *const o[], const float *keep, const float *p, const chunk *c, int from, int to,
                       int n, bool bf16) {
    const int width = ATTENTION_VECTORS(n), half = width > 1 ? width / 2 : 1;
    int d = 0;
    for (; d + V_LANES * width <= c->dim; d += V_LANES * width)
        add_columns(o, keep, p, c, from, to, d, n, width, bf16);
    for (; d + V_LANES * half <= c->dim; d += V_LANES * half)
        add_columns(o, keep, p, c, from, to, d, n, half, bf16);
    for (; d + V_LANES <= c->dim; d += V_LANES) add_columns(o, keep, p, c, from, to, d, n, 1, bf16);
    for (; d < c->dim; d++)
        for (int r = 0; r < n; r++) {
            float sum = o[r][d] * keep[r];
            for (int i = from; i < to; i++)
                sum = fmaf(p[i * ROWS + r], element(c->values, (size_t)i * (size_t)c->dim + (size_t)d, bf16),
                           sum);
            o[r][d] = sum;
        }
}

typedef void score_fn(float scores[][KV_PAGE_TOKENS], const float *const q[], const chunk *c, int from,
                      int to);
typedef void values_fn(float *const o[], const float *keep, const float *p, const chunk *c, int from, int to);

#define BLOCK(n, dtype, bf16)                                                                                \
    static void score_##dtype##_##n(float scores[][KV_PAGE_TOKENS], const float *const q[], const chunk *c,  \
                                    int from, int to) {                                                      \
        score(scores, q, c, from, to, n, bf16);                                                              \
    }                                                                                                        \
    static void values_##dtype##_##n(float *const o[], const float *keep, const float *p, const chunk *c,    \
                                     int from, int to) {                                                     \
        add_values(o, keep, p, c, from, to, n, bf16);                                                        \
    }
BLOCK(1, f32, false)
BLOCK(2, f32, false)
BLOCK(3, f32, false)
BLOCK(4, f32, false)
BLOCK(1, bf16, true)
BLOCK(2, bf16, true)
BLOCK(3, bf16, true)
BLOCK(4, bf16, true)

static score_fn *const score_block[2][ROWS + 1] = {
    {NULL, score_f32_1, score_f32_2, score_f32_3, score_f32_4},
    {NULL, score_bf16_1, score_bf16_2, score_bf16_3, score_bf16_4}};
static values_fn *const values_block[2][ROWS + 1] = {
    {NULL, values_f32_1, values_f32_2, values_f32_3, values_f32_4},
    {NULL, values_bf16_1, values_bf16_2, values_bf16_3, values_bf16_4}};

/* ---- A block meets a chunk. */

/* Which keys of the chunk each query sees. */
typedef struct view {
    int first[ROWS], end[ROWS];
    int from, to;           /* some query sees them: the union's bounds */
    int all_first, all_end; /* every query sees them; empty at the chunk's end if there are none */
} view;

static view look(query *const x[], int n, const chunk *c) {
    view v = {.from = KV_PAGE_TOKENS, .to = 0, .all_first = 0, .all_end = KV_PAGE_TOKENS};
    for (int r = 0; r < n; r++) {
        int first = x[r]->low > c->first ? x[r]->low - c->first : 0;
        int end = x[r]->pos - c->first < KV_PAGE_TOKENS ? x[r]->pos - c->first + 1 : KV_PAGE_TOKENS;
        v.first[r] = first, v.end[r] = end;
        if (first < v.from) v.from = first;
        if (end > v.to) v.to = end;
        if (first > v.all_first) v.all_first = first;
        if (end < v.all_end) v.all_end = end;
    }
    if (v.all_end < v.all_first) v.all_first = v.all_end = KV_PAGE_TOKENS;
    return v;
}

/* From scores to the weights p of the keys and the factors `keep` of what was summed before; m and l move on.
 * A key that a query does not see gets the score -inf and so the weight 0, which does not change l (l >= +0);
 * the outputs never meet it. */
static void weigh(float *p, float *keep, query *const x[], int n, float scores[][KV_PAGE_TOKENS],
                  const view *v) {
    int from = v->from - v->from % V_LANES;
    bool whole = v->all_first == 0 && v->all_end == KV_PAGE_TOKENS;
    float old[V_LANES] = {0}, m[V_LANES] = {0};
    for (int r = 0; r < n; r++) {
        vf best = v_set(x[r]->part.m);
        vi first = vi_set((uint32_t)(v->first[r] - 1)), end = vi_set((uint32_t)v->end[r]);
        for (int at = from; at < v->to; at += V_LANES) {
            vf s = v_load(&scores[r][at]);
            if (!whole) {
                vi i = vi_add(vi_lanes(), vi_set((uint32_t)at));
                s = v_select(vm_and(vm_below(first, i), vm_below(i, end)), s, v_set(-INFINITY));
                v_store(&scores[r][at], s);
            }
            best = v_max(best, s);
        }
        old[r] = x[r]->part.m;
        m[r] = v_greatest(best);
    }
    v_store(keep, v_exp(v_sub(v_load(old), v_load(m))));
    four l = {0};
    for (int r = 0; r < n; r++) l[r] = x[r]->part.l * keep[r];
    for (int at = from; at < v->to; at += V_LANES) {
        vi weights[ROWS], by_key[ROWS];
        for (int r = 0; r < ROWS; r++)
            weights[r] = vi_of(r < n ? v_exp(v_sub(v_load(&scores[r][at]), v_set(m[r]))) : v_zero());
        vi_interleave(by_key, weights);
        for (int r = 0; r < ROWS; r++) vi_store(p + ROWS * at + V_LANES * r, by_key[r]);
        for (int i = at; i < at + V_LANES; i++) {
            four key;
            memcpy(&key, p + ROWS * i, sizeof key);
            l = l + key;
        }
    }
    for (int r = 0; r < n; r++) {
        x[r]->part.m = m[r];
        x[r]->part.l = l[r];
    }
}

/* Extend the states of n queries by the chunk: what all of them see together, the rest one by one. */
static void add_chunk(query *const x[], int n, const chunk *c, bool bf16) {
    float scores[ROWS][KV_PAGE_TOKENS] __attribute__((aligned(64)));
    float p[WEIGHTS] __attribute__((aligned(64)));
    float keep[V_LANES], *o[ROWS];
    const float *q[ROWS];
    view v = look(x, n, c);
    for (int r = 0; r < n; r++) q[r] = x[r]->q, o[r] = x[r]->part.o;
    score_block[bf16][n](scores, q, c, v.from, v.to);
    weigh(p, keep, x, n, scores, &v);
    for (int r = 0; r < n; r++) {
        int end = v.end[r] < v.all_first ? v.end[r] : v.all_first;
        if (v.first[r] >= end) continue;
        values_block[bf16][1](&o[r], &keep[r], p + r, c, v.first[r], end);
        keep[r] = 1.0f;
    }
    values_block[bf16][n](o, keep, p, c, v.all_first, v.all_end);
    for (int r = 0; r < n; r++) keep[r] = 1.0f;
    for (int r = 0; r < n; r++)
        if (v.all_end < v.end[r]) values_block[bf16][1](&o[r], &keep[r], p + r, c, v.all_end, v.end[r]);
}

/* ---- The walk of a gang. */

static void merge(state *a, const state *b, int dim) {
    float m = a->m > b->m ? a->m : b->m;
    float ea = cop_exp(a->m - m), eb = cop_exp(b->m - m);
    a->l = fmaf(b->l, eb, a->l * ea);
    int d = 0;
    for (; d + V_LANES <= dim; d += V_LANES)
        v_store(a->o + d, v_fma(v_load(b->o + d), v_set(eb), v_mul(v_load(a->o + d), v_set(ea))));
    for (; d < dim; d++) a->o[d] = fmaf(b->o[d], eb, a->o[d] * ea);
    a->m = m;
}

/* The split at hand is complete: it joins, or is, the total. */
static void close_split(query *x, int dim) {
    if (x->has_total) {
        merge(&x->total, &x->part, dim);
        return;
    }
    state first = x->part;
    x->part = x->total; /* for its room */
    x->total = first;
    x->has_total = true;
}

/* Name the query's page for chunk c, and start a split where one starts.  A state without keys has m = -inf,
 * whose factor `keep` is exp(-inf) = 0. */
static void begin_chunk(query *x, int32_t c, int dim) {
    x->page = -1;
    int32_t first = x->low / KV_PAGE_TOKENS;
    if (c < first || c > x->pos / KV_PAGE_TOKENS) return;
    x->page = x->pages[c];
    if (c != first && c % (K_SPLIT_TOKENS / KV_PAGE_TOKENS) != 0) return;
    if (c != first) close_split(x, dim);
    x->part.m = -INFINITY;
    x->part.l = 0.0f;
    memset(x->part.o, 0, (size_t)dim * sizeof *x->part.o);
}

static void finish(query *x, int dim, bool bf16) {
    close_split(x, dim);
    const state *s = &x->total;
    int d = 0;
    for (; d + V_LANES <= dim; d += V_LANES) {
        vf y = v_div(v_load(s->o + d), v_set(s->l));
        v_store(x->out + d, bf16 ? v_round_bf16(y) : y);
    }
    for (; d < dim; d++) {
        float y = s->o[d] / s->l;
        x->out[d] = bf16 ? cop_round_bf16(y) : y;
    }
}

static void open_query(query *x, const cpu_attention *a, int kv_head, int index, float *room) {
    int dim = a->kv->head_dim, group = a->n_heads / a->kv->n_kv_heads, t = index / group;
    size_t row = ((size_t)t * (size_t)a->n_heads + (size_t)(kv_head * group + index % group)) * (size_t)dim;
    int32_t pos = a->b->pos[t];
    *x = (query){.q = a->q + row,
                 .out = a->out + row,
                 .pages = a->b->pages + (size_t)a->b->table[t] * (size_t)a->b->page_stride,
                 .low = pos > a->window ? pos - a->window : 0,
                 .pos = pos,
                 .part.o = room,
                 .total.o = room + dim};
}

/* The queries of a gang that lie on the same page as query i, taken out of the waiting ones. */
static int take_page(query *out[], query *gang, int i, int n) {
    int count = 0;
    for (int32_t page = gang[i].page; i < n; i++) {
        if (gang[i].page != page) continue;
        gang[i].page = -1;
        out[count++] = &gang[i];
    }
    return count;
}

void ATTENTION_NAME(const cpu_attention *a, int kv_head, int first, int end, float *room) {
    int dim = a->kv->head_dim, n = end - first;
    assert(dim <= K_MAX_HEAD_DIM && n <= CPU_GANG);
    query gang[CPU_GANG], *together[CPU_GANG];
    int32_t low = INT32_MAX, high = 0;
    for (int i = 0; i < n; i++) {
        open_query(&gang[i], a, kv_head, first + i, room + (size_t)i * 2 * (size_t)dim);
        if (gang[i].low < low) low = gang[i].low;
        if (gang[i].pos > high) high = gang[i].pos;
    }
    size_t size = a->bf16 ? sizeof(uint16_t) : sizeof(float);
    size_t keys = cpu_key_offset(a->kv, a->layer, kv_head) * size;
    size_t values = cpu_value_offset(a->kv, a->layer, kv_head) * size;
    for (int32_t at = low / KV_PAGE_TOKENS; at <= high / KV_PAGE_TOKENS; at++) {
        for (int i = 0; i < n; i++) begin_chunk(&gang[i], at, dim);
        for (int i = 0; i < n; i++) {
            if (gang[i].page < 0) continue;
            const char *page = (const char *)a->kv->arena + (size_t)gang[i].page * a->page_bytes;
            chunk c = {at * KV_PAGE_TOKENS, page + keys, page + values, dim, a->scale};
            int count = take_page(together, gang, i, n), blocks = (count + ROWS - 1) / ROWS;
            for (int b = 0; b < blocks; b++) {
                int from = count * b / blocks;
                add_chunk(together + from, count * (b + 1) / blocks - from, &c, a->bf16);
            }
        }
    }
    for (int i = 0; i < n; i++) finish(&gang[i], dim, a->bf16);
}
