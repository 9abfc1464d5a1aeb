/* One step: collect a ragged batch as planned, run it, use its logits; for each set of weights in use. */
#include "engine/engine_internal.h"

#include <math.h>
#include <string.h>

k_draw step_draw(const live_row *r, int logits_row) {
    const prompt *p = r->prompt;
    const rollout_sampling *s = &p->job->sampling;
    k_draw d = {.row = logits_row,
                .inv_temp = s->temperature > 0 ? (float)(1.0 / s->temperature) : 0.0f,
                .top_k = s->top_k,
                .top_p = s->top_p,
                .min_p = s->min_p,
                .key = {(uint32_t)p->seed, (uint32_t)(p->seed >> 32)},
                .index = (uint32_t)row_index(&r->row),
                .sample = p->first_sample + r->index,
                .prompt_hash = p->hash,
                .want_model = r->row.rules->model_logprobs,
                .want_entropy = r->row.rules->entropy};
    if (row_index(&r->row) < s->min_tokens) {
        d.absent = s->stop_tokens;
        d.n_absent = s->n_stop_tokens;
    }
    return d;
}

/* Draw for e->drawing[0 .. n) with e->draws filled, and let the rows go on. */
void step_draw_rows(engine *e, int n, const float *logits) {
    for (int i = 0; i < n; i++) e->draws[i].kept = row_kept_room(&e->drawing[i]->row);
    double start = clock_seconds();
    where_is(&e->where, "sampling", -1);
    k_sample(e->k, e->drawn, e->draws, n, logits, e->a.vocab, e->a.vocab);
    e->totals.seconds_sample += clock_seconds() - start;
    for (int i = 0; i < n; i++) {
        live_row *r = e->drawing[i];
        const k_drawn *d = &e->drawn[i];
        engine_job *j = r->prompt->job;
        cop_error err;
        if (j->over || prompt_settled(r->prompt)) continue;
        if (d->token < 0) {
            cop_fail(&err, COP_EMODEL,
                     "the model computed a logit that is no number, at token %d of sample %u of prompt %zu",
                     row_index(&r->row), (unsigned)(r->prompt->first_sample + r->index),
                     (size_t)(r->prompt - j->prompts));
            finish_failed(j, &err);
        } else if (row_draw(&r->row, d, &err) != COP_OK) {
            finish_failed(j, &err);
        } else if (r->row.state != ROW_RUNNING) {
            finish_sample(e, r->prompt, r->index, &r->row);
        }
    }
}

/* ---- The step. */

/* Put a task's tokens of this step into the batch. */
static void add_span(engine *e, k_batch *b, int table, task *t) {
    const sequence *s = task_sequence(t);
    for (int i = s->n_computed / KV_PAGE_TOKENS; i < sequence_pages_for(s->n_computed + t->n_step); i++)
        assert(kv_pool_may_write(&e->pool, s->pages[i]));
    memcpy(e->pages + (size_t)table * (size_t)e->page_stride, s->pages,
           (size_t)s->n_pages * sizeof *s->pages);
    e->spans[table] = (span){.task = t, .first = b->n, .n = t->n_step};
    for (int i = 0; i < t->n_step; i++, b->n++) {
        int pos = s->n_computed + i;
        e->ids[b->n] = sequence_token(s, pos);
        e->prev[b->n] = pos > 0 ? sequence_token(s, pos - 1) : -1;
        e->pos[b->n] = pos;
        e->table[b->n] = table;
    }
}

/* Put into the batch what is planned of the tasks that are computed under these weights. */
static int collect(engine *e, const weights *w, k_batch *b) {
    int n_spans = 0;
    *b = (k_batch){.ids = e->ids,
                   .prev = e->prev,
                   .pos = e->pos,
                   .table = e->table,
                   .pages = e->pages,
                   .page_stride = e->page_stride};
    for (int i = 0; i < e->n_tasks; i++) {
        task *t = e->tasks[i];
        if (t->n_step > 0 && task_weights(e, t) == w) add_span(e, b, n_spans++, t);
    }
    return n_spans;
}

/* Which tokens need logits: the last one of a row or prompt that is now computed whole, all of a scored
 * sequence. */
static int list_wants(engine *e, int n_spans) {
    int n = 0;
    for (int i = 0; i < n_spans; i++) {
        const span *s = &e->spans[i];
        bool score = s->task->kind == TASK_SCORE;
        if (!score && sequence_pending(task_sequence(s->task)) > 0) continue;
        for (int t = score ? 0 : s->n - 1; t < s->n; t++)
            e->wants[n++] = (want){.span = s, .token = s->first + t};
    }
    return n;
}

static k_target target_of(scored *s, int pos, int logits_row) {
    const score_spec *spec = &s->job->score;
    bool last = pos + 1 == s->n_tokens;
    size_t at = (size_t)(pos + 1) * (size_t)spec->top;
    return (k_target){.row = logits_row,
                      .token = last ? -1 : s->tokens[pos + 1],
                      .inv_temp = (float)(1.0 / spec->temperature),
                      .top = spec->top,
                      .top_ids = spec->top == 0 ? NULL
                                 : last         ? s->next_ids
                                                : s->top_ids + at,
                      .top_logprobs = spec->top == 0 ? NULL
                                      : last         ? s->next_logprobs
                                                     : s->top_logprobs + at};
}

static void score_tokens(engine *e, const want *wants, int n, const float *logits) {
    int n_targets = 0;
    for (int i = 0; i < n; i++) {
        if (wants[i].span->task->kind == TASK_SCORE) {
            int pos = e->pos[wants[i].token];
            e->targets[n_targets++] = target_of(task_scored(wants[i].span->task), pos, i);
        }
    }
    if (n_targets == 0) return;
    k_score(e->k, e->target_logprobs, e->targets, n_targets, logits, e->a.vocab, e->a.vocab);
    for (int i = 0, t = 0; i < n; i++) {
        if (wants[i].span->task->kind != TASK_SCORE) continue;
        scored *s = task_scored(wants[i].span->task);
        int pos = e->pos[wants[i].token];
        float logprob = e->target_logprobs[t];
        if (isnan(logprob)) {
            cop_error err;
            cop_fail(&err, COP_EMODEL,
                     "the model computed a logit that is no number, after token %d of sequence %zu", pos,
                     (size_t)(s - s->job->scores));
            finish_failed(s->job, &err);
        } else if (e->targets[t].token >= 0) {
            s->logprobs[pos + 1] = logprob;
        }
        t++;
    }
}

/* What follows from the logits of wants[0 .. n). */
static void use_logits(engine *e, const want *wants, int n, const float *logits) {
    int n_drawing = 0;
    where_is(&e->where, "results", -1);
    for (int i = 0; i < n; i++) {
        const task *t = wants[i].span->task;
        if (t->kind == TASK_ROW) {
            e->drawing[n_drawing] = task_row(t);
            e->draws[n_drawing++] = step_draw(task_row(t), i);
        } else if (t->kind == TASK_PROMPT) {
            prompt *p = task_prompt(t);
            size_t vocab = (size_t)e->a.vocab;
            k_copy(e->k, e->first_logits + (size_t)p->slot * vocab, logits + (size_t)i * vocab, vocab);
            p->ready = true;
        }
    }
    score_tokens(e, wants, n, logits);
    step_draw_rows(e, n_drawing, logits);
}

static void fail_all(engine *e, const cop_error *err) {
    for (engine_job *j = e->jobs; j; j = j->next) finish_failed(j, err);
}

static void advance(engine *e, int n_spans) {
    for (int i = 0; i < n_spans; i++) {
        sequence *s = task_sequence(e->spans[i].task);
        int n_prompt = s->n_head - s->n_computed; /* of a row, what is its prompt's */
        if (n_prompt > e->spans[i].n) n_prompt = e->spans[i].n;
        s->n_computed += e->spans[i].n;
        if (n_prompt <= 0 || e->spans[i].task->kind == TASK_SCORE) continue;
        e->totals.prefilled_tokens += (uint64_t)n_prompt;
        prompt *p = task_whose(e->spans[i].task);
        int n_seen = task_prompt_computed(e->spans[i].task);
        if (p->n_seen < n_seen) p->n_seen = n_seen;
    }
}

/* The pages that the step filled are valid: let others find them. */
static void remember(engine *e, const weights *w, int n_spans) {
    for (int i = 0; i < n_spans; i++) {
        const task *t = e->spans[i].task;
        if (!task_is_kept(t)) sequence_remember(task_sequence(t), &e->pool, w->root);
    }
}

static void finish_scores(engine *e, int n_spans) {
    for (int i = 0; i < n_spans; i++) {
        if (e->spans[i].task->kind != TASK_SCORE) continue;
        scored *s = task_scored(e->spans[i].task);
        if (s->n_scored < s->seq.n_computed) s->n_scored = s->seq.n_computed;
        if (s->n_scored == s->seq.n && !s->job->over) finish_scored(s);
    }
}

static void run_batch(engine *e, const weights *w, const k_batch *b, int n_spans) {
    double start = clock_seconds();
    forward_run(e->f, w, b, &e->kv);
    e->totals.seconds_forward += clock_seconds() - start;
    advance(e, n_spans);
    int n_wants = list_wants(e, n_spans);
    for (int first = 0; first < n_wants; first += MAX_LOGITS) {
        int n = n_wants - first < MAX_LOGITS ? n_wants - first : MAX_LOGITS;
        for (int i = 0; i < n; i++) e->index[i] = e->wants[first + i].token;
        start = clock_seconds();
        const float *logits = forward_logits(e->f, w, e->index, n);
        e->totals.seconds_forward += clock_seconds() - start;
        use_logits(e, e->wants + first, n, logits);
    }
    cop_error err;
    if (k_sync(e->k, &err) != COP_OK)
        fail_all(e, &err);
    else
        remember(e, w, n_spans);
    finish_scores(e, n_spans);
}

/* One pass for each set of weights that the step needs.  A sequence's bits do not depend on what else is in
 * its batch, so it does not matter how the batch is divided.  False: nothing was planned. */
static bool run_batches(engine *e) {
    bool any = false;
    for (const weights *w = e->w; w; w = w->next) {
        k_batch b;
        int n_spans = collect(e, w, &b);
        if (n_spans == 0) continue;
        any = true;
        where_batch(&e->where, n_spans, b.n);
        run_batch(e, w, &b, n_spans);
    }
    return any;
}

/* Whether something may still start by itself. */
static bool has_unparked(const engine *e) {
    for (const engine_job *j = e->jobs; j; j = j->next) {
        if (!j->parked) return true;
    }
    return false;
}

static bool step(engine *e) {
    if (!e->bound) k_bind(e->k);
    e->bound = true;
    admission_run(e);
    finish_sweep(e); /* a first token can end a sample, and a sequence of one token needs no pass */
    plan_step(e);
    /* All that there was ended with its first token, or nothing is left but what is parked. */
    if (!run_batches(e)) return e->n_tasks > 0 || has_unparked(e);
    e->totals.steps++;
    finish_sweep(e); /* what ended makes room */
    admission_run(e);
    finish_sweep(e);
    return true;
}

bool engine_step(engine *e) {
    if (!e->jobs || e->pause == ENGINE_HOLD) return false;
    if (e->pause == ENGINE_FINISH && engine_is_quiet(e)) return false;
    where_begin(&e->where);
    bool more = step(e);
    where_end(&e->where);
    return more;
}
