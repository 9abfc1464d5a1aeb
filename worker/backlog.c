/* Three lists per client. */
#include "worker/backlog.h"

#include <assert.h>

struct backlog_frame {
    backlog_frame *next;
    zmq_msg_t message;
};

backlog *backlog_find(backlog *list, const client_id *client) {
    for (backlog *b = list; b; b = b->next) {
        if (client_equal(&b->client, client)) return b;
    }
    return NULL;
}

backlog *backlog_add(backlog **list, const client_id *client) {
    assert(!backlog_find(*list, client));
    backlog *b = mem_zalloc(1, sizeof *b);
    if (!b) return NULL;
    b->client = *client;
    b->next = *list;
    *list = b;
    return b;
}

void backlog_free(backlog *b) {
    if (!b) return;
    while (b->first) backlog_drop_letter(b);
    while (b->first_ticket) backlog_drop_ticket(b, b->first_ticket);
    zmq_msg_t frame;
    zmq_msg_init(&frame);
    while (backlog_take_frame(b, &frame)) continue;
    zmq_msg_close(&frame);
    mem_free(b);
}

/* What a letter takes, its own struct included: many small ones count too. */
static size_t letter_cost(const letter *l) { return sizeof *l + packet_bytes(l->message); }

void backlog_put_letter(backlog *b, letter *l) {
    assert(!l->item.next);
    if (b->last)
        b->last->item.next = &l->item;
    else
        b->first = l;
    b->last = l;
    b->letter_bytes += letter_cost(l);
}

letter *backlog_first_letter(const backlog *b) { return b->first; }

void backlog_drop_letter(backlog *b) {
    letter *l = b->first;
    b->first = (letter *)l->item.next;
    if (!b->first) b->last = NULL;
    b->letter_bytes -= letter_cost(l);
    letter_free(l);
}

void backlog_put_ticket(backlog *b, ticket *t) {
    assert(t->unsent && client_equal(&t->client, &b->client));
    if (t->queued) return;
    t->queued = true;
    t->next_queued = NULL;
    *(b->last_ticket ? &b->last_ticket->next_queued : &b->first_ticket) = t;
    b->last_ticket = t;
}

ticket *backlog_first_ticket(const backlog *b) { return b->first_ticket; }

void backlog_drop_ticket(backlog *b, ticket *t) {
    ticket *before = NULL;
    if (t != b->first_ticket) {
        before = b->first_ticket;
        while (before->next_queued != t) before = before->next_queued;
    }
    *(before ? &before->next_queued : &b->first_ticket) = t->next_queued;
    if (b->last_ticket == t) b->last_ticket = before;
    t->queued = false;
}

size_t backlog_unread(const backlog *b) {
    size_t n = b->letter_bytes;
    for (const ticket *t = b->first_ticket; t; t = t->next_queued) n += t->unsent_bytes;
    return n;
}

static size_t frame_cost(zmq_msg_t *frame) { return sizeof(backlog_frame) + zmq_msg_size(frame); }

bool backlog_put_frame(backlog *b, zmq_msg_t *frame) {
    backlog_frame *f = mem_zalloc(1, sizeof *f);
    if (!f) return false;
    b->frame_bytes += frame_cost(frame);
    zmq_msg_init(&f->message);
    zmq_msg_move(&f->message, frame);
    if (b->last_frame)
        b->last_frame->next = f;
    else
        b->first_frame = f;
    b->last_frame = f;
    return true;
}

bool backlog_take_frame(backlog *b, zmq_msg_t *frame) {
    backlog_frame *f = b->first_frame;
    if (!f) return false;
    b->first_frame = f->next;
    if (!b->first_frame) b->last_frame = NULL;
    b->frame_bytes -= frame_cost(&f->message);
    zmq_msg_move(frame, &f->message); /* frees what `frame` held */
    zmq_msg_close(&f->message);
    mem_free(f);
    return true;
}

bool backlog_frames_wait(const backlog *b) { return b->parked || b->first_frame; }

size_t backlog_letters(const backlog *list) {
    size_t n = 0;
    for (const backlog *b = list; b; b = b->next) n += b->letter_bytes;
    return n;
}

size_t backlog_frames(const backlog *list) {
    size_t n = 0;
    for (const backlog *b = list; b; b = b->next) n += b->frame_bytes;
    return n;
}
