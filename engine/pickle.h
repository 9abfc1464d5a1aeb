/* A safe subset of Python's pickle: it builds a tree of plain values and never calls anything.
 *
 * Protocols 2 to 5.  A GLOBAL or STACK_GLOBAL is accepted only if the caller lists it; REDUCE and NEWOBJ on a
 * listed global give a PICKLE_OBJECT that records callee, arguments and BUILD state; the caller interprets
 * it.  Everything else is refused with the offending opcode or name and its offset (NANOCHAT.md 4.3).  The
 * tree is acyclic; shared values are shared.  Nodes live as long as the pickle.  Immutable after pickle_read;
 * any thread. */
#ifndef COP_PICKLE_H
#define COP_PICKLE_H

#include "kernels/base.h"

typedef enum pickle_kind {
    PICKLE_NONE,
    PICKLE_BOOL,
    PICKLE_INT, /* within int64 */
    PICKLE_FLOAT,
    PICKLE_BYTES,
    PICKLE_STR, /* valid UTF-8, may hold NUL */
    PICKLE_TUPLE,
    PICKLE_LIST,
    PICKLE_DICT,   /* items alternate key, value; n_items counts both */
    PICKLE_GLOBAL, /* text is "module name", as in the caller's list */
    PICKLE_OBJECT, /* callee(*args), with `state` if a BUILD followed; an OrderedDict() is one, its SETITEMS
                      in items */
    PICKLE_PERSID  /* args[0] is the persistent id */
} pickle_kind;

typedef struct pickle_value pickle_value;
struct pickle_value {
    pickle_kind kind;
    int64_t integer; /* BOOL, INT */
    double real;
    const char *text; /* STR, BYTES: text_len bytes, NUL-terminated besides; GLOBAL */
    size_t text_len;
    const pickle_value **items; /* TUPLE, LIST, DICT; OBJECT: key, value, ... set on it */
    size_t n_items;
    const pickle_value *callee; /* OBJECT: a GLOBAL */
    const pickle_value *args;   /* OBJECT: a TUPLE; PERSID: the id */
    const pickle_value *state;  /* OBJECT: the BUILD argument, or NULL */
};

typedef struct pickle pickle;

/* Parse `n` bytes.
 *   globals  NULL-terminated list of allowed "module name" pairs, such as "collections OrderedDict".
 * Limits: depth 64, 16 million nodes, everything bounded by n before it is allocated.  Bytes after STOP are
 * ignored. Errors: COP_EFORMAT (malformed), COP_EUNSUPPORTED (a refused opcode or global), COP_ENOMEM; *out
 * is then NULL. */
cop_status pickle_read(pickle **out, const uint8_t *bytes, size_t n, const char *const globals[],
                       cop_error *err);
void pickle_close(pickle *p);
const pickle_value *pickle_root(const pickle *p);

/* The value under a string key of a DICT (or an OBJECT's items), or NULL. */
const pickle_value *pickle_get(const pickle_value *dict, const char *key);

#endif
