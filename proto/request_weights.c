/* New weights: `weights`, and the chunks and the commit of its stream.  Where a chunk lies in its tensor is
 * judged here; whether the tensor is the model's is for the worker. */
#include <string.h>

#include "proto/request_read.h"
#include "proto/wire_utf8.h"

/* ---- Text with a form of its own. */

/* As request_read_text(), for what becomes a C string. */
static bool read_text_without_nul(request_reader *r, const request_place *place, const msgpack_object *value,
                                  const request_field *field, void *out) {
    wire_text text;
    if (!request_read_text(r, place, value, field, &text)) return false;
    size_t n = strlen(text.bytes);
    if (n < text.n)
        return request_read_fail(r, place, WIRE_BAD_REQUEST,
                                 "cannot accept a str with a NUL at byte %zu: expected none", n);
    *(wire_text *)out = text;
    return true;
}

static bool read_digest(request_reader *r, const request_place *place, const msgpack_object *value,
                        const request_field *field, void *out) {
    wire_text text;
    if (!request_read_text(r, place, value, field, &text)) return false;
    if (text.n != REQUEST_DIGEST || strspn(text.bytes, "0123456789abcdef") != REQUEST_DIGEST)
        return request_read_fail(r, place, WIRE_BAD_REQUEST,
                                 "cannot accept \"%s\", %zu bytes: expected %d lower-case hex digits",
                                 wire_quote(text).text, text.n, REQUEST_DIGEST);
    *(wire_text *)out = text;
    return true;
}

/* ---- weights */

/* For counts that start at 1. */
static bool read_positive(request_reader *r, const request_place *place, const msgpack_object *value,
                          const request_field *field, void *out) {
    uint64_t number = 0;
    if (!request_read_u64(r, place, value, field, &number)) return false;
    if (!number) return request_read_fail(r, place, WIRE_BAD_REQUEST, "cannot accept 0: expected 1 or more");
    *(uint64_t *)out = number;
    return true;
}

#define WEIGHTS(member) offsetof(request_weights, member)

static const request_field stream_fields[] = {
    {"tensors", read_positive, WEIGHTS(tensors), REQUEST_NO_FLAG, 0, 0},
    {"bytes", read_positive, WEIGHTS(bytes), REQUEST_NO_FLAG, 0, 0},
};

static bool read_stream(request_reader *r, const request_place *place, const msgpack_object *value,
                        const request_field *field, void *out) {
    (void)field;
    request_weights *w = out;
    if (!request_read_map(r, place, value, stream_fields, sizeof stream_fields / sizeof *stream_fields, w))
        return false;
    if (!w->tensors) return request_read_missing(r, place, "tensors", "how many tensors come");
    return w->bytes || request_read_missing(r, place, "bytes", "the bytes of all tensors");
}

static const request_field source_fields[] = {
    {"path", read_text_without_nul, WEIGHTS(path), REQUEST_NO_FLAG, 1, REQUEST_MAX_PATH},
    {"stream", read_stream, 0, REQUEST_NO_FLAG, 0, 0},
};

static bool read_source(request_reader *r, const request_place *place, const msgpack_object *value,
                        const request_field *field, void *out) {
    (void)field;
    request_weights *w = out;
    if (!request_read_map(r, place, value, source_fields, sizeof source_fields / sizeof *source_fields, w))
        return false;
    bool has_path = w->path.bytes, has_stream = w->tensors;
    return has_path != has_stream ||
           request_read_fail(r, place, WIRE_BAD_REQUEST,
                             "cannot use %s of \"path\", \"stream\": expected exactly one",
                             has_path ? "several" : "none");
}

static bool read_policy(request_reader *r, const request_place *place, const msgpack_object *value,
                        const request_field *field, void *out) {
    (void)field;
    static const char *const policies[] = {"finish", "keep", "recompute", "abort"};
    int policy = request_read_name(r, place, value, policies, 4);
    if (policy >= 0) *(request_policy *)out = (request_policy)policy;
    return policy >= 0;
}

static const request_field weights_fields[] = {
    REQUEST_COMMON_FIELDS,
    {"version", read_positive, WEIGHTS(version), REQUEST_NO_FLAG, 0, 0},
    {"source", read_source, 0, REQUEST_NO_FLAG, 0, 0},
    {"policy", read_policy, WEIGHTS(policy), REQUEST_NO_FLAG, 0, 0},
    {"model", request_read_unbuilt, 0, REQUEST_NO_FLAG, 0, 0},
};

bool request_read_weights(request_reader *r, const msgpack_object *map, request_weights *out) {
    if (!request_read_map(r, NULL, map, weights_fields, sizeof weights_fields / sizeof *weights_fields, out))
        return false;
    if (!out->version)
        return request_read_missing(r, NULL, "version", "a number above that of the weights in use");
    return out->path.bytes || out->tensors ||
           request_read_missing(r, NULL, "source", "a map with one of path, stream");
}

/* ---- weights_chunk */

static const char *const dtype_names[] = {"F32", "BF16", "F16", "F64"};
static const size_t dtype_bytes[] = {4, 2, 2, 8}; /* of an element */

static bool read_dtype(request_reader *r, const request_place *place, const msgpack_object *value,
                       const request_field *field, void *out) {
    (void)field;
    int dtype = request_read_name(r, place, value, dtype_names, 4);
    if (dtype >= 0) *(request_dtype *)out = (request_dtype)dtype;
    return dtype >= 0;
}

static bool read_shape(request_reader *r, const request_place *place, const msgpack_object *value,
                       const request_field *field, void *out) {
    request_chunk *c = out;
    if (!request_read_array(r, place, value, 0, REQUEST_MAX_DIMS)) return false;
    size_t n = value->via.array.size;
    uint64_t *shape = request_read_take(r, n, sizeof *shape);
    if (!shape) return false;
    for (size_t i = 0; i < n; i++) {
        request_place here = request_place_index(place, i);
        if (!read_positive(r, &here, &value->via.array.ptr[i], field, &shape[i])) return false;
    }
    c->shape = shape, c->n_dims = n;
    return true;
}

/* The one copy of a chunk's data. */
static bool read_data(request_reader *r, const request_place *place, const msgpack_object *value,
                      const request_field *field, void *out) {
    (void)field;
    request_chunk *c = out;
    if (value->type != MSGPACK_OBJECT_BIN)
        return request_read_fail(r, place, WIRE_BAD_REQUEST, "cannot accept a value of type %s: expected bin",
                                 request_read_kind(value));
    size_t n = value->via.bin.size;
    uint8_t *data = request_arena_take(r->arena, n, 1);
    if (!data)
        return request_read_fail(r, NULL, WIRE_INTERNAL, "could not allocate %zu bytes of a tensor", n);
    if (n) memcpy(data, value->via.bin.ptr, n);
    c->data = data, c->n_data = n;
    return true;
}

typedef struct chunk_draft {
    request_chunk chunk;
    bool has_dtype, has_offset;
} chunk_draft;

#define CHUNK(member) offsetof(chunk_draft, chunk.member)

static const request_field chunk_fields[] = {
    REQUEST_COMMON_FIELDS,
    {"target", request_read_text, CHUNK(target), REQUEST_NO_FLAG, 1, WIRE_ID_BYTES},
    {"name", read_text_without_nul, CHUNK(name), REQUEST_NO_FLAG, 1, REQUEST_MAX_TENSOR_NAME},
    {"dtype", read_dtype, CHUNK(dtype), offsetof(chunk_draft, has_dtype), 0, 0},
    {"shape", read_shape, offsetof(chunk_draft, chunk), REQUEST_NO_FLAG, 0, 0},
    {"offset", request_read_u64, CHUNK(offset), offsetof(chunk_draft, has_offset), 0, 0},
    {"data", read_data, offsetof(chunk_draft, chunk), REQUEST_NO_FLAG, 0, 0},
};

static bool check_given(request_reader *r, const chunk_draft *d) {
    const struct {
        bool given;
        const char *key, *expected;
    } keys[] = {
        {d->chunk.target.bytes, "target", "the id of a \"weights\" request with a stream"},
        {d->chunk.name.bytes, "name", "the name of a tensor"},
        {d->has_dtype, "dtype", "one of F32, BF16, F16, F64"},
        {d->chunk.shape, "shape", "an array of at most 4 dims"},
        {d->has_offset, "offset", "the byte of the tensor that the data starts at"},
        {d->chunk.data, "data", "a part of the tensor, as bin"},
    };
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        if (!keys[i].given) return request_read_missing(r, NULL, keys[i].key, keys[i].expected);
    }
    return true;
}

/* The bytes of the whole tensor, in *n_bytes: below 2^63, so that no sum of a chunk's sizes wraps. */
static bool measure(request_reader *r, const request_chunk *c, uint64_t *n_bytes) {
    request_place shape = request_place_key(NULL, "shape");
    *n_bytes = dtype_bytes[c->dtype];
    for (size_t i = 0; i < c->n_dims; i++) {
        if (c->shape[i] > INT64_MAX / *n_bytes)
            return request_read_fail(
                r, &shape, WIRE_BAD_REQUEST,
                "cannot accept %llu items of %llu bytes (dim %zu): expected a tensor of less than 2^63 bytes",
                (unsigned long long)c->shape[i], (unsigned long long)*n_bytes, i);
        *n_bytes *= c->shape[i];
    }
    return true;
}

static bool check_chunk(request_reader *r, const request_chunk *c) {
    request_place offset = request_place_key(NULL, "offset"), data = request_place_key(NULL, "data");
    size_t element = dtype_bytes[c->dtype];
    const char *name = dtype_names[c->dtype];
    uint64_t n_bytes;
    if (!measure(r, c, &n_bytes)) return false;
    if (c->offset % element)
        return request_read_fail(
            r, &offset, WIRE_BAD_REQUEST,
            "cannot accept %llu: expected a multiple of %zu, the bytes of an element of %s",
            (unsigned long long)c->offset, element, name);
    if (c->n_data % element)
        return request_read_fail(
            r, &data, WIRE_BAD_REQUEST,
            "cannot accept %zu bytes: expected a multiple of %zu, the bytes of an element of %s", c->n_data,
            element, name);
    if (c->offset > n_bytes)
        return request_read_fail(r, &offset, WIRE_BAD_REQUEST,
                                 "cannot accept %llu: expected at most %llu, the bytes of the tensor",
                                 (unsigned long long)c->offset, (unsigned long long)n_bytes);
    if (c->n_data > n_bytes - c->offset)
        return request_read_fail(
            r, &data, WIRE_BAD_REQUEST,
            "cannot accept %zu bytes at offset %llu: expected at most %llu, the tensor has %llu", c->n_data,
            (unsigned long long)c->offset, (unsigned long long)(n_bytes - c->offset),
            (unsigned long long)n_bytes);
    return true;
}

bool request_read_chunk(request_reader *r, const msgpack_object *map, request_chunk *out) {
    chunk_draft d = {0};
    if (!request_read_map(r, NULL, map, chunk_fields, sizeof chunk_fields / sizeof *chunk_fields, &d) ||
        !check_given(r, &d) || !check_chunk(r, &d.chunk))
        return false;
    *out = d.chunk;
    return true;
}

/* ---- weights_commit */

static const request_field commit_fields[] = {
    REQUEST_COMMON_FIELDS,
    {"target", request_read_text, offsetof(request_commit, target), REQUEST_NO_FLAG, 1, WIRE_ID_BYTES},
    {"digest", read_digest, offsetof(request_commit, digest), REQUEST_NO_FLAG, 0, -1},
};

bool request_read_commit(request_reader *r, const msgpack_object *map, request_commit *out) {
    if (!request_read_map(r, NULL, map, commit_fields, sizeof commit_fields / sizeof *commit_fields, out))
        return false;
    if (!out->target.bytes)
        return request_read_missing(r, NULL, "target", "the id of a \"weights\" request with a stream");
    return out->digest.bytes || request_read_missing(r, NULL, "digest", "32 lower-case hex digits");
}
