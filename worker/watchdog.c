/* The thread that looks whether steps come back. */
#include "worker/watchdog.h"

#include <math.h>
#include <pthread.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "worker/log.h"

enum {
    LOOKS = 8, /* in the time that a step may take */
    MOST_LOOK_SEC = 1,
    LOG_PATIENCE_SEC = 10 /* for the last line: stderr may be a pipe that nobody reads */
};

struct watchdog {
    const engine *engine;
    double timeout_sec;
    pthread_t thread;
    pthread_mutex_t mutex; /* guards stop */
    pthread_cond_t wake;
    bool stop;
};

/* True after `seconds`, false when it is to stop. */
static bool sleep_for(watchdog *w, double seconds) {
    double until = clock_seconds() + seconds;
    struct timespec t = {(time_t)until, (long)(fmod(until, 1.0) * 1e9)};
    pthread_mutex_lock(&w->mutex);
    while (!w->stop && pthread_cond_timedwait(&w->wake, &w->mutex, &t) == 0) continue;
    bool stop = w->stop;
    pthread_mutex_unlock(&w->mutex);
    return !stop;
}

static void end_process(const watchdog *w, const engine_place *p) {
    alarm(LOG_PATIENCE_SEC);
    log_event(LOG_ERROR, "step_timeout limit_sec=%g step=%llu operation=%s layer=%d rows=%d tokens=%d",
              w->timeout_sec, (unsigned long long)p->step, p->operation, p->layer, p->n_rows, p->n_tokens);
    _exit(WATCHDOG_STATUS);
}

static void *run(void *arg) {
    watchdog *w = arg;
    const double look_sec = fmin(w->timeout_sec / LOOKS, MOST_LOOK_SEC);
    uint64_t step = 0;
    double seen_sec = 0; /* for which `step` has been running, as far as this thread was awake */
    while (sleep_for(w, look_sec)) {
        engine_place p = engine_where(w->engine);
        seen_sec = p.operation && p.step == step ? seen_sec + look_sec : 0;
        step = p.step;
        if (seen_sec >= w->timeout_sec) end_process(w, &p);
    }
    return NULL;
}

cop_status watchdog_open(watchdog **out, const engine *e, double timeout_sec, cop_error *err) {
    *out = NULL;
    watchdog *w = mem_zalloc(1, sizeof *w);
    if (!w) return cop_fail(err, COP_ENOMEM, "could not allocate the watchdog");
    *w = (watchdog){.engine = e, .timeout_sec = timeout_sec};
    pthread_mutex_init(&w->mutex, NULL);
    pthread_condattr_t monotonic; /* as clock_seconds() */
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&w->wake, &monotonic);
    pthread_condattr_destroy(&monotonic);
    int failed = pthread_create(&w->thread, NULL, run, w);
    if (failed) {
        pthread_cond_destroy(&w->wake);
        pthread_mutex_destroy(&w->mutex);
        mem_free(w);
        return cop_fail(err, COP_EIO, "could not start the watchdog: %s", strerror(failed));
    }
    *out = w;
    return COP_OK;
}

void watchdog_close(watchdog *w) {
    if (!w) return;
    pthread_mutex_lock(&w->mutex);
    w->stop = true;
    pthread_cond_signal(&w->wake);
    pthread_mutex_unlock(&w->mutex);
    pthread_join(w->thread, NULL);
    pthread_cond_destroy(&w->wake);
    pthread_mutex_destroy(&w->mutex);
    mem_free(w);
}
