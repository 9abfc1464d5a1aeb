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
    sequence_truncate(s, pool, 0);
    kv_pool_unreserve(pool, s->n_reserved);
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

void sequence_extend(sequence *s, kv_pool *pool, int n_tokens) {
    int want = sequence_pages_for(n_tokens);
    assert(want <= s->cap_pages && want - s->n_pages <= s->n_reserved);
    while (s->n_pages < want) {
        s->pages[s->n_pages++] = kv_pool_take(pool);
        s->n_reserved--;
    }
}

void sequence_truncate(sequence *s, kv_pool *pool, int first) {
    while (s->n_pages > first) kv_pool_drop(pool, s->pages[--s->n_pages]);
    int held = s->n_pages * KV_PAGE_TOKENS;
    if (s->n_computed > held) s->n_computed = held;
}
