/* `coppice show`: leaf through samples. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "worker/commands.h"
#include "worker/open_tokenizer.h"
#include "worker/sample_source.h"
#include "worker/show_prompt.h"

enum { TERMINAL_LIMIT = 20 }; /* prompts, unless --limit says otherwise */

typedef struct choices {
    const char *colour;
    int64_t limit; /* 0: all */
    bool has_limit;
} choices;

/* ---- Leafing. */

/* An error may quote the input: nothing of that is to reach the terminal as a control character. */
static void defuse(cop_error *err) {
    for (char *c = err->message; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7F) *c = '?';
}

static void tell_end(const show_view *v, int64_t n_shown, bool more) {
    if (v->lacks_text)
        fprintf(stderr, "coppice: note: shown as token ids: --model PATH or --tokenizer PATH decodes them\n");
    if (more)
        fprintf(stderr, "coppice: %" PRId64 " shown, there is more: --limit N shows N, --limit 0 all\n",
                n_shown);
    else if (n_shown == 0)
        fprintf(stderr, "coppice: there is nothing to show\n");
}

static cop_status leaf(show_view *v, sample_source *s, int64_t limit, cop_error *err) {
    int64_t n_shown = 0;
    json_t *objects = NULL;
    cop_status status;
    while ((status = sample_source_next(s, &objects, err)) == COP_OK && objects) {
        if (limit > 0 && n_shown == limit) break;
        bool shown = false;
        status = show_prompt(v, objects, &shown, err);
        json_decref(objects);
        objects = NULL;
        n_shown += shown;
        if (status == COP_OK && ferror(v->page.out))
            status = cop_fail(err, COP_EIO, "could not write the output: %s", strerror(errno));
        if (status != COP_OK) return status;
    }
    if (status == COP_OK && fflush(v->page.out) != 0)
        status = cop_fail(err, COP_EIO, "could not write the output: %s", strerror(errno));
    if (status == COP_OK) tell_end(v, n_shown, objects);
    json_decref(objects);
    return status;
}

static int show(const char *path, show_view *v, const model_options *m, int64_t limit) {
    cop_error err = {0};
    sample_source *s;
    tokenizer *t = NULL;
    cop_status status = sample_source_open(&s, path, &err);
    if (status == COP_OK) status = find_tokenizer(&t, m, sample_source_manifest(s), &err);
    v->t = t;
    if (status == COP_OK) {
        status = leaf(v, s, limit, &err);
        fflush(v->page.out); /* what was shown stands before what went wrong */
        sample_source_tell_state(s);
    }
    tokenizer_close(t);
    sample_source_close(s);
    if (status == COP_OK) return 0;
    defuse(&err);
    return tell_error(&err, 1);
}

/* ---- The command line. */

enum { SHOW_OPTION_ROWS = 10 };

static void option_rows(show_view *v, choices *c, option_spec *rows) {
    const option_spec own[] = {
        {.name = "logprobs",
         .kind = OPTION_FLAG,
         .value = &v->logprobs,
         .help = "token by token, with log-probabilities"},
        {.name = "prompt",
         .kind = OPTION_STRING,
         .value = &v->filter.prompt,
         .arg = "ID",
         .help = "only the prompt with this id, or of this line (from 0)"},
        {.name = "sample",
         .kind = OPTION_INT,
         .value = &v->filter.sample,
         .arg = "I",
         .max = UINT32_MAX,
         .help = "only samples with this index"},
        {.name = "finish",
         .kind = OPTION_STRING,
         .value = &v->filter.finish,
         .arg = "stop|length",
         .help = "only samples that ended so"},
        {.name = "tool-calls",
         .kind = OPTION_FLAG,
         .value = &v->filter.tool_calls,
         .help = "only samples that called a tool"},
        {.name = "failed-tools",
         .kind = OPTION_FLAG,
         .value = &v->filter.failed_tools,
         .help = "only samples with a call that got no answer"},
        {.name = "best",
         .kind = OPTION_FLAG,
         .value = &v->filter.best,
         .help = "only the sample with the highest reward of each prompt"},
        {.name = "errors",
         .kind = OPTION_FLAG,
         .value = &v->filter.errors,
         .help = "only lines for which nothing was generated"},
        {.name = "limit",
         .kind = OPTION_INT,
         .value = &c->limit,
         .arg = "N",
         .max = INFINITY,
         .help = "prompts to show, 0: all; default: 20 on a terminal, else all",
         .given = &c->has_limit},
        {.name = "color",
         .kind = OPTION_STRING,
         .value = &c->colour,
         .arg = "auto|always|never",
         .help = "auto: on a terminal, unless NO_COLOR is set"},
    };
    _Static_assert(sizeof own / sizeof *own == SHOW_OPTION_ROWS, "as many as the caller has room for");
    memcpy(rows, own, sizeof own);
}

static int run(int argc, char **argv) {
    model_options m = model_options_defaults();
    show_view v = {.page.out = stdout, .filter.sample = -1};
    choices c = {.colour = "auto", .limit = -1};
    option_spec rows[SHOW_OPTION_ROWS + TOKENIZER_OPTION_ROWS];
    option_rows(&v, &c, rows);
    int n_args, n_rows = SHOW_OPTION_ROWS + tokenizer_option_rows(&m, rows + SHOW_OPTION_ROWS);
    int exit_status = options_parse(&command_show, rows, n_rows, argc, argv, 1, &n_args);
    if (exit_status >= 0) return exit_status;
    if (n_args != 1) {
        cop_error err;
        cop_fail(&err, COP_EINVAL, "show needs a path: coppice show PATH");
        return tell_error(&err, 2);
    }
    v.page.colour = show_wants_colour(stdout, c.colour);
    if (!c.has_limit) c.limit = isatty(STDOUT_FILENO) ? TERMINAL_LIMIT : 0;
    return show(argv[1], &v, &m, c.limit);
}

const command command_show = {
    .name = "show",
    .arguments = "PATH",
    .summary = "leaf through samples",
    .details =
        "Prints each prompt with its samples below it: a line about the sample, then its text. Sampled "
        "tokens and forced ones (what a tool put in) have different colours; without colours forced ones "
        "stand "
        "between ⟦ and ⟧. Control characters are spelled out, so the text is safe to look at.\n"
        "\n"
        "PATH is a folder that `coppice generate` writes or wrote, a single shard, JSON Lines of samples, or "
        "- for stdin. Samples of one prompt are shown together where they stand together. Text is decoded "
        "with "
        "the tokenizer of --model, else of the model that the folder's manifest names, if it is still there; "
        "else it is the samples' own text, or token ids. A data set that is not complete gives what it holds "
        "by now, with a note on stderr.",
    .example = "coppice show DIR --failed-tools --limit 5\n"
               "  coppice show DIR --prompt 3 --sample 0 --logprobs\n"
               "  coppice show samples.jsonl --model tests/models/calc-d4 --color=always | less -R",
    .run = run,
};
