/* Finding a sample's answer, comparing answers as decimals, and pass@k. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <jansson.h>
#include <math.h>
#include <string.h>

#include "worker/answer.h"

static tokenizer *shared; /* calc-d4's */

static int open_tokenizer(void **state) {
    (void)state;
    return tokenizer_open(&shared, "tests/models/calc-d4/tokenizer.pkl", NULL);
}

static int close_tokenizer(void **state) {
    (void)state;
    tokenizer_close(shared);
    return 0;
}

/* ---- Samples: text with specials written as one letter in angle brackets. */

typedef struct sample {
    int32_t ids[256];
    uint8_t mask[256];
    size_t n;
} sample;

static void add_text(sample *s, const char *text, size_t n, bool forced) {
    token_list ids = {0};
    assert_int_equal(tokenizer_encode(shared, text, n, &ids, NULL), COP_OK);
    for (size_t i = 0; i < ids.n; i++) {
        assert_true(s->n < 256);
        s->ids[s->n] = ids.ids[i];
        s->mask[s->n++] = !forced;
    }
    token_list_free(&ids);
}

static void add_special(sample *s, token_special which, bool forced) {
    s->ids[s->n] = tokenizer_special(shared, which);
    s->mask[s->n++] = !forced;
}

/* "{" starts a call and "}" ends it, "[" and "]" stand around a result (forced), "(" and ")" around output
 * that the model wrote itself, "$" is assistant_end. */
static sample sample_of(const char *text) {
    static const char marks[] = "{}[]()$";
    static const token_special specials[] = {TOKEN_PYTHON_START, TOKEN_PYTHON_END,   TOKEN_OUTPUT_START,
                                             TOKEN_OUTPUT_END,   TOKEN_OUTPUT_START, TOKEN_OUTPUT_END,
                                             TOKEN_ASSISTANT_END};
    sample s = {.n = 0};
    bool forced = false;
    while (*text) {
        size_t n = strcspn(text, marks);
        add_text(&s, text, n, forced);
        text += n;
        if (!*text) break;
        size_t which = (size_t)(strchr(marks, *text) - marks);
        add_special(&s, specials[which], which == 2 || which == 3);
        forced = which == 2;
        text++;
    }
    return s;
}

/* The answer is `want` (NULL: there is none). */
static void expect_answer(const char *text, const char *want) {
    sample s = sample_of(text);
    char *got;
    cop_error err = {0};
    if (answer_of_sample(&got, shared, s.ids, s.mask, s.n, &err) != COP_OK) fail_msg("%s", err.message);
    if (strcmp(got ? got : "nothing", want ? want : "nothing") != 0)
        fail_msg("\"%s\" answers %s, not %s", text, got ? got : "nothing", want ? want : "nothing");
    mem_free(got);
}

static void the_last_number_of_a_text_is_its_answer(void **state) {
    (void)state;
    expect_answer("The answer is 73.$", "73");
    expect_answer("12 apples, then 7", "7");
    expect_answer("It is 9.625.", "9.625");
    expect_answer("It is -4", "-4");
    expect_answer("It is -0.5, I think", "-0.5");
    expect_answer("It is .5", ".5");
    expect_answer("0.0001 is 1e-04.", "1e-04");
    expect_answer("so 007", "007");
    expect_answer("about 5kg", "5");
    expect_answer("**42**", "42");
    expect_answer("\xe2\x82\xac"
                  "8\xe2\x80\xa6",
                  "8");
    expect_answer("No idea.", NULL);
    expect_answer("", NULL);
}

static void commas_between_groups_of_three_are_left_out(void **state) {
    (void)state;
    expect_answer("It costs 1,234.", "1234");
    expect_answer("It costs -1,234,567.25, or so", "-1234567.25");
    expect_answer("1, 2, 3,", "3");
    expect_answer("1,2345", "2345");
    expect_answer("1,23", "23");
    expect_answer("1234,567", "567");
    expect_answer("12,345,67", "67");
}

static void a_minus_or_point_between_two_things_is_no_part_of_a_number(void **state) {
    (void)state;
    expect_answer("9-4", "4");
    expect_answer("9 - 4", "4");
    expect_answer("9 = -4", "-4");
    expect_answer("x-4", "4");
    expect_answer("1.5.2", "2");
    expect_answer("see 3..5", "5");
    expect_answer("x2 and y", NULL);
    expect_answer("5 for x2", "5");
    expect_answer("0x1F", "0");
    expect_answer("3e", "3");
    expect_answer("3e5x", "3");
}

static void the_last_result_of_a_tool_is_an_answer_too(void **state) {
    (void)state;
    expect_answer("{8*7}[56]", "56");
    expect_answer("{8*7}[56] The answer is 57.$", "57");
    expect_answer("I think 3, or {8*7}[56] yes$", "56");
    expect_answer("{1}[1] Then, {1/3}[0.3333333333333333] done.$", "0.3333333333333333");
    expect_answer("{1e308*10}[inf] It is inf.$", "inf"); /* a word */
    expect_answer("{x}[ 1,234 ]", "1234");
    expect_answer("{x}[3 1,234 4]", "3 1,234 4");
}

static void a_call_is_no_answer_and_neither_is_half_a_result(void **state) {
    (void)state;
    expect_answer("{1/0}", NULL);
    expect_answer("{1/0} That has no answer.$", NULL);
    expect_answer("{12", NULL);
    expect_answer("I guess 5 {12$", "5");
    expect_answer("{12*12}[14", NULL); /* cut by max_tokens */
    expect_answer("5 {12*12}[14", "5");
}

static void output_that_the_model_wrote_is_text(void **state) {
    (void)state;
    expect_answer("{8*7}(It is 55)", "55");
    expect_answer("{8*7}(word)", NULL);
    expect_answer("{8*7}(5", "5");
}

static void an_id_outside_the_vocabulary_is_refused(void **state) {
    (void)state;
    sample s = sample_of("The answer is 7. {8}[8]");
    for (int i = 0; i < 2; i++) {
        s.ids[s.n] = i ? -1 : tokenizer_vocab(shared);
        s.mask[s.n] = 1;
        char *got = "x";
        assert_int_equal(answer_of_sample(&got, shared, s.ids, s.mask, s.n + 1, NULL), COP_EINVAL);
        assert_null(got);
    }
}

static void a_failed_allocation_leaves_nothing(void **state) {
    (void)state;
    sample s = sample_of("First 3, {8*7}[56] The answer is 56.$");
    long live = mem_live();
    bool fired = true;
    for (long n = 0; fired; n++) {
        char *got = "x";
        mem_fail_after(n);
        cop_status status = answer_of_sample(&got, shared, s.ids, s.mask, s.n, NULL);
        fired = mem_fail_stop();
        assert_int_equal(status, fired ? COP_ENOMEM : COP_OK);
        if (fired) assert_null(got);
        mem_free(got);
        assert_int_equal(mem_live(), live);
    }
}

/* ---- Comparing. */

typedef struct pair {
    const char *a, *b;
} pair;

static void expect_pairs(const pair *pairs, size_t n, bool want) {
    for (size_t i = 0; i < n; i++)
        if (answer_equal(pairs[i].a, pairs[i].b) != want || answer_equal(pairs[i].b, pairs[i].a) != want)
            fail_msg("\"%s\" and \"%s\" are %s", pairs[i].a, pairs[i].b, want ? "different" : "the same");
}
#define EXPECT_PAIRS(want, ...)                                                                              \
    do {                                                                                                     \
        const pair pairs[] = {__VA_ARGS__};                                                                  \
        expect_pairs(pairs, sizeof pairs / sizeof *pairs, want);                                             \
    } while (0)

static void numbers_are_compared_as_exact_decimals(void **state) {
    (void)state;
    EXPECT_PAIRS(true, {"1,200", "1200.0"}, {"7", " 7\n"}, {"007", "7"}, {"+7", "7"}, {"-0", "0.00"},
                 {"0", "0e5"}, {".5", "0.50"}, {"1e3", "1,000"}, {"12e-1", "1.2"}, {"0.012E+2", "1.2"},
                 {"1e-05", "0.00001"}, {"9007199254740993", "9007199254740993.0"}, {"100", "1e2"});
    EXPECT_PAIRS(false, {"1", "-1"}, {"1", "10"}, {"1", "0.1"}, {"12", "1.2"}, {"101", "11"}, {"1.01", "1.1"},
                 {"0.3", "0.30000000000000004"}, {"9007199254740993", "9007199254740992"}, {"010", "8"},
                 {"0x10", "16"}, {"1,2", "12"}, {"1e1", "1e-1"}, {"1", "1.00000000000000000000000001"},
                 {"1e999999999999999", "2e999999999999999"}, {"1e400", "1e401"}, {"", "0"}, {"1 2", "12"},
                 {"-", "0"}, {".", "0"}, {"1_0", "10"});
}

static void words_are_compared_as_text(void **state) {
    (void)state;
    EXPECT_PAIRS(true, {"Paris", " Paris\t"}, {"inf", "inf"}, {"", "  "}, {"1,2", "1,2"},
                 {"1e9999999999999999", "1e9999999999999999"});
    EXPECT_PAIRS(false, {"Paris", "paris"}, {"True", "1"}, {"a b", "ab"}, {"Paris", "Pari"},
                 {"1e9999999999999999", "1.0e9999999999999999"}, {"1e99999999999999999999999", "1"});
}

static double reward_for(const char *answer, const char *expected) {
    json_t *value = json_loads(expected, JSON_DECODE_ANY, NULL);
    assert_non_null(value);
    double reward = answer_reward(answer, value);
    json_decref(value);
    return reward;
}

static void a_reward_is_one_zero_or_none(void **state) {
    (void)state;
    static const struct {
        const char *answer, *expected;
        double reward;
    } cases[] = {{"73", "\"73\"", 1},
                 {"73", "73", 1},
                 {"73.0", "73", 1},
                 {"73", "73.0", 1},
                 {"0.1", "0.1", 1},
                 {"-9.615384615384615", "-9.615384615384615", 1},
                 {"9.615384615384616", "9.615384615384615", 0},
                 {"0.30000000000000004", "0.3", 0},
                 {"1e-05", "0.00001", 1},
                 {"179769313486231570000", "1.7976931348623157e20", 1},
                 {"9223372036854775807", "9223372036854775807", 1},
                 {"-9223372036854775808", "-9223372036854775808", 1},
                 {"9223372036854775806", "9223372036854775807", 0},
                 {"yes", "\"yes\"", 1},
                 {NULL, "\"yes\"", 0},
                 {NULL, "7", 0},
                 {"7", "8", 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (reward_for(cases[i].answer, cases[i].expected) != cases[i].reward)
            fail_msg("%s for %s: not %g", cases[i].answer ? cases[i].answer : "nothing", cases[i].expected,
                     cases[i].reward);
    static const char *const none[] = {"null", "true", "[7]", "{\"a\": 7}"};
    for (size_t i = 0; i < sizeof none / sizeof *none; i++) assert_true(isnan(reward_for("7", none[i])));
    assert_true(isnan(answer_reward("7", NULL)));
}

/* ---- Pass@k. */

static void pass_at_k_counts_prompts_with_a_good_sample_among_the_first_k(void **state) {
    (void)state;
    pass_counts p;
    assert_int_equal(pass_init(&p, 3, NULL), COP_OK);
    assert_true(pass_at(&p, 1) == 0);
    pass_add(&p, (double[]){1, 0, 0}, 3);
    pass_add(&p, (double[]){0.99, 0, 1.5}, 3);
    pass_add(&p, (double[]){0, NAN, 0, 1}, 4); /* the fourth is beyond pass@3 */
    pass_add(&p, (double[]){0, 1}, 2);         /* and a third is not there */
    pass_add(&p, (double[]){NAN, 1, 1}, 3);    /* not counted */
    pass_add(&p, NULL, 0);
    assert_int_equal(p.n_prompts, 4);
    assert_true(pass_at(&p, 1) == 0.25);
    assert_true(pass_at(&p, 2) == 0.5);
    assert_true(pass_at(&p, 3) == 0.75);
    pass_free(&p);
    pass_free(&p);
    mem_fail_after(0);
    assert_int_equal(pass_init(&p, 3, NULL), COP_ENOMEM);
    assert_true(mem_fail_stop());
    pass_free(&p);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_last_number_of_a_text_is_its_answer),
        cmocka_unit_test(commas_between_groups_of_three_are_left_out),
        cmocka_unit_test(a_minus_or_point_between_two_things_is_no_part_of_a_number),
        cmocka_unit_test(the_last_result_of_a_tool_is_an_answer_too),
        cmocka_unit_test(a_call_is_no_answer_and_neither_is_half_a_result),
        cmocka_unit_test(output_that_the_model_wrote_is_text),
        cmocka_unit_test(an_id_outside_the_vocabulary_is_refused),
        cmocka_unit_test(a_failed_allocation_leaves_nothing),
        cmocka_unit_test(numbers_are_compared_as_exact_decimals),
        cmocka_unit_test(words_are_compared_as_text),
        cmocka_unit_test(a_reward_is_one_zero_or_none),
        cmocka_unit_test(pass_at_k_counts_prompts_with_a_good_sample_among_the_first_k),
    };
    return cmocka_run_group_tests(tests, open_tokenizer, close_tokenizer);
}
