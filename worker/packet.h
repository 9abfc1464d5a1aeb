/* An encoded reply that several hold at once: the ticket of its rollout, for whoever asks again, and libzmq,
 * which sends the bytes from where they are, on a thread of its own.
 *
 * Immutable but for the count of holders.  Any thread. */
#ifndef COP_PACKET_H
#define COP_PACKET_H

#include <stdatomic.h>
#include <zmq.h>

#include "proto/wire.h"

typedef struct packet {
    struct packet *next; /* of the one list that it is in, which holds it */
    wire_buffer buffer;  /* of worker_allocator */
    atomic_uint n_holders;
} packet;

/* Takes the bytes, for one holder.  NULL without memory; *buffer is then untouched. */
packet *packet_open(wire_buffer *buffer);
void packet_close(packet *m); /* one holder fewer, the last one frees it; NULL does nothing */

size_t packet_bytes(const packet *m); /* that it takes, its own struct included: many small ones count too */

/* Make a frame of it that holds it too and shares its bytes.  False without memory; *frame is then not
 * initialized. */
bool packet_frame(packet *m, zmq_msg_t *frame);

#endif
