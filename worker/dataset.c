/* The folder of a data set, being written.
 *
 * What stands on disk at any moment, and so what opening finds after a crash:
 *
 *   1. nothing, or a temporary manifest                      begin
 *   2. a manifest; shards 0 .. k-1 as it tells               go on with shard k; where there is no record
 *                                                            yet, another identity may begin anew
 *   3. the same, and shard k: whole frames, then perhaps     cut the torn frame off, count the records,
 *      a torn one                                            complete the shard if it has grown enough
 *   4. the manifest says "complete": no shard but its own    nothing to do
 *
 * The order of writes makes others impossible: the first manifest is there before any shard; shard k is
 * fsynced before the manifest that tells of it; shard k+1 is made after that one was fsynced. */
#include "worker/dataset.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "worker/file_hash.h"
#include "worker/frames.h"
#include "worker/held_records.h"

_Static_assert(DATASET_MAX_RECORD + FRAME_BYTES == FRAME_MAX_BYTES, "it fits a frame behind others");

/* What a run of records counts. */
typedef struct tally {
    dataset_counts counts;
    uint64_t first_line, last_line;
} tally;

/* The shard that grows. */
typedef struct growing {
    int fd;         /* -1: not there yet; it comes with its first frame */
    uint64_t bytes; /* of its whole frames */
    bool is_torn;   /* more than that may be in the file */
    tally tally;
} growing;

struct dataset_writer {
    char *dir;
    int dir_fd; /* holds the lock */
    size_t shard_bytes;

    /* What the manifest is made from. */
    json_t *identity, *about, *notes, *shards;
    dataset_counts complete_counts; /* of `shards` */
    bool has_news;                  /* notes that the manifest on disk lacks */
    bool lost_news;                 /* there was no memory for one */
    bool complete;

    growing shard;
    XXH3_state_t *hash; /* of the shard's whole frames */
    frame_encoder *encoder;

    uint8_t *records; /* [n_records bytes] not flushed yet */
    size_t n_records, cap;
    tally unflushed;

    uint64_t next_line;
    dataset_counts totals;
};

static void tally_add(tally *sum, const tally *more) {
    if (sum->counts.records == 0) sum->first_line = more->first_line;
    sum->last_line = more->last_line;
    dataset_counts_add(&sum->counts, &more->counts);
}

static cop_status no_memory(const char *dir, cop_error *err) {
    return cop_fail(err, COP_ENOMEM, "could not write the data set \"%s\": out of memory", dir);
}

/* The path of the growing shard as messages tell it; a long one is cut. */
typedef struct shard_path {
    char text[256];
} shard_path;

static shard_path growing_path(const dataset_writer *w) {
    shard_path p;
    char name[SHARD_NAME_CHARS];
    shard_name(name, json_array_size(w->shards));
    snprintf(p.text, sizeof p.text, "%.*s/%s", (int)(sizeof p.text - sizeof name - 1), w->dir, name);
    return p;
}

/* ---- The manifest. */

static cop_status write_manifest(dataset_writer *w, bool complete, cop_error *err) {
    json_t *m = manifest_new(&(manifest_parts){.complete = complete,
                                               .identity = w->identity,
                                               .notes = w->notes,
                                               .about = w->about,
                                               .shards = w->shards,
                                               .totals = &w->complete_counts});
    if (!m) return no_memory(w->dir, err);
    cop_status status = manifest_write_at(w->dir_fd, w->dir, m, err);
    json_decref(m);
    if (status != COP_OK) return status;
    w->has_news = false;
    w->complete = complete;
    return COP_OK;
}

void dataset_note(dataset_writer *w, const char *key, json_t *value) {
    assert(!w->complete && !manifest_owns(key) && !json_object_get(w->identity, key));
    if (json_equal(json_object_get(w->notes, key), value)) {
        json_decref(value);
        return;
    }
    w->has_news = true;
    if (json_object_set_new(w->notes, key, value) != 0) w->lost_news = true;
}

const json_t *dataset_noted(const dataset_writer *w, const char *key) {
    return json_object_get(w->notes, key);
}

/* ---- The growing shard. */

/* Put the shard, which is not empty, into the manifest, and with it perhaps mark the folder complete. */
static cop_status complete_shard(dataset_writer *w, bool all_complete, cop_error *err) {
    growing *g = &w->shard;
    if (fsync(g->fd) != 0 || fsync(w->dir_fd) != 0)
        return cop_fail(err, COP_EIO, "could not write \"%s\": %s", growing_path(w).text, strerror(errno));
    dataset_counts before = w->complete_counts;
    dataset_counts_add(&w->complete_counts, &g->tally.counts);
    manifest_shard s = {.bytes = g->bytes,
                        .counts = g->tally.counts,
                        .first_line = g->tally.first_line,
                        .last_line = g->tally.last_line};
    file_hash_hex(w->hash, s.xxh128);
    cop_status status = COP_OK;
    size_t number = json_array_size(w->shards);
    if (json_array_append_new(w->shards, manifest_shard_json(&s, number)) != 0)
        status = no_memory(w->dir, err);
    if (status == COP_OK) status = write_manifest(w, all_complete, err);
    if (status != COP_OK) {
        json_array_remove(w->shards, number);
        w->complete_counts = before;
        return status;
    }
    close(g->fd);
    *g = (growing){.fd = -1};
    XXH3_128bits_reset(w->hash);
    return COP_OK;
}

static bool is_full(const dataset_writer *w) {
    return w->shard.bytes > 0 && w->shard.bytes >= w->shard_bytes;
}

static cop_status create_shard(dataset_writer *w, cop_error *err) {
    char name[SHARD_NAME_CHARS];
    shard_name(name, json_array_size(w->shards));
    w->shard.fd = openat(w->dir_fd, name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (w->shard.fd >= 0) return COP_OK;
    return cop_fail(err, COP_EIO, "could not create \"%s\": %s", growing_path(w).text, strerror(errno));
}

/* Cut off what stands behind the whole frames. */
static cop_status cut_torn(dataset_writer *w, cop_error *err) {
    if (!w->shard.is_torn) return COP_OK;
    if (ftruncate(w->shard.fd, (off_t)w->shard.bytes) != 0)
        return cop_fail(err, COP_EIO, "could not cut the torn frame off \"%s\": %s", growing_path(w).text,
                        strerror(errno));
    w->shard.is_torn = false;
    return COP_OK;
}

static cop_status write_frame(dataset_writer *w, const uint8_t *bytes, size_t n, cop_error *err) {
    growing *g = &w->shard;
    g->is_torn = true;
    for (size_t done = 0; done < n;) {
        ssize_t written = pwrite(g->fd, bytes + done, n - done, (off_t)(g->bytes + done));
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) {
            cop_status status =
                cop_fail(err, COP_EIO, "could not write \"%s\": %s", growing_path(w).text, strerror(errno));
            cut_torn(w, NULL); /* else the next frame does it, or the next run */
            return status;
        }
        done += (size_t)written;
    }
    g->is_torn = false;
    g->bytes += n;
    XXH3_128bits_update(w->hash, bytes, n);
    return COP_OK;
}

static cop_status flush_records(dataset_writer *w, cop_error *err) {
    const uint8_t *frame;
    size_t n;
    cop_status status = frame_encode(w->encoder, w->records, w->n_records, &frame, &n, err);
    if (status == COP_OK && w->shard.fd < 0) status = create_shard(w, err);
    if (status == COP_OK) status = cut_torn(w, err);
    if (status == COP_OK) status = write_frame(w, frame, n, err);
    if (status != COP_OK) return status;
    tally_add(&w->shard.tally, &w->unflushed);
    w->unflushed = (tally){0};
    w->n_records = 0;
    return COP_OK;
}

/* ---- Records. */

static uint64_t count_ones(const msgpack_object_bin *mask) {
    uint64_t n = 0;
    for (uint32_t i = 0; i < mask->size; i++) n += mask->ptr[i] != 0;
    return n;
}

dataset_counts dataset_counts_of(const shard_view *record) {
    dataset_counts c = {.records = 1, .errors = record->error.bytes != NULL};
    if (!record->samples) return c;
    c.samples = record->samples->via.array.size;
    for (uint64_t i = 0; i < c.samples; i++) {
        const msgpack_object *mask = shard_find(&record->samples->via.array.ptr[i], "mask");
        if (!mask || mask->type != MSGPACK_OBJECT_BIN) continue;
        uint64_t sampled = count_ones(&mask->via.bin);
        c.sampled_tokens += sampled;
        c.forced_tokens += mask->via.bin.size - sampled;
    }
    return c;
}

cop_status dataset_append(dataset_writer *w, uint64_t line, const uint8_t *record, size_t n,
                          const dataset_counts *one, cop_error *err) {
    assert(!w->complete && line >= w->next_line && line < UINT64_MAX && one->records == 1);
    assert(n > 0 && n <= DATASET_MAX_RECORD);
    if (w->n_records >= FRAME_BYTES) { /* an earlier flush failed */
        cop_status status = dataset_flush(w, err);
        if (status != COP_OK) return status;
    }
    if (!mem_grow((void **)&w->records, &w->cap, w->n_records + n, 1)) return no_memory(w->dir, err);
    memcpy(w->records + w->n_records, record, n);
    w->n_records += n;
    tally_add(&w->unflushed, &(tally){*one, line, line});
    dataset_counts_add(&w->totals, one);
    w->next_line = line + 1;
    return w->n_records >= FRAME_BYTES ? dataset_flush(w, err) : COP_OK;
}

cop_status dataset_flush(dataset_writer *w, cop_error *err) {
    cop_status status = COP_OK;
    if (w->lost_news) return no_memory(w->dir, err);
    if (is_full(w)) status = complete_shard(w, false, err); /* which failed when it became so */
    if (status == COP_OK && w->has_news) status = write_manifest(w, false, err);
    if (status == COP_OK && w->n_records > 0) status = flush_records(w, err);
    if (status == COP_OK && is_full(w)) status = complete_shard(w, false, err);
    return status;
}

bool dataset_has_unflushed(const dataset_writer *w) { return w->n_records > 0; }

/* A shard that was begun and holds nothing is no part of a complete data set. */
static cop_status remove_empty_shard(dataset_writer *w, cop_error *err) {
    if (w->shard.fd < 0) return COP_OK;
    assert(w->shard.bytes == 0);
    char name[SHARD_NAME_CHARS];
    shard_name(name, json_array_size(w->shards));
    if (unlinkat(w->dir_fd, name, 0) != 0)
        return cop_fail(err, COP_EIO, "could not remove the empty \"%s\": %s", growing_path(w).text,
                        strerror(errno));
    close(w->shard.fd);
    w->shard.fd = -1;
    return COP_OK;
}

cop_status dataset_finish(dataset_writer *w, cop_error *err) {
    if (w->complete) return COP_OK;
    cop_status status = dataset_flush(w, err);
    if (status != COP_OK) return status;
    if (w->shard.bytes > 0) return complete_shard(w, true, err);
    status = remove_empty_shard(w, err);
    return status == COP_OK ? write_manifest(w, true, err) : status;
}

bool dataset_complete(const dataset_writer *w) { return w->complete; }
uint64_t dataset_next_line(const dataset_writer *w) { return w->next_line; }
const dataset_counts *dataset_totals(const dataset_writer *w) { return &w->totals; }

/* ---- Going on with a shard. */

/* Count the records of a whole frame of the growing shard. */
static cop_status count_frame(dataset_writer *w, const shard_frame *f, cop_error *err) {
    for (size_t at = 0; at < f->n;) {
        shard_view view;
        wire_error why = {0};
        if (!shard_read(&view, f->bytes + at, f->n - at, &why))
            return !strcmp(why.code, WIRE_INTERNAL)
                       ? no_memory(w->dir, err)
                       : cop_fail(err, COP_EFORMAT, "cannot go on with \"%s\": frame at byte %llu: %s",
                                  growing_path(w).text, (unsigned long long)f->start, why.message);
        uint64_t line = view.line;
        dataset_counts one = dataset_counts_of(&view);
        at += view.n_bytes;
        shard_view_free(&view);
        if (line < w->next_line || line == UINT64_MAX)
            return cop_fail(
                err, COP_EFORMAT,
                "cannot go on with \"%s\": frame at byte %llu: line %llu comes where line %llu or a "
                "later one is due",
                growing_path(w).text, (unsigned long long)f->start, (unsigned long long)line,
                (unsigned long long)w->next_line);
        tally_add(&w->shard.tally, &(tally){one, line, line});
        dataset_counts_add(&w->totals, &one);
        w->next_line = line + 1;
    }
    return COP_OK;
}

/* Whether a file may begin so that is to be a frame and was not written whole: as a frame does, with zeros in
 * place of what did not reach the disk. */
static cop_status begins_frame(bool *out, const dataset_writer *w, cop_error *err) {
    static const uint8_t magic[4] = {0x28, 0xB5, 0x2F, 0xFD};
    uint8_t bytes[sizeof magic];
    ssize_t n = pread(w->shard.fd, bytes, sizeof bytes, 0), i = 0;
    if (n < 0)
        return cop_fail(err, COP_EIO, "could not read \"%s\": %s", growing_path(w).text, strerror(errno));
    while (i < n && bytes[i] == magic[i]) i++;
    while (i < n && bytes[i] == 0) i++;
    *out = i == n;
    return COP_OK;
}

/* The whole frames end here, the file does not.  What is left is cut off, unless whole frames follow: no
 * crash leaves that, so it is damage, and what follows is not ours to remove.  Nor is a file that never held
 * a frame and does not begin as one. */
static cop_status cut_tail(dataset_writer *w, const shard_frame *f, cop_error *err) {
    shard_path path = growing_path(w);
    bool follows;
    cop_status status = frames_follow(&follows, w->shard.fd, path.text, f->start + 1, err);
    if (status != COP_OK) return status;
    if (follows)
        return cop_fail(
            err, COP_EFORMAT,
            "cannot go on with \"%s\": the frame at byte %llu is damaged (%s) and whole ones follow; "
            "to make it and all after it again: truncate -s %llu \"%s\"",
            path.text, (unsigned long long)f->start, f->why, (unsigned long long)f->start, path.text);
    bool is_ours = true;
    if (w->shard.bytes == 0) status = begins_frame(&is_ours, w, err);
    if (status != COP_OK) return status;
    if (!is_ours)
        return cop_fail(err, COP_EFORMAT,
                        "cannot go on with \"%s\": it is no shard, nor the beginning of one; move it away",
                        path.text);
    w->shard.is_torn = true;
    return cut_torn(w, err);
}

/* Walk the growing shard from its start. */
static cop_status count_shard(dataset_writer *w, cop_error *err) {
    shard_path path = growing_path(w);
    frame_reader *r;
    cop_status status = frame_reader_open(&r, w->shard.fd, path.text, err);
    if (status != COP_OK) return status;
    shard_frame f;
    while ((status = frame_reader_next(r, &f, err)) == COP_OK && f.kind == FRAME_WHOLE) {
        status = count_frame(w, &f, err);
        if (status != COP_OK) break;
        w->shard.bytes = f.end;
    }
    frame_reader_close(r);
    if (status == COP_OK && f.kind != FRAME_END) status = cut_tail(w, &f, err);
    if (status == COP_OK) status = file_hash_add(w->hash, w->shard.fd, path.text, w->shard.bytes, err);
    return status;
}

static cop_status resume_shard(dataset_writer *w, cop_error *err) {
    char name[SHARD_NAME_CHARS];
    shard_name(name, json_array_size(w->shards));
    struct stat st;
    w->shard.fd = openat(w->dir_fd, name, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (w->shard.fd < 0 && errno == ENOENT) return COP_OK;
    if (w->shard.fd < 0 || fstat(w->shard.fd, &st) != 0)
        return cop_fail(err, COP_EIO, "could not open \"%s\": %s", growing_path(w).text, strerror(errno));
    if (!S_ISREG(st.st_mode))
        return cop_fail(err, COP_EINVAL, "cannot go on with \"%s\": it is no file", growing_path(w).text);
    cop_status status = count_shard(w, err);
    return status == COP_OK && is_full(w) ? complete_shard(w, false, err) : status;
}

/* ---- Opening the folder. */

/* Make it if it is not there, and lock it. */
static cop_status open_folder(dataset_writer *w, cop_error *err) {
    bool made = mkdir(w->dir, 0777) == 0;
    if (!made && errno != EEXIST)
        return cop_fail(err, COP_EIO, "could not make the folder \"%s\": %s", w->dir, strerror(errno));
    w->dir_fd = open(w->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (w->dir_fd < 0)
        return cop_fail(err, COP_EIO, "could not open the folder \"%s\": %s", w->dir, strerror(errno));
    if (flock(w->dir_fd, LOCK_EX | LOCK_NB) != 0)
        return errno == EWOULDBLOCK
                   ? cop_fail(err, COP_EUNSUPPORTED, "cannot write into \"%s\": another process does", w->dir)
                   : cop_fail(err, COP_EIO, "could not lock the folder \"%s\": %s", w->dir, strerror(errno));
    int parent = made ? openat(w->dir_fd, "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    if (parent < 0) return COP_OK; /* a parent that cannot be read cannot be synced */
    int synced = fsync(parent);
    close(parent);
    return synced == 0
               ? COP_OK
               : cop_fail(err, COP_EIO, "could not make the folder \"%s\": %s", w->dir, strerror(errno));
}

static cop_status list_folder(DIR **out, const dataset_writer *w, cop_error *err) {
    int fd = openat(w->dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    *out = fd < 0 ? NULL : fdopendir(fd);
    if (*out) return COP_OK;
    cop_fail(err, COP_EIO, "could not list the folder \"%s\": %s", w->dir, strerror(errno));
    if (fd >= 0) close(fd);
    return COP_EIO;
}

/* That no shard has a number of `end` or above. */
static cop_status check_numbers(const dataset_writer *w, uint64_t end, cop_error *err) {
    DIR *folder;
    cop_status status = list_folder(&folder, w, err);
    if (status != COP_OK) return status;
    const struct dirent *entry;
    uint64_t number;
    while (status == COP_OK && (entry = readdir(folder))) {
        if (shard_number(entry->d_name, &number) && number >= end)
            status = cop_fail(err, COP_EINVAL,
                              "cannot write into \"%s\": it holds \"%s\", beyond what its manifest tells of; "
                              "move it away, or take another folder",
                              w->dir, entry->d_name);
    }
    closedir(folder);
    return status;
}

/* Every complete shard is there, as long as it should be. */
static cop_status check_sizes(const dataset_writer *w, const json_t *manifest, cop_error *err) {
    for (size_t i = 0; i < manifest_n_shards(manifest); i++) {
        char name[SHARD_NAME_CHARS];
        shard_name(name, i);
        uint64_t due = manifest_shard_at(manifest, i).bytes;
        struct stat st;
        if (fstatat(w->dir_fd, name, &st, 0) != 0)
            return cop_fail(err, COP_EIO, "could not find \"%s\" of the data set \"%s\": %s", name, w->dir,
                            strerror(errno));
        if (!S_ISREG(st.st_mode) || (uint64_t)st.st_size != due)
            return cop_fail(err, COP_EIO,
                            "cannot go on in \"%s\": \"%s\" has %lld bytes, its manifest says %llu", w->dir,
                            name, (long long)st.st_size, (unsigned long long)due);
    }
    return COP_OK;
}

static cop_status check_identity(const dataset_writer *w, const json_t *manifest, cop_error *err) {
    json_t *was = json_object(), *value;
    const char *key;
    int failed = was == NULL;
    json_object_foreach(w->identity, key, value) {
        json_t *old = json_object_get(manifest, key);
        if (old && !failed) failed = json_object_set(was, key, old);
    }
    char differences[sizeof err->message - 128];
    int n = failed ? 0 : manifest_differences(differences, sizeof differences, was, w->identity);
    json_decref(was);
    if (failed) return no_memory(w->dir, err);
    return n == 0 ? COP_OK : cop_fail(err, COP_EINVAL, "cannot go on in \"%.100s\": %s", w->dir, differences);
}

/* Take over what the manifest tells. */
static cop_status take_manifest(dataset_writer *w, const json_t *manifest, cop_error *err) {
    json_t *value;
    const char *key;
    json_object_foreach((json_t *)manifest, key, value) {
        if (manifest_owns(key) || json_object_get(w->identity, key)) continue;
        if (json_object_set(w->notes, key, value) != 0) return no_memory(w->dir, err);
    }
    for (size_t i = 0; i < manifest_n_shards(manifest); i++) {
        manifest_shard s = manifest_shard_at(manifest, i);
        if (json_array_append_new(w->shards, manifest_shard_json(&s, i)) != 0) return no_memory(w->dir, err);
        dataset_counts_add(&w->complete_counts, &s.counts);
        w->next_line = s.last_line + 1;
    }
    w->totals = w->complete_counts;
    w->complete = manifest_complete(manifest);
    return COP_OK;
}

/* Whether the first shard holds a whole frame; it may be missing. */
static cop_status has_frame(bool *out, const dataset_writer *w, cop_error *err) {
    char name[SHARD_NAME_CHARS];
    shard_name(name, 0);
    *out = false;
    int fd = openat(w->dir_fd, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0 && errno == ENOENT) return COP_OK;
    if (fd < 0)
        return cop_fail(err, COP_EIO, "could not open \"%s\": %s", growing_path(w).text, strerror(errno));
    cop_status status = frames_follow(out, fd, growing_path(w).text, 0, err);
    close(fd);
    return status;
}

/* Whether nothing would be lost if the folder were made with another identity. */
static cop_status is_empty(bool *out, const dataset_writer *w, const json_t *manifest, cop_error *err) {
    struct stat st;
    *out = manifest_n_shards(manifest) == 0 && fstatat(w->dir_fd, HELD_FILE, &st, AT_SYMLINK_NOFOLLOW) != 0;
    if (!*out) return COP_OK;
    if (errno != ENOENT)
        return cop_fail(err, COP_EIO, "could not look for \"%s/" HELD_FILE "\": %s", w->dir, strerror(errno));
    bool has = false;
    cop_status status = has_frame(&has, w, err);
    *out = !has;
    return status;
}

/* Begin in the folder of an empty set.  A growing shard without a whole frame is cut to nothing. */
static cop_status begin_anew(dataset_writer *w, bool was_complete, cop_error *err) {
    cop_status status = check_numbers(w, !was_complete, err);
    if (status == COP_OK) status = resume_shard(w, err);
    return status == COP_OK ? write_manifest(w, false, err) : status;
}

static cop_status go_on(dataset_writer *w, const json_t *manifest, cop_error *err) {
    cop_status status = check_identity(w, manifest, err);
    bool empty = false;
    if (status == COP_EINVAL) {
        cop_status looked = is_empty(&empty, w, manifest, err);
        if (looked != COP_OK) return looked;
    }
    if (empty) return begin_anew(w, manifest_complete(manifest), err);
    if (status == COP_OK) status = check_sizes(w, manifest, err);
    if (status == COP_OK) status = take_manifest(w, manifest, err);
    if (status != COP_OK) return status;
    status = check_numbers(w, json_array_size(w->shards) + !w->complete, err);
    return status == COP_OK && !w->complete ? resume_shard(w, err) : status;
}

/* A folder without a manifest is somebody's, unless there is nothing in it: see the states above. */
static cop_status check_nothing_there(const dataset_writer *w, cop_error *err) {
    DIR *folder;
    cop_status status = list_folder(&folder, w, err);
    if (status != COP_OK) return status;
    const struct dirent *entry;
    while (status == COP_OK && (entry = readdir(folder))) {
        const char *name = entry->d_name;
        if (strcmp(name, ".") != 0 && strcmp(name, "..") != 0 && strcmp(name, MANIFEST_TEMPORARY) != 0)
            status = cop_fail(err, COP_EINVAL,
                              "cannot write into \"%s\": it is no data set and not empty; give a folder of "
                              "its own",
                              w->dir);
    }
    closedir(folder);
    return status;
}

static cop_status begin(dataset_writer *w, cop_error *err) {
    cop_status status = check_nothing_there(w, err);
    return status == COP_OK ? write_manifest(w, false, err) : status;
}

static cop_status prepare(dataset_writer *w, const dataset_options *o, cop_error *err) {
    w->shard_bytes = o->shard_bytes;
    w->dir = mem_strdup(o->dir);
    w->identity = json_deep_copy(o->identity);
    w->about = json_deep_copy(o->about);
    w->notes = json_object();
    w->shards = json_array();
    w->hash = XXH3_createState();
    if (!w->dir || !w->identity || !w->about || !w->notes || !w->shards || !w->hash)
        return no_memory(o->dir, err);
    XXH3_128bits_reset(w->hash);
    return frame_encoder_open(&w->encoder, err);
}

static cop_status start(dataset_writer *w, const dataset_options *o, cop_error *err) {
    json_t *manifest = NULL;
    cop_status status = prepare(w, o, err);
    if (status == COP_OK) status = open_folder(w, err);
    if (status == COP_OK) status = manifest_read_at(&manifest, w->dir_fd, w->dir, err);
    if (status == COP_OK) status = manifest ? go_on(w, manifest, err) : begin(w, err);
    json_decref(manifest);
    return status;
}

cop_status dataset_open(dataset_writer **out, const dataset_options *o, cop_error *err) {
    assert(o->dir && json_is_object(o->identity) && json_is_object(o->about));
    *out = NULL;
    dataset_writer *w = mem_zalloc(1, sizeof *w);
    if (!w) return no_memory(o->dir, err);
    w->dir_fd = w->shard.fd = -1;
    cop_status status = start(w, o, err);
    if (status == COP_OK)
        *out = w;
    else
        dataset_close(w);
    return status;
}

void dataset_close(dataset_writer *w) {
    if (!w) return;
    if (w->shard.fd >= 0) close(w->shard.fd);
    if (w->dir_fd >= 0) close(w->dir_fd); /* and with it the lock */
    json_decref(w->identity);
    json_decref(w->about);
    json_decref(w->notes);
    json_decref(w->shards);
    XXH3_freeState(w->hash);
    frame_encoder_close(w->encoder);
    mem_free(w->records);
    mem_free(w->dir);
    mem_free(w);
}
