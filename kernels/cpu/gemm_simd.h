/* y = W x over the primitives of simd_*.h: lanes run over outputs, so each lane is the chain of rule 1.
 * Included once per instruction set, with
 *
 *   GEMM_ROWS_F32, GEMM_ROWS_BF16           most rows that a block serves, by the dtype of the weights
 *   GEMM_TILES_1, GEMM_TILES_2, GEMM_TILES  tiles of a block of one, two and more rows
 *   GEMM_PAIRS   defined: bf16 weights meet bf16 inputs as pairs (v_pairs); no fp32 weights then
 *   GEMM_NAME    the body
 *
 * A panel of rows meets a few tiles of weights at a time.  For each chunk of 128 inputs the weights, which
 * stay in the first-level cache, serve all rows, block by block; a block keeps its chains in registers, as
 * many as hide the latency of a multiply-add, and adds them to the rows' totals.  Few rows take more tiles at
 * once, for the same reason. */
#include "kernels/cpu/math_simd.h"
#include "kernels/cpu/scalar.h"
#include "kernels/cpu/simd_ops.h"

#include <assert.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define TILE_PARTS (CPU_TILE / V_LANES)
#define MOST_ROWS 8 /* of any block */
#define AHEAD_BYTES 8192
#define WIDEST 8 /* tiles of any block */
#define PANEL_ROWS CPU_PANEL_ROWS
#define PAIR_BYTES_BF16 (CPU_TILE * (int)sizeof(uint32_t))
#define PAIR_BYTES_F32 (2 * CPU_TILE * (int)sizeof(float))

/* Tiles that a block of that many rows takes at once. */
#define tiles_of(rows) ((rows) == 1 ? GEMM_TILES_1 : (rows) == 2 ? GEMM_TILES_2 : GEMM_TILES)

/* How a block meets weights and inputs. */
typedef enum feed {
    FEED_F32,  /* fp32 weights, fp32 inputs */
    FEED_BF16, /* bf16 weights, fp32 inputs */
    FEED_PAIRS /* bf16 weights, bf16 inputs */
} feed;

/* A block's view of one chunk.  Both operands lie in the order in which they are read. */
typedef struct chunk {
    const char *w;   /* of tile j: at w + j * w_stride */
    const char *x;   /* [pair][row][2], fp32 or bf16 */
    size_t w_stride; /* bytes */
    int n_pairs;
    float *total; /* row r, tile j at total + r * total_stride + j * CPU_TILE */
    size_t total_stride;
    bool first; /* totals start from zero */
} chunk;

#define X_PAIR(feed)                                                                                         \
    ((feed) == FEED_PAIRS ? sizeof(uint32_t) : 2 * sizeof(float)) /* bytes of a pair of inputs */

/* One multiply-add of a pair's odd (half 1) or even inputs. */
INLINE void half_step(vf acc[], const chunk *c, int pair, int half, int n_rows, int n_tiles, feed f) {
    vf w[WIDEST * TILE_PARTS];
#pragma GCC unroll 16
    for (int j = 0; j < n_tiles * TILE_PARTS; j++) {
        const char *tile = c->w + (size_t)(j / TILE_PARTS) * c->w_stride;
        int at = j % TILE_PARTS * V_LANES;
        if (f == FEED_F32) {
            w[j] = v_load((const float *)(tile + (size_t)pair * PAIR_BYTES_F32) + half * CPU_TILE + at);
        } else {
            vi two = vi_load((const uint32_t *)(tile + (size_t)pair * PAIR_BYTES_BF16) + at);
            w[j] = v_of(half ? vi_and(two, vi_set(0xffff0000u)) : vi_left(two, 16));
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < n_rows; r++) {
        vf x = v_broadcast((const float *)c->x + 2 * (pair * n_rows + r) + half);
#pragma GCC unroll 16
        for (int j = 0; j < n_tiles * TILE_PARTS; j++) {
            vf *a = &acc[r * n_tiles * TILE_PARTS + j];
            *a = v_fma(w[j], x, *a);
        }
    }
}

#ifdef GEMM_PAIRS
INLINE void pair_step(vf acc[], const chunk *c, int pair, int n_rows, int n_tiles) {
    vi w[WIDEST];
#pragma GCC unroll 16
    for (int j = 0; j < n_tiles; j++)
        w[j] = vi_load(c->w + (size_t)j * c->w_stride + (size_t)pair * PAIR_BYTES_BF16);
#pragma GCC unroll 16
    for (int r = 0; r < n_rows; r++) {
        vi x = vi_set(((const uint32_t *)c->x)[pair * n_rows + r]);
#pragma GCC unroll 16
        for (int j = 0; j < n_tiles; j++) acc[r * n_tiles + j] = v_pairs(acc[r * n_tiles + j], w[j], x);
    }
}
#endif

/* Ask for what comes next.  Weights follow in memory, chunk after chunk (the processor's own prefetching
 * starts anew at every 4 KiB): one or two rows read them once, so it is enough to stay some KiB ahead; more
 * rows come back to a chunk, and meanwhile the next one arrives. */
INLINE void fetch_ahead(const chunk *c, int pair, int n_rows, int n_tiles, feed f) {
    const int pair_bytes = f == FEED_F32 ? PAIR_BYTES_F32 : PAIR_BYTES_BF16;
    const int ahead = n_rows > 2 ? CPU_CHUNK_PAIRS : AHEAD_BYTES / (n_tiles * pair_bytes);
#pragma GCC unroll 16
    for (int j = 0; j < n_tiles; j++) {
        const char *next = c->w + (size_t)j * c->w_stride + (size_t)((pair + ahead) * pair_bytes);
        __builtin_prefetch(next);
        if (f == FEED_F32) __builtin_prefetch(next + 64);
    }
}

INLINE void block(const chunk *c, int n_rows, int n_tiles, feed f) {
    vf acc[MOST_ROWS * WIDEST * TILE_PARTS];
    const int n = n_tiles * TILE_PARTS;
#pragma GCC unroll 64
    for (int i = 0; i < n_rows * n; i++) acc[i] = v_zero();
#pragma GCC unroll 2
    for (int p = 0; p < c->n_pairs; p++) {
        fetch_ahead(c, p, n_rows, n_tiles, f);
#ifdef GEMM_PAIRS
        if (f == FEED_PAIRS) {
            pair_step(acc, c, p, n_rows, n_tiles);
            continue;
        }
#endif
        half_step(acc, c, p, 1, n_rows, n_tiles, f);
        half_step(acc, c, p, 0, n_rows, n_tiles, f);
    }
#pragma GCC unroll 16
    for (int r = 0; r < n_rows; r++)
#pragma GCC unroll 16
        for (int j = 0; j < n; j++) {
            float *total = c->total + (size_t)r * c->total_stride + j * V_LANES;
            v_store(total, v_add(c->first ? v_zero() : v_load(total), acc[r * n + j]));
        }
}

/* Every shape of block as a function of its own, so that its sums live in registers: `one` tile, or as many
 * as that number of rows takes at once. */
typedef void block_fn(const chunk *c);
#define BLOCK(rows, tiles, name, f)                                                                          \
    static void block_##name##_##rows##_##f(const chunk *c) { block(c, rows, tiles, f); }
#define BLOCKS(f)                                                                                            \
    BLOCK(1, 1, one, f)                                                                                      \
    BLOCK(2, 1, one, f)                                                                                      \
    BLOCK(3, 1, one, f)                                                                                      \
    BLOCK(4, 1, one, f)                                                                                      \
    BLOCK(5, 1, one, f)                                                                                      \
    BLOCK(6, 1, one, f)                                                                                      \
    BLOCK(7, 1, one, f)                                                                                      \
    BLOCK(8, 1, one, f)                                                                                      \
    BLOCK(1, tiles_of(1), many, f) BLOCK(2, tiles_of(2), many, f) BLOCK(3, tiles_of(3), many, f)             \
        BLOCK(4, tiles_of(4), many, f) BLOCK(5, tiles_of(5), many, f) BLOCK(6, tiles_of(6), many, f)         \
            BLOCK(7, tiles_of(7), many, f) BLOCK(8, tiles_of(8), many, f)
#define BLOCK_LIST(name, f)                                                                                  \
    {                                                                                                        \
        NULL, block_##name##_1_##f, block_##name##_2_##f, block_##name##_3_##f, block_##name##_4_##f,        \
            block_##name##_5_##f, block_##name##_6_##f, block_##name##_7_##f, block_##name##_8_##f           \
    }
#ifdef GEMM_PAIRS
BLOCKS(FEED_PAIRS)
static block_fn *const one_tile[][MOST_ROWS + 1] = {[FEED_PAIRS] = BLOCK_LIST(one, FEED_PAIRS)};
static block_fn *const many_tiles[][MOST_ROWS + 1] = {[FEED_PAIRS] = BLOCK_LIST(many, FEED_PAIRS)};
#else
BLOCKS(FEED_F32)
BLOCKS(FEED_BF16)
static block_fn *const one_tile[][MOST_ROWS + 1] = {
    [FEED_F32] = BLOCK_LIST(one, FEED_F32), [FEED_BF16] = BLOCK_LIST(one, FEED_BF16)};
static block_fn *const many_tiles[][MOST_ROWS + 1] = {
    [FEED_F32] = BLOCK_LIST(many, FEED_F32), [FEED_BF16] = BLOCK_LIST(many, FEED_BF16)};
#endif

/* ---- From blocks to panels. */

/* Rows that are worked on together, and the buffers for it. */
typedef struct panel {
    const cpu_gemm *g;
    int row, n_rows;
    const char *x; /* [chunk][group][pair][row][2], fp32 or bf16 */
    int n_groups;  /* blocks that share the rows evenly */
    feed feed;
    float total[PANEL_ROWS * WIDEST * CPU_TILE] __attribute__((aligned(64)));
} panel;

static int first_of_group(const panel *p, int group) { return p->n_rows * group / p->n_groups; }

/* Totals of n_tiles tiles, chunk by chunk. */
static void add_chunks(panel *p, int tile, int n_tiles) {
    const k_matrix *m = p->g->w;
    size_t pair_bytes = (size_t)(m->bf16 ? PAIR_BYTES_BF16 : PAIR_BYTES_F32),
           tile_bytes = (size_t)m->pairs * pair_bytes;
    const char *w = (const char *)m->data + (size_t)tile * tile_bytes;
    block_fn *const *blocks = (n_tiles > 1 ? many_tiles : one_tile)[p->feed];
    for (int first = 0; first < m->pairs; first += CPU_CHUNK_PAIRS) {
        int n = m->pairs - first < CPU_CHUNK_PAIRS ? m->pairs - first : CPU_CHUNK_PAIRS;
        chunk c = {.w = w + (size_t)first * pair_bytes,
                   .w_stride = tile_bytes,
                   .n_pairs = n,
                   .total_stride = (size_t)n_tiles * CPU_TILE,
                   .first = first == 0};
        for (int i = 0; i < p->n_groups; i++) {
            int from = first_of_group(p, i), end = first_of_group(p, i + 1);
            c.x = p->x + ((size_t)first * (size_t)p->n_rows + (size_t)from * (size_t)n) * X_PAIR(p->feed);
            c.total = p->total + (size_t)from * c.total_stride;
            blocks[end - from](&c);
        }
    }
}

static inline vf finish(vf old, vf sum, k_epilogue epilogue, bool bf16) {
    if (epilogue == K_STORE) return sum;
    if (epilogue == K_ADD) return v_add(old, sum);
    vf positive = v_max(v_zero(), sum); /* in this order it keeps a NaN */
    vf square = v_mul(positive, positive);
    return bf16 ? v_round_bf16(square) : square;
}

/* From totals to outputs; those past the matrix are dropped. */
static void store_tiles(const panel *p, int tile, int n_tiles) {
    const cpu_gemm *g = p->g;
    int n_out = g->w->n_out, first = tile * CPU_TILE, n = n_tiles * CPU_TILE;
    if (n > n_out - first) n = n_out - first;
    for (int r = 0; r < p->n_rows; r++) {
        float *y = g->y + (size_t)(p->row + r) * (size_t)n_out + first;
        const float *total = p->total + (size_t)r * (size_t)n_tiles * CPU_TILE;
        int i = 0;
        for (; i + V_LANES <= n; i += V_LANES) {
            vf old = g->epilogue == K_ADD ? v_load(y + i) : v_zero();
            v_store(y + i, finish(old, v_load(total + i), g->epilogue, g->w->bf16));
        }
        if (i == n) continue;
        float edge[V_LANES] = {0};
        memcpy(edge, y + i, (size_t)(n - i) * sizeof *y);
        v_store(edge, finish(v_load(edge), v_load(total + i), g->epilogue, g->w->bf16));
        memcpy(y + i, edge, (size_t)(n - i) * sizeof *y);
    }
}

/* One block's inputs of a chunk, in the order in which it reads them. */
static char *pack_block(char *out, const float *x, size_t x_stride, int n_pairs, int n_rows, feed f) {
    for (int r = 0; r < n_rows; r++) {
        const float *row = x + (size_t)r * x_stride;
        if (f == FEED_PAIRS) {
            uint32_t *pairs = (uint32_t *)out + r;
            for (int i = 0; i < n_pairs; i++)
                pairs[i * n_rows] = cop_bits(row[2 * i]) >> 16 | (cop_bits(row[2 * i + 1]) & 0xffff0000u);
        } else {
            char *pairs = out + (size_t)r * X_PAIR(f);
            for (int i = 0; i < n_pairs; i++)
                memcpy(pairs + (size_t)(i * n_rows) * X_PAIR(f), row + 2 * i, X_PAIR(f));
        }
    }
    return out + (size_t)(n_pairs * n_rows) * X_PAIR(f);
}

/* Put the panel's inputs together, chunk by chunk, block by block, unless the last call did.  (Rows of the
 * step's buffers are often multiples of 4 KiB apart and would drive each other out of the first-level cache.)
 */
static void pack_inputs(panel *p) {
    const cpu_gemm *g = p->g;
    const float *x = g->x + (size_t)p->row * (size_t)g->x_stride;
    if (p->n_rows == 1 && p->feed != FEED_PAIRS) {
        p->x = (const char *)x; /* it already is in order */
        return;
    }
    cpu_inputs *in = g->inputs;
    p->x = in->room;
    if (in->x == x && in->x_stride == g->x_stride && in->n_in == g->w->n_in && in->n_rows == p->n_rows)
        return;
    *in = (cpu_inputs){in->room, x, g->x_stride, g->w->n_in, p->n_rows};
    char *out = in->room;
    for (int first = 0; first < g->w->pairs; first += CPU_CHUNK_PAIRS) {
        int n = g->w->pairs - first < CPU_CHUNK_PAIRS ? g->w->pairs - first : CPU_CHUNK_PAIRS;
        for (int i = 0; i < p->n_groups; i++) {
            int from = first_of_group(p, i), n_rows = first_of_group(p, i + 1) - from;
            const float *rows = x + (size_t)from * (size_t)g->x_stride + 2 * first;
            out = pack_block(out, rows, (size_t)g->x_stride, n, n_rows, p->feed);
        }
    }
}

static void run(const cpu_gemm *g, int tile, int tile_end, int row, int row_end) {
    if (g->w->n_in % 2 || g->w->n_in == 0) { /* no model has that */
        cpu_gemm_scalar(g, tile, tile_end, row, row_end);
        return;
    }
    assert(row_end - row <= PANEL_ROWS);
    panel p; /* its totals are set where they are needed */
    p.g = g;
#ifdef GEMM_PAIRS
    p.feed = FEED_PAIRS;
#else
    p.feed = g->w->bf16 ? FEED_BF16 : FEED_F32;
#endif
    p.row = row;
    p.n_rows = row_end - row;
    int most = p.feed == FEED_F32 ? GEMM_ROWS_F32 : GEMM_ROWS_BF16;
    p.n_groups = (p.n_rows + most - 1) / most;
    pack_inputs(&p);
    int n_tiles = tiles_of((p.n_rows + p.n_groups - 1) / p.n_groups);
    for (int t = tile; t < tile_end; t += n_tiles) {
        if (t + n_tiles > tile_end) n_tiles = 1;
        add_chunks(&p, t, n_tiles);
        store_tiles(&p, t, n_tiles);
    }
}

const cpu_gemm_body GEMM_NAME = {run, {GEMM_TILES_1, GEMM_TILES_2, GEMM_TILES}};
