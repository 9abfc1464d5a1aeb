/* The thread that writes what `coppice generate` made, while the engine goes on: it puts lines back into
 * order, has their samples judged, and appends records to a data set, or prints them as JSON Lines.
 *
 *   finished --> judged: waits for rewards --> sealed: waits for older lines --> data set, or stdout
 *                                                   \-> held.zst, every so often (held_records.h)
 *
 * What waits here is bounded by whoever finishes lines: run_state.held_bytes tells how much it is. */
#ifndef COP_LINE_OUTPUT_H
#define COP_LINE_OUTPUT_H

#include <stdio.h>

#include "worker/answer.h"
#include "worker/dataset.h"
#include "worker/line_job.h"
#include "worker/progress.h"
#include "worker/reward.h"
#include "worker/run_state.h"

/* What the rewards of a run come to. */
typedef struct reward_tally {
    pass_counts pass;
    uint64_t n_prompts, n_rewards; /* prompts with a reward, rewards */
    double sum, sum_best;          /* of all rewards; of each prompt's best */
} reward_tally;

void reward_tally_add(reward_tally *t, const double *rewards, size_t n);

/* The rewards of a record that has some, as a new array (mem_free); NaN for nil.  False without memory. */
bool record_rewards(double **out, size_t *n, const shard_view *record);

/* What the manifest tells of the input: lines, their digest, and whether that is all of it.  NULL without
 * memory. */
json_t *input_note(uint64_t n_lines, const char *digest, bool whole);

typedef struct line_output_options {
    dataset_writer *dataset; /* NULL: JSON Lines to `out` */
    const char *dir;         /* its folder */
    size_t
        n_held; /* lines that come with a record of an earlier run: until all have, held.zst stays as it is */
    uint64_t n_lines_noted; /* of the input, in its manifest */
    FILE *out;
    const tokenizer *tokenizer;
    bool text;        /* keep the decoded text of samples that have one */
    bool answers;     /* judge by the line's `answer` */
    reward *program;  /* or by this; NULL: not */
    uint32_t keep;    /* so many of the best samples; 0: all */
    bool notes_input; /* note in the manifest how much of the input was used, as it grows */
    uint64_t n_lines; /* of the whole output, for the progress; 0: not known */
    bool quiet;
} line_output_options;

typedef struct line_output_result {
    dataset_counts counts; /* of the whole output, earlier runs included */
    size_t n_held;         /* further lines that are finished, but wait for older ones */
    bool complete;         /* all lines are written */
    bool suspect;          /* rewards in the data set belong to other samples */
    cop_error rest; /* of an interrupted run, why what was finished could not be saved; COP_OK: it is */
} line_output_result;

typedef struct line_output line_output;

/* Start the thread.  It takes line_jobs from `finished`: each order once, in any order, and the job marked
 * last behind all.  All is borrowed.  `tally` has what earlier runs came to (may be NULL if nothing is
 * judged). Whatever fails stops the run; if it was stopped, what was finished is written as far as it is in
 * order. */
cop_status line_output_open(line_output **out, const line_output_options *o, queue *finished, run_state *run,
                            reward_tally *tally, cop_error *err);
bool line_output_ended(const line_output *w); /* it has come to its end, and waits for nothing more */
/* Wait for its end, after the last job or after the run was stopped.  NULL does nothing. */
line_output_result line_output_close(line_output *w);

#endif
