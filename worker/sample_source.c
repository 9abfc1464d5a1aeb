/* Samples, prompt by prompt: over record_source, or over the lines of a file. */
#include "worker/sample_source.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "worker/jsonl.h"
#include "worker/manifest.h"
#include "worker/record_json.h"
#include "worker/record_source.h"

struct sample_source {
    record_source *records; /* NULL: JSON Lines */
    input_file *lines;
    json_t *ahead; /* the line that ended the last prompt; NULL: none */
};

/* ---- Opening. */

/* The first byte that reading fd will give, without taking it: whoever reads is to find it too.  -1: there is
 * none, or this cannot be told (a terminal). */
static int peek(int fd) {
    unsigned char byte;
    off_t at = lseek(fd, 0, SEEK_CUR);
    if (at >= 0) return pread(fd, &byte, 1, at) == 1 ? byte : -1;
    if (recv(fd, &byte, 1, MSG_PEEK) == 1) return byte;
    int copy[2]; /* of a pipe, tee() copies what it holds */
    if (pipe2(copy, O_CLOEXEC) != 0) return -1;
    bool has = tee(fd, copy[1], 1, 0) == 1 && read(copy[0], &byte, 1) == 1;
    close(copy[0]);
    close(copy[1]);
    return has ? byte : -1;
}

/* Whether JSON Lines begin so; an empty file is one of no lines. */
static bool begins_lines(int first) { return first < 0 || (first > 0 && strchr("{ \t\r\n", first)); }

static cop_status holds_lines(bool *out, const char *path, cop_error *err) {
    struct stat st;
    int fd = strcmp(path, "-") ? open(path, O_RDONLY | O_CLOEXEC) : STDIN_FILENO;
    if (fd < 0 || fstat(fd, &st) != 0)
        return cop_fail(err, COP_EIO, "could not open \"%s\": %s", path, strerror(errno));
    *out = !S_ISDIR(st.st_mode) && begins_lines(peek(fd));
    if (fd != STDIN_FILENO) close(fd);
    return COP_OK;
}

static cop_status open_source(sample_source *s, const char *path, cop_error *err) {
    bool is_lines = false;
    cop_status status = holds_lines(&is_lines, path, err);
    if (status != COP_OK) return status;
    return is_lines ? input_open(&s->lines, path, err) : record_source_open(&s->records, path, err);
}

cop_status sample_source_open(sample_source **out, const char *path, cop_error *err) {
    *out = NULL;
    sample_source *s = mem_zalloc(1, sizeof *s);
    if (!s) return cop_fail(err, COP_ENOMEM, "could not open \"%s\": out of memory", path);
    cop_status status = open_source(s, path, err);
    if (status == COP_OK)
        *out = s;
    else
        sample_source_close(s);
    return status;
}

void sample_source_close(sample_source *s) {
    if (!s) return;
    record_source_close(s->records);
    json_decref(s->ahead);
    input_close(s->lines);
    mem_free(s);
}

const json_t *sample_source_manifest(const sample_source *s) {
    return s->records ? record_source_manifest(s->records) : NULL;
}

/* ---- Reading. */

static bool same_value(const json_t *a, const json_t *b, const char *key) {
    const json_t *x = json_object_get(a, key), *y = json_object_get(b, key);
    return x && y ? json_equal(x, y) : x == y;
}

static bool same_prompt(const json_t *a, const json_t *b) {
    if (json_object_get(a, "error") || json_object_get(b, "error")) return false;
    return same_value(a, b, "prompt") && same_value(a, b, "prompt_id");
}

/* Read the next line that is not blank into `ahead`, which stays NULL at the end. */
static cop_status read_ahead(sample_source *s, cop_error *err) {
    input_line line;
    bool more;
    do {
        cop_status status = input_next(s->lines, &line, &more, err);
        if (status != COP_OK || !more) return status;
    } while (line.blank);
    COP_TRY(jsonl_parse(&line, &s->ahead, err), err, "line %" PRIu64, line.number + 1);
    return COP_OK;
}

/* Append the next line if it belongs to the prompt of `list`, or begins it; else it stays ahead. */
static cop_status take_line(sample_source *s, json_t *list, bool *took, cop_error *err) {
    *took = false;
    if (!s->ahead) {
        cop_status status = read_ahead(s, err);
        if (status != COP_OK || !s->ahead) return status;
    }
    if (json_array_size(list) > 0 && !same_prompt(json_array_get(list, 0), s->ahead)) return COP_OK;
    if (json_array_append(list, s->ahead) != 0)
        return cop_fail(err, COP_ENOMEM, "could not keep a sample: out of memory");
    json_decref(s->ahead);
    s->ahead = NULL;
    *took = true;
    return COP_OK;
}

static cop_status next_of_lines(sample_source *s, json_t **out, cop_error *err) {
    json_t *list = json_array();
    if (!list) return cop_fail(err, COP_ENOMEM, "could not keep a prompt: out of memory");
    cop_status status;
    bool took;
    do status = take_line(s, list, &took, err);
    while (status == COP_OK && took);
    if (status == COP_OK && json_array_size(list) > 0)
        *out = list;
    else
        json_decref(list);
    return status;
}

static cop_status next_of_records(sample_source *s, json_t **out, cop_error *err) {
    const shard_view *record;
    bool more = true;
    while (!*out) { /* a record may have no samples: then there is nothing to look at */
        cop_status status = record_source_next(s->records, &record, &more, err);
        if (status == COP_OK && more) status = record_to_json(out, record, err);
        if (status != COP_OK || !more) return status;
        if (json_array_size(*out) > 0) return COP_OK;
        json_decref(*out);
        *out = NULL;
    }
    return COP_OK;
}

cop_status sample_source_next(sample_source *s, json_t **out, cop_error *err) {
    *out = NULL;
    return s->records ? next_of_records(s, out, err) : next_of_lines(s, out, err);
}

void sample_source_tell_state(const sample_source *s) {
    const json_t *manifest = sample_source_manifest(s);
    if (manifest && !manifest_complete(manifest))
        fprintf(stderr, "coppice: note: the data set is not complete: this is what it holds by now\n");
}
