/* Random weights.
 *
 * Element i of tensor t is a hash of (seed, t, i), so that nothing depends on how many rows are made at a
 * time. Scales keep the residual stream and the logits near unit variance: a matrix has standard deviation 1
 * / sqrt(n_in), tables 1, the few scalars what training starts from. */
#include "engine/weights.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "engine/work.h"

enum { CHUNK_ELEMENTS = 1 << 16 };

typedef struct filler {
    weights *w;
    uint64_t key; /* of the tensor that is filled now: it counts up from a hash of the seed */
    float *rows;  /* [cap] */
    int cap;
    cop_status status;
    cop_error *err;
} filler;

/* Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014: the finalizer of SplitMix64.
 */
static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* Elements [first, first + n) of the tensor, first even: uniform within +-bound.  A hash makes two of them.
 */
static void make_elements(float *to, uint64_t key, size_t first, size_t n, float bound) {
    assert(first % 2 == 0);
    for (size_t i = 0; i < n; i += 2) {
        uint64_t bits = mix(key + (first + i) * 0x9e3779b97f4a7c15u);
        to[i] = ((float)(bits & 0xffffffu) * 0x1p-23f - 1.0f) * bound;
        if (i + 1 < n) to[i + 1] = ((float)(bits >> 40) * 0x1p-23f - 1.0f) * bound;
    }
}

/* Fill whichever of matrix and table is not NULL, row by row in chunks of whole rows. */
static void fill(filler *f, k_matrix *matrix, k_table *table, int n_rows, int n_columns, float deviation) {
    int n_chunk = f->cap / n_columns & ~1; /* even, so that a chunk starts at an even element */
    f->key = mix(f->key + 1);
    for (int first = 0; first < n_rows; first += n_chunk) {
        int n = n_rows - first < n_chunk ? n_rows - first : n_chunk;
        size_t at = (size_t)first * (size_t)n_columns, count = (size_t)n * (size_t)n_columns;
        make_elements(f->rows, f->key, at, count, deviation * sqrtf(3.0f));
        if (matrix)
            k_matrix_pack(f->w->k, matrix, first, n, f->rows);
        else
            k_table_pack(f->w->k, table, first, n, f->rows);
    }
}

static void add_matrix(filler *f, k_matrix **m, int n_out, int n_in) {
    if (f->status == COP_OK) f->status = k_matrix_open(f->w->k, m, n_out, n_in, f->err);
    if (f->status == COP_OK) fill(f, *m, NULL, n_out, n_in, 1.0f / sqrtf((float)n_in));
}

static void add_table(filler *f, k_table **t, int n_rows, int dim) {
    if (f->status == COP_OK) f->status = k_table_open(f->w->k, t, n_rows, dim, f->err);
    if (f->status == COP_OK) fill(f, NULL, *t, n_rows, dim, 1.0f);
}

static void add_layer(filler *f, layer_weights *l, const arch *a, int i) {
    int dim = a->dim, heads = a->n_heads * a->head_dim, kv = a->n_kv_heads * a->head_dim;
    add_matrix(f, &l->q, heads, dim);
    add_matrix(f, &l->k, kv, dim);
    add_matrix(f, &l->v, kv, dim);
    add_matrix(f, &l->attn_out, dim, heads);
    add_matrix(f, &l->fc, a->ff_dim, dim);
    add_matrix(f, &l->mlp_out, dim, a->ff_dim);
    if (a->has_lambdas) l->x0 = 0.1f;
    if (!a->has_value_embed[i]) return;
    add_matrix(f, &l->gate, a->n_kv_heads, a->gate_channels);
    add_table(f, &l->value_embed, a->vocab, kv);
}

static void add_all(filler *f, const arch *a) {
    add_table(f, &f->w->embed, a->vocab, a->dim);
    for (int i = 0; i < a->n_layers; i++) add_layer(f, &f->w->layers[i], a, i);
    add_matrix(f, &f->w->lm_head, a->vocab, a->dim);
    if (a->smear_channels) add_matrix(f, &f->w->smear_gate, 1, a->smear_channels);
    if (a->smear_channels) f->w->smear_lambda = 0.1f;
    if (a->has_backout) f->w->backout = 0.2f;
}

/* A machine that lacks the memory would rather kill the process than refuse it. */
static cop_status check_room(k_ctx *k, const arch *a, cop_error *err) {
    size_t element = k_precision(k) == PRECISION_BF16 ? 2 : 4;
    size_t wanted = (size_t)work_parameters(a) * element, room = mem_available();
    if (wanted <= room) return COP_OK;
    return cop_fail(err, COP_ENOMEM, "could not make random weights of %zu MiB: %zu MiB are free",
                    wanted >> 20, room >> 20);
}

cop_status weights_open_random(weights **out, k_ctx *k, const arch *a, uint64_t seed, cop_error *err) {
    *out = NULL;
    int widest = a->ff_dim > a->dim ? a->ff_dim : a->dim;
    cop_status status = check_room(k, a, err);
    if (status != COP_OK) return status;
    filler f = {.w = weights_new(k, a->n_layers), .key = mix(seed), .err = err};
    f.cap = 2 * widest > CHUNK_ELEMENTS ? 2 * widest : CHUNK_ELEMENTS;
    f.rows = mem_alloc((size_t)f.cap, sizeof *f.rows);
    if (f.w && f.rows)
        add_all(&f, a);
    else
        f.status = cop_fail(err, COP_ENOMEM, "could not allocate memory to make random weights");
    mem_free(f.rows);
    if (f.status != COP_OK) {
        weights_close(f.w);
        return f.status;
    }
    f.w->n_bytes = weights_packed_bytes(f.w);
    snprintf(f.w->digest, sizeof f.w->digest, "random-%016" PRIx64, seed);
    *out = f.w;
    return COP_OK;
}
