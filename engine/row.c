/* The row state machine. */
#include "engine/row.h"

#include <assert.h>
#include <string.h>

#include "engine/calculator.h"

/* What stands where nothing was drawn: no log-probability can be 1, and it stays finite. */
static const k_drawn NOT_DRAWN = {.logprob = 1.0f, .model_logprob = 1.0f, .entropy = 1.0f};

cop_status row_init(row *r, const row_rules *rules, const int32_t *prompt, int n_prompt, int limit,
                    cop_error *err) {
    assert(limit >= 0);
    *r = (row){.rules = rules,
               .limit = limit,
               .stop = -1,
               .stop_string = -1,
               .state = limit == 0 ? ROW_FULL : ROW_RUNNING};
    cop_status status = sequence_init(&r->seq, prompt, n_prompt, limit, err);
    if (status != COP_OK) return status;
    size_t n = (size_t)limit;
    bool ok = (r->mask = mem_alloc(n, sizeof *r->mask)) != NULL;
    ok = (r->runs = mem_alloc(1, sizeof *r->runs)) && ok;
    r->cap_runs = r->runs != NULL;
    if (rules->logprobs) ok = (r->logprobs = mem_alloc(n, sizeof *r->logprobs)) && ok;
    if (rules->model_logprobs) ok = (r->model_logprobs = mem_alloc(n, sizeof *r->model_logprobs)) && ok;
    if (rules->entropy) ok = (r->entropy = mem_alloc(n, sizeof *r->entropy)) && ok;
    if (rules->kept) {
        ok = (r->kept_ids = mem_alloc(n, (size_t)rules->kept * sizeof *r->kept_ids)) && ok;
        ok = (r->kept_offsets = mem_zalloc(n + 1, sizeof *r->kept_offsets)) && ok;
    }
    if (ok) return COP_OK;
    row_free(r, NULL);
    return cop_fail(err, COP_ENOMEM, "could not allocate a sample of %d tokens", limit);
}

size_t row_output_bytes(const row_rules *rules, int limit) {
    size_t floats = (size_t)rules->logprobs + (size_t)rules->model_logprobs + (size_t)rules->entropy;
    size_t kept = rules->kept ? (size_t)rules->kept * sizeof(int32_t) + sizeof(uint32_t) : 0;
    return (size_t)limit * (sizeof(int32_t) + 1 + floats * sizeof(float) + kept);
}

void row_free(row *r, kv_pool *pool) {
    if (pool || r->seq.pages) {
        kv_pool none = {0}; /* a row that never ran holds no pages */
        sequence_free(&r->seq, pool ? pool : &none);
    }
    mem_free(r->mask);
    mem_free(r->logprobs);
    mem_free(r->model_logprobs);
    mem_free(r->entropy);
    mem_free(r->kept_ids);
    mem_free(r->kept_offsets);
    mem_free(r->calls);
    mem_free(r->runs);
    token_list_free(&r->forced);
    *r = (row){0};
}

static bool is_stop(const row_rules *rules, int32_t token) {
    for (int i = 0; i < rules->n_stop_tokens; i++) {
        if (rules->stop_tokens[i] == token) return true;
    }
    return false;
}

/* Whether a token that was just appended ends the sample.  Its bytes move the match on even where a stop
 * string ends nothing, below min_tokens; one that is complete there does not end the sample later. */
static bool ends_sample(row *r, int32_t token) {
    const row_rules *rules = r->rules;
    if (is_stop(rules, token)) {
        r->stop = token;
        return true;
    }
    if (!rules->stop_strings) return false;
    size_t n;
    const char *bytes = tokenizer_bytes(rules->tokenizer, token, &n);
    int hit = stop_feed(rules->stop_strings, &r->match, bytes, n);
    if (hit < 0 || row_index(r) - 1 < rules->min_tokens) return false;
    r->stop_string = hit;
    return true;
}

/* Run the calculator on the expression that the last token closed, and queue its answer as [output_start]
 * answer [output_end]. */
static cop_status call_calculator(row *r, cop_error *err) {
    const row_rules *rules = r->rules;
    const int32_t *expr = r->seq.tail + r->expr_at;
    size_t n, n_expr = (size_t)(row_index(r) - 1 - r->expr_at);
    char *text, *answer;
    cop_status status = tokenizer_decode(rules->tokenizer, expr, n_expr, &text, &n, err);
    if (status != COP_OK) return status;
    status = calculator_eval(text, n, &answer, err);
    mem_free(text);
    if (status != COP_OK) return status;
    int at = row_index(r) - 1 - r->n_prefix; /* the token that closed the call; < 0: it is in the prefix */
    if (at >= 0) {
        if (!mem_grow((void **)&r->calls, &r->cap_calls, r->n_calls + 1, sizeof *r->calls)) {
            mem_free(answer);
            return cop_fail(err, COP_ENOMEM, "could not record a tool call");
        }
        r->calls[r->n_calls++] = (tool_call){.at = at, .ok = answer != NULL};
    }
    if (!answer) return COP_OK;
    r->forced.n = r->forced_at = 0;
    status = token_list_push(&r->forced, rules->output_start, err);
    if (status == COP_OK)
        status = tokenizer_encode(rules->tokenizer, answer, strlen(answer), &r->forced, err);
    if (status == COP_OK) status = token_list_push(&r->forced, rules->output_end, err);
    mem_free(answer);
    return status;
}

/* What a token that was just appended means for a model that calls the calculator. */
static cop_status follow_tools(row *r, int32_t token, cop_error *err) {
    const row_rules *rules = r->rules;
    if (token == rules->python_start) {
        r->in_python = true;
        r->expr_at = row_index(r);
        return COP_OK;
    }
    if (!r->in_python || token != rules->python_end) return COP_OK;
    r->in_python = false;
    /* A call that the limit cuts off is not run: nothing of its answer could follow. */
    bool runs = row_index(r) - 1 > r->expr_at && r->state == ROW_RUNNING;
    return runs ? call_calculator(r, err) : COP_OK;
}

/* d: NOT_DRAWN for a token that was not drawn. */
static cop_status append(row *r, int32_t token, const k_drawn *d, cop_error *err) {
    assert(r->state == ROW_RUNNING);
    int i = row_index(r);
    sequence_push(&r->seq, token);
    r->mask[i] = d != &NOT_DRAWN;
    if (r->logprobs) r->logprobs[i] = d->logprob;
    if (r->model_logprobs) r->model_logprobs[i] = d->model_logprob;
    if (r->entropy) r->entropy[i] = d->entropy;
    if (r->kept_offsets) r->kept_offsets[i + 1] = r->n_kept;
    if (ends_sample(r, token)) {
        r->state = ROW_STOPPED;
        return COP_OK;
    }
    if (i + 1 == r->limit) r->state = ROW_FULL;
    return r->rules->calculator ? follow_tools(r, token, err) : COP_OK;
}

static cop_status append_forced(row *r, cop_error *err) {
    while (r->state == ROW_RUNNING && r->forced_at < r->forced.n) {
        cop_status status = append(r, r->forced.ids[r->forced_at++], &NOT_DRAWN, err);
        if (status != COP_OK) return status;
        r->n_forced++;
    }
    return COP_OK;
}

cop_status row_replay(row *r, const int32_t *prefix, size_t n_prefix, cop_error *err) {
    assert(row_index(r) == 0);
    if (n_prefix > (size_t)r->limit)
        return cop_fail(err, COP_EINVAL,
                        "a prefix of %zu tokens is longer than the %d that the sample may have", n_prefix,
                        r->limit);
    r->n_prefix = (int)n_prefix;
    for (size_t i = 0; i < n_prefix; i++) {
        if (r->forced_at < r->forced.n && prefix[i] != r->forced.ids[r->forced_at])
            return cop_fail(
                err, COP_EINVAL,
                "prefix token %zu is %d, but after the tool call before it the answer goes on with %d", i,
                (int)prefix[i], (int)r->forced.ids[r->forced_at]);
        if (r->forced_at < r->forced.n) r->forced_at++;
        cop_status status = append(r, prefix[i], &NOT_DRAWN, err);
        if (status != COP_OK) return status;
        if (r->state == ROW_STOPPED)
            return cop_fail(err, COP_EINVAL,
                            "prefix token %zu, which is %d, %s: such a sample has nothing to continue", i,
                            (int)prefix[i], r->stop >= 0 ? "is a stop token" : "completes a stop string");
    }
    return append_forced(r, err);
}

int32_t *row_kept_room(row *r) { return r->kept_ids ? r->kept_ids + r->n_kept : NULL; }

cop_status row_draw(row *r, const k_drawn *d, cop_error *err) {
    assert(d->n_kept >= 0 && d->n_kept <= r->rules->kept);
    r->n_kept += (uint32_t)d->n_kept;
    r->n_drawn++;
    cop_status status = append(r, d->token, d, err);
    return status == COP_OK ? append_forced(r, err) : status;
}

cop_status row_relabel(row *r, const weights_label *label, cop_error *err) {
    int32_t at = r->n_runs > 0 ? row_index(r) - r->n_prefix : 0; /* what the prefix forced comes first */
    if (r->n_runs > 0 && r->runs[r->n_runs - 1].start == at) r->n_runs--; /* nothing came under it */
    if (!mem_grow((void **)&r->runs, &r->cap_runs, r->n_runs + 1, sizeof *r->runs))
        return cop_fail(err, COP_ENOMEM, "could not record new weights of a sample");
    r->runs[r->n_runs++] = (weights_run){.start = at, .label = *label};
    return COP_OK;
}

void row_cancel(row *r) {
    assert(r->state == ROW_RUNNING);
    r->state = ROW_CANCELLED;
}

void row_result(const row *r, sample_result *out) {
    int skip = r->n_prefix;
    out->n_tokens = row_index(r) - skip;
    out->tokens = r->seq.tail + skip;
    out->mask = r->mask + skip;
    out->logprobs = r->logprobs ? r->logprobs + skip : NULL;
    out->model_logprobs = r->model_logprobs ? r->model_logprobs + skip : NULL;
    out->entropy = r->entropy ? r->entropy + skip : NULL;
    out->kept_ids = r->kept_ids;
    out->kept_offsets = r->kept_offsets ? r->kept_offsets + skip : NULL;
    out->tool_calls = r->calls;
    out->n_tool_calls = (int)r->n_calls;
    out->weights = r->runs;
    out->n_weights = (int)r->n_runs;
    if (r->n_runs > 0 && r->runs[r->n_runs - 1].start == out->n_tokens) out->n_weights--;
    out->stop = r->stop;
    out->stop_string =
        r->stop_string >= 0 ? stop_get(r->rules->stop_strings, r->stop_string) : (stop_string){0};
    out->finish = r->state == ROW_STOPPED ? FINISH_STOP
                  : r->state == ROW_FULL  ? FINISH_LENGTH
                                          : FINISH_CANCELLED;
}
