/* The manifest of a data set's folder: a JSON file that tells what was made, with what, and which shards are
 * complete.
 *
 *   {"format": "coppice.shards", "version": 1, "state": "running" or "complete",
 *    the identity's objects, the notes,
 *    "about": {...},
 *    "shards": [{"file", "bytes", "xxh128", "records", "errors", "samples", "sampled_tokens",
 *                "forced_tokens", "first_line", "last_line"}],
 *    "totals": {"records", "errors", "samples", "sampled_tokens", "forced_tokens"}}
 *
 * xxh128 is XXH3-128 of the file's bytes in canonical hex.  It is replaced as a whole: whoever reads it sees
 * the old one or the new one.  Any thread; one writer, who holds the folder's lock. */
#ifndef COP_MANIFEST_H
#define COP_MANIFEST_H

#include <jansson.h>

#include "kernels/base.h"

typedef struct dataset_counts {
    uint64_t records, errors; /* lines: all of them, and those without samples */
    uint64_t samples, sampled_tokens, forced_tokens;
} dataset_counts;

void dataset_counts_add(dataset_counts *sum, const dataset_counts *more);

/* In the folder while the manifest is replaced, or left there by a crash. */
#define MANIFEST_TEMPORARY "manifest.json.tmp"

/* A complete shard. */
#define SHARD_NAME_CHARS 32
#define SHARD_DIGEST_CHARS 33
typedef struct manifest_shard {
    uint64_t bytes;
    char xxh128[SHARD_DIGEST_CHARS];
    dataset_counts counts;
    uint64_t first_line, last_line;
} manifest_shard;

/* "shard-00000.zst", and back: false for any other name. */
void shard_name(char out[SHARD_NAME_CHARS], uint64_t number);
bool shard_number(const char *name, uint64_t *number);

/* The manifest of a folder; *out NULL where there is none, or no folder (COP_OK).  What it returns is
 * checked: the shards have the names they should, at least a record each, and lines that increase.
 * COP_EFORMAT where it is none of ours; COP_EIO, COP_ENOMEM. */
cop_status manifest_read(json_t **out, const char *dir, cop_error *err);
/* The same by a descriptor of the folder; `dir` is for messages. */
cop_status manifest_read_at(json_t **out, int dir_fd, const char *dir, cop_error *err);

/* Replace the manifest, durably: a temporary file is written, fsynced and renamed, the folder fsynced.  After
 * an error the old one or the new one stands. */
cop_status manifest_write_at(int dir_fd, const char *dir, const json_t *manifest, cop_error *err);

/* A new manifest of these parts, which are borrowed.  NULL without memory. */
typedef struct manifest_parts {
    bool complete;
    json_t *identity, *notes, *about; /* objects */
    json_t *shards;                   /* of manifest_shard_json()s */
    const dataset_counts *totals;     /* of the shards */
} manifest_parts;
json_t *manifest_new(const manifest_parts *p);

bool manifest_complete(const json_t *manifest);
size_t manifest_n_shards(const json_t *manifest);
manifest_shard manifest_shard_at(const json_t *manifest, size_t i);
json_t *manifest_shard_json(const manifest_shard *s, uint64_t number); /* NULL without memory */

/* The manifest's own keys; all others are the identity's or notes. */
bool manifest_owns(const char *key);

/* Write the differences of two JSON objects to text (n_text bytes, ended by NUL), such as
 * "parameters.n was 8 and is 16; model.digest was \"a\" and is not set"; those that do not fit are counted at
 * the end.  Returns how many there are. */
int manifest_differences(char *text, size_t n_text, const json_t *was, const json_t *is);

#endif
