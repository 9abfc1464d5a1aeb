/* How far each task moves in a step, and who gives its pages back when they run out.
 *
 *   budget = step_tokens      row  row  row(forced span)  prompt      prompt    score
 *   tokens in the step         1    1    1 + 5             300         207       0
 *   of the budget              -    -    5                 300         207       nothing left
 *
 * Every row moves by a token at least, so that none waits for prompts; the rest is shared out by age.  Where
 * the pool has no page for a task, the youngest that holds any gives back all of its pages, which may be that
 * task itself.  It is never one that the plan has dealt with before, for those are older. */
#include "engine/engine_internal.h"

engine_job *task_job(const task *t) {
    switch (t->kind) {
    case TASK_PROMPT: return task_prompt(t)->job;
    case TASK_ROW: return task_row(t)->prompt->job;
    default: return task_scored(t)->job;
    }
}

sequence *task_sequence(const task *t) {
    switch (t->kind) {
    case TASK_PROMPT: return &task_prompt(t)->seq;
    case TASK_ROW: return &task_row(t)->row.seq;
    default: return &task_scored(t)->seq;
    }
}

void plan_preempt(engine *e, task *t) {
    assert(t->runs);
    sequence_release(task_sequence(t), &e->pool);
    t->runs = false;
    t->n_step = 0;
    if (t->kind == TASK_PROMPT) task_prompt(t)->ready = false;
    e->totals.preemptions++;
}

/* Pages for n more tokens of e->tasks[at].  False: it was itself the youngest, and waits now. */
static bool provide_pages(engine *e, int at, int n) {
    sequence *s = task_sequence(e->tasks[at]);
    int youngest = e->n_tasks - 1;
    while (!sequence_extend(s, &e->pool, s->n_computed + n)) {
        while (youngest > at && task_sequence(e->tasks[youngest])->n_pages == 0) youngest--;
        plan_preempt(e, e->tasks[youngest]);
        if (youngest == at) return false;
    }
    return true;
}

/* Whether rows wait because a prompt is being computed (engine_options.hold_rows). */
static bool rows_held(const engine *e) {
    bool held = false;
    for (int i = 0; i < e->n_tasks && e->o.hold_rows; i++) {
        const task *t = e->tasks[i];
        held = held || (t->kind == TASK_PROMPT && t->runs && !task_prompt(t)->ready);
    }
    return held;
}

void plan_step(engine *e) {
    int budget = e->o.step_tokens, span_tokens = e->o.span_tokens ? e->o.span_tokens : budget;
    bool held = rows_held(e);
    for (int i = 0; i < e->n_tasks; i++) {
        task *t = e->tasks[i];
        bool is_row = t->kind == TASK_ROW;
        t->n_step = 0;
        if (!t->runs || (is_row && held)) continue;
        int n = sequence_pending(task_sequence(t));
        if (n > span_tokens) n = span_tokens;
        if (n > budget + is_row) n = budget + is_row;
        if (n == 0 || !provide_pages(e, i, n)) continue;
        t->n_step = n;
        budget -= n - is_row;
    }
}
