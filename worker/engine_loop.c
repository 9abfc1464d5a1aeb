/* The engine's thread. */
#include "worker/engine_loop.h"

#include <assert.h>
#include <math.h>
#include <pthread.h>
#include <string.h>

#include "worker/flight.h"
#include "worker/updater.h"

enum { MOST_PAUSES = 1024 }; /* requests that wait until nothing runs: each takes kilobytes */

struct engine_loop {
    flights flights;
    queue *requests, *replies;
    pthread_t thread;
    queue_item *pauses; /* parcels of `pause` that wait until nothing runs any more */
    int n_pauses;
    double start;
    bool stop;
};

static engine *engine_of(const engine_loop *l) { return l->flights.engine; }

static letter letter_to(const client_id *client) { return (letter){.client = *client}; }

static void tell_done(engine_loop *l, const parcel *p) {
    letter last = letter_to(&p->client);
    post_done(l->replies, &last, p->request);
}

/* ---- Weights. */

static const weights_policy policies[] = {[REQUEST_FINISH] = WEIGHTS_FINISH,
                                          [REQUEST_KEEP] = WEIGHTS_KEEP,
                                          [REQUEST_RECOMPUTE] = WEIGHTS_RECOMPUTE,
                                          [REQUEST_ABORT] = WEIGHTS_ABORT};

/* The last letter to a request that is part of an update: the weights in use, or why they are not. */
static void tell_update(engine_loop *l, const client_id *client, const request *r, const wire_error *e) {
    letter last = letter_to(client);
    if (e->code) {
        post_error(l->replies, &last, r, e);
        return;
    }
    last.last = last.has_label = true;
    last.label = *engine_weights(engine_of(l));
    reply_head head = convert_head(r);
    reply_weights in_use = {last.label.version, wire_text_of(last.label.digest)};
    wire_buffer message = {0};
    while (!reply_encode_weights(&message, &head, in_use)) wait_for_memory();
    post_letter(l->replies, &last, &message);
}

/* Take the update into use, unless it failed, or one that came earlier was newer. */
static void handle_update(engine_loop *l, update *u) {
    const request_weights *r = &u->request->weights;
    uint64_t version = engine_weights(engine_of(l))->version;
    if (u->weights && r->version <= version) {
        wire_fail(&u->error, WIRE_BAD_REQUEST, "version",
                  "weights of version %llu are in use: version %llu would have to be greater",
                  (unsigned long long)version, (unsigned long long)r->version);
    } else if (u->weights) {
        u->error = (wire_error){0};
        weights *w = u->weights;
        u->weights = NULL;
        engine_use_weights(engine_of(l), w, r->version, policies[r->policy]);
    }
    tell_update(l, &u->client, u->request, &u->error);
    if (u->commit) tell_update(l, &u->commit_client, u->commit, &u->error);
    update_free(u, engine_of(l));
    flights_release(&l->flights);
}

/* ---- Pausing. */

static void tell_paused(engine_loop *l) {
    while (l->pauses) {
        parcel *p = (parcel *)l->pauses;
        l->pauses = p->item.next;
        l->n_pauses--;
        tell_done(l, p);
        parcel_free(p);
    }
}

/* While so many wait, the worker is paused already: nothing is left undone. */
static void refuse_pause(engine_loop *l, parcel *p) {
    letter last = letter_to(&p->client);
    wire_error e;
    wire_fail(&e, WIRE_OVERLOADED, NULL,
              "%d requests to pause wait already until nothing runs: try again when it is so", MOST_PAUSES);
    e.retry_after = 1.0;
    post_error(l->replies, &last, p->request, &e);
    parcel_free(p);
}

/* The newest mode holds.  Takes the parcel: it is answered once nothing runs. */
static void handle_pause(engine_loop *l, parcel *p) {
    if (p->request->pause.mode == REQUEST_PAUSE_FINISH && l->n_pauses >= MOST_PAUSES) {
        refuse_pause(l, p);
        return;
    }
    p->item.next = l->pauses;
    l->pauses = &p->item;
    l->n_pauses++;
    if (p->request->pause.mode == REQUEST_PAUSE_FINISH) {
        engine_pause(engine_of(l), ENGINE_FINISH);
        return;
    }
    if (p->request->pause.mode == REQUEST_PAUSE_ABORT) engine_abort_rows(engine_of(l));
    engine_pause(engine_of(l), ENGINE_HOLD);
    tell_paused(l);
}

static void handle_resume(engine_loop *l, const parcel *p) {
    engine_pause(engine_of(l), ENGINE_RUN);
    tell_paused(l);
    tell_done(l, p);
}

/* ---- Requests. */

static void handle_cancel(engine_loop *l, const parcel *p) {
    flights_cancel(&l->flights, p->ticket);
    tell_done(l, p);
}

static void tell_status(engine_loop *l, const parcel *p) {
    engine_status s;
    const weights_label *w = engine_weights(engine_of(l));
    engine_read_status(engine_of(l), &s);
    reply_status status = {.rows = s.rows,
                           .queued = s.queued,
                           .pages_total = s.pages_total,
                           .pages_used = s.pages_used,
                           .pages_cached = s.pages_cached,
                           .pages_free = s.pages_free,
                           .pages_shared = s.pages_shared,
                           .weights = {w->version, wire_text_of(w->digest)},
                           .requests = s.requests,
                           .samples = s.samples,
                           .prompt_tokens = s.prompt_tokens,
                           .prefilled_tokens = s.prefilled_tokens,
                           .cached_tokens = s.cached_tokens,
                           .sampled_tokens = s.sampled_tokens,
                           .forced_tokens = s.forced_tokens,
                           .preemptions = s.preemptions,
                           .steps = s.steps,
                           .seconds = clock_seconds() - l->start};
    reply_head head = convert_head(p->request);
    wire_buffer message = {0};
    while (!reply_encode_status(&message, &head, &status)) wait_for_memory();
    letter last = letter_to(&p->client);
    last.last = true;
    post_letter(l->replies, &last, &message);
}

static void handle_request(engine_loop *l, parcel **p) {
    switch ((*p)->request->type) {
    case REQUEST_ROLLOUT:
    case REQUEST_SCORE: flights_begin(&l->flights, *p); break;
    case REQUEST_CANCEL: handle_cancel(l, *p); break;
    case REQUEST_STATUS: tell_status(l, *p); break;
    case REQUEST_RESUME: handle_resume(l, *p); break;
    case REQUEST_PAUSE:
        handle_pause(l, *p);
        *p = NULL;
        break;
    default: assert(!"the service answers the others itself");
    }
}

/* Takes the parcel. */
static void handle(engine_loop *l, parcel *p) {
    switch (p->kind) {
    case PARCEL_REQUEST: handle_request(l, &p); break;
    case PARCEL_PARK:
    case PARCEL_UNPARK: flights_park(&l->flights, p->ticket, p->kind == PARCEL_PARK); break;
    case PARCEL_UPDATE:
        handle_update(l, p->update);
        p->update = NULL;
        break;
    case PARCEL_CANCEL: flights_cancel_all(&l->flights); break;
    case PARCEL_STOP: l->stop = true; break;
    }
    parcel_free(p);
}

static void *run(void *arg) {
    engine_loop *l = arg;
    cpu_flush_denormals();
    for (bool busy = false; !l->stop;) {
        parcel *p = (parcel *)(busy ? queue_take(l->requests)
                                    : queue_wait_until(l->requests, flights_next_deadline(&l->flights)));
        for (; p; p = (parcel *)queue_take(l->requests)) handle(l, p);
        flights_end_late(&l->flights, clock_seconds());
        busy = engine_step(engine_of(l));
        flights_sweep(&l->flights);
        if (engine_is_quiet(engine_of(l))) tell_paused(l);
    }
    return NULL;
}

cop_status engine_loop_open(engine_loop **out, engine *e, const tokenizer *t, size_t keep_bytes,
                            queue *requests, queue *replies, cop_error *err) {
    *out = NULL;
    engine_loop *l = mem_zalloc(1, sizeof *l);
    if (!l) return cop_fail(err, COP_ENOMEM, "could not allocate the engine's thread");
    *l = (engine_loop){.flights = {.engine = e, .tokenizer = t, .replies = replies, .keep_bytes = keep_bytes},
                       .requests = requests,
                       .replies = replies,
                       .start = clock_seconds()};
    int failed = pthread_create(&l->thread, NULL, run, l);
    if (failed) {
        mem_free(l);
        return cop_fail(err, COP_EIO, "could not start the engine's thread: %s", strerror(failed));
    }
    *out = l;
    return COP_OK;
}

void engine_loop_close(engine_loop *l) {
    if (!l) return;
    parcel *p;
    while (!(p = mem_zalloc(1, sizeof *p))) wait_for_memory();
    p->kind = PARCEL_STOP;
    queue_item *item = &p->item;
    queue_put(l->requests, &item);
    pthread_join(l->thread, NULL);
    mem_free(l);
}
