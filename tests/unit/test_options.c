/* Command lines: what is accepted, what is refused and with which words. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/capture.h"
#include "worker/options.h"

static const command a_command = {
    .name = "try",
    .arguments = "FILE...",
    .summary = "a command to test with",
    .details = "It does nothing.",
    .example = "coppice try x",
};

/* One option of each kind, and what a parse left behind. */
typedef struct fixture {
    bool json, json_given;
    option_list tags;
    const char *output, *mode;
    int64_t threads, step;
    uint64_t seed;
    double softcap;
    size_t memory;
    char *argv[16];
    int argc, n_args, status;
    capture err, out; /* what it printed */
} fixture;

enum { MAX_ARGS = 3 };

/* Parse the NULL-terminated arguments. */
static void parse(fixture *f, ...) {
    *f = (fixture){.mode = "fast", .step = -1, .threads = 2, .memory = 4096};
    const option_spec options[] = {
        {.name = "json",
         .kind = OPTION_FLAG,
         .value = &f->json,
         .help = "print JSON",
         .given = &f->json_given},
        {.name = "output",
         .letter = 'o',
         .kind = OPTION_STRING,
         .value = &f->output,
         .arg = "PATH",
         .help = "to"},
        {.name = "mode", .kind = OPTION_STRING, .value = &f->mode, .arg = "fast|exact", .help = "how"},
        {.name = "threads",
         .kind = OPTION_INT,
         .value = &f->threads,
         .arg = "N",
         .min = 1,
         .max = 64,
         .help = "t"},
        {.name = "step",
         .kind = OPTION_INT,
         .value = &f->step,
         .arg = "N",
         .min = 0,
         .max = INFINITY,
         .help = "s"},
        {.name = "seed", .kind = OPTION_U64, .value = &f->seed, .arg = "N", .help = "of the noise"},
        {.name = "softcap",
         .kind = OPTION_REAL,
         .value = &f->softcap,
         .arg = "X",
         .min = 0.5,
         .max = 100,
         .help = "c"},
        {.name = "remember", .kind = OPTION_LIST, .value = &f->tags, .arg = "T", .help = "l"},
        {.name = "kv-memory", .kind = OPTION_BYTES, .value = &f->memory, .arg = "BYTES", .help = "memory"},
    };
    va_list args;
    va_start(args, f);
    f->argv[f->argc++] = (char *)"try";
    for (char *a; (a = va_arg(args, char *));) f->argv[f->argc++] = a;
    va_end(args);
    capture_start(&f->out, stdout);
    capture_start(&f->err, stderr);
    f->status = options_parse(&a_command, options, sizeof options / sizeof *options, f->argc, f->argv,
                              MAX_ARGS, &f->n_args);
    capture_stop(&f->err);
    capture_stop(&f->out);
}

static void expect_refusal(const fixture *f, const char *message) {
    assert_string_equal(f->err.text, message);
    assert_string_equal(f->out.text, "");
    assert_int_equal(f->status, 2);
}

static void both_forms_of_a_value_are_taken(void **state) {
    (void)state;
    fixture f;
    parse(&f, "--json", "--output", "a b", "--threads=7", "--seed", "18446744073709551615", "--softcap=1.5e1",
          "--kv-memory", "4G", "--mode=exact", NULL);
    assert_int_equal(f.status, -1);
    assert_string_equal(f.err.text, "");
    assert_true(f.json && f.json_given);
    assert_string_equal(f.output, "a b");
    assert_string_equal(f.mode, "exact");
    assert_int_equal(f.threads, 7);
    assert_true(f.seed == UINT64_MAX);
    assert_true(f.softcap == 15);
    assert_true(f.memory == (size_t)4 << 30);
    assert_int_equal(f.n_args, 0);
}

static void what_is_not_given_keeps_its_default(void **state) {
    (void)state;
    fixture f;
    parse(&f, NULL);
    assert_int_equal(f.status, -1);
    assert_false(f.json || f.json_given);
    assert_null(f.output);
    assert_int_equal(f.threads, 2);
    assert_int_equal(f.step, -1);
}

static void letters_take_values_apart_or_attached(void **state) {
    (void)state;
    fixture f;
    parse(&f, "-o", "x", NULL);
    assert_string_equal(f.output, "x");
    parse(&f, "-oy", NULL);
    assert_string_equal(f.output, "y");
    parse(&f, "-z", NULL);
    expect_refusal(&f, "coppice try: unknown option \"-z\": `coppice try --help` lists them\n");
}

static void arguments_come_in_order_among_options(void **state) {
    (void)state;
    fixture f;
    parse(&f, "one", "--json", "-", "--threads", "3", "-5+1", NULL);
    assert_int_equal(f.status, -1);
    assert_int_equal(f.n_args, 3);
    assert_string_equal(f.argv[1], "one");
    assert_string_equal(f.argv[2], "-");
    assert_string_equal(f.argv[3], "-5+1");
}

static void two_dashes_end_the_options(void **state) {
    (void)state;
    fixture f;
    parse(&f, "--json", "--", "--threads", "--", NULL);
    assert_int_equal(f.status, -1);
    assert_int_equal(f.n_args, 2);
    assert_string_equal(f.argv[1], "--threads");
    assert_string_equal(f.argv[2], "--");
    parse(&f, "a", "b", "c", "d", NULL);
    expect_refusal(&f, "coppice try: unexpected argument \"d\": at most 3 can be given\n");
}

static void a_wrong_name_gets_the_nearest_right_one(void **state) {
    (void)state;
    fixture f;
    parse(&f, "--sofcap", "3", NULL);
    expect_refusal(&f, "coppice try: unknown option \"--sofcap\": did you mean \"--softcap\"?\n");
    parse(&f, "--thread=3", NULL);
    expect_refusal(&f, "coppice try: unknown option \"--thread\": did you mean \"--threads\"?\n");
    parse(&f, "--hepl", NULL);
    expect_refusal(&f, "coppice try: unknown option \"--hepl\": did you mean \"--help\"?\n");
    parse(&f, "--frobnicate", NULL); /* nothing is near */
    expect_refusal(&f, "coppice try: unknown option \"--frobnicate\": `coppice try --help` lists them\n");
    parse(&f, "--thr", NULL); /* no abbreviations: a later option must not change what a script means */
    assert_int_equal(f.status, 2);
}

static void a_long_wrong_name_is_cut(void **state) {
    (void)state;
    fixture f;
    char name[3000];
    memset(name, 'x', sizeof name);
    name[0] = name[1] = '-';
    name[sizeof name - 1] = '\0';
    parse(&f, name, NULL);
    assert_int_equal(f.status, 2);
    assert_true(strlen(f.err.text) < 150);
}

static void wrong_values_are_told_with_the_right_range(void **state) {
    (void)state;
    static const struct {
        const char *option, *value, *expected;
    } cases[] = {
        {"threads", "0", "a whole number from 1 to 64"},
        {"threads", "65", "a whole number from 1 to 64"},
        {"threads", "", "a whole number from 1 to 64"},
        {"threads", " 3", "a whole number from 1 to 64"},
        {"threads", "3x", "a whole number from 1 to 64"},
        {"threads", "+3", "a whole number from 1 to 64"},
        {"threads", "99999999999999999999", "a whole number from 1 to 64"},
        {"step", "-1", "a whole number of at least 0"},
        {"seed", "-1", "a whole number from 0 to 18446744073709551615"},
        {"seed", "18446744073709551616", "a whole number from 0 to 18446744073709551615"},
        {"seed", "1.5", "a whole number from 0 to 18446744073709551615"},
        {"softcap", "0.25", "a number from 0.5 to 100"},
        {"softcap", "nan", "a number from 0.5 to 100"},
        {"softcap", "0x10", "a number from 0.5 to 100"},
        {"softcap", "1e", "a number from 0.5 to 100"},
        {"softcap", "", "a number from 0.5 to 100"},
        {"kv-memory", "4T", "a number of bytes such as 4096, 64K, 512M or 4G"},
        {"kv-memory", "4GB", "a number of bytes such as 4096, 64K, 512M or 4G"},
        {"kv-memory", "G", "a number of bytes such as 4096, 64K, 512M or 4G"},
        {"kv-memory", "17179869184G", "a number of bytes such as 4096, 64K, 512M or 4G"},
        {"mode", "fas", "one of fast|exact"},
        {"mode", "", "one of fast|exact"},
        {"json", "true", "given without a value"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fixture f;
        char argument[128], message[256];
        snprintf(argument, sizeof argument, "--%s=%s", cases[i].option, cases[i].value);
        snprintf(message, sizeof message, "coppice try: option \"--%s\" cannot be \"%s\": it is %s\n",
                 cases[i].option, cases[i].value, cases[i].expected);
        parse(&f, argument, NULL);
        expect_refusal(&f, message);
    }
}

static void a_missing_value_is_told(void **state) {
    (void)state;
    fixture f;
    parse(&f, "x", "--output", NULL);
    expect_refusal(&f, "coppice try: option \"--output\" needs a value: PATH\n");
    parse(&f, "-o", NULL);
    expect_refusal(&f, "coppice try: option \"--output\" needs a value: PATH\n");
}

static void a_list_grows_with_each_time(void **state) {
    (void)state;
    fixture f;
    parse(&f, "--remember", "a", "x", "--remember=", "--remember", "--json", NULL);
    assert_int_equal(f.status, -1);
    assert_int_equal(f.tags.n, 3);
    assert_string_equal(f.tags.items[0], "a");
    assert_string_equal(f.tags.items[1], "");
    assert_string_equal(f.tags.items[2], "--json");
    assert_int_equal(f.n_args, 1);
}

static void byte_sizes_have_units(void **state) {
    (void)state;
    fixture f;
    parse(&f, "--kv-memory=12", NULL);
    assert_true(f.memory == 12);
    parse(&f, "--kv-memory=3K", NULL);
    assert_true(f.memory == 3072);
    parse(&f, "--kv-memory=17179869183G", NULL); /* the largest that fits */
    assert_true(f.memory == (size_t)17179869183 << 30);
}

static void help_shows_everything_on_stdout(void **state) {
    (void)state;
    fixture f;
    parse(&f, "--json", "--help", NULL);
    assert_int_equal(f.status, 0);
    assert_string_equal(f.err.text, "");
    static const char *const parts[] = {
        "usage: coppice try [options] FILE...\n\na command to test with\n\nIt does nothing.\n\noptions:\n",
        "  --json                    print JSON\n",
        "  -o, --output PATH         to\n",
        "  --mode fast|exact         how (default: fast)\n",
        "  --threads N               t (default: 2)\n",
        "  --step N                  s\n", /* a default outside the range is not shown */
        "  --softcap X               c\n",
        "  --seed N                  of the noise (default: 0)\n",
        "  --remember T              l\n"
        "  --kv-memory BYTES         memory (default: 4K)\n",
        "  -h, --help                show this\n",
        "\nexample:\n  coppice try x\n",
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        if (!strstr(f.out.text, parts[i])) fail_msg("no \"%s\" in:\n%s", parts[i], f.out.text);
    }
    parse(&f, "-h", NULL);
    assert_int_equal(f.status, 0);
}

static void long_help_is_wrapped(void **state) {
    (void)state;
    bool flag = false;
    const option_spec o = {
        .name = "flag-with-a-rather-long-name",
        .kind = OPTION_FLAG,
        .value = &flag,
        .help = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
                "fifteen sixteen seventeen eighteen nineteen twenty"};
    char *argv[] = {(char *)"try", (char *)"--help"};
    int n_args;
    static capture out;
    capture_start(&out, stdout);
    options_parse(&a_command, &o, 1, 2, argv, 0, &n_args);
    capture_stop(&out);
    assert_non_null(
        strstr(out.text, "  --flag-with-a-rather-long-name\n                            one two"));
    char *line = strtok(out.text, "\n");
    for (; line; line = strtok(NULL, "\n")) assert_true(strlen(line) <= 100);
}

static void the_nearest_name_counts_edits(void **state) {
    (void)state;
    static const char *const names[] = {"worker", "calc", "score", "show"};
    assert_string_equal(nearest_name("clac", names, 4), "calc"); /* neighbours swapped: one edit */
    assert_string_equal(nearest_name("shwo", names, 4), "show");
    assert_string_equal(nearest_name("scores", names, 4), "score");
    assert_string_equal(nearest_name("worker", names, 4), "worker");
    assert_null(nearest_name("x", names, 0));
}

static void only_what_is_near_is_a_suggestion(void **state) {
    (void)state;
    static const char *const names[] = {"worker", "show", "detokenize", "n"};
    assert_string_equal(nearest_name("sohw", names, 4), "show");
    assert_string_equal(nearest_name("shwoo", names, 4), "show"); /* 2 edits */
    assert_null(nearest_name("frob", names, 4));                  /* 3 of "show" */
    assert_string_equal(nearest_name("detoknze", names, 4), "detokenize");
    assert_string_equal(nearest_name("detokinise", names, 4), "detokenize");
    assert_string_equal(nearest_name("detokinyse", names, 4), "detokenize"); /* 3 of 10 letters */
    assert_null(nearest_name("detakinyse", names, 4));                       /* 4 */
    assert_null(nearest_name("", names, 4));
    assert_null(nearest_name("x", names, 4)); /* 1 edit from "n", which is all of it */
    assert_null(nearest_name("xy", names, 4));
}

static void model_rows_cover_what_commands_take(void **state) {
    (void)state;
    model_options m = model_options_defaults();
    option_spec rows[MODEL_OPTION_ROWS];
    assert_int_equal(tokenizer_option_rows(&m, rows), TOKENIZER_OPTION_ROWS);
    assert_string_equal(rows[TOKENIZER_OPTION_ROWS - 1].name, "tokenizer");
    assert_int_equal(model_option_rows(&m, false, rows), 8);
    int n = model_option_rows(&m, true, rows), n_args;
    assert_int_equal(n, 13);
    assert_false(m.pin);
    assert_int_equal(m.step, -1);
    assert_string_equal(m.precision, "bf16");
    char *argv[] = {"try",
                    "--model=m",
                    "--step=3",
                    "--tokenizer=t",
                    "--softcap=15",
                    "--window-pattern=SL",
                    "--rope-table=bf16",
                    "--sequence-len=256",
                    "--short-window=64",
                    "--precision=f32",
                    "--threads=4",
                    "--pin",
                    "--context=100",
                    "--kv-memory=1M"};
    assert_int_equal(options_parse(&a_command, rows, n, sizeof argv / sizeof *argv, argv, 0, &n_args), -1);
    checkpoint_options o = model_checkpoint_options(&m);
    assert_string_equal(m.model, "m");
    assert_int_equal(o.step, 3);
    assert_string_equal(o.tokenizer, "t");
    assert_true(o.softcap == 15);
    assert_string_equal(o.window_pattern, "SL");
    assert_string_equal(o.rope_table, "bf16");
    assert_int_equal(o.sequence_len, 256);
    assert_int_equal(o.short_window, 64);
    assert_string_equal(m.precision, "f32");
    assert_int_equal(m.threads, 4);
    assert_true(m.pin);
    assert_int_equal(m.context, 100);
    assert_int_equal(m.kv_memory, 1 << 20);
}

static void errors_are_told_with_their_key(void **state) {
    (void)state;
    static capture err;
    cop_error e = {0};
    cop_fail(&e, COP_EINVAL, "cannot be %d", 3);
    capture_start(&err, stderr);
    int status = tell_error(&e, 1);
    assert_string_equal(capture_stop(&err), "coppice: cannot be 3\n");
    assert_int_equal(status, 1);
    snprintf(e.key, sizeof e.key, "prompts[3]");
    capture_start(&err, stderr);
    tell_error(&e, 1);
    assert_string_equal(capture_stop(&err), "coppice: prompts[3]: cannot be 3\n");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(both_forms_of_a_value_are_taken),
        cmocka_unit_test(what_is_not_given_keeps_its_default),
        cmocka_unit_test(letters_take_values_apart_or_attached),
        cmocka_unit_test(arguments_come_in_order_among_options),
        cmocka_unit_test(two_dashes_end_the_options),
        cmocka_unit_test(a_wrong_name_gets_the_nearest_right_one),
        cmocka_unit_test(a_long_wrong_name_is_cut),
        cmocka_unit_test(wrong_values_are_told_with_the_right_range),
        cmocka_unit_test(a_missing_value_is_told),
        cmocka_unit_test(a_list_grows_with_each_time),
        cmocka_unit_test(byte_sizes_have_units),
        cmocka_unit_test(help_shows_everything_on_stdout),
        cmocka_unit_test(long_help_is_wrapped),
        cmocka_unit_test(the_nearest_name_counts_edits),
        cmocka_unit_test(only_what_is_near_is_a_suggestion),
        cmocka_unit_test(model_rows_cover_what_commands_take),
        cmocka_unit_test(errors_are_told_with_their_key),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
