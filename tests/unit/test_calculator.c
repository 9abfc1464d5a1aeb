/* The calculator against nanochat's own answers, Python's rules by name, and inputs that mean harm. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <jansson.h>
#include <locale.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/calculator.h"

/* The answer, or NULL for no output; the caller frees it. */
static char *answer_n(const char *expr, size_t n) {
    char *result;
    cop_error err = {0};
    if (calculator_eval(expr, n, &result, &err) != COP_OK) fail_msg("%s", err.message);
    return result;
}

typedef struct expectation {
    const char *expr, *result;
} expectation;

static void expect(const expectation *cases, size_t n) {
    for (size_t i = 0; i < n; i++) {
        char *result = answer_n(cases[i].expr, strlen(cases[i].expr));
        const char *want = cases[i].result ? cases[i].result : "no output";
        if (strcmp(result ? result : "no output", want) != 0)
            fail_msg("%s -> %s, not %s", cases[i].expr, result ? result : "no output", want);
        mem_free(result);
    }
}
#define EXPECT(...)                                                                                          \
    do {                                                                                                     \
        const expectation cases[] = {__VA_ARGS__};                                                           \
        expect(cases, sizeof cases / sizeof *cases);                                                         \
    } while (0)

/* ---- Reference answers. */

/* All lines of the golden file as an array; json_decref it. */
static json_t *load_golden(void) {
    FILE *f = fopen("tests/golden/calculator.jsonl", "r");
    if (!f) fail_msg("could not open tests/golden/calculator.jsonl: run from the root of the tree");
    json_t *all = json_array(), *line;
    while ((line = json_loadf(f, JSON_DISABLE_EOF_CHECK, NULL))) json_array_append_new(all, line);
    fclose(f);
    return all;
}

/* How many lines are answered otherwise; the first is printed. */
static int count_wrong(const json_t *golden) {
    int wrong = 0;
    for (size_t i = 0; i < json_array_size(golden); i++) {
        const json_t *expr = json_object_get(json_array_get(golden, i), "expr");
        const char *want = json_string_value(json_object_get(json_array_get(golden, i), "result"));
        char *result = NULL;
        cop_status status = calculator_eval(json_string_value(expr), json_string_length(expr), &result, NULL);
        bool right = status == COP_OK && (want ? result && !strcmp(result, want) : !result);
        if (!right && wrong++ == 0)
            fprintf(stderr, "%s -> %s, not %s\n", json_string_value(expr), result ? result : "null",
                    want ? want : "null");
        mem_free(result);
    }
    return wrong;
}

static void all_reference_answers_are_equal(void **state) {
    (void)state;
    json_t *golden = load_golden();
    assert_int_equal(json_array_size(golden), 2645);
    assert_int_equal(count_wrong(golden), 0);
    json_decref(golden);
}

static void *run_thread(void *golden) { return (void *)(intptr_t)count_wrong(golden); }

static void eight_threads_get_the_same_answers(void **state) {
    (void)state;
    enum { N = 8 };
    json_t *golden = load_golden();
    pthread_t threads[N];
    for (int i = 0; i < N; i++) assert_int_equal(pthread_create(&threads[i], NULL, run_thread, golden), 0);
    for (int i = 0; i < N; i++) {
        void *wrong;
        pthread_join(threads[i], &wrong);
        assert_int_equal((intptr_t)wrong, 0);
    }
    json_decref(golden);
}

/* ---- Python's rules. */

static void integers_have_any_size(void **state) {
    (void)state;
    EXPECT({"99999999999999999999*99999999999999999999", "9999999999999999999800000000000000000001"},
           {"-7//2", "-4"}, {"7//-2", "-4"}, {"-7//-2", "3"},
           {"100000000000000000000//-3", "-33333333333333333334"}, {"1,000+2", "1002"}, {"00", "0"},
           {"-0", "0"}, {"--5", "5"}, {"2*-3", "-6"}, {"2--3", "5"}, {"  1+1 ", "2"});
}

static void division_is_rounded_once(void **state) {
    (void)state;
    EXPECT({"7/2", "3.5"}, {"10/5", "2.0"}, {"1/3", "0.3333333333333333"}, {"0/5", "0.0"}, {"0/-5", "-0.0"},
           {"123456789012345678/10", "1.2345678901234568e+16"},
           {"9007199254740993/1", "9007199254740992.0"}, /* a tie goes to even */
           {"9007199254740995/1", "9007199254740996.0"},
           {"90071992547409930000000000000000000001/10000000000000000000000", "9007199254740994.0"},
           {"-1/3", "-0.3333333333333333"});
}

static void floats_print_as_repr(void **state) {
    (void)state;
    EXPECT({"0.1+0.2", "0.30000000000000004"}, {"5.", "5.0"}, {".5+.5", "1.0"}, {"-0.0", "-0.0"},
           {"00.5", "0.5"}, {"007.5", "7.5"}, {"0.00001*1", "1e-05"}, {"0.0001*1", "0.0001"},
           {"1000000000000000.0", "1000000000000000.0"}, {"9999999999999998.0", "9999999999999998.0"},
           {"10000000000000000.0", "1e+16"}, {"123.456e", NULL},
           {"1/17592186044416",
            "5.684341886080802e-14"}, /* a power of two: the nearest 16 digits read as another */
           {"0.1*3", "0.30000000000000004"}, {"100.0", "100.0"}, {"12345.678", "12345.678"});
}

static void float_floor_division_is_pythons(void **state) {
    (void)state;
    EXPECT({"1//0.5", "2.0"}, {"7.5//-2", "-4.0"}, {"-7.5//2", "-4.0"}, {"0.0//-3", "-0.0"},
           {"-0.0//3", "-0.0"}, {"1//0.1", "9.0"}, {"-1//100000000000000000000.0", "-1.0"},
           {"0.3//0.1", "2.0"}, {"6.0//3", "2.0"});
}

static void numbers_may_leave_the_range_of_doubles(void **state) {
    (void)state;
    char big[700], expr[1600];
    memset(big, '9', 310);
    big[310] = '\0';
    static const struct {
        const char *format, *result;
    } cases[] = {
        {"%s.", "inf"},      {"-%s.", "-inf"},  {"%s.-%s.", "nan"}, {"%s*1.0", NULL},    {"%s/1", NULL},
        {"%s/%s", "1.0"},    {"%s.//3", "nan"}, {"3//%s.", "0.0"},  {"-3//%s.", "-1.0"}, {"1/%s%s", "0.0"},
        {"-1/%s%s", "-0.0"}, {"%s.*0", "nan"},  {"1.0-%s", NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
        snprintf(expr, sizeof expr, cases[i].format, big, big);
#pragma GCC diagnostic pop
        expect(&(expectation){expr, cases[i].result}, 1);
    }
    snprintf(expr, sizeof expr, "1/2%0323d", 0); /* the smallest subnormal */
    expect(&(expectation){expr, "5e-324"}, 1);
    snprintf(expr, sizeof expr, "1/4%0323d", 0); /* just above half of the smallest */
    expect(&(expectation){expr, "5e-324"}, 1);
    snprintf(expr, sizeof expr, "1/5%0323d", 0);
    expect(&(expectation){expr, "0.0"}, 1);
}

static void a_thread_that_flushes_denormals_gets_the_same_answer(void **state) {
    (void)state;
    cpu_flush_denormals();
    char expr[400]; /* 1 / 10^200 / 10^110 */
    snprintf(expr, sizeof expr, "1/1%0200d/1%0110d", 0, 0);
    char *result = answer_n(expr, strlen(expr));
    assert_string_equal(result, "1e-310");
    mem_free(result);
}

static void tuples_and_ellipsis_come_through_the_filter(void **state) {
    (void)state;
    EXPECT({"()", "()"}, {"(())", "()"}, {" ( ) ", "()"}, {"()*3", "()"}, {"3*()", "()"}, {"()*-1", "()"},
           {"()+()", "()"}, {"...", "Ellipsis"}, {"(...)", "Ellipsis"}, {"-()", NULL}, {"()-()", NULL},
           {"()*()", NULL}, {"()*1.5", NULL}, {"()/1", NULL}, {"()*9223372036854775808", NULL},
           {"...+1", NULL}, {"+...", NULL}, {"()()", NULL}, {"....", NULL}, {"5()", NULL}, {"(+)", NULL},
           {"(1+)", NULL});
}

static void what_python_refuses_gives_no_output(void **state) {
    (void)state;
    EXPECT({"007", NULL}, {"1 2", NULL}, {"2**3", NULL}, {"2* *3", NULL}, {"2*,*3", NULL}, {"1/0", NULL},
           {"1//0", NULL}, {"3.0//0", NULL}, {"1/0.0", NULL}, {"1/-0.0", NULL}, {"5-", NULL}, {"1.5.2", NULL},
           {"1 . 5", NULL}, {"(1)(2)", NULL}, {"3(4)", NULL}, {"1e5", NULL}, {"5%3", NULL}, {"", NULL},
           {" ", NULL}, {"1\t+1", NULL}, {"1+1\n", NULL}, {"(1", NULL}, {"1)", NULL}, {")(", NULL},
           {".", NULL}, {"5..", NULL}, {"*3", NULL}, {"1///2", NULL}, {"/", NULL}, {"1_000", NULL},
           {"()(", NULL}, {"(1/0)*()", NULL});
    char *result = answer_n("1\0+1", 4);
    assert_null(result);
}

static void strings_count(void **state) {
    (void)state;
    EXPECT({"'strawberry'.count('r')", "3"}, {"'aaaa'.count('aa')", "2"}, {"'abc'.count('')", "4"},
           {"''.count('')", "1"}, {"''.count('a')", "0"}, {"'a,b'.count(',')", "3"},
           {"\"it's\".count('s')", "1"}, {"'b' 'a'.count('a')", "1"}, {"'b'\"a\".count('a' '')", "1"},
           {"'a' .count('a')", "1"}, {"('a').count(('a'))", "1"}, {"('.count('.count)('c')", "1"},
           {" (('a'.count('a'))) ", "1"}, {"'''a'b'''.count(\"'\")", "1"}, {"''''a'''.count(\"'\")", "1"},
           {"rF'a'.count(U'a')", "1"}, {"'a'.count( 'a' )", "1"}, {"'a.count('", "a.count("},
           {"'Hello World'.count('o')", "2"});
}

static void other_strings_give_no_output(void **state) {
    (void)state;
    EXPECT({"'eval'.count('e')", NULL}, {"'profile'.count('e')", NULL}, {"'DIRector'.count('r')", NULL},
           {"'a__b'.count('a')", NULL}, {"'a'.count('a')+1", NULL}, {"'a'. count ('a')", NULL},
           {"'\xc3\xa9'.count('e')", NULL}, {"a.count(b)", NULL}, {"'a'.counts('.count(')", NULL},
           {"'a'.count()", NULL}, {"'a'.count('a').count('a')", NULL}, {"'.count('.count", NULL},
           {"'a'('.count(')", NULL}, {"'a'.count('a'", NULL}, {"'a.count('b')", NULL},
           {"'''a''''.count('a')", NULL}, {"urr'a'.count('a')", NULL}, {"r 'a'.count('a')", NULL},
           {"'a'.count('a')'b'", NULL}, {"('a')'b'.count('a')", NULL}, {"'a'.count('a'))", NULL},
           {"'aXa'.upper().count('A')", NULL}, {"b'a'.count(b'a')", NULL}, {"().count('a')", NULL},
           {"'a'.count('a').real", NULL}, {"not 'a'.count('a')", NULL});
}

static void the_locale_does_not_matter(void **state) {
    (void)state;
    static const char *const names[] = {"de_DE.UTF-8", "fr_FR.UTF-8", "de_DE", "ru_RU.UTF-8"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (!setlocale(LC_ALL, names[i])) continue;
        EXPECT({"0.5+0.25", "0.75"}, {"1/3", "0.3333333333333333"}, {"1.5/100000000000000000000", "1.5e-20"});
        setlocale(LC_ALL, "C");
        return;
    }
    print_message("no locale with a decimal comma here\n");
    skip();
}

/* ---- Limits. */

/* `part` `n` times between `before` and `after`, evaluated; the answer, which must come at once. */
static char *answer_repeated(const char *before, const char *part, size_t n, const char *after) {
    size_t n_before = strlen(before), n_part = strlen(part), n_after = strlen(after);
    char *expr = malloc(n_before + n_part * n + n_after + 1);
    assert_non_null(expr);
    memcpy(expr, before, n_before);
    for (size_t i = 0; i < n; i++) memcpy(expr + n_before + i * n_part, part, n_part);
    memcpy(expr + n_before + n * n_part, after, n_after);
    struct timespec start, end;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &start);
    char *result = answer_n(expr, n_before + n_part * n + n_after);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
    free(expr);
    double seconds = (double)(end.tv_sec - start.tv_sec) + 1e-9 * (double)(end.tv_nsec - start.tv_nsec);
    if (seconds > 2) fail_msg("%s%s... took %.1f s", before, part, seconds);
    return result;
}

static void expect_repeated(const char *before, const char *part, size_t n, const char *after,
                            const char *want) {
    char *result = answer_repeated(before, part, n, after);
    if (want) {
        assert_non_null(result);
        assert_string_equal(result, want);
    } else {
        assert_null(result);
    }
    mem_free(result);
}

static void parentheses_nest_two_hundred_deep(void **state) {
    (void)state;
    char close[202];
    memset(close, ')', 201);
    close[201] = '\0';
    expect_repeated("", "(", 200, "1", NULL);
    char after[204];
    snprintf(after, sizeof after, "1%.200s", close);
    expect_repeated("", "(", 200, after, "1");
    snprintf(after, sizeof after, "1%.201s", close);
    expect_repeated("", "(", 201, after, NULL);
    snprintf(after, sizeof after, ")%.199s", close); /* the innermost is an empty tuple */
    expect_repeated("", "(", 200, after, "()");
    snprintf(after, sizeof after, ")%.200s", close);
    expect_repeated("", "(", 201, after, NULL);
    expect_repeated("'a.count('", "(", 100000, "", NULL);
    char string[300];
    snprintf(string, sizeof string, "'.count('%.200s", close);
    expect_repeated("", "(", 200, string, ".count(");
    snprintf(string, sizeof string, "'.count('%.201s", close);
    expect_repeated("", "(", 201, string, NULL);
}

static void integers_are_read_and_printed_up_to_4300_digits(void **state) {
    (void)state;
    char *result = answer_repeated("", "9", 4300, "");
    assert_non_null(result);
    assert_int_equal(strlen(result), 4300);
    mem_free(result);
    result = answer_repeated("-", "9", 4300, "");
    assert_int_equal(strlen(result), 4301);
    mem_free(result);
    expect_repeated("", "9", 4301, "", NULL);
    expect_repeated("1+", "9", 4300, "", NULL); /* the sum has one digit more */
    expect_repeated("0*", "9", 4301, "", NULL);
    expect_repeated("", "0", 5000, "", "0");
    expect_repeated("", "0", 5000, ".5", "0.5");
}

static void larger_integers_live_in_between(void **state) {
    (void)state;
    enum { N = 4300 };
    char nines[N + 2];
    memset(nines, '9', N);
    strcpy(nines + N, "*");
    char *after = malloc(N + 16);
    sprintf(after, "0//%.*s", N, nines);
    expect_repeated("", nines, 73, after, "0");  /* 313,900 digits, times 0 */
    expect_repeated("", nines, 74, after, NULL); /* 318,200 digits are more than 2^20 bits */
    free(after);
}

static void bombs_end_at_once(void **state) {
    (void)state;
    expect_repeated("", "9", 100000, "", NULL);
    expect_repeated("", "9*", 100000, "9", NULL);
    expect_repeated("", "9999999999*", 2900, "9", NULL); /* 29,001 digits cannot be printed */
    expect_repeated("", "(", 100000, "", NULL);
    expect_repeated("", ")", 100000, "", NULL);
    expect_repeated("", "()", 100000, "", NULL);
    expect_repeated("", "1//", 100000, "1", NULL);
    expect_repeated("", "1//", 2000, "1", "1");
    expect_repeated("", "-", 100000, "1", NULL);
    expect_repeated("", "-", 2990, "1", "1");
    expect_repeated("", "-", 2991, "1", NULL);
    expect_repeated("1", "+1", 2990, "", "2991");
    expect_repeated("1", "+1", 2991, "", NULL);
    expect_repeated("", ",", 1000000, "1", "1");
    expect_repeated("", " ", 1000000, "1", "1");
    expect_repeated("", "9", 1000000, ".", "inf");
    expect_repeated("0.", "0", 1000000, "1", "0.0");
    expect_repeated("'", "a", 1000000, "'.count('aab')", "0");
    expect_repeated("", "'a'", 100000, ".count('a')", "100000");
    expect_repeated("'.count('", "'", 100001, "", NULL);
}

static void every_allocation_may_fail(void **state) {
    (void)state;
    static const char *const exprs[] = {"1.5+2", "99999999999999999999*3", "'aa'.count('a')", "'.count('",
                                        "()"};
    for (size_t i = 0; i < sizeof exprs / sizeof *exprs; i++) {
        long live = mem_live();
        int n_failures = 0;
        for (bool failed = true; failed; n_failures += failed) {
            char *result = (char *)exprs;
            cop_error err = {0};
            mem_fail_after(n_failures);
            cop_status status = calculator_eval(exprs[i], strlen(exprs[i]), &result, &err);
            failed = mem_fail_stop();
            assert_int_equal(status, failed ? COP_ENOMEM : COP_OK);
            assert_int_equal(err.status, status);
            assert_true(failed == !result);
            mem_free(result);
            assert_int_equal(mem_live(), live);
        }
        assert_int_equal(n_failures, 3);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_reference_answers_are_equal),
        cmocka_unit_test(eight_threads_get_the_same_answers),
        cmocka_unit_test(integers_have_any_size),
        cmocka_unit_test(division_is_rounded_once),
        cmocka_unit_test(floats_print_as_repr),
        cmocka_unit_test(float_floor_division_is_pythons),
        cmocka_unit_test(numbers_may_leave_the_range_of_doubles),
        cmocka_unit_test(tuples_and_ellipsis_come_through_the_filter),
        cmocka_unit_test(what_python_refuses_gives_no_output),
        cmocka_unit_test(strings_count),
        cmocka_unit_test(other_strings_give_no_output),
        cmocka_unit_test(the_locale_does_not_matter),
        cmocka_unit_test(a_thread_that_flushes_denormals_gets_the_same_answer),
        cmocka_unit_test(parentheses_nest_two_hundred_deep),
        cmocka_unit_test(integers_are_read_and_printed_up_to_4300_digits),
        cmocka_unit_test(larger_integers_live_in_between),
        cmocka_unit_test(bombs_end_at_once),
        cmocka_unit_test(every_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
