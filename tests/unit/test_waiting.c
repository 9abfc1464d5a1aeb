/* How many requests wait, and when there is room again. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "worker/waiting.h"

static void assert_about(double a, double b) {
    if (a < b - 1e-9 || a > b + 1e-9) fail_msg("%.12g is not %.12g", a, b);
}

static void it_is_full_at_the_limit_and_not_before(void **state) {
    (void)state;
    waiting w = {.most = 2};
    waiting_enter(&w, 0);
    assert_false(waiting_is_full(&w));
    waiting_enter(&w, 0);
    assert_true(waiting_is_full(&w));
    waiting_leave(&w, 1);
    assert_false(waiting_is_full(&w));
}

static void half_of_the_line_has_left_by_then(void **state) {
    (void)state;
    waiting w = {.most = 30};
    for (int i = 0; i < 30; i++) waiting_enter(&w, 100);
    for (int i = 1; i <= 10; i++) waiting_leave(&w, 100 + 0.5 * i);
    assert_about(waiting_retry_after(&w, 105), 5.0); /* 20 wait, one leaves every half second */
}

static void the_time_in_which_nobody_waited_does_not_count(void **state) {
    (void)state;
    waiting w = {.most = 100};
    waiting_enter(&w, 0);
    waiting_leave(&w, 0.5);
    for (int i = 0; i < 8; i++) waiting_enter(&w, 1000);
    assert_about(waiting_retry_after(&w, 1000), 2.0);
}

static void a_line_that_stands_still_takes_longer(void **state) {
    (void)state;
    waiting w = {.most = 100};
    for (int i = 0; i < 5; i++) waiting_enter(&w, 0);
    waiting_leave(&w, 0.5);
    assert_about(waiting_retry_after(&w, 0.5), 1.0);
    assert_about(waiting_retry_after(&w, 10.5), 20.0); /* nobody has left for ten seconds */
}

static void a_recent_pace_counts_more(void **state) {
    (void)state;
    waiting w = {.most = 1000};
    double now = 0;
    for (int i = 0; i < 300; i++) waiting_enter(&w, now);
    for (int i = 0; i < 100; i++) waiting_leave(&w, now += 1.0);
    for (int i = 0; i < 100; i++) waiting_leave(&w, now += 0.1);
    double seconds = waiting_retry_after(&w, now);
    assert_true(seconds >= 5.0 && seconds < 6.0); /* 50 at 0.1 s each, and a trace of the slow ones */
}

static void it_is_never_beyond_the_bounds(void **state) {
    (void)state;
    waiting w = {.most = 1000};
    assert_about(waiting_retry_after(&w, 1e6), WAITING_LEAST_RETRY);
    for (int i = 0; i < 1000; i++) waiting_enter(&w, 0);
    assert_about(waiting_retry_after(&w, 0), WAITING_LEAST_RETRY);
    waiting_leave(&w, 100);
    assert_about(waiting_retry_after(&w, 100), WAITING_MOST_RETRY);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(it_is_full_at_the_limit_and_not_before),
        cmocka_unit_test(half_of_the_line_has_left_by_then),
        cmocka_unit_test(the_time_in_which_nobody_waited_does_not_count),
        cmocka_unit_test(a_line_that_stands_still_takes_longer),
        cmocka_unit_test(a_recent_pace_counts_more),
        cmocka_unit_test(it_is_never_beyond_the_bounds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
