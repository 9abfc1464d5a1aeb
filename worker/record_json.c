/* Records and JSON.
 *
 * A record is bytes from a file: nothing in it is trusted but what shard_read() has checked, which is the
 * outline.  An object is made key by key; the first failure sticks in the maker, later steps do nothing, and
 * the end looks once.  What all samples of a record share (prompt_tokens, input) is converted once and shared
 * by reference. */
#include "worker/record_json.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "engine/utf8.h"
#include "proto/pack.h"
#include "worker/jsonl.h"

/* ---- MessagePack to JSON. */

static cop_status no_memory(cop_error *err) {
    return cop_fail(err, COP_ENOMEM, "could not convert a value to JSON: out of memory");
}

/* msgpack-c may give an empty text as NULL. */
static json_t *string_of(const char *bytes, size_t n) { return json_stringn(n > 0 ? bytes : "", n); }
static bool is_utf8(const msgpack_object_str *s) {
    return s->size == 0 || utf8_valid_prefix(s->ptr, s->size) == s->size;
}

static cop_status text_to_json(json_t **out, const msgpack_object_str *s, cop_error *err) {
    if (!is_utf8(s)) return cop_fail(err, COP_EFORMAT, "cannot convert a text to JSON: it is not UTF-8");
    *out = string_of(s->ptr, s->size);
    return *out ? COP_OK : no_memory(err);
}

static cop_status real_to_json(json_t **out, double value, cop_error *err) {
    if (!isfinite(value)) return cop_fail(err, COP_EFORMAT, "cannot convert the number %g to JSON", value);
    *out = json_real(value);
    return *out ? COP_OK : no_memory(err);
}

static cop_status array_to_json(json_t **out, const msgpack_object_array *array, cop_error *err) {
    *out = json_array();
    if (!*out) return no_memory(err);
    for (uint32_t i = 0; i < array->size; i++) {
        json_t *item;
        cop_status status = json_of_msgpack(&item, &array->ptr[i], err);
        if (status != COP_OK) return status;
        if (json_array_append_new(*out, item) != 0) return no_memory(err);
    }
    return COP_OK;
}

/* A key as jansson takes it: NUL-terminated, so without a NUL of its own. */
static cop_status key_of(char **out, const msgpack_object *key, cop_error *err) {
    *out = NULL;
    if (key->type != MSGPACK_OBJECT_STR)
        return cop_fail(err, COP_EFORMAT, "cannot convert a map to JSON: a key is not text");
    const msgpack_object_str *s = &key->via.str;
    if (!is_utf8(s) || (s->size > 0 && memchr(s->ptr, 0, s->size)))
        return cop_fail(err, COP_EFORMAT, "cannot convert a map to JSON: a key is not UTF-8, or holds NUL");
    *out = mem_alloc((size_t)s->size + 1, 1);
    if (!*out) return no_memory(err);
    if (s->size > 0) memcpy(*out, s->ptr, s->size);
    (*out)[s->size] = '\0';
    return COP_OK;
}

static cop_status pair_to_json(json_t *object, const msgpack_object_kv *pair, cop_error *err) {
    char *key;
    json_t *value;
    cop_status status = key_of(&key, &pair->key, err);
    if (status != COP_OK) return status;
    if (json_object_get(object, key)) {
        status = cop_fail(err, COP_EFORMAT, "cannot convert a map to JSON: a key stands twice in it");
    } else {
        status = json_of_msgpack(&value, &pair->val, err);
        if (status == COP_OK && json_object_set_new(object, key, value) != 0) status = no_memory(err);
    }
    mem_free(key);
    return status;
}

static cop_status map_to_json(json_t **out, const msgpack_object_map *map, cop_error *err) {
    *out = json_object();
    if (!*out) return no_memory(err);
    cop_status status = COP_OK;
    for (uint32_t i = 0; i < map->size && status == COP_OK; i++)
        status = pair_to_json(*out, &map->ptr[i], err);
    return status;
}

static cop_status scalar_to_json(json_t **out, const msgpack_object *v, cop_error *err) {
    switch (v->type) {
    case MSGPACK_OBJECT_NIL: *out = json_null(); return COP_OK;
    case MSGPACK_OBJECT_BOOLEAN: *out = json_boolean(v->via.boolean); return COP_OK;
    case MSGPACK_OBJECT_POSITIVE_INTEGER:
        if (v->via.u64 > INT64_MAX)
            return cop_fail(err, COP_EFORMAT, "cannot convert %" PRIu64 " to JSON: it passes 2^63 - 1",
                            v->via.u64);
        *out = json_integer((json_int_t)v->via.u64);
        return *out ? COP_OK : no_memory(err);
    case MSGPACK_OBJECT_NEGATIVE_INTEGER:
        *out = json_integer(v->via.i64);
        return *out ? COP_OK : no_memory(err);
    case MSGPACK_OBJECT_FLOAT32:
    case MSGPACK_OBJECT_FLOAT64: return real_to_json(out, v->via.f64, err);
    case MSGPACK_OBJECT_STR: return text_to_json(out, &v->via.str, err);
    default:
        return cop_fail(err, COP_EFORMAT, "cannot convert a value to JSON: it is binary or an extension");
    }
}

cop_status json_of_msgpack(json_t **out, const msgpack_object *value, cop_error *err) {
    cop_status status;
    *out = NULL;
    if (value->type == MSGPACK_OBJECT_ARRAY)
        status = array_to_json(out, &value->via.array, err);
    else if (value->type == MSGPACK_OBJECT_MAP)
        status = map_to_json(out, &value->via.map, err);
    else
        return scalar_to_json(out, value, err);
    if (status == COP_OK) return COP_OK;
    json_decref(*out); /* what was made so far */
    *out = NULL;
    return status;
}

/* ---- JSON to MessagePack. */

/* Recurses as deep as the value is nested, which jansson's parser bounds. */
static void pack(pack_writer *w, const json_t *value) {
    const char *key;
    json_t *item;
    size_t i;
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        pack_map(w, json_object_size(value));
        json_object_foreach((json_t *)value, key, item) {
            pack_key(w, key);
            pack(w, item);
        }
        return;
    case JSON_ARRAY:
        pack_array(w, json_array_size(value));
        json_array_foreach(value, i, item) pack(w, item);
        return;
    case JSON_STRING: pack_text(w, (wire_text){json_string_value(value), json_string_length(value)}); return;
    case JSON_INTEGER: msgpack_pack_int64(&w->packer, json_integer_value(value)); return;
    case JSON_REAL: msgpack_pack_double(&w->packer, json_real_value(value)); return;
    case JSON_TRUE: msgpack_pack_true(&w->packer); return;
    case JSON_FALSE: msgpack_pack_false(&w->packer); return;
    case JSON_NULL: msgpack_pack_nil(&w->packer); return;
    }
}

bool json_to_msgpack(wire_buffer *out, const json_t *value, const wire_allocator *allocator) {
    pack_writer w;
    pack_start(&w, allocator);
    pack(&w, value);
    return pack_take(&w, out);
}

/* ---- Records. */

/* What makes the object of one sample (or failure). */
typedef struct maker {
    const shard_view *record;
    const msgpack_object *sample; /* the map being read; NULL in a failure */
    size_t index;                 /* of it in the record */
    size_t n_tokens;
    json_t *object;
    cop_status status; /* the first failure sticks */
    cop_error *err;
} maker;

static bool good(const maker *m) { return m->status == COP_OK; }

/* Keep a failure of the record's content: `why` follows the key. */
static void refuse(maker *m, const char *key, const char *why) {
    if (!good(m)) return;
    if (m->sample)
        m->status = cop_fail(m->err, COP_EFORMAT, "line %" PRIu64 ", sample %zu of the record: \"%s\" %s",
                             m->record->line, m->index, key, why);
    else
        m->status = cop_fail(m->err, COP_EFORMAT, "line %" PRIu64 ": \"%s\" %s", m->record->line, key, why);
}

/* Take a new value, NULL without memory. */
static void put(maker *m, const char *key, json_t *value) {
    if (!good(m)) {
        json_decref(value);
    } else if (!value || json_object_set_new(m->object, key, value) != 0) {
        m->status = cop_fail(m->err, COP_ENOMEM, "could not convert a record to JSON: out of memory");
    }
}

static void put_text(maker *m, const char *key, const char *bytes, size_t n) {
    if (n > 0 && utf8_valid_prefix(bytes, n) != n)
        refuse(m, key, "is not UTF-8");
    else
        put(m, key, string_of(bytes, n));
}

static void put_shared(maker *m, const char *key, json_t *value) {
    if (value) put(m, key, json_incref(value));
}

/* The value of a key that every sample has; NULL after a failure. */
static const msgpack_object *need(maker *m, const char *key, msgpack_object_type type, const char *why) {
    const msgpack_object *v = shard_find(m->sample, key);
    if (v && v->type == type) return v;
    refuse(m, key, v ? why : "is missing");
    return NULL;
}

static bool is_u32(const msgpack_object *v) {
    return v->type == MSGPACK_OBJECT_POSITIVE_INTEGER && v->via.u64 <= UINT32_MAX;
}

static bool is_text(const msgpack_object *v) { return v->type == MSGPACK_OBJECT_STR; }

static bool is_text_in(const msgpack_object *v, const char *const names[], int n_names) {
    for (int i = 0; i < n_names; i++)
        if (v->via.str.size == strlen(names[i]) && !memcmp(v->via.str.ptr, names[i], v->via.str.size))
            return true;
    return false;
}

/* Numbers as they are packed in a bin: little-endian, not aligned. */
typedef struct packed {
    const char *bytes;
    size_t n;
} packed;

static uint32_t packed_u32(packed p, size_t i) {
    const unsigned char *b = (const unsigned char *)p.bytes + 4 * i;
    return b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
}

static float packed_f32(packed p, size_t i) {
    uint32_t bits = packed_u32(p, i);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Read the bin of a key into *out.  False if there is none, or it is wrong. */
static bool read_packed(maker *m, const char *key, size_t item_bytes, bool needed, packed *out) {
    *out = (packed){0};
    const msgpack_object *v = shard_find(m->sample, key);
    if (!v && needed) refuse(m, key, "is missing");
    if (!v) return false;
    if (v->type != MSGPACK_OBJECT_BIN || v->via.bin.size % item_bytes) {
        refuse(m, key, item_bytes == 1 ? "is not a bin" : "is not a bin of 4 bytes per number");
        return false;
    }
    *out = (packed){v->via.bin.ptr, v->via.bin.size / item_bytes};
    return true;
}

/* Append a new value to a list that is being made; false without memory. */
static bool add(json_t *list, json_t *value) {
    if (list) return json_array_append_new(list, value) == 0;
    json_decref(value);
    return false;
}

/* A list, or NULL if something was missing while it was made. */
static json_t *whole(json_t *list, bool ok) {
    if (ok) return list;
    json_decref(list);
    return NULL;
}

static json_t *u32_list(packed p) {
    json_t *list = json_array();
    bool ok = list;
    for (size_t i = 0; i < p.n && ok; i++) ok = add(list, json_integer(packed_u32(p, i)));
    return whole(list, ok);
}

static void put_tokens(maker *m) {
    packed p;
    if (!read_packed(m, "tokens", 4, true, &p)) return;
    m->n_tokens = p.n;
    put(m, "tokens", u32_list(p));
}

static void put_mask(maker *m) {
    packed p;
    if (!read_packed(m, "mask", 1, true, &p)) return;
    if (p.n != m->n_tokens) refuse(m, "mask", "has another length than \"tokens\"");
    json_t *list = json_array();
    bool ok = list;
    for (size_t i = 0; i < p.n && ok; i++) {
        if ((unsigned char)p.bytes[i] > 1) refuse(m, "mask", "holds another number than 0 and 1");
        ok = add(list, json_integer(p.bytes[i]));
    }
    put(m, "mask", whole(list, ok));
}

static void put_reals(maker *m, const char *key) {
    packed p;
    if (!read_packed(m, key, 4, false, &p)) return;
    if (p.n != m->n_tokens) refuse(m, key, "has another length than \"tokens\"");
    json_t *list = json_array();
    bool ok = list;
    for (size_t i = 0; i < p.n && ok && good(m); i++) {
        float value = packed_f32(p, i);
        if (isfinite(value))
            ok = add(list, json_real(value));
        else
            refuse(m, key, "holds a number that JSON lacks");
    }
    put(m, key, whole(list, ok));
}

static void put_kept(maker *m) {
    packed ids, offsets;
    bool has_ids = read_packed(m, "kept_ids", 4, false, &ids);
    if (!read_packed(m, "kept_offsets", 4, has_ids, &offsets)) return;
    if (!has_ids) refuse(m, "kept_ids", "is missing beside \"kept_offsets\"");
    bool rising = offsets.n == m->n_tokens + 1 && packed_u32(offsets, 0) == 0;
    for (size_t i = 1; i < offsets.n && rising; i++)
        rising = packed_u32(offsets, i - 1) <= packed_u32(offsets, i);
    if (!rising || packed_u32(offsets, offsets.n - 1) != ids.n)
        refuse(m, "kept_offsets", "does not divide \"kept_ids\" into one part per token");
    if (!good(m)) return;
    put(m, "kept_ids", u32_list(ids));
    put(m, "kept_offsets", u32_list(offsets));
}

static void put_finish(maker *m) {
    static const char *const names[] = {"stop", "length", "cancelled"};
    const msgpack_object *v = need(m, "finish", MSGPACK_OBJECT_STR, "is not text");
    if (v && !is_text_in(v, names, 3)) refuse(m, "finish", "is none of stop, length and cancelled");
    if (v) put_text(m, "finish", v->via.str.ptr, v->via.str.size);
}

static void put_stop(maker *m) {
    const msgpack_object *v = shard_find(m->sample, "stop");
    if (!v) return;
    if (is_u32(v))
        put(m, "stop", json_integer((json_int_t)v->via.u64));
    else if (is_text(v))
        put_text(m, "stop", v->via.str.ptr, v->via.str.size);
    else
        refuse(m, "stop", "is neither a token nor text");
}

static json_t *tool_call(maker *m, const msgpack_object *call) {
    bool is_map = call->type == MSGPACK_OBJECT_MAP;
    const msgpack_object *at = is_map ? shard_find(call, "at") : NULL,
                         *tool = is_map ? shard_find(call, "tool") : NULL,
                         *ok = is_map ? shard_find(call, "ok") : NULL;
    if (!at || !tool || !ok || !is_u32(at) || at->via.u64 >= m->n_tokens || !is_text(tool) ||
        ok->type != MSGPACK_OBJECT_BOOLEAN || !is_utf8(&tool->via.str)) {
        refuse(m, "tool_calls", "holds something else than {at, tool, ok}, with `at` a place in \"tokens\"");
        return NULL;
    }
    return json_pack("{s:I, s:o, s:b}", "at", (json_int_t)at->via.u64, "tool",
                     string_of(tool->via.str.ptr, tool->via.str.size), "ok", (int)ok->via.boolean);
}

static json_t *weights_run(maker *m, const msgpack_object *run) {
    const msgpack_object_array *a = &run->via.array;
    if (run->type != MSGPACK_OBJECT_ARRAY || a->size != 3 || !is_u32(&a->ptr[0]) ||
        a->ptr[1].type != MSGPACK_OBJECT_POSITIVE_INTEGER || !is_text(&a->ptr[2]) ||
        !is_utf8(&a->ptr[2].via.str)) {
        refuse(m, "weights", "holds something else than [start, version, digest]");
        return NULL;
    }
    return json_pack("[I, o, o]", (json_int_t)a->ptr[0].via.u64, json_u64(a->ptr[1].via.u64),
                     string_of(a->ptr[2].via.str.ptr, a->ptr[2].via.str.size));
}

/* An array of things that `item` converts. */
static void put_list(maker *m, const char *key, json_t *(*item)(maker *m, const msgpack_object *v)) {
    const msgpack_object *v = need(m, key, MSGPACK_OBJECT_ARRAY, "is not an array");
    if (!v) return;
    json_t *list = json_array();
    bool ok = list;
    for (uint32_t i = 0; i < v->via.array.size && ok && good(m); i++)
        ok = add(list, item(m, &v->via.array.ptr[i]));
    put(m, key, whole(list, ok));
}

static void put_decoded(maker *m) {
    const msgpack_object *v = shard_find(m->sample, "text");
    if (!v) return;
    if (is_text(v))
        put_text(m, "text", v->via.str.ptr, v->via.str.size);
    else
        refuse(m, "text", "is not text");
}

/* The number in `rewards` at the sample's own index; nil, or an index beyond them, is none. */
static void put_reward(maker *m, uint64_t sample) {
    const msgpack_object *all = m->record->rewards;
    if (!all) return;
    if (all->type != MSGPACK_OBJECT_ARRAY) {
        refuse(m, "rewards", "is not an array");
    } else if (sample < all->via.array.size) {
        const msgpack_object *v = &all->via.array.ptr[sample];
        bool is_real = v->type == MSGPACK_OBJECT_FLOAT32 || v->type == MSGPACK_OBJECT_FLOAT64;
        bool is_integer =
            v->type == MSGPACK_OBJECT_POSITIVE_INTEGER || v->type == MSGPACK_OBJECT_NEGATIVE_INTEGER;
        double value = is_real                                      ? v->via.f64
                       : v->type == MSGPACK_OBJECT_POSITIVE_INTEGER ? (double)v->via.u64
                                                                    : (double)v->via.i64;
        if (v->type == MSGPACK_OBJECT_NIL) return;
        if ((!is_real && !is_integer) || !isfinite(value))
            refuse(m, "rewards", "holds something else than numbers and nil");
        else
            put(m, "reward", json_real(value));
    }
}

/* What the samples of a record share: new references, NULL where it is absent. */
typedef struct shared {
    json_t *prompt_tokens, *input;
} shared;

static void make_sample(maker *m, const shared *s) {
    if (m->sample->type != MSGPACK_OBJECT_MAP) {
        refuse(m, "samples", "holds something else than maps");
        return;
    }
    const msgpack_object *sample = need(m, "sample", MSGPACK_OBJECT_POSITIVE_INTEGER, "is not an index"),
                         *seed = need(m, "seed", MSGPACK_OBJECT_POSITIVE_INTEGER, "is not a u64");
    if (sample && !is_u32(sample)) refuse(m, "sample", "is not an index");
    if (!good(m)) return;
    put(m, "prompt", json_u64(m->record->line));
    put_text(m, "prompt_id", m->record->prompt_id.bytes, m->record->prompt_id.n);
    put(m, "sample", json_integer((json_int_t)sample->via.u64));
    put(m, "seed", json_u64(seed->via.u64));
    put_shared(m, "prompt_tokens", s->prompt_tokens);
    put_tokens(m);
    put_mask(m);
    put_reals(m, "logprobs");
    put_reals(m, "model_logprobs");
    put_reals(m, "entropy");
    put_kept(m);
    put_finish(m);
    put_stop(m);
    put_list(m, "tool_calls", tool_call);
    put_list(m, "weights", weights_run);
    put_decoded(m);
    put_reward(m, sample->via.u64);
    put_shared(m, "input", s->input);
}

static void make_failure(maker *m, const shared *s) {
    put(m, "line", json_u64(m->record->line));
    put_text(m, "error", m->record->error.bytes, m->record->error.n);
    if (m->record->prompt_id.bytes)
        put_text(m, "prompt_id", m->record->prompt_id.bytes, m->record->prompt_id.n);
    put_shared(m, "input", s->input);
}

/* Make one object and append it to `list`. */
static cop_status append_object(json_t *list, const shard_view *record, const msgpack_object *sample,
                                size_t index, const shared *s, cop_error *err) {
    maker m = {.record = record, .sample = sample, .index = index, .object = json_object(), .err = err};
    if (!m.object) return no_memory(err);
    if (sample)
        make_sample(&m, s);
    else
        make_failure(&m, s);
    if (!good(&m))
        json_decref(m.object);
    else if (json_array_append_new(list, m.object) != 0)
        return no_memory(err);
    return m.status;
}

static cop_status append_objects(json_t *list, const shard_view *r, const shared *s, cop_error *err) {
    if (!r->samples) return append_object(list, r, NULL, 0, s, err);
    if (r->samples->type != MSGPACK_OBJECT_ARRAY)
        return cop_fail(err, COP_EFORMAT, "line %" PRIu64 ": \"samples\" is not an array", r->line);
    cop_status status = COP_OK;
    for (uint32_t i = 0; i < r->samples->via.array.size && status == COP_OK; i++)
        status = append_object(list, r, &r->samples->via.array.ptr[i], i, s, err);
    return status;
}

static json_t *prompt_list(wire_ids ids) {
    json_t *list = json_array();
    bool ok = list;
    for (size_t i = 0; i < ids.n && ok; i++) ok = add(list, json_integer(ids.ids[i]));
    return whole(list, ok);
}

static cop_status share(shared *s, const shard_view *r, cop_error *err) {
    if (r->input && r->input->type != MSGPACK_OBJECT_NIL)
        COP_TRY(json_of_msgpack(&s->input, r->input, err), err, "line %" PRIu64 ": input", r->line);
    if (r->samples && !(s->prompt_tokens = prompt_list(r->prompt_tokens))) return no_memory(err);
    return COP_OK;
}

cop_status record_to_json(json_t **out, const shard_view *record, cop_error *err) {
    shared s = {0};
    *out = NULL;
    json_t *list = json_array();
    cop_status status = list ? share(&s, record, err) : no_memory(err);
    if (status == COP_OK) status = append_objects(list, record, &s, err);
    json_decref(s.input);
    json_decref(s.prompt_tokens);
    if (status == COP_OK)
        *out = list;
    else
        json_decref(list);
    return status;
}
