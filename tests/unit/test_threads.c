/* The pool: every index runs once, writes are seen on both sides, sleepers wake, denormals are flushed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <time.h>

#include "kernels/backend.h"
#include "kernels/cores.h"
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
    if (threads_open(&t, n, NULL, &err) != COP_OK) fail_msg("%s", err.message);
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

typedef struct mask {
    int n[4], first[4]; /* cores that each thread may use, and the first of them */
} mask;

static void note_mask(void *arg, int index, int n) {
    mask *m = arg;
    (void)n;
    m->n[index] = cores_allowed(&m->first[index], 1);
}

static void workers_are_bound_only_if_asked(void **state) {
    (void)state;
    int allowed[2], n_allowed = cores_allowed(allowed, 2);
    assert_true(n_allowed >= 1);
    int last = allowed[n_allowed > 1], cores[3] = {allowed[0], last, allowed[0]};
    for (int pinned = 0; pinned < 2; pinned++) {
        threads *t;
        mask m = {{0}, {0}};
        assert_int_equal(threads_open(&t, 3, pinned ? cores : NULL, NULL), COP_OK);
        threads_run(t, note_mask, &m);
        threads_close(t);
        assert_int_equal(m.n[0], n_allowed); /* the caller's business */
        for (int i = 1; i < 3; i++) {
            assert_int_equal(m.n[i], pinned ? 1 : n_allowed);
            assert_int_equal(m.first[i], pinned ? cores[i] : allowed[0]);
        }
    }
    threads *t;
    cop_error err;
    cores[2] = 100000; /* no such core */
    assert_int_equal(threads_open(&t, 3, cores, &err), COP_EIO);
    assert_null(t);
}

/* A backend in a thread of its own, which k_bind() may bind. */
static void *bind_backend(void *arg) {
    mask *m = arg;
    k_ctx *k;
    cop_error err;
    bool pin = m->n[3];
    if (k_open(&k, PRECISION_BF16, 1, pin, &err) != COP_OK) return NULL;
    note_mask(m, 0, 1);
    k_bind(k);
    note_mask(m, 1, 1);
    m->n[2] = k_sync(k, &err);
    k_close(k);
    return m;
}

static void the_thread_that_uses_a_backend_is_bound_only_if_asked(void **state) {
    (void)state;
    int first, n_allowed = cores_allowed(&first, 1);
    for (int pin = 0; pin < 2; pin++) {
        mask m = {.n = {[3] = pin}};
        pthread_t id;
        void *done;
        assert_int_equal(pthread_create(&id, NULL, bind_backend, &m), 0);
        assert_int_equal(pthread_join(id, &done), 0);
        assert_non_null(done);
        assert_int_equal(m.n[0], n_allowed);
        assert_int_equal(m.n[1], pin ? 1 : n_allowed);
        assert_int_equal(m.first[1], first);
        assert_int_equal(m.n[2], COP_OK);
    }
    k_ctx *k;
    cop_error err;
    assert_int_equal(k_open(&k, PRECISION_BF16, n_allowed + 1, true, &err), COP_EINVAL);
    assert_null(k);
}

static void failed_allocations_are_told(void **state) {
    (void)state;
    long before = mem_live();
    int n_pinned = cores_allowed(NULL, 0) > 1 ? 2 : 1;
    for (long n = 0;; n++) {
        k_ctx *k;
        cop_error err = {0};
        mem_fail_after(n);
        cop_status status = k_open(&k, PRECISION_BF16, n_pinned, true, &err);
        bool fired = mem_fail_stop();
        k_close(k);
        assert_int_equal(status, fired ? COP_ENOMEM : COP_OK);
        assert_int_equal(mem_live(), before);
        if (!fired) break;
    }
    for (long n = 0; n < 2; n++) {
        threads *t;
        cop_error err = {0};
        mem_fail_after(n);
        assert_int_equal(threads_open(&t, 2, NULL, &err), COP_ENOMEM);
        assert_true(mem_fail_stop());
        assert_null(t);
    }
    assert_int_equal(mem_live(), before);
    threads_close(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_index_runs_once_a_round),
        cmocka_unit_test(sleepers_wake),
        cmocka_unit_test(the_caller_waits_for_the_slowest),
        cmocka_unit_test(workers_flush_denormals),
        cmocka_unit_test(workers_are_bound_only_if_asked),
        cmocka_unit_test(the_thread_that_uses_a_backend_is_bound_only_if_asked),
        cmocka_unit_test(failed_allocations_are_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
