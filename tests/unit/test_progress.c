/* Progress: how lines read, that they never wrap, and what a terminal shows after them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include "tests/unit/capture.h"
#include "worker/progress_internal.h"

static const progress_view example = {.what = "generate",
                                      .now = {4312, 68992, 1234567, 10000},
                                      .tokens_per_second = 8119.7,
                                      .eta_seconds = 761.9,
                                      .rss_bytes = (size_t)1395864371};

static void expect_line(const progress_view *v, const char *want) {
    char line[PROGRESS_LINE_BYTES];
    progress_format(line, v);
    assert_string_equal(line, want);
}

static void expect_at(int columns, const char *want) {
    progress_view v = example;
    v.columns = columns;
    expect_line(&v, want);
}

/* ---- Lines. */

static void a_plain_line_tells_everything(void **state) {
    (void)state;
    expect_at(0, "generate  43 %  4,312 of 10,000 lines, 68,992 samples, 8,120 tokens/s, 1.3 GiB, ETA 12:41");
}

static void a_terminal_gets_a_bar_as_long_as_there_is_room(void **state) {
    (void)state;
    expect_at(300, "generate  [============>                 ]  43 %  4,312 of 10,000 lines, 68,992 samples, "
                   "8,120 tokens/s, 1.3 GiB, ETA 12:41");
    expect_at(105, "generate  [====>      ]  43 %  4,312 of 10,000 lines, 68,992 samples, 8,120 tokens/s, "
                   "1.3 GiB, ETA 12:41");
}

static void parts_go_in_order_of_importance(void **state) {
    (void)state;
    expect_at(100, "generate  [======>        ]  43 %  4,312 of 10,000 lines, 68,992 samples, 8,120 "
                   "tokens/s, ETA 12:41");
    expect_at(80, "generate  [====>      ]  43 %  4,312 of 10,000 lines, 8,120 tokens/s, ETA 12:41");
    expect_at(70, "generate  43 %  4,312 of 10,000 lines, 8,120 tokens/s, ETA 12:41");
    expect_at(60, "generate  43 %  4,312 of 10,000 lines, ETA 12:41");
    expect_at(40, "generate  43 %  ETA 12:41");
    expect_at(20, "43 %  ETA 12:41");
    expect_at(10, "43 %");
    expect_at(3, "43");
    expect_at(1, "");
}

static void a_line_is_shorter_than_any_terminal(void **state) {
    (void)state;
    static const progress_state states[] = {{0, 0, 0, 0},
                                            {0, 0, 0, 1},
                                            {7, 7, 7, 0},
                                            {UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX},
                                            {5, 80, 9, 7}};
    for (size_t i = 0; i < sizeof states / sizeof *states; i++)
        for (int columns = 1; columns < 400; columns++) {
            char line[PROGRESS_LINE_BYTES];
            progress_view v = example;
            v.now = states[i];
            v.columns = columns;
            progress_format(line, &v);
            assert_in_range(strlen(line), 0, columns - 1);
        }
    char what[400], line[PROGRESS_LINE_BYTES];
    memset(what, 'w', sizeof what);
    what[399] = '\0';
    progress_view v = example;
    v.what = what;
    progress_format(line, &v);
    assert_non_null(strstr(line, "ETA 12:41"));
}

static void what_is_not_known_is_left_out(void **state) {
    (void)state;
    progress_view v = {.what = "generate",
                       .now = {1000, 999, 5, 0},
                       .tokens_per_second = 3,
                       .eta_seconds = 60,
                       .columns = 90};
    expect_line(&v, "generate  1,000 lines, 999 samples, 3 tokens/s");
    v = (progress_view){
        .what = "merge", .now = {1, 2, 3, 1000000}, .tokens_per_second = -1, .eta_seconds = -1};
    expect_line(&v, "merge  0 %  1 of 1,000,000 lines, 2 samples");
}

static void percent_is_100_only_at_the_end(void **state) {
    (void)state;
    progress_view v = {
        .what = "x", .now = {99999, 0, 0, 100000}, .tokens_per_second = -1, .eta_seconds = -1, .columns = 46};
    expect_line(&v, "x  [========>]  99 %  99,999 of 100,000 lines");
    v.now.lines = 100000;
    expect_line(&v, "x  [========]  100 %  100,000 of 100,000 lines");
    v.now.lines = 100001; /* more than were counted */
    expect_line(&v, "x  [========]  100 %  100,001 of 100,000 lines");
}

static void an_eta_has_hours_when_it_needs_them(void **state) {
    (void)state;
    static const struct {
        double seconds;
        const char *text;
    } cases[] = {{0, "0:00"},           {59.9, "0:59"}, {3599, "59:59"}, {3723, "1:02:03"},
                 {360000, "100:00:00"}, {4e6, NULL},    {INFINITY, NULL}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char line[PROGRESS_LINE_BYTES];
        progress_view v = example;
        v.eta_seconds = cases[i].seconds;
        progress_format(line, &v);
        const char *eta = strstr(line, "ETA ");
        if (cases[i].text)
            assert_string_equal(eta + 4, cases[i].text);
        else
            assert_null(eta);
    }
}

static void the_last_line_sums_up(void **state) {
    (void)state;
    char line[PROGRESS_LINE_BYTES];
    progress_state none = {0}, some = {40, 160, 1000, 0}, end = {1000, 4000, 61000, 1000};
    progress_format_end(line, "generate", &none, &end, 61);
    assert_string_equal(
        line, "generate  1,000 of 1,000 lines, 4,000 samples, 61,000 tokens in 1:01, 1,000 tokens/s");
    progress_format_end(line, "generate", &some, &end, 30);
    assert_string_equal(
        line,
        "generate  1,000 of 1,000 lines, 4,000 samples; this run: 60,000 tokens in 0:30, 2,000 tokens/s");
}

static void a_rate_is_exact_when_steady_and_follows_a_change(void **state) {
    (void)state;
    progress_rate r = {.memory_seconds = 10};
    progress_rate_add(&r, 50, 0.5);
    assert_true(progress_rate_per_second(&r) < 0); /* too early to tell */
    for (int i = 0; i < 100; i++) progress_rate_add(&r, 10, 0.1);
    assert_true(fabs(progress_rate_per_second(&r) - 100) < 1e-6);
    for (int i = 0; i < 500; i++) progress_rate_add(&r, 30, 0.1);
    assert_true(progress_rate_per_second(&r) > 295 && progress_rate_per_second(&r) < 300);
}

/* ---- Without a terminal. */

static void a_file_gets_a_line_at_first_and_every_30_seconds(void **state) {
    (void)state;
    char *text = NULL;
    FILE *out = tmpfile();
    progress_state start = {1000, 2000, 500000, 4000}, now = start;
    progress *p = progress_open_at(out, "generate", &start, 100);
    for (int i = 0; i < 700; i++) { /* 70 seconds: 5 lines and 500 tokens a second */
        if (i % 2) now.lines++;
        now.samples++;
        now.tokens += 50;
        progress_update_at(p, &now, 100 + i / 10.0);
    }
    progress_print(p, "a warning");
    progress_close(p, &now);
    long n = ftell(out);
    text = calloc(1, (size_t)n + 1);
    rewind(out);
    assert_int_equal(fread(text, 1, (size_t)n, out), n);
    fclose(out);
    assert_null(strchr(text, '\r'));
    assert_null(strchr(text, '\x1b'));
    const char *lines[8];
    int n_lines = 0;
    for (char *line = strtok(text, "\n"); line && n_lines < 8; line = strtok(NULL, "\n"))
        lines[n_lines++] = line;
    assert_int_equal(n_lines, 5);
    assert_non_null(strstr(lines[0], "generate  25 %  1,000 of 4,000 lines, 2,001 samples, "));
    assert_null(strstr(lines[0], "tokens/s"));
    assert_non_null(strstr(lines[1], "1,150 of 4,000 lines, 2,301 samples, 50")); /* 50x tokens/s */
    assert_non_null(strstr(lines[1], "ETA 9:30")); /* 2,850 lines at 5 a second */
    assert_non_null(strstr(lines[2], "1,300 of 4,000 lines"));
    assert_non_null(strstr(lines[2], "ETA 9:00"));
    assert_string_equal(lines[3], "a warning");
    assert_non_null(strstr(lines[4], "1,350 of 4,000 lines, 2,700 samples; this run: 35,000 tokens in "));
    free(text);
}

static void quiet_prints_nothing(void **state) {
    (void)state;
    capture c;
    progress_state s = {1, 2, 3, 4};
    capture_start(&c, stderr);
    progress *p = progress_open("generate", &s, true);
    progress_update(p, &s);
    progress_print(p, "a warning");
    progress_close(p, &s);
    assert_string_equal(capture_stop(&c), "");
    assert_null(p);
}

static void without_memory_it_is_quiet(void **state) {
    (void)state;
    progress_state s = {0};
    for (long n = 0;; n++) {
        long live = mem_live();
        mem_fail_after(n);
        progress *p = progress_open("generate", &s, false);
        bool fired = mem_fail_stop();
        assert_true(fired == !p);
        if (fired) {
            assert_int_equal(mem_live(), live);
            progress_update(p, &s);
            progress_close(p, &s);
            continue;
        }
        capture c;
        capture_start(&c, stderr);
        progress_close(p, &s);
        assert_string_equal(capture_stop(&c), "generate  0 lines, 0 samples, 0 tokens in 0:00, 0 tokens/s\n");
        assert_int_equal(mem_live(), live);
        return;
    }
}

/* ---- On a terminal. */

/* A terminal of our own, and what it shows: rows are cut at line feeds; a row that reaches `columns` fails.
 */
typedef struct screen {
    int master;
    FILE *slave;
    int columns;
    char rows[16][256];
    int row, at, n_redraws;
} screen;

static void screen_open(screen *s, int columns) {
    *s = (screen){.master = posix_openpt(O_RDWR | O_NOCTTY), .columns = columns};
    assert_true(s->master >= 0);
    assert_int_equal(grantpt(s->master), 0);
    assert_int_equal(unlockpt(s->master), 0);
    s->slave = fopen(ptsname(s->master), "r+");
    assert_non_null(s->slave);
    struct winsize size = {.ws_row = 24, .ws_col = (unsigned short)columns};
    assert_int_equal(ioctl(s->master, TIOCSWINSZ, &size), 0);
    fcntl(s->master, F_SETFL, O_NONBLOCK);
}

static void screen_take(screen *s, const char *bytes, size_t n) {
    for (size_t i = 0; i < n; i++) {
        char *row = s->rows[s->row];
        if (bytes[i] == '\r') {
            s->at = 0;
        } else if (bytes[i] == '\n') {
            assert_in_range(++s->row, 0, 15);
        } else if (bytes[i] == '\x1b') {
            assert_memory_equal(bytes + i, "\x1b[K", 3);
            memset(row + s->at, 0, sizeof s->rows[0] - (size_t)s->at);
            i += 2;
            s->n_redraws++;
        } else {
            row[s->at++] = bytes[i];
            if (s->columns > 0) assert_in_range(s->at, 1, s->columns - 1);
        }
    }
}

/* What was written since the last time. */
static void screen_read(screen *s) {
    char bytes[65536];
    size_t n = 0;
    ssize_t got;
    tcdrain(fileno(s->slave));
    while (n < sizeof bytes && (got = read(s->master, bytes + n, sizeof bytes - n)) > 0) n += (size_t)got;
    screen_take(s, bytes, n);
}

static void screen_close(screen *s) {
    fclose(s->slave);
    close(s->master);
}

static void a_bar_is_redrawn_in_place_and_makes_way(void **state) {
    (void)state;
    setenv("TERM", "xterm", 1);
    static const char want[] =
        "generate  [=====>     ]  48 %  48 of 100 lines, 0 samples, 0 tokens/s, ETA 0:02";
    screen s;
    screen_open(&s, 80);
    progress_state start = {0, 0, 0, 100}, now = start;
    progress *p = progress_open_at(s.slave, "generate", &start, 10);
    progress_print(p, "first words");
    for (int i = 0; i < 200; i++) {
        now.lines = (uint64_t)i / 4;
        progress_update_at(p, &now, 10 + i * 0.01);
        screen_read(&s);
    }
    assert_string_equal(s.rows[0], "first words");
    assert_string_equal(s.rows[1], want);
    progress_print(p, "a warning");
    screen_read(&s);
    assert_string_equal(s.rows[1], "a warning");
    assert_string_equal(s.rows[2], want);
    s.columns = 0; /* the last line may be long */
    progress_close(p, &now);
    screen_read(&s);
    assert_memory_equal(s.rows[2], "generate  49 of 100 lines, 0 samples, 0 tokens in ", 50);
    assert_string_equal(s.rows[3], "");
    screen_close(&s);
}

static void a_terminal_is_drawn_ten_times_a_second_at_most(void **state) {
    (void)state;
    setenv("TERM", "xterm", 1);
    screen s;
    screen_open(&s, 100);
    progress_state now = {0, 0, 0, 100};
    progress *p = progress_open_at(s.slave, "generate", &now, 0);
    for (int i = 0; i < 1000; i++) {
        progress_update_at(p, &now, i * 0.001 + 0.0005);
        screen_read(&s);
    }
    assert_in_range(s.n_redraws, 9, 10);
    progress_close(p, &now);
    screen_close(&s);
}

static void a_terminal_of_another_size_is_noticed(void **state) {
    (void)state;
    setenv("TERM", "xterm", 1);
    screen s;
    screen_open(&s, 0); /* it does not tell: 80 */
    progress_state now = {50, 100, 1000, 100};
    progress *p = progress_open_at(s.slave, "generate", &now, 0);
    for (int i = 0; i < 5; i++) progress_update_at(p, &now, i);
    screen_read(&s);
    assert_int_equal(strlen(s.rows[0]), 79);
    struct winsize size = {.ws_row = 24, .ws_col = 30};
    assert_int_equal(ioctl(s.master, TIOCSWINSZ, &size), 0);
    progress_update_at(p, &now, 10);
    screen_read(&s);
    assert_in_range(strlen(s.rows[0]), 10, 29);
    progress_close(p, &now);
    screen_close(&s);
}

static void a_dumb_terminal_gets_plain_lines(void **state) {
    (void)state;
    static const char *const terms[] = {"dumb", "", NULL};
    for (size_t i = 0; i < 3; i++) {
        if (terms[i])
            setenv("TERM", terms[i], 1);
        else
            unsetenv("TERM");
        screen s;
        screen_open(&s, 200);
        progress_state now = {50, 100, 1000, 100};
        progress *p = progress_open_at(s.slave, "generate", &now, 0);
        for (int k = 0; k < 29; k++) progress_update_at(p, &now, k);
        progress_close(p, &now);
        screen_read(&s);
        assert_int_equal(s.n_redraws, 0);
        assert_int_equal(s.row, 2);
        screen_close(&s);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_plain_line_tells_everything),
        cmocka_unit_test(a_terminal_gets_a_bar_as_long_as_there_is_room),
        cmocka_unit_test(parts_go_in_order_of_importance),
        cmocka_unit_test(a_line_is_shorter_than_any_terminal),
        cmocka_unit_test(what_is_not_known_is_left_out),
        cmocka_unit_test(percent_is_100_only_at_the_end),
        cmocka_unit_test(an_eta_has_hours_when_it_needs_them),
        cmocka_unit_test(the_last_line_sums_up),
        cmocka_unit_test(a_rate_is_exact_when_steady_and_follows_a_change),
        cmocka_unit_test(a_file_gets_a_line_at_first_and_every_30_seconds),
        cmocka_unit_test(quiet_prints_nothing),
        cmocka_unit_test(without_memory_it_is_quiet),
        cmocka_unit_test(a_bar_is_redrawn_in_place_and_makes_way),
        cmocka_unit_test(a_terminal_is_drawn_ten_times_a_second_at_most),
        cmocka_unit_test(a_terminal_of_another_size_is_noticed),
        cmocka_unit_test(a_dumb_terminal_gets_plain_lines),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
