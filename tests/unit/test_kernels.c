/* Every operation of the forward pass: against a naive reference in double, bit for bit between instruction
 * sets, and row by row independent of what else is in the batch and of the number of threads. */
#include "tests/unit/kernel_test.h"

#include "kernels/cpu/math.h"

static const precision profiles[] = {PRECISION_BF16, PRECISION_F32};
static const struct {
    const char *isa;
    int threads;
} variants[] = {{"scalar", 1}, {"scalar", 2}, {"avx2", 1}, {"avx2", 2}, {"avx512", 1}, {"avx512bf16", 2}};
enum { N_VARIANTS = sizeof variants / sizeof variants[0] };

static float rounded(float x, precision p) { return p == PRECISION_BF16 ? cop_round_bf16(x) : x; }

static float *rounded_floats(size_t n, uint64_t seed, precision p) {
    float *x = random_floats(n, seed, 1.0f);
    for (size_t i = 0; i < n; i++) x[i] = rounded(x[i], p);
    return x;
}

/* Keep the first variant's result in *first, compare the others with it. */
static void same_as_first(float **first, const float *y, size_t n, const char *what) {
    if (*first) {
        check_bits(*first, y, n, what);
        return;
    }
    *first = mem_alloc(n, sizeof *y);
    if (n) memcpy(*first, y, n * sizeof *y);
}

/* ---- k_gemm. */

typedef struct gemm_case {
    int n_out, n_in, n, extra_stride;
    k_epilogue epilogue;
} gemm_case;

/* Rule 1 as the text has it, from weights that are not packed. */
static float rule_1(const float *w, const float *x, int n_in) {
    float sum = 0.0f;
    for (int first = 0; first < n_in; first += 128) {
        int end = first + 128 < n_in ? first + 128 : n_in;
        float chain = 0.0f;
        for (int i = first; i < end; i += 2) {
            chain = fmaf(i + 1 < n_in ? w[i + 1] : 0.0f, i + 1 < n_in ? x[i + 1] : 0.0f, chain);
            chain = fmaf(w[i], x[i], chain);
        }
        sum = sum + chain;
    }
    return sum;
}

static float expected(const gemm_case *c, float sum, float old, precision p) {
    if (c->epilogue == K_STORE) return sum;
    if (c->epilogue == K_ADD) return old + sum;
    return sum < 0 ? 0.0f : rounded(sum * sum, p);
}

static void check_gemm(const gemm_case *c, precision p) {
    int stride = c->n_in + c->extra_stride;
    float *w = rounded_floats((size_t)c->n_out * (size_t)c->n_in, 1, p);
    float *x = rounded_floats((size_t)c->n * (size_t)stride, 2, p);
    float *old = random_floats((size_t)c->n * (size_t)c->n_out, 3, 1.0f);
    size_t count = (size_t)c->n * (size_t)c->n_out;
    for (int i = 0; i < N_VARIANTS; i++) {
        k_ctx *k = open_isa(variants[i].isa, p, variants[i].threads);
        if (!k) continue;
        k_matrix *m;
        assert_int_equal(k_matrix_open(k, &m, c->n_out, c->n_in, NULL), COP_OK);
        k_matrix_pack(k, m, 0, c->n_out, w);
        float *y = k_alloc(k, count, sizeof *y);
        k_write(k, y, old, count * sizeof *y);
        k_gemm(k, y, m, x, stride, c->n, c->epilogue);
        for (size_t at = 0; at < count; at++) {
            const float *row = x + at / (size_t)c->n_out * (size_t)stride;
            const float *column = w + at % (size_t)c->n_out * (size_t)c->n_in;
            float want = expected(c, rule_1(column, row, c->n_in), old[at], p);
            if (cop_bits(want) != cop_bits(y[at]))
                fail_msg("%s: [%d, %d] n %d: %a, not %a", variants[i].isa, c->n_out, c->n_in, c->n,
                         (double)y[at], (double)want);
            double sum = 0;
            for (int j = 0; j < c->n_in; j++) sum += (double)column[j] * row[j];
            if (c->epilogue == K_STORE) check_near(y[at], sum, 2e-5 * sqrt(c->n_in), "gemm", at);
        }
        k_free(k, y);
        k_matrix_close(k, m);
        k_close(k);
    }
    mem_free(w), mem_free(x), mem_free(old);
}

static void gemm_follows_rule_1(void **state) {
    (void)state;
    cpu_flush_denormals();
    static const gemm_case cases[] = {
        {16, 2, 1, 0, K_STORE},   {1, 1, 1, 0, K_STORE},     {0, 8, 3, 0, K_STORE},
        {8, 0, 3, 0, K_STORE},    {24, 24, 0, 0, K_STORE},   {1, 24, 5, 40, K_STORE},
        {17, 129, 2, 0, K_STORE}, {33, 127, 3, 1, K_ADD},    {64, 128, 4, 0, K_RELU2},
        {100, 257, 7, 3, K_ADD},  {12, 65, 9, 0, K_RELU2},   {130, 300, 1, 0, K_STORE},
        {130, 300, 2, 0, K_ADD},  {70, 384, 33, 0, K_STORE}, {6, 768, 50, 0, K_ADD},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (int p = 0; p < 2; p++) check_gemm(&cases[i], profiles[p]);
}

/* Every size of block, in rows and in tiles, whole and cut short; panels of rows; a last chunk of one pair.
 */
static void gemm_blocks_of_all_shapes(void **state) {
    (void)state;
    cpu_flush_denormals();
    for (int p = 0; p < 2; p++) {
        for (int n = 1; n <= 17; n++)
            check_gemm(&(gemm_case){181, 258, n, 2, (k_epilogue)(n % 3)}, profiles[p]);
        static const int panels[] = {63, 64, 65, 131};
        for (int i = 0; i < 4; i++) check_gemm(&(gemm_case){53, 130, panels[i], 0, K_RELU2}, profiles[p]);
        for (int tiles = 1; tiles <= 12; tiles++)
            for (int n = 1; n <= 3; n++)
                check_gemm(&(gemm_case){16 * tiles - 3, 256, n, 0, K_ADD}, profiles[p]);
    }
}

static void gemm_rows_do_not_depend_on_the_batch(void **state) {
    (void)state;
    enum { OUT = 80, IN = 200, N = 257 };
    static const int counts[] = {N, 1, 4, 7, 64};
    for (int p = 0; p < 2; p++) {
        float *w = random_floats((size_t)OUT * IN, 5, 1.0f),
              *x = rounded_floats((size_t)N * IN, 6, profiles[p]);
        float *first = NULL;
        for (int i = 0; i < N_VARIANTS; i++) {
            k_ctx *k = open_isa(variants[i].isa, profiles[p], variants[i].threads);
            if (!k) continue;
            k_matrix *m;
            assert_int_equal(k_matrix_open(k, &m, OUT, IN, NULL), COP_OK);
            k_matrix_pack(k, m, 0, 33, w);
            k_matrix_pack(k, m, 33, OUT - 33, w + 33 * IN);
            float *y = k_alloc(k, (size_t)N * OUT, sizeof *y);
            for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++)
                for (int skip = 0; skip < 3 && skip + counts[c] <= N; skip++) {
                    k_gemm(k, y, m, x + skip * IN, IN, counts[c], K_STORE);
                    if (!first) same_as_first(&first, y, (size_t)N * OUT, "gemm");
                    check_bits(first + skip * OUT, y, (size_t)counts[c] * OUT, "gemm rows");
                }
            k_free(k, y);
            k_matrix_close(k, m);
            k_close(k);
        }
        mem_free(w), mem_free(x), mem_free(first);
    }
}

static void gemm_keeps_a_nan(void **state) {
    (void)state;
    for (int i = 0; i < N_VARIANTS; i++) {
        k_ctx *k = open_isa(variants[i].isa, PRECISION_BF16, 1);
        if (!k) continue;
        k_matrix *m;
        assert_int_equal(k_matrix_open(k, &m, 20, 2, NULL), COP_OK);
        float w[40], x[2] = {NAN, 1.0f}, y[20];
        for (int j = 0; j < 40; j++) w[j] = 1.0f;
        k_matrix_pack(k, m, 0, 20, w);
        k_gemm(k, y, m, x, 2, 1, K_RELU2);
        for (int j = 0; j < 20; j++) assert_true(isnan(y[j]));
        k_matrix_close(k, m);
        k_close(k);
    }
}

/* ---- Norms and element-wise operations. */

static double rms_of(const float *x, int n, double eps) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += (double)x[i] * x[i];
    return sqrt(sum / n + eps);
}

static void norms_match_the_reference(void **state) {
    (void)state;
    static const int dims[] = {1, 2, 15, 16, 17, 100, 768, 4096, 4100, 9000};
    enum { N = 5 };
    for (int p = 0; p < 2; p++)
        for (size_t d = 0; d < sizeof dims / sizeof dims[0]; d++) {
            int dim = dims[d];
            size_t count = (size_t)N * (size_t)dim;
            float *x = random_floats(count, 7, 3.0f), *x0 = random_floats(count, 8, 1.0f), *first = NULL,
                  *mixed = NULL;
            for (int i = 0; i < N_VARIANTS; i++) {
                k_ctx *k = open_isa(variants[i].isa, profiles[p], variants[i].threads);
                if (!k) continue;
                float *y = k_alloc(k, count, sizeof *y), *h = k_alloc(k, count, sizeof *h);
                k_write(k, y, x, count * sizeof *y);
                k_mix_norm(k, h, y, x0, 0.9f, 0.3f, N, dim, 1e-6f);
                double tolerance = profiles[p] == PRECISION_BF16 ? 0.004 : 1e-6;
                for (size_t at = 0; at < count; at++) {
                    check_near(y[at], 0.9f * (double)x[at] + 0.3f * (double)x0[at], 1e-6, "mix", at);
                    double want = y[at] / rms_of(y + at / (size_t)dim * (size_t)dim, dim, 1e-6);
                    check_near(h[at], want, tolerance * fmax(1, fabs(want)), "norm", at);
                    assert_true(h[at] == rounded(h[at], profiles[p]));
                }
                same_as_first(&first, h, count, "norm");
                same_as_first(&mixed, y, count, "mix");
                /* Gathered rows are those rows, in another order and number. */
                static const int32_t index[] = {3, 0, 3};
                float *g = k_alloc(k, 3 * (size_t)dim, sizeof *g);
                k_gather_norm(k, g, y, index, 3, dim, 1e-6f);
                for (int r = 0; r < 3; r++)
                    check_bits(g + r * dim, h + index[r] * dim, (size_t)dim, "gathered");
                /* Without x0, x stays. */
                k_mix_norm(k, h, y, NULL, 5.0f, 5.0f, N, dim, 1e-6f);
                check_bits(first, h, count, "norm without mix");
                k_free(k, g), k_free(k, y), k_free(k, h);
                k_close(k);
            }
            mem_free(x), mem_free(x0), mem_free(first), mem_free(mixed);
        }
}

static void elements_match_the_reference(void **state) {
    (void)state;
    static const int counts[] = {0, 1, 7, 8, 9, 1000, 70001};
    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
        size_t n = (size_t)counts[c];
        float *x = random_floats(n, 9, 40.0f), *y = random_floats(n, 10, 1.0f), *capped = NULL, *less = NULL;
        for (int i = 0; i < N_VARIANTS; i++) {
            k_ctx *k = open_isa(variants[i].isa, PRECISION_F32, variants[i].threads);
            if (!k) continue;
            float *a = k_alloc(k, n, sizeof *a);
            k_copy(k, a, x, n);
            k_sub_scaled(k, a, y, 0.37f, n);
            for (size_t at = 0; at < n; at++) assert_true(a[at] == x[at] - (float)(0.37f * y[at]));
            same_as_first(&less, a, n, "sub_scaled");
            k_copy(k, a, x, n);
            k_softcap(k, a, 1, counts[c], counts[c], 15.0f);
            for (size_t at = 0; at < n; at++)
                check_near(a[at], 15 * tanh((double)x[at] / 15), 5e-6, "softcap", at);
            same_as_first(&capped, a, n, "softcap");
            k_free(k, a);
            k_close(k);
        }
        mem_free(x), mem_free(y), mem_free(capped), mem_free(less);
    }
}

static void softcap_leaves_the_padding(void **state) {
    (void)state;
    k_ctx *k = open_isa("avx2", PRECISION_F32, 2);
    if (!k) skip();
    float x[60];
    for (int i = 0; i < 60; i++) x[i] = 30.0f;
    k_softcap(k, x, 3, 13, 20, 15.0f);
    for (int i = 0; i < 60; i++) assert_true(i % 20 < 13 ? x[i] < 15.0f : x[i] == 30.0f);
    k_close(k);
}

/* ---- k_embed. */

static void embeddings_are_normed_and_smeared(void **state) {
    (void)state;
    enum { ROWS = 11, DIM = 150, CHANNELS = 23, N = 4 };
    static const int32_t ids[N] = {3, 10, 0, 3}, prev[N] = {-1, 3, 10, 9}, pos[N] = {0, 1, 2, 70};
    k_batch b = {.n = N, .ids = ids, .prev = prev, .pos = pos};
    for (int p = 0; p < 2; p++) {
        float *table = rounded_floats(ROWS * DIM, 11, profiles[p]),
              *gate = rounded_floats(CHANNELS, 12, profiles[p]);
        float *first = NULL;
        for (int i = 0; i < N_VARIANTS; i++) {
            k_ctx *k = open_isa(variants[i].isa, profiles[p], variants[i].threads);
            if (!k) continue;
            k_table *wte;
            k_matrix *m;
            assert_int_equal(k_table_open(k, &wte, ROWS, DIM, NULL), COP_OK);
            assert_int_equal(k_matrix_open(k, &m, 1, CHANNELS, NULL), COP_OK);
            k_table_pack(k, wte, 0, ROWS, table);
            k_matrix_pack(k, m, 0, 1, gate);
            float x[N * DIM], plain[N * DIM];
            k_embed(k, plain, wte, &b, DIM, 1e-6f, NULL, 0, 0.0f);
            k_embed(k, x, wte, &b, DIM, 1e-6f, m, CHANNELS, 0.7f);
            for (int t = 0; t < N; t++) {
                const float *e = table + ids[t] * DIM, *before = prev[t] < 0 ? NULL : table + prev[t] * DIM;
                double dot = 0, r = rms_of(e, DIM, 1e-6);
                for (int c = 0; c < CHANNELS; c++)
                    dot += (double)gate[c] * rounded((float)(e[c] / r), profiles[p]);
                double g = before ? 0.7 / (1 + exp(-dot)) : 0;
                for (int d = 0; d < DIM; d++) {
                    double want = e[d] / r + (before ? g * before[d] / rms_of(before, DIM, 1e-6) : 0);
                    check_near(plain[t * DIM + d], e[d] / r, 2e-6, "embedding", (size_t)d);
                    check_near(x[t * DIM + d], want, profiles[p] == PRECISION_BF16 ? 2e-3 : 5e-6, "smear",
                               (size_t)d);
                }
            }
            same_as_first(&first, x, N * DIM, "embed");
            k_matrix_close(k, m);
            k_table_close(k, wte);
            k_close(k);
        }
        mem_free(table), mem_free(gate), mem_free(first);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gemm_follows_rule_1),
        cmocka_unit_test(gemm_blocks_of_all_shapes),
        cmocka_unit_test(gemm_rows_do_not_depend_on_the_batch),
        cmocka_unit_test(gemm_keeps_a_nan),
        cmocka_unit_test(norms_match_the_reference),
        cmocka_unit_test(elements_match_the_reference),
        cmocka_unit_test(softcap_leaves_the_padding),
        cmocka_unit_test(embeddings_are_normed_and_smeared),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
