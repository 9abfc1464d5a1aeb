/* Lines of an input, cut from blocks.
 *
 *   bytes  [ given | open line ... scanned | not searched yet | room ]
 *          0       start           scanned                    end    cap
 *
 * read(2) or the expansion of `packed` appends at `end`.  When no line feed is left, the open line moves to
 * the front and the buffer grows only if that line fills it: each byte is moved once and searched once,
 * whatever sizes the reads have. */
#define XXH_STATIC_LINKING_ONLY /* for a state within the struct */
#include "worker/input.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>
#include <zstd.h>
#include <zstd_errors.h>

#include "worker/file_hash.h"
#include "worker/jsonl.h"

enum { BLOCK_BYTES = 256 << 10, MAGIC_BYTES = 4 };

struct input_file {
    XXH3_state_t digest; /* of the lines given; wants 64-byte alignment */
    char *name;          /* the path; NULL: stdin */
    int fd;
    int wake_fd;   /* an eventfd: readable once it was interrupted */
    bool detected; /* plain or compressed is known */
    bool ended;    /* everything that can be read is in the buffer */
    char *bytes;
    size_t start, scanned, end, cap;
    uint64_t n_lines;
    cop_error failure; /* the first one; it stays */
    /* Compressed only. */
    ZSTD_DCtx *context;
    char *packed_bytes; /* [BLOCK_BYTES] */
    ZSTD_inBuffer packed;
    size_t frame_rest; /* 0: between two frames */
    bool held;         /* the expansion filled the buffer, and more of it may wait in the context */
};

/* ---- Reading. */

static const char *shown_name(const input_file *in) { return in->name ? in->name : "stdin"; }

/* Wait until read(2) does not, or until it is interrupted: then false. */
static bool wait_readable(const input_file *in) {
    struct pollfd fds[] = {{in->fd, POLLIN, 0}, {in->wake_fd, POLLIN, 0}};
    while (poll(fds, 2, -1) < 0 && errno == EINTR) continue;
    return !fds[1].revents;
}

/* At least one byte, unless the input ends or fails. */
static size_t read_some(input_file *in, char *to, size_t room) {
    ssize_t n;
    do n = wait_readable(in) ? read(in->fd, to, room) : 0;
    while (n < 0 && errno == EINTR);
    if (n < 0)
        cop_fail(&in->failure, COP_EIO, "could not read input \"%s\": %s", shown_name(in), strerror(errno));
    in->ended = n <= 0;
    return n > 0 ? (size_t)n : 0;
}

static void fail_torn(input_file *in) {
    cop_fail(
        &in->failure, COP_EFORMAT,
        "could not read input \"%s\" to its end: it is torn, it stops inside a Zstandard frame after %" PRIu64
        " whole lines",
        shown_name(in), in->n_lines);
}

/* Append what packed bytes expand to: something, unless the input ends or fails. */
static void expand_some(input_file *in) {
    size_t had = in->end;
    while (in->end == had) {
        if (in->packed.pos == in->packed.size && !in->held) {
            in->packed = (ZSTD_inBuffer){in->packed_bytes, read_some(in, in->packed_bytes, BLOCK_BYTES), 0};
            if (in->ended && in->failure.status == COP_OK && in->frame_rest != 0) fail_torn(in);
            if (in->ended) return;
        }
        ZSTD_outBuffer out = {in->bytes, in->cap, in->end};
        in->frame_rest = ZSTD_decompressStream(in->context, &out, &in->packed);
        if (ZSTD_isError(in->frame_rest)) {
            bool memory = ZSTD_getErrorCode(in->frame_rest) == ZSTD_error_memory_allocation;
            cop_fail(&in->failure, memory ? COP_ENOMEM : COP_EFORMAT,
                     "could not expand input \"%s\" after %" PRIu64 " whole lines: %s", shown_name(in),
                     in->n_lines, ZSTD_getErrorName(in->frame_rest));
            return;
        }
        in->end = out.pos;
        in->held = out.pos == out.size && in->frame_rest != 0;
    }
}

/* Append to the buffer, which has room.  Sets `ended` where nothing follows. */
static cop_status fill(input_file *in) {
    if (in->context)
        expand_some(in);
    else
        in->end += read_some(in, in->bytes + in->end, in->cap - in->end);
    return in->failure.status;
}

/* ---- Plain or compressed. */

/* Are these the first bytes of a frame, or may they become them? */
static bool may_start_frame(const char *bytes, size_t n) {
    static const unsigned char zstd[MAGIC_BYTES] = {0x28, 0xb5, 0x2f, 0xfd},
                               skippable[MAGIC_BYTES] = {0x50, 0x2a, 0x4d, 0x18}; /* 0x50 to 0x5f */
    bool is_zstd = true, is_skippable = true;
    for (size_t i = 0; i < n && i < MAGIC_BYTES; i++) {
        unsigned char c = (unsigned char)bytes[i];
        is_zstd = is_zstd && c == zstd[i];
        is_skippable = is_skippable && (i == 0 ? c & 0xf0 : c) == skippable[i];
    }
    return is_zstd || is_skippable;
}

/* The end came within a magic number.  Its first byte alone may be text; two are no UTF-8. */
static bool is_torn_magic(const input_file *in) {
    size_t n = in->name ? strlen(in->name) : 0;
    bool named_zst = n > 4 && !strcmp(in->name + n - 4, ".zst");
    return named_zst || (in->end >= 2 && in->bytes[0] == 0x28);
}

/* What was read becomes packed bytes. */
static cop_status start_expanding(input_file *in) {
    in->packed_bytes = in->bytes;
    in->packed = (ZSTD_inBuffer){in->bytes, in->end, 0};
    in->end = in->cap = 0;
    in->bytes = NULL;
    in->context = ZSTD_createDCtx();
    if (in->context && mem_grow((void **)&in->bytes, &in->cap, BLOCK_BYTES, 1)) return COP_OK;
    return cop_fail(&in->failure, COP_ENOMEM, "could not expand input \"%s\": out of memory", shown_name(in));
}

/* Read no more than tells: a line typed at a terminal may be shorter than a magic number. */
static cop_status detect(input_file *in) {
    while (!in->ended && in->end < MAGIC_BYTES && may_start_frame(in->bytes, in->end))
        if (fill(in) != COP_OK) return in->failure.status;
    in->detected = true;
    if (!may_start_frame(in->bytes, in->end)) return COP_OK;
    if (in->end >= MAGIC_BYTES) return start_expanding(in);
    if (is_torn_magic(in)) fail_torn(in);
    return in->failure.status;
}

/* ---- Opening. */

static cop_status open_file(input_file *in, const char *path, cop_error *err) {
    in->name = mem_strdup(path);
    if (!in->name) return cop_fail(err, COP_ENOMEM, "could not open input \"%s\": out of memory", path);
    in->fd = open(path, O_RDONLY | O_CLOEXEC);
    if (in->fd >= 0) return COP_OK;
    return cop_fail(err, COP_EIO, "could not open input \"%s\": %s", path, strerror(errno));
}

static cop_status open_parts(input_file *in, const char *path, cop_error *err) {
    in->fd = STDIN_FILENO;
    in->wake_fd = eventfd(0, EFD_CLOEXEC);
    if (in->wake_fd < 0)
        return cop_fail(err, COP_EIO, "could not open input \"%s\": %s", path, strerror(errno));
    if (strcmp(path, "-") != 0) {
        cop_status status = open_file(in, path, err);
        if (status != COP_OK) return status;
    }
    struct stat st;
    if (fstat(in->fd, &st) != 0)
        return cop_fail(err, COP_EIO, "could not read input \"%s\": %s", shown_name(in), strerror(errno));
    if (S_ISDIR(st.st_mode))
        return cop_fail(err, COP_EIO, "cannot read input \"%s\": it is a folder, expected a file",
                        shown_name(in));
    if (!mem_grow((void **)&in->bytes, &in->cap, BLOCK_BYTES, 1))
        return cop_fail(err, COP_ENOMEM, "could not open input \"%s\": out of memory", shown_name(in));
    return COP_OK;
}

void input_interrupt(input_file *in) {
    while (eventfd_write(in->wake_fd, 1) < 0 && errno == EINTR) continue;
}

cop_status input_open(input_file **out, const char *path, cop_error *err) {
    *out = NULL;
    input_file *in = mem_alloc_aligned(1, sizeof *in);
    if (!in) return cop_fail(err, COP_ENOMEM, "could not open input \"%s\": out of memory", path);
    memset(in, 0, sizeof *in);
    XXH3_128bits_reset(&in->digest);
    cop_status status = open_parts(in, path, err);
    if (status == COP_OK)
        *out = in;
    else
        input_close(in);
    return status;
}

void input_close(input_file *in) {
    if (!in) return;
    if (in->name && in->fd >= 0) close(in->fd);
    if (in->wake_fd >= 0) close(in->wake_fd);
    ZSTD_freeDCtx(in->context);
    mem_free(in->packed_bytes);
    mem_free(in->bytes);
    mem_free(in->name);
    mem_free(in);
}

/* ---- Lines. */

/* Room after `end`. */
static bool make_room(input_file *in) {
    if (in->start > 0) {
        memmove(in->bytes, in->bytes + in->start, in->end - in->start);
        in->end -= in->start;
        in->scanned -= in->start;
        in->start = 0;
    }
    return in->end < in->cap || mem_grow((void **)&in->bytes, &in->cap, in->cap + BLOCK_BYTES, 1);
}

/* The bytes of the open line that are there, its line feed included; *whole: it ends with them. */
static size_t scan(input_file *in, bool *whole) {
    const char *lf = memchr(in->bytes + in->scanned, '\n', in->end - in->scanned);
    in->scanned = lf ? (size_t)(lf - in->bytes) + 1 : in->end;
    *whole = lf || in->ended;
    return in->scanned - in->start;
}

/* Go past the next n bytes. */
static void pass(input_file *in, size_t n) {
    XXH3_128bits_update(&in->digest, in->bytes + in->start, n);
    in->start += n;
}

/* Read the open line into the buffer: *n bytes with its line feed, 0 at the end of the input.  COP_ETOOLARGE
 * and COP_ENOMEM without a failure of the input: it does not fit. */
static cop_status collect(input_file *in, size_t *n) {
    for (;;) {
        bool whole;
        *n = scan(in, &whole);
        bool has_lf = *n > 0 && in->bytes[in->start + *n - 1] == '\n';
        if (*n - has_lf > JSONL_MAX_LINE) return COP_ETOOLARGE;
        if (whole) return COP_OK;
        if (!make_room(in)) return COP_ENOMEM;
        if (fill(in) != COP_OK) return in->failure.status;
    }
}

/* Pass the open line, however long it is. */
static cop_status skip_line(input_file *in) {
    XXH3_state_t before = in->digest;
    in->scanned = in->start;
    for (;;) {
        bool whole;
        pass(in, scan(in, &whole));
        if (whole) return COP_OK;
        make_room(in); /* succeeds: the buffer is empty now */
        if (fill(in) == COP_OK) continue;
        in->digest = before; /* the line is not given */
        return in->failure.status;
    }
}

static bool is_blank(const char *bytes, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (bytes[i] != ' ' && bytes[i] != '\t' && bytes[i] != '\r') return false;
    return true;
}

static cop_status next_line(input_file *in, input_line *line, bool *more) {
    if (in->failure.status != COP_OK || (!in->detected && detect(in) != COP_OK)) return in->failure.status;
    size_t n;
    line->status = collect(in, &n);
    if (line->status != COP_OK) {
        if (in->failure.status != COP_OK || skip_line(in) != COP_OK) return in->failure.status;
    } else if (n > 0) {
        line->bytes = in->bytes + in->start;
        line->terminated = line->bytes[n - 1] == '\n';
        line->n = n - line->terminated;
        line->blank = is_blank(line->bytes, line->n);
        pass(in, n);
    } else {
        return COP_OK;
    }
    in->n_lines++;
    *more = true;
    return COP_OK;
}

cop_status input_next(input_file *in, input_line *line, bool *more, cop_error *err) {
    *line = (input_line){.bytes = "", .number = in->n_lines};
    *more = false;
    cop_status status = next_line(in, line, more);
    if (status != COP_OK && err) *err = in->failure;
    return status;
}

void input_digest(const input_file *in, char hex[INPUT_DIGEST_CHARS]) { file_hash_hex(&in->digest, hex); }

uint64_t input_lines(const input_file *in) { return in->n_lines; }
