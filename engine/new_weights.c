/* New weights between two steps, and pausing.
 *
 *   e->w --> set in use --> older set --> older set       each with a root of its own in the prefix cache
 *              ^   ^           ^             ^
 *        prompts   rows       rows that WEIGHTS_FINISH lets end, scores that began under it
 *
 * A prompt always is of the set in use: its samples that have not started start under that.  An older set is
 * closed by the first sweep that finds nothing running on it. */
#include <string.h>

#include "engine/engine_internal.h"

/* ---- Pausing. */

void engine_pause(engine *e, engine_pause_mode mode) { e->pause = mode; }

bool engine_is_quiet(const engine *e) {
    for (int i = 0; i < e->n_tasks; i++) {
        if (e->tasks[i]->kind != TASK_PROMPT) return false;
    }
    return true;
}

/* The row at e->tasks[i] if it is in flight, or NULL. */
static live_row *row_in_flight(const engine *e, int i) {
    const task *t = e->tasks[i];
    if (t->kind != TASK_ROW || task_job(t)->over) return NULL;
    return task_row(t)->row.state == ROW_RUNNING ? task_row(t) : NULL;
}

void engine_abort_rows(engine *e) {
    for (int i = 0; i < e->n_tasks; i++) {
        live_row *r = row_in_flight(e, i);
        if (r) finish_cancelled(e, r);
    }
    finish_sweep(e);
}

/* ---- New weights. */

static bool runs_on(const engine *e, const weights *w) {
    for (int i = 0; i < e->n_tasks; i++) {
        if (task_weights(e, e->tasks[i]) == w) return true;
    }
    for (const engine_job *j = e->jobs; j; j = j->next) {
        if (j->weights == w) return true; /* a score, between two of its sequences */
    }
    return false;
}

void weights_sweep(engine *e, bool all) {
    weights **link = all || !e->w ? &e->w : &e->w->next; /* none: the engine could not be opened */
    while (*link) {
        weights *w = *link;
        if (!all && runs_on(e, w)) {
            link = &w->next;
            continue;
        }
        *link = w->next;
        weights_close(w);
        e->n_weights--;
    }
}

/* Make w the set in use. */
static void put_in_use(engine *e, weights *w) {
    w->root = kv_pool_root(&e->pool);
    w->next = e->w;
    e->w = w;
    e->n_weights++;
    memcpy(e->label.digest, w->digest, sizeof e->label.digest);
    for (int i = 0; i < e->n_tasks; i++) {
        task *t = e->tasks[i];
        if (t->kind == TASK_PROMPT && t->runs) plan_preempt(e, t);
    }
}

/* Let a row in flight go on under the set in use.  Without K and V there is nothing to keep; and where no
 * token was drawn with them yet, they are computed again, so that nothing but what its runs name is in it. */
static void move_row(engine *e, live_row *r, bool keep) {
    r->weights = e->w;
    r->kept = keep && r->row.seq.n_computed > 0 && r->row.n_drawn > 0;
    if (!r->kept && r->task.runs) plan_preempt(e, &r->task);
}

static void change_row(engine *e, live_row *r, weights_policy policy) {
    bool moves = r->weights != e->w;
    if (policy == WEIGHTS_FINISH) return;
    if (policy == WEIGHTS_ABORT && moves) {
        finish_cancelled(e, r);
        return;
    }
    if (moves) move_row(e, r, policy == WEIGHTS_KEEP);
    cop_error err;
    if (row_relabel(&r->row, &e->label, &err) != COP_OK) finish_failed(r->prompt->job, &err);
}

void engine_use_weights(engine *e, weights *w, uint64_t version, weights_policy policy) {
    e->label.version = version;
    if (strcmp(w->digest, e->w->digest))
        put_in_use(e, w);
    else
        engine_drop_weights(e, w);
    for (int i = e->n_tasks - 1; i >= 0; i--) { /* as in the sweep, pages of the oldest become idle last */
        live_row *r = row_in_flight(e, i);
        if (r) change_row(e, r, policy);
    }
    finish_sweep(e);
}

void engine_drop_weights(engine *e, weights *w) {
    (void)e;
    weights_close(w);
}

/* ---- Facts. */

const char *engine_weights_digest(const weights *w) { return w->digest; }
const weights_label *engine_weights(const engine *e) { return &e->label; }
int engine_n_weights(const engine *e) { return atomic_load(&e->n_weights); }
