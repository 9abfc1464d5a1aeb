/* How progress lines read, apart from terminals and clocks; for progress.c and its tests. */
#ifndef COP_PROGRESS_INTERNAL_H
#define COP_PROGRESS_INTERNAL_H

#include <stdio.h>

#include "worker/progress.h"

enum { PROGRESS_LINE_BYTES = 512 };

/* What one line tells. */
typedef struct progress_view {
    const char *what;
    progress_state now;
    double tokens_per_second; /* < 0: not known yet */
    double eta_seconds;       /* < 0: not known */
    size_t rss_bytes;         /* 0: not known */
    int columns;              /* of the terminal; 0: no terminal, no bar and no limit */
} progress_view;

/* The line, without a line feed.  On a terminal it stays below `columns`, so that it never wraps: the bar
 * shrinks first; then go, one after the other, memory, samples, the bar, the speed, the count of lines, the
 * name, the ETA and the percent.  Texts are ASCII. */
void progress_format(char line[PROGRESS_LINE_BYTES], const progress_view *v);

/* The last line: what there is, and what this run added to `start` within `seconds`. */
void progress_format_end(char line[PROGRESS_LINE_BYTES], const char *what, const progress_state *start,
                         const progress_state *end, double seconds);

/* A rate over the recent past: what is older than `memory_seconds` has faded to 1/e. */
typedef struct progress_rate {
    double memory_seconds, amount, seconds;
} progress_rate;
void progress_rate_add(progress_rate *r, double amount, double seconds);
double progress_rate_per_second(const progress_rate *r); /* < 0 within the first second */

/* progress_open() and progress_update() with another stream and clock; `seconds` never goes back. */
progress *progress_open_at(FILE *out, const char *what, const progress_state *start, double seconds);
void progress_update_at(progress *p, const progress_state *now, double seconds);

#endif
