/* The options of `coppice generate`: their table, and what they come to. */
#include "worker/generate_options.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/utf8.h"

generate_choices generate_defaults(void) {
    return (generate_choices){.logprobs = "sampling",
                              .n = 1,
                              .max_tokens = 256,
                              .temperature = 1.0,
                              .top_p = 1.0,
                              .shard_bytes = (size_t)256 << 20};
}

int generate_option_rows(generate_choices *c, option_spec *rows) {
    const option_spec all[] = {
        {.name = "input",
         .letter = 'i',
         .kind = OPTION_STRING,
         .value = &c->input,
         .arg = "FILE",
         .help = "JSON Lines of prompts, plain or Zstandard; - is stdin"},
        {.name = "output",
         .letter = 'o',
         .kind = OPTION_STRING,
         .value = &c->output,
         .arg = "DIR",
         .help = "write a data set there; -o -: JSON Lines of samples to stdout"},
        {.name = "n",
         .letter = 'n',
         .kind = OPTION_INT,
         .value = &c->n,
         .arg = "N",
         .help = "samples per prompt",
         .min = 1,
         .max = 4096},
        {.name = "seed",
         .kind = OPTION_U64,
         .value = &c->seed,
         .arg = "SEED",
         .help = "of all prompts without their own; default: drawn and told",
         .given = &c->has_seed},
        {.name = "max-tokens",
         .kind = OPTION_INT,
         .value = &c->max_tokens,
         .arg = "N",
         .help = "per sample, sampled and forced",
         .min = 1,
         .max = INT32_MAX},
        {.name = "min-tokens",
         .kind = OPTION_INT,
         .value = &c->min_tokens,
         .arg = "N",
         .help = "no stop token is drawn before, no --stop ends a sample",
         .max = INT32_MAX},
        {.name = "temperature",
         .kind = OPTION_REAL,
         .value = &c->temperature,
         .arg = "T",
         .help = "0 takes the best token",
         .max = 100},
        {.name = "top-k",
         .kind = OPTION_INT,
         .value = &c->top_k,
         .arg = "K",
         .help = "keep the K best; 0: off",
         .max = INT32_MAX},
        {.name = "top-p",
         .kind = OPTION_REAL,
         .value = &c->top_p,
         .arg = "P",
         .help = "keep the best that make up P",
         .max = 1},
        {.name = "min-p",
         .kind = OPTION_REAL,
         .value = &c->min_p,
         .arg = "P",
         .help = "drop what has less than P times the best",
         .max = 1},
        {.name = "stop-tokens",
         .kind = OPTION_STRING,
         .value = &c->stop_tokens,
         .arg = "IDS",
         .help = "such as 1015,1019; default: the model's",
         .given = &c->has_stop_tokens},
        {.name = "stop",
         .kind = OPTION_LIST,
         .value = &c->stop,
         .arg = "TEXT",
         .help = "end a sample with the token that completes TEXT; may be given up to 16 times"},
        {.name = "no-tools", .kind = OPTION_FLAG, .value = &c->no_tools, .help = "do not run the calculator"},
        {.name = "logprobs",
         .kind = OPTION_STRING,
         .value = &c->logprobs,
         .arg = "LIST",
         .help = "of sampling, model"},
        {.name = "entropy",
         .kind = OPTION_FLAG,
         .value = &c->entropy,
         .help = "also tell the entropy of what each token was drawn from"},
        {.name = "kept",
         .kind = OPTION_FLAG,
         .value = &c->kept,
         .help = "also tell the ids that survived truncation"},
        {.name = "text", .kind = OPTION_FLAG, .value = &c->text, .help = "also decode the samples"},
        {.name = "shard",
         .kind = OPTION_STRING,
         .value = &c->split,
         .arg = "i/N",
         .help = "only part i, from 0, of N: lines i, i + N, ..; `coppice merge` joins the parts"},
        {.name = "shard-bytes",
         .kind = OPTION_BYTES,
         .value = &c->shard_bytes,
         .arg = "BYTES",
         .min = 1,
         .max = (double)((size_t)1 << 40),
         .help = "a shard is complete when it has so many"},
        {.name = "reward",
         .kind = OPTION_STRING,
         .value = &c->reward,
         .arg = "CMD",
         .help = "judge each sample: a program, or `answer`"},
        {.name = "keep",
         .kind = OPTION_STRING,
         .value = &c->keep,
         .arg = "WHICH",
         .help = "of each prompt keep the `best` sample by reward, the best so many, or `all`"},
        {.name = "strict", .kind = OPTION_FLAG, .value = &c->strict, .help = "stop at the first bad line"},
        {.name = "quiet", .kind = OPTION_FLAG, .value = &c->quiet, .help = "tell no progress"},
    };
    _Static_assert(sizeof all / sizeof all[0] <= GENERATE_OPTION_ROWS, "room in the caller's table");
    memcpy(rows, all, sizeof all);
    return sizeof all / sizeof all[0];
}

/* ---- What they come to. */

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

/* The strings must be UTF-8, since they come back as text. */
static bool parse_stops(generate_setting *s, const option_list *list) {
    for (int i = 0; i < list->n; i++) {
        size_t n = strlen(list->items[i]);
        if (n < 1 || n > STOP_MAX_BYTES || utf8_valid_prefix(list->items[i], n) != n) return false;
        s->stops[i] = (stop_string){list->items[i], n};
    }
    s->sampling.stop_strings = s->stops;
    s->sampling.n_stop_strings = list->n;
    return true;
}

static bool parse_count(const char *text, char end, uint64_t *out, const char **rest) {
    char *after;
    errno = 0;
    if (*text < '0' || *text > '9') return false;
    *out = strtoull(text, &after, 10);
    *rest = after;
    return !errno && *after == end;
}

/* "i/N" */
static bool parse_split(const char *text, uint64_t *index, uint64_t *of) {
    const char *rest;
    *index = 0, *of = 1;
    if (!text) return true;
    return parse_count(text, '/', index, &rest) && parse_count(rest + 1, '\0', of, &rest) && *index < *of &&
           *of <= 1000000;
}

/* "all", "best", or how many. */
static bool parse_keep(const char *text, uint32_t *keep) {
    uint64_t n;
    const char *rest;
    *keep = 0;
    if (!text || !strcmp(text, "all")) return true;
    if (!strcmp(text, "best"))
        n = 1;
    else if (!parse_count(text, '\0', &n, &rest) || n < 1 || n > 4096)
        return false;
    *keep = (uint32_t)n;
    return true;
}

static int read_sampling(generate_setting *s, const generate_choices *c) {
    s->sampling = (rollout_sampling){.max_tokens = (int)c->max_tokens,
                                     .min_tokens = (int)c->min_tokens,
                                     .temperature = c->temperature,
                                     .top_k = (int)c->top_k,
                                     .top_p = c->top_p,
                                     .min_p = c->min_p,
                                     .entropy = c->entropy,
                                     .kept = c->kept,
                                     .has_stop_tokens = c->has_stop_tokens};
    if (c->temperature != 0 && c->temperature < 0.001)
        return usage_error("--temperature is 0, or 0.001 to 100");
    if (c->min_tokens > c->max_tokens) return usage_error("--min-tokens is greater than --max-tokens");
    if (c->kept && (c->top_k < 1 || c->top_k > 1024)) return usage_error("--kept needs --top-k of 1 to 1024");
    if (!parse_logprobs(c->logprobs, &s->sampling))
        return usage_error("--logprobs is a list of sampling and model");
    if (c->has_stop_tokens && !parse_ids(c->stop_tokens, &s->stop_tokens))
        return usage_error("--stop-tokens is a list of ids such as 1015,1019");
    if (!parse_stops(s, &c->stop)) return usage_error("--stop is a string of 1 to 256 bytes of UTF-8");
    s->sampling.stop_tokens = s->stop_tokens.ids;
    s->sampling.n_stop_tokens = (int)s->stop_tokens.n;
    return -1;
}

int generate_read_choices(generate_setting *s, const generate_choices *c) {
    *s = (generate_setting){.c = c};
    if (!c->input) return usage_error("no input given: use -i FILE, or -i - for stdin");
    if (!c->output)
        return usage_error("no output given: use -o DIR for a data set, or -o - for JSON Lines on stdout");
    s->from_stdin = !strcmp(c->input, "-");
    s->to_folder = strcmp(c->output, "-") != 0;
    if (!parse_split(c->split, &s->index, &s->of))
        return usage_error("--shard is i/N, such as 0/4: part i, from 0, of N");
    if (s->of > 1 && !c->has_seed)
        return usage_error("--shard needs --seed, so that all parts are made with the same");
    if (!parse_keep(c->keep, &s->keep)) return usage_error("--keep is best, all, or how many of 1 to 4096");
    if (s->keep > 0 && !c->reward) return usage_error("--keep needs --reward");
    s->answers = c->reward && !strcmp(c->reward, "answer");
    s->program = c->reward && !s->answers;
    return read_sampling(s, c);
}

void generate_setting_free(generate_setting *s) { token_list_free(&s->stop_tokens); }
