/* What the service's thread and the engine's send each other.
 *
 *   service thread --- parcel{ticket or client, request} ---> requests --> engine thread
 *   service thread <-- letter{ticket or client, message} ---- replies  <--
 *
 * Every parcel with a request gets exactly one letter that is marked last; of those with a rollout or a score
 * exactly one, that one at the latest, is marked started.  After the last letter the engine's thread no
 * longer looks at what the ticket lent it. */
#ifndef COP_POST_H
#define COP_POST_H

#include "proto/reply.h"
#include "worker/convert.h"
#include "worker/packet.h"
#include "worker/queue.h"

/* A ROUTER's name for a connection; n 0: nobody. */
typedef struct client_id {
    uint8_t bytes[255];
    uint8_t n;
} client_id;

bool client_equal(const client_id *a, const client_id *b);

typedef enum parcel_kind {
    PARCEL_REQUEST,
    PARCEL_PARK,   /* start nothing more of the ticket: its client does not read */
    PARCEL_UNPARK, /* it reads again, or another one is there, or nobody */
    PARCEL_UPDATE, /* new weights were read, or were not */
    PARCEL_CANCEL, /* cancel everything: the grace time is over */
    PARCEL_STOP    /* end the thread; nothing is in flight */
} parcel_kind;

struct ticket; /* worker/ticket.h; the engine's thread only compares where they point */
struct update; /* worker/updater.h */

typedef struct parcel { /* owned by whoever holds it; ends with parcel_free() */
    queue_item item;
    parcel_kind kind;
    client_id client;      /* who gets the reply, but for a rollout or a score: its ticket does */
    struct ticket *ticket; /* of a rollout or score; of `cancel` and PARCEL_PARK: the one that is meant */
    request *request;      /* a rollout's and a score's belong to the ticket, the others to the parcel */
    struct update *update; /* of PARCEL_UPDATE */
    /* Of a rollout: */
    converted_rollout rollout;
    uint64_t seed;           /* the request's own, or the one that was drawn for it */
    double deadline;         /* clock_seconds() at which what is unfinished is cancelled; INFINITY: never */
    double weights_deadline; /* until which it waits for `min_weights` */
} parcel;
void parcel_free(parcel *p); /* NULL does nothing; the set of an update must have been taken out */

typedef struct letter { /* ends with letter_free() */
    queue_item item;
    struct ticket *ticket; /* whose it is; NULL: it goes to `client` */
    client_id client;
    packet *message; /* NULL: it only tells what the rest says */
    bool last;       /* of its request */
    bool started;    /* its request no longer waits: something of it runs, or it is parked or over */
    bool failed;     /* with `last`: the message is an error, which is all that remains of the ticket */
    bool has_label;  /* `label` has come into use, before this was written */
    weights_label label;
} letter;
void letter_free(letter *l);

/* Send a copy of `what`, with the message (which is taken; without bytes there is none).  False without
 * memory, unless it is the last letter: that is what the service counts, so it waits for memory. */
bool post_letter(queue *replies, const letter *what, wire_buffer *message);
/* The last letter of `r`: an error, a bare `done`. */
void post_error(queue *replies, const letter *what, const request *r, const wire_error *e);
void post_done(queue *replies, const letter *what, const request *r);

/* For what has to be told and is small: sleep a little, then try again to allocate it.  Any thread. */
void wait_for_memory(void);

#endif
