/* Replies on their way to clients: what a pipe takes is sent, the rest waits in a backlog of that client, and
 * when that is full, nothing more is started for it.  No client waits for another.
 *
 * The service's thread only. */
#ifndef COP_DELIVERY_H
#define COP_DELIVERY_H

#include "worker/backlog.h"
#include "worker/ticket.h"

typedef struct delivery {
    void *router;
    queue *requests;    /* to the engine's thread: who is parked */
    size_t max_backlog; /* bytes that a client leaves unread until its tickets are parked */
    size_t keep_bytes;  /* that all leave unread, likewise */
    tickets tickets;
    backlog *backlogs; /* of clients that read too slowly */
    client_id gone;    /* the last one that could not be reached */
} delivery;
void delivery_free(delivery *d);

/* A reply that belongs to no ticket.  Takes the letter. */
void delivery_letter(delivery *d, letter *l);
/* A message of a ticket, or its end, or both.  Takes the letter. */
void delivery_ticket_letter(delivery *d, letter *l);

/* `client` sends the request of a rollout again. */
void delivery_attach(delivery *d, ticket *t, const client_id *client);
void delivery_ack(delivery *d, ticket *t); /* that is over: drop it */

/* Send what a pipe takes now.  False: the client is gone, and so is what was in the backlog. */
bool delivery_retry(delivery *d, backlog *b);

/* Bytes that nobody has been sent yet, letters included. */
size_t delivery_unsent(const delivery *d);

#endif
