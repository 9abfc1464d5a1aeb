/* What the tests of the wire share: an allocator that counts and fails when told, the rows of tests/vectors.
 */
#ifndef COP_PROTO_TEST_H
#define COP_PROTO_TEST_H

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/wire.h"

/* ---- An allocator that counts, and fails when told. */

typedef struct counted_heap {
    long n_live, n_calls, fail_at; /* fail_at: the call that fails, counted from 0; -1: none */
    size_t most_bytes, n_bytes;    /* the largest block asked for; all together */
} counted_heap;

static inline void *counted_resize(void *context, void *block, size_t n_bytes) {
    counted_heap *h = context;
    if (n_bytes > h->most_bytes) h->most_bytes = n_bytes;
    h->n_bytes += n_bytes;
    if (h->n_calls++ == h->fail_at) return NULL;
    void *p = realloc(block, n_bytes);
    if (p && !block) h->n_live++;
    return p;
}

static inline void counted_release(void *context, void *block) {
    counted_heap *h = context;
    if (block) h->n_live--;
    free(block);
}

#define COUNTED(h)                                                                                           \
    (wire_allocator) { counted_resize, counted_release, &(h) }

/* ---- Vectors. */

static inline size_t hex_bytes(const char *hex, uint8_t **out) {
    size_t n = strlen(hex) / 2;
    *out = malloc(n ? n : 1); /* exactly n, so that a sanitizer sees a read past the end */
    for (size_t i = 0; i < n; i++) {
        unsigned byte;
        assert_int_equal(sscanf(hex + 2 * i, "%2x", &byte), 1);
        (*out)[i] = (uint8_t)byte;
    }
    return n;
}

static inline const char *text_at(const json_t *o, const char *key) {
    const char *s = json_string_value(json_object_get(o, key));
    assert_non_null(s);
    return s;
}

typedef void (*row_test)(const json_t *row);

static inline void each_row(const char *path, row_test test) {
    FILE *in = fopen(path, "r");
    char *line = NULL;
    size_t cap = 0;
    int n = 0;
    assert_non_null(in);
    while (getline(&line, &cap, in) > 0) {
        json_t *row = json_loads(line, JSON_ALLOW_NUL, NULL);
        assert_non_null(row);
        test(row);
        json_decref(row);
        n++;
    }
    free(line);
    fclose(in);
    assert_true(n > 10);
}

static inline void check_same_json(const char *name, const json_t *got, const json_t *wanted) {
    if (json_equal(got, wanted)) return;
    char *a = json_dumps(got, JSON_SORT_KEYS | JSON_ENCODE_ANY),
         *b = json_dumps(wanted, JSON_SORT_KEYS | JSON_ENCODE_ANY);
    print_message("%s\n  got    %s\n  wanted %s\n", name, a, b);
    free(a), free(b);
    fail();
}

#endif
