/* Records as JSON: what generate prints, key by key; and nothing that a malformed record could break. */
#include "tests/unit/proto_test.h"

#include <math.h>

#include "worker/record_json.h"

static const uint32_t TOKENS[] = {5, 70000, 1019};
static const uint8_t MASK[] = {1, 0, 1};
static const float LOGPROBS[] = {-0.1f, 1.0f, -2.25f};
static const float ENTROPY[] = {0.0f, 1.0f, 3.5f};
static const uint32_t PROMPT[] = {1015, 3};
static const uint32_t KEPT_IDS[] = {5, 9, 1019};
static const uint32_t KEPT_OFFSETS[] = {0, 2, 2, 3};
static const reply_tool_call CALLS[] = {{1, {"calculator", 10}, true}, {2, {"calculator", 10}, false}};
static const reply_weights_run RUNS[] = {{0, {0, {"abc", 3}}}, {2, {UINT64_MAX, {"def", 3}}}};
static const double REWARDS[] = {0.5, NAN, -1};

/* A sample with everything, and one with nothing. */
static void example_samples(reply_sample samples[2]) {
    samples[0] = (reply_sample){.prompt = 7,
                                .sample = 0,
                                .seed = 42,
                                .n_tokens = 3,
                                .tokens = TOKENS,
                                .mask = MASK,
                                .has_logprobs = true,
                                .has_model_logprobs = true,
                                .has_entropy = true,
                                .has_kept = true,
                                .logprobs = LOGPROBS,
                                .model_logprobs = LOGPROBS,
                                .entropy = ENTROPY,
                                .kept_ids = {KEPT_IDS, 3},
                                .kept_offsets = KEPT_OFFSETS,
                                .finish = REPLY_STOP,
                                .has_stop = true,
                                .stop = 1019,
                                .tool_calls = CALLS,
                                .n_tool_calls = 2,
                                .weights = RUNS,
                                .n_weights = 2,
                                .text = wire_text_of("été\n")};
    samples[1] = (reply_sample){.prompt = 7,
                                .sample = 2,
                                .seed = UINT64_MAX,
                                .finish = REPLY_LENGTH,
                                .stop_string = wire_text_of("END"),
                                .text = wire_text_of("")};
}

static wire_buffer example_record(void) {
    json_t *input = json_loads("{\"text\": \"x\", \"n\": [1, null, 0.5]}", 0, NULL);
    wire_buffer packed, out;
    assert_true(json_to_msgpack(&packed, input, NULL));
    reply_sample samples[2];
    example_samples(samples);
    shard_record r = {.line = 7,
                      .prompt_id = wire_text_of("seven"),
                      .prompt_tokens = {PROMPT, 2},
                      .input = packed,
                      .samples = samples,
                      .n_samples = 2,
                      .rewards = REWARDS,
                      .n_rewards = 3};
    assert_true(shard_encode_record(&out, &r, NULL));
    wire_buffer_free(&packed, NULL);
    json_decref(input);
    return out;
}

/* The record's objects, printed as jsonl_print() does; free() it. */
static char *printed(wire_buffer record) {
    shard_view view;
    wire_error why;
    cop_error err = {0};
    json_t *objects;
    assert_true(shard_read(&view, record.bytes, record.n, &why));
    if (record_to_json(&objects, &view, &err) != COP_OK) fail_msg("%s", err.message);
    char *text = json_dumps(objects, JSON_REAL_PRECISION(9));
    json_decref(objects);
    shard_view_free(&view);
    return text;
}

static void test_samples_are_printed_as_generate_prints_them(void **state) {
    (void)state;
    wire_buffer record = example_record();
    char *text = printed(record);
    assert_string_equal(
        text, "[{\"prompt\": 7, \"prompt_id\": \"seven\", \"sample\": 0, \"seed\": 42, "
              "\"prompt_tokens\": [1015, 3], \"tokens\": [5, 70000, 1019], \"mask\": [1, 0, 1], "
              "\"logprobs\": [-0.100000001, 1.0, -2.25], \"model_logprobs\": [-0.100000001, 1.0, -2.25], "
              "\"entropy\": [0.0, 1.0, 3.5], \"kept_ids\": [5, 9, 1019], \"kept_offsets\": [0, 2, 2, 3], "
              "\"finish\": \"stop\", \"stop\": 1019, "
              "\"tool_calls\": [{\"at\": 1, \"tool\": \"calculator\", \"ok\": true}, "
              "{\"at\": 2, \"tool\": \"calculator\", \"ok\": false}], "
              "\"weights\": [[0, 0, \"abc\"], [2, \"18446744073709551615\", \"def\"]], \"text\": \"été\\n\", "
              "\"reward\": 0.5, \"input\": {\"text\": \"x\", \"n\": [1, null, 0.5]}}, "
              "{\"prompt\": 7, \"prompt_id\": \"seven\", \"sample\": 2, \"seed\": \"18446744073709551615\", "
              "\"prompt_tokens\": [1015, 3], \"tokens\": [], \"mask\": [], \"finish\": \"length\", "
              "\"stop\": \"END\", \"tool_calls\": [], \"weights\": [], \"text\": \"\", "
              "\"reward\": -1.0, \"input\": {\"text\": \"x\", \"n\": [1, null, 0.5]}}]");
    free(text);
    wire_buffer_free(&record, NULL);
}

/* The reward is the one at the sample's own index; nil, or an index beyond them, is none. */
static void test_a_reward_belongs_to_an_index(void **state) {
    (void)state;
    static const struct {
        uint32_t sample;
        const char *reward;
    } rows[] = {{0, "\"reward\": 0.5"}, {1, NULL}, {2, "\"reward\": -1.0"}, {3, NULL}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        reply_sample sample = {.sample = rows[i].sample, .finish = REPLY_LENGTH};
        shard_record r = {.prompt_id = wire_text_of("0"),
                          .samples = &sample,
                          .n_samples = 1,
                          .rewards = REWARDS,
                          .n_rewards = 3};
        wire_buffer record;
        assert_true(shard_encode_record(&record, &r, NULL));
        char *text = printed(record);
        if (rows[i].reward)
            assert_non_null(strstr(text, rows[i].reward));
        else
            assert_null(strstr(text, "reward"));
        assert_null(strstr(text, "input")); /* nil is left out */
        free(text);
        wire_buffer_free(&record, NULL);
    }
}

static void test_a_failure_is_an_object_of_its_own(void **state) {
    (void)state;
    shard_failure f = {
        .line = UINT64_MAX, .prompt_id = wire_text_of("x"), .error = wire_text_of("text: it is no string")};
    wire_buffer record;
    assert_true(shard_encode_failure(&record, &f, NULL));
    char *text = printed(record);
    assert_string_equal(text, "[{\"line\": \"18446744073709551615\", \"error\": \"text: it is no string\", "
                              "\"prompt_id\": \"x\"}]");
    free(text);
    wire_buffer_free(&record, NULL);
}

/* ---- Malformed records. */

typedef struct pair {
    const char *key, *value; /* value: MessagePack in hex; "": the key is left out */
} pair;

/* What a sample has: every key is one that a row below replaces. */
static const pair GOOD[] = {
    {"sample", "00"},
    {"seed", "01"},
    {"tokens", "C408"
               "0100000002000000"},
    {"mask", "C402"
             "0100"},
    {"logprobs", "C408"
                 "000000BF"
                 "0000803F"},
    {"kept_ids", "C404"
                 "01000000"},
    {"kept_offsets", "C40C"
                     "00000000"
                     "01000000"
                     "01000000"},
    {"finish", "A473746F70"},
    {"stop", "02"},
    {"tool_calls", "91"
                   "83"
                   "A26174"
                   "01"
                   "A4746F6F6C"
                   "A163"
                   "A26F6B"
                   "C3"},
    {"weights", "91"
                "93"
                "00"
                "00"
                "A161"},
    {"text", "A161"},
};
enum { N_GOOD = sizeof GOOD / sizeof *GOOD };

static void pack_hex(msgpack_sbuffer *buffer, const char *hex) {
    uint8_t *bytes;
    size_t n = hex_bytes(hex, &bytes);
    msgpack_sbuffer_write(buffer, (const char *)bytes, n);
    free(bytes);
}

static void pack_word(msgpack_packer *p, const char *word) {
    msgpack_pack_str_with_body(p, word, strlen(word));
}

/* A record of one sample in which `changed` stands for the pair of that key, or is one more. */
static void pack_record(msgpack_sbuffer *buffer, const pair *changed, const char *rewards) {
    msgpack_packer p;
    msgpack_packer_init(&p, buffer, msgpack_sbuffer_write);
    bool drop = changed && !changed->value[0];
    msgpack_pack_map(&p, 5 + (rewards != NULL));
    pack_word(&p, "line"), msgpack_pack_uint8(&p, 3);
    pack_word(&p, "prompt_id"), pack_word(&p, "x");
    pack_word(&p, "prompt_tokens"), pack_hex(buffer, "C400");
    pack_word(&p, "input"), msgpack_pack_nil(&p);
    if (rewards) pack_word(&p, "rewards"), pack_hex(buffer, rewards);
    pack_word(&p, "samples"), msgpack_pack_array(&p, 1);
    msgpack_pack_map(&p, (size_t)(N_GOOD - drop));
    for (int i = 0; i < N_GOOD; i++) {
        const pair *at = changed && !strcmp(changed->key, GOOD[i].key) ? changed : &GOOD[i];
        if (at->value[0]) pack_word(&p, at->key), pack_hex(buffer, at->value);
    }
}

static cop_status convert(const pair *changed, const char *rewards, cop_error *err) {
    msgpack_sbuffer buffer;
    msgpack_sbuffer_init(&buffer);
    pack_record(&buffer, changed, rewards);
    uint8_t *exact = malloc(buffer.size); /* so that a sanitizer sees a read past the end */
    memcpy(exact, buffer.data, buffer.size);
    shard_view view;
    wire_error why;
    json_t *objects;
    assert_true(shard_read(&view, exact, buffer.size, &why));
    cop_status status = record_to_json(&objects, &view, err);
    assert_true((status == COP_OK) == (objects != NULL));
    json_decref(objects);
    shard_view_free(&view);
    free(exact);
    msgpack_sbuffer_destroy(&buffer);
    return status;
}

static void test_a_malformed_sample_is_refused_by_key(void **state) {
    (void)state;
    static const pair rows[] = {
        {"sample", ""},
        {"sample", "FF"},                 /* -1 */
        {"sample", "CF0000000100000000"}, /* 2^32 */
        {"seed", ""},
        {"seed", "A131"},
        {"tokens", ""},
        {"tokens", "9201"
                   "02"},                 /* an array */
        {"tokens", "C40701000000020000"}, /* 7 bytes */
        {"mask", ""},
        {"mask", "C40101"},                   /* too short */
        {"mask", "C4020102"},                 /* 2 */
        {"mask", "A20100"},                   /* text */
        {"logprobs", "C404000000BF"},         /* too short */
        {"logprobs", "C407000000BF000080"},   /* 7 bytes */
        {"logprobs", "C408000000BF0000C07F"}, /* NaN */
        {"logprobs", "C0"},
        {"kept_ids", ""},
        {"kept_ids", "C40801000000"
                     "02000000"}, /* more than the offsets say */
        {"kept_offsets", ""},
        {"kept_offsets", "C4080000000001000000"}, /* one too few */
        {"kept_offsets", "C40C"
                         "00000000"
                         "02000000"
                         "01000000"}, /* falling */
        {"kept_offsets", "C40C"
                         "01000000"
                         "01000000"
                         "01000000"}, /* not from 0 */
        {"finish", ""},
        {"finish", "A3656E64"},
        {"finish", "01"},
        {"stop", "C3"},
        {"stop", "A1FF"},
        {"tool_calls", ""},
        {"tool_calls", "9101"},
        {"tool_calls", "91"
                       "83"
                       "A26174"
                       "02"
                       "A4746F6F6C"
                       "A163"
                       "A26F6B"
                       "C3"}, /* behind the end */
        {"tool_calls", "91"
                       "83"
                       "A26174"
                       "01"
                       "A4746F6F6C"
                       "A1FF"
                       "A26F6B"
                       "C3"},
        {"tool_calls", "91"
                       "82"
                       "A26174"
                       "01"
                       "A4746F6F6C"
                       "A163"},
        {"weights", ""},
        {"weights", "9192"
                    "00"
                    "00"},
        {"weights", "9193"
                    "00"
                    "00"
                    "A1FF"},
        {"weights", "80"},
        {"text", "A1FF"},
        {"text", "C40161"},
    };
    cop_error err = {0};
    assert_int_equal(convert(NULL, NULL, &err), COP_OK);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        err = (cop_error){0};
        cop_status status = convert(&rows[i], NULL, &err);
        char quoted[32];
        snprintf(quoted, sizeof quoted, "\"%s\"", rows[i].key);
        if (status != COP_EFORMAT || !strstr(err.message, quoted) || !strstr(err.message, "line 3"))
            fail_msg("%s %s: %s", rows[i].key, rows[i].value, err.message);
    }
}

static void test_malformed_rewards_are_refused(void **state) {
    (void)state;
    cop_error err = {0};
    assert_int_equal(convert(NULL, "9101", &err), COP_OK);
    assert_int_equal(convert(NULL, "91FF", &err), COP_OK);
    assert_int_equal(convert(NULL, "90", &err), COP_OK);
    assert_int_equal(convert(NULL, "91A131", &err), COP_EFORMAT);
    assert_int_equal(convert(NULL, "91CB7FF0000000000000", &err), COP_EFORMAT); /* infinity */
}

/* Any byte may be any other: a record is converted or refused. */
static void test_flipped_bytes_do_no_harm(void **state) {
    (void)state;
    static const uint8_t values[] = {0x00, 0x01, 0x80, 0x90, 0xA1, 0xC0, 0xC4, 0xCB, 0xD9, 0xFF};
    wire_buffer record = example_record();
    int n_converted = 0, n_refused = 0;
    for (size_t at = 0; at < record.n; at++) {
        for (size_t i = 0; i < sizeof values; i++) {
            uint8_t was = record.bytes[at];
            record.bytes[at] = values[i];
            shard_view view;
            wire_error why;
            cop_error err;
            if (shard_read(&view, record.bytes, record.n, &why)) {
                json_t *objects;
                cop_status status = record_to_json(&objects, &view, &err);
                assert_true(status == COP_OK || status == COP_EFORMAT);
                n_converted += status == COP_OK, n_refused += status == COP_EFORMAT;
                json_decref(objects);
                shard_view_free(&view);
            }
            record.bytes[at] = was;
        }
    }
    assert_true(n_converted > 100 && n_refused > 100);
    wire_buffer_free(&record, NULL);
}

/* ---- JSON and MessagePack. */

static void test_json_comes_back_from_messagepack(void **state) {
    (void)state;
    static const char *const rows[] = {
        "null",
        "true",
        "[]",
        "{}",
        "0",
        "-1",
        "9223372036854775807",
        "-9223372036854775808",
        "0.1",
        "-0.0",
        "1e300",
        "\"\"",
        "\"a\\u0000b\"",
        "\"\\ud83d\\ude00\"",
        "{\"b\": [1, [2.5, {\"\": null}]], \"a\": {\"x\": [false, \"y\"]}}",
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        json_t *value = json_loads(rows[i], JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL), *back;
        wire_buffer bytes;
        cop_error err;
        assert_true(json_to_msgpack(&bytes, value, NULL));
        msgpack_unpacked unpacked;
        msgpack_unpacked_init(&unpacked);
        assert_int_equal(msgpack_unpack_next(&unpacked, (char *)bytes.bytes, bytes.n, NULL),
                         MSGPACK_UNPACK_SUCCESS);
        if (json_of_msgpack(&back, &unpacked.data, &err) != COP_OK) fail_msg("%s: %s", rows[i], err.message);
        char *a = json_dumps(value, JSON_ENCODE_ANY), *b = json_dumps(back, JSON_ENCODE_ANY);
        assert_string_equal(a, b);
        free(a), free(b);
        msgpack_unpacked_destroy(&unpacked);
        wire_buffer_free(&bytes, NULL);
        json_decref(value);
        json_decref(back);
    }
}

static void test_what_json_lacks_is_refused(void **state) {
    (void)state;
    static const char *const rows[] = {
        "C40161",             /* binary */
        "D40100",             /* an extension */
        "A1FF",               /* no UTF-8 */
        "CB7FF8000000000000", /* NaN */
        "CFFFFFFFFFFFFFFFFF", /* beyond a signed 64 bits */
        "810100",             /* a key that is no text */
        "81A100C0",           /* a key of NUL */
        "81A1FFC0",
        "82A16101A16102", /* a key twice */
        "920191C40161",   /* deeper inside */
        "81A16191CB7FF8000000000000",
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        uint8_t *bytes;
        size_t n = hex_bytes(rows[i], &bytes);
        msgpack_unpacked unpacked;
        msgpack_unpacked_init(&unpacked);
        assert_int_equal(msgpack_unpack_next(&unpacked, (char *)bytes, n, NULL), MSGPACK_UNPACK_SUCCESS);
        json_t *value;
        cop_error err = {0};
        if (json_of_msgpack(&value, &unpacked.data, &err) != COP_EFORMAT) fail_msg("%s passed", rows[i]);
        assert_null(value);
        assert_true(err.message[0]);
        msgpack_unpacked_destroy(&unpacked);
        free(bytes);
    }
}

/* ---- Memory. */

/* jansson's, which is not mem_*'s: counted here, and made to fail. */
static long n_live, n_calls, fail_at;
static void *failing_malloc(size_t n) {
    if (n_calls++ == fail_at) return NULL;
    void *p = malloc(n);
    n_live += p != NULL;
    return p;
}
static void counting_free(void *p) {
    n_live -= p != NULL;
    free(p);
}

static void test_every_allocation_of_a_record_may_fail(void **state) {
    (void)state;
    wire_buffer record = example_record();
    shard_view view;
    wire_error why;
    assert_true(shard_read(&view, record.bytes, record.n, &why));
    cop_status status = COP_ENOMEM;
    json_set_alloc_funcs(failing_malloc, counting_free);
    for (long at = 0; status == COP_ENOMEM; at++) {
        json_t *objects;
        cop_error err;
        n_calls = 0, fail_at = at;
        status = record_to_json(&objects, &view, &err);
        if (status == COP_OK) assert_true(at > 50);
        json_decref(objects);
        assert_int_equal(n_live, 0);
    }
    assert_int_equal(status, COP_OK);
    json_set_alloc_funcs(malloc, free);
    shard_view_free(&view);
    wire_buffer_free(&record, NULL);
}

static void test_packing_survives_every_allocation_failure(void **state) {
    (void)state;
    json_t *value = json_object();
    for (int i = 0; i < 200; i++) {
        char key[16];
        snprintf(key, sizeof key, "key %d", i);
        json_object_set_new(value, key, json_integer(i));
    }
    bool ok = false;
    for (long at = 0; !ok; at++) {
        counted_heap heap = {.fail_at = at};
        wire_allocator allocator = COUNTED(heap);
        wire_buffer out;
        ok = json_to_msgpack(&out, value, &allocator);
        assert_true(ok || !out.bytes);
        assert_true(at > 0 || !ok);
        wire_buffer_free(&out, &allocator);
        assert_int_equal(heap.n_live, 0);
    }
    json_decref(value);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_samples_are_printed_as_generate_prints_them),
        cmocka_unit_test(test_a_reward_belongs_to_an_index),
        cmocka_unit_test(test_a_failure_is_an_object_of_its_own),
        cmocka_unit_test(test_a_malformed_sample_is_refused_by_key),
        cmocka_unit_test(test_malformed_rewards_are_refused),
        cmocka_unit_test(test_flipped_bytes_do_no_harm),
        cmocka_unit_test(test_json_comes_back_from_messagepack),
        cmocka_unit_test(test_what_json_lacks_is_refused),
        cmocka_unit_test(test_every_allocation_of_a_record_may_fail),
        cmocka_unit_test(test_packing_survives_every_allocation_failure),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
