/* The queue between two threads. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <poll.h>
#include <pthread.h>

#include "worker/queue.h"

typedef struct number {
    queue_item item;
    int value;
} number;

static queue *open_queue(void) {
    queue *q;
    cop_error err;
    assert_int_equal(queue_open(&q, &err), COP_OK);
    return q;
}

static void put(queue *q, number *n) {
    queue_item *item = &n->item;
    queue_put(q, &item);
    assert_null(item);
}

static bool readable(const queue *q, int timeout_ms) {
    struct pollfd p = {.fd = queue_fd(q), .events = POLLIN};
    return poll(&p, 1, timeout_ms) == 1;
}

static void items_come_out_in_order(void **state) {
    (void)state;
    queue *q = open_queue();
    number items[3] = {{.value = 0}, {.value = 1}, {.value = 2}};
    for (int i = 0; i < 3; i++) put(q, &items[i]);
    for (int i = 0; i < 3; i++) assert_ptr_equal(queue_take(q), &items[i]);
    assert_null(queue_take(q));
    put(q, &items[1]);
    assert_ptr_equal(queue_wait(q), &items[1]);
    queue_close(q);
}

static void the_descriptor_tells_when_there_is_something(void **state) {
    (void)state;
    queue *q = open_queue();
    number items[2] = {{.value = 0}, {.value = 1}};
    assert_false(readable(q, 0));
    put(q, &items[0]);
    put(q, &items[1]);
    assert_true(readable(q, 0));
    while (queue_take(q)) continue;
    assert_false(readable(q, 0));
    put(q, &items[0]);
    assert_true(readable(q, 0));
    queue_take(q);
    queue_close(q);
}

static void waiting_ends_at_the_time_given(void **state) {
    (void)state;
    queue *q = open_queue();
    number item = {.value = 0};
    double start = clock_seconds();
    assert_null(queue_wait_until(q, start - 1.0));
    assert_null(queue_wait_until(q, start + 0.05));
    assert_true(clock_seconds() >= start + 0.05);
    put(q, &item);
    assert_ptr_equal(queue_wait_until(q, start - 1.0), &item); /* what is there is never left */
    queue_close(q);
}

enum { N_ITEMS = 20000 };
static number many[N_ITEMS];

static void *produce(void *q) {
    for (int i = 0; i < N_ITEMS; i++) {
        many[i].value = i;
        queue_item *item = &many[i].item;
        queue_put(q, &item);
    }
    return NULL;
}

/* Half by waiting, half by polling as the service does: nothing is lost, nothing comes out of order. */
static void another_thread_loses_nothing(void **state) {
    (void)state;
    queue *q = open_queue();
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, produce, q), 0);
    for (int i = 0; i < N_ITEMS;) {
        number *n = (number *)(i < N_ITEMS / 2 ? queue_wait(q) : queue_take(q));
        if (!n)
            assert_true(readable(q, 10000));
        else
            assert_int_equal(n->value, i++);
    }
    pthread_join(thread, NULL);
    queue_close(q);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(items_come_out_in_order),
        cmocka_unit_test(the_descriptor_tells_when_there_is_something),
        cmocka_unit_test(waiting_ends_at_the_time_given),
        cmocka_unit_test(another_thread_loses_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
