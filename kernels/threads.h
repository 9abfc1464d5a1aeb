/* A pool of threads that run one function at a time, each on its own part.
 *
 * threads_run() is called by one thread, which takes part as number 0 and returns when all are done.  Between
 * runs the workers spin for a moment (a step is hundreds of short runs) and then sleep.  Every worker flushes
 * denormals. */
#ifndef COP_THREADS_H
#define COP_THREADS_H

#include "kernels/base.h"

typedef struct threads threads;

/* What a thread does: thread `index` of `n`. */
typedef void threads_fn(void *arg, int index, int n);

/* Start n - 1 workers, n >= 1.
 *   cores  [n] worker i is bound to core cores[i]; NULL: none is bound.  Number 0 is the caller's business
 * Errors: COP_ENOMEM, COP_EIO (no thread could be started or bound). */
cop_status threads_open(threads **out, int n, const int *cores, cop_error *err);
void threads_close(threads *t);
int threads_count(const threads *t);

/* fn(arg, index, n) for every index at once.  Everything written before the call is seen by all, everything
 * that they wrote is seen after it.  fn must not call threads_run(). */
void threads_run(threads *t, threads_fn *fn, void *arg);

#endif
