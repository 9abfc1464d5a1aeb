/* `coppice generate`: samples for a file of prompts, without a server. */
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "worker/commands.h"
#include "worker/convert.h"
#include "worker/generate_options.h"
#include "worker/generate_run.h"
#include "worker/jsonl.h"
#include "worker/record_source.h"

static int run(int argc, char **argv);

const command command_generate = {
    .name = "generate",
    .arguments = "",
    .summary = "samples for a file of prompts, without a server",
    .details =
        "Each input line holds `text`, `messages` or `tokens`, optionally `id` and `seed`; the whole line is "
        "passed through as `input`. Lines count from 0. The same seed gives the same samples as a worker "
        "does for a prompt with the same id; a line's default id is its number.\n"
        "\n"
        "-o DIR writes a data set: shards of Zstandard frames, and a manifest. Stopped at any moment and "
        "started again with the same command, it goes on where it was. A line that cannot be used becomes a "
        "record with `error`, and the run goes on. `coppice show DIR` leafs through it, `coppice export DIR` "
        "prints it. -o - prints one JSON object per sample instead.\n"
        "\n"
        "--reward CMD gives each sample, as such an object with its text, as a line to a program, which "
        "prints a number (or null) for each, in the same order. --reward answer compares the last number or "
        "tool result of a sample with the line's `answer`, and ends with pass@k.\n"
        "\n"
        "Exit status: 0; 3, finished, but some lines became errors; 1, failed; 2, wrong options; 130, "
        "stopped "
        "by Ctrl-C.",
    .example = "echo '{\"messages\": [{\"role\": \"user\", \"content\": \"What is 7*8?\"}]}' | \\\n"
               "      coppice generate --model tests/models/calc-d4 -i - -o - -n 4 --seed 42 --text\n"
               "  coppice generate --model tests/models/calc-d4 -i prompts.jsonl -o samples -n 16 --seed 42",
    .run = run,
};

enum { STATUS_SOME_FAILED = 3 };

/* ---- What the data set is made with. */

static json_t *of_stop_strings(const rollout_sampling *s) {
    json_t *a = json_array();
    for (int i = 0; i < s->n_stop_strings; i++)
        json_array_append_new(a, json_stringn(s->stop_strings[i].bytes, s->stop_strings[i].n));
    return a;
}

static json_t *of_stop_tokens(const rollout_sampling *s) {
    if (!s->has_stop_tokens) return json_string("the model's");
    json_t *a = json_array();
    for (int i = 0; i < s->n_stop_tokens; i++) json_array_append_new(a, json_integer(s->stop_tokens[i]));
    return a;
}

static json_t *parameters_of(const generate_setting *s) {
    const generate_choices *c = s->c;
    const rollout_sampling *p = &s->sampling;
    return json_pack(
        "{s:I, s:o, s:i, s:i, s:f, s:i, s:f, s:f, s:o, s:o, s:b, s:b, s:b, s:b, s:b, s:b, s:s, s:s}", //
        "n", (json_int_t)c->n, "seed", json_u64(s->seed), "max_tokens", p->max_tokens, "min_tokens",
        p->min_tokens, "temperature", p->temperature, "top_k", p->top_k, "top_p", p->top_p, "min_p", p->min_p,
        "stop_tokens", of_stop_tokens(p), "stop", of_stop_strings(p), "tools", p->calculator, "logprobs",
        p->logprobs, "model_logprobs", p->model_logprobs, "entropy", p->entropy, "kept", p->kept, "text",
        c->text, "reward", c->reward ? c->reward : "", "keep", c->keep ? c->keep : "all");
}

static json_t *identity_of(const generate_setting *s, const open_model *m) {
    char digest[33] = "none";
    if (m->tokenizer) tokenizer_digest(m->tokenizer, digest);
    json_t *model =
        json_pack("{s:s, s:s, s:s, s:i}", "digest", engine_weights(m->engine)->digest, "numerics",
                  engine_numerics(m->engine), "tokenizer", digest, "context", engine_context(m->engine));
    return json_pack("{s:o, s:o, s:{s:I, s:I}}", "parameters", parameters_of(s), "model", model, "split",
                     "index", (json_int_t)s->index, "of", (json_int_t)s->of);
}

/* A data set that was begun without --seed goes on with the one that was drawn for it. */
static cop_status choose_seed(generate_setting *s, cop_error *err) {
    json_t *manifest = NULL;
    s->seed = s->c->seed;
    if (s->c->has_seed) return COP_OK;
    if (s->to_folder) COP_TRY(manifest_read(&manifest, s->c->output, err), err, "read the manifest");
    const json_t *earlier = json_object_get(json_object_get(manifest, "parameters"), "seed");
    if (!earlier || !json_u64_get(earlier, &s->seed)) s->seed = convert_seed();
    json_decref(manifest);
    fprintf(stderr, "coppice: seed %" PRIu64 "\n", s->seed);
    return COP_OK;
}

/* ---- The input as a whole. */

/* An input that was read through. */
typedef struct whole_input {
    uint64_t n_lines;
    char digest[INPUT_DIGEST_CHARS];
    char prefix_digest[INPUT_DIGEST_CHARS]; /* of as many first lines as were asked for; "": it has fewer */
} whole_input;

static cop_status measure_input(whole_input *out, const char *path, uint64_t n_prefix, cop_error *err) {
    input_file *in;
    cop_status status = input_open(&in, path, err);
    if (status != COP_OK) return status;
    *out = (whole_input){0};
    bool more = true;
    while (status == COP_OK && more) {
        input_line line;
        if (input_lines(in) == n_prefix) input_digest(in, out->prefix_digest);
        status = input_next(in, &line, &more, err);
    }
    out->n_lines = input_lines(in);
    input_digest(in, out->digest);
    input_close(in);
    return status;
}

/* What the folder knows of its input: the whole, or of a pipe what was used so far.  Zeroed: nothing. */
typedef struct noted_input {
    uint64_t n_lines;
    const char *digest;
    bool whole;
} noted_input;

static noted_input noted_of(const dataset_writer *w) {
    const json_t *note = w ? dataset_noted(w, "input") : NULL;
    const char *digest = json_string_value(json_object_get(note, "digest"));
    if (!digest || strlen(digest) + 1 != INPUT_DIGEST_CHARS) return (noted_input){0};
    return (noted_input){(uint64_t)json_integer_value(json_object_get(note, "lines")), digest,
                         json_is_true(json_object_get(note, "whole"))};
}

static cop_status check_input(const noted_input *noted, const whole_input *now, const char *path,
                              cop_error *err) {
    if (!noted->digest) return COP_OK;
    bool same = noted->whole ? noted->n_lines == now->n_lines && !strcmp(noted->digest, now->digest)
                             : !strcmp(noted->digest, now->prefix_digest);
    if (same) return COP_OK;
    return cop_fail(err, COP_EINVAL,
                    "the input \"%s\" is not what the output was begun with: %s %" PRIu64
                    " lines, digest %s, but it has %" PRIu64 ", digest %s",
                    path, noted->whole ? "that had" : "that began with", noted->n_lines, noted->digest,
                    now->n_lines,
                    noted->whole            ? now->digest
                    : now->prefix_digest[0] ? now->prefix_digest
                                            : now->digest);
}

/* ---- The run. */

static volatile int interrupted; /* the signal that asked for the end */

static void on_signal(int signal) { interrupted = signal; }

/* A second signal ends the process at once: what is in the folder then is mended by the next run. */
static void catch_signals(void) {
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = (int)SA_RESETHAND};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

/* Everything that a run holds.  Zeroed: nothing. */
typedef struct generation_job {
    generate_setting s;
    const model_options *m;
    open_model model;
    dataset_writer *dataset; /* NULL: JSON Lines to stdout */
    input_file *in;
    whole_input input; /* read through before the run, unless it goes to stdout or comes from stdin */
    held_records held; /* of an earlier run */
    reward_tally tally;
    reward *program;
} generation_job;

static void close_all(generation_job *j) {
    reward_close(j->program);
    pass_free(&j->tally.pass);
    held_records_free(&j->held);
    input_close(j->in);
    dataset_close(j->dataset);
    open_model_free(&j->model);
    generate_setting_free(&j->s);
}

static bool is_complete(const generation_job *j) { return j->dataset && dataset_complete(j->dataset); }

/* A line must not be an error in one run and samples in another, by what memory there is. */
static cop_status check_pool(const engine *e, cop_error *err) {
    engine_status s;
    engine_read_status(e, &s);
    uint64_t n = s.pages_total * KV_PAGE_TOKENS;
    if (n >= (uint64_t)engine_context(e)) return COP_OK;
    return cop_fail(err, COP_EINVAL,
                    "the page pool holds %" PRIu64
                    " tokens, but one sample may have the context's %d: raise --kv-memory or "
                    "lower --context",
                    n, engine_context(e));
}

static cop_status open_computing(generation_job *j, cop_error *err) {
    generate_setting *s = &j->s;
    cop_status status = open_model_init(&j->model, j->m, err);
    if (status != COP_OK) return status;
    s->sampling.calculator = !s->c->no_tools && engine_has_calculator(j->model.engine);
    if (s->to_folder) status = check_pool(j->model.engine, err);
    if (j->model.tokenizer || status != COP_OK) return status;
    const char *needs = s->c->text         ? "--text"
                        : s->c->stop.n > 0 ? "--stop"
                        : s->answers       ? "--reward answer"
                                           : NULL;
    return needs ? cop_fail(err, COP_EINVAL, "%s needs a tokenizer, which the model lacks", needs) : COP_OK;
}

/* An input that is not there shows before anything else is done. */
static cop_status find_input(const generation_job *j, cop_error *err) {
    input_file *in;
    if (j->s.from_stdin) return COP_OK;
    cop_status status = input_open(&in, j->s.c->input, err);
    if (status == COP_OK) input_close(in);
    return status;
}

static cop_status open_dataset(generation_job *j, cop_error *err) {
    const generate_setting *s = &j->s;
    char *model = realpath(j->m->model, NULL); /* `coppice show` looks for the tokenizer there */
    json_t *identity = identity_of(s, &j->model);
    json_t *about = json_pack("{s:s, s:s, s:s}", "program", "coppice " COP_VERSION, "model",
                              model ? model : j->m->model, "input", s->c->input);
    dataset_options o = {
        .dir = s->c->output, .identity = identity, .about = about, .shard_bytes = s->c->shard_bytes};
    cop_status status = identity && about ? dataset_open(&j->dataset, &o, err)
                                          : cop_fail(err, COP_EINVAL,
                                                     "could not describe the run: a name in it is not UTF-8");
    json_decref(identity);
    json_decref(about);
    free(model);
    return status;
}

/* Whether nothing has been made yet. */
static bool is_empty(const generation_job *j) {
    return j->dataset && dataset_next_line(j->dataset) == 0 && j->held.n == 0 && !is_complete(j);
}

/* The input that a run is bound to: none before anything has been made of it. */
static noted_input noted_of_job(const generation_job *j) {
    return is_empty(j) ? (noted_input){0} : noted_of(j->dataset);
}

/* The input must be what the output was begun with, as far as that is known.  Of a file all is known before
 * anything is generated; what comes from stdin is compared as it comes (line_reader.h), or as a whole with an
 * output that is complete. */
static cop_status open_input(generation_job *j, cop_error *err) {
    const char *path = j->s.c->input;
    noted_input noted = noted_of_job(j);
    cop_status status = COP_OK;
    if (j->s.from_stdin && noted.whole && !is_complete(j))
        return cop_fail(err, COP_EINVAL,
                        "the output was begun with a file of %" PRIu64
                        " lines: give it with -i FILE, not on stdin",
                        noted.n_lines);
    if (j->dataset && (!j->s.from_stdin || is_complete(j))) {
        status = measure_input(&j->input, path, noted.n_lines, err);
        if (status == COP_OK) status = check_input(&noted, &j->input, path, err);
        if (status == COP_OK && !noted.whole)
            dataset_note(j->dataset, "input", input_note(j->input.n_lines, j->input.digest, true));
    }
    return status == COP_OK && !is_complete(j) ? input_open(&j->in, path, err) : status;
}

/* Rewards that were found to belong to other samples stay in the folder, unless nothing has got there. */
static cop_status check_trust(generation_job *j, cop_error *err) {
    const char *why = j->dataset ? json_string_value(dataset_noted(j->dataset, "suspect_rewards")) : NULL;
    if (!why) return COP_OK;
    if (!is_empty(j))
        return cop_fail(err, COP_EINVAL, "the rewards in \"%s\" cannot be trusted, take another folder: %s",
                        j->s.c->output, why);
    dataset_note(j->dataset, "suspect_rewards", json_null());
    return COP_OK;
}

/* The rewards of the records that are there already. */
static cop_status count_earlier(generation_job *j, cop_error *err) {
    record_source *source;
    const shard_view *record;
    bool more = true;
    cop_status status = record_source_open(&source, j->s.c->output, err);
    while (status == COP_OK && more) {
        status = record_source_next(source, &record, &more, err);
        if (status != COP_OK || !more || !record->rewards) continue;
        double *rewards;
        size_t n;
        if (!record_rewards(&rewards, &n, record))
            status = cop_fail(err, COP_ENOMEM, "could not read the rewards so far");
        else
            reward_tally_add(&j->tally, rewards, n);
        mem_free(rewards);
    }
    record_source_close(source);
    return status;
}

static cop_status open_rewards(generation_job *j, cop_error *err) {
    const generate_setting *s = &j->s;
    if (!s->c->reward) return COP_OK;
    cop_status status = pass_init(&j->tally.pass, (size_t)s->c->n, err);
    if (status == COP_OK && j->dataset && dataset_next_line(j->dataset) > 0) status = count_earlier(j, err);
    bool starts = s->program && !is_complete(j);
    return status == COP_OK && starts ? reward_open(&j->program, s->c->reward, err) : status;
}

static cop_status open_all(generation_job *j, cop_error *err) {
    cop_status status = find_input(j, err);
    if (status == COP_OK) status = choose_seed(&j->s, err);
    if (status == COP_OK) status = open_computing(j, err);
    if (status == COP_OK && j->s.to_folder) status = open_dataset(j, err);
    if (status == COP_OK && j->dataset && !is_complete(j))
        status = held_records_read(&j->held, j->s.c->output, dataset_next_line(j->dataset), err);
    if (status == COP_OK) status = check_trust(j, err);
    if (status == COP_OK) status = open_input(j, err);
    return status == COP_OK ? open_rewards(j, err) : status;
}

static generate_plan plan_of(generation_job *j) {
    const generate_setting *s = &j->s;
    const tokenizer *t = j->model.tokenizer;
    bool grows = j->dataset && s->from_stdin; /* the input becomes known as it comes */
    generate_plan p = {.model = &j->model,
                       .sampling = s->sampling,
                       .most_rows = model_engine_options(j->m).max_rows,
                       .text = t && (s->c->text || s->program)};
    p.reading =
        (line_reader_options){.rules = {t, engine_arch(j->model.engine)->vocab, s->seed, (uint32_t)s->c->n},
                              .index = s->index,
                              .of = s->of,
                              .next_line = j->dataset ? dataset_next_line(j->dataset) : 0,
                              .strict = s->c->strict,
                              .tells_digest = grows,
                              .held = j->held.n > 0 ? &j->held : NULL};
    p.writing = (line_output_options){.dataset = j->dataset,
                                      .dir = s->c->output,
                                      .n_held = j->held.n,
                                      .out = stdout,
                                      .tokenizer = t,
                                      .text = s->c->text,
                                      .answers = s->answers,
                                      .program = j->program,
                                      .keep = s->keep,
                                      .notes_input = grows,
                                      .n_lines = (j->input.n_lines + s->of - 1 - s->index) / s->of,
                                      .quiet = s->c->quiet || !s->to_folder};
    if (!grows) return p;
    noted_input noted = noted_of_job(j);
    p.reading.known_lines = p.writing.n_lines_noted = noted.n_lines;
    if (noted.n_lines > 0) memcpy(p.reading.known_digest, noted.digest, INPUT_DIGEST_CHARS);
    return p;
}

/* ---- The end. */

static void tell_rewards(const generation_job *j) {
    const reward_tally *t = &j->tally;
    if (!j->s.c->reward) return;
    fprintf(stderr, "coppice: %" PRIu64 " rewards of %" PRIu64 " prompts", t->n_rewards, t->n_prompts);
    if (t->n_rewards > 0)
        fprintf(stderr, ": mean %.4g, of the best of each prompt %.4g", t->sum / (double)t->n_rewards,
                t->sum_best / (double)t->n_prompts);
    fputc('\n', stderr);
    if (!j->s.answers || t->pass.n_prompts == 0) return;
    for (size_t k = 1; k <= t->pass.n; k++) {
        bool told = t->pass.n <= 16 || k == t->pass.n || (k & (k - 1)) == 0; /* of many, the powers of two */
        if (told) fprintf(stderr, "%spass@%zu %.4f", k == 1 ? "coppice: " : ", ", k, pass_at(&t->pass, k));
    }
    fputc('\n', stderr);
}

static void tell_counts(const generation_job *j, const dataset_counts *c, const char *what) {
    if (!j->s.to_folder) return;
    fprintf(stderr, "coppice: \"%s\" %s: %" PRIu64 " samples of %" PRIu64 " lines", j->s.c->output, what,
            c->samples, c->records);
    if (c->errors > 0)
        fprintf(stderr, ", %" PRIu64 " of them with an error instead (coppice show %s --errors)", c->errors,
                j->s.c->output);
    fputc('\n', stderr);
}

static int tell_end(generation_job *j, const line_output_result *r) {
    if (r->complete) {
        tell_counts(j, &r->counts, "is complete");
        tell_rewards(j);
        return r->counts.errors > 0 ? STATUS_SOME_FAILED : 0;
    }
    tell_counts(j, &r->counts, "is not complete yet");
    if (j->s.to_folder && r->n_held > 0)
        fprintf(stderr, "coppice: %zu lines more are finished, and wait for older ones\n", r->n_held);
    if (j->s.to_folder) fprintf(stderr, "coppice: interrupted: the same command goes on from there\n");
    return 128 + interrupted;
}

static int generate(generation_job *j) {
    cop_error err;
    cop_status status = open_all(j, &err);
    if (status == COP_OK && is_complete(j)) {
        tell_counts(j, dataset_totals(j->dataset), "was complete already");
        tell_rewards(j);
        return 0;
    }
    if (status != COP_OK) return tell_error(&err, 1);
    generate_plan plan = plan_of(j);
    line_output_result result;
    catch_signals();
    status = generate_run(&plan, j->in, &j->tally, &interrupted, &result, &err);
    if (status == COP_OK) return tell_end(j, &result);
    tell_error(&err, 1);
    tell_counts(j, &result.counts,
                result.suspect ? "is of no use: take another folder"
                               : "is not complete yet, and goes on with the same command");
    return 1;
}

static int run(int argc, char **argv) {
    model_options m = model_options_defaults();
    generate_choices c = generate_defaults();
    option_spec rows[MODEL_OPTION_ROWS + GENERATE_OPTION_ROWS];
    int n_args, n_rows = generate_option_rows(&c, rows);
    n_rows += model_option_rows(&m, true, rows + n_rows);
    int status = options_parse(&command_generate, rows, n_rows, argc, argv, 0, &n_args);
    if (status >= 0) return status;
    generation_job j = {.m = &m};
    status = generate_read_choices(&j.s, &c);
    if (status < 0) status = generate(&j);
    close_all(&j);
    return status;
}
