/* The engine: admission, the step, events.
 *
 *   jobs (order of arrival) -> grant: reserve pages -> prefill the prompt -> start samples: fork, draw the
 * first token
 *        -> each step: feed what is pending, draw -> finished rows leave at once -> events
 *
 * Grants are first come, first served: the first sample that does not fit waits, and everything behind it
 * too.  A granted sample always runs to its end, so the one at the head always gets its turn (until
 * preemption exists). */
#include "engine/engine.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "engine/forward.h"
#include "engine/job.h"

enum {
    MAX_LOGITS = 128, /* rows of logits computed at a time */
};

typedef struct live_row {
    row row;
    prompt *prompt;
    uint32_t index; /* of the sample among its prompt's */
} live_row;

/* What one sequence has in the batch of a step. */
typedef enum span_kind { SPAN_PROMPT, SPAN_ROW, SPAN_SCORE } span_kind;
typedef struct span {
    span_kind kind;
    sequence *seq;
    void *owner;  /* prompt, live_row or scored */
    int first, n; /* tokens [first, first + n) of the batch */
} span;

/* A token of the batch whose logits are needed. */
typedef struct want {
    const span *span;
    int32_t token; /* of the batch */
} want;

struct engine {
    k_ctx *k;
    arch a;
    weights *w;
    forward *f;
    const tokenizer *tokenizer;
    engine_options o;
    int context;
    char numerics[16];

    kv_pool pool;
    k_kv kv;
    job_limits limits;
    int32_t stop_tokens[2];

    engine_job *jobs; /* in order of arrival */
    live_row **rows;  /* [n_rows], in order of start: rows of one prompt are neighbours */
    int n_rows;
    int n_promised;   /* samples that are granted and not started */
    prompt **prompts; /* [n_prompts] admitted */
    size_t n_prompts, cap_prompts;
    scored **scores; /* [n_scores] granted */
    size_t n_scores, cap_scores;

    /* The step: all [max_tokens]. */
    int max_tokens, page_stride;
    int32_t *ids, *prev, *pos, *table, *pages, *index;
    span *spans;
    want *wants;
    live_row **drawing;
    k_draw *draws;
    k_drawn *drawn;
    k_target *targets;
    float *target_logprobs;

    engine_status totals; /* the counters of it */
};

static double now_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

engine_options engine_defaults(void) { return (engine_options){.max_rows = 1024, .step_tokens = 512}; }

rollout_sampling rollout_sampling_defaults(void) {
    return (rollout_sampling){.max_tokens = 256, .temperature = 1.0, .top_p = 1.0, .logprobs = true};
}

/* ---- Life. */

static size_t free_memory(void) {
    size_t kib = 0;
    FILE *f = fopen("/proc/meminfo", "re");
    char line[128];
    while (f && fgets(line, sizeof line, f) && sscanf(line, "MemAvailable: %zu kB", &kib) != 1) continue;
    if (f) fclose(f);
    return kib ? kib * 1024 : (size_t)1 << 30;
}

static cop_status open_pool(engine *e, cop_error *err) {
    size_t page_bytes = k_page_bytes(e->k, e->a.n_layers, e->a.n_kv_heads, e->a.head_dim);
    size_t bytes = e->o.kv_memory ? e->o.kv_memory : free_memory() / 4;
    size_t n = bytes / page_bytes;
    if (n > (size_t)1 << 30) n = (size_t)1 << 30;
    if (n == 0)
        return cop_fail(err, COP_EINVAL,
                        "cannot keep a KV page of %zu bytes in %zu bytes of KV memory: raise --kv-memory",
                        page_bytes, bytes);
    e->kv = (k_kv){.n_layers = e->a.n_layers, .n_kv_heads = e->a.n_kv_heads, .head_dim = e->a.head_dim};
    e->kv.arena = k_alloc(e->k, n, page_bytes);
    if (!e->kv.arena)
        return cop_fail(err, COP_ENOMEM, "could not allocate %zu KV pages of %zu bytes", n, page_bytes);
    return kv_pool_init(&e->pool, (int)n, err);
}

static cop_status open_step(engine *e, cop_error *err) {
    size_t n = (size_t)e->max_tokens;
    e->page_stride = sequence_pages_for(e->context);
    struct {
        void **p;
        size_t n, size;
    } arrays[] = {{(void **)&e->rows, (size_t)e->o.max_rows, sizeof *e->rows},
                  {(void **)&e->ids, n, sizeof *e->ids},
                  {(void **)&e->prev, n, sizeof *e->prev},
                  {(void **)&e->pos, n, sizeof *e->pos},
                  {(void **)&e->table, n, sizeof *e->table},
                  {(void **)&e->pages, n, (size_t)e->page_stride * sizeof *e->pages},
                  {(void **)&e->index, n, sizeof *e->index},
                  {(void **)&e->spans, n, sizeof *e->spans},
                  {(void **)&e->wants, n, sizeof *e->wants},
                  {(void **)&e->drawing, n, sizeof *e->drawing},
                  {(void **)&e->draws, n, sizeof *e->draws},
                  {(void **)&e->drawn, n, sizeof *e->drawn},
                  {(void **)&e->targets, n, sizeof *e->targets},
                  {(void **)&e->target_logprobs, n, sizeof *e->target_logprobs}};
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) {
        *arrays[i].p = mem_alloc(arrays[i].n, arrays[i].size);
        if (!*arrays[i].p)
            return cop_fail(err, COP_ENOMEM, "could not allocate the arrays of a step of %zu tokens", n);
    }
    return COP_OK;
}

/* The tokens that matter to rows: the model's stop tokens, and whether it can call the calculator. */
static void set_limits(engine *e) {
    e->limits = (job_limits){
        .vocab = e->a.vocab, .context = e->context, .n_pages = e->pool.n_pages, .tokenizer = e->tokenizer};
    e->limits.stop_tokens = e->stop_tokens;
    if (!e->tokenizer) return;
    const token_special stops[] = {TOKEN_ASSISTANT_END, TOKEN_BOS};
    for (int i = 0; i < 2; i++) {
        int32_t id = tokenizer_special(e->tokenizer, stops[i]);
        if (id >= 0) e->stop_tokens[e->limits.n_stop_tokens++] = id;
    }
    e->limits.has_calculator = true;
    for (int s = TOKEN_PYTHON_START; s <= TOKEN_OUTPUT_END; s++) {
        if (tokenizer_special(e->tokenizer, (token_special)s) < 0) e->limits.has_calculator = false;
    }
}

static cop_status open_parts(engine *e, checkpoint *c, cop_error *err) {
    int threads = e->o.n_threads > 0 ? e->o.n_threads : cpu_count();
    cop_status status = k_open(&e->k, e->o.profile, threads, err);
    if (status == COP_OK) status = weights_open(&e->w, e->k, c, err);
    if (status == COP_OK)
        status = forward_open(&e->f, e->k, &e->a, e->w, e->context, e->max_tokens, MAX_LOGITS, err);
    if (status == COP_OK) status = open_pool(e, err);
    if (status == COP_OK) status = open_step(e, err);
    return status;
}

cop_status engine_open(engine **out, checkpoint *c, const tokenizer *t, const engine_options *o,
                       cop_error *err) {
    assert(o->max_rows > 0 && o->step_tokens > 0 && o->span_tokens >= 0);
    const arch *a = checkpoint_arch(c);
    *out = NULL;
    if (t && tokenizer_vocab(t) != a->vocab)
        return cop_fail(err, COP_EFORMAT, "the tokenizer has %d ids, but the model %d", tokenizer_vocab(t),
                        a->vocab);
    if (o->context < 0 || o->context > a->context)
        return cop_fail(err, COP_EINVAL, "cannot use a context of %d: the model's is %d", o->context,
                        a->context);
    engine *e = mem_zalloc(1, sizeof *e);
    if (!e) return cop_fail(err, COP_ENOMEM, "could not allocate the engine");
    e->a = *a;
    e->o = *o;
    e->tokenizer = t;
    e->context = o->context ? o->context : a->context;
    e->max_tokens = o->max_rows + o->step_tokens;
    snprintf(e->numerics, sizeof e->numerics, "cop1-%s", o->profile == PRECISION_BF16 ? "bf16" : "f32");
    cop_status status = open_parts(e, c, err);
    if (status != COP_OK) {
        engine_close(e);
        return status;
    }
    set_limits(e);
    *out = e;
    return COP_OK;
}

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

/* ---- Ends of samples and jobs. */

static void emit(engine *e, prompt *p, uint32_t index, const row *r) {
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
    if (!s.logprobs && j->rules.logprobs) s.logprobs = &no_float;
    if (!s.model_logprobs && j->rules.model_logprobs) s.model_logprobs = &no_float;
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
    j->events.sample(j->events.context, &s);
}

static void job_fail(engine_job *j, const cop_error *err) {
    if (j->over) return;
    j->over = true;
    j->failure = *err;
}

static void live_row_close(engine *e, live_row *r) {
    row_free(&r->row, &e->pool);
    mem_free(r);
}

/* A prompt that all samples have left, or whose job is over. */
static void prompt_release(engine *e, prompt *p) {
    while (p->n_granted > p->n_started) {
        kv_pool_unreserve(&e->pool, promised_pages(p, --p->n_granted));
        e->n_promised--;
    }
    sequence_free(&p->seq, &e->pool);
    k_free(e->k, p->logits);
    p->logits = NULL;
    p->admitted = p->ready = false;
}

static void scored_release(engine *e, scored *s) {
    sequence_free(&s->seq, &e->pool);
    s->granted = false;
}

/* Drop what is over: finished rows, prompts whose samples have all started, and everything of jobs that
 * ended. */
static void sweep_parts(engine *e) {
    int n_rows = 0;
    for (int i = 0; i < e->n_rows; i++) {
        live_row *r = e->rows[i];
        if (r->prompt->job->over || r->row.state != ROW_RUNNING)
            live_row_close(e, r);
        else
            e->rows[n_rows++] = r;
    }
    e->n_rows = n_rows;
    size_t n = 0;
    for (size_t i = 0; i < e->n_prompts; i++) {
        prompt *p = e->prompts[i];
        if (p->job->over || p->n_started == p->job->n)
            prompt_release(e, p);
        else
            e->prompts[n++] = p;
    }
    e->n_prompts = n;
    n = 0;
    for (size_t i = 0; i < e->n_scores; i++) {
        scored *s = e->scores[i];
        if (s->job->over || sequence_pending(&s->seq) == 0)
            scored_release(e, s);
        else
            e->scores[n++] = s;
    }
    e->n_scores = n;
}

static void job_tell_end(engine_job *j) {
    if (j->silent) return;
    bool rollout = j->kind == JOB_ROLLOUT;
    if (j->failure.status != COP_OK) {
        if (rollout)
            j->events.failed(j->events.context, &j->failure);
        else
            j->score.failed(j->score.context, &j->failure);
    } else if (rollout) {
        j->totals.seconds = now_seconds() - j->start;
        j->events.done(j->events.context, &j->totals);
    } else {
        j->score.done(j->score.context);
    }
}

static void sweep(engine *e) {
    for (engine_job *j = e->jobs; j; j = j->next) j->over = j->over || j->n_open == 0;
    sweep_parts(e);
    engine_job **link = &e->jobs;
    while (*link) {
        engine_job *j = *link;
        if (!j->over) {
            link = &j->next;
            continue;
        }
        *link = j->next;
        job_tell_end(j);
        job_close(j);
    }
}

void engine_close(engine *e) {
    if (!e) return;
    for (engine_job *j = e->jobs; j; j = j->next) j->over = j->silent = true;
    sweep(e);
    void *arrays[] = {e->rows,    e->ids,   e->prev,    e->pos,   e->table, e->pages,   e->index,
                      e->spans,   e->wants, e->drawing, e->draws, e->drawn, e->targets, e->target_logprobs,
                      e->prompts, e->scores};
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) mem_free(arrays[i]);
    kv_pool_free(&e->pool);
    if (e->k) {
        k_free(e->k, e->kv.arena);
        forward_close(e->f);
        weights_close(e->w);
    }
    k_close(e->k);
    mem_free(e);
}

void engine_cancel(engine *e, engine_job *j) {
    if (j->kind == JOB_ROLLOUT && !j->over) {
        for (int i = 0; i < e->n_rows; i++) {
            live_row *r = e->rows[i];
            if (r->prompt->job == j && r->row.state == ROW_RUNNING) emit(e, r->prompt, r->index, &r->row);
        }
        for (size_t i = 0; i < j->n_prompts; i++) {
            prompt *p = &j->prompts[i];
            for (uint32_t s = p->n_started; s < j->n; s++) emit(e, p, s, p->prepared);
        }
    }
    j->over = true;
    sweep(e);
}

void engine_abandon(engine *e, engine_job *j) {
    j->over = j->silent = true;
    sweep(e);
}

/* ---- Submitting. */

static void enqueue(engine *e, engine_job *j, engine_job **out) {
    engine_job **link = &e->jobs;
    while (*link) link = &(*link)->next;
    *link = j;
    e->totals.requests++;
    e->totals.prompt_tokens += j->totals.prompt_tokens;
    if (out) *out = j;
}

cop_status engine_submit(engine *e, const rollout_spec *spec, engine_job **job, cop_error *err) {
    engine_job *j;
    if (job) *job = NULL;
    cop_status status = job_open_rollout(&j, spec, &e->limits, err);
    if (status == COP_OK) enqueue(e, j, job);
    return status;
}

cop_status engine_submit_score(engine *e, const score_spec *spec, engine_job **job, cop_error *err) {
    engine_job *j;
    if (job) *job = NULL;
    cop_status status = job_open_score(&j, spec, &e->limits, err);
    if (status == COP_OK) enqueue(e, j, job);
    return status;
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
        emit(e, p, 0, p->prepared);
        return true;
    }
    while (p->n_granted < p->job->n) {
        if (e->n_rows + e->n_promised >= e->o.max_rows || !grant_sample(e, p, err, status)) return false;
    }
    return true;
}

static void tell_scored(scored *s) {
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

static bool grant_score(engine *e, scored *s, cop_error *err, cop_status *status) {
    engine_job *j = s->job;
    int n = s->n_tokens - (j->score.top == 0); /* what follows the last token is not always asked for */
    int n_pages = sequence_pages_for(n);
    if (n == 0) {
        tell_scored(s);
        return true;
    }
    if (!kv_pool_reserve(&e->pool, n_pages)) return false;
    *status = sequence_init(&s->seq, s->tokens, n, 0, err);
    if (*status != COP_OK) {
        kv_pool_unreserve(&e->pool, n_pages);
        return false;
    }
    s->seq.n_reserved = n_pages;
    s->granted = true;
    if (!mem_grow((void **)&e->scores, &e->cap_scores, e->n_scores + 1, sizeof *e->scores)) {
        scored_release(e, s);
        *status = cop_fail(err, COP_ENOMEM, "could not start scoring a sequence");
        return false;
    }
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

static void grant(engine *e) {
    for (engine_job *j = e->jobs; j; j = j->next) {
        cop_error err;
        cop_status status = COP_OK;
        if (j->over || grant_job(e, j, &err, &status)) continue;
        if (status == COP_OK) return; /* it waits for pages or rows, and everything behind it too */
        job_fail(j, &err);
    }
}

/* ---- Starting samples of a prompt that is ready. */

static k_draw draw_of(const live_row *r, int logits_row) {
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
                .prompt_hash = p->hash};
    if (row_index(&r->row) < s->min_tokens) {
        d.absent = s->stop_tokens;
        d.n_absent = s->n_stop_tokens;
    }
    return d;
}

/* Draw for e->drawing[0 .. n) with e->draws filled, and let the rows go on. */
static void draw_rows(engine *e, int n, const float *logits) {
    for (int i = 0; i < n; i++) e->draws[i].kept = row_kept_room(&e->drawing[i]->row);
    k_sample(e->k, e->drawn, e->draws, n, logits, e->a.vocab, e->a.vocab);
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
            job_fail(j, &err);
        } else if (row_draw(&r->row, d->token, d->logprob, d->model_logprob, d->n_kept, &err) != COP_OK) {
            job_fail(j, &err);
        } else if (r->row.state != ROW_RUNNING) {
            emit(e, r->prompt, r->index, &r->row);
        }
    }
}

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
            job_fail(p->job, &err);
            break;
        }
        if (sequence_pending(&r->row.seq) > 0) continue; /* its prefix comes first */
        e->drawing[n] = r;
        e->draws[n++] = draw_of(r, 0);
    }
    draw_rows(e, n, p->logits);
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

static int collect(engine *e, k_batch *b) {
    int n_spans = 0, budget = e->o.step_tokens;
    int span_tokens = e->o.span_tokens ? e->o.span_tokens : budget;
    *b = (k_batch){.ids = e->ids,
                   .prev = e->prev,
                   .pos = e->pos,
                   .table = e->table,
                   .pages = e->pages,
                   .page_stride = e->page_stride};
    /* A row always moves by a token; the rest of a forced span counts against the budget like prompts do. */
    for (int i = 0; i < e->n_rows; i++) {
        int most = 1 + (span_tokens - 1 < budget ? span_tokens - 1 : budget);
        budget -= add_span(e, b, &n_spans, SPAN_ROW, &e->rows[i]->row.seq, e->rows[i], most) - 1;
    }
    for (size_t i = 0; i < e->n_prompts; i++) {
        if (e->prompts[i]->n_granted == e->prompts[i]->n_started) continue; /* nobody waits for it now */
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
            job_fail(s->job, &err);
        }
    }
}

/* What follows from the logits of wants[0 .. n). */
static void use_logits(engine *e, const want *wants, int n, const float *logits) {
    int n_drawing = 0;
    for (int i = 0; i < n; i++) {
        if (wants[i].span->kind == SPAN_ROW) {
            live_row *r = wants[i].span->owner;
            e->drawing[n_drawing] = r;
            e->draws[n_drawing++] = draw_of(r, i);
        } else if (wants[i].span->kind == SPAN_PROMPT) {
            prompt *p = wants[i].span->owner;
            k_copy(e->k, p->logits, logits + (size_t)i * (size_t)e->a.vocab, (size_t)e->a.vocab);
            p->ready = true;
        }
    }
    score_tokens(e, wants, n, logits);
    draw_rows(e, n_drawing, logits);
}

static void fail_all(engine *e, const cop_error *err) {
    for (engine_job *j = e->jobs; j; j = j->next) job_fail(j, err);
}

static void advance(engine *e, int n_spans) {
    for (int i = 0; i < n_spans; i++) {
        e->spans[i].seq->n_computed += e->spans[i].n;
        if (e->spans[i].kind == SPAN_PROMPT) e->totals.prefilled_tokens += (uint64_t)e->spans[i].n;
    }
}

static void run_batch(engine *e, const k_batch *b, int n_spans) {
    forward_run(e->f, b, &e->kv);
    e->totals.steps++;
    advance(e, n_spans);
    int n_wants = list_wants(e, n_spans);
    for (int first = 0; first < n_wants; first += MAX_LOGITS) {
        int n = n_wants - first < MAX_LOGITS ? n_wants - first : MAX_LOGITS;
        for (int i = 0; i < n; i++) e->index[i] = e->wants[first + i].token;
        use_logits(e, e->wants + first, n, forward_logits(e->f, e->index, n));
    }
    cop_error err;
    if (k_sync(e->k, &err) != COP_OK) fail_all(e, &err);
    for (size_t i = 0; i < e->n_scores; i++) {
        if (sequence_pending(&e->scores[i]->seq) == 0 && !e->scores[i]->job->over) tell_scored(e->scores[i]);
    }
}

static void start_ready(engine *e) {
    for (size_t i = 0; i < e->n_prompts; i++) start_samples(e, e->prompts[i]);
}

bool engine_step(engine *e) {
    if (!e->jobs) return false;
    grant(e);
    start_ready(e);
    sweep(e); /* a first token can end a sample, and a sequence of one token needs no pass */
    k_batch b;
    int n_spans = collect(e, &b);
    if (n_spans == 0) return true; /* all that there was ended with its first token */
    run_batch(e, &b, n_spans);
    start_ready(e);
    sweep(e);
    return true;
}

/* ---- Facts. */

const arch *engine_arch(const engine *e) { return &e->a; }
const char *engine_digest(const engine *e) { return e->w->digest; }
const char *engine_numerics(const engine *e) { return e->numerics; }
const char *engine_isa(const engine *e) { return cpu_isa_name(k_isa(e->k)); }
int engine_context(const engine *e) { return e->context; }
bool engine_has_calculator(const engine *e) { return e->limits.has_calculator; }

void engine_read_status(const engine *e, engine_status *s) {
    *s = e->totals;
    s->rows = (uint64_t)e->n_rows;
    for (const engine_job *j = e->jobs; j; j = j->next) {
        for (size_t i = 0; i < j->n_prompts; i++) s->queued += j->n - j->prompts[i].n_started;
        for (size_t i = j->cursor; i < j->n_scores; i++) s->queued++;
    }
    s->pages_total = (uint64_t)e->pool.n_pages;
    s->pages_free = (uint64_t)e->pool.n_free;
    s->pages_used = s->pages_total - s->pages_free;
    s->pages_shared = (uint64_t)kv_pool_shared(&e->pool);
}
