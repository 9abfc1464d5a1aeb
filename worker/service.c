/* The service's thread.
 *
 *   ROUTER --frames--> decode --> ping, tokenize, detokenize: answered here
 *                             \-> parcel --> engine's thread --> letter --> ROUTER, or the client's backlog
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

#include "worker/backlog.h"
#include "worker/log.h"
#include "worker/waiting.h"
#include "worker/watchdog.h"

enum {
    BACKLOG_RETRY_MS = 5, /* a full pipe gives no sign when it empties */
    PIPE_MESSAGES =
        128,          /* that libzmq holds for a client besides the backlog: they are counted, not weighed */
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
    watchdog *dog;
    backlog *backlogs;           /* of clients that read too slowly */
    client_id gone;              /* the last one that could not be reached */
    atomic_size_t request_bytes; /* of messages whose rollouts and scores are in flight */
    waiting waiting;             /* rollouts and scores of which nothing has been started */
    uint64_t n_open;             /* parcels with a request whose last letter has not come */
    int signals;                 /* signalfd */
    bool draining, cancelled;
    double deadline; /* of the grace time */
} service;

/* ---- Sending. */

/* False without memory. */
static bool tell_engine(service *s, parcel_kind kind, const client_id *client) {
    parcel *p = mem_zalloc(1, sizeof *p);
    if (!p) return false;
    p->kind = kind;
    if (client) p->client = *client;
    queue_item *item = &p->item;
    queue_put(s->requests, &item);
    return true;
}

/* Every reply that was under way to it comes here; one line tells it.  Without memory to tell the engine, its
 * rollouts run to their end unseen. */
static void client_gone(service *s, const client_id *client) {
    if (!client_equal(&s->gone, client))
        log_event(LOG_INFO, "client_lost open_requests=%llu", (unsigned long long)s->n_open);
    s->gone = *client;
    tell_engine(s, PARCEL_GONE, client);
}

typedef enum sent { SENT, SENT_FULL, SENT_GONE } sent;

static sent try_send(service *s, const letter *l) {
    if (zmq_send(s->router, l->client.bytes, l->client.n, ZMQ_DONTWAIT | ZMQ_SNDMORE) < 0)
        return errno == EAGAIN ? SENT_FULL : SENT_GONE;
    /* The pipe has taken the first part, so it takes the second. */
    if (zmq_send(s->router, l->message.bytes, l->message.n, ZMQ_DONTWAIT) < 0) return SENT_GONE;
    return SENT;
}

/* The client has more unread replies than it may: nothing more is started for it.  Without memory to tell the
 * engine, that is tried again with its next reply. */
static void park_if_full(service *s, backlog *b) {
    bool full = b->letter_bytes > s->o->max_backlog || backlog_letters(s->backlogs) > s->o->keep_bytes;
    if (b->parked || !full) return;
    b->parked = tell_engine(s, PARCEL_PARK, &b->client);
    if (b->parked) log_event(LOG_INFO, "client_parked backlog_bytes=%zu", b->letter_bytes);
}

static void unpark_if_drained(service *s, backlog *b) {
    bool full = b->letter_bytes > s->o->max_backlog / 2 || backlog_letters(s->backlogs) > s->o->keep_bytes;
    if (!b->parked || (full && b->letter_bytes > 0)) return;
    b->parked = !tell_engine(s, PARCEL_UNPARK, &b->client);
    if (!b->parked) log_event(LOG_INFO, "client_unparked backlog_bytes=%zu", b->letter_bytes);
}

/* Send it, keep it for later, or drop it with a client that is gone.  Takes the letter. */
static void dispatch(service *s, letter *l) {
    backlog *b = backlog_find(s->backlogs, &l->client);
    sent result = b ? SENT_FULL : try_send(s, l);
    if (result == SENT_FULL && !b) b = backlog_add(&s->backlogs, &l->client);
    if (b) {
        backlog_put_letter(b, l);
        park_if_full(s, b);
        return;
    }
    if (result != SENT) {
        client_gone(s, &l->client);
    }
    letter_free(l);
}

static void take_replies(service *s) {
    for (letter *l; (l = (letter *)queue_take(s->replies));) {
        if (l->started) waiting_leave(&s->waiting, clock_seconds());
        if (l->last) s->n_open--;
        if (l->message.n > 0)
            dispatch(s, l);
        else
            letter_free(l);
    }
}

/* ---- Answers that need no engine. */

static void answer(service *s, const client_id *client, wire_buffer *message) {
    letter *l;
    while (!(l = mem_zalloc(1, sizeof *l))) wait_for_memory();
    l->client = *client;
    l->message = *message;
    dispatch(s, l);
}

static void answer_error(service *s, const client_id *client, wire_text id, bool compress,
                         const wire_error *e) {
    wire_buffer message = {0};
    reply_head head = {id, compress, &worker_allocator};
    while (!reply_encode_error(&message, &head, e)) wait_for_memory();
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
                       .state = wire_text_of(s->draining ? "draining" : "ready"),
                       .weights = {0, wire_text_of(engine_weights(s->engine)->digest)}};
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

/* ---- Receiving. */

static void refuse(service *s, const client_id *client, const request *r, const char *code,
                   double retry_after, const char *message) {
    wire_error e;
    wire_fail(&e, code, NULL, "%s", message);
    e.retry_after = retry_after;
    answer_error(s, client, r->id, r->compress, &e);
}

/* A parcel for the engine, with a rollout's prompts tokenized: that takes its time here and not the rows'. */
static cop_status pack(parcel **out, const service *s, const client_id *client, request *r, cop_error *err) {
    parcel *p = *out = mem_zalloc(1, sizeof *p);
    if (!p) return cop_fail(err, COP_ENOMEM, "there was no memory for the request");
    *p = (parcel){.kind = PARCEL_REQUEST, .client = *client, .deadline = INFINITY};
    if (r->type == REQUEST_ROLLOUT) {
        const request_rollout *q = &r->rollout;
        if (q->timeout > 0) p->deadline = clock_seconds() + q->timeout;
        p->seed = q->has_seed ? q->seed : convert_seed();
        cop_status status = convert_rollout(&p->rollout, q, p->seed, s->engine, s->tokenizer, err);
        if (status != COP_OK) {
            parcel_free(p);
            *out = NULL;
            return status;
        }
    }
    p->request = r;
    return COP_OK;
}

/* Takes the request. */
static void hand_over(service *s, const client_id *client, request *r) {
    parcel *p;
    cop_error err;
    if (pack(&p, s, client, r, &err) != COP_OK) {
        answer_cop_error(s, client, r, &err);
        request_free(r);
        return;
    }
    s->n_open++;
    if (r->type == REQUEST_ROLLOUT || r->type == REQUEST_SCORE) {
        waiting_enter(&s->waiting, clock_seconds());
        parcel_hold(p, &s->request_bytes);
    }
    queue_item *item = &p->item;
    queue_put(s->requests, &item);
}

/* Memory for a request in flight.  Alone it always has it. */
static bool has_room_for(service *s, const request *r) {
    size_t held = atomic_load(&s->request_bytes);
    return held == 0 || held + r->n_bytes <= REQUESTS_MULTIPLE * s->o->max_message;
}

/* Takes the request. */
static void route(service *s, const client_id *client, request *r) {
    cop_error err = {0};
    switch (r->type) {
    case REQUEST_PING: answer_ping(s, client, r); break;
    case REQUEST_TOKENIZE:
        if (tokenize(s, client, r, &err) != COP_OK) answer_cop_error(s, client, r, &err);
        break;
    case REQUEST_DETOKENIZE:
        if (detokenize(s, client, r, &err) != COP_OK) answer_cop_error(s, client, r, &err);
        break;
    case REQUEST_ROLLOUT:
    case REQUEST_SCORE:
        if (s->draining) {
            refuse(s, client, r, WIRE_DRAINING, 0, "the worker is shutting down: send this to another one");
            break;
        }
        if (waiting_is_full(&s->waiting)) {
            refuse(s, client, r, WIRE_OVERLOADED, waiting_retry_after(&s->waiting, clock_seconds()),
                   "as many requests wait to be started as --max-queue allows: try again later");
            break;
        }
        if (!has_room_for(s, r)) {
            refuse(s, client, r, WIRE_OVERLOADED, waiting_retry_after(&s->waiting, clock_seconds()),
                   "the requests in flight hold as much as four messages of --max-message: try again later");
            break;
        }
        hand_over(s, client, r);
        return;
    case REQUEST_ACK:
    case REQUEST_PAUSE:
    case REQUEST_RESUME:
    case REQUEST_WEIGHTS:
    case REQUEST_WEIGHTS_CHUNK:
    case REQUEST_WEIGHTS_COMMIT:
        refuse(s, client, r, WIRE_UNSUPPORTED, 0, "this version does not serve such a request yet");
        break;
    default: hand_over(s, client, r); return;
    }
    request_free(r);
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
    if (decode(s, client, frame, &r)) route(s, client, r);
}

/* A message of a client that does not read its replies waits until it does; more of them than it may have
 * unread replies are refused. */
static void keep_or_take_frame(service *s, const client_id *client, zmq_msg_t *frame) {
    backlog *b = backlog_find(s->backlogs, client);
    if (!b || !backlog_frames_wait(b)) {
        take_frame(s, client, frame);
        return;
    }
    size_t n = zmq_msg_size(frame), most = REQUESTS_MULTIPLE * s->o->max_message;
    bool room = b->frame_bytes == 0 ||
                (b->frame_bytes + n <= s->o->max_backlog && backlog_frames(s->backlogs) + n <= most);
    if (room && backlog_put_frame(b, frame)) return;
    if (b->n_refused++ >= REFUSALS_KEPT) {
        if (b->n_refused == REFUSALS_KEPT + 1)
            log_event(LOG_WARNING, "client_ignored unread_refusals=%d", REFUSALS_KEPT);
        return;
    }
    request *r;
    if (!decode(s, client, frame, &r)) return;
    refuse(s, client, r, WIRE_OVERLOADED, WAITING_LEAST_RETRY,
           "too many replies have not been read: read them before you ask for more");
    request_free(r);
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
    if (n_frames == 1) {
        keep_or_take_frame(s, &client, &first);
    } else {
        wire_error e;
        wire_fail(&e, WIRE_BAD_REQUEST, NULL, "a message is one frame, this one has %d", n_frames);
        answer_error(s, &client, (wire_text){"", 0}, true, &e);
    }
    zmq_msg_close(&first);
    zmq_msg_close(&frame);
    return true;
}

/* ---- Backlogs. */

/* Send what its pipe takes now.  False: the client is gone. */
static bool send_letters(service *s, backlog *b) {
    sent result = SENT;
    for (letter *l; result == SENT && (l = backlog_first_letter(b));) {
        result = try_send(s, l);
        if (result == SENT) backlog_drop_letter(b);
    }
    return result != SENT_GONE;
}

/* Answer what has waited, until there are too many unread replies again. */
static void take_kept_frames(service *s, backlog *b) {
    zmq_msg_t frame;
    zmq_msg_init(&frame);
    for (int i = 0; i < FRAMES_PER_TURN && !b->parked && backlog_take_frame(b, &frame); i++)
        take_frame(s, &b->client, &frame); /* its replies go behind the others, into b */
    zmq_msg_close(&frame);
}

static void retry_backlogs(service *s) {
    for (backlog **link = &s->backlogs; *link;) {
        backlog *b = *link;
        bool there = send_letters(s, b);
        if (there) {
            unpark_if_drained(s, b);
            take_kept_frames(s, b);
        } else {
            client_gone(s, &b->client);
        }
        if (there && (backlog_first_letter(b) || backlog_frames_wait(b))) {
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
    s->cancelled = tell_engine(s, PARCEL_CANCEL, NULL); /* or at the next turn */
    if (s->cancelled) log_event(LOG_WARNING, "grace_over open_requests=%llu", (unsigned long long)s->n_open);
}

/* ---- The loop. */

static void serve(service *s) {
    while (!s->draining || s->n_open > 0 || (s->backlogs && clock_seconds() < s->deadline)) {
        zmq_pollitem_t items[] = {{.socket = s->router, .events = ZMQ_POLLIN},
                                  {.fd = queue_fd(s->replies), .events = ZMQ_POLLIN},
                                  {.fd = s->signals, .events = ZMQ_POLLIN}};
        int wait_ms = s->backlogs ? BACKLOG_RETRY_MS : s->draining ? 100 : -1;
        if (zmq_poll(items, 3, wait_ms) < 0 && errno != EINTR) break;
        take_signals(s);
        take_replies(s);
        for (int i = 0; i < FRAMES_PER_TURN && take_message(s); i++) continue;
        retry_backlogs(s);
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
    engine_loop_close(s->loop);
    watchdog_close(s->dog);
    while (s->backlogs) {
        backlog *b = s->backlogs;
        s->backlogs = b->next;
        backlog_free(b);
    }
    for (parcel *p; s->requests && (p = (parcel *)queue_take(s->requests));) parcel_free(p);
    for (letter *l; s->replies && (l = (letter *)queue_take(s->replies));) letter_free(l);
    queue_close(s->requests);
    queue_close(s->replies);
    if (s->router) zmq_close(s->router);
    if (s->context) zmq_ctx_term(s->context);
    if (s->signals >= 0) close(s->signals);
}

cop_status service_run(engine *e, const tokenizer *t, const service_options *o, cop_error *err) {
    service s = {.engine = e, .tokenizer = t, .o = o, .signals = -1, .waiting = {.most = o->max_queue}};
    cop_status status = open_signals(&s, err);
    if (status == COP_OK) status = queue_open(&s.requests, err);
    if (status == COP_OK) status = queue_open(&s.replies, err);
    if (status == COP_OK) status = open_socket(&s, err);
    if (status == COP_OK) status = engine_loop_open(&s.loop, e, t, o->keep_bytes, s.requests, s.replies, err);
    if (status == COP_OK) status = watchdog_open(&s.dog, e, o->step_timeout_sec, err);
    if (status == COP_OK) {
        serve(&s);
        log_event(LOG_INFO, "stopped");
    }
    service_free(&s);
    return status;
}
