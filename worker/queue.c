/* A list under a mutex, and an eventfd that tells when it stops being empty. */
#include "worker/queue.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

struct queue {
    pthread_mutex_t mutex; /* guards head and tail; never held while another lock is taken */
    pthread_cond_t filled;
    queue_item *head, *tail;
    int fd;
};

cop_status queue_open(queue **out, cop_error *err) {
    *out = NULL;
    queue *q = mem_zalloc(1, sizeof *q);
    if (!q) return cop_fail(err, COP_ENOMEM, "could not allocate a queue");
    q->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (q->fd < 0) {
        mem_free(q);
        return cop_fail(err, COP_EIO, "could not make an eventfd: %s", strerror(errno));
    }
    pthread_mutex_init(&q->mutex, NULL);
    pthread_condattr_t monotonic; /* as clock_seconds() */
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&q->filled, &monotonic);
    pthread_condattr_destroy(&monotonic);
    *out = q;
    return COP_OK;
}

void queue_close(queue *q) {
    if (!q) return;
    assert(!q->head);
    pthread_cond_destroy(&q->filled);
    pthread_mutex_destroy(&q->mutex);
    close(q->fd);
    mem_free(q);
}

void queue_put(queue *q, queue_item **item) {
    assert(*item && !(*item)->next);
    pthread_mutex_lock(&q->mutex);
    if (q->tail)
        q->tail->next = *item;
    else
        q->head = *item;
    q->tail = *item;
    *item = NULL;
    pthread_cond_signal(&q->filled);
    pthread_mutex_unlock(&q->mutex);
    uint64_t one = 1;
    ssize_t n = write(q->fd, &one, sizeof one); /* can only fail by being full, and then it is readable */
    (void)n;
}

static queue_item *take_locked(queue *q) {
    queue_item *item = q->head;
    if (!item) return NULL;
    q->head = item->next;
    if (!q->head) q->tail = NULL;
    item->next = NULL;
    return item;
}

queue_item *queue_take(queue *q) {
    pthread_mutex_lock(&q->mutex);
    queue_item *item = take_locked(q);
    if (!item) { /* under the lock, so that a put after this look is announced anew */
        uint64_t count;
        ssize_t n = read(q->fd, &count, sizeof count);
        (void)n;
    }
    pthread_mutex_unlock(&q->mutex);
    return item;
}

queue_item *queue_wait(queue *q) { return queue_wait_until(q, INFINITY); }

queue_item *queue_wait_until(queue *q, double until) {
    struct timespec t = {0};
    bool bounded = until < (double)INT32_MAX; /* seconds since the machine started: beyond is never */
    if (bounded && until > 0) t = (struct timespec){(time_t)until, (long)(fmod(until, 1.0) * 1e9)};
    int e = 0;
    pthread_mutex_lock(&q->mutex);
    while (!q->head && e != ETIMEDOUT)
        e = bounded ? pthread_cond_timedwait(&q->filled, &q->mutex, &t)
                    : pthread_cond_wait(&q->filled, &q->mutex);
    queue_item *item = q->head ? take_locked(q) : NULL;
    pthread_mutex_unlock(&q->mutex);
    return item;
}

int queue_fd(const queue *q) { return q->fd; }
