/* Where a step is, for whoever watches from another thread whether it comes back.
 *
 * The engine's thread writes, any thread reads.  The fields are written one by one: a reader may catch two of
 * them from different moments, which does no harm where it asks about a step that stands still. */
#ifndef COP_WHERE_H
#define COP_WHERE_H

#include <stdatomic.h>
#include <stdint.h>

/* Zeroed: between steps. */
typedef struct where {
    _Atomic(const char *) operation; /* a string literal; NULL: between steps */
    atomic_int layer;                /* from 0; -1: of no layer */
    atomic_int n_rows, n_tokens;     /* in the batch; 0 before it is collected */
    _Atomic(uint64_t) step;          /* from 1 */
} where;

/* One store that nobody waits for, so that every operation of a pass can afford it. */
static inline void where_is(where *w, const char *operation, int layer) {
    atomic_store_explicit(&w->layer, layer, memory_order_relaxed);
    atomic_store_explicit(&w->operation, operation, memory_order_relaxed);
}

static inline void where_batch(where *w, int n_rows, int n_tokens) {
    atomic_store_explicit(&w->n_rows, n_rows, memory_order_relaxed);
    atomic_store_explicit(&w->n_tokens, n_tokens, memory_order_relaxed);
}

static inline void where_begin(where *w) {
    where_batch(w, 0, 0);
    atomic_fetch_add_explicit(&w->step, 1, memory_order_relaxed);
    where_is(w, "admission", -1);
}

static inline void where_end(where *w) { atomic_store_explicit(&w->operation, NULL, memory_order_relaxed); }

#endif
