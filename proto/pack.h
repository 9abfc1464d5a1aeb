/* Writing MessagePack into a buffer that grows: msgpack-c's packer with the failures of memory kept, so that
 * an encoder looks once, at its end.  For encoders, in proto/ and worker/record_json.c. */
#ifndef WIRE_PACK_H
#define WIRE_PACK_H

#include <msgpack.h>

#include "proto/reply.h"

typedef struct pack_writer {
    msgpack_packer packer;
    wire_buffer buffer;
    size_t cap;
    bool failed; /* for want of memory */
    const wire_allocator *allocator;
} pack_writer;

void pack_start(pack_writer *w, const wire_allocator *allocator);
/* The packer's callback; also for bytes that are MessagePack already.  0, or -1 without memory. */
int pack_append(void *writer, const char *bytes, size_t n);

void pack_map(pack_writer *w, size_t n_pairs);
void pack_array(pack_writer *w, size_t n);
void pack_key(pack_writer *w, const char *name);
void pack_text(pack_writer *w, wire_text value);

/* A key and its value. */
void pack_put_text(pack_writer *w, const char *name, wire_text value);
void pack_put_u64(pack_writer *w, const char *name, uint64_t value);
void pack_put_real(pack_writer *w, const char *name, double value);
void pack_put_bool(pack_writer *w, const char *name, bool value);
/* n items of `size` bytes as bin, little-endian. */
void pack_put_binary(pack_writer *w, const char *name, const void *items, size_t n, size_t size);

/* A sample as it stands in `samples` (reply.c). */
void pack_sample(pack_writer *w, const reply_sample *s);

/* Hand the buffer over as it is.  False without memory; *out is then zeroed. */
bool pack_take(pack_writer *w, wire_buffer *out);

#endif
