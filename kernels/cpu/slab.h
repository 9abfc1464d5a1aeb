/* Slabs: where packed weights lie, so that matrices of a megabyte share huge pages.
 *
 *   slab, 32 MiB at a multiple of 2 MiB   | header | matrix | matrix | table | ... not yet touched |
 *
 * A block is cut from the slab in use, or from a new one where it does not fit; a large block is one of its
 * own, without a slab.  A slab goes when its last block does: the weights of a set are closed together.  Two
 * sets share a slab where one ends and the next begins, so that of a closed set no more than two slabs stay,
 * until its neighbours go too.
 *
 * Any thread, several at once: a set is read while another is closed. */
#ifndef COP_SLAB_H
#define COP_SLAB_H

#include <pthread.h>

#include "kernels/base.h"

typedef struct slab slab;

typedef struct slab_pool {
    pthread_mutex_t mutex; /* guards `current` and each slab's counters; no other lock is taken under it */
    slab *current;         /* what blocks are cut from; NULL: none yet */
} slab_pool;

void slab_pool_init(slab_pool *p);
void slab_pool_free(slab_pool *p); /* every block was given back */

/* `bytes` bytes, 64-byte aligned, holding anything.  *owner: what slab_drop() is told.  NULL without memory.
 */
void *slab_take(slab_pool *p, size_t bytes, slab **owner);

/* Give a block back; NULL does nothing. */
void slab_drop(slab_pool *p, slab *owner, void *block);

#endif
