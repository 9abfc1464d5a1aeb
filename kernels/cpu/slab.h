/* Slabs: where packed weights lie, so that matrices of a megabyte share huge pages.
 *
 *   slab, 32 MiB at a multiple of 2 MiB   | header | matrix | matrix | table | ... not yet touched |
 *
 * A block is cut from the slab in use, or from a new one where it does not fit; a large block is one of its
 * own, without a slab.  A slab goes when its last block does: the weights of a set are closed together.  The
 * thread that owns the k_ctx only. */
#ifndef COP_SLAB_H
#define COP_SLAB_H

#include "kernels/base.h"

typedef struct slab slab;

/* `bytes` bytes, 64-byte aligned, holding anything, from *current (NULL: none yet), which moves on to a new
 * slab when it is full.  *owner: what slab_drop() is told.  NULL without memory. */
void *slab_take(slab **current, size_t bytes, slab **owner);

/* Give a block back; NULL does nothing. */
void slab_drop(slab **current, slab *owner, void *block);

#endif
