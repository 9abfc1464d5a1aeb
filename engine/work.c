/* Counting. */
#include "engine/work.h"

#include <assert.h>

/* Weights of the matrices of layer i. */
static double layer_weights_of(const arch *a, int i) {
    double dim = a->dim, q = (double)a->n_heads * a->head_dim, kv = (double)a->n_kv_heads * a->head_dim;
    double gate = a->has_value_embed[i] ? (double)a->n_kv_heads * a->gate_channels : 0;
    return dim * q + 2 * dim * kv + q * dim + 2 * dim * a->ff_dim + gate;
}

/* Weights of every matrix but lm_head: each token goes through all of them. */
static double token_weights(const arch *a) {
    double n = a->smear_channels;
    for (int i = 0; i < a->n_layers; i++) n += layer_weights_of(a, i);
    return n;
}

static double lm_head_weights(const arch *a) { return (double)a->vocab * a->dim; }

uint64_t work_parameters(const arch *a) {
    double n = token_weights(a) + 2.0 * a->rows * a->dim; /* wte and lm_head as they are stored */
    for (int i = 0; i < a->n_layers; i++)
        if (a->has_value_embed[i]) n += (double)a->rows * a->n_kv_heads * a->head_dim;
    if (a->has_lambdas) n += 2.0 * a->n_layers;
    return (uint64_t)n + (a->smear_channels > 0) + a->has_backout;
}

/* The first position that layer i lets the token at `pos` see. */
static int first_visible(const arch *a, int i, int pos) {
    return pos > a->window[i] ? pos - a->window[i] : 0;
}

/* Scores and their sum of values: two operations each for every element of every head's query. */
static double attention_flops(const arch *a, int i, int pos) {
    return 4.0 * a->n_heads * a->head_dim * (pos + 1 - first_visible(a, i, pos));
}

static size_t kv_bytes_of_layer(const arch *a, size_t element_bytes) {
    return 2 * (size_t)a->n_kv_heads * (size_t)a->head_dim * element_bytes;
}

size_t work_kv_bytes(const arch *a, size_t element_bytes) {
    return (size_t)a->n_layers * kv_bytes_of_layer(a, element_bytes);
}

double work_prefill_flops(const arch *a, int n_tokens) {
    double flops = 2 * (n_tokens * token_weights(a) + lm_head_weights(a));
    for (int i = 0; i < a->n_layers; i++)
        for (int pos = 0; pos < n_tokens; pos++) flops += attention_flops(a, i, pos);
    return flops;
}

work work_of_decode(const arch *a, size_t element_bytes, int n_rows, int pos, int n_shared) {
    assert(n_rows > 0 && n_shared >= 0 && n_shared <= pos);
    double weights = token_weights(a) + lm_head_weights(a);
    work w = {.bytes = (double)element_bytes * weights, .flops = 2 * n_rows * weights};
    for (int i = 0; i < a->n_layers; i++) {
        int first = first_visible(a, i, pos);
        int shared = n_shared > first ? n_shared - first : 0;
        double keys = shared + (double)n_rows * (pos + 1 - first - shared);
        w.bytes += keys * (double)kv_bytes_of_layer(a, element_bytes);
        w.flops += n_rows * attention_flops(a, i, pos);
    }
    return w;
}
