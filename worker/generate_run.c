/* The run of `coppice generate`. */
#include "worker/generate_run.h"

#include <time.h>

#include "worker/sample_copy.h"

#define MOST_HELD_BYTES ((size_t)256 << 20) /* of finished samples that wait to be written */
#define MOST_JUDGED_BYTES                                                                                    \
    ((size_t)64 << 20) /* the same with a reward program, for which they are JSON as well */
#define WAIT_SECONDS 0.1

typedef struct generation generation;

/* A line whose samples are being generated. */
typedef struct flight {
    struct flight *next;
    generation *run;
    line_job *line;
    engine_job *job;
} flight;

struct generation {
    const generate_plan *plan;
    engine *engine;
    run_state state;
    queue *lines, *finished;
    line_reader *reader;
    line_output *output;
    flight *flights;
    size_t n_flights;
    line_job *end; /* the last job of the input, once it came */
};

/* ---- Flights. */

static void post(generation *g, line_job *j) {
    atomic_fetch_sub(&g->state.read_bytes, j->n_read_bytes);
    atomic_fetch_add(&g->state.held_bytes, j->n_bytes);
    queue_item *item = &j->item;
    queue_put(g->finished, &item);
}

static void drop_samples(line_job *j) {
    for (uint32_t i = 0; j->samples && i < j->n; i++) sample_copy_free(&j->samples[i]);
    j->n_bytes = j->n_read_bytes;
}

/* The line goes on to the writing thread. */
static void land(flight *f) {
    generation *g = f->run;
    flight **link = &g->flights;
    while (*link != f) link = &(*link)->next;
    *link = f->next;
    g->n_flights--;
    if (f->line) post(g, f->line);
    mem_free(f);
}

static void on_sample(void *context, const sample_result *s) {
    flight *f = context;
    line_job *j = f->line;
    const generate_plan *p = f->run->plan;
    reply_sample *to = &j->samples[s->sample];
    if (!sample_copy(to, s, p->text ? p->model->tokenizer : NULL)) {
        cop_error err;
        cop_fail(&err, COP_ENOMEM, "could not keep sample %u of line %llu", (unsigned)s->sample,
                 (unsigned long long)j->line);
        run_stop(&f->run->state, &err);
        return;
    }
    to->prompt = (uint32_t)j->line;
    atomic_fetch_add(&f->run->state.n_samples, 1);
    atomic_fetch_add(&f->run->state.n_tokens, to->n_tokens);
    j->n_bytes += sample_copy_bytes(to);
}

static void on_done(void *context, const rollout_totals *totals) {
    (void)totals;
    land(context);
}

/* What is wrong with a line becomes its record; what is wrong with the machine stops the run. */
static void fail_line(generation *g, line_job *j, const cop_error *e) {
    drop_samples(j);
    j->error = *e;
    if (line_error_stays(e) && !g->plan->reading.strict) return;
    cop_error err = *e;
    cop_error_prefix(&err, "line %llu (from 0)", (unsigned long long)j->line);
    run_stop(&g->state, &err);
}

static void on_failed(void *context, const cop_error *e) {
    flight *f = context;
    fail_line(f->run, f->line, e);
    land(f);
}

/* ---- Lines. */

static cop_status submit(generation *g, line_job *j, flight *f, cop_error *err) {
    j->samples = mem_zalloc(j->n, sizeof *j->samples);
    if (!j->samples) return cop_fail(err, COP_ENOMEM, "could not allocate %u samples", (unsigned)j->n);
    rollout_prompt prompt = {
        .tokens = j->tokens.ids, .n_tokens = j->tokens.n, .id = j->id, .n_id = j->n_id, .seed = j->seed};
    rollout_spec spec = {.prompts = &prompt,
                         .n_prompts = 1,
                         .n = j->n,
                         .sampling = g->plan->sampling,
                         .events = {f, on_sample, on_done, on_failed}};
    return engine_submit(g->engine, &spec, &f->job, err);
}

/* Takes the job. */
static void start_line(generation *g, line_job *j) {
    if (j->error.status != COP_OK || j->record.n > 0) {
        post(g, j);
        return;
    }
    cop_error err;
    flight *f = mem_zalloc(1, sizeof *f);
    cop_status status = COP_OK;
    if (!f)
        status = cop_fail(&err, COP_ENOMEM, "could not start a line");
    else
        *f = (flight){.next = g->flights, .run = g, .line = j};
    if (status == COP_OK) status = submit(g, j, f, &err);
    if (status == COP_OK) {
        g->flights = f;
        g->n_flights++;
        return;
    }
    mem_free(f);
    fail_line(g, j, &err);
    post(g, j);
}

static bool has_room(generation *g) {
    size_t n = g->plan->reading.rules.n, most = 2 * (size_t)g->plan->most_rows;
    return (g->n_flights == 0 || (g->n_flights + 1) * n <= most) &&
           atomic_load(&g->state.held_bytes) <
               (g->plan->writing.program ? MOST_JUDGED_BYTES : MOST_HELD_BYTES);
}

/* Start what was read; without anything to compute, wait for it a little. */
static void start_lines(generation *g) {
    while (!g->end && has_room(g)) {
        bool idle = g->n_flights == 0;
        line_job *j = (line_job *)(idle ? queue_wait_until(g->lines, clock_seconds() + WAIT_SECONDS)
                                        : queue_take(g->lines));
        if (!j) return;
        line_reader_taken(g->reader);
        if (j->last)
            g->end = j;
        else
            start_line(g, j);
    }
}

static void sleep_little(void) { nanosleep(&(struct timespec){0, 10000000}, NULL); }

static void generate_all(generation *g, const volatile int *interrupted) {
    while (!run_stopped(&g->state) && !(g->end && g->n_flights == 0)) {
        if (*interrupted) run_stop(&g->state, NULL);
        start_lines(g);
        if (!engine_step(g->engine) && !has_room(g)) sleep_little(); /* it waits for the writing thread */
    }
    if (run_stopped(&g->state)) return;
    post(g, g->end);
    g->end = NULL;
    while (!line_output_ended(g->output) &&
           !run_stopped(&g->state)) { /* a reward program may take its time */
        if (*interrupted) run_stop(&g->state, NULL);
        sleep_little();
    }
}

/* ---- Ends. */

static void drain(queue *q) {
    if (!q) return;
    for (queue_item *item; (item = queue_take(q));) line_job_free((line_job *)item);
    queue_close(q);
}

/* Lines whose samples are not complete are generated again by the next run. */
static void abandon_flights(generation *g) {
    while (g->flights) {
        flight *f = g->flights;
        engine_abandon(g->engine, f->job);
        line_job_free(f->line);
        f->line = NULL;
        land(f);
    }
}

cop_status generate_run(const generate_plan *plan, input_file *in, reward_tally *tally,
                        const volatile int *interrupted, line_output_result *result, cop_error *err) {
    generation g = {.plan = plan, .engine = plan->model->engine};
    run_state_init(&g.state);
    *result = (line_output_result){0};
    cop_status status = queue_open(&g.lines, err);
    if (status == COP_OK) status = queue_open(&g.finished, err);
    if (status == COP_OK)
        status = line_output_open(&g.output, &plan->writing, g.finished, &g.state, tally, err);
    if (status == COP_OK) status = line_reader_open(&g.reader, &plan->reading, in, g.lines, &g.state, err);
    if (status == COP_OK)
        generate_all(&g, interrupted);
    else
        run_stop(&g.state, err);
    if (run_stopped(&g.state)) {
        input_interrupt(in);
        if (plan->writing.program) reward_stop(plan->writing.program);
    }
    line_reader_close(g.reader);
    *result = line_output_close(g.output);
    abandon_flights(&g);
    line_job_free(g.end);
    drain(g.lines);
    drain(g.finished);
    if (status == COP_OK && g.state.error.status == COP_OK && result->rest.status != COP_OK) {
        status = result->rest.status;
        if (err) *err = result->rest;
    }
    if (g.state.error.status != COP_OK) {
        status = g.state.error.status;
        if (err) *err = g.state.error;
    }
    run_state_free(&g.state);
    return status;
}
