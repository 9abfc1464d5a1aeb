/* Comparing tensors that come with those that are expected. */
#include "engine/tensor_table.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

cop_status tensor_table_init(tensor_table *out, const checkpoint *c, cop_error *err) {
    int n = checkpoint_n_tensors(c);
    size_t n_bytes = 0;
    for (int i = 0; i < n; i++) n_bytes += strlen(checkpoint_tensor(c, i)->name) + 1;
    *out =
        (tensor_table){.tensors = mem_alloc((size_t)n, sizeof *out->tensors), .names = mem_alloc(n_bytes, 1)};
    if (!out->tensors || !out->names) {
        tensor_table_free(out);
        return cop_fail(err, COP_ENOMEM, "could not allocate a table of %d tensors", n);
    }
    char *name = out->names;
    for (int i = 0; i < n; i++) {
        const tensor_info *t = checkpoint_tensor(c, i);
        out->tensors[i] = *t;
        out->tensors[i].name = strcpy(name, t->name);
        name += strlen(name) + 1;
    }
    out->n = n;
    return COP_OK;
}

void tensor_table_free(tensor_table *t) {
    mem_free(t->tensors);
    mem_free(t->names);
    *t = (tensor_table){0};
}

static int by_name(const void *a, const void *b) {
    return strcmp(((const tensor_info *)a)->name, ((const tensor_info *)b)->name);
}

/* The index of that name, or -1. */
static int find(const tensor_table *t, const tensor_info *got) {
    const tensor_info *found = bsearch(got, t->tensors, (size_t)t->n, sizeof *got, by_name);
    return found ? (int)(found - t->tensors) : -1;
}

typedef struct shape_text {
    char text[96];
} shape_text;

static shape_text shape_of(const tensor_info *t) {
    shape_text s = {"a scalar"};
    size_t at = 0;
    for (int i = 0; i < t->n_dims; i++)
        at += (size_t)snprintf(s.text + at, sizeof s.text - at, "%s%" PRId64, i ? " x " : "", t->dims[i]);
    return s;
}

/* Another name came than that of tensor i. */
static cop_status tell_name(const tensor_table *t, int i, const tensor_info *got, cop_error *err) {
    int at = find(t, got);
    if (at < 0)
        return cop_fail(err, COP_EFORMAT, "tensor \"%s\" is unknown: the model has no such tensor",
                        got->name);
    if (at < i)
        return cop_fail(err, COP_EFORMAT, "tensor \"%s\" came again or out of order, after \"%s\"", got->name,
                        t->tensors[i - 1].name);
    return cop_fail(err, COP_EFORMAT, "tensor \"%s\" is missing: \"%s\" came instead", t->tensors[i].name,
                    got->name);
}

cop_status tensor_table_expect(const tensor_table *t, int i, const tensor_info *got, cop_error *err) {
    assert(i >= 0 && i <= t->n);
    if (!got && i == t->n) return COP_OK;
    if (!got)
        return cop_fail(err, COP_EFORMAT, "tensor \"%s\" is missing: only %d of %d tensors came",
                        t->tensors[i].name, i, t->n);
    if (i == t->n || strcmp(got->name, t->tensors[i].name) != 0) return tell_name(t, i, got, err);
    const tensor_info *want = &t->tensors[i];
    bool same = got->n_dims == want->n_dims;
    for (int d = 0; same && d < want->n_dims; d++) same = got->dims[d] == want->dims[d];
    if (same) return COP_OK;
    return cop_fail(err, COP_EFORMAT, "tensor \"%s\" is %s, where the model has %s", got->name,
                    shape_of(got).text, shape_of(want).text);
}
