/* Encoders.  A message is written into a growing buffer by msgpack-c's packer; the first failure to grow
 * sticks in the buffer, and finish() looks once.  Keys stand in the order of the protocol's tables, `type`
 * and `id` first. */
#include "proto/reply.h"

#include <assert.h>
#include <string.h>

#include "proto/pack.h"

/* Hand the message over, compressed as the head says. */
static bool finish(pack_writer *w, const reply_head *head, wire_buffer *out) {
    if (!w->failed && wire_wrap(&w->buffer, head->compress, w->allocator)) {
        *out = w->buffer;
        return true;
    }
    wire_buffer_free(&w->buffer, w->allocator);
    *out = (wire_buffer){0};
    return false;
}

static void put_weights(pack_writer *w, reply_weights weights) {
    pack_key(w, "weights"), pack_array(w, 2);
    msgpack_pack_uint64(&w->packer, weights.version);
    pack_text(w, weights.digest);
}

/* Open a reply of n_more pairs after `type` and `id`. */
static void open_reply(pack_writer *w, const reply_head *head, const char *type, size_t n_more) {
    pack_map(w, 2 + n_more);
    pack_put_text(w, "type", wire_text_of(type));
    pack_put_text(w, "id", head->id);
}

/* ---- The plain replies. */

bool reply_encode_pong(wire_buffer *out, const reply_head *head, const reply_pong *pong) {
    pack_writer w;
    pack_start(&w, head->allocator);
    open_reply(&w, head, "pong", 7);
    pack_put_text(&w, "version", pong->version);
    pack_put_u64(&w, "protocol", WIRE_PROTOCOL);
    pack_put_text(&w, "model", pong->model);
    put_weights(&w, pong->weights);
    pack_put_text(&w, "backend", pong->backend);
    pack_put_text(&w, "numerics", pong->numerics);
    pack_put_text(&w, "state", pong->state);
    return finish(&w, head, out);
}

bool reply_encode_status(wire_buffer *out, const reply_head *head, const reply_status *s) {
    const struct {
        const char *name;
        uint64_t value;
    } numbers[] = {
        {"rows", s->rows},
        {"queued", s->queued},
        {"pages_total", s->pages_total},
        {"pages_used", s->pages_used},
        {"pages_cached", s->pages_cached},
        {"pages_free", s->pages_free},
        {"pages_shared", s->pages_shared},
        {"requests", s->requests},
        {"samples", s->samples},
        {"prompt_tokens", s->prompt_tokens},
        {"prefilled_tokens", s->prefilled_tokens},
        {"cached_tokens", s->cached_tokens},
        {"sampled_tokens", s->sampled_tokens},
        {"forced_tokens", s->forced_tokens},
        {"preemptions", s->preemptions},
        {"steps", s->steps},
    };
    const size_t n = sizeof numbers / sizeof *numbers;
    pack_writer w;
    pack_start(&w, head->allocator);
    open_reply(&w, head, "status", n + 2);
    for (size_t i = 0; i < n; i++) pack_put_u64(&w, numbers[i].name, numbers[i].value);
    put_weights(&w, s->weights);
    pack_put_real(&w, "seconds", s->seconds);
    return finish(&w, head, out);
}

bool reply_encode_accepted(wire_buffer *out, const reply_head *head, const reply_accepted *accepted) {
    pack_writer w;
    pack_start(&w, head->allocator);
    open_reply(&w, head, "accepted", 4);
    pack_put_u64(&w, "samples", accepted->samples);
    pack_put_u64(&w, "seed", accepted->seed);
    put_weights(&w, accepted->weights);
    pack_put_text(&w, "numerics", accepted->numerics);
    return finish(&w, head, out);
}

bool reply_encode_done(wire_buffer *out, const reply_head *head, const reply_done *done) {
    pack_writer w;
    pack_start(&w, head->allocator);
    open_reply(&w, head, "done", done ? 6 : 0);
    if (done) {
        pack_put_u64(&w, "samples", done->samples);
        pack_put_u64(&w, "prompt_tokens", done->prompt_tokens);
        pack_put_u64(&w, "cached_tokens", done->cached_tokens);
        pack_put_u64(&w, "sampled_tokens", done->sampled_tokens);
        pack_put_u64(&w, "forced_tokens", done->forced_tokens);
        pack_put_real(&w, "seconds", done->seconds);
    }
    return finish(&w, head, out);
}

bool reply_encode_weights(wire_buffer *out, const reply_head *head, reply_weights weights) {
    pack_writer w;
    pack_start(&w, head->allocator);
    open_reply(&w, head, "weights", 1);
    put_weights(&w, weights);
    return finish(&w, head, out);
}

bool reply_encode_error(wire_buffer *out, const reply_head *head, const wire_error *error) {
    assert(error->code);
    bool has_key = error->key[0], has_retry = error->retry_after > 0;
    pack_writer w;
    pack_start(&w, head->allocator);
    open_reply(&w, head, "error", 2 + has_key + has_retry);
    pack_put_text(&w, "code", wire_text_of(error->code));
    pack_put_text(&w, "message", wire_text_of(error->message));
    if (has_key) pack_put_text(&w, "key", wire_text_of(error->key));
    if (has_retry) pack_put_real(&w, "retry_after", error->retry_after);
    return finish(&w, head, out);
}

bool reply_encode_tokens(wire_buffer *out, const reply_head *head, wire_ids tokens) {
    pack_writer w;
    pack_start(&w, head->allocator);
    open_reply(&w, head, "tokens", 1);
    pack_put_binary(&w, "tokens", tokens.ids, tokens.n, sizeof *tokens.ids);
    return finish(&w, head, out);
}

bool reply_encode_text(wire_buffer *out, const reply_head *head, wire_text repaired, const void *bytes,
                       size_t n_bytes) {
    pack_writer w;
    pack_start(&w, head->allocator);
    open_reply(&w, head, "text", 2);
    pack_put_text(&w, "text", repaired);
    pack_put_binary(&w, "bytes", bytes, n_bytes, 1);
    return finish(&w, head, out);
}

/* ---- scores */

static void write_score(pack_writer *w, const reply_score *s, size_t top) {
    pack_map(w, top ? 5 : 1);
    pack_put_binary(w, "logprobs", s->logprobs, s->n, sizeof(float));
    if (!top) return;
    pack_put_binary(w, "top_ids", s->top_ids, s->n * top, sizeof(uint32_t));
    pack_put_binary(w, "top_logprobs", s->top_logprobs, s->n * top, sizeof(float));
    pack_put_binary(w, "next_ids", s->next_ids, top, sizeof(uint32_t));
    pack_put_binary(w, "next_logprobs", s->next_logprobs, top, sizeof(float));
}

bool reply_encode_scores(wire_buffer *out, const reply_head *head, const reply_scores *scores) {
    pack_writer w;
    pack_start(&w, head->allocator);
    open_reply(&w, head, "scores", 3);
    pack_key(&w, "scores"), pack_array(&w, scores->n_scores);
    for (size_t i = 0; i < scores->n_scores; i++) write_score(&w, &scores->scores[i], scores->top);
    put_weights(&w, scores->weights);
    pack_put_text(&w, "numerics", scores->numerics);
    return finish(&w, head, out);
}

/* ---- samples */

static void write_tool_calls(pack_writer *w, const reply_sample *s) {
    pack_key(w, "tool_calls"), pack_array(w, s->n_tool_calls);
    for (size_t i = 0; i < s->n_tool_calls; i++) {
        const reply_tool_call *call = &s->tool_calls[i];
        assert(call->at < s->n_tokens);
        pack_map(w, 3);
        pack_put_u64(w, "at", call->at);
        pack_put_text(w, "tool", call->tool);
        pack_put_bool(w, "ok", call->ok);
    }
}

static void write_weights_runs(pack_writer *w, const reply_sample *s) {
    pack_key(w, "weights"), pack_array(w, s->n_weights);
    for (size_t i = 0; i < s->n_weights; i++) {
        pack_array(w, 3);
        msgpack_pack_uint32(&w->packer, s->weights[i].start);
        msgpack_pack_uint64(&w->packer, s->weights[i].weights.version);
        pack_text(w, s->weights[i].weights.digest);
    }
}

static size_t count_keys(const reply_sample *s) {
    return 8 + (s->prompt_id.bytes != NULL) + s->has_prompt_tokens + s->has_logprobs + s->has_model_logprobs +
           s->has_entropy + 2 * (size_t)s->has_kept + (s->has_stop || s->stop_string.bytes) +
           (s->text.bytes != NULL);
}

void pack_sample(pack_writer *w, const reply_sample *s) {
    static const char *const finishes[] = {"stop", "length", "cancelled"};
    pack_map(w, count_keys(s));
    pack_put_u64(w, "prompt", s->prompt);
    pack_put_u64(w, "sample", s->sample);
    if (s->prompt_id.bytes) pack_put_text(w, "prompt_id", s->prompt_id);
    pack_put_u64(w, "seed", s->seed);
    if (s->has_prompt_tokens)
        pack_put_binary(w, "prompt_tokens", s->prompt_tokens.ids, s->prompt_tokens.n, sizeof(uint32_t));
    pack_put_binary(w, "tokens", s->tokens, s->n_tokens, sizeof(uint32_t));
    pack_put_binary(w, "mask", s->mask, s->n_tokens, 1);
    if (s->has_logprobs) pack_put_binary(w, "logprobs", s->logprobs, s->n_tokens, sizeof(float));
    if (s->has_model_logprobs)
        pack_put_binary(w, "model_logprobs", s->model_logprobs, s->n_tokens, sizeof(float));
    if (s->has_entropy) pack_put_binary(w, "entropy", s->entropy, s->n_tokens, sizeof(float));
    if (s->has_kept) {
        assert(s->kept_offsets[s->n_tokens] == s->kept_ids.n);
        pack_put_binary(w, "kept_ids", s->kept_ids.ids, s->kept_ids.n, sizeof(uint32_t));
        pack_put_binary(w, "kept_offsets", s->kept_offsets, s->n_tokens + 1, sizeof(uint32_t));
    }
    pack_put_text(w, "finish", wire_text_of(finishes[s->finish]));
    if (s->has_stop)
        pack_put_u64(w, "stop", s->stop);
    else if (s->stop_string.bytes)
        pack_put_text(w, "stop", s->stop_string);
    write_tool_calls(w, s);
    write_weights_runs(w, s);
    if (s->text.bytes) pack_put_text(w, "text", s->text);
}

/* One message around the samples encoded in bytes[0 .. n_bytes). */
static bool write_message(wire_buffer *out, const reply_head *head, size_t n_samples, const uint8_t *bytes,
                          size_t n_bytes) {
    pack_writer w;
    pack_start(&w, head->allocator);
    open_reply(&w, head, "samples", 1);
    pack_key(&w, "samples"), pack_array(&w, n_samples);
    pack_append(&w, (const char *)bytes, n_bytes);
    return finish(&w, head, out);
}

/* The bytes of a message around its samples, at most: map, type, id, key, array head. */
static size_t envelope_bytes(const reply_head *head) { return head->id.n + 48; }

/* Cut the encoded samples (sample i ends at ends[i] in `bytes`) into messages: each takes as many as fit, one
 * at least. */
static bool write_messages(wire_buffer *messages, size_t *n_messages, const reply_head *head,
                           const uint8_t *bytes, const size_t *ends, size_t n) {
    for (size_t first = 0, start_at = 0; first < n;) {
        size_t last = first + 1;
        while (last < n && ends[last] - start_at + envelope_bytes(head) <= WIRE_SPLIT_BYTES) last++;
        size_t end = ends[last - 1];
        if (!write_message(&messages[*n_messages], head, last - first, bytes + start_at, end - start_at))
            return false;
        ++*n_messages;
        first = last, start_at = end;
    }
    return true;
}

bool reply_encode_samples(wire_buffer **out, size_t *n_out, const reply_head *head,
                          const reply_sample *samples, size_t n) {
    assert(n >= 1 && n <= UINT32_MAX);
    const wire_allocator *allocator = head->allocator;
    size_t *ends = wire_resize(allocator, NULL, n * sizeof *ends), n_messages = 0;
    wire_buffer *messages =
        wire_resize(allocator, NULL, n * sizeof *messages); /* no more messages than samples */
    pack_writer w;
    pack_start(&w, allocator);
    bool ok = ends && messages;
    for (size_t i = 0; ok && i < n; i++) {
        pack_sample(&w, &samples[i]);
        ends[i] = w.buffer.n;
        ok = !w.failed;
    }
    ok = ok && write_messages(messages, &n_messages, head, w.buffer.bytes, ends, n);
    wire_buffer_free(&w.buffer, allocator);
    wire_release(allocator, ends);
    if (!ok) {
        reply_messages_free(messages, n_messages, allocator);
        messages = NULL, n_messages = 0;
    }
    *out = messages, *n_out = n_messages;
    return ok;
}

void reply_messages_free(wire_buffer *messages, size_t n, const wire_allocator *allocator) {
    for (size_t i = 0; i < n; i++) wire_buffer_free(&messages[i], allocator);
    wire_release(allocator, messages);
}
