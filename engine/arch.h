/* What a model is: dimensions and which optional parts are present.  Plain data, made once when a checkpoint
 * is opened (NANOCHAT.md 1.1 to 1.5), checked there, and trusted by everything after. */
#ifndef COP_ARCH_H
#define COP_ARCH_H

#include "kernels/base.h"

#define ARCH_MAX_LAYERS 256
#define ARCH_NO_WINDOW INT32_MAX

typedef struct arch {
    char generation[8]; /* "A".."F"; A with padded rows is still "A" */
    int vocab;          /* ids that exist: logits are cropped to them */
    int rows;           /* stored rows of embeddings and lm_head, >= vocab */
    int dim;
    int n_layers, n_heads, n_kv_heads, head_dim;
    int ff_dim; /* width of the MLP */
    int sequence_len;
    int context;   /* longest sequence: 10 x sequence_len, the rotary table */
    float softcap; /* logits = softcap * tanh(z / softcap) */
    double rope_base;
    bool rope_bf16;                  /* the sine and cosine table is rounded to bf16 */
    float qk_scale;                  /* q and k are multiplied by it after their norm; 1: not at all */
    float eps;                       /* of every RMS norm */
    int32_t window[ARCH_MAX_LAYERS]; /* key j is visible to query i iff 0 <= i - j <= window */
    bool has_lambdas;                /* resid_lambdas and x0_lambdas */
    bool has_value_embed[ARCH_MAX_LAYERS];
    int gate_channels;  /* of the value-embedding gate; 0: none */
    float gate_factor;  /* gate = gate_factor * sigmoid(...) */
    int smear_channels; /* 0: no smear */
    bool has_backout;   /* x -= backout * (output of layer n_layers / 2) at the end */
} arch;

#endif
