/* The pool of KV pages. */
#include "engine/kv_pool.h"

#include <assert.h>
#include <string.h>

static cop_status init_cache(kv_pool *p, cop_error *err) {
    size_t n = (size_t)p->n_pages + 1;
    p->newer = mem_alloc(n, sizeof *p->newer);
    p->older = mem_alloc(n, sizeof *p->older);
    if (!p->newer || !p->older)
        return cop_fail(err, COP_ENOMEM, "could not allocate the list of %d KV pages", p->n_pages);
    p->newer[p->n_pages] = p->older[p->n_pages] = p->n_pages;
    return prefix_cache_init(&p->cache, p->n_pages, err);
}

cop_status kv_pool_init(kv_pool *p, int n_pages, bool caches, cop_error *err) {
    assert(n_pages > 0);
    *p = (kv_pool){.n_pages = n_pages, .n_free = n_pages, .caches = caches};
    p->free_pages = mem_alloc((size_t)n_pages, sizeof *p->free_pages);
    p->refs = mem_zalloc((size_t)n_pages, sizeof *p->refs);
    cop_status status = COP_OK;
    if (!p->free_pages || !p->refs)
        status = cop_fail(err, COP_ENOMEM, "could not allocate the table of %d KV pages", n_pages);
    if (status == COP_OK && caches) status = init_cache(p, err);
    if (status != COP_OK) {
        kv_pool_free(p);
        return status;
    }
    for (int i = 0; i < n_pages; i++) p->free_pages[i] = n_pages - 1 - i;
    return COP_OK;
}

void kv_pool_free(kv_pool *p) {
    mem_free(p->free_pages);
    mem_free(p->refs);
    mem_free(p->newer);
    mem_free(p->older);
    prefix_cache_free(&p->cache);
    *p = (kv_pool){0};
}

static bool is_known(const kv_pool *p, int32_t page) {
    return p->caches && prefix_cache_serial(&p->cache, page) != 0;
}

/* ---- Idle pages. */

static void idle_add(kv_pool *p, int32_t page) {
    int32_t end = p->n_pages, newest = p->older[end];
    p->older[page] = newest;
    p->newer[page] = end;
    p->newer[newest] = p->older[end] = page;
    p->n_idle++;
}

static void idle_remove(kv_pool *p, int32_t page) {
    p->newer[p->older[page]] = p->newer[page];
    p->older[p->newer[page]] = p->older[page];
    p->n_idle--;
}

/* The page that has been idle for longest, forgotten. */
static int32_t reclaim(kv_pool *p) {
    int32_t page = p->newer[p->n_pages];
    idle_remove(p, page);
    prefix_cache_remove(&p->cache, page);
    return page;
}

/* ---- Owners. */

int32_t kv_pool_take(kv_pool *p) {
    if (kv_pool_available(p) == 0) return NO_PAGE;
    int32_t page = p->n_free > 0 ? p->free_pages[--p->n_free] : reclaim(p);
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
    if (--p->refs[page] > 0) return;
    if (is_known(p, page))
        idle_add(p, page);
    else
        p->free_pages[p->n_free++] = page;
}

/* ---- Finding pages again. */

uint64_t kv_pool_root(kv_pool *p) { return p->caches ? prefix_cache_root(&p->cache) : 0; }

static prefix_key key_of(const kv_pool *p, uint64_t root, int32_t parent, const int32_t ids[KV_PAGE_TOKENS]) {
    prefix_key key = {.parent = root};
    assert(parent == NO_PAGE || is_known(p, parent));
    if (parent != NO_PAGE) key.parent = prefix_cache_serial(&p->cache, parent);
    memcpy(key.ids, ids, sizeof key.ids);
    return key;
}

int32_t kv_pool_find(kv_pool *p, uint64_t root, int32_t parent, const int32_t ids[KV_PAGE_TOKENS]) {
    if (!p->caches) return NO_PAGE;
    prefix_key key = key_of(p, root, parent, ids);
    int32_t page = prefix_cache_find(&p->cache, &key);
    if (page == NO_PAGE) return NO_PAGE;
    if (p->refs[page]++ == 0) idle_remove(p, page);
    return page;
}

int32_t kv_pool_keep(kv_pool *p, int32_t page, uint64_t root, int32_t parent,
                     const int32_t ids[KV_PAGE_TOKENS]) {
    assert(p->refs[page] == 1 && !is_known(p, page));
    if (!p->caches) return page;
    int32_t known = kv_pool_find(p, root, parent, ids);
    if (known != NO_PAGE) {
        kv_pool_drop(p, page);
        return known;
    }
    prefix_key key = key_of(p, root, parent, ids);
    prefix_cache_add(&p->cache, page, &key);
    return page;
}

/* ---- Facts. */

bool kv_pool_may_write(const kv_pool *p, int32_t page) { return p->refs[page] == 1 && !is_known(p, page); }

int kv_pool_shared(const kv_pool *p) {
    int n = 0;
    for (int i = 0; i < p->n_pages; i++) n += p->refs[i] > 1;
    return n;
}
