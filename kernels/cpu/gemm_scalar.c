/* y = W x, rule 1: per output a chain of fused multiply-adds over each chunk of 128 inputs, odd input of a
 * pair first, and the chunks added in order to +0. */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/math.h"
#include "kernels/cpu/scalar.h"

#include <string.h>

static float weight(const k_matrix *w, int n, int pair, int odd) {
    size_t at = (size_t)(n / CPU_TILE) * (size_t)w->pairs + (size_t)pair;
    size_t column = (size_t)(n % CPU_TILE);
    if (!w->bf16) return ((const float *)w->data)[(at * 2 + (size_t)odd) * CPU_TILE + column];
    uint32_t two = ((const uint32_t *)w->data)[at * CPU_TILE + column];
    return cop_float(odd ? two & 0xffff0000u : two << 16);
}

float cpu_chain(const k_matrix *w, int n, int chunk, const float *x) {
    int first = chunk * CPU_CHUNK_PAIRS, end = first + CPU_CHUNK_PAIRS;
    if (end > w->pairs) end = w->pairs;
    float sum = 0.0f;
    for (int pair = first; pair < end; pair++, x += 2) {
        float odd = pair * 2 + 1 < w->n_in ? x[1] : 0.0f;
        sum = fmaf(weight(w, n, pair, 1), odd, sum);
        sum = fmaf(weight(w, n, pair, 0), x[0], sum);
    }
    return sum;
}

static void finish(float *y, float sum, k_epilogue epilogue, bool bf16) {
    switch (epilogue) {
    case K_STORE: *y = sum; break;
    case K_ADD: *y = *y + sum; break;
    case K_RELU2: {
        float positive = 0.0f > sum ? 0.0f : sum; /* keeps a NaN */
        float square = positive * positive;
        *y = bf16 ? cop_round_bf16(square) : square;
        break;
    }
    }
}

/* The weights of a pair of inputs for a tile's outputs. */
static void pair_weights(float even[CPU_TILE], float odd[CPU_TILE], const k_matrix *w, int tile, int pair) {
    size_t at = ((size_t)tile * (size_t)w->pairs + (size_t)pair) * CPU_TILE;
    if (w->bf16) {
        const uint32_t *two = (const uint32_t *)w->data + at;
        for (int j = 0; j < CPU_TILE; j++) even[j] = cop_float(two[j] << 16);
        for (int j = 0; j < CPU_TILE; j++) odd[j] = cop_float(two[j] & 0xffff0000u);
    } else {
        memcpy(even, (const float *)w->data + 2 * at, CPU_TILE * sizeof *even);
        memcpy(odd, (const float *)w->data + 2 * at + CPU_TILE, CPU_TILE * sizeof *odd);
    }
}

/* One row by one tile: sixteen chains side by side, in loops that a compiler can vectorise. */
static void row_by_tile(float sums[CPU_TILE], const k_matrix *w, int tile, const float *x) {
    for (int j = 0; j < CPU_TILE; j++) sums[j] = 0.0f;
    for (int first = 0; first < w->pairs; first += CPU_CHUNK_PAIRS) {
        int end = first + CPU_CHUNK_PAIRS < w->pairs ? first + CPU_CHUNK_PAIRS : w->pairs;
        float chains[CPU_TILE] = {0}, even[CPU_TILE], odd[CPU_TILE];
        for (int pair = first; pair < end; pair++) {
            float x_odd = pair * 2 + 1 < w->n_in ? x[pair * 2 + 1] : 0.0f, x_even = x[pair * 2];
            pair_weights(even, odd, w, tile, pair);
            for (int j = 0; j < CPU_TILE; j++) chains[j] = fmaf(odd[j], x_odd, chains[j]);
            for (int j = 0; j < CPU_TILE; j++) chains[j] = fmaf(even[j], x_even, chains[j]);
        }
        for (int j = 0; j < CPU_TILE; j++) sums[j] = sums[j] + chains[j];
    }
}

void cpu_gemm_scalar(const cpu_gemm *g, int tile, int tile_end, int row, int row_end) {
    for (int r = row; r < row_end; r++) {
        const float *x = g->x + (size_t)r * (size_t)g->x_stride;
        float *y = g->y + (size_t)r * (size_t)g->w->n_out;
        for (int t = tile; t < tile_end; t++) {
            float sums[CPU_TILE];
            row_by_tile(sums, g->w, t, x);
            for (int n = t * CPU_TILE; n < (t + 1) * CPU_TILE && n < g->w->n_out; n++)
                finish(&y[n], sums[n % CPU_TILE], g->epilogue, g->w->bf16);
        }
    }
}

const cpu_gemm_body cpu_gemm_body_scalar = {cpu_gemm_scalar, {1, 1, 1}};
