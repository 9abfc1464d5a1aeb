/* Chat messages from JSON. */
#include "worker/messages.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Fail with the key that `format` makes. */
static cop_status refuse(cop_error *err, const char *why, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static cop_status refuse(cop_error *err, const char *why, const char *format, ...) {
    cop_fail(err, COP_EINVAL, "%s", why);
    if (!err) return COP_EINVAL;
    va_list args;
    va_start(args, format);
    vsnprintf(err->key, sizeof err->key, format, args);
    va_end(args);
    return COP_EINVAL;
}

/* The first key of an object that is neither a nor b, or NULL. */
static const char *other_key(const json_t *object, const char *a, const char *b) {
    const char *key;
    const json_t *value;
    json_object_foreach((json_t *)object, key, value) {
        if (strcmp(key, a) != 0 && strcmp(key, b) != 0) return key;
    }
    return NULL;
}

static bool read_kind(const json_t *value, chat_part_kind *kind) {
    static const char *const names[] = {
        [CHAT_TEXT] = "text", [CHAT_PYTHON] = "python", [CHAT_PYTHON_OUTPUT] = "python_output"};
    for (int i = CHAT_TEXT; json_is_string(value) && i <= CHAT_PYTHON_OUTPUT; i++) {
        *kind = (chat_part_kind)i;
        if (!strcmp(json_string_value(value), names[i])) return true;
    }
    return false;
}

static bool read_role(const json_t *value, chat_role *role) {
    static const char *const names[] = {
        [CHAT_SYSTEM] = "system", [CHAT_USER] = "user", [CHAT_ASSISTANT] = "assistant"};
    for (int i = CHAT_SYSTEM; json_is_string(value) && i <= CHAT_ASSISTANT; i++) {
        *role = (chat_role)i;
        if (!strcmp(json_string_value(value), names[i])) return true;
    }
    return false;
}

static chat_part text_part(chat_part_kind kind, const json_t *string) {
    return (chat_part){.kind = kind, .text = json_string_value(string), .n = json_string_length(string)};
}

/* Part j of message i. */
static cop_status read_part(chat_part *part, const json_t *value, size_t i, size_t j, cop_error *err) {
    if (!json_is_object(value))
        return refuse(err, "a part is not an object", "messages[%zu].content[%zu]", i, j);
    const char *other = other_key(value, "type", "text");
    if (other)
        return refuse(err, "unknown key: a part has type and text", "messages[%zu].content[%zu].%s", i, j,
                      other);
    chat_part_kind kind;
    if (!read_kind(json_object_get(value, "type"), &kind))
        return refuse(err, "the type is not \"text\", \"python\" or \"python_output\"",
                      "messages[%zu].content[%zu].type", i, j);
    const json_t *text = json_object_get(value, "text");
    if (!json_is_string(text))
        return refuse(err, "the text is not a string", "messages[%zu].content[%zu].text", i, j);
    *part = text_part(kind, text);
    return COP_OK;
}

/* Message i; its parts go to parts[], which has room for them. */
static cop_status read_message(chat_message *m, chat_part *parts, const json_t *value, size_t i,
                               cop_error *err) {
    if (!json_is_object(value)) return refuse(err, "a message is not an object", "messages[%zu]", i);
    const char *other = other_key(value, "role", "content");
    if (other)
        return refuse(err, "unknown key: a message has role and content", "messages[%zu].%s", i, other);
    if (!read_role(json_object_get(value, "role"), &m->role))
        return refuse(err, "the role is not \"system\", \"user\" or \"assistant\"", "messages[%zu].role", i);
    const json_t *content = json_object_get(value, "content");
    m->parts = parts;
    m->is_string = json_is_string(content);
    if (m->is_string) {
        m->n_parts = 1;
        parts[0] = text_part(CHAT_TEXT, content);
        return COP_OK;
    }
    if (!json_is_array(content))
        return refuse(err, "the content is neither a string nor a list of parts", "messages[%zu].content", i);
    m->n_parts = json_array_size(content);
    for (size_t j = 0; j < m->n_parts; j++) {
        cop_status status = read_part(&parts[j], json_array_get(content, j), i, j, err);
        if (status != COP_OK) return status;
    }
    return COP_OK;
}

/* How many parts a message has, as far as it is well formed. */
static size_t count_parts(const json_t *message) {
    const json_t *content = json_object_get(message, "content");
    return json_is_array(content) ? json_array_size(content) : 1;
}

cop_status messages_read(message_list *list, const json_t *array, cop_error *err) {
    *list = (message_list){0};
    if (!json_is_array(array)) return refuse(err, "it is not a list of messages", "messages");
    size_t n = json_array_size(array), n_parts = 0;
    for (size_t i = 0; i < n; i++) n_parts += count_parts(json_array_get(array, i));
    list->messages = mem_zalloc(n, sizeof *list->messages);
    list->parts = mem_alloc(n_parts, sizeof *list->parts);
    cop_status status = COP_OK;
    if (!list->messages || !list->parts)
        status = cop_fail(err, COP_ENOMEM, "could not hold %zu messages: out of memory", n);
    chat_part *parts = list->parts;
    for (size_t i = 0; i < n && status == COP_OK; i++) {
        status = read_message(&list->messages[i], parts, json_array_get(array, i), i, err);
        parts += list->messages[i].n_parts;
    }
    list->n = n;
    if (status != COP_OK) messages_free(list);
    return status;
}

void messages_free(message_list *list) {
    mem_free(list->messages);
    mem_free(list->parts);
    *list = (message_list){0};
}
