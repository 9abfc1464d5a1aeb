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

static const command *find_command(const char *name) {
    for (int i = 0; i < N_COMMANDS; i++) {
        if (!strcmp(name, commands[i]->name)) return commands[i];
    }
    return NULL;
}

static int unknown_command(const char *name) {
    const char *names[N_COMMANDS];
    for (int i = 0; i < N_COMMANDS; i++) names[i] = commands[i]->name;
    const char *nearest = nearest_name(name, names, N_COMMANDS);
    fprintf(stderr, "coppice: unknown command \"%s\": ", name);
    if (nearest)
        fprintf(stderr, "did you mean \"%s\"?\n", nearest);
    else
        fprintf(stderr, "`coppice --help` lists them\n");
    return 2;
}

/* `coppice help COMMAND` */
static int help_with(const char *name) {
    const command *c = find_command(name);
    return c ? c->run(2, (char *[]){(char *)c->name, (char *)"--help", NULL}) : unknown_command(name);
}

int main(int argc, char **argv) {
    if (argc < 2) {
        print_help(stderr);
        return 2;
    }
    if (!strcmp(argv[1], "help") && argc > 2) return help_with(argv[2]);
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") || !strcmp(argv[1], "help")) {
        print_help(stdout);
        return 0;
    }
    if (!strcmp(argv[1], "--version")) {
        print_version();
        return 0;
    }
    const command *c = find_command(argv[1]);
    return c ? c->run(argc - 1, argv + 1) : unknown_command(argv[1]);
}
