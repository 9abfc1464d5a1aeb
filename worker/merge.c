/* `coppice merge`: the parts of a split run become one data set.
 *
 * The parts are what `generate --shard i/N` wrote.  Their records stand in order of line and line % N tells
 * the part, so the next record is always the head with the lowest line.  The output is written like any data
 * set: stopped and started again, the merge skips what is there. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "worker/commands.h"
#include "worker/dataset.h"
#include "worker/file_hash.h"
#include "worker/jsonl.h"
#include "worker/record_source.h"

#define INPUT_NOTE "input"
#define MAX_PARTS 65536

typedef struct part {
    const char *dir;
    json_t *manifest;
    record_source *source;
    const shard_view *head; /* its next record; NULL: it has no more */
} part;

typedef struct merge {
    part *parts; /* [n] by index of the split, once they are checked */
    uint64_t n;
    dataset_counts totals; /* of all parts */
    const char *out;
    size_t shard_bytes;
} merge;

static cop_status no_memory(cop_error *err) {
    return cop_fail(err, COP_ENOMEM, "could not merge: out of memory");
}

/* ---- The parts must be those of one run. */

static bool split_of(const json_t *manifest, uint64_t *index, uint64_t *of) {
    const json_t *split = json_object_get(manifest, "split");
    return json_u64_get(json_object_get(split, "index"), index) &&
           json_u64_get(json_object_get(split, "of"), of) && *index < *of && *of <= MAX_PARTS;
}

static cop_status open_part(part *p, const char *dir, cop_error *err) {
    p->dir = dir;
    cop_status status = manifest_read(&p->manifest, dir, err);
    if (status != COP_OK) return status;
    uint64_t index, of;
    if (!p->manifest)
        return cop_fail(err, COP_ENOTFOUND,
                        "cannot merge \"%s\": it is no data set, as it holds no manifest.json", dir);
    if (!split_of(p->manifest, &index, &of))
        return cop_fail(err, COP_EFORMAT,
                        "cannot merge \"%s\": its manifest has no \"split\" with index and of", dir);
    if (!manifest_complete(p->manifest))
        return cop_fail(
            err, COP_EINVAL,
            "cannot merge \"%s\": it is not complete; the `coppice generate` that wrote it goes on when "
            "it is started again",
            dir);
    return COP_OK;
}

/* What all parts of a run have in common: the identity but for the split, and the whole input.  NULL without
 * memory. */
static json_t *common_of(const json_t *manifest) {
    json_t *common = json_object(), *value;
    const char *key;
    json_object_foreach((json_t *)manifest, key, value) {
        if (!common || manifest_owns(key) || !strcmp(key, "split")) continue;
        if (json_object_set(common, key, value) == 0) continue;
        json_decref(common);
        common = NULL;
    }
    return common;
}

static cop_status check_same(const part *a, const part *b, cop_error *err) {
    json_t *first = common_of(a->manifest), *second = common_of(b->manifest);
    char differences[sizeof err->message - 256];
    bool ok = first && second;
    int n = ok ? manifest_differences(differences, sizeof differences, first, second) : 0;
    json_decref(first);
    json_decref(second);
    if (!ok) return no_memory(err);
    return n == 0 ? COP_OK
                  : cop_fail(err, COP_EINVAL,
                             "cannot merge \"%.80s\" with \"%.80s\", which is of another run: %s", a->dir,
                             b->dir, differences);
}

/* Put the parts into the order of their indices; each must be there once. */
static cop_status sort_parts(merge *m, cop_error *err) {
    uint64_t of = 0, index;
    split_of(m->parts[0].manifest, &index, &of);
    part *sorted = mem_zalloc(of, sizeof *sorted);
    if (!sorted) return no_memory(err);
    cop_status status = COP_OK;
    for (uint64_t i = 0; i < m->n && status == COP_OK; i++) {
        uint64_t its_of;
        split_of(m->parts[i].manifest, &index, &its_of);
        if (its_of != of)
            status = cop_fail(err, COP_EINVAL,
                              "cannot merge: \"%s\" is one of %" PRIu64 " parts, \"%s\" one of %" PRIu64,
                              m->parts[0].dir, of, m->parts[i].dir, its_of);
        else if (sorted[index].dir)
            status =
                cop_fail(err, COP_EINVAL,
                         "cannot merge: \"%s\" and \"%s\" are both part %" PRIu64 " of %" PRIu64 " (from 0)",
                         sorted[index].dir, m->parts[i].dir, index, of);
        else
            sorted[index] = m->parts[i];
    }
    for (index = 0; index < of && status == COP_OK; index++) {
        if (!sorted[index].dir)
            status = cop_fail(err, COP_EINVAL,
                              "cannot merge: part %" PRIu64 " of %" PRIu64 " (from 0) is missing", index, of);
    }
    if (status == COP_OK) memcpy(m->parts, sorted, m->n * sizeof *sorted); /* so n is `of` */
    mem_free(sorted);
    return status;
}

static cop_status check_parts(merge *m, cop_error *err) {
    cop_status status = sort_parts(m, err);
    for (uint64_t i = 1; i < m->n && status == COP_OK; i++)
        status = check_same(&m->parts[0], &m->parts[i], err);
    for (uint64_t i = 0; i < m->n && status == COP_OK; i++) {
        for (size_t s = 0; s < manifest_n_shards(m->parts[i].manifest); s++) {
            manifest_shard shard = manifest_shard_at(m->parts[i].manifest, s);
            dataset_counts_add(&m->totals, &shard.counts);
        }
    }
    return status;
}

/* ---- The shards must be what the manifests say. */

static cop_status verify_shard(const char *path, const manifest_shard *s, XXH3_state_t *hash,
                               cop_error *err) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return cop_fail(err, COP_EIO, "could not open \"%s\": %s", path, strerror(errno));
    XXH3_128bits_reset(hash);
    cop_status status = file_hash_add(hash, fd, path, s->bytes, err);
    close(fd);
    if (status != COP_OK) return status;
    char found[FILE_HASH_CHARS];
    file_hash_hex(hash, found);
    return !strcmp(found, s->xxh128)
               ? COP_OK
               : cop_fail(err, COP_EFORMAT,
                          "cannot merge \"%s\": it is damaged: its xxh128 is %s, the manifest says %s", path,
                          found, s->xxh128);
}

static cop_status verify_part(const part *p, XXH3_state_t *hash, cop_error *err) {
    cop_status status = COP_OK;
    for (size_t i = 0; i < manifest_n_shards(p->manifest) && status == COP_OK; i++) {
        manifest_shard s = manifest_shard_at(p->manifest, i);
        char name[SHARD_NAME_CHARS];
        shard_name(name, i);
        size_t n = strlen(p->dir) + sizeof name + 1;
        char *path = mem_alloc(n, 1);
        if (!path) return no_memory(err);
        snprintf(path, n, "%s/%s", p->dir, name);
        status = verify_shard(path, &s, hash, err);
        mem_free(path);
    }
    return status;
}

static cop_status verify(const merge *m, cop_error *err) {
    XXH3_state_t *hash = XXH3_createState();
    cop_status status = hash ? COP_OK : no_memory(err);
    for (uint64_t i = 0; i < m->n && status == COP_OK; i++) status = verify_part(&m->parts[i], hash, err);
    XXH3_freeState(hash);
    return status;
}

/* ---- Records. */

/* The part's next record of `line` or after it. */
static cop_status advance(const merge *m, uint64_t index, uint64_t line, cop_error *err) {
    part *p = &m->parts[index];
    bool more;
    uint64_t before = p->head ? p->head->line + 1 : 0;
    do {
        cop_status status = record_source_next(p->source, &p->head, &more, err);
        if (status != COP_OK || !more) return status;
        if (p->head->line < before || p->head->line % m->n != index || p->head->line == UINT64_MAX)
            return cop_fail(err, COP_EFORMAT,
                            "cannot merge \"%s\": a record of line %" PRIu64
                            " is out of place in part %" PRIu64 " of %" PRIu64,
                            p->dir, p->head->line, index, m->n);
        before = p->head->line + 1;
    } while (p->head->line < line);
    return COP_OK;
}

static cop_status open_sources(merge *m, uint64_t line, cop_error *err) {
    cop_status status = COP_OK;
    for (uint64_t i = 0; i < m->n && status == COP_OK; i++) {
        status = record_source_open(&m->parts[i].source, m->parts[i].dir, err);
        if (status == COP_OK) status = advance(m, i, line, err);
    }
    return status;
}

/* The part whose head has the lowest line, or n. */
static uint64_t lowest(const merge *m) {
    uint64_t best = m->n;
    for (uint64_t i = 0; i < m->n; i++) {
        const shard_view *head = m->parts[i].head;
        if (head && (best == m->n || head->line < m->parts[best].head->line)) best = i;
    }
    return best;
}

static cop_status copy_records(merge *m, dataset_writer *w, cop_error *err) {
    cop_status status = open_sources(m, dataset_next_line(w), err);
    while (status == COP_OK) {
        uint64_t i = lowest(m);
        if (i == m->n) break;
        const shard_view *head = m->parts[i].head;
        dataset_counts one = dataset_counts_of(head);
        status = dataset_append(w, head->line, head->bytes, head->n_bytes, &one, err);
        if (status == COP_OK) status = advance(m, i, head->line + 1, err);
    }
    return status;
}

/* ---- The output. */

static json_t *identity_of(const json_t *manifest) {
    json_t *identity = common_of(manifest);
    if (!identity) return NULL;
    json_object_del(identity, INPUT_NOTE);
    if (json_object_set_new(identity, "split", json_pack("{s:i, s:i}", "index", 0, "of", 1)) == 0)
        return identity;
    json_decref(identity);
    return NULL;
}

static cop_status open_output(const merge *m, dataset_writer **w, cop_error *err) {
    *w = NULL;
    const json_t *manifest = m->parts[0].manifest;
    dataset_options o = {.dir = m->out, .shard_bytes = m->shard_bytes, .identity = identity_of(manifest)};
    o.about = json_object_get(manifest, "about");
    cop_status status = o.identity ? COP_OK : no_memory(err);
    if (status == COP_OK && !json_is_object(o.about))
        status =
            cop_fail(err, COP_EFORMAT, "cannot merge \"%s\": its manifest has no \"about\"", m->parts[0].dir);
    if (status == COP_OK) status = dataset_open(w, &o, err);
    json_decref(o.identity);
    return status;
}

static void note_input(const merge *m, dataset_writer *w) {
    json_t *note = json_object_get(m->parts[0].manifest, INPUT_NOTE);
    if (note) dataset_note(w, INPUT_NOTE, json_incref(note));
}

/* What was written counts what the parts do. */
static cop_status check_totals(const merge *m, const dataset_writer *w, cop_error *err) {
    const dataset_counts *have = dataset_totals(w);
    if (!memcmp(have, &m->totals, sizeof *have)) return COP_OK;
    return cop_fail(err, COP_EFORMAT,
                    "cannot take \"%s\" for the merged data set: it has %" PRIu64 " records and %" PRIu64
                    " samples, the parts' manifests say %" PRIu64 " and %" PRIu64,
                    m->out, have->records, have->samples, m->totals.records, m->totals.samples);
}

static void tell(const merge *m, const dataset_writer *w, bool was_complete) {
    const dataset_counts *c = dataset_totals(w);
    fprintf(stderr,
            "%s \"%s\": %" PRIu64 " records (%" PRIu64 " of them errors) of %" PRIu64 " part%s, %" PRIu64
            " samples\n",
            was_complete ? "already complete:" : "merged", m->out, c->records, c->errors, m->n,
            m->n == 1 ? "" : "s", c->samples);
}

static cop_status write_output(merge *m, cop_error *err) {
    dataset_writer *w;
    cop_status status = open_output(m, &w, err);
    if (status != COP_OK) return status;
    bool was_complete = dataset_complete(w);
    if (!was_complete) {
        note_input(m, w);
        status = verify(m, err);
        if (status == COP_OK) status = copy_records(m, w, err);
    }
    if (status == COP_OK) status = check_totals(m, w, err);
    if (status == COP_OK) status = dataset_finish(w, err);
    if (status == COP_OK) tell(m, w, was_complete);
    dataset_close(w);
    return status;
}

/* ---- The command. */

static cop_status run_merge(merge *m, char **dirs, cop_error *err) {
    cop_status status = COP_OK;
    for (uint64_t i = 0; i < m->n && status == COP_OK; i++) status = open_part(&m->parts[i], dirs[i], err);
    if (status == COP_OK) status = check_parts(m, err);
    return status == COP_OK ? write_output(m, err) : status;
}

static void close_parts(merge *m) {
    for (uint64_t i = 0; i < m->n; i++) {
        record_source_close(m->parts[i].source);
        json_decref(m->parts[i].manifest);
    }
    mem_free(m->parts);
}

static int run(int argc, char **argv) {
    merge m = {.shard_bytes = (size_t)256 << 20};
    const option_spec options[] = {
        {.name = "output",
         .letter = 'o',
         .kind = OPTION_STRING,
         .value = &m.out,
         .arg = "DIR",
         .help = "the folder of the merged data set; made if it does not exist"},
        {.name = "shard-bytes",
         .kind = OPTION_BYTES,
         .value = &m.shard_bytes,
         .arg = "BYTES",
         .help = "begin another shard when one has this size"},
    };
    int n_args;
    int exit_status = options_parse(&command_merge, options, 2, argc, argv, argc, &n_args);
    if (exit_status >= 0) return exit_status;
    cop_error err;
    if (n_args == 0 || !m.out || n_args > MAX_PARTS) {
        cop_fail(&err, COP_EINVAL, "merge needs %s: coppice merge DIR... -o DIR",
                 n_args > MAX_PARTS ? "fewer parts"
                 : n_args == 0      ? "data sets"
                                    : "-o DIR");
        return tell_error(&err, 2);
    }
    m.n = (uint64_t)n_args;
    m.parts = mem_zalloc(m.n, sizeof *m.parts);
    cop_status status = m.parts ? run_merge(&m, argv + 1, &err) : no_memory(&err);
    if (m.parts) close_parts(&m);
    return status == COP_OK ? 0 : tell_error(&err, 1);
}

const command command_merge = {
    .name = "merge",
    .arguments = "DIR...",
    .summary = "join the parts of a split run into one data set, verified",
    .details = "Takes the data sets that `coppice generate --shard i/N` wrote, all N of them in any order, "
               "and writes "
               "one with their records in order of line: what the run without --shard would have written.\n"
               "The parts must be complete, of one run, and undamaged: every shard is compared with the "
               "checksum in its "
               "manifest.  A single data set is verified and copied.  Stopped at any moment and started "
               "again, it goes "
               "on; nothing that exists is overwritten.",
    .example = "coppice merge part-0 part-1 part-2 -o data",
    .run = run,
};
