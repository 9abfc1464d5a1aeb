/* How far a long run is, on stderr: a bar on a terminal, a plain line every so often elsewhere.
 *
 *   generate  [=====>   ]  43 %  4,312 of 10,000 lines, 68,992 samples, 8,120 tokens/s, 1.3 GiB, ETA 12:41
 *
 * Speed is that of the last seconds, the ETA follows from the lines of the last minutes; both leave out what
 * earlier runs did.  Where the whole is not known there is no bar, percent or ETA.  Memory is what is
 * resident.  A line never wraps: on a narrow terminal the least important parts go.  TERM=dumb or none is no
 * terminal.
 *
 * One thread. */
#ifndef COP_PROGRESS_H
#define COP_PROGRESS_H

#include "kernels/base.h"

typedef struct progress_state {
    uint64_t lines, samples, tokens; /* done, those of earlier runs included; they never go back */
    uint64_t n_lines;                /* of the whole; 0: not known */
} progress_state;

typedef struct progress progress;

/* what: a short ASCII name, copied.  start: what earlier runs did.  quiet: nothing is printed.  NULL without
 * memory, which the others take as quiet.  Ends with progress_close(). */
progress *progress_open(const char *what, const progress_state *start, bool quiet);
/* Tell the state as often as you like: it prints at once the first time, then at most ten times a second on a
 * terminal, else every 30 seconds. */
void progress_update(progress *p, const progress_state *now);
/* Print `line` (no line feed) on its own, with the bar below it, as warnings need. */
void progress_print(progress *p, const char *line);
/* Remove the bar, and print a last line that sums up. */
void progress_close(progress *p, const progress_state *end);

#endif
