/* The service's thread.
 *
 *   ROUTER --frames--> decode --> ping, tokenize, detokenize, ack, a rollout that is known: answered here
 *                             |-> weights, their chunks and commit --> updater's thread --> parcel
 *                             \-> parcel --> engine's thread --> letter --> ticket, ROUTER or backlog
 */
#include "worker/service.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>
#include <zmq.h>

#include "worker/delivery.h"
#include "worker/engine_loop.h"
#include "worker/log.h"
#include "worker/updater.h"
#include "worker/waiting.h"
#include "worker/watchdog.h"

enum {
    RETRY_MS = 5, /* a full pipe gives no sign when it empties */
    DRAINING_MS = 100,
    MOST_WAIT_SEC = 1000000, /* that zmq_poll() can count in milliseconds */
    PIPE_MESSAGES =
        128,          /* that libzmq holds for a client besides the backlog: they are counted, not weighed */
    MOMENT_SEC = 2,   /* for clients to read what the end of the grace time has cancelled */
    LINGER_MS = 2000, /* for what the sockets still hold at the end */
    REQUESTS_MULTIPLE =
        4, /* times max_message: bytes of messages whose requests are kept, and of those that wait */
    REFUSALS_KEPT = 4096, /* for a client that does not read and goes on asking */
    FRAMES_PER_TURN = 64  /* so that a flood of requests does not hold up replies */
};

typedef struct service {
    engine *engine;
    const tokenizer *tokenizer;
    const service_options *o;
    void *context, *router;
    queue *requests, *replies;
    engine_loop *loop;
    updater *updater;
    watchdog *dog;
    delivery delivery;
    weights_label label;  /* of the weights in use, as far as letters tell */
    size_t request_bytes; /* of messages whose rollouts and scores are in flight */
    waiting waiting;      /* rollouts and scores of which nothing has been started */
    uint64_t n_open;      /* requests of which the last letter has not come */
    int signals;          /* signalfd */
    bool paused, draining, cancelled;
    bool held;       /* paused so that nothing ends by itself */
    double deadline; /* of the grace time */
} service;

static void take_replies(service *s) {
    for (letter *l; (l = (letter *)queue_take(s->replies));) {
        if (l->started) waiting_leave(&s->waiting, clock_seconds());
        if (l->last) s->n_open--;
        if (l->has_label) s->label = l->label;
        if (l->ticket) {
            if (l->last) s->request_bytes -= l->ticket->request->n_bytes;
            delivery_ticket_letter(&s->delivery, l);
        } else {
            delivery_letter(&s->delivery, l);
        }
    }
}

/* ---- Answers that need no engine. */

static void answer(service *s, const client_id *client, wire_buffer *message) {
    letter *l;
    while (!(l = mem_zalloc(1, sizeof *l))) wait_for_memory();
    while (!(l->message = packet_open(message))) wait_for_memory();
    l->client = *client;
    delivery_letter(&s->delivery, l);
}

static void answer_error(service *s, const client_id *client, wire_text id, bool compress,
                         const wire_error *e) {
    wire_buffer message = {0};
    reply_head head = {id, compress, &worker_allocator};
    while (!reply_encode_error(&message, &head, e)) wait_for_memory();
    answer(s, client, &message);
}

static void answer_done(service *s, const client_id *client, const request *r) {
    wire_buffer message = {0};
    reply_head head = convert_head(r);
    while (!reply_encode_done(&message, &head, NULL)) wait_for_memory();
    answer(s, client, &message);
}

static void answer_cop_error(service *s, const client_id *client, const request *r, const cop_error *e) {
    wire_error w;
    convert_error(&w, e);
    answer_error(s, client, r->id, r->compress, &w);
}

static void answer_ping(service *s, const client_id *client, const request *r) {
    wire_buffer message = {0};
    reply_head head = convert_head(r);
    reply_pong pong = {.version = wire_text_of(COP_VERSION),
                       .model = wire_text_of(s->o->model),
                       .backend = wire_text_of("cpu"),
                       .numerics = wire_text_of(engine_numerics(s->engine)),
                       .state = wire_text_of(s->draining ? "draining"
                                             : s->paused ? "paused"
                                                         : "ready"),
                       .weights = {s->label.version, wire_text_of(s->label.digest)}};
    while (!reply_encode_pong(&message, &head, &pong)) wait_for_memory();
    answer(s, client, &message);
}

static cop_status no_memory_for_answer(cop_error *err) {
    return cop_fail(err, COP_ENOMEM, "there was no memory for the answer");
}

static cop_status tokenize(service *s, const client_id *client, const request *r, cop_error *err) {
    token_list ids = {0};
    cop_status status = convert_input(&ids, &r->tokenize, s->tokenizer, engine_arch(s->engine)->vocab, false,
                                      CHAT_CUT, "", err);
    wire_buffer message = {0};
    reply_head head = convert_head(r);
    if (status == COP_OK &&
        !reply_encode_tokens(&message, &head, (wire_ids){(const uint32_t *)ids.ids, ids.n}))
        status = no_memory_for_answer(err);
    token_list_free(&ids);
    if (status == COP_OK) answer(s, client, &message);
    return status;
}

static cop_status detokenize(service *s, const client_id *client, const request *r, cop_error *err) {
    if (!s->tokenizer) return cop_fail(err, COP_EUNSUPPORTED, "the model has no tokenizer");
    int32_t *ids;
    cop_status status = convert_ids(&ids, r->detokenize.tokens, engine_arch(s->engine)->vocab, "tokens", err);
    if (status != COP_OK) return status;
    char *text, *bytes = NULL;
    size_t n_text, n_bytes = 0;
    status = convert_text(&text, &n_text, &bytes, &n_bytes, s->tokenizer, ids, r->detokenize.tokens.n, err);
    mem_free(ids);
    if (status != COP_OK) return status;
    wire_buffer message = {0};
    reply_head head = convert_head(r);
    if (reply_encode_text(&message, &head, (wire_text){text, n_text}, bytes, n_bytes))
        answer(s, client, &message);
    else
        status = no_memory_for_answer(err);
    mem_free(text);
    mem_free(bytes);
    return status;
}

/* ---- Requests for the engine's thread. */

static void refuse_key(service *s, const client_id *client, const request *r, const char *code,
                       const char *key, double retry_after, const char *message) {
    wire_error e;
    wire_fail(&e, code, key, "%s", message);
    e.retry_after = retry_after;
    answer_error(s, client, r->id, r->compress, &e);
}

static void refuse(service *s, const client_id *client, const request *r, const char *code,
                   double retry_after, const char *message) {
    refuse_key(s, client, r, code, NULL, retry_after, message);
}

static parcel *parcel_for(const client_id *client, request *r) {
    parcel *p = mem_zalloc(1, sizeof *p);
    if (p)
        *p = (parcel){.kind = PARCEL_REQUEST,
                      .client = *client,
                      .request = r,
                      .deadline = INFINITY,
                      .weights_deadline = INFINITY};
    return p;
}

static void hand_over(service *s, parcel *p) {
    s->n_open++;
    queue_item *item = &p->item;
    queue_put(s->requests, &item);
}

/* Takes the request.  target: the ticket that it is about, or NULL. */
static void ask_engine(service *s, const client_id *client, request *r, ticket *target) {
    parcel *p;
    while (!(p = parcel_for(client, r))) wait_for_memory();
    p->ticket = target;
    hand_over(s, p);
}

/* Tokenize a rollout's prompts: that takes its time here and not the rows'. */
static cop_status pack_rollout(parcel *p, const service *s, cop_error *err) {
    const request_rollout *q = &p->request->rollout;
    double now = clock_seconds();
    if (q->timeout > 0) p->deadline = now + q->timeout;
    p->weights_deadline = now + q->weights_timeout;
    p->seed = q->has_seed ? q->seed : convert_seed();
    return convert_rollout(&p->rollout, q, p->seed, s->engine, s->tokenizer, err);
}

/* Open a ticket and send it on.  Takes the request if it returns COP_OK. */
static cop_status start(service *s, const client_id *client, request *r, cop_error *err) {
    parcel *p = parcel_for(client, r);
    cop_status status = p ? COP_OK : COP_ENOMEM;
    if (p && r->type == REQUEST_ROLLOUT) status = pack_rollout(p, s, err);
    if (status == COP_OK && !(p->ticket = tickets_add(&s->delivery.tickets, r, p->seed, client)))
        status = COP_ENOMEM;
    if (status != COP_OK) {
        parcel_free(p);
        return status == COP_ENOMEM ? cop_fail(err, status, "there was no memory for the request") : status;
    }
    waiting_enter(&s->waiting, clock_seconds());
    s->request_bytes += r->n_bytes;
    hand_over(s, p);
    return COP_OK;
}

/* Memory for a request in flight.  Alone it always has it. */
static bool has_room_for(const service *s, const request *r) {
    return s->request_bytes == 0 || s->request_bytes + r->n_bytes <= REQUESTS_MULTIPLE * s->o->max_message;
}

/* True: it was started, and the request taken. */
static bool admit(service *s, const client_id *client, request *r) {
    cop_error err = {0};
    double later = waiting_retry_after(&s->waiting, clock_seconds());
    if (s->draining)
        refuse(s, client, r, WIRE_DRAINING, 0, "the worker is shutting down: send this to another one");
    else if (waiting_is_full(&s->waiting))
        refuse(s, client, r, WIRE_OVERLOADED, later,
               "as many requests wait to be started as --max-queue allows: try again later");
    else if (!has_room_for(s, r))
        refuse(s, client, r, WIRE_OVERLOADED, later,
               "the requests in flight hold as much as four messages of --max-message: try again later");
    else if (s->delivery.tickets.lost_bytes > s->o->keep_bytes)
        refuse(s, client, r, WIRE_OVERLOADED, later,
               "results that no client has asked for again fill --keep-bytes: try again later");
    else if (start(s, client, r, &err) != COP_OK)
        answer_cop_error(s, client, r, &err);
    else
        return true;
    return false;
}

/* ---- Rollouts that are known. */

static ticket *find_target(service *s, const client_id *client, const request *r, wire_text target) {
    ticket *t = tickets_find(&s->delivery.tickets, target);
    if (!t)
        refuse_key(s, client, r, WIRE_NOT_FOUND, "target", 0,
                   "no rollout with this id is known: it never came, failed, or was not kept any longer");
    return t;
}

static void attach(service *s, const client_id *client, const request *r, ticket *t) {
    wire_error e;
    if (ticket_matches(t, r, &e))
        delivery_attach(&s->delivery, t, client);
    else
        answer_error(s, client, r->id, r->compress, &e);
}

static void ack(service *s, const client_id *client, const request *r) {
    ticket *t = find_target(s, client, r, r->ack.target);
    if (!t) return;
    if (!ticket_is_over(t)) {
        refuse_key(s, client, r, WIRE_BAD_REQUEST, "target", 0,
                   "the rollout is not finished: acknowledge it after its done, or cancel it first");
        return;
    }
    delivery_ack(&s->delivery, t);
    answer_done(s, client, r);
}

/* True: the request was taken.  What is over has nothing left to cancel. */
static bool cancel(service *s, const client_id *client, request *r) {
    ticket *t = find_target(s, client, r, r->cancel.target);
    if (t && !ticket_is_over(t)) {
        ask_engine(s, client, r, t);
        return true;
    }
    if (t) answer_done(s, client, r);
    return false;
}

/* ---- Weights. */

/* Else an update would have to wait until samples have ended that run on older sets. */
static bool has_room_for_set(const service *s) { return engine_n_weights(s->engine) < UPDATER_MAX_SETS; }

/* True: the request was taken. */
static bool update_weights(service *s, const client_id *client, request *r) {
    wire_error e;
    bool taken = false;
    if (r->type == REQUEST_WEIGHTS_CHUNK) {
        if (updater_chunk(s->updater, r, &e)) return true; /* it gets no reply */
    } else if (r->type == REQUEST_WEIGHTS_COMMIT) {
        taken = updater_commit(s->updater, client, r, &e);
    } else if (s->draining) {
        wire_fail(&e, WIRE_DRAINING, NULL, "the worker is shutting down: no weights come into use any more");
    } else if (r->weights.version <= s->label.version) {
        wire_fail(&e, WIRE_BAD_REQUEST, "version",
                  "weights of version %llu are in use: a new version must be greater",
                  (unsigned long long)s->label.version);
    } else if (s->held && !has_room_for_set(s)) { /* and who sends it may want to resume after it */
        wire_fail(
            &e, WIRE_OVERLOADED, NULL,
            "a pause holds samples on %d older sets of weights: resume, and send this when some have ended",
            UPDATER_MAX_SETS - 1);
        e.retry_after = WAITING_LEAST_RETRY;
    } else if (!r->weights.path.bytes && !has_room_for_set(s)) { /* its chunks would wait, too */
        wire_fail(&e, WIRE_OVERLOADED, NULL,
                  "samples still run on %d older sets of weights: send the stream when some have ended",
                  UPDATER_MAX_SETS - 1);
        e.retry_after = WAITING_LEAST_RETRY;
    } else {
        taken = updater_begin(s->updater, client, r, &e);
    }
    if (taken)
        s->n_open++;
    else
        answer_error(s, client, r->id, r->compress, &e);
    return taken;
}

/* ---- Receiving. */

/* True: the request was taken. */
static bool route(service *s, const client_id *client, request *r) {
    cop_error err = {0};
    ticket *known;
    switch (r->type) {
    case REQUEST_PING: answer_ping(s, client, r); break;
    case REQUEST_TOKENIZE:
        if (tokenize(s, client, r, &err) != COP_OK) answer_cop_error(s, client, r, &err);
        break;
    case REQUEST_DETOKENIZE:
        if (detokenize(s, client, r, &err) != COP_OK) answer_cop_error(s, client, r, &err);
        break;
    case REQUEST_ROLLOUT:
        known = tickets_find(&s->delivery.tickets, r->id);
        if (!known) return admit(s, client, r);
        attach(s, client, r, known);
        break;
    case REQUEST_SCORE: return admit(s, client, r);
    case REQUEST_ACK: ack(s, client, r); break;
    case REQUEST_CANCEL: return cancel(s, client, r);
    case REQUEST_WEIGHTS:
    case REQUEST_WEIGHTS_CHUNK:
    case REQUEST_WEIGHTS_COMMIT: return update_weights(s, client, r);
    case REQUEST_PAUSE:
    case REQUEST_RESUME:
        s->paused = r->type == REQUEST_PAUSE; /* the engine's thread takes them in this order */
        s->held = s->paused && r->pause.mode == REQUEST_PAUSE_KEEP;
        ask_engine(s, client, r, NULL);
        return true;
    case REQUEST_STATUS: ask_engine(s, client, r, NULL); return true;
    }
    return false;
}

/* False: it is no request, and the client has been told. */
static bool decode(service *s, const client_id *client, zmq_msg_t *frame, request **out) {
    request_failure failure;
    if (request_decode(out, zmq_msg_data(frame), zmq_msg_size(frame), s->o->max_message, &worker_allocator,
                       &failure))
        return true;
    answer_error(s, client, (wire_text){failure.id, failure.n_id}, failure.compress, &failure.error);
    return false;
}

static void take_frame(service *s, const client_id *client, zmq_msg_t *frame) {
    request *r;
    if (decode(s, client, frame, &r) && !route(s, client, r)) request_free(r);
}

/* Whether the client hears that a message of its was not kept: it does not read, so there is an end. */
static bool may_refuse(backlog *b) {
    if (b->n_refused < REFUSALS_KEPT) {
        b->n_refused++;
        return true;
    }
    if (!b->ignored) log_event(LOG_WARNING, "client_ignored unread_refusals=%d", REFUSALS_KEPT);
    b->ignored = true;
    return false;
}

/* A message of a client that does not read its replies waits until it does; more of them than it may have
 * unread replies are refused. */
static void keep_or_take_frame(service *s, const client_id *client, zmq_msg_t *frame) {
    backlog *b = backlog_find(s->delivery.backlogs, client);
    if (!b || !backlog_frames_wait(b)) {
        take_frame(s, client, frame);
        return;
    }
    size_t n = zmq_msg_size(frame), most = REQUESTS_MULTIPLE * s->o->max_message;
    bool room = b->frame_bytes == 0 ||
                (b->frame_bytes + n <= s->o->max_backlog && backlog_frames(s->delivery.backlogs) + n <= most);
    if (room && backlog_put_frame(b, frame)) return;
    if (!may_refuse(b)) return;
    request *r;
    if (!decode(s, client, frame, &r)) return;
    refuse(s, client, r, WIRE_OVERLOADED, WAITING_LEAST_RETRY,
           "too many replies have not been read: read them before you ask for more");
    request_free(r);
}

/* A message of no frame, or of several: not even kept for a client that does not read. */
static void refuse_frames(service *s, const client_id *client, int n_frames) {
    backlog *b = backlog_find(s->delivery.backlogs, client);
    if (b && backlog_frames_wait(b) && !may_refuse(b)) return;
    wire_error e;
    wire_fail(&e, WIRE_BAD_REQUEST, NULL, "a message is one frame, this one has %d", n_frames);
    answer_error(s, client, (wire_text){"", 0}, true, &e);
}

/* One message: the ROUTER's name of the client, then what it sent, which must be one frame.  False: there is
 * none. */
static bool take_message(service *s) {
    zmq_msg_t frame;
    client_id client = {.n = 0};
    zmq_msg_init(&frame);
    if (zmq_msg_recv(&frame, s->router, ZMQ_DONTWAIT) < 0) {
        zmq_msg_close(&frame);
        return false;
    }
    assert(zmq_msg_size(&frame) <= sizeof client.bytes);
    client.n = (uint8_t)zmq_msg_size(&frame);
    memcpy(client.bytes, zmq_msg_data(&frame), client.n);
    int n_frames = 0;
    bool more = zmq_msg_more(&frame);
    zmq_msg_t first;
    zmq_msg_init(&first);
    while (more) {
        zmq_msg_close(&frame);
        zmq_msg_init(&frame);
        if (zmq_msg_recv(&frame, s->router, ZMQ_DONTWAIT) < 0)
            break; /* the parts of a message come together */
        more = zmq_msg_more(&frame);
        if (n_frames++ == 0) zmq_msg_move(&first, &frame);
    }
    if (n_frames == 1)
        keep_or_take_frame(s, &client, &first);
    else
        refuse_frames(s, &client, n_frames);
    zmq_msg_close(&first);
    zmq_msg_close(&frame);
    return true;
}

/* Chunks of weights that come faster than they are read wait in the sender's pipe. */
static bool may_receive(const service *s) { return !updater_is_full(s->updater); }

/* ---- Backlogs. */

/* Answer what has waited, until there are too many unread replies again. */
static void take_kept_frames(service *s, backlog *b) {
    zmq_msg_t frame;
    zmq_msg_init(&frame);
    for (int i = 0; i < FRAMES_PER_TURN && !b->parked && may_receive(s) && backlog_take_frame(b, &frame); i++)
        take_frame(s, &b->client, &frame); /* its replies go behind the others, into b */
    zmq_msg_close(&frame);
}

static void retry_backlogs(service *s) {
    for (backlog **link = &s->delivery.backlogs; *link;) {
        backlog *b = *link;
        bool there = delivery_retry(&s->delivery, b);
        if (there) take_kept_frames(s, b);
        if (there && (backlog_unread(b) > 0 || backlog_frames_wait(b))) {
            link = &b->next;
            continue;
        }
        *link = b->next;
        backlog_free(b);
    }
}

/* ---- Signals. */

static void take_signals(service *s) {
    struct signalfd_siginfo info;
    while (read(s->signals, &info, sizeof info) == (ssize_t)sizeof info) {
        if (s->draining) {
            log_event(LOG_WARNING, "exit signal=%u open_requests=%llu", info.ssi_signo,
                      (unsigned long long)s->n_open);
            _exit(1);
        }
        log_event(LOG_INFO, "draining signal=%u open_requests=%llu", info.ssi_signo,
                  (unsigned long long)s->n_open);
        s->draining = true;
        s->deadline = clock_seconds() + s->o->grace_sec;
    }
}

static void cancel_at_deadline(service *s) {
    if (!s->draining || s->cancelled || clock_seconds() < s->deadline) return;
    parcel *p;
    while (!(p = mem_zalloc(1, sizeof *p))) wait_for_memory();
    p->kind = PARCEL_CANCEL;
    queue_item *item = &p->item;
    queue_put(s->requests, &item);
    updater_stop(s->updater);
    s->cancelled = true;
    log_event(LOG_WARNING, "grace_over open_requests=%llu", (unsigned long long)s->n_open);
}

/* ---- The loop. */

/* All rollouts and scores are over, and who can still be reached has been told all there is, or has had the
 * time for it. */
static bool is_drained(const service *s) {
    if (!s->draining || s->delivery.tickets.running.first) return false;
    return (s->n_open == 0 && !s->delivery.backlogs) || clock_seconds() >= s->deadline + MOMENT_SEC;
}

/* Until something has to be looked at that gives no sign. */
static int wait_ms(const service *s) {
    if (s->delivery.backlogs || !may_receive(s)) return RETRY_MS;
    if (s->draining) return DRAINING_MS;
    double seconds = tickets_next_expiry(&s->delivery.tickets) - clock_seconds();
    return isinf(seconds) ? -1 : (int)(1000 * fmax(0, fmin(seconds, MOST_WAIT_SEC))) + 1;
}

static void serve(service *s) {
    while (!is_drained(s)) {
        zmq_pollitem_t items[] = {{.socket = s->router, .events = may_receive(s) ? ZMQ_POLLIN : 0},
                                  {.fd = queue_fd(s->replies), .events = ZMQ_POLLIN},
                                  {.fd = s->signals, .events = ZMQ_POLLIN}};
        if (zmq_poll(items, 3, wait_ms(s)) < 0 && errno != EINTR) break;
        take_signals(s);
        take_replies(s);
        for (int i = 0; i < FRAMES_PER_TURN && may_receive(s) && take_message(s); i++) continue;
        retry_backlogs(s);
        tickets_expire(&s->delivery.tickets, clock_seconds());
        tickets_trim(&s->delivery.tickets);
        cancel_at_deadline(s);
    }
}

/* ---- Life. */

static bool is_loopback(const char *endpoint) {
    if (strncmp(endpoint, "tcp://", 6)) return true;
    const char *host = endpoint + 6;
    return !strncmp(host, "127.", 4) || !strncmp(host, "localhost:", 10) || !strncmp(host, "[::1]:", 6);
}

static cop_status write_endpoint(const char *path, const char *endpoint, cop_error *err) {
    char part[4096];
    if (snprintf(part, sizeof part, "%s.%ld", path, (long)getpid()) >= (int)sizeof part)
        return cop_fail(err, COP_EINVAL, "the path of the endpoint file is too long");
    FILE *f = fopen(part, "we");
    bool ok = f && fprintf(f, "%s\n", endpoint) > 0;
    if (f && fclose(f)) ok = false;
    if (ok && !rename(part, path)) return COP_OK;
    int e = errno;
    unlink(part);
    return cop_fail(err, COP_EIO, "could not write the endpoint file \"%s\": %s", path, strerror(e));
}

static cop_status open_socket(service *s, cop_error *err) {
    if (!is_loopback(s->o->bind))
        return cop_fail(err, COP_EINVAL,
                        "cannot bind \"%s\": only loopback (tcp://127.0.0.1:PORT) and ipc:// are served, as "
                        "encryption is not built yet",
                        s->o->bind);
    s->context = zmq_ctx_new();
    s->router = s->context ? zmq_socket(s->context, ZMQ_ROUTER) : NULL;
    if (!s->router) return cop_fail(err, COP_EIO, "could not make a socket: %s", zmq_strerror(errno));
    int one = 1, linger = LINGER_MS, most = PIPE_MESSAGES, ipv6 = strchr(s->o->bind, '[') != NULL;
    int64_t limit = 2 * (int64_t)s->o->max_message;
    zmq_setsockopt(s->router, ZMQ_ROUTER_MANDATORY, &one, sizeof one);
    zmq_setsockopt(s->router, ZMQ_SNDHWM, &most, sizeof most);
    zmq_setsockopt(s->router, ZMQ_LINGER, &linger, sizeof linger);
    zmq_setsockopt(s->router, ZMQ_IPV6, &ipv6, sizeof ipv6);
    zmq_setsockopt(s->router, ZMQ_MAXMSGSIZE, &limit, sizeof limit);
    if (zmq_bind(s->router, s->o->bind))
        return cop_fail(err, errno == EINVAL ? COP_EINVAL : COP_EIO, "could not bind \"%s\": %s", s->o->bind,
                        zmq_strerror(errno));
    char endpoint[512];
    size_t n = sizeof endpoint;
    zmq_getsockopt(s->router, ZMQ_LAST_ENDPOINT, endpoint, &n);
    log_event(LOG_INFO, "listening endpoint=%s model=%s numerics=%s isa=%s weights=%s", endpoint, s->o->model,
              engine_numerics(s->engine), engine_isa(s->engine), engine_weights(s->engine)->digest);
    return s->o->endpoint_file ? write_endpoint(s->o->endpoint_file, endpoint, err) : COP_OK;
}

static cop_status open_signals(service *s, cop_error *err) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    s->signals = signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC);
    if (s->signals < 0) return cop_fail(err, COP_EIO, "could not make a signalfd: %s", strerror(errno));
    return COP_OK;
}

static void service_free(service *s) {
    updater_close(s->updater); /* first: the engine's thread takes what is still under way */
    engine_loop_close(s->loop);
    watchdog_close(s->dog);
    for (parcel *p; s->requests && (p = (parcel *)queue_take(s->requests));) parcel_free(p);
    for (letter *l; s->replies && (l = (letter *)queue_take(s->replies));) letter_free(l);
    delivery_free(&s->delivery);
    queue_close(s->requests);
    queue_close(s->replies);
    if (s->router) zmq_close(s->router);
    if (s->context) zmq_ctx_term(s->context);
    if (s->signals >= 0) close(s->signals);
}

cop_status service_run(engine *e, const tokenizer *t, const service_options *o, cop_error *err) {
    service s = {.engine = e,
                 .tokenizer = t,
                 .o = o,
                 .signals = -1,
                 .waiting = {.most = o->max_queue},
                 .label = *engine_weights(e)};
    cop_status status = open_signals(&s, err);
    if (status == COP_OK) status = queue_open(&s.requests, err);
    if (status == COP_OK) status = queue_open(&s.replies, err);
    if (status == COP_OK) status = open_socket(&s, err);
    s.delivery = (delivery){.router = s.router,
                            .requests = s.requests,
                            .max_backlog = o->max_backlog,
                            .keep_bytes = o->keep_bytes};
    tickets_init(&s.delivery.tickets, o->keep_bytes, o->keep_results_sec);
    if (status == COP_OK) status = engine_loop_open(&s.loop, e, t, o->keep_bytes, s.requests, s.replies, err);
    if (status == COP_OK)
        status = updater_open(&s.updater, e, o->weights_dir, o->weights_silence_sec, s.requests, err);
    if (status == COP_OK) status = watchdog_open(&s.dog, e, o->step_timeout_sec, err);
    if (status == COP_OK) {
        serve(&s);
        log_event(LOG_INFO, "stopped");
    }
    service_free(&s);
    return status;
}
