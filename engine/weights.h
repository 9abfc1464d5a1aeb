/* A set of weights, packed for a backend: read once, then immutable, with a digest that names it. */
#ifndef COP_WEIGHTS_H
#define COP_WEIGHTS_H

#include "engine/checkpoint.h"
#include "kernels/backend.h"

typedef struct layer_weights {
    k_matrix *q, *k, *v, *attn_out, *fc, *mlp_out;
    k_matrix *gate; /* of the value embedding; NULL: none */
    k_table *value_embed;
    float resid, x0; /* 1 and 0 where the architecture has no lambdas */
} layer_weights;

typedef struct weights {
    k_ctx *k;
    int n_layers;
    k_table *embed;
    k_matrix *lm_head; /* [vocab, dim]: padded rows are left out */
    k_matrix *smear_gate;
    float smear_lambda, backout;
    layer_weights *layers; /* [n_layers] */
    size_t n_bytes;        /* packed */
    char digest[33];       /* XXH3-128 in hex: PROTOCOL "Weights" */

    /* Of the engine that has them in use (new_weights.c). */
    struct weights *next; /* an older set that something still runs on */
    uint64_t root;        /* under which the prefix cache knows first pages computed with them */
} weights;

/* Weights without any tensor yet, to be filled; resid 1, everything else zero.  NULL without memory. */
weights *weights_new(k_ctx *k, int n_layers);
size_t weights_packed_bytes(const weights *w); /* once every tensor is there */

/* Read and pack every tensor of `c`.  Errors: COP_EIO (the file changed meanwhile), COP_EMODEL (a tensor
 * holds NaN or infinity), COP_ENOMEM; *out is then NULL. */
cop_status weights_open(weights **out, k_ctx *k, checkpoint *c, cop_error *err);
void weights_close(weights *w);

/* Weights of an architecture out of nothing, for measuring speed: small pseudo-random numbers, a function of
 * the seed, with which logits are finite and differ.  The digest is no hash: it is "random-" and the seed in
 * hex. Errors: COP_ENOMEM (told before anything is touched if the machine lacks the memory); *out is then
 * NULL. */
cop_status weights_open_random(weights **out, k_ctx *k, const arch *a, uint64_t seed, cop_error *err);

#endif
