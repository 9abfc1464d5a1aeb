/* JSON Lines: one answer per line, whatever the line holds. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "tests/unit/capture.h"
#include "worker/jsonl.h"

/* Answers {"x": v} with {"x": v}; "fail" in the object makes it fail with that text. */
static cop_status echo(void *context, json_t *line, uint64_t number, json_t **out, cop_error *err) {
    (void)number;
    ++*(int *)context;
    const char *fail = json_string_value(json_object_get(line, "fail"));
    if (fail) {
        cop_status status = cop_fail(err, COP_EINVAL, "cannot take \"%s\"", fail);
        snprintf(err->key, sizeof err->key, "fail");
        return status;
    }
    *out = json_pack("{s:O}", "x", json_object_get(line, "x"));
    assert_non_null(*out);
    return COP_OK;
}

/* A name by which jsonl_run() finds what was written to `file`. */
static const char *path_of(FILE *file) {
    static char path[32];
    fflush(file);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fileno(file));
    return path;
}

/* Run `n` bytes through echo; returns what was written (free) and the exit status. */
static char *run(const char *text, size_t n, int *status, int *calls) {
    FILE *in = tmpfile();
    assert_int_equal(fwrite(text, 1, n, in), n);
    char *written = NULL;
    size_t n_written = 0;
    FILE *out = open_memstream(&written, &n_written);
    *calls = 0;
    *status = jsonl_run(path_of(in), out, echo, calls);
    fclose(out);
    fclose(in);
    return written;
}

static void expect(const char *text, size_t n, const char *answer, int exit_status) {
    int status, calls;
    char *written = run(text, n, &status, &calls);
    assert_string_equal(written, answer);
    assert_int_equal(status, exit_status);
    free(written);
}
#define EXPECT(text, answer, exit_status) expect(text, sizeof(text) - 1, answer, exit_status)

static void each_line_gets_an_answer(void **state) {
    (void)state;
    EXPECT("{\"x\": 1}\n{\"x\": [2, \"b\"]}\n", "{\"x\": 1}\n{\"x\": [2, \"b\"]}\n", 0);
    EXPECT("", "", 0);
}

static void line_ends_are_forgiven(void **state) {
    (void)state;
    EXPECT("{\"x\": 1}\r\n{\"x\": 2}", "{\"x\": 1}\n{\"x\": 2}\n", 0);
    EXPECT("\n \t\r\n{\"x\": 1}\n\n", "{\"x\": 1}\n", 0);
}

static void a_bad_line_is_numbered_and_the_run_goes_on(void **state) {
    (void)state;
    EXPECT("\n{\"x\": }\n{\"x\": 2}\n",
           "{\"line\": 2, \"error\": \"invalid JSON in column 7: unexpected token near '}'\"}\n{\"x\": 2}\n",
           1);
    EXPECT("{\"fail\": \"me\"}\n{\"x\": 2}\n",
           "{\"line\": 1, \"error\": \"fail: cannot take \\\"me\\\"\"}\n{\"x\": 2}\n", 1);
}

static void a_line_must_be_an_object(void **state) {
    (void)state;
    static const char *const lines[] = {"[1]", "3", "\"x\"", "null", "true"};
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
        expect(lines[i], strlen(lines[i]), "{\"line\": 1, \"error\": \"a line must be a JSON object\"}\n", 1);
}

static void keys_must_be_unique(void **state) {
    (void)state;
    EXPECT("{\"x\": 1, \"x\": 2}",
           "{\"line\": 1, \"error\": \"invalid JSON in column 12: duplicate object key near '\\\"x\\\"'\"}\n",
           1);
}

static void garbage_after_the_object_is_an_error(void **state) {
    (void)state;
    EXPECT("{\"x\": 1} {\"x\": 2}\n",
           "{\"line\": 1, \"error\": \"invalid JSON in column 10: end of file expected near '{'\"}\n", 1);
}

static void nul_is_data_when_escaped_and_an_error_when_raw(void **state) {
    (void)state;
    EXPECT("{\"x\": \"a\\u0000b\"}\n", "{\"x\": \"a\\u0000b\"}\n", 0);
    int status, calls;
    char *written = run("{\"x\": \0 1}\n{\"x\": 2}\n", 20, &status, &calls);
    assert_non_null(strstr(written, "{\"line\": 1, \"error\": \"invalid JSON"));
    assert_non_null(strstr(written, "{\"x\": 2}\n"));
    assert_int_equal(status, 1);
    free(written);
    written = run("\0\0\n", 3, &status, &calls); /* not blank */
    assert_int_equal(status, 1);
    free(written);
}

static void invalid_utf8_is_an_error_that_prints(void **state) {
    (void)state;
    int status, calls;
    char *written = run("{\"x\": \"\xff\"}\n{\"\xe4\xbd\": 1}\n", 22, &status, &calls);
    assert_int_equal(status, 1);
    assert_int_equal(calls, 0);
    json_t *first = json_loads(written, JSON_DISABLE_EOF_CHECK, NULL);
    assert_non_null(first);
    assert_int_equal(json_integer_value(json_object_get(first, "line")), 1);
    json_decref(first);
    assert_non_null(strstr(written, "\"line\": 2"));
    free(written);
}

static void a_message_cut_inside_a_character_still_prints(void **state) {
    (void)state;
    char text[2048] = "{\"fail\": \"";
    for (size_t n = strlen(text); n < 1900; n += 2) memcpy(text + n, "\xc3\xa9", 3);
    strcat(text, "\"}");
    int status, calls;
    char *odd = run(text, strlen(text), &status, &calls);
    memmove(text + 11, text + 10, strlen(text) - 9); /* one more byte: the other half of the cuts */
    text[10] = 'a';
    char *even = run(text, strlen(text), &status, &calls);
    json_t *a = json_loads(odd, 0, NULL), *b = json_loads(even, 0, NULL);
    assert_non_null(a);
    assert_non_null(b);
    assert_true(!strchr(odd, '?') != !strchr(even, '?'));
    json_decref(a);
    json_decref(b);
    free(odd);
    free(even);
}

static void utf8_passes_unescaped(void **state) {
    (void)state;
    EXPECT("{\"x\": \"h\xc3\xa9\xf0\x9f\x98\x80\"}\n", "{\"x\": \"h\xc3\xa9\xf0\x9f\x98\x80\"}\n", 0);
    EXPECT("{\"x\": \"\\u00e9\"}\n", "{\"x\": \"\xc3\xa9\"}\n", 0);
}

static void floats_have_nine_digits(void **state) {
    (void)state;
    EXPECT("{\"x\": -1.2345678912345}\n{\"x\": 1e-7}\n{\"x\": 2.0}\n",
           "{\"x\": -1.23456789}\n{\"x\": 1e-7}\n{\"x\": 2.0}\n", 0);
}

static void nesting_bombs_are_refused(void **state) {
    (void)state;
    enum { N = 1 << 20 };
    for (int kind = 0; kind < 2; kind++) {
        char *bomb = malloc(N);
        for (int i = 0; i < N; i++) bomb[i] = kind == 0 ? '[' : "{\"a\":"[i % 5];
        int status, calls;
        char *written = run(bomb, N, &status, &calls);
        assert_non_null(strstr(written, "maximum parsing depth reached"));
        assert_true(strlen(written) < 300);
        assert_int_equal(status, 1);
        free(written);
        free(bomb);
    }
}

static void very_long_lines_are_skipped(void **state) {
    (void)state;
    size_t n = JSONL_MAX_LINE + 1;
    char *text = malloc(n + 16);
    memset(text, ' ', n);
    memcpy(text + n, "\n{\"x\": 2}\n", 11);
    expect(text, n + 10, "{\"line\": 1, \"error\": \"the line is longer than 64 MiB\"}\n{\"x\": 2}\n", 1);
    memcpy(text + 1, "{\"x\": 1}", 8); /* with one byte less, the line is read */
    expect(text + 1, n + 9, "{\"x\": 1}\n{\"x\": 2}\n", 0);
    free(text);
}

static void a_failed_allocation_costs_one_line(void **state) {
    (void)state;
    enum { N = 300 << 10 }; /* more than is read at once, so that the line makes the buffer grow */
    char *text = malloc(N + 32);
    memset(text, ' ', N);
    strcpy(text + N, "{\"x\": 1}\n{\"x\": 2}\n");
    bool cost_a_line = false;
    for (long n = 0;; n++) {
        long live = mem_live();
        int status, calls;
        mem_fail_after(n);
        char *written = run(text, N + 18, &status, &calls);
        bool fired = mem_fail_stop();
        assert_int_equal(mem_live(), live);
        if (fired) assert_int_equal(status, 1);
        if (fired && *written) {
            assert_string_equal(
                written,
                "{\"line\": 1, \"error\": \"could not keep the line: out of memory\"}\n{\"x\": 2}\n");
            cost_a_line = true;
        }
        free(written);
        if (!fired) break;
    }
    assert_true(cost_a_line);
    free(text);
}

static void an_input_that_cannot_be_read_is_a_failure(void **state) {
    (void)state;
    static const char *const paths[] = {"/nonexistent.jsonl", "/"};
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
        capture c;
        int calls = 0;
        capture_start(&c, stderr);
        int status = jsonl_run(paths[i], stdout, echo, &calls);
        assert_non_null(strstr(capture_stop(&c), paths[i]));
        assert_int_equal(status, 1);
        assert_int_equal(calls, 0);
    }
}

static void output_that_cannot_be_written_is_a_failure(void **state) {
    (void)state;
    FILE *in = tmpfile(), *out = fopen("/dev/full", "w");
    if (!out) {
        fclose(in);
        skip();
    }
    fputs("{\"x\": 1}\n", in);
    int calls = 0;
    assert_int_equal(jsonl_run(path_of(in), out, echo, &calls), 1);
    fclose(in);
    fclose(out);
}

/* Counts the bytes that can be read from the other end of the pipe when a line comes in. */
static cop_status peek(void *context, json_t *line, uint64_t number, json_t **out, cop_error *err) {
    (void)number;
    (void)line, (void)err;
    int *fd_and_waiting = context;
    ioctl(fd_and_waiting[0], FIONREAD, &fd_and_waiting[1]);
    *out = json_object();
    return COP_OK;
}

static void a_pipe_gets_each_answer_at_once(void **state) {
    (void)state;
    int fds[2];
    assert_int_equal(pipe(fds), 0);
    FILE *in = tmpfile(), *out = fdopen(fds[1], "w");
    fputs("{}\n{}\n", in);
    int fd_and_waiting[2] = {fds[0], -1};
    assert_int_equal(jsonl_run(path_of(in), out, peek, fd_and_waiting), 0);
    assert_int_equal(fd_and_waiting[1], 3); /* the second line found the answer "{}\n" to the first */
    fclose(in);
    fclose(out);
    close(fds[0]);
}

static void u64_survives_the_round_trip(void **state) {
    (void)state;
    static const uint64_t values[] = {
        0, 1, (UINT64_C(1) << 53), (UINT64_C(1) << 53) + 1, INT64_MAX, (uint64_t)INT64_MAX + 1, UINT64_MAX};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        json_t *j = json_u64(values[i]);
        assert_true(json_is_integer(j) == (values[i] <= UINT64_C(1) << 53));
        char *text = json_dumps(j, JSON_ENCODE_ANY);
        json_t *back = json_loads(text, JSON_DECODE_ANY, NULL);
        uint64_t v = 77;
        assert_true(json_u64_get(back, &v));
        assert_true(v == values[i]);
        free(text);
        json_decref(j);
        json_decref(back);
    }
}

static void what_is_no_u64_is_refused(void **state) {
    (void)state;
    static const char *const bad[] = {"-1",
                                      "1.5",
                                      "2.0",
                                      "\"\"",
                                      "\"-1\"",
                                      "\" 1\"",
                                      "\"1 \"",
                                      "\"0x1\"",
                                      "\"1\\u0000\"",
                                      "\"18446744073709551616\"",
                                      "\"99999999999999999999999\"",
                                      "null",
                                      "true",
                                      "[1]"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        json_t *j = json_loads(bad[i], JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
        assert_non_null(j);
        uint64_t v = 77;
        if (json_u64_get(j, &v)) fail_msg("%s was taken", bad[i]);
        assert_true(v == 77);
        json_decref(j);
    }
    uint64_t v;
    assert_false(json_u64_get(NULL, &v));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_line_gets_an_answer),
        cmocka_unit_test(line_ends_are_forgiven),
        cmocka_unit_test(a_bad_line_is_numbered_and_the_run_goes_on),
        cmocka_unit_test(a_line_must_be_an_object),
        cmocka_unit_test(keys_must_be_unique),
        cmocka_unit_test(garbage_after_the_object_is_an_error),
        cmocka_unit_test(nul_is_data_when_escaped_and_an_error_when_raw),
        cmocka_unit_test(invalid_utf8_is_an_error_that_prints),
        cmocka_unit_test(a_message_cut_inside_a_character_still_prints),
        cmocka_unit_test(utf8_passes_unescaped),
        cmocka_unit_test(floats_have_nine_digits),
        cmocka_unit_test(nesting_bombs_are_refused),
        cmocka_unit_test(very_long_lines_are_skipped),
        cmocka_unit_test(a_failed_allocation_costs_one_line),
        cmocka_unit_test(an_input_that_cannot_be_read_is_a_failure),
        cmocka_unit_test(output_that_cannot_be_written_is_a_failure),
        cmocka_unit_test(a_pipe_gets_each_answer_at_once),
        cmocka_unit_test(u64_survives_the_round_trip),
        cmocka_unit_test(what_is_no_u64_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
