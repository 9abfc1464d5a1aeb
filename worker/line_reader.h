/* The thread that reads the input of `coppice generate`, and tokenizes it, while the engine computes. */
#ifndef COP_LINE_READER_H
#define COP_LINE_READER_H

#include "worker/held_records.h"
#include "worker/line_job.h"
#include "worker/run_state.h"

typedef struct line_reader_options {
    line_rules rules;
    uint64_t index, of;   /* only lines with line % of == index */
    uint64_t next_line;   /* those below it are done */
    bool strict;          /* a bad line stops the run */
    bool tells_digest;    /* each job has the digest of the input so far */
    held_records *held;   /* what an earlier run has finished; taken line by line.  NULL: nothing */
    uint64_t known_lines; /* so many were read before, with this digest: they must be the same; 0: none */
    char known_digest[INPUT_DIGEST_CHARS];
} line_reader_options;

typedef struct line_reader line_reader;

/* Start the thread.  It puts line_jobs on `lines`, in order of line, at most `LINES_AHEAD` that were not
 * taken; the final one is marked last.  Lines that were known before are put when all of them have been read
 * and are the same.  in, lines and run are borrowed, and not used by others meanwhile but as the functions
 * below say.  Whatever fails stops the run. */
cop_status line_reader_open(line_reader **out, const line_reader_options *o, input_file *in, queue *lines,
                            run_state *run, cop_error *err);
enum { LINES_AHEAD = 512 };

/* The taker of the queue tells that it took one. */
void line_reader_taken(line_reader *r);

/* Wait for the thread to end, which it does after the last line or soon after the run was stopped. */
void line_reader_close(line_reader *r); /* NULL does nothing */

#endif
