/* Writing lines in order. */
#include "worker/line_output.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "worker/convert.h"
#include "worker/engine_loop.h"
#include "worker/jsonl.h"
#include "worker/record_json.h"
#include "worker/sample_copy.h"

#define FLUSH_SECONDS 10.0 /* results are in the file after that, however few they are */
#define TICK_SECONDS 0.1
#define PROGRAM_END_SECONDS 5.0 /* that a reward program has to end after its last answer */

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
    /* Lines that came, by order: place order % n_places, which grows so that each has its own. */
    line_job **places;
    size_t n_places;
    uint64_t next_order;
    line_job *end; /* the last job, once it came */
    judged *first, *newest;
    reward_tally *tally;
    dataset_counts counts;    /* written */
    dataset_counts generated; /* the same with the samples that were not kept */
    double unflushed_since;
    progress *progress;
    bool complete;
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

/* The record of a line as JSON objects, one per sample. */
static cop_status objects_of(json_t **out, const line_job *j, const bool *keeps, const double *rewards,
                             cop_error *err) {
    wire_buffer record;
    wire_error why;
    shard_view view;
    *out = NULL;
    if (!line_job_encode(&record, j, keeps, rewards))
        return cop_fail(err, COP_ENOMEM, "could not encode a record");
    cop_status status = COP_OK;
    if (!shard_read(&view, record.bytes, record.n, &why))
        status = cop_fail(err, COP_ENOMEM, "could not read a record: %s", why.message);
    if (status == COP_OK) status = record_to_json(out, &view, err);
    shard_view_free(&view);
    wire_buffer_free(&record, &worker_allocator);
    return status;
}

static cop_status ask_program(line_output *w, const judged *j, cop_error *err) {
    json_t *objects, *sample;
    size_t i;
    COP_TRY(objects_of(&objects, j->job, NULL, NULL, err), err, "hand samples to the reward program");
    cop_status status = COP_OK;
    json_array_foreach(objects, i, sample) {
        if (status == COP_OK) status = reward_ask(w->o.program, sample, err);
    }
    json_decref(objects);
    return status;
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

/* ---- Writing one line. */

static void drop_text(line_job *j) {
    for (uint32_t i = 0; j->samples && i < j->n; i++) {
        mem_free((void *)j->samples[i].text.bytes);
        j->samples[i].text = (wire_text){0};
    }
}

/* What a line counts, with the samples that are kept. */
static dataset_counts count_line(const line_job *j, const bool *keeps) {
    dataset_counts c = {.records = 1, .errors = j->error.status != COP_OK};
    for (uint32_t i = 0; !c.errors && i < j->n; i++) {
        if (keeps && !keeps[i]) continue;
        c.samples++;
        for (size_t t = 0; t < j->samples[i].n_tokens; t++) {
            if (j->samples[i].mask[t])
                c.sampled_tokens++;
            else
                c.forced_tokens++;
        }
    }
    return c;
}

static cop_status print_line(line_output *w, const line_job *j, const bool *keeps, const double *rewards,
                             cop_error *err) {
    json_t *objects, *object;
    size_t i;
    COP_TRY(objects_of(&objects, j, keeps, rewards, err), err, "print a line");
    bool ok = true;
    json_array_foreach(objects, i, object) ok = ok && jsonl_print(w->o.out, object);
    json_decref(objects);
    return ok ? COP_OK : cop_fail(err, COP_EIO, "could not write the output: %s", strerror(errno));
}

static json_t *input_note(const line_job *j, bool whole) {
    return json_pack("{s:I, s:s, s:b}", "lines", (json_int_t)j->n_lines, "digest", j->digest, "whole", whole);
}

static cop_status append_line(line_output *w, const line_job *j, const bool *keeps, const double *rewards,
                              const dataset_counts *c, cop_error *err) {
    wire_buffer record;
    if (!line_job_encode(&record, j, keeps, rewards))
        return cop_fail(err, COP_ENOMEM, "could not encode a record");
    if (w->o.notes_input) dataset_note(w->o.dataset, "input", input_note(j, false));
    if (!dataset_has_unflushed(w->o.dataset)) w->unflushed_since = clock_seconds();
    cop_status status = dataset_append(w->o.dataset, j->line, record.bytes, record.n, c, err);
    wire_buffer_free(&record, &worker_allocator);
    return status;
}

/* Takes the job. */
static cop_status write_line(line_output *w, line_job *j, const double *rewards, cop_error *err) {
    bool *keeps = NULL;
    cop_status status = COP_OK;
    if (!w->o.text) drop_text(j);
    if (rewards && w->o.keep > 0) {
        keeps = mem_alloc(j->n, sizeof *keeps);
        if (!keeps) status = cop_fail(err, COP_ENOMEM, "could not choose the best of %u samples", j->n);
    }
    if (keeps) choose_best(keeps, rewards, j->n, w->o.keep);
    dataset_counts c = count_line(j, keeps);
    if (status == COP_OK)
        status =
            w->o.dataset ? append_line(w, j, keeps, rewards, &c, err) : print_line(w, j, keeps, rewards, err);
    if (status == COP_OK) {
        dataset_counts all = count_line(j, NULL);
        dataset_counts_add(&w->counts, &c);
        dataset_counts_add(&w->generated, &all);
        if (rewards) reward_tally_add(w->tally, rewards, j->n);
    }
    atomic_fetch_sub(&w->run->held_bytes, j->n_bytes);
    mem_free(keeps);
    line_job_free(j);
    return status;
}

/* ---- Judging, in order. */

static void judged_free(judged *j) {
    line_job_free(j->job);
    mem_free(j->rewards);
    mem_free(j);
}

/* Takes the job. */
static cop_status begin_judging(line_output *w, line_job *job, cop_error *err) {
    judged *j = mem_zalloc(1, sizeof *j);
    if (!j) {
        line_job_free(job);
        return cop_fail(err, COP_ENOMEM, "could not judge a line");
    }
    j->job = job;
    if (w->newest)
        w->newest->next = j;
    else
        w->first = j;
    w->newest = j;
    if (job->error.status != COP_OK) return COP_OK;
    j->rewards = mem_alloc(job->n, sizeof *j->rewards);
    if (!j->rewards) return cop_fail(err, COP_ENOMEM, "could not judge %u samples", job->n);
    return w->o.program ? ask_program(w, j, err) : judge_answers(w, j, err);
}

/* Take answers for the oldest line.  True: it has all. */
static bool take_rewards(line_output *w, judged *j, double until, cop_status *status, cop_error *err) {
    if (!j->rewards) return true; /* an error: nothing was asked */
    bool has = true;
    while (*status == COP_OK && j->n_rewards < j->job->n && has) {
        *status = reward_take(w->o.program, until, &j->rewards[j->n_rewards], &has, err);
        if (*status == COP_OK && has) j->n_rewards++;
    }
    return *status == COP_OK && j->n_rewards == j->job->n;
}

static cop_status write_judged(line_output *w, double until, cop_error *err) {
    cop_status status = COP_OK;
    while (w->first && take_rewards(w, w->first, until, &status, err)) {
        judged *j = w->first;
        w->first = j->next;
        if (!w->first) w->newest = NULL;
        line_job *job = j->job;
        j->job = NULL;
        status = write_line(w, job, j->rewards, err);
        judged_free(j);
        if (status != COP_OK) break;
    }
    return status;
}

/* ---- Order. */

static bool grow_places(line_output *w, uint64_t order) {
    size_t n = w->n_places ? w->n_places : 64;
    while (order - w->next_order >= n) n *= 2;
    if (n == w->n_places) return true;
    line_job **places = mem_zalloc(n, sizeof *places);
    if (!places) return false;
    for (size_t i = 0; i < w->n_places; i++) {
        if (w->places[i]) places[w->places[i]->order % n] = w->places[i];
    }
    mem_free(w->places);
    w->places = places;
    w->n_places = n;
    return true;
}

/* Takes the job. */
static cop_status put_in_order(line_output *w, line_job *j, cop_error *err) {
    if (!grow_places(w, j->order)) {
        line_job_free(j);
        return cop_fail(err, COP_ENOMEM, "could not keep a line until its turn");
    }
    w->places[j->order % w->n_places] = j;
    return COP_OK;
}

static cop_status write_ordered(line_output *w, cop_error *err) {
    cop_status status = COP_OK;
    bool judges = w->o.answers || w->o.program;
    while (status == COP_OK && w->n_places > 0) {
        line_job **place = &w->places[w->next_order % w->n_places], *j = *place;
        if (!j) break;
        *place = NULL;
        w->next_order++;
        status = judges ? begin_judging(w, j, err) : write_line(w, j, NULL, err);
        if (status == COP_OK && judges) status = write_judged(w, 0, err);
    }
    return status;
}

/* ---- The thread. */

static cop_status flush(line_output *w, bool due, cop_error *err) {
    if (!w->o.dataset) {
        if (fflush(w->o.out) == 0) return COP_OK;
        return cop_fail(err, COP_EIO, "could not write the output: %s", strerror(errno));
    }
    bool unflushed = dataset_has_unflushed(w->o.dataset);
    if (!unflushed || (!due && clock_seconds() < w->unflushed_since + FLUSH_SECONDS)) return COP_OK;
    return dataset_flush(w->o.dataset, err);
}

static progress_state progress_of(const line_output *w) {
    const dataset_counts *g = &w->generated;
    return (progress_state){.lines = g->records,
                            .samples = g->samples,
                            .tokens = g->sampled_tokens + g->forced_tokens,
                            .n_lines = w->o.n_lines};
}

static void show(line_output *w) {
    progress_state now = progress_of(w);
    progress_update(w->progress, &now);
}

/* All jobs that are there.  Waits for the first a little. */
static cop_status take_finished(line_output *w, double until, cop_error *err) {
    cop_status status = COP_OK;
    line_job *j = (line_job *)queue_wait_until(w->finished, until);
    for (; j; j = (line_job *)queue_take(w->finished)) {
        if (j->last)
            w->end = j;
        else if (status == COP_OK)
            status = put_in_order(w, j, err);
        else
            line_job_free(j);
    }
    return status;
}

/* A reward too many tells that they belong to other samples than it seemed. */
static cop_status expect_no_more(line_output *w, cop_error *err) {
    double extra;
    bool has;
    return reward_take(w->o.program, clock_seconds() + PROGRAM_END_SECONDS, &extra, &has, err);
}

/* Wait for the rewards that are owing, and close the data set. */
static cop_status finish(line_output *w, cop_error *err) {
    cop_status status = COP_OK;
    if (w->o.program) reward_no_more(w->o.program);
    while (status == COP_OK && w->first && !run_stopped(w->run)) {
        status = write_judged(w, clock_seconds() + TICK_SECONDS, err);
        show(w);
    }
    if (status == COP_OK && w->o.program) status = expect_no_more(w, err);
    if (status != COP_OK || run_stopped(w->run)) return status;
    w->complete = true;
    if (!w->o.dataset) return flush(w, true, err);
    if (w->o.notes_input) dataset_note(w->o.dataset, "input", input_note(w->end, true));
    return dataset_finish(w->o.dataset, err);
}

static cop_status write_some(line_output *w, cop_error *err) {
    double wait = w->first ? TICK_SECONDS / 5 : TICK_SECONDS;
    cop_status status = take_finished(w, clock_seconds() + wait, err);
    if (status == COP_OK) status = write_ordered(w, err);
    if (status == COP_OK) status = write_judged(w, 0, err);
    if (status == COP_OK) status = flush(w, false, err);
    show(w);
    return status;
}

/* The run was stopped: what was finished, in order, need not be computed again. */
static void write_rest(line_output *w) {
    cop_error ignored;
    cop_status status = take_finished(w, 0, &ignored);
    if (status == COP_OK && !w->o.program) status = write_ordered(w, &ignored);
    if (status == COP_OK) flush(w, true, &ignored);
}

static void *run(void *arg) {
    line_output *w = arg;
    cop_error err = {0};
    cop_status status = COP_OK;
    while (status == COP_OK && !w->end && !run_stopped(w->run)) status = write_some(w, &err);
    /* The last job comes behind all lines, so nothing is missing before it. */
    if (status == COP_OK && w->end && !run_stopped(w->run)) status = finish(w, &err);
    if (status != COP_OK) run_stop(w->run, &err);
    if (!w->complete) write_rest(w);
    return NULL;
}

cop_status line_output_open(line_output **out, const line_output_options *o, queue *finished,
                            run_state *state, reward_tally *tally, cop_error *err) {
    *out = NULL;
    line_output *w = mem_zalloc(1, sizeof *w);
    if (!w) return cop_fail(err, COP_ENOMEM, "could not start to write");
    *w = (line_output){.o = *o, .finished = finished, .run = state, .tally = tally};
    if (o->dataset) w->counts = w->generated = *dataset_totals(o->dataset);
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

line_output_result line_output_close(line_output *w) {
    if (!w) return (line_output_result){0};
    pthread_join(w->thread, NULL);
    progress_state end = progress_of(w);
    progress_close(w->progress, &end);
    line_output_result result = {w->counts, w->tally, w->complete};
    for (size_t i = 0; i < w->n_places; i++) line_job_free(w->places[i]);
    while (w->first) {
        judged *j = w->first;
        w->first = j->next;
        judged_free(j);
    }
    mem_free(w->places);
    line_job_free(w->end);
    mem_free(w);
    return result;
}
