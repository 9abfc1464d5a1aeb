/* The walk keeps one level per open array or map:
 *
 *   {"prompts": [ {"tokens": [7, ...        levels[0] map   key "prompts"
 *                                 ^         levels[1] array index 0
 *                                           levels[2] map   key "tokens"
 *                                           levels[3] array index 1
 *
 * which is also the path that an error names.  A broken rule (a key given twice, text that is no UTF-8) is
 * noted, and the walk goes on to find the id, so that the client can tell which request it was; broken
 * structure ends it. */
#include "proto/request_check.h"

#include <msgpack.h>
#include <stdio.h>
#include <string.h>

#include "proto/item.h"
#include "proto/request.h"
#include "proto/wire_utf8.h"

typedef struct level {
    bool is_map;
    bool key_is_next;
    uint64_t left;  /* elements not yet met */
    uint64_t index; /* elements met, without the current one */
    wire_text key;  /* a map's current key */
    size_t n_keys;
    wire_text keys[REQUEST_MAX_KEYS]; /* so far; keys beyond are an error of their own */
} level;

typedef struct walk {
    item_reader in;
    int depth;
    level levels[REQUEST_MAX_DEPTH];
    size_t max_object_bytes;
    request_checked *out;
    wire_error *err; /* code NULL: nothing broken so far */
} walk;

/* ---- Errors. */

/* The path of the current item: keys and indices of all open levels. */
static void write_path(const walk *w, char *path, size_t size) {
    size_t at = 0;
    path[0] = 0;
    for (int i = 0; i < w->depth && at < size; i++) {
        const level *l = &w->levels[i];
        int n = 0;
        if (!l->is_map)
            n = snprintf(path + at, size - at, "[%llu]", (unsigned long long)l->index);
        else if (l->key.bytes)
            n = snprintf(path + at, size - at, i ? ".%s" : "%s", wire_quote(l->key).text);
        at += (size_t)n;
    }
}

/* Note a broken rule: the first is kept. */
static void broke(walk *w, const char *why) {
    if (w->err->code) return;
    char path[sizeof w->err->key * 2];
    write_path(w, path, sizeof path);
    wire_fail(w->err, WIRE_BAD_REQUEST, path, "cannot accept the value at byte %zu: %s", w->in.pos, why);
}

/* What is no message has no id either. */
static bool malformed(walk *w, const char *why) {
    *w->out = (request_checked){.compress = true};
    return wire_fail(w->err, WIRE_BAD_REQUEST, NULL,
                     "cannot read the message: at byte %zu of %zu, %s; expected a MessagePack map", w->in.pos,
                     w->in.n, why);
}

/* ---- The walk. */

static bool same(wire_text a, wire_text b) { return a.n == b.n && !memcmp(a.bytes, b.bytes, a.n); }

static void take_key(walk *w, level *l, const item *it) {
    l->key = (wire_text){0};
    if (it->kind != ITEM_STR) {
        broke(w, "keys must be str");
        return;
    }
    wire_text key = {(const char *)w->in.bytes + it->start, it->n};
    if (!wire_utf8_valid(key.bytes, key.n)) return; /* take_item() tells of it */
    l->key = key;
    for (size_t i = 0; i < l->n_keys; i++) {
        if (same(l->keys[i], key)) broke(w, "the key is given twice");
    }
    if (l->n_keys < REQUEST_MAX_KEYS) l->keys[l->n_keys++] = key;
}

/* What the top map says of the request itself. */
static void take_top_value(walk *w, const level *l, const item *it) {
    const wire_text id_key = {"id", 2}, compress_key = {"compress", 8};
    if (!l->key.bytes) return;
    if (same(l->key, id_key) && !w->out->id.bytes && it->kind == ITEM_STR && it->n >= 1 &&
        it->n <= WIRE_ID_BYTES) {
        wire_text id = {(const char *)w->in.bytes + it->start, it->n};
        if (wire_utf8_valid(id.bytes, id.n)) w->out->id = id;
    }
    if (same(l->key, compress_key) && it->kind == ITEM_BOOL) w->out->compress = it->first == 0xC3;
}

static const char *open_level(walk *w, const item *it) {
    bool is_map = it->kind == ITEM_MAP;
    if (is_map && it->n / 2 > REQUEST_MAX_KEYS) broke(w, "a map may have at most 64 keys");
    w->out->object_bytes += is_map ? it->n / 2 * sizeof(msgpack_object_kv) : it->n * sizeof(msgpack_object);
    if (w->out->object_bytes > w->max_object_bytes)
        broke(w,
              "the message has too many separate values for its limit: send token ids as bin (packed u32)");
    if (w->depth == REQUEST_MAX_DEPTH) {
        broke(w, "values may be nested at most 16 deep");
        return item_skip(&w->in, it->n);
    }
    level *l = &w->levels[w->depth++];
    l->is_map = l->key_is_next = is_map;
    l->left = it->n;
    l->index = 0;
    l->key = (wire_text){0};
    l->n_keys = 0;
    return NULL;
}

/* Close the levels that have met their last element. */
static void close_levels(walk *w) {
    while (w->depth > 0 && w->levels[w->depth - 1].left == 0) {
        w->depth--;
        if (w->depth > 0) w->levels[w->depth - 1].index++;
    }
}

static const char *take_item(walk *w) {
    item it;
    const char *why = item_next(&w->in, &it);
    if (why) return why;
    level *l = w->depth ? &w->levels[w->depth - 1] : NULL;
    if (!l && it.kind != ITEM_MAP) return "the message is no map";
    if (l) {
        l->left--;
        if (l->is_map && l->key_is_next)
            take_key(w, l, &it);
        else if (w->depth == 1)
            take_top_value(w, l, &it);
        if (l->is_map) l->key_is_next = !l->key_is_next;
    }
    if (it.kind == ITEM_EXT) broke(w, "ext types have no meaning here");
    if (it.kind == ITEM_STR && !wire_utf8_valid((const char *)w->in.bytes + it.start, it.n))
        broke(w, "the str is not valid UTF-8");
    int depth = w->depth;
    if (it.kind >= ITEM_ARRAY && (why = open_level(w, &it))) return why;
    if (l && !l->is_map && w->depth == depth) l->index++;
    close_levels(w);
    return NULL;
}

bool request_check(request_checked *out, const uint8_t *message, size_t n, size_t max_object_bytes,
                   wire_error *err) {
    walk w; /* 17 KB, of which a walk touches little: not zeroed */
    *out = (request_checked){.compress = true};
    *err = (wire_error){0};
    w.in = (item_reader){message, n, 0}, w.depth = 0;
    w.max_object_bytes = max_object_bytes, w.out = out, w.err = err;
    do {
        const char *why = take_item(&w);
        if (why) return malformed(&w, why);
    } while (w.depth > 0);
    if (w.in.pos < n) return malformed(&w, "more follows the end of the map");
    return !err->code;
}
