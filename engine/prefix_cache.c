/* The index of full pages: a hash table with chains through the pages' entries. */
#include "engine/prefix_cache.h"

#include <assert.h>
#include <string.h>
#include <xxhash.h>

_Static_assert(sizeof(prefix_key) == 8 + 4 * KV_PAGE_TOKENS, "a key has no padding");

cop_status prefix_cache_init(prefix_cache *c, int n_pages, cop_error *err) {
    assert(n_pages > 0);
    *c = (prefix_cache){0};
    while (c->mask + 1 < (size_t)n_pages) c->mask = 2 * c->mask + 1;
    c->entries = mem_zalloc((size_t)n_pages, sizeof *c->entries);
    c->buckets = mem_zalloc(c->mask + 1, sizeof *c->buckets);
    if (c->entries && c->buckets) return COP_OK;
    prefix_cache_free(c);
    return cop_fail(err, COP_ENOMEM, "could not allocate the prefix cache of %d KV pages", n_pages);
}

void prefix_cache_free(prefix_cache *c) {
    mem_free(c->entries);
    mem_free(c->buckets);
    *c = (prefix_cache){0};
}

static int32_t *bucket_of(const prefix_cache *c, const prefix_key *key) {
    return &c->buckets[XXH3_64bits(key, sizeof *key) & c->mask];
}

int32_t prefix_cache_find(const prefix_cache *c, const prefix_key *key) {
    for (int32_t at = *bucket_of(c, key); at != 0; at = c->entries[at - 1].next) {
        if (!memcmp(&c->entries[at - 1].key, key, sizeof *key)) return at - 1;
    }
    return NO_PAGE;
}

void prefix_cache_add(prefix_cache *c, int32_t page, const prefix_key *key) {
    prefix_entry *e = &c->entries[page];
    int32_t *bucket = bucket_of(c, key);
    assert(e->serial == 0);
    *e = (prefix_entry){.key = *key, .serial = ++c->last_serial, .next = *bucket};
    *bucket = page + 1;
}

void prefix_cache_remove(prefix_cache *c, int32_t page) {
    prefix_entry *e = &c->entries[page];
    int32_t *link = bucket_of(c, &e->key);
    assert(e->serial != 0);
    while (*link != page + 1) link = &c->entries[*link - 1].next;
    *link = e->next;
    e->serial = 0;
}
