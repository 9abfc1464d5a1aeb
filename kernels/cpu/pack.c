/* Packing rows of weights into tiles, as cpu.h lays them out.
 *
 * A group of 16 rows is a tile on its side.  It is turned in blocks of columns that stay in the first cache:
 * rows are rounded to bf16 one by one and then read across, so that whole cache lines are written. */
#include "kernels/cpu/cpu.h"

#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { BLOCK = 64 }; /* columns, even */

/* out[i][r] = block[r][i] for i < n. */
static void turn(uint32_t (*restrict out)[CPU_TILE], uint32_t (*restrict block)[BLOCK], int n) {
    int i = 0;
#ifdef __SSE2__
    for (; i + 4 <= n; i += 4)
        for (int r = 0; r < CPU_TILE; r += 4) { /* four by four */
            __m128i a = _mm_loadu_si128((const __m128i *)&block[r][i]);
            __m128i b = _mm_loadu_si128((const __m128i *)&block[r + 1][i]);
            __m128i c = _mm_loadu_si128((const __m128i *)&block[r + 2][i]);
            __m128i d = _mm_loadu_si128((const __m128i *)&block[r + 3][i]);
            __m128i ab = _mm_unpacklo_epi32(a, b), cd = _mm_unpacklo_epi32(c, d);
            __m128i ab_high = _mm_unpackhi_epi32(a, b), cd_high = _mm_unpackhi_epi32(c, d);
            _mm_storeu_si128((__m128i *)&out[i][r], _mm_unpacklo_epi64(ab, cd));
            _mm_storeu_si128((__m128i *)&out[i + 1][r], _mm_unpackhi_epi64(ab, cd));
            _mm_storeu_si128((__m128i *)&out[i + 2][r], _mm_unpacklo_epi64(ab_high, cd_high));
            _mm_storeu_si128((__m128i *)&out[i + 3][r], _mm_unpackhi_epi64(ab_high, cd_high));
        }
#endif
    for (; i < n; i++)
        for (int r = 0; r < CPU_TILE; r++) out[i][r] = block[r][i];
}

/* n_rows <= 16 rows into columns [column, column + n_rows) of a tile. */
static void put(uint32_t (*out)[CPU_TILE], int column, int n_rows, uint32_t (*block)[BLOCK], int n) {
    if (n_rows == CPU_TILE) {
        turn(out, block, n);
        return;
    }
    for (int i = 0; i < n; i++)
        for (int r = 0; r < n_rows; r++) out[i][column + r] = block[r][i];
}

static void pack_group(const cpu_ops *ops, const k_matrix *m, int first, int n_rows, const float *rows) {
    size_t tile = (size_t)(first / CPU_TILE) * (size_t)m->pairs;
    int column = first % CPU_TILE;
    uint32_t block[CPU_TILE][BLOCK];
    for (int at = 0; at < m->n_in; at += BLOCK) {
        int n = m->n_in - at < BLOCK ? m->n_in - at : BLOCK, n_even = n + n % 2;
        for (int r = 0; r < n_rows; r++) {
            const float *row = rows + (size_t)r * (size_t)m->n_in + (size_t)at;
            if (m->bf16) { /* a pair is a word whose low half comes first in memory */
                uint16_t *halves = (uint16_t *)block[r];
                ops->narrow(halves, row, n);
                if (n < n_even) halves[n] = 0;
            } else {
                memcpy(block[r], row, (size_t)n * sizeof *row);
                if (n < n_even) block[r][n] = 0;
            }
        }
        size_t pair = tile + (size_t)at / 2;
        uint32_t(*out)[CPU_TILE] = (uint32_t(*)[CPU_TILE])m->data + (m->bf16 ? pair : 2 * pair);
        put(out, column, n_rows, block, m->bf16 ? n_even / 2 : n_even);
    }
}

void cpu_pack(const cpu_ops *ops, k_matrix *m, int first, int n, const float *rows) {
    while (n > 0) {
        int room = CPU_TILE - first % CPU_TILE, n_rows = n < room ? n : room;
        pack_group(ops, m, first, n_rows, rows);
        rows += (size_t)n_rows * (size_t)m->n_in;
        first += n_rows;
        n -= n_rows;
    }
}
