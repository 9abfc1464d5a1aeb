/* Records of an offline data set: one MessagePack map per input line (PROTOCOL, "Shards").
 *
 *   {line, prompt_id, prompt_tokens, input, samples: [...], rewards?}     or     {line, prompt_id, input,
 * error}
 *
 * A shard is a file of Zstandard frames, each of which holds whole records, one after the other.  Samples are
 * as on the wire, but for prompt_id and prompt_tokens, which the record has.  Like the rest of proto/, this
 * knows libc and msgpack-c only.  No state is shared: any thread. */
#ifndef WIRE_SHARD_H
#define WIRE_SHARD_H

#include <msgpack.h>

#include "proto/reply.h"

/* What was generated for a line.  All of it is borrowed for the call. */
typedef struct shard_record {
    uint64_t line; /* of the whole input, from 0 */
    wire_text prompt_id;
    wire_ids prompt_tokens;
    wire_buffer input;           /* one encoded MessagePack value: the line as a map; empty: nil */
    const reply_sample *samples; /* [n_samples] in order of index */
    size_t n_samples;
    const double
        *rewards; /* [n_rewards] by index of the sample; NaN: it has none (nil).  NULL: no such key */
    size_t n_rewards;
} shard_record;

/* A line for which nothing was generated. */
typedef struct shard_failure {
    uint64_t line;
    wire_text prompt_id;
    wire_buffer input; /* as above; empty where the line was no JSON object */
    wire_text error;
} shard_failure;

/* The bytes of a record; end with wire_buffer_free().  False without memory, *out is then zeroed. */
bool shard_encode_record(wire_buffer *out, const shard_record *r, const wire_allocator *allocator);
bool shard_encode_failure(wire_buffer *out, const shard_failure *f, const wire_allocator *allocator);

/* A decoded record.  Texts and objects point into the bytes it was read from and into `zone`. */
typedef struct shard_view {
    uint64_t line;
    wire_text prompt_id;
    wire_text error;               /* {0}: there are samples */
    const msgpack_object *input;   /* a map or nil */
    const msgpack_object *samples; /* an array of maps; NULL in a failure */
    const msgpack_object *rewards; /* an array of numbers and nil; NULL: none */
    wire_ids prompt_tokens;        /* copied to `zone`, so that it is aligned */
    const uint8_t *bytes;          /* the record as it stands in the frame */
    size_t n_bytes;
    msgpack_zone *zone;
} shard_view;

/* Read the record at the start of the n bytes.  False with *err filled (bad_request: not MessagePack, or no
 * record; internal: no memory); *out is then zeroed.  Hostile bytes are refused, and take memory in
 * proportion to n at most.  Keys that are not known are ignored.  End with shard_view_free(). */
bool shard_read(shard_view *out, const uint8_t *bytes, size_t n, wire_error *err);
void shard_view_free(shard_view *v); /* zeroed does nothing */

/* The value of a key of a map, or NULL. */
const msgpack_object *shard_find(const msgpack_object *map, const char *key);

#endif
