/* The matcher of stop strings against looking at every end of every string, fed in pieces of every size. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "engine/stop.h"

static uint64_t seed = 9;

static uint32_t below(uint32_t n) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33) % n;
}

/* The string that is complete after text[0, n): the longest, of equal ones the first; -1: none. */
static int plain_hit(const stop_string *strings, int n_strings, const char *text, size_t n) {
    int hit = -1;
    for (int i = 0; i < n_strings; i++) {
        size_t length = strings[i].n;
        if (length > n || memcmp(text + n - length, strings[i].bytes, length)) continue;
        if (hit < 0 || length > strings[hit].n) hit = i;
    }
    return hit;
}

static void matches_are_those_of_looking_everywhere(void **state) {
    (void)state;
    enum { TEXT = 400 };
    char text[TEXT], bytes[STOP_MAX_STRINGS][STOP_MAX_BYTES];
    int n_hits = 0;
    for (int round = 0; round < 3000; round++) {
        uint32_t letters = 1 + below(3),
                 longest = round % 3 ? 6 : 30; /* few letters: nearly everything matches */
        int n_strings = 1 + (int)below(STOP_MAX_STRINGS);
        stop_string strings[STOP_MAX_STRINGS];
        for (int i = 0; i < n_strings; i++) {
            strings[i] = (stop_string){bytes[i], 1 + below(longest)};
            for (size_t j = 0; j < strings[i].n; j++)
                bytes[i][j] = (char)(below(letters) + (round % 2 ? 0 : 250));
        }
        for (int i = 0; i < TEXT; i++) text[i] = (char)(below(letters) + (round % 2 ? 0 : 250));
        stop_set *set;
        stop_match match = {0};
        cop_error err;
        assert_int_equal(stop_open(&set, strings, (size_t)n_strings, &err), COP_OK);
        for (size_t from = 0, to; from < TEXT; from = to) {
            to = from + below(5);
            if (to > TEXT) to = TEXT;
            int want = -1;
            for (size_t end = from + 1; end <= to && want < 0; end++)
                want = plain_hit(strings, n_strings, text, end);
            assert_int_equal(stop_feed(set, &match, text + from, to - from), want);
            n_hits += want >= 0;
        }
        stop_close(set);
    }
    assert_true(n_hits > 10000);
}

static void the_longest_strings_fit(void **state) {
    (void)state;
    char bytes[STOP_MAX_BYTES];
    memset(bytes, 'a', sizeof bytes);
    stop_string strings[STOP_MAX_STRINGS];
    for (int i = 0; i < STOP_MAX_STRINGS; i++) strings[i] = (stop_string){bytes, sizeof bytes - (i ? 1 : 0)};
    stop_set *set;
    stop_match match = {0};
    cop_error err;
    assert_int_equal(stop_open(&set, strings, STOP_MAX_STRINGS, &err), COP_OK);
    assert_int_equal(stop_feed(set, &match, bytes, sizeof bytes - 2), -1);
    assert_int_equal(stop_feed(set, &match, "a", 1), 1);
    assert_int_equal(stop_feed(set, &match, "a", 1), 0);
    assert_int_equal(stop_feed(set, &match, "b", 1), -1);
    assert_int_equal(stop_get(set, 0).n, STOP_MAX_BYTES);
    assert_memory_equal(stop_get(set, 0).bytes, bytes, sizeof bytes);
    stop_close(set);
    stop_close(NULL);
}

static void a_failing_allocation_is_told(void **state) {
    (void)state;
    stop_set *set;
    cop_error err;
    mem_fail_after(0);
    assert_int_equal(stop_open(&set, &(stop_string){"x", 1}, 1, &err), COP_ENOMEM);
    mem_fail_stop();
    assert_null(set);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(matches_are_those_of_looking_everywhere),
        cmocka_unit_test(the_longest_strings_fit),
        cmocka_unit_test(a_failing_allocation_is_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
