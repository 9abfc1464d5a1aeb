/* Attention with AVX2: attention_scalar.c explains the order.  Scores have lanes over keys, outputs lanes
 * over the head's dimensions, so each lane is the scalar chain.  Scores of all 64 positions of a page are
 * computed, those that are not visible (perhaps never written) are left out of the maximum and the sums. */
#include "kernels/cpu/avx2.h"

#ifdef __AVX2__
#include "kernels/cpu/math_avx2.h"

#include <assert.h>

#define GROUPS (KV_PAGE_TOKENS / 8)

typedef struct state {
    float m, l;
    float o[K_MAX_HEAD_DIM];
} state;

typedef struct span {
    const void *keys, *values;
    int first, end;
} span;

static inline __m256 load(const void *p, size_t at, bool bf16) {
    return bf16 ? v_widen((const uint16_t *)p + at) : _mm256_loadu_ps((const float *)p + at);
}

static inline __attribute__((always_inline)) void
score_keys(__m256 scores[GROUPS], const float *q, const void *keys, int dim, float scale, bool bf16) {
    __m256 sum[GROUPS];
#pragma GCC unroll 8
    for (int g = 0; g < GROUPS; g++) sum[g] = _mm256_setzero_ps();
    for (int d = 0; d < dim; d++) {
        __m256 query = _mm256_broadcast_ss(q + d);
#pragma GCC unroll 8
        for (int g = 0; g < GROUPS; g++)
            sum[g] = V_FMA(query, load(keys, (size_t)d * KV_PAGE_TOKENS + 8 * (size_t)g, bf16), sum[g]);
    }
    for (int g = 0; g < GROUPS; g++) scores[g] = _mm256_mul_ps(sum[g], V_SET(scale));
}

/* The greatest visible score. */
static float greatest(const __m256 scores[GROUPS], int first, int end) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256 best = V_SET(-INFINITY);
    for (int g = 0; g < GROUPS; g++) {
        __m256i at = _mm256_add_epi32(lane, _mm256_set1_epi32(8 * g));
        __m256i visible = _mm256_and_si256(_mm256_cmpgt_epi32(at, _mm256_set1_epi32(first - 1)),
                                           _mm256_cmpgt_epi32(_mm256_set1_epi32(end), at));
        __m256 s = _mm256_blendv_ps(V_SET(-INFINITY), scores[g], _mm256_castsi256_ps(visible));
        best = _mm256_max_ps(best, s);
    }
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(best), _mm256_extractf128_ps(best, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}

/* o = o * keep (0 where `fresh`), then o += p[i] * v[i], for 8 * n dimensions. */
static inline __attribute__((always_inline)) void add_values(float *o, const float *p, const span *c, int dim,
                                                             int at, int n, bool fresh, float keep,
                                                             bool bf16) {
    __m256 sum[8];
#pragma GCC unroll 8
    for (int j = 0; j < n; j++)
        sum[j] = fresh ? _mm256_setzero_ps() : _mm256_mul_ps(_mm256_loadu_ps(o + at + 8 * j), V_SET(keep));
    for (int i = c->first; i < c->end; i++) {
        __m256 weight = _mm256_broadcast_ss(p + i);
        size_t row = (size_t)i * (size_t)dim + (size_t)at;
#pragma GCC unroll 8
        for (int j = 0; j < n; j++)
            sum[j] = V_FMA(weight, load(c->values, row + 8 * (size_t)j, bf16), sum[j]);
    }
#pragma GCC unroll 8
    for (int j = 0; j < n; j++) _mm256_storeu_ps(o + at + 8 * j, sum[j]);
}

static inline __attribute__((always_inline)) void add_chunk(state *s, bool fresh, const float *q,
                                                            const span *c, int dim, float scale, bool bf16) {
    __m256 scores[GROUPS];
    float p[KV_PAGE_TOKENS];
    score_keys(scores, q, c->keys, dim, scale, bf16);
    float m = greatest(scores, c->first, c->end);
    if (!fresh) m = s->m > m ? s->m : m;
    for (int g = 0; g < GROUPS; g++) _mm256_storeu_ps(p + 8 * g, v_exp(_mm256_sub_ps(scores[g], V_SET(m))));
    float keep = fresh ? 0.0f : cop_exp(s->m - m);
    float l = fresh ? 0.0f : s->l * keep;
    for (int i = c->first; i < c->end; i++) l = l + p[i];
    int d = 0;
    for (; d + 64 <= dim; d += 64) add_values(s->o, p, c, dim, d, 8, fresh, keep, bf16);
    for (; d + 16 <= dim; d += 16) add_values(s->o, p, c, dim, d, 2, fresh, keep, bf16);
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

void cpu_attention_avx2(const cpu_attention *a, int t, int head) {
    assert(a->kv->head_dim <= K_MAX_HEAD_DIM);
    if (a->bf16)
        attend(a, t, head, true);
    else
        attend(a, t, head, false);
}
#endif
