/* The pickle subset: what it builds, and what it refuses and with which words. */
#include "engine/pickle.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const char *const allowed[] = {"collections OrderedDict", "torch FloatStorage", NULL};

/* A literal with its length, NULs included. */
#define BYTES(literal) (const uint8_t *)(literal), sizeof(literal) - 1

static pickle *open_bytes(const uint8_t *bytes, size_t n) {
    pickle *p;
    cop_error err = {0};
    if (pickle_read(&p, bytes, n, allowed, &err) != COP_OK) fail_msg("%s", err.message);
    return p;
}

/* Reading fails with this status and these words, and leaves nothing behind. */
static void refuses(const uint8_t *bytes, size_t n, cop_status status, const char *words) {
    pickle *p = (pickle *)&p;
    cop_error err = {0};
    long live = mem_live();
    cop_status got = pickle_read(&p, bytes, n, allowed, &err);
    if (got != status || !strstr(err.message, words))
        fail_msg("got %d \"%s\", expected %d \"%s\"", got, err.message, status, words);
    assert_null(p);
    assert_int_equal(mem_live(), live);
}

static void scalars_come_out_as_they_went_in(void **state) {
    (void)state;
    /* (None, True, False, -1, 255, 65535, -2**31, 2**40, -(2**63), 0L, 1.5) */
    pickle *p =
        open_bytes(BYTES("\x80\x02(N\x88\x89J\xff\xff\xff\xffK\xffM\xff\xffJ\0\0\0\x80\x8a\x06\0\0\0\0\0\x01"
                         "\x8a\x08\0\0\0\0\0\0\0\x80\x8a\0G?\xf8\0\0\0\0\0\0t."));
    const pickle_value *t = pickle_root(p);
    assert_int_equal(t->kind, PICKLE_TUPLE);
    assert_int_equal(t->n_items, 11);
    assert_int_equal(t->items[0]->kind, PICKLE_NONE);
    assert_int_equal(t->items[1]->kind, PICKLE_BOOL);
    const int64_t expected[] = {0, 1, 0, -1, 255, 65535, INT32_MIN, INT64_C(1) << 40, INT64_MIN, 0};
    for (int i = 1; i < 10; i++) assert_true(t->items[i]->integer == expected[i]);
    assert_int_equal(t->items[9]->kind, PICKLE_INT);
    assert_true(t->items[10]->kind == PICKLE_FLOAT && t->items[10]->real == 1.5);
    pickle_close(p);
}

static void strings_and_bytes_may_hold_nul_and_end_with_one(void **state) {
    (void)state;
    /* ("a\0b", "a tree", "x", b"\xff\0", b"c", b"") */
    pickle *p = open_bytes(BYTES("\x80\x05(\x8c\x03"
                                 "a\0b"
                                 "X\x04\0\0\0\xf0\x9f\x8c\xb2\x8d\x01\0\0\0\0\0\0\0x"
                                 "C\x02\xff\0"
                                 "B\x01\0\0\0c\x8e\0\0\0\0\0\0\0\0t."));
    const pickle_value *t = pickle_root(p);
    static const struct {
        pickle_kind kind;
        size_t n;
        const char *text;
    } expected[] = {{PICKLE_STR, 3, "a\0b"}, {PICKLE_STR, 4, "\xf0\x9f\x8c\xb2"},
                    {PICKLE_STR, 1, "x"},    {PICKLE_BYTES, 2, "\xff\0"},
                    {PICKLE_BYTES, 1, "c"},  {PICKLE_BYTES, 0, ""}};
    assert_int_equal(t->n_items, 6);
    for (size_t i = 0; i < 6; i++) {
        assert_int_equal(t->items[i]->kind, expected[i].kind);
        assert_int_equal(t->items[i]->text_len, expected[i].n);
        assert_memory_equal(t->items[i]->text, expected[i].text, expected[i].n + 1);
    }
    pickle_close(p);
}

static void dicts_are_looked_up_by_string_key(void **state) {
    (void)state;
    /* {"a": 1, b"a": 2, "b": 3} */
    pickle *p = open_bytes(BYTES("\x80\x04}(\x8c\x01"
                                 "aK\x01"
                                 "C\x01"
                                 "aK\x02\x8c\x01"
                                 "bK\x03u."));
    const pickle_value *d = pickle_root(p);
    assert_int_equal(d->n_items, 6);
    assert_true(pickle_get(d, "a")->integer == 1);
    assert_true(pickle_get(d, "b")->integer == 3);
    assert_null(pickle_get(d, "c"));
    assert_null(pickle_get(d->items[1], "a"));
    pickle_close(p);
}

static void lists_grow_by_append_and_appends(void **state) {
    (void)state;
    pickle *p = open_bytes(BYTES("\x80\x02]K\x01"
                                 "a(K\x02K\x03"
                                 "e(eK\x04"
                                 "a."));
    const pickle_value *l = pickle_root(p);
    assert_int_equal(l->kind, PICKLE_LIST);
    assert_int_equal(l->n_items, 4);
    for (size_t i = 0; i < 4; i++) assert_true(l->items[i]->integer == (int64_t)i + 1);
    pickle_close(p);
}

static void shared_values_are_shared(void **state) {
    (void)state;
    /* x = []; (x, x), by BINPUT, LONG_BINPUT and MEMOIZE */
    pickle *p = open_bytes(BYTES("\x80\x02]q\x05h\x05\x86."));
    assert_ptr_equal(pickle_root(p)->items[0], pickle_root(p)->items[1]);
    pickle_close(p);
    p = open_bytes(BYTES("\x80\x02]r\x06\0\0\0j\x06\0\0\0\x86."));
    assert_ptr_equal(pickle_root(p)->items[0], pickle_root(p)->items[1]);
    pickle_close(p);
    p = open_bytes(BYTES("\x80\x04\x95\x06\0\0\0\0\0\0\0]\x94N\x94h\0\x87."));
    assert_ptr_equal(pickle_root(p)->items[0], pickle_root(p)->items[2]);
    pickle_close(p);
}

static void calls_are_written_down_and_not_made(void **state) {
    (void)state;
    /* OrderedDict() with an item set on it and a state, then a persistent id, in both spellings of a global
     */
    pickle *p = open_bytes(BYTES("\x80\x02"
                                 "ccollections\nOrderedDict\n)R(\x8c\x01kK\x07u}b\x8c\x02idQ\x86."));
    const pickle_value *o = pickle_root(p)->items[0], *id = pickle_root(p)->items[1];
    assert_int_equal(o->kind, PICKLE_OBJECT);
    assert_string_equal(o->callee->text, "collections OrderedDict");
    assert_int_equal(o->args->n_items, 0);
    assert_int_equal(o->state->kind, PICKLE_DICT);
    assert_true(pickle_get(o, "k")->integer == 7);
    assert_int_equal(id->kind, PICKLE_PERSID);
    assert_string_equal(id->args->text, "id");
    pickle_close(p);
    p = open_bytes(BYTES("\x80\x04\x8c\x05torch\x8c\x0c"
                         "FloatStorage\x93)\x81."));
    assert_string_equal(pickle_root(p)->callee->text, "torch FloatStorage");
    pickle_close(p);
}

static void bytes_after_stop_are_ignored(void **state) {
    (void)state;
    pickle_close(open_bytes(BYTES("\x80\x02N.\xff\xff\xff")));
}

/* One row per refusal of the design. */
#define REFUSAL(bytes, status, words)                                                                        \
    { BYTES(bytes), status, words }
static const struct {
    const uint8_t *bytes;
    size_t n;
    cop_status status;
    const char *words;
} refusals[] = {
    REFUSAL("", COP_EFORMAT, "cut off"), REFUSAL("\x80", COP_EFORMAT, "cut off"),
    REFUSAL("(dp0\n.", COP_EUNSUPPORTED, "not a pickle of protocol 2 to 5"),
    REFUSAL("\x80\x01N.", COP_EUNSUPPORTED, "not a pickle of protocol 2 to 5"),
    REFUSAL("\x80\x06N.", COP_EUNSUPPORTED, "pickle protocol 6"),
    REFUSAL("\x80\x02", COP_EFORMAT, "without a STOP"), REFUSAL("\x80\x02N", COP_EFORMAT, "without a STOP"),
    REFUSAL("\x80\x02.", COP_EFORMAT, "stack underflow at byte 2"),
    REFUSAL("\x80\x02NN.", COP_EFORMAT, "leaves 1 values behind"),
    REFUSAL("\x80\x02N(.", COP_EFORMAT, "stack underflow"),
    /* globals */
    REFUSAL("\x80\x02"
            "cos\nsystem\n\x8c\x02id\x85R.",
            COP_EUNSUPPORTED, "\"os.system\" at byte 2"),
    REFUSAL("\x80\x04\x8c\x08"
            "builtins\x8c\x04"
            "eval\x93.",
            COP_EUNSUPPORTED, "\"builtins.eval\""),
    REFUSAL("\x80\x02"
            "c_codecs\nencode\n.",
            COP_EUNSUPPORTED, "\"_codecs.encode\""),
    REFUSAL("\x80\x02"
            "ctorch\nload\n.",
            COP_EUNSUPPORTED, "\"torch.load\""),
    REFUSAL("\x80\x02"
            "ca\x1b[2J\nb\n.",
            COP_EUNSUPPORTED, "\"a?[2J.b\""),
    REFUSAL("\x80\x02"
            "ccollections OrderedDict\n\n.",
            COP_EUNSUPPORTED, "not allowed"),
    REFUSAL("\x80\x02"
            "ccollections\nOrderedDict",
            COP_EFORMAT, "cut off within the name"),
    REFUSAL("\x80\x04NN\x93.", COP_EFORMAT, "two strings"),
    /* calls of anything but a listed global */
    REFUSAL("\x80\x02N)R.", COP_EUNSUPPORTED, "the call at byte 4"),
    REFUSAL("\x80\x02"
            "ccollections\nOrderedDict\nNR.",
            COP_EUNSUPPORTED, "the call at byte"),
    REFUSAL("\x80\x02"
            "ccollections\nOrderedDict\n)R)R.",
            COP_EUNSUPPORTED, "the call at byte"),
    REFUSAL("\x80\x02}Nb.", COP_EFORMAT, "BUILD at byte 4"),
    REFUSAL("\x80\x02"
            "ccollections\nOrderedDict\n)RNbNb.",
            COP_EFORMAT, "BUILD at byte"),
    REFUSAL("\x80\x02"
            "ccollections\nOrderedDict\n)Rq\0\x85q\1h\0h\1b\x86.",
            COP_EFORMAT, "BUILD at byte"), /* would close a cycle */
    /* opcodes */
    REFUSAL("\x80\x02(ios\nsystem\n.", COP_EUNSUPPORTED, "opcode INST at byte 3"),
    REFUSAL("\x80\x02(No.", COP_EUNSUPPORTED, "opcode OBJ"),
    REFUSAL("\x80\x02\x82\x01.", COP_EUNSUPPORTED, "opcode EXT1"),
    REFUSAL("\x80\x02\x83\x01\0.", COP_EUNSUPPORTED, "opcode EXT2"),
    REFUSAL("\x80\x02\x84\x01\0\0\0.", COP_EUNSUPPORTED, "opcode EXT4"),
    REFUSAL("\x80\x02Px\n.", COP_EUNSUPPORTED, "opcode PERSID"),
    REFUSAL("\x80\x05\x97.", COP_EUNSUPPORTED, "opcode NEXT_BUFFER"),
    REFUSAL("\x80\x05\x98.", COP_EUNSUPPORTED, "opcode READONLY_BUFFER"),
    REFUSAL("\x80\x04N}\x92.", COP_EUNSUPPORTED, "opcode NEWOBJ_EX"),
    REFUSAL("\x80\x02\x80\x02N.", COP_EUNSUPPORTED, "opcode PROTO"),
    REFUSAL("\x80\x02\xfe.", COP_EFORMAT, "unknown pickle opcode 0xfe at byte 2"),
    /* stack, marks, memo */
    REFUSAL("\x80\x02\x85.", COP_EFORMAT, "stack underflow at byte 2"),
    REFUSAL("\x80\x02NN\x87.", COP_EFORMAT, "stack underflow"),
    REFUSAL("\x80\x02N(\x85.", COP_EFORMAT, "stack underflow"), /* not past a mark */
    REFUSAL("\x80\x02t.", COP_EFORMAT, "no mark"), REFUSAL("\x80\x02q\0.", COP_EFORMAT, "stack underflow"),
    REFUSAL("\x80\x02h\0.", COP_EFORMAT, "memo index 0 at byte 2 was never set"),
    REFUSAL("\x80\x02Nq\x02h\x01\x86.", COP_EFORMAT, "memo index 1"),
    REFUSAL("\x80\x02Nr\xff\xff\xff\xff.", COP_EFORMAT, "memo index 4294967295 at byte 3"),
    /* containers */
    REFUSAL("\x80\x02]q\0h\0a.", COP_EFORMAT, "contains itself"),
    REFUSAL("\x80\x02]q\0]h\0ah\0]h\0aa\x86.", COP_EFORMAT, "changes after its use"),
    REFUSAL("\x80\x02]q\0\x85h\0h\0a\x86.", COP_EFORMAT, "changes after its use"),
    REFUSAL("\x80\x02}K\x01Ns.", COP_EUNSUPPORTED, "neither a string nor bytes"),
    REFUSAL("\x80\x02}(\x8c\x01kNNu.", COP_EFORMAT, "a key without a value"),
    REFUSAL("\x80\x02]\x8c\x01kNs.", COP_EFORMAT, "do not go to a dict"),
    REFUSAL("\x80\x02}Na.", COP_EFORMAT, "not to a list"),
    /* lengths and text */
    REFUSAL("\x80\x02X\xff\xff\xff\xff"
            "a.",
            COP_EFORMAT, "asks for 4294967295 more, 2 are left"),
    REFUSAL("\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\xff.", COP_EFORMAT, "cut off"),
    REFUSAL("\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.", COP_EFORMAT, "cut off"),
    REFUSAL("\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xffN.", COP_EFORMAT, "frame at byte 2"),
    REFUSAL("\x80\x02\x8a\x09\0\0\0\0\0\0\0\0\x01.", COP_EUNSUPPORTED, "an integer of 9 bytes"),
    REFUSAL("\x80\x02J\0\0", COP_EFORMAT, "cut off"), REFUSAL("\x80\x02G\0\0\0", COP_EFORMAT, "cut off"),
    REFUSAL("\x80\x02X\x01\0\0\0\x80.", COP_EFORMAT, "not UTF-8"),
    REFUSAL("\x80\x02X\x02\0\0\0\xc0\xaf.", COP_EFORMAT, "not UTF-8"),         /* overlong */
    REFUSAL("\x80\x02X\x03\0\0\0\xe0\x80\xaf.", COP_EFORMAT, "not UTF-8"),     /* overlong */
    REFUSAL("\x80\x02X\x03\0\0\0\xed\xa0\x80.", COP_EFORMAT, "not UTF-8"),     /* surrogate */
    REFUSAL("\x80\x02X\x04\0\0\0\xf4\x90\x80\x80.", COP_EFORMAT, "not UTF-8"), /* above U+10FFFF */
    REFUSAL("\x80\x02X\x02\0\0\0\xe2\x82.", COP_EFORMAT, "not UTF-8"),         /* cut off */
};

static void each_malformed_or_unsafe_pickle_is_refused_by_name(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; i++)
        refuses(refusals[i].bytes, refusals[i].n, refusals[i].status, refusals[i].words);
}

/* PROTO 2, `n` times `open`, then `n - less` times `close`, STOP. */
static size_t nested(uint8_t *out, char open, char close, size_t n, size_t less) {
    size_t at = 0;
    out[at++] = 0x80;
    out[at++] = 2;
    for (size_t i = 0; i < n; i++) out[at++] = (uint8_t)open;
    for (size_t i = 0; i < n - less; i++) out[at++] = (uint8_t)close;
    out[at++] = '.';
    return at;
}

static void depth_and_marks_are_bounded(void **state) {
    (void)state;
    uint8_t bytes[1024];
    size_t n = nested(bytes, ']', 'a', 64, 1);
    pickle_close(open_bytes(bytes, n));
    n = nested(bytes, ']', 'a', 65, 1);
    refuses(bytes, n, COP_EFORMAT, "nested deeper than 64");
    n = nested(bytes, '(', 't', 64, 0);
    pickle_close(open_bytes(bytes, n));
    n = nested(bytes, '(', 't', 257, 0);
    refuses(bytes, n, COP_EFORMAT, "open marks");
}

static void every_truncation_is_refused(void **state) {
    (void)state;
    static const char good[] = "\x80\x04\x95\x20\0\0\0\0\0\0\0"
                               "ccollections\nOrderedDict\n\x94)R\x94(\x8c\x01k\x94]\x94(K\x01M\0\x01"
                               "e\x8c\x01l}u}b.";
    for (size_t n = 0; n < sizeof good - 1; n++) {
        pickle *p;
        cop_error err;
        assert_int_equal(pickle_read(&p, (const uint8_t *)good, n, allowed, &err), COP_EFORMAT);
        assert_null(p);
    }
    pickle_close(open_bytes(BYTES(good)));
}

static void every_allocation_failure_is_told_and_leaks_nothing(void **state) {
    (void)state;
    /* Big enough to need several chunks, a stack and a memo that grow. */
    static uint8_t bytes[40000];
    size_t n = 0;
    memcpy(bytes, "\x80\x04](", 4);
    for (n = 4; n + 8 < sizeof bytes; n += 5) memcpy(bytes + n, "\x8c\x01x\x94N", 5);
    memcpy(bytes + n, "e.", 2);
    n += 2;
    long live = mem_live();
    for (long i = 0;; i++) {
        pickle *p;
        cop_error err;
        mem_fail_after(i);
        cop_status status = pickle_read(&p, bytes, n, allowed, &err);
        bool fired = mem_fail_stop();
        assert_int_equal(status, fired ? COP_ENOMEM : COP_OK);
        pickle_close(p);
        assert_int_equal(mem_live(), live);
        if (!fired) {
            assert_true(i > 5);
            return;
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scalars_come_out_as_they_went_in),
        cmocka_unit_test(strings_and_bytes_may_hold_nul_and_end_with_one),
        cmocka_unit_test(dicts_are_looked_up_by_string_key),
        cmocka_unit_test(lists_grow_by_append_and_appends),
        cmocka_unit_test(shared_values_are_shared),
        cmocka_unit_test(calls_are_written_down_and_not_made),
        cmocka_unit_test(bytes_after_stop_are_ignored),
        cmocka_unit_test(each_malformed_or_unsafe_pickle_is_refused_by_name),
        cmocka_unit_test(depth_and_marks_are_bounded),
        cmocka_unit_test(every_truncation_is_refused),
        cmocka_unit_test(every_allocation_failure_is_told_and_leaks_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
