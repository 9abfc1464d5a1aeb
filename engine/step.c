/* One step: collect a ragged batch, run it, use its logits. */
#include "engine/engine_internal.h"

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
                .want_model = r->row.rules->model_logprobs};
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
        if (j->over) continue;
        if (d->token < 0) {
            cop_fail(&err, COP_EMODEL,
                     "the model computed a logit that is no number, at token %d of sample %u of prompt %zu",
                     row_index(&r->row), (unsigned)(r->prompt->first_sample + r->index),
                     (size_t)(r->prompt - j->prompts));
            finish_failed(j, &err);
        } else if (row_draw(&r->row, d->token, d->logprob, d->model_logprob, d->n_kept, &err) != COP_OK) {
            finish_failed(j, &err);
        } else if (r->row.state != ROW_RUNNING) {
            finish_sample(e, r->prompt, r->index, &r->row);
        }
    }
}

/* ---- The step. */

/* Put up to `most` pending tokens of a sequence into the batch. */
static int add_span(engine *e, k_batch *b, int *n_spans, span_kind kind, sequence *s, void *owner, int most) {
    int n = sequence_pending(s) < most ? sequence_pending(s) : most;
    if (n <= 0) return 0;
    sequence_extend(s, &e->pool, s->n_computed + n);
    int table = *n_spans;
    memcpy(e->pages + (size_t)table * (size_t)e->page_stride, s->pages,
           (size_t)s->n_pages * sizeof *s->pages);
    e->spans[(*n_spans)++] = (span){.kind = kind, .seq = s, .owner = owner, .first = b->n, .n = n};
    for (int i = 0; i < n; i++, b->n++) {
        int pos = s->n_computed + i;
        e->ids[b->n] = sequence_token(s, pos);
        e->prev[b->n] = pos > 0 ? sequence_token(s, pos - 1) : -1;
        e->pos[b->n] = pos;
        e->table[b->n] = table;
    }
    return n;
}

/* Whether a sample waits for this prompt to be computed. */
static bool is_awaited(const prompt *p) { return p->n_granted > p->n_started; }

static bool rows_held(const engine *e) {
    bool held = false;
    for (size_t i = 0; i < e->n_prompts && e->o.hold_rows; i++) held = held || is_awaited(e->prompts[i]);
    return held;
}

static int collect(engine *e, k_batch *b) {
    int n_spans = 0, budget = e->o.step_tokens;
    int n_rows = rows_held(e) ? 0 : e->n_rows;
    int span_tokens = e->o.span_tokens ? e->o.span_tokens : budget;
    *b = (k_batch){.ids = e->ids,
                   .prev = e->prev,
                   .pos = e->pos,
                   .table = e->table,
                   .pages = e->pages,
                   .page_stride = e->page_stride};
    /* A row always moves by a token; the rest of a forced span counts against the budget like prompts do. */
    for (int i = 0; i < n_rows; i++) {
        int most = 1 + (span_tokens - 1 < budget ? span_tokens - 1 : budget);
        budget -= add_span(e, b, &n_spans, SPAN_ROW, &e->rows[i]->row.seq, e->rows[i], most) - 1;
    }
    for (size_t i = 0; i < e->n_prompts; i++) {
        if (!is_awaited(e->prompts[i])) continue;
        int most = span_tokens < budget ? span_tokens : budget;
        budget -= add_span(e, b, &n_spans, SPAN_PROMPT, &e->prompts[i]->seq, e->prompts[i], most);
    }
    for (size_t i = 0; i < e->n_scores; i++) {
        int most = span_tokens < budget ? span_tokens : budget;
        budget -= add_span(e, b, &n_spans, SPAN_SCORE, &e->scores[i]->seq, e->scores[i], most);
    }
    return n_spans;
}

/* Which tokens need logits: the last one of a row or prompt that is now computed whole, all of a scored
 * sequence. */
static int list_wants(engine *e, int n_spans) {
    int n = 0;
    for (int i = 0; i < n_spans; i++) {
        const span *s = &e->spans[i];
        if (s->kind != SPAN_SCORE && sequence_pending(s->seq) > 0) continue;
        for (int t = s->kind == SPAN_SCORE ? 0 : s->n - 1; t < s->n; t++)
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
        if (wants[i].span->kind == SPAN_SCORE) {
            int pos = e->pos[wants[i].token];
            e->targets[n_targets++] = target_of(wants[i].span->owner, pos, i);
        }
    }
    if (n_targets == 0) return;
    bool ok = k_score(e->k, e->target_logprobs, e->targets, n_targets, logits, e->a.vocab, e->a.vocab);
    for (int i = 0, t = 0; i < n; i++) {
        if (wants[i].span->kind != SPAN_SCORE) continue;
        scored *s = wants[i].span->owner;
        int pos = e->pos[wants[i].token];
        if (e->targets[t].token >= 0) s->logprobs[pos + 1] = e->target_logprobs[t];
        t++;
        if (!ok) {
            /* The backend tells only that one of them is bad: blame each job that took part. */
            cop_error err;
            cop_fail(&err, COP_EMODEL, "the model computed a logit that is no number while scoring");
            finish_failed(s->job, &err);
        }
    }
}

/* What follows from the logits of wants[0 .. n). */
static void use_logits(engine *e, const want *wants, int n, const float *logits) {
    int n_drawing = 0;
    where_is(&e->where, "results", -1);
    for (int i = 0; i < n; i++) {
        if (wants[i].span->kind == SPAN_ROW) {
            live_row *r = wants[i].span->owner;
            e->drawing[n_drawing] = r;
            e->draws[n_drawing++] = step_draw(r, i);
        } else if (wants[i].span->kind == SPAN_PROMPT) {
            prompt *p = wants[i].span->owner;
            k_copy(e->k, p->logits, logits + (size_t)i * (size_t)e->a.vocab, (size_t)e->a.vocab);
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
        e->spans[i].seq->n_computed += e->spans[i].n;
        if (e->spans[i].kind == SPAN_PROMPT) e->totals.prefilled_tokens += (uint64_t)e->spans[i].n;
    }
}

static void run_batch(engine *e, const k_batch *b, int n_spans) {
    double start = clock_seconds();
    forward_run(e->f, b, &e->kv);
    e->totals.seconds_forward += clock_seconds() - start;
    e->totals.steps++;
    advance(e, n_spans);
    int n_wants = list_wants(e, n_spans);
    for (int first = 0; first < n_wants; first += MAX_LOGITS) {
        int n = n_wants - first < MAX_LOGITS ? n_wants - first : MAX_LOGITS;
        for (int i = 0; i < n; i++) e->index[i] = e->wants[first + i].token;
        start = clock_seconds();
        const float *logits = forward_logits(e->f, e->index, n);
        e->totals.seconds_forward += clock_seconds() - start;
        use_logits(e, e->wants + first, n, logits);
    }
    cop_error err;
    if (k_sync(e->k, &err) != COP_OK) fail_all(e, &err);
    for (size_t i = 0; i < e->n_scores; i++) {
        if (sequence_pending(&e->scores[i]->seq) == 0 && !e->scores[i]->job->over)
            finish_scored(e->scores[i]);
    }
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
    admission_grant(e);
    admission_start(e);
    finish_sweep(e); /* a first token can end a sample, and a sequence of one token needs no pass */
    k_batch b;
    int n_spans = collect(e, &b);
    if (n_spans == 0)
        return has_unparked(e); /* all that there was ended with its first token, or is parked */
    where_batch(&e->where, n_spans, b.n);
    run_batch(e, &b, n_spans);
    admission_start(e);
    finish_sweep(e);
    return true;
}

bool engine_step(engine *e) {
    if (!e->jobs) return false;
    where_begin(&e->where);
    bool more = step(e);
    where_end(&e->where);
    return more;
}
