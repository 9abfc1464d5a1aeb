/* Zstandard frames of a shard.  Reading streams: a block of the file is expanded into a buffer that grows
 * with what comes out, whatever the frame declares. */
#include "worker/frames.h"

#include <assert.h>
#include <errno.h>
#include <string.h>
#include <unistd.h>
#include <zstd.h>

#define LEVEL 3
#define BLOCK_BYTES ((size_t)128 << 10)

/* ---- Making frames. */

struct frame_encoder {
    ZSTD_CCtx *context;
    uint8_t *bytes; /* the last frame */
    size_t cap;
};

cop_status frame_encoder_open(frame_encoder **out, cop_error *err) {
    *out = NULL;
    frame_encoder *e = mem_zalloc(1, sizeof *e);
    if (e) e->context = ZSTD_createCCtx();
    if (!e || !e->context ||
        ZSTD_isError(ZSTD_CCtx_setParameter(e->context, ZSTD_c_compressionLevel, LEVEL)) ||
        ZSTD_isError(ZSTD_CCtx_setParameter(e->context, ZSTD_c_checksumFlag, 1))) {
        frame_encoder_close(e);
        return cop_fail(err, COP_ENOMEM, "could not prepare compression: out of memory");
    }
    *out = e;
    return COP_OK;
}

void frame_encoder_close(frame_encoder *e) {
    if (!e) return;
    ZSTD_freeCCtx(e->context);
    mem_free(e->bytes);
    mem_free(e);
}

bool write_all(int fd, const void *bytes, size_t n) {
    for (const uint8_t *from = bytes; n > 0;) {
        ssize_t written = write(fd, from, n);
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) return false;
        from += written;
        n -= (size_t)written;
    }
    return true;
}

cop_status frame_encode(frame_encoder *e, const uint8_t *bytes, size_t n, const uint8_t **frame,
                        size_t *n_frame, cop_error *err) {
    assert(n > 0 && n <= FRAME_MAX_BYTES);
    if (!mem_grow((void **)&e->bytes, &e->cap, ZSTD_compressBound(n), 1))
        return cop_fail(err, COP_ENOMEM, "could not compress %zu bytes: out of memory", n);
    size_t size = ZSTD_compress2(e->context, e->bytes, e->cap, bytes, n);
    if (ZSTD_isError(size))
        return cop_fail(err, COP_ENOMEM, "could not compress %zu bytes: %s", n, ZSTD_getErrorName(size));
    *frame = e->bytes;
    *n_frame = size;
    return COP_OK;
}

/* ---- Reading frames. */

struct frame_reader {
    int fd;
    const char *name;
    ZSTD_DCtx *context;
    ZSTD_inBuffer in; /* what is left of `block` */
    uint64_t offset;  /* in the file, of in.pos */
    uint8_t *content; /* of the last frame */
    size_t cap;
    uint8_t block[BLOCK_BYTES];
};

cop_status frame_reader_open(frame_reader **out, int fd, const char *name, cop_error *err) {
    *out = NULL;
    frame_reader *r = mem_alloc(1, sizeof *r);
    if (r) {
        *r = (frame_reader){.fd = fd, .name = name};
        r->in.src = r->block;
        r->context = ZSTD_createDCtx();
    }
    if (!r || !r->context) {
        frame_reader_close(r);
        return cop_fail(err, COP_ENOMEM, "could not read \"%s\": out of memory", name);
    }
    *out = r;
    return COP_OK;
}

void frame_reader_close(frame_reader *r) {
    if (!r) return;
    ZSTD_freeDCtx(r->context);
    mem_free(r->content);
    mem_free(r);
}

/* Read the next block; in.size is 0 at the end. */
static cop_status refill(frame_reader *r, cop_error *err) {
    ssize_t n;
    do n = read(r->fd, r->block, sizeof r->block);
    while (n < 0 && errno == EINTR);
    if (n < 0) return cop_fail(err, COP_EIO, "could not read \"%s\": %s", r->name, strerror(errno));
    r->in.size = (size_t)n;
    r->in.pos = 0;
    return COP_OK;
}

/* Expand what there is into `content`, which holds *n bytes of the frame.  The result is zstd's: 0 at the end
 * of the frame, or an error. */
static size_t expand(frame_reader *r, size_t *n) {
    ZSTD_outBuffer out = {r->content, r->cap, *n};
    size_t before = r->in.pos, left = ZSTD_decompressStream(r->context, &out, &r->in);
    r->offset += r->in.pos - before;
    *n = out.pos;
    return left;
}

cop_status frame_reader_next(frame_reader *r, shard_frame *out, cop_error *err) {
    *out = (shard_frame){.start = r->offset};
    size_t n = 0, left;
    bool filled = false; /* zstd may hold more than the buffer had room for */
    do {
        if (!mem_grow((void **)&r->content, &r->cap, n < BLOCK_BYTES ? BLOCK_BYTES : n + 1, 1))
            return cop_fail(err, COP_ENOMEM,
                            "could not read \"%s\": out of memory for the frame at byte %llu", r->name,
                            (unsigned long long)out->start);
        if (r->in.pos == r->in.size && !filled) {
            cop_status status = refill(r, err);
            if (status != COP_OK) return status;
            if (r->in.size == 0) {
                out->kind = r->offset == out->start ? FRAME_END : FRAME_TORN;
                out->why = "it is not whole";
                out->end = r->offset;
                return COP_OK;
            }
        }
        left = expand(r, &n);
        filled = n == r->cap;
        if (ZSTD_isError(left) || n > FRAME_MAX_BYTES) {
            out->kind = FRAME_BROKEN;
            out->why = ZSTD_isError(left) ? ZSTD_getErrorName(left) : "it holds more than 1 GiB";
            out->end = r->offset;
            return COP_OK;
        }
    } while (left != 0);
    out->kind = FRAME_WHOLE;
    out->end = r->offset;
    out->bytes = r->content;
    out->n = n;
    return COP_OK;
}

/* ---- Looking for a frame. */

/* Tries at frames that might begin somewhere; chance makes one in 4 GiB. */
#define MAX_TRIES 64

static cop_status frame_at(bool *out, int fd, const char *name, uint64_t offset, cop_error *err) {
    if (lseek(fd, (off_t)offset, SEEK_SET) < 0)
        return cop_fail(err, COP_EIO, "could not read \"%s\": %s", name, strerror(errno));
    frame_reader *r;
    cop_status status = frame_reader_open(&r, fd, name, err);
    if (status != COP_OK) return status;
    shard_frame f;
    status = frame_reader_next(r, &f, err);
    *out = status == COP_OK && f.kind == FRAME_WHOLE && f.n > 0;
    frame_reader_close(r);
    return status;
}

/* Where a frame's magic number stands in the n bytes, or n. */
static size_t find_magic(const uint8_t *bytes, size_t n) {
    static const uint8_t magic[4] = {0x28, 0xB5, 0x2F, 0xFD};
    const uint8_t *at = memmem(bytes, n, magic, sizeof magic);
    return at ? (size_t)(at - bytes) : n;
}

cop_status frames_follow(bool *out, int fd, const char *name, uint64_t offset, cop_error *err) {
    uint8_t bytes[4096];
    *out = false;
    for (int tries = 0; tries < MAX_TRIES;) {
        ssize_t n = pread(fd, bytes, sizeof bytes, (off_t)offset);
        if (n < 0) return cop_fail(err, COP_EIO, "could not read \"%s\": %s", name, strerror(errno));
        if (n < 4) return COP_OK;
        size_t at = find_magic(bytes, (size_t)n);
        if (at == (size_t)n) {
            offset += (uint64_t)n - 3; /* it may lie across the end of the block */
            continue;
        }
        cop_status status = frame_at(out, fd, name, offset + at, err);
        if (status != COP_OK || *out) return status;
        offset += at + 1;
        tries++;
    }
    *out = true; /* whatever this is, it is no torn end */
    return COP_OK;
}
