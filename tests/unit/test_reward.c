/* Programs that judge samples, good ones and bad ones: none hangs us, kills us, or gets its answers mixed up.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <dirent.h>
#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include "worker/reward.h"

/* Answers each sample at once. */
#define AT_ONCE "while read -r line; do echo 0.5; done"

static reward *open_or_fail(const char *command) {
    reward *r;
    cop_error err = {0};
    if (reward_open(&r, command, &err) != COP_OK) fail_msg("%s", err.message);
    return r;
}

static cop_status ask(reward *r, cop_error *err) {
    json_t *sample = json_pack("{s:s}", "text", "The answer is 7.");
    cop_status status = reward_ask(r, sample, err);
    json_decref(sample);
    return status;
}

static void ask_or_fail(reward *r, int n) {
    cop_error err = {0};
    for (int i = 0; i < n; i++)
        if (ask(r, &err) != COP_OK) fail_msg("sample %d: %s", i, err.message);
}

/* Lines go over behind our back, so that what is wrong shows a little later. */
static cop_status ask_until_it_fails(reward *r, cop_error *err) {
    cop_status status;
    while ((status = ask(r, err)) == COP_OK) nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    return status;
}

/* A sample with a text of n bytes, which is more than a pipe holds. */
static void ask_much_or_fail(reward *r, size_t n) {
    char *text = malloc(n + 1);
    memset(text, 'x', n);
    text[n] = '\0';
    json_t *sample = json_pack("{s:s}", "text", text);
    cop_error err = {0};
    if (reward_ask(r, sample, &err) != COP_OK) fail_msg("%s", err.message);
    json_decref(sample);
    free(text);
}

#define MUCH ((size_t)1 << 20)

static double take_or_fail(reward *r) {
    double value = -77;
    bool has;
    cop_error err = {0};
    if (reward_take(r, INFINITY, &value, &has, &err) != COP_OK) fail_msg("%s", err.message);
    assert_true(has);
    return value;
}

/* Nothing is owing, and nothing more comes to the program's end. */
static void expect_end(reward *r) {
    double value;
    bool has = true;
    cop_error err = {0};
    if (reward_take(r, INFINITY, &value, &has, &err) != COP_OK) fail_msg("%s", err.message);
    assert_false(has);
    assert_int_equal(reward_owing(r), 0);
}

/* The next answer is a failure whose message has `part` in it, and so is the one after. */
static void expect_failure(reward *r, cop_status want, const char *part) {
    for (int i = 0; i < 2; i++) {
        double value;
        bool has = true;
        cop_error err = {0};
        assert_int_equal(reward_take(r, INFINITY, &value, &has, &err), want);
        if (!strstr(err.message, part)) fail_msg("\"%s\" lacks \"%s\"", err.message, part);
        assert_false(has);
    }
}

/* What a program answers that is asked once. */
static double answer_of(const char *command) {
    char after_reading[400];
    snprintf(after_reading, sizeof after_reading, "read -r line; %s", command);
    reward *r = open_or_fail(after_reading);
    ask_or_fail(r, 1);
    double value = take_or_fail(r);
    reward_close(r);
    return value;
}

/* A program that is asked `n` times answers `n_good` and then fails so. */
static void expect_bad_program(const char *command, int n, int n_good, cop_status want, const char *part) {
    reward *r = open_or_fail(command);
    ask_or_fail(r, n);
    reward_no_more(r);
    for (int i = 0; i < n_good; i++) take_or_fail(r);
    expect_failure(r, want, part);
    assert_int_equal(reward_owing(r), n - n_good);
    reward_close(r);
}

/* ---- What goes over. */

static void each_sample_is_one_line_and_gets_its_answer(void **state) {
    (void)state;
    char path[] = "/tmp/coppice-reward-XXXXXX", command[200];
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    snprintf(command, sizeof command,
             "n=0; while read -r l; do n=$((n+1)); printf '%%s\\n' \"$l\" >>%s; echo $n; done", path);
    reward *r = open_or_fail(command);
    for (int i = 1; i <= 3; i++) {
        json_t *sample =
            json_pack("{s:i, s:s, s:f}", "sample", i, "text", "two\nlines, \xc3\xa9", "logprob", -1.0 / 3);
        cop_error err = {0};
        if (reward_ask(r, sample, &err) != COP_OK) fail_msg("%s", err.message);
        json_decref(sample);
    }
    assert_int_equal(reward_owing(r), 3);
    for (int i = 1; i <= 3; i++) assert_true(take_or_fail(r) == i);
    reward_no_more(r);
    expect_end(r);
    reward_close(r);
    char text[400] = "";
    assert_true(read(fd, text, sizeof text - 1) > 0);
    assert_string_equal(text,
                        "{\"sample\": 1, \"text\": \"two\\nlines, \xc3\xa9\", \"logprob\": -0.333333333}\n"
                        "{\"sample\": 2, \"text\": \"two\\nlines, \xc3\xa9\", \"logprob\": -0.333333333}\n"
                        "{\"sample\": 3, \"text\": \"two\\nlines, \xc3\xa9\", \"logprob\": -0.333333333}\n");
    close(fd);
    unlink(path);
}

static void answers_are_numbers_null_or_objects_with_a_reward(void **state) {
    (void)state;
    static const struct {
        const char *line;
        double value;
    } good[] = {{"1", 1},
                {"-0.25", -0.25},
                {"1e-3", 1e-3},
                {" 2 \r", 2},
                {"123456789012345678901234567890", 123456789012345678901234567890.0},
                {"{\"why\": [1, {}], \"reward\": 0.5}", 0.5},
                {"null", NAN},
                {"{\"reward\": null}", NAN}};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        char command[200];
        snprintf(command, sizeof command, "printf '%%s\\n' '%s'", good[i].line);
        double value = answer_of(command);
        if (isnan(good[i].value) ? !isnan(value) : value != good[i].value)
            fail_msg("%s was read as %g", good[i].line, value);
    }
}

static void everything_else_is_refused_by_line(void **state) {
    (void)state;
    static const char *const bad[] = {"NaN",
                                      "nan",
                                      "inf",
                                      "-Infinity",
                                      "1e999",
                                      "true",
                                      "True",
                                      "yes",
                                      "",
                                      "\"1\"",
                                      "1 2",
                                      "0x10",
                                      "[1]",
                                      "{}",
                                      "{\"reward\": true}",
                                      "{\"reward\": \"1\"}",
                                      "{\"reward\": 1, \"reward\": 2}"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char command[200], part[200];
        snprintf(command, sizeof command, "cat >/dev/null; printf '0.25\\n%%s\\n1\\n' '%s'", bad[i]);
        snprintf(part, sizeof part,
                 "line 2 of the reward program, \"%s\": an answer is a finite number or null", bad[i]);
        expect_bad_program(command, 3, 1, COP_EFORMAT, part);
    }
    expect_bad_program("cat >/dev/null; printf 'a\\001\\377b\\n'", 1, 0, COP_EFORMAT, "\"a??b\"");
}

static void a_line_is_bounded(void **state) {
    (void)state;
    /* 65536 bytes are an answer, one more is not, and one without end neither fills memory nor hangs */
    assert_true(answer_of("printf '%065536d\\n' 0 | tr 0 ' ' | sed 's/ $/7/'") == 7);
    expect_bad_program("cat >/dev/null; printf '%065537d\\n' 0 | tr 0 ' ' | sed 's/ $/7/'", 1, 0, COP_EFORMAT,
                       "line 1 ");
    expect_bad_program("cat >/dev/null; printf 0.; exec tr '\\0' 0 </dev/zero", 1, 0, COP_EFORMAT,
                       "\"0.00000000");
}

static void a_last_line_feed_may_be_missing(void **state) {
    (void)state;
    reward *r = open_or_fail("read -r a; read -r b; printf '1\\n0.75'");
    ask_or_fail(r, 2);
    assert_true(take_or_fail(r) == 1);
    assert_true(take_or_fail(r) == 0.75);
    expect_end(r);
    reward_close(r);
    /* but what a program wrote before it was killed may be half a number */
    expect_bad_program("cat >/dev/null; printf '1\\n0.7'; kill -9 $$", 2, 1, COP_EIO, "signal 9");
}

static void a_line_too_many_is_found(void **state) {
    (void)state;
    expect_bad_program("n=$(wc -l); exec seq $((2 * n))", 2, 2, COP_EINVAL, "line 3 ");
    expect_bad_program("cat >/dev/null; exec yes 1", 5, 5, COP_EINVAL, "asked for 5 so far");
    reward *r = open_or_fail("echo 1; exec sleep 1000"); /* before any question */
    expect_failure(r, COP_EINVAL, "asked for 0 so far");
    cop_error err = {0};
    assert_int_equal(ask(r, &err), COP_EINVAL);
    assert_int_equal(reward_owing(r), 0);
    reward_close(r);
    /* an answer to what still waits here: the second question has begun, the third has not */
    r = open_or_fail("read -r a; head -c 9 >/dev/null; sleep 0.2; echo 1; echo 2; echo 3; exec sleep 1000");
    ask_or_fail(r, 1);
    ask_much_or_fail(r, MUCH);
    ask(r, NULL); /* on a slow machine that may be too late, which changes nothing below */
    for (int i = 1; i <= 2; i++) assert_true(take_or_fail(r) == i);
    expect_failure(r, COP_EINVAL, "line 3 of the reward program, \"3\": it was asked for 2 so far");
    reward_close(r);
}

/* ---- How programs end. */

static void a_program_that_ends_tells_how(void **state) {
    (void)state;
    expect_bad_program("cat >/dev/null", 3, 0, COP_EIO,
                       "could not get 3 more answers of the reward program: it ended with exit status 0");
    expect_bad_program("read -r line; echo 1; cat >/dev/null; exit 3", 3, 1, COP_EIO, "exit status 3");
    expect_bad_program("cat >/dev/null; kill -TERM $$", 1, 0, COP_EIO, "signal 15");
    expect_bad_program("cat >/dev/null; exec /no/such/program 2>/dev/null", 1, 0, COP_EIO, "exit status 127");
}

static void how_it_ends_does_not_matter_when_all_is_answered(void **state) {
    (void)state;
    reward *r = open_or_fail("read -r line; echo 1; exit 9");
    ask_or_fail(r, 1);
    assert_true(take_or_fail(r) == 1);
    expect_end(r);
    reward_close(r);
}

static void asking_a_program_that_has_ended_fails_and_kills_nobody(void **state) {
    (void)state;
    reward *r = open_or_fail("exit 5");
    cop_error err = {0};
    assert_int_equal(ask_until_it_fails(r, &err), COP_EIO);
    assert_string_equal(err.message, "could not ask the reward program: it ended with exit status 5");
    sigset_t pending;
    sigpending(&pending);
    assert_false(sigismember(&pending, SIGPIPE));
    reward_close(r);
}

static void a_program_may_close_its_input_and_answer_on(void **state) {
    (void)state;
    char path[] = "/tmp/coppice-reward-XXXXXX", command[200];
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    snprintf(command, sizeof command,
             "read -r a; read -r b; exec <&-; echo 1; while [ ! -s %s ]; do sleep 0.01; done; echo 2; exec "
             "sleep 1000",
             path);
    reward *r = open_or_fail(command);
    ask_or_fail(r, 2);
    assert_true(take_or_fail(r) == 1); /* now it is closed */
    assert_int_equal(write(fd, "x", 1), 1);
    assert_true(take_or_fail(r) == 2);
    cop_error err = {0};
    assert_int_equal(ask_until_it_fails(r, &err), COP_EIO); /* but it cannot be asked any more */
    assert_string_equal(err.message, "could not ask the reward program: it closed its input");
    reward_close(r);
    close(fd);
    unlink(path);
}

/* It waits for the first byte of a question, of which it leaves the rest. */
#define UNTIL_ASKED "dd bs=1 count=1 >/dev/null 2>&1"

static void a_program_that_leaves_questions_unread_fails_after_its_answers(void **state) {
    (void)state;
    static const struct {
        const char *end, *how;
    } cases[] = {{"exec <&-; echo 2; exec sleep 1000", "it closed its input"},
                 {UNTIL_ASKED "; echo 2; exit 3", "it ended with exit status 3"},
                 {UNTIL_ASKED "; exec <&-; sleep 0.1; echo 2; kill -9 $$", "signal 9 ended it"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char command[200];
        snprintf(command, sizeof command, "read -r a; read -r b; echo 1; %s", cases[i].end);
        reward *r = open_or_fail(command);
        ask_or_fail(r, 2);
        ask_much_or_fail(r, MUCH);
        for (int k = 1; k <= 2; k++) assert_true(take_or_fail(r) == k);
        expect_failure(r, COP_EIO, cases[i].how);
        assert_int_equal(reward_owing(r), 1);
        cop_error err = {0};
        assert_int_equal(ask(r, &err), COP_EIO);
        assert_non_null(strstr(err.message, cases[i].how));
        assert_int_equal(reward_owing(r), 1);
        reward_close(r);
    }
}

static void a_program_that_closes_its_output_has_ended(void **state) {
    (void)state;
    expect_bad_program("read -r line; exec >&-; exec sleep 1000", 1, 0, COP_EIO, "it closed its output");
    reward *r = open_or_fail("exec >&-; exec sleep 1000"); /* it never reads, so the pipe fills */
    ask_much_or_fail(r, MUCH);
    cop_error err = {0};
    assert_int_equal(ask_until_it_fails(r, &err), COP_EIO);
    assert_non_null(strstr(err.message, "it closed its output"));
    reward_close(r);
}

static void answers_may_all_come_at_the_end(void **state) {
    (void)state;
    reward *r = open_or_fail("n=$(wc -l); exec seq $n");
    ask_or_fail(r, 5000);
    double value;
    bool has = true;
    assert_int_equal(reward_take(r, clock_seconds() + 0.05, &value, &has, NULL), COP_OK);
    assert_false(has);
    reward_no_more(r);
    for (int i = 1; i <= 5000; i++) assert_true(take_or_fail(r) == i);
    expect_end(r);
    reward_close(r);
}

static void taking_does_not_wait_longer_than_told(void **state) {
    (void)state;
    reward *r = open_or_fail("exec sleep 1000");
    ask_or_fail(r, 1);
    const double untils[] = {-INFINITY, 0, clock_seconds(), clock_seconds() + 0.1};
    for (size_t i = 0; i < sizeof untils / sizeof *untils; i++) {
        double value;
        bool has = true;
        assert_int_equal(reward_take(r, untils[i], &value, &has, NULL), COP_OK);
        assert_false(has);
        assert_true(clock_seconds() >= untils[i]);
    }
    assert_int_equal(reward_owing(r), 1);
    reward_close(r);
}

/* ---- Programs that hang. */

static void *stop_soon(void *r) {
    nanosleep(&(struct timespec){.tv_nsec = 200000000}, NULL);
    reward_stop(r);
    return NULL;
}

static void stopping_frees_whoever_waits(void **state) {
    (void)state;
    for (int is_writing = 0; is_writing < 2; is_writing++) {
        reward *r = open_or_fail("exec sleep 1000");
        ask_or_fail(r, 1);
        if (is_writing) ask_much_or_fail(r, MUCH); /* then the writing thread waits too */
        pthread_t thread;
        pthread_create(&thread, NULL, stop_soon, r);
        expect_failure(r, COP_EIO, "it was stopped");
        pthread_join(thread, NULL);
        cop_error err = {0};
        assert_int_equal(ask(r, &err), COP_EIO);
        assert_string_equal(err.message, "could not ask the reward program: it was stopped");
        reward_close(r);
    }
}

static void a_program_that_never_reads_holds_up_nobody(void **state) {
    (void)state;
    enum { N = 1000 };
    const long live = mem_live();
    reward *r = open_or_fail("exec sleep 1000");
    for (int i = 0; i < N; i++) ask_much_or_fail(r, 10000); /* waiting here would be for ever */
    assert_int_equal(reward_owing(r), N);
    assert_true(mem_live() - live > N / 2); /* one block each, but for what is in the pipe */
    double value;
    bool has = true;
    assert_int_equal(reward_take(r, 0, &value, &has, NULL), COP_OK);
    assert_false(has);
    reward_no_more(r);
    reward_close(r);
    assert_int_equal(mem_live(), live);
}

static void a_process_that_ignores_its_children_still_finds_them_ended(void **state) {
    (void)state;
    void (*old)(int) = signal(SIGCHLD, SIG_IGN); /* then nobody can ask how one ended */
    reward *r = open_or_fail("read -r line; echo 1; exit 3");
    ask_or_fail(r, 1);
    assert_true(take_or_fail(r) == 1);
    expect_end(r);
    cop_error err = {0};
    assert_int_equal(ask(r, &err), COP_EIO);
    assert_string_equal(err.message, "could not ask the reward program: it ended");
    reward_close(r);
    signal(SIGCHLD, old);
}

static void closing_waits_for_no_program(void **state) {
    (void)state;
    static const char *const stubborn[] = {
        "exec sleep 1000",         "trap '' TERM INT HUP PIPE; while :; do sleep 1000; done",
        "sleep 1000 | sleep 1000", "exec yes 1",
        "kill -STOP $$",           "exit 0"};
    for (size_t i = 0; i < sizeof stubborn / sizeof *stubborn; i++) {
        reward *r = open_or_fail(stubborn[i]);
        if (i % 2) nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL); /* early and late */
        reward_close(r);
    }
    reward_close(NULL);
}

/* A process that left the group holds the program's stdout open; it answers with its number. */
#define LEAVE_SOMEBODY "read -r line; setsid sleep 100 2>/dev/null & echo $!; "

static void what_a_program_leaves_behind_holds_up_nobody(void **state) {
    (void)state;
    double start = clock_seconds();
    reward *r = open_or_fail(LEAVE_SOMEBODY "exec sleep 1000");
    ask_or_fail(r, 1);
    pid_t first = (pid_t)take_or_fail(r);
    reward_close(r);
    r = open_or_fail("read -r other; " LEAVE_SOMEBODY "exit 4");
    ask_or_fail(r, 2);
    pid_t second = (pid_t)take_or_fail(r);
    expect_failure(r, COP_EIO, "exit status 4");
    reward_close(r);
    assert_true(clock_seconds() - start < 90);
    assert_int_equal(kill(first, SIGKILL), 0); /* still there: nobody waited for it */
    assert_int_equal(kill(second, SIGKILL), 0);
}

static void closing_kills_the_whole_group(void **state) {
    (void)state;
    reward *r = open_or_fail("read -r line; sleep 1000 & echo $!; wait");
    ask_or_fail(r, 1);
    pid_t pid = (pid_t)take_or_fail(r);
    assert_int_equal(kill(pid, 0), 0);
    reward_close(r);
    char path[64], status[64] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    for (int i = 0; i < 1000; i++) { /* it is dying; a zombie until somebody reaps it */
        FILE *f = fopen(path, "r");
        if (!f) return;
        int n = fscanf(f, "%*d (%*[^)]) %63s", status);
        fclose(f);
        if (n != 1 || status[0] == 'Z' || status[0] == 'X') return;
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    fail_msg("process %d is still there, in state %s", pid, status);
}

/* ---- What a child inherits. */

static int count_descriptors(void) {
    DIR *d = opendir("/proc/self/fd");
    assert_non_null(d);
    int n = -1; /* its own */
    for (struct dirent *e; (e = readdir(d));) n += e->d_name[0] != '.';
    closedir(d);
    return n;
}

#define COUNT_DESCRIPTORS                                                                                    \
    "n=0; for fd in $(seq 0 100); do [ ! -e /proc/$$/fd/$fd ] || n=$((n+1)); done; echo $n; "

static void no_descriptor_leaks(void **state) {
    (void)state;
    int inheritable = dup(1), before = count_descriptors();
    reward *a = open_or_fail("read -r line; " COUNT_DESCRIPTORS "exec sleep 1000");
    assert_int_equal(count_descriptors(), before + 3); /* two ends and an eventfd */
    reward *b = open_or_fail("read -r line; " COUNT_DESCRIPTORS "exec sleep 1000");
    ask_or_fail(a, 1), ask_or_fail(b, 1);
    assert_true(take_or_fail(a) == 3);
    assert_true(take_or_fail(b) == 3);
    reward_close(a), reward_close(b);
    assert_int_equal(count_descriptors(), before);
    close(inheritable);
}

static void a_program_starts_even_if_our_own_stdin_and_stdout_are_closed(void **state) {
    (void)state;
    int in = dup(0), out = dup(1);
    close(0), close(1);
    reward *r = open_or_fail(AT_ONCE);
    cop_error err = {0};
    cop_status asked = ask(r, &err);
    double value = 0;
    bool has = false;
    cop_status taken = reward_take(r, clock_seconds() + 60, &value, &has, &err);
    reward_close(r);
    dup2(in, 0), dup2(out, 1);
    close(in), close(out);
    assert_int_equal(asked, COP_OK);
    assert_int_equal(taken, COP_OK);
    assert_true(has && value == 0.5);
}

static void signals_are_as_a_shell_gives_them(void **state) {
    (void)state;
    sigset_t some, before;
    sigemptyset(&some), sigaddset(&some, SIGINT), sigaddset(&some, SIGTERM), sigaddset(&some, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &some, &before);
    void (*old)(int) = signal(SIGPIPE, SIG_IGN);
    /* of the signals up to 28; posix_spawn() itself ignores the two that are the C library's own */
    double n = answer_of("grep -c 'Sig\\(Blk\\|Ign\\):.*[1-9a-f].\\{0,6\\}$' /proc/self/status");
    signal(SIGPIPE, old);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    assert_true(n == 0);
}

static void it_leads_a_group_of_its_own(void **state) {
    (void)state;
    assert_true(answer_of("read -r a b c d group rest </proc/$$/stat; echo $((group - $$))") == 0);
}

static void python_is_told_not_to_buffer(void **state) {
    (void)state;
    setenv("PYTHONUNBUFFERED", "", 1);
    setenv("COPPICE_TEST_OTHER", "41", 1);
    assert_true(answer_of("env | grep -c '^PYTHONUNBUFFERED=1$'") == 1);
    assert_true(answer_of("echo $COPPICE_TEST_OTHER") == 41);
    reward *r = open_or_fail("exec python3 -c 'import sys\nfor line in sys.stdin: print(len(line))'");
    ask_or_fail(r, 1);
    assert_true(take_or_fail(r) == strlen("{\"text\": \"The answer is 7.\"}\n"));
    reward_close(r);
}

/* ---- Much. */

static void note_signal(int signal_number) { (void)signal_number; }

static void a_sample_larger_than_the_pipe_goes_over_whatever_interrupts_it(void **state) {
    (void)state;
    struct sigaction interrupting = {.sa_handler = note_signal}, before; /* without SA_RESTART */
    sigaction(SIGALRM, &interrupting, &before);
    setitimer(ITIMER_REAL, &(struct itimerval){{0, 5000}, {0, 5000}}, NULL);
    reward *r = open_or_fail("sleep 0.2; exec wc -c");
    ask_much_or_fail(r, MUCH);
    reward_no_more(r); /* what is not written yet goes over all the same */
    assert_true(take_or_fail(r) == (double)(MUCH + strlen("{\"text\": \"\"}\n")));
    reward_close(r);
    setitimer(ITIMER_REAL, &(struct itimerval){{0, 0}, {0, 0}}, NULL);
    sigaction(SIGALRM, &before, NULL);
}

static void many_answers_need_no_more_memory_than_what_is_owing(void **state) {
    (void)state;
    enum { WARM = 600, N = 6600, OWING = 64 };
    reward *r = open_or_fail("exec python3 -c 'import sys\nfor n, line in enumerate(sys.stdin): print(n)'");
    long allocated = 0, live = 0;
    int taken = 0;
    for (int asked = 0; asked < N; asked++) {
        if (asked == WARM) allocated = mem_count(), live = mem_live();
        ask_or_fail(r, 1);
        /* time for the program to answer, so that the list of answers is never empty and never starts anew */
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
        if (reward_owing(r) == OWING) assert_true(take_or_fail(r) == taken++);
    }
    reward_no_more(r);
    while (taken < N) assert_true(take_or_fail(r) == taken++);
    expect_end(r);
    /* beside a block for each question, which is gone, a list that grows by half with all that was asked
     * would have done so five times since */
    assert_in_range(mem_count() - allocated - (N - WARM), 0, 2);
    assert_true(mem_live() <= live);
    reward_close(r);
}

static void it_survives_every_single_allocation_failure(void **state) {
    (void)state;
    long live = mem_live();
    bool fired = true;
    for (long n = 0; fired; n++) {
        mem_fail_after(n);
        reward *r = NULL;
        double value;
        bool has = true;
        cop_status status = reward_open(&r, AT_ONCE, NULL);
        for (int i = 0; i < 3 && status == COP_OK; i++) status = ask(r, NULL);
        for (int i = 0; i < 3 && status == COP_OK; i++) status = reward_take(r, INFINITY, &value, &has, NULL);
        reward_close(r);
        fired = mem_fail_stop();
        assert_int_equal(status, fired ? COP_ENOMEM : COP_OK);
        assert_int_equal(mem_live(), live);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_sample_is_one_line_and_gets_its_answer),
        cmocka_unit_test(answers_are_numbers_null_or_objects_with_a_reward),
        cmocka_unit_test(everything_else_is_refused_by_line),
        cmocka_unit_test(a_line_is_bounded),
        cmocka_unit_test(a_last_line_feed_may_be_missing),
        cmocka_unit_test(a_line_too_many_is_found),
        cmocka_unit_test(a_program_that_ends_tells_how),
        cmocka_unit_test(how_it_ends_does_not_matter_when_all_is_answered),
        cmocka_unit_test(asking_a_program_that_has_ended_fails_and_kills_nobody),
        cmocka_unit_test(a_program_may_close_its_input_and_answer_on),
        cmocka_unit_test(a_program_that_leaves_questions_unread_fails_after_its_answers),
        cmocka_unit_test(a_program_that_closes_its_output_has_ended),
        cmocka_unit_test(answers_may_all_come_at_the_end),
        cmocka_unit_test(taking_does_not_wait_longer_than_told),
        cmocka_unit_test(stopping_frees_whoever_waits),
        cmocka_unit_test(a_program_that_never_reads_holds_up_nobody),
        cmocka_unit_test(a_process_that_ignores_its_children_still_finds_them_ended),
        cmocka_unit_test(closing_waits_for_no_program),
        cmocka_unit_test(what_a_program_leaves_behind_holds_up_nobody),
        cmocka_unit_test(closing_kills_the_whole_group),
        cmocka_unit_test(no_descriptor_leaks),
        cmocka_unit_test(a_program_starts_even_if_our_own_stdin_and_stdout_are_closed),
        cmocka_unit_test(signals_are_as_a_shell_gives_them),
        cmocka_unit_test(it_leads_a_group_of_its_own),
        cmocka_unit_test(python_is_told_not_to_buffer),
        cmocka_unit_test(a_sample_larger_than_the_pipe_goes_over_whatever_interrupts_it),
        cmocka_unit_test(many_answers_need_no_more_memory_than_what_is_owing),
        cmocka_unit_test(it_survives_every_single_allocation_failure),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
