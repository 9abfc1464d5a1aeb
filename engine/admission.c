/* Who may start: grants and forks.
 *
 *   jobs (order of arrival) -> grant: reserve pages -> prefill the prompt -> start samples: fork, draw the
 * first token
 *
 * Grants are first come, first served: the first sample that does not fit waits, and everything behind it
 * too.  A granted sample always runs to its end, so the one at the head always gets its turn (until
 * preemption exists). */
#include "engine/engine_internal.h"

#include <assert.h>

/* ---- What a sample needs of the pool. */

/* Pages that a sample needs besides its prompt's full ones. */
static int own_pages(const prompt *p) {
    return sequence_pages_for(p->n_tokens + p->limit) - p->n_tokens / KV_PAGE_TOKENS;
}

static bool has_tail(const prompt *p) { return p->n_tokens % KV_PAGE_TOKENS != 0; }

/* Whether sample number `index` of the prompt takes the prompt's last page over instead of copying it. */
static bool takes_tail(const prompt *p, uint32_t index) {
    return has_tail(p) && (p->tight || index + 1 == p->job->n);
}

/* Promised pages of a sample that are its own from the start. */
static int promised_pages(const prompt *p, uint32_t index) {
    bool first_takes = takes_tail(p, index) && (p->tight || p->job->n == 1);
    return own_pages(p) - first_takes;
}

/* A prompt that all samples have left, or whose job is over. */
void admission_release(engine *e, prompt *p) {
    while (p->n_granted > p->n_started) {
        kv_pool_unreserve(&e->pool, promised_pages(p, --p->n_granted));
        e->n_promised--;
    }
    sequence_free(&p->seq, &e->pool);
    k_free(e->k, p->logits);
    p->logits = NULL;
    p->admitted = p->ready = false;
}

/* ---- Granting: pages are reserved, first come, first served. */

/* Bring a prompt in together with its first sample.  Its last page, if it is not full, is copied for every
 * sample but the last, which takes it over; where the pool has no room for that copy, each sample takes it
 * over and the next one's is computed again (`tight`). */
static bool admit_prompt(engine *e, prompt *p, cop_error *err, cop_status *status) {
    int full = p->n_tokens / KV_PAGE_TOKENS, own = own_pages(p);
    bool copies = has_tail(p) && p->job->n > 1;
    if (!kv_pool_reserve(&e->pool, full + own + copies)) {
        bool idle = e->pool.n_free == e->pool.n_pages && e->pool.n_reserved == 0;
        if (!copies || !idle || !kv_pool_reserve(&e->pool, full + own)) return false;
        p->tight = true;
    }
    *status = sequence_init(&p->seq, p->tokens, p->n_tokens, 0, err);
    p->logits = *status == COP_OK ? k_alloc(e->k, (size_t)e->a.vocab, sizeof(float)) : NULL;
    bool listed =
        p->logits && mem_grow((void **)&e->prompts, &e->cap_prompts, e->n_prompts + 1, sizeof *e->prompts);
    if (!listed) {
        if (*status == COP_OK) {
            *status = cop_fail(err, COP_ENOMEM, "could not admit a prompt of %d tokens", p->n_tokens);
            sequence_free(&p->seq, &e->pool);
        }
        k_free(e->k, p->logits);
        p->logits = NULL;
        kv_pool_unreserve(&e->pool, full + own + (copies && !p->tight));
        return false;
    }
    p->seq.n_reserved = full + has_tail(p);
    p->admitted = true;
    e->prompts[e->n_prompts++] = p;
    return true;
}

static bool grant_sample(engine *e, prompt *p, cop_error *err, cop_status *status) {
    if (!p->admitted) {
        if (!admit_prompt(e, p, err, status)) return false;
    } else {
        if (p->tight && p->n_granted > p->n_started) return false; /* one at a time */
        if (!kv_pool_reserve(&e->pool, own_pages(p))) return false;
        if (p->tight) p->seq.n_reserved++; /* for the page that the sample before took over */
    }
    p->n_granted++;
    e->n_promised++;
    return true;
}

/* True if the prompt's samples have all been granted. */
static bool grant_prompt(engine *e, prompt *p, cop_error *err, cop_status *status) {
    if (p->prepared &&
        p->prepared->state != ROW_RUNNING) { /* nothing to compute: the prefix fills the limit */
        p->n_granted = p->n_started = 1;
        finish_sample(e, p, 0, p->prepared);
        return true;
    }
    while (p->n_granted < p->job->n) {
        if (e->n_rows + e->n_promised >= e->o.max_rows || !grant_sample(e, p, err, status)) return false;
    }
    return true;
}

static bool grant_score(engine *e, scored *s, cop_error *err, cop_status *status) {
    engine_job *j = s->job;
    int n = s->n_tokens - (j->score.top == 0); /* what follows the last token is not always asked for */
    int n_pages = sequence_pages_for(n);
    if (n == 0) {
        finish_scored(s);
        return true;
    }
    if (!mem_grow((void **)&e->scores, &e->cap_scores, e->n_scores + 1, sizeof *e->scores)) {
        *status = cop_fail(err, COP_ENOMEM, "could not start scoring a sequence");
        return false;
    }
    if (!kv_pool_reserve(&e->pool, n_pages)) return false;
    *status = sequence_init(&s->seq, s->tokens, n, 0, err);
    if (*status != COP_OK) {
        kv_pool_unreserve(&e->pool, n_pages);
        return false;
    }
    s->seq.n_reserved = n_pages;
    s->granted = true;
    e->scores[e->n_scores++] = s;
    return true;
}

/* True if everything of the job has been granted. */
static bool grant_job(engine *e, engine_job *j, cop_error *err, cop_status *status) {
    size_t n = j->kind == JOB_ROLLOUT ? j->n_prompts : j->n_scores;
    for (; j->cursor < n; j->cursor++) {
        bool all = j->kind == JOB_ROLLOUT ? grant_prompt(e, &j->prompts[j->cursor], err, status)
                                          : grant_score(e, &j->scores[j->cursor], err, status);
        if (!all) return false;
    }
    return true;
}

void admission_grant(engine *e) {
    for (engine_job *j = e->jobs; j; j = j->next) {
        cop_error err;
        cop_status status = COP_OK;
        if (j->over || j->parked || grant_job(e, j, &err, &status)) continue;
        if (status == COP_OK) return; /* it waits for pages or rows, and everything behind it too */
        finish_failed(j, &err);
    }
}

/* ---- Starting samples of a prompt that is ready. */

/* Give a new row its prompt's pages: full ones shared, the last one copied or taken over. */
static void fork_pages(engine *e, prompt *p, row *r, uint32_t index) {
    sequence *s = &r->seq;
    int full = p->n_tokens / KV_PAGE_TOKENS;
    s->n_reserved = promised_pages(p, index);
    for (int i = 0; i < full; i++) {
        kv_pool_share(&e->pool, p->seq.pages[i]);
        s->pages[s->n_pages++] = p->seq.pages[i];
    }
    if (takes_tail(p, index)) {
        s->pages[s->n_pages++] = p->seq.pages[--p->seq.n_pages];
        p->seq.n_computed = full * KV_PAGE_TOKENS;
        p->ready = false;
        int spare = s->n_pages + s->n_reserved - s->cap_pages; /* promised for a copy that was not made */
        kv_pool_unreserve(&e->pool, spare);
        s->n_reserved -= spare;
    } else if (has_tail(p)) {
        sequence_extend(s, &e->pool, p->n_tokens);
        k_page_copy(e->k, &e->kv, s->pages[full], p->seq.pages[full], p->n_tokens % KV_PAGE_TOKENS);
    }
    s->n_computed = p->n_tokens;
}

static cop_status start_sample(engine *e, prompt *p, live_row **out, cop_error *err) {
    engine_job *j = p->job;
    live_row *r = mem_zalloc(1, sizeof *r);
    cop_status status = r ? COP_OK : cop_fail(err, COP_ENOMEM, "could not start a sample");
    if (p->prepared && r) {
        r->row = *p->prepared;
        mem_free(p->prepared);
        p->prepared = NULL;
    } else if (r) {
        status = row_init(&r->row, &j->rules, p->tokens, p->n_tokens, p->limit, err);
    }
    if (status != COP_OK) {
        mem_free(r);
        return status;
    }
    r->prompt = p;
    r->index = p->n_started;
    fork_pages(e, p, &r->row, r->index);
    p->n_started++;
    e->n_promised--;
    e->rows[e->n_rows++] = *out = r;
    return COP_OK;
}

static void start_samples(engine *e, prompt *p) {
    int n = 0;
    while (p->ready && p->n_started < p->n_granted && !p->job->over) {
        live_row *r;
        cop_error err;
        if (start_sample(e, p, &r, &err) != COP_OK) {
            finish_failed(p->job, &err);
            break;
        }
        if (sequence_pending(&r->row.seq) > 0) continue; /* its prefix comes first */
        e->drawing[n] = r;
        e->draws[n++] = step_draw(r, 0);
    }
    step_draw_rows(e, n, p->logits);
}

void admission_start(engine *e) {
    for (size_t i = 0; i < e->n_prompts; i++) start_samples(e, e->prompts[i]);
}
