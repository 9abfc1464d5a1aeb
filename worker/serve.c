/* `coppice worker`: the service. */
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "proto/wire.h"
#include "worker/commands.h"
#include "worker/open_model.h"
#include "worker/service.h"
#include "worker/updater.h"

static int run(int argc, char **argv);

const command command_worker = {
    .name = "worker",
    .arguments = "",
    .summary = "serve rollouts over ZeroMQ",
    .details =
        "Loads a model, binds a socket and answers the requests of proto/README.md until SIGTERM or SIGINT.\n"
        "Requests in flight are then finished, for at most --grace seconds; a second signal ends it at once.",
    .example = "coppice worker --model tests/models/calc-d4 --bind tcp://127.0.0.1:5555",
    .run = run,
};

/* The last part of a path, trailing slashes aside. */
static void name_of(char *name, size_t size, const char *path) {
    size_t end = strlen(path);
    while (end > 1 && path[end - 1] == '/') end--;
    size_t begin = end;
    while (begin > 0 && path[begin - 1] != '/') begin--;
    snprintf(name, size, "%.*s", (int)(end - begin), path + begin);
}

static int run(int argc, char **argv) {
    model_options m = model_options_defaults();
    service_options s = {.bind = "tcp://127.0.0.1:5555",
                         .max_message = WIRE_MAX_MESSAGE,
                         .max_backlog = WIRE_MAX_MESSAGE,
                         .keep_bytes = (size_t)1 << 30,
                         .keep_results_sec = 600,
                         .weights_silence_sec = UPDATER_SILENCE_SEC,
                         .step_timeout_sec = 300,
                         .grace_sec = 15};
    m.max_rows = engine_defaults().max_rows;
    m.step_tokens = engine_defaults().step_tokens;
    int64_t max_queue = 1000;
    enum { N_ROWS = 14 };
    option_spec rows[MODEL_OPTION_ROWS + N_ROWS] = {
        {.name = "bind",
         .kind = OPTION_STRING,
         .value = &s.bind,
         .arg = "ENDPOINT",
         .help = "where to listen; port 0 takes a free one"},
        {.name = "endpoint-file",
         .kind = OPTION_STRING,
         .value = &s.endpoint_file,
         .arg = "PATH",
         .help = "write the endpoint in use there"},
        {.name = "max-message",
         .kind = OPTION_BYTES,
         .value = &s.max_message,
         .arg = "BYTES",
         .min = 1 << 10,
         .max = (double)((size_t)4 << 30),
         .help = "largest message after expansion"},
        {.name = "max-backlog",
         .kind = OPTION_BYTES,
         .value = &s.max_backlog,
         .arg = "BYTES",
         .min = 64 << 10,
         .max = (double)((size_t)1 << 40),
         .help = "replies that a client may leave unread; its requests wait beyond that"},
        {.name = "keep-bytes",
         .kind = OPTION_BYTES,
         .value = &s.keep_bytes,
         .arg = "BYTES",
         .min = 64 << 10,
         .max = (double)((size_t)1 << 40),
         .help = "results that wait, of all clients: to be sent with others (deliver), to be read, or to be "
                 "asked for again"},
        {.name = "keep-results",
         .kind = OPTION_REAL,
         .value = &s.keep_results_sec,
         .arg = "SECONDS",
         .min = 0,
         .max = 1e9,
         .help = "after the end of a rollout, until its results are dropped without an ack"},
        {.name = "weights-silence",
         .kind = OPTION_REAL,
         .value = &s.weights_silence_sec,
         .arg = "SECONDS",
         .min = 0.1,
         .max = 1e9,
         .help = "of who sends new weights, until they are given up"},
        {.name = "weights-dir",
         .kind = OPTION_STRING,
         .value = &s.weights_dir,
         .arg = "PATH",
         .help = "folder that new weights must lie in; default: anywhere"},
        {.name = "max-queue",
         .kind = OPTION_INT,
         .value = &max_queue,
         .arg = "N",
         .min = 1,
         .max = 1000000,
         .help = "requests that wait to be started; further ones are refused as overloaded"},
        {.name = "max-rows",
         .kind = OPTION_INT,
         .value = &m.max_rows,
         .arg = "N",
         .min = 1,
         .max = 65536,
         .help = "samples that run at once; further ones wait"},
        {.name = "step-tokens",
         .kind = OPTION_INT,
         .value = &m.step_tokens,
         .arg = "N",
         .min = 1,
         .max = 65536,
         .help = "prompt and forced tokens that a step computes at most, so that rows do not wait for long"},
        {.name = "no-prefix-cache",
         .kind = OPTION_FLAG,
         .value = &m.no_prefix_cache,
         .help = "compute every prompt anew, also where it begins like an earlier one"},
        {.name = "step-timeout",
         .kind = OPTION_REAL,
         .value = &s.step_timeout_sec,
         .arg = "SECONDS",
         .min = 0.01,
         .max = 1e6,
         .help = "a step that takes longer ends the worker with status 3"},
        {.name = "grace",
         .kind = OPTION_REAL,
         .value = &s.grace_sec,
         .arg = "SECONDS",
         .min = 0,
         .max = 1e6,
         .help = "after SIGTERM, until what still runs is cancelled"},
    };
    int n_args, n_rows = N_ROWS + model_option_rows(&m, true, rows + N_ROWS);
    int status = options_parse(&command_worker, rows, n_rows, argc, argv, 0, &n_args);
    if (status >= 0) return status;

    s.max_queue = (int)max_queue;

    /* Before any thread starts, so that all of them inherit it. */
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    pthread_sigmask(SIG_BLOCK, &set, NULL);

    cop_error err;
    open_model model;
    if (open_model_init(&model, &m, &err) != COP_OK) return tell_error(&err, 1);
    char name[256];
    name_of(name, sizeof name, m.model);
    s.model = name;
    cop_status served = service_run(model.engine, model.tokenizer, &s, &err);
    open_model_free(&model);
    return served == COP_OK ? 0 : tell_error(&err, 1);
}
