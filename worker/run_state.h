/* What the threads of `coppice generate` share besides queues: whether the run goes on, and why not.  Any
 * thread. */
#ifndef COP_RUN_STATE_H
#define COP_RUN_STATE_H

#include <pthread.h>
#include <stdatomic.h>

#include "kernels/base.h"

typedef struct run_state {
    pthread_mutex_t lock;
    cop_error error; /* why it stopped; COP_OK: it was interrupted, or it goes on */
    atomic_bool stopped;
    atomic_size_t n_samples, n_tokens; /* generated so far, for the progress */
    atomic_size_t read_bytes;          /* of lines that were read and are not finished yet */
    atomic_size_t held_bytes;          /* of samples that are finished and not written yet */
} run_state;

void run_state_init(run_state *r);
void run_state_free(run_state *r);

/* Stop the run: with an error, or without one where it was interrupted (NULL).  The first call is the reason:
 * what fails because the run was stopped is none. */
void run_stop(run_state *r, const cop_error *err);
static inline bool run_stopped(run_state *r) { return atomic_load(&r->stopped); }

#endif
