/* y = W x with AVX2 and FMA: lanes run over outputs, so each lane is the chain of rule 1.
 *
 * A block of up to 4 rows by one tile of 16 outputs keeps 8 sums in registers, enough to hide the latency of
 * the multiply-add (6 rows would need every register, and the compiler spills).  One or two rows take 4 or 2
 * tiles at once for the same reason.  Rows go in panels that stay in the second-level cache; within a panel a
 * tile of weights serves all rows.
 */
#include "kernels/cpu/avx2.h"

#ifdef __AVX2__
#include "kernels/cpu/math_avx2.h"

#define MAX_ROWS 4
#define MAX_TILES 4
#define PANEL_FLOATS 98304 /* of x */

typedef struct sums {
    __m256 v[MAX_ROWS][2 * MAX_TILES];
} sums;

/* One pair of inputs: the odd one first.  `single`: there is no odd one, zero stands for it. */
static inline __attribute__((always_inline)) void pair_step(sums *acc, const char *w, size_t tile_bytes,
                                                            const float *const x[MAX_ROWS], int at,
                                                            bool single, int n_rows, int n_tiles, bool bf16) {
#pragma GCC unroll 2
    for (int half = 1; half >= 0; half--) {
        __m256 weights[2 * MAX_TILES];
#pragma GCC unroll 8
        for (int j = 0; j < 2 * n_tiles; j++) {
            const char *tile = w + (size_t)(j / 2) * tile_bytes;
            if (bf16) {
                __m256i two = _mm256_load_si256((const __m256i *)(tile + 32 * (j % 2)));
                weights[j] =
                    _mm256_castsi256_ps(half ? _mm256_and_si256(two, _mm256_set1_epi32((int)0xffff0000u))
                                             : _mm256_slli_epi32(two, 16));
            } else {
                weights[j] = _mm256_load_ps((const float *)(tile + 64 * half + 32 * (j % 2)));
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < n_rows; r++) {
            __m256 input = single && half ? _mm256_setzero_ps() : _mm256_broadcast_ss(x[r] + at + half);
#pragma GCC unroll 8
            for (int j = 0; j < 2 * n_tiles; j++) acc->v[r][j] = V_FMA(weights[j], input, acc->v[r][j]);
        }
    }
}

static inline __m256 finish(__m256 old, __m256 sum, k_epilogue epilogue, bool bf16) {
    if (epilogue == K_STORE) return sum;
    if (epilogue == K_ADD) return _mm256_add_ps(old, sum);
    __m256 positive = _mm256_max_ps(_mm256_setzero_ps(), sum); /* in this order it keeps a NaN */
    __m256 square = _mm256_mul_ps(positive, positive);
    return bf16 ? v_round_bf16(square) : square;
}

/* Eight outputs of a row from column n; those past the matrix are dropped. */
static inline void store(const cpu_gemm *g, int row, int n, __m256 sum) {
    int left = g->w->n_out - n;
    float *y = g->y + (size_t)row * (size_t)g->w->n_out + n;
    if (left >= 8) {
        _mm256_storeu_ps(
            y, finish(g->epilogue == K_ADD ? _mm256_loadu_ps(y) : sum, sum, g->epilogue, g->w->bf16));
        return;
    }
    float edge[8] = {0};
    for (int i = 0; i < left; i++) edge[i] = y[i];
    _mm256_storeu_ps(edge, finish(_mm256_loadu_ps(edge), sum, g->epilogue, g->w->bf16));
    for (int i = 0; i < left; i++) y[i] = edge[i];
}

static inline __attribute__((always_inline)) void block(const cpu_gemm *g, int tile, int row, int n_rows,
                                                        int n_tiles, bool bf16) {
    const k_matrix *m = g->w;
    const size_t pair_bytes = bf16 ? 64 : 128;
    const size_t tile_bytes = (size_t)m->pairs * pair_bytes;
    const char *w = (const char *)m->data + (size_t)tile * tile_bytes;
    const float *x[MAX_ROWS];
    sums total;
    for (int r = 0; r < n_rows; r++) {
        x[r] = g->x + (size_t)(row + r) * (size_t)g->x_stride;
        for (int j = 0; j < 2 * n_tiles; j++) total.v[r][j] = _mm256_setzero_ps();
    }
    int whole = m->n_in / 2; /* pairs that have both inputs */
    for (int first = 0; first < m->pairs; first += CPU_CHUNK_PAIRS) {
        int end = first + CPU_CHUNK_PAIRS < whole ? first + CPU_CHUNK_PAIRS : whole;
        sums acc;
#pragma GCC unroll 4
        for (int r = 0; r < n_rows; r++)
#pragma GCC unroll 8
            for (int j = 0; j < 2 * n_tiles; j++) acc.v[r][j] = _mm256_setzero_ps();
        for (int p = first; p < end; p++)
            pair_step(&acc, w + (size_t)p * pair_bytes, tile_bytes, x, 2 * p, false, n_rows, n_tiles, bf16);
        if (whole < m->pairs && whole < first + CPU_CHUNK_PAIRS)
            pair_step(&acc, w + (size_t)whole * pair_bytes, tile_bytes, x, 2 * whole, true, n_rows, n_tiles,
                      bf16);
#pragma GCC unroll 4
        for (int r = 0; r < n_rows; r++)
#pragma GCC unroll 8
            for (int j = 0; j < 2 * n_tiles; j++) total.v[r][j] = _mm256_add_ps(total.v[r][j], acc.v[r][j]);
    }
    for (int r = 0; r < n_rows; r++)
        for (int j = 0; j < 2 * n_tiles; j++)
            if ((tile * 2 + j) * 8 < m->n_out) store(g, row + r, (tile * 2 + j) * 8, total.v[r][j]);
}

/* Every shape of block as a function of its own, so that its sums live in registers. */
#define BLOCK(name, rows, tiles)                                                                             \
    static void name(const cpu_gemm *g, int tile, int row) {                                                 \
        if (g->w->bf16)                                                                                      \
            block(g, tile, row, rows, tiles, true);                                                          \
        else                                                                                                 \
            block(g, tile, row, rows, tiles, false);                                                         \
    }
BLOCK(block_1x1, 1, 1)
BLOCK(block_2x1, 2, 1)
BLOCK(block_3x1, 3, 1)
BLOCK(block_4x1, 4, 1)
BLOCK(block_1x4, 1, 4)
BLOCK(block_2x2, 2, 2)

typedef void block_fn(const cpu_gemm *g, int tile, int row);

static int narrow(const cpu_gemm *g, int tile, int tile_end, int row, int n_tiles, block_fn *fn) {
    for (; tile + n_tiles <= tile_end; tile += n_tiles) fn(g, tile, row);
    return tile;
}

void cpu_gemm_avx2(const cpu_gemm *g, int tile, int tile_end, int row, int row_end) {
    static block_fn *const by_rows[MAX_ROWS + 1] = {NULL, block_1x1, block_2x1, block_3x1, block_4x1};
    if (row_end - row == 1) tile = narrow(g, tile, tile_end, row, 4, block_1x4);
    if (row_end - row == 2) tile = narrow(g, tile, tile_end, row, 2, block_2x2);
    int panel = g->w->n_in ? PANEL_FLOATS / g->w->n_in / MAX_ROWS * MAX_ROWS : MAX_ROWS;
    if (panel < 6 * MAX_ROWS) panel = 6 * MAX_ROWS;
    for (int first = row; first < row_end; first += panel) {
        int end = row_end - first < panel ? row_end : first + panel;
        for (int t = tile; t < tile_end; t++)
            for (int r = first; r < end; r += MAX_ROWS)
                by_rows[end - r < MAX_ROWS ? end - r : MAX_ROWS](g, t, r);
    }
}
#endif
