/* Records and JSON: what `generate -o -`, `export`, `show` and reward programs see.  Any thread. */
#ifndef COP_RECORD_JSON_H
#define COP_RECORD_JSON_H

#include <jansson.h>

#include "kernels/base.h"
#include "proto/shard.h"

/* A new array of one object per sample
 *
 *   {prompt, prompt_id, sample, seed, prompt_tokens, tokens, mask, logprobs .., finish, stop, tool_calls,
 * weights, text, reward, input}
 *
 * with ids and numbers as JSON arrays and keys that the sample lacks left out; or of one {line, error,
 * prompt_id, input} for a line without samples.  Errors: COP_EFORMAT where the record is not as PROTOCOL
 * says; COP_ENOMEM. */
cop_status record_to_json(json_t **out, const shard_view *record, cop_error *err);

/* A JSON value as MessagePack, and back.  Integers, reals, strings, booleans, null, arrays and objects; the
 * way back refuses what JSON lacks (COP_EFORMAT).  False without memory. */
bool json_to_msgpack(wire_buffer *out, const json_t *value, const wire_allocator *allocator);
cop_status json_of_msgpack(json_t **out, const msgpack_object *value, cop_error *err);

#endif
