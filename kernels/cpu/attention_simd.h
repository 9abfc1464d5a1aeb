/* Attention over the primitives of simd_*.h: attention_scalar.c explains the order.  Scores have lanes over
 * keys, outputs lanes over the head's dimensions, so each lane is the scalar chain.  Scores of all 64
 * positions of a page are computed; those that are not visible (perhaps never written) are left out of the
 * maximum and the sums. */
#include "kernels/cpu/math_simd.h"
#include "kernels/cpu/simd_ops.h"

#include <assert.h>

#define GROUPS (KV_PAGE_TOKENS / V_LANES)

typedef struct state {
    float m, l;
    float o[K_MAX_HEAD_DIM];
} state;

typedef struct span {
    const void *keys, *values;
    int first, end;
} span;

static inline vf load(const void *p, size_t at, bool bf16) {
    return bf16 ? v_widen((const uint16_t *)p + at) : v_load((const float *)p + at);
}

static inline __attribute__((always_inline)) void
score_keys(vf scores[GROUPS], const float *q, const void *keys, int dim, float scale, bool bf16) {
    vf sum[GROUPS];
#pragma GCC unroll 8
    for (int g = 0; g < GROUPS; g++) sum[g] = v_zero();
    for (int d = 0; d < dim; d++) {
        vf query = v_broadcast(q + d);
#pragma GCC unroll 8
        for (int g = 0; g < GROUPS; g++)
            sum[g] =
                v_fma(query, load(keys, (size_t)d * KV_PAGE_TOKENS + (size_t)(V_LANES * g), bf16), sum[g]);
    }
    for (int g = 0; g < GROUPS; g++) scores[g] = v_mul(sum[g], v_set(scale));
}

/* The greatest visible score. */
static float greatest(const vf scores[GROUPS], int first, int end) {
    vf best = v_set(-INFINITY);
    for (int g = 0; g < GROUPS; g++) {
        vi at = vi_add(vi_lanes(), vi_set((uint32_t)(V_LANES * g)));
        vm visible = vm_and(vm_below(vi_set((uint32_t)(first - 1)), at), vm_below(at, vi_set((uint32_t)end)));
        best = v_max(best, v_select(visible, scores[g], v_set(-INFINITY)));
    }
    return v_greatest(best);
}

/* o = o * keep (0 where `fresh`), then o += p[i] * v[i], for V_LANES * n dimensions. */
static inline __attribute__((always_inline)) void add_values(float *o, const float *p, const span *c, int dim,
                                                             int at, int n, bool fresh, float keep,
                                                             bool bf16) {
    vf sum[8];
#pragma GCC unroll 8
    for (int j = 0; j < n; j++) sum[j] = fresh ? v_zero() : v_mul(v_load(o + at + V_LANES * j), v_set(keep));
    for (int i = c->first; i < c->end; i++) {
        vf weight = v_broadcast(p + i);
        size_t row = (size_t)i * (size_t)dim + (size_t)at;
#pragma GCC unroll 8
        for (int j = 0; j < n; j++)
            sum[j] = v_fma(weight, load(c->values, row + (size_t)(V_LANES * j), bf16), sum[j]);
    }
#pragma GCC unroll 8
    for (int j = 0; j < n; j++) v_store(o + at + V_LANES * j, sum[j]);
}

static inline __attribute__((always_inline)) void add_chunk(state *s, bool fresh, const float *q,
                                                            const span *c, int dim, float scale, bool bf16) {
    vf scores[GROUPS];
    float p[KV_PAGE_TOKENS];
    score_keys(scores, q, c->keys, dim, scale, bf16);
    float m = greatest(scores, c->first, c->end);
    if (!fresh) m = s->m > m ? s->m : m;
    for (int g = 0; g < GROUPS; g++) v_store(p + V_LANES * g, v_exp(v_sub(scores[g], v_set(m))));
    float keep = fresh ? 0.0f : cop_exp(s->m - m);
    float l = fresh ? 0.0f : s->l * keep;
    for (int i = c->first; i < c->end; i++) l = l + p[i];
    int d = 0;
    for (; d + 64 <= dim; d += 64) add_values(s->o, p, c, dim, d, 64 / V_LANES, fresh, keep, bf16);
    for (; d + 16 <= dim; d += 16) add_values(s->o, p, c, dim, d, 16 / V_LANES, fresh, keep, bf16);
    for (; d < dim; d++) {
        float sum = fresh ? 0.0f : s->o[d] * keep;
        for (int i = c->first; i < c->end; i++) {
            size_t at = (size_t)i * (size_t)dim + (size_t)d;
            float v = bf16 ? cop_widen(((const uint16_t *)c->values)[at]) : ((const float *)c->values)[at];
            sum = fmaf(p[i], v, sum);
        }
        s->o[d] = sum;
    }
    s->l = l;
    s->m = m;
}

static void merge(state *a, const state *b, int dim) {
    float m = a->m > b->m ? a->m : b->m;
    float ea = cop_exp(a->m - m), eb = cop_exp(b->m - m);
    a->l = fmaf(b->l, eb, a->l * ea);
    for (int d = 0; d < dim; d++) a->o[d] = fmaf(b->o[d], eb, a->o[d] * ea);
    a->m = m;
}

static inline __attribute__((always_inline)) void attend(const cpu_attention *a, int t, int head, bool bf16) {
    int dim = a->kv->head_dim;
    int kv_head = head / (a->n_heads / a->kv->n_kv_heads);
    size_t size = bf16 ? sizeof(uint16_t) : sizeof(float);
    size_t row = ((size_t)t * (size_t)a->n_heads + (size_t)head) * (size_t)dim;
    const int32_t *pages = a->b->pages + (size_t)a->b->table[t] * (size_t)a->b->page_stride;
    int32_t pos = a->b->pos[t], low = pos > a->window ? pos - a->window : 0;
    size_t keys = cpu_key_offset(a->kv, a->layer, kv_head) * size;
    size_t values = cpu_value_offset(a->kv, a->layer, kv_head) * size;

    state total, part;
    state *s = &total;
    int32_t chunks_in_split = K_SPLIT_TOKENS / KV_PAGE_TOKENS, first_chunk = low / KV_PAGE_TOKENS;
    for (int32_t c = first_chunk; c <= pos / KV_PAGE_TOKENS; c++) {
        bool fresh = c == first_chunk || c % chunks_in_split == 0;
        if (fresh && c != first_chunk) { /* the split before this one is complete */
            if (s == &part) merge(&total, &part, dim);
            s = &part;
        }
        const char *page = (const char *)a->kv->arena + (size_t)pages[c] * a->page_bytes;
        span visible = {page + keys, page + values, c == first_chunk ? low % KV_PAGE_TOKENS : 0,
                        c == pos / KV_PAGE_TOKENS ? pos % KV_PAGE_TOKENS + 1 : KV_PAGE_TOKENS};
        add_chunk(s, fresh, a->q + row, &visible, dim, a->scale, bf16);
    }
    if (s == &part) merge(&total, &part, dim);
    for (int d = 0; d < dim; d++) {
        float y = total.o[d] / total.l;
        a->out[row + (size_t)d] = bf16 ? cop_round_bf16(y) : y;
    }
}

void ATTENTION_NAME(const cpu_attention *a, int t, int head) {
    assert(a->kv->head_dim <= K_MAX_HEAD_DIM);
    if (a->bf16)
        attend(a, t, head, true);
    else
        attend(a, t, head, false);
}
