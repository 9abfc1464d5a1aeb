/* A pool of threads with a static partition.
 *
 *   caller                                worker
 *   fn, arg, pending = n - 1
 *   round++            ---------------->  sees another round (spinning, or woken by `wake`)
 *   fn(arg, 0, n)                         fn(arg, i, n)
 *   waits for pending 0 <---------------  pending--, the last one signals `done` if the caller sleeps
 *
 * Nobody misses a wake-up: who goes to sleep announces it (`sleeping`, `caller_sleeps`) and then looks once
 * more, who changes the state looks for sleepers after the change; both are sequentially consistent, so one
 * of them sees the other. The mutex guards nothing but the two conditions. */
#include "kernels/threads.h"

#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#define SPINS 2000 /* looks before sleeping: some ten microseconds */

struct threads {
    int n, n_started;
    pthread_t *ids; /* [n - 1] */
    threads_fn *fn; /* written before `round` moves, read after */
    void *arg;
    atomic_uint round;
    atomic_int pending;
    atomic_int next_index;
    atomic_int sleeping;
    atomic_bool caller_sleeps;
    atomic_bool stop;
    pthread_mutex_t mutex;
    pthread_cond_t wake, done;
};

static void relax(void) {
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
}

/* Wait until the round is no longer `seen`. */
static unsigned next_round(threads *t, unsigned seen) {
    for (int i = 0; i < SPINS; i++) {
        unsigned now = atomic_load_explicit(&t->round, memory_order_acquire);
        if (now != seen) return now;
        relax();
    }
    pthread_mutex_lock(&t->mutex);
    atomic_fetch_add(&t->sleeping, 1);
    while (atomic_load(&t->round) == seen) pthread_cond_wait(&t->wake, &t->mutex);
    atomic_fetch_sub(&t->sleeping, 1);
    pthread_mutex_unlock(&t->mutex);
    return atomic_load(&t->round);
}

static void *work(void *arg) {
    threads *t = arg;
    cpu_flush_denormals();
    int index = atomic_fetch_add(&t->next_index, 1);
    for (unsigned seen = 0;;) {
        seen = next_round(t, seen);
        if (atomic_load(&t->stop)) return NULL;
        t->fn(t->arg, index, t->n);
        if (atomic_fetch_sub(&t->pending, 1) != 1 || !atomic_load(&t->caller_sleeps)) continue;
        pthread_mutex_lock(&t->mutex);
        pthread_cond_signal(&t->done);
        pthread_mutex_unlock(&t->mutex);
    }
}

static void start_round(threads *t) {
    atomic_fetch_add(&t->round, 1);
    if (atomic_load(&t->sleeping) == 0) return;
    pthread_mutex_lock(&t->mutex);
    pthread_cond_broadcast(&t->wake);
    pthread_mutex_unlock(&t->mutex);
}

cop_status threads_open(threads **out, int n, cop_error *err) {
    assert(out && n >= 1);
    *out = NULL;
    threads *t = mem_zalloc(1, sizeof *t);
    if (!t) return cop_fail(err, COP_ENOMEM, "could not allocate a pool of %d threads", n);
    t->n = n;
    atomic_store(&t->next_index, 1);
    pthread_mutex_init(&t->mutex, NULL);
    pthread_cond_init(&t->wake, NULL);
    pthread_cond_init(&t->done, NULL);
    t->ids = mem_alloc((size_t)n, sizeof *t->ids);
    if (!t->ids) {
        threads_close(t);
        return cop_fail(err, COP_ENOMEM, "could not allocate a pool of %d threads", n);
    }
    for (; t->n_started < n - 1; t->n_started++) {
        int e = pthread_create(&t->ids[t->n_started], NULL, work, t);
        if (!e) continue;
        int started = t->n_started;
        threads_close(t);
        return cop_fail(err, COP_EIO, "could not start thread %d of %d: %s", started + 2, n, strerror(e));
    }
    *out = t;
    return COP_OK;
}

void threads_close(threads *t) {
    if (!t) return;
    atomic_store(&t->stop, true);
    start_round(t);
    for (int i = 0; i < t->n_started; i++) pthread_join(t->ids[i], NULL);
    pthread_cond_destroy(&t->done);
    pthread_cond_destroy(&t->wake);
    pthread_mutex_destroy(&t->mutex);
    mem_free(t->ids);
    mem_free(t);
}

int threads_count(const threads *t) { return t->n; }

void threads_run(threads *t, threads_fn *fn, void *arg) {
    if (t->n > 1) {
        t->fn = fn;
        t->arg = arg;
        atomic_store(&t->pending, t->n - 1);
        start_round(t);
    }
    fn(arg, 0, t->n);
    if (t->n == 1) return;
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&t->pending, memory_order_acquire) == 0) return;
        relax();
    }
    pthread_mutex_lock(&t->mutex);
    atomic_store(&t->caller_sleeps, true);
    while (atomic_load(&t->pending) != 0) pthread_cond_wait(&t->done, &t->mutex);
    atomic_store(&t->caller_sleeps, false);
    pthread_mutex_unlock(&t->mutex);
}
