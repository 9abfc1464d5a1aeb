/* The fused operations that a forward pass and a sampler are made of (NUMERICS 1.7 fixes every bit of them).
 *
 * A k_ctx is one backend: its threads, instruction set and precision profile.  Operations are enqueued in call order
 * and may return before they are done; k_sync() waits and tells the first failure.  Pointers to activations, pages and
 * tables are backend memory from k_alloc(): only operations, k_write() and k_read() touch them.  (On the CPU that is
 * ordinary memory and operations are done when they return.)  All activations are fp32; in the bf16 profile those that
 * feed a matrix hold values that are already rounded to bf16.  One thread (the engine's) uses a k_ctx, but for
 * opening, packing and closing weights.
 *
 * Every value of an output row is a function of that row's inputs alone: not of n, of the other rows, of the number of
 * threads or of the instruction set.
 *
 * Operands are [rows, columns], row-major, dense unless a stride is named.  Counts may be 0 (nothing happens). */
#ifndef COP_BACKEND_H
#define COP_BACKEND_H

#include "kernels/base.h"

#define KV_PAGE_TOKENS 64 /* positions in a page; also the chunk of attention */
#define K_SPLIT_TOKENS 256 /* positions in a split of attention */
#define K_MAX_HEAD_DIM 512 /* engine_open checks it; head_dim is even */

typedef enum precision { PRECISION_BF16, PRECISION_F32 } precision;

typedef struct k_ctx k_ctx;

/* Start a backend on the CPU.
 *   n_threads  1.. ; the thread that uses the k_ctx counts as one of them, number 0
 *   pin        bind thread i to the i-th core of the calling thread's affinity mask; number 0 when k_bind() is called
 * Errors: COP_EINVAL (COPPICE_ISA, fewer cores than pinned threads), COP_ENOMEM, COP_EIO (no thread could be started
 * or bound). */
cop_status k_open(k_ctx **out, precision profile, int n_threads, bool pin, cop_error *err);
/* The calling thread is the one that uses `k` from now on: if `pin` was given, bind it to its core, where it stays.
 * Threads that it starts afterwards share that core.  A failure is told by k_sync. */
void k_bind(k_ctx *k);
void k_close(k_ctx *k);
precision k_precision(const k_ctx *k);
cpu_isa k_isa(const k_ctx *k);
int k_threads(const k_ctx *k);

/* Wait for everything enqueued; the first failure since the last call, or COP_OK. */
cop_status k_sync(k_ctx *k, cop_error *err);

/* The most that this machine does, by all threads of the backend and with its instruction set: what a step is measured
 * against.  Takes a fraction of a second and, for that time, a buffer much larger than the caches (at least 256 MB).
 * Errors: COP_ENOMEM. */
typedef struct k_peaks {
    double bandwidth; /* bytes read from memory in a second */
    double flops;     /* of the profile's multiply-adds in a second, each counted as 2 */
} k_peaks;
cop_status k_measure(k_ctx *k, k_peaks *out, cop_error *err);

/* Backend memory, 64-byte aligned, untouched; what is large lies on huge pages where the system gives them.  NULL if
 * there is none.  k_free(NULL) does nothing. */
void *k_alloc(k_ctx *k, size_t n, size_t size);
void k_free(k_ctx *k, void *p);
void k_write(k_ctx *k, void *to, const void *from, size_t n_bytes); /* host to backend, enqueued, `from` copied at once */
void k_read(k_ctx *k, void *to, const void *from, size_t n_bytes);  /* backend to host; waits */

/* ---- Weights.  They may be opened, packed and closed on another thread while the engine's steps, if the rows of a
 * matrix are then no longer than those of one that was opened before: a set like the one in use.  A closed set gives its
 * memory back at once, but for a bounded rest that it shares with sets opened next to it. */

/* A matrix [n_out, n_in], packed for k_gemm, in the profile's dtype (rounded to bf16, or fp32). */
typedef struct k_matrix k_matrix;
cop_status k_matrix_open(k_ctx *k, k_matrix **out, int n_out, int n_in, cop_error *err); /* its rows hold anything */
/* Pack rows [first, first + n) from fp32 [n, n_in] in host memory.  Borrows `rows` for the call.  Any thread; several
 * may pack at once if no two of them share a group of K_PACK_ROWS rows (in a table: a row). */
#define K_PACK_ROWS 16
void k_matrix_pack(k_ctx *k, k_matrix *m, int first, int n, const float *rows);
void k_matrix_close(k_ctx *k, k_matrix *m);
size_t k_matrix_bytes(const k_matrix *m);

/* A table of embedding rows [n_rows, dim] in the profile's dtype; they hold anything until they are packed. */
typedef struct k_table k_table;
cop_status k_table_open(k_ctx *k, k_table **out, int n_rows, int dim, cop_error *err);
void k_table_pack(k_ctx *k, k_table *t, int first, int n, const float *rows);
void k_table_close(k_ctx *k, k_table *t);
size_t k_table_bytes(const k_table *t);

/* The rotary table for positions [0, n_pos): sines and cosines as rule 4 says, rounded to bf16 if `bf16`. */
typedef struct k_rope k_rope;
cop_status k_rope_open(k_ctx *k, k_rope **out, int n_pos, int head_dim, double base, bool bf16, cop_error *err);
void k_rope_close(k_ctx *k, k_rope *r);

/* ---- A step: a ragged batch of spans of tokens. */
typedef struct k_batch {
    int n;                /* tokens */
    const int32_t *ids;   /* [n] */
    const int32_t *prev;  /* [n] the id before it in its sequence, -1 at position 0 */
    const int32_t *pos;   /* [n] absolute position */
    const int32_t *table; /* [n] which page table */
    const int32_t *pages; /* [n_tables, page_stride] page numbers, in order of position */
    int page_stride;
} k_batch;

/* The KV cache: pages of KV_PAGE_TOKENS positions for all layers, in one arena. */
typedef struct k_kv {
    void *arena;
    int n_layers, n_kv_heads, head_dim;
} k_kv;
/* Bytes of one page in the profile's dtype: 2 x layers x kv heads x head_dim x 64 elements. */
size_t k_page_bytes(const k_ctx *k, int n_layers, int n_kv_heads, int head_dim);
/* Copy the first n_tokens positions of page `from` to page `to`. */
void k_page_copy(k_ctx *k, const k_kv *kv, int to, int from, int n_tokens);

/* x[t] = rms(e), e = wte[ids[t]]; with smear (channels > 0) and pos > 0:
 *   x[t] = e_t + (lambda * sigmoid(gate . round(e_t[0:channels]))) * e_prev, e being the normed, unsmeared embeddings.
 *   x        [n, dim]
 *   gate     [1, channels] packed, or NULL */
void k_embed(k_ctx *k, float *x, const k_table *wte, const k_batch *b, int dim, float eps, const k_matrix *gate,
             int channels, float lambda);

/* x = resid * x + x0_lambda * x0 (three roundings; skipped when x0 is NULL), then h = round(rms(x)).
 *   x, x0, h  [n, dim]; x is updated in place */
void k_mix_norm(k_ctx *k, float *h, float *x, const float *x0, float resid, float x0_lambda, int n, int dim, float eps);

/* h[i] = round(rms(x[index[i]])): the final norm, of the tokens whose logits are needed.  index: host memory. */
void k_gather_norm(k_ctx *k, float *h, const float *x, const int32_t *index, int n, int dim, float eps);

/* y = W x per row.  What is done with the sum:
 *   K_STORE   y = sum
 *   K_ADD     y = y + sum                         (the residual stream)
 *   K_RELU2   y = round(relu(sum)^2)              (the MLP's hidden layer)
 *   x  [n, n_in] with row stride x_stride >= n_in;  y  [n, n_out], may not alias x */
typedef enum k_epilogue { K_STORE, K_ADD, K_RELU2 } k_epilogue;
void k_gemm(k_ctx *k, float *y, const k_matrix *w, const float *x, int x_stride, int n, k_epilogue epilogue);

/* Products that do not need each other's results, all of n rows: as k_gemm() of each, but waited for once. */
typedef struct k_product {
    float *y;
    const k_matrix *w;
    const float *x;
    int x_stride;
    k_epilogue epilogue;
} k_product;
void k_gemms(k_ctx *k, const k_product *products, int n_products, int n);

/* Between the projections and attention: q = rms_head(rope(q)) * qk_scale in place; k likewise, rounded, into its page;
 * v = v + (factor * sigmoid(gate)) * ve[id] where `ve` is given, rounded, into its page.
 *   q     [n, n_heads * head_dim];  k, v  [n, n_kv_heads * head_dim], used as scratch
 *   gate  [n, n_kv_heads] raw gate sums, NULL without value embedding;  ve: table of n_kv_heads * head_dim
 *   qk_scale 1: no multiplication */
typedef struct k_qkv {
    float *q, *k, *v;
    const float *gate;
    const k_table *ve;
    float gate_factor, qk_scale, eps;
    int n_heads;
    int layer;
} k_qkv;
void k_qkv_store(k_ctx *k, const k_qkv *a, const k_rope *rope, const k_batch *b, const k_kv *kv);

/* out[t, head] = round(attention of q[t, head] over positions max(0, pos - window) .. pos of its page table), rule 5.
 * Tokens next to each other in the batch that share pages (a span, the rows of a prompt) read them once.
 *   q, out  [n, n_heads * head_dim], out may be q;  window >= 0 */
void k_attention(k_ctx *k, float *out, const float *q, const k_batch *b, const k_kv *kv, int n_heads, int layer,
                 int32_t window);

/* x = x - scale * y, two roundings.  n elements. */
void k_sub_scaled(k_ctx *k, float *x, const float *y, float scale, size_t n);
void k_copy(k_ctx *k, float *to, const float *from, size_t n);

/* logits = cap * tanh(logits / cap) on the first n_cols of each row of `stride`. */
void k_softcap(k_ctx *k, float *logits, int n, int n_cols, int stride, float cap);

/* ---- Sampling (PROTOCOL.md "Truncation", "Determinism"; NUMERICS 1.7 rules 7 and 8, and 7). */

/* How one token is drawn.  Host memory. */
typedef struct k_draw {
    int row;           /* of the logits */
    float inv_temp;    /* fp32(1 / temperature); 0: argmax */
    int top_k;         /* 0: off */
    double top_p;      /* >= 1: off */
    double min_p;      /* 0: off */
    uint32_t key[2];   /* low and high half of the seed */
    uint32_t index;    /* in the completion, a prefix included */
    uint32_t sample;
    uint32_t prompt_hash;
    const int32_t *absent; /* [n_absent] ids that cannot be drawn (stop tokens below min_tokens); at least one is left */
    int n_absent;
    int32_t *kept;     /* room for top_k ids, or NULL: not wanted */
    bool want_model;   /* model_logprob, which costs a sum over the vocabulary */
    bool want_entropy; /* entropy, which costs another */
} k_draw;

typedef struct k_drawn {
    int32_t token;         /* -1: the logits hold a NaN or an infinity that leaves no distribution */
    float logprob;         /* of the distribution drawn from */
    float model_logprob;   /* log-softmax of the logits at temperature 1 over the whole vocabulary; 1 if not wanted */
    float entropy;         /* of the distribution drawn from, in nats; 1 if not wanted */
    int n_kept;            /* written to kept, best first; 0 if not wanted */
} k_drawn;

/* Allocate now what sampling from `vocab` logits needs, so that no step does.  Without it the first k_sample or k_score
 * allocates, and a failure is told by k_sync. */
cop_status k_reserve(k_ctx *k, int vocab, cop_error *err);

/* Draw n tokens from logits [.., stride], the first `vocab` columns of each row.  out: host memory; waits. */
void k_sample(k_ctx *k, k_drawn *out, const k_draw *draws, int n, const float *logits, int vocab, int stride);

/* How one position is scored: log-softmax of fp32(z * inv_temp) over the whole vocabulary. */
typedef struct k_target {
    int row;
    int32_t token;       /* -1: none, only the top */
    float inv_temp;
    int top;             /* how many of the best ids to list, best first; at most the vocabulary */
    int32_t *top_ids;    /* [top] */
    float *top_logprobs; /* [top] */
} k_target;
/* logprobs [n] of the targets, 1 where token is -1; NaN, whatever the token, where the logits hold a NaN or an infinity
 * that leaves no distribution: nothing else of that target is written.  False if there is such a target.  Host memory;
 * waits. */
bool k_score(k_ctx *k, float *logprobs, const k_target *targets, int n, const float *logits, int vocab, int stride);

#endif
