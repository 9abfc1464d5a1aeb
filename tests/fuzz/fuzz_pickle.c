/* Property: any bytes give a tree of pickle.h, every node of it sound, or an error; nothing leaks, and
 * reading twice gives the same answer. */
#include <stdlib.h>
#include <string.h>

#include "engine/pickle.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool holds) {
    if (!holds) abort();
}

/* Visit at most `*budget` nodes: a tree that shares its values may be exponentially larger than its input. */
static void visit(const pickle_value *v, int depth, long *budget) {
    if (--*budget < 0) return;
    require(v != NULL && depth <= 64);
    if (v->kind == PICKLE_STR || v->kind == PICKLE_BYTES) require(v->text && v->text[v->text_len] == 0);
    if (v->kind == PICKLE_GLOBAL) require(strlen(v->text) == v->text_len);
    if (v->kind == PICKLE_OBJECT) require(v->callee->kind == PICKLE_GLOBAL && v->args->kind == PICKLE_TUPLE);
    if (v->kind == PICKLE_DICT || v->kind == PICKLE_OBJECT) require(v->n_items % 2 == 0);
    if (v->callee) visit(v->callee, depth + 1, budget);
    if (v->args) visit(v->args, depth + 1, budget);
    if (v->state) visit(v->state, depth + 1, budget);
    for (size_t i = 0; i < v->n_items; i++) visit(v->items[i], depth + 1, budget);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const char *const globals[] = {"collections OrderedDict", "torch FloatStorage",
                                          "tiktoken.core Encoding", NULL};
    pickle *p, *again;
    cop_error err = {0};
    long live = mem_live(), budget = 100000;
    cop_status status = pickle_read(&p, data, size, globals, &err);
    require((p != NULL) == (status == COP_OK) && (status == COP_OK || err.message[0]));
    require(pickle_read(&again, data, size, globals, NULL) == status);
    if (p) {
        visit(pickle_root(p), 1, &budget);
        (void)pickle_get(pickle_root(p), "pat_str");
    }
    pickle_close(p);
    pickle_close(again);
    require(mem_live() == live);
    return 0;
}
