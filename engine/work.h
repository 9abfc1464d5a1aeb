/* What computing must cost at least: bytes that have to come from memory and arithmetic operations, counted
 * from the architecture alone.  Bandwidth and arithmetic that a machine has, against these, tell how far a
 * backend is from what is possible.
 *
 * A step has to read every matrix once, however many tokens it computes, lm_head if it needs any logits; and
 * the keys and values that its tokens see, those of a prefix that sequences share once.  Everything else (a
 * row of embeddings per token, norm, activations) is left out as small.  A multiply-add counts as two
 * operations.
 *
 * Pure functions; any thread. */
#ifndef COP_WORK_H
#define COP_WORK_H

#include "engine/arch.h"

typedef struct work {
    double bytes, flops;
} work;

/* Numbers that the model's weights hold, embeddings and scalars included. */
uint64_t work_parameters(const arch *a);

/* Operations to compute n_tokens from nothing, with the logits of the last one. */
double work_prefill_flops(const arch *a, int n_tokens);

/* One step of n_rows sequences, each by its token at position `pos`, with logits for all.
 *   element_bytes  of weights, keys and values in the precision profile
 *   n_shared       positions [0, n_shared) are one prefix of all sequences; at most pos */
work work_of_decode(const arch *a, size_t element_bytes, int n_rows, int pos, int n_shared);

/* Bytes of the keys and values of one position in all layers. */
size_t work_kv_bytes(const arch *a, size_t element_bytes);

#endif
