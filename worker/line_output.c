/* Writing lines in order. */
#include "worker/line_output.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "worker/convert.h"
#include "worker/held_records.h"
#include "worker/jsonl.h"
#include "worker/record_json.h"
#include "worker/sample_copy.h"

#define FLUSH_SECONDS 10.0 /* what is finished is in a file after that */
#define TICK_SECONDS 0.1
#define MOST_ASKED_BYTES ((size_t)32 << 20) /* of JSON that the reward program has not read yet */
#define SILENCE_SECONDS 60.0                /* of a reward program, until that is told */
#define PROGRAM_END_SECONDS 5.0             /* that a reward program has to end after its last answer */

/* A record as it will be written, waiting for older lines. */
typedef struct sealed {
    uint64_t line, order;
    wire_buffer record;
    dataset_counts counts;
    double *rewards; /* [n_rewards] NULL: none */
    size_t n_rewards;
    size_t n_bytes; /* of run_state.held_bytes */
    uint64_t n_lines;
    char digest[INPUT_DIGEST_CHARS];
} sealed;

/* A line whose samples wait for their rewards. */
typedef struct judged {
    struct judged *next;
    line_job *job;
    double *rewards; /* [job->n] */
    uint32_t n_rewards;
} judged;

struct line_output {
    line_output_options o;
    queue *finished;
    run_state *run;
    pthread_t thread;
    bool ended; /* the last job came */
    uint64_t n_lines_end;
    char digest_end[INPUT_DIGEST_CHARS];
    judged *first, *newest; /* in order of arrival */
    judged *unasked;        /* the first of them that the program has not been asked for */
    double silent_since;    /* the oldest of them got its last answer, or was asked */
    /* Sealed lines by order: place order % n_places, which grows so that each has its own. */
    sealed **places;
    size_t n_places, n_sealed;
    uint64_t next_order;
    uint64_t n_lines_noted;
    bool has_snapshot;                     /* there may be a file of held records */
    size_t n_new;                          /* lines sealed since it was written */
    size_t n_restored;                     /* of o.n_held */
    double unflushed_since, snapshot_next; /* when it may be written next */
    reward_tally *tally;
    dataset_counts before, counts; /* of the output: at the start, and now */
    progress *progress;
    bool suspect; /* rewards that were taken belong to other samples */
    cop_error rest;
    bool output_failed; /* nothing more can be written */
    bool complete;
    atomic_bool thread_ended;
};

/* ---- Rewards. */

void reward_tally_add(reward_tally *t, const double *rewards, size_t n) {
    double best = -INFINITY;
    for (size_t i = 0; i < n; i++) {
        if (isnan(rewards[i])) continue;
        t->n_rewards++;
        t->sum += rewards[i];
        if (rewards[i] > best) best = rewards[i];
    }
    if (best == -INFINITY) return;
    t->n_prompts++;
    t->sum_best += best;
    pass_add(&t->pass, rewards, n);
}

bool record_rewards(double **out, size_t *n, const shard_view *record) {
    const msgpack_object_array *a = &record->rewards->via.array;
    *n = a->size;
    *out = mem_alloc(*n, sizeof **out);
    for (size_t i = 0; *out && i < *n; i++)
        (*out)[i] = a->ptr[i].type == MSGPACK_OBJECT_FLOAT64 ? a->ptr[i].via.f64 : NAN;
    return *out != NULL;
}

static cop_status judge_answers(line_output *w, judged *j, cop_error *err) {
    for (; j->n_rewards < j->job->n; j->n_rewards++) {
        const reply_sample *s = &j->job->samples[j->n_rewards];
        char *answer;
        COP_TRY(
            answer_of_sample(&answer, w->o.tokenizer, (const int32_t *)s->tokens, s->mask, s->n_tokens, err),
            err, "judge a sample");
        j->rewards[j->n_rewards] = answer_reward(answer, j->job->answer);
        mem_free(answer);
    }
    return COP_OK;
}

/* keeps[i]: sample i is among the best; of equal ones the first are. */
static void choose_best(bool *keeps, const double *rewards, uint32_t n, uint32_t keep) {
    memset(keeps, 0, n * sizeof *keeps);
    for (uint32_t k = 0; k < keep && k < n; k++) {
        uint32_t best = n;
        for (uint32_t i = 0; i < n; i++) {
            if (keeps[i]) continue;
            bool better =
                best == n || rewards[i] > rewards[best] || (isnan(rewards[best]) && !isnan(rewards[i]));
            if (better) best = i;
        }
        keeps[best] = true;
    }
}

/* ---- Sealing. */

static void drop_text(line_job *j) {
    for (uint32_t i = 0; j->samples && i < j->n; i++) {
        mem_free((void *)j->samples[i].text.bytes);
        j->samples[i].text = (wire_text){0};
    }
}

static void sealed_free(sealed *s) {
    if (!s) return;
    wire_buffer_free(&s->record, &worker_allocator);
    mem_free(s->rewards);
    mem_free(s);
}

static bool grow_places(line_output *w, uint64_t order) {
    size_t n = w->n_places ? w->n_places : 64;
    while (order - w->next_order >= n) n *= 2;
    if (n == w->n_places) return true;
    sealed **places = mem_zalloc(n, sizeof *places);
    if (!places) return false;
    for (size_t i = 0; i < w->n_places; i++) {
        if (w->places[i]) places[w->places[i]->order % n] = w->places[i];
    }
    mem_free(w->places);
    w->places = places;
    w->n_places = n;
    return true;
}

/* Takes the line. */
static cop_status put_in_order(line_output *w, sealed *s, cop_error *err) {
    if (!grow_places(w, s->order)) {
        sealed_free(s);
        return cop_fail(err, COP_ENOMEM, "could not keep a line until its turn");
    }
    w->places[s->order % w->n_places] = s;
    w->n_sealed++;
    w->n_new++;
    return COP_OK;
}

/* What an encoded record holds that the tally wants. */
static cop_status read_sealed(sealed *s, cop_error *err) {
    shard_view v;
    wire_error why;
    if (!shard_read(&v, s->record.bytes, s->record.n, &why))
        return cop_fail(err, COP_ENOMEM, "could not read a record: %s", why.message);
    s->counts = dataset_counts_of(&v);
    cop_status status = COP_OK;
    if (v.rewards && !record_rewards(&s->rewards, &s->n_rewards, &v))
        status = cop_fail(err, COP_ENOMEM, "could not keep the rewards of a line");
    shard_view_free(&v);
    return status;
}

/* The record of a job, with the samples that are kept. */
static cop_status encode_job(line_output *w, line_job *j, const double *rewards, wire_buffer *out,
                             cop_error *err) {
    bool *keeps = NULL;
    if (!w->o.text) drop_text(j);
    if (rewards && w->o.keep > 0) {
        keeps = mem_alloc(j->n, sizeof *keeps);
        if (!keeps)
            return cop_fail(err, COP_ENOMEM, "could not choose the best of %u samples", (unsigned)j->n);
        choose_best(keeps, rewards, j->n, w->o.keep);
    }
    bool ok = line_job_encode(out, j, keeps, rewards);
    mem_free(keeps);
    return ok ? COP_OK : cop_fail(err, COP_ENOMEM, "could not encode a record");
}

/* A record that no reader takes becomes one that says so. */
static cop_status shorten(line_job *j, wire_buffer *record, cop_error *err) {
    if (record->n <= DATASET_MAX_RECORD) return COP_OK;
    cop_fail(&j->error, COP_ETOOLARGE, "the samples of this line take %zu bytes, %zu is most: ask for fewer",
             record->n, DATASET_MAX_RECORD);
    wire_buffer_free(record, &worker_allocator);
    return line_job_encode(record, j, NULL, NULL) ? COP_OK
                                                  : cop_fail(err, COP_ENOMEM, "could not encode a record");
}

/* Takes the job, of which the record is all that stays. */
static cop_status seal(line_output *w, line_job *j, const double *rewards, cop_error *err) {
    sealed *s = mem_zalloc(1, sizeof *s);
    cop_status status = s ? COP_OK : cop_fail(err, COP_ENOMEM, "could not keep a line");
    if (s) {
        *s = (sealed){.line = j->line, .order = j->order, .n_bytes = j->n_bytes, .n_lines = j->n_lines};
        memcpy(s->digest, j->digest, sizeof s->digest);
        s->record = j->record;
        j->record = (wire_buffer){0};
        w->n_restored += s->record.n > 0;
    }
    if (status == COP_OK && s->record.n == 0) status = encode_job(w, j, rewards, &s->record, err);
    if (status == COP_OK && w->o.dataset) status = shorten(j, &s->record, err);
    if (status == COP_OK) status = read_sealed(s, err);
    line_job_free(j);
    if (status == COP_OK) return put_in_order(w, s, err);
    sealed_free(s);
    return status;
}

/* ---- Judging, in order of arrival. */

static void judged_free(judged *j) {
    line_job_free(j->job);
    mem_free(j->rewards);
    mem_free(j);
}

/* A record as JSON objects, one per sample. */
static cop_status objects_of(json_t **out, const wire_buffer *record, cop_error *err) {
    wire_error why;
    shard_view view;
    *out = NULL;
    if (!shard_read(&view, record->bytes, record->n, &why))
        return cop_fail(err, COP_ENOMEM, "could not read a record: %s", why.message);
    cop_status status = record_to_json(out, &view, err);
    shard_view_free(&view);
    return status;
}

static cop_status ask_program(line_output *w, const judged *j, cop_error *err) {
    json_t *objects, *sample;
    size_t i;
    wire_buffer record;
    if (!line_job_encode(&record, j->job, NULL, NULL))
        return cop_fail(err, COP_ENOMEM, "could not encode samples for the reward program");
    cop_status status = objects_of(&objects, &record, err);
    wire_buffer_free(&record, &worker_allocator);
    json_array_foreach(objects, i, sample) {
        if (status == COP_OK) status = reward_ask(w->o.program, sample, err);
    }
    json_decref(objects);
    return status;
}

/* Takes the job. */
static cop_status begin_judging(line_output *w, line_job *job, cop_error *err) {
    judged *j = mem_zalloc(1, sizeof *j);
    if (!j) {
        line_job_free(job);
        return cop_fail(err, COP_ENOMEM, "could not judge a line");
    }
    j->job = job;
    if (!w->first) w->silent_since = clock_seconds();
    if (w->newest)
        w->newest->next = j;
    else
        w->first = j;
    w->newest = j;
    if (!w->unasked) w->unasked = j;
    j->rewards = mem_alloc(job->n, sizeof *j->rewards);
    if (!j->rewards) return cop_fail(err, COP_ENOMEM, "could not judge %u samples", (unsigned)job->n);
    return w->o.program ? COP_OK : judge_answers(w, j, err);
}

/* Ask for as many lines as the program has room for: as JSON they take much more memory than here. */
static cop_status ask_lines(line_output *w, cop_error *err) {
    cop_status status = COP_OK;
    for (; w->o.program && w->unasked && status == COP_OK; w->unasked = w->unasked->next) {
        if (reward_waiting_bytes(w->o.program) > MOST_ASKED_BYTES) break;
        status = ask_program(w, w->unasked, err);
        if (status != COP_OK) break;
    }
    return status;
}

/* A reward too many tells that rewards belong to other samples than it seemed: nothing more is written, and
 * the data set says for good that what is there cannot be trusted. */
static void mark_suspect(line_output *w, const cop_error *why) {
    cop_error ignored;
    w->suspect = w->output_failed = true;
    if (!w->o.dataset) return;
    dataset_note(w->o.dataset, "suspect_rewards", json_string(why->message));
    dataset_flush(w->o.dataset, &ignored);
}

/* Take answers for the oldest line.  True: it has all. */
static bool take_rewards(line_output *w, judged *j, double until, cop_status *status, cop_error *err) {
    while (j->n_rewards < j->job->n) {
        bool has;
        *status = reward_take(w->o.program, until, &j->rewards[j->n_rewards], &has, err);
        if (*status == COP_EINVAL) mark_suspect(w, err);
        if (*status != COP_OK || !has) return false;
        j->n_rewards++;
        w->silent_since = clock_seconds();
    }
    return true;
}

static cop_status seal_judged(line_output *w, double until, cop_error *err) {
    cop_status status = ask_lines(w, err);
    while (status == COP_OK && w->first && take_rewards(w, w->first, until, &status, err)) {
        judged *j = w->first;
        w->first = j->next;
        if (!w->first) w->newest = NULL;
        if (w->unasked == j) w->unasked = j->next; /* it has its answers without */
        line_job *job = j->job;
        j->job = NULL;
        status = seal(w, job, j->rewards, err);
        judged_free(j);
    }
    return status;
}

/* Takes the job. */
static cop_status take_job(line_output *w, line_job *j, cop_error *err) {
    bool judges = (w->o.answers || w->o.program) && j->error.status == COP_OK && j->record.n == 0;
    return judges ? begin_judging(w, j, err) : seal(w, j, NULL, err);
}

/* All jobs that are there.  Waits for the first a little. */
static cop_status take_finished(line_output *w, double until, cop_error *err) {
    cop_status status = COP_OK;
    line_job *j = (line_job *)queue_wait_until(w->finished, until);
    for (; j; j = (line_job *)queue_take(w->finished)) {
        if (!j->last && status == COP_OK) {
            status = take_job(w, j, err);
            continue;
        }
        w->ended = w->ended || j->last;
        if (j->last) {
            w->n_lines_end = j->n_lines;
            memcpy(w->digest_end, j->digest, sizeof w->digest_end);
        }
        line_job_free(j);
    }
    return status;
}

/* ---- Writing, in order of line. */

static cop_status print_line(line_output *w, const sealed *s, cop_error *err) {
    json_t *objects, *object;
    size_t i;
    cop_status status = objects_of(&objects, &s->record, err);
    bool ok = true;
    json_array_foreach(objects, i, object) ok = ok && jsonl_print(w->o.out, object);
    json_decref(objects);
    if (status != COP_OK || ok) return status;
    return cop_fail(err, COP_EIO, "could not write the output: %s", strerror(errno));
}

json_t *input_note(uint64_t n_lines, const char *digest, bool whole) {
    return json_pack("{s:I, s:s, s:b}", "lines", (json_int_t)n_lines, "digest", digest, "whole", whole);
}

/* The manifest tells how much of an input that comes from a pipe was used; it is never less than was written.
 */
static void note_input(line_output *w, uint64_t n_lines, const char *digest, bool whole) {
    if (!w->o.notes_input || (n_lines <= w->n_lines_noted && !whole)) return;
    w->n_lines_noted = n_lines;
    dataset_note(w->o.dataset, "input", input_note(n_lines, digest, whole));
}

static cop_status append_line(line_output *w, const sealed *s, cop_error *err) {
    note_input(w, s->n_lines, s->digest, false);
    if (!dataset_has_unflushed(w->o.dataset)) w->unflushed_since = clock_seconds();
    return dataset_append(w->o.dataset, s->line, s->record.bytes, s->record.n, &s->counts, err);
}

static cop_status write_ordered(line_output *w, cop_error *err) {
    cop_status status = COP_OK;
    while (status == COP_OK && w->n_sealed > 0) {
        sealed **place = &w->places[w->next_order % w->n_places], *s = *place;
        if (!s) break;
        status = w->o.dataset ? append_line(w, s, err) : print_line(w, s, err);
        w->output_failed = w->output_failed || status != COP_OK;
        if (status != COP_OK) break;
        *place = NULL;
        w->next_order++;
        w->n_sealed--;
        dataset_counts_add(&w->counts, &s->counts);
        if (s->rewards) reward_tally_add(w->tally, s->rewards, s->n_rewards);
        atomic_fetch_sub(&w->run->held_bytes, s->n_bytes);
        sealed_free(s);
    }
    return status;
}

/* ---- What waits is saved too. */

static cop_status save_held(line_output *w, cop_error *err) {
    held_record *records = mem_alloc(w->n_sealed, sizeof *records);
    if (!records) return cop_fail(err, COP_ENOMEM, "could not list the lines that wait");
    size_t n = 0;
    for (size_t i = 0; i < w->n_places; i++) {
        const sealed *s = w->places[i];
        if (!s) continue;
        records[n++] = (held_record){s->line, s->record.bytes, s->record.n};
        note_input(w, s->n_lines, s->digest, false);
    }
    double start = clock_seconds();
    cop_status status = dataset_flush(w->o.dataset, err); /* the note comes first */
    if (status == COP_OK) status = held_records_write(w->o.dir, records, n, err);
    mem_free(records);
    /* A large snapshot is written more rarely. */
    w->snapshot_next = clock_seconds() + FLUSH_SECONDS + 20 * (clock_seconds() - start);
    w->has_snapshot = n > 0;
    w->n_new = 0;
    return status;
}

/* Save what was appended and what waits, if it is time, or now. */
static cop_status flush_dataset(line_output *w, bool now, cop_error *err) {
    double time = clock_seconds();
    cop_status status = COP_OK;
    if (dataset_has_unflushed(w->o.dataset) && (now || time >= w->unflushed_since + FLUSH_SECONDS))
        status = dataset_flush(w->o.dataset, err);
    bool changed = w->n_sealed > 0 ? w->n_new > 0 : w->has_snapshot;
    bool mine = w->n_restored >= w->o.n_held; /* else it has lines that have not come yet */
    if (status == COP_OK && changed && mine && (now || time >= w->snapshot_next)) status = save_held(w, err);
    return status;
}

static cop_status flush(line_output *w, bool now, cop_error *err) {
    cop_status status = COP_OK;
    if (w->o.dataset)
        status = flush_dataset(w, now, err);
    else if (fflush(w->o.out) != 0)
        status = cop_fail(err, COP_EIO, "could not write the output: %s", strerror(errno));
    w->output_failed = w->output_failed || status != COP_OK;
    return status;
}

/* ---- The thread. */

static progress_state progress_of(const line_output *w) {
    size_t n_lines = w->counts.records + w->n_sealed;
    return (progress_state){.lines = n_lines,
                            .samples = w->before.samples + atomic_load(&w->run->n_samples),
                            .tokens = w->before.sampled_tokens + w->before.forced_tokens +
                                      atomic_load(&w->run->n_tokens),
                            .n_lines = w->o.n_lines};
}

static void show(line_output *w) {
    progress_state now = progress_of(w);
    progress_update(w->progress, &now);
    if (!w->first || clock_seconds() < w->silent_since + SILENCE_SECONDS) return;
    char line[128];
    snprintf(line, sizeof line,
             "coppice: note: %" PRIu64 " samples wait for the reward program: does it flush its answers?",
             reward_owing(w->o.program));
    progress_print(w->progress, line);
    w->silent_since = clock_seconds();
}

static cop_status expect_no_more(line_output *w, cop_error *err) {
    double extra;
    bool has;
    cop_status status = reward_take(w->o.program, clock_seconds() + PROGRAM_END_SECONDS, &extra, &has, err);
    if (status == COP_EINVAL) mark_suspect(w, err);
    return status;
}

/* Wait for the rewards that are owing, and close the data set. */
static cop_status finish(line_output *w, cop_error *err) {
    cop_status status = write_ordered(w, err);
    while (status == COP_OK && w->first && !run_stopped(w->run)) {
        status = seal_judged(w, clock_seconds() + TICK_SECONDS, err);
        if (w->o.program && !w->unasked) reward_no_more(w->o.program);
        if (status == COP_OK) status = write_ordered(w, err);
        if (status == COP_OK) status = flush(w, false, err);
        show(w);
    }
    if (w->o.program) reward_no_more(w->o.program);
    if (status == COP_OK && w->o.program) status = expect_no_more(w, err);
    if (status != COP_OK || run_stopped(w->run)) return status;
    assert(w->n_sealed == 0);
    w->complete = true;
    if (!w->o.dataset) return flush(w, true, err);
    note_input(w, w->n_lines_end, w->digest_end, true);
    status = flush(w, true, err);
    return status == COP_OK ? dataset_finish(w->o.dataset, err) : status;
}

static cop_status write_some(line_output *w, cop_error *err) {
    double wait = w->first ? TICK_SECONDS / 5 : TICK_SECONDS;
    cop_status status = take_finished(w, clock_seconds() + wait, err);
    if (status == COP_OK) status = seal_judged(w, 0, err);
    if (status == COP_OK) status = write_ordered(w, err);
    if (status == COP_OK) status = flush(w, false, err);
    show(w);
    return status;
}

/* The run was stopped: what was finished need not be computed again. */
static void write_rest(line_output *w) {
    cop_status status = COP_OK;
    if (!w->o.program) status = take_finished(w, 0, &w->rest);
    if (status == COP_OK) status = write_ordered(w, &w->rest);
    if (status == COP_OK) status = flush(w, true, &w->rest);
    w->rest.status = status;
}

static void *run(void *arg) {
    line_output *w = arg;
    cop_error err = {0};
    cop_status status = COP_OK;
    while (status == COP_OK && !w->ended && !run_stopped(w->run)) status = write_some(w, &err);
    /* The last job comes behind all lines, so nothing is missing before it. */
    if (status == COP_OK && w->ended && !run_stopped(w->run)) status = finish(w, &err);
    if (status != COP_OK) run_stop(w->run, &err);
    if (!w->complete && !w->output_failed) write_rest(w);
    atomic_store(&w->thread_ended, true);
    return NULL;
}

cop_status line_output_open(line_output **out, const line_output_options *o, queue *finished,
                            run_state *state, reward_tally *tally, cop_error *err) {
    *out = NULL;
    line_output *w = mem_zalloc(1, sizeof *w);
    if (!w) return cop_fail(err, COP_ENOMEM, "could not start to write");
    *w = (line_output){.o = *o,
                       .finished = finished,
                       .run = state,
                       .tally = tally,
                       .n_lines_noted = o->n_lines_noted,
                       .has_snapshot = o->dataset != NULL, /* perhaps, of an earlier run */
                       .snapshot_next = clock_seconds() + FLUSH_SECONDS};
    if (o->dataset) w->before = w->counts = *dataset_totals(o->dataset);
    progress_state start = progress_of(w);
    w->progress = progress_open("generate", &start, o->quiet);
    int failed = pthread_create(&w->thread, NULL, run, w);
    if (failed) {
        progress_close(w->progress, &start);
        mem_free(w);
        return cop_fail(err, COP_EIO, "could not start the writing thread: %s", strerror(failed));
    }
    *out = w;
    return COP_OK;
}

bool line_output_ended(const line_output *w) { return atomic_load(&w->thread_ended); }

line_output_result line_output_close(line_output *w) {
    if (!w) return (line_output_result){0};
    pthread_join(w->thread, NULL);
    progress_state end = progress_of(w);
    progress_close(w->progress, &end);
    line_output_result result = {w->counts, w->n_sealed, w->complete, w->suspect, w->rest};
    for (size_t i = 0; i < w->n_places; i++) sealed_free(w->places[i]);
    while (w->first) {
        judged *j = w->first;
        w->first = j->next;
        judged_free(j);
    }
    mem_free(w->places);
    mem_free(w);
    return result;
}
