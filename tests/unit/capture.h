/* For tests: what a call prints on stdout or stderr, as a string. */
#ifndef COP_TEST_CAPTURE_H
#define COP_TEST_CAPTURE_H

#include <assert.h>
#include <stdio.h>
#include <unistd.h>

typedef struct capture {
    FILE *stream, *file;
    int saved;
    char text[16384];
} capture;

static inline void capture_start(capture *c, FILE *stream) {
    fflush(stream);
    c->stream = stream;
    c->file = tmpfile();
    assert(c->file);
    c->saved = dup(fileno(stream));
    dup2(fileno(c->file), fileno(stream));
}

/* Ends it; the text stays in c->text. */
static inline const char *capture_stop(capture *c) {
    fflush(c->stream);
    dup2(c->saved, fileno(c->stream));
    close(c->saved);
    rewind(c->file);
    size_t n = fread(c->text, 1, sizeof c->text - 1, c->file);
    c->text[n] = '\0';
    fclose(c->file);
    return c->text;
}

#endif
