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

#include "kernels/cores.h"

#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#define SPINS 2000 /* looks before sleeping: some ten microseconds */

typedef struct worker {
    threads *pool;
    int index; /* 1 .. n - 1 */
    pthread_t id;
} worker;

struct threads {
    int n, n_started;
    worker *workers; /* [n - 1] */
    threads_fn *fn;  /* written before `round` moves, read after */
    void *arg;
    atomic_uint round;
    atomic_int pending;
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
    const worker *w = arg;
    threads *t = w->pool;
    cpu_flush_denormals();
    for (unsigned seen = 0;;) {
        seen = next_round(t, seen);
        if (atomic_load(&t->stop)) return NULL;
        t->fn(t->arg, w->index, t->n);
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

static cop_status start_worker(threads *t, int index, const int *cores, cop_error *err) {
    worker *w = &t->workers[t->n_started];
    *w = (worker){.pool = t, .index = index};
    int e = pthread_create(&w->id, NULL, work, w);
    if (e) return cop_fail(err, COP_EIO, "could not start thread %d of %d: %s", index + 1, t->n, strerror(e));
    t->n_started++;
    return cores ? cores_pin(w->id, cores[index], err) : COP_OK;
}

cop_status threads_open(threads **out, int n, const int *cores, cop_error *err) {
    assert(out && n >= 1);
    *out = NULL;
    threads *t = mem_zalloc(1, sizeof *t);
    if (!t) return cop_fail(err, COP_ENOMEM, "could not allocate a pool of %d threads", n);
    t->n = n;
    pthread_mutex_init(&t->mutex, NULL);
    pthread_cond_init(&t->wake, NULL);
    pthread_cond_init(&t->done, NULL);
    t->workers = mem_alloc((size_t)n, sizeof *t->workers);
    cop_status status = COP_OK;
    if (!t->workers) status = cop_fail(err, COP_ENOMEM, "could not allocate a pool of %d threads", n);
    for (int i = 1; i < n && status == COP_OK; i++) status = start_worker(t, i, cores, err);
    if (status != COP_OK) {
        threads_close(t);
        return status;
    }
    *out = t;
    return COP_OK;
}

void threads_close(threads *t) {
    if (!t) return;
    atomic_store(&t->stop, true);
    start_round(t);
    for (int i = 0; i < t->n_started; i++) pthread_join(t->workers[i].id, NULL);
    pthread_cond_destroy(&t->done);
    pthread_cond_destroy(&t->wake);
    pthread_mutex_destroy(&t->mutex);
    mem_free(t->workers);
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
