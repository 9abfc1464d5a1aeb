/* The snapshot of records that wait. */
#include "worker/held_records.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/shard.h"
#include "worker/frames.h"

#define TEMPORARY HELD_FILE ".tmp"

static cop_status fail(const char *dir, const char *did, cop_error *err) {
    return cop_fail(err, COP_EIO, "could not %s \"%s/" HELD_FILE "\": %s", did, dir, strerror(errno));
}

/* ---- Writing. */

static cop_status write_frame(int fd, frame_encoder *e, const uint8_t *bytes, size_t n, const char *dir,
                              cop_error *err) {
    const uint8_t *frame;
    size_t n_frame;
    cop_status status = frame_encode(e, bytes, n, &frame, &n_frame, err);
    if (status != COP_OK) return status;
    return write_all(fd, frame, n_frame) ? COP_OK : fail(dir, "write", err);
}

static cop_status write_records(int fd, const char *dir, const held_record *records, size_t n,
                                cop_error *err) {
    frame_encoder *e;
    cop_status status = frame_encoder_open(&e, err);
    for (size_t i = 0; i < n && status == COP_OK; i++)
        status = write_frame(fd, e, records[i].bytes, records[i].n, dir, err);
    frame_encoder_close(e);
    return status == COP_OK && fsync(fd) != 0 ? fail(dir, "write", err) : status;
}

static cop_status replace(int dir_fd, const char *dir, const held_record *records, size_t n, cop_error *err) {
    int fd = openat(dir_fd, TEMPORARY, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) return fail(dir, "create", err);
    cop_status status = write_records(fd, dir, records, n, err);
    if (close(fd) != 0 && status == COP_OK) status = fail(dir, "write", err);
    if (status == COP_OK && renameat(dir_fd, TEMPORARY, dir_fd, HELD_FILE) != 0)
        status = fail(dir, "replace", err);
    if (status != COP_OK) unlinkat(dir_fd, TEMPORARY, 0);
    return status;
}

cop_status held_records_write(const char *dir, const held_record *records, size_t n, cop_error *err) {
    int dir_fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir_fd < 0) return fail(dir, "write", err);
    cop_status status = COP_OK;
    if (n > 0)
        status = replace(dir_fd, dir, records, n, err);
    else if ((unlinkat(dir_fd, HELD_FILE, 0) != 0 && errno != ENOENT) ||
             (unlinkat(dir_fd, TEMPORARY, 0) != 0 && errno != ENOENT))
        status = fail(dir, "remove", err);
    close(dir_fd);
    return status;
}

/* ---- Reading. */

static cop_status keep_record(held_records *h, const shard_view *v, cop_error *err) {
    uint8_t *copy = mem_alloc(v->n_bytes, 1);
    if (!copy || !mem_grow((void **)&h->records, &h->cap, h->n + 1, sizeof *h->records)) {
        mem_free(copy);
        return cop_fail(err, COP_ENOMEM, "could not keep the records that wait");
    }
    memcpy(copy, v->bytes, v->n_bytes);
    h->records[h->n++] = (held_record){v->line, copy, v->n_bytes};
    return COP_OK;
}

static cop_status keep_frame(held_records *h, const shard_frame *f, uint64_t next_line, cop_error *err) {
    shard_view v;
    wire_error why;
    cop_status status = COP_OK;
    for (size_t at = 0; at < f->n && status == COP_OK && shard_read(&v, f->bytes + at, f->n - at, &why);) {
        at += v.n_bytes;
        if (v.line >= next_line) status = keep_record(h, &v, err);
        shard_view_free(&v);
    }
    return status;
}

static int by_line(const void *a, const void *b) {
    uint64_t x = ((const held_record *)a)->line, y = ((const held_record *)b)->line;
    return x < y ? -1 : x > y;
}

cop_status held_records_read(held_records *out, const char *dir, uint64_t next_line, cop_error *err) {
    char path[4096];
    *out = (held_records){0};
    if (snprintf(path, sizeof path, "%s/" HELD_FILE, dir) >= (int)sizeof path) return COP_OK;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return errno == ENOENT ? COP_OK : fail(dir, "open", err);
    frame_reader *r;
    shard_frame f;
    cop_status status = frame_reader_open(&r, fd, path, err);
    while (status == COP_OK) {
        status = frame_reader_next(r, &f, err);
        if (status != COP_OK || f.kind != FRAME_WHOLE) break;
        status = keep_frame(out, &f, next_line, err);
    }
    frame_reader_close(r);
    close(fd);
    if (out->n > 0) qsort(out->records, out->n, sizeof *out->records, by_line);
    if (status != COP_OK) held_records_free(out);
    return status;
}

void held_records_free(held_records *h) {
    for (size_t i = 0; i < h->n; i++) mem_free((void *)h->records[i].bytes);
    mem_free(h->records);
    *h = (held_records){0};
}
