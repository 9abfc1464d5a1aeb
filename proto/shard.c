/* Records: from plain structs to bytes, and back to a view of them. */
#include "proto/shard.h"

#include <math.h>
#include <string.h>

#include "proto/item.h"
#include "proto/pack.h"
#include "proto/wire_utf8.h"

/* ---- Writing. */

static void put_input(pack_writer *w, wire_buffer input) {
    pack_key(w, "input");
    if (input.n > 0)
        pack_append(w, (const char *)input.bytes, input.n);
    else
        msgpack_pack_nil(&w->packer);
}

static void put_rewards(pack_writer *w, const double *rewards, size_t n) {
    pack_key(w, "rewards");
    pack_array(w, n);
    for (size_t i = 0; i < n; i++) {
        if (isnan(rewards[i]))
            msgpack_pack_nil(&w->packer);
        else
            msgpack_pack_double(&w->packer, rewards[i]);
    }
}

bool shard_encode_record(wire_buffer *out, const shard_record *r, const wire_allocator *allocator) {
    pack_writer w;
    pack_start(&w, allocator);
    pack_map(&w, 5 + (r->rewards != NULL));
    pack_put_u64(&w, "line", r->line);
    pack_put_text(&w, "prompt_id", r->prompt_id);
    pack_put_binary(&w, "prompt_tokens", r->prompt_tokens.ids, r->prompt_tokens.n, sizeof(uint32_t));
    put_input(&w, r->input);
    pack_key(&w, "samples");
    pack_array(&w, r->n_samples);
    for (size_t i = 0; i < r->n_samples; i++) pack_sample(&w, &r->samples[i]);
    if (r->rewards) put_rewards(&w, r->rewards, r->n_rewards);
    return pack_take(&w, out);
}

bool shard_encode_failure(wire_buffer *out, const shard_failure *f, const wire_allocator *allocator) {
    pack_writer w;
    pack_start(&w, allocator);
    pack_map(&w, 4);
    pack_put_u64(&w, "line", f->line);
    pack_put_text(&w, "prompt_id", f->prompt_id);
    put_input(&w, f->input);
    pack_put_text(&w, "error", f->error);
    return pack_take(&w, out);
}

/* ---- Reading. */

const msgpack_object *shard_find(const msgpack_object *map, const char *key) {
    size_t n = strlen(key);
    for (uint32_t i = 0; map->type == MSGPACK_OBJECT_MAP && i < map->via.map.size; i++) {
        const msgpack_object_kv *pair = &map->via.map.ptr[i];
        if (pair->key.type == MSGPACK_OBJECT_STR && pair->key.via.str.size == n &&
            !memcmp(pair->key.via.str.ptr, key, n))
            return &pair->val;
    }
    return NULL;
}

static bool refuse(wire_error *err, const char *key, const char *why) {
    return wire_fail(err, WIRE_BAD_REQUEST, key, "cannot read a record: %s", why);
}

static bool view_text(wire_text *out, const msgpack_object *value, const char *key, wire_error *err) {
    if (!value || value->type != MSGPACK_OBJECT_STR ||
        !wire_utf8_valid(value->via.str.ptr, value->via.str.size))
        return refuse(err, key, "it is no text");
    *out = (wire_text){value->via.str.ptr, value->via.str.size};
    return true;
}

/* Packed ids stand at any address in the message; the copy is aligned. */
static bool view_ids(shard_view *v, const msgpack_object *value, wire_error *err) {
    if (!value || value->type != MSGPACK_OBJECT_BIN || value->via.bin.size % sizeof(uint32_t))
        return refuse(err, "prompt_tokens", "it is no bin of u32");
    size_t n = value->via.bin.size;
    uint32_t *ids = msgpack_zone_malloc(v->zone, n ? n : 1);
    if (!ids) return wire_fail(err, WIRE_INTERNAL, NULL, "there was no memory for a record");
    memcpy(ids, value->via.bin.ptr, n);
    v->prompt_tokens = (wire_ids){ids, n / sizeof *ids};
    return true;
}

static bool is_array(const msgpack_object *value) { return value && value->type == MSGPACK_OBJECT_ARRAY; }

static bool view_samples(shard_view *v, const msgpack_object *record, wire_error *err) {
    v->samples = shard_find(record, "samples");
    v->rewards = shard_find(record, "rewards");
    if (!is_array(v->samples)) return refuse(err, "samples", "it is no array");
    for (uint32_t i = 0; i < v->samples->via.array.size; i++) {
        if (v->samples->via.array.ptr[i].type != MSGPACK_OBJECT_MAP)
            return refuse(err, "samples", "one of them is no map");
    }
    if (v->rewards && !is_array(v->rewards)) return refuse(err, "rewards", "it is no array");
    return view_ids(v, shard_find(record, "prompt_tokens"), err);
}

static bool view_record(shard_view *v, const msgpack_object *record, wire_error *err) {
    if (record->type != MSGPACK_OBJECT_MAP) return refuse(err, NULL, "it is no map");
    const msgpack_object *line = shard_find(record, "line");
    if (!line || line->type != MSGPACK_OBJECT_POSITIVE_INTEGER)
        return refuse(err, "line", "it is no whole number");
    v->line = line->via.u64;
    v->input = shard_find(record, "input");
    if (!v->input || (v->input->type != MSGPACK_OBJECT_MAP && v->input->type != MSGPACK_OBJECT_NIL))
        return refuse(err, "input", "it is no map and not nil");
    if (!view_text(&v->prompt_id, shard_find(record, "prompt_id"), "prompt_id", err)) return false;
    const msgpack_object *error = shard_find(record, "error");
    return error ? view_text(&v->error, error, "error", err) : view_samples(v, record, err);
}

bool shard_read(shard_view *out, const uint8_t *bytes, size_t n, wire_error *err) {
    item_reader in = {bytes, n, 0};
    *out = (shard_view){0};
    /* The counts of a value that is whole fit its bytes, so what msgpack-c allocates for it is in proportion.
     */
    const char *why = item_skip(&in, 1);
    if (why) return refuse(err, NULL, why);
    msgpack_unpacked unpacked;
    msgpack_unpacked_init(&unpacked);
    size_t used = 0;
    if (msgpack_unpack_next(&unpacked, (const char *)bytes, in.pos, &used) != MSGPACK_UNPACK_SUCCESS) {
        msgpack_unpacked_destroy(&unpacked);
        return refuse(err, NULL, "it is nested too deep, or there was no memory");
    }
    shard_view v = {.bytes = bytes, .n_bytes = in.pos, .zone = msgpack_unpacked_release_zone(&unpacked)};
    if (!v.zone) v.zone = msgpack_zone_new(MSGPACK_ZONE_CHUNK_SIZE); /* a value that needed none */
    bool ok = v.zone ? view_record(&v, &unpacked.data, err)
                     : wire_fail(err, WIRE_INTERNAL, NULL, "there was no memory for a record");
    if (ok)
        *out = v;
    else
        shard_view_free(&v);
    return ok;
}

void shard_view_free(shard_view *v) {
    if (v->zone) msgpack_zone_free(v->zone);
    *v = (shard_view){0};
}
