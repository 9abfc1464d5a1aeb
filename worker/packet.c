/* A buffer and how many hold it. */
#include "worker/packet.h"

#include <assert.h>

#include "worker/convert.h"

packet *packet_open(wire_buffer *buffer) {
    assert(buffer->n > 0);
    packet *m = mem_zalloc(1, sizeof *m);
    if (!m) return NULL;
    m->buffer = *buffer;
    atomic_init(&m->n_holders, 1);
    *buffer = (wire_buffer){0};
    return m;
}

void packet_close(packet *m) {
    if (!m || atomic_fetch_sub(&m->n_holders, 1) > 1) return;
    wire_buffer_free(&m->buffer, &worker_allocator);
    mem_free(m);
}

size_t packet_bytes(const packet *m) { return sizeof *m + m->buffer.n; }

static void frame_closed(void *bytes, void *holder) {
    (void)bytes;
    packet_close(holder);
}

bool packet_frame(packet *m, zmq_msg_t *frame) {
    atomic_fetch_add(&m->n_holders, 1);
    if (zmq_msg_init_data(frame, m->buffer.bytes, m->buffer.n, frame_closed, m) == 0) return true;
    packet_close(m);
    return false;
}
