/* `coppice export`: a data set as JSON Lines. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "worker/commands.h"
#include "worker/convert.h"
#include "worker/json_ids.h"
#include "worker/jsonl.h"
#include "worker/open_tokenizer.h"
#include "worker/sample_source.h"

/* Add `text` to a sample that has none. */
static cop_status add_text(json_t *sample, const tokenizer *t, cop_error *err) {
    if (json_object_get(sample, "error") || json_object_get(sample, "text")) return COP_OK;
    token_list ids = {0};
    char *text = NULL;
    size_t n = 0;
    cop_status status =
        json_read_ids(json_object_get(sample, "tokens"), "tokens", tokenizer_vocab(t), &ids, err);
    if (status == COP_OK) status = convert_text(&text, &n, NULL, NULL, t, ids.ids, ids.n, err);
    if (status == COP_OK && json_object_set_new(sample, "text", json_stringn(text, n)) != 0)
        status = cop_fail(err, COP_ENOMEM, "could not keep the text of a sample: out of memory");
    mem_free(text);
    token_list_free(&ids);
    return status;
}

typedef struct exported {
    const tokenizer *text; /* decode with it; NULL: not */
    double min_reward;
    bool has_min_reward;
} exported;

/* Samples that are judged lower stay out, those without a reward and lines without samples too. */
static bool is_wanted(const exported *e, const json_t *sample) {
    const json_t *reward = json_object_get(sample, "reward");
    return !e->has_min_reward || (json_is_number(reward) && json_number_value(reward) >= e->min_reward);
}

static cop_status write_all(sample_source *s, FILE *out, const exported *e, cop_error *err) {
    json_t *samples, *o;
    size_t i;
    cop_status status;
    while ((status = sample_source_next(s, &samples, err)) == COP_OK && samples) {
        json_array_foreach(samples, i, o) {
            if (status != COP_OK || !is_wanted(e, o)) continue;
            if (e->text) status = add_text(o, e->text, err);
            if (status == COP_OK && !jsonl_print(out, o))
                status = cop_fail(err, COP_EIO, "could not write the output: %s", strerror(errno));
        }
        json_decref(samples);
        if (status != COP_OK) return status;
    }
    return status;
}

/* Open FILE for writing.  What is there already is never written over. */
static cop_status open_output(FILE **out, const char *file, cop_error *err) {
    bool to_stdout = !file || !strcmp(file, "-");
    *out = to_stdout ? stdout : fopen(file, "wxe");
    if (*out) return COP_OK;
    return cop_fail(err, COP_EIO, "could not create \"%s\": %s", file, strerror(errno));
}

/* Close what open_output() gave.  A file that could not be written whole is removed: it was not there before.
 */
static cop_status close_output(FILE *out, const char *file, cop_status status, cop_error *err) {
    bool closed = out == stdout ? fflush(out) == 0 : fclose(out) == 0;
    if (status == COP_OK && !closed)
        status = cop_fail(err, COP_EIO, "could not write the output: %s", strerror(errno));
    if (status != COP_OK && out != stdout) unlink(file);
    return status;
}

static cop_status export(const char *path, const char *file, exported *e, bool text, const model_options *m,
                         cop_error *err) {
    sample_source *s;
    FILE *out;
    tokenizer *t = NULL;
    cop_status status = sample_source_open(&s, path, err);
    if (status != COP_OK) return status;
    if (text) status = find_tokenizer(&t, m, sample_source_manifest(s), err);
    if (status == COP_OK && text && !t)
        status = cop_fail(err, COP_EINVAL, "--text needs a tokenizer: give --model PATH or --tokenizer PATH");
    e->text = t;
    if (status == COP_OK) status = open_output(&out, file, err);
    if (status == COP_OK) {
        status = close_output(out, file, write_all(s, out, e, err), err);
        sample_source_tell_state(s);
    }
    tokenizer_close(t);
    sample_source_close(s);
    return status;
}

static int run(int argc, char **argv) {
    model_options m = model_options_defaults();
    const char *to = "jsonl", *file = NULL;
    bool text = false;
    exported e = {0};
    enum { N_ROWS = 4 };
    option_spec rows[TOKENIZER_OPTION_ROWS + N_ROWS] = {
        {.name = "to", .kind = OPTION_STRING, .value = &to, .arg = "jsonl", .help = "the format"},
        {.name = "output",
         .letter = 'o',
         .kind = OPTION_STRING,
         .value = &file,
         .arg = "FILE",
         .help = "where to; it must not exist; default: stdout"},
        {.name = "text",
         .kind = OPTION_FLAG,
         .value = &text,
         .help =
             "add the decoded text to samples that lack it, with the tokenizer of --model or of the model "
             "that made the data set"},
        {.name = "min-reward",
         .kind = OPTION_REAL,
         .value = &e.min_reward,
         .arg = "R",
         .help = "only samples with a reward of at least R",
         .given = &e.has_min_reward},
    };
    int n_args, n_rows = N_ROWS + tokenizer_option_rows(&m, rows + N_ROWS);
    int exit_status = options_parse(&command_export, rows, n_rows, argc, argv, 1, &n_args);
    if (exit_status >= 0) return exit_status;
    cop_error err;
    if (n_args != 1 || strcmp(to, "jsonl") != 0) {
        cop_fail(&err, COP_EINVAL, "export needs a path, and its format is jsonl: %s",
                 "coppice export PATH --to jsonl");
        return tell_error(&err, 2);
    }
    return export(argv[1], file, &e, text, &m, &err) == COP_OK ? 0 : tell_error(&err, 1);
}

const command command_export = {
    .name = "export",
    .arguments = "PATH --to jsonl",
    .summary = "a data set as JSON Lines",
    .details =
        "Prints one JSON object per sample, and {\"line\": ..., \"error\": ...} for a line without samples, "
        "as `coppice generate -o -` does: ids, masks and log-probabilities are JSON arrays, a seed "
        "beyond 2^53 is a decimal string, floats have nine digits, which bring back every bit of an fp32.\n"
        "\n"
        "PATH is a folder that `coppice generate` writes or wrote, a single shard, JSON Lines of samples, or "
        "- for stdin. A data set that is not complete gives what it holds by now, with a note on stderr.",
    .example = "coppice export DIR --to jsonl -o samples.jsonl\n"
               "  coppice export DIR --to jsonl --text --model tests/models/calc-d4 | head -1",
    .run = run,
};
