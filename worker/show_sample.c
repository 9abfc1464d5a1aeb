/* A sample for showing. */
#include "worker/show_sample.h"

#include <math.h>
#include <string.h>

#include "worker/json_ids.h"
#include "worker/jsonl.h"

static cop_status read_mask(show_sample *s, const json_t *mask, cop_error *err) {
    size_t n = s->tokens.n;
    if (!json_is_array(mask) || json_array_size(mask) != n)
        return jsonl_refuse(err, "mask", "it is not a list of as many numbers as there are tokens");
    s->mask = mem_alloc(n, 1);
    if (!s->mask) return cop_fail(err, COP_ENOMEM, "could not keep a mask: out of memory");
    for (size_t i = 0; i < n; i++) {
        const json_t *v = json_array_get(mask, i);
        if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) > 1)
            return jsonl_refuse(err, "mask", "it holds something else than 0 and 1");
        s->mask[i] = (uint8_t)json_integer_value(v);
    }
    return COP_OK;
}

static cop_status read_reals(double **out, size_t n, const char *key, const json_t *list, cop_error *err) {
    if (!list) return COP_OK;
    if (!json_is_array(list) || json_array_size(list) != n)
        return jsonl_refuse(err, key, "it is not a list of as many numbers as there are tokens");
    *out = mem_alloc(n, sizeof **out);
    if (!*out) return cop_fail(err, COP_ENOMEM, "could not keep log-probabilities: out of memory");
    for (size_t i = 0; i < n; i++) {
        const json_t *v = json_array_get(list, i);
        if (!json_is_number(v)) return jsonl_refuse(err, key, "it holds something else than numbers");
        (*out)[i] = json_number_value(v);
    }
    return COP_OK;
}

static cop_status read_calls(show_sample *s, const json_t *calls, cop_error *err) {
    if (calls && !json_is_array(calls)) return jsonl_refuse(err, "tool_calls", "it is not a list");
    s->n_calls = json_array_size(calls);
    for (size_t i = 0; i < s->n_calls; i++) {
        const json_t *ok = json_object_get(json_array_get(calls, i), "ok");
        if (!json_is_boolean(ok)) return jsonl_refuse(err, "tool_calls", "a call has no `ok`");
        s->n_failed_calls += json_is_false(ok);
    }
    return COP_OK;
}

static cop_status read_scalars(show_sample *s, const json_t *o, cop_error *err) {
    if (!json_u64_get(json_object_get(o, "sample"), &s->index))
        return jsonl_refuse(err, "sample", "it is missing, or no whole number");
    s->finish = json_string_value(json_object_get(o, "finish"));
    if (!s->finish) return jsonl_refuse(err, "finish", "it is missing, or not a string");
    s->stop = json_object_get(o, "stop");
    if (s->stop && !json_is_integer(s->stop) && !json_is_string(s->stop))
        return jsonl_refuse(err, "stop", "it is neither a token nor a string");
    s->text = json_object_get(o, "text");
    if (s->text && !json_is_string(s->text)) return jsonl_refuse(err, "text", "it is not a string");
    const json_t *reward = json_object_get(o, "reward");
    if (reward && !json_is_null(reward) && !json_is_number(reward))
        return jsonl_refuse(err, "reward", "it is not a number");
    s->reward = json_is_number(reward) ? json_number_value(reward) : NAN;
    return COP_OK;
}

static cop_status read_sample(show_sample *s, const json_t *o, int vocab, cop_error *err) {
    static const char *const keys[SHOW_N_REALS] = {"logprobs", "model_logprobs", "entropy"};
    cop_status status = read_scalars(s, o, err);
    if (status == COP_OK)
        status = json_read_ids(json_object_get(o, "tokens"), "tokens", vocab, &s->tokens, err);
    if (status == COP_OK) status = read_mask(s, json_object_get(o, "mask"), err);
    for (int i = 0; i < SHOW_N_REALS && status == COP_OK; i++)
        status = read_reals(&s->reals[i], s->tokens.n, keys[i], json_object_get(o, keys[i]), err);
    if (status == COP_OK) status = read_calls(s, json_object_get(o, "tool_calls"), err);
    return status;
}

cop_status show_sample_init(show_sample *out, const json_t *object, int vocab, cop_error *err) {
    *out = (show_sample){0};
    cop_status status = read_sample(out, object, vocab, err);
    if (status != COP_OK) show_sample_free(out);
    return status;
}

void show_sample_free(show_sample *s) {
    token_list_free(&s->tokens);
    mem_free(s->mask);
    for (int i = 0; i < SHOW_N_REALS; i++) mem_free(s->reals[i]);
    *s = (show_sample){0};
}

size_t show_sample_drawn(const show_sample *s) {
    size_t n = 0;
    for (size_t i = 0; i < s->tokens.n; i++) n += s->mask[i];
    return n;
}
