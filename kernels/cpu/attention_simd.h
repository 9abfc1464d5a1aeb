/* Attention over the primitives of simd_*.h: attention_scalar.c explains the order.  Included once per
 * instruction set, with
 *
 *   ATTENTION_VECTORS(rows)  vectors of keys or of dimensions that a block of that many queries takes at once
 * then ATTENTION_NAME        the function
 *
 * A gang of queries walks the chunks of its pages upwards:
 *
 *   chunk           0  1  2  3 | 4  5
 *   query 0, page   7  2  9  4 | 0
 *   query 1         7  2  9  5 |
 *   query 2         7  2  3  8 | 1  6
 *
 * The first query leads.  Whoever names the same page for the same chunk comes along, so that the page is
 * read from memory once for all of them and widened once for a block of up to ROWS.  Here all share two
 * chunks and query 1 a third.  Where they part, the others wait until the lead is done, and one takes over.
 *
 * Every sum belongs to one query, and its order is the scalar one, so who shares a block changes no bit.
 * Scores have lanes over keys, outputs lanes over the head's dimensions: each lane is the scalar chain. */
#include "kernels/cpu/math_simd.h"
#include "kernels/cpu/simd_ops.h"

#include <assert.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define ROWS 6         /* most queries of a block */
#define MOST_VECTORS 8 /* of any block */
#define FEW 3          /* queries that wait for memory, so that fetch() pays */
#define GROUPS (KV_PAGE_TOKENS / V_LANES)

/* Weights of a block: [2][KV_PAGE_TOKENS][4], so that those of a key for four queries lie side by side. */
#define P_FOUR (4 * KV_PAGE_TOKENS)
#define p_of(r) ((r) / 4 * P_FOUR + (r) % 4) /* query r's weights, every fourth float */
typedef float four __attribute__((vector_size(16)));

typedef struct state {
    float m, l;
    float *o; /* [dim] */
} state;

typedef struct query {
    const float *q;
    float *out;
    const int32_t *pages;
    int32_t low, pos;   /* the visible positions, both included */
    int32_t next, last; /* chunks: the one that comes next, the last visible one */
    state part;         /* of the split at hand */
    state total;        /* of the splits before it */
    bool has_total;
} query;

/* The chunk at hand as one kv head sees it. */
typedef struct chunk {
    int32_t first; /* position of its first key */
    const void *keys, *values;
    const char *ahead; /* the keys that come next for the lead; some keys if none do */
    int dim;
    float scale;
} chunk;

/* Which keys of the chunk each query sees. */
typedef struct view {
    int first[ROWS], end[ROWS];
    int from, to;           /* some query sees them: the union's bounds */
    int all_first, all_end; /* every query sees them; empty at the chunk's end if there are none */
} view;

INLINE vf load(const void *p, size_t at, bool bf16) {
    return bf16 ? v_widen((const uint16_t *)p + at) : v_load((const float *)p + at);
}

INLINE float element(const void *p, size_t at, bool bf16) {
    return bf16 ? cop_widen(((const uint16_t *)p)[at]) : ((const float *)p)[at];
}

/* ---- What a block of n queries does per key and dimension: a function for each n and dtype. */

/* sum[r][j] += x[r][x_at] * vector j at `at`, of n x `width` vectors.  The fewer of the two sides are held in
 * registers. */
INLINE void step(vf sum[], const float *const x[], size_t x_at, const void *vectors, size_t at, int n,
                 int width, bool bf16) {
    vf held[MOST_VECTORS];
    if (width <= n) {
#pragma GCC unroll 8
        for (int j = 0; j < width; j++) held[j] = load(vectors, at + (size_t)(V_LANES * j), bf16);
#pragma GCC unroll 8
        for (int r = 0; r < n; r++) {
            vf one = v_broadcast(x[r] + x_at);
#pragma GCC unroll 8
            for (int j = 0; j < width; j++) sum[r * width + j] = v_fma(one, held[j], sum[r * width + j]);
        }
    } else {
#pragma GCC unroll 8
        for (int r = 0; r < n; r++) held[r] = v_broadcast(x[r] + x_at);
#pragma GCC unroll 8
        for (int j = 0; j < width; j++) {
            vf one = load(vectors, at + (size_t)(V_LANES * j), bf16);
#pragma GCC unroll 8
            for (int r = 0; r < n; r++) sum[r * width + j] = v_fma(held[r], one, sum[r * width + j]);
        }
    }
}

/* Few queries on a page wait for memory.  For each vector of keys as much of the values is fetched, and for
 * each vector of values as much of the keys that the lead meets next. */
INLINE void fetch(const char *p, size_t n_bytes) {
#pragma GCC unroll 8
    for (size_t i = 0; i < n_bytes; i += 64) __builtin_prefetch(p + i);
}

/* Scores of the keys [from, to) of a chunk, and perhaps more of it. */
INLINE void score(float scores[][KV_PAGE_TOKENS], const float *const q[], const chunk *c, int from, int to,
                  int n, bool bf16) {
    const int width = ATTENTION_VECTORS(n) < GROUPS ? ATTENTION_VECTORS(n) : GROUPS;
    const float *x[ROWS];
    size_t dim = (size_t)c->dim, size = bf16 ? sizeof(uint16_t) : sizeof(float);
    for (int r = 0; r < n; r++) x[r] = q[r];
    for (int at = from & -(width * V_LANES); at < to; at += width * V_LANES) {
        vf sum[ROWS * MOST_VECTORS];
#pragma GCC unroll 48
        for (int i = 0; i < n * width; i++) sum[i] = v_zero();
        const char *ahead = (const char *)c->values + (size_t)at * dim * size;
        for (size_t d = 0; d < dim; d++, ahead += (size_t)(width * V_LANES) * size) {
            if (n <= FEW) fetch(ahead, (size_t)(width * V_LANES) * size);
            step(sum, x, d, c->keys, d * KV_PAGE_TOKENS + (size_t)at, n, width, bf16);
        }
        vf scale = v_set(c->scale);
#pragma GCC unroll 8
        for (int r = 0; r < n; r++)
#pragma GCC unroll 8
            for (int j = 0; j < width; j++)
                v_store(&scores[r][at + V_LANES * j], v_mul(sum[r * width + j], scale));
    }
}

/* o[r] = o[r] * keep[r], then o[r] += p[r] * v for each of the keys [from, to): width * V_LANES dimensions.
 */
INLINE void add_columns(float *const o[], const float *keep, const float *p, const chunk *c, int from, int to,
                        int at, int n, int width, bool bf16) {
    vf sum[ROWS * MOST_VECTORS];
    const float *weights[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < n; r++) {
        weights[r] = p + p_of(r);
#pragma GCC unroll 8
        for (int j = 0; j < width; j++)
            sum[r * width + j] = v_mul(v_load(o[r] + at + V_LANES * j), v_set(keep[r]));
    }
    size_t dim = (size_t)c->dim, size = bf16 ? sizeof(uint16_t) : sizeof(float);
    const char *ahead = c->ahead + (size_t)at * KV_PAGE_TOKENS * size;
    for (size_t i = (size_t)from; i < (size_t)to; i++, ahead += (size_t)(width * V_LANES) * size) {
        if (n <= FEW) fetch(ahead, (size_t)(width * V_LANES) * size);
        step(sum, weights, 4 * i, c->values, i * dim + (size_t)at, n, width, bf16);
    }
#pragma GCC unroll 8
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
                sum = fmaf(p[p_of(r) + 4 * i],
                           element(c->values, (size_t)i * (size_t)c->dim + (size_t)d, bf16), sum);
            o[r][d] = sum;
        }
}

/* A key that query r does not see, outside [first[r], end[r]), gets the score -inf. */
static void hide(float scores[][KV_PAGE_TOKENS], const view *v, int n) {
    for (int r = 0; r < n; r++) {
        vi first = vi_set((uint32_t)(v->first[r] - 1)), end = vi_set((uint32_t)v->end[r]);
        for (int at = v->from & -V_LANES; at < v->to; at += V_LANES) {
            vi i = vi_add(vi_lanes(), vi_set((uint32_t)at));
            vm seen = vm_and(vm_below(first, i), vm_below(i, end));
            v_store(&scores[r][at], v_select(seen, v_load(&scores[r][at]), v_set(-INFINITY)));
        }
    }
}

/* The weights of V_LANES keys for up to four queries; returns their sums l, key by key. */
INLINE four weigh_four(float *p, four l, float scores[][KV_PAGE_TOKENS], const float *m, int at, int n) {
    vi weights[4], by_key[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++)
        weights[r] = vi_of(r < n ? v_exp(v_sub(v_load(&scores[r][at]), v_broadcast(m + r))) : v_zero());
    vi_interleave(by_key, weights);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) vi_store(p + V_LANES * i, by_key[i]);
#pragma GCC unroll 16
    for (int i = 0; i < V_LANES; i++) {
        four key;
        memcpy(&key, p + 4 * i, sizeof key);
        l = l + key;
    }
    return l;
}

/* From scores to the weights p of the keys and the factors `keep` of what was summed before; m and l move on.
 * Only groups of keys that hold some of [from, to) have scores.  A hidden key gets the weight +0, which does
 * not change l (it is never -0); the outputs never meet it. */
INLINE void weigh(float *p, float *keep, state *const s[], float scores[][KV_PAGE_TOKENS], const view *v,
                  int n) {
    float old[V_LANES] = {0}, m[V_LANES] = {0}, sums[8] = {0};
    int from = v->from & -V_LANES;
    if (v->all_first != 0 || v->all_end != KV_PAGE_TOKENS) hide(scores, v, n);
    vf best[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < n; r++) best[r] = v_set(s[r]->m);
    for (int at = from; at < v->to; at += V_LANES)
#pragma GCC unroll 8
        for (int r = 0; r < n; r++) best[r] = v_max(best[r], v_load(&scores[r][at]));
#pragma GCC unroll 8
    for (int r = 0; r < n; r++) {
        old[r] = s[r]->m;
        m[r] = s[r]->m = v_greatest(best[r]);
    }
    v_store(keep, v_exp(v_sub(v_load(old), v_load(m))));
    for (int r = 0; r < n; r++) sums[r] = s[r]->l * keep[r];
    four l0, l1;
    memcpy(&l0, sums, sizeof l0), memcpy(&l1, sums + 4, sizeof l1);
    for (int at = from; at < v->to; at += V_LANES) {
        l0 = weigh_four(p + 4 * at, l0, scores, m, at, n < 4 ? n : 4);
        if (n > 4) l1 = weigh_four(p + P_FOUR + 4 * at, l1, scores + 4, m + 4, at, n - 4);
    }
    memcpy(sums, &l0, sizeof l0), memcpy(sums + 4, &l1, sizeof l1);
    for (int r = 0; r < n; r++) s[r]->l = sums[r];
}

typedef void score_fn(float scores[][KV_PAGE_TOKENS], const float *const q[], const chunk *c, int from,
                      int to);
typedef void weigh_fn(float *p, float *keep, state *const s[], float scores[][KV_PAGE_TOKENS], const view *v);
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
#define BLOCKS(n)                                                                                            \
    BLOCK(n, f32, false)                                                                                     \
    BLOCK(n, bf16, true)                                                                                     \
    static void weigh_##n(float *p, float *keep, state *const s[], float scores[][KV_PAGE_TOKENS],           \
                          const view *v) {                                                                   \
        weigh(p, keep, s, scores, v, n);                                                                     \
    }
BLOCKS(1)
BLOCKS(2)
BLOCKS(3)
BLOCKS(4)
BLOCKS(5)
BLOCKS(6)

#define BY_ROWS(name)                                                                                        \
    { NULL, name##_1, name##_2, name##_3, name##_4, name##_5, name##_6 }
static score_fn *const score_block[2][ROWS + 1] = {BY_ROWS(score_f32), BY_ROWS(score_bf16)};
static values_fn *const values_block[2][ROWS + 1] = {BY_ROWS(values_f32), BY_ROWS(values_bf16)};
static weigh_fn *const weigh_block[ROWS + 1] = BY_ROWS(weigh);

/* ---- A block meets a chunk. */

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

/* Extend the states of n queries by the chunk: what all of them see together, the rest one by one. */
static void add_chunk(query *const x[], int n, const chunk *c, bool bf16) {
    float scores[ROWS][KV_PAGE_TOKENS] __attribute__((aligned(64)));
    float p[2 * P_FOUR] __attribute__((aligned(64)));
    float keep[V_LANES], *o[ROWS];
    const float *q[ROWS];
    state *s[ROWS];
    view v = look(x, n, c);
    for (int r = 0; r < n; r++) q[r] = x[r]->q, s[r] = &x[r]->part, o[r] = s[r]->o;
    score_block[bf16][n](scores, q, c, v.from, v.to);
    weigh_block[n](p, keep, s, scores, &v);
    for (int r = 0; r < n; r++) {
        int end = v.end[r] < v.all_first ? v.end[r] : v.all_first;
        if (v.first[r] >= end) continue;
        values_block[bf16][1](&o[r], &keep[r], p + p_of(r), c, v.first[r], end);
        keep[r] = 1.0f;
    }
    values_block[bf16][n](o, keep, p, c, v.all_first, v.all_end);
    for (int r = 0; r < n; r++) keep[r] = 1.0f;
    for (int r = 0; r < n; r++)
        if (v.all_end < v.end[r]) values_block[bf16][1](&o[r], &keep[r], p + p_of(r), c, v.all_end, v.end[r]);
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

/* Start a split where one starts.  A state without keys has m = -inf, whose factor `keep` is exp(-inf) = 0.
 */
static void begin_chunk(query *x, int dim) {
    bool first = x->next == x->low / KV_PAGE_TOKENS;
    if (!first && x->next % (K_SPLIT_TOKENS / KV_PAGE_TOKENS) != 0) return;
    if (!first) close_split(x, dim);
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
    int32_t pos = a->b->pos[t], low = pos > a->window ? pos - a->window : 0;
    *x = (query){.q = a->q + row,
                 .out = a->out + row,
                 .pages = a->b->pages + (size_t)a->b->table[t] * (size_t)a->b->page_stride,
                 .low = low,
                 .pos = pos,
                 .next = low / KV_PAGE_TOKENS,
                 .last = pos / KV_PAGE_TOKENS,
                 .part.o = room,
                 .total.o = room + dim};
}

/* The queries for which the page comes next, as chunk c.  Those that stay behind, or are done, leave `near`.
 */
static int meet(query *together[], query *near[], int *n_near, int32_t c, int32_t page) {
    int kept = 0, count = 0;
    for (int i = 0; i < *n_near; i++) {
        query *x = near[i];
        if (x->next < c || x->next > x->last) continue;
        near[kept++] = x;
        if (x->next == c && x->pages[c] == page) together[count++] = x;
    }
    *n_near = kept;
    return count;
}

/* Take the lead to its end, and with it, as far as they share its pages, those of the n queries after it. */
static void walk(const cpu_attention *a, int kv_head, query *lead, int n) {
    size_t size = a->bf16 ? sizeof(uint16_t) : sizeof(float);
    size_t keys = cpu_key_offset(a->kv, a->layer, kv_head) * size;
    size_t values = cpu_value_offset(a->kv, a->layer, kv_head) * size;
    query *near[CPU_GANG], *together[CPU_GANG];
    int n_near = n;
    for (int i = 0; i < n; i++) near[i] = lead + i;
    for (int32_t at; (at = lead->next) <= lead->last;) {
        const char *page = (const char *)a->kv->arena + (size_t)lead->pages[at] * a->page_bytes;
        chunk c = {.first = at * KV_PAGE_TOKENS,
                   .keys = page + keys,
                   .values = page + values,
                   .dim = a->kv->head_dim,
                   .scale = a->scale};
        int32_t next = lead->pages[at < lead->last ? at + 1 : at];
        c.ahead = (const char *)a->kv->arena + (size_t)next * a->page_bytes + keys;
        int count = meet(together, near, &n_near, at, lead->pages[at]);
        for (int i = 0; i < count; i++) begin_chunk(together[i], c.dim);
        int blocks = (count + ROWS - 1) / ROWS;
        for (int i = 0; i < blocks; i++) {
            int from = count * i / blocks;
            add_chunk(together + from, count * (i + 1) / blocks - from, &c, a->bf16);
        }
        for (int i = 0; i < count; i++) together[i]->next++;
    }
}

void ATTENTION_NAME(const cpu_attention *a, int kv_head, int first, int end, float *room) {
    int dim = a->kv->head_dim, n = end - first;
    assert(dim <= K_MAX_HEAD_DIM && n <= CPU_GANG);
    query gang[CPU_GANG];
    for (int i = 0; i < n; i++)
        open_query(&gang[i], a, kv_head, first + i, room + (size_t)i * 2 * (size_t)dim);
    for (int i = 0; i < n; i++) {
        walk(a, kv_head, &gang[i], n - i);
        finish(&gang[i], dim, a->bf16);
    }
}
