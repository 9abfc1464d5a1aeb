/* Samples that outlive their event. */
#include "worker/sample_copy.h"

#include <string.h>

#include "worker/convert.h"

void *copy_items(const void *from, size_t n, size_t size, bool *ok) {
    void *to = mem_alloc(n, size);
    if (to && n) memcpy(to, from, n * size);
    if (!to) *ok = false;
    return to;
}

static bool copy_arrays(reply_sample *out, const sample_result *s) {
    size_t n = (size_t)s->n_tokens;
    bool ok = true;
    out->tokens = copy_items(s->tokens, n, sizeof(uint32_t), &ok);
    out->mask = copy_items(s->mask, n, 1, &ok);
    if (s->logprobs) out->logprobs = copy_items(s->logprobs, n, sizeof(float), &ok);
    if (s->model_logprobs) out->model_logprobs = copy_items(s->model_logprobs, n, sizeof(float), &ok);
    if (s->entropy) out->entropy = copy_items(s->entropy, n, sizeof(float), &ok);
    if (s->kept_offsets) {
        out->kept_offsets = copy_items(s->kept_offsets, n + 1, sizeof(uint32_t), &ok);
        out->kept_ids = (wire_ids){copy_items(s->kept_ids, s->kept_offsets[n], sizeof(uint32_t), &ok),
                                   s->kept_offsets[n]};
    }
    return ok;
}

/* Runs with their digests behind them, in one block. */
static bool copy_weights(reply_sample *out, const sample_result *s) {
    size_t n = (size_t)s->n_weights, digest_bytes = sizeof s->weights->label.digest;
    reply_weights_run *runs = mem_alloc(n, sizeof *runs + digest_bytes);
    out->weights = runs;
    if (!runs) return false;
    char *digests = (char *)(runs + n);
    for (size_t i = 0; i < n; i++) {
        char *digest = digests + i * digest_bytes;
        memcpy(digest, s->weights[i].label.digest, digest_bytes);
        runs[i] = (reply_weights_run){(uint32_t)s->weights[i].start,
                                      {s->weights[i].label.version, wire_text_of(digest)}};
    }
    out->n_weights = n;
    return true;
}

static bool copy_lists(reply_sample *out, const sample_result *s) {
    bool ok = copy_weights(out, s);
    if (s->stop_string.bytes)
        out->stop_string =
            (wire_text){copy_items(s->stop_string.bytes, s->stop_string.n, 1, &ok), s->stop_string.n};
    reply_tool_call *calls = mem_alloc((size_t)s->n_tool_calls, sizeof *calls);
    out->tool_calls = calls;
    if (!calls) return false;
    for (int i = 0; i < s->n_tool_calls; i++)
        calls[out->n_tool_calls++] =
            (reply_tool_call){(uint32_t)s->tool_calls[i].at, wire_text_of("calculator"), s->tool_calls[i].ok};
    return ok;
}

static bool copy_text(reply_sample *out, const sample_result *s, const tokenizer *t) {
    char *text;
    size_t n;
    if (convert_text(&text, &n, NULL, NULL, t, s->tokens, (size_t)s->n_tokens, NULL) != COP_OK) return false;
    out->text = (wire_text){text, n};
    return true;
}

bool sample_copy(reply_sample *out, const sample_result *s, const tokenizer *text) {
    *out = (reply_sample){.prompt = s->prompt,
                          .sample = s->sample,
                          .seed = s->seed,
                          .n_tokens = (size_t)s->n_tokens,
                          .has_logprobs = s->logprobs != NULL,
                          .has_model_logprobs = s->model_logprobs != NULL,
                          .has_entropy = s->entropy != NULL,
                          .has_kept = s->kept_offsets != NULL,
                          .finish = s->finish == FINISH_STOP     ? REPLY_STOP
                                    : s->finish == FINISH_LENGTH ? REPLY_LENGTH
                                                                 : REPLY_CANCELLED,
                          .has_stop = s->stop >= 0,
                          .stop = s->stop >= 0 ? (uint32_t)s->stop : 0};
    bool ok = copy_arrays(out, s);
    ok = copy_lists(out, s) && ok;
    ok = (!text || copy_text(out, s, text)) && ok;
    if (!ok) sample_copy_free(out);
    return ok;
}

void sample_copy_free(reply_sample *s) {
    mem_free((void *)s->tokens);
    mem_free((void *)s->mask);
    mem_free((void *)s->logprobs);
    mem_free((void *)s->model_logprobs);
    mem_free((void *)s->entropy);
    mem_free((void *)s->kept_ids.ids);
    mem_free((void *)s->kept_offsets);
    mem_free((void *)s->tool_calls);
    mem_free((void *)s->weights);
    mem_free((void *)s->text.bytes);
    mem_free((void *)s->stop_string.bytes);
    *s = (reply_sample){0};
}

size_t sample_copy_bytes(const reply_sample *s) {
    size_t per_token =
        sizeof(uint32_t) + 1 + sizeof(float) * (s->has_logprobs + s->has_model_logprobs + s->has_entropy);
    return sizeof *s + s->n_tokens * per_token + s->kept_ids.n * sizeof(uint32_t) + s->text.n + 256;
}
