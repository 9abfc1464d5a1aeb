/* Tokens and the pages that hold their K and V. */
#include "engine/sequence.h"

#include <assert.h>

#include "kernels/backend.h"

int sequence_pages_for(int n_tokens) { return (n_tokens + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS; }

cop_status sequence_init(sequence *s, const int32_t *head, int n_head, int cap_tail, cop_error *err) {
    *s = (sequence){.head = head, .n_head = n_head, .n = n_head, .cap_tail = cap_tail};
    s->cap_pages = sequence_pages_for(n_head + cap_tail);
    s->tail = mem_alloc((size_t)cap_tail, sizeof *s->tail);
    s->pages = mem_alloc((size_t)s->cap_pages, sizeof *s->pages);
    if (s->tail && s->pages) return COP_OK;
    mem_free(s->tail);
    mem_free(s->pages);
    *s = (sequence){0};
    return cop_fail(err, COP_ENOMEM, "could not allocate a sequence of %d tokens", n_head + cap_tail);
}

void sequence_free(sequence *s, kv_pool *pool) {
    sequence_release(s, pool);
    mem_free(s->tail);
    mem_free(s->pages);
    *s = (sequence){0};
}

int32_t sequence_token(const sequence *s, int pos) {
    assert(pos >= 0 && pos < s->n);
    return pos < s->n_head ? s->head[pos] : s->tail[pos - s->n_head];
}

void sequence_push(sequence *s, int32_t token) {
    assert(s->n - s->n_head < s->cap_tail);
    s->tail[s->n++ - s->n_head] = token;
}

/* ---- Pages. */

bool sequence_extend(sequence *s, kv_pool *pool, int n_tokens) {
    int want = sequence_pages_for(n_tokens);
    assert(want <= s->cap_pages);
    while (s->n_pages < want) {
        int32_t page = kv_pool_take(pool);
        if (page == NO_PAGE) return false;
        s->pages[s->n_pages++] = page;
    }
    return true;
}

void sequence_release(sequence *s, kv_pool *pool) {
    while (s->n_pages > 0) kv_pool_drop(pool, s->pages[--s->n_pages]);
    s->n_computed = s->n_known = 0;
}

/* ---- Pages that others computed. */

static void page_ids(const sequence *s, int page, int32_t ids[KV_PAGE_TOKENS]) {
    for (int i = 0; i < KV_PAGE_TOKENS; i++) ids[i] = sequence_token(s, page * KV_PAGE_TOKENS + i);
}

static int32_t page_before(const sequence *s, int page) { return page > 0 ? s->pages[page - 1] : NO_PAGE; }

void sequence_restore(sequence *s, kv_pool *pool, uint64_t root, int n_tokens) {
    assert(n_tokens <= s->n);
    if (!pool->caches || s->n_known < s->n_pages) return;
    int32_t ids[KV_PAGE_TOKENS];
    for (int i = s->n_pages; i < n_tokens / KV_PAGE_TOKENS; i++) {
        page_ids(s, i, ids);
        int32_t page = kv_pool_find(pool, root, page_before(s, i), ids);
        if (page == NO_PAGE) break;
        s->pages[s->n_pages++] = page;
    }
    s->n_known = s->n_pages;
    s->n_computed = s->n_pages * KV_PAGE_TOKENS;
}

void sequence_remember(sequence *s, kv_pool *pool, uint64_t root) {
    int32_t ids[KV_PAGE_TOKENS];
    for (; pool->caches && s->n_known < s->n_computed / KV_PAGE_TOKENS; s->n_known++) {
        page_ids(s, s->n_known, ids);
        s->pages[s->n_known] =
            kv_pool_keep(pool, s->pages[s->n_known], root, page_before(s, s->n_known), ids);
    }
}

void sequence_share(sequence *to, const sequence *from, kv_pool *pool) {
    assert(to->n_pages == 0 && sequence_pending(from) == 0 && from->n <= to->n);
    for (; to->n_pages < from->n / KV_PAGE_TOKENS; to->n_pages++) {
        to->pages[to->n_pages] = from->pages[to->n_pages];
        kv_pool_share(pool, to->pages[to->n_pages]);
    }
    to->n_known = from->n_known;
    to->n_computed = to->n_pages * KV_PAGE_TOKENS;
}

void sequence_take_over(sequence *to, sequence *from) {
    assert(to->n_computed == to->n_pages * KV_PAGE_TOKENS && from->n_pages == to->n_pages + 1);
    to->pages[to->n_pages++] = from->pages[--from->n_pages];
    to->n_computed = from->n_computed;
    from->n_computed = from->n_pages * KV_PAGE_TOKENS;
}
