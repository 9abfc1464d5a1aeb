/* coppice calc: what the calculator tool answers. */
#include "engine/calculator.h"
#include "worker/commands.h"
#include "worker/jsonl.h"

#include <string.h>

/* {"expr": text} to {"expr": text, "result": text or null}. */
static cop_status answer(void *context, json_t *line, uint64_t number, json_t **out, cop_error *err) {
    (void)number;
    (void)context;
    json_t *expr = json_object_get(line, "expr");
    if (!json_is_string(expr)) {
        cop_fail(err, COP_EINVAL, "%s",
                 expr ? "must be a string" : "is missing: a line is {\"expr\": \"3*4\"}");
        snprintf(err->key, sizeof err->key, "expr");
        return err->status;
    }
    char *result;
    cop_status status = calculator_eval(json_string_value(expr), json_string_length(expr), &result, err);
    if (status != COP_OK) return status;
    *out = json_pack("{s:O, s:s?}", "expr", expr, "result", result);
    mem_free(result);
    return *out ? COP_OK : cop_fail(err, COP_ENOMEM, "could not keep the answer: out of memory");
}

static int print_one(const char *expr) {
    cop_error err = {0};
    char *result;
    if (calculator_eval(expr, strlen(expr), &result, &err) != COP_OK) return tell_error(&err, 1);
    if (!result) {
        fprintf(stderr, "no output\n");
        return 1;
    }
    bool written = puts(result) != EOF && fflush(stdout) == 0;
    mem_free(result);
    if (!written) perror("coppice: could not write the output");
    return written ? 0 : 1;
}

static int run(int argc, char **argv) {
    int n_args;
    int status = options_parse(&command_calc, NULL, 0, argc, argv, 1, &n_args);
    if (status >= 0) return status;
    return n_args ? print_one(argv[1]) : jsonl_run("-", stdout, answer, NULL);
}

const command command_calc = {
    .name = "calc",
    .arguments = "[EXPR]",
    .summary = "what the calculator tool answers",
    .details =
        "Evaluates EXPR as nanochat's calculator does: + - * / // with integers of any size and floats, and "
        "'text'.count('x'). Without EXPR it reads JSON Lines {\"expr\": \"3*4\"} and writes {\"expr\": "
        "\"3*4\", "
        "\"result\": \"12\"}, with null where the tool gives no output.",
    .example = "coppice calc '(1 + 2) * 3.5'",
    .run = run,
};
