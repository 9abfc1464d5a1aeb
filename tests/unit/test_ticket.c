/* Tickets: found by id, sent again from the first message on, counted, and dropped in the right order. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "worker/backlog.h"
#include "worker/ticket.h"

static const client_id somebody = {"a", 1}, another = {"b", 1}, nobody = {.n = 0};

/* A rollout of one prompt, or a score. */
static request *request_of(const char *type, const char *id) {
    char frame[256];
    bool rollout = !strcmp(type, "rollout");
    int n = snprintf(frame, sizeof frame, "\x83\xa4type%c%s\xa2id\xd9%c%s%s", (char)(0xa0 + strlen(type)),
                     type, (char)strlen(id), id,
                     rollout ? "\xa7prompts\x91\x81\xa6tokens\x91\x05" : "\xa9sequences\x91\x91\x05");
    request *r;
    request_failure failure;
    if (!request_decode(&r, frame, (size_t)n, 1 << 20, &worker_allocator, &failure))
        fail_msg("%s: %s", failure.error.key, failure.error.message);
    return r;
}

static ticket *add(tickets *ts, const char *id, const client_id *client) {
    ticket *t = tickets_add(ts, request_of("rollout", id), 7, client);
    assert_non_null(t);
    return t;
}

static packet *packet_of(size_t n) {
    wire_buffer bytes = {mem_zalloc(n, 1), n};
    packet *p = packet_open(&bytes);
    assert_non_null(p);
    assert_null(bytes.bytes);
    return p;
}

static ticket *find(const tickets *ts, const char *id) { return tickets_find(ts, wire_text_of(id)); }

static void send_all(tickets *ts, ticket *t) {
    while (t->unsent) tickets_sent(ts, t);
}

static void expect_empty(tickets *ts) {
    assert_int_equal(ts->bytes, 0);
    assert_int_equal(ts->sent_bytes, 0);
    assert_int_equal(ts->unsent_bytes, 0);
    assert_int_equal(ts->lost_bytes, 0);
    assert_int_equal(ts->n_known, 0);
    assert_null(ts->over.first);
    assert_null(ts->running.first);
    tickets_free(ts);
}

static void every_id_is_found_and_forgotten_when_it_is_dropped(void **state) {
    (void)state;
    enum { N = 1000 };
    tickets ts;
    tickets_init(&ts, 1 << 20, 1);
    char id[16];
    for (int i = 0; i < N; i++) {
        snprintf(id, sizeof id, "id-%d", i);
        add(&ts, id, &somebody);
    }
    assert_int_equal(ts.n_known, N);
    assert_true(ts.n_buckets >= N);
    for (int i = 0; i < N; i++) {
        snprintf(id, sizeof id, "id-%d", i);
        ticket *t = find(&ts, id);
        assert_non_null(t);
        assert_memory_equal(t->request->id.bytes, id, strlen(id));
        tickets_end(&ts, t, false, i);
        if (i % 2) tickets_drop(&ts, t);
    }
    for (int i = 0; i < N; i++) {
        snprintf(id, sizeof id, "id-%d", i);
        assert_int_equal(find(&ts, id) == NULL, i % 2);
    }
    assert_null(find(&ts, "id"));
    tickets_expire(&ts, INFINITY);
    expect_empty(&ts);
}

static void who_attaches_is_sent_it_from_the_first_message_on(void **state) {
    (void)state;
    tickets ts;
    tickets_init(&ts, 1 << 20, 1);
    ticket *t = add(&ts, "x", &somebody);
    packet *first = packet_of(10), *second = packet_of(20);
    size_t both = packet_bytes(first) + packet_bytes(second);
    tickets_append(&ts, t, first);
    tickets_sent(&ts, t);
    assert_null(t->unsent);
    tickets_append(&ts, t, second);
    assert_ptr_equal(t->unsent, second);
    assert_int_equal(ts.unsent_bytes, packet_bytes(second));
    assert_int_equal(ts.sent_bytes, packet_bytes(first));
    tickets_attach(&ts, t, &another);
    assert_ptr_equal(t->unsent, first);
    assert_int_equal(ts.unsent_bytes, both);
    assert_int_equal(ts.lost_bytes, 0);
    tickets_attach(&ts, t, NULL);
    assert_true(client_equal(&t->client, &nobody));
    assert_int_equal(ts.lost_bytes, both);
    tickets_end(&ts, t, false, 5);
    tickets_settle(&ts, t); /* somebody may ask */
    assert_ptr_equal(find(&ts, "x"), t);
    tickets_drop(&ts, t);
    expect_empty(&ts);
}

static void what_nobody_can_ask_for_again_goes_as_soon_as_it_is_sent(void **state) {
    (void)state;
    tickets ts;
    tickets_init(&ts, 1 << 20, 1);
    ticket *failed = add(&ts, "x", &somebody),
           *score = tickets_add(&ts, request_of("score", "x"), 0, &somebody);
    assert_non_null(score);
    for (ticket *t = failed; t; t = t == failed ? score : NULL) {
        tickets_append(&ts, t, packet_of(10));
        tickets_end(&ts, t, true, 1);
        tickets_settle(&ts, t); /* not yet */
        assert_null(find(&ts, "x"));
    }
    ticket *next = add(&ts, "x", &another); /* the id is free */
    tickets_sent(&ts, failed);
    tickets_settle(&ts, failed);
    tickets_attach(&ts, score, NULL);
    tickets_settle(&ts, score);
    assert_null(ts.over.first);
    tickets_end(&ts, next, false, 1);
    tickets_drop(&ts, next);
    expect_empty(&ts);
}

static void the_old_expire_and_what_is_being_sent_stays(void **state) {
    (void)state;
    tickets ts;
    tickets_init(&ts, 1 << 20, 10);
    assert_true(isinf(tickets_next_expiry(&ts)));
    backlog *slow = NULL;
    assert_non_null(backlog_add(&slow, &somebody));
    ticket *t[3];
    for (int i = 0; i < 3; i++) {
        t[i] = add(&ts, (const char *[]){"0", "1", "2"}[i], &somebody);
        tickets_append(&ts, t[i], packet_of(10));
        if (i != 0) send_all(&ts, t[i]);
        tickets_end(&ts, t[i], false, i);
    }
    backlog_put_ticket(slow, t[0]);
    assert_int_equal(backlog_unread(slow), ts.unsent_bytes);
    assert_true(tickets_next_expiry(&ts) == 10);
    tickets_expire(&ts, 11);
    assert_non_null(find(&ts, "0"));
    assert_null(find(&ts, "1"));
    assert_non_null(find(&ts, "2"));
    backlog_drop_ticket(slow, t[0]);
    tickets_expire(&ts, 12);
    backlog_free(slow);
    expect_empty(&ts);
}

static void a_backlog_gives_tickets_back_from_anywhere(void **state) {
    (void)state;
    tickets ts;
    tickets_init(&ts, 1 << 20, 10);
    backlog *slow = NULL;
    assert_non_null(backlog_add(&slow, &somebody));
    ticket *t[4];
    for (int i = 0; i < 4; i++) {
        t[i] = add(&ts, (const char *[]){"0", "1", "2", "3"}[i], &somebody);
        tickets_append(&ts, t[i], packet_of(10));
        backlog_put_ticket(slow, t[i]);
        backlog_put_ticket(slow, t[i]); /* once is enough */
    }
    backlog_drop_ticket(slow, t[3]);
    backlog_drop_ticket(slow, t[1]);
    backlog_put_ticket(slow, t[1]);
    static const int order[] = {0, 2, 1};
    for (int i = 0; i < 3; i++) {
        assert_ptr_equal(backlog_first_ticket(slow), t[order[i]]);
        backlog_drop_ticket(slow, t[order[i]]);
    }
    assert_null(backlog_first_ticket(slow));
    assert_int_equal(backlog_unread(slow), 0);
    backlog_free(slow);
    tickets_free(&ts);
}

static void the_oldest_that_were_sent_make_room_then_what_was_sent_of_others(void **state) {
    (void)state;
    enum { N = 10000 };
    tickets ts;
    tickets_init(&ts, 5 * N, 10); /* a ticket takes about N/2 besides its messages */
    ticket *runs = add(&ts, "runs", &somebody), *lost = add(&ts, "lost", &somebody);
    ticket *old = add(&ts, "old", &somebody), *young = add(&ts, "young", &somebody);
    ticket *all[] = {runs, lost, old, young};
    for (int i = 0; i < 4; i++) tickets_append(&ts, all[i], packet_of(N));
    tickets_attach(&ts, lost, NULL);
    send_all(&ts, runs);
    send_all(&ts, old);
    send_all(&ts, young);
    tickets_end(&ts, lost, false, 1);
    tickets_end(&ts, old, false, 2);
    tickets_end(&ts, young, false, 3);
    tickets_trim(&ts); /* 4 N, and the requests */
    assert_null(find(&ts, "old"));
    assert_non_null(find(&ts, "young"));
    assert_false(runs->incomplete);
    tickets_append(&ts, runs, packet_of(N));
    tickets_append(&ts, runs, packet_of(N));
    tickets_trim(&ts);
    assert_null(find(&ts, "young"));
    assert_false(runs->incomplete);
    tickets_append(&ts, runs, packet_of(N));
    tickets_trim(&ts);
    assert_true(runs->incomplete);
    assert_int_equal(runs->message_bytes, runs->unsent_bytes);
    tickets_append(&ts, runs, packet_of(N));
    tickets_append(&ts, runs, packet_of(N));
    tickets_trim(&ts); /* there is nothing left that could go */
    assert_true(ts.bytes > ts.keep_bytes);
    assert_non_null(find(&ts, "lost"));
    request *again = request_of("rollout", "runs");
    wire_error e;
    assert_false(ticket_matches(runs, again, &e));
    assert_string_equal(e.code, WIRE_DUPLICATE_ID);
    assert_true(ticket_matches(lost, again, &e));
    request_free(again);
    tickets_end(&ts, runs, false, 4);
    send_all(&ts, runs);
    tickets_settle(&ts, runs);
    assert_null(find(&ts, "runs"));
    tickets_drop(&ts, lost);
    expect_empty(&ts);
}

static void incomplete_and_without_a_client_it_keeps_nothing(void **state) {
    (void)state;
    tickets ts;
    tickets_init(&ts, 100, 10);
    ticket *t = add(&ts, "x", &somebody);
    tickets_append(&ts, t, packet_of(1000));
    tickets_sent(&ts, t);
    tickets_append(&ts, t, packet_of(1000));
    tickets_trim(&ts);
    assert_true(t->incomplete);
    tickets_attach(&ts, t, NULL);
    tickets_append(&ts, t, packet_of(1000));
    assert_int_equal(t->message_bytes, 0);
    assert_int_equal(ts.lost_bytes, 0);
    tickets_end(&ts, t, false, 1);
    tickets_settle(&ts, t);
    expect_empty(&ts);
}

static void without_memory_there_is_no_ticket_and_the_request_is_the_callers(void **state) {
    (void)state;
    for (int n = 0;; n++) {
        tickets ts;
        tickets_init(&ts, 1 << 20, 1);
        request *r = request_of("rollout", "x");
        long before = mem_live();
        mem_fail_after(n);
        ticket *t = tickets_add(&ts, r, 1, &somebody);
        bool fired = mem_fail_stop();
        assert_int_equal(t == NULL, fired);
        assert_int_equal(find(&ts, "x") == NULL, fired);
        if (fired) request_free(r);
        tickets_free(&ts);
        if (!fired) break;
        assert_true(mem_live() < before);
        assert_true(n < 10);
    }
    assert_int_equal(mem_live(), 0);
}

/* A ticket whose table cannot grow is found all the same. */
static void a_table_that_cannot_grow_serves_on(void **state) {
    (void)state;
    tickets ts;
    tickets_init(&ts, 1 << 20, 1);
    char id[16];
    for (int i = 0; i < 200; i++) {
        snprintf(id, sizeof id, "id-%d", i);
        request *r = request_of("rollout", id);
        if (i > 0 && i == (int)ts.n_buckets) mem_fail_after(0); /* just that */
        assert_non_null(tickets_add(&ts, r, 1, &somebody));
        mem_fail_stop();
    }
    for (int i = 0; i < 200; i++) {
        snprintf(id, sizeof id, "id-%d", i);
        assert_non_null(find(&ts, id));
    }
    tickets_free(&ts);
    assert_int_equal(mem_live(), 0);
}

static void a_frame_holds_its_packet_for_itself(void **state) {
    (void)state;
    packet *p = packet_of(100);
    memset(p->buffer.bytes, 'x', 100);
    zmq_msg_t frame;
    assert_true(packet_frame(p, &frame));
    assert_ptr_equal(zmq_msg_data(&frame), p->buffer.bytes); /* not a copy */
    packet_close(p);
    assert_int_equal(zmq_msg_size(&frame), 100);
    assert_int_equal(((const char *)zmq_msg_data(&frame))[99], 'x');
    zmq_msg_close(&frame);
    packet_close(NULL);
    assert_int_equal(mem_live(), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_id_is_found_and_forgotten_when_it_is_dropped),
        cmocka_unit_test(who_attaches_is_sent_it_from_the_first_message_on),
        cmocka_unit_test(what_nobody_can_ask_for_again_goes_as_soon_as_it_is_sent),
        cmocka_unit_test(the_old_expire_and_what_is_being_sent_stays),
        cmocka_unit_test(a_backlog_gives_tickets_back_from_anywhere),
        cmocka_unit_test(the_oldest_that_were_sent_make_room_then_what_was_sent_of_others),
        cmocka_unit_test(incomplete_and_without_a_client_it_keeps_nothing),
        cmocka_unit_test(without_memory_there_is_no_ticket_and_the_request_is_the_callers),
        cmocka_unit_test(a_table_that_cannot_grow_serves_on),
        cmocka_unit_test(a_frame_holds_its_packet_for_itself),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
