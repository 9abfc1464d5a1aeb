/* The tensors of a model in memory, to be changed, written as a .pt file or sent as a stream; and comparing
 * packed sets. */
#ifndef COP_TENSOR_FIXTURE_H
#define COP_TENSOR_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <xxhash.h>

#include "engine/checkpoint.h"
#include "engine/widen.h"
#include "kernels/cpu/cpu.h"
#include "engine/weights.h"

typedef struct tensor {
    char name[96];
    tensor_dtype dtype;
    int n_dims;
    int64_t dims[4];
    size_t n; /* elements */
    uint8_t *data;
} tensor;

typedef struct tensor_list {
    int n;
    tensor t[128]; /* in order of name */
} tensor_list;

static inline size_t tensor_bytes(const tensor *t) { return t->n * tensor_dtype_bytes(t->dtype); }

static inline tensor_list *tensors_read(const char *path) {
    checkpoint *c;
    cop_error err;
    tensor_list *l = calloc(1, sizeof *l);
    if (checkpoint_open(&c, path, NULL, &err) != COP_OK) fail_msg("%s", err.message);
    assert_in_range(checkpoint_n_tensors(c), 1, 127);
    for (l->n = 0; l->n < checkpoint_n_tensors(c); l->n++) {
        const tensor_info *info = checkpoint_tensor(c, l->n);
        tensor *t = &l->t[l->n];
        *t = (tensor){.dtype = info->dtype, .n_dims = info->n_dims, .n = info->n_elements};
        snprintf(t->name, sizeof t->name, "%s", info->name);
        memcpy(t->dims, info->dims, sizeof t->dims);
        t->data = malloc(tensor_bytes(t));
        assert_int_equal(checkpoint_read(c, info, 0, t->n, t->data, NULL), COP_OK);
    }
    checkpoint_close(c);
    return l;
}

static inline void tensors_free(tensor_list *l) {
    for (int i = 0; i < l->n; i++) free(l->t[i].data);
    free(l);
}

static inline tensor *tensor_named(tensor_list *l, const char *name) {
    for (int i = 0; i < l->n; i++)
        if (!strcmp(l->t[i].name, name)) return &l->t[i];
    fail_msg("no tensor %s", name);
    return NULL;
}

static inline void tensors_remove(tensor_list *l, const char *name) {
    int at = (int)(tensor_named(l, name) - l->t);
    free(l->t[at].data);
    memmove(&l->t[at], &l->t[at + 1], (size_t)(--l->n - at) * sizeof l->t[0]);
}

/* Add one of zeros, [rows], where its name belongs. */
static inline void tensors_add(tensor_list *l, const char *name, int64_t rows) {
    int at = 0;
    while (at < l->n && strcmp(l->t[at].name, name) < 0) at++;
    memmove(&l->t[at + 1], &l->t[at], (size_t)(l->n++ - at) * sizeof l->t[0]);
    l->t[at] = (tensor){.n_dims = 1, .dims = {rows}, .n = (size_t)rows, .data = calloc((size_t)rows, 4)};
    snprintf(l->t[at].name, sizeof l->t[at].name, "%s", name);
}

/* One number in another type.  What has no place there is cut off. */
static inline void tensor_put(uint8_t *to, tensor_dtype dtype, float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    double wide = (double)x;
    uint16_t half = (uint16_t)(bits >> 16);
    int exponent = (int)(bits >> 23 & 255) - 112; /* of a half */
    if (dtype == TENSOR_F16)
        half = (uint16_t)(bits >> 16 & 0x8000) |
               (exponent <= 0 ? 0 : (uint16_t)(exponent << 10 | (int)(bits >> 13 & 1023)));
    if (dtype == TENSOR_F32) memcpy(to, &x, 4);
    if (dtype == TENSOR_F64) memcpy(to, &wide, 8);
    if (dtype == TENSOR_BF16 || dtype == TENSOR_F16) memcpy(to, &half, 2);
}

static inline void tensor_convert(tensor *t, tensor_dtype dtype) {
    float *wide = malloc(t->n * sizeof *wide);
    widen(wide, t->data, t->n, t->dtype);
    t->dtype = dtype;
    t->data = realloc(t->data, tensor_bytes(t));
    for (size_t i = 0; i < t->n; i++) tensor_put(t->data + i * tensor_dtype_bytes(dtype), dtype, wide[i]);
    free(wide);
}

/* What a set's digest covers, up to the architecture. */
static inline void tensors_digest(const tensor_list *l, char text[33]) {
    XXH3_state_t *h = XXH3_createState();
    XXH3_128bits_reset(h);
    for (int i = 0; i < l->n; i++) {
        const tensor *t = &l->t[i];
        uint64_t facts[6] = {t->dtype, (uint64_t)t->n_dims};
        for (int d = 0; d < t->n_dims; d++) facts[2 + d] = (uint64_t)t->dims[d];
        XXH3_128bits_update(h, t->name, strlen(t->name) + 1);
        XXH3_128bits_update(h, facts, (size_t)(2 + t->n_dims) * 8); /* this machine is little-endian */
        XXH3_128bits_update(h, t->data, tensor_bytes(t));
    }
    XXH128_hash_t d = XXH3_128bits_digest(h);
    snprintf(text, 33, "%016llx%016llx", (unsigned long long)d.high64, (unsigned long long)d.low64);
    XXH3_freeState(h);
}

/* ---- A .pt file, as torch.save writes it: a ZIP of data.pkl and data/0, data/1... */

static inline void put_number(FILE *f, uint64_t v, int n_bytes) {
    for (int i = 0; i < n_bytes; i++) fputc(i < 8 ? (int)(v >> 8 * i & 255) : 0, f);
}

static inline void pickle_text(FILE *f, const char *s) {
    fputc('X', f);
    put_number(f, strlen(s), 4);
    fputs(s, f);
}

static inline void pickle_tensor(FILE *f, const tensor *t, int index) {
    static const char *const storages[] = {"Float", "BFloat16", "Half", "Double"};
    char key[16];
    int64_t strides[4];
    snprintf(key, sizeof key, "%d", index);
    for (int d = t->n_dims; d-- > 0;) strides[d] = d == t->n_dims - 1 ? 1 : strides[d + 1] * t->dims[d + 1];
    pickle_text(f, t->name);
    fputs("ctorch._utils\n_rebuild_tensor_v2\n((", f);
    pickle_text(f, "storage");
    fprintf(f, "ctorch\n%sStorage\n", storages[t->dtype]);
    pickle_text(f, key);
    pickle_text(f, "cpu");
    fputc('J', f), put_number(f, t->n, 4);
    fputs("tQJ", f), put_number(f, 0, 4);
    fputc('(', f);
    for (int d = 0; d < t->n_dims; d++) fputc('J', f), put_number(f, (uint64_t)t->dims[d], 4);
    fputs("t(", f);
    for (int d = 0; d < t->n_dims; d++) fputc('J', f), put_number(f, (uint64_t)strides[d], 4);
    fputs("t\x89"
          "ccollections\nOrderedDict\n)RtR",
          f);
}

typedef struct zip_item {
    char name[32];
    size_t at, n;
} zip_item;

static inline void zip_add(FILE *f, zip_item *item, const void *data, size_t n) {
    item->at = (size_t)ftell(f);
    item->n = n;
    put_number(f, 0x04034b50, 4), put_number(f, 0, 2), put_number(f, 0x0808, 2);
    for (int i = 0; i < 18; i++) fputc(0, f); /* stored; sizes are in the directory */
    put_number(f, strlen(item->name), 2), put_number(f, 0, 2);
    fputs(item->name, f);
    assert_int_equal(fwrite(data, 1, n, f), n);
}

static inline void zip_directory(FILE *f, const zip_item *items, int n) {
    size_t at = (size_t)ftell(f);
    for (int i = 0; i < n; i++) {
        put_number(f, 0x02014b50, 4), put_number(f, 0, 4), put_number(f, 0x0808, 2), put_number(f, 0, 10);
        put_number(f, items[i].n, 4), put_number(f, items[i].n, 4), put_number(f, strlen(items[i].name), 2);
        put_number(f, 0, 12), put_number(f, items[i].at, 4);
        fputs(items[i].name, f);
    }
    size_t end = (size_t)ftell(f);
    put_number(f, 0x06054b50, 4), put_number(f, 0, 4), put_number(f, (uint64_t)n, 2),
        put_number(f, (uint64_t)n, 2);
    put_number(f, end - at, 4), put_number(f, at, 4), put_number(f, 0, 2);
}

static inline void tensors_write(const tensor_list *l, const char *path) {
    static zip_item items[130];
    char *pickle;
    size_t n_pickle;
    FILE *p = open_memstream(&pickle, &n_pickle), *f = fopen(path, "wb");
    assert_true(p && f);
    fputs("\x80\x02}(", p);
    for (int i = 0; i < l->n; i++) pickle_tensor(p, &l->t[i], i);
    fputs("u.", p);
    fclose(p);
    strcpy(items[0].name, "m/data.pkl");
    zip_add(f, &items[0], pickle, n_pickle);
    for (int i = 0; i < l->n; i++) {
        snprintf(items[1 + i].name, sizeof items[0].name, "m/data/%d", i);
        zip_add(f, &items[1 + i], l->t[i].data, tensor_bytes(&l->t[i]));
    }
    zip_directory(f, items, l->n + 1);
    free(pickle);
    assert_int_equal(fclose(f), 0);
}

/* ---- Packed sets. */

static inline void check_matrix(const k_matrix *a, const k_matrix *b) {
    assert_int_equal(a == NULL, b == NULL);
    if (!a) return;
    assert_int_equal(k_matrix_bytes(a), k_matrix_bytes(b));
    assert_memory_equal(a->data, b->data, k_matrix_bytes(a));
}

static inline void check_table(const k_table *a, const k_table *b) {
    assert_int_equal(a == NULL, b == NULL);
    if (!a) return;
    assert_int_equal(k_table_bytes(a), k_table_bytes(b));
    assert_memory_equal(a->data, b->data, k_table_bytes(a));
}

/* Bit for bit, but for the digest, which tells how they were stored. */
static inline void check_packed(const weights *a, const weights *b) {
    check_table(a->embed, b->embed);
    check_matrix(a->lm_head, b->lm_head);
    check_matrix(a->smear_gate, b->smear_gate);
    assert_memory_equal(&a->smear_lambda, &b->smear_lambda, sizeof(float));
    assert_memory_equal(&a->backout, &b->backout, sizeof(float));
    assert_int_equal(a->n_bytes, b->n_bytes);
    assert_int_equal(a->n_layers, b->n_layers);
    for (int i = 0; i < a->n_layers; i++) {
        const layer_weights *x = &a->layers[i], *y = &b->layers[i];
        check_matrix(x->q, y->q), check_matrix(x->k, y->k), check_matrix(x->v, y->v);
        check_matrix(x->attn_out, y->attn_out), check_matrix(x->fc, y->fc),
            check_matrix(x->mlp_out, y->mlp_out);
        check_matrix(x->gate, y->gate);
        check_table(x->value_embed, y->value_embed);
        assert_memory_equal(&x->resid, &y->resid, sizeof(float));
        assert_memory_equal(&x->x0, &y->x0, sizeof(float));
    }
}

#endif
