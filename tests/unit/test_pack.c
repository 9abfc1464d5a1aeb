/* Packing rows into tiles: the layout, whatever the rows come in, and from several threads at once. */
#include "kernel_test.h"

#include <malloc.h>

#include "kernels/cpu/math.h"

/* Element (row, column) of a packed matrix as fp32, by the layout of cpu.h; beyond n_out and n_in too. */
static float packed(const k_matrix *m, int row, int column) {
    size_t pair = (size_t)(row / CPU_TILE) * (size_t)m->pairs + (size_t)(column / 2),
           lane = (size_t)(row % CPU_TILE);
    if (!m->bf16) return ((const float *)m->data)[(pair * 2 + (size_t)(column % 2)) * CPU_TILE + lane];
    uint32_t two = ((const uint32_t *)m->data)[pair * CPU_TILE + lane], high = two & 0xffff0000u,
             low = two << 16;
    float x;
    memcpy(&x, column % 2 ? &high : &low, sizeof x);
    return x;
}

static float rounded_to(precision p, float x) {
    if (p == PRECISION_F32) return x;
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    u = (u + 0x7fffu + (u >> 16 & 1)) & 0xffff0000u;
    memcpy(&x, &u, sizeof x);
    return x;
}

static void check_matrix(const k_matrix *m, precision p, const float *w) {
    for (int r = 0; r < m->tiles * CPU_TILE; r++)
        for (int c = 0; c < m->pairs * 2; c++) {
            bool inside = r < m->n_out && c < m->n_in;
            float want = inside ? rounded_to(p, w[(size_t)r * (size_t)m->n_in + (size_t)c]) : 0.0f;
            float got = packed(m, r, c);
            if (r < m->n_out ? memcmp(&got, &want, sizeof got) != 0 : got != 0)
                fail_msg("[%d, %d]: (%d, %d) is %a, not %a", m->n_out, m->n_in, r, c, (double)got,
                         (double)want);
        }
}

static void rows_lie_in_tiles_and_the_rest_is_zero(void **state) {
    (void)state;
    static const int shapes[][2] = {{0, 3},   {3, 0},    {1, 1},  {16, 2},  {17, 129},
                                    {48, 64}, {50, 127}, {6, 12}, {33, 200}};
    static const int steps[] = {1, 5, 16, 24, 1000};
    for (int p = 0; p < 2; p++) {
        precision profile = p ? PRECISION_F32 : PRECISION_BF16;
        k_ctx *k = open_isa("scalar", profile, 1);
        k_matrix *keep; /* the slab */
        assert_int_equal(k_matrix_open(k, &keep, 1, 1, NULL), COP_OK);
        for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
            for (size_t t = 0; t < sizeof steps / sizeof steps[0]; t++) {
                int n_out = shapes[s][0], n_in = shapes[s][1];
                float *w = random_floats((size_t)n_out * (size_t)n_in, s, 1.0f);
                k_matrix *m;
                assert_int_equal(k_matrix_open(k, &m, n_out, n_in, NULL), COP_OK);
                for (int r = 0; r < n_out; r += steps[t])
                    k_matrix_pack(k, m, r, n_out - r < steps[t] ? n_out - r : steps[t],
                                  w + (size_t)r * (size_t)n_in);
                check_matrix(m, profile, w);
                k_matrix_close(k, m);
                mem_free(w);
            }
        k_matrix_close(k, keep);
        k_close(k);
    }
}

typedef struct job {
    k_ctx *k;
    k_matrix *m;
    const float *w;
} job;

static void pack_every_nth_group(void *arg, int index, int n) {
    const job *j = arg;
    for (int r = index * K_PACK_ROWS; r < j->m->n_out; r += n * K_PACK_ROWS) {
        int left = j->m->n_out - r;
        k_matrix_pack(j->k, j->m, r, left < K_PACK_ROWS ? left : K_PACK_ROWS,
                      j->w + (size_t)r * (size_t)j->m->n_in);
    }
}

static void groups_are_packed_by_several_threads(void **state) {
    (void)state;
    threads *pool;
    assert_int_equal(threads_open(&pool, 3, NULL, NULL), COP_OK);
    for (int p = 0; p < 2; p++) {
        precision profile = p ? PRECISION_F32 : PRECISION_BF16;
        job j = {.k = open_isa("scalar", profile, 1)};
        float *w = random_floats(200 * 77, 9, 1.0f);
        j.w = w;
        assert_int_equal(k_matrix_open(j.k, &j.m, 200, 77, NULL), COP_OK);
        threads_run(pool, pack_every_nth_group, &j);
        check_matrix(j.m, profile, w);
        k_matrix_close(j.k, j.m);
        k_close(j.k);
        mem_free(w);
    }
    threads_close(pool);
}

static void rows_are_rounded_as_math_h_says(void **state) {
    (void)state;
    enum { N = 4099 };
    float from[N];
    uint16_t to[N];
    const char *const isas[] = {"scalar", "avx2", "avx512"};
    for (size_t isa = 0; isa < sizeof isas / sizeof isas[0]; isa++) {
        k_ctx *k = open_isa(isas[isa], PRECISION_BF16, 1);
        if (!k) continue;
        for (uint64_t bits = 0; bits < (uint64_t)1 << 32;) { /* NaNs, infinities, ties, all exponents */
            for (int i = 0; i < N; i++, bits += 32749) {
                uint32_t u = (uint32_t)(i % 3 == 0 ? bits & 0xffff8000u : bits);
                memcpy(&from[i], &u, sizeof u);
            }
            k->ops->narrow(to, from, N);
            for (int i = 0; i < N; i++)
                if (to[i] != cop_bf16(from[i]))
                    fail_msg("%s: %a is rounded to %#x, not %#x", isas[isa], from[i], to[i],
                             cop_bf16(from[i]));
        }
        k_close(k);
    }
}

static void tables_keep_rows_as_they_are(void **state) {
    (void)state;
    for (int p = 0; p < 2; p++) {
        precision profile = p ? PRECISION_F32 : PRECISION_BF16;
        k_ctx *k = open_isa("scalar", profile, 1);
        float *rows = random_floats(21 * 13, 4, 1.0f);
        k_table *t;
        assert_int_equal(k_table_open(k, &t, 21, 13, NULL), COP_OK);
        k_table_pack(k, t, 0, 8, rows);
        k_table_pack(k, t, 8, 13, rows + 8 * 13);
        for (int i = 0; i < 21 * 13; i++) {
            float want = rounded_to(profile, rows[i]), got;
            uint32_t wide =
                t->bf16 ? (uint32_t)((const uint16_t *)t->data)[i] << 16 : ((const uint32_t *)t->data)[i];
            memcpy(&got, &wide, sizeof got);
            check_bits(&got, &want, 1, "table");
        }
        k_table_close(k, t);
        k_close(k);
        mem_free(rows);
    }
}

static void the_rotary_table_does_not_depend_on_threads(void **state) {
    (void)state;
    enum { POSITIONS = 777, WIDTH = 64 };
    float *first = NULL;
    for (int n = 1; n <= 5; n += 2) {
        k_ctx *k = open_isa("scalar", PRECISION_F32, n);
        k_rope *r;
        assert_int_equal(k_rope_open(k, &r, POSITIONS, WIDTH, 10000.0, false, NULL), COP_OK);
        if (!first) {
            first = mem_alloc(POSITIONS * WIDTH, sizeof *first);
            memcpy(first, r->data, POSITIONS * WIDTH * sizeof *first);
            check_near(first[5 * WIDTH], cos(5), 1e-7, "cosine", 0);
            check_near(first[5 * WIDTH + WIDTH / 2], sin(5), 1e-7, "sine", 0);
        }
        check_bits(first, r->data, POSITIONS * WIDTH, "rotary table");
        k_rope_close(k, r);
        k_close(k);
    }
    mem_free(first);
}

int main(void) {
    mallopt(M_PERTURB, 0xa5); /* new memory holds something: what is not written shows */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_lie_in_tiles_and_the_rest_is_zero),
        cmocka_unit_test(groups_are_packed_by_several_threads),
        cmocka_unit_test(rows_are_rounded_as_math_h_says),
        cmocka_unit_test(tables_keep_rows_as_they_are),
        cmocka_unit_test(the_rotary_table_does_not_depend_on_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
