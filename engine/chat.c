/* Chat rendering: nanochat's render_conversation and render_for_completion (NANOCHAT.md 3.5).
 *
 *   bos | user_start text user_end | assistant_start parts assistant_end | user_start ...
 *
 * A part of the assistant's: text; python_start text python_end; output_start text output_end.  The mask is 1
 * for the text, the python call with both its delimiters, and assistant_end: what the assistant itself
 * writes. */
#include "engine/tokenizer.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

/* Where ids go.  The first failure sticks and later calls do nothing. */
typedef struct sink {
    const tokenizer *tokenizer;
    token_list *ids, *mask; /* mask may be NULL */
    cop_status status;
    cop_error *err;
} sink;

/* Bring the mask up to the length of ids. */
static void mark(sink *s, bool own) {
    while (s->status == COP_OK && s->mask && s->mask->n < s->ids->n)
        s->status = token_list_push(s->mask, own ? 1 : 0, s->err);
}

static void put_special(sink *s, token_special which, bool own) {
    if (s->status != COP_OK) return;
    int32_t id = tokenizer_special(s->tokenizer, which);
    if (id < 0) {
        s->status =
            cop_fail(s->err, COP_EUNSUPPORTED,
                     "cannot render a chat: the tokenizer lacks one of nanochat's nine special tokens");
        return;
    }
    s->status = token_list_push(s->ids, id, s->err);
    mark(s, own);
}

static void put_text(sink *s, const char *text, size_t n, bool own) {
    if (s->status != COP_OK) return;
    s->status = tokenizer_encode(s->tokenizer, text, n, s->ids, s->err);
    mark(s, own);
}

static void put_part(sink *s, const chat_part *part) {
    switch (part->kind) {
    case CHAT_TEXT: put_text(s, part->text, part->n, true); break;
    case CHAT_PYTHON:
        put_special(s, TOKEN_PYTHON_START, true);
        put_text(s, part->text, part->n, true);
        put_special(s, TOKEN_PYTHON_END, true);
        break;
    case CHAT_PYTHON_OUTPUT:
        put_special(s, TOKEN_OUTPUT_START, false);
        put_text(s, part->text, part->n, false);
        put_special(s, TOKEN_OUTPUT_END, false);
        break;
    }
}

/* The system message has no tokens of its own: it stands before the first user message, with a blank line
 * between. */
static void put_merged(sink *s, const chat_part *system, const chat_part *user) {
    if (s->status != COP_OK) return;
    size_t n = system->n + 2 + user->n;
    char *text = mem_alloc(n, 1);
    if (!text) {
        s->status = cop_fail(s->err, COP_ENOMEM, "could not join the system message: out of memory");
        return;
    }
    memcpy(text, system->text, system->n);
    memcpy(text + system->n, "\n\n", 2);
    memcpy(text + system->n + 2, user->text, user->n);
    put_text(s, text, n, false);
    mem_free(text);
}

static void put_message(sink *s, const chat_message *m, const chat_message *system) {
    if (m->role == CHAT_USER) {
        put_special(s, TOKEN_USER_START, false);
        if (system && s->status == COP_OK)
            put_merged(s, &system->parts[0], &m->parts[0]);
        else
            put_text(s, m->parts[0].text, m->parts[0].n, false);
        put_special(s, TOKEN_USER_END, false);
        return;
    }
    put_special(s, TOKEN_ASSISTANT_START, false);
    for (size_t i = 0; i < m->n_parts; i++) put_part(s, &m->parts[i]);
    put_special(s, TOKEN_ASSISTANT_END, true);
}

/* ---- What may stand where. */

static cop_status refuse(cop_error *err, size_t i, const char *field, const char *why) {
    cop_fail(err, COP_EINVAL, "%s", why);
    if (err) snprintf(err->key, sizeof err->key, "messages[%zu].%s", i, field);
    return COP_EINVAL;
}

static cop_status check_messages(const chat_message *messages, size_t n, cop_error *err) {
    size_t first = n > 0 && messages[0].role == CHAT_SYSTEM ? 1 : 0;
    if (n == first) {
        cop_fail(err, COP_EINVAL, "a conversation needs a user's message");
        if (err) snprintf(err->key, sizeof err->key, "messages");
        return COP_EINVAL;
    }
    for (size_t i = 0; i < n; i++) {
        const chat_message *m = &messages[i];
        assert(!m->is_string || (m->n_parts == 1 && m->parts[0].kind == CHAT_TEXT));
        bool user_turn = (i - first) % 2 == 0;
        if (i >= first && user_turn && m->role != CHAT_USER)
            return refuse(err, i, "role",
                          "roles must alternate from user to assistant: a user's message must stand here");
        if (i >= first && !user_turn && m->role != CHAT_ASSISTANT)
            return refuse(
                err, i, "role",
                "roles must alternate from user to assistant: an assistant's message must stand here");
        if (m->role != CHAT_ASSISTANT && !m->is_string)
            return refuse(err, i, "content",
                          "only an assistant's content may be a list of parts: a string must stand here");
    }
    return COP_OK;
}

/* ---- Whole conversations. */

static void cut_list(token_list *l, size_t n_before, size_t cut) {
    if (l && cut > 0 && l->n - n_before > cut) l->n = n_before + cut;
}

cop_status chat_render(const tokenizer *t, const chat_message *messages, size_t n, size_t cut,
                       token_list *ids, token_list *mask, cop_error *err) {
    assert(!mask || mask->n == ids->n);
    cop_status status = check_messages(messages, n, err);
    if (status != COP_OK) return status;
    size_t n_before = ids->n;
    sink s = {.tokenizer = t, .ids = ids, .mask = mask, .err = err};
    put_special(&s, TOKEN_BOS, false);
    size_t first = messages[0].role == CHAT_SYSTEM ? 1 : 0;
    for (size_t i = first; i < n; i++) put_message(&s, &messages[i], i == 1 && first ? &messages[0] : NULL);
    if (s.status != COP_OK) {
        ids->n = n_before;
        if (mask) mask->n = n_before;
        return s.status;
    }
    cut_list(ids, n_before, cut);
    cut_list(mask, n_before, cut);
    return COP_OK;
}

cop_status chat_prompt(const tokenizer *t, const chat_message *messages, size_t n, size_t cut,
                       token_list *ids, cop_error *err) {
    size_t n_before = ids->n;
    cop_status status = chat_render(t, messages, n, cut, ids, NULL, err);
    if (status != COP_OK) return status;
    sink s = {.tokenizer = t, .ids = ids, .err = err};
    if (messages[n - 1].role != CHAT_USER)
        s.status = refuse(err, n - 1, "role", "the last message of a prompt must be the user's");
    put_special(&s, TOKEN_ASSISTANT_START, false);
    if (s.status != COP_OK) ids->n = n_before;
    return s.status;
}
