/* Reading typed values out of msgpack-c's objects, by tables of fields.  Inside proto/ only.
 *
 * The first error sticks in the reader; later calls may go on or stop, nothing they do counts.  The message
 * has passed request_check(): keys are unique str, text is UTF-8, counts are real. */
#ifndef WIRE_REQUEST_READ_H
#define WIRE_REQUEST_READ_H

#include <msgpack.h>

#include "proto/request.h"

/* Blocks that live as long as their request; each is aligned for any type.  NULL without memory. */
request_arena *request_arena_open(const wire_allocator *allocator);
void *request_arena_take(request_arena *arena, size_t n, size_t size);
void request_arena_close(request_arena *arena); /* NULL does nothing */

typedef struct request_reader {
    request_arena *arena;
    wire_error *err; /* code NULL: no error so far */
} request_reader;

/* Where a value stands in the message: a chain up to the top map (`up` NULL), on the callers' stacks. */
typedef struct request_place {
    const struct request_place *up;
    wire_text key; /* {0}: an array's element */
    size_t index;
} request_place;

request_place request_place_key(const request_place *up, const char *key);
request_place request_place_index(const request_place *up, size_t index);

/* Note an error at `place` (NULL: about no key) unless there is one already.  Always false. */
bool request_read_fail(request_reader *r, const request_place *place, const char *code, const char *format,
                       ...) __attribute__((format(printf, 4, 5)));

/* Where a map's values go. */
typedef struct request_field request_field;
typedef bool (*request_read_value)(request_reader *r, const request_place *place, const msgpack_object *value,
                                   const request_field *field, void *out);
struct request_field {
    const char *name;
    request_read_value read;
    size_t offset;       /* of the value in the struct */
    size_t given_offset; /* of a bool that becomes true; REQUEST_NO_FLAG: none */
    double min, max;     /* for numbers of at most 32 bits, reals, and the bytes of text */
};
#define REQUEST_NO_FLAG ((size_t)-1)

/* Read every pair of the map `value` into `base` by the table; a key outside it is an error that lists the
 * known ones, those of request_read_unbuilt() apart. */
bool request_read_map(request_reader *r, const request_place *place, const msgpack_object *value,
                      const request_field *fields, size_t n_fields, void *base);

/* ---- Values: what stands at `out`, which they fill only when they return true. */
bool request_read_u32(request_reader *, const request_place *, const msgpack_object *, const request_field *,
                      void *);
bool request_read_u64(request_reader *, const request_place *, const msgpack_object *, const request_field *,
                      void *);
bool request_read_real(request_reader *, const request_place *, const msgpack_object *, const request_field *,
                       void *);
bool request_read_temperature(request_reader *, const request_place *, const msgpack_object *,
                              const request_field *, void *);
bool request_read_bool(request_reader *, const request_place *, const msgpack_object *, const request_field *,
                       void *);
bool request_read_text(request_reader *, const request_place *, const msgpack_object *, const request_field *,
                       void *);
bool request_read_ids(request_reader *, const request_place *, const msgpack_object *, const request_field *,
                      void *);
bool request_read_nothing(request_reader *, const request_place *, const msgpack_object *,
                          const request_field *, void *); /* the caller reads it */
bool request_read_unbuilt(request_reader *, const request_place *, const msgpack_object *,
                          const request_field *, void *); /* `unsupported` */

/* The index in `names` of the str `value`; -1 and an error that lists the names otherwise. */
int request_read_name(request_reader *r, const request_place *place, const msgpack_object *value,
                      const char *const names[], int n_names);

/* Note that the map at `place` lacks `key`; `expected` says what it should hold.  Always false. */
bool request_read_missing(request_reader *r, const request_place *place, const char *key,
                          const char *expected);

/* Check that `value` is an array of min..max elements (max SIZE_MAX: any number). */
bool request_read_array(request_reader *r, const request_place *place, const msgpack_object *value,
                        size_t min, size_t max);

/* `n` zeroed items of the arena; NULL with an `internal` error without memory. */
void *request_read_take(request_reader *r, size_t n, size_t size);

/* The value of `key` in a map; NULL if it lacks it. */
const msgpack_object *request_read_find(const msgpack_object *map, const char *key);

/* Whether a str has exactly this content. */
bool request_read_is(const msgpack_object *value, const char *text);

/* What kind of value it is, for messages: "str", "float". */
const char *request_read_kind(const msgpack_object *value);

/* ---- Inputs (request_input.c). */

/* What tells which form an input came in, in a struct that begins with a request_input. */
typedef struct request_draft {
    request_input input;
    bool has_tokens, has_text, has_messages;
} request_draft;

/* Reads messages into a request_input. */
bool request_read_messages(request_reader *, const request_place *, const msgpack_object *,
                           const request_field *, void *);

/* The fields that a prompt and `tokenize` share, for the request_draft `member` of `type`. */
#define REQUEST_DRAFT_FIELDS(type, member)                                                                   \
    {"text", request_read_text, offsetof(type, member.input.text), offsetof(type, member.has_text), 0, -1},  \
    {                                                                                                        \
        "messages", request_read_messages, offsetof(type, member.input),                                     \
            offsetof(type, member.has_messages), 0, 0                                                        \
    }

/* Exactly one form must be given; sets input.kind.  `forms` is the wording of the choice. */
bool request_draft_finish(request_reader *r, const request_place *place, request_draft *draft,
                          const char *forms);

/* Read a whole `rollout` (request_rollout.c). */
bool request_read_rollout(request_reader *r, const msgpack_object *map, request_rollout *out);

/* Read `weights` and the messages of its stream into zeroed structs (request_weights.c). */
bool request_read_weights(request_reader *r, const msgpack_object *map, request_weights *out);
bool request_read_chunk(request_reader *r, const msgpack_object *map, request_chunk *out);
bool request_read_commit(request_reader *r, const msgpack_object *map, request_commit *out);

/* The keys that every request has. */
#define REQUEST_COMMON_FIELDS                                                                                \
    {"type", request_read_nothing, 0, REQUEST_NO_FLAG, 0, 0},                                                \
        {"id", request_read_nothing, 0, REQUEST_NO_FLAG, 0, 0}, {                                            \
        "compress", request_read_compress, 0, REQUEST_NO_FLAG, 0, 0                                          \
    }
bool request_read_compress(request_reader *, const request_place *, const msgpack_object *,
                           const request_field *,
                           void *); /* only that it is a bool: request_check() has read it */

#endif
