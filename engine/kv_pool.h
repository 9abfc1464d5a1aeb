/* The pool of KV pages: reference counts, a free list, and reservations.
 *
 * Laws, each with a test of its number in tests/unit/test_kv_pool.c:
 *  1. A page is free, or has one owner or more; used + free = total.
 *  2. A fork shares full pages by one more reference; a page with more than one owner is never written.
 *  3. A reservation promises pages to come; take() draws on one and never fails.  What is reserved cannot be
 * reserved again, but counts as free until it is taken.
 *  4. A page goes back when its last owner drops it.
 * The pool knows page numbers only; the memory behind them is the backend's.  Engine thread only. */
#ifndef COP_KV_POOL_H
#define COP_KV_POOL_H

#include "kernels/base.h"

typedef struct kv_pool {
    int n_pages, n_free, n_reserved;
    int32_t *free_pages; /* [n_free] used as a stack, so that recently used memory is used again */
    int32_t *refs;       /* [n_pages] owners */
} kv_pool;

cop_status kv_pool_init(kv_pool *p, int n_pages, cop_error *err);
void kv_pool_free(kv_pool *p);

bool kv_pool_reserve(kv_pool *p, int n);      /* false: fewer than n pages are free and not promised */
void kv_pool_unreserve(kv_pool *p, int n);    /* give back promises that were not taken */
int32_t kv_pool_take(kv_pool *p);             /* a page with one owner, out of a reservation */
void kv_pool_share(kv_pool *p, int32_t page); /* one more owner */
void kv_pool_drop(kv_pool *p, int32_t page);  /* one owner less */
int kv_pool_shared(const kv_pool *p);         /* pages with more than one owner; looks at all */

#endif
