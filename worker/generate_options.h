/* The options of `coppice generate`. */
#ifndef COP_GENERATE_OPTIONS_H
#define COP_GENERATE_OPTIONS_H

#include "engine/engine.h"
#include "worker/options.h"

/* As given on the command line; strings are borrowed from it. */
typedef struct generate_choices {
    const char *input, *output, *logprobs, *stop_tokens, *split, *reward, *keep;
    int64_t n, max_tokens, min_tokens, top_k;
    double temperature, top_p, min_p;
    uint64_t seed;
    size_t shard_bytes;
    option_list stop;
    bool has_seed, has_stop_tokens, no_tools, entropy, kept, text, strict, quiet;
} generate_choices;

/* What the choices come to.  `c` is borrowed; ends with generate_setting_free(). */
typedef struct generate_setting {
    const generate_choices *c;
    rollout_sampling sampling;
    token_list stop_tokens;
    stop_string stops[OPTION_LIST_MAX];
    uint64_t seed;
    uint64_t index, of; /* of --shard */
    uint32_t keep;      /* 0: all */
    bool to_folder, from_stdin, answers, program;
} generate_setting;

generate_choices generate_defaults(void);

/* Rows for a table; at most GENERATE_OPTION_ROWS. */
#define GENERATE_OPTION_ROWS 24
int generate_option_rows(generate_choices *c, option_spec *rows);

/* -1, or the exit status of a usage error, which was told.  The seed and the tools are not set yet. */
int generate_read_choices(generate_setting *s, const generate_choices *c);
void generate_setting_free(generate_setting *s);

#endif
