/* Packing rows of weights into tiles, as cpu.h lays them out.
 *
 * A group of 16 rows is a tile on its side.  It is turned in blocks of columns that stay in the first cache:
 * rows are rounded to bf16 one by one, which vectorizes, and then read across, so that whole cache lines are
 * written.  Built with -O3. */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/math.h"

#include <string.h>

enum { BLOCK = 64 }; /* columns, even */

void cpu_narrow(uint16_t *to, const float *from, size_t n) {
    for (size_t i = 0; i < n; i++) to[i] = cop_bf16(from[i]);
}

/* out[i][r] = block[r][i]: four by four, which compilers keep in registers. */
static void turn(uint32_t (*restrict out)[CPU_TILE], uint32_t (*restrict block)[BLOCK], int n) {
    for (int i = 0; i < n; i++)
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

static void pack_group(const k_matrix *m, int first, int n_rows, const float *rows) {
    size_t tile = (size_t)(first / CPU_TILE) * (size_t)m->pairs;
    int column = first % CPU_TILE;
    uint32_t block[CPU_TILE][BLOCK];
    for (int at = 0; at < m->n_in; at += BLOCK) {
        int n = m->n_in - at < BLOCK ? m->n_in - at : BLOCK, n_even = n + n % 2;
        for (int r = 0; r < n_rows; r++) {
            const float *row = rows + (size_t)r * (size_t)m->n_in + (size_t)at;
            if (m->bf16) {
                uint16_t narrow[BLOCK];
                cpu_narrow(narrow, row, (size_t)n);
                if (n < n_even) narrow[n] = 0;
                for (int i = 0; i < n_even; i += 2)
                    block[r][i / 2] = (uint32_t)narrow[i] | (uint32_t)narrow[i + 1] << 16;
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

void cpu_pack(k_matrix *m, int first, int n, const float *rows) {
    while (n > 0) {
        int room = CPU_TILE - first % CPU_TILE, n_rows = n < room ? n : room;
        pack_group(m, first, n_rows, rows);
        rows += (size_t)n_rows * (size_t)m->n_in;
        first += n_rows;
        n -= n_rows;
    }
}
