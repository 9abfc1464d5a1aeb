/* The manifest: reading with checks, writing at one stroke, comparing. */
#include "worker/manifest.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "worker/frames.h"
#include "worker/jsonl.h"

#define FORMAT "coppice.shards"
#define VERSION 1
#define FILE_NAME "manifest.json"
/* Room for half a million shards; a longer file is not read. */
#define MAX_BYTES ((off_t)256 << 20)

/* ---- Names. */

void shard_name(char out[SHARD_NAME_CHARS], uint64_t number) {
    snprintf(out, SHARD_NAME_CHARS, "shard-%05" PRIu64 ".zst", number);
}

bool shard_number(const char *name, uint64_t *number) {
    char same[SHARD_NAME_CHARS];
    if (strncmp(name, "shard-", 6) != 0) return false;
    *number = strtoull(name + 6, NULL, 10);
    shard_name(same, *number);
    return !strcmp(name, same);
}

bool manifest_owns(const char *key) {
    static const char *const own[] = {"format", "version", "state", "about", "shards", "totals"};
    for (size_t i = 0; i < sizeof own / sizeof own[0]; i++)
        if (!strcmp(key, own[i])) return true;
    return false;
}

/* ---- Shards. */

static const struct count_key {
    const char *key;
    size_t offset;
} count_keys[] = {
    {"records", offsetof(dataset_counts, records)},
    {"errors", offsetof(dataset_counts, errors)},
    {"samples", offsetof(dataset_counts, samples)},
    {"sampled_tokens", offsetof(dataset_counts, sampled_tokens)},
    {"forced_tokens", offsetof(dataset_counts, forced_tokens)},
};
enum { N_COUNTS = sizeof count_keys / sizeof count_keys[0] };

void dataset_counts_add(dataset_counts *sum, const dataset_counts *more) {
    sum->records += more->records;
    sum->errors += more->errors;
    sum->samples += more->samples;
    sum->sampled_tokens += more->sampled_tokens;
    sum->forced_tokens += more->forced_tokens;
}

static bool put_counts(json_t *object, const dataset_counts *c) {
    for (int i = 0; i < N_COUNTS; i++) {
        uint64_t value = *(const uint64_t *)((const char *)c + count_keys[i].offset);
        if (json_object_set_new(object, count_keys[i].key, json_u64(value)) != 0) return false;
    }
    return true;
}

json_t *manifest_shard_json(const manifest_shard *s, uint64_t number) {
    char name[SHARD_NAME_CHARS];
    shard_name(name, number);
    json_t *object =
        json_pack("{s:s, s:o, s:s}", "file", name, "bytes", json_u64(s->bytes), "xxh128", s->xxh128);
    if (object && put_counts(object, &s->counts) &&
        json_object_set_new(object, "first_line", json_u64(s->first_line)) == 0 &&
        json_object_set_new(object, "last_line", json_u64(s->last_line)) == 0)
        return object;
    json_decref(object);
    return NULL;
}

static bool get_u64(const json_t *object, const char *key, uint64_t *out) {
    return json_u64_get(json_object_get(object, key), out);
}

static bool parse_shard(const json_t *object, size_t number, manifest_shard *s) {
    char name[SHARD_NAME_CHARS];
    shard_name(name, number);
    const char *file = json_string_value(json_object_get(object, "file"));
    const char *digest = json_string_value(json_object_get(object, "xxh128"));
    if (!file || strcmp(file, name) != 0) return false;
    if (!digest || strlen(digest) != SHARD_DIGEST_CHARS - 1) return false;
    memcpy(s->xxh128, digest, SHARD_DIGEST_CHARS);
    for (int i = 0; i < N_COUNTS; i++) {
        uint64_t *value = (uint64_t *)((char *)&s->counts + count_keys[i].offset);
        if (!get_u64(object, count_keys[i].key, value)) return false;
    }
    return get_u64(object, "bytes", &s->bytes) && get_u64(object, "first_line", &s->first_line) &&
           get_u64(object, "last_line", &s->last_line) && s->bytes > 0 && s->counts.records > 0 &&
           s->first_line <= s->last_line && s->last_line < UINT64_MAX;
}

bool manifest_complete(const json_t *manifest) {
    const char *state = json_string_value(json_object_get(manifest, "state"));
    return state && !strcmp(state, "complete");
}

size_t manifest_n_shards(const json_t *manifest) {
    return json_array_size(json_object_get(manifest, "shards"));
}

manifest_shard manifest_shard_at(const json_t *manifest, size_t i) {
    manifest_shard s = {0};
    parse_shard(json_array_get(json_object_get(manifest, "shards"), i), i, &s); /* checked when it was read */
    return s;
}

json_t *manifest_new(const manifest_parts *p) {
    json_t *m = json_pack("{s:s, s:i, s:s}", "format", FORMAT, "version", VERSION, "state",
                          p->complete ? "complete" : "running");
    json_t *totals = json_object();
    bool ok = m && totals && put_counts(totals, p->totals) && json_object_update(m, p->identity) == 0 &&
              json_object_update(m, p->notes) == 0 && json_object_set(m, "about", p->about) == 0 &&
              json_object_set(m, "shards", p->shards) == 0 && json_object_set(m, "totals", totals) == 0;
    json_decref(totals);
    if (ok) return m;
    json_decref(m);
    return NULL;
}

/* ---- Reading. */

/* What is wrong with a manifest, or NULL. */
static const char *fault(const json_t *m) {
    const char *format = json_string_value(json_object_get(m, "format"));
    if (!format || strcmp(format, FORMAT) != 0) return "\"format\" is not \"" FORMAT "\"";
    if (json_integer_value(json_object_get(m, "version")) != VERSION) return "\"version\" is not 1";
    const char *state = json_string_value(json_object_get(m, "state"));
    if (!state || (strcmp(state, "running") != 0 && strcmp(state, "complete") != 0))
        return "\"state\" is neither \"running\" nor \"complete\"";
    if (!json_is_array(json_object_get(m, "shards"))) return "\"shards\" is no array";
    uint64_t next_line = 0;
    for (size_t i = 0; i < manifest_n_shards(m); i++) {
        manifest_shard s = {0};
        if (!parse_shard(json_array_get(json_object_get(m, "shards"), i), i, &s))
            return "an entry of \"shards\" is not as it should be";
        if (s.first_line < next_line) return "the lines of \"shards\" do not increase";
        next_line = s.last_line + 1;
    }
    return NULL;
}

static cop_status parse(json_t **out, int fd, const char *dir, cop_error *err) {
    struct stat st;
    if (fstat(fd, &st) != 0)
        return cop_fail(err, COP_EIO, "could not read \"%s/" FILE_NAME "\": %s", dir, strerror(errno));
    if (!S_ISREG(st.st_mode) || st.st_size > MAX_BYTES)
        return cop_fail(err, COP_EFORMAT, "cannot read \"%s/" FILE_NAME "\": %s", dir,
                        S_ISREG(st.st_mode) ? "it has more than 256 MiB" : "it is no file");
    json_error_t error;
    json_t *m = json_loadfd(fd, JSON_REJECT_DUPLICATES, &error);
    if (!m)
        return json_error_code(&error) == json_error_out_of_memory
                   ? cop_fail(err, COP_ENOMEM, "could not read \"%s/" FILE_NAME "\": out of memory", dir)
                   : cop_fail(err, COP_EFORMAT, "cannot read \"%s/" FILE_NAME "\": line %d: %s", dir,
                              error.line, error.text);
    const char *why = fault(m);
    if (!why) {
        *out = m;
        return COP_OK;
    }
    json_decref(m);
    return cop_fail(err, COP_EFORMAT, "cannot take \"%s/" FILE_NAME "\" for the manifest of a data set: %s",
                    dir, why);
}

cop_status manifest_read_at(json_t **out, int dir_fd, const char *dir, cop_error *err) {
    *out = NULL;
    int fd = openat(dir_fd, FILE_NAME, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO must not block */
    if (fd < 0 && errno == ENOENT) return COP_OK;
    if (fd < 0)
        return cop_fail(err, COP_EIO, "could not open \"%s/" FILE_NAME "\": %s", dir, strerror(errno));
    cop_status status = parse(out, fd, dir, err);
    close(fd);
    return status;
}

cop_status manifest_read(json_t **out, const char *dir, cop_error *err) {
    *out = NULL;
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT) return COP_OK;
    if (fd < 0) return cop_fail(err, COP_EIO, "could not open the folder \"%s\": %s", dir, strerror(errno));
    cop_status status = manifest_read_at(out, fd, dir, err);
    close(fd);
    return status;
}

/* ---- Writing. */

/* Digits with which every real in `value` reads back as the same double, but no more than it needs: 0.7 is to
 * stand as 0.7. */
static int real_digits(const json_t *value) {
    int digits = 15;
    if (json_is_real(value)) {
        char text[40];
        for (; digits < 17; digits++) {
            snprintf(text, sizeof text, "%.*g", digits, json_real_value(value));
            if (strtod(text, NULL) == json_real_value(value)) break;
        }
    }
    const char *key;
    json_t *child;
    size_t i;
    json_object_foreach((json_t *)value, key, child) {
        int n = real_digits(child);
        if (n > digits) digits = n;
    }
    json_array_foreach(value, i, child) {
        int n = real_digits(child);
        if (n > digits) digits = n;
    }
    return digits;
}

static char *dump(const json_t *value, size_t flags) {
    return json_dumps(value, flags | JSON_ENCODE_ANY | JSON_REAL_PRECISION(real_digits(value)));
}

static bool write_temporary(int dir_fd, const char *text) {
    int fd = openat(dir_fd, MANIFEST_TEMPORARY, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (fd < 0) return false;
    bool ok = write_all(fd, text, strlen(text)) && write_all(fd, "\n", 1) && fsync(fd) == 0;
    int error = errno;
    if (close(fd) != 0 && ok) return false;
    errno = error;
    return ok;
}

cop_status manifest_write_at(int dir_fd, const char *dir, const json_t *manifest, cop_error *err) {
    char *text = dump(manifest, JSON_INDENT(2));
    if (!text) return cop_fail(err, COP_ENOMEM, "could not write \"%s/" FILE_NAME "\": out of memory", dir);
    bool ok = write_temporary(dir_fd, text) && renameat(dir_fd, MANIFEST_TEMPORARY, dir_fd, FILE_NAME) == 0 &&
              fsync(dir_fd) == 0;
    free(text); /* jansson's */
    if (ok) return COP_OK;
    return cop_fail(err, COP_EIO, "could not write \"%s/" FILE_NAME "\": %s", dir, strerror(errno));
}

/* ---- Comparing. */

/* Text that grows up to its room. */
typedef struct report {
    char *text;
    size_t n, cap;
    int found, untold;
} report;

#define SHOWN_CHARS 60

/* A value for a message. */
static void show(char out[SHOWN_CHARS + 4], const json_t *value) {
    char *text = value ? dump(value, JSON_COMPACT) : NULL;
    if (!value)
        snprintf(out, SHOWN_CHARS + 4, "not set");
    else if (!text)
        snprintf(out, SHOWN_CHARS + 4, "?");
    else
        snprintf(out, SHOWN_CHARS + 4, "%.*s%s", SHOWN_CHARS, text, strlen(text) > SHOWN_CHARS ? "..." : "");
    free(text);
}

static void tell(report *r, const char *path, const json_t *was, const json_t *is) {
    char line[512], old[SHOWN_CHARS + 4], new[SHOWN_CHARS + 4];
    show(old, was);
    show(new, is);
    int n = snprintf(line, sizeof line, "%s%s was %s and is %s", r->found ? "; " : "", path, old, new);
    r->found++;
    if (r->untold || n >= (int)sizeof line || r->n + (size_t)n >= r->cap) {
        r->untold++;
        return;
    }
    memcpy(r->text + r->n, line, (size_t)n + 1);
    r->n += (size_t)n;
}

/* A whole number and a real of the same value are the same. */
static bool is_same(const json_t *a, const json_t *b) {
    if (json_is_number(a) && json_is_number(b) && json_typeof(a) != json_typeof(b))
        return json_number_value(a) == json_number_value(b);
    return json_equal(a, b);
}

static void compare(report *r, const char *path, const json_t *was, const json_t *is) {
    if (!json_is_object(was) || !json_is_object(is)) {
        if (!is_same(was, is)) tell(r, path, was, is);
        return;
    }
    const char *key;
    json_t *child;
    char below[256];
    json_object_foreach((json_t *)was, key, child) {
        snprintf(below, sizeof below, "%s%s%s", path, path[0] ? "." : "", key);
        compare(r, below, child, json_object_get(is, key));
    }
    json_object_foreach((json_t *)is, key, child) {
        if (json_object_get(was, key)) continue;
        snprintf(below, sizeof below, "%s%s%s", path, path[0] ? "." : "", key);
        tell(r, below, NULL, child);
    }
}

int manifest_differences(char *text, size_t n_text, const json_t *was, const json_t *is) {
    const size_t tail = sizeof "; and 2147483647 more";
    report r = {.text = text, .cap = n_text > tail ? n_text - tail : 0};
    text[0] = 0;
    compare(&r, "", was, is);
    if (r.untold) snprintf(text + r.n, n_text - r.n, "%s%d more", r.n ? "; and " : "", r.untold);
    return r.found;
}
