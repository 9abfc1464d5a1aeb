/* How many requests wait to be started, and how long it takes until there is room again.
 *
 * Pure bookkeeping over times that the caller gives (seconds on a monotonic clock).  One thread. */
#ifndef COP_WAITING_H
#define COP_WAITING_H

#include <stdbool.h>

#define WAITING_LEAST_RETRY 1.0 /* seconds */
#define WAITING_MOST_RETRY 60.0

typedef struct waiting {
    int n, most; /* now, and at most */
    double
        mean_sec; /* between two that leave while others wait, recent ones counting more; 0: none has left */
    double since; /* when the last one left, or the first one came */
} waiting;

bool waiting_is_full(const waiting *w);

/* One more waits; there must be room. */
void waiting_enter(waiting *w, double now);

/* One that waited has been started, or is over. */
void waiting_leave(waiting *w, double now);

/* Seconds until half of the line has left at the pace of late: those who come back then find room, and there
 * is still work for the engine.  WAITING_LEAST_RETRY..WAITING_MOST_RETRY. */
double waiting_retry_after(const waiting *w, double now);

#endif
