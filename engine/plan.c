/* How far each task moves in a step, and who gives its pages back when they run out.
 *
 *   budget = step_tokens      row  row  row(forced span)  prompt      prompt    score
 *   tokens in the step         1    1    1 + 5             300         207       0
 *   of the budget              -    -    5                 300         207       nothing left
 *
 * Every row moves by a token at least, so that none waits for prompts; the rest is shared out by age.  But a
 * row with more than a page to compute lost its pages and is like a prompt: it has what the budget leaves.
 * And what would begin a page that an older task is computing in this very step waits, to find it in the
 * cache: so samples of one prompt that all lost their pages compute it once.  It waits only in steps in which
 * the older one moves, and that leaves the page after at most as many steps as the page has tokens.
 *
 * Where the pool has no page for a task, the youngest that holds any gives back all of its pages, which may
 * be that task itself.  It is never one that the plan has dealt with before, for those are older.  A kept row
 * gives nothing back, for nothing could compute it again: where it gets no page, it stands still.  The first
 * task of the step that has something to compute need not stand still: where nobody else can give way, the
 * youngest kept row ends.  After that no other task holds pages, and no task needs more than the pool has; so
 * in each step the first one moves, whatever runs beside it.  It gets to its end, and then the next one is
 * the first. */
#include "engine/engine_internal.h"

prompt *task_whose(const task *t) { return t->kind == TASK_ROW ? task_row(t)->prompt : task_prompt(t); }

engine_job *task_job(const task *t) {
    return t->kind == TASK_SCORE ? task_scored(t)->job : task_whose(t)->job;
}

sequence *task_sequence(const task *t) {
    switch (t->kind) {
    case TASK_PROMPT: return &task_prompt(t)->seq;
    case TASK_ROW: return &task_row(t)->row.seq;
    default: return &task_scored(t)->seq;
    }
}

const weights *task_weights(const engine *e, const task *t) {
    switch (t->kind) {
    case TASK_PROMPT: return e->w;
    case TASK_ROW: return task_row(t)->weights;
    default: return task_job(t)->weights;
    }
}

int task_restorable(const task *t) {
    return t->kind == TASK_SCORE ? task_scored(t)->n_scored : task_sequence(t)->n - 1;
}

void plan_preempt(engine *e, task *t) {
    assert(t->runs && !task_is_kept(t));
    sequence_release(task_sequence(t), &e->pool);
    t->runs = false;
    t->n_step = 0;
    if (t->kind == TASK_PROMPT) task_prompt(t)->ready = false;
    e->totals.preemptions++;
}

/* ---- Pages. */

/* The youngest task after e->tasks[at] that holds pages and is kept, or is not.  Of the others, what does not
 * go on gives way wherever it stands.  NULL: there is none. */
static task *youngest(const engine *e, int at, bool kept) {
    for (int i = e->n_tasks - 1; i >= 0; i--) {
        task *t = e->tasks[i];
        if (task_sequence(t)->n_pages == 0 || task_is_kept(t) != kept) continue;
        if (i > at || !plan_goes_on(e, t)) return t;
    }
    return NULL;
}

/* End a kept row: its pages are there at once, the row is dropped by the sweep. */
static void end_kept(engine *e, task *t) {
    finish_cancelled(e, task_row(t));
    sequence_release(task_sequence(t), &e->pool);
    t->runs = false;
}

/* Pages for n more tokens of e->tasks[at].  first: nothing before it moves in this step.  False: there are
 * none; it stands still if it is kept, else it waits now. */
static bool provide_pages(engine *e, int at, int n, bool first) {
    task *t = e->tasks[at], *other;
    sequence *s = task_sequence(t);
    while (!sequence_extend(s, &e->pool, s->n_computed + n)) {
        if ((other = youngest(e, at, false))) {
            plan_preempt(e, other);
        } else if (first && (other = youngest(e, at, true))) {
            end_kept(e, other);
        } else {
            if (!task_is_kept(t)) plan_preempt(e, t);
            return false;
        }
    }
    return true;
}

/* ---- Pages that an older task is about to let the cache know. */

/* Whether page k, which is the next of t, is the next of u too, which has all of its tokens.  What lies
 * before is the same if the page before is, for the cache knows it. */
static bool same_next_page(const sequence *t, const sequence *u, int k) {
    if (u->n_computed / KV_PAGE_TOKENS != k || u->n < (k + 1) * KV_PAGE_TOKENS) return false;
    if (k > 0 && t->pages[k - 1] != u->pages[k - 1]) return false;
    for (int i = k * KV_PAGE_TOKENS; i < (k + 1) * KV_PAGE_TOKENS; i++) {
        if (sequence_token(t, i) != sequence_token(u, i)) return false;
    }
    return true;
}

/* Whether an older task moves, in this step, through the page that e->tasks[at] would begin and could take.
 */
static bool waits_for_older(const engine *e, int at) {
    const task *t = e->tasks[at];
    const sequence *s = task_sequence(t);
    int k = s->n_known;
    if (!e->pool.caches || task_is_kept(t) || s->n_computed != k * KV_PAGE_TOKENS) return false;
    if ((k + 1) * KV_PAGE_TOKENS > task_restorable(t)) return false;
    for (int i = 0; i < at; i++) {
        const task *older = e->tasks[i];
        if (older->n_step == 0 || task_is_kept(older)) continue;
        if (task_weights(e, older) == task_weights(e, t) && same_next_page(s, task_sequence(older), k))
            return true;
    }
    return false;
}

/* ---- The plan. */

/* Whether rows wait because a prompt is being computed (engine_options.hold_rows). */
static bool rows_held(const engine *e) {
    bool held = false;
    for (int i = 0; i < e->n_tasks && e->o.hold_rows; i++) {
        const task *t = e->tasks[i];
        if (t->kind != TASK_PROMPT || !plan_goes_on(e, t)) continue;
        held = held || (t->runs && !task_prompt(t)->ready);
    }
    return held;
}

void plan_step(engine *e) {
    int budget = e->o.step_tokens, span_tokens = e->o.span_tokens ? e->o.span_tokens : budget;
    bool held = rows_held(e), first = true;
    for (int i = 0; i < e->n_tasks; i++) {
        task *t = e->tasks[i];
        bool is_row = t->kind == TASK_ROW;
        t->n_step = 0;
        if (!t->runs || !plan_goes_on(e, t) || (is_row && held)) continue;
        bool far = sequence_pending(task_sequence(t)) > KV_PAGE_TOKENS;
        if (far && !task_is_kept(t)) admission_restore(e, t);
        int n = sequence_pending(task_sequence(t)), extra = is_row && n <= KV_PAGE_TOKENS;
        if (n > span_tokens) n = span_tokens;
        if (n > budget + extra) n = budget + extra;
        if (n == 0 || (far && waits_for_older(e, i)) || !provide_pages(e, i, n, first)) continue;
        t->n_step = n;
        budget -= n - extra;
        first = false;
    }
}
