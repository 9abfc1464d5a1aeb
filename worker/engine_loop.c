/* The engine's thread. */
#include "worker/engine_loop.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "worker/sample_copy.h"
#include "worker/updater.h"

bool client_equal(const client_id *a, const client_id *b) {
    return a->n == b->n && !memcmp(a->bytes, b->bytes, a->n);
}

static void free_counted(request *r, atomic_size_t *held_bytes) {
    if (r && held_bytes) atomic_fetch_sub(held_bytes, r->n_bytes);
    request_free(r);
}

void parcel_hold(parcel *p, atomic_size_t *held_bytes) {
    p->held_bytes = held_bytes;
    atomic_fetch_add(held_bytes, p->request->n_bytes);
}

void parcel_free(parcel *p) {
    if (!p) return;
    converted_rollout_free(&p->rollout);
    free_counted(p->request, p->held_bytes);
    update_free(p->update, NULL);
    mem_free(p);
}

void letter_free(letter *l) {
    if (!l) return;
    wire_buffer_free(&l->message, &worker_allocator);
    mem_free(l);
}

void wait_for_memory(void) { nanosleep(&(struct timespec){0, 10000000}, NULL); }

/* A rollout or score in flight. */
typedef struct flight {
    struct flight *next;
    engine_loop *loop;
    client_id client;
    request *request;
    atomic_size_t *held_bytes; /* as the parcel's */
    engine_job *job;
    converted_rollout rollout; /* its tokens are kept for prompts that came as text */
    reply_sample
        *held; /* [n_held] samples that wait for their prompt or the whole request; each owns its arrays */
    size_t n_held, cap_held;
    size_t held_sample_bytes;
    reply_score *scores; /* [n_sequences] each owns its arrays */
    double deadline;     /* of a rollout's timeout */
    bool started;        /* the service has been told */
    bool broken;         /* a reply could not be made: told as an error once the engine is not calling */
    bool too_much;       /* broken because too many samples wait to be sent together */
} flight;

struct engine_loop {
    engine *engine;
    const tokenizer *tokenizer;
    size_t keep_bytes, kept_bytes; /* of samples that wait: at most, and now */
    queue *requests, *replies;
    pthread_t thread;
    flight *flights;
    double start;
    bool stop;
};

/* ---- Replies. */

static reply_weights weights_of(const engine_loop *l) {
    const weights_label *w = engine_weights(l->engine);
    return (reply_weights){w->version, wire_text_of(w->digest)};
}

typedef enum post_flags { POST_MORE = 0, POST_LAST = 1, POST_STARTED = 2 } post_flags;

/* Send a message and take it; a message without bytes (nobody is to hear it) is not sent, but the flags still
 * tell the service thread that the request is over or started. */
static bool post(engine_loop *l, const client_id *client, wire_buffer *message, int flags) {
    letter *p = mem_zalloc(1, sizeof *p);
    if (!p) {
        /* The letter itself is what the service counts: wait for memory rather than lose it. */
        if (!(flags & POST_LAST)) {
            wire_buffer_free(message, &worker_allocator);
            return false;
        }
        while (!(p = mem_zalloc(1, sizeof *p))) wait_for_memory();
    }
    p->client = *client;
    p->message = *message;
    p->last = flags & POST_LAST;
    p->started = flags & POST_STARTED;
    *message = (wire_buffer){0};
    queue_item *item = &p->item;
    queue_put(l->replies, &item);
    return true;
}

/* An error, with which a request ends. */
static void post_error(engine_loop *l, const client_id *client, const request *r, int flags,
                       const wire_error *e) {
    wire_buffer message = {0};
    reply_head head = convert_head(r);
    while (!reply_encode_error(&message, &head, e)) wait_for_memory();
    post(l, client, &message, flags | POST_LAST);
}

/* ---- Flights. */

/* The last letter of a flight; it has to say that the flight has started if none has. */
static void post_end(flight *f, wire_buffer *message) {
    post(f->loop, &f->client, message, POST_LAST | (f->started ? 0 : POST_STARTED));
}

static void post_failure(flight *f, const wire_error *e) {
    post_error(f->loop, &f->client, f->request, f->started ? 0 : POST_STARTED, e);
}

static void post_cop_failure(flight *f, const cop_error *e) {
    wire_error w;
    convert_error(&w, e);
    post_failure(f, &w);
}

/* Tell that it no longer waits; without memory that is tried again after the next step. */
static void tell_started(flight *f) {
    wire_buffer nothing = {0};
    if (!f->started) f->started = post(f->loop, &f->client, &nothing, POST_STARTED);
}

static void flight_free(flight *f) {
    for (size_t i = 0; i < f->n_held; i++) sample_copy_free(&f->held[i]);
    mem_free(f->held);
    for (size_t i = 0; f->scores && i < f->request->score.n_sequences; i++) {
        mem_free((void *)f->scores[i].logprobs);
        mem_free((void *)f->scores[i].top_ids);
        mem_free((void *)f->scores[i].top_logprobs);
        mem_free((void *)f->scores[i].next_ids);
        mem_free((void *)f->scores[i].next_logprobs);
    }
    mem_free(f->scores);
    f->loop->kept_bytes -= f->held_sample_bytes;
    converted_rollout_free(&f->rollout);
    free_counted(f->request, f->held_bytes);
    mem_free(f);
}

/* Take it off the list and free it; its last letter has been posted. */
static void flight_end(flight *f) {
    flight **link = &f->loop->flights;
    while (*link != f) link = &(*link)->next;
    *link = f->next;
    flight_free(f);
}

/* The rollout with this id; the ids of other requests are only echoed. */
static flight *find_rollout(engine_loop *l, wire_text id) {
    for (flight *f = l->flights; f; f = f->next) {
        if (f->request->type == REQUEST_ROLLOUT && f->request->id.n == id.n &&
            !memcmp(f->request->id.bytes, id.bytes, id.n))
            return f;
    }
    return NULL;
}

/* ---- Samples. */

static bool own_sample(flight *f, const sample_result *s, reply_sample *out) {
    const request_prompt *p = &f->request->rollout.prompts[s->prompt];
    const token_list *prompt = &f->rollout.tokens[s->prompt];
    const tokenizer *text = f->request->rollout.text ? f->loop->tokenizer : NULL;
    if (!sample_copy(out, s, text)) return false;
    out->prompt_id = p->id;
    out->has_prompt_tokens = p->input.kind != REQUEST_INPUT_TOKENS;
    if (out->has_prompt_tokens) out->prompt_tokens = (wire_ids){(const uint32_t *)prompt->ids, prompt->n};
    return true;
}

static void post_samples(flight *f, const reply_sample *samples, size_t n) {
    wire_buffer *messages;
    size_t n_messages;
    reply_head head = convert_head(f->request);
    if (!reply_encode_samples(&messages, &n_messages, &head, samples, n)) {
        f->broken = true;
        return;
    }
    for (size_t i = 0; i < n_messages; i++) {
        if (!post(f->loop, &f->client, &messages[i], POST_MORE)) f->broken = true;
    }
    reply_messages_free(messages, n_messages, &worker_allocator);
}

/* A sample waits with others: false where those are too many. */
static bool keep_sample_bytes(flight *f, size_t n) {
    engine_loop *l = f->loop;
    f->too_much = l->kept_bytes + n > l->keep_bytes;
    if (f->too_much) return false;
    l->kept_bytes += n;
    f->held_sample_bytes += n;
    return true;
}

static void sent_bytes(flight *f, size_t n) {
    f->loop->kept_bytes -= n;
    f->held_sample_bytes -= n;
}

/* Samples that are complete now as `deliver` has it, taken from the held ones. */
static void deliver_prompt(flight *f, uint32_t prompt) {
    size_t n = 0, wanted = f->request->rollout.n;
    for (size_t i = 0; i < f->n_held; i++) n += f->held[i].prompt == prompt;
    if (n < wanted) return;
    reply_sample *all = mem_zalloc(n, sizeof *all);
    if (!all) {
        f->broken = true;
        return;
    }
    /* In order of index; with `sample` given there is one, of any index. */
    size_t kept = 0;
    for (size_t i = 0; i < f->n_held; i++) {
        if (f->held[i].prompt == prompt)
            all[wanted == 1 ? 0 : f->held[i].sample] = f->held[i];
        else
            f->held[kept++] = f->held[i];
    }
    f->n_held = kept;
    post_samples(f, all, n);
    for (size_t i = 0; i < n; i++) {
        sent_bytes(f, sample_copy_bytes(&all[i]));
        sample_copy_free(&all[i]);
    }
    mem_free(all);
}

static void on_sample(void *context, const sample_result *s) {
    flight *f = context;
    reply_sample owned;
    if (f->broken || !own_sample(f, s, &owned)) {
        f->broken = true;
        return;
    }
    if (f->request->rollout.deliver == REQUEST_DELIVER_SAMPLE) {
        post_samples(f, &owned, 1);
        sample_copy_free(&owned);
        return;
    }
    if (!mem_grow((void **)&f->held, &f->cap_held, f->n_held + 1, sizeof *f->held) ||
        !keep_sample_bytes(f, sample_copy_bytes(&owned))) {
        f->broken = true;
        sample_copy_free(&owned);
        return;
    }
    f->held[f->n_held++] = owned;
    if (f->request->rollout.deliver == REQUEST_DELIVER_PROMPT) deliver_prompt(f, s->prompt);
}

static int by_place(const void *a, const void *b) {
    const reply_sample *x = a, *y = b;
    if (x->prompt != y->prompt) return x->prompt < y->prompt ? -1 : 1;
    return x->sample < y->sample ? -1 : x->sample > y->sample;
}

static void post_broken(flight *f) {
    wire_error e;
    if (f->too_much) {
        wire_fail(
            &e, WIRE_TOO_LARGE, "deliver",
            "samples that wait to be sent together take more than the %zu bytes of --keep-bytes: ask for "
            "deliver \"sample\", or for fewer of them at once",
            f->loop->keep_bytes);
        post_failure(f, &e);
        return;
    }
    wire_fail(&e, WIRE_OVERLOADED, NULL,
              "there was no memory for the results: try again with fewer prompts or samples");
    e.retry_after = 1.0;
    post_failure(f, &e);
}

static void on_done(void *context, const rollout_totals *t) {
    flight *f = context;
    if (f->n_held > 0 && !f->broken) {
        qsort(f->held, f->n_held, sizeof *f->held, by_place);
        post_samples(f, f->held, f->n_held);
    }
    reply_done done = {t->samples,        t->prompt_tokens, t->cached_tokens,
                       t->sampled_tokens, t->forced_tokens, t->seconds};
    reply_head head = convert_head(f->request);
    wire_buffer message = {0};
    if (f->broken || !reply_encode_done(&message, &head, &done))
        post_broken(f);
    else
        post_end(f, &message);
    flight_end(f);
}

static void on_failed(void *context, const cop_error *e) {
    flight *f = context;
    post_cop_failure(f, e);
    flight_end(f);
}

/* ---- Scores. */

static void on_scored(void *context, size_t sequence, const score_result *s) {
    flight *f = context;
    reply_score *to = &f->scores[sequence];
    bool ok = true;
    to->n = s->n;
    to->logprobs = copy_items(s->logprobs, s->n, sizeof(float), &ok);
    if (s->top > 0) {
        size_t top = (size_t)s->top;
        to->top_ids = copy_items(s->top_ids, s->n * top, sizeof(uint32_t), &ok);
        to->top_logprobs = copy_items(s->top_logprobs, s->n * top, sizeof(float), &ok);
        to->next_ids = copy_items(s->next_ids, top, sizeof(uint32_t), &ok);
        to->next_logprobs = copy_items(s->next_logprobs, top, sizeof(float), &ok);
    }
    if (!ok) f->broken = true;
}

static void on_scores_done(void *context, const weights_label *w) {
    flight *f = context;
    const request_score *r = &f->request->score;
    int vocab = engine_arch(f->loop->engine)->vocab;
    reply_scores scores = {.scores = f->scores,
                           .n_scores = r->n_sequences,
                           .top = r->top < (uint32_t)vocab ? r->top : (uint32_t)vocab,
                           .weights = {w->version, wire_text_of(w->digest)},
                           .numerics = wire_text_of(engine_numerics(f->loop->engine))};
    reply_head head = convert_head(f->request);
    wire_buffer message = {0};
    for (size_t i = 0; i < r->n_sequences; i++) {
        if (f->scores[i].logprobs || f->broken) continue;
        wire_error e; /* it was cancelled */
        wire_fail(&e, WIRE_NOT_FOUND, NULL, "the score was cancelled before it was complete");
        post_failure(f, &e);
        flight_end(f);
        return;
    }
    if (f->broken || !reply_encode_scores(&message, &head, &scores))
        post_broken(f);
    else
        post_end(f, &message);
    flight_end(f);
}

/* ---- Requests. */

/* Takes what the parcel holds.  NULL without memory, which the client has then been told. */
static flight *flight_open(engine_loop *l, parcel *p) {
    flight *f = mem_zalloc(1, sizeof *f);
    if (!f) {
        wire_error e;
        wire_fail(&e, WIRE_OVERLOADED, NULL, "there was no memory for the request");
        e.retry_after = 1.0;
        post_error(l, &p->client, p->request, POST_STARTED, &e);
        return NULL;
    }
    f->loop = l;
    f->client = p->client;
    f->request = p->request;
    f->held_bytes = p->held_bytes;
    f->rollout = p->rollout;
    f->deadline = p->deadline;
    p->request = NULL;
    p->rollout = (converted_rollout){0};
    f->next = l->flights;
    l->flights = f;
    return f;
}

static bool post_accepted(flight *f, uint64_t seed) {
    const request_rollout *r = &f->request->rollout;
    reply_accepted accepted = {.samples = (uint64_t)r->n_prompts * r->n,
                               .seed = seed,
                               .weights = weights_of(f->loop),
                               .numerics = wire_text_of(engine_numerics(f->loop->engine))};
    reply_head head = convert_head(f->request);
    wire_buffer message = {0};
    return reply_encode_accepted(&message, &head, &accepted) &&
           post(f->loop, &f->client, &message, POST_MORE);
}

/* The engine knows prompts by their tokens: name the key that the client sent instead. */
static void name_as_sent(const request_rollout *r, cop_error *err) {
    size_t i;
    int n = 0;
    if (sscanf(err->key, "prompts[%zu].tokens%n", &i, &n) != 1 || n == 0 || err->key[n]) return;
    request_input_kind kind = r->prompts[i].input.kind;
    if (kind != REQUEST_INPUT_TOKENS)
        snprintf(err->key, sizeof err->key, "prompts[%zu].%s", i,
                 kind == REQUEST_INPUT_TEXT ? "text" : "messages");
}

static cop_status submit_rollout(flight *f, cop_error *err) {
    engine_loop *l = f->loop;
    const request_rollout *r = &f->request->rollout;
    if (r->text && !l->tokenizer) {
        cop_fail(err, COP_EUNSUPPORTED, "the model has no tokenizer to decode text with");
        snprintf(err->key, sizeof err->key, "text");
        return COP_EUNSUPPORTED;
    }
    f->rollout.spec.events = (rollout_events){f, on_sample, on_done, on_failed};
    cop_status status = engine_submit(l->engine, &f->rollout.spec, &f->job, err);
    if (status != COP_OK) name_as_sent(r, err);
    return status;
}

static void start_rollout(engine_loop *l, parcel *p) {
    const request *r = p->request;
    if (find_rollout(l, r->id)) {
        wire_error e;
        wire_fail(&e, WIRE_DUPLICATE_ID, "id",
                  "a rollout with this id is in flight: use another id, such as a UUID");
        post_error(l, &p->client, r, POST_STARTED, &e);
        return;
    }
    cop_error err = {0};
    flight *f = flight_open(l, p);
    if (!f) return;
    if (submit_rollout(f, &err) != COP_OK) {
        post_cop_failure(f, &err);
        flight_end(f);
    } else if (!post_accepted(f, p->seed)) {
        f->broken = true;
    }
}

/* What a score is to tell must fit, all of it at once. */
static cop_status check_score_bytes(const flight *f, cop_error *err) {
    const request_score *r = &f->request->score;
    size_t n = 0, per_token = sizeof(float) + r->top * (sizeof(uint32_t) + sizeof(float));
    for (size_t i = 0; i < r->n_sequences; i++) n += r->sequences[i].n;
    if (n <= f->loop->keep_bytes / per_token) return COP_OK;
    cop_fail(
        err, COP_ETOOLARGE,
        "the scores of %zu tokens take %zu bytes each, and together more than the %zu of --keep-bytes: send "
        "fewer sequences at once, or ask for a smaller top",
        n, per_token, f->loop->keep_bytes);
    if (err) snprintf(err->key, sizeof err->key, "sequences");
    return COP_ETOOLARGE;
}

static cop_status submit_score(flight *f, cop_error *err) {
    engine_loop *l = f->loop;
    const request_score *r = &f->request->score;
    cop_status fits = check_score_bytes(f, err);
    if (fits != COP_OK) return fits;
    int32_t **sequences = mem_zalloc(r->n_sequences, sizeof *sequences);
    size_t *lengths = mem_alloc(r->n_sequences, sizeof *lengths);
    f->scores = mem_zalloc(r->n_sequences, sizeof *f->scores);
    cop_status status = COP_OK;
    if (!sequences || !lengths || !f->scores)
        status = cop_fail(err, COP_ENOMEM, "could not allocate %zu sequences", r->n_sequences);
    for (size_t i = 0; i < r->n_sequences && status == COP_OK; i++) {
        char key[64];
        snprintf(key, sizeof key, "sequences[%zu]", i);
        lengths[i] = r->sequences[i].n;
        status = convert_ids(&sequences[i], r->sequences[i], engine_arch(l->engine)->vocab, key, err);
    }
    if (status == COP_OK) {
        score_spec spec = {.sequences = (const int32_t *const *)sequences,
                           .lengths = lengths,
                           .n_sequences = r->n_sequences,
                           .top = (int)r->top,
                           .temperature = r->temperature,
                           .context = f,
                           .scored = on_scored,
                           .done = on_scores_done,
                           .failed = on_failed};
        status = engine_submit_score(l->engine, &spec, &f->job, err);
    }
    for (size_t i = 0; sequences && i < r->n_sequences; i++) mem_free(sequences[i]);
    mem_free(sequences);
    mem_free(lengths);
    return status;
}

static void start_score(engine_loop *l, parcel *p) {
    cop_error err = {0};
    flight *f = flight_open(l, p);
    if (f && submit_score(f, &err) != COP_OK) {
        post_cop_failure(f, &err);
        flight_end(f);
    }
}

static void cancel_target(engine_loop *l, parcel *p) {
    const request *r = p->request;
    flight *target = find_rollout(l, r->cancel.target);
    if (!target) {
        wire_error e;
        wire_fail(&e, WIRE_NOT_FOUND, "target", "no rollout with this id is in flight");
        post_error(l, &p->client, r, 0, &e);
        return;
    }
    engine_cancel(l->engine, target->job); /* tells its samples and its end, and frees the flight */
    reply_head head = convert_head(r);
    wire_buffer message = {0};
    while (!reply_encode_done(&message, &head, NULL)) wait_for_memory();
    post(l, &p->client, &message, POST_LAST);
}

static void tell_status(engine_loop *l, parcel *p) {
    engine_status s;
    engine_read_status(l->engine, &s);
    reply_status status = {.rows = s.rows,
                           .queued = s.queued,
                           .pages_total = s.pages_total,
                           .pages_used = s.pages_used,
                           .pages_cached = s.pages_cached,
                           .pages_free = s.pages_free,
                           .pages_shared = s.pages_shared,
                           .weights = weights_of(l),
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
    post(l, &p->client, &message, POST_LAST);
}

/* The client's flights end without a word to it; the service still counts their ends. */
static void drop_client(engine_loop *l, const client_id *client) {
    for (flight *f = l->flights, *next; f; f = next) {
        next = f->next;
        if (!client_equal(&f->client, client)) continue;
        engine_abandon(l->engine, f->job);
        wire_buffer nothing = {0};
        post_end(f, &nothing);
        flight_end(f);
    }
}

/* A parked client's requests leave the line of those that wait, so that it is not full of them for others. */
static void park_client(engine_loop *l, const client_id *client, bool parked) {
    for (flight *f = l->flights; f; f = f->next) {
        if (!client_equal(&f->client, client)) continue;
        engine_park(l->engine, f->job, parked);
        tell_started(f);
    }
}

static void cancel_all(engine_loop *l) {
    while (l->flights) engine_cancel(l->engine, l->flights->job);
}

static void handle(engine_loop *l, parcel *p) {
    switch (p->kind) {
    case PARCEL_GONE: drop_client(l, &p->client); break;
    case PARCEL_PARK:
    case PARCEL_UNPARK: park_client(l, &p->client, p->kind == PARCEL_PARK); break;
    case PARCEL_CANCEL: cancel_all(l); break;
    case PARCEL_UPDATE: break;
    case PARCEL_STOP: l->stop = true; break;
    case PARCEL_REQUEST:
        switch (p->request->type) {
        case REQUEST_ROLLOUT: start_rollout(l, p); break;
        case REQUEST_SCORE: start_score(l, p); break;
        case REQUEST_CANCEL: cancel_target(l, p); break;
        case REQUEST_STATUS: tell_status(l, p); break;
        default: assert(!"the service answers the others itself");
        }
    }
    parcel_free(p);
}

/* Rollouts whose results could not be told end with an error. */
static void end_broken(engine_loop *l) {
    for (flight *f = l->flights, *next; f; f = next) {
        next = f->next;
        if (!f->broken) continue;
        engine_abandon(l->engine, f->job);
        post_broken(f);
        flight_end(f);
    }
}

static flight *first_due(const engine_loop *l) {
    flight *first = NULL;
    for (flight *f = l->flights; f; f = f->next) {
        if (!first || f->deadline < first->deadline) first = f;
    }
    return first;
}

/* Cancel the rollouts whose time is over. */
static void end_late(engine_loop *l) {
    for (flight *f; (f = first_due(l)) && f->deadline <= clock_seconds();) engine_cancel(l->engine, f->job);
}

static void tell_all_started(engine_loop *l) {
    for (flight *f = l->flights; f; f = f->next) {
        if (!f->started && engine_job_started(f->job)) tell_started(f);
    }
}

static void *run(void *arg) {
    engine_loop *l = arg;
    cpu_flush_denormals();
    for (bool busy = false; !l->stop;) {
        const flight *due = first_due(l);
        parcel *p = (parcel *)(busy ? queue_take(l->requests)
                                    : queue_wait_until(l->requests, due ? due->deadline : INFINITY));
        for (; p; p = (parcel *)queue_take(l->requests)) handle(l, p);
        end_late(l);
        busy = engine_step(l->engine);
        end_broken(l);
        tell_all_started(l);
    }
    return NULL;
}

cop_status engine_loop_open(engine_loop **out, engine *e, const tokenizer *t, size_t keep_bytes,
                            queue *requests, queue *replies, cop_error *err) {
    *out = NULL;
    engine_loop *l = mem_zalloc(1, sizeof *l);
    if (!l) return cop_fail(err, COP_ENOMEM, "could not allocate the engine's thread");
    *l = (engine_loop){.engine = e,
                       .tokenizer = t,
                       .keep_bytes = keep_bytes,
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
