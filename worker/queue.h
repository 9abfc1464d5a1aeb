/* The one object that two threads share: a queue of owned items with a descriptor to poll.
 *
 * Items embed a queue_item as their first member.  put() takes the item (the caller's pointer is NULL after),
 * take() gives it.  Any thread. */
#ifndef COP_QUEUE_H
#define COP_QUEUE_H

#include "kernels/base.h"

typedef struct queue_item {
    struct queue_item *next;
} queue_item;

typedef struct queue queue;

cop_status queue_open(queue **out, cop_error *err);
void queue_close(queue *q); /* must be empty */

void queue_put(queue *q, queue_item **item);
queue_item *queue_take(queue *q); /* the oldest, or NULL; never waits */
queue_item *queue_wait(queue *q); /* the oldest; waits for one */
/* The same, but NULL once clock_seconds() passes `until` (INFINITY: never). */
queue_item *queue_wait_until(queue *q, double until);

/* Readable while the queue may hold items; take() until NULL before polling it again. */
int queue_fd(const queue *q);

#endif
