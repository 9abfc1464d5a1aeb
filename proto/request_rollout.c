/* `rollout`: the table of its keys, what must hold between them, and when two ask for the same. */
#include <string.h>

#include "proto/request_read.h"

/* ---- Prompts. */

typedef struct prompt_draft {
    request_prompt prompt;
    request_draft draft;
} prompt_draft;

#define PROMPT(member) offsetof(prompt_draft, prompt.member)

static const request_field prompt_fields[] = {
    {"tokens", request_read_ids, offsetof(prompt_draft, draft.input.tokens),
     offsetof(prompt_draft, draft.has_tokens), 0, 0},
    REQUEST_DRAFT_FIELDS(prompt_draft, draft),
    {"id", request_read_text, PROMPT(id), REQUEST_NO_FLAG, 0, REQUEST_MAX_PROMPT_ID},
    {"seed", request_read_u64, PROMPT(seed), PROMPT(has_seed), 0, 0},
    {"enough", request_read_u32, PROMPT(enough), REQUEST_NO_FLAG, 1, REQUEST_MAX_PROMPTS},
    {"sample", request_read_u32, PROMPT(sample), PROMPT(has_sample), 0, UINT32_MAX},
    {"prefix", request_read_ids, PROMPT(prefix), PROMPT(has_prefix), 0, 0},
};

static bool read_prompt(request_reader *r, const request_place *place, const msgpack_object *value,
                        request_prompt *out) {
    prompt_draft d = {0};
    if (value->type != MSGPACK_OBJECT_MAP)
        return request_read_fail(
            r, place, WIRE_BAD_REQUEST,
            "cannot accept a value of type %s: expected a map with one of tokens, text, messages",
            request_read_kind(value));
    if (!request_read_map(r, place, value, prompt_fields, sizeof prompt_fields / sizeof *prompt_fields, &d) ||
        !request_draft_finish(r, place, &d.draft, "\"tokens\", \"text\", \"messages\""))
        return false;
    if (d.draft.has_tokens && !d.draft.input.tokens.n) {
        request_place tokens = request_place_key(place, "tokens");
        return request_read_fail(r, &tokens, WIRE_BAD_REQUEST,
                                 "cannot use an empty prompt: expected at least one token");
    }
    *out = d.prompt;
    out->input = d.draft.input;
    return true;
}

static bool read_prompts(request_reader *r, const request_place *place, const msgpack_object *value,
                         const request_field *field, void *out) {
    (void)field;
    request_rollout *q = out;
    if (!request_read_array(r, place, value, 1, REQUEST_MAX_PROMPTS)) return false;
    q->n_prompts = value->via.array.size;
    request_prompt *prompts = request_read_take(r, q->n_prompts, sizeof *prompts);
    if (!prompts) return false;
    q->prompts = prompts;
    for (size_t i = 0; i < q->n_prompts; i++) {
        request_place here = request_place_index(place, i);
        if (!read_prompt(r, &here, &value->via.array.ptr[i], &prompts[i])) return false;
    }
    return true;
}

/* ---- The other keys that are no plain values. */

/* An array of at most `max` texts, each as `element` bounds it. */
static bool read_texts(request_reader *r, const request_place *place, const msgpack_object *value, size_t max,
                       const request_field *element, const wire_text **out, size_t *n) {
    if (!request_read_array(r, place, value, 0, max)) return false;
    wire_text *texts = request_read_take(r, value->via.array.size, sizeof *texts);
    if (!texts) return false;
    *out = texts;
    *n = value->via.array.size;
    for (size_t i = 0; i < *n; i++) {
        request_place here = request_place_index(place, i);
        if (!request_read_text(r, &here, &value->via.array.ptr[i], element, &texts[i])) return false;
    }
    return true;
}

static bool read_tools(request_reader *r, const request_place *place, const msgpack_object *value,
                       const request_field *field, void *out) {
    (void)field;
    const request_field any = {.max = -1};
    request_rollout *q = out;
    return read_texts(r, place, value, SIZE_MAX, &any, &q->tools, &q->n_tools);
}

static bool read_stop(request_reader *r, const request_place *place, const msgpack_object *value,
                      const request_field *field, void *out) {
    request_rollout *q = out;
    return read_texts(r, place, value, REQUEST_MAX_STOP, field, &q->stop, &q->n_stop);
}

static bool read_logprobs(request_reader *r, const request_place *place, const msgpack_object *value,
                          const request_field *field, void *out) {
    (void)field;
    static const char *const kinds[] = {"sampling", "model"};
    request_rollout *q = out;
    if (!request_read_array(r, place, value, 0, SIZE_MAX)) return false;
    q->logprobs = q->model_logprobs = false;
    for (size_t i = 0; i < value->via.array.size; i++) {
        request_place here = request_place_index(place, i);
        int kind = request_read_name(r, &here, &value->via.array.ptr[i], kinds, 2);
        if (kind < 0) return false;
        bool *wanted = kind == 0 ? &q->logprobs : &q->model_logprobs;
        if (*wanted)
            return request_read_fail(r, &here, WIRE_BAD_REQUEST, "\"%s\" is given twice", kinds[kind]);
        *wanted = true;
    }
    return true;
}

static bool read_deliver(request_reader *r, const request_place *place, const msgpack_object *value,
                         const request_field *field, void *out) {
    (void)field;
    static const char *const ways[] = {"sample", "prompt", "request"};
    int way = request_read_name(r, place, value, ways, 3);
    if (way >= 0) *(request_deliver *)out = (request_deliver)way;
    return way >= 0;
}

#define ROLLOUT(member) offsetof(request_rollout, member)

static const request_field rollout_fields[] = {
    REQUEST_COMMON_FIELDS,
    {"prompts", read_prompts, 0, REQUEST_NO_FLAG, 0, 0},
    {"n", request_read_u32, ROLLOUT(n), REQUEST_NO_FLAG, 1, REQUEST_MAX_PROMPTS},
    {"seed", request_read_u64, ROLLOUT(seed), ROLLOUT(has_seed), 0, 0},
    {"max_tokens", request_read_u32, ROLLOUT(max_tokens), REQUEST_NO_FLAG, 1, UINT32_MAX},
    {"min_tokens", request_read_u32, ROLLOUT(min_tokens), REQUEST_NO_FLAG, 0, UINT32_MAX},
    {"temperature", request_read_temperature, ROLLOUT(temperature), REQUEST_NO_FLAG, 0, 0},
    {"top_k", request_read_u32, ROLLOUT(top_k), REQUEST_NO_FLAG, 0, UINT32_MAX},
    {"top_p", request_read_real, ROLLOUT(top_p), REQUEST_NO_FLAG, 0, 1},
    {"min_p", request_read_real, ROLLOUT(min_p), REQUEST_NO_FLAG, 0, 1},
    {"stop_tokens", request_read_ids, ROLLOUT(stop_tokens), ROLLOUT(has_stop_tokens), 0, 0},
    {"stop", read_stop, 0, REQUEST_NO_FLAG, 1, REQUEST_MAX_STOP_BYTES},
    {"tools", read_tools, 0, ROLLOUT(has_tools), 0, 0},
    {"logprobs", read_logprobs, 0, REQUEST_NO_FLAG, 0, 0},
    {"entropy", request_read_bool, ROLLOUT(entropy), REQUEST_NO_FLAG, 0, 0},
    {"kept", request_read_bool, ROLLOUT(kept), REQUEST_NO_FLAG, 0, 0},
    {"text", request_read_bool, ROLLOUT(text), REQUEST_NO_FLAG, 0, 0},
    {"deliver", read_deliver, ROLLOUT(deliver), REQUEST_NO_FLAG, 0, 0},
    {"timeout", request_read_real, ROLLOUT(timeout), REQUEST_NO_FLAG, REQUEST_LEAST_TIMEOUT,
     REQUEST_MOST_TIMEOUT},
    {"min_weights", request_read_u64, ROLLOUT(min_weights), REQUEST_NO_FLAG, 0, 0},
    {"weights_timeout", request_read_real, ROLLOUT(weights_timeout), REQUEST_NO_FLAG, REQUEST_LEAST_TIMEOUT,
     REQUEST_MOST_TIMEOUT},
    {"model", request_read_unbuilt, 0, REQUEST_NO_FLAG, 0, 0},
};

/* ---- What must hold between keys, in whatever order they came. */

static bool check_prompt(request_reader *r, const request_rollout *q, size_t index) {
    const request_prompt *p = &q->prompts[index];
    request_place prompts = request_place_key(NULL, "prompts"), here = request_place_index(&prompts, index);
    request_place sample = request_place_key(&here, "sample"), prefix = request_place_key(&here, "prefix");
    if (p->has_sample && q->n != 1)
        return request_read_fail(r, &sample, WIRE_BAD_REQUEST,
                                 "cannot generate one sample index with n %u: expected n 1", q->n);
    if (p->has_prefix && !p->has_sample)
        return request_read_fail(
            r, &prefix, WIRE_BAD_REQUEST,
            "cannot continue a prefix without its sample index: expected \"sample\" beside it");
    if (p->prefix.n > q->max_tokens)
        return request_read_fail(
            r, &prefix, WIRE_BAD_REQUEST,
            "cannot continue a prefix of %zu tokens: max_tokens, which includes it, is %u", p->prefix.n,
            q->max_tokens);
    return true;
}

static bool check_rollout(request_reader *r, const request_rollout *q) {
    request_place prompts = request_place_key(NULL, "prompts"), n = request_place_key(NULL, "n");
    request_place min_tokens = request_place_key(NULL, "min_tokens"), kept = request_place_key(NULL, "kept");
    if (!q->prompts)
        return request_read_fail(r, &prompts, WIRE_BAD_REQUEST,
                                 "missing key \"prompts\": expected an array of maps");
    if (q->n_prompts * q->n > REQUEST_MAX_SAMPLES)
        return request_read_fail(r, &n, WIRE_BAD_REQUEST,
                                 "cannot take %zu prompts of %u samples: expected at most %d in all",
                                 q->n_prompts, q->n, REQUEST_MAX_SAMPLES);
    if (q->min_tokens > q->max_tokens)
        return request_read_fail(r, &min_tokens, WIRE_BAD_REQUEST,
                                 "cannot accept %u: expected at most max_tokens, %u", q->min_tokens,
                                 q->max_tokens);
    if (q->kept && (q->top_k == 0 || q->top_k > REQUEST_MAX_KEPT))
        return request_read_fail(r, &kept, WIRE_BAD_REQUEST,
                                 "cannot return the kept ids with top_k %u: expected 1 to %d", q->top_k,
                                 REQUEST_MAX_KEPT);
    for (size_t i = 0; i < q->n_prompts; i++) {
        if (!check_prompt(r, q, i)) return false;
    }
    return true;
}

bool request_read_rollout(request_reader *r, const msgpack_object *map, request_rollout *out) {
    *out = (request_rollout){.n = 1,
                             .max_tokens = 256,
                             .temperature = 1.0,
                             .top_p = 1.0,
                             .logprobs = true,
                             .weights_timeout = REQUEST_WEIGHTS_TIMEOUT};
    return request_read_map(r, NULL, map, rollout_fields, sizeof rollout_fields / sizeof *rollout_fields,
                            out) &&
           check_rollout(r, out);
}

/* ---- Equality. */

static bool same_text(wire_text a, wire_text b) {
    return !a.bytes == !b.bytes && a.n == b.n && (!a.n || !memcmp(a.bytes, b.bytes, a.n));
}

static bool same_ids(wire_ids a, wire_ids b) {
    return a.n == b.n && (!a.n || !memcmp(a.ids, b.ids, a.n * sizeof *a.ids));
}

static bool same_message(const request_message *a, const request_message *b) {
    if (a->role != b->role || a->is_string != b->is_string || a->n_parts != b->n_parts) return false;
    for (size_t i = 0; i < a->n_parts; i++) {
        if (a->parts[i].kind != b->parts[i].kind || !same_text(a->parts[i].text, b->parts[i].text))
            return false;
    }
    return true;
}

static bool same_input(const request_input *a, const request_input *b) {
    if (a->kind != b->kind || !same_ids(a->tokens, b->tokens) || !same_text(a->text, b->text) ||
        a->n_messages != b->n_messages)
        return false;
    for (size_t i = 0; i < a->n_messages; i++) {
        if (!same_message(&a->messages[i], &b->messages[i])) return false;
    }
    return true;
}

static bool same_prompt(const request_prompt *a, const request_prompt *b) {
    return same_input(&a->input, &b->input) && same_text(a->id, b->id) && a->has_seed == b->has_seed &&
           a->seed == b->seed && a->has_sample == b->has_sample && a->sample == b->sample &&
           a->enough == b->enough && a->has_prefix == b->has_prefix && same_ids(a->prefix, b->prefix);
}

static bool same_texts(const wire_text *a, size_t n_a, const wire_text *b, size_t n_b) {
    if (n_a != n_b) return false;
    for (size_t i = 0; i < n_a; i++) {
        if (!same_text(a[i], b[i])) return false;
    }
    return true;
}

bool request_rollout_equal(const request_rollout *a, const request_rollout *b) {
    if (a->n_prompts != b->n_prompts || a->n != b->n || a->max_tokens != b->max_tokens ||
        a->min_tokens != b->min_tokens || a->temperature != b->temperature || a->top_k != b->top_k ||
        a->top_p != b->top_p || a->min_p != b->min_p || a->has_stop_tokens != b->has_stop_tokens ||
        !same_ids(a->stop_tokens, b->stop_tokens) || !same_texts(a->stop, a->n_stop, b->stop, b->n_stop) ||
        a->has_tools != b->has_tools || !same_texts(a->tools, a->n_tools, b->tools, b->n_tools) ||
        a->deliver != b->deliver || a->logprobs != b->logprobs || a->model_logprobs != b->model_logprobs ||
        a->entropy != b->entropy || a->kept != b->kept || a->text != b->text || a->timeout != b->timeout ||
        a->min_weights != b->min_weights || a->weights_timeout != b->weights_timeout)
        return false;
    for (size_t i = 0; i < a->n_prompts; i++) {
        if (!same_prompt(&a->prompts[i], &b->prompts[i])) return false;
    }
    return true;
}
