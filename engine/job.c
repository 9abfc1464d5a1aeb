/* Checking and copying what is submitted. */
#include "engine/job.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>
#define XXH_STATIC_LINKING_ONLY /* for a state on the stack */
#include <xxhash.h>

#include "kernels/backend.h"

static cop_status at_key(cop_error *err, cop_status status, const char *format, size_t i) {
    if (status != COP_OK && err) snprintf(err->key, sizeof err->key, format, i);
    return status;
}

static cop_status check_ids(const int32_t *ids, size_t n, int vocab, cop_error *err) {
    for (size_t i = 0; i < n; i++) {
        if (ids[i] < 0 || ids[i] >= vocab)
            return cop_fail(err, COP_EINVAL, "token %zu is %lld, but the vocabulary has ids 0 to %d", i,
                            (long long)ids[i], vocab - 1);
    }
    return COP_OK;
}

static int32_t *copy_ids(const int32_t *ids, size_t n) {
    int32_t *copy = mem_alloc(n, sizeof *copy);
    if (copy && n) memcpy(copy, ids, n * sizeof *copy);
    return copy;
}

/* The fourth counter word: the low 32 bits of XXH64 over the tokens as little-endian u32, then the id. */
static uint32_t prompt_hash(const rollout_prompt *p) {
    XXH64_state_t h;
    XXH64_reset(&h, 0);
    for (size_t i = 0; i < p->n_tokens; i++) {
        uint32_t t = (uint32_t)p->tokens[i];
        uint8_t bytes[4] = {(uint8_t)t, (uint8_t)(t >> 8), (uint8_t)(t >> 16), (uint8_t)(t >> 24)};
        XXH64_update(&h, bytes, sizeof bytes);
    }
    if (p->id && p->n_id) XXH64_update(&h, p->id, p->n_id);
    uint32_t hash = (uint32_t)XXH64_digest(&h);
    return hash;
}

/* ---- Rollouts. */

static cop_status check_prompt(const rollout_prompt *p, const rollout_sampling *s, const job_limits *limits,
                               cop_error *err) {
    if (p->n_tokens == 0) return cop_fail(err, COP_EINVAL, "a prompt needs at least one token");
    if (p->n_tokens >= (size_t)limits->context)
        return cop_fail(err, COP_ETOOLONG,
                        "the prompt has %zu tokens, but the context of %d needs room for at least one more",
                        p->n_tokens, limits->context);
    cop_status status = check_ids(p->tokens, p->n_tokens, limits->vocab, err);
    if (status != COP_OK) return status;
    int n = (int)p->n_tokens, room = limits->context - n;
    int total = n + (s->max_tokens < room ? s->max_tokens : room);
    if (sequence_pages_for(total) > limits->n_pages)
        return cop_fail(err, COP_ETOOLARGE,
                        "one sample may need %d pages of %d tokens, but the pool has %d: lower max_tokens or "
                        "raise --kv-memory",
                        sequence_pages_for(total), KV_PAGE_TOKENS, limits->n_pages);
    return COP_OK;
}

static cop_status prepare_prefix(prompt *to, const rollout_prompt *p, const engine_job *j,
                                 const job_limits *limits, cop_error *err) {
    cop_status status = check_ids(p->prefix, p->n_prefix, limits->vocab, err);
    if (status != COP_OK) return status;
    live_row *r = mem_zalloc(1, sizeof *r);
    if (!r) return cop_fail(err, COP_ENOMEM, "could not allocate a sample");
    r->prompt = to;
    status = row_init(&r->row, &j->rules, to->tokens, to->n_tokens, to->limit, err);
    if (status == COP_OK) status = row_replay(&r->row, p->prefix, p->n_prefix, err);
    if (status != COP_OK) {
        row_free(&r->row, NULL);
        mem_free(r);
        return status;
    }
    to->prepared = r;
    return COP_OK;
}

static cop_status copy_prompt(prompt *to, const rollout_prompt *p, engine_job *j, const job_limits *limits,
                              cop_error *err) {
    int room = limits->context - (int)p->n_tokens;
    *to = (prompt){.job = j,
                   .n_tokens = (int)p->n_tokens,
                   .seed = p->seed,
                   .first_sample = p->has_sample ? p->sample : 0,
                   .hash = prompt_hash(p),
                   .limit = j->sampling.max_tokens < room ? j->sampling.max_tokens : room,
                   .enough = p->enough};
    to->tokens = copy_ids(p->tokens, p->n_tokens);
    if (!to->tokens) return cop_fail(err, COP_ENOMEM, "could not copy a prompt of %zu tokens", p->n_tokens);
    cop_status status = sequence_init(&to->seq, to->tokens, to->n_tokens, 0, err);
    if (status != COP_OK) return status;
    return p->n_prefix ? prepare_prefix(to, p, j, limits, err) : COP_OK;
}

/* The distinct ids of a list, so that a long one costs no more at each draw.  NULL without memory. */
static int32_t *distinct_ids(const int32_t *ids, int n, int vocab, int *n_distinct) {
    bool *seen = mem_zalloc((size_t)vocab, sizeof *seen);
    int32_t *out = mem_alloc((size_t)(n < vocab ? n : vocab), sizeof *out);
    *n_distinct = 0;
    for (int i = 0; seen && out && i < n; i++) {
        if (!seen[ids[i]]) out[(*n_distinct)++] = ids[i];
        seen[ids[i]] = true;
    }
    if (!seen) {
        mem_free(out);
        out = NULL;
    }
    mem_free(seen);
    return out;
}

static cop_status set_stop_strings(engine_job *j, const job_limits *limits, cop_error *err) {
    rollout_sampling *s = &j->sampling;
    const stop_string *strings = s->stop_strings;
    s->stop_strings = NULL; /* the caller's */
    if (s->n_stop_strings == 0) return COP_OK;
    if (!limits->tokenizer)
        return at_key(err, cop_fail(err, COP_EUNSUPPORTED, "the model has no tokenizer to find strings with"),
                      "stop", 0);
    return stop_open(&j->stop_strings, strings, (size_t)s->n_stop_strings, err);
}

static cop_status set_rules(engine_job *j, const rollout_spec *spec, const job_limits *limits,
                            cop_error *err) {
    rollout_sampling *s = &j->sampling;
    *s = spec->sampling;
    if (!s->has_stop_tokens) {
        s->stop_tokens = limits->stop_tokens;
        s->n_stop_tokens = limits->n_stop_tokens;
    }
    cop_status status = check_ids(s->stop_tokens, (size_t)s->n_stop_tokens, limits->vocab, err);
    if (status != COP_OK) return at_key(err, status, "stop_tokens", 0);
    if (s->calculator && !limits->has_calculator)
        return at_key(err, cop_fail(err, COP_EINVAL, "the model has no tokens to call a calculator with"),
                      "tools", 0);
    j->stop_tokens = distinct_ids(s->stop_tokens, s->n_stop_tokens, limits->vocab, &s->n_stop_tokens);
    if (!j->stop_tokens) return cop_fail(err, COP_ENOMEM, "could not copy the stop tokens");
    if (s->min_tokens > 0 && s->n_stop_tokens == limits->vocab)
        return at_key(
            err, cop_fail(err, COP_EINVAL, "every id is a stop token, so min_tokens leaves none to draw"),
            "stop_tokens", 0);
    s->stop_tokens = j->stop_tokens;
    status = set_stop_strings(j, limits, err);
    if (status != COP_OK) return status;
    j->rules = (row_rules){.tokenizer = limits->tokenizer,
                           .calculator = s->calculator,
                           .stop_tokens = j->stop_tokens,
                           .n_stop_tokens = s->n_stop_tokens,
                           .stop_strings = j->stop_strings,
                           .min_tokens = s->min_tokens,
                           .logprobs = s->logprobs,
                           .model_logprobs = s->model_logprobs,
                           .entropy = s->entropy,
                           .kept = s->kept ? (s->top_k < limits->vocab ? s->top_k : limits->vocab) : 0};
    if (s->calculator) {
        j->rules.python_start = tokenizer_special(limits->tokenizer, TOKEN_PYTHON_START);
        j->rules.python_end = tokenizer_special(limits->tokenizer, TOKEN_PYTHON_END);
        j->rules.output_start = tokenizer_special(limits->tokenizer, TOKEN_OUTPUT_START);
        j->rules.output_end = tokenizer_special(limits->tokenizer, TOKEN_OUTPUT_END);
    }
    return COP_OK;
}

static cop_status fill_rollout(engine_job *j, const rollout_spec *spec, const job_limits *limits,
                               cop_error *err) {
    cop_status status = set_rules(j, spec, limits, err);
    if (status != COP_OK) return status;
    j->prompts = mem_zalloc(spec->n_prompts, sizeof *j->prompts);
    if (!j->prompts) return cop_fail(err, COP_ENOMEM, "could not allocate %zu prompts", spec->n_prompts);
    j->n_prompts = spec->n_prompts;
    for (size_t i = 0; i < spec->n_prompts; i++) {
        const rollout_prompt *p = &spec->prompts[i];
        status = check_prompt(p, &j->sampling, limits, err);
        if (status != COP_OK) return at_key(err, status, "prompts[%zu].tokens", i);
        status = copy_prompt(&j->prompts[i], p, j, limits, err);
        if (status != COP_OK) return at_key(err, status, "prompts[%zu].prefix", i);
        j->totals.prompt_tokens += p->n_tokens;
    }
    return COP_OK;
}

cop_status job_open_rollout(engine_job **out, const rollout_spec *spec, const job_limits *limits,
                            cop_error *err) {
    assert(spec->n_prompts > 0 && spec->n > 0 && spec->sampling.max_tokens > 0);
    assert(!spec->sampling.kept || spec->sampling.top_k > 0);
    *out = NULL;
    engine_job *j = mem_zalloc(1, sizeof *j);
    if (!j) return cop_fail(err, COP_ENOMEM, "could not allocate a rollout");
    *j = (engine_job){.kind = JOB_ROLLOUT,
                      .n = spec->n,
                      .events = spec->events,
                      .start = clock_seconds(),
                      .n_open = spec->n_prompts * spec->n};
    cop_status status = fill_rollout(j, spec, limits, err);
    if (status != COP_OK) {
        job_close(j);
        return status;
    }
    *out = j;
    return COP_OK;
}

/* ---- Scores. */

static cop_status copy_sequence(scored *to, const int32_t *ids, size_t n, int top, const job_limits *limits,
                                cop_error *err) {
    if (n == 0) return cop_fail(err, COP_EINVAL, "a sequence needs at least one token");
    if (n > (size_t)limits->context)
        return cop_fail(err, COP_ETOOLONG, "the sequence has %zu tokens, the context %d", n, limits->context);
    if (sequence_pages_for((int)n) > limits->n_pages)
        return cop_fail(err, COP_ETOOLARGE,
                        "the sequence needs %d pages of %d tokens, but the pool has %d: raise --kv-memory",
                        sequence_pages_for((int)n), KV_PAGE_TOKENS, limits->n_pages);
    cop_status status = check_ids(ids, n, limits->vocab, err);
    if (status != COP_OK) return status;
    to->n_tokens = (int)n;
    to->tokens = copy_ids(ids, n);
    to->logprobs = mem_alloc(n, sizeof *to->logprobs);
    bool ok = to->tokens && to->logprobs;
    if (top > 0) {
        to->top_ids = mem_alloc(n, (size_t)top * sizeof *to->top_ids);
        to->top_logprobs = mem_alloc(n, (size_t)top * sizeof *to->top_logprobs);
        to->next_ids = mem_alloc((size_t)top, sizeof *to->next_ids);
        to->next_logprobs = mem_alloc((size_t)top, sizeof *to->next_logprobs);
        ok = ok && to->top_ids && to->top_logprobs && to->next_ids && to->next_logprobs;
    }
    if (!ok) return cop_fail(err, COP_ENOMEM, "could not allocate the scores of %zu tokens", n);
    status = sequence_init(&to->seq, to->tokens, to->n_tokens - (top == 0), 0, err);
    if (status != COP_OK) return status;
    to->logprobs[0] = 1.0f;
    for (int i = 0; i < top; i++) {
        to->top_ids[i] = -1;
        to->top_logprobs[i] = 1.0f;
    }
    return COP_OK;
}

/* How many tokens' scores can be taken from the sequence before.  Those of token t depend on tokens [0, t],
 * so of n equal ones the logits of n - 1 are. */
static int shared_tokens(const scored *s, const scored *before) {
    int most = s->n_tokens < before->n_tokens ? s->n_tokens : before->n_tokens, n = 0;
    while (n < most && s->tokens[n] == before->tokens[n]) n++;
    return n > 0 ? (n - 1) / KV_PAGE_TOKENS * KV_PAGE_TOKENS : 0;
}

cop_status job_open_score(engine_job **out, const score_spec *spec, const job_limits *limits,
                          cop_error *err) {
    assert(spec->n_sequences > 0 && spec->top >= 0 && spec->temperature > 0);
    *out = NULL;
    engine_job *j = mem_zalloc(1, sizeof *j);
    if (!j) return cop_fail(err, COP_ENOMEM, "could not allocate a score");
    *j = (engine_job){
        .kind = JOB_SCORE, .score = *spec, .start = clock_seconds(), .n_open = spec->n_sequences};
    j->score.sequences = NULL;
    j->score.lengths = NULL;
    if (j->score.top > limits->vocab) j->score.top = limits->vocab;
    j->scores = mem_zalloc(spec->n_sequences, sizeof *j->scores);
    cop_status status = COP_OK;
    if (j->scores)
        j->n_scores = spec->n_sequences;
    else
        status = cop_fail(err, COP_ENOMEM, "could not allocate %zu sequences", spec->n_sequences);
    for (size_t i = 0; i < j->n_scores && status == COP_OK; i++) {
        j->scores[i].job = j;
        status =
            copy_sequence(&j->scores[i], spec->sequences[i], spec->lengths[i], j->score.top, limits, err);
        at_key(err, status, "sequences[%zu]", i);
        if (i > 0 && status == COP_OK)
            j->scores[i].n_shared = shared_tokens(&j->scores[i], &j->scores[i - 1]);
    }
    if (status != COP_OK) {
        job_close(j);
        return status;
    }
    *out = j;
    return COP_OK;
}

void job_close(engine_job *j) {
    if (!j) return;
    for (size_t i = 0; i < j->n_prompts; i++) {
        prompt *p = &j->prompts[i];
        sequence_free(&p->seq, NULL);
        if (p->prepared) row_free(&p->prepared->row, NULL);
        mem_free(p->prepared);
        mem_free(p->tokens);
    }
    for (size_t i = 0; i < j->n_scores; i++) {
        scored *s = &j->scores[i];
        sequence_free(&s->seq, NULL);
        mem_free(s->tokens);
        mem_free(s->logprobs);
        mem_free(s->top_ids);
        mem_free(s->top_logprobs);
        mem_free(s->next_ids);
        mem_free(s->next_logprobs);
    }
    mem_free(j->prompts);
    mem_free(j->scores);
    mem_free(j->stop_tokens);
    stop_close(j->stop_strings);
    mem_free(j);
}
