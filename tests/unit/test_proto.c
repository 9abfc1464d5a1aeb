/* Requests: the shared vectors (tests/vectors), limits, damage, and every allocation failing in turn. */
#include "tests/unit/proto_test.h"

#include <inttypes.h>
#include <xxhash.h>
#include <zstd.h>

#include "proto/request.h"

/* ---- A decoded request as the JSON of the vectors. */

static json_t *text_json(wire_text t) {
    if (!t.bytes) return json_null();
    assert_int_equal(t.bytes[t.n], 0);
    return json_stringn(t.bytes, t.n);
}

static json_t *u64_json(bool given, uint64_t value) {
    char digits[24];
    if (!given) return json_null();
    if (value <= (uint64_t)1 << 53) return json_integer((json_int_t)value);
    snprintf(digits, sizeof digits, "%" PRIu64, value);
    return json_string(digits);
}

static json_t *ids_json(bool given, wire_ids ids) {
    if (!given) return json_null();
    json_t *a = json_array();
    for (size_t i = 0; i < ids.n; i++) json_array_append_new(a, json_integer(ids.ids[i]));
    return a;
}

static json_t *content_json(const request_message *m) {
    static const char *const kinds[] = {"text", "python", "python_output"};
    if (m->is_string) return text_json(m->parts[0].text);
    json_t *a = json_array();
    for (size_t i = 0; i < m->n_parts; i++)
        json_array_append_new(
            a, json_pack("{s:s, s:o}", "type", kinds[m->parts[i].kind], "text", text_json(m->parts[i].text)));
    return a;
}

static json_t *messages_json(const request_input *input) {
    static const char *const roles[] = {"system", "user", "assistant"};
    if (input->kind != REQUEST_INPUT_MESSAGES) return json_null();
    json_t *a = json_array();
    for (size_t i = 0; i < input->n_messages; i++)
        json_array_append_new(a, json_pack("{s:s, s:o}", "role", roles[input->messages[i].role], "content",
                                           content_json(&input->messages[i])));
    return a;
}

static void put_input(json_t *o, const request_input *input) {
    json_object_set_new(o, "tokens", ids_json(input->kind == REQUEST_INPUT_TOKENS, input->tokens));
    json_object_set_new(o, "text", input->kind == REQUEST_INPUT_TEXT ? text_json(input->text) : json_null());
    json_object_set_new(o, "messages", messages_json(input));
}

static json_t *prompt_json(const request_prompt *p) {
    json_t *o = json_object();
    put_input(o, &p->input);
    json_object_set_new(o, "id", text_json(p->id));
    json_object_set_new(o, "seed", u64_json(p->has_seed, p->seed));
    json_object_set_new(o, "sample", u64_json(p->has_sample, p->sample));
    json_object_set_new(o, "enough", u64_json(p->enough > 0, p->enough));
    json_object_set_new(o, "prefix", ids_json(p->has_prefix, p->prefix));
    return o;
}

static json_t *texts_json(bool given, const wire_text *texts, size_t n) {
    if (!given) return json_null();
    json_t *a = json_array();
    for (size_t i = 0; i < n; i++) json_array_append_new(a, text_json(texts[i]));
    return a;
}

static void put_rollout(json_t *o, const request_rollout *q) {
    static const char *const ways[] = {"sample", "prompt", "request"};
    json_t *prompts = json_array(), *logprobs = json_array();
    for (size_t i = 0; i < q->n_prompts; i++) json_array_append_new(prompts, prompt_json(&q->prompts[i]));
    if (q->logprobs) json_array_append_new(logprobs, json_string("sampling"));
    if (q->model_logprobs) json_array_append_new(logprobs, json_string("model"));
    json_object_set_new(o, "prompts", prompts);
    json_object_set_new(o, "n", json_integer(q->n));
    json_object_set_new(o, "seed", u64_json(q->has_seed, q->seed));
    json_object_set_new(o, "max_tokens", json_integer(q->max_tokens));
    json_object_set_new(o, "min_tokens", json_integer(q->min_tokens));
    json_object_set_new(o, "temperature", json_real(q->temperature));
    json_object_set_new(o, "top_k", json_integer(q->top_k));
    json_object_set_new(o, "top_p", json_real(q->top_p));
    json_object_set_new(o, "min_p", json_real(q->min_p));
    json_object_set_new(o, "stop_tokens", ids_json(q->has_stop_tokens, q->stop_tokens));
    json_object_set_new(o, "stop", texts_json(true, q->stop, q->n_stop));
    json_object_set_new(o, "tools", texts_json(q->has_tools, q->tools, q->n_tools));
    json_object_set_new(o, "logprobs", logprobs);
    json_object_set_new(o, "entropy", json_boolean(q->entropy));
    json_object_set_new(o, "kept", json_boolean(q->kept));
    json_object_set_new(o, "text", json_boolean(q->text));
    json_object_set_new(o, "deliver", json_string(ways[q->deliver]));
    json_object_set_new(o, "timeout", q->timeout > 0 ? json_real(q->timeout) : json_null());
    json_object_set_new(o, "min_weights", u64_json(true, q->min_weights));
    json_object_set_new(o, "weights_timeout", json_real(q->weights_timeout));
}

static void put_score(json_t *o, const request_score *s) {
    json_t *a = json_array();
    for (size_t i = 0; i < s->n_sequences; i++) json_array_append_new(a, ids_json(true, s->sequences[i]));
    json_object_set_new(o, "sequences", a);
    json_object_set_new(o, "top", json_integer(s->top));
    json_object_set_new(o, "temperature", json_real(s->temperature));
}

static void put_weights(json_t *o, const request_weights *w) {
    static const char *const policies[] = {"finish", "keep", "recompute", "abort"};
    json_t *source = w->path.bytes ? json_pack("{s:o}", "path", text_json(w->path))
                                   : json_pack("{s:{s:o, s:o}}", "stream", "tensors",
                                               u64_json(true, w->tensors), "bytes", u64_json(true, w->bytes));
    json_object_set_new(o, "version", u64_json(true, w->version));
    json_object_set_new(o, "source", source);
    json_object_set_new(o, "policy", json_string(policies[w->policy]));
}

static json_t *hex_json(const uint8_t *bytes, size_t n) {
    char *hex = malloc(2 * n + 1);
    for (size_t i = 0; i < n; i++) snprintf(hex + 2 * i, 3, "%02x", bytes[i]);
    json_t *s = json_stringn(hex, 2 * n);
    free(hex);
    return s;
}

static void put_chunk(json_t *o, const request_chunk *c) {
    static const char *const dtypes[] = {"F32", "BF16", "F16", "F64"};
    json_t *shape = json_array();
    for (size_t i = 0; i < c->n_dims; i++) json_array_append_new(shape, u64_json(true, c->shape[i]));
    json_object_set_new(o, "target", text_json(c->target));
    json_object_set_new(o, "name", text_json(c->name));
    json_object_set_new(o, "dtype", json_string(dtypes[c->dtype]));
    json_object_set_new(o, "shape", shape);
    json_object_set_new(o, "offset", u64_json(true, c->offset));
    json_object_set_new(o, "data", hex_json(c->data, c->n_data));
}

static void put_commit(json_t *o, const request_commit *c) {
    json_object_set_new(o, "target", text_json(c->target));
    json_object_set_new(o, "digest", text_json(c->digest));
}

static json_t *request_json(const request *q) {
    static const char *const names[] = {"ping",       "status",        "cancel",        "score", "tokenize",
                                        "detokenize", "rollout",       "ack",           "pause", "resume",
                                        "weights",    "weights_chunk", "weights_commit"};
    static const char *const modes[] = {"finish", "keep", "abort"};
    json_t *o =
        json_pack("{s:s, s:o, s:b}", "type", names[q->type], "id", text_json(q->id), "compress", q->compress);
    switch (q->type) {
    case REQUEST_PING:
    case REQUEST_STATUS:
    case REQUEST_RESUME: break;
    case REQUEST_CANCEL: json_object_set_new(o, "target", text_json(q->cancel.target)); break;
    case REQUEST_SCORE: put_score(o, &q->score); break;
    case REQUEST_TOKENIZE: put_input(o, &q->tokenize); break;
    case REQUEST_DETOKENIZE: json_object_set_new(o, "tokens", ids_json(true, q->detokenize.tokens)); break;
    case REQUEST_ROLLOUT: put_rollout(o, &q->rollout); break;
    case REQUEST_ACK: json_object_set_new(o, "target", text_json(q->ack.target)); break;
    case REQUEST_PAUSE: json_object_set_new(o, "mode", json_string(modes[q->pause.mode])); break;
    case REQUEST_WEIGHTS: put_weights(o, &q->weights); break;
    case REQUEST_WEIGHTS_CHUNK: put_chunk(o, &q->chunk); break;
    case REQUEST_WEIGHTS_COMMIT: put_commit(o, &q->commit); break;
    }
    return o;
}

/* ---- Requests. */

static void check_error(const char *name, const request_failure *f, const json_t *wanted) {
    json_t *got = json_pack("{s:s, s:s, s:o, s:b}", "code", f->error.code, "key", f->error.key, "id",
                            json_stringn(f->id, f->n_id), "compress", f->compress);
    json_t *pinned = json_deep_copy(wanted);
    const char *says = text_at(wanted, "says");
    json_object_del(pinned, "says");
    check_same_json(name, got, pinned);
    if (!strstr(f->error.message, says)) {
        print_message("%s\n  got    %s\n  wanted ...%s...\n", name, f->error.message, says);
        fail();
    }
    json_decref(got), json_decref(pinned);
}

static void check_request(const json_t *row) {
    const char *name = text_at(row, "name");
    const json_t *wanted = json_object_get(row, "request");
    counted_heap heap = {.fail_at = -1};
    wire_allocator allocator = COUNTED(heap);
    request *q;
    request_failure failure;
    uint8_t *frame;
    size_t n = hex_bytes(text_at(row, "hex"), &frame);
    if (request_decode(&q, frame, n, WIRE_MAX_MESSAGE, &allocator, &failure)) {
        memset(frame, 0xAA, n); /* the request must not borrow it */
        json_t *got = request_json(q);
        check_same_json(name, got, wanted);
        json_decref(got);
    } else {
        if (wanted) print_message("%s: %s: %s\n", name, failure.error.key, failure.error.message);
        assert_null(wanted);
        assert_null(q);
        check_error(name, &failure, json_object_get(row, "error"));
    }
    request_free(q);
    free(frame);
    assert_int_equal(heap.n_live, 0);
}

static void requests_decode_as_the_vectors_say(void **state) {
    (void)state;
    each_row("tests/vectors/requests.jsonl", check_request);
}

/* {"type": "rollout", "id": "r", "x": 1} */
static void what_is_expected_instead_of_a_key_is_built(void **state) {
    (void)state;
    static const char message[] = "\x83\xA4type\xA7rollout\xA2id\xA1r\xA1x\x01";
    counted_heap heap = {.fail_at = -1};
    wire_allocator allocator = COUNTED(heap);
    request *q;
    request_failure failure;
    assert_false(request_decode(&q, message, sizeof message - 1, WIRE_MAX_MESSAGE, &allocator, &failure));
    assert_string_equal(failure.error.key, "x");
    assert_non_null(strstr(failure.error.message, "expected type, id, compress, prompts, n, seed,"));
    assert_non_null(strstr(failure.error.message, "deliver, timeout, min_weights, weights_timeout"));
    assert_null(strstr(failure.error.message, "model"));
    assert_int_equal(heap.n_live, 0);
}

static void five_bytes_do_not_allocate(void **state) {
    (void)state;
    const uint8_t frames[][5] = {
        {0xDD, 0xFF, 0xFF, 0xFF, 0xFF}, {0xDF, 0xFF, 0xFF, 0xFF, 0xFF}, {0xC6, 0xFF, 0xFF, 0xFF, 0xFF}};
    for (int i = 0; i < 3; i++) {
        counted_heap heap = {.fail_at = -1};
        wire_allocator allocator = COUNTED(heap);
        request *q;
        request_failure failure;
        assert_false(request_decode(&q, frames[i], 5, WIRE_MAX_MESSAGE, &allocator, &failure));
        assert_int_equal(heap.n_calls, 0);
    }
}

/* The bytes of {"type": "tokenize", "id": "r", "text": <n bytes>}, bare. */
static size_t tokenize_bytes(uint8_t **out, uint32_t n) {
    const uint8_t head[] = "\x83\xA4type\xA8tokenize\xA2id\xA1r\xA4text\xDB";
    size_t at = sizeof head - 1;
    *out = malloc(at + 4 + n);
    memcpy(*out, head, at);
    for (int i = 0; i < 4; i++) (*out)[at++] = (uint8_t)(n >> (24 - 8 * i));
    memset(*out + at, 'x', n);
    return at + n;
}

static void a_message_may_be_as_long_as_the_limit_and_no_longer(void **state) {
    (void)state;
    uint8_t *message;
    size_t n = tokenize_bytes(&message, 5000), bound = ZSTD_compressBound(n);
    uint8_t *frame = malloc(bound);
    size_t n_frame = ZSTD_compress(frame, bound, message, n, 3);
    for (int compressed = 0; compressed < 2; compressed++) {
        const uint8_t *bytes = compressed ? frame : message;
        size_t n_bytes = compressed ? n_frame : n;
        request *q;
        request_failure failure;
        assert_true(request_decode(&q, bytes, n_bytes, n, NULL, &failure));
        assert_int_equal(q->tokenize.text.n, 5000);
        request_free(q);
        assert_false(request_decode(&q, bytes, n_bytes, n - 1, NULL, &failure));
        assert_string_equal(failure.error.code, WIRE_BAD_REQUEST);
        assert_non_null(strstr(failure.error.message, "--max-message"));
    }
    free(message), free(frame);
}

/* Compress without declaring the size, as a streaming client does. */
static size_t compress_undeclared(uint8_t *out, size_t cap, const uint8_t *bytes, size_t n) {
    ZSTD_CCtx *context = ZSTD_createCCtx();
    ZSTD_CCtx_setParameter(context, ZSTD_c_contentSizeFlag, 0);
    size_t n_out = ZSTD_compress2(context, out, cap, bytes, n);
    ZSTD_freeCCtx(context);
    assert_false(ZSTD_isError(n_out));
    return n_out;
}

static void undeclared_sizes_cost_in_proportion_and_stop_at_the_limit(void **state) {
    (void)state;
    uint8_t *message;
    size_t n = tokenize_bytes(&message, 100000), bound = ZSTD_compressBound(n);
    uint8_t *bytes = malloc(bound);
    size_t n_bytes = compress_undeclared(bytes, bound, message, n);
    counted_heap heap = {.fail_at = -1};
    wire_allocator allocator = COUNTED(heap);
    wire_frame frame;
    wire_error err;
    assert_true(wire_unwrap(&frame, bytes, n_bytes, WIRE_MAX_MESSAGE, &allocator, &err));
    assert_int_equal(frame.n, n);
    assert_memory_equal(frame.message, message, n);
    assert_true(heap.most_bytes <= 3 * n);
    wire_frame_free(&frame, &allocator);
    assert_true(wire_unwrap(&frame, bytes, n_bytes, n, &allocator, &err));
    wire_frame_free(&frame, &allocator);
    assert_false(wire_unwrap(&frame, bytes, n_bytes, n - 1, &allocator, &err));
    assert_non_null(strstr(err.message, "--max-message"));
    assert_int_equal(heap.n_live, 0);
    free(message), free(bytes);
}

/* A chunk's data counts as bytes, whatever they are, and is copied once. */
static void a_chunk_costs_its_bytes_and_little_more(void **state) {
    (void)state;
    static const uint8_t head[] = "\x88\xA4type\xADweights_chunk\xA2id\xA1r\xA6target\xA1w\xA4name\xA1"
                                  "a"
                                  "\xA5"
                                  "dtype\xA3"
                                  "F32"
                                  "\xA5shape\x91\xCE\x00\x04\x00\x00"
                                  "\xA6offset\x00"
                                  "\xA4"
                                  "data\xC6\x00\x10\x00\x00";
    const size_t n_data = 1 << 20, n = sizeof head - 1 + n_data;
    uint8_t *message = malloc(n);
    memcpy(message, head, sizeof head - 1);
    memset(message + sizeof head - 1, 0x91, n_data); /* as objects, a million arrays */
    counted_heap heap = {.fail_at = -1};
    wire_allocator allocator = COUNTED(heap);
    request *q;
    request_failure failure;
    assert_true(request_decode(&q, message, n, n, &allocator, &failure));
    assert_int_equal(q->chunk.n_data, n_data);
    assert_memory_equal(q->chunk.data, message + sizeof head - 1, n_data);
    assert_true(heap.n_bytes <= n_data + 16384);
    request_free(q);
    assert_int_equal(heap.n_live, 0);
    free(message);
}

/* The commit of the vectors is that of a stream with nothing but their first chunk, as README.md hashes it.
 */
static request *digest_chunk, *digest_commit;

static void keep_for_digest(const json_t *row) {
    request **kept = !strcmp(text_at(row, "name"), "a chunk that is a whole tensor") ? &digest_chunk
                     : !strcmp(text_at(row, "name"), "weights_commit")               ? &digest_commit
                                                                                     : NULL;
    request_failure failure;
    uint8_t *frame;
    if (!kept) return;
    size_t n = hex_bytes(text_at(row, "hex"), &frame);
    assert_true(request_decode(kept, frame, n, WIRE_MAX_MESSAGE, NULL, &failure));
    free(frame);
}

static void the_digest_of_the_vectors_is_that_of_their_chunk(void **state) {
    (void)state;
    each_row("tests/vectors/requests.jsonl", keep_for_digest);
    assert_true(digest_chunk && digest_commit);
    const request_chunk *c = &digest_chunk->chunk;
    const uint64_t head[] = {c->dtype, c->n_dims, c->shape[0]};
    char digest[REQUEST_DIGEST + 1];
    XXH3_state_t *h = XXH3_createState();
    assert_int_equal(c->n_dims, 1);
    XXH3_128bits_reset(h);
    XXH3_128bits_update(h, c->name.bytes, c->name.n + 1);
    XXH3_128bits_update(h, head, sizeof head);
    XXH3_128bits_update(h, c->data, c->n_data);
    XXH128_hash_t sum = XXH3_128bits_digest(h);
    snprintf(digest, sizeof digest, "%016" PRIx64 "%016" PRIx64, sum.high64, sum.low64);
    assert_string_equal(digest, digest_commit->commit.digest.bytes);
    XXH3_freeState(h);
    request_free(digest_chunk), request_free(digest_commit);
}

/* Every prefix and every single changed byte of a real request: nothing to assert but that it ends, in one of
 * two ways. */
static void damaged_requests_never_crash(void **state) {
    (void)state;
    const char *hex = "83a474797065a7726f6c6c6f7574a26964a172a770726f6d7074739182a86d6573736167657392"
                      "82a4726f6c65a673797374656da7636f6e74656e74a178"
                      "82a4726f6c65a475736572a7636f6e74656e749182a474797065a474657874a474657874a179"
                      "a26964a131";
    uint8_t *frame;
    size_t n = hex_bytes(hex, &frame);
    request *q;
    request_failure failure;
    assert_true(request_decode(&q, frame, n, WIRE_MAX_MESSAGE, NULL, &failure));
    request_free(q);
    for (size_t cut = 0; cut < n; cut++) {
        uint8_t *prefix = malloc(cut ? cut : 1);
        memcpy(prefix, frame, cut);
        assert_false(request_decode(&q, prefix, cut, WIRE_MAX_MESSAGE, NULL, &failure));
        assert_int_equal(failure.n_id, 0);
        free(prefix);
    }
    for (size_t i = 0; i < n; i++) {
        for (int flip = 1; flip < 256; flip++) {
            frame[i] ^= (uint8_t)flip;
            if (!request_decode(&q, frame, n, WIRE_MAX_MESSAGE, NULL, &failure))
                assert_non_null(failure.error.code);
            request_free(q);
            frame[i] ^= (uint8_t)flip;
        }
    }
    free(frame);
}

static void check_decode_failures(const json_t *row) {
    uint8_t *frame;
    size_t n = hex_bytes(text_at(row, "hex"), &frame);
    for (long fail_at = 0;; fail_at++) {
        counted_heap heap = {.fail_at = fail_at};
        wire_allocator allocator = COUNTED(heap);
        request *q;
        request_failure failure;
        bool ok = request_decode(&q, frame, n, WIRE_MAX_MESSAGE, &allocator, &failure);
        bool fired = heap.n_calls > fail_at;
        if (fired) {
            assert_false(ok);
            assert_string_equal(failure.error.code, WIRE_INTERNAL);
        }
        request_free(q);
        assert_int_equal(heap.n_live, 0);
        if (!fired) break;
        assert_true(fail_at < 1000);
    }
    free(frame);
}

static void decoding_survives_every_allocation_failure(void **state) {
    (void)state;
    each_row("tests/vectors/requests.jsonl", check_decode_failures);
}

/* ---- Equality. */

static const char *plain_hex = "83a474797065a7726f6c6c6f7574a26964a172a770726f6d7074739181a6746f6b656e739105";

static request *decode_hex(const char *hex) {
    uint8_t *frame;
    size_t n = hex_bytes(hex, &frame);
    request *q;
    request_failure failure;
    assert_true(request_decode(&q, frame, n, WIRE_MAX_MESSAGE, NULL, &failure));
    free(frame);
    return q;
}

static void check_different_from_plain(const json_t *row) {
    const json_t *wanted = json_object_get(row, "request");
    if (!wanted || strcmp(text_at(wanted, "type"), "rollout")) return;
    request *plain = decode_hex(plain_hex), *other = decode_hex(text_at(row, "hex"));
    request *again = decode_hex(text_at(row, "hex"));
    json_t *a = request_json(plain), *b = request_json(other);
    json_object_del(a, "compress"), json_object_del(b, "compress");
    json_object_del(a, "seed"), json_object_del(b, "seed"); /* the caller's matter */
    assert_int_equal(request_rollout_equal(&plain->rollout, &other->rollout), json_equal(a, b));
    assert_true(request_rollout_equal(&other->rollout, &again->rollout));
    json_decref(a), json_decref(b);
    request_free(plain), request_free(other), request_free(again);
}

static void rollouts_are_equal_when_all_their_fields_are(void **state) {
    (void)state;
    each_row("tests/vectors/requests.jsonl", check_different_from_plain);
}

static void every_field_counts(void **state) {
    (void)state;
    request *plain = decode_hex(plain_hex);
    const request_rollout q = plain->rollout;
    request_rollout other[21];
    const wire_text x = wire_text_of("x"), y = wire_text_of("y");
    const size_t n = sizeof other / sizeof *other;
    for (size_t i = 0; i < n; i++) other[i] = q;
    assert_true(request_rollout_equal(&q, &other[0]));
    size_t i = 0;
    other[i++].n = 2;
    other[i++].max_tokens = 255;
    other[i++].min_tokens = 1;
    other[i++].temperature = 0.5;
    other[i++].top_k = 1;
    other[i++].top_p = 0.5;
    other[i++].min_p = 0.5;
    other[i++].has_stop_tokens = true;
    other[i++].stop_tokens = (wire_ids){&(uint32_t){1}, 1};
    other[i].stop = &x, other[i++].n_stop = 1;
    other[i].stop = &y, other[i++].n_stop = 1;
    other[i++].has_tools = true;
    other[i++].deliver = REQUEST_DELIVER_PROMPT;
    other[i++].logprobs = false;
    other[i++].model_logprobs = true;
    other[i++].entropy = true;
    other[i++].kept = true;
    other[i++].text = true;
    other[i++].timeout = 1.0;
    other[i++].min_weights = 1;
    other[i++].weights_timeout = 599.0;
    assert_int_equal(i, n);
    for (i = 0; i < n; i++) {
        if (request_rollout_equal(&q, &other[i]) || request_rollout_equal(&other[i], &q))
            fail_msg("change %zu is not seen", i);
        for (size_t j = 0; j < i; j++)
            if (request_rollout_equal(&other[i], &other[j])) fail_msg("%zu and %zu are one", i, j);
    }
    request_free(plain);
}

static void every_field_of_a_prompt_counts(void **state) {
    (void)state;
    request *plain = decode_hex(plain_hex);
    const request_prompt p = plain->rollout.prompts[0];
    request_prompt other[9];
    const size_t n = sizeof other / sizeof *other;
    for (size_t i = 0; i < n; i++) other[i] = p;
    size_t i = 0;
    other[i++].id = (wire_text){"", 0};
    other[i++].has_seed = true;
    other[i++].seed = 1;
    other[i++].has_sample = true;
    other[i++].sample = 1;
    other[i++].enough = 1;
    other[i++].has_prefix = true;
    other[i++].prefix = (wire_ids){&(uint32_t){1}, 1};
    other[i++].input.tokens = (wire_ids){&(uint32_t){6}, 1};
    assert_int_equal(i, n);
    for (i = 0; i < n; i++) {
        request_rollout q = plain->rollout;
        q.prompts = &other[i];
        if (request_rollout_equal(&q, &plain->rollout)) fail_msg("change %zu is not seen", i);
    }
    request_free(plain);
}

static void ids_and_seeds_of_requests_do_not_count(void **state) {
    (void)state;
    request *a = decode_hex(plain_hex);
    /* The same with id "s", and seed 9. */
    request *b = decode_hex(
        "84a47365656409a474797065a7726f6c6c6f7574a26964a173a770726f6d7074739181a6746f6b656e739105");
    request_rollout none = b->rollout;
    none.has_seed = false;
    assert_true(b->rollout.has_seed && b->rollout.seed == 9);
    assert_true(request_rollout_equal(&a->rollout, &b->rollout));
    assert_true(request_rollout_equal(&b->rollout, &a->rollout));
    assert_true(request_rollout_equal(&b->rollout, &none));
    request_free(a), request_free(b);
}

static void how_ids_are_encoded_does_not_matter(void **state) {
    (void)state;
    request *a = decode_hex(plain_hex);
    request *b =
        decode_hex("83a770726f6d7074739181a6746f6b656e73c40405000000a26964a173a474797065a7726f6c6c6f7574");
    assert_true(request_rollout_equal(&a->rollout, &b->rollout));
    request_free(a), request_free(b);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(requests_decode_as_the_vectors_say),
        cmocka_unit_test(what_is_expected_instead_of_a_key_is_built),
        cmocka_unit_test(five_bytes_do_not_allocate),
        cmocka_unit_test(a_message_may_be_as_long_as_the_limit_and_no_longer),
        cmocka_unit_test(undeclared_sizes_cost_in_proportion_and_stop_at_the_limit),
        cmocka_unit_test(a_chunk_costs_its_bytes_and_little_more),
        cmocka_unit_test(the_digest_of_the_vectors_is_that_of_their_chunk),
        cmocka_unit_test(damaged_requests_never_crash),
        cmocka_unit_test(decoding_survives_every_allocation_failure),
        cmocka_unit_test(rollouts_are_equal_when_all_their_fields_are),
        cmocka_unit_test(every_field_counts),
        cmocka_unit_test(every_field_of_a_prompt_counts),
        cmocka_unit_test(ids_and_seeds_of_requests_do_not_count),
        cmocka_unit_test(how_ids_are_encoded_does_not_matter),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
