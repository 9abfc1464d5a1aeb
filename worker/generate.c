/* `coppice generate`: samples for a file of prompts, without a server.  Writes JSON Lines to stdout for now.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/utf8.h"
#include "worker/commands.h"
#include "worker/convert.h"
#include "worker/json_ids.h"
#include "worker/jsonl.h"
#include "worker/messages.h"
#include "worker/open_model.h"

static int run(int argc, char **argv);

const command command_generate = {
    .name = "generate",
    .arguments = "",
    .summary = "samples for a file of prompts, without a server",
    .details = "Each input line holds `text`, `messages` or `tokens`, optionally `id` and `seed`; other keys "
               "are passed\n"
               "through. One JSON object per sample goes to stdout (-o -), in order of completion. The same "
               "seed gives the\n"
               "same samples as a worker does for a prompt with the same id; a line's default id is its "
               "number, from 0.",
    .example = "echo '{\"messages\": [{\"role\": \"user\", \"content\": \"What is 7*8?\"}]}' | \\\n"
               "      coppice generate --model tests/models/calc-d4 -i - -o - -n 4 --seed 42 --text",
    .run = run,
};

enum { MOST_IN_FLIGHT = 256 }; /* lines; bounds memory, and is enough to fill the batch */

typedef struct generator {
    const open_model *model;
    rollout_sampling sampling;
    int64_t n;
    uint64_t seed;
    stop_string stops[OPTION_LIST_MAX]; /* what sampling points to */
    bool text;
    int n_in_flight;
    bool failed; /* a line ended in an error, or the output could not be written */
} generator;

/* One input line in flight; freed at the end of its rollout. */
typedef struct line_job {
    generator *g;
    uint64_t number; /* from 1 */
    char *id;
    size_t n_id;
    json_t *extra; /* the line's own fields */
    token_list tokens;
} line_job;

static void line_job_free(line_job *j) {
    if (!j) return;
    mem_free(j->id);
    json_decref(j->extra);
    token_list_free(&j->tokens);
    mem_free(j);
}

/* ---- Samples. */

static json_t *mask_of(const sample_result *s) {
    json_t *mask = json_array();
    for (int i = 0; i < s->n_tokens; i++) json_array_append_new(mask, json_integer(s->mask[i]));
    return mask;
}

static json_t *kept_of(const sample_result *s) {
    json_t *offsets = json_array();
    for (int i = 0; i <= s->n_tokens; i++) json_array_append_new(offsets, json_integer(s->kept_offsets[i]));
    return offsets;
}

static json_t *calls_of(const sample_result *s) {
    json_t *calls = json_array();
    for (int i = 0; i < s->n_tool_calls; i++)
        json_array_append_new(calls, json_pack("{s:i, s:s, s:b}", "at", (int)s->tool_calls[i].at, "tool",
                                               "calculator", "ok", (int)s->tool_calls[i].ok));
    return calls;
}

static json_t *text_of(const line_job *j, const sample_result *s) {
    char *text;
    size_t n;
    cop_error err;
    if (convert_text(&text, &n, NULL, NULL, j->g->model->tokenizer, s->tokens, (size_t)s->n_tokens, &err) !=
        COP_OK)
        return NULL;
    json_t *value = json_stringn(text, n);
    mem_free(text);
    return value;
}

static json_t *sample_object(const line_job *j, const sample_result *s) {
    size_t n = (size_t)s->n_tokens;
    json_t *o = json_object();
    json_object_set_new(o, "prompt", json_integer((json_int_t)(j->number - 1)));
    json_object_set_new(o, "prompt_id", json_stringn(j->id, j->n_id));
    json_object_set_new(o, "sample", json_integer(s->sample));
    json_object_set_new(o, "seed", json_u64(s->seed));
    json_object_set_new(o, "prompt_tokens", json_of_ids(j->tokens.ids, j->tokens.n));
    json_object_set_new(o, "tokens", json_of_ids(s->tokens, n));
    json_object_set_new(o, "mask", mask_of(s));
    if (s->logprobs) json_object_set_new(o, "logprobs", json_of_reals(s->logprobs, n));
    if (s->model_logprobs) json_object_set_new(o, "model_logprobs", json_of_reals(s->model_logprobs, n));
    if (s->entropy) json_object_set_new(o, "entropy", json_of_reals(s->entropy, n));
    if (s->kept_offsets) {
        json_object_set_new(o, "kept_ids", json_of_ids(s->kept_ids, s->kept_offsets[n]));
        json_object_set_new(o, "kept_offsets", kept_of(s));
    }
    json_object_set_new(o, "finish", json_string(s->finish == FINISH_STOP ? "stop" : "length"));
    if (s->stop >= 0) json_object_set_new(o, "stop", json_integer(s->stop));
    if (s->stop_string.bytes)
        json_object_set_new(o, "stop", json_stringn(s->stop_string.bytes, s->stop_string.n));
    json_object_set_new(o, "tool_calls", calls_of(s));
    json_t *run = n > 0 ? json_pack("[[i, i, s]]", 0, 0, engine_digest(j->g->model->engine)) : json_array();
    json_object_set_new(o, "weights", run);
    if (j->g->text) json_object_set_new(o, "text", text_of(j, s));
    if (json_object_size(j->extra) > 0) json_object_set(o, "input", j->extra);
    return o;
}

static void on_sample(void *context, const sample_result *s) {
    line_job *j = context;
    json_t *o = sample_object(j, s);
    if (!jsonl_print(stdout, o)) j->g->failed = true;
    json_decref(o);
}

static void on_done(void *context, const rollout_totals *totals) {
    line_job *j = context;
    (void)totals;
    j->g->n_in_flight--;
    line_job_free(j);
}

static void on_failed(void *context, const cop_error *e) {
    line_job *j = context;
    jsonl_print_error(stdout, j->number, e);
    j->g->failed = true;
    j->g->n_in_flight--;
    line_job_free(j);
}

/* ---- Lines. */

static cop_status read_prompt(line_job *j, const json_t *line, cop_error *err) {
    const tokenizer *t = j->g->model->tokenizer;
    const json_t *tokens = json_object_get(line, "tokens"), *text = json_object_get(line, "text"),
                 *messages = json_object_get(line, "messages");
    if (!!tokens + !!text + !!messages != 1)
        return jsonl_refuse(err, "", "a line needs exactly one of text, messages and tokens");
    if (tokens)
        return json_read_ids(tokens, "tokens", engine_arch(j->g->model->engine)->vocab, &j->tokens, err);
    if (!t) return cop_fail(err, COP_EUNSUPPORTED, "the model has no tokenizer: give tokens");
    if (text) {
        if (!json_is_string(text)) return jsonl_refuse(err, "text", "it is not a string");
        return tokenizer_encode_prompt(t, json_string_value(text), json_string_length(text), &j->tokens, err);
    }
    message_list list;
    cop_status status = messages_read(&list, messages, err);
    if (status != COP_OK) return status;
    status = chat_prompt(t, list.messages, list.n, 0, &j->tokens, err);
    messages_free(&list);
    return status;
}

/* The line's id, or its number from 0. */
static cop_status read_id(line_job *j, const json_t *line, cop_error *err) {
    const json_t *id = json_object_get(line, "id");
    if (id && !json_is_string(id)) return jsonl_refuse(err, "id", "it is not a string");
    char number[32];
    j->n_id =
        id ? json_string_length(id) : (size_t)snprintf(number, sizeof number, "%" PRIu64, j->number - 1);
    j->id = mem_alloc(j->n_id + 1, 1);
    if (!j->id) return cop_fail(err, COP_ENOMEM, "could not keep the line's id");
    memcpy(j->id, id ? json_string_value(id) : number, j->n_id);
    j->id[j->n_id] = '\0';
    return COP_OK;
}

static cop_status read_line(line_job *j, const json_t *line, uint64_t *seed, cop_error *err) {
    const json_t *own = json_object_get(line, "seed");
    *seed = j->g->seed;
    if (own && !json_u64_get(own, seed))
        return jsonl_refuse(err, "seed", "it is not a whole number within 64 bits");
    cop_status status = read_id(j, line, err);
    if (status == COP_OK) status = read_prompt(j, line, err);
    j->extra = json_copy((json_t *)line);
    if (!j->extra) return cop_fail(err, COP_ENOMEM, "could not keep the line");
    const char *const known[] = {"text", "messages", "tokens", "id", "seed"};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) json_object_del(j->extra, known[i]);
    return status;
}

static cop_status start_line(void *context, json_t *line, uint64_t number, json_t **out, cop_error *err) {
    generator *g = context;
    *out = NULL;
    line_job *j = mem_zalloc(1, sizeof *j);
    if (!j) return cop_fail(err, COP_ENOMEM, "could not keep the line");
    j->g = g;
    j->number = number;
    rollout_prompt p = {0};
    cop_status status = read_line(j, line, &p.seed, err);
    if (status == COP_OK) {
        p.tokens = j->tokens.ids;
        p.n_tokens = j->tokens.n;
        p.id = j->id;
        p.n_id = j->n_id;
        rollout_spec spec = {.prompts = &p,
                             .n_prompts = 1,
                             .n = (uint32_t)g->n,
                             .sampling = g->sampling,
                             .events = {j, on_sample, on_done, on_failed}};
        status = engine_submit(g->model->engine, &spec, NULL, err);
    }
    if (status != COP_OK) {
        line_job_free(j);
        return status;
    }
    g->n_in_flight++;
    while (g->n_in_flight >= MOST_IN_FLIGHT) engine_step(g->model->engine);
    return COP_OK;
}

/* ---- The command line. */

typedef struct choices {
    const char *input, *output, *logprobs, *stop_tokens;
    int64_t n, max_tokens, min_tokens, top_k;
    double temperature, top_p, min_p;
    uint64_t seed;
    option_list stop;
    bool has_seed, has_stop_tokens, no_tools, entropy, kept, text;
} choices;

static int usage_error(const char *message) {
    fprintf(stderr, "coppice: %s\n", message);
    return 2;
}

/* "1,2,3" to ids; "" is none. */
static bool parse_ids(const char *list, token_list *ids) {
    while (*list) {
        char *end;
        errno = 0;
        long id = strtol(list, &end, 10);
        if (end == list || errno || id < 0 || id > INT32_MAX || (*end && *end != ',')) return false;
        if (token_list_push(ids, (int32_t)id, NULL) != COP_OK) return false;
        list = *end ? end + 1 : end;
    }
    return true;
}

static bool parse_logprobs(const char *list, rollout_sampling *s) {
    s->logprobs = s->model_logprobs = false;
    for (const char *p = list; *p;) {
        size_t n = strcspn(p, ",");
        if (n == 8 && !memcmp(p, "sampling", 8))
            s->logprobs = true;
        else if (n == 5 && !memcmp(p, "model", 5))
            s->model_logprobs = true;
        else
            return false;
        p += n + (p[n] == ',');
    }
    return true;
}

/* The strings must be UTF-8, since they come back as JSON. */
static bool read_stops(generator *g, const option_list *list) {
    for (int i = 0; i < list->n; i++) {
        size_t n = strlen(list->items[i]);
        if (n < 1 || n > STOP_MAX_BYTES || utf8_valid_prefix(list->items[i], n) != n) return false;
        g->stops[i] = (stop_string){list->items[i], n};
    }
    g->sampling.stop_strings = g->stops;
    g->sampling.n_stop_strings = list->n;
    return true;
}

/* -1, or the exit status of a usage error. */
static int read_choices(generator *g, const choices *c, token_list *stops) {
    rollout_sampling *s = &g->sampling;
    *s = (rollout_sampling){.max_tokens = (int)c->max_tokens,
                            .min_tokens = (int)c->min_tokens,
                            .temperature = c->temperature,
                            .top_k = (int)c->top_k,
                            .top_p = c->top_p,
                            .min_p = c->min_p,
                            .entropy = c->entropy,
                            .kept = c->kept,
                            .has_stop_tokens = c->has_stop_tokens};
    if (!c->input) return usage_error("no input given: use -i FILE, or -i - for stdin");
    if (!c->output || strcmp(c->output, "-"))
        return usage_error("only -o - is built yet: it writes JSON Lines to stdout");
    if (c->temperature != 0 && c->temperature < 0.001)
        return usage_error("--temperature is 0, or 0.001 to 100");
    if (c->min_tokens > c->max_tokens) return usage_error("--min-tokens is greater than --max-tokens");
    if (c->kept && (c->top_k < 1 || c->top_k > 1024)) return usage_error("--kept needs --top-k of 1 to 1024");
    if (!parse_logprobs(c->logprobs, s)) return usage_error("--logprobs is a list of sampling and model");
    if (c->has_stop_tokens && !parse_ids(c->stop_tokens, stops))
        return usage_error("--stop-tokens is a list of ids such as 1015,1019");
    if (!read_stops(g, &c->stop)) return usage_error("--stop is a string of 1 to 256 bytes of UTF-8");
    s->stop_tokens = stops->ids;
    s->n_stop_tokens = (int)stops->n;
    g->n = c->n;
    g->text = c->text;
    g->seed = c->seed;
    if (!c->has_seed) {
        g->seed = convert_seed();
        fprintf(stderr, "coppice: seed %" PRIu64 "\n", g->seed);
    }
    return -1;
}

static int generate(generator *g, const choices *c, const model_options *m) {
    cop_error err;
    open_model model;
    int status = 1;
    if (open_model_init(&model, m, &err) != COP_OK) {
        tell_error(&err, 1);
    } else if (g->text && !model.tokenizer) {
        usage_error("--text needs a tokenizer");
        open_model_free(&model);
    } else if (c->stop.n > 0 && !model.tokenizer) {
        usage_error("--stop needs a tokenizer");
        open_model_free(&model);
    } else {
        g->model = &model;
        g->sampling.calculator = !c->no_tools && engine_has_calculator(model.engine);
        status = jsonl_run(c->input, stdout, start_line, g);
        while (engine_step(model.engine)) continue;
        if (fflush(stdout)) g->failed = true;
        if (g->failed) status = 1;
        open_model_free(&model);
    }
    return status;
}

static int run(int argc, char **argv) {
    model_options m = model_options_defaults();
    choices c = {.logprobs = "sampling", .n = 1, .max_tokens = 256, .temperature = 1.0, .top_p = 1.0};
    option_spec rows[MODEL_OPTION_ROWS + 17] = {
        {.name = "input",
         .letter = 'i',
         .kind = OPTION_STRING,
         .value = &c.input,
         .arg = "FILE",
         .help = "JSON Lines of prompts; - is stdin"},
        {.name = "output",
         .letter = 'o',
         .kind = OPTION_STRING,
         .value = &c.output,
         .arg = "-",
         .help = "JSON Lines of samples to stdout"},
        {.name = "n",
         .letter = 'n',
         .kind = OPTION_INT,
         .value = &c.n,
         .arg = "N",
         .help = "samples per prompt",
         .min = 1,
         .max = 4096},
        {.name = "seed",
         .kind = OPTION_U64,
         .value = &c.seed,
         .arg = "SEED",
         .help = "of all prompts without their own; default: drawn and told",
         .given = &c.has_seed},
        {.name = "max-tokens",
         .kind = OPTION_INT,
         .value = &c.max_tokens,
         .arg = "N",
         .help = "per sample, sampled and forced",
         .min = 1,
         .max = INT32_MAX},
        {.name = "min-tokens",
         .kind = OPTION_INT,
         .value = &c.min_tokens,
         .arg = "N",
         .help = "no stop token is drawn before, no --stop ends a sample",
         .max = INT32_MAX},
        {.name = "temperature",
         .kind = OPTION_REAL,
         .value = &c.temperature,
         .arg = "T",
         .help = "0 takes the best token",
         .max = 100},
        {.name = "top-k",
         .kind = OPTION_INT,
         .value = &c.top_k,
         .arg = "K",
         .help = "keep the K best; 0: off",
         .max = INT32_MAX},
        {.name = "top-p",
         .kind = OPTION_REAL,
         .value = &c.top_p,
         .arg = "P",
         .help = "keep the best that make up P",
         .max = 1},
        {.name = "min-p",
         .kind = OPTION_REAL,
         .value = &c.min_p,
         .arg = "P",
         .help = "drop what has less than P times the best",
         .max = 1},
        {.name = "stop-tokens",
         .kind = OPTION_STRING,
         .value = &c.stop_tokens,
         .arg = "IDS",
         .help = "such as 1015,1019; default: the model's",
         .given = &c.has_stop_tokens},
        {.name = "stop",
         .kind = OPTION_LIST,
         .value = &c.stop,
         .arg = "TEXT",
         .help = "end a sample with the token that completes TEXT; may be given up to 16 times"},
        {.name = "no-tools", .kind = OPTION_FLAG, .value = &c.no_tools, .help = "do not run the calculator"},
        {.name = "logprobs",
         .kind = OPTION_STRING,
         .value = &c.logprobs,
         .arg = "LIST",
         .help = "of sampling, model"},
        {.name = "entropy",
         .kind = OPTION_FLAG,
         .value = &c.entropy,
         .help = "also tell the entropy of what each token was drawn from"},
        {.name = "kept",
         .kind = OPTION_FLAG,
         .value = &c.kept,
         .help = "also tell the ids that survived truncation"},
        {.name = "text", .kind = OPTION_FLAG, .value = &c.text, .help = "also decode the samples"},
    };
    int n_args, n_rows = 17 + model_option_rows(&m, true, rows + 17);
    int status = options_parse(&command_generate, rows, n_rows, argc, argv, 0, &n_args);
    if (status >= 0) return status;
    token_list stops = {0};
    generator g = {0};
    status = read_choices(&g, &c, &stops);
    if (status < 0) status = generate(&g, &c, &m);
    token_list_free(&stops);
    return status;
}
