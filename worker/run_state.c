/* Whether the run goes on. */
#include "worker/run_state.h"

void run_state_init(run_state *r) {
    *r = (run_state){.error = {.status = COP_OK}};
    pthread_mutex_init(&r->lock, NULL);
}

void run_state_free(run_state *r) { pthread_mutex_destroy(&r->lock); }

void run_stop(run_state *r, const cop_error *err) {
    pthread_mutex_lock(&r->lock);
    if (err && !run_stopped(r)) r->error = *err;
    atomic_store(&r->stopped, true);
    pthread_mutex_unlock(&r->lock);
}
