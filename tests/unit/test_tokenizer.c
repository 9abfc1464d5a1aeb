/* The tokenizer against nanochat's own answers (tests/golden/README.md), its refusals, and its behaviour at
 * the limits. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine/split.h"
#include "engine/tokenizer.h"

#define DEMO "tests/models/calc-d4/tokenizer.pkl"
#define K32 "tests/models/tokenizer-32k"

static tokenizer *open_or_fail(const char *path) {
    tokenizer *t;
    cop_error err = {0};
    if (tokenizer_open(&t, path, &err) != COP_OK) fail_msg("%s", err.message);
    return t;
}

static void check_ids(const token_list *got, const json_t *want, const char *what, int line) {
    bool same = got->n == json_array_size(want);
    for (size_t i = 0; same && i < got->n; i++)
        same = got->ids[i] == json_integer_value(json_array_get(want, i));
    if (!same)
        fail_msg("%s, line %d: %zu ids differ from the %zu expected", what, line, got->n,
                 json_array_size(want));
}

/* Call fn for every line of a golden file; the file must have `n_lines`. */
static void each_line(const char *path, int n_lines, void (*fn)(const json_t *line, int n, void *context),
                      void *context) {
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    char *text = NULL;
    size_t cap = 0;
    int n = 0;
    while (getline(&text, &cap, f) > 0) {
        json_t *line = json_loads(text, JSON_ALLOW_NUL, NULL);
        assert_non_null(line);
        fn(line, ++n, context);
        json_decref(line);
    }
    free(text);
    fclose(f);
    assert_int_equal(n, n_lines);
}

/* ---- Golden answers. */

typedef struct tokenizer_pair {
    tokenizer *demo, *k32;
} tokenizer_pair;

static void encode_line(const json_t *line, int n, void *context) {
    tokenizer_pair *pair = context;
    const json_t *text = json_object_get(line, "text");
    token_list ids = {0};
    assert_int_equal(
        tokenizer_encode(pair->demo, json_string_value(text), json_string_length(text), &ids, NULL), COP_OK);
    check_ids(&ids, json_object_get(line, "demo"), "demo", n);
    ids.n = 0;
    assert_int_equal(
        tokenizer_encode(pair->k32, json_string_value(text), json_string_length(text), &ids, NULL), COP_OK);
    check_ids(&ids, json_object_get(line, "k32"), "k32", n);
    token_list_free(&ids);
}

static void encoding_gives_the_reference_ids(void **state) {
    (void)state;
    tokenizer_pair pair = {open_or_fail(DEMO), open_or_fail(K32)};
    each_line("tests/golden/tokenizer.jsonl", 553, encode_line, &pair);
    tokenizer_close(pair.demo);
    tokenizer_close(pair.k32);
}

static void decode_line(const json_t *line, int n, void *context) {
    const json_t *array = json_object_get(line, "ids"), *want = json_object_get(line, "text");
    token_list ids = {0};
    for (size_t i = 0; i < json_array_size(array); i++)
        assert_int_equal(token_list_push(&ids, (int32_t)json_integer_value(json_array_get(array, i)), NULL),
                         COP_OK);
    char *bytes, *text;
    size_t n_bytes, n_text;
    assert_int_equal(tokenizer_decode(context, ids.ids, ids.n, &bytes, &n_bytes, NULL), COP_OK);
    assert_int_equal(utf8_repair(bytes, n_bytes, &text, &n_text, NULL), COP_OK);
    if (n_text != json_string_length(want) || memcmp(text, json_string_value(want), n_text) != 0)
        fail_msg("line %d: decoded to \"%s\", expected \"%s\"", n, text, json_string_value(want));
    mem_free(text);
    mem_free(bytes);
    token_list_free(&ids);
}

static void decoding_gives_the_reference_text(void **state) {
    (void)state;
    tokenizer *t = open_or_fail(DEMO);
    each_line("tests/golden/decode.jsonl", 200, decode_line, t);
    tokenizer_close(t);
}

/* ---- Chat. */

enum { MAX_MESSAGES = 64, MAX_PARTS = 256 };

static size_t read_messages(const json_t *array, chat_message *messages, chat_part *parts) {
    size_t n = json_array_size(array);
    assert_true(n <= MAX_MESSAGES);
    for (size_t i = 0; i < n; i++) {
        const json_t *m = json_array_get(array, i), *content = json_object_get(m, "content");
        const char *role = json_string_value(json_object_get(m, "role"));
        messages[i] = (chat_message){
            .role = role[0] == 's'   ? CHAT_SYSTEM
                    : role[0] == 'u' ? CHAT_USER
                                     : CHAT_ASSISTANT,
            .is_string = json_is_string(content),
            .parts = parts,
            .n_parts = json_is_string(content) ? 1 : json_array_size(content),
        };
        for (size_t j = 0; j < messages[i].n_parts; j++) {
            const json_t *part = json_array_get(content, j);
            const json_t *text = part ? json_object_get(part, "text") : content;
            const char *type = part ? json_string_value(json_object_get(part, "type")) : "text";
            *parts++ = (chat_part){
                .kind = !strcmp(type, "text")     ? CHAT_TEXT
                        : !strcmp(type, "python") ? CHAT_PYTHON
                                                  : CHAT_PYTHON_OUTPUT,
                .text = json_string_value(text),
                .n = json_string_length(text),
            };
        }
    }
    return n;
}

static void render_line(const json_t *line, int n, void *context) {
    chat_message messages[MAX_MESSAGES];
    chat_part parts[MAX_PARTS];
    size_t n_messages =
        read_messages(json_object_get(json_object_get(line, "conversation"), "messages"), messages, parts);
    token_list ids = {0}, mask = {0};
    cop_error err = {0};
    if (chat_render(context, messages, n_messages, CHAT_CUT, &ids, &mask, &err))
        fail_msg("line %d: %s", n, err.message);
    check_ids(&ids, json_object_get(line, "ids"), "ids", n);
    check_ids(&mask, json_object_get(line, "mask"), "mask", n);
    const json_t *completion = json_object_get(line, "completion_ids");
    if (json_is_array(completion)) {
        ids.n = 0;
        assert_int_equal(chat_prompt(context, messages, n_messages - 1, CHAT_CUT, &ids, &err), COP_OK);
        check_ids(&ids, completion, "completion_ids", n);
    }
    token_list_free(&ids);
    token_list_free(&mask);
}

static void rendering_gives_the_reference_ids_and_mask(void **state) {
    (void)state;
    tokenizer *t = open_or_fail(DEMO);
    each_line("tests/golden/render.jsonl", 80, render_line, t);
    tokenizer_close(t);
}

static void roles_out_of_order_are_refused_by_key(void **state) {
    (void)state;
    tokenizer *t = open_or_fail(DEMO);
    chat_part part = {CHAT_TEXT, "x", 1};
    chat_message user = {CHAT_USER, true, &part, 1}, answer = {CHAT_ASSISTANT, true, &part, 1};
    chat_message system = {CHAT_SYSTEM, true, &part, 1}, user_parts = {CHAT_USER, false, &part, 1};
    const struct {
        chat_message messages[3];
        size_t n;
        const char *key;
    } cases[] = {
        {{user}, 0, "messages"},
        {{system}, 1, "messages"},
        {{answer}, 1, "messages[0].role"},
        {{user, user}, 2, "messages[1].role"},
        {{system, answer}, 2, "messages[1].role"},
        {{user, answer, system}, 3, "messages[2].role"},
        {{user_parts}, 1, "messages[0].content"},
        {{user, answer}, 2, "messages[1].role"}, /* a prompt must end with the user */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        token_list ids = {0};
        cop_error err = {0};
        assert_int_equal(chat_prompt(t, cases[i].messages, cases[i].n, 0, &ids, &err), COP_EINVAL);
        assert_string_equal(err.key, cases[i].key);
        assert_int_equal(ids.n, 0);
        token_list_free(&ids);
    }
    tokenizer_close(t);
}

/* ---- Parts. */

static void unicode_classes_have_the_counts_of_unicode_16(void **state) {
    (void)state;
    int counts[4] = {0};
    for (uint32_t c = 0; c < 0x110000; c++) counts[split_class(c)]++;
    assert_int_equal(counts[UNICODE_LETTER], 141028);
    assert_int_equal(counts[UNICODE_NUMBER], 1911);
    assert_int_equal(counts[UNICODE_SPACE], 25);
}

static void only_known_patterns_are_accepted(void **state) {
    (void)state;
    const char *unknown = "\\p{L}+|.";
    int max_numbers;
    cop_error err = {0};
    assert_int_equal(split_pattern(unknown, strlen(unknown), &max_numbers, &err), COP_EUNSUPPORTED);
    assert_non_null(strstr(err.message, unknown));
}

static void repairing_replaces_each_maximal_subpart_once(void **state) {
    (void)state;
#define R "\xEF\xBF\xBD"
    static const char *const cases[][2] = {
        {"\xE4\xBD", R},
        {"\xF0\x9F\x98", R},
        {"\xF0\x9F"
         "a",
         R "a"},
        {"\xE4\xBD\xF0\x9F", R R},
        {"\xC0\xAF", R R},
        {"\xED\xA0\x80", R R R},
        {"\xF5\x80\x80\x80", R R R R},
        {"\xF4\x90\x80\x80", R R R R},
        {"\xF0\x9F\x98\x80", "\xF0\x9F\x98\x80"},
        {"", ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char *text;
        size_t n;
        assert_int_equal(utf8_repair(cases[i][0], strlen(cases[i][0]), &text, &n, NULL), COP_OK);
        assert_string_equal(text, cases[i][1]);
        mem_free(text);
    }
}

static void a_megabyte_without_a_break_takes_seconds_at_most(void **state) {
    (void)state;
    enum { N = 1000000 };
    tokenizer *t = open_or_fail(K32);
    char *text = mem_alloc(N, 1);
    for (int random = 0; random < 2; random++) {
        uint32_t seed = 1;
        for (int i = 0; i < N; i++)
            text[i] = random ? (char)('a' + (seed = seed * 1664525u + 1013904223u) / 165191050u) : 'a';
        token_list ids = {0};
        char *bytes;
        size_t n;
        clock_t start = clock();
        assert_int_equal(tokenizer_encode(t, text, N, &ids, NULL), COP_OK);
        double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
        if (seconds > 20) fail_msg("took %.1f s", seconds); /* the sanitizers' share included */
        print_message("# 1 MB: %zu tokens in %.2f s\n", ids.n, seconds);
        assert_int_equal(tokenizer_decode(t, ids.ids, ids.n, &bytes, &n, NULL), COP_OK);
        assert_int_equal(n, N);
        assert_memory_equal(bytes, text, N);
        mem_free(bytes);
        token_list_free(&ids);
    }
    mem_free(text);
    tokenizer_close(t);
}

static void every_failing_allocation_is_survived(void **state) {
    (void)state;
    long live = mem_live();
    bool failed = true;
    for (long n = 0; failed; n += n < 200 ? 1 : 199) { /* reading the pickle takes thousands, all alike */
        tokenizer *t;
        token_list ids = {0};
        cop_error err = {0};
        mem_fail_after(n);
        cop_status status = tokenizer_open(&t, DEMO, &err);
        if (status == COP_OK) status = tokenizer_encode(t, "hello \xFF wonderful worlds", 24, &ids, &err);
        failed = mem_fail_stop();
        assert_int_equal(status, failed ? COP_ENOMEM : COP_OK);
        token_list_free(&ids);
        tokenizer_close(t);
        assert_int_equal(mem_live(), live);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(encoding_gives_the_reference_ids),
        cmocka_unit_test(decoding_gives_the_reference_text),
        cmocka_unit_test(rendering_gives_the_reference_ids_and_mask),
        cmocka_unit_test(roles_out_of_order_are_refused_by_key),
        cmocka_unit_test(unicode_classes_have_the_counts_of_unicode_16),
        cmocka_unit_test(only_known_patterns_are_accepted),
        cmocka_unit_test(repairing_replaces_each_maximal_subpart_once),
        cmocka_unit_test(a_megabyte_without_a_break_takes_seconds_at_most),
        cmocka_unit_test(every_failing_allocation_is_survived),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
