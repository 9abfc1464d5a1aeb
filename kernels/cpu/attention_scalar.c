/* Attention of one head of one token, rule 5.
 *
 *   positions   0 .. 63 | 64 .. 127 | 128 .. 191 | 192 .. 255 || 256 .. 319 | ...
 *               chunk     chunk       chunk        chunk      || chunk           chunk = page
 *               ------------------ split ------------------   || split ...
 *
 * The grids are absolute, so the order of all sums depends on the position alone.  A state is (m, l, o): the
 * greatest score, the sum of exp(score - m) and the sum of that times the value.  Chunks extend the state of
 * their split; the splits are merged left to right.  The first visible chunk of a split starts from l = 0 and
 * o = 0 with its own m; the first visible split is the result's initial state.  Only visible positions are
 * read. */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/math.h"
#include "kernels/cpu/scalar.h"

#include <assert.h>

typedef struct state {
    float m, l;
    float o[K_MAX_HEAD_DIM];
} state;

/* One chunk's part of the page: positions [first, end) within it. */
typedef struct span {
    const void *keys, *values;
    int first, end;
} span;

static float element(const void *p, size_t i, bool bf16) {
    return bf16 ? cop_widen(((const uint16_t *)p)[i]) : ((const float *)p)[i];
}

static float score(const cpu_attention *a, const float *q, const void *keys, int at) {
    float sum = 0.0f;
    for (int d = 0; d < a->kv->head_dim; d++)
        sum = fmaf(q[d], element(keys, (size_t)d * KV_PAGE_TOKENS + (size_t)at, a->bf16), sum);
    return sum * a->scale;
}

static void add_chunk(const cpu_attention *a, state *s, bool first, const float *q, const span *c) {
    int dim = a->kv->head_dim;
    float scores[KV_PAGE_TOKENS];
    for (int i = c->first; i < c->end; i++) scores[i] = score(a, q, c->keys, i);
    float m = first ? scores[c->first] : s->m;
    for (int i = c->first; i < c->end; i++) m = m > scores[i] ? m : scores[i];
    float keep = first ? 0.0f : cop_exp(s->m - m);
    s->l = first ? 0.0f : s->l * keep;
    for (int d = 0; d < dim; d++) s->o[d] = first ? 0.0f : s->o[d] * keep;
    for (int i = c->first; i < c->end; i++) {
        float p = cop_exp(scores[i] - m);
        s->l = s->l + p;
        for (int d = 0; d < dim; d++)
            s->o[d] = fmaf(p, element(c->values, (size_t)i * (size_t)dim + (size_t)d, a->bf16), s->o[d]);
    }
    s->m = m;
}

static void merge(state *a, const state *b, int dim) {
    float m = a->m > b->m ? a->m : b->m;
    float ea = cop_exp(a->m - m), eb = cop_exp(b->m - m);
    a->l = fmaf(b->l, eb, a->l * ea);
    for (int d = 0; d < dim; d++) a->o[d] = fmaf(b->o[d], eb, a->o[d] * ea);
    a->m = m;
}

static void attend(const cpu_attention *a, int t, int head, int kv_head) {
    int dim = a->kv->head_dim;
    size_t size = a->bf16 ? sizeof(uint16_t) : sizeof(float);
    size_t row = ((size_t)t * (size_t)a->n_heads + (size_t)head) * (size_t)dim;
    const int32_t *pages = a->b->pages + (size_t)a->b->table[t] * (size_t)a->b->page_stride;
    int32_t pos = a->b->pos[t], low = pos > a->window ? pos - a->window : 0;

    state total, part;
    for (int32_t split = low / K_SPLIT_TOKENS; split <= pos / K_SPLIT_TOKENS; split++) {
        bool first_split = split == low / K_SPLIT_TOKENS;
        state *s = first_split ? &total : &part;
        int32_t begin = split * K_SPLIT_TOKENS > low ? split * K_SPLIT_TOKENS : low;
        int32_t last = pos / K_SPLIT_TOKENS > split ? split * K_SPLIT_TOKENS + K_SPLIT_TOKENS - 1 : pos;
        for (int32_t c = begin / KV_PAGE_TOKENS; c <= last / KV_PAGE_TOKENS; c++) {
            const char *page = (const char *)a->kv->arena + (size_t)pages[c] * a->page_bytes;
            bool first = c == begin / KV_PAGE_TOKENS;
            span visible = {page + cpu_key_offset(a->kv, a->layer, kv_head) * size,
                            page + cpu_value_offset(a->kv, a->layer, kv_head) * size,
                            first ? begin % KV_PAGE_TOKENS : 0,
                            c == last / KV_PAGE_TOKENS ? last % KV_PAGE_TOKENS + 1 : KV_PAGE_TOKENS};
            add_chunk(a, s, first, a->q + row, &visible);
        }
        if (!first_split) merge(&total, &part, dim);
    }
    for (int d = 0; d < dim; d++) {
        float y = total.o[d] / total.l;
        a->out[row + (size_t)d] = a->bf16 ? cop_round_bf16(y) : y;
    }
}

void cpu_attention_scalar(const cpu_attention *a, int kv_head, int first, int end, float *room) {
    (void)room;
    assert(a->kv->head_dim <= K_MAX_HEAD_DIM);
    int group = a->n_heads / a->kv->n_kv_heads;
    for (int i = first; i < end; i++) attend(a, i / group, kv_head * group + i % group, kv_head);
}
