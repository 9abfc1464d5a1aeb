/* Flights and their letters. */
#include "worker/flight.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "worker/sample_copy.h"

/* A rollout or score in flight. */
struct flight {
    flight *before, *behind; /* in order of arrival */
    flights *all;
    struct ticket *ticket;
    const request *request;    /* borrowed until the last letter is posted */
    engine_job *job;           /* NULL: it is held */
    converted_rollout rollout; /* its tokens are kept for prompts that came as text */
    reply_sample *held; /* [n_held] they wait for their prompt or the whole request; each owns its arrays */
    size_t n_held, cap_held;
    size_t held_sample_bytes;
    reply_score *scores; /* [n_scores] each owns its arrays */
    size_t n_scores;
    uint64_t seed;
    double deadline, weights_deadline; /* as the parcel's */
    bool started;                      /* the service has been told */
    bool parked;
    bool broken;   /* a reply could not be made: told as an error once the engine is not calling */
    bool too_much; /* broken because too many samples wait to be sent together */
};

/* ---- Letters. */

static reply_weights weights_of(const flights *fs) {
    const weights_label *w = engine_weights(fs->engine);
    return (reply_weights){w->version, wire_text_of(w->digest)};
}

/* One that more will follow. */
static bool post_more(flight *f, wire_buffer *message) {
    return post_letter(f->all->replies, &(letter){.ticket = f->ticket}, message);
}

/* The last letter of a flight; it has to say that the flight has started if none has. */
static letter last_letter(const flight *f, bool failed) {
    return (letter){.ticket = f->ticket, .last = true, .started = !f->started, .failed = failed};
}

static void post_end(flight *f, wire_buffer *message) {
    letter last = last_letter(f, false);
    post_letter(f->all->replies, &last, message);
}

static void post_failure(flight *f, const wire_error *e) {
    letter last = last_letter(f, true);
    post_error(f->all->replies, &last, f->request, e);
}

static void post_cop_failure(flight *f, const cop_error *e) {
    wire_error w;
    convert_error(&w, e);
    post_failure(f, &w);
}

/* Tell that it no longer waits; without memory that is tried again after the next step. */
static void tell_started(flight *f) {
    wire_buffer nothing = {0};
    if (!f->started)
        f->started = post_letter(f->all->replies, &(letter){.ticket = f->ticket, .started = true}, &nothing);
}

/* ---- Life. */

/* The request may be gone. */
static void flight_free(flight *f) {
    for (size_t i = 0; i < f->n_held; i++) sample_copy_free(&f->held[i]);
    mem_free(f->held);
    for (size_t i = 0; i < f->n_scores; i++) {
        mem_free((void *)f->scores[i].logprobs);
        mem_free((void *)f->scores[i].top_ids);
        mem_free((void *)f->scores[i].top_logprobs);
        mem_free((void *)f->scores[i].next_ids);
        mem_free((void *)f->scores[i].next_logprobs);
    }
    mem_free(f->scores);
    f->all->kept_bytes -= f->held_sample_bytes;
    converted_rollout_free(&f->rollout);
    mem_free(f);
}

/* Take it off the list and free it; its last letter has been posted. */
static void flight_end(flight *f) {
    *(f->before ? &f->before->behind : &f->all->first) = f->behind;
    *(f->behind ? &f->behind->before : &f->all->last) = f->before;
    flight_free(f);
}

/* ---- Samples. */

static bool own_sample(flight *f, const sample_result *s, reply_sample *out) {
    const request_prompt *p = &f->request->rollout.prompts[s->prompt];
    const token_list *prompt = &f->rollout.tokens[s->prompt];
    const tokenizer *text = f->request->rollout.text ? f->all->tokenizer : NULL;
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
        if (!post_more(f, &messages[i])) f->broken = true;
    }
    reply_messages_free(messages, n_messages, &worker_allocator);
}

/* A sample waits with others: false where those are too many. */
static bool keep_sample_bytes(flight *f, size_t n) {
    flights *fs = f->all;
    f->too_much = fs->kept_bytes + n > fs->keep_bytes;
    if (f->too_much) return false;
    fs->kept_bytes += n;
    f->held_sample_bytes += n;
    return true;
}

static void sent_bytes(flight *f, size_t n) {
    f->all->kept_bytes -= n;
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
            f->all->keep_bytes);
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
    int vocab = engine_arch(f->all->engine)->vocab;
    reply_scores scores = {.scores = f->scores,
                           .n_scores = r->n_sequences,
                           .top = r->top < (uint32_t)vocab ? r->top : (uint32_t)vocab,
                           .weights = {w->version, wire_text_of(w->digest)},
                           .numerics = wire_text_of(engine_numerics(f->all->engine))};
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

/* ---- Submitting. */

/* Takes the rollout of the parcel.  NULL without memory, which the client has then been told. */
static flight *flight_open(flights *fs, parcel *p) {
    flight *f = mem_zalloc(1, sizeof *f);
    if (!f) {
        wire_error e;
        wire_fail(&e, WIRE_OVERLOADED, NULL, "there was no memory for the request");
        e.retry_after = 1.0;
        post_error(fs->replies, &(letter){.ticket = p->ticket, .started = true, .failed = true}, p->request,
                   &e);
        return NULL;
    }
    *f = (flight){.all = fs,
                  .ticket = p->ticket,
                  .request = p->request,
                  .rollout = p->rollout,
                  .seed = p->seed,
                  .deadline = p->deadline,
                  .weights_deadline = p->weights_deadline,
                  .before = fs->last};
    p->rollout = (converted_rollout){0};
    *(fs->last ? &fs->last->behind : &fs->first) = f;
    fs->last = f;
    return f;
}

static bool post_accepted(flight *f) {
    const request_rollout *r = &f->request->rollout;
    reply_accepted accepted = {.samples = (uint64_t)r->n_prompts * r->n,
                               .seed = f->seed,
                               .weights = weights_of(f->all),
                               .numerics = wire_text_of(engine_numerics(f->all->engine))};
    reply_head head = convert_head(f->request);
    wire_buffer message = {0};
    return reply_encode_accepted(&message, &head, &accepted) && post_more(f, &message);
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
    flights *fs = f->all;
    const request_rollout *r = &f->request->rollout;
    if (r->text && !fs->tokenizer) {
        cop_fail(err, COP_EUNSUPPORTED, "the model has no tokenizer to decode text with");
        snprintf(err->key, sizeof err->key, "text");
        return COP_EUNSUPPORTED;
    }
    f->rollout.spec.events = (rollout_events){f, on_sample, on_done, on_failed};
    cop_status status = engine_submit(fs->engine, &f->rollout.spec, &f->job, err);
    if (status != COP_OK) name_as_sent(r, err);
    return status;
}

/* What a score is to tell must fit, all of it at once. */
static cop_status check_score_bytes(const flight *f, cop_error *err) {
    const request_score *r = &f->request->score;
    size_t n = 0, per_token = sizeof(float) + r->top * (sizeof(uint32_t) + sizeof(float));
    for (size_t i = 0; i < r->n_sequences; i++) n += r->sequences[i].n;
    if (n <= f->all->keep_bytes / per_token) return COP_OK;
    cop_fail(
        err, COP_ETOOLARGE,
        "the scores of %zu tokens take %zu bytes each, and together more than the %zu of --keep-bytes: send "
        "fewer sequences at once, or ask for a smaller top",
        n, per_token, f->all->keep_bytes);
    if (err) snprintf(err->key, sizeof err->key, "sequences");
    return COP_ETOOLARGE;
}

static cop_status submit_score(flight *f, cop_error *err) {
    flights *fs = f->all;
    const request_score *r = &f->request->score;
    cop_status fits = check_score_bytes(f, err);
    if (fits != COP_OK) return fits;
    int32_t **sequences = mem_zalloc(r->n_sequences, sizeof *sequences);
    size_t *lengths = mem_alloc(r->n_sequences, sizeof *lengths);
    f->scores = mem_zalloc(r->n_sequences, sizeof *f->scores);
    f->n_scores = f->scores ? r->n_sequences : 0;
    cop_status status = COP_OK;
    if (!sequences || !lengths || !f->scores)
        status = cop_fail(err, COP_ENOMEM, "could not allocate %zu sequences", r->n_sequences);
    for (size_t i = 0; i < r->n_sequences && status == COP_OK; i++) {
        char key[64];
        snprintf(key, sizeof key, "sequences[%zu]", i);
        lengths[i] = r->sequences[i].n;
        status = convert_ids(&sequences[i], r->sequences[i], engine_arch(fs->engine)->vocab, key, err);
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
        status = engine_submit_score(fs->engine, &spec, &f->job, err);
    }
    for (size_t i = 0; sequences && i < r->n_sequences; i++) mem_free(sequences[i]);
    mem_free(sequences);
    mem_free(lengths);
    return status;
}

/* Give it to the engine.  If that fails, the flight is over. */
static bool flight_submit(flight *f) {
    cop_error err = {0};
    bool rollout = f->request->type == REQUEST_ROLLOUT;
    if ((rollout ? submit_rollout(f, &err) : submit_score(f, &err)) != COP_OK) {
        post_cop_failure(f, &err);
        flight_end(f);
        return false;
    }
    if (f->parked) engine_park(f->all->engine, f->job, true);
    if (rollout && !post_accepted(f)) f->broken = true;
    return true;
}

/* Whether weights as new as it wants are in use. */
static bool may_start(const flight *f) {
    return f->request->type != REQUEST_ROLLOUT ||
           f->request->rollout.min_weights <= engine_weights(f->all->engine)->version;
}

void flights_begin(flights *fs, parcel *p) {
    flight *f = flight_open(fs, p);
    p->request = NULL; /* the last letter may be on its way */
    if (f && may_start(f)) flight_submit(f);
}

void flights_release(flights *fs) {
    for (flight *f = fs->first, *behind; f; f = behind) {
        behind = f->behind;
        if (!f->job && may_start(f)) flight_submit(f);
    }
}

/* ---- Ending. */

static flight *find(const flights *fs, const struct ticket *t) {
    flight *f = fs->first;
    while (f && f->ticket != t) f = f->behind;
    return f;
}

/* One that is held is told like one that nothing has been drawn of. */
static void flight_cancel(flight *f) {
    if (!f->job && !flight_submit(f)) return;
    engine_cancel(f->all->engine, f->job);
}

void flights_cancel(flights *fs, const struct ticket *t) {
    flight *f = find(fs, t);
    if (f) flight_cancel(f);
}

void flights_cancel_all(flights *fs) {
    while (fs->first) flight_cancel(fs->first);
}

/* Parked, it leaves the line of those that wait, so that it is not full of them for others. */
void flights_park(flights *fs, const struct ticket *t, bool parked) {
    flight *f = find(fs, t);
    if (!f) return;
    f->parked = parked;
    if (f->job) engine_park(fs->engine, f->job, parked);
    tell_started(f);
}

static double next_deadline(const flight *f) {
    return f->job ? f->deadline : fmin(f->deadline, f->weights_deadline);
}

static flight *first_due(const flights *fs) {
    flight *first = NULL;
    for (flight *f = fs->first; f; f = f->behind) {
        if (!first || next_deadline(f) < next_deadline(first)) first = f;
    }
    return first;
}

double flights_next_deadline(const flights *fs) {
    const flight *f = first_due(fs);
    return f ? next_deadline(f) : INFINITY;
}

static void fail_held(flight *f) {
    wire_error e;
    wire_fail(&e, WIRE_TIMEOUT, "min_weights",
              "weights of version %llu have not come into use within %g seconds (weights_timeout): version "
              "%llu is in use",
              (unsigned long long)f->request->rollout.min_weights, f->request->rollout.weights_timeout,
              (unsigned long long)engine_weights(f->all->engine)->version);
    post_failure(f, &e);
    flight_end(f);
}

void flights_end_late(flights *fs, double now) {
    for (flight *f; (f = first_due(fs)) && next_deadline(f) <= now;) {
        if (f->deadline <= now)
            flight_cancel(f);
        else
            fail_held(f);
    }
}

void flights_sweep(flights *fs) {
    for (flight *f = fs->first, *behind; f; f = behind) {
        behind = f->behind;
        if (f->broken) {
            engine_abandon(fs->engine, f->job);
            post_broken(f);
            flight_end(f);
        } else if (!f->started && f->job && engine_job_started(f->job)) {
            tell_started(f);
        }
    }
}
