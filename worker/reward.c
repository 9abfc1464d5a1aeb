/* A child process, a thread that writes what it reads, a thread that reads what it prints, and a list between
 * either of them and the asking thread.
 *
 * One eventfd, `over`, becomes readable for good when no answer can come any more.  Both threads watch it
 * beside their pipe, so that neither waits for a program that is not there, or that we have given up. */
#include "worker/reward.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define LOOK_MS 500      /* how often a silent program is asked whether it has ended */
#define EXIT_SECONDS 1.0 /* how long the end of a program may be after the end of its output */
#define EXIT_LOOK_NS 1000000
#define SHOWN 60 /* bytes of a wrong line that a message shows */

/* A line that waits to be written. */
typedef struct question {
    struct question *next;
    size_t n;
    char bytes[]; /* [n] with the line feed */
} question;

/* What was read and is no whole line yet. */
typedef struct input {
    char bytes[REWARD_MAX_LINE + 1]; /* a whole line with its line feed fits */
    size_t n;
} input;

struct reward {
    pid_t pid;   /* the shell, and its process group; 0: not started.  Reaped by reward_close() alone */
    int ask_fd;  /* its stdin, does not block; the writing thread's, which closes it at its end */
    int read_fd; /* its stdout; the reading thread's */
    int over_fd;
    bool has_reader, has_writer;
    pthread_t reader, writer;
    input *in;  /* the reading thread's */
    char *line; /* the asking thread's: the sample being asked */
    size_t n_line, cap_line;

    pthread_mutex_t mutex;     /* guards what follows; no other lock is taken under it */
    pthread_cond_t changed;    /* for the asking thread: what reward_take() looks at */
    pthread_cond_t handed;     /* for the writing thread: what next_question() looks at */
    uint64_t n_asked, n_taken; /* changed by the asking thread, which may read them without the lock */
    uint64_t n_given;          /* of those asked, what was written, if only in part */
    uint64_t n_answered;
    question *first_question, **end_question; /* not written yet */
    size_t n_waiting;                         /* bytes of them, and of the one being written */
    bool no_more;                             /* questions come */
    bool input_closed;                        /* by the program, before all was written */
    double *answers;                          /* the n_answered - n_taken that wait, from `first` on */
    size_t first, cap;
    bool is_over, stopped;
    cop_error failure; /* of the reading thread; COP_OK if there was none */
    char how[80];      /* how the program ended, for messages */
};

/* ---- The child. */

/* The environment with PYTHONUNBUFFERED=1, its strings borrowed (mem_free). */
static char **unbuffered_environment(void) {
    static char unbuffered[] = "PYTHONUNBUFFERED=1";
    size_t n = 0, used = 0;
    while (environ[n]) n++;
    char **copy = mem_alloc(n + 2, sizeof *copy);
    if (!copy) return NULL;
    for (size_t i = 0; i < n; i++)
        if (strncmp(environ[i], unbuffered, strlen("PYTHONUNBUFFERED=")) != 0) copy[used++] = environ[i];
    copy[used++] = unbuffered;
    copy[used] = NULL;
    return copy;
}

/* Start the shell on these ends of the pipes; returns 0 or an errno.  in_fd may be 0 or 1, if ours are
 * closed, but out_fd was opened after three others and is not overwritten by the first dup2. */
static int spawn(pid_t *pid, const char *command, int in_fd, int out_fd) {
    char **environment = unbuffered_environment();
    if (!environment) return ENOMEM;
    char *const argv[] = {"sh", "-c", (char *)(uintptr_t)command, NULL};
    posix_spawnattr_t how;
    posix_spawn_file_actions_t files;
    sigset_t none, all;
    sigemptyset(&none), sigfillset(&all);
    posix_spawnattr_init(&how);
    posix_spawnattr_setflags(&how, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    posix_spawnattr_setpgroup(&how, 0);
    posix_spawnattr_setsigmask(&how, &none);
    posix_spawnattr_setsigdefault(&how, &all);
    posix_spawn_file_actions_init(&files);
    int e = posix_spawn_file_actions_adddup2(&files, in_fd, STDIN_FILENO);
    if (!e) e = posix_spawn_file_actions_adddup2(&files, out_fd, STDOUT_FILENO);
    if (!e) e = posix_spawn_file_actions_addclosefrom_np(&files, STDERR_FILENO + 1);
    if (!e) e = posix_spawn(pid, "/bin/sh", &files, &how, argv, environment);
    posix_spawn_file_actions_destroy(&files);
    posix_spawnattr_destroy(&how);
    mem_free(environment);
    return e;
}

/* Make both pipes and start the shell.  Returns 0 or an errno; ours are then in *r, to be closed. */
static int start(reward *r, const char *command) {
    int in[2], out[2];
    r->over_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (r->over_fd < 0) return errno;
    if (pipe2(in, O_CLOEXEC)) return errno;
    r->ask_fd = in[1];
    int e = pipe2(out, O_CLOEXEC) ? errno : 0;
    if (!e) {
        r->read_fd = out[0];
        if (fcntl(in[1], F_SETFL, O_NONBLOCK)) e = errno;
        if (!e) e = spawn(&r->pid, command, in[0], out[1]);
        if (e) r->pid = 0;
        close(out[1]);
    }
    close(in[0]);
    return e;
}

/* Whether the shell has ended, leaving it to be reaped: its number stays taken.  *info tells how, and is zero
 * where nobody knows because this process ignores SIGCHLD. */
static bool has_exited(const reward *r, siginfo_t *info) {
    *info = (siginfo_t){0};
    int e;
    do e = waitid(P_PID, (id_t)r->pid, info, WEXITED | WNOWAIT | WNOHANG);
    while (e && errno == EINTR);
    return e || info->si_pid != 0;
}

static void kill_group(const reward *r) {
    siginfo_t info;
    /* An unknown end means that the number may be another's by now. */
    if (has_exited(r, &info) && info.si_pid == 0) return;
    kill(-r->pid, SIGKILL);
}

static void signal_over(reward *r) {
    uint64_t one = 1;
    ssize_t n =
        write(r->over_fd, &one, sizeof one); /* can only fail by being full, and then it is readable */
    (void)n;
}

/* ---- Reading answers. */

/* A line as a message shows it: printable ASCII, cut. */
static void show_line(char out[SHOWN + 4], const char *line, size_t n) {
    size_t shown = n < SHOWN ? n : SHOWN;
    for (size_t i = 0; i < shown; i++) out[i] = line[i] >= ' ' && line[i] <= '~' ? line[i] : '?';
    strcpy(out + shown, n > shown ? "..." : "");
}

/* The number in a line, NaN for null.  False if it is no answer. */
static bool parse_answer(const char *line, size_t n, double *value) {
    if (n > REWARD_MAX_LINE) return false;
    json_t *root =
        json_loadb(line, n, JSON_DECODE_ANY | JSON_DECODE_INT_AS_REAL | JSON_REJECT_DUPLICATES, NULL);
    const json_t *answer = json_is_object(root) ? json_object_get(root, "reward") : root;
    bool ok = json_is_real(answer) || json_is_null(answer);
    if (ok) *value = json_is_real(answer) ? json_real_value(answer) : NAN;
    json_decref(root);
    return ok;
}

/* Put an answer at the end of the list, under the lock.  The list is moved to its start when half of it has
 * been taken, so that it never holds more than twice what was owing at once. */
static bool put_answer(reward *r, double value) {
    size_t n = (size_t)(r->n_answered - r->n_taken);
    if (r->first + n == r->cap && r->first > 0 && r->first >= n) {
        memmove(r->answers, r->answers + r->first, n * sizeof *r->answers);
        r->first = 0;
    }
    if (!mem_grow((void **)&r->answers, &r->cap, r->first + n + 1, sizeof *r->answers)) return false;
    r->answers[r->first + n] = value;
    r->n_answered++;
    return true;
}

/* Take in one line.  What is wrong with it goes into r->failure. */
static cop_status take_line(reward *r, const char *line, size_t n) {
    double value = 0;
    char shown[SHOWN + 4];
    bool ok = parse_answer(line, n, &value);
    show_line(shown, line, n);
    pthread_mutex_lock(&r->mutex);
    cop_error *err = &r->failure;
    uint64_t number = r->n_answered + 1;
    if (number > r->n_given)
        cop_fail(err, COP_EINVAL,
                 "could not match line %" PRIu64 " of the reward program, \"%s\": it was asked for %" PRIu64
                 " so far, one line each",
                 number, shown, r->n_given);
    else if (!ok)
        cop_fail(err, COP_EFORMAT,
                 "could not read line %" PRIu64
                 " of the reward program, \"%s\": an answer is a finite number or null",
                 number, shown);
    else if (!put_answer(r, value))
        cop_fail(err, COP_ENOMEM, "could not allocate a list of rewards");
    pthread_cond_signal(&r->changed);
    cop_status status = err->status;
    pthread_mutex_unlock(&r->mutex);
    return status;
}

/* Take in the whole lines.  Fails like take_line(); a line that does not fit is none. */
static cop_status take_lines(reward *r, size_t n_new) {
    input *in = r->in;
    size_t start = 0, look = in->n;
    in->n += n_new;
    for (char *end; (end = memchr(in->bytes + look, '\n', in->n - look)); look = start) {
        cop_status status = take_line(r, in->bytes + start, (size_t)(end - in->bytes) - start);
        if (status != COP_OK) return status;
        start = (size_t)(end - in->bytes) + 1;
    }
    if (start == 0 && in->n == sizeof in->bytes) return take_line(r, in->bytes, in->n);
    memmove(in->bytes, in->bytes + start, in->n - start);
    in->n -= start;
    return COP_OK;
}

/* Wait for output.  False if there will be none: reward_stop(), or the shell has ended and all is quiet. */
static bool wait_for_output(const reward *r) {
    struct pollfd fds[] = {{.fd = r->read_fd, .events = POLLIN}, {.fd = r->over_fd, .events = POLLIN}};
    siginfo_t info;
    for (bool exited = false;; exited = has_exited(r, &info)) {
        int n = poll(fds, 2, LOOK_MS);
        if (n < 0) continue;
        if (fds[1].revents) return false;
        if (n > 0) return true;
        if (exited) return false;
    }
}

/* Give the shell a moment to end, and note how it did.  True if it ended well. */
static bool note_end(reward *r) {
    double until = clock_seconds() + EXIT_SECONDS;
    siginfo_t info;
    bool exited;
    while (!(exited = has_exited(r, &info)) && clock_seconds() < until)
        nanosleep(&(struct timespec){.tv_nsec = EXIT_LOOK_NS}, NULL);
    if (!exited)
        snprintf(r->how, sizeof r->how, "it closed its output");
    else if (info.si_pid == 0)
        snprintf(r->how, sizeof r->how, "it ended");
    else if (info.si_code == CLD_EXITED)
        snprintf(r->how, sizeof r->how, "it ended with exit status %d", info.si_status);
    else
        snprintf(r->how, sizeof r->how, "signal %d ended it", info.si_status);
    return exited && info.si_code == CLD_EXITED && info.si_status == 0;
}

static bool is_stopped(reward *r) {
    pthread_mutex_lock(&r->mutex);
    bool stopped = r->stopped;
    pthread_mutex_unlock(&r->mutex);
    return stopped;
}

static void *read_answers(void *arg) {
    reward *r = arg;
    cop_status status = COP_OK;
    while (status == COP_OK && wait_for_output(r)) {
        ssize_t n = read(r->read_fd, r->in->bytes + r->in->n, sizeof r->in->bytes - r->in->n);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) break;
        status = take_lines(r, (size_t)n);
    }
    if (is_stopped(r))
        snprintf(r->how, sizeof r->how, "it was stopped");
    else if (status == COP_OK && note_end(r) && r->in->n > 0) /* else the last line may be a part of one */
        take_line(r, r->in->bytes, r->in->n);
    pthread_mutex_lock(&r->mutex);
    r->is_over = true;
    pthread_cond_signal(&r->changed);
    pthread_cond_signal(&r->handed);
    pthread_mutex_unlock(&r->mutex);
    signal_over(r);
    return NULL;
}

static void close_fd(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

/* ---- Writing questions. */

/* Wait for the next question, which is then the caller's.  NULL: all are written, or nobody reads them. */
static question *next_question(reward *r) {
    pthread_mutex_lock(&r->mutex);
    while (!r->first_question && !r->no_more && !r->is_over && !r->stopped)
        pthread_cond_wait(&r->handed, &r->mutex);
    question *q = r->is_over || r->stopped ? NULL : r->first_question;
    if (q) {
        r->first_question = q->next;
        if (!q->next) r->end_question = &r->first_question;
        r->n_given++; /* now, since its answer may come before the last write() returns */
    }
    pthread_mutex_unlock(&r->mutex);
    return q;
}

/* Write it whole.  False if the program takes no more. */
static bool write_question(const reward *r, const question *q) {
    struct pollfd fds[] = {{.fd = r->ask_fd, .events = POLLOUT}, {.fd = r->over_fd, .events = POLLIN}};
    for (size_t done = 0; done < q->n;) {
        ssize_t n = write(r->ask_fd, q->bytes + done, q->n - done);
        if (n >= 0) {
            done += (size_t)n;
        } else if (errno == EAGAIN) {
            if (poll(fds, 2, -1) > 0 && fds[1].revents) return false;
        } else if (errno != EINTR) {
            return false;
        }
    }
    return true;
}

/* The program takes no more.  It gets a moment to end, so that its answers are in and the error tells how it
 * ended. */
static void note_closed_input(reward *r) {
    struct pollfd over = {.fd = r->over_fd, .events = POLLIN};
    double until = clock_seconds() + 2 * EXIT_SECONDS, left;
    while ((left = until - clock_seconds()) > 0 && poll(&over, 1, (int)(left * 1000) + 1) < 0) {
    }
    pthread_mutex_lock(&r->mutex);
    r->input_closed = !r->stopped; /* that is told when the reading thread has noticed too */
    pthread_cond_signal(&r->changed);
    pthread_mutex_unlock(&r->mutex);
}

static void *write_questions(void *arg) {
    reward *r = arg;
    bool ok = true;
    for (question *q; ok && (q = next_question(r));) {
        ok = write_question(r, q);
        pthread_mutex_lock(&r->mutex);
        r->n_waiting -= q->n;
        pthread_mutex_unlock(&r->mutex);
        mem_free(q);
    }
    if (!ok) note_closed_input(r);
    close_fd(&r->ask_fd);
    return NULL;
}

/* ---- Opening and closing. */

/* Start both threads; signals are for the others, and SIGPIPE for nobody.  Returns 0 or an errno. */
static int start_threads(reward *r) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int e = pthread_create(&r->reader, NULL, read_answers, r);
    r->has_reader = !e;
    if (!e) {
        e = pthread_create(&r->writer, NULL, write_questions, r);
        r->has_writer = !e;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return e;
}

cop_status reward_open(reward **out, const char *command, cop_error *err) {
    *out = NULL;
    reward *r = mem_zalloc(1, sizeof *r);
    if (!r) return cop_fail(err, COP_ENOMEM, "could not allocate a reward program's state");
    r->ask_fd = r->read_fd = r->over_fd = -1;
    r->end_question = &r->first_question;
    pthread_mutex_init(&r->mutex, NULL);
    pthread_condattr_t monotonic; /* as clock_seconds() */
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&r->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_cond_init(&r->handed, NULL);
    r->in = mem_zalloc(1, sizeof *r->in);
    int e = r->in ? start(r, command) : ENOMEM;
    if (!e) e = start_threads(r);
    if (!e) {
        *out = r;
        return COP_OK;
    }
    reward_close(r);
    return cop_fail(err, e == ENOMEM ? COP_ENOMEM : COP_EIO, "could not start the reward program \"%s\": %s",
                    command, strerror(e));
}

void reward_stop(reward *r) {
    pthread_mutex_lock(&r->mutex);
    r->stopped = true;
    pthread_cond_signal(&r->handed);
    pthread_mutex_unlock(&r->mutex);
    signal_over(r);
    kill_group(r);
}

static void free_questions(reward *r) {
    for (question *q; (q = r->first_question);) {
        r->first_question = q->next;
        mem_free(q);
    }
}

void reward_close(reward *r) {
    if (!r) return;
    if (r->pid) reward_stop(r);
    if (r->has_reader) pthread_join(r->reader, NULL);
    if (r->has_writer) pthread_join(r->writer, NULL);
    while (r->pid && waitpid(r->pid, NULL, 0) < 0 && errno == EINTR) {
    }
    close_fd(&r->ask_fd), close_fd(&r->read_fd), close_fd(&r->over_fd);
    pthread_cond_destroy(&r->changed);
    pthread_cond_destroy(&r->handed);
    pthread_mutex_destroy(&r->mutex);
    free_questions(r);
    mem_free(r->in), mem_free(r->line), mem_free(r->answers);
    mem_free(r);
}

/* ---- Asking. */

/* Wait, under the lock, until something changes; false if it is clock_seconds() == until. */
static bool wait_until(reward *r, double until) {
    if (!(until < (double)INT32_MAX)) /* seconds since the machine started: beyond is never */
        return pthread_cond_wait(&r->changed, &r->mutex) == 0;
    struct timespec t = {0};
    if (until > 0) t = (struct timespec){(time_t)until, (long)(fmod(until, 1.0) * 1e9)};
    return pthread_cond_timedwait(&r->changed, &r->mutex, &t) != ETIMEDOUT;
}

/* Under the lock: why there is nothing more.  The first failure wins. */
static cop_status fail_over(const reward *r, const char *what, cop_error *err) {
    if (r->failure.status == COP_OK)
        return cop_fail(err, COP_EIO, "could not %s: %s", what, r->is_over ? r->how : "it closed its input");
    if (err) *err = r->failure;
    return r->failure.status;
}

static int append_to_line(const char *bytes, size_t n, void *context) {
    reward *r = context;
    if (!mem_grow((void **)&r->line, &r->cap_line, r->n_line + n, 1)) return -1;
    memcpy(r->line + r->n_line, bytes, n);
    r->n_line += n;
    return 0;
}

/* The sample as a question of its own, since `line` has room to spare.  NULL without memory. */
static question *question_of(reward *r, json_t *sample) {
    r->n_line = 0;
    if (json_dump_callback(sample, append_to_line, r, JSON_REAL_PRECISION(9)) || append_to_line("\n", 1, r))
        return NULL;
    question *q = mem_alloc(1, sizeof *q + r->n_line);
    if (!q) return NULL;
    *q = (question){.n = r->n_line};
    memcpy(q->bytes, r->line, r->n_line);
    return q;
}

cop_status reward_ask(reward *r, json_t *sample, cop_error *err) {
    question *q = question_of(r, sample);
    if (!q) return cop_fail(err, COP_ENOMEM, "could not allocate a sample's line for the reward program");
    cop_status status = COP_OK;
    pthread_mutex_lock(&r->mutex);
    assert(!r->no_more);
    if (r->is_over || r->input_closed || r->failure.status != COP_OK) {
        status = fail_over(r, "ask the reward program", err);
        mem_free(q);
    } else {
        *r->end_question = q;
        r->end_question = &q->next;
        r->n_asked++;
        r->n_waiting += q->n;
        pthread_cond_signal(&r->handed);
    }
    pthread_mutex_unlock(&r->mutex);
    return status;
}

size_t reward_waiting_bytes(reward *r) {
    pthread_mutex_lock(&r->mutex);
    size_t n = r->n_waiting;
    pthread_mutex_unlock(&r->mutex);
    return n;
}

void reward_no_more(reward *r) {
    pthread_mutex_lock(&r->mutex);
    r->no_more = true;
    pthread_cond_signal(&r->handed);
    pthread_mutex_unlock(&r->mutex);
}

/* Under the lock: whether no answer can come to what is owing. */
static bool is_hopeless(const reward *r) {
    return r->failure.status != COP_OK || ((r->is_over || r->input_closed) && r->n_asked > r->n_taken);
}

cop_status reward_take(reward *r, double until, double *value, bool *has, cop_error *err) {
    cop_status status = COP_OK;
    *has = false;
    pthread_mutex_lock(&r->mutex);
    while (r->n_answered == r->n_taken && !r->is_over && !is_hopeless(r) && wait_until(r, until)) {
    }
    if (r->n_answered > r->n_taken) {
        *value = r->answers[r->first++];
        *has = true;
        r->n_taken++;
        if (r->n_answered == r->n_taken) r->first = 0;
    } else if (is_hopeless(r)) {
        char what[80];
        snprintf(what, sizeof what, "get %" PRIu64 " more answers of the reward program",
                 r->n_asked - r->n_taken);
        status = fail_over(r, what, err);
    }
    pthread_mutex_unlock(&r->mutex);
    return status;
}

uint64_t reward_owing(const reward *r) { return r->n_asked - r->n_taken; }
