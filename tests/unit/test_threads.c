/* The pool: every index runs once, writes are seen on both sides, sleepers wake, denormals are flushed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <time.h>

#include "kernels/threads.h"

typedef struct tally {
    int n;
    long counts[8]; /* each written by one thread only: a race shows under TSan */
    float small[8];
} tally;

static void count(void *arg, int index, int n) {
    tally *t = arg;
    if (index == 0) t->n = n;
    t->counts[index]++;
    volatile float tiny = 1e-38f;
    t->small[index] = tiny * 0.01f;
}

static threads *open_pool(int n) {
    threads *t;
    cop_error err = {0};
    if (threads_open(&t, n, &err) != COP_OK) fail_msg("%s", err.message);
    assert_int_equal(threads_count(t), n);
    return t;
}

static void every_index_runs_once_a_round(void **state) {
    (void)state;
    for (int n = 1; n <= 5; n += 2) {
        threads *t = open_pool(n);
        tally all = {0};
        for (int round = 0; round < 3000; round++) threads_run(t, count, &all);
        assert_int_equal(all.n, n);
        for (int i = 0; i < 8; i++) assert_int_equal(all.counts[i], i < n ? 3000 : 0);
        threads_close(t);
    }
}

static void sleepers_wake(void **state) {
    (void)state;
    threads *t = open_pool(3);
    tally all = {0};
    for (int round = 0; round < 5; round++) {
        nanosleep(&(struct timespec){0, 20000000}, NULL); /* well past the spinning */
        threads_run(t, count, &all);
        for (int i = 0; i < 3; i++) assert_int_equal(all.counts[i], round + 1);
    }
    threads_close(t);
}

static void slow_part(void *arg, int index, int n) {
    tally *t = arg;
    (void)n;
    if (index == 1) nanosleep(&(struct timespec){0, 20000000}, NULL);
    t->counts[index]++;
}

static void the_caller_waits_for_the_slowest(void **state) {
    (void)state;
    threads *t = open_pool(2);
    tally all = {0};
    for (int round = 1; round <= 5; round++) {
        threads_run(t, slow_part, &all);
        assert_int_equal(all.counts[1], round);
    }
    threads_close(t);
}

static void workers_flush_denormals(void **state) {
    (void)state;
#ifdef __x86_64__
    threads *t = open_pool(3);
    tally all = {.small = {1, 1, 1}};
    threads_run(t, count, &all);
    assert_true(all.small[1] == 0.0f && all.small[2] == 0.0f);
    threads_close(t);
#endif
}

static void failed_allocations_are_told(void **state) {
    (void)state;
    long before = mem_live();
    for (long n = 0; n < 2; n++) {
        threads *t;
        cop_error err = {0};
        mem_fail_after(n);
        assert_int_equal(threads_open(&t, 2, &err), COP_ENOMEM);
        assert_true(mem_fail_stop());
        assert_null(t);
    }
    assert_int_equal(mem_live(), before);
    threads_close(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_index_runs_once_a_round),    cmocka_unit_test(sleepers_wake),
        cmocka_unit_test(the_caller_waits_for_the_slowest), cmocka_unit_test(workers_flush_denormals),
        cmocka_unit_test(failed_allocations_are_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
