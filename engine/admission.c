/* What may start: first come, first served.
 *
 *   e->tasks  | row | row | prompt | score | row | row | prompt |   e->jobs  | prompt, prompt .. | score ..
 *              oldest                                  youngest               never listed so far
 *              1. what waits goes on, samples of ready prompts start          2. these are listed
 *
 * Both go in order of age, and the first that finds no room ends it: nothing overtakes.  Room is judged so
 * that what starts does not at once take pages from others: it needs its own and, for each row that runs, a
 * page more than the row has use for now.  The oldest task needs no such room: what it lacks the others give
 * back (plan.c), and since no sample is accepted that needs more than the whole pool, the oldest always gets
 * to its end, and so does each task in its turn.  While the engine is paused, that is the oldest of those
 * that go on. */
#include "engine/engine_internal.h"

#include <string.h>

/* ---- Room. */

/* What can still be started. */
typedef struct room {
    int pages;      /* that can be had, but for those that running tasks take soon */
    int tokens;     /* of the step's budget that no task waits for */
    int rows;       /* but for samples that are still to start of prompts that are listed */
    size_t outputs; /* bytes of rows' outputs */
} room;

static int row_pages(const sequence *s) {
    int n = sequence_pages_for(s->n) + 1;
    return n < s->cap_pages ? n : s->cap_pages;
}

static bool has_tail(const prompt *p) { return p->n_tokens % KV_PAGE_TOKENS != 0; }

/* Pages that the next sample of a prompt takes when it starts, and soon after. */
static int start_pages(const prompt *p) {
    bool copies = has_tail(p) && p->n_started + 1 < p->job->n;
    bool grows = sequence_pages_for(p->n_tokens + p->limit) > sequence_pages_for(p->n_tokens);
    return copies + grows;
}

/* Pages that a task takes soon, those that it has included. */
static int pages_soon(const task *t) {
    const sequence *s = task_sequence(t);
    if (t->kind == TASK_ROW) return row_pages(s);
    if (t->kind == TASK_SCORE) return sequence_pages_for(s->n);
    const prompt *p = task_prompt(t);
    return p->ready ? s->n_pages : sequence_pages_for(s->n) + start_pages(p);
}

/* Tokens of a task that count against the budget of steps: a row's last one never does. */
static int budget_tokens(const task *t) { return sequence_pending(task_sequence(t)) - (t->kind == TASK_ROW); }

static int rows_of(const task *t) {
    if (t->kind == TASK_PROMPT) return (int)(task_prompt(t)->job->n - task_prompt(t)->n_started);
    return t->kind == TASK_ROW;
}

static size_t output_bytes(const prompt *p) { return row_output_bytes(&p->job->rules, p->limit); }

/* Take room for a row's outputs.  The oldest has it even where there is none. */
static bool take_outputs(room *r, const prompt *p, bool oldest) {
    size_t n = output_bytes(p);
    if (n > r->outputs && !oldest) return false;
    r->outputs -= n < r->outputs ? n : r->outputs;
    return true;
}

static room room_of(const engine *e) {
    room r = {.pages = kv_pool_available(&e->pool),
              .tokens = e->o.step_tokens,
              .rows = e->o.max_rows,
              .outputs = e->o.output_memory};
    for (int i = 0; i < e->n_tasks; i++) {
        const task *t = e->tasks[i];
        r.rows -= rows_of(t);
        if (t->kind == TASK_ROW) take_outputs(&r, task_row(t)->prompt, true); /* also while it waits */
        if (!t->runs) continue;
        r.pages -= pages_soon(t) - task_sequence(t)->n_pages;
        r.tokens -= budget_tokens(t);
    }
    return r;
}

/* Prompt tokens that the cache had are counted if they were never computed. */
static void count_cached(engine *e, const task *t) {
    if (t->kind == TASK_SCORE) return;
    prompt *p = task_whose(t);
    int n = task_prompt_computed(t) - p->n_seen;
    if (n <= 0) return;
    p->job->totals.cached_tokens += (uint64_t)n;
    e->totals.cached_tokens += (uint64_t)n;
    p->n_seen += n;
}

static void restore(engine *e, const task *t) {
    sequence_restore(task_sequence(t), &e->pool, task_weights(e, t)->root, task_restorable(t));
}

void admission_restore(engine *e, task *t) {
    restore(e, t);
    count_cached(e, t);
}

/* Let a task that has no pages run if there is room for it, with the pages that the cache has for it. */
static bool run_task(engine *e, task *t, bool oldest, room *r) {
    int before = kv_pool_available(&e->pool);
    sequence *s = task_sequence(t);
    restore(e, t);
    assert(sequence_pending(s) > 0);
    int n_pages = before - kv_pool_available(&e->pool) + pages_soon(t) - s->n_pages;
    if (n_pages > r->pages && !oldest) {
        sequence_release(s, &e->pool);
        return false;
    }
    t->runs = true;
    count_cached(e, t);
    r->pages -= n_pages;
    r->tokens -= budget_tokens(t);
    return true;
}

static void insert_task(engine *e, task *t, int at) {
    for (int i = e->n_tasks++; i > at; i--) e->tasks[i] = e->tasks[i - 1];
    e->tasks[at] = t;
    e->n_rows += t->kind == TASK_ROW;
    assert(e->n_rows <= e->o.max_rows);
}

/* ---- Starting samples of a prompt that is ready. */

static void queue_draw(engine *e, live_row *r, int slot, int *n_drawing) {
    e->drawing[*n_drawing] = r;
    e->draws[(*n_drawing)++] = step_draw(r, slot);
}

/* Give a new row its prompt's pages: full ones shared, the last one copied or, by the last sample or where no
 * page is left for a copy, taken over.  Then the prompt waits, to be computed again for the next sample. */
static void fork_pages(engine *e, prompt *p, sequence *s) {
    int full = p->n_tokens / KV_PAGE_TOKENS;
    bool last = p->n_started + 1 == p->job->n;
    sequence_share(s, &p->seq, &e->pool);
    if (!has_tail(p)) return;
    if (!last && sequence_extend(s, &e->pool, p->n_tokens)) {
        k_page_copy(e->k, &e->kv, s->pages[full], p->seq.pages[full], p->n_tokens % KV_PAGE_TOKENS);
        s->n_computed = p->n_tokens;
        return;
    }
    sequence_take_over(s, &p->seq);
    if (!last) plan_preempt(e, &p->task);
}

/* A row starts under the weights in use. */
static void start_under(const engine *e, live_row *r) {
    cop_status status = row_relabel(&r->row, &e->label, NULL);
    assert(status == COP_OK && r->row.n_runs == 1);
    (void)status;
    r->weights = e->w;
}

static cop_status start_sample(engine *e, prompt *p, int at, live_row **out, cop_error *err) {
    live_row *r = mem_zalloc(1, sizeof *r);
    cop_status status = r ? row_init(&r->row, &p->job->rules, p->tokens, p->n_tokens, p->limit, err)
                          : cop_fail(err, COP_ENOMEM, "could not start a sample");
    if (status != COP_OK) {
        mem_free(r);
        return status;
    }
    r->task = (task){.kind = TASK_ROW, .runs = true};
    r->prompt = p;
    r->index = p->n_started;
    start_under(e, r);
    fork_pages(e, p, &r->row.seq);
    p->n_started++;
    insert_task(e, &r->task, at);
    *out = r;
    return COP_OK;
}

/* Start samples of the prompt at e->tasks[*at], which they move on.  True: it has no more. */
static bool start_samples(engine *e, int *at, room *r, int *n_drawing) {
    prompt *p = task_prompt(e->tasks[*at]);
    while (p->n_started < p->job->n && !prompt_settled(p)) {
        int n_pages = start_pages(p);
        bool fits = n_pages <= r->pages || *at == 0;
        if (!p->ready || e->n_rows == e->o.max_rows || !fits || !take_outputs(r, p, *at == 0)) return false;
        live_row *started;
        cop_error err;
        if (start_sample(e, p, *at, &started, &err) != COP_OK) {
            finish_failed(p->job, &err);
            break;
        }
        r->pages -= n_pages;
        ++*at;
        queue_draw(e, started, p->slot, n_drawing);
    }
    return true;
}

/* 1. What is listed.  True: all of it goes on, and everything that was ready has started. */
static bool run_listed(engine *e, room *r, int *n_drawing) {
    bool in_order = true; /* no older sample is still to start */
    bool oldest = true;   /* of what goes on */
    for (int i = 0; i < e->n_tasks; i++) {
        task *t = e->tasks[i];
        if (task_job(t)->over || !plan_goes_on(e, t)) continue;
        if (!t->runs) {
            if (t->kind == TASK_PROMPT && e->n_rows == e->o.max_rows) return false;
            if (!run_task(e, t, oldest, r)) return false;
        }
        oldest = false;
        if (t->kind != TASK_PROMPT) continue;
        if (!task_prompt(t)->ready)
            in_order = false;
        else if (in_order && !start_samples(e, &i, r, n_drawing))
            return false;
    }
    return true;
}

/* ---- Listing what is new.  Each of these is true if the job's next one may have its turn. */

/* A sample with a prefix starts as a row that has everything to compute, as if its pages had been given back.
 */
static bool list_prefixed(engine *e, prompt *p, room *left) {
    live_row *r = p->prepared;
    if (r->row.state != ROW_RUNNING) { /* the prefix fills the limit */
        p->n_started = 1;
        finish_sample(e, p, 0, &r->row);
        return true;
    }
    r->task = (task){.kind = TASK_ROW};
    bool oldest = e->n_tasks == 0;
    if (output_bytes(p) > left->outputs && !oldest) return false;
    r->weights = e->w;
    if (!run_task(e, &r->task, oldest, left)) return false;
    start_under(e, r);
    take_outputs(left, p, true);
    p->prepared = NULL;
    p->n_started = 1;
    insert_task(e, &r->task, e->n_tasks);
    left->rows--;
    return true;
}

static bool list_prompt(engine *e, prompt *p, room *r) {
    if (p->n_started == p->job->n) return true; /* all of it, before the job was parked */
    if (r->rows <= 0 || r->tokens <= 0) return false;
    if (p->prepared) return list_prefixed(e, p, r);
    for (p->slot = 0; p->slot < MAX_PROMPTS && e->slot_used[p->slot];) p->slot++;
    p->task = (task){.kind = TASK_PROMPT};
    if (p->slot == MAX_PROMPTS || !run_task(e, &p->task, e->n_tasks == 0, r)) return false;
    e->slot_used[p->slot] = true;
    insert_task(e, &p->task, e->n_tasks);
    r->rows -= rows_of(&p->task);
    return true;
}

/* Whether a sequence waits for the one before it, which is listed and computes what they share.  Later jobs
 * may have their turn meanwhile, so that the step is full. */
static bool score_waits(const engine *e, const scored *s) {
    return e->pool.caches && s->n_shared > 0 && s[-1].n_scored < s->n_shared;
}

/* Take the scores of what a sequence shares with the one before it; the pages are found by the cache. */
static void copy_shared(const engine *e, scored *s) {
    if (!e->pool.caches || s->n_shared == 0) return;
    const scored *from = s - 1;
    size_t n = (size_t)s->n_shared, top = (size_t)s->job->score.top;
    memcpy(s->logprobs + 1, from->logprobs + 1, n * sizeof *s->logprobs);
    if (top > 0) {
        memcpy(s->top_ids + top, from->top_ids + top, n * top * sizeof *s->top_ids);
        memcpy(s->top_logprobs + top, from->top_logprobs + top, n * top * sizeof *s->top_logprobs);
    }
    s->n_scored = s->n_shared;
}

static bool list_score(engine *e, scored *s, room *r) {
    engine_job *j = s->job;
    bool first = !j->weights;
    if (first) {
        j->weights = e->w;
        j->label = e->label;
    }
    copy_shared(e, s);
    if (s->n_scored == s->seq.n) { /* nobody asks what follows its last token, and it has no other to score */
        finish_scored(s);
        return true;
    }
    s->task = (task){.kind = TASK_SCORE};
    if (r->tokens <= 0 || !run_task(e, &s->task, e->n_tasks == 0, r)) {
        if (first) j->weights = NULL; /* it has not begun: others may come before it does */
        return false;
    }
    insert_task(e, &s->task, e->n_tasks);
    return true;
}

/* 2. What was never listed, in order of arrival. */
static void list_new(engine *e, room *r) {
    for (engine_job *j = e->jobs; j; j = j->next) {
        if (j->parked) continue;
        size_t n = j->kind == JOB_ROLLOUT ? j->n_prompts : j->n_scores;
        for (; !j->over && j->cursor < n; j->cursor++) {
            if (j->kind == JOB_SCORE && score_waits(e, &j->scores[j->cursor])) break;
            bool listed = j->kind == JOB_ROLLOUT ? list_prompt(e, &j->prompts[j->cursor], r)
                                                 : list_score(e, &j->scores[j->cursor], r);
            if (!listed) return;
        }
    }
}

void admission_run(engine *e) {
    int n_drawing = 0;
    room r = room_of(e);
    if (run_listed(e, &r, &n_drawing) && e->pause == ENGINE_RUN) list_new(e, &r);
    step_draw_rows(e, n_drawing, e->first_logits);
}
