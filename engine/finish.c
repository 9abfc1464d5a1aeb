/* Ends: what samples, scores and jobs tell, and how they leave. */
#include "engine/engine_internal.h"

void finish_sample(engine *e, prompt *p, uint32_t index, const row *r) {
    static const float no_float = 0.0f;
    static const int32_t no_id = 0;
    static const uint32_t no_offset = 0;
    engine_job *j = p->job;
    sample_result s = {.prompt = (uint32_t)(p - j->prompts),
                       .sample = p->first_sample + index,
                       .seed = p->seed,
                       .finish = FINISH_CANCELLED,
                       .stop = -1};
    if (r) row_result(r, &s);
    const weights_run run = {0, e->label};
    if (s.n_tokens > 0 && s.n_weights == 0) { /* what a prefix forced, of a sample that never started */
        s.weights = &run;
        s.n_weights = 1;
    }
    if (!s.logprobs && j->rules.logprobs) s.logprobs = &no_float;
    if (!s.model_logprobs && j->rules.model_logprobs) s.model_logprobs = &no_float;
    if (!s.entropy && j->rules.entropy) s.entropy = &no_float;
    if (!s.kept_offsets && j->rules.kept) {
        s.kept_ids = &no_id;
        s.kept_offsets = &no_offset;
    }
    uint64_t n_drawn = r ? r->n_drawn : 0, n_forced = r ? r->n_forced : 0;
    j->totals.samples++;
    j->totals.sampled_tokens += n_drawn;
    j->totals.forced_tokens += n_forced;
    e->totals.samples++;
    e->totals.sampled_tokens += n_drawn;
    e->totals.forced_tokens += n_forced;
    j->n_open--;
    p->n_ended += s.finish != FINISH_CANCELLED;
    if (prompt_settled(p)) j->settles = true;
    j->events.sample(j->events.context, &s);
}

void finish_cancelled(engine *e, live_row *r) {
    row_cancel(&r->row);
    finish_sample(e, r->prompt, r->index, &r->row);
}

void finish_failed(engine_job *j, const cop_error *err) {
    if (j->over) return;
    j->over = true;
    j->failure = *err;
}

static bool is_over(const task *t) {
    if (task_job(t)->over) return true;
    switch (t->kind) {
    case TASK_PROMPT: return task_prompt(t)->n_started == task_prompt(t)->job->n || task_job(t)->parked;
    case TASK_ROW: return task_row(t)->row.state != ROW_RUNNING;
    default: return task_scored(t)->n_scored == task_scored(t)->seq.n;
    }
}

static void drop(engine *e, task *t) {
    if (t->kind == TASK_ROW) {
        row_free(&task_row(t)->row, &e->pool);
        mem_free(task_row(t));
        e->n_rows--;
        return;
    }
    sequence_release(task_sequence(t), &e->pool);
    if (t->kind != TASK_PROMPT) return;
    e->slot_used[task_prompt(t)->slot] = false;
    task_prompt(t)->ready = false; /* that of a parked job is listed again */
}

/* Cancel the samples of a settled prompt that have not ended; those that have not started never will. */
static void settle(engine *e, prompt *p) {
    for (int i = 0; i < e->n_tasks; i++) {
        if (e->tasks[i]->kind != TASK_ROW) continue;
        live_row *r = task_row(e->tasks[i]);
        if (r->prompt != p || r->row.state != ROW_RUNNING) continue;
        finish_cancelled(e, r);
    }
    for (uint32_t s = p->n_started; s < p->job->n; s++) finish_sample(e, p, s, NULL);
    p->n_started = p->job->n;
}

static void settle_prompts(engine *e, engine_job *j) {
    for (size_t i = 0; j->settles && !j->over && i < j->n_prompts; i++) {
        if (prompt_settled(&j->prompts[i])) settle(e, &j->prompts[i]);
    }
    j->settles = false;
}

/* The youngest first, so that of idle pages those of the oldest are kept for longest. */
static void sweep_tasks(engine *e) {
    for (int i = e->n_tasks - 1; i >= 0; i--) {
        if (!is_over(e->tasks[i])) continue;
        drop(e, e->tasks[i]);
        e->tasks[i] = NULL;
    }
    int n = 0;
    for (int i = 0; i < e->n_tasks; i++) {
        if (e->tasks[i]) e->tasks[n++] = e->tasks[i];
    }
    e->n_tasks = n;
}

static void job_tell_end(const engine *e, engine_job *j) {
    if (j->silent) return;
    bool rollout = j->kind == JOB_ROLLOUT;
    if (j->failure.status != COP_OK) {
        if (rollout)
            j->events.failed(j->events.context, &j->failure);
        else
            j->score.failed(j->score.context, &j->failure);
    } else if (rollout) {
        j->totals.seconds = clock_seconds() - j->start;
        j->events.done(j->events.context, &j->totals);
    } else {
        j->score.done(j->score.context, j->weights ? &j->label : &e->label);
    }
}

void finish_sweep(engine *e) {
    for (engine_job *j = e->jobs; j; j = j->next) {
        settle_prompts(e, j);
        j->over = j->over || j->n_open == 0;
    }
    sweep_tasks(e);
    engine_job **link = &e->jobs;
    while (*link) {
        engine_job *j = *link;
        if (!j->over) {
            link = &j->next;
            continue;
        }
        *link = j->next;
        job_tell_end(e, j);
        job_close(j);
    }
    weights_sweep(e, false);
}

void finish_scored(scored *s) {
    engine_job *j = s->job;
    int top = j->score.top;
    score_result r = {.n = (size_t)s->n_tokens, .logprobs = s->logprobs, .top = top};
    if (top > 0) {
        r.top_ids = s->top_ids;
        r.top_logprobs = s->top_logprobs;
        r.next_ids = s->next_ids;
        r.next_logprobs = s->next_logprobs;
    }
    j->n_open--;
    j->score.scored(j->score.context, (size_t)(s - j->scores), &r);
}
