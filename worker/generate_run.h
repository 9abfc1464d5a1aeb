/* The run of `coppice generate`: three threads from lines to records.
 *
 *   reading thread --- lines ---> this thread: the engine --- finished ---> writing thread
 *   line_reader.h                 submit, step                              line_output.h
 */
#ifndef COP_GENERATE_RUN_H
#define COP_GENERATE_RUN_H

#include "worker/line_output.h"
#include "worker/line_reader.h"
#include "worker/open_model.h"

typedef struct generate_plan {
    const open_model *model;
    rollout_sampling sampling;
    int most_rows; /* of the engine: twice as many samples are in flight, so that it has always some to start
                    */
    bool text;     /* decode samples: for the output, or for a reward program */
    line_reader_options reading;
    line_output_options writing;
} generate_plan;

/* Run it to its end, or until `*interrupted` is not 0 (set by a signal handler).  `tally` as
 * line_output_open().  The caller closes the input and the data set.  On failure *result is what was written
 * all the same. */
cop_status generate_run(const generate_plan *plan, input_file *in, reward_tally *tally,
                        const volatile int *interrupted, line_output_result *result, cop_error *err);

#endif
