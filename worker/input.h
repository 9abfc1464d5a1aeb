/* Lines of an input: a file or stdin, plain or compressed with Zstandard.  One thread, but for
 * input_interrupt().
 *
 * Its first bytes tell which: a Zstandard or a skippable frame starts with its magic number.  Frames follow
 * each other without anything between; a window larger than 128 MiB is refused.  An input that stops inside a
 * frame is an error after its last whole line, never a shorter input; so is one that is named .zst and stops
 * before its first magic number is whole.  What a pipe or a terminal has is given at once. */
#ifndef COP_INPUT_H
#define COP_INPUT_H

#include "kernels/base.h"

typedef struct input_file input_file;

/* path: a file's, or "-" for stdin.  COP_EIO, COP_ENOMEM. */
cop_status input_open(input_file **out, const char *path, cop_error *err);
void input_close(input_file *in); /* NULL does nothing */

/* A line without its line feed (the last one may lack it); a carriage return before it stays.  The bytes are
 * valid until the next call. */
typedef struct input_line {
    const char *bytes;
    size_t n;
    uint64_t number;   /* from 0; every line counts, blank ones too */
    cop_status status; /* COP_ETOOLARGE beyond JSONL_MAX_LINE, COP_ENOMEM: the line was skipped, n is 0 */
    bool terminated;   /* it ended with a line feed, not with the input */
    bool blank;        /* nothing but spaces, tabs and carriage returns */
} input_line;

/* The next line; *more is false at the end and on an error.  COP_EIO, COP_EFORMAT (a torn or broken Zstandard
 * frame), COP_ENOMEM (nothing can be expanded); every later call then fails alike. */
cop_status input_next(input_file *in, input_line *line, bool *more, cop_error *err);

/* Let input_next() wait no longer: the input ends with what was read.  Any thread. */
void input_interrupt(input_file *in);

#define INPUT_DIGEST_CHARS 33
/* XXH3-128, in hex, of all bytes (expanded, line feeds included) of the lines that input_next() gave, those
 * that it skipped too. */
void input_digest(const input_file *in, char hex[INPUT_DIGEST_CHARS]);
uint64_t input_lines(const input_file *in); /* how many it gave */

#endif
