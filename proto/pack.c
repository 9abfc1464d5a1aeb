/* Writing MessagePack. */
#include "proto/pack.h"

#include <assert.h>
#include <string.h>

#include "proto/wire_utf8.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "arrays of numbers are little-endian on the wire and are written as they stand"
#endif

int pack_append(void *writer, const char *bytes, size_t n) {
    pack_writer *w = writer;
    if (w->failed) return -1;
    if (n > w->cap - w->buffer.n) {
        size_t cap = w->cap + w->cap / 2 + 256;
        if (cap < w->buffer.n + n) cap = w->buffer.n + n;
        void *block = wire_resize(w->allocator, w->buffer.bytes, cap);
        if (!block) {
            w->failed = true;
            return -1;
        }
        w->buffer.bytes = block, w->cap = cap;
    }
    memcpy(w->buffer.bytes + w->buffer.n, bytes, n);
    w->buffer.n += n;
    return 0;
}

void pack_start(pack_writer *w, const wire_allocator *allocator) {
    *w = (pack_writer){.allocator = allocator};
    msgpack_packer_init(&w->packer, w, pack_append);
}

bool pack_take(pack_writer *w, wire_buffer *out) {
    *out = w->buffer;
    if (w->failed) wire_buffer_free(out, w->allocator);
    return !w->failed;
}

/* ---- Values. */

void pack_map(pack_writer *w, size_t n_pairs) { msgpack_pack_map(&w->packer, n_pairs); }
void pack_array(pack_writer *w, size_t n) { msgpack_pack_array(&w->packer, n); }

void pack_key(pack_writer *w, const char *name) {
    msgpack_pack_str_with_body(&w->packer, name, strlen(name));
}

void pack_text(pack_writer *w, wire_text value) {
    assert(wire_utf8_valid(value.bytes, value.n));
    msgpack_pack_str_with_body(&w->packer, value.bytes ? value.bytes : "", value.n);
}

void pack_put_text(pack_writer *w, const char *name, wire_text value) {
    pack_key(w, name);
    pack_text(w, value);
}

void pack_put_u64(pack_writer *w, const char *name, uint64_t value) {
    pack_key(w, name);
    msgpack_pack_uint64(&w->packer, value);
}

void pack_put_real(pack_writer *w, const char *name, double value) {
    pack_key(w, name);
    msgpack_pack_double(&w->packer, value);
}

void pack_put_bool(pack_writer *w, const char *name, bool value) {
    pack_key(w, name);
    if (value)
        msgpack_pack_true(&w->packer);
    else
        msgpack_pack_false(&w->packer);
}

void pack_put_binary(pack_writer *w, const char *name, const void *items, size_t n, size_t size) {
    assert(n <= UINT32_MAX / size);
    pack_key(w, name);
    msgpack_pack_bin_with_body(&w->packer, items ? items : "", n * size);
}
