/* An index of full pages by what they hold, so that later sequences find them again.
 *
 * A page's K and V are a function of its own tokens and of all before them, so its key is
 *
 *   (serial of the entry of the page before it, its own KV_PAGE_TOKENS ids)
 *
 *   root 0 (nothing before) <-- 1: "You are ..." <-- 2: "... helpful" <-- 5: "What is"
 *                                                                     <-- 6: "Who was"
 *   root 7 (other weights)  <-- 8: "You are ..."
 *
 * compared exactly: the hash only finds the bucket.  Each set of weights has a root of its own, so that pages
 * computed with one are never found for another.  Serials are never used again, so what followed a page that
 * was removed can never be found under another page that took its place.
 *
 * It knows keys and page numbers only: who owns a page and when it goes is the pool's matter (kv_pool.h).
 * There is at most one entry per page, and all memory is allocated by prefix_cache_init() (and touched as
 * pages enter).  Engine thread only. */
#ifndef COP_PREFIX_CACHE_H
#define COP_PREFIX_CACHE_H

#include "kernels/backend.h"

enum { NO_PAGE = -1 };

typedef struct prefix_key { /* without padding: it is hashed and compared as bytes */
    uint64_t parent;        /* serial; of the first page of a sequence: its root */
    int32_t ids[KV_PAGE_TOKENS];
} prefix_key;

typedef struct prefix_entry {
    prefix_key key;
    uint64_t serial; /* 0: the page is not in the index */
    int32_t next;    /* 1 + page of the next entry in its bucket; 0: none */
} prefix_entry;

typedef struct prefix_cache {
    prefix_entry *entries; /* [n_pages], by page */
    int32_t *buckets;      /* [mask + 1] 1 + page of the first entry; 0: none */
    size_t mask;
    uint64_t last_serial;
} prefix_cache;

/* For pages 0 to n_pages - 1.  COP_ENOMEM; it is then zeroed. */
cop_status prefix_cache_init(prefix_cache *c, int n_pages, cop_error *err);
void prefix_cache_free(prefix_cache *c);

/* The page with this key, or NO_PAGE. */
int32_t prefix_cache_find(const prefix_cache *c, const prefix_key *key);
/* Enter a page that is not in the index; no other has this key. */
void prefix_cache_add(prefix_cache *c, int32_t page, const prefix_key *key);
void prefix_cache_remove(prefix_cache *c, int32_t page); /* it is in the index */

/* A root that no key has yet. */
static inline uint64_t prefix_cache_root(prefix_cache *c) { return ++c->last_serial; }

/* What a key of the page after this one has as its parent; 0 if it is not in the index. */
static inline uint64_t prefix_cache_serial(const prefix_cache *c, int32_t page) {
    return c->entries[page].serial;
}

#endif
