/* Command lines: a table of options per command, parsed and explained by one function.
 *
 * `--name VALUE`, `--name=VALUE`, and short forms where given.  A wrong option gets one line on stderr that
 * names it and the nearest right one, if one is near, and exit status 2.  `--help` prints usage, options and
 * the example on stdout. */
#ifndef COP_OPTIONS_H
#define COP_OPTIONS_H

#include "engine/checkpoint.h"

typedef enum option_kind {
    OPTION_FLAG,   /* bool, set to true */
    OPTION_STRING, /* const char *, borrowed from argv */
    OPTION_INT,    /* int64_t within min..max */
    OPTION_U64,    /* uint64_t */
    OPTION_REAL,   /* double within min..max */
    OPTION_BYTES,  /* size_t: digits with an optional K, M, G (powers of 1024) */
    OPTION_LIST    /* option_list: a string more each time the option is given */
} option_kind;

#define OPTION_LIST_MAX 16

/* The strings of an OPTION_LIST, borrowed from argv. */
typedef struct option_list {
    const char *items[OPTION_LIST_MAX];
    int n;
} option_list;

typedef struct option_spec {
    const char *name; /* without dashes */
    char letter;      /* 0: no short form */
    option_kind kind;
    void *value; /* the default stands here */
    const char
        *arg; /* what the value is called in help: "N", "PATH"; "a|b" for a STRING that is one of these */
    const char *help;
    double min, max; /* INT, REAL and BYTES; both 0: any */
    bool *given;     /* NULL, or set to true when the option was on the command line */
} option_spec;

typedef struct command {
    const char *name;
    const char *arguments; /* "" or "EXPR..." */
    const char *summary;   /* one line */
    const char *details;   /* a paragraph or two */
    const char *example;
    int (*run)(int argc, char **argv); /* argv[0] is the command's name; returns the exit status */
} command;

/* Parse.  Returns -1 to go on, or an exit status (0 after --help, 2 after an error, already told).  On -1 the
 * positional arguments are argv[1 .. *n_args], in order. options      n_options rows; several tables may be
 * joined by the caller max_args     how many positional arguments are allowed */
int options_parse(const command *c, const option_spec *options, int n_options, int argc, char **argv,
                  int max_args, int *n_args);

/* What every command that opens a model takes. */
typedef struct model_options {
    const char *model;
    int64_t step;
    const char *tokenizer;
    double softcap;
    const char *window_pattern, *rope_table;
    int64_t sequence_len, short_window;
    const char *precision;         /* "bf16" or "f32" */
    int64_t threads;               /* 0: cpu_count() */
    bool pin;                      /* each of them to a core */
    int64_t context;               /* 0: the model's */
    size_t kv_memory;              /* 0: a quarter of the free memory */
    int64_t max_rows, step_tokens; /* as engine_options; 0: engine_defaults() */
    bool no_prefix_cache;
} model_options;
model_options model_options_defaults(void);

/* Rows for a table, of a command that only needs the tokenizer: --model --step --tokenizer. */
enum { TOKENIZER_OPTION_ROWS = 3 };
int tokenizer_option_rows(model_options *m, option_spec *rows);

/* Rows for a table.  Write at most MODEL_OPTION_ROWS of them to `rows`; returns how many.
 * computes: also --precision --threads --pin --context --kv-memory, which commands that only read a
 * checkpoint lack. */
#define MODEL_OPTION_ROWS 16
int model_option_rows(model_options *m, bool computes, option_spec *rows);

/* The part that checkpoint_open takes. */
checkpoint_options model_checkpoint_options(const model_options *m);

/* The name among `n` that is nearest to `wrong` by edit distance; NULL if none is near: at most 2 edits away,
 * or a third of the length of `wrong`, and not all of it. */
const char *nearest_name(const char *wrong, const char *const names[], int n);

/* Print "coppice: <message>" to stderr and return `status`. */
int tell_error(const cop_error *err, int status);

#endif
