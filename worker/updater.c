/* The updater's thread, and the line of updates before it. */
#include "worker/updater.h"

#include <assert.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "engine/checkpoint_path.h"
#include "engine/utf8.h"
#include "worker/update_stream.h"

#define LOOK_SEC 0.02 /* between looks whether there is room for another set */
#define RETRY_SEC 1.0 /* what the sender of an update that cannot be taken is told */

/* ---- Sets on their way to the engine's thread. */

/* One reference each of the updater and of every update with a set that was posted: either may go first. */
struct update_gate {
    atomic_int n_references;
};

static void gate_leave(struct update_gate *g) {
    if (g && atomic_fetch_sub(&g->n_references, 1) == 1) mem_free(g);
}

static int gate_posted(struct update_gate *g) { return atomic_load(&g->n_references) - 1; }

void update_free(update *u, engine *e) {
    if (!u) return;
    assert(e || !u->weights);
    if (u->weights) engine_drop_weights(e, u->weights);
    request_free(u->request);
    request_free(u->commit);
    gate_leave(u->gate);
    mem_free(u);
}

/* ---- The line. */

/* An update that waits or is being read, with all that telling its end will take. */
typedef struct work {
    struct work *next;
    update *update;
    parcel *parcel;        /* without the update */
    update_stream *stream; /* borrowed; NULL: from a path */
} work;

struct updater {
    engine *engine;
    queue *requests;
    char *weights_dir; /* resolved; NULL: anywhere */
    double silence_sec;
    pthread_t thread;
    struct update_gate *gate;

    pthread_mutex_t mutex; /* guards what follows, up to `stream`; no other lock is taken under it */
    pthread_cond_t changed;
    work *first, **last; /* the one that is read is not among them */
    int n_works;         /* but counted here */
    bool stop;

    update_stream *stream; /* the last one that was begun, or NULL; set by the service's thread, when idle */
};

static void work_free(work *w, engine *e) {
    if (!w) return;
    update_free(w->update, e);
    parcel_free(w->parcel);
    mem_free(w);
}

/* Without the request, which is still the caller's.  NULL without memory. */
static work *work_open(const client_id *client) {
    work *w = mem_zalloc(1, sizeof *w);
    if (!w) return NULL;
    w->update = mem_zalloc(1, sizeof *w->update);
    w->parcel = mem_zalloc(1, sizeof *w->parcel);
    if (!w->update || !w->parcel) {
        work_free(w, NULL);
        return NULL;
    }
    w->update->client = w->parcel->client = *client;
    w->parcel->kind = PARCEL_UPDATE;
    return w;
}

/* The next one, once there is any; NULL: the thread is to stop, and none is left. */
static work *take(updater *u) {
    pthread_mutex_lock(&u->mutex);
    while (!u->first && !u->stop) pthread_cond_wait(&u->changed, &u->mutex);
    work *w = u->first;
    if (w) {
        u->first = w->next;
        if (!u->first) u->last = &u->first;
    }
    pthread_mutex_unlock(&u->mutex);
    return w;
}

static bool is_stopping(updater *u) {
    pthread_mutex_lock(&u->mutex);
    bool stop = u->stop;
    pthread_mutex_unlock(&u->mutex);
    return stop;
}

/* Sleep a little, or until the thread is to stop. */
static void sleep_a_little(updater *u) {
    double until = clock_seconds() + LOOK_SEC;
    struct timespec t = {(time_t)until, (long)(fmod(until, 1.0) * 1e9)};
    pthread_mutex_lock(&u->mutex);
    for (int e = 0; !u->stop && e != ETIMEDOUT;) e = pthread_cond_timedwait(&u->changed, &u->mutex, &t);
    pthread_mutex_unlock(&u->mutex);
}

static bool is_full(update_stream *s) { return s && update_stream_waiting(s) >= UPDATER_STREAM_BYTES; }

/* Until another set may be read.  False: the thread is to stop; or, told in *err, a stream filled what may
 * wait of it, and nothing more can be received until that goes: not even what would end the wait. */
static bool wait_for_room(updater *u, update_stream *s, wire_error *err) {
    double full_sec = clock_seconds(); /* since when it has been full */
    while (engine_n_weights(u->engine) + gate_posted(u->gate) >= UPDATER_MAX_SETS) {
        if (is_stopping(u)) return false;
        double now = clock_seconds();
        if (!is_full(s)) full_sec = now;
        if (now - full_sec >= u->silence_sec)
            return wire_fail(
                err, WIRE_OVERLOADED, NULL,
                "%d sets of weights are in memory, the old ones since rollouts end on them: send the "
                "next when some have ended",
                UPDATER_MAX_SETS);
        sleep_a_little(u);
    }
    return !is_stopping(u);
}

/* ---- Reading one. */

/* The wire's error for why loading failed.  Names that the message quotes from a disk may be in any bytes. */
static void tell(wire_error *to, cop_error *from, const char *key) {
    size_t n = strlen(from->message);
    if (utf8_valid_prefix(from->message, n) < n) {
        for (char *c = from->message; *c; c++)
            if ((unsigned char)*c >= 0x80) *c = '?';
    }
    if (from->status == COP_EFORMAT) from->status = COP_EINVAL; /* the sender's fault, not ours */
    convert_error(to, from);
    if (key) wire_fail(to, to->code, key, "%s", from->message);
}

/* The path to load: with a directory given, the one that it leads to, which must lie in there. */
static bool find_path(const updater *u, const char *path, char real[PATH_MAX], const char **found,
                      wire_error *err) {
    static const char key[] = "source.path";
    *found = path;
    if (!u->weights_dir) return true;
    *found = realpath(path, real);
    if (!*found) {
        int e = errno;
        return wire_fail(err, e == ENOENT || e == ENOTDIR ? WIRE_NOT_FOUND : WIRE_BAD_REQUEST, key,
                         "could not open \"%s\": %s", path, strerror(e));
    }
    if (path_lies_in(real, u->weights_dir)) return true;
    return wire_fail(err, WIRE_BAD_REQUEST, key, "cannot load \"%s\": it does not lie in --weights-dir",
                     path);
}

static void read_path(updater *u, update *up) {
    char real[PATH_MAX];
    const char *path;
    cop_error err = {0};
    if (!find_path(u, up->request->weights.path.bytes, real, &path, &up->error)) return;
    if (engine_load_path(u->engine, path, u->weights_dir, &up->weights, &err) != COP_OK)
        tell(&up->error, &err, "source.path");
}

static void read_stream(updater *u, update *up, update_stream *s) {
    weights_source source = update_stream_source(s);
    cop_error err = {0};
    if (engine_load_weights(u->engine, &source, &up->weights, &err) == COP_OK) return;
    if (update_stream_failure(s)->code)
        up->error = *update_stream_failure(s);
    else
        tell(&up->error, &err, NULL);
}

static void read_update(updater *u, update *up, update_stream *s) {
    bool room = wait_for_room(u, s, &up->error);
    if (room && s) read_stream(u, up, s);
    if (room && !s) read_path(u, up);
    if (!up->weights && is_stopping(u))
        wire_fail(&up->error, WIRE_DRAINING, NULL,
                  "the worker is shutting down: no weights come into use any more");
    const char *code = up->error.code;
    if (code && !strcmp(code, WIRE_OVERLOADED)) up->error.retry_after = RETRY_SEC;
    if (s) update_stream_end(s, up->weights ? NULL : &up->error, &up->commit_client, &up->commit);
}

/* The update is over: the next stream may begin, even before the client hears of this one. */
static void post(updater *u, work *w) {
    update *up = w->update;
    parcel *p = w->parcel;
    if (up->weights) {
        up->gate = u->gate;
        atomic_fetch_add(&u->gate->n_references, 1);
    }
    p->update = up;
    mem_free(w);
    pthread_mutex_lock(&u->mutex);
    u->n_works--;
    pthread_mutex_unlock(&u->mutex);
    queue_item *item = &p->item;
    queue_put(u->requests, &item);
}

static void *run(void *arg) {
    updater *u = arg;
    cpu_flush_denormals();
    for (work *w; (w = take(u));) {
        read_update(u, w->update, w->stream);
        post(u, w);
    }
    return NULL;
}

/* ---- Life. */

static cop_status resolve_dir(updater *u, const char *weights_dir, cop_error *err) {
    char real[PATH_MAX];
    struct stat st;
    if (!realpath(weights_dir, real) || stat(real, &st))
        return cop_fail(err, errno == ENOENT ? COP_ENOTFOUND : COP_EIO,
                        "could not open --weights-dir \"%s\": %s", weights_dir, strerror(errno));
    if (!S_ISDIR(st.st_mode))
        return cop_fail(err, COP_EINVAL, "cannot use --weights-dir \"%s\": it is no directory", weights_dir);
    u->weights_dir = mem_strdup(real);
    return u->weights_dir ? COP_OK : cop_fail(err, COP_ENOMEM, "could not allocate the updater");
}

/* After the thread, or without it. */
static void updater_free(updater *u) {
    for (work *w = u->first, *next; w; w = next) {
        next = w->next;
        work_free(w, u->engine);
    }
    update_stream_close(u->stream);
    gate_leave(u->gate);
    pthread_cond_destroy(&u->changed);
    pthread_mutex_destroy(&u->mutex);
    mem_free(u->weights_dir);
    mem_free(u);
}

static void init(updater *u) {
    u->last = &u->first;
    pthread_mutex_init(&u->mutex, NULL);
    pthread_condattr_t monotonic; /* as clock_seconds() */
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&u->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

cop_status updater_open(updater **out, engine *e, const char *weights_dir, double silence_sec,
                        queue *requests, cop_error *err) {
    *out = NULL;
    updater *u = mem_zalloc(1, sizeof *u);
    if (!u) return cop_fail(err, COP_ENOMEM, "could not allocate the updater");
    *u = (updater){.engine = e, .silence_sec = silence_sec, .requests = requests};
    init(u);
    cop_status status = weights_dir ? resolve_dir(u, weights_dir, err) : COP_OK;
    if (status == COP_OK && !(u->gate = mem_zalloc(1, sizeof *u->gate)))
        status = cop_fail(err, COP_ENOMEM, "could not allocate the updater");
    if (status == COP_OK) {
        atomic_init(&u->gate->n_references, 1);
        int failed = pthread_create(&u->thread, NULL, run, u);
        if (failed) status = cop_fail(err, COP_EIO, "could not start the updater: %s", strerror(failed));
    }
    if (status != COP_OK) {
        updater_free(u);
        return status;
    }
    *out = u;
    return COP_OK;
}

void updater_stop(updater *u) {
    pthread_mutex_lock(&u->mutex);
    u->stop = true;
    pthread_cond_signal(&u->changed);
    pthread_mutex_unlock(&u->mutex);
    engine_stop_loading(u->engine, true);
    if (u->stream) update_stream_stop(u->stream);
}

void updater_close(updater *u) {
    if (!u) return;
    updater_stop(u);
    pthread_join(u->thread, NULL);
    engine_stop_loading(u->engine, false);
    updater_free(u);
}

/* ---- The service's side. */

static bool overloaded(wire_error *err, const char *why) {
    wire_fail(err, WIRE_OVERLOADED, NULL, "%s", why);
    err->retry_after = RETRY_SEC;
    return false;
}

static int count_works(updater *u) {
    pthread_mutex_lock(&u->mutex);
    int n = u->n_works;
    pthread_mutex_unlock(&u->mutex);
    return n;
}

static void append(updater *u, work *w) {
    pthread_mutex_lock(&u->mutex);
    *u->last = w;
    u->last = &w->next;
    u->n_works++;
    pthread_cond_signal(&u->changed);
    pthread_mutex_unlock(&u->mutex);
}

bool updater_begin(updater *u, const client_id *client, request *r, wire_error *err) {
    assert(r->type == REQUEST_WEIGHTS);
    bool streamed = !r->weights.path.bytes;
    int n = count_works(u); /* only this thread adds some */
    if (streamed && n > 0)
        return overloaded(err, "another update is under way: send the stream when it is in use");
    if (n > UPDATER_MAX_PATHS) /* one of them is not waiting */
        return overloaded(err, "as many updates wait as may: try again when one of them is in use");
    update_stream *s = NULL;
    work *w = work_open(client);
    if (w && streamed) s = update_stream_open(r, u->silence_sec);
    if (!w || (streamed && !s)) {
        work_free(w, u->engine);
        return overloaded(err, "there was no memory for the update");
    }
    if (streamed) {
        update_stream_close(u->stream);
        u->stream = s;
    }
    w->update->request = r;
    w->stream = s;
    append(u, w);
    return true;
}

static bool no_stream(wire_error *err) {
    return wire_fail(err, WIRE_NOT_FOUND, "target", "no stream of weights with this id is open");
}

bool updater_chunk(updater *u, request *r, wire_error *err) {
    assert(r->type == REQUEST_WEIGHTS_CHUNK);
    bool taken = u->stream && update_stream_is(u->stream, r->chunk.target) && update_stream_put(u->stream, r);
    return taken || no_stream(err);
}

bool updater_commit(updater *u, const client_id *client, request *r, wire_error *err) {
    assert(r->type == REQUEST_WEIGHTS_COMMIT);
    if (!u->stream || !update_stream_is(u->stream, r->commit.target)) return no_stream(err);
    if (update_stream_commit(u->stream, client, r, err)) return true;
    return err->code ? false : no_stream(err);
}

bool updater_is_full(updater *u) { return is_full(u->stream); }
