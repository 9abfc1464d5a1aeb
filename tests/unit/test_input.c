/* Inputs: the same lines from every packing and chunking, and no silent loss. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>
#include <zstd.h>

#include "worker/input.h"
#include "worker/jsonl.h"

/* ---- Bytes, and files of them. */

typedef struct bytes {
    char *p;
    size_t n;
} bytes;

static void append(bytes *b, const void *p, size_t n) {
    b->p = realloc(b->p, b->n + n + 1);
    memcpy(b->p + b->n, p, n);
    b->n += n;
    b->p[b->n] = '\0';
}

/* Append text as a Zstandard frame with a checksum. */
static void append_frame(bytes *b, const char *text, size_t n) {
    ZSTD_CCtx *c = ZSTD_createCCtx();
    ZSTD_CCtx_setParameter(c, ZSTD_c_checksumFlag, 1);
    size_t cap = ZSTD_compressBound(n);
    char *frame = malloc(cap);
    size_t n_frame = ZSTD_compress2(c, frame, cap, text, n);
    assert_false(ZSTD_isError(n_frame));
    append(b, frame, n_frame);
    free(frame);
    ZSTD_freeCCtx(c);
}

static void append_skippable(bytes *b, unsigned char variant, unsigned char n) {
    unsigned char head[8] = {0x50 | variant, 0x2a, 0x4d, 0x18, n, 0, 0, 0};
    char content[255];
    memset(content, '\n', sizeof content);
    append(b, head, sizeof head);
    append(b, content, n);
}

/* A new file; its name holds until the next call. */
static const char *file_of(const void *p, size_t n, const char *suffix) {
    static char path[64];
    snprintf(path, sizeof path, "/tmp/coppice-input-%d%s", (int)getpid(), suffix);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(p, 1, n, f), n);
    fclose(f);
    return path;
}

/* Give the bytes to stdin through a pipe, in pieces of random sizes up to `most`. */
typedef struct feeder {
    pthread_t thread;
    const bytes *b;
    size_t most;
    unsigned seed;
    int to, saved_stdin;
} feeder;

static void *feed(void *context) {
    feeder *f = context;
    for (size_t at = 0; at < f->b->n;) {
        size_t n = 1 + (size_t)rand_r(&f->seed) % f->most;
        if (n > f->b->n - at) n = f->b->n - at;
        ssize_t written = write(f->to, f->b->p + at, n);
        if (written <= 0) break;
        at += (size_t)written;
        if (rand_r(&f->seed) % 8 == 0) sched_yield();
    }
    close(f->to);
    return NULL;
}

static void feed_start(feeder *f, const bytes *b, size_t most, unsigned seed) {
    int fds[2];
    assert_int_equal(pipe2(fds, O_CLOEXEC), 0);
    *f = (feeder){.b = b, .most = most, .seed = seed, .to = fds[1], .saved_stdin = dup(STDIN_FILENO)};
    dup2(fds[0], STDIN_FILENO);
    close(fds[0]);
    assert_int_equal(pthread_create(&f->thread, NULL, feed, f), 0);
}

static void feed_stop(feeder *f) {
    pthread_join(f->thread, NULL);
    dup2(f->saved_stdin, STDIN_FILENO);
    close(f->saved_stdin);
}

/* ---- Reading all lines. */

/* What an input gave: each line's status, blankness, bytes and a separator that no test text holds. */
typedef struct reading {
    bytes lines;
    uint64_t n_lines;
    char digest[INPUT_DIGEST_CHARS];
    cop_status status;
    cop_error err;
} reading;

static void note_line(bytes *to, const char *p, size_t n, cop_status status, bool blank) {
    char head[3] = {(char)('0' + status), blank ? 'b' : '-', ':'};
    append(to, head, 3);
    append(to, p, n);
    append(to, "\xff", 1);
}

static reading read_all(const char *path) {
    reading r = {0};
    append(&r.lines, "", 0);
    input_file *in;
    r.status = input_open(&in, path, &r.err);
    if (r.status != COP_OK) {
        assert_null(in);
        return r;
    }
    input_line line;
    bool more = true;
    while ((r.status = input_next(in, &line, &more, &r.err)) == COP_OK && more) {
        assert_int_equal(line.number, r.n_lines++);
        note_line(&r.lines, line.bytes, line.n, line.status, line.blank);
    }
    assert_false(more);
    assert_int_equal(input_lines(in), r.n_lines);
    input_digest(in, r.digest);
    cop_status again = input_next(in, &line, &more, &r.err); /* the end stays the end, an error an error */
    assert_int_equal(again, r.status);
    assert_false(more);
    input_close(in);
    return r;
}

static void reading_free(reading *r) { free(r->lines.p); }

static void hex_of(const char *p, size_t n, char hex[INPUT_DIGEST_CHARS]) {
    XXH128_hash_t h = XXH3_128bits(p, n);
    snprintf(hex, INPUT_DIGEST_CHARS, "%016" PRIx64 "%016" PRIx64, h.high64, h.low64);
}

/* What a text must give, cut with a loop over its bytes. */
static reading expected_of(const char *p, size_t n) {
    reading r = {0};
    append(&r.lines, "", 0);
    for (size_t at = 0, i = 0; i <= n; i++) {
        if (i < n ? p[i] != '\n' : at == n) continue;
        size_t length = i - at;
        bool too_long = length > JSONL_MAX_LINE, blank = !too_long;
        for (size_t k = at; blank && k < i; k++) blank = p[k] == ' ' || p[k] == '\t' || p[k] == '\r';
        note_line(&r.lines, p + at, too_long ? 0 : length, too_long ? COP_ETOOLARGE : COP_OK, blank);
        r.n_lines++;
        at = i + 1;
    }
    hex_of(p, n, r.digest);
    return r;
}

static void expect_same(const reading *got, const reading *want) {
    if (got->status != COP_OK) fail_msg("%s", got->err.message);
    assert_int_equal(got->n_lines, want->n_lines);
    assert_int_equal(got->lines.n, want->lines.n);
    assert_memory_equal(got->lines.p, want->lines.p, want->lines.n);
    assert_string_equal(got->digest, want->digest);
}

/* The text reads alike as a file, plain and compressed. */
static void expect_text(const char *text, size_t n) {
    reading want = expected_of(text, n), plain = read_all(file_of(text, n, ".jsonl"));
    expect_same(&plain, &want);
    bytes frame = {0};
    append_frame(&frame, text, n);
    reading packed = read_all(file_of(frame.p, frame.n, ".zst"));
    expect_same(&packed, &want);
    free(frame.p);
    reading_free(&plain), reading_free(&packed), reading_free(&want);
}
#define EXPECT_TEXT(text) expect_text(text, sizeof(text) - 1)

/* Random lines: many short, some blank, some longer than a block, some bytes that need care. */
static bytes random_text(unsigned seed, size_t about) {
    static const char alphabet[] = "{}\"ab \t\r\0\x28\xb5\xf0";
    bytes text = {0};
    while (text.n < about) {
        size_t n = (size_t)rand_r(&seed) % (rand_r(&seed) % 50 == 0 ? 400000 : 60);
        char *line = malloc(n + 1);
        bool blank = rand_r(&seed) % 5 == 0;
        for (size_t i = 0; i < n; i++)
            line[i] =
                blank ? " \t\r"[rand_r(&seed) % 3] : alphabet[(size_t)rand_r(&seed) % (sizeof alphabet - 1)];
        line[n] = '\n';
        append(&text, line, n + 1);
        free(line);
    }
    if (rand_r(&seed) % 2) text.n--; /* no line feed at the end */
    return text;
}

/* The text cut into frames of random sizes, empty ones too, with skippable frames in between. */
static bytes random_frames(const bytes *text, unsigned seed) {
    bytes packed = {0};
    if (rand_r(&seed) % 2) append_skippable(&packed, 15, 0);
    for (size_t at = 0; at < text->n;) {
        size_t n = (size_t)rand_r(&seed) % (text->n / 3 + 2);
        if (n > text->n - at) n = text->n - at;
        append_frame(&packed, text->p + at, n);
        at += n;
        if (rand_r(&seed) % 3 == 0)
            append_skippable(&packed, rand_r(&seed) % 16, (unsigned char)rand_r(&seed));
    }
    return packed;
}

/* ---- Tests. */

static void lines_come_without_their_line_feed(void **state) {
    (void)state;
    EXPECT_TEXT("one\ntwo\n");
    EXPECT_TEXT("one\ntwo");
    EXPECT_TEXT("\n");
    EXPECT_TEXT("\n\n a\n\n");
    reading r = read_all(file_of("a\r\n\r\n\0 \n \t\n\0", 12, ""));
    assert_int_equal(r.lines.n, 28);
    assert_memory_equal(r.lines.p,
                        "0-:a\r\xff"
                        "0b:\r\xff"
                        "0-:\0 \xff"
                        "0b: \t\xff"
                        "0-:\0\xff",
                        28);
    reading_free(&r);
}

static void an_empty_input_has_no_lines(void **state) {
    (void)state;
    EXPECT_TEXT("");
    bytes nothing = {0};
    feeder f;
    feed_start(&f, &nothing, 1, 1);
    reading r = read_all("-");
    feed_stop(&f);
    assert_int_equal(r.status, COP_OK);
    assert_int_equal(r.n_lines, 0);
    reading_free(&r);
}

static void short_texts_that_begin_like_a_frame_are_text(void **state) {
    (void)state;
    static const char *const texts[] = {"(",     "P",       "(\n", "P\n", "P*",     "P*M",
                                        "P*M\n", "_*M\x19", "(a",  "((",  "P\n\n\n"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        size_t n = strlen(texts[i]);
        reading want = expected_of(texts[i], n), got = read_all(file_of(texts[i], n, ".jsonl"));
        expect_same(&got, &want);
        reading_free(&want), reading_free(&got);
    }
}

static void any_chunking_gives_the_same_lines(void **state) {
    (void)state;
    for (unsigned seed = 1; seed <= 24; seed++) {
        bytes text = random_text(seed, 20000u << seed % 7), packed = random_frames(&text, seed);
        reading want = expected_of(text.p, text.n);
        for (int compressed = 0; compressed < 2; compressed++) {
            feeder f;
            feed_start(&f, compressed ? &packed : &text, (size_t[]){7, 501, 70000}[seed % 3], seed);
            reading got = read_all("-");
            feed_stop(&f);
            expect_same(&got, &want);
            reading_free(&got);
        }
        reading got = read_all(file_of(packed.p, packed.n, ".zst"));
        expect_same(&got, &want);
        reading_free(&got), reading_free(&want);
        free(text.p), free(packed.p);
    }
}

static void compressed_bytes_may_come_one_by_one(void **state) {
    (void)state;
    bytes text = random_text(77, 3000), packed = {0};
    append_skippable(&packed, 3, 200);
    append_frame(&packed, text.p, text.n / 2);
    append_frame(&packed, "", 0);
    append_frame(&packed, text.p + text.n / 2, text.n - text.n / 2);
    append_skippable(&packed, 0, 1);
    reading want = expected_of(text.p, text.n);
    feeder f;
    feed_start(&f, &packed, 1, 1);
    reading got = read_all("-");
    feed_stop(&f);
    expect_same(&got, &want);
    reading_free(&got), reading_free(&want);
    free(text.p), free(packed.p);
}

static void the_longest_line_is_kept_and_longer_ones_are_skipped(void **state) {
    (void)state;
    for (size_t over = 0; over < 3; over++) {
        size_t n = JSONL_MAX_LINE + over;
        bytes text = {0};
        append(&text, "first\n", 6);
        char *line = malloc(n + 1);
        memset(line, 'x', n);
        line[n] = '\n';
        append(&text, line, n + 1);
        if (over == 2) append(&text, line, n + 1); /* two in a row; then one without a line feed at the end */
        append(&text, "last\n", 5);
        append(&text, line, n);
        expect_text(text.p, text.n);
        free(line);
        free(text.p);
    }
}

static void the_digest_covers_the_lines_given_so_far(void **state) {
    (void)state;
    const char text[] = "one\n\nthree\nfour";
    const size_t ends[] = {4, 5, 11, 15};
    cop_error err;
    input_file *in;
    assert_int_equal(input_open(&in, file_of(text, sizeof text - 1, ""), &err), COP_OK);
    char got[INPUT_DIGEST_CHARS], want[INPUT_DIGEST_CHARS];
    input_digest(in, got);
    assert_string_equal(got, "99aa06d3014798d86001c324468d497f"); /* of nothing, as xxhsum -H2 tells */
    for (size_t i = 0; i < 4; i++) {
        input_line line;
        bool more;
        assert_int_equal(input_next(in, &line, &more, &err), COP_OK);
        assert_true(more);
        input_digest(in, got);
        hex_of(text, ends[i], want);
        assert_string_equal(got, want);
    }
    input_close(in);
}

/* A small compressed file of several frames; bounds[] are the places where a cut leaves whole frames. */
static bytes small_file(const char **text, size_t bounds[4]) {
    static const char lines[] =
        "{\"text\": \"one\"}\n{\"text\": \"two, two, two, two, two\"}\n\n{\"text\": \"three\"}\n";
    bytes packed = {0};
    append_frame(&packed, lines, 20);
    bounds[0] = packed.n;
    append_skippable(&packed, 0, 96); /* no broken bit in its size leads to the end of a frame */
    bounds[1] = packed.n;
    append_frame(&packed, lines + 20, 31);
    bounds[2] = packed.n;
    append_frame(&packed, lines + 51, sizeof lines - 1 - 51);
    bounds[3] = packed.n;
    *text = lines;
    return packed;
}

static void a_file_cut_anywhere_is_an_error_after_its_whole_lines(void **state) {
    (void)state;
    const char *text;
    size_t bounds[4];
    bytes packed = small_file(&text, bounds);
    reading want = expected_of(text, strlen(text));
    for (size_t cut = 0; cut < packed.n; cut++) {
        reading got = read_all(file_of(packed.p, cut, ".zst"));
        bool bound = cut == bounds[0] || cut == bounds[1] || cut == bounds[2];
        if (got.status != (bound ? COP_OK : COP_EFORMAT)) fail_msg("cut at %zu: status %d", cut, got.status);
        if (!bound) {
            assert_non_null(strstr(got.err.message, "torn"));
            assert_true(got.lines.n <= want.lines.n);
            assert_memory_equal(got.lines.p, want.lines.p, got.lines.n);
        }
        reading_free(&got);
        if (cut < 2) continue; /* without the name, these two may be texts */
        got = read_all(file_of(packed.p, cut, ".jsonl"));
        assert_int_equal(got.status, bound ? COP_OK : COP_EFORMAT);
        reading_free(&got);
    }
    reading_free(&want);
    free(packed.p);
}

static void a_broken_bit_never_loses_or_changes_a_line_silently(void **state) {
    (void)state;
    const char *text;
    size_t bounds[4], n_errors = 0;
    bytes packed = small_file(&text, bounds);
    reading want = expected_of(text, strlen(text));
    for (size_t bit = 8 * 4; bit < 8 * packed.n; bit++) { /* another magic number makes it text */
        packed.p[bit / 8] ^= (char)(1 << bit % 8);
        reading got = read_all(file_of(packed.p, packed.n, ".zst"));
        if (got.status == COP_OK) expect_same(&got, &want);
        n_errors += got.status == COP_EFORMAT;
        reading_free(&got);
        packed.p[bit / 8] ^= (char)(1 << bit % 8);
    }
    assert_true(n_errors > 4 * (packed.n - 96)); /* in most places but the skippable frame's */
    reading_free(&want);
    free(packed.p);
}

static void expect_refused(const void *p, size_t n, const char *word) {
    reading r = read_all(file_of(p, n, ".zst"));
    assert_int_equal(r.status, COP_EFORMAT);
    if (!strstr(r.err.message, word)) fail_msg("%s", r.err.message);
    reading_free(&r);
}

static void what_is_no_frame_is_refused(void **state) {
    (void)state;
    bytes packed = {0};
    append_frame(&packed, "a\n", 2);
    append(&packed, "b\nmore text\n", 12);
    expect_refused(packed.p, packed.n, "after 1 whole lines");
    free(packed.p);
    unsigned char frame[] = {0x28, 0xb5, 0x2f, 0xfd, 0, 17 << 3, 9, 0, 0, 'a'}; /* a window of 128 MiB */
    reading r = read_all(file_of(frame, sizeof frame, ".zst"));
    assert_int_equal(r.status, COP_OK);
    assert_int_equal(r.n_lines, 1);
    reading_free(&r);
    frame[5] = 17 << 3 | 1; /* a bit more */
    expect_refused(frame, sizeof frame, "too much memory");
}

static void what_cannot_be_opened_is_told(void **state) {
    (void)state;
    static const char *const cases[][2] = {
        {"/nonexistent/x.jsonl", "No such file"}, {"/tmp", "folder"}, {"", "No such file"}};
    for (size_t i = 0; i < 3; i++) {
        reading r = read_all(cases[i][0]);
        assert_int_equal(r.status, COP_EIO);
        assert_non_null(strstr(r.err.message, cases[i][1]));
        assert_non_null(strstr(r.err.message, cases[i][0]));
        reading_free(&r);
    }
}

static void a_reading_that_fails_is_an_error(void **state) {
    (void)state;
    int saved = dup(STDIN_FILENO), write_only = open("/dev/null", O_WRONLY);
    dup2(write_only, STDIN_FILENO);
    reading r = read_all("-");
    dup2(saved, STDIN_FILENO);
    close(saved), close(write_only);
    assert_int_equal(r.status, COP_EIO);
    assert_non_null(strstr(r.err.message, "stdin"));
    reading_free(&r);
}

/* The writer waits for each answer before it goes on, as a person does. */
static void a_line_is_given_as_soon_as_it_is_there(void **state) {
    (void)state;
    static const char *const lines[] = {"P\n", "{}\n", "\n", "(\n", "abc\n"};
    int fds[2];
    assert_int_equal(pipe(fds), 0);
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fds[0]);
    cop_error err;
    input_file *in;
    assert_int_equal(input_open(&in, path, &err), COP_OK);
    alarm(20); /* a reader that waits for more ends here */
    for (size_t i = 0; i < 5; i++) {
        size_t n = strlen(lines[i]);
        assert_int_equal(write(fds[1], lines[i], n), n);
        input_line line;
        bool more;
        assert_int_equal(input_next(in, &line, &more, &err), COP_OK);
        assert_true(more);
        assert_int_equal(line.n, n - 1);
        assert_memory_equal(line.bytes, lines[i], n - 1);
    }
    alarm(0);
    input_close(in);
    close(fds[0]), close(fds[1]);
}

static void every_failed_allocation_is_told(void **state) {
    (void)state;
    bytes text = {0}, packed = {0};
    char *line = calloc(1, 700000);
    append(&text, line, 700000);
    append(&text, "\nb\n", 3);
    free(line);
    append_frame(&packed, text.p, text.n);
    for (int compressed = 0; compressed < 2; compressed++) {
        const bytes *b = compressed ? &packed : &text;
        const char *path = file_of(b->p, b->n, "");
        bool cost_a_line = false;
        for (long n = 0;; n++) {
            long live = mem_live();
            mem_fail_after(n);
            reading r = read_all(path);
            bool fired = mem_fail_stop();
            assert_int_equal(mem_live(), live);
            if (fired && r.status == COP_OK) { /* the long line was skipped, the next one is there */
                assert_int_equal(r.n_lines, 2);
                assert_string_equal(r.lines.p, "3-:\xff"
                                               "0-:b\xff");
                char hex[INPUT_DIGEST_CHARS];
                hex_of(text.p, text.n, hex);
                assert_string_equal(r.digest, hex);
                cost_a_line = true;
            } else {
                assert_int_equal(r.status, fired ? COP_ENOMEM : COP_OK);
            }
            reading_free(&r);
            if (!fired) break;
        }
        assert_true(cost_a_line);
    }
    free(text.p), free(packed.p);
}

static int remove_files(void **state) {
    (void)state;
    static const char *const suffixes[] = {"", ".jsonl", ".zst"};
    for (size_t i = 0; i < 3; i++) {
        char path[64];
        snprintf(path, sizeof path, "/tmp/coppice-input-%d%s", (int)getpid(), suffixes[i]);
        unlink(path);
    }
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lines_come_without_their_line_feed),
        cmocka_unit_test(an_empty_input_has_no_lines),
        cmocka_unit_test(short_texts_that_begin_like_a_frame_are_text),
        cmocka_unit_test(any_chunking_gives_the_same_lines),
        cmocka_unit_test(compressed_bytes_may_come_one_by_one),
        cmocka_unit_test(the_longest_line_is_kept_and_longer_ones_are_skipped),
        cmocka_unit_test(the_digest_covers_the_lines_given_so_far),
        cmocka_unit_test(a_file_cut_anywhere_is_an_error_after_its_whole_lines),
        cmocka_unit_test(a_broken_bit_never_loses_or_changes_a_line_silently),
        cmocka_unit_test(what_is_no_frame_is_refused),
        cmocka_unit_test(what_cannot_be_opened_is_told),
        cmocka_unit_test(a_reading_that_fails_is_an_error),
        cmocka_unit_test(a_line_is_given_as_soon_as_it_is_there),
        cmocka_unit_test(every_failed_allocation_is_told),
    };
    return cmocka_run_group_tests(tests, NULL, remove_files);
}
