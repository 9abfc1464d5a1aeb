/* Keys and values in pages, and attention over them: against a naive reference in double, bit for bit between
 * instruction sets and numbers of threads, one query at a time as many at once.  Pages start full of NaN:
 * whatever was not written must not be used. */
#include "tests/unit/kernel_test.h"

#include "kernels/cpu/math.h"

enum { LENGTH = 701, PAGES = 13, LAYERS = 2, LAYER = 1, VOCAB = 5 };

static const precision profiles[] = {PRECISION_BF16, PRECISION_F32};
static const struct {
    const char *isa;
    int threads;
} variants[] = {{"scalar", 1}, {"scalar", 2}, {"avx2", 1}, {"avx2", 2}, {"avx512", 1}, {"avx512bf16", 2}};
enum { N_VARIANTS = sizeof variants / sizeof variants[0] };

/* Page numbers out of order, so that no code may count on neighbours. */
static const int32_t page_table[PAGES] = {7, 2, 9, 0, 12, 4, 11, 1, 8, 3, 10, 5, 6};

typedef struct shape {
    int n_heads, n_kv_heads, head_dim;
    float qk_scale;
} shape;

static const shape shapes[] = {
    {4, 2, 32, 1.2f}, {3, 1, 16, 1.0f}, {2, 2, 64, 1.15f}, {6, 2, 6, 1.2f}, {2, 1, 128, 1.0f}};
enum { N_SHAPES = sizeof shapes / sizeof shapes[0] };

/* A sequence whose keys and values are in a cache. */
typedef struct fixture {
    k_ctx *k;
    precision p;
    shape s;
    k_kv kv;
    k_rope *rope;
    k_table *ve;
    float *q, *keys, *values, *gate; /* as they were before the store, but q after it */
    int32_t ids[LENGTH], prev[LENGTH], pos[LENGTH], table[LENGTH];
    k_batch b;
} fixture;

static float element(const fixture *f, size_t page_at, int32_t page) {
    size_t size = f->p == PRECISION_BF16 ? 2 : 4;
    const char *at = (const char *)f->kv.arena +
                     (size_t)page * k_page_bytes(f->k, LAYERS, f->s.n_kv_heads, f->s.head_dim) +
                     page_at * size;
    uint16_t half;
    float x;
    if (size == 2) {
        memcpy(&half, at, 2);
        return cop_widen(half);
    }
    memcpy(&x, at, 4);
    return x;
}

static float key_at(const fixture *f, int32_t pos, int head, int d) {
    size_t at = cpu_key_offset(&f->kv, LAYER, head) + (size_t)d * 64 + (size_t)(pos % 64);
    return element(f, at, page_table[pos / 64]);
}

static float value_at(const fixture *f, int32_t pos, int head, int d) {
    size_t at =
        cpu_value_offset(&f->kv, LAYER, head) + (size_t)(pos % 64) * (size_t)f->s.head_dim + (size_t)d;
    return element(f, at, page_table[pos / 64]);
}

static bool fixture_open(fixture *f, const char *isa, int n_threads, precision p, const shape *s) {
    *f = (fixture){.k = open_isa(isa, p, n_threads), .p = p, .s = *s};
    if (!f->k) return false;
    size_t nq = (size_t)LENGTH * (size_t)(s->n_heads * s->head_dim),
           width = (size_t)(s->n_kv_heads * s->head_dim);
    f->q = random_floats(nq, 1, 2.0f);
    f->keys = random_floats(LENGTH * width, 2, 2.0f);
    f->values = random_floats(LENGTH * width, 3, 2.0f);
    f->gate = random_floats((size_t)LENGTH * (size_t)s->n_kv_heads, 4, 3.0f);
    float *rows = random_floats(VOCAB * width, 5, 1.0f);
    size_t bytes = PAGES * k_page_bytes(f->k, LAYERS, s->n_kv_heads, s->head_dim);
    f->kv = (k_kv){k_alloc(f->k, bytes, 1), LAYERS, s->n_kv_heads, s->head_dim};
    memset(f->kv.arena, 0xff, bytes);
    assert_int_equal(k_table_open(f->k, &f->ve, VOCAB, (int)width, NULL), COP_OK);
    k_table_pack(f->k, f->ve, 0, VOCAB, rows);
    mem_free(rows);
    assert_int_equal(k_rope_open(f->k, &f->rope, LENGTH, s->head_dim, 10000.0, true, NULL), COP_OK);
    for (int t = 0; t < LENGTH; t++) {
        f->ids[t] = t % VOCAB;
        f->prev[t] = t ? f->ids[t - 1] : -1;
        f->pos[t] = t;
    }
    f->b = (k_batch){LENGTH, f->ids, f->prev, f->pos, f->table, page_table, PAGES};
    float *k = random_floats(LENGTH * width, 2, 2.0f), *v = random_floats(LENGTH * width, 3, 2.0f);
    k_qkv a = {f->q, k, v, f->gate, f->ve, 3.0f, s->qk_scale, 1e-6f, s->n_heads, LAYER};
    k_qkv_store(f->k, &a, f->rope, &f->b, &f->kv);
    mem_free(k), mem_free(v);
    return true;
}

static void fixture_close(fixture *f) {
    mem_free(f->q), mem_free(f->keys), mem_free(f->values), mem_free(f->gate);
    k_free(f->k, f->kv.arena);
    k_table_close(f->k, f->ve);
    k_rope_close(f->k, f->rope);
    k_close(f->k);
}

/* rms(rope(x)) * scale in double, from the table's own rounding of sines and cosines. */
static void turned(double *out, const float *x, int32_t pos, int dim, double scale) {
    double sum = 0;
    for (int j = 0; j < dim / 2; j++) {
        float inverse = 1.0f / (float)pow(10000.0, (double)((float)(2 * j) / (float)dim));
        double angle = (float)pos * inverse;
        double c = cop_round_bf16((float)cos(angle)), s = cop_round_bf16((float)sin(angle));
        out[j] = x[j] * c + x[j + dim / 2] * s;
        out[j + dim / 2] = x[j + dim / 2] * c - x[j] * s;
    }
    for (int d = 0; d < dim; d++) sum += out[d] * out[d];
    for (int d = 0; d < dim; d++) out[d] *= scale / sqrt(sum / dim + 1e-6);
}

static void keys_and_values_are_stored(void **state) {
    (void)state;
    for (int i = 0; i < N_SHAPES * 2; i++) {
        fixture f;
        const shape *s = &shapes[i / 2];
        assert_true(fixture_open(&f, "scalar", 1, profiles[i % 2], s));
        float *raw = random_floats((size_t)LENGTH * (size_t)(s->n_heads * s->head_dim), 1, 2.0f);
        double tolerance = f.p == PRECISION_BF16 ? 0.005 : 3e-6, want[128];
        for (int t = 0; t < LENGTH; t += 37) {
            for (int h = 0; h < s->n_heads; h++) {
                size_t row = (size_t)(t * s->n_heads + h) * (size_t)s->head_dim;
                turned(want, raw + row, t, s->head_dim, s->qk_scale);
                for (int d = 0; d < s->head_dim; d++)
                    check_near(f.q[row + (size_t)d], want[d], 5e-6, "q", (size_t)d);
            }
            for (int h = 0; h < s->n_kv_heads; h++) {
                size_t row = (size_t)(t * s->n_kv_heads + h) * (size_t)s->head_dim;
                turned(want, f.keys + row, t, s->head_dim, s->qk_scale);
                double g = 3.0 / (1 + exp(-(double)f.gate[t * s->n_kv_heads + h]));
                for (int d = 0; d < s->head_dim; d++) {
                    check_near(key_at(&f, t, h, d), want[d], tolerance * fmax(1, fabs(want[d])), "key",
                               (size_t)d);
                    const char *ve = f.ve->data;
                    size_t at = (size_t)f.ids[t] * (size_t)f.ve->dim + (size_t)(h * s->head_dim + d);
                    double e = f.ve->bf16 ? cop_widen(((const uint16_t *)ve)[at]) : ((const float *)ve)[at];
                    double v = f.values[row + (size_t)d] + g * e;
                    check_near(value_at(&f, t, h, d), v, tolerance * fmax(1, fabs(v)), "value", (size_t)d);
                }
            }
        }
        mem_free(raw);
        fixture_close(&f);
    }
}

static const int32_t probes[] = {0, 1, 62, 63, 64, 65, 127, 128, 254, 255, 256, 257, 300, 511, 512, 575, 700};
static const int32_t windows[] = {0, 1, 5, 63, 64, 100, 255, 256, 300, INT32_MAX};
enum { N_PROBES = sizeof probes / sizeof probes[0], N_WINDOWS = sizeof windows / sizeof windows[0] };

/* Attention of one head in double over what the pages hold. */
static void reference(const fixture *f, double *out, int32_t pos, int head, int32_t window) {
    int dim = f->s.head_dim, kv_head = head / (f->s.n_heads / f->s.n_kv_heads);
    const float *q = f->q + (size_t)(pos * f->s.n_heads + head) * (size_t)dim;
    static double scores[LENGTH];
    int32_t low = pos > window ? pos - window : 0;
    double max = -1e300, sum = 0;
    for (int32_t t = low; t <= pos; t++) {
        scores[t] = 0;
        for (int d = 0; d < dim; d++) scores[t] += (double)q[d] * key_at(f, t, kv_head, d);
        scores[t] /= sqrt(dim);
        max = fmax(max, scores[t]);
    }
    for (int d = 0; d < dim; d++) out[d] = 0;
    for (int32_t t = low; t <= pos; t++) {
        double p = exp(scores[t] - max);
        sum += p;
        for (int d = 0; d < dim; d++) out[d] += p * value_at(f, t, kv_head, d);
    }
    for (int d = 0; d < dim; d++) out[d] /= sum;
}

/* The probes' queries, gathered; returns the batch of them. */
static k_batch probe_batch(const fixture *f, float *q) {
    size_t width = (size_t)(f->s.n_heads * f->s.head_dim);
    for (int i = 0; i < N_PROBES; i++)
        memcpy(q + (size_t)i * width, f->q + (size_t)probes[i] * width, width * sizeof *q);
    return (k_batch){N_PROBES, f->ids, f->prev, probes, f->table, page_table, PAGES};
}

static void check_probes(const fixture *f, const float *out, int32_t window) {
    double want[128], tolerance = f->p == PRECISION_BF16 ? 0.004 : 2e-6;
    for (int i = 0; i < N_PROBES; i++)
        for (int h = 0; h < f->s.n_heads; h++) {
            reference(f, want, probes[i], h, window);
            for (int d = 0; d < f->s.head_dim; d++)
                check_near(out[(size_t)(i * f->s.n_heads + h) * (size_t)f->s.head_dim + (size_t)d], want[d],
                           tolerance * fmax(2, fabs(want[d])), "attention", (size_t)d);
        }
}

static void attention_matches_the_reference(void **state) {
    (void)state;
    for (int i = 0; i < N_SHAPES * 2; i++) {
        const shape *s = &shapes[i / 2];
        size_t width = (size_t)(s->n_heads * s->head_dim), n = N_PROBES * width;
        float *first[N_WINDOWS] = {NULL};
        for (int v = 0; v < N_VARIANTS; v++) {
            fixture f;
            if (!fixture_open(&f, variants[v].isa, variants[v].threads, profiles[i % 2], s)) continue;
            float *q = mem_alloc(n, sizeof *q), *out = mem_alloc(n, sizeof *out),
                  *one = mem_alloc(n, sizeof *one);
            k_batch b = probe_batch(&f, q);
            for (int w = 0; w < N_WINDOWS; w++) {
                k_attention(f.k, out, q, &b, &f.kv, s->n_heads, LAYER, windows[w]);
                if (!first[w]) {
                    check_probes(&f, out, windows[w]);
                    first[w] = mem_alloc(n, sizeof *out);
                    memcpy(first[w], out, n * sizeof *out);
                }
                check_bits(first[w], out, n, "attention, another variant");
                for (int t = 0; t < N_PROBES; t++) { /* alone, and in place */
                    k_batch alone = {1, f.ids, f.prev, probes + t, f.table, page_table, PAGES};
                    memcpy(one + (size_t)t * width, q + (size_t)t * width, width * sizeof *q);
                    k_attention(f.k, one + (size_t)t * width, one + (size_t)t * width, &alone, &f.kv,
                                s->n_heads, LAYER, windows[w]);
                }
                check_bits(first[w], one, n, "attention, one query at a time");
            }
            mem_free(q), mem_free(out), mem_free(one);
            fixture_close(&f);
        }
        for (int w = 0; w < N_WINDOWS; w++) mem_free(first[w]);
    }
}

/* ---- Batches whose queries share pages in all ways, against the scalar body that takes one at a time. */

enum { TOKENS = 70, STRIDE = 10, POOL = 14, RANDOM_BATCHES = 14 };

static const struct {
    const char *isa;
    int threads;
} bodies[] = {{"scalar", 1}, {"scalar", 3}, {"avx2", 1},   {"avx2", 2},
              {"avx2", 3},   {"avx2", 5},   {"avx512", 1}, {"avx512bf16", 3}};
enum { N_BODIES = sizeof bodies / sizeof bodies[0] };

static const shape wide_shapes[] = {
    {.n_heads = 1, .n_kv_heads = 1, .head_dim = 2},   {.n_heads = 4, .n_kv_heads = 2, .head_dim = 6},
    {.n_heads = 3, .n_kv_heads = 3, .head_dim = 16},  {.n_heads = 4, .n_kv_heads = 1, .head_dim = 40},
    {.n_heads = 2, .n_kv_heads = 2, .head_dim = 64},  {.n_heads = 8, .n_kv_heads = 2, .head_dim = 64},
    {.n_heads = 2, .n_kv_heads = 1, .head_dim = 80},  {.n_heads = 2, .n_kv_heads = 1, .head_dim = 128},
    {.n_heads = 1, .n_kv_heads = 1, .head_dim = 256}, {.n_heads = 2, .n_kv_heads = 1, .head_dim = 512},
    {.n_heads = 70, .n_kv_heads = 1, .head_dim = 4}};
enum { N_WIDE_SHAPES = sizeof wide_shapes / sizeof wide_shapes[0] };

/* Tokens and tables drawn at random; `seen` marks what some query may read. */
typedef struct tangle {
    int32_t pos[TOKENS], table[TOKENS], pages[TOKENS * STRIDE], window;
    bool seen[POOL][KV_PAGE_TOKENS];
    k_batch b;
} tangle;

static int32_t below(uint64_t *state, int32_t n) {
    return (int32_t)((next_random(state) + 1.0f) * 0.5f * (float)n) % n;
}

/* Each table is a fork of an earlier one at some chunk (kind 0), shares every other chunk or so with it (kind
 * 1), or is like no other (kind 2). */
static void draw_tables(tangle *g, uint64_t *state) {
    for (int i = 0; i < TOKENS; i++) {
        int parent = i ? below(state, i) : 0, kind = i ? below(state, 3) : 2, fork = below(state, STRIDE + 1);
        for (int c = 0; c < STRIDE; c++) {
            bool shared = kind == 0 ? c < fork : kind == 1 && below(state, 2);
            g->pages[i * STRIDE + c] = shared ? g->pages[parent * STRIDE + c] : below(state, POOL);
        }
    }
}

/* Spans of a few tokens, or of many, or single ones; positions near each other so that chunks end in all
 * ways. */
static void draw_tokens(tangle *g, int n, uint64_t *state) {
    static const int32_t longest[] = {1, 1, 9, TOKENS};
    int32_t most = longest[below(state, 4)], at = below(state, STRIDE * KV_PAGE_TOKENS - TOKENS);
    for (int t = 0; t < n;) {
        int32_t length = 1 + below(state, most), table = below(state, TOKENS);
        int32_t pos = below(state, 3) ? at + below(state, TOKENS) : below(state, STRIDE * KV_PAGE_TOKENS);
        for (int i = 0; i < length && t < n && pos + i < STRIDE * KV_PAGE_TOKENS; i++, t++) {
            g->pos[t] = pos + i;
            g->table[t] = table;
        }
    }
}

static void draw_tangle(tangle *g, int number, uint64_t *state) {
    static const int sizes[] = {1, 2, 3, 5, 6, 7, 8, 13, 31, 33, 64, 65, TOKENS};
    *g = (tangle){.window = windows[number % N_WINDOWS]};
    int n = sizes[below(state, sizeof sizes / sizeof sizes[0])];
    draw_tables(g, state);
    draw_tokens(g, n, state);
    for (int t = 0; t < n; t++)
        for (int32_t p = g->pos[t] > g->window ? g->pos[t] - g->window : 0; p <= g->pos[t]; p++)
            g->seen[g->pages[g->table[t] * STRIDE + p / KV_PAGE_TOKENS]][p % KV_PAGE_TOKENS] = true;
    g->b = (k_batch){n, NULL, NULL, g->pos, g->table, g->pages, STRIDE};
}

/* NaN wherever no query looks; random elsewhere. */
static void fill_pages(char *arena, const k_kv *kv, precision p, const tangle *g, uint64_t *state) {
    size_t size = p == PRECISION_BF16 ? 2 : 4, heads = (size_t)kv->n_kv_heads, dim = (size_t)kv->head_dim;
    for (int page = 0; page < POOL; page++)
        for (size_t i = 0; i < 2 * heads * dim * KV_PAGE_TOKENS; i++, arena += size) {
            bool is_key = i < heads * dim * KV_PAGE_TOKENS;
            float x = next_random(state) * 2.0f;
            if (!g->seen[page][is_key ? i % KV_PAGE_TOKENS : i / dim % KV_PAGE_TOKENS]) x = NAN;
            uint16_t half = cop_bf16(x);
            memcpy(arena, size == 2 ? (void *)&half : (void *)&x, size);
        }
}

static void check_tangles(k_ctx *const k[], precision p, const shape *s, uint64_t seed) {
    size_t width = (size_t)(s->n_heads * s->head_dim);
    k_kv kv = {NULL, 1, s->n_kv_heads, s->head_dim};
    kv.arena = mem_alloc_aligned(POOL, k_page_bytes(k[0], 1, s->n_kv_heads, s->head_dim));
    float *q = random_floats(TOKENS * width, seed, 2.0f), *want = mem_alloc(TOKENS * width, sizeof *want),
          *got = mem_alloc(TOKENS * width, sizeof *got);
    for (int i = 0; i < RANDOM_BATCHES; i++) {
        tangle g;
        draw_tangle(&g, i, &seed);
        fill_pages(kv.arena, &kv, p, &g, &seed);
        size_t n = (size_t)g.b.n * width;
        k_attention(k[0], want, q, &g.b, &kv, s->n_heads, 0, g.window);
        for (size_t j = 0; j < n; j++) assert_true(isfinite(want[j]));
        for (int v = 1; v < N_BODIES; v++) {
            if (!k[v]) continue;
            memcpy(got, q, n * sizeof *q); /* in place */
            k_attention(k[v], got, got, &g.b, &kv, s->n_heads, 0, g.window);
            check_bits(want, got, n, bodies[v].isa);
        }
    }
    mem_free(q), mem_free(want), mem_free(got), mem_free(kv.arena);
}

static void queries_that_share_pages_keep_their_bits(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        k_ctx *k[N_BODIES];
        for (int v = 0; v < N_BODIES; v++) k[v] = open_isa(bodies[v].isa, profiles[i], bodies[v].threads);
        for (int j = 0; j < N_WIDE_SHAPES; j++)
            check_tangles(k, profiles[i], &wide_shapes[j], (uint64_t)(7 * i + j));
        for (int v = 0; v < N_BODIES; v++) k_close(k[v]);
    }
}

/* What is written does not depend on how the positions come: all at once or in spans of 1, 7, 100 .. tokens.
 */
static void spans_store_the_same(void **state) {
    (void)state;
    for (int i = 0; i < 4 * N_SHAPES; i++) {
        fixture f, g;
        const shape *s = &shapes[i / 4];
        assert_true(fixture_open(&f, "scalar", 1, profiles[i % 2], s));
        if (fixture_open(&g, i % 4 < 2 ? "avx2" : "avx512", 2, profiles[i % 2], s)) {
            size_t bytes = PAGES * k_page_bytes(f.k, LAYERS, f.s.n_kv_heads, f.s.head_dim);
            size_t width = (size_t)(f.s.n_kv_heads * f.s.head_dim),
                   q_width = (size_t)(f.s.n_heads * f.s.head_dim);
            assert_memory_equal(f.kv.arena, g.kv.arena, bytes);
            memset(g.kv.arena, 0xff, bytes);
            float *q = random_floats(LENGTH * q_width, 1, 2.0f);
            for (int at = 0, n = 1; at < LENGTH; at += n, n = n * 7 % 101) {
                if (n > LENGTH - at) n = LENGTH - at;
                k_batch b = {n, f.ids + at, f.prev + at, f.pos + at, f.table, page_table, PAGES};
                k_qkv a = {q + (size_t)at * q_width,
                           g.keys + (size_t)at * width,
                           g.values + (size_t)at * width,
                           g.gate + at * f.s.n_kv_heads,
                           g.ve,
                           3.0f,
                           f.s.qk_scale,
                           1e-6f,
                           f.s.n_heads,
                           LAYER};
                k_qkv_store(g.k, &a, g.rope, &b, &g.kv);
            }
            assert_memory_equal(f.kv.arena, g.kv.arena, bytes);
            check_bits(f.q, q, LENGTH * q_width, "q");
            mem_free(q);
            fixture_close(&g);
        }
        fixture_close(&f);
    }
}

/* A copied page gives what the original gives, and has nothing beyond the copied positions. */
static void pages_are_copied(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        fixture f;
        assert_true(fixture_open(&f, "scalar", 1, profiles[i], &shapes[3]));
        int32_t copied[PAGES], pos = 64 + 20, id = 0, table = 0;
        memcpy(copied, page_table, sizeof copied);
        copied[1] = page_table[12]; /* no position of the sequence lies there */
        k_page_copy(f.k, &f.kv, copied[1], page_table[1], 21);
        size_t width = (size_t)(f.s.n_heads * f.s.head_dim);
        float a[64], b[64];
        k_batch original = {1, &id, &id, &pos, &table, page_table, PAGES}, copy = original;
        copy.pages = copied;
        k_attention(f.k, a, f.q + (size_t)pos * width, &original, &f.kv, f.s.n_heads, LAYER, INT32_MAX);
        k_attention(f.k, b, f.q + (size_t)pos * width, &copy, &f.kv, f.s.n_heads, LAYER, INT32_MAX);
        check_bits(a, b, width, "copied page");
        pos++; /* the next position was not copied */
        k_attention(f.k, b, f.q + (size_t)pos * width, &copy, &f.kv, f.s.n_heads, LAYER, INT32_MAX);
        assert_true(isnan(b[0]));
        fixture_close(&f);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(keys_and_values_are_stored),
        cmocka_unit_test(attention_matches_the_reference),
        cmocka_unit_test(queries_that_share_pages_keep_their_bits),
        cmocka_unit_test(spans_store_the_same),
        cmocka_unit_test(pages_are_copied),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
