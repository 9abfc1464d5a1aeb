/* A hash table of ids, two lists, and the counts of bytes. */
#include "worker/ticket.h"

#include <assert.h>
#include <math.h>
#include <string.h>
#include <xxhash.h>

enum {
    FIRST_BUCKETS = 64,
    REQUEST_BYTES = 4096 /* that a decoded request takes at least, whatever its packet */
};

/* ---- Counts. */

static size_t bytes_of(const ticket *t) {
    return sizeof *t + REQUEST_BYTES + t->request->n_bytes + t->message_bytes;
}

/* Every change of a ticket stands between these two. */
static void uncount(tickets *ts, const ticket *t) {
    ts->bytes -= bytes_of(t);
    ts->sent_bytes -= t->message_bytes - t->unsent_bytes;
    ts->unsent_bytes -= t->unsent_bytes;
    if (t->client.n == 0) ts->lost_bytes -= t->unsent_bytes;
}

static void count(tickets *ts, const ticket *t) {
    ts->bytes += bytes_of(t);
    ts->sent_bytes += t->message_bytes - t->unsent_bytes;
    ts->unsent_bytes += t->unsent_bytes;
    if (t->client.n == 0) ts->lost_bytes += t->unsent_bytes;
}

/* ---- Lists. */

static void list_put(ticket_list *l, ticket *t) {
    t->before = l->last;
    t->behind = NULL;
    *(l->last ? &l->last->behind : &l->first) = t;
    l->last = t;
}

static void list_take(ticket_list *l, ticket *t) {
    *(t->before ? &t->before->behind : &l->first) = t->behind;
    *(t->behind ? &t->behind->before : &l->last) = t->before;
}

/* ---- Ids. */

static ticket **bucket(const tickets *ts, wire_text id) {
    return &ts->buckets[XXH3_64bits_withSeed(id.bytes, id.n, ts->hash_seed) & (ts->n_buckets - 1)];
}

/* As many buckets as ids.  False if there are none at all. */
static bool grow(tickets *ts) {
    if (ts->n_known < ts->n_buckets) return true;
    tickets larger = *ts;
    larger.n_buckets = ts->n_buckets ? 2 * ts->n_buckets : FIRST_BUCKETS;
    larger.buckets = mem_zalloc(larger.n_buckets, sizeof *larger.buckets);
    if (!larger.buckets) return ts->n_buckets > 0; /* chains get longer */
    for (size_t i = 0; i < ts->n_buckets; i++) {
        for (ticket *t = ts->buckets[i], *next; t; t = next) {
            next = t->next_alike;
            ticket **b = bucket(&larger, t->request->id);
            t->next_alike = *b;
            *b = t;
        }
    }
    mem_free(ts->buckets);
    *ts = larger;
    return true;
}

static void make_known(tickets *ts, ticket *t) {
    ticket **b = bucket(ts, t->request->id);
    t->next_alike = *b;
    *b = t;
    t->known = true;
    ts->n_known++;
}

static void make_unknown(tickets *ts, ticket *t) {
    if (!t->known) return;
    ticket **link = bucket(ts, t->request->id);
    while (*link != t) link = &(*link)->next_alike;
    *link = t->next_alike;
    t->known = false;
    ts->n_known--;
}

ticket *tickets_find(const tickets *ts, wire_text id) {
    ticket *t = ts->n_buckets ? *bucket(ts, id) : NULL;
    while (t && (t->request->id.n != id.n || memcmp(t->request->id.bytes, id.bytes, id.n))) t = t->next_alike;
    return t;
}

/* ---- Life. */

void tickets_init(tickets *ts, size_t keep_bytes, double keep_sec) {
    *ts = (tickets){.keep_bytes = keep_bytes, .keep_sec = keep_sec, .hash_seed = convert_seed()};
}

static void drop_messages(ticket *t, const packet *end) {
    while (t->first != end) {
        packet *m = t->first;
        t->first = m->next;
        t->message_bytes -= packet_bytes(m);
        packet_close(m);
    }
    if (!t->first) t->last = NULL;
}

static void ticket_free(ticket *t) {
    drop_messages(t, NULL);
    request_free(t->request);
    mem_free(t);
}

void tickets_free(tickets *ts) {
    for (ticket *t = ts->running.first, *behind; t; t = behind) behind = t->behind, ticket_free(t);
    for (ticket *t = ts->over.first, *behind; t; t = behind) behind = t->behind, ticket_free(t);
    mem_free(ts->buckets);
    *ts = (tickets){0};
}

ticket *tickets_add(tickets *ts, request *r, uint64_t seed, const client_id *client) {
    bool known = r->type == REQUEST_ROLLOUT;
    assert(!known || !tickets_find(ts, r->id));
    ticket *t = known && !grow(ts) ? NULL : mem_zalloc(1, sizeof *t);
    if (!t) return NULL;
    *t = (ticket){.request = r, .seed = seed, .client = *client, .end = INFINITY};
    if (known) make_known(ts, t);
    list_put(&ts->running, t);
    count(ts, t);
    return t;
}

bool ticket_is_over(const ticket *t) { return t->end < INFINITY; }

void tickets_drop(tickets *ts, ticket *t) {
    assert(ticket_is_over(t) && !t->queued);
    uncount(ts, t);
    make_unknown(ts, t);
    list_take(&ts->over, t);
    ticket_free(t);
}

void tickets_settle(tickets *ts, ticket *t) {
    bool wanted = t->unsent && t->client.n > 0;
    if (ticket_is_over(t) && !wanted && (!t->known || t->incomplete)) tickets_drop(ts, t);
}

/* ---- What comes and goes. */

/* Nobody is sent it, and nobody can be from its first message on. */
static bool is_useless(const ticket *t) { return t->incomplete && t->client.n == 0; }

void tickets_append(tickets *ts, ticket *t, packet *m) {
    assert(!m->next);
    if (is_useless(t)) {
        packet_close(m);
        return;
    }
    uncount(ts, t);
    *(t->last ? &t->last->next : &t->first) = m;
    t->last = m;
    if (!t->unsent) t->unsent = m;
    t->message_bytes += packet_bytes(m);
    t->unsent_bytes += packet_bytes(m);
    count(ts, t);
}

void tickets_end(tickets *ts, ticket *t, bool failed, double now) {
    assert(!ticket_is_over(t));
    t->end = now;
    list_take(&ts->running, t);
    list_put(&ts->over, t);
    if (failed) make_unknown(ts, t);
}

void tickets_sent(tickets *ts, ticket *t) {
    uncount(ts, t);
    t->unsent_bytes -= packet_bytes(t->unsent);
    t->unsent = t->unsent->next;
    count(ts, t);
}

void tickets_attach(tickets *ts, ticket *t, const client_id *client) {
    uncount(ts, t);
    t->client = client ? *client : (client_id){.n = 0};
    if (is_useless(t)) drop_messages(t, NULL);
    t->unsent = t->first;
    t->unsent_bytes = t->message_bytes;
    count(ts, t);
}

bool ticket_matches(const ticket *t, const request *r, wire_error *err) {
    const request_rollout *was = &t->request->rollout, *is = &r->rollout;
    if (!request_rollout_equal(was, is))
        return wire_fail(err, WIRE_DUPLICATE_ID, "id",
                         "a rollout with this id asks for something else: use another id, such as a UUID");
    if (is->has_seed ? is->seed != t->seed : was->has_seed)
        return wire_fail(
            err, WIRE_DUPLICATE_ID, "id",
            "a rollout with this id and another seed is known: repeat it with its seed, %llu, or "
            "use another id",
            (unsigned long long)t->seed);
    if (t->incomplete)
        return wire_fail(err, WIRE_DUPLICATE_ID, "id",
                         "the first results of the rollout with this id had to make room (--keep-bytes): "
                         "ask for it again with another id");
    return true;
}

/* ---- What has to go. */

void tickets_expire(tickets *ts, double now) {
    for (ticket *t = ts->over.first, *behind; t && t->end + ts->keep_sec <= now; t = behind) {
        behind = t->behind;
        if (!t->queued) tickets_drop(ts, t);
    }
}

double tickets_next_expiry(const tickets *ts) {
    return ts->over.first ? ts->over.first->end + ts->keep_sec : INFINITY;
}

static bool is_too_much(const tickets *ts) { return ts->bytes > ts->keep_bytes && ts->sent_bytes > 0; }

static void drop_sent(tickets *ts, ticket *t) {
    if (t->first == t->unsent) return;
    uncount(ts, t);
    drop_messages(t, t->unsent);
    t->incomplete = true;
    count(ts, t);
}

void tickets_trim(tickets *ts) {
    for (ticket *t = ts->over.first, *behind; t && is_too_much(ts); t = behind) {
        behind = t->behind;
        if (!t->unsent) tickets_drop(ts, t);
    }
    for (ticket *t = ts->over.first; t && is_too_much(ts); t = t->behind) drop_sent(ts, t);
    for (ticket *t = ts->running.first; t && is_too_much(ts); t = t->behind) drop_sent(ts, t);
}
