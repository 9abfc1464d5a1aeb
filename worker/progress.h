/* How far a long run is, on stderr: a bar on a terminal, a plain line every so often elsewhere.
 *
 *   generate  [=========>          ]  43 %  4,312 of 10,000 lines, 68,992 samples, 8,120 tokens/s, 1.3 GiB,
 * ETA 12:41
 *
 * One thread. */
#ifndef COP_PROGRESS_H
#define COP_PROGRESS_H

#include "kernels/base.h"

typedef struct progress_state {
    uint64_t lines, samples, tokens; /* done, those of earlier runs included */
    uint64_t n_lines;                /* of the whole; 0: not known */
} progress_state;

typedef struct progress progress;

/* `start`: what earlier runs did, which speed and ETA leave out.  quiet: nothing is printed.  NULL without
 * memory, which the others take as quiet. */
progress *progress_open(const char *what, const progress_state *start, bool quiet);
/* Tell the state as often as you like: it prints ten times a second on a terminal, else every 30 seconds. */
void progress_update(progress *p, const progress_state *now);
/* Print `line` (no line feed) on its own, with the bar below it, as warnings need. */
void progress_print(progress *p, const char *line);
/* Remove the bar, and print a last line that sums up. */
void progress_close(progress *p, const progress_state *end);

#endif
