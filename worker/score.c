/* `coppice score`: log-probabilities of token sequences. */
#include <stdio.h>
#include <string.h>

#include "worker/commands.h"
#include "worker/json_ids.h"
#include "worker/jsonl.h"
#include "worker/open_model.h"

static int run(int argc, char **argv);

const command command_score = {
    .name = "score",
    .arguments = "",
    .summary = "log-probabilities of token sequences, JSON Lines in and out",
    .details =
        "Reads JSON Lines on stdin. Each line {\"tokens\": [...]} gives {\"logprobs\": [...]}, as long as "
        "the "
        "input: the natural log of the probability of each token given those before it, null for the first. "
        "At temperature 1 the bits are those of a rollout's model_logprobs.\n"
        "\n"
        "--top K adds top_ids and top_logprobs, the K best ids of each position (null for the first), best "
        "first, and next_ids and next_logprobs, the K best to follow the last token.\n"
        "\n"
        "A bad line gives {\"line\": n, \"error\": ...}, and the next is read. Exit status: 0; 1, failed, or "
        "some lines were bad; 2, wrong options.",
    .example =
        "echo '{\"tokens\": [1015, 1016, 72, 105]}' | coppice score --model tests/models/calc-d4 --top 3",
    .run = run,
};

typedef struct scorer {
    engine *engine;
    int64_t top;
    double temperature;
    json_t *answer; /* of the line being scored */
    cop_error failure;
} scorer;

/* [n, top] as a list of lists, null for the first. */
static json_t *rows_of(const score_result *s, bool ids) {
    json_t *rows = json_array();
    for (size_t t = 0; rows && t < s->n; t++) {
        size_t at = t * (size_t)s->top, top = (size_t)s->top;
        json_array_append_new(rows, t == 0 ? json_null()
                                    : ids  ? json_of_ids(s->top_ids + at, top)
                                           : json_of_reals(s->top_logprobs + at, top));
    }
    return rows;
}

static void on_scored(void *context, size_t sequence, const score_result *s) {
    scorer *c = context;
    (void)sequence;
    json_t *logprobs = json_of_reals(s->logprobs, s->n);
    if (logprobs) json_array_set_new(logprobs, 0, json_null());
    json_object_set_new(c->answer, "logprobs", logprobs);
    if (s->top == 0) return;
    json_object_set_new(c->answer, "top_ids", rows_of(s, true));
    json_object_set_new(c->answer, "top_logprobs", rows_of(s, false));
    json_object_set_new(c->answer, "next_ids", json_of_ids(s->next_ids, (size_t)s->top));
    json_object_set_new(c->answer, "next_logprobs", json_of_reals(s->next_logprobs, (size_t)s->top));
}

static void on_done(void *context, const weights_label *w) { (void)context, (void)w; }
static void on_failed(void *context, const cop_error *e) { ((scorer *)context)->failure = *e; }

static cop_status score_tokens(scorer *c, const token_list *ids, cop_error *err) {
    score_spec spec = {.sequences = (const int32_t *const[]){ids->ids},
                       .lengths = &ids->n,
                       .n_sequences = 1,
                       .top = (int)c->top,
                       .temperature = c->temperature,
                       .context = c,
                       .scored = on_scored,
                       .done = on_done,
                       .failed = on_failed};
    cop_status status = engine_submit_score(c->engine, &spec, NULL, err);
    if (status != COP_OK) return status;
    while (engine_step(c->engine)) continue;
    if (c->failure.status != COP_OK) *err = c->failure;
    return c->failure.status;
}

static cop_status score_line(void *context, json_t *line, uint64_t number, json_t **out, cop_error *err) {
    scorer *c = context;
    (void)number;
    const char *key;
    json_t *value;
    json_object_foreach(line, key, value) {
        if (!strcmp(key, "tokens")) continue;
        return jsonl_refuse(err, key, "unknown key: a line is {\"tokens\": [...]}");
    }
    token_list ids = {0};
    cop_status status =
        json_read_ids(json_object_get(line, "tokens"), "tokens", engine_arch(c->engine)->vocab, &ids, err);
    c->failure = (cop_error){0};
    c->answer = json_object();
    if (status == COP_OK) status = score_tokens(c, &ids, err);
    token_list_free(&ids);
    if (status == COP_OK)
        *out = c->answer;
    else
        json_decref(c->answer);
    return status;
}

static int run(int argc, char **argv) {
    model_options m = model_options_defaults();
    scorer c = {.temperature = 1.0};
    option_spec rows[MODEL_OPTION_ROWS + 2] = {
        {.name = "top",
         .kind = OPTION_INT,
         .value = &c.top,
         .arg = "K",
         .help = "also tell the K best ids of each position, and after the last",
         .max = 20},
        {.name = "temperature",
         .kind = OPTION_REAL,
         .value = &c.temperature,
         .arg = "T",
         .help = "score at this temperature",
         .min = 0.001,
         .max = 100},
    };
    int n_args, n_rows = 2 + model_option_rows(&m, true, rows + 2);
    int status = options_parse(&command_score, rows, n_rows, argc, argv, 0, &n_args);
    if (status >= 0) return status;
    cop_error err;
    open_model model;
    if (open_model_init(&model, &m, &err) != COP_OK) return tell_error(&err, 1);
    c.engine = model.engine;
    status = jsonl_run("-", stdout, score_line, &c);
    open_model_free(&model);
    return status;
}
