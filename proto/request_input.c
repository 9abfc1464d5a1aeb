/* What a prompt or `tokenize` gives: ids, text, or the messages of a chat. */
#include <string.h>

#include "proto/request_read.h"

static const char *const role_names[] = {"system", "user", "assistant"};
static const char *const part_names[] = {"text", "python", "python_output"};

/* ---- Parts. */

typedef struct part_draft {
    request_part part;
    bool has_kind, has_text;
} part_draft;

static bool read_part_kind(request_reader *r, const request_place *place, const msgpack_object *value,
                           const request_field *field, void *out) {
    (void)field;
    int kind = request_read_name(r, place, value, part_names, 3);
    if (kind >= 0) *(request_part_kind *)out = (request_part_kind)kind;
    return kind >= 0;
}

static const request_field part_fields[] = {
    {"type", read_part_kind, offsetof(part_draft, part.kind), offsetof(part_draft, has_kind), 0, 0},
    {"text", request_read_text, offsetof(part_draft, part.text), offsetof(part_draft, has_text), 0, -1},
};

static bool missing(request_reader *r, const request_place *place, const char *key, const char *of) {
    request_place here = request_place_key(place, key);
    return request_read_fail(r, &here, WIRE_BAD_REQUEST, "missing key \"%s\": %s", key, of);
}

static bool read_part(request_reader *r, const request_place *place, const msgpack_object *value,
                      request_part *out) {
    part_draft d = {0};
    if (!request_read_map(r, place, value, part_fields, 2, &d)) return false;
    if (!d.has_kind) return missing(r, place, "type", "every part has a type and a text");
    if (!d.has_text) return missing(r, place, "text", "every part has a type and a text");
    *out = d.part;
    return true;
}

/* ---- Messages. */

typedef struct message_draft {
    request_message message;
    bool has_role, has_content;
} message_draft;

static bool read_role(request_reader *r, const request_place *place, const msgpack_object *value,
                      const request_field *field, void *out) {
    (void)field;
    int role = request_read_name(r, place, value, role_names, 3);
    if (role >= 0) *(request_role *)out = (request_role)role;
    return role >= 0;
}

static bool read_string_content(request_reader *r, const request_place *place, const msgpack_object *value,
                                request_message *m) {
    const request_field any = {.max = -1};
    request_part *part = request_read_take(r, 1, sizeof *part);
    if (!part || !request_read_text(r, place, value, &any, &part->text)) return false;
    m->is_string = true;
    m->parts = part, m->n_parts = 1;
    return true;
}

static bool read_content(request_reader *r, const request_place *place, const msgpack_object *value,
                         const request_field *field, void *out) {
    (void)field;
    request_message *m = out;
    if (value->type == MSGPACK_OBJECT_STR) return read_string_content(r, place, value, m);
    if (value->type != MSGPACK_OBJECT_ARRAY)
        return request_read_fail(r, place, WIRE_BAD_REQUEST,
                                 "cannot accept a value of type %s: expected a str, or an array of parts",
                                 request_read_kind(value));
    m->n_parts = value->via.array.size;
    request_part *parts = request_read_take(r, m->n_parts, sizeof *parts);
    if (!parts) return false;
    m->parts = parts;
    for (size_t i = 0; i < m->n_parts; i++) {
        request_place here = request_place_index(place, i);
        if (!read_part(r, &here, &value->via.array.ptr[i], &parts[i])) return false;
    }
    return true;
}

static const request_field message_fields[] = {
    {"role", read_role, offsetof(message_draft, message.role), offsetof(message_draft, has_role), 0, 0},
    {"content", read_content, offsetof(message_draft, message), offsetof(message_draft, has_content), 0, 0},
};

static bool read_message(request_reader *r, const request_place *place, const msgpack_object *value,
                         request_message *out) {
    message_draft d = {0};
    if (!request_read_map(r, place, value, message_fields, 2, &d)) return false;
    if (!d.has_role) return missing(r, place, "role", "every message has a role and a content");
    if (!d.has_content) return missing(r, place, "content", "every message has a role and a content");
    *out = d.message;
    return true;
}

bool request_read_messages(request_reader *r, const request_place *place, const msgpack_object *value,
                           const request_field *field, void *out) {
    (void)field;
    request_input *input = out;
    if (!request_read_array(r, place, value, 1, SIZE_MAX)) return false;
    size_t n = value->via.array.size;
    request_message *messages = request_read_take(r, n, sizeof *messages);
    if (!messages) return false;
    for (size_t i = 0; i < n; i++) {
        request_place here = request_place_index(place, i);
        if (!read_message(r, &here, &value->via.array.ptr[i], &messages[i])) return false;
    }
    if (messages[n - 1].role != REQUEST_USER) {
        request_place last = request_place_index(place, n - 1), role = request_place_key(&last, "role");
        return request_read_fail(r, &role, WIRE_BAD_REQUEST,
                                 "cannot answer a message of the %s: the last message must be the user's",
                                 role_names[messages[n - 1].role]);
    }
    input->messages = messages, input->n_messages = n;
    return true;
}

bool request_draft_finish(request_reader *r, const request_place *place, request_draft *draft,
                          const char *forms) {
    int n = draft->has_tokens + draft->has_text + draft->has_messages;
    if (n != 1)
        return request_read_fail(r, place, WIRE_BAD_REQUEST, "cannot use %s of %s: expected exactly one",
                                 n ? "several" : "none", forms);
    draft->input.kind = draft->has_tokens ? REQUEST_INPUT_TOKENS
                        : draft->has_text ? REQUEST_INPUT_TEXT
                                          : REQUEST_INPUT_MESSAGES;
    return true;
}
