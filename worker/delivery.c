/* Sending, and who reads too slowly. */
#include "worker/delivery.h"

#include <assert.h>
#include <errno.h>

#include "worker/log.h"

#define TURN_BYTES ((size_t)1 << 20) /* that one client is sent at a time, while others wait */

typedef enum sent { SENT, SENT_FULL, SENT_GONE } sent;

/* Without memory it is as if the pipe were full: later. */
static sent send_message(delivery *d, const client_id *client, packet *m) {
    zmq_msg_t frame;
    if (!packet_frame(m, &frame)) return SENT_FULL;
    sent result = SENT;
    if (zmq_send(d->router, client->bytes, client->n, ZMQ_DONTWAIT | ZMQ_SNDMORE) < 0)
        result = errno == EAGAIN ? SENT_FULL : SENT_GONE;
    /* The pipe has taken the first part, so it takes the second. */
    else if (zmq_msg_send(&frame, d->router, ZMQ_DONTWAIT) < 0)
        result = SENT_GONE;
    if (result != SENT) zmq_msg_close(&frame);
    return result;
}

/* Its messages, as long as *n_bytes is less than TURN_BYTES; beyond, it is as if the pipe were full. */
static sent send_ticket(delivery *d, ticket *t, size_t *n_bytes) {
    sent result = SENT;
    while (t->unsent) {
        size_t n = packet_bytes(t->unsent);
        result = *n_bytes < TURN_BYTES ? send_message(d, &t->client, t->unsent) : SENT_FULL;
        if (result != SENT) break;
        *n_bytes += n;
        tickets_sent(&d->tickets, t);
    }
    return result;
}

/* ---- Parking. */

static void park(delivery *d, ticket *t, bool parked) {
    if (t->parked == parked || ticket_is_over(t)) return;
    parcel *p;
    while (!(p = mem_zalloc(1, sizeof *p))) wait_for_memory();
    p->kind = parked ? PARCEL_PARK : PARCEL_UNPARK;
    p->ticket = t;
    t->parked = parked;
    queue_item *item = &p->item;
    queue_put(d->requests, &item);
}

static void park_client(delivery *d, backlog *b, bool parked) {
    b->parked = parked;
    if (!parked) b->n_refused = 0, b->ignored = false; /* most of them have been read */
    for (ticket *t = d->tickets.running.first; t; t = t->behind) {
        if (client_equal(&t->client, &b->client)) park(d, t, parked);
    }
    log_event(LOG_INFO, parked ? "client_parked backlog_bytes=%zu" : "client_unparked backlog_bytes=%zu",
              backlog_unread(b));
}

size_t delivery_unsent(const delivery *d) { return d->tickets.unsent_bytes + backlog_letters(d->backlogs); }

/* The client has more unread replies than it may: nothing more is started for it. */
static void park_if_full(delivery *d, backlog *b) {
    bool full = backlog_unread(b) > d->max_backlog || delivery_unsent(d) > d->keep_bytes;
    if (full && !b->parked) park_client(d, b, true);
}

static void unpark_if_drained(delivery *d, backlog *b) {
    size_t unread = backlog_unread(b);
    bool full = unread > d->max_backlog / 2 || delivery_unsent(d) > d->keep_bytes;
    if (b->parked && (!full || unread == 0)) park_client(d, b, false);
}

/* ---- Clients that are gone. */

/* Nobody is sent the ticket any more; it runs on. */
static void detach(delivery *d, ticket *t) {
    tickets_attach(&d->tickets, t, NULL);
    park(d, t, false);
    tickets_settle(&d->tickets, t);
}

/* Every reply that was under way to it comes here; one line tells it. */
static void lose_client(delivery *d, const client_id *client) {
    if (!client_equal(&d->gone, client)) log_event(LOG_INFO, "client_lost tickets=%zu", d->tickets.n_known);
    d->gone = *client;
    for (ticket *t = d->tickets.running.first, *behind; t; t = behind) {
        behind = t->behind;
        if (client_equal(&t->client, &d->gone)) detach(d, t);
    }
}

/* ---- Letters. */

void delivery_letter(delivery *d, letter *l) {
    assert(!l->ticket && l->message);
    backlog *b = backlog_find(d->backlogs, &l->client);
    sent result = b ? SENT_FULL : send_message(d, &l->client, l->message);
    if (result == SENT_FULL && !b) b = backlog_add(&d->backlogs, &l->client);
    if (b) {
        backlog_put_letter(b, l);
        park_if_full(d, b);
        return;
    }
    if (result != SENT) lose_client(d, &l->client);
    letter_free(l);
}

/* ---- Tickets. */

/* Send what its client has not been sent.  May drop the ticket. */
static void push(delivery *d, ticket *t) {
    backlog *b = t->client.n && t->unsent ? backlog_find(d->backlogs, &t->client) : NULL;
    size_t n_bytes = 0;
    sent result = b ? SENT_FULL : t->client.n ? send_ticket(d, t, &n_bytes) : SENT;
    if (result == SENT_FULL && !b) b = backlog_add(&d->backlogs, &t->client);
    if (b) {
        backlog_put_ticket(b, t);
        park_if_full(d, b);
    } else if (result != SENT) {
        client_id client = t->client;
        if (ticket_is_over(t)) detach(d, t);
        lose_client(d, &client);
        return;
    }
    tickets_settle(&d->tickets, t);
}

void delivery_ticket_letter(delivery *d, letter *l) {
    ticket *t = l->ticket;
    if (l->message) tickets_append(&d->tickets, t, l->message);
    l->message = NULL;
    if (l->last) tickets_end(&d->tickets, t, l->failed, clock_seconds());
    letter_free(l);
    push(d, t);
}

/* Out of the backlog of the client that it has now. */
static void unqueue(delivery *d, ticket *t) {
    if (t->queued) backlog_drop_ticket(backlog_find(d->backlogs, &t->client), t);
}

void delivery_attach(delivery *d, ticket *t, const client_id *client) {
    unqueue(d, t);
    tickets_attach(&d->tickets, t, client);
    park(d, t, false);
    push(d, t);
}

void delivery_ack(delivery *d, ticket *t) {
    unqueue(d, t);
    tickets_drop(&d->tickets, t);
}

/* ---- Backlogs. */

static sent send_backlog(delivery *d, backlog *b) {
    sent result = SENT;
    size_t n_bytes = 0;
    for (letter *l; result == SENT && (l = backlog_first_letter(b));) {
        result = send_message(d, &b->client, l->message);
        if (result == SENT) backlog_drop_letter(b);
    }
    for (ticket *t; result == SENT && (t = backlog_first_ticket(b));) {
        result = send_ticket(d, t, &n_bytes);
        if (result != SENT) continue;
        backlog_drop_ticket(b, t);
        tickets_settle(&d->tickets, t);
    }
    return result;
}

bool delivery_retry(delivery *d, backlog *b) {
    if (send_backlog(d, b) != SENT_GONE) {
        unpark_if_drained(d, b);
        return true;
    }
    for (ticket *t; (t = backlog_first_ticket(b));) {
        backlog_drop_ticket(b, t);
        detach(d, t);
    }
    lose_client(d, &b->client);
    return false;
}

void delivery_free(delivery *d) {
    while (d->backlogs) {
        backlog *b = d->backlogs;
        d->backlogs = b->next;
        backlog_free(b);
    }
    tickets_free(&d->tickets);
}
