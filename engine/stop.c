/* Knuth, Morris and Pratt's matcher, one per string.
 *
 * back[i] is how much of the string its first i bytes end with, themselves as a whole aside: what is still
 * matched where the next byte fails, and after a whole match, so that one may begin within another.
 *
 *   string   a b a b c            after "abab" comes "a": not c, but back[4] is 2,
 *   back   0 0 0 1 2 0            and "ab" goes on with "a"
 */
#include "engine/stop.h"

#include <assert.h>
#include <string.h>

typedef struct pattern {
    size_t n;
    char bytes[STOP_MAX_BYTES];
    uint16_t back[STOP_MAX_BYTES + 1];
} pattern;

struct stop_set {
    size_t n;
    pattern patterns[];
};

/* How much is matched once `byte` follows `matched` bytes, not all of the string.  Each step back undoes a
 * byte that was matched before, so that there are never more of them than bytes fed. */
static size_t follow(const pattern *p, size_t matched, char byte) {
    while (matched > 0 && p->bytes[matched] != byte) matched = p->back[matched];
    return p->bytes[matched] == byte ? matched + 1 : 0;
}

static void set_pattern(pattern *p, stop_string string) {
    assert(string.n >= 1 && string.n <= STOP_MAX_BYTES);
    p->n = string.n;
    memcpy(p->bytes, string.bytes, string.n);
    p->back[0] = p->back[1] = 0;
    for (size_t i = 1; i < p->n; i++) p->back[i + 1] = (uint16_t)follow(p, p->back[i], p->bytes[i]);
}

cop_status stop_open(stop_set **out, const stop_string *strings, size_t n, cop_error *err) {
    assert(n >= 1 && n <= STOP_MAX_STRINGS);
    stop_set *s = mem_alloc(1, sizeof *s + n * sizeof s->patterns[0]);
    *out = s;
    if (!s) return cop_fail(err, COP_ENOMEM, "could not copy %zu stop strings", n);
    s->n = n;
    for (size_t i = 0; i < n; i++) set_pattern(&s->patterns[i], strings[i]);
    return COP_OK;
}

void stop_close(stop_set *s) { mem_free(s); }

/* Feed one byte; the longest string that it completes, or -1. */
static int feed_byte(const stop_set *s, stop_match *m, char byte) {
    int hit = -1;
    for (size_t i = 0; i < s->n; i++) {
        const pattern *p = &s->patterns[i];
        size_t matched = follow(p, m->n_matched[i], byte);
        if (matched == p->n) {
            if (hit < 0 || p->n > s->patterns[hit].n) hit = (int)i;
            matched = p->back[matched];
        }
        m->n_matched[i] = (uint16_t)matched;
    }
    return hit;
}

int stop_feed(const stop_set *s, stop_match *m, const char *bytes, size_t n) {
    int first = -1;
    for (size_t i = 0; i < n; i++) {
        int hit = feed_byte(s, m, bytes[i]);
        if (first < 0) first = hit;
    }
    return first;
}

stop_string stop_get(const stop_set *s, int index) {
    assert(index >= 0 && (size_t)index < s->n);
    return (stop_string){s->patterns[index].bytes, s->patterns[index].n};
}
