/* Parcels and letters. */
#include "worker/post.h"

#include <string.h>
#include <time.h>

#include "worker/updater.h"

bool client_equal(const client_id *a, const client_id *b) {
    return a->n == b->n && !memcmp(a->bytes, b->bytes, a->n);
}

void parcel_free(parcel *p) {
    if (!p) return;
    converted_rollout_free(&p->rollout);
    bool lent = p->request && (p->request->type == REQUEST_ROLLOUT || p->request->type == REQUEST_SCORE);
    if (!lent) request_free(p->request);
    update_free(p->update, NULL);
    mem_free(p);
}

void letter_free(letter *l) {
    if (!l) return;
    packet_close(l->message);
    mem_free(l);
}

void wait_for_memory(void) { nanosleep(&(struct timespec){0, 10000000}, NULL); }

bool post_letter(queue *replies, const letter *what, wire_buffer *bytes) {
    letter *l;
    packet *m = NULL;
    while (!(l = mem_zalloc(1, sizeof *l)) || (bytes->n > 0 && !(m = packet_open(bytes)))) {
        mem_free(l);
        if (!what->last) {
            wire_buffer_free(bytes, &worker_allocator);
            return false;
        }
        wait_for_memory();
    }
    *l = *what;
    l->item = (queue_item){0};
    l->message = m;
    queue_item *item = &l->item;
    queue_put(replies, &item);
    return true;
}

void post_error(queue *replies, const letter *what, const request *r, const wire_error *e) {
    letter last = *what;
    last.last = true;
    wire_buffer bytes = {0};
    reply_head head = convert_head(r);
    while (!reply_encode_error(&bytes, &head, e)) wait_for_memory();
    post_letter(replies, &last, &bytes);
}

void post_done(queue *replies, const letter *what, const request *r) {
    letter last = *what;
    last.last = true;
    wire_buffer bytes = {0};
    reply_head head = convert_head(r);
    while (!reply_encode_done(&bytes, &head, NULL)) wait_for_memory();
    post_letter(replies, &last, &bytes);
}
