/* A safe subset of Python's pickle.
 *
 * One loop over opcodes with an explicit stack: no recursion, so depth costs no C stack.  All values live in
 * an arena that only grows; what it holds is proportional to the input, since every node, item and text byte
 * is paid for by at least one byte of it.
 *
 * Why the result is acyclic: putting a value into a container seals it, and a sealed container takes nothing
 * more.  The edge that would close a cycle leads out of a container that is already inside another one, hence
 * sealed.  Python's own pickles fill a container before they use it, but for recursive ones, which no
 * checkpoint needs. */
#include "engine/pickle.h"

#include <assert.h>
#include <ctype.h>
#include <stdio.h>
#include <string.h>

enum {
    MAX_DEPTH = 64,
    MAX_MARKS = 4 * MAX_DEPTH,
    MAX_NODES = 16 << 20,
    FIRST_CHUNK = 4 << 10,
    MAX_CHUNK = 1 << 20
};

/* Every opcode of protocols 0 to 5, for messages; those that the machine knows are the cases of execute(). */
/* clang-format off */
#define OPCODES(X)                                                                                           \
    X(MARK, '(') X(STOP, '.') X(POP, '0') X(POP_MARK, '1') X(DUP, '2') X(FLOAT, 'F') X(INT, 'I')             \
    X(BININT, 'J') X(BININT1, 'K') X(LONG, 'L') X(BININT2, 'M') X(NONE, 'N') X(PERSID, 'P')                  \
    X(BINPERSID, 'Q') X(REDUCE, 'R') X(STRING, 'S') X(BINSTRING, 'T') X(SHORT_BINSTRING, 'U')                \
    X(UNICODE, 'V') X(BINUNICODE, 'X') X(APPEND, 'a') X(BUILD, 'b') X(GLOBAL, 'c') X(DICT, 'd')              \
    X(EMPTY_DICT, '}') X(APPENDS, 'e') X(GET, 'g') X(BINGET, 'h') X(INST, 'i') X(LONG_BINGET, 'j')           \
    X(LIST, 'l') X(EMPTY_LIST, ']') X(OBJ, 'o') X(PUT, 'p') X(BINPUT, 'q') X(LONG_BINPUT, 'r')               \
    X(SETITEM, 's') X(TUPLE, 't') X(EMPTY_TUPLE, ')') X(SETITEMS, 'u') X(BINFLOAT, 'G') X(BINBYTES, 'B')     \
    X(SHORT_BINBYTES, 'C') X(PROTO, 0x80) X(NEWOBJ, 0x81) X(EXT1, 0x82) X(EXT2, 0x83) X(EXT4, 0x84)          \
    X(TUPLE1, 0x85) X(TUPLE2, 0x86) X(TUPLE3, 0x87) X(NEWTRUE, 0x88) X(NEWFALSE, 0x89) X(LONG1, 0x8a)        \
    X(LONG4, 0x8b) X(SHORT_BINUNICODE, 0x8c) X(BINUNICODE8, 0x8d) X(BINBYTES8, 0x8e) X(EMPTY_SET, 0x8f)      \
    X(ADDITEMS, 0x90) X(FROZENSET, 0x91) X(NEWOBJ_EX, 0x92) X(STACK_GLOBAL, 0x93) X(MEMOIZE, 0x94)           \
    X(FRAME, 0x95) X(BYTEARRAY8, 0x96) X(NEXT_BUFFER, 0x97) X(READONLY_BUFFER, 0x98)
/* clang-format on */

#define OPCODE_ENUM(name, byte) OP_##name = byte,
enum { OPCODES(OPCODE_ENUM) };

static const char *opcode_name(uint8_t op) {
#define OPCODE_NAME(name, byte)                                                                              \
    case byte: return #name;
    switch (op) { OPCODES(OPCODE_NAME) }
    return NULL;
}

typedef struct node {
    pickle_value v; /* first, so that a pickle_value of ours is a node */
    size_t cap;     /* of v.items */
    int depth;      /* 1 for a leaf */
    bool sealed;    /* is part of another value; takes nothing more */
} node;

typedef struct chunk {
    struct chunk *next;
    size_t used, size;
    max_align_t data[];
} chunk;

struct pickle {
    chunk *chunks; /* the newest first */
    const pickle_value *root;
};

typedef struct machine {
    pickle *p;
    const uint8_t *bytes;
    size_t n, pos, op_pos; /* op_pos: of the opcode that is being executed */
    const char *const *globals;
    node **stack;
    size_t n_stack, stack_cap;
    size_t marks[MAX_MARKS]; /* n_stack when the MARK was met */
    size_t n_marks;
    node **memo;                       /* NULL: not set */
    size_t n_memo, memo_len, memo_cap; /* n_memo are set, all below memo_len */
    size_t n_nodes;
    cop_status status; /* the first failure sticks; everything after it does nothing */
    cop_error *err;
} machine;

#define fail(m, status_, ...)                                                                                \
    ((m)->status ? (m)->status : ((m)->status = cop_fail((m)->err, status_, __VA_ARGS__)))

static cop_status no_memory(machine *m) {
    return fail(m, COP_ENOMEM, "out of memory for the pickle's values");
}

/* ---- The arena. */

static void *arena_take(machine *m, size_t n_bytes) {
    size_t unit = _Alignof(max_align_t);
    assert(n_bytes <= SIZE_MAX - sizeof(chunk) - unit);
    n_bytes = (n_bytes + unit - 1) / unit * unit;
    chunk *c = m->p->chunks;
    if (!c || c->size - c->used < n_bytes) {
        size_t size = !c ? FIRST_CHUNK : c->size < MAX_CHUNK ? 2 * c->size : MAX_CHUNK;
        if (size < n_bytes) size = n_bytes;
        chunk *fresh = mem_alloc(1, sizeof *fresh + size);
        if (!fresh) {
            no_memory(m);
            return NULL;
        }
        *fresh = (chunk){.next = c, .size = size};
        m->p->chunks = c = fresh;
    }
    void *p = (char *)c->data + c->used;
    c->used += n_bytes;
    return p;
}

static node *node_new(machine *m, pickle_kind kind) {
    if (m->status) return NULL;
    if (m->n_nodes++ >= MAX_NODES) {
        fail(m, COP_EFORMAT, "more than %d values in the pickle", MAX_NODES);
        return NULL;
    }
    node *x = arena_take(m, sizeof *x);
    if (x) *x = (node){.v.kind = kind, .depth = 1};
    return x;
}

/* Put child into parent's keeping. */
static void adopt(machine *m, node *parent, node *child) {
    if (child == parent) {
        fail(m, COP_EFORMAT, "a value that contains itself, at byte %zu", m->op_pos);
        return;
    }
    child->sealed = true;
    if (parent->depth <= child->depth) parent->depth = child->depth + 1;
    if (parent->depth > MAX_DEPTH)
        fail(m, COP_EFORMAT, "values nested deeper than %d, at byte %zu", MAX_DEPTH, m->op_pos);
}

/* Append `n` values to parent's items. */
static void add_items(machine *m, node *parent, node *const *children, size_t n) {
    if (!m->status && parent->sealed)
        fail(m, COP_EFORMAT, "a container that changes after its use, at byte %zu", m->op_pos);
    for (size_t i = 0; i < n && !m->status; i++) adopt(m, parent, children[i]);
    if (m->status) return;
    if (n > parent->cap - parent->v.n_items) {
        size_t cap = 2 * parent->cap;
        if (cap < parent->v.n_items + n) cap = parent->v.n_items + n;
        const pickle_value **items = arena_take(m, cap * sizeof *items);
        if (!items) return;
        if (parent->v.n_items) memcpy(items, parent->v.items, parent->v.n_items * sizeof *items);
        parent->v.items = items;
        parent->cap = cap;
    }
    for (size_t i = 0; i < n; i++) parent->v.items[parent->v.n_items++] = &children[i]->v;
}

/* ---- Input. */

/* The next n bytes, or NULL. */
static const uint8_t *take(machine *m, uint64_t n) {
    if (m->status) return NULL;
    if (n > m->n - m->pos) {
        fail(m, COP_EFORMAT, "the pickle is cut off: byte %zu asks for %llu more, %zu are left", m->op_pos,
             (unsigned long long)n, m->n - m->pos);
        return NULL;
    }
    const uint8_t *p = m->bytes + m->pos;
    m->pos += (size_t)n;
    return p;
}

/* A little-endian unsigned number of `n` <= 8 bytes; 0 after a failure. */
static uint64_t take_number(machine *m, size_t n) {
    const uint8_t *p = take(m, n);
    uint64_t x = 0;
    for (size_t i = 0; p && i < n; i++) x |= (uint64_t)p[i] << (8 * i);
    return x;
}

/* A signed one. */
static int64_t take_signed(machine *m, size_t n) {
    uint64_t x = take_number(m, n);
    if (n > 0 && n < 8 && x >> (8 * n - 1)) x |= ~(uint64_t)0 << (8 * n);
    return (int64_t)x;
}

/* Bytes up to a newline, which is dropped. */
static const char *take_line(machine *m, size_t *len) {
    const uint8_t *start = m->bytes + m->pos;
    const uint8_t *end = m->n > m->pos ? memchr(start, '\n', m->n - m->pos) : NULL;
    if (!end) {
        fail(m, COP_EFORMAT, "the pickle is cut off within the name at byte %zu", m->op_pos);
        return NULL;
    }
    *len = (size_t)(end - start);
    m->pos += *len + 1;
    return (const char *)start;
}

static bool utf8_valid(const uint8_t *s, size_t n) {
    for (size_t i = 0; i < n;) {
        uint8_t c = s[i++];
        if (c < 0x80) continue;
        int more = c >= 0xc2 && c < 0xe0 ? 1 : c >= 0xe0 && c < 0xf0 ? 2 : c >= 0xf0 && c < 0xf5 ? 3 : -1;
        if (more < 0 || n - i < (size_t)more) return false;
        /* The second byte excludes overlong forms, surrogates and what is above U+10FFFF. */
        uint8_t low = c == 0xe0   ? 0xa0
                      : c == 0xf0 ? 0x90
                                  : 0x80,
                high = c == 0xed   ? 0x9f
                       : c == 0xf4 ? 0x8f
                                   : 0xbf;
        for (; more; more--, low = 0x80, high = 0xbf) {
            if (s[i] < low || s[i] > high) return false;
            i++;
        }
    }
    return true;
}

/* ---- The stack. */

static size_t fence(const machine *m) { return m->n_marks ? m->marks[m->n_marks - 1] : 0; }

static void push(machine *m, node *x) {
    if (m->status) return;
    if (!mem_grow((void **)&m->stack, &m->stack_cap, m->n_stack + 1, sizeof *m->stack)) {
        no_memory(m);
        return;
    }
    m->stack[m->n_stack++] = x;
}

/* The topmost value, or NULL where the stack, down to the last mark, is empty. */
static node *top(machine *m) {
    if (!m->status && m->n_stack <= fence(m)) fail(m, COP_EFORMAT, "stack underflow at byte %zu", m->op_pos);
    return m->status ? NULL : m->stack[m->n_stack - 1];
}

static node *pop(machine *m) {
    node *x = top(m);
    if (x) m->n_stack--;
    return x;
}

/* The last n values leave the stack; they stay readable until the next push. */
static node **pop_n(machine *m, size_t n) {
    if (!m->status && m->n_stack - fence(m) < n)
        fail(m, COP_EFORMAT, "stack underflow at byte %zu", m->op_pos);
    if (m->status) return NULL;
    m->n_stack -= n;
    return m->stack + m->n_stack;
}

/* Everything above the last mark, and the mark. */
static node **pop_to_mark(machine *m, size_t *n) {
    *n = 0;
    if (!m->status && !m->n_marks) fail(m, COP_EFORMAT, "no mark for the opcode at byte %zu", m->op_pos);
    if (m->status) return NULL;
    *n = m->n_stack - fence(m);
    node **values = pop_n(m, *n);
    m->n_marks--;
    return values;
}

static void push_mark(machine *m) {
    if (m->n_marks == MAX_MARKS)
        fail(m, COP_EFORMAT, "more than %d open marks, at byte %zu", MAX_MARKS, m->op_pos);
    else
        m->marks[m->n_marks++] = m->n_stack;
}

/* ---- The memo. */

static void memo_put(machine *m, uint64_t index) {
    node *x = top(m);
    if (!x) return;
    if (index >= m->n) {
        fail(m, COP_EFORMAT, "memo index %llu at byte %zu is larger than the pickle",
             (unsigned long long)index, m->op_pos);
        return;
    }
    if (!mem_grow((void **)&m->memo, &m->memo_cap, (size_t)index + 1, sizeof *m->memo)) {
        no_memory(m);
        return;
    }
    while (m->memo_len <= index) m->memo[m->memo_len++] = NULL;
    if (!m->memo[index]) m->n_memo++;
    m->memo[index] = x;
}

static void memo_get(machine *m, uint64_t index) {
    if (m->status) return;
    if (index >= m->memo_len || !m->memo[index])
        fail(m, COP_EFORMAT, "memo index %llu at byte %zu was never set", (unsigned long long)index,
             m->op_pos);
    else
        push(m, m->memo[index]);
}

/* ---- Opcodes. */

static void push_int(machine *m, pickle_kind kind, int64_t value) {
    node *x = node_new(m, kind);
    if (!x) return;
    x->v.integer = value;
    push(m, x);
}

static void push_long1(machine *m) {
    size_t n = (size_t)take_number(m, 1);
    if (n > 8)
        fail(m, COP_EUNSUPPORTED, "an integer of %zu bytes at byte %zu: at most 8 are supported", n,
             m->op_pos);
    else
        push_int(m, PICKLE_INT, take_signed(m, n));
}

static void push_float(machine *m) {
    const uint8_t *p = take(m, 8);
    node *x = node_new(m, PICKLE_FLOAT);
    if (!x) return;
    uint64_t bits = 0;
    for (int i = 0; i < 8; i++) bits = bits << 8 | p[i]; /* the one big-endian number in the format */
    memcpy(&x->v.real, &bits, sizeof bits);
    push(m, x);
}

static void push_text(machine *m, pickle_kind kind, size_t length_bytes) {
    uint64_t n = take_number(m, length_bytes);
    const uint8_t *bytes = take(m, n);
    if (!bytes) return;
    if (kind == PICKLE_STR && !utf8_valid(bytes, (size_t)n)) {
        fail(m, COP_EFORMAT, "the string at byte %zu is not UTF-8", m->op_pos);
        return;
    }
    node *x = node_new(m, kind);
    char *text = x ? arena_take(m, (size_t)n + 1) : NULL;
    if (!text) return;
    memcpy(text, bytes, (size_t)n);
    text[n] = 0;
    x->v.text = text;
    x->v.text_len = (size_t)n;
    push(m, x);
}

static void push_container(machine *m, pickle_kind kind, node *const *values, size_t n) {
    node *x = node_new(m, kind);
    if (!x) return;
    if (n) add_items(m, x, values, n);
    push(m, x);
}

static void push_tuple_of(machine *m, size_t n) {
    node **values = pop_n(m, n);
    if (values) push_container(m, PICKLE_TUPLE, values, n);
}

/* A name for a message: at most 60 bytes, anything odd replaced. */
static const char *printable(char out[64], const char *s, size_t n) {
    size_t len = n < 60 ? n : 60;
    for (size_t i = 0; i < len; i++) out[i] = isprint((unsigned char)s[i]) ? s[i] : '?';
    out[len] = 0;
    return out;
}

static void push_global(machine *m, const char *module, size_t n_module, const char *name, size_t n_name) {
    if (m->status) return;
    for (const char *const *g = m->globals; *g; g++) {
        const char *text = *g;
        if (strlen(text) != n_module + 1 + n_name || text[n_module] != ' ') continue;
        if (memcmp(text, module, n_module) || memcmp(text + n_module + 1, name, n_name)) continue;
        node *x = node_new(m, PICKLE_GLOBAL);
        if (!x) return;
        x->v.text = text;
        x->v.text_len = strlen(text);
        push(m, x);
        return;
    }
    char a[64], b[64];
    fail(m, COP_EUNSUPPORTED, "the pickle names \"%s.%s\" at byte %zu, which is not allowed",
         printable(a, module, n_module), printable(b, name, n_name), m->op_pos);
}

static void push_global_lines(machine *m) {
    size_t n_module = 0, n_name = 0;
    const char *module = take_line(m, &n_module);
    const char *name = module ? take_line(m, &n_name) : NULL;
    if (name) push_global(m, module, n_module, name, n_name);
}

static void push_global_from_stack(machine *m) {
    node **s = pop_n(m, 2);
    if (!s) return;
    if (s[0]->v.kind != PICKLE_STR || s[1]->v.kind != PICKLE_STR)
        fail(m, COP_EFORMAT, "STACK_GLOBAL at byte %zu needs two strings", m->op_pos);
    else
        push_global(m, s[0]->v.text, s[0]->v.text_len, s[1]->v.text, s[1]->v.text_len);
}

/* REDUCE and NEWOBJ: nothing is called; the call is written down. */
static void push_object(machine *m) {
    node **s = pop_n(m, 2);
    if (!s) return;
    node *callee = s[0], *args = s[1];
    if (callee->v.kind != PICKLE_GLOBAL || args->v.kind != PICKLE_TUPLE) {
        fail(m, COP_EUNSUPPORTED, "the call at byte %zu is not of an allowed name with a tuple", m->op_pos);
        return;
    }
    node *x = node_new(m, PICKLE_OBJECT);
    if (!x) return;
    adopt(m, x, callee);
    adopt(m, x, args);
    x->v.callee = &callee->v;
    x->v.args = &args->v;
    push(m, x);
}

static void build(machine *m) {
    node *state = pop(m), *object = top(m);
    if (!object) return;
    if (object->v.kind != PICKLE_OBJECT || object->v.state || object->sealed) {
        fail(m, COP_EFORMAT, "BUILD at byte %zu is not on a fresh object", m->op_pos);
        return;
    }
    adopt(m, object, state);
    object->v.state = &state->v;
}

static void push_persid(machine *m) {
    node *id = pop(m), *x = id ? node_new(m, PICKLE_PERSID) : NULL;
    if (!x) return;
    adopt(m, x, id);
    x->v.args = &id->v;
    push(m, x);
}

static void append(machine *m, node *const *values, size_t n) {
    node *list = values ? top(m) : NULL;
    if (!list) return;
    if (list->v.kind != PICKLE_LIST)
        fail(m, COP_EFORMAT, "the append at byte %zu is not to a list", m->op_pos);
    else
        add_items(m, list, values, n);
}

static void set_items(machine *m, node *const *values, size_t n) {
    node *dict = values ? top(m) : NULL;
    if (!dict) return;
    if (dict->v.kind != PICKLE_DICT && dict->v.kind != PICKLE_OBJECT) {
        fail(m, COP_EFORMAT, "the items at byte %zu do not go to a dict", m->op_pos);
        return;
    }
    if (n % 2) fail(m, COP_EFORMAT, "a key without a value at byte %zu", m->op_pos);
    for (size_t i = 0; i < n && !m->status; i += 2) {
        pickle_kind k = values[i]->v.kind;
        if (k != PICKLE_STR && k != PICKLE_BYTES)
            fail(m, COP_EUNSUPPORTED, "a dict key at byte %zu is neither a string nor bytes", m->op_pos);
    }
    add_items(m, dict, values, n);
}

static void skip_frame(machine *m) {
    uint64_t n = take_number(m, 8);
    if (n > m->n - m->pos) fail(m, COP_EFORMAT, "the frame at byte %zu is longer than the pickle", m->op_pos);
}

static void finish(machine *m) {
    node *x = pop(m);
    if (!x) return;
    if (m->n_stack || m->n_marks)
        fail(m, COP_EFORMAT, "STOP at byte %zu leaves %zu values behind", m->op_pos, m->n_stack);
    m->p->root = &x->v;
}

static void refuse(machine *m, uint8_t op) {
    const char *name = opcode_name(op);
    if (name)
        fail(m, COP_EUNSUPPORTED, "pickle opcode %s at byte %zu is not allowed", name, m->op_pos);
    else
        fail(m, COP_EFORMAT, "unknown pickle opcode 0x%02x at byte %zu", op, m->op_pos);
}

static void execute(machine *m, uint8_t op) {
    size_t n;
    node **values;
    switch (op) {
    case OP_FRAME: skip_frame(m); return;
    case OP_MARK: push_mark(m); return;
    case OP_NONE: push_int(m, PICKLE_NONE, 0); return;
    case OP_NEWTRUE: push_int(m, PICKLE_BOOL, 1); return;
    case OP_NEWFALSE: push_int(m, PICKLE_BOOL, 0); return;
    case OP_BININT: push_int(m, PICKLE_INT, take_signed(m, 4)); return;
    case OP_BININT1: push_int(m, PICKLE_INT, (int64_t)take_number(m, 1)); return;
    case OP_BININT2: push_int(m, PICKLE_INT, (int64_t)take_number(m, 2)); return;
    case OP_LONG1: push_long1(m); return;
    case OP_BINFLOAT: push_float(m); return;
    case OP_SHORT_BINUNICODE: push_text(m, PICKLE_STR, 1); return;
    case OP_BINUNICODE: push_text(m, PICKLE_STR, 4); return;
    case OP_BINUNICODE8: push_text(m, PICKLE_STR, 8); return;
    case OP_SHORT_BINBYTES: push_text(m, PICKLE_BYTES, 1); return;
    case OP_BINBYTES: push_text(m, PICKLE_BYTES, 4); return;
    case OP_BINBYTES8: push_text(m, PICKLE_BYTES, 8); return;
    case OP_EMPTY_TUPLE: push_container(m, PICKLE_TUPLE, NULL, 0); return;
    case OP_EMPTY_LIST: push_container(m, PICKLE_LIST, NULL, 0); return;
    case OP_EMPTY_DICT: push_container(m, PICKLE_DICT, NULL, 0); return;
    case OP_TUPLE1:
    case OP_TUPLE2:
    case OP_TUPLE3: push_tuple_of(m, (size_t)(op - OP_TUPLE1) + 1); return;
    case OP_TUPLE:
        values = pop_to_mark(m, &n);
        if (values) push_container(m, PICKLE_TUPLE, values, n);
        return;
    case OP_APPEND: append(m, pop_n(m, 1), 1); return;
    case OP_APPENDS:
        values = pop_to_mark(m, &n);
        append(m, values, n);
        return;
    case OP_SETITEM: set_items(m, pop_n(m, 2), 2); return;
    case OP_SETITEMS:
        values = pop_to_mark(m, &n);
        set_items(m, values, n);
        return;
    case OP_BINPUT: memo_put(m, take_number(m, 1)); return;
    case OP_LONG_BINPUT: memo_put(m, take_number(m, 4)); return;
    case OP_MEMOIZE: memo_put(m, m->n_memo); return;
    case OP_BINGET: memo_get(m, take_number(m, 1)); return;
    case OP_LONG_BINGET: memo_get(m, take_number(m, 4)); return;
    case OP_GLOBAL: push_global_lines(m); return;
    case OP_STACK_GLOBAL: push_global_from_stack(m); return;
    case OP_REDUCE:
    case OP_NEWOBJ: push_object(m); return;
    case OP_BUILD: build(m); return;
    case OP_BINPERSID: push_persid(m); return;
    default: refuse(m, op); return;
    }
}

static cop_status run(machine *m) {
    /* Room at once, so that the stack is never NULL, not even to point at its end. */
    if (!mem_grow((void **)&m->stack, &m->stack_cap, 64, sizeof *m->stack)) return no_memory(m);
    const uint8_t *head = take(m, 2);
    if (head && (head[0] != OP_PROTO || head[1] < 2))
        fail(m, COP_EUNSUPPORTED, "not a pickle of protocol 2 to 5: it starts with 0x%02x 0x%02x", head[0],
             head[1]);
    else if (head && head[1] > 5)
        fail(m, COP_EUNSUPPORTED, "pickle protocol %d: 2 to 5 are supported", head[1]);
    while (!m->status) {
        m->op_pos = m->pos;
        if (m->pos == m->n) return fail(m, COP_EFORMAT, "the pickle ends at byte %zu without a STOP", m->pos);
        uint8_t op = m->bytes[m->pos++];
        if (op == OP_STOP) {
            finish(m);
            break;
        }
        execute(m, op);
    }
    return m->status;
}

cop_status pickle_read(pickle **out, const uint8_t *bytes, size_t n, const char *const globals[],
                       cop_error *err) {
    assert(out && (bytes || !n) && globals);
    *out = NULL;
    pickle *p = mem_zalloc(1, sizeof *p);
    if (!p) return cop_fail(err, COP_ENOMEM, "out of memory for the pickle's values");
    machine m = {.p = p, .bytes = bytes, .n = n, .globals = globals, .err = err};
    cop_status status = run(&m);
    mem_free(m.stack);
    mem_free(m.memo);
    if (status) {
        pickle_close(p);
        return status;
    }
    *out = p;
    return COP_OK;
}

void pickle_close(pickle *p) {
    if (!p) return;
    for (chunk *c = p->chunks, *next; c; c = next) {
        next = c->next;
        mem_free(c);
    }
    mem_free(p);
}

const pickle_value *pickle_root(const pickle *p) { return p->root; }

const pickle_value *pickle_get(const pickle_value *dict, const char *key) {
    if (!dict || (dict->kind != PICKLE_DICT && dict->kind != PICKLE_OBJECT)) return NULL;
    size_t n = strlen(key);
    for (size_t i = 0; i + 1 < dict->n_items; i += 2) {
        const pickle_value *k = dict->items[i];
        if (k->kind == PICKLE_STR && k->text_len == n && !memcmp(k->text, key, n)) return dict->items[i + 1];
    }
    return NULL;
}
