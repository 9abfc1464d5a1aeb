/* Stop strings: which of a rollout's strings the bytes of a completion complete.
 *
 * A stop_set is built once per rollout and is immutable after that; any thread.  Each sample follows it with
 * a stop_match of its own, which is a few bytes and owns nothing: bytes go in as tokens come, a match may
 * cross their borders, and feeding one byte takes amortised constant time per string, however nearly the
 * bytes match. */
#ifndef COP_STOP_H
#define COP_STOP_H

#include "kernels/base.h"

#define STOP_MAX_STRINGS 16
#define STOP_MAX_BYTES 256

typedef struct stop_string {
    const char *bytes;
    size_t n; /* 1 to STOP_MAX_BYTES */
} stop_string;

typedef struct stop_set stop_set;

/* How much of each string the bytes so far end with.  Zeroed: no bytes yet. */
typedef struct stop_match {
    uint16_t n_matched[STOP_MAX_STRINGS];
} stop_match;

/* Copy n strings, 1 to STOP_MAX_STRINGS.  Errors: COP_ENOMEM; *out is then NULL. */
cop_status stop_open(stop_set **out, const stop_string *strings, size_t n, cop_error *err);
void stop_close(stop_set *s);

/* Feed n bytes, all of them.  The index of the string that they complete, or -1: of several the one that ends
 * first, of those that end together the longest, of equal ones the first. */
int stop_feed(const stop_set *s, stop_match *m, const char *bytes, size_t n);

/* A string of the set; valid until it is closed. */
stop_string stop_get(const stop_set *s, int index);

#endif
