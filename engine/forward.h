/* The forward pass: from a ragged batch of tokens to the residual stream, and from there to logits. */
#ifndef COP_FORWARD_H
#define COP_FORWARD_H

#include "engine/weights.h"
#include "engine/where.h"

typedef struct forward forward;

/* Scratch for steps of at most max_tokens tokens and max_logits rows of logits at a time.  `a` is borrowed,
 * and `at`, which is told each operation. */
cop_status forward_open(forward **out, k_ctx *k, const arch *a, where *at, int context, int max_tokens,
                        int max_logits, cop_error *err);
void forward_close(forward *f);

/* Compute the batch under weights of the architecture: its K and V go into the pages, the last layer's output
 * stays in `f` until the next call. */
void forward_run(forward *f, const weights *w, const k_batch *b, const k_kv *kv);

/* Logits (softcapped) of n <= max_logits tokens of the last batch, which ran under `w`: [n, vocab], backend
 * memory, valid until the next call. index  [n] which tokens of the batch; host memory */
float *forward_logits(forward *f, const weights *w, const int32_t *index, int n);

#endif
