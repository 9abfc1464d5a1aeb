/* How many requests wait, and how fast they leave. */
#include "worker/waiting.h"

#include <assert.h>

#define WEIGHT (1.0 / 16) /* of the newest interval in the mean */

bool waiting_is_full(const waiting *w) { return w->n >= w->most; }

void waiting_enter(waiting *w, double now) {
    assert(!waiting_is_full(w));
    if (w->n++ == 0) w->since = now; /* the time in which nobody waited says nothing about the pace */
}

void waiting_leave(waiting *w, double now) {
    assert(w->n > 0);
    double interval = now - w->since;
    w->mean_sec = w->mean_sec > 0 ? w->mean_sec + WEIGHT * (interval - w->mean_sec) : interval;
    w->since = now;
    w->n--;
}

double waiting_retry_after(const waiting *w, double now) {
    /* If nobody has left for longer than usual, the pace has dropped. */
    double interval = now - w->since > w->mean_sec ? now - w->since : w->mean_sec;
    double seconds = interval * w->n / 2;
    if (seconds < WAITING_LEAST_RETRY) return WAITING_LEAST_RETRY;
    return seconds < WAITING_MOST_RETRY ? seconds : WAITING_MOST_RETRY;
}
