/* The subcommands; each is a file of its own in worker/. */
#ifndef COP_COMMANDS_H
#define COP_COMMANDS_H

#include "worker/options.h"

extern const command command_calc;
extern const command command_worker;
extern const command command_generate;
extern const command command_merge;
extern const command command_score;
extern const command command_tokenize;
extern const command command_detokenize;
extern const command command_inspect;
extern const command command_bench;
extern const command command_show;
extern const command command_export;

#endif
