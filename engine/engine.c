/* The engine: its life, what is submitted to it, facts about it. */
#include "engine/engine.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "engine/engine_internal.h"

engine_options engine_defaults(void) { return (engine_options){.max_rows = 1024, .step_tokens = 512}; }

rollout_sampling rollout_sampling_defaults(void) {
    return (rollout_sampling){.max_tokens = 256, .temperature = 1.0, .top_p = 1.0, .logprobs = true};
}

/* ---- Life. */

static cop_status open_pool(engine *e, cop_error *err) {
    size_t page_bytes = k_page_bytes(e->k, e->a.n_layers, e->a.n_kv_heads, e->a.head_dim);
    size_t bytes = e->o.kv_memory ? e->o.kv_memory : mem_available() / 4;
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
    return kv_pool_init(&e->pool, (int)n, !e->o.no_prefix_cache, err);
}

static cop_status open_step(engine *e, cop_error *err) {
    size_t n = (size_t)e->max_tokens;
    e->page_stride = sequence_pages_for(e->context);
    struct {
        void **p;
        size_t n, size;
    } arrays[] = {/* prompts that are not ready and scores: each has a token of the step's budget */
                  {(void **)&e->tasks, n + MAX_PROMPTS, sizeof *e->tasks},
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
    e->first_logits = k_alloc(e->k, MAX_PROMPTS, (size_t)e->a.vocab * sizeof *e->first_logits);
    if (!e->first_logits)
        return cop_fail(err, COP_ENOMEM, "could not allocate the logits of %d prompts", MAX_PROMPTS);
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

/* Weights come from a checkpoint, or, if that is NULL, from a seed. */
static cop_status open_parts(engine *e, checkpoint *c, uint64_t seed, cop_error *err) {
    int threads = e->o.n_threads > 0 ? e->o.n_threads : cpu_count();
    cop_status status = k_open(&e->k, e->o.profile, threads, e->o.pin, err);
    if (status == COP_OK) status = k_reserve(e->k, e->a.vocab, err);
    if (status == COP_OK)
        status = c ? weights_open(&e->w, e->k, c, err) : weights_open_random(&e->w, e->k, &e->a, seed, err);
    if (status == COP_OK && c) status = reload_model_init(&e->reload, c, e->w->n_bytes, err);
    if (status == COP_OK)
        status = forward_open(&e->f, e->k, &e->a, &e->where, e->context, e->max_tokens, MAX_LOGITS, err);
    if (status == COP_OK) status = open_pool(e, err);
    if (status == COP_OK) status = open_step(e, err);
    return status;
}

static cop_status open_engine(engine **out, const arch *a, checkpoint *c, uint64_t seed, const tokenizer *t,
                              const engine_options *o, cop_error *err) {
    assert(o->max_rows > 0 && o->step_tokens > 0 && o->span_tokens >= 0);
    *out = NULL;
    if (t && tokenizer_vocab(t) != a->vocab)
        return cop_fail(err, COP_EFORMAT, "the tokenizer has %d ids, but the model %d", tokenizer_vocab(t),
                        a->vocab);
    if (a->head_dim > K_MAX_HEAD_DIM)
        return cop_fail(err, COP_EUNSUPPORTED, "cannot use heads of %d: at most %d", a->head_dim,
                        K_MAX_HEAD_DIM);
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
    if (o->output_memory == 0) e->o.output_memory = (size_t)256 << 20;
    snprintf(e->numerics, sizeof e->numerics, "cop1-%s", o->profile == PRECISION_BF16 ? "bf16" : "f32");
    cop_status status = open_parts(e, c, seed, err);
    if (status != COP_OK) {
        engine_close(e);
        return status;
    }
    memcpy(e->label.digest, e->w->digest, sizeof e->label.digest);
    e->n_weights = 1;
    set_limits(e);
    *out = e;
    return COP_OK;
}

cop_status engine_open(engine **out, checkpoint *c, const tokenizer *t, const engine_options *o,
                       cop_error *err) {
    return open_engine(out, checkpoint_arch(c), c, 0, t, o, err);
}

cop_status engine_open_random(engine **out, const arch *a, uint64_t seed, const engine_options *o,
                              cop_error *err) {
    return open_engine(out, a, NULL, seed, NULL, o, err);
}

void engine_close(engine *e) {
    if (!e) return;
    for (engine_job *j = e->jobs; j; j = j->next) j->over = j->silent = true;
    finish_sweep(e);
    void *arrays[] = {e->tasks, e->ids,   e->prev,    e->pos,   e->table, e->pages,   e->index,
                      e->spans, e->wants, e->drawing, e->draws, e->drawn, e->targets, e->target_logprobs};
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) mem_free(arrays[i]);
    kv_pool_free(&e->pool);
    if (e->k) {
        k_free(e->k, e->kv.arena);
        k_free(e->k, e->first_logits);
        forward_close(e->f);
        weights_sweep(e, true);
    }
    k_close(e->k);
    reload_model_free(&e->reload);
    mem_free(e);
}

void engine_cancel(engine *e, engine_job *j) {
    if (j->kind == JOB_ROLLOUT && !j->over) {
        for (int i = 0; i < e->n_tasks; i++) {
            if (e->tasks[i]->kind != TASK_ROW || task_job(e->tasks[i]) != j) continue;
            const live_row *r = task_row(e->tasks[i]);
            if (r->row.state == ROW_RUNNING) finish_sample(e, r->prompt, r->index, &r->row);
        }
        for (size_t i = 0; i < j->n_prompts; i++) {
            prompt *p = &j->prompts[i];
            for (uint32_t s = p->n_started; s < j->n; s++)
                finish_sample(e, p, s, p->prepared ? &p->prepared->row : NULL);
        }
    }
    j->over = true;
    finish_sweep(e);
}

void engine_abandon(engine *e, engine_job *j) {
    j->over = j->silent = true;
    finish_sweep(e);
}

void engine_park(engine *e, engine_job *j, bool parked) {
    j->parked = parked;
    if (!parked || j->kind != JOB_ROLLOUT) return;
    /* Its prompts leave the list, with their pages and their claim on rows; those with samples to start are
     * listed again later, as the youngest. */
    for (size_t i = j->cursor; i-- > 0;) {
        if (j->prompts[i].n_started < j->n) j->cursor = i;
    }
    finish_sweep(e);
}

bool engine_job_started(const engine_job *j) { return j->cursor > 0; }

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

/* ---- Facts. */

const arch *engine_arch(const engine *e) { return &e->a; }
const char *engine_numerics(const engine *e) { return e->numerics; }
const char *engine_isa(const engine *e) { return cpu_isa_name(k_isa(e->k)); }
int engine_threads(const engine *e) { return k_threads(e->k); }
int engine_context(const engine *e) { return e->context; }
bool engine_has_calculator(const engine *e) { return e->limits.has_calculator; }

engine_place engine_where(const engine *e) {
    const where *w = &e->where;
    return (engine_place){.operation = atomic_load_explicit(&w->operation, memory_order_relaxed),
                          .layer = atomic_load_explicit(&w->layer, memory_order_relaxed),
                          .n_rows = atomic_load_explicit(&w->n_rows, memory_order_relaxed),
                          .n_tokens = atomic_load_explicit(&w->n_tokens, memory_order_relaxed),
                          .step = atomic_load_explicit(&w->step, memory_order_relaxed)};
}

void engine_read_status(const engine *e, engine_status *s) {
    *s = e->totals;
    for (int i = 0; i < e->n_tasks; i++) s->rows += e->tasks[i]->kind == TASK_ROW && e->tasks[i]->runs;
    for (const engine_job *j = e->jobs; j; j = j->next) {
        for (size_t i = 0; i < j->n_prompts; i++) s->queued += j->n - j->prompts[i].n_started;
        if (j->kind == JOB_SCORE) s->queued += j->n_scores - j->cursor;
        s->waiting_requests += j->cursor == 0;
    }
    s->pages_total = (uint64_t)e->pool.n_pages;
    s->pages_free = (uint64_t)e->pool.n_free;
    s->pages_cached = (uint64_t)e->pool.n_idle;
    s->pages_used = s->pages_total - s->pages_cached - s->pages_free;
    s->pages_shared = (uint64_t)kv_pool_shared(&e->pool);
}

cop_status engine_measure(engine *e, k_peaks *out, cop_error *err) { return k_measure(e->k, out, err); }
