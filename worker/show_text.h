/* Text of models and users on a terminal: in colours, and harmless.
 *
 * What a model wrote may hold escape sequences.  Nothing of it reaches the terminal but printable UTF-8, line
 * feeds and tabs: control characters, and those that turn the writing direction, are spelled out (\x1b,
 * \u{202e}), invalid UTF-8 becomes U+FFFD.  A colour ends before each line feed and begins anew behind it, so
 * that a pager may start at any line.  One thread. */
#ifndef COP_SHOW_TEXT_H
#define COP_SHOW_TEXT_H

#include <stdio.h>

#include "kernels/base.h"

typedef enum show_ink {
    SHOW_PLAIN,
    SHOW_HEAD,
    SHOW_SAMPLED, /* what the model drew */
    SHOW_FORCED,  /* what a tool put in its place */
    SHOW_ERROR,
    SHOW_N_INKS
} show_ink;

typedef struct show_page {
    FILE *out;
    bool colour; /* false: SHOW_FORCED stands between marks, the other inks are all alike */
} show_page;

/* Whether to colour `out`.  choice: "always", "never", or "auto": on a terminal, unless NO_COLOR is set or
 * TERM is "dumb". */
bool show_wants_colour(FILE *out, const char *choice);

/* n bytes as they would stand in a document; lines after the first begin with `indent` spaces. */
void show_text(const show_page *p, show_ink ink, const char *bytes, size_t n, int indent);
/* n bytes within one line and between quotes: line feeds and tabs are spelled out too, and invalid bytes one
 * by one. */
void show_quoted(const show_page *p, show_ink ink, const char *bytes, size_t n);
/* Around words of our own, which are harmless; within them SHOW_PLAIN changes nothing. */
void show_begin(const show_page *p, show_ink ink);
void show_end(const show_page *p, show_ink ink);

#endif
