/* The engine's thread: takes requests from one queue, steps the engine, puts encoded replies on another.
 *
 *   service thread --- parcel{client, request} ---> requests --> engine thread
 *   service thread <-- letter{client, message} ---- replies  <--
 *
 * Every parcel with a request gets exactly one letter that is marked last; of those with a rollout or a score
 * exactly one, that one at the latest, is marked started.  Nothing but the two queues is shared. */
#ifndef COP_ENGINE_LOOP_H
#define COP_ENGINE_LOOP_H

#include <stdatomic.h>

#include "proto/reply.h"
#include "worker/convert.h"
#include "worker/queue.h"

/* A ROUTER's name for a connection. */
typedef struct client_id {
    uint8_t bytes[255];
    uint8_t n;
} client_id;

bool client_equal(const client_id *a, const client_id *b);

typedef enum parcel_kind {
    PARCEL_REQUEST,
    PARCEL_GONE,   /* the client cannot be reached: nobody wants its rollouts */
    PARCEL_PARK,   /* the client does not read: start nothing more for it */
    PARCEL_UNPARK, /* it reads again */
    PARCEL_UPDATE, /* new weights were read, or were not */
    PARCEL_CANCEL, /* cancel everything: the grace time is over */
    PARCEL_STOP    /* end the thread; nothing is in flight */
} parcel_kind;

struct update; /* worker/updater.h */

typedef struct parcel { /* owned by whoever holds it; ends with parcel_free() */
    queue_item item;
    parcel_kind kind;
    client_id client;
    request *request;
    struct update *update; /* of PARCEL_UPDATE */
    atomic_size_t
        *held_bytes; /* the service's count of the requests that are kept; NULL: it is not counted */
    /* Of a rollout: */
    converted_rollout rollout;
    uint64_t seed;   /* the request's own, or the one that was drawn for it */
    double deadline; /* clock_seconds() at which what is unfinished is cancelled; INFINITY: never */
} parcel;
void parcel_hold(parcel *p, atomic_size_t *held_bytes); /* count its request until it is freed */
void parcel_free(parcel *p);                            /* NULL does nothing */

typedef struct letter { /* ends with letter_free() */
    queue_item item;
    client_id client;
    wire_buffer message; /* empty: it only tells what the flags say */
    bool last;           /* of its request */
    bool started;        /* its request no longer waits: something of it runs, or it is parked or over */
} letter;
void letter_free(letter *l);

/* For what has to be told and is small: sleep a little, then try again to allocate it.  Any thread. */
void wait_for_memory(void);

typedef struct engine_loop engine_loop;

/* Start the thread; returns when it runs.  engine, tokenizer (may be NULL) and queues are borrowed; the
 * engine belongs to the thread until engine_loop_close().  keep_bytes: of samples that wait to be sent with
 * the others of their prompt or request, and of a score. */
cop_status engine_loop_open(engine_loop **out, engine *e, const tokenizer *t, size_t keep_bytes,
                            queue *requests, queue *replies, cop_error *err);
void engine_loop_close(engine_loop *l); /* sends PARCEL_STOP and joins */

#endif
