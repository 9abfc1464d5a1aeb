/* A list of chunks under a mutex, and the source that takes them from it. */
#include "worker/update_stream.h"

#include <assert.h>
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

_Static_assert((int)TENSOR_F32 == (int)REQUEST_F32 && (int)TENSOR_BF16 == (int)REQUEST_BF16 &&
                   (int)TENSOR_F16 == (int)REQUEST_F16 && (int)TENSOR_F64 == (int)REQUEST_F64,
               "the wire and checkpoints have the same types");

typedef struct chunk_item {
    struct chunk_item *next;
    request *request;
} chunk_item;

typedef enum stream_state { STREAM_OPEN, STREAM_FAILED, STREAM_OVER } stream_state;

struct update_stream {
    char target[WIRE_ID_BYTES];
    size_t n_target;
    uint64_t tensors, bytes; /* as announced */
    double silence_sec;

    pthread_mutex_t mutex; /* guards what follows, up to `chunk`; no other lock is taken under it */
    pthread_cond_t changed;
    chunk_item *head, *tail;
    size_t waiting;  /* bytes of them */
    request *commit; /* NULL: not yet, or taken out */
    client_id commit_client;
    bool committed, stopped;
    bool lost; /* there was no memory for a chunk */
    stream_state state;
    wire_error error; /* of STREAM_FAILED */

    /* The reader's own. */
    chunk_item *chunk;                     /* that is being read, or NULL */
    size_t used;                           /* bytes of it that were read */
    tensor_info tensor;                    /* that it belongs to; its name is `name` */
    char name[UPDATE_STREAM_MAX_NAME + 1]; /* "": none has come */
    uint64_t tensor_bytes;
    uint64_t got_bytes;            /* of it, in chunks that came */
    uint64_t n_begun, begun_bytes; /* tensors that came, and how large they are */
    wire_error failure;
};

/* ---- Life. */

update_stream *update_stream_open(const request *r, double silence_sec) {
    update_stream *s = mem_zalloc(1, sizeof *s);
    if (!s) return NULL;
    assert(r->id.n <= sizeof s->target);
    memcpy(s->target, r->id.bytes, r->id.n);
    s->n_target = r->id.n;
    s->tensors = r->weights.tensors;
    s->bytes = r->weights.bytes;
    s->silence_sec = silence_sec;
    pthread_mutex_init(&s->mutex, NULL);
    pthread_condattr_t monotonic; /* as clock_seconds() */
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&s->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    return s;
}

static void item_free(chunk_item *item) {
    if (!item) return;
    request_free(item->request);
    mem_free(item);
}

static void drop_items(update_stream *s) {
    for (chunk_item *i = s->head, *next; i; i = next) {
        next = i->next;
        item_free(i);
    }
    s->head = s->tail = NULL;
    s->waiting = 0;
}

void update_stream_close(update_stream *s) {
    if (!s) return;
    drop_items(s);
    item_free(s->chunk);
    request_free(s->commit);
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->mutex);
    mem_free(s);
}

/* ---- The service's side. */

bool update_stream_is(const update_stream *s, wire_text target) {
    return s->n_target == target.n && !memcmp(s->target, target.bytes, target.n);
}

static size_t item_bytes(const chunk_item *i) { return sizeof *i + sizeof *i->request + i->request->n_bytes; }

static void append(update_stream *s, request *chunk) {
    chunk_item *item = mem_zalloc(1, sizeof *item);
    if (!item) { /* the reader tells it, once it comes to where the chunk is missing */
        s->lost = true;
        request_free(chunk);
        return;
    }
    item->request = chunk;
    s->waiting += item_bytes(item);
    if (s->tail)
        s->tail->next = item;
    else
        s->head = item;
    s->tail = item;
}

bool update_stream_put(update_stream *s, request *chunk) {
    pthread_mutex_lock(&s->mutex);
    bool taken = s->state == STREAM_FAILED || (s->state == STREAM_OPEN && !s->committed);
    if (taken && s->state == STREAM_OPEN && !s->lost)
        append(s, chunk);
    else if (taken)
        request_free(chunk);
    pthread_cond_signal(&s->changed);
    pthread_mutex_unlock(&s->mutex);
    return taken;
}

bool update_stream_commit(update_stream *s, const client_id *client, request *commit, wire_error *err) {
    *err = (wire_error){0};
    pthread_mutex_lock(&s->mutex);
    bool taken = s->state == STREAM_OPEN && !s->committed;
    if (taken) {
        s->commit = commit;
        s->commit_client = *client;
        s->committed = true;
        pthread_cond_signal(&s->changed);
    } else if (s->state == STREAM_FAILED) {
        *err = s->error;
        s->state = STREAM_OVER;
    }
    pthread_mutex_unlock(&s->mutex);
    return taken;
}

size_t update_stream_waiting(update_stream *s) {
    pthread_mutex_lock(&s->mutex);
    size_t n = s->waiting;
    pthread_mutex_unlock(&s->mutex);
    return n;
}

void update_stream_stop(update_stream *s) {
    pthread_mutex_lock(&s->mutex);
    s->stopped = true;
    pthread_cond_signal(&s->changed);
    pthread_mutex_unlock(&s->mutex);
}

/* ---- The source. */

/* Note what is wrong, for the client; the loader is told that something is. */
static cop_status refuse(update_stream *s, cop_error *err, const char *code, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
static cop_status refuse(update_stream *s, cop_error *err, const char *code, const char *format, ...) {
    char text[sizeof s->failure.message];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args); /* ASCII: names are checked before they are told */
    va_end(args);
    wire_fail(&s->failure, code, NULL, "%s", text);
    return cop_fail(err, COP_EFORMAT, "%s", text);
}

/* Until something came, or nothing does any more. */
static void wait_for_more(update_stream *s) {
    double until = clock_seconds() + s->silence_sec;
    struct timespec t = {(time_t)until, (long)(fmod(until, 1.0) * 1e9)};
    for (int e = 0; e != ETIMEDOUT && !s->head && !s->committed && !s->stopped && !s->lost;)
        e = pthread_cond_timedwait(&s->changed, &s->mutex, &t);
}

/* The next chunk becomes s->chunk; it stays NULL where the commit came instead. */
static cop_status take(update_stream *s, cop_error *err) {
    item_free(s->chunk);
    s->chunk = NULL;
    s->used = 0;
    pthread_mutex_lock(&s->mutex);
    wait_for_more(s);
    bool stopped = s->stopped, lost = !s->head && s->lost, silent = !s->head && !s->committed && !lost;
    if (s->head && !stopped) {
        s->chunk = s->head;
        s->head = s->chunk->next;
        if (!s->head) s->tail = NULL;
        s->waiting -= item_bytes(s->chunk);
    }
    pthread_mutex_unlock(&s->mutex);
    if (stopped) return cop_fail(err, COP_EIO, "could not load weights: loading was stopped");
    if (lost)
        return refuse(s, err, WIRE_OVERLOADED, "there was no memory for a chunk after %" PRIu64 " tensors",
                      s->n_begun);
    if (!silent) return COP_OK;
    if (s->n_begun == 0) return refuse(s, err, WIRE_TIMEOUT, "no chunk came for %g seconds", s->silence_sec);
    return refuse(s, err, WIRE_TIMEOUT,
                  "nothing came for %g seconds, after %" PRIu64 " of %" PRIu64
                  " bytes of tensor \"%s\" (%" PRIu64 " of %" PRIu64 " tensors)",
                  s->silence_sec, s->got_bytes, s->tensor_bytes, s->name, s->n_begun, s->tensors);
}

static bool same_name(const update_stream *s, const request_chunk *c) {
    return strlen(s->name) == c->name.n && !memcmp(s->name, c->name.bytes, c->name.n);
}

static cop_status check_name(update_stream *s, const request_chunk *c, cop_error *err) {
    bool plain = c->name.n > 0 && c->name.n <= UPDATE_STREAM_MAX_NAME;
    for (size_t i = 0; plain && i < c->name.n; i++)
        plain = isascii((unsigned char)c->name.bytes[i]) && isgraph((unsigned char)c->name.bytes[i]);
    if (plain) return COP_OK;
    return refuse(s, err, WIRE_BAD_REQUEST,
                  "cannot use the name of the tensor after \"%s\", of %zu bytes: names are 1 to %d printable "
                  "ASCII characters",
                  s->name, c->name.n, UPDATE_STREAM_MAX_NAME);
}

/* A chunk of the tensor that is under way. */
static cop_status check_chunk(update_stream *s, const request_chunk *c, cop_error *err) {
    const tensor_info *t = &s->tensor;
    size_t item = tensor_dtype_bytes(t->dtype);
    if ((int)c->dtype != (int)t->dtype)
        return refuse(s, err, WIRE_BAD_REQUEST,
                      "tensor \"%s\" changed its dtype from %s to %s at offset %" PRIu64, s->name,
                      tensor_dtype_name(t->dtype), tensor_dtype_name((tensor_dtype)c->dtype), c->offset);
    bool same = (int)c->n_dims == t->n_dims;
    for (int i = 0; same && i < t->n_dims; i++) same = c->shape[i] == (uint64_t)t->dims[i];
    if (!same)
        return refuse(s, err, WIRE_BAD_REQUEST, "tensor \"%s\" changed its shape at offset %" PRIu64, s->name,
                      c->offset);
    if (c->offset != s->got_bytes)
        return refuse(s, err, WIRE_BAD_REQUEST,
                      "a chunk of tensor \"%s\" is at offset %" PRIu64 ", where %" PRIu64
                      " should follow: chunks come in order, without a gap",
                      s->name, c->offset, s->got_bytes);
    if (c->n_data > s->tensor_bytes - s->got_bytes)
        return refuse(s, err, WIRE_BAD_REQUEST,
                      "a chunk of tensor \"%s\" has %zu bytes at offset %" PRIu64
                      ", but the tensor only %" PRIu64,
                      s->name, c->n_data, c->offset, s->tensor_bytes);
    if (c->n_data % item)
        return refuse(s, err, WIRE_BAD_REQUEST,
                      "a chunk of tensor \"%s\" has %zu bytes at offset %" PRIu64
                      ", which are no whole elements of %zu",
                      s->name, c->n_data, c->offset, item);
    s->got_bytes += c->n_data;
    return COP_OK;
}

/* Fill in the shape and size of the tensor whose first chunk is c. */
static cop_status set_shape(update_stream *s, const request_chunk *c, cop_error *err) {
    tensor_info *t = &s->tensor;
    *t = (tensor_info){
        .name = s->name, .dtype = (tensor_dtype)c->dtype, .n_dims = (int)c->n_dims, .n_elements = 1};
    assert(c->n_dims <= sizeof t->dims / sizeof t->dims[0]);
    bool fits = true;
    for (size_t i = 0; i < c->n_dims; i++) {
        fits = fits && c->shape[i] <= INT64_MAX &&
               !__builtin_mul_overflow(t->n_elements, (size_t)c->shape[i], &t->n_elements);
        t->dims[i] = (int64_t)c->shape[i];
    }
    if (!fits ||
        __builtin_mul_overflow((uint64_t)t->n_elements, tensor_dtype_bytes(t->dtype), &s->tensor_bytes))
        return refuse(s, err, WIRE_BAD_REQUEST, "tensor \"%s\" has more than 2^63 elements", s->name);
    s->got_bytes = 0;
    return COP_OK;
}

/* c is the first chunk of another tensor. */
static cop_status begin_tensor(update_stream *s, const request_chunk *c, cop_error *err) {
    char before[sizeof s->name];
    cop_status status = check_name(s, c, err);
    if (status != COP_OK) return status;
    memcpy(before, s->name, sizeof before);
    memcpy(s->name, c->name.bytes, c->name.n);
    s->name[c->name.n] = '\0';
    if (strcmp(before, s->name) > 0)
        return refuse(s, err, WIRE_BAD_REQUEST, "tensor \"%s\" came after \"%s\": they come in order of name",
                      s->name, before);
    if (s->n_begun == s->tensors)
        return refuse(s, err, WIRE_BAD_REQUEST,
                      "tensor \"%s\" is one more than the %" PRIu64 " that were announced", s->name,
                      s->tensors);
    status = set_shape(s, c, err);
    if (status != COP_OK) return status;
    if (s->tensor_bytes > s->bytes - s->begun_bytes)
        return refuse(s, err, WIRE_BAD_REQUEST,
                      "tensor \"%s\" has %" PRIu64 " bytes, more than the %" PRIu64
                      " that are left of the %" PRIu64 " that were announced",
                      s->name, s->tensor_bytes, s->bytes - s->begun_bytes, s->bytes);
    s->n_begun++;
    s->begun_bytes += s->tensor_bytes;
    return check_chunk(s, c, err);
}

/* The commit came where a tensor could begin. */
static cop_status check_totals(update_stream *s, cop_error *err) {
    if (s->n_begun < s->tensors)
        return refuse(s, err, WIRE_BAD_REQUEST,
                      "the stream was committed after %" PRIu64 " of %" PRIu64 " tensors, the last \"%s\"",
                      s->n_begun, s->tensors, s->name);
    if (s->begun_bytes != s->bytes)
        return refuse(s, err, WIRE_BAD_REQUEST,
                      "the stream was committed after %" PRIu64 " bytes, but %" PRIu64 " were announced",
                      s->begun_bytes, s->bytes);
    return COP_OK;
}

static cop_status next(void *context, const tensor_info **out, cop_error *err) {
    update_stream *s = context;
    *out = NULL;
    for (;;) { /* more than once only where chunks without bytes end a tensor */
        cop_status status = take(s, err);
        if (status == COP_OK && !s->chunk) return check_totals(s, err);
        if (status != COP_OK) return status;
        const request_chunk *c = &s->chunk->request->chunk;
        bool same = same_name(s, c);
        status = same ? check_chunk(s, c, err) : begin_tensor(s, c, err);
        if (status != COP_OK) return status;
        if (same) continue;
        *out = &s->tensor;
        return COP_OK;
    }
}

/* The next chunk of a tensor that is not complete. */
static cop_status take_more(update_stream *s, cop_error *err) {
    cop_status status = take(s, err);
    if (status != COP_OK) return status;
    if (!s->chunk)
        return refuse(s, err, WIRE_BAD_REQUEST,
                      "the stream was committed after %" PRIu64 " of %" PRIu64 " bytes of tensor \"%s\"",
                      s->got_bytes, s->tensor_bytes, s->name);
    const request_chunk *c = &s->chunk->request->chunk;
    if (same_name(s, c)) return check_chunk(s, c, err);
    status = check_name(s, c, err);
    if (status != COP_OK) return status;
    return refuse(s, err, WIRE_BAD_REQUEST,
                  "tensor \"%.*s\" came after %" PRIu64 " of %" PRIu64 " bytes of tensor \"%s\"",
                  (int)c->name.n, c->name.bytes, s->got_bytes, s->tensor_bytes, s->name);
}

static cop_status read_elements(void *context, size_t first, size_t n, void *to, cop_error *err) {
    (void)first; /* in order */
    update_stream *s = context;
    size_t left = n * tensor_dtype_bytes(s->tensor.dtype);
    for (char *at = to; left > 0;) {
        const request_chunk *c = &s->chunk->request->chunk;
        size_t have = c->n_data - s->used, part = have < left ? have : left;
        if (part > 0) memcpy(at, c->data + s->used, part);
        s->used += part;
        at += part;
        left -= part;
        if (left == 0) break;
        cop_status status = take_more(s, err);
        if (status != COP_OK) return status;
    }
    return COP_OK;
}

static cop_status finish(void *context, const char *tensors_digest, cop_error *err) {
    update_stream *s = context;
    pthread_mutex_lock(&s->mutex);
    wire_text want = s->commit->commit.digest; /* next() has seen the commit */
    pthread_mutex_unlock(&s->mutex);
    if (want.n == strlen(tensors_digest) && !memcmp(want.bytes, tensors_digest, want.n)) return COP_OK;
    return refuse(s, err, WIRE_BAD_REQUEST,
                  "the tensors that came have the digest %s, but the commit says %.*s: they are not the ones "
                  "that were sent",
                  tensors_digest, (int)(want.n < 64 ? want.n : 64), want.bytes);
}

weights_source update_stream_source(update_stream *s) {
    return (weights_source){s, next, read_elements, finish};
}

const wire_error *update_stream_failure(const update_stream *s) { return &s->failure; }

void update_stream_end(update_stream *s, const wire_error *why, client_id *client, request **commit) {
    item_free(s->chunk);
    s->chunk = NULL;
    pthread_mutex_lock(&s->mutex);
    drop_items(s);
    *commit = s->commit;
    *client = s->commit_client;
    s->commit = NULL;
    s->state = why && !s->committed ? STREAM_FAILED : STREAM_OVER;
    if (why) s->error = *why;
    pthread_mutex_unlock(&s->mutex);
}
