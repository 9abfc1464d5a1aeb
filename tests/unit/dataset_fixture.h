/* A small job that writes a data set, and system calls that crash the process or fail at the n-th.
 *
 * The calls by which a data set reaches the disk are replaced for the whole test program.  They are counted
 * once a fault is armed; fsync does nothing, since what the disk keeps is not tested here. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <xxhash.h>

#include "worker/dataset.h"
#include "worker/frames.h"
#include "worker/record_source.h"

/* ---- Faults. */

typedef enum fault_kind { NO_FAULT, CRASH_BEFORE, CRASH_MIDWAY, CRASH_AFTER, FAIL } fault_kind;

static struct {
    fault_kind kind;
    int left; /* calls until it happens */
    bool fired;
} fault;

static void arm(fault_kind kind, int n) {
    fault.kind = kind;
    fault.left = n;
    fault.fired = false;
}

static void crash(void) {
    kill(getpid(), SIGKILL);
    abort();
}

/* What is to happen to this call. */
static fault_kind next_fault(void) {
    if (fault.kind == NO_FAULT || fault.fired || fault.left-- > 0) return NO_FAULT;
    fault.fired = true;
    if (fault.kind == CRASH_BEFORE) crash();
    return fault.kind;
}

/* ---- What is not durable yet, kept while `watching`: a power failure may lose it. */
static struct {
    bool watching, shard, temporary, entry; /* bytes of either file; a name in the folder */
    ino_t shard_file;
    size_t n_shards; /* that the manifest tells of */
} volatile_state;

static size_t shards_told(int fd, const char *name);

static void watch_write(int fd, bool is_shard) {
    struct stat st;
    if (is_shard && fstat(fd, &st) == 0) volatile_state.shard_file = st.st_ino;
    *(is_shard ? &volatile_state.shard : &volatile_state.temporary) = true;
}

static void watch_sync(int fd) {
    struct stat st;
    assert_int_equal(fstat(fd, &st), 0);
    if (S_ISDIR(st.st_mode))
        volatile_state.entry = false;
    else if (st.st_ino == volatile_state.shard_file)
        volatile_state.shard = false;
    else
        volatile_state.temporary = false;
}

/* What enters the manifest must be durable, name and bytes. */
static void watch_rename(int fd, const char *from) {
    if (!volatile_state.watching) return;
    size_t n = shards_told(fd, from);
    assert_false(volatile_state.temporary);
    if (n > volatile_state.n_shards) assert_false(volatile_state.shard || volatile_state.entry);
    volatile_state.n_shards = n;
    volatile_state.entry = true;
}

/* A shard is made when all before it is durable. */
static void watch_create(void) {
    if (volatile_state.watching) assert_false(volatile_state.shard || volatile_state.entry);
    volatile_state.entry = true;
}

#define REPLACED(partly, whole)                                                                              \
    fault_kind kind = next_fault();                                                                          \
    if (kind == CRASH_MIDWAY || kind == FAIL) (void)!(partly);                                               \
    if (kind == CRASH_MIDWAY) crash();                                                                       \
    if (kind == FAIL) {                                                                                      \
        errno = ENOSPC;                                                                                      \
        return -1;                                                                                           \
    }                                                                                                        \
    long result = (whole);                                                                                   \
    if (kind == CRASH_AFTER) crash();                                                                        \
    return result

ssize_t pwrite(int fd, const void *bytes, size_t n, off_t offset) {
    watch_write(fd, true);
    REPLACED(syscall(SYS_pwrite64, fd, bytes, n / 2, offset), syscall(SYS_pwrite64, fd, bytes, n, offset));
}
ssize_t write(int fd, const void *bytes, size_t n) {
    watch_write(fd, false);
    REPLACED(syscall(SYS_write, fd, bytes, n / 2), syscall(SYS_write, fd, bytes, n));
}
int fsync(int fd) {
    watch_sync(fd);
    REPLACED(0L, 0L);
}
int renameat(int from_fd, const char *from, int to_fd, const char *to) {
    watch_rename(from_fd, from);
    REPLACED(0L, syscall(SYS_renameat2, from_fd, from, to_fd, to, 0));
}
int ftruncate(int fd, off_t n) { REPLACED(0L, syscall(SYS_ftruncate, fd, n)); }
int unlinkat(int fd, const char *name, int flags) { REPLACED(0L, syscall(SYS_unlinkat, fd, name, flags)); }
int mkdir(const char *path, mode_t mode) { REPLACED(0L, syscall(SYS_mkdirat, AT_FDCWD, path, mode)); }
int openat(int fd, const char *name, int flags, ...) {
    va_list args;
    va_start(args, flags);
    int mode = flags & O_CREAT ? va_arg(args, int) : 0;
    va_end(args);
    if (flags & O_EXCL) watch_create();
    REPLACED(0L, syscall(SYS_openat, fd, name, flags, mode));
}

static size_t shards_told(int fd, const char *name) {
    static char text[1 << 16];
    int file = (int)syscall(SYS_openat, fd, name, O_RDONLY);
    ssize_t n_bytes = read(file, text, sizeof text - 1);
    assert_true(n_bytes > 0);
    text[n_bytes] = 0;
    close(file);
    size_t n = 0;
    for (const char *at = text; (at = strstr(at, "\"xxh128\"")); at++) n++;
    return n;
}

/* Run `run` in a process of its own with a fault.  Whether the fault came; else it must have answered 0. */
static inline bool crashes(int (*run)(const void *context), const void *context, fault_kind kind, int n) {
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        arm(kind, n);
        _exit(run(context));
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (WIFSIGNALED(status)) {
        assert_int_equal(WTERMSIG(status), SIGKILL);
        return true;
    }
    assert_int_equal(WEXITSTATUS(status), 0);
    return false;
}

/* ---- Folders. */

static char scratch[64]; /* the folder of all tests */
static char path_buffer[4][256];

/* A path in the scratch folder; valid for three more calls. */
static const char *in_scratch(const char *name) {
    static int turn;
    char *path = path_buffer[turn++ % 4];
    snprintf(path, sizeof path_buffer[0], "%s/%s", scratch, name);
    return path;
}

static void shell(const char *format, ...) {
    char command[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(command, sizeof command, format, args);
    va_end(args);
    assert_int_equal(system(command), 0);
}

static int make_scratch(void **state) {
    (void)state;
    snprintf(scratch, sizeof scratch, "%s/coppice-dataset-XXXXXX",
             access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    return mkdtemp(scratch) ? 0 : -1;
}

static int remove_scratch(void **state) {
    (void)state;
    shell("rm -rf '%s'", scratch);
    return 0;
}

static uint8_t *read_file(const char *path, size_t *n) {
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    fseek(f, 0, SEEK_END);
    *n = (size_t)ftell(f);
    rewind(f);
    uint8_t *bytes = malloc(*n + 1);
    assert_int_equal(fread(bytes, 1, *n, f), *n);
    fclose(f);
    bytes[*n] = 0;
    return bytes;
}

static void write_file(const char *path, const void *bytes, size_t n) {
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

/* ---- The job: JOB_LINES records, three to a frame, some frames to a shard. */

#define JOB_LINES 30
#define FRAME_LINES 3

/* The record of a line; every seventh one is a failure. */
static wire_buffer record_of(uint64_t line) {
    wire_buffer out;
    char id[24];
    snprintf(id, sizeof id, "%llu", (unsigned long long)line);
    if (line % 7 == 6) {
        shard_failure f = {
            .line = line, .prompt_id = wire_text_of(id), .error = wire_text_of("it has no text")};
        assert_true(shard_encode_failure(&out, &f, NULL));
        return out;
    }
    uint32_t tokens[24];
    uint8_t mask[24];
    for (uint32_t i = 0; i < 24; i++) {
        tokens[i] = (uint32_t)(line * 2654435761u + i * 40503u) % 65536; /* so that it compresses little */
        mask[i] = i % 4 != 1;
    }
    reply_sample samples[2] = {
        {.prompt = (uint32_t)line, .n_tokens = 24, .tokens = tokens, .mask = mask},
        {.prompt = (uint32_t)line, .sample = 1, .n_tokens = 5, .tokens = tokens, .mask = mask}};
    shard_record r = {.line = line,
                      .prompt_id = wire_text_of(id),
                      .prompt_tokens = {tokens, 3},
                      .samples = samples,
                      .n_samples = 2};
    assert_true(shard_encode_record(&out, &r, NULL));
    return out;
}

typedef struct job {
    char dir[256];
    size_t shard_bytes;
    uint64_t index, of;    /* of the lines */
    uint64_t n_lines;      /* where it stops */
    bool unfinished;       /* and leaves the folder as it is then */
    int retries;           /* after errors, with the same writer */
    const char *parameter; /* in the identity */
} job;

static job job_defaults(const char *dir) {
    job j = {.shard_bytes = 900, .of = 1, .n_lines = JOB_LINES, .parameter = "a"};
    snprintf(j.dir, sizeof j.dir, "%s", dir);
    return j;
}

static cop_status open_job(dataset_writer **w, const job *j, cop_error *err) {
    json_t *identity = json_pack("{s:{s:f, s:s}, s:{s:i, s:i}}", "parameters", "temperature", 0.7, "name",
                                 j->parameter, "split", "index", (int)j->index, "of", (int)j->of);
    json_t *about = json_pack("{s:s}", "program", "test");
    assert_true(identity && about);
    dataset_options o = {.dir = j->dir, .identity = identity, .about = about, .shard_bytes = j->shard_bytes};
    cop_status status = dataset_open(w, &o, err);
    json_decref(identity);
    json_decref(about);
    return status;
}

static cop_status append_line(dataset_writer *w, uint64_t line, cop_error *err) {
    wire_buffer b = record_of(line);
    shard_view view;
    wire_error why;
    assert_true(shard_read(&view, b.bytes, b.n, &why));
    dataset_counts one = dataset_counts_of(&view);
    shard_view_free(&view);
    cop_status status = dataset_append(w, line, b.bytes, b.n, &one, err);
    wire_buffer_free(&b, NULL);
    return status;
}

/* Write what is missing, from the next line of this part on. */
static cop_status write_lines(dataset_writer *w, const job *j, cop_error *err) {
    uint64_t line = dataset_next_line(w);
    while (line % j->of != j->index) line++;
    for (; line < j->n_lines; line += j->of) {
        cop_status status = append_line(w, line, err);
        uint64_t k = line / j->of;
        if (status == COP_OK && k % FRAME_LINES == FRAME_LINES - 1) {
            if (k % 2) dataset_note(w, "input", json_pack("{s:I}", "lines", (json_int_t)JOB_LINES));
            status = dataset_flush(w, err);
        }
        if (status != COP_OK) return status;
    }
    return j->unfinished ? dataset_flush(w, err) : dataset_finish(w, err);
}

static cop_status run_job(const job *j, cop_error *err) {
    dataset_writer *w;
    cop_status status = open_job(&w, j, err);
    if (status != COP_OK) return status;
    if (!dataset_complete(w)) status = write_lines(w, j, err);
    for (int i = 0; i < j->retries && status != COP_OK; i++) status = write_lines(w, j, err);
    dataset_close(w);
    return status;
}

/* ---- What must be there at the end. */

static void check_lines(const char *path, const manifest_shard *s) {
    cop_error err;
    record_source *source;
    const shard_view *v;
    bool more;
    uint64_t first = 0, last = 0, n = 0;
    assert_int_equal(record_source_open(&source, path, &err), COP_OK);
    for (;; n++) {
        assert_int_equal(record_source_next(source, &v, &more, &err), COP_OK);
        if (!more) break;
        if (n == 0) first = v->line;
        last = v->line;
    }
    record_source_close(source);
    assert_int_equal(n, s->counts.records);
    assert_int_equal(first, s->first_line);
    assert_int_equal(last, s->last_line);
}

static void check_shard(const char *dir, const json_t *manifest, size_t i, dataset_counts *sum) {
    manifest_shard s = manifest_shard_at(manifest, i);
    char path[512], name[SHARD_NAME_CHARS], hex[40] = "";
    shard_name(name, i);
    snprintf(path, sizeof path, "%s/%s", dir, name);
    size_t n;
    uint8_t *bytes = read_file(path, &n);
    assert_int_equal(n, s.bytes);
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes, n));
    for (int k = 0; k < 16; k++) snprintf(hex + 2 * k, 3, "%02x", canonical.digest[k]);
    assert_string_equal(hex, s.xxh128);
    free(bytes);
    check_lines(path, &s);
    dataset_counts_add(sum, &s.counts);
}

static void check_manifest(const char *dir, bool complete) {
    cop_error err;
    json_t *m;
    assert_int_equal(manifest_read(&m, dir, &err), COP_OK);
    assert_non_null(m);
    assert_int_equal(manifest_complete(m), complete);
    dataset_counts sum = {0};
    for (size_t i = 0; i < manifest_n_shards(m); i++) check_shard(dir, m, i, &sum);
    const json_t *totals = json_object_get(m, "totals");
    assert_int_equal(json_integer_value(json_object_get(totals, "records")), sum.records);
    assert_int_equal(json_integer_value(json_object_get(totals, "samples")), sum.samples);
    assert_int_equal(json_integer_value(json_object_get(totals, "forced_tokens")), sum.forced_tokens);
    json_decref(m);
}

/* The records of lines index, index + of .. below n_lines, each once, in order, byte by byte. */
static void check_records(const char *path, uint64_t index, uint64_t of, uint64_t n_lines) {
    cop_error err;
    record_source *s;
    const shard_view *v;
    bool more;
    assert_int_equal(record_source_open(&s, path, &err), COP_OK);
    for (uint64_t line = index; line < n_lines; line += of) {
        if (record_source_next(s, &v, &more, &err) != COP_OK) fail_msg("line %d: %s", (int)line, err.message);
        assert_true(more);
        wire_buffer due = record_of(line);
        assert_int_equal(v->line, line);
        assert_int_equal(v->n_bytes, due.n);
        assert_memory_equal(v->bytes, due.bytes, due.n);
        wire_buffer_free(&due, NULL);
    }
    assert_int_equal(record_source_next(s, &v, &more, &err), COP_OK);
    assert_false(more);
    record_source_close(s);
}

/* Run the job to its end and check what it leaves. */
static void finish_and_check(const job *j) {
    cop_error err;
    if (run_job(j, &err) != COP_OK) fail_msg("%s", err.message);
    check_manifest(j->dir, true);
    check_records(j->dir, j->index, j->of, j->n_lines);
}

/* ---- Shards that grow; not every test program has them. */

static inline size_t file_size(const char *path) {
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    return (size_t)st.st_size;
}

/* A growing shard with all records, and where its frames start; returns their number. */
static inline int grow(const job *j, uint64_t starts[JOB_LINES]) {
    cop_error err;
    assert_int_equal(run_job(j, &err), COP_OK);
    char path[512];
    snprintf(path, sizeof path, "%s/shard-00000.zst", j->dir);
    int fd = open(path, O_RDONLY), n = 0;
    frame_reader *r;
    shard_frame f;
    assert_int_equal(frame_reader_open(&r, fd, path, &err), COP_OK);
    while (frame_reader_next(r, &f, &err) == COP_OK && f.kind == FRAME_WHOLE) starts[n++] = f.start;
    assert_int_equal(f.kind, FRAME_END);
    frame_reader_close(r);
    close(fd);
    return n;
}

static inline job growing_job(const char *dir) {
    job j = job_defaults(dir);
    j.shard_bytes = 1 << 20;
    j.unfinished = true;
    return j;
}
