/* The token table: one block of bytes, one array by id, one hash table of ids. */
#include "engine/vocab.h"

#include <assert.h>
#include <string.h>
#include <xxhash.h>

cop_status vocab_init(vocab *v, int32_t n_tokens, size_t n_bytes, cop_error *err) {
    assert(n_tokens >= 0);
    *v = (vocab){.n_tokens = n_tokens, .heap_size = n_bytes + (size_t)n_tokens}; /* a NUL each */
    size_t n_slots = 16;
    while (n_slots < 2 * (size_t)n_tokens) n_slots *= 2;
    v->slot_mask = n_slots - 1;
    v->tokens = mem_zalloc((size_t)n_tokens, sizeof *v->tokens);
    v->slots = mem_alloc(n_slots, sizeof *v->slots);
    v->heap = mem_alloc(v->heap_size, 1);
    if (!v->tokens || !v->slots || !v->heap) {
        vocab_free(v);
        return cop_fail(err, COP_ENOMEM, "could not hold a vocabulary of %d tokens: out of memory",
                        (int)n_tokens);
    }
    for (size_t i = 0; i < n_slots; i++) v->slots[i] = -1;
    return COP_OK;
}

void vocab_free(vocab *v) {
    mem_free(v->tokens);
    mem_free(v->slots);
    mem_free(v->heap);
    *v = (vocab){0};
}

/* The slot that holds the token with these bytes, or the empty one where it belongs. */
static int32_t *find_slot(const vocab *v, const char *bytes, size_t len) {
    for (size_t i = XXH3_64bits(bytes, len);; i++) {
        int32_t *slot = &v->slots[i & v->slot_mask];
        if (*slot < 0) return slot;
        const vocab_token *t = &v->tokens[*slot];
        if (t->len == len && memcmp(t->bytes, bytes, len) == 0) return slot;
    }
}

cop_status vocab_set(vocab *v, int32_t id, const char *bytes, size_t len, bool ordinary, cop_error *err) {
    assert(id >= 0 && id < v->n_tokens);
    assert(len < v->heap_size - v->heap_used && len < UINT32_MAX);
    if (v->tokens[id].bytes) return cop_fail(err, COP_EFORMAT, "two tokens have the id %d", (int)id);
    if (ordinary) {
        int32_t *slot = find_slot(v, bytes, len);
        if (*slot >= 0)
            return cop_fail(err, COP_EFORMAT, "the tokens %d and %d have the same bytes", (int)*slot,
                            (int)id);
        *slot = id;
        if (len > v->longest) v->longest = len;
    }
    char *copy = v->heap + v->heap_used;
    memcpy(copy, bytes, len);
    copy[len] = '\0';
    v->heap_used += len + 1;
    v->tokens[id] = (vocab_token){copy, (uint32_t)len};
    return COP_OK;
}

int32_t vocab_find(const vocab *v, const char *bytes, size_t len) {
    return len > v->longest ? -1 : *find_slot(v, bytes, len);
}
