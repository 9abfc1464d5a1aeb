/* Which ids a draw keeps (PROTOCOL.md "Truncation"), without a pass over the vocabulary where one over the
 * maxima of its blocks tells enough. */
#ifndef COP_CPU_TRUNCATE_H
#define COP_CPU_TRUNCATE_H

#include "kernels/cpu/cpu.h"

/* A row of logits without NaN, the greatest of which is finite. */
typedef struct cpu_row {
    const float *z;      /* [n] */
    const float *blocks; /* the greatest of each CPU_MAX_BLOCK of them */
    int n;
    float max;
} cpu_row;

/* Bring the `count` best ids of the row into s->order, in order of id.  count <= n. */
void truncate_best(const cpu_row *r, int count, cpu_scratch *s);

static inline bool truncates(const k_draw *d) { return d->top_k > 0 || d->top_p < 1.0 || d->min_p > 0.0; }

/* Bring the ids that the draw keeps into s->order, in order of id, and exp(y - max) of each into s->weights.
 * Returns how many, at least 1.  Uses s->spare. */
int truncate_row(const k_ctx *k, const k_draw *d, const cpu_row *r, cpu_scratch *s);

#endif
