/* Records of offline shards: what was written is read, every broken byte is told, every allocation may fail.
 */
#include "tests/unit/proto_test.h"

#include <math.h>

#include "proto/shard.h"

static const uint8_t INPUT[] = {0x81, 0xA1, 'a', 0x92, 0x01, 0xC0}; /* {"a": [1, nil]} */

static const uint32_t TOKENS[] = {5, 70000, 1019};
static const uint8_t MASK[] = {1, 0, 1};
static const float LOGPROBS[] = {-0.5f, 1.0f, -2.25f};
static const uint32_t PROMPT[] = {1015, 3};
static const double REWARDS[] = {0.5, NAN, -1};

static shard_record example(reply_sample samples[2]) {
    samples[0] = (reply_sample){.prompt = 7,
                                .sample = 0,
                                .seed = 42,
                                .n_tokens = 3,
                                .tokens = TOKENS,
                                .mask = MASK,
                                .has_logprobs = true,
                                .logprobs = LOGPROBS,
                                .finish = REPLY_STOP,
                                .has_stop = true,
                                .stop = 1019};
    samples[1] = (reply_sample){.prompt = 7, .sample = 2, .seed = UINT64_MAX, .finish = REPLY_LENGTH};
    return (shard_record){.line = 7,
                          .prompt_id = wire_text_of("seven"),
                          .prompt_tokens = {PROMPT, 2},
                          .input = {(uint8_t *)INPUT, sizeof INPUT},
                          .samples = samples,
                          .n_samples = 2,
                          .rewards = REWARDS,
                          .n_rewards = 3};
}

static wire_buffer encoded(void) {
    reply_sample samples[2];
    shard_record r = example(samples);
    wire_buffer out;
    assert_true(shard_encode_record(&out, &r, NULL));
    return out;
}

/* The same bytes at an address of their own, of exactly that length. */
static uint8_t *copied(const uint8_t *bytes, size_t n) {
    uint8_t *to = malloc(n ? n : 1);
    assert_non_null(to);
    if (n) memcpy(to, bytes, n);
    return to;
}

static void test_a_record_comes_back(void **state) {
    (void)state;
    wire_buffer b = encoded();
    shard_view v;
    wire_error err;
    assert_true(shard_read(&v, b.bytes, b.n, &err));
    assert_int_equal(v.line, 7);
    assert_memory_equal(v.prompt_id.bytes, "seven", 5);
    assert_int_equal(v.prompt_id.n, 5);
    assert_null(v.error.bytes);
    assert_int_equal(v.n_bytes, b.n);
    assert_int_equal(v.prompt_tokens.n, 2);
    assert_memory_equal(v.prompt_tokens.ids, PROMPT, sizeof PROMPT);
    assert_int_equal(v.input->type, MSGPACK_OBJECT_MAP);
    assert_int_equal(shard_find(v.input, "a")->via.array.size, 2);
    assert_int_equal(v.samples->via.array.size, 2);
    const msgpack_object *first = &v.samples->via.array.ptr[0];
    assert_memory_equal(shard_find(first, "tokens")->via.bin.ptr, TOKENS, sizeof TOKENS);
    assert_memory_equal(shard_find(first, "logprobs")->via.bin.ptr, LOGPROBS, sizeof LOGPROBS);
    assert_memory_equal(shard_find(first, "mask")->via.bin.ptr, MASK, sizeof MASK);
    assert_true(shard_find(&v.samples->via.array.ptr[1], "seed")->via.u64 == UINT64_MAX);
    assert_null(shard_find(first, "prompt_id"));
    assert_int_equal(v.rewards->via.array.size, 3);
    assert_true(v.rewards->via.array.ptr[0].via.f64 == 0.5);
    assert_int_equal(v.rewards->via.array.ptr[1].type, MSGPACK_OBJECT_NIL);
    shard_view_free(&v);
    wire_buffer_free(&b, NULL);
}

static void test_a_failure_comes_back(void **state) {
    (void)state;
    const shard_failure f = {
        .line = 1 << 20, .prompt_id = wire_text_of("1048576"), .error = wire_text_of("text: no")};
    wire_buffer b;
    shard_view v;
    wire_error err;
    assert_true(shard_encode_failure(&b, &f, NULL));
    assert_true(shard_read(&v, b.bytes, b.n, &err));
    assert_int_equal(v.line, 1 << 20);
    assert_memory_equal(v.error.bytes, "text: no", 8);
    assert_null(v.samples);
    assert_int_equal(v.input->type, MSGPACK_OBJECT_NIL);
    shard_view_free(&v);
    wire_buffer_free(&b, NULL);
}

static void test_the_next_record_starts_where_one_ends(void **state) {
    (void)state;
    wire_buffer b = encoded();
    uint8_t *two = malloc(2 * b.n);
    memcpy(two, b.bytes, b.n);
    memcpy(two + b.n, b.bytes, b.n);
    shard_view v;
    wire_error err;
    assert_true(shard_read(&v, two, 2 * b.n, &err));
    assert_int_equal(v.n_bytes, b.n);
    shard_view_free(&v);
    free(two);
    wire_buffer_free(&b, NULL);
}

static void test_no_part_of_a_record_is_one(void **state) {
    (void)state;
    wire_buffer b = encoded();
    for (size_t n = 0; n < b.n; n++) {
        uint8_t *part = copied(b.bytes, n);
        shard_view v;
        wire_error err = {0};
        assert_false(shard_read(&v, part, n, &err));
        assert_string_equal(err.code, WIRE_BAD_REQUEST);
        free(part);
    }
    wire_buffer_free(&b, NULL);
}

/* Any byte may be any other: no crash, and what is read is within the bytes (a sanitizer sees to that). */
static void test_flipped_bytes_do_no_harm(void **state) {
    (void)state;
    wire_buffer b = encoded();
    for (size_t at = 0; at < b.n; at++) {
        for (int value = 0; value < 256; value++) {
            uint8_t *bytes = copied(b.bytes, b.n);
            bytes[at] = (uint8_t)value;
            shard_view v;
            wire_error err;
            if (shard_read(&v, bytes, b.n, &err)) {
                assert_true(v.n_bytes <= b.n);
                assert_true(v.error.bytes || v.samples);
                shard_view_free(&v);
            }
            free(bytes);
        }
    }
    wire_buffer_free(&b, NULL);
}

#define ROW(bytes, key)                                                                                      \
    { bytes, sizeof bytes - 1, key }
static void test_what_is_no_record_is_named(void **state) {
    (void)state;
    static const struct {
        const char *bytes;
        size_t n;
        const char *key;
    } rows[] = {
        ROW("\x01", ""),
        ROW("\xDD\xFF\xFF\xFF\xFF", ""), /* an array of 4 G elements, none of which is there */
        ROW("\x80", "line"),
        ROW("\x81\xA4line\xFF", "line"), /* -1 */
        ROW("\x81\xA4line\x01", "input"),
        ROW("\x82\xA4line\x01\xA5input\xC0", "prompt_id"),
        ROW("\x83\xA4line\x01\xA5input\xC0\xA9prompt_id\xA1\xFF", "prompt_id"), /* no UTF-8 */
        ROW("\x83\xA4line\x01\xA5input\xC0\xA9prompt_id\xA1x", "samples"),
        ROW("\x84\xA4line\x01\xA5input\xC0\xA9prompt_id\xA1x\xA5\x65rror\x01", "error"),
        ROW("\x84\xA4line\x01\xA5input\xC0\xA9prompt_id\xA1x\xA7samples\x91\x01", "samples"),
        ROW("\x84\xA4line\x01\xA5input\xC0\xA9prompt_id\xA1x\xA7samples\x90", "prompt_tokens"),
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        uint8_t *bytes = copied((const uint8_t *)rows[i].bytes, rows[i].n);
        shard_view v;
        wire_error err = {0};
        assert_false(shard_read(&v, bytes, rows[i].n, &err));
        assert_string_equal(err.key, rows[i].key);
        assert_null(v.zone);
        free(bytes);
    }
}

static void test_every_allocation_may_fail(void **state) {
    (void)state;
    reply_sample samples[2];
    shard_record r = example(samples);
    bool ok = false;
    for (long at = 0; !ok; at++) {
        counted_heap heap = {.fail_at = at};
        wire_allocator allocator = COUNTED(heap);
        wire_buffer out;
        ok = shard_encode_record(&out, &r, &allocator);
        assert_true(ok || !out.bytes);
        wire_buffer_free(&out, &allocator);
        assert_int_equal(heap.n_live, 0);
        assert_true(at > 0 || !ok);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_record_comes_back),
        cmocka_unit_test(test_a_failure_comes_back),
        cmocka_unit_test(test_the_next_record_starts_where_one_ends),
        cmocka_unit_test(test_no_part_of_a_record_is_one),
        cmocka_unit_test(test_flipped_bytes_do_no_harm),
        cmocka_unit_test(test_what_is_no_record_is_named),
        cmocka_unit_test(test_every_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
