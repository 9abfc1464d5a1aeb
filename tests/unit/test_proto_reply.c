/* Replies: the shared vectors (tests/vectors), compression, splitting, and every allocation failing in turn.
 */
#include "tests/unit/proto_test.h"

#include <zstd.h>

#include "proto/reply.h"

/* ---- Replies: the structs of the vectors, from their JSON.  Blocks of a row live until it ends. */

static void *row_blocks[64];
static int n_row_blocks;

static void *row_take(size_t n_bytes) {
    assert_true(n_row_blocks < 64);
    return row_blocks[n_row_blocks++] = calloc(1, n_bytes ? n_bytes : 1);
}

static void row_free(void) {
    while (n_row_blocks > 0) free(row_blocks[--n_row_blocks]);
}

static wire_text text_of(const json_t *o, const char *key) {
    const json_t *s = json_object_get(o, key);
    return s ? (wire_text){json_string_value(s), json_string_length(s)} : (wire_text){0};
}

static uint64_t u64_of(const json_t *o, const char *key) {
    const json_t *v = json_object_get(o, key);
    return json_is_string(v) ? strtoull(json_string_value(v), NULL, 10) : (uint64_t)json_integer_value(v);
}

static reply_weights weights_of(const json_t *a, size_t at) {
    const json_t *digest = json_array_get(a, at + 1);
    return (reply_weights){(uint64_t)json_integer_value(json_array_get(a, at)),
                           {json_string_value(digest), json_string_length(digest)}};
}

static wire_ids ids_of(const json_t *o, const char *key) {
    const json_t *a = json_object_get(o, key);
    uint32_t *ids = row_take(json_array_size(a) * sizeof *ids);
    for (size_t i = 0; i < json_array_size(a); i++)
        ids[i] = (uint32_t)json_integer_value(json_array_get(a, i));
    return (wire_ids){ids, json_array_size(a)};
}

static const float *floats_of(const json_t *o, const char *key) {
    const json_t *a = json_object_get(o, key);
    float *f = row_take(json_array_size(a) * sizeof *f);
    for (size_t i = 0; i < json_array_size(a); i++) f[i] = (float)json_number_value(json_array_get(a, i));
    return f;
}

static const uint8_t *mask_of(const json_t *o) {
    wire_ids wide = ids_of(o, "mask");
    uint8_t *mask = row_take(wide.n);
    for (size_t i = 0; i < wide.n; i++) mask[i] = (uint8_t)wide.ids[i];
    return mask;
}

static void read_runs(const json_t *o, reply_sample *s) {
    const json_t *calls = json_object_get(o, "tool_calls"), *runs = json_object_get(o, "weights");
    reply_tool_call *c = row_take(json_array_size(calls) * sizeof *c);
    reply_weights_run *w = row_take(json_array_size(runs) * sizeof *w);
    for (size_t i = 0; i < json_array_size(calls); i++) {
        const json_t *call = json_array_get(calls, i);
        c[i] = (reply_tool_call){(uint32_t)u64_of(call, "at"), text_of(call, "tool"),
                                 json_is_true(json_object_get(call, "ok"))};
    }
    for (size_t i = 0; i < json_array_size(runs); i++) {
        const json_t *run = json_array_get(runs, i);
        w[i] = (reply_weights_run){(uint32_t)json_integer_value(json_array_get(run, 0)), weights_of(run, 1)};
    }
    s->tool_calls = c, s->n_tool_calls = json_array_size(calls);
    s->weights = w, s->n_weights = json_array_size(runs);
}

static bool has(const json_t *o, const char *key) { return json_object_get(o, key) != NULL; }

static reply_sample sample_of(const json_t *o) {
    const char *finish = text_at(o, "finish");
    wire_ids tokens = ids_of(o, "tokens");
    reply_sample s = {.prompt = (uint32_t)u64_of(o, "prompt"),
                      .sample = (uint32_t)u64_of(o, "sample"),
                      .prompt_id = text_of(o, "prompt_id"),
                      .seed = u64_of(o, "seed"),
                      .has_prompt_tokens = has(o, "prompt_tokens"),
                      .prompt_tokens = ids_of(o, "prompt_tokens"),
                      .n_tokens = tokens.n,
                      .tokens = tokens.ids,
                      .mask = mask_of(o),
                      .has_logprobs = has(o, "logprobs"),
                      .has_model_logprobs = has(o, "model_logprobs"),
                      .has_entropy = has(o, "entropy"),
                      .has_kept = has(o, "kept_ids"),
                      .logprobs = floats_of(o, "logprobs"),
                      .model_logprobs = floats_of(o, "model_logprobs"),
                      .entropy = floats_of(o, "entropy"),
                      .kept_ids = ids_of(o, "kept_ids"),
                      .kept_offsets = ids_of(o, "kept_offsets").ids,
                      .finish = !strcmp(finish, "stop")     ? REPLY_STOP
                                : !strcmp(finish, "length") ? REPLY_LENGTH
                                                            : REPLY_CANCELLED,
                      .has_stop = json_is_integer(json_object_get(o, "stop")),
                      .stop_string =
                          json_is_string(json_object_get(o, "stop")) ? text_of(o, "stop") : (wire_text){0},
                      .text = text_of(o, "text")};
    if (s.has_stop) s.stop = (uint32_t)u64_of(o, "stop");
    read_runs(o, &s);
    return s;
}

static bool encode_pong(wire_buffer *out, const reply_head *head, const json_t *v) {
    return reply_encode_pong(out, head,
                             &(reply_pong){.version = text_of(v, "version"),
                                           .model = text_of(v, "model"),
                                           .backend = text_of(v, "backend"),
                                           .numerics = text_of(v, "numerics"),
                                           .state = text_of(v, "state"),
                                           .weights = weights_of(json_object_get(v, "weights"), 0)});
}

static bool encode_status(wire_buffer *out, const reply_head *head, const json_t *v) {
    return reply_encode_status(out, head,
                               &(reply_status){.rows = u64_of(v, "rows"),
                                               .queued = u64_of(v, "queued"),
                                               .pages_total = u64_of(v, "pages_total"),
                                               .pages_used = u64_of(v, "pages_used"),
                                               .pages_cached = u64_of(v, "pages_cached"),
                                               .pages_free = u64_of(v, "pages_free"),
                                               .pages_shared = u64_of(v, "pages_shared"),
                                               .weights = weights_of(json_object_get(v, "weights"), 0),
                                               .requests = u64_of(v, "requests"),
                                               .samples = u64_of(v, "samples"),
                                               .prompt_tokens = u64_of(v, "prompt_tokens"),
                                               .prefilled_tokens = u64_of(v, "prefilled_tokens"),
                                               .cached_tokens = u64_of(v, "cached_tokens"),
                                               .sampled_tokens = u64_of(v, "sampled_tokens"),
                                               .forced_tokens = u64_of(v, "forced_tokens"),
                                               .preemptions = u64_of(v, "preemptions"),
                                               .steps = u64_of(v, "steps"),
                                               .seconds = json_number_value(json_object_get(v, "seconds"))});
}

static bool encode_accepted(wire_buffer *out, const reply_head *head, const json_t *v) {
    return reply_encode_accepted(out, head,
                                 &(reply_accepted){.samples = u64_of(v, "samples"),
                                                   .seed = u64_of(v, "seed"),
                                                   .weights = weights_of(json_object_get(v, "weights"), 0),
                                                   .numerics = text_of(v, "numerics")});
}

static bool encode_done(wire_buffer *out, const reply_head *head, const json_t *v) {
    if (json_is_null(v)) return reply_encode_done(out, head, NULL);
    return reply_encode_done(out, head,
                             &(reply_done){.samples = u64_of(v, "samples"),
                                           .prompt_tokens = u64_of(v, "prompt_tokens"),
                                           .cached_tokens = u64_of(v, "cached_tokens"),
                                           .sampled_tokens = u64_of(v, "sampled_tokens"),
                                           .forced_tokens = u64_of(v, "forced_tokens"),
                                           .seconds = json_number_value(json_object_get(v, "seconds"))});
}

static bool encode_weights(wire_buffer *out, const reply_head *head, const json_t *v) {
    return reply_encode_weights(out, head, weights_of(json_object_get(v, "weights"), 0));
}

static bool encode_error(wire_buffer *out, const reply_head *head, const json_t *v) {
    wire_error err;
    wire_fail(&err, text_at(v, "code"), text_of(v, "key").bytes, "%s", text_at(v, "message"));
    err.retry_after = json_number_value(json_object_get(v, "retry_after"));
    return reply_encode_error(out, head, &err);
}

static bool encode_text(wire_buffer *out, const reply_head *head, const json_t *v) {
    uint8_t *bytes;
    size_t n = hex_bytes(text_at(v, "bytes"), &bytes);
    bool ok = reply_encode_text(out, head, text_of(v, "text"), bytes, n);
    free(bytes);
    return ok;
}

static bool encode_tokens(wire_buffer *out, const reply_head *head, const json_t *v) {
    return reply_encode_tokens(out, head, ids_of(v, "tokens"));
}

static bool encode_scores(wire_buffer *out, const reply_head *head, const json_t *v) {
    const json_t *scores = json_object_get(v, "scores");
    reply_score *s = row_take(json_array_size(scores) * sizeof *s);
    for (size_t i = 0; i < json_array_size(scores); i++) {
        const json_t *o = json_array_get(scores, i);
        s[i] = (reply_score){.n = json_array_size(json_object_get(o, "logprobs")),
                             .logprobs = floats_of(o, "logprobs"),
                             .top_ids = ids_of(o, "top_ids").ids,
                             .top_logprobs = floats_of(o, "top_logprobs"),
                             .next_ids = ids_of(o, "next_ids").ids,
                             .next_logprobs = floats_of(o, "next_logprobs")};
    }
    return reply_encode_scores(out, head,
                               &(reply_scores){.scores = s,
                                               .n_scores = json_array_size(scores),
                                               .top = (uint32_t)u64_of(v, "top"),
                                               .weights = weights_of(json_object_get(v, "weights"), 0),
                                               .numerics = text_of(v, "numerics")});
}

/* As for the others; the one message that these samples fit into. */
static bool encode_samples(wire_buffer *out, const reply_head *head, const json_t *v) {
    reply_sample *samples = row_take(json_array_size(v) * sizeof *samples);
    wire_buffer *messages;
    size_t n_messages;
    for (size_t i = 0; i < json_array_size(v); i++) samples[i] = sample_of(json_array_get(v, i));
    *out = (wire_buffer){0};
    if (!reply_encode_samples(&messages, &n_messages, head, samples, json_array_size(v))) {
        assert_null(messages);
        return false;
    }
    assert_int_equal(n_messages, 1);
    *out = messages[0], messages[0] = (wire_buffer){0};
    reply_messages_free(messages, 1, head->allocator);
    return true;
}

static bool encode_row(wire_buffer *out, const json_t *row, bool compress, const wire_allocator *allocator) {
    static const struct {
        const char *type;
        bool (*encode)(wire_buffer *out, const reply_head *head, const json_t *value);
    } encoders[] = {{"pong", encode_pong},      {"status", encode_status},   {"accepted", encode_accepted},
                    {"done", encode_done},      {"weights", encode_weights}, {"error", encode_error},
                    {"tokens", encode_tokens},  {"text", encode_text},       {"scores", encode_scores},
                    {"samples", encode_samples}};
    const reply_head head = {text_of(row, "id"), compress, allocator};
    for (size_t i = 0; i < sizeof encoders / sizeof *encoders; i++) {
        if (!strcmp(encoders[i].type, text_at(row, "reply")))
            return encoders[i].encode(out, &head, json_object_get(row, "value"));
    }
    fail_msg("no encoder for %s", text_at(row, "reply"));
    return false;
}

static bool is_compressed(wire_buffer b) { return b.n >= 4 && !memcmp(b.bytes, "\x28\xB5\x2F\xFD", 4); }

static void check_reply(const json_t *row) {
    uint8_t *wanted;
    size_t n = hex_bytes(text_at(row, "hex"), &wanted);
    for (int compress = 0; compress < 2; compress++) {
        wire_buffer out;
        wire_frame frame;
        wire_error err;
        assert_true(encode_row(&out, row, compress, NULL));
        assert_int_equal(is_compressed(out), compress && n >= 512);
        if (is_compressed(out)) assert_int_equal(ZSTD_getFrameContentSize(out.bytes, out.n), n);
        assert_true(wire_unwrap(&frame, out.bytes, out.n, WIRE_MAX_MESSAGE, NULL, &err));
        if (frame.n != n || memcmp(frame.message, wanted, n))
            print_message("%s differs\n", text_at(row, "name"));
        assert_int_equal(frame.n, n);
        assert_memory_equal(frame.message, wanted, n);
        wire_frame_free(&frame, NULL);
        wire_buffer_free(&out, NULL);
    }
    row_free();
    free(wanted);
}

static void replies_encode_as_the_vectors_say(void **state) {
    (void)state;
    each_row("tests/vectors/replies.jsonl", check_reply);
}

static void check_encode_failures(const json_t *row) {
    for (long fail_at = 0;; fail_at++) {
        counted_heap heap = {.fail_at = fail_at};
        wire_allocator allocator = COUNTED(heap);
        wire_buffer out = {(uint8_t *)"", 1};
        bool ok = encode_row(&out, row, false, &allocator);
        bool fired = heap.n_calls > fail_at;
        assert_int_equal(ok, !fired);
        if (!ok)
            assert_null(out.bytes);
        else
            wire_buffer_free(&out, &allocator);
        row_free();
        assert_int_equal(heap.n_live, 0);
        if (!fired) break;
        assert_true(fail_at < 1000);
    }
}

static void encoding_survives_every_allocation_failure(void **state) {
    (void)state;
    each_row("tests/vectors/replies.jsonl", check_encode_failures);
}

/* ---- Compression and splitting. */

static void replies_of_512_bytes_are_compressed(void **state) {
    (void)state;
    char text[600];
    memset(text, 'x', sizeof text);
    for (size_t n = 400; n < 600; n++) {
        const reply_head plain = {wire_text_of("r"), false, NULL}, packed = {wire_text_of("r"), true, NULL};
        wire_buffer a, b;
        assert_true(reply_encode_text(&a, &plain, (wire_text){text, n}, "", 0));
        assert_true(reply_encode_text(&b, &packed, (wire_text){text, n}, "", 0));
        assert_false(is_compressed(a));
        assert_int_equal(is_compressed(b), a.n >= 512);
        wire_buffer_free(&a, NULL), wire_buffer_free(&b, NULL);
    }
}

static void compressing_survives_every_allocation_failure(void **state) {
    (void)state;
    char text[2000];
    memset(text, 'x', sizeof text);
    for (long fail_at = 0;; fail_at++) {
        counted_heap heap = {.fail_at = fail_at};
        wire_allocator allocator = COUNTED(heap);
        const reply_head head = {wire_text_of("r"), true, &allocator};
        wire_buffer out;
        bool ok = reply_encode_text(&out, &head, (wire_text){text, sizeof text}, "", 0);
        bool fired = heap.n_calls > fail_at;
        if (!fired) assert_true(ok); /* the last call only makes the block shorter, and may fail */
        wire_buffer_free(&out, &allocator);
        assert_int_equal(heap.n_live, 0);
        if (!fired) break;
    }
}

/* How many samples of `n_tokens` tokens each stand in each message; checks that all of them arrive, in order.
 */
static void split(size_t n_samples, size_t n_tokens, size_t *n_messages, size_t *longest) {
    uint32_t *tokens = calloc(n_tokens, sizeof *tokens);
    uint8_t *mask = calloc(n_tokens, 1);
    reply_sample *samples = calloc(n_samples, sizeof *samples);
    const reply_head head = {wire_text_of("r"), false, NULL};
    wire_buffer *messages;
    for (size_t i = 0; i < n_samples; i++)
        samples[i] =
            (reply_sample){.sample = (uint32_t)i, .n_tokens = n_tokens, .tokens = tokens, .mask = mask};
    assert_true(reply_encode_samples(&messages, n_messages, &head, samples, n_samples));
    size_t total = 0;
    *longest = 0;
    for (size_t i = 0; i < *n_messages; i++) {
        assert_memory_equal(messages[i].bytes, "\x83\xA4type\xA7samples\xA2id\xA1r\xA7samples", 27);
        total += messages[i].bytes[27] & 0x0F; /* a fixarray: fewer than 16 samples */
        assert_int_equal(messages[i].bytes[27] & 0xF0, 0x90);
        if (messages[i].n > *longest) *longest = messages[i].n;
    }
    assert_int_equal(total, n_samples);
    reply_messages_free(messages, *n_messages, NULL);
    free(tokens), free(mask), free(samples);
}

static void samples_past_16_mib_are_sent_as_several_messages(void **state) {
    (void)state;
    size_t n_messages, longest;
    split(8, 1000, &n_messages, &longest);
    assert_int_equal(n_messages, 1);
    split(5, 1 << 20, &n_messages, &longest); /* 5 MiB each: three, then two */
    assert_int_equal(n_messages, 2);
    assert_true(longest <= WIRE_SPLIT_BYTES && longest > 15 << 20);
    split(2, 4 << 20, &n_messages, &longest); /* 20 MiB each: alone */
    assert_int_equal(n_messages, 2);
    assert_true(longest > WIRE_SPLIT_BYTES);
}

/* ---- Errors. */

static void error_texts_are_cut_between_characters(void **state) {
    (void)state;
    for (int lead = 0; lead < 4; lead++) {
        char text[1200] = "xxxx";
        for (size_t i = (size_t)lead; i + 3 < sizeof text; i += 3) memcpy(text + i, "\xE2\x82\xAC", 4);
        wire_error err;
        assert_false(wire_fail(&err, WIRE_INTERNAL, text, "%s", text));
        wire_buffer out;
        /* The encoder asserts that text is UTF-8. */
        assert_true(reply_encode_error(&out, &(reply_head){wire_text_of("r"), true, NULL}, &err));
        wire_buffer_free(&out, NULL);
        assert_true(strlen(err.message) >= sizeof err.message - 4);
        assert_true(strlen(err.key) >= sizeof err.key - 4);
        assert_memory_equal(err.message, text, strlen(err.message));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(replies_encode_as_the_vectors_say),
        cmocka_unit_test(encoding_survives_every_allocation_failure),
        cmocka_unit_test(replies_of_512_bytes_are_compressed),
        cmocka_unit_test(compressing_survives_every_allocation_failure),
        cmocka_unit_test(samples_past_16_mib_are_sent_as_several_messages),
        cmocka_unit_test(error_texts_are_cut_between_characters),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
