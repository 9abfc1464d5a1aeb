/* Records of a data set, read one after the other: shards, their frames, the records of a frame. */
#include "worker/record_source.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "worker/frames.h"
#include "worker/manifest.h"

struct record_source {
    char *path;
    json_t *manifest; /* NULL: a single stream */
    size_t n_opened;  /* shards of a folder so far */

    /* The shard or stream being read. */
    char *name; /* for messages */
    int fd;     /* -1: none */
    frame_reader *reader;
    shard_frame frame;
    size_t at; /* in the frame's content */
    shard_view view;
};

static cop_status no_memory(const char *path, cop_error *err) {
    return cop_fail(err, COP_ENOMEM, "could not read \"%s\": out of memory", path);
}

/* ---- One shard. */

static void close_shard(record_source *s) {
    shard_view_free(&s->view);
    frame_reader_close(s->reader);
    if (s->fd > STDIN_FILENO) close(s->fd);
    mem_free(s->name);
    s->reader = NULL;
    s->fd = -1;
    s->name = NULL;
    s->frame = (shard_frame){0};
    s->at = 0;
}

/* Begin with the file `name` (taken) that is open as fd. */
static cop_status begin_shard(record_source *s, char *name, int fd, cop_error *err) {
    s->name = name;
    s->fd = fd;
    return name ? frame_reader_open(&s->reader, fd, name, err) : no_memory(s->path, err);
}

static cop_status open_file(record_source *s, cop_error *err) {
    bool is_stdin = !strcmp(s->path, "-");
    int fd = is_stdin ? STDIN_FILENO : open(s->path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return cop_fail(err, COP_EIO, "could not open \"%s\": %s", s->path, strerror(errno));
    return begin_shard(s, mem_strdup(is_stdin ? "stdin" : s->path), fd, err);
}

/* ---- A folder. */

static bool is_growing(const record_source *s) {
    return s->manifest && s->n_opened > manifest_n_shards(s->manifest);
}

/* Open the next shard; *more is false where there is none.  The one after those of the manifest may exist or
 * not, and have any size. */
static cop_status open_next_shard(record_source *s, bool *more, cop_error *err) {
    size_t n_complete = manifest_n_shards(s->manifest), i = s->n_opened;
    *more = i < n_complete || (i == n_complete && !manifest_complete(s->manifest));
    if (!*more) return COP_OK;
    s->n_opened++;
    char base[SHARD_NAME_CHARS];
    shard_name(base, i);
    size_t n = strlen(s->path) + sizeof base + 1;
    char *name = mem_alloc(n, 1);
    if (!name) return no_memory(s->path, err);
    snprintf(name, n, "%s/%s", s->path, base);
    int fd = open(name, O_RDONLY | O_CLOEXEC);
    cop_status status = COP_OK;
    struct stat st;
    if (fd < 0 && errno == ENOENT && i == n_complete)
        *more = false;
    else if (fd < 0 || fstat(fd, &st) != 0)
        status = cop_fail(err, COP_EIO, "could not open \"%s\": %s", name, strerror(errno));
    else if (i < n_complete && (uint64_t)st.st_size != manifest_shard_at(s->manifest, i).bytes)
        status = cop_fail(err, COP_EIO, "cannot read \"%s\": it has %lld bytes, the manifest says %llu", name,
                          (long long)st.st_size, (unsigned long long)manifest_shard_at(s->manifest, i).bytes);
    if (status == COP_OK && *more) return begin_shard(s, name, fd, err);
    if (fd >= 0) close(fd);
    mem_free(name);
    return status;
}

static cop_status open_folder(record_source *s, cop_error *err) {
    cop_status status = manifest_read(&s->manifest, s->path, err);
    if (status != COP_OK || s->manifest) return status;
    return cop_fail(err, COP_ENOTFOUND, "cannot read the folder \"%s\": it holds no manifest.json", s->path);
}

/* ---- Records. */

/* Whether the frame at `start`, which was not whole when it was read, is so by now. */
static cop_status is_whole_now(bool *out, const record_source *s, uint64_t start, cop_error *err) {
    if (lseek(s->fd, (off_t)start, SEEK_SET) < 0)
        return cop_fail(err, COP_EIO, "could not read \"%s\": %s", s->name, strerror(errno));
    frame_reader *r;
    shard_frame f;
    cop_status status = frame_reader_open(&r, s->fd, s->name, err);
    if (status != COP_OK) return status;
    status = frame_reader_next(r, &f, err);
    *out = status == COP_OK && f.kind == FRAME_WHOLE;
    frame_reader_close(r);
    return status;
}

/* Whether what stands behind the whole frames of the growing shard is damage: whole frames follow it, though
 * it is none itself even now.  (The run may have gone on since it was read.)  Else it is being written, or
 * was left by a crash, and the next run cuts it off. */
static cop_status is_damage(bool *out, const record_source *s, cop_error *err) {
    bool is_whole = false;
    cop_status status = frames_follow(out, s->fd, s->name, s->frame.start + 1, err);
    if (status == COP_OK && *out) status = is_whole_now(&is_whole, s, s->frame.start, err);
    *out = *out && !is_whole;
    return status;
}

/* Go to the next frame of the shard; *more is false at its end. */
static cop_status next_frame(record_source *s, bool *more, cop_error *err) {
    cop_status status = frame_reader_next(s->reader, &s->frame, err);
    s->at = 0;
    *more = status == COP_OK && s->frame.kind == FRAME_WHOLE;
    if (status != COP_OK || *more || s->frame.kind == FRAME_END) return status;
    bool bad = true;
    if (is_growing(s)) status = is_damage(&bad, s, err);
    if (status != COP_OK || !bad) return status;
    return cop_fail(err, COP_EFORMAT, "cannot read \"%s\": frame at byte %llu: %s", s->name,
                    (unsigned long long)s->frame.start, s->frame.why);
}

static cop_status read_record(record_source *s, cop_error *err) {
    wire_error why = {0};
    if (shard_read(&s->view, s->frame.bytes + s->at, s->frame.n - s->at, &why)) {
        s->at += s->view.n_bytes;
        return COP_OK;
    }
    if (!strcmp(why.code, WIRE_INTERNAL)) return no_memory(s->name, err);
    return cop_fail(err, COP_EFORMAT,
                    "cannot read \"%s\": frame at byte %llu: byte %zu of its content: %s%s%s", s->name,
                    (unsigned long long)s->frame.start, s->at, why.key, why.key[0] ? ": " : "", why.message);
}

cop_status record_source_next(record_source *s, const shard_view **out, bool *more, cop_error *err) {
    *out = NULL;
    *more = false;
    shard_view_free(&s->view);
    for (;;) {
        bool has = false;
        cop_status status = COP_OK;
        if (s->fd < 0) { /* a single stream that has ended, or between two shards */
            if (s->manifest) status = open_next_shard(s, &has, err);
            if (status != COP_OK || !has) return status;
        }
        if (s->at < s->frame.n) {
            status = read_record(s, err);
            *more = status == COP_OK;
            *out = *more ? &s->view : NULL;
            return status;
        }
        status = next_frame(s, &has, err);
        if (status != COP_OK) return status;
        if (!has) close_shard(s);
    }
}

const json_t *record_source_manifest(const record_source *s) { return s->manifest; }

/* ---- Opening. */

cop_status record_source_open(record_source **out, const char *path, cop_error *err) {
    *out = NULL;
    record_source *s = mem_zalloc(1, sizeof *s);
    if (!s) return no_memory(path, err);
    s->fd = -1;
    s->path = mem_strdup(path);
    struct stat st;
    cop_status status = COP_OK;
    if (!s->path)
        status = no_memory(path, err);
    else if (strcmp(path, "-") != 0 && stat(path, &st) == 0 && S_ISDIR(st.st_mode))
        status = open_folder(s, err);
    else
        status = open_file(s, err);
    if (status == COP_OK)
        *out = s;
    else
        record_source_close(s);
    return status;
}

void record_source_close(record_source *s) {
    if (!s) return;
    close_shard(s);
    json_decref(s->manifest);
    mem_free(s->path);
    mem_free(s);
}
