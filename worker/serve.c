/* `coppice worker`: the service. */
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "proto/wire.h"
#include "worker/commands.h"
#include "worker/open_model.h"
#include "worker/service.h"

static int run(int argc, char **argv);

const command command_worker = {
    .name = "worker",
    .arguments = "",
    .summary = "serve rollouts over ZeroMQ",
    .details =
        "Loads a model, binds a socket and answers the requests of proto/README.md until SIGTERM or SIGINT.\n"
        "Requests in flight are then finished, for at most 15 seconds; a second signal ends it at once.",
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
    service_options s = {.bind = "tcp://127.0.0.1:5555", .max_message = WIRE_MAX_MESSAGE, .grace_sec = 15};
    option_spec rows[MODEL_OPTION_ROWS + 3] = {
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
         .help = "largest message after expansion"},
    };
    int n_args, n_rows = 3 + model_option_rows(&m, true, rows + 3);
    int status = options_parse(&command_worker, rows, n_rows, argc, argv, 0, &n_args);
    if (status >= 0) return status;

    if (s.max_message < 1024 || s.max_message > (size_t)1 << 32) {
        fprintf(stderr, "coppice worker: option \"--max-message\" is 1K to 4G\n");
        return 2;
    }

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
