/* What the files of the CPU backend share: the layouts, and the table of functions that an instruction set
 * fills.
 *
 * The ops take no decisions about threads; kernels/cpu/ops.c cuts the work into rows, tiles or heads and
 * calls them. Every body of an op gives the same bits (NUMERICS 1.7); *_scalar.c is the readable one. */
#ifndef COP_CPU_H
#define COP_CPU_H

#include "kernels/backend.h"
#include "kernels/cpu/slab.h"
#include "kernels/threads.h"

#define CPU_TILE 16        /* outputs in a tile of packed weights */
#define CPU_CHUNK_PAIRS 64 /* rule 1: a chain covers 128 inputs */
#define CPU_PANEL_ROWS 64  /* rows that a gemm works on together */
#define CPU_GANG 64        /* queries of one kv head that walk the pages together, at most */
#define CPU_LANES 16       /* rules 3 and 7: partial sums of a row */
#define CPU_NORM_BLOCK 4096
#define CPU_SOFTMAX_TILE 1024
#define CPU_MAX_BLOCK 32     /* logits whose greatest is noted: draws look only into blocks that matter */
#define CPU_FIXED_ONE 0x1p40 /* the weight 1 in the fixed point of top_p and min_p */

/* Packed weights, zero beyond n_out and, in rows that were packed, beyond n_in:
 *   bf16  uint32 [tiles][pairs][CPU_TILE]      low half = even input, high half = odd input
 *   f32   float  [tiles][pairs][2][CPU_TILE]   even inputs, then odd ones */
struct k_matrix {
    int n_out, n_in;
    int tiles, pairs;
    bool bf16;
    void *data;
    slab *slab; /* that data lies in */
};

/* Embedding rows as they are: uint16 or float [n_rows, dim]. */
struct k_table {
    int n_rows, dim;
    bool bf16;
    void *data;
    slab *slab; /* that data lies in */
};

/* float [n_pos][2][head_dim / 2]: cosines, then sines. */
struct k_rope {
    int n_pos, half;
    float *data;
};

/* A page holds for every layer the keys, transposed so that lanes run over positions, and then the values:
 *   K [n_kv_heads][head_dim][KV_PAGE_TOKENS]    V [n_kv_heads][KV_PAGE_TOKENS][head_dim] */

/* The inputs that a thread has put in the order in which blocks read them, to be met by more weights. */
typedef struct cpu_inputs {
    void *room;     /* for CPU_PANEL_ROWS rows, whole chunks of them */
    const float *x; /* of the first row; NULL: none yet */
    int x_stride, n_in, n_rows;
} cpu_inputs;

typedef struct cpu_gemm {
    float *y;
    const k_matrix *w;
    const float *x;
    int x_stride;
    k_epilogue epilogue;
    cpu_inputs *inputs; /* of this thread */
} cpu_gemm;

typedef struct cpu_attention {
    float *out;
    const float *q;
    const k_batch *b;
    const k_kv *kv;
    size_t page_bytes;
    int n_heads, layer;
    int32_t window;
    bool bf16;
    float scale; /* fp32(1 / sqrt(head_dim)) */
} cpu_attention;

/* The body of k_gemm. */
typedef struct cpu_gemm_body {
    /* Tiles [tile, tile_end) of rows [row, row_end), at most CPU_PANEL_ROWS. */
    void (*run)(const cpu_gemm *g, int tile, int tile_end, int row, int row_end);
    int tiles[3]; /* that one row, two rows, more rows meet at once: with fewer it is slower */
} cpu_gemm_body;

/* The coordinates of a draw's noise. */
typedef struct cpu_noise {
    uint32_t key[2];
    uint32_t index, sample, prompt_hash;
} cpu_noise;

/* The functions of math.h that have vector bodies, for tests. */
typedef enum cpu_function { CPU_EXP, CPU_LOG, CPU_TANH, CPU_SIGMOID, CPU_GUMBEL } cpu_function;

/* The bodies of k_measure: measure.c. */
#define CPU_PROBE_BLOCK 4096 /* what is read is a multiple of it in bytes, and aligned to 64 */
typedef struct cpu_probe {
    /* The sum of n words, read once with the widest loads. */
    uint32_t (*read)(const uint32_t *words, size_t n);
    /* Independent chains of fused multiply-adds in registers, about n_rounds rounds of them; returns the
     * arithmetic operations done (a fused one counts 2).  *sink takes part, so that nothing can be left out.
     */
    double (*burn)(float *sink, int n_rounds);
} cpu_probe;
extern const cpu_probe cpu_probe_scalar;

typedef struct cpu_ops {
    const cpu_gemm_body *gemm;
    /* Queries [first, end) of a kv head, at most CPU_GANG: query i is head kv_head * group + i % group of
     * token i / group, where `group` heads share the kv head.  room: [CPU_GANG][2][K_MAX_HEAD_DIM] of this
     * thread. */
    void (*attention)(const cpu_attention *a, int kv_head, int first, int end, float *room);
    /* 1 / sqrt(mean of squares + eps), rule 3. */
    float (*inverse_rms)(const float *x, int n, float eps);
    /* out = x * scale, rounded to bf16 if `bf16`.  out may be x. */
    void (*scale)(float *out, const float *x, float scale, int n, bool bf16);
    /* x = a * x + b * y, three roundings. */
    void (*mix)(float *x, const float *y, float a, float b, int n);
    /* x = x - scale * y, two roundings. */
    void (*sub_scaled)(float *x, const float *y, float scale, size_t n);
    /* x = x + scale * y, two roundings.  y is bf16 or float. */
    void (*add_scaled)(float *x, const void *y, float scale, int n, bool bf16);
    /* out = x in bf16. */
    void (*narrow)(uint16_t *out, const float *x, int n);
    /* Rotate one head of 2 * half elements in place. */
    void (*rotate)(float *x, const float *cosines, const float *sines, int half);
    /* x = cap * tanh(x / cap). */
    void (*softcap)(float *x, int n, float cap);
    /* The greatest value, n >= 1; false if there is a NaN. */
    bool (*max)(float *max, const float *x, int n);
    /* The greatest of each CPU_MAX_BLOCK values, the last block perhaps shorter; false if there is a NaN. */
    bool (*block_max)(float *max, const float *x, int n);
    /* The sum over i of exp(fp32(x[i] * scale) - max), rule 7. */
    float (*exp_sum)(const float *x, int n, float scale, float max);
    /* The sum over i of e^y * y, y = fp32(x[i] * scale) - max, rule 7: what the entropy takes. */
    float (*entropy_sum)(const float *x, int n, float scale, float max);
    /* The same sum with each term cut to a multiple of 1 / CPU_FIXED_ONE, in that unit.  No term exceeds 1.
     */
    uint64_t (*fixed_sum)(const float *x, int n, float scale, float max);
    /* The i with the greatest fma(x[i], scale, noise of i); the lowest on ties. */
    int32_t (*draw)(const float *x, int n, float scale, const cpu_noise *noise);
    /* Each word, as a float or, for noise, as random bits, becomes the bits of f of it. */
    void (*map)(cpu_function f, uint32_t *words, size_t n);
    const cpu_probe *probe;
} cpu_ops;

extern const cpu_ops cpu_ops_scalar;
const cpu_ops *cpu_ops_avx2(void); /* these: NULL where it was not built */
const cpu_ops *cpu_ops_avx512(void);
const cpu_ops *cpu_ops_avx512bf16(void); /* bf16 weights only */

/* What one thread needs to draw. */
typedef struct cpu_scratch {
    float *masked;           /* [vocab] the logits, -inf where absent or dropped */
    float *blocks;           /* [vocab / CPU_MAX_BLOCK, rounded up] the greatest of each block */
    uint64_t *order, *spare; /* [vocab] candidates as rank << 32 | id */
    float *weights;          /* [vocab] of the candidates */
    void *packed;            /* what cpu_inputs.room points to, for matrices of up to packed_chunks */
    float *attention; /* [CPU_GANG][2][K_MAX_HEAD_DIM] outputs of a gang's queries, untouched until used */
} cpu_scratch;

struct k_ctx {
    precision profile;
    cpu_isa isa;
    const cpu_ops *ops;
    threads *threads;
    int *cores;           /* [threads] that they are bound to, or NULL */
    slab_pool weights;    /* where matrices and tables lie */
    cpu_scratch *scratch; /* [threads] */
    int scratch_vocab, packed_chunks;
    cop_error failure; /* the first since k_sync */
};

/* Run part(job, first, end) over [0, n_items) cut among the threads, or on this one alone where `work` (rough
 * count of arithmetic operations) is too small to be worth waking them. */
typedef void cpu_part(const void *job, int first, int end, int thread);
void cpu_spread(k_ctx *k, cpu_part *part, const void *job, int n_items, double work);

/* The body of k_matrix_pack(). */
void cpu_pack(const cpu_ops *ops, k_matrix *m, int first, int n, const float *rows);

/* The chain of rule 1 for output n, chunk `chunk`; x points to the chunk's inputs. */
float cpu_chain(const k_matrix *w, int n, int chunk, const float *x);

/* Where the keys or values of one kv head lie in a page. */
static inline size_t cpu_page_elements(const k_kv *kv) {
    return (size_t)2 * (size_t)kv->n_layers * (size_t)kv->n_kv_heads * (size_t)kv->head_dim * KV_PAGE_TOKENS;
}
static inline size_t cpu_key_offset(const k_kv *kv, int layer, int kv_head) {
    size_t head = (size_t)kv->head_dim * KV_PAGE_TOKENS;
    return ((size_t)layer * 2 * (size_t)kv->n_kv_heads + (size_t)kv_head) * head;
}
static inline size_t cpu_value_offset(const k_kv *kv, int layer, int kv_head) {
    return cpu_key_offset(kv, layer, kv_head + kv->n_kv_heads);
}

#endif
