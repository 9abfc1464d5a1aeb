/* BPE with a list of parts and a queue of possible joins.
 *
 *   piece   h    e    l    l    o          parts[] is indexed by where a part starts;
 *   parts   he---+    ll---+    o          next and prev are the starts of its neighbours
 *           0 -> 2         2 -> 4    4
 *
 * A join is named by the start of its left part.  The queue is a binary heap of `rank << 32 | start`, so its
 * least element is the lowest rank and, among equals, the leftmost.  Entries are not removed when a part
 * changes: an entry holds as long as its part still says that joining gives this rank.  Parts only grow, so
 * an outdated entry can never come true again.  Each join adds at most two entries: 3 n in all. */
#include "engine/bpe.h"

#include <assert.h>

#define NO_JOIN (-1)

struct bpe_part {
    uint32_t prev, next; /* starts; next of the last part is n, prev of the first UINT32_MAX */
    int32_t id;
    int32_t
        joined; /* the id of this part and the next one together, or NO_JOIN; also NO_JOIN once swallowed */
};

void bpe_scratch_free(bpe_scratch *s) {
    mem_free(s->parts);
    mem_free(s->queue);
    *s = (bpe_scratch){0};
}

/* ---- The queue: least element first. */

static void queue_put(bpe_scratch *s, int32_t rank, uint32_t start) {
    uint64_t entry = (uint64_t)(uint32_t)rank << 32 | start;
    size_t i = s->n_queue++;
    for (; i > 0 && s->queue[(i - 1) / 2] > entry; i = (i - 1) / 2) s->queue[i] = s->queue[(i - 1) / 2];
    s->queue[i] = entry;
}

static uint64_t queue_take(bpe_scratch *s) {
    uint64_t *q = s->queue, least = q[0], entry = q[--s->n_queue];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < s->n_queue; i = child) {
        if (child + 1 < s->n_queue && q[child + 1] < q[child]) child++;
        if (q[child] >= entry) break;
        q[i] = q[child];
    }
    q[i] = entry;
    return least;
}

/* ---- The parts. */

/* Note what the part at `start` and its right neighbour give together. */
static bool find_join(const vocab *v, bpe_scratch *s, const char *piece, uint32_t n, uint32_t start,
                      cop_error *err) {
    bpe_part *p = &s->parts[start];
    p->joined = NO_JOIN;
    if (p->next == n) return true;
    p->joined = vocab_find(v, piece + start, s->parts[p->next].next - start);
    if (p->joined == NO_JOIN) return true;
    if (!mem_grow((void **)&s->queue, &s->queue_cap, s->n_queue + 1, sizeof *s->queue)) {
        cop_fail(err, COP_ENOMEM, "could not encode a run of %u bytes: out of memory", n);
        return false;
    }
    queue_put(s, p->joined, start);
    return true;
}

/* Join the part at `start` with its right neighbour. */
static bool join(const vocab *v, bpe_scratch *s, const char *piece, uint32_t n, uint32_t start,
                 cop_error *err) {
    bpe_part *left = &s->parts[start], *right = &s->parts[left->next];
    left->id = left->joined;
    left->next = right->next;
    right->joined = NO_JOIN;
    if (left->next < n) s->parts[left->next].prev = start;
    if (!find_join(v, s, piece, n, start, err)) return false;
    return left->prev == UINT32_MAX || find_join(v, s, piece, n, left->prev, err);
}

static bool cut_into_bytes(const vocab *v, bpe_scratch *s, const char *piece, uint32_t n, cop_error *err) {
    s->n_queue = 0;
    for (uint32_t i = 0; i < n; i++) {
        s->parts[i] = (bpe_part){i - 1, i + 1, vocab_find(v, piece + i, 1), NO_JOIN};
        assert(s->parts[i].id >= 0);
    }
    for (uint32_t i = 0; i < n; i++)
        if (!find_join(v, s, piece, n, i, err)) return false;
    return true;
}

cop_status bpe_encode(const vocab *v, bpe_scratch *s, const char *piece, size_t n_bytes, token_list *out,
                      cop_error *err) {
    assert(n_bytes > 0);
    int32_t whole = vocab_find(v, piece, n_bytes);
    if (whole >= 0) return token_list_push(out, whole, err);
    if (n_bytes >= UINT32_MAX || !mem_grow((void **)&s->parts, &s->parts_cap, n_bytes, sizeof *s->parts))
        return cop_fail(err, COP_ENOMEM, "could not encode a run of %zu bytes: out of memory", n_bytes);
    uint32_t n = (uint32_t)n_bytes;
    if (!cut_into_bytes(v, s, piece, n, err)) return COP_ENOMEM;
    while (s->n_queue > 0) {
        uint64_t entry = queue_take(s);
        uint32_t start = (uint32_t)entry;
        if (s->parts[start].joined != (int32_t)(entry >> 32)) continue;
        if (!join(v, s, piece, n, start, err)) return COP_ENOMEM;
    }
    for (uint32_t i = 0; i < n; i = s->parts[i].next)
        COP_TRY(token_list_push(out, s->parts[i].id, err), err, "encoding a run of %u bytes", n);
    return COP_OK;
}
