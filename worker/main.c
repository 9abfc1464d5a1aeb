/* coppice: one program with subcommands. */
#include "worker/commands.h"

#include <stdio.h>
#include <string.h>

/* In the order in which `coppice --help` shows them. */
static const command *const commands[] = {
    &command_worker, &command_generate, &command_merge,      &command_score,
    &command_calc,   &command_tokenize, &command_detokenize, &command_inspect,
    &command_bench,  &command_show,     &command_export,
};
enum { N_COMMANDS = sizeof commands / sizeof commands[0] };

static void print_help(FILE *out) {
    fprintf(out, "usage: coppice COMMAND [options]\n\n");
    for (int i = 0; i < N_COMMANDS; i++)
        fprintf(out, "  %-12s %s\n", commands[i]->name, commands[i]->summary);
    fprintf(out, "\n`coppice COMMAND --help` explains a command; `coppice --version` tells what this is.\n");
}

static void print_version(void) {
    cpu_isa isa;
    cop_error err;
    const char *name = cpu_isa_pick(&isa, &err) == COP_OK ? cpu_isa_name(isa) : "unknown";
#ifdef __clang__
    const char *compiler = "clang " __clang_version__;
#else
    const char *compiler = "gcc " __VERSION__;
#endif
    printf("coppice %s, protocol 1, %s, cpu %s, no CUDA\n", COP_VERSION, compiler, name);
}

int main(int argc, char **argv) {
    if (argc < 2) {
        print_help(stderr);
        return 2;
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") || !strcmp(argv[1], "help")) {
        print_help(stdout);
        return 0;
    }
    if (!strcmp(argv[1], "--version")) {
        print_version();
        return 0;
    }
    for (int i = 0; i < N_COMMANDS; i++) {
        if (!strcmp(argv[1], commands[i]->name)) return commands[i]->run(argc - 1, argv + 1);
    }
    const char *names[N_COMMANDS];
    for (int i = 0; i < N_COMMANDS; i++) names[i] = commands[i]->name;
    fprintf(stderr, "coppice: unknown command \"%s\": did you mean \"%s\"?\n", argv[1],
            nearest_name(argv[1], names, N_COMMANDS));
    return 2;
}
