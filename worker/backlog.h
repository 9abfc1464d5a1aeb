/* What is kept for a client that does not read as fast as it asks.
 *
 *   letters  replies that its pipe did not take, in order
 *   tickets  whose next message its pipe did not take; they stay the tickets' own
 *   frames   messages that it sent while there were too many of those: they wait instead of being answered
 *
 * The service's thread only; letters and frames that are put in belong to the backlog. */
#ifndef COP_BACKLOG_H
#define COP_BACKLOG_H

#include <zmq.h>

#include "worker/ticket.h"

typedef struct backlog_frame backlog_frame;

typedef struct backlog {
    struct backlog *next;
    client_id client;
    letter *first, *last; /* linked by item.next */
    ticket *first_ticket, *last_ticket;
    backlog_frame *first_frame, *last_frame;
    size_t letter_bytes, frame_bytes;
    int n_refused; /* messages that were refused since it was parked: their errors are among the letters */
    bool ignored;  /* there were more of them than are told */
    bool parked;   /* the engine starts nothing for this client, and its frames wait */
} backlog;

/* A list of them, of which each client has at most one.  add: NULL without memory. */
backlog *backlog_find(backlog *list, const client_id *client); /* NULL: it has none */
backlog *backlog_add(backlog **list, const client_id *client);
void backlog_free(backlog *b); /* with all that it holds; it must be off its list */

void backlog_put_letter(backlog *b, letter *l);
letter *backlog_first_letter(const backlog *b); /* NULL: none */
void backlog_drop_letter(backlog *b);           /* the first one */

/* A ticket of this client with unsent messages, unless it is in already.  drop: it may be anywhere in the
 * line. */
void backlog_put_ticket(backlog *b, ticket *t);
ticket *backlog_first_ticket(const backlog *b); /* NULL: none */
void backlog_drop_ticket(backlog *b, ticket *t);

/* Bytes of all that the client is to read. */
size_t backlog_unread(const backlog *b);

/* Frames: moved in and out, as zmq_msg_move() does.  put: false without memory, the frame is then untouched.
 * take: the oldest, into an initialized message; false: none. */
bool backlog_put_frame(backlog *b, zmq_msg_t *frame);
bool backlog_take_frame(backlog *b, zmq_msg_t *frame);

/* Of a list: bytes of all letters, and of all frames. */
size_t backlog_letters(const backlog *list);
size_t backlog_frames(const backlog *list);

/* Whether a frame that comes now has to wait for others. */
bool backlog_frames_wait(const backlog *b);

#endif
