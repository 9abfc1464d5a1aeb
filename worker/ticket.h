/* Rollouts and scores in the service's hands, from the request until nobody will ask for the results again.
 *
 *   ticket   request, client  | accepted | samples | samples | samples | done |
 *                               ^ first             ^ unsent
 *
 * A rollout belongs to its id, not to a connection: its messages stay, in order, and a client that repeats
 * the request is sent them from the first on.  A ticket has one client at a time, or nobody, and then it
 * still runs to its end.  Once it is over it stays until it is acknowledged, is old, or has to make room.
 * What nobody can ask for again (a score, a rollout that failed) is known by no id and goes as soon as it is
 * sent.
 *
 * The engine's thread borrows the request until the last letter.  The service's thread only. */
#ifndef COP_TICKET_H
#define COP_TICKET_H

#include "worker/post.h"

typedef struct ticket {
    request *request;
    uint64_t seed;    /* in use, of a rollout */
    client_id client; /* who is sent it; n 0: nobody */
    packet *first, *last,
        *unsent; /* unsent: the next one for the client; NULL: it has been sent all there is */
    size_t message_bytes, unsent_bytes;
    double end;      /* clock_seconds() of the last message; INFINITY: it runs */
    bool known;      /* an id leads to it */
    bool incomplete; /* messages that were sent had to make room */
    bool parked;     /* the engine starts nothing more of it */
    bool queued;     /* in its client's backlog, by next_queued */
    struct ticket *next_queued;
    struct ticket *next_alike;      /* in its bucket */
    struct ticket *before, *behind; /* in the list of those that run, or of those that are over, by end */
} ticket;

typedef struct ticket_list {
    ticket *first, *last;
} ticket_list;

typedef struct tickets {
    size_t keep_bytes; /* that all may take, before what was sent makes room */
    double keep_sec;   /* that one is kept once it is over */
    ticket **buckets;  /* [n_buckets], a power of two, or none */
    size_t n_buckets, n_known;
    uint64_t hash_seed; /* drawn, so that nobody can choose ids that meet */
    ticket_list running, over;
    size_t bytes;        /* that all take */
    size_t sent_bytes;   /* of messages that their clients were sent */
    size_t unsent_bytes; /* of the others */
    size_t lost_bytes;   /* of these, where there is no client */
} tickets;

void tickets_init(tickets *ts, size_t keep_bytes, double keep_sec);
void tickets_free(tickets *ts); /* whatever their state: nobody may borrow or queue them any more */

/* A new one that runs, for a request that it takes if there is memory (else NULL).  A rollout is known by its
 * id, which must be free. */
ticket *tickets_add(tickets *ts, request *r, uint64_t seed, const client_id *client);
ticket *tickets_find(const tickets *ts, wire_text id); /* NULL: no such rollout */

/* Whether a rollout asks for what the ticket stands for, so that it can be attached; else *err says why not.
 */
bool ticket_matches(const ticket *t, const request *r, wire_error *err);

bool ticket_is_over(const ticket *t);

void tickets_append(tickets *ts, ticket *t, packet *m);            /* takes the packet */
void tickets_end(tickets *ts, ticket *t, bool failed, double now); /* after its last packet */
void tickets_sent(tickets *ts, ticket *t);                         /* the first unsent message was sent */
/* From now on `client` (NULL: nobody) is to be sent it, from the first message on. */
void tickets_attach(tickets *ts, ticket *t, const client_id *client);
void tickets_drop(tickets *ts, ticket *t); /* that is over and in no backlog */

/* Drop it if it is over and nothing can come of it: nobody can ask for it again, and its client was sent all,
 * or there is none. */
void tickets_settle(tickets *ts, ticket *t);

/* Drop what is old.  What a client is still being sent stays. */
void tickets_expire(tickets *ts, double now);
double tickets_next_expiry(const tickets *ts); /* INFINITY: none is over */

/* Make room, if they take too much: the oldest go that are over and were sent; then what was sent of others.
 */
void tickets_trim(tickets *ts);

#endif
