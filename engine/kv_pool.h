/* The pool of KV pages: reference counts, a free list, and pages that nobody owns but that may be found
 * again.
 *
 *            take                       drop by the last owner
 *   free ------------> owned ------------------------------------> free
 *                       ^  |  keep: it is full, and entered in the prefix cache
 *                       |  v
 *        find      owned, known --- drop by the last owner ---> idle, known
 *         +---------------------------------------------------------+  |
 *                                         take, when none is free: ----+ the one idle for longest
 *
 * Laws, each with a test of its number in tests/unit/test_kv_pool.c:
 *  1. A page is free, owned (by one or more) or idle; used + idle + free = total.
 *  2. A page with more than one owner, or known to the cache, is never written (kv_pool_may_write).
 *  3. take() gives a free page, else the one that has been idle for longest, which is forgotten, else none.
 *  4. When its last owner drops a page, it becomes idle if the cache knows it, else free.
 *  5. Whoever owns a known page owns the page before it too, and drops it later: so of idle pages the last
 *     of a prefix goes first, and what the cache knows can be reached from a first page.
 * The pool knows page numbers and tokens only; the memory behind them is the backend's.  Nothing is allocated
 * after kv_pool_init().  Engine thread only. */
#ifndef COP_KV_POOL_H
#define COP_KV_POOL_H

#include "engine/prefix_cache.h"

typedef struct kv_pool {
    int n_pages, n_free, n_idle;
    int32_t *free_pages;    /* [n_free] used as a stack, so that recently used memory is used again */
    int32_t *refs;          /* [n_pages] owners */
    bool caches;            /* full pages are kept */
    prefix_cache cache;     /* if `caches` */
    int32_t *newer, *older; /* [n_pages + 1] if `caches`: idle pages, a ring by when they became idle, closed
                               by entry n_pages */
} kv_pool;

cop_status kv_pool_init(kv_pool *p, int n_pages, bool caches, cop_error *err);
void kv_pool_free(kv_pool *p);

int32_t kv_pool_take(kv_pool *p);             /* a page with one owner, or NO_PAGE */
void kv_pool_share(kv_pool *p, int32_t page); /* one more owner of a page that has some */
void kv_pool_drop(kv_pool *p, int32_t page);  /* one owner less */

/* Under what the pages of another set of weights are known from now on (prefix_cache.h); at first it is 0. */
uint64_t kv_pool_root(kv_pool *p);

/* The known page that holds these ids after `parent` (a known page, or NO_PAGE: at the start, under `root`),
 * with one more owner; or NO_PAGE. */
int32_t kv_pool_find(kv_pool *p, uint64_t root, int32_t parent, const int32_t ids[KV_PAGE_TOKENS]);
/* Let the cache know a page that is computed in full and has one owner.  The owner goes on with the page
 * returned: if the cache knows one with the same tokens before and in it, that one, which holds the same
 * bits, and `page` is dropped. */
int32_t kv_pool_keep(kv_pool *p, int32_t page, uint64_t root, int32_t parent,
                     const int32_t ids[KV_PAGE_TOKENS]);

static inline int kv_pool_available(const kv_pool *p) { return p->n_free + p->n_idle; } /* to take() */
bool kv_pool_may_write(const kv_pool *p, int32_t page);
int kv_pool_shared(const kv_pool *p); /* pages with more than one owner; looks at all */

#endif
