/* The row state machine, without a model: tokens of calc-d4's tokenizer go in by hand (the traces of
 * NANOCHAT 2.1). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "engine/row.h"

enum { PS = 1020, PE = 1021, OS = 1022, OE = 1023, AE = 1019, BOS = 1015 };

static tokenizer *tok;
static row_rules rules;
static const int32_t prompt[] = {BOS, 1016, 72, 1017, 1018};
static const int32_t stops[] = {AE, BOS};

static int open_tokenizer(void **state) {
    (void)state;
    cop_error err;
    if (tokenizer_open(&tok, "tests/models/calc-d4", &err) != COP_OK) fail_msg("%s", err.message);
    rules = (row_rules){.tokenizer = tok,
                        .calculator = true,
                        .python_start = tokenizer_special(tok, TOKEN_PYTHON_START),
                        .python_end = tokenizer_special(tok, TOKEN_PYTHON_END),
                        .output_start = tokenizer_special(tok, TOKEN_OUTPUT_START),
                        .output_end = tokenizer_special(tok, TOKEN_OUTPUT_END),
                        .stop_tokens = stops,
                        .n_stop_tokens = 2,
                        .logprobs = true,
                        .model_logprobs = true,
                        .entropy = true};
    assert_int_equal(rules.python_start, PS);
    assert_int_equal(rules.output_end, OE);
    return 0;
}

static int close_tokenizer(void **state) {
    (void)state;
    tokenizer_close(tok);
    return 0;
}

static row row_of(int limit) {
    row r;
    cop_error err;
    assert_int_equal(row_init(&r, &rules, prompt, 5, limit, &err), COP_OK);
    return r;
}

static k_drawn drawn(int32_t token, int n_kept) {
    return (k_drawn){
        .token = token, .logprob = -0.5f, .model_logprob = -0.25f, .entropy = 0.75f, .n_kept = n_kept};
}

/* Draw the tokens, as long as the row takes any; returns how many it took. */
static int draw(row *r, const int32_t *tokens, int n) {
    cop_error err;
    int i = 0;
    for (; i < n && r->state == ROW_RUNNING; i++) {
        k_drawn d = drawn(tokens[i], 0);
        assert_int_equal(row_draw(r, &d, &err), COP_OK);
    }
    return i;
}

static void expect(const row *r, const int32_t *tokens, const uint8_t *mask, int n) {
    sample_result s;
    row_result(r, &s);
    assert_int_equal(s.n_tokens, n);
    for (int i = 0; i < n; i++) {
        assert_int_equal(s.tokens[i], tokens[i]);
        assert_int_equal(s.mask[i], mask[i]);
        assert_true(s.logprobs[i] == (mask[i] ? -0.5f : 1.0f));
        assert_true(s.model_logprobs[i] == (mask[i] ? -0.25f : 1.0f));
        assert_true(s.entropy[i] == (mask[i] ? 0.75f : 1.0f));
    }
}
#define EXPECT(r, n, ...)                                                                                    \
    do {                                                                                                     \
        const struct {                                                                                       \
            int32_t tokens[n];                                                                               \
            uint8_t mask[n];                                                                                 \
        } want = {__VA_ARGS__};                                                                              \
        expect(r, want.tokens, want.mask, n);                                                                \
    } while (0)

static void an_answer_is_forced_after_a_call(void **state) {
    (void)state;
    row r = row_of(20);
    draw(&r, (int32_t[]){PS, '1', '+', '1', PE}, 5);
    EXPECT(&r, 8, {PS, '1', '+', '1', PE, OS, '2', OE}, {1, 1, 1, 1, 1, 0, 0, 0});
    assert_int_equal(r.n_calls, 1);
    assert_int_equal(r.calls[0].at, 4);
    assert_true(r.calls[0].ok);
    assert_int_equal(r.state, ROW_RUNNING);
    assert_int_equal(r.n_drawn, 5);
    assert_int_equal(r.n_forced, 3);
    row_free(&r, NULL);
}

static void the_limit_cuts_a_forced_answer(void **state) {
    (void)state;
    row r = row_of(6);
    draw(&r, (int32_t[]){PS, '1', '+', '1', PE}, 5);
    EXPECT(&r, 6, {PS, '1', '+', '1', PE, OS}, {1, 1, 1, 1, 1, 0});
    assert_int_equal(r.state, ROW_FULL);
    row_free(&r, NULL);
}

static void a_call_that_the_limit_cuts_off_is_not_run(void **state) {
    (void)state;
    row r = row_of(5);
    draw(&r, (int32_t[]){PS, '1', '+', '1', PE}, 5);
    EXPECT(&r, 5, {PS, '1', '+', '1', PE}, {1, 1, 1, 1, 1});
    assert_int_equal(r.state, ROW_FULL);
    assert_int_equal(r.n_calls, 0);
    row_free(&r, NULL);
}

static void a_wrong_expression_forces_nothing_but_is_told(void **state) {
    (void)state;
    row r = row_of(20);
    draw(&r, (int32_t[]){PS, 'a', PE, 'o'}, 4);
    EXPECT(&r, 4, {PS, 'a', PE, 'o'}, {1, 1, 1, 1});
    assert_int_equal(r.n_calls, 1);
    assert_false(r.calls[0].ok);
    row_free(&r, NULL);
}

static void blocks_open_and_close_as_nanochat_has_it(void **state) {
    (void)state;
    row r = row_of(40);
    draw(&r, (int32_t[]){PS, PE}, 2); /* nothing inside: no call */
    assert_int_equal(row_index(&r), 2);
    draw(&r, (int32_t[]){PE, 'o'}, 2); /* closes nothing */
    assert_int_equal(row_index(&r), 4);
    draw(&r, (int32_t[]){PS, '9', '+', PS, '2', '*', '3', PE}, 8); /* opening again starts over */
    assert_int_equal(row_index(&r), 15);
    assert_int_equal(r.seq.tail[13], '6');
    draw(&r, (int32_t[]){PS, '1', '+', '1', OS, PE}, 6); /* a special token makes the calculator refuse */
    assert_int_equal(row_index(&r), 21);
    assert_int_equal(r.n_calls, 2);
    assert_false(r.calls[1].ok);
    row_free(&r, NULL);
}

static void a_stop_token_ends_the_sample_and_runs_no_tool(void **state) {
    (void)state;
    row r = row_of(20);
    assert_int_equal(draw(&r, (int32_t[]){PS, '1', AE, 'x'}, 4), 3);
    assert_int_equal(r.state, ROW_STOPPED);
    assert_int_equal(r.stop, AE);
    row_free(&r, NULL);

    row_rules other = rules; /* the token that closes a call stops: the call is not run */
    other.stop_tokens = (const int32_t[]){PE};
    other.n_stop_tokens = 1;
    cop_error err;
    assert_int_equal(row_init(&r, &other, prompt, 5, 20, &err), COP_OK);
    draw(&r, (int32_t[]){PS, '1', PE}, 3);
    assert_int_equal(r.state, ROW_STOPPED);
    assert_int_equal(r.n_calls, 0);
    row_free(&r, NULL);

    other.stop_tokens = (const int32_t[]){OE}; /* a forced stop token ends the sample too */
    assert_int_equal(row_init(&r, &other, prompt, 5, 20, &err), COP_OK);
    draw(&r, (int32_t[]){PS, '1', PE}, 3);
    assert_int_equal(r.state, ROW_STOPPED);
    EXPECT(&r, 6, {PS, '1', PE, OS, '1', OE}, {1, 1, 1, 0, 0, 0});
    row_free(&r, NULL);
}

static void a_stop_token_at_the_limit_is_a_stop(void **state) {
    (void)state;
    row r = row_of(2);
    draw(&r, (int32_t[]){'x', AE}, 2);
    assert_int_equal(r.state, ROW_STOPPED);
    row_free(&r, NULL);
}

static void without_tools_a_call_is_text(void **state) {
    (void)state;
    row_rules off = rules;
    off.calculator = false;
    row r;
    cop_error err;
    assert_int_equal(row_init(&r, &off, prompt, 5, 20, &err), COP_OK);
    draw(&r, (int32_t[]){PS, '1', PE}, 3);
    assert_int_equal(row_index(&r), 3);
    row_free(&r, NULL);
}

static void every_cut_of_a_completion_replays_to_the_same_state(void **state) {
    (void)state;
    const int32_t whole[] = {'a', PS, '6', '*', '7', PE, OS, '4', '2', OE, PS, '1', PE, OS, '1', OE, 'b'};
    const int32_t drawn[] = {'a', PS, '6', '*', '7', PE, PS, '1', PE, 'b'};
    enum { N = sizeof whole / sizeof whole[0] };
    row full = row_of(N + 1);
    draw(&full, drawn, 10);
    /* The tokenizer may hold "42" as one token: take what the row really has. */
    int n = row_index(&full);
    for (int cut = 0; cut <= n; cut++) {
        row r = row_of(N + 1);
        cop_error err;
        assert_int_equal(row_replay(&r, full.seq.tail, (size_t)cut, &err), COP_OK);
        /* What the prefix leaves open of an answer is forced, with mask 0. */
        int forced = row_index(&r) - cut;
        for (int i = 0; i < forced; i++) assert_int_equal(full.mask[cut + i], 0);
        assert_true(row_index(&r) == n || full.mask[row_index(&r)] == 1);
        for (int i = row_index(&r); i < n; i = row_index(&r)) draw(&r, &full.seq.tail[i], 1);
        assert_int_equal(row_index(&r), n);
        assert_memory_equal(r.seq.tail, full.seq.tail, (size_t)n * sizeof(int32_t));
        sample_result s;
        row_result(&r, &s);
        assert_int_equal(s.n_tokens, n - cut);
        assert_memory_equal(s.mask, full.mask + cut, (size_t)(n - cut));
        /* Calls that the prefix closed are not told again; the others are told at their new index. */
        size_t told = 0;
        for (size_t c = 0; c < full.n_calls; c++) {
            if (full.calls[c].at < cut) continue;
            assert_int_equal(r.calls[told++].at, full.calls[c].at - cut);
        }
        assert_int_equal(r.n_calls, told);
        row_free(&r, NULL);
    }
    row_free(&full, NULL);
}

static void a_prefix_that_contradicts_its_tools_is_refused(void **state) {
    (void)state;
    cop_error err;
    struct {
        int32_t tokens[8];
        size_t n;
    } bad[] = {{{PS, '1', '+', '1', PE, OS, '3', OE}, 8}, /* not the answer */
               {{PS, '1', '+', '1', PE, 'x'}, 6},         /* no answer */
               {{'x', AE}, 2},                            /* a stop token */
               {{'1', '2', '3', '4', '5', '6', '7', '8'}, 8}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        row r = row_of(i == 3 ? 7 : 20);
        assert_int_equal(row_replay(&r, bad[i].tokens, bad[i].n, &err), COP_EINVAL);
        row_free(&r, NULL);
    }
    row r = row_of(2); /* as long as the limit: an empty sample of finish length */
    assert_int_equal(row_replay(&r, (int32_t[]){'x', 'y'}, 2, &err), COP_OK);
    sample_result s;
    row_result(&r, &s);
    assert_int_equal(s.n_tokens, 0);
    assert_int_equal(s.finish, FINISH_LENGTH);
    row_free(&r, NULL);
}

/* ---- Stop strings. */

typedef struct stopping {
    row_rules rules;
    stop_set *set;
    row row;
} stopping;

static void stopping_open(stopping *s, const char *const strings[], size_t n, int min_tokens, int limit) {
    cop_error err;
    stop_string given[STOP_MAX_STRINGS];
    for (size_t i = 0; i < n; i++) given[i] = (stop_string){strings[i], strlen(strings[i])};
    assert_int_equal(stop_open(&s->set, given, n, &err), COP_OK);
    s->rules = rules;
    s->rules.stop_strings = s->set;
    s->rules.min_tokens = min_tokens;
    assert_int_equal(row_init(&s->row, &s->rules, prompt, 5, limit, &err), COP_OK);
}

static void stopping_close(stopping *s) {
    row_free(&s->row, NULL);
    stop_close(s->set);
}

/* The row ended with this string (NULL: it runs) after n tokens. */
static void expect_stop(const stopping *s, const char *string, int n) {
    sample_result r;
    row_result(&s->row, &r);
    assert_int_equal(r.n_tokens, n);
    assert_int_equal(r.stop, -1);
    assert_int_equal(s->row.state, string ? ROW_STOPPED : ROW_RUNNING);
    assert_int_equal(r.finish, string ? FINISH_STOP : FINISH_CANCELLED);
    assert_int_equal(r.stop_string.n, string ? strlen(string) : 0);
    if (string) assert_memory_equal(r.stop_string.bytes, string, r.stop_string.n);
}

/* The ids of a text, to be drawn one by one. */
static token_list ids_of(const char *text) {
    token_list ids = {0};
    cop_error err;
    assert_int_equal(tokenizer_encode(tok, text, strlen(text), &ids, &err), COP_OK);
    return ids;
}

static void a_stop_string_ends_the_sample_with_its_last_token(void **state) {
    (void)state;
    stopping s;
    stopping_open(&s, (const char *const[]){"bc", "xyz"}, 2, 0, 20); /* across the borders of tokens */
    assert_int_equal(draw(&s.row, (int32_t[]){'a', 'b', 'x', 'b', 'c', 'd'}, 6), 5);
    expect_stop(&s, "bc", 5);
    stopping_close(&s);

    stopping_open(&s, (const char *const[]){"t|>ab", "zz"}, 2, 0, 20); /* special tokens are their text */
    assert_int_equal(draw(&s.row, (int32_t[]){'a', PS, 'a', 'b', 'c'}, 5), 4);
    expect_stop(&s, "t|>ab", 4);
    stopping_close(&s);

    stopping_open(&s, (const char *const[]){"<|bos|>H"}, 1, 0, 20); /* the prompt's bytes do not count */
    draw(&s.row, (int32_t[]){'H', 'H'}, 2);
    expect_stop(&s, NULL, 2);
    stopping_close(&s);

    stopping_open(&s, (const char *const[]){"b"}, 1, 0, 2); /* at the limit it is a stop */
    draw(&s.row, (int32_t[]){'a', 'b'}, 2);
    expect_stop(&s, "b", 2);
    stopping_close(&s);

    token_list ids = ids_of(" the"); /* one token: it may hold a string in its midst */
    assert_int_equal(ids.n, 1);
    stopping_open(&s, (const char *const[]){"the", "h", "th", "e"}, 4, 0, 20);
    draw(&s.row, ids.ids, 1);
    expect_stop(&s, "th", 1); /* the one that ends first, of those the longest */
    stopping_close(&s);
    token_list_free(&ids);
}

static void a_stop_token_comes_before_a_stop_string(void **state) {
    (void)state;
    stopping s;
    stopping_open(&s, (const char *const[]){"<|assistant_end|>"}, 1, 0, 20);
    draw(&s.row, (int32_t[]){'a', AE}, 2);
    sample_result r;
    row_result(&s.row, &r);
    assert_int_equal(r.stop, AE);
    assert_null(r.stop_string.bytes);
    stopping_close(&s);
}

static void a_string_that_min_tokens_passes_over_does_not_end_the_sample_later(void **state) {
    (void)state;
    stopping s;
    stopping_open(&s, (const char *const[]){"bb"}, 1, 3, 20);
    draw(&s.row, (int32_t[]){'b', 'b', 'a', 'a', 'b'}, 5);
    expect_stop(&s, NULL, 5);
    draw(&s.row, (int32_t[]){'b'}, 1);
    expect_stop(&s, "bb", 6);
    stopping_close(&s);

    stopping_open(&s, (const char *const[]){"bb"}, 1, 2, 20); /* begun below, completed above: it does */
    draw(&s.row, (int32_t[]){'a', 'b', 'b'}, 3);
    expect_stop(&s, "bb", 3);
    stopping_close(&s);

    stopping_open(&s, (const char *const[]){"bb"}, 1, 2, 20); /* within one that was passed over: it does */
    draw(&s.row, (int32_t[]){'b', 'b', 'b'}, 3);
    expect_stop(&s, "bb", 3);
    stopping_close(&s);
}

static void a_stop_string_in_a_forced_span_drops_the_rest(void **state) {
    (void)state;
    stopping s;
    stopping_open(&s, (const char *const[]){"<|output_start|>2"}, 1, 0, 20);
    draw(&s.row, (int32_t[]){PS, '1', '+', '1', PE}, 5);
    EXPECT(&s.row, 7, {PS, '1', '+', '1', PE, OS, '2'}, {1, 1, 1, 1, 1, 0, 0});
    expect_stop(&s, "<|output_start|>2", 7);
    assert_int_equal(s.row.n_calls, 1);
    assert_int_equal(s.row.n_forced, 2);
    stopping_close(&s);

    stopping_open(&s, (const char *const[]){"1<|python_end"}, 1, 0,
                  20); /* what closes a call: it is not run */
    draw(&s.row, (int32_t[]){PS, '1', '+', '1', PE}, 5);
    expect_stop(&s, "1<|python_end", 5);
    assert_int_equal(s.row.n_calls, 0);
    stopping_close(&s);
}

/* Every cut of a completion that a stop string ends, but the whole, continues to the same end. */
static void a_prefix_stands_where_its_bytes_do(void **state) {
    (void)state;
    const int32_t whole[] = {'b', 'c', PS, '1', '+', '1', PE, OS, '2', OE, 'a', 'b', 'c'};
    enum { N = sizeof whole / sizeof whole[0] };
    for (size_t cut = 0; cut <= N; cut++) {
        stopping s;
        cop_error err;
        stopping_open(&s, (const char *const[]){"bc"}, 1, 2, 20); /* the first "bc" is below min_tokens */
        cop_status status = row_replay(&s.row, whole, cut, &err);
        assert_int_equal(status, cut < N ? COP_OK : COP_EINVAL);
        if (cut == N) assert_non_null(strstr(err.message, "completes a stop string"));
        while (cut < N && s.row.state == ROW_RUNNING && row_index(&s.row) < N)
            draw(&s.row, &whole[row_index(&s.row)], 1);
        if (cut < N) expect_stop(&s, "bc", N - (int)cut);
        stopping_close(&s);
    }
}

static void a_cancelled_row_tells_what_it_has(void **state) {
    (void)state;
    row r = row_of(20);
    draw(&r, (int32_t[]){'a', 'b'}, 2);
    row_cancel(&r);
    EXPECT(&r, 2, {'a', 'b'}, {1, 1});
    sample_result s;
    row_result(&r, &s);
    assert_int_equal(s.finish, FINISH_CANCELLED);
    row_free(&r, NULL);
}

static void kept_ids_follow_the_drawn_tokens(void **state) {
    (void)state;
    row_rules kept = rules;
    kept.kept = 3;
    row r;
    cop_error err;
    assert_int_equal(row_init(&r, &kept, prompt, 5, 20, &err), COP_OK);
    const int32_t tokens[] = {PS, '1', PE, 'x'};
    for (int i = 0; i < 4; i++) {
        for (int j = 0; j <= i % 3; j++) row_kept_room(&r)[j] = 10 * i + j;
        k_drawn d = drawn(tokens[i], i % 3 + 1);
        assert_int_equal(row_draw(&r, &d, &err), COP_OK);
    }
    sample_result s;
    row_result(&r, &s); /* PS '1' PE OS '1' OE 'x' */
    const uint32_t offsets[] = {0, 1, 3, 6, 6, 6, 6, 7};
    const int32_t ids[] = {0, 10, 11, 20, 21, 22, 30};
    assert_int_equal(s.n_tokens, 7);
    assert_memory_equal(s.kept_offsets, offsets, sizeof offsets);
    assert_memory_equal(s.kept_ids, ids, sizeof ids);
    row_free(&r, NULL);
}

static void every_failing_allocation_is_told(void **state) {
    (void)state;
    long live = mem_live();
    for (long n = 0;; n++) {
        row r;
        cop_error err;
        mem_fail_after(n);
        cop_status status = row_init(&r, &rules, prompt, 5, 20, &err);
        const int32_t tokens[] = {PS, '6', '*', '7', PE};
        for (int i = 0; i < 5 && status == COP_OK; i++) {
            k_drawn d = drawn(tokens[i], 0);
            status = row_draw(&r, &d, &err);
        }
        bool fired = mem_fail_stop();
        if (r.seq.pages) row_free(&r, NULL);
        assert_int_equal(mem_live(), live);
        assert_int_equal(status, fired ? COP_ENOMEM : COP_OK);
        if (!fired) break;
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_answer_is_forced_after_a_call),
        cmocka_unit_test(the_limit_cuts_a_forced_answer),
        cmocka_unit_test(a_call_that_the_limit_cuts_off_is_not_run),
        cmocka_unit_test(a_wrong_expression_forces_nothing_but_is_told),
        cmocka_unit_test(blocks_open_and_close_as_nanochat_has_it),
        cmocka_unit_test(a_stop_token_ends_the_sample_and_runs_no_tool),
        cmocka_unit_test(a_stop_token_at_the_limit_is_a_stop),
        cmocka_unit_test(without_tools_a_call_is_text),
        cmocka_unit_test(every_cut_of_a_completion_replays_to_the_same_state),
        cmocka_unit_test(a_prefix_that_contradicts_its_tools_is_refused),
        cmocka_unit_test(a_stop_string_ends_the_sample_with_its_last_token),
        cmocka_unit_test(a_stop_token_comes_before_a_stop_string),
        cmocka_unit_test(a_string_that_min_tokens_passes_over_does_not_end_the_sample_later),
        cmocka_unit_test(a_stop_string_in_a_forced_span_drops_the_rest),
        cmocka_unit_test(a_prefix_stands_where_its_bytes_do),
        cmocka_unit_test(a_cancelled_row_tells_what_it_has),
        cmocka_unit_test(kept_ids_follow_the_drawn_tokens),
        cmocka_unit_test(every_failing_allocation_is_told),
    };
    return cmocka_run_group_tests(tests, open_tokenizer, close_tokenizer);
}
