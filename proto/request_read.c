/* Typed values, tables of fields, and the arena that they go to. */
#include "proto/request_read.h"

#include <assert.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "proto/wire_utf8.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "arrays of numbers are little-endian on the wire and are copied as they stand"
#endif

/* ---- The arena: blocks in a chain, newest first. */

#define ARENA_ALIGN 16
#define ARENA_BLOCK_BYTES 4096

typedef struct arena_block {
    struct arena_block *next;
    size_t used, cap; /* bytes after the header */
    _Alignas(ARENA_ALIGN) char data[];
} arena_block;

struct request_arena {
    const wire_allocator *allocator;
    arena_block *blocks;
};

request_arena *request_arena_open(const wire_allocator *allocator) {
    request_arena *a = wire_resize(allocator, NULL, sizeof *a);
    if (a) *a = (request_arena){allocator, NULL};
    return a;
}

void *request_arena_take(request_arena *arena, size_t n, size_t size) {
    if (size && n > (SIZE_MAX / 2) / size) return NULL;
    size_t want = (n * size + ARENA_ALIGN - 1) / ARENA_ALIGN * ARENA_ALIGN;
    arena_block *b = arena->blocks;
    if (!b || want > b->cap - b->used) {
        size_t cap = want > ARENA_BLOCK_BYTES ? want : ARENA_BLOCK_BYTES;
        b = wire_resize(arena->allocator, NULL, sizeof *b + cap);
        if (!b) return NULL;
        *b = (arena_block){.next = arena->blocks, .cap = cap};
        arena->blocks = b;
    }
    void *p = b->data + b->used;
    b->used += want;
    return p;
}

void request_arena_close(request_arena *arena) {
    if (!arena) return;
    for (arena_block *b = arena->blocks, *next; b; b = next) {
        next = b->next;
        wire_release(arena->allocator, b);
    }
    wire_release(arena->allocator, arena);
}

void *request_read_take(request_reader *r, size_t n, size_t size) {
    void *p = request_arena_take(r->arena, n, size);
    if (p)
        memset(p, 0, n * size);
    else
        request_read_fail(r, NULL, WIRE_INTERNAL, "could not allocate %zu values of %zu bytes for a request",
                          n, size);
    return p;
}

/* ---- Places and errors. */

request_place request_place_key(const request_place *up, const char *key) {
    return (request_place){up, wire_text_of(key), 0};
}

request_place request_place_index(const request_place *up, size_t index) {
    return (request_place){up, {0}, index};
}

/* Write the path of `place`; returns its length, which may pass `size`. */
static size_t write_path(const request_place *place, char *path, size_t size) {
    size_t at = place->up ? write_path(place->up, path, size) : 0;
    if (at >= size) return at;
    int n = !place->key.bytes
                ? snprintf(path + at, size - at, "[%zu]", place->index)
                : snprintf(path + at, size - at, at ? ".%s" : "%s", wire_quote(place->key).text);
    return at + (size_t)n;
}

bool request_read_fail(request_reader *r, const request_place *place, const char *code, const char *format,
                       ...) {
    if (r->err->code) return false;
    char path[sizeof r->err->key * 2] = "", message[sizeof r->err->message];
    if (place) write_path(place, path, sizeof path);
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    return wire_fail(r->err, code, path, "%s", message);
}

const char *request_read_kind(const msgpack_object *value) {
    switch (value->type) {
    case MSGPACK_OBJECT_NIL: return "nil";
    case MSGPACK_OBJECT_BOOLEAN: return "bool";
    case MSGPACK_OBJECT_POSITIVE_INTEGER:
    case MSGPACK_OBJECT_NEGATIVE_INTEGER: return "int";
    case MSGPACK_OBJECT_FLOAT32:
    case MSGPACK_OBJECT_FLOAT64: return "float";
    case MSGPACK_OBJECT_STR: return "str";
    case MSGPACK_OBJECT_BIN: return "bin";
    case MSGPACK_OBJECT_ARRAY: return "array";
    case MSGPACK_OBJECT_MAP: return "map";
    default: return "ext";
    }
}

static bool wrong_kind(request_reader *r, const request_place *place, const msgpack_object *value,
                       const char *expected) {
    return request_read_fail(r, place, WIRE_BAD_REQUEST, "cannot accept a value of type %s: expected %s",
                             request_read_kind(value), expected);
}

/* ---- Maps. */

static wire_text text_of(const msgpack_object *str) {
    return (wire_text){str->via.str.ptr, str->via.str.size};
}

bool request_read_is(const msgpack_object *value, const char *text) {
    size_t n = strlen(text);
    return value->type == MSGPACK_OBJECT_STR && value->via.str.size == n &&
           !memcmp(value->via.str.ptr, text, n);
}

const msgpack_object *request_read_find(const msgpack_object *map, const char *key) {
    for (uint32_t i = 0; i < map->via.map.size; i++) {
        if (request_read_is(&map->via.map.ptr[i].key, key)) return &map->via.map.ptr[i].val;
    }
    return NULL;
}

static const request_field *find_field(const request_field *fields, size_t n_fields,
                                       const msgpack_object *key) {
    for (size_t i = 0; i < n_fields; i++) {
        if (request_read_is(key, fields[i].name)) return &fields[i];
    }
    return NULL;
}

/* Append ", name" (or "name") to a list of names; what does not fit is left out. */
static void list_name(char *list, size_t size, const char *name) {
    size_t n = strlen(list);
    if (n + strlen(name) + 3 <= size) snprintf(list + n, size - n, "%s%s", n ? ", " : "", name);
}

static bool unknown_key(request_reader *r, const request_place *place, const request_field *fields,
                        size_t n_fields) {
    char known[360] = "";
    for (size_t i = 0; i < n_fields; i++) {
        if (fields[i].read != request_read_unbuilt) list_name(known, sizeof known, fields[i].name);
    }
    return request_read_fail(r, place, WIRE_BAD_REQUEST, "unknown key \"%s\": expected %s",
                             wire_quote(place->key).text, known);
}

bool request_read_map(request_reader *r, const request_place *place, const msgpack_object *value,
                      const request_field *fields, size_t n_fields, void *base) {
    if (value->type != MSGPACK_OBJECT_MAP) return wrong_kind(r, place, value, "a map");
    for (uint32_t i = 0; i < value->via.map.size; i++) {
        const msgpack_object_kv *pair = &value->via.map.ptr[i];
        request_place here = {place, text_of(&pair->key), 0};
        const request_field *f = find_field(fields, n_fields, &pair->key);
        if (!f) return unknown_key(r, &here, fields, n_fields);
        if (!f->read(r, &here, &pair->val, f, (char *)base + f->offset)) return false;
        if (f->given_offset != REQUEST_NO_FLAG) *(bool *)((char *)base + f->given_offset) = true;
    }
    return true;
}

/* ---- Values. */

bool request_read_u64(request_reader *r, const request_place *place, const msgpack_object *value,
                      const request_field *field, void *out) {
    (void)field;
    if (value->type == MSGPACK_OBJECT_NEGATIVE_INTEGER)
        return request_read_fail(r, place, WIRE_BAD_REQUEST,
                                 "cannot accept %lld: expected an integer of 0 or more",
                                 (long long)value->via.i64);
    if (value->type != MSGPACK_OBJECT_POSITIVE_INTEGER)
        return wrong_kind(r, place, value, "an integer of 0 or more");
    *(uint64_t *)out = value->via.u64;
    return true;
}

bool request_read_u32(request_reader *r, const request_place *place, const msgpack_object *value,
                      const request_field *field, void *out) {
    uint64_t number = 0;
    if (!request_read_u64(r, place, value, field, &number)) return false;
    if (number < (uint64_t)field->min || number > (uint64_t)field->max)
        return request_read_fail(r, place, WIRE_BAD_REQUEST, "cannot accept %llu: expected %.0f to %.0f",
                                 (unsigned long long)number, field->min, field->max);
    *(uint32_t *)out = (uint32_t)number;
    return true;
}

static bool read_number(request_reader *r, const request_place *place, const msgpack_object *value,
                        double *out) {
    switch (value->type) {
    case MSGPACK_OBJECT_POSITIVE_INTEGER: *out = (double)value->via.u64; return true;
    case MSGPACK_OBJECT_NEGATIVE_INTEGER: *out = (double)value->via.i64; return true;
    case MSGPACK_OBJECT_FLOAT32:
    case MSGPACK_OBJECT_FLOAT64: *out = value->via.f64; return true;
    default: return wrong_kind(r, place, value, "a number");
    }
}

bool request_read_real(request_reader *r, const request_place *place, const msgpack_object *value,
                       const request_field *field, void *out) {
    double number = 0;
    if (!read_number(r, place, value, &number)) return false;
    if (!(number >= field->min && number <= field->max)) /* also NaN */
        return request_read_fail(r, place, WIRE_BAD_REQUEST, "cannot accept %g: expected %g to %g", number,
                                 field->min, field->max);
    *(double *)out = number;
    return true;
}

bool request_read_temperature(request_reader *r, const request_place *place, const msgpack_object *value,
                              const request_field *field, void *out) {
    (void)field;
    double number = 0;
    if (!read_number(r, place, value, &number)) return false;
    if (number != 0 && !(number >= REQUEST_LEAST_TEMPERATURE && number <= REQUEST_MOST_TEMPERATURE))
        return request_read_fail(r, place, WIRE_BAD_REQUEST,
                                 "cannot accept %g: expected 0 (argmax), or %g to %g", number,
                                 REQUEST_LEAST_TEMPERATURE, REQUEST_MOST_TEMPERATURE);
    *(double *)out = number;
    return true;
}

bool request_read_bool(request_reader *r, const request_place *place, const msgpack_object *value,
                       const request_field *field, void *out) {
    (void)field;
    if (value->type != MSGPACK_OBJECT_BOOLEAN) return wrong_kind(r, place, value, "a bool");
    *(bool *)out = value->via.boolean;
    return true;
}

bool request_read_compress(request_reader *r, const request_place *place, const msgpack_object *value,
                           const request_field *field, void *out) {
    bool ignored;
    (void)out;
    return request_read_bool(r, place, value, field, &ignored);
}

bool request_read_text(request_reader *r, const request_place *place, const msgpack_object *value,
                       const request_field *field, void *out) {
    if (value->type != MSGPACK_OBJECT_STR) return wrong_kind(r, place, value, "a str");
    wire_text text = text_of(value);
    bool bounded = field->max >= 0;
    if (bounded && (text.n < (size_t)field->min || text.n > (size_t)field->max))
        return request_read_fail(r, place, WIRE_BAD_REQUEST,
                                 "cannot accept a str of %zu bytes: expected %.0f to %.0f", text.n,
                                 field->min, field->max);
    char *copy = request_arena_take(r->arena, text.n + 1, 1);
    if (!copy)
        return request_read_fail(r, NULL, WIRE_INTERNAL, "could not allocate %zu bytes of text", text.n + 1);
    memcpy(copy, text.bytes, text.n);
    copy[text.n] = 0;
    *(wire_text *)out = (wire_text){copy, text.n};
    return true;
}

static bool read_packed_ids(request_reader *r, const request_place *place, const msgpack_object *bin,
                            wire_ids *out) {
    size_t n_bytes = bin->via.bin.size;
    if (n_bytes % 4)
        return request_read_fail(
            r, place, WIRE_BAD_REQUEST,
            "cannot accept %zu bytes of token ids: expected a multiple of 4 (packed u32)", n_bytes);
    uint32_t *ids = request_arena_take(r->arena, n_bytes, 1);
    if (!ids)
        return request_read_fail(r, NULL, WIRE_INTERNAL, "could not allocate %zu bytes of token ids",
                                 n_bytes);
    if (n_bytes) memcpy(ids, bin->via.bin.ptr, n_bytes);
    *out = (wire_ids){ids, n_bytes / 4};
    return true;
}

bool request_read_ids(request_reader *r, const request_place *place, const msgpack_object *value,
                      const request_field *field, void *out) {
    const request_field id_field = {.max = UINT32_MAX};
    (void)field;
    if (value->type == MSGPACK_OBJECT_BIN) return read_packed_ids(r, place, value, out);
    if (value->type != MSGPACK_OBJECT_ARRAY)
        return wrong_kind(r, place, value, "token ids, as bin (packed u32) or as an array of integers");
    size_t n = value->via.array.size;
    uint32_t *ids = request_read_take(r, n, sizeof *ids);
    if (!ids) return false;
    for (size_t i = 0; i < n; i++) {
        request_place here = request_place_index(place, i);
        if (!request_read_u32(r, &here, &value->via.array.ptr[i], &id_field, &ids[i])) return false;
    }
    *(wire_ids *)out = (wire_ids){ids, n};
    return true;
}

bool request_read_nothing(request_reader *r, const request_place *place, const msgpack_object *value,
                          const request_field *field, void *out) {
    (void)r, (void)place, (void)value, (void)field, (void)out;
    return true;
}

bool request_read_unbuilt(request_reader *r, const request_place *place, const msgpack_object *value,
                          const request_field *field, void *out) {
    (void)value, (void)out;
    return request_read_fail(r, place, WIRE_UNSUPPORTED,
                             "cannot use \"%s\": this version does not have it yet", field->name);
}

int request_read_name(request_reader *r, const request_place *place, const msgpack_object *value,
                      const char *const names[], int n_names) {
    char known[200] = "";
    for (int i = 0; i < n_names; i++) {
        if (request_read_is(value, names[i])) return i;
        list_name(known, sizeof known, names[i]);
    }
    if (value->type != MSGPACK_OBJECT_STR)
        wrong_kind(r, place, value, "a str");
    else
        request_read_fail(r, place, WIRE_BAD_REQUEST, "cannot accept \"%s\": expected one of %s",
                          wire_quote(text_of(value)).text, known);
    return -1;
}

bool request_read_missing(request_reader *r, const request_place *place, const char *key,
                          const char *expected) {
    request_place here = request_place_key(place, key);
    return request_read_fail(r, &here, WIRE_BAD_REQUEST, "missing key \"%s\": expected %s", key, expected);
}

bool request_read_array(request_reader *r, const request_place *place, const msgpack_object *value,
                        size_t min, size_t max) {
    if (value->type != MSGPACK_OBJECT_ARRAY) return wrong_kind(r, place, value, "an array");
    size_t n = value->via.array.size;
    if (n >= min && n <= max) return true;
    if (max == SIZE_MAX)
        return request_read_fail(r, place, WIRE_BAD_REQUEST,
                                 "cannot accept %zu elements: expected at least %zu", n, min);
    return request_read_fail(r, place, WIRE_BAD_REQUEST, "cannot accept %zu elements: expected %zu to %zu", n,
                             min, max);
}
