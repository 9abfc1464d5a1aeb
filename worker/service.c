/* The service's thread.
 *
 *   ROUTER --frames--> decode --> ping, tokenize, detokenize: answered here
 *                             \-> parcel --> engine's thread --> letter --> ROUTER, or the client's backlog
 */
#include "worker/service.h"

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>
#include <zmq.h>

#include "worker/convert.h"
#include "worker/engine_loop.h"
#include "worker/log.h"

enum {
    BACKLOG_RETRY_MS = 5, /* a full pipe gives no sign when it empties */
    LINGER_MS = 2000      /* for what the sockets still hold at the end */
};

/* Letters that a client's pipe did not take, in order. */
typedef struct backlog {
    struct backlog *next;
    client_id client;
    letter *head, *tail; /* linked by item.next */
} backlog;

typedef struct service {
    engine *engine;
    const tokenizer *tokenizer;
    const service_options *o;
    void *context, *router;
    queue *requests, *replies;
    engine_loop *loop;
    backlog *backlogs;
    uint64_t n_open; /* parcels with a request whose last letter has not come */
    int signals;     /* signalfd */
    bool draining, cancelled;
    double deadline; /* of the grace time */
} service;

/* ---- Sending. */

static void client_gone(service *s, const client_id *client) {
    parcel *p = mem_zalloc(1, sizeof *p);
    if (!p) return; /* its rollouts then run to their end unseen */
    p->kind = PARCEL_GONE;
    p->client = *client;
    queue_item *item = &p->item;
    queue_put(s->requests, &item);
}

typedef enum sent { SENT, SENT_FULL, SENT_GONE } sent;

static sent try_send(service *s, const letter *l) {
    if (l->message.n == 0) return SENT;
    if (zmq_send(s->router, l->client.bytes, l->client.n, ZMQ_DONTWAIT | ZMQ_SNDMORE) < 0)
        return errno == EAGAIN ? SENT_FULL : SENT_GONE;
    /* The pipe has taken the first part, so it takes the second. */
    if (zmq_send(s->router, l->message.bytes, l->message.n, ZMQ_DONTWAIT) < 0) return SENT_GONE;
    return SENT;
}

static backlog *find_backlog(service *s, const client_id *client) {
    for (backlog *b = s->backlogs; b; b = b->next) {
        if (client_equal(&b->client, client)) return b;
    }
    return NULL;
}

static void append(backlog *b, letter *l) {
    if (b->tail)
        b->tail->item.next = &l->item;
    else
        b->head = l;
    b->tail = l;
}

/* Send it, keep it for later, or drop it with a client that is gone.  Takes the letter. */
static void dispatch(service *s, letter *l) {
    backlog *b = find_backlog(s, &l->client);
    if (b) {
        append(b, l);
        return;
    }
    sent result = try_send(s, l);
    if (result == SENT_FULL && (b = mem_zalloc(1, sizeof *b))) {
        b->client = l->client;
        b->next = s->backlogs;
        s->backlogs = b;
        append(b, l);
        return;
    }
    if (result != SENT) {
        log_event(LOG_INFO, "client_lost message_bytes=%zu", l->message.n);
        client_gone(s, &l->client);
    }
    letter_free(l);
}

static void backlog_free(backlog *b) {
    while (b->head) {
        letter *l = b->head;
        b->head = (letter *)l->item.next;
        letter_free(l);
    }
    mem_free(b);
}

static void retry_backlogs(service *s) {
    for (backlog **link = &s->backlogs; *link;) {
        backlog *b = *link;
        sent result = SENT;
        while (b->head && (result = try_send(s, b->head)) == SENT) {
            letter *l = b->head;
            b->head = (letter *)l->item.next;
            letter_free(l);
        }
        if (result == SENT_FULL) {
            link = &b->next;
            continue;
        }
        if (result == SENT_GONE) client_gone(s, &b->client);
        *link = b->next;
        backlog_free(b);
    }
}

static void take_replies(service *s) {
    for (letter *l; (l = (letter *)queue_take(s->replies));) {
        if (l->last) s->n_open--;
        dispatch(s, l);
    }
}

/* ---- Answers that need no engine. */

static void answer(service *s, const client_id *client, wire_buffer *message) {
    letter *l = mem_zalloc(1, sizeof *l);
    if (!l) {
        log_event(LOG_ERROR, "reply_dropped why=memory");
        wire_buffer_free(message, &worker_allocator);
        return;
    }
    l->client = *client;
    l->message = *message;
    dispatch(s, l);
}

static void answer_error(service *s, const client_id *client, wire_text id, bool compress,
                         const wire_error *e) {
    wire_buffer message = {0};
    reply_head head = {id, compress, &worker_allocator};
    reply_encode_error(&message, &head, e);
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
                       .weights = {0, wire_text_of(engine_digest(s->engine))}};
    reply_encode_pong(&message, &head, &pong);
    answer(s, client, &message);
}

static void answer_tokenize(service *s, const client_id *client, const request *r) {
    token_list ids = {0};
    cop_error err = {0};
    if (convert_input(&ids, &r->tokenize, s->tokenizer, engine_arch(s->engine)->vocab, false, CHAT_CUT, "",
                      &err) != COP_OK) {
        answer_cop_error(s, client, r, &err);
    } else {
        wire_buffer message = {0};
        reply_head head = convert_head(r);
        reply_encode_tokens(&message, &head, (wire_ids){(const uint32_t *)ids.ids, ids.n});
        answer(s, client, &message);
    }
    token_list_free(&ids);
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
    reply_encode_text(&message, &head, (wire_text){text, n_text}, bytes, n_bytes);
    answer(s, client, &message);
    mem_free(text);
    mem_free(bytes);
    return COP_OK;
}

/* ---- Receiving. */

static void hand_over(service *s, const client_id *client, request *r) {
    parcel *p = mem_zalloc(1, sizeof *p);
    if (!p) {
        cop_error err;
        cop_fail(&err, COP_ENOMEM, "there was no memory for the request");
        answer_cop_error(s, client, r, &err);
        request_free(r);
        return;
    }
    p->kind = PARCEL_REQUEST;
    p->client = *client;
    p->request = r;
    s->n_open++;
    queue_item *item = &p->item;
    queue_put(s->requests, &item);
}

/* Takes the request. */
static void route(service *s, const client_id *client, request *r) {
    cop_error err = {0};
    switch (r->type) {
    case REQUEST_PING: answer_ping(s, client, r); break;
    case REQUEST_TOKENIZE: answer_tokenize(s, client, r); break;
    case REQUEST_DETOKENIZE:
        if (detokenize(s, client, r, &err) != COP_OK) answer_cop_error(s, client, r, &err);
        break;
    case REQUEST_ROLLOUT:
    case REQUEST_SCORE:
        if (s->draining) {
            wire_error e;
            wire_fail(&e, WIRE_DRAINING, NULL, "the worker is shutting down: send this to another one");
            answer_error(s, client, r->id, r->compress, &e);
            break;
        }
        hand_over(s, client, r);
        return;
    default: hand_over(s, client, r); return;
    }
    request_free(r);
}

static void take_frame(service *s, const client_id *client, zmq_msg_t *frame) {
    request *r;
    request_failure failure;
    if (request_decode(&r, zmq_msg_data(frame), zmq_msg_size(frame), s->o->max_message, &worker_allocator,
                       &failure))
        route(s, client, r);
    else
        answer_error(s, client, (wire_text){failure.id, failure.n_id}, failure.compress, &failure.error);
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
        take_frame(s, &client, &first);
    } else {
        wire_error e;
        wire_fail(&e, WIRE_BAD_REQUEST, NULL, "a message is one frame, this one has %d", n_frames);
        answer_error(s, &client, (wire_text){"", 0}, true, &e);
    }
    zmq_msg_close(&first);
    zmq_msg_close(&frame);
    return true;
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
    parcel *p = mem_zalloc(1, sizeof *p);
    if (!p) return; /* tried again at the next turn */
    log_event(LOG_WARNING, "grace_over open_requests=%llu", (unsigned long long)s->n_open);
    p->kind = PARCEL_CANCEL;
    queue_item *item = &p->item;
    queue_put(s->requests, &item);
    s->cancelled = true;
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
        /* A bounded number at a time, so that a flood of requests does not hold up replies. */
        for (int i = 0; i < 64 && take_message(s); i++) continue;
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
    int one = 1, linger = LINGER_MS, ipv6 = strchr(s->o->bind, '[') != NULL;
    int64_t limit = 2 * (int64_t)s->o->max_message;
    zmq_setsockopt(s->router, ZMQ_ROUTER_MANDATORY, &one, sizeof one);
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
              engine_numerics(s->engine), engine_isa(s->engine), engine_digest(s->engine));
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
    service s = {.engine = e, .tokenizer = t, .o = o, .signals = -1};
    cop_status status = open_signals(&s, err);
    if (status == COP_OK) status = queue_open(&s.requests, err);
    if (status == COP_OK) status = queue_open(&s.replies, err);
    if (status == COP_OK) status = open_socket(&s, err);
    if (status == COP_OK) status = engine_loop_open(&s.loop, e, t, s.requests, s.replies, err);
    if (status == COP_OK) {
        serve(&s);
        log_event(LOG_INFO, "stopped");
    }
    service_free(&s);
    return status;
}
