/* The pool of KV pages. */
#include "engine/kv_pool.h"

#include <assert.h>

cop_status kv_pool_init(kv_pool *p, int n_pages, cop_error *err) {
    assert(n_pages > 0);
    *p = (kv_pool){.n_pages = n_pages, .n_free = n_pages};
    p->free_pages = mem_alloc((size_t)n_pages, sizeof *p->free_pages);
    p->refs = mem_zalloc((size_t)n_pages, sizeof *p->refs);
    if (!p->free_pages || !p->refs) {
        kv_pool_free(p);
        return cop_fail(err, COP_ENOMEM, "could not allocate the table of %d KV pages", n_pages);
    }
    for (int i = 0; i < n_pages; i++) p->free_pages[i] = n_pages - 1 - i;
    return COP_OK;
}

void kv_pool_free(kv_pool *p) {
    mem_free(p->free_pages);
    mem_free(p->refs);
    *p = (kv_pool){0};
}

bool kv_pool_reserve(kv_pool *p, int n) {
    assert(n >= 0);
    if (p->n_free - p->n_reserved < n) return false;
    p->n_reserved += n;
    return true;
}

void kv_pool_unreserve(kv_pool *p, int n) {
    assert(n >= 0 && n <= p->n_reserved);
    p->n_reserved -= n;
}

int32_t kv_pool_take(kv_pool *p) {
    assert(p->n_reserved > 0 && p->n_free > 0);
    p->n_reserved--;
    int32_t page = p->free_pages[--p->n_free];
    assert(p->refs[page] == 0);
    p->refs[page] = 1;
    return page;
}

void kv_pool_share(kv_pool *p, int32_t page) {
    assert(page >= 0 && page < p->n_pages && p->refs[page] > 0);
    p->refs[page]++;
}

void kv_pool_drop(kv_pool *p, int32_t page) {
    assert(page >= 0 && page < p->n_pages && p->refs[page] > 0);
    if (--p->refs[page] == 0) p->free_pages[p->n_free++] = page;
}

int kv_pool_shared(const kv_pool *p) {
    int n = 0;
    for (int i = 0; i < p->n_pages; i++) n += p->refs[i] > 1;
    return n;
}
