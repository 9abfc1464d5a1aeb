/* The folder of a data set, being written: shards and a manifest.
 *
 *   DIR/manifest.json      what it was made with, and the shards that are complete
 *   DIR/shard-00000.zst    records in order of line, in frames of some 64 KiB
 *   DIR/shard-00001.zst    the last one grows; it enters the manifest when it is complete and fsynced
 *
 * A record counts as soon as its frame is whole.  Whatever stops the process leaves whole frames and at most
 * one torn one at the end, which opening the folder again cuts off; then it goes on after the last record.
 * Nothing else is ever removed, but for a last shard that holds nothing when the folder is finished.  One
 * process writes at a time (a lock on the folder).  One thread. */
#ifndef COP_DATASET_H
#define COP_DATASET_H

#include <jansson.h>

#include "kernels/base.h"
#include "proto/shard.h"
#include "worker/manifest.h"

/* Bytes of the longest record. */
#define DATASET_MAX_RECORD (((size_t)1 << 30) - ((size_t)64 << 10))

typedef struct dataset_writer dataset_writer;

typedef struct dataset_options {
    const char *dir; /* made if it does not exist (its parents are not) */
    /* An object of objects.  What another run wrote into the folder must be the same, value by value, unless
     * the folder holds no record: then it begins anew with this one. */
    json_t *identity;
    json_t *about;      /* an object: told in the manifest as the last run gave it, never compared */
    size_t shard_bytes; /* a shard that has reached this is complete */
} dataset_options;

/* Open or go on.  Errors: COP_EINVAL where the folder was written with another identity (every difference is
 * named, such as "parameters.temperature was 1.0 and is 0.7"), holds shards beyond its manifest, or has none
 * and is not empty (but for what a crash leaves of a first manifest); COP_EIO, also where a complete shard is
 * missing or has another size; COP_EFORMAT where the manifest is none of ours, or the growing shard holds
 * what is no record in its place or a damaged frame before whole ones (the message tells how to cut it by
 * hand), or something else that is not ours from its start on; COP_EUNSUPPORTED where another process writes.
 * The objects are borrowed for the call. */
cop_status dataset_open(dataset_writer **out, const dataset_options *o, cop_error *err);
/* Give up the folder as it stands: what was not flushed is lost.  NULL does nothing. */
void dataset_close(dataset_writer *w);

/* What is already there. */
bool dataset_complete(const dataset_writer *w);
uint64_t dataset_next_line(const dataset_writer *w); /* 1 + the line of the last record, or 0 */
const dataset_counts *dataset_totals(const dataset_writer *w);

/* A value of the manifest that changes as the run goes on, such as how much of the input was read; written
 * with the next flush before any record, so that the manifest is never behind the records.  `value` is taken.
 */
void dataset_note(dataset_writer *w, const char *key, json_t *value);
const json_t *dataset_noted(const dataset_writer *w, const char *key); /* NULL: none */

/* What a record counts: itself, its samples, and their tokens by their masks. */
dataset_counts dataset_counts_of(const shard_view *record);

/* Append an encoded record of a line >= dataset_next_line() (and below 2^64 - 1).  `one` is what
 * dataset_counts_of() says of it, since that is counted when a folder is opened again.  It is in the file
 * once it was flushed: when a frame's worth is there, or by dataset_flush().
 * Errors: COP_EIO, COP_ENOMEM: what was not flushed is kept and goes with the next flush, or is lost when the
 * writer is closed and made again by the next run (a record of which append itself told an error may be in
 * either state: dataset_next_line() tells); COP_ETOOLARGE beyond 1 GiB. */
cop_status dataset_append(dataset_writer *w, uint64_t line, const uint8_t *record, size_t n,
                          const dataset_counts *one, cop_error *err);
cop_status dataset_flush(dataset_writer *w, cop_error *err);
bool dataset_has_unflushed(const dataset_writer *w);

/* Flush, complete the last shard, and mark the folder complete.  Where that is done already, nothing. */
cop_status dataset_finish(dataset_writer *w, cop_error *err);

#endif
