/* Input lines: from JSON to a prompt, and from samples to a record. */
#include "worker/line_job.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "worker/convert.h"
#include "worker/json_ids.h"
#include "worker/jsonl.h"
#include "worker/messages.h"
#include "worker/record_json.h"
#include "worker/sample_copy.h"

enum { MAX_DEPTH = 16 }; /* of a line's values; readers of records need a bound */

void line_job_free(line_job *j) {
    if (!j) return;
    for (uint32_t i = 0; j->samples && i < j->n; i++) sample_copy_free(&j->samples[i]);
    mem_free(j->samples);
    mem_free(j->id);
    wire_buffer_free(&j->input, &worker_allocator);
    wire_buffer_free(&j->record, &worker_allocator);
    json_decref(j->answer);
    token_list_free(&j->tokens);
    mem_free(j);
}

/* ---- Reading. */

static cop_status read_prompt(line_job *j, const line_rules *rules, const json_t *line, cop_error *err) {
    const tokenizer *t = rules->tokenizer;
    const json_t *tokens = json_object_get(line, "tokens"), *text = json_object_get(line, "text"),
                 *messages = json_object_get(line, "messages");
    if (!!tokens + !!text + !!messages != 1)
        return jsonl_refuse(err, "", "a line needs exactly one of text, messages and tokens");
    if (tokens) return json_read_ids(tokens, "tokens", rules->vocab, &j->tokens, err);
    if (!t) return cop_fail(err, COP_EUNSUPPORTED, "the model has no tokenizer: give tokens");
    if (text) {
        if (!json_is_string(text)) return jsonl_refuse(err, "text", "it is not a string");
        return tokenizer_encode_prompt(t, json_string_value(text), json_string_length(text), &j->tokens, err);
    }
    message_list list;
    cop_status status = messages_read(&list, messages, err);
    if (status != COP_OK) return status;
    status = chat_prompt(t, list.messages, list.n, 0, &j->tokens, err);
    messages_free(&list);
    return status;
}

static cop_status set_id(line_job *j, const char *bytes, size_t n, cop_error *err) {
    char *id = mem_alloc(n + 1, 1);
    if (!id) return cop_fail(err, COP_ENOMEM, "could not keep the line's id");
    memcpy(id, bytes, n);
    id[n] = '\0';
    mem_free(j->id);
    j->id = id;
    j->n_id = n;
    return COP_OK;
}

static cop_status number_id(line_job *j, cop_error *err) {
    char number[32];
    int n = snprintf(number, sizeof number, "%" PRIu64, j->line);
    return set_id(j, number, (size_t)n, err);
}

static cop_status read_keys(line_job *j, const line_rules *rules, const json_t *line, cop_error *err) {
    const json_t *id = json_object_get(line, "id"), *seed = json_object_get(line, "seed");
    if (id && !json_is_string(id)) return jsonl_refuse(err, "id", "it is not a string");
    if (id) COP_TRY(set_id(j, json_string_value(id), json_string_length(id), err), err, "read id");
    if (seed && !json_u64_get(seed, &j->seed))
        return jsonl_refuse(err, "seed", "it is not a whole number within 64 bits");
    return read_prompt(j, rules, line, err);
}

static bool is_deeper(const json_t *value, int depth) {
    const char *key;
    size_t i;
    json_t *inner;
    if (depth == 0) return json_is_object(value) || json_is_array(value);
    json_object_foreach((json_t *)value, key, inner) {
        if (is_deeper(inner, depth - 1)) return true;
    }
    json_array_foreach(value, i, inner) {
        if (is_deeper(inner, depth - 1)) return true;
    }
    return false;
}

/* Keep the line as it came, before its keys are judged: the record of a bad line has it too. */
static cop_status keep_input(line_job *j, json_t *line, cop_error *err) {
    if (is_deeper(line, MAX_DEPTH))
        return cop_fail(err, COP_EINVAL, "values may be nested at most %d deep", MAX_DEPTH);
    if (!json_to_msgpack(&j->input, line, &worker_allocator))
        return cop_fail(err, COP_ENOMEM, "could not keep the line");
    j->answer = json_incref(json_object_get(line, "answer"));
    return COP_OK;
}

static cop_status read_line(line_job *j, const line_rules *rules, const input_line *line, cop_error *err) {
    json_t *object;
    cop_status status = number_id(j, err);
    if (status == COP_OK) status = jsonl_parse(line, &object, err);
    if (status != COP_OK) return status;
    status = keep_input(j, object, err);
    if (status == COP_OK) status = read_keys(j, rules, object, err);
    json_decref(object);
    return status;
}

line_job *line_job_open(const line_rules *rules, const input_line *line) {
    line_job *j = mem_zalloc(1, sizeof *j);
    if (!j) return NULL;
    j->line = line->number;
    j->seed = rules->seed;
    j->n = rules->n;
    j->error.status = read_line(j, rules, line, &j->error);
    return j;
}

bool line_error_stays(const cop_error *err) {
    switch (err->status) {
    case COP_EINVAL:
    case COP_EFORMAT:
    case COP_EUNSUPPORTED:
    case COP_ETOOLONG:
    case COP_ETOOLARGE:
    case COP_EMODEL: return true;
    default: return false;
    }
}

/* ---- Writing. */

/* "key: message", as UTF-8 whatever a cut left of it. */
static cop_status error_text(char **out, size_t *n, const cop_error *e) {
    char text[sizeof e->key + sizeof e->message + 2];
    snprintf(text, sizeof text, "%s%s%s", e->key, e->key[0] ? ": " : "", e->message);
    return utf8_repair(text, strlen(text), out, n, NULL);
}

static bool encode_failure(wire_buffer *out, const line_job *j) {
    char *text;
    size_t n;
    if (error_text(&text, &n, &j->error) != COP_OK) return false;
    shard_failure f = {.line = j->line, .prompt_id = {j->id, j->n_id}, .input = j->input, .error = {text, n}};
    bool ok = shard_encode_failure(out, &f, &worker_allocator);
    mem_free(text);
    return ok;
}

bool line_job_encode(wire_buffer *out, const line_job *j, const bool *keeps, const double *rewards) {
    if (j->error.status != COP_OK) return encode_failure(out, j);
    reply_sample *kept = mem_alloc(j->n, sizeof *kept);
    if (!kept) return false;
    shard_record r = {.line = j->line,
                      .prompt_id = {j->id, j->n_id},
                      .prompt_tokens = {(const uint32_t *)j->tokens.ids, j->tokens.n},
                      .input = j->input,
                      .samples = kept,
                      .rewards = rewards,
                      .n_rewards = rewards ? j->n : 0};
    for (uint32_t i = 0; i < j->n; i++) {
        if (!keeps || keeps[i]) kept[r.n_samples++] = j->samples[i];
    }
    bool ok = shard_encode_record(out, &r, &worker_allocator);
    mem_free(kept);
    return ok;
}
