/* Between the wire's structs and the engine's. */
#include "worker/convert.h"

#include <stdio.h>
#include <string.h>
#include <sys/random.h>

static void *resize(void *context, void *block, size_t n_bytes) {
    (void)context;
    return mem_realloc(block, n_bytes, 1);
}
static void release(void *context, void *block) {
    (void)context;
    mem_free(block);
}
const wire_allocator worker_allocator = {resize, release, NULL};

reply_head convert_head(const request *r) { return (reply_head){r->id, r->compress, &worker_allocator}; }

uint64_t convert_seed(void) {
    uint64_t seed = 0;
    while (getrandom(&seed, sizeof seed, 0) != (ssize_t)sizeof seed) continue;
    return seed >> 11;
}

void convert_error(wire_error *to, const cop_error *from) {
    const char *code = WIRE_INTERNAL;
    switch (from->status) {
    case COP_EINVAL: code = WIRE_BAD_REQUEST; break;
    case COP_ETOOLONG: code = WIRE_TOO_LONG; break;
    case COP_ETOOLARGE: code = WIRE_TOO_LARGE; break;
    case COP_EUNSUPPORTED: code = WIRE_UNSUPPORTED; break;
    case COP_ENOTFOUND: code = WIRE_NOT_FOUND; break;
    case COP_EMODEL: code = WIRE_MODEL_ERROR; break;
    case COP_ENOMEM: code = WIRE_OVERLOADED; break;
    default: break;
    }
    wire_fail(to, code, from->key, "%s", from->message);
    if (from->status == COP_ENOMEM) to->retry_after = 1.0;
}

static cop_status at_key(cop_error *err, cop_status status, const char *key, const char *part) {
    if (status == COP_OK || !err) return status;
    char inner[sizeof err->key];
    memcpy(inner, err->key, sizeof inner);
    if (inner[0]) part = inner;
    snprintf(err->key, sizeof err->key, "%.60s%s%.30s", key, key[0] && part[0] ? "." : "", part);
    return status;
}

cop_status convert_ids(int32_t **out, wire_ids ids, int vocab, const char *key, cop_error *err) {
    *out = mem_alloc(ids.n, sizeof **out);
    if (!*out) return cop_fail(err, COP_ENOMEM, "could not copy %zu token ids", ids.n);
    for (size_t i = 0; i < ids.n; i++) {
        if (ids.ids[i] >= (uint32_t)vocab) {
            mem_free(*out);
            *out = NULL;
            cop_fail(err, COP_EINVAL, "token %zu is %u, but the vocabulary has ids 0 to %d", i,
                     (unsigned)ids.ids[i], vocab - 1);
            return at_key(err, COP_EINVAL, key, "");
        }
        (*out)[i] = (int32_t)ids.ids[i];
    }
    return COP_OK;
}

/* The wire's messages and the engine's differ in type only. */
static cop_status encode_messages(token_list *out, const request_input *input, const tokenizer *t, size_t cut,
                                  cop_error *err) {
    static const chat_role roles[] = {
        [REQUEST_SYSTEM] = CHAT_SYSTEM, [REQUEST_USER] = CHAT_USER, [REQUEST_ASSISTANT] = CHAT_ASSISTANT};
    static const chat_part_kind kinds[] = {[REQUEST_TEXT] = CHAT_TEXT,
                                           [REQUEST_PYTHON] = CHAT_PYTHON,
                                           [REQUEST_PYTHON_OUTPUT] = CHAT_PYTHON_OUTPUT};
    size_t n_parts = 0;
    for (size_t i = 0; i < input->n_messages; i++) n_parts += input->messages[i].n_parts;
    chat_message *messages = mem_alloc(input->n_messages, sizeof *messages);
    chat_part *parts = mem_alloc(n_parts, sizeof *parts), *part = parts;
    cop_status status = COP_OK;
    if (!messages || !parts)
        status = cop_fail(err, COP_ENOMEM, "could not copy %zu messages", input->n_messages);
    for (size_t i = 0; i < input->n_messages && status == COP_OK; i++) {
        const request_message *m = &input->messages[i];
        messages[i] = (chat_message){roles[m->role], m->is_string, part, m->n_parts};
        for (size_t p = 0; p < m->n_parts; p++)
            *part++ = (chat_part){kinds[m->parts[p].kind], m->parts[p].text.bytes, m->parts[p].text.n};
    }
    if (status == COP_OK) status = chat_prompt(t, messages, input->n_messages, cut, out, err);
    mem_free(messages);
    mem_free(parts);
    return status;
}

static cop_status encode_text(token_list *out, wire_text text, const tokenizer *t, bool bos, cop_error *err) {
    return bos ? tokenizer_encode_prompt(t, text.bytes, text.n, out, err)
               : tokenizer_encode(t, text.bytes, text.n, out, err);
}

cop_status convert_input(token_list *out, const request_input *input, const tokenizer *t, int vocab, bool bos,
                         size_t cut, const char *key, cop_error *err) {
    if (input->kind == REQUEST_INPUT_TOKENS) {
        int32_t *ids;
        cop_status status = convert_ids(&ids, input->tokens, vocab, "tokens", err);
        if (status != COP_OK) return at_key(err, status, key, "tokens");
        mem_free(out->ids);
        *out = (token_list){ids, input->tokens.n, input->tokens.n};
        return COP_OK;
    }
    bool text = input->kind == REQUEST_INPUT_TEXT;
    const char *part = text ? "text" : "messages";
    if (!t)
        return at_key(err, cop_fail(err, COP_EUNSUPPORTED, "the model has no tokenizer: send token ids"), key,
                      part);
    return at_key(
        err, text ? encode_text(out, input->text, t, bos, err) : encode_messages(out, input, t, cut, err),
        key, part);
}

/* ---- Rollouts. */

static cop_status convert_prompt(converted_rollout *c, size_t i, const request_prompt *p, uint64_t seed,
                                 int vocab, const tokenizer *t, cop_error *err) {
    char key[64];
    snprintf(key, sizeof key, "prompts[%zu]", i);
    cop_status status = convert_input(&c->tokens[i], &p->input, t, vocab, true, 0, key, err);
    if (status != COP_OK) return status;
    if (p->has_prefix) {
        snprintf(key, sizeof key, "prompts[%zu].prefix", i);
        status = convert_ids(&c->prefixes[i], p->prefix, vocab, key, err);
        if (status != COP_OK) return status;
    }
    c->prompts[i] = (rollout_prompt){.tokens = c->tokens[i].ids,
                                     .n_tokens = c->tokens[i].n,
                                     .id = p->id.bytes,
                                     .n_id = p->id.n,
                                     .seed = p->has_seed ? p->seed : seed,
                                     .has_sample = p->has_sample,
                                     .sample = p->sample,
                                     .prefix = c->prefixes[i],
                                     .n_prefix = p->has_prefix ? p->prefix.n : 0,
                                     .enough = p->enough};
    return COP_OK;
}

static cop_status convert_tools(bool *calculator, const request_rollout *r, const engine *e, cop_error *err) {
    *calculator = r->has_tools ? r->n_tools > 0 : engine_has_calculator(e);
    for (size_t i = 0; r->has_tools && i < r->n_tools; i++) {
        wire_text name = r->tools[i];
        bool known = name.n == 10 && !memcmp(name.bytes, "calculator", 10);
        if (known && engine_has_calculator(e)) continue;
        if (known)
            cop_fail(err, COP_EUNSUPPORTED, "the model has no tokens to call the calculator with");
        else
            cop_fail(err, COP_EUNSUPPORTED, "unknown tool \"%.*s\": the tools are \"calculator\"",
                     (int)(name.n < 64 ? name.n : 64), name.bytes);
        if (err) snprintf(err->key, sizeof err->key, "tools[%zu]", i);
        return COP_EUNSUPPORTED;
    }
    return COP_OK;
}

_Static_assert(REQUEST_MAX_STOP == STOP_MAX_STRINGS && REQUEST_MAX_STOP_BYTES == STOP_MAX_BYTES,
               "the wire and the engine take the same stop strings");

static int clamp_int(uint32_t v) { return v > INT32_MAX ? INT32_MAX : (int)v; }

static cop_status convert_sampling(converted_rollout *c, const request_rollout *r, const engine *e,
                                   cop_error *err) {
    rollout_sampling *s = &c->spec.sampling;
    *s = (rollout_sampling){.max_tokens = clamp_int(r->max_tokens),
                            .min_tokens = clamp_int(r->min_tokens),
                            .temperature = r->temperature,
                            .top_k = clamp_int(r->top_k),
                            .top_p = r->top_p,
                            .min_p = r->min_p,
                            .has_stop_tokens = r->has_stop_tokens,
                            .logprobs = r->logprobs,
                            .model_logprobs = r->model_logprobs,
                            .entropy = r->entropy,
                            .kept = r->kept};
    if (r->has_stop_tokens) {
        cop_status status =
            convert_ids(&c->stop_tokens, r->stop_tokens, engine_arch(e)->vocab, "stop_tokens", err);
        if (status != COP_OK) return status;
        s->stop_tokens = c->stop_tokens;
        s->n_stop_tokens = (int)r->stop_tokens.n;
    }
    c->stop_strings = mem_alloc(r->n_stop, sizeof *c->stop_strings);
    if (!c->stop_strings) return cop_fail(err, COP_ENOMEM, "could not allocate %zu stop strings", r->n_stop);
    for (size_t i = 0; i < r->n_stop; i++) c->stop_strings[i] = (stop_string){r->stop[i].bytes, r->stop[i].n};
    s->stop_strings = c->stop_strings;
    s->n_stop_strings = (int)r->n_stop;
    return convert_tools(&s->calculator, r, e, err);
}

cop_status convert_rollout(converted_rollout *out, const request_rollout *r, uint64_t seed, const engine *e,
                           const tokenizer *t, cop_error *err) {
    *out = (converted_rollout){.n_prompts = r->n_prompts};
    out->prompts = mem_zalloc(r->n_prompts, sizeof *out->prompts);
    out->tokens = mem_zalloc(r->n_prompts, sizeof *out->tokens);
    out->prefixes = mem_zalloc(r->n_prompts, sizeof *out->prefixes);
    cop_status status = COP_OK;
    if (!out->prompts || !out->tokens || !out->prefixes)
        status = cop_fail(err, COP_ENOMEM, "could not allocate %zu prompts", r->n_prompts);
    if (status == COP_OK) status = convert_sampling(out, r, e, err);
    for (size_t i = 0; i < r->n_prompts && status == COP_OK; i++)
        status = convert_prompt(out, i, &r->prompts[i], seed, engine_arch(e)->vocab, t, err);
    if (status != COP_OK) {
        converted_rollout_free(out);
        return status;
    }
    out->spec.prompts = out->prompts;
    out->spec.n_prompts = r->n_prompts;
    out->spec.n = r->n;
    return COP_OK;
}

void converted_rollout_free(converted_rollout *c) {
    for (size_t i = 0; i < c->n_prompts; i++) {
        if (c->tokens) token_list_free(&c->tokens[i]);
        if (c->prefixes) mem_free(c->prefixes[i]);
    }
    mem_free(c->prompts);
    mem_free(c->tokens);
    mem_free(c->prefixes);
    mem_free(c->stop_tokens);
    mem_free(c->stop_strings);
    *c = (converted_rollout){0};
}

cop_status convert_text(char **text, size_t *n_text, char **bytes, size_t *n_bytes, const tokenizer *t,
                        const int32_t *ids, size_t n, cop_error *err) {
    char *raw;
    size_t n_raw;
    *text = NULL;
    cop_status status = tokenizer_decode(t, ids, n, &raw, &n_raw, err);
    if (status != COP_OK) return status;
    status = utf8_repair(raw, n_raw, text, n_text, err);
    if (status == COP_OK && bytes) {
        *bytes = raw;
        *n_bytes = n_raw;
        return COP_OK;
    }
    mem_free(raw);
    return status;
}
