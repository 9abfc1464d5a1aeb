/* y = W x, rule 1: per output a chain of fused multiply-adds over each chunk of 128 inputs, odd input of a
 * pair first, and the chunks added in order to +0. */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/math.h"
#include "kernels/cpu/scalar.h"

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

void cpu_gemm_scalar(const cpu_gemm *g, int tile, int tile_end, int row, int row_end) {
    const k_matrix *w = g->w;
    int n_chunks = (w->pairs + CPU_CHUNK_PAIRS - 1) / CPU_CHUNK_PAIRS;
    int end = tile_end * CPU_TILE < w->n_out ? tile_end * CPU_TILE : w->n_out;
    for (int r = row; r < row_end; r++) {
        const float *x = g->x + (size_t)r * (size_t)g->x_stride;
        float *y = g->y + (size_t)r * (size_t)w->n_out;
        for (int n = tile * CPU_TILE; n < end; n++) {
            float sum = 0.0f;
            for (int c = 0; c < n_chunks; c++)
                sum = sum + cpu_chain(w, n, c, x + (size_t)c * 2 * CPU_CHUNK_PAIRS);
            finish(&y[n], sum, g->epilogue, w->bf16);
        }
    }
}
