/* From data.pkl to a table of tensors.
 *
 *   OrderedDict or dict: name -> _rebuild_tensor_v2(storage, offset, sizes, strides, requires_grad, hooks)
 *   storage: persistent id ("storage", class, key, location, number of elements), its bytes the entry
 * data/<key> */
#include "engine/pt_file.h"

#include <assert.h>
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/pickle.h"

enum { MAX_PICKLE_BYTES = 4 << 20, MAX_KEY_DIGITS = 9, MAX_NAME = 200, MAX_DIMS = 4, MAX_TENSORS = 8192 };

static const char ORDERED_DICT[] = "collections OrderedDict";
static const char REBUILD_TENSOR[] = "torch._utils _rebuild_tensor_v2";
static const char REBUILD_PARAMETER[] = "torch._utils _rebuild_parameter";

/* Storage classes.  Those without floating numbers are known only to be refused by name. */
static const struct {
    const char *global;
    bool floating;
    tensor_dtype dtype;
} storages[] = {
    {"torch FloatStorage", true, TENSOR_F32}, {"torch BFloat16Storage", true, TENSOR_BF16},
    {"torch HalfStorage", true, TENSOR_F16},  {"torch DoubleStorage", true, TENSOR_F64},
    {"torch LongStorage", false, 0},          {"torch IntStorage", false, 0},
    {"torch ShortStorage", false, 0},         {"torch CharStorage", false, 0},
    {"torch ByteStorage", false, 0},          {"torch BoolStorage", false, 0},
};
enum { N_STORAGES = sizeof storages / sizeof storages[0] };

struct pt_file {
    zip_file *zip;
    pickle *pickle; /* holds the names */
    tensor_info *tensors;
    int n_tensors;
};

static bool is_call(const pickle_value *v, const char *global) {
    return v->kind == PICKLE_OBJECT && !strcmp(v->callee->text, global);
}

/* ---- One tensor. */

typedef struct storage {
    tensor_dtype dtype;
    int64_t n_elements;
    uint64_t offset; /* in the file */
} storage;

static cop_status storage_class(const char *name, const pickle_value *v, storage *s, cop_error *err) {
    for (int i = 0; v->kind == PICKLE_GLOBAL && i < N_STORAGES; i++) {
        if (strcmp(v->text, storages[i].global) != 0) continue;
        s->dtype = storages[i].dtype;
        if (storages[i].floating) return COP_OK;
        return cop_fail(err, COP_EUNSUPPORTED,
                        "tensor \"%s\" is a %s: only float, bfloat16, half and double are supported", name,
                        storages[i].global);
    }
    return cop_fail(err, COP_EFORMAT, "tensor \"%s\" has no storage class", name);
}

/* The persistent id of a storage, and its entry in the archive. */
static cop_status read_storage(const pt_file *f, const char *name, const pickle_value *v, storage *s,
                               cop_error *err) {
    const pickle_value *id = v->kind == PICKLE_PERSID ? v->args : NULL;
    if (!id || id->kind != PICKLE_TUPLE || id->n_items != 5 || id->items[0]->kind != PICKLE_STR ||
        strcmp(id->items[0]->text, "storage") != 0 || id->items[2]->kind != PICKLE_STR ||
        id->items[4]->kind != PICKLE_INT)
        return cop_fail(err, COP_EFORMAT, "tensor \"%s\" has a malformed storage", name);
    cop_status status = storage_class(name, id->items[1], s, err);
    if (status) return status;
    const char *key = id->items[2]->text;
    size_t digits = strspn(key, "0123456789");
    if (!digits || digits > MAX_KEY_DIGITS || digits != id->items[2]->text_len)
        return cop_fail(err, COP_EFORMAT, "tensor \"%s\" names a storage that is no number", name);
    char entry_name[32];
    snprintf(entry_name, sizeof entry_name, "data/%s", key);
    const zip_entry *e = zip_find(f->zip, entry_name);
    if (!e)
        return cop_fail(err, COP_EFORMAT, "the storage \"%s\" of tensor \"%s\" is missing", entry_name, name);
    s->n_elements = id->items[4]->integer;
    s->offset = e->offset;
    uint64_t item = tensor_dtype_bytes(s->dtype);
    if (s->n_elements < 0 || e->size % item || (uint64_t)s->n_elements != e->size / item)
        return cop_fail(err, COP_EFORMAT, "storage \"%s\" of tensor \"%s\" has %llu bytes, yet %lld elements",
                        entry_name, name, (unsigned long long)e->size, (long long)s->n_elements);
    return COP_OK;
}

static bool is_int_tuple(const pickle_value *v) {
    if (v->kind != PICKLE_TUPLE || v->n_items > MAX_DIMS) return false;
    for (size_t i = 0; i < v->n_items; i++)
        if (v->items[i]->kind != PICKLE_INT) return false;
    return true;
}

/* Sizes and strides: no negative ones, no product that overflows, and row-major without gaps. */
static cop_status read_shape(tensor_info *t, const pickle_value *sizes, const pickle_value *strides,
                             cop_error *err) {
    if (!is_int_tuple(sizes) || !is_int_tuple(strides) || sizes->n_items != strides->n_items)
        return cop_fail(err, COP_EFORMAT, "tensor \"%s\" has malformed sizes or more than %d dimensions",
                        t->name, MAX_DIMS);
    int64_t n = 1;
    bool contiguous = true;
    t->n_dims = (int)sizes->n_items;
    for (int i = t->n_dims - 1; i >= 0; i--) {
        int64_t size = sizes->items[i]->integer, stride = strides->items[i]->integer;
        if (size < 0 || stride < 0)
            return cop_fail(err, COP_EFORMAT, "tensor \"%s\" has a negative size or stride", t->name);
        if (size != 1 && stride != n) contiguous = false;
        if (__builtin_mul_overflow(n, size, &n) || n > INT64_MAX / 8)
            return cop_fail(err, COP_EFORMAT, "the sizes of tensor \"%s\" overflow", t->name);
        t->dims[i] = size;
    }
    if (!contiguous) return cop_fail(err, COP_EUNSUPPORTED, "tensor \"%s\" is not contiguous", t->name);
    if (n == 0) return cop_fail(err, COP_EUNSUPPORTED, "tensor \"%s\" is empty", t->name);
    t->n_elements = (size_t)n;
    return COP_OK;
}

/* The arguments of _rebuild_tensor_v2. */
static cop_status read_tensor(const pt_file *f, tensor_info *t, const pickle_value *args, cop_error *err) {
    const pickle_value *const *a = args->items;
    if (args->n_items < 6 || args->n_items > 7 || a[1]->kind != PICKLE_INT || a[4]->kind != PICKLE_BOOL ||
        !is_call(a[5], ORDERED_DICT) || a[5]->n_items)
        return cop_fail(err, COP_EFORMAT, "tensor \"%s\" is rebuilt from unknown arguments", t->name);
    if (args->n_items == 7 && !(a[6]->kind == PICKLE_DICT && a[6]->n_items == 0) && a[6]->kind != PICKLE_NONE)
        return cop_fail(err, COP_EUNSUPPORTED, "tensor \"%s\" is a conjugate or negative view", t->name);
    storage s = {0};
    cop_status status = read_storage(f, t->name, a[0], &s, err);
    if (status == COP_OK) status = read_shape(t, a[2], a[3], err);
    if (status) return status;
    int64_t first = a[1]->integer;
    if (first < 0 || first > s.n_elements || t->n_elements > (uint64_t)(s.n_elements - first))
        return cop_fail(err, COP_EFORMAT,
                        "tensor \"%s\" reaches beyond its storage: %zu elements from %lld, of %lld", t->name,
                        t->n_elements, (long long)first, (long long)s.n_elements);
    t->dtype = s.dtype;
    t->offset = s.offset + (uint64_t)first * tensor_dtype_bytes(s.dtype);
    return COP_OK;
}

/* A name is printable ASCII; torch.compile's prefix is dropped once. */
static cop_status read_name(tensor_info *t, const pickle_value *key, cop_error *err) {
    static const char prefix[] = "_orig_mod.";
    bool plain = key->kind == PICKLE_STR && key->text_len > 0 && key->text_len <= MAX_NAME;
    for (size_t i = 0; plain && i < key->text_len; i++) plain = isgraph((unsigned char)key->text[i]);
    if (!plain) return cop_fail(err, COP_EFORMAT, "the state dict has a key that is no tensor name");
    t->name = key->text + (strncmp(key->text, prefix, sizeof prefix - 1) ? 0 : sizeof prefix - 1);
    return COP_OK;
}

static cop_status read_item(const pt_file *f, tensor_info *t, const pickle_value *key, const pickle_value *v,
                            cop_error *err) {
    cop_status status = read_name(t, key, err);
    if (status) return status;
    if (is_call(v, REBUILD_PARAMETER) && v->args->n_items == 3) v = v->args->items[0];
    if (!is_call(v, REBUILD_TENSOR))
        return cop_fail(err, COP_EUNSUPPORTED, "not a state dict: the value of \"%s\" is no tensor", t->name);
    return read_tensor(f, t, v->args, err);
}

/* ---- The table. */

static int by_name(const void *a, const void *b) {
    return strcmp(((const tensor_info *)a)->name, ((const tensor_info *)b)->name);
}

static cop_status read_table(pt_file *f, cop_error *err) {
    const pickle_value *root = pickle_root(f->pickle);
    bool is_dict = root->kind == PICKLE_DICT || (is_call(root, ORDERED_DICT) && root->args->n_items == 0);
    if (!is_dict)
        return cop_fail(err, COP_EUNSUPPORTED, "not a state dict: data.pkl holds no dict of tensors");
    if (root->n_items / 2 > MAX_TENSORS)
        return cop_fail(err, COP_EUNSUPPORTED,
                        "its data.pkl names %zu tensors, more than %d: not a state dict", root->n_items / 2,
                        MAX_TENSORS);
    f->tensors = mem_zalloc(root->n_items / 2, sizeof *f->tensors);
    if (!f->tensors) return cop_fail(err, COP_ENOMEM, "out of memory for %zu tensors", root->n_items / 2);
    uint64_t bytes = 0;
    for (size_t i = 0; i < root->n_items; i += 2) {
        tensor_info *t = &f->tensors[f->n_tensors];
        cop_status status = read_item(f, t, root->items[i], root->items[i + 1], err);
        if (status) return status;
        f->n_tensors++;
        /* No overflow: each is below the file's size, and so was the sum. */
        bytes += t->n_elements * tensor_dtype_bytes(t->dtype);
        if (bytes > zip_file_bytes(f->zip))
            return cop_fail(err, COP_EUNSUPPORTED,
                            "the tensors overlap: together they are larger than the file");
    }
    qsort(f->tensors, (size_t)f->n_tensors, sizeof *f->tensors, by_name);
    for (int i = 1; i < f->n_tensors; i++) {
        if (!by_name(&f->tensors[i - 1], &f->tensors[i]))
            return cop_fail(err, COP_EFORMAT, "two tensors \"%s\"", f->tensors[i].name);
    }
    return COP_OK;
}

static cop_status check_byteorder(const pt_file *f, cop_error *err) {
    const zip_entry *e = zip_find(f->zip, "byteorder");
    if (!e) return COP_OK; /* torch before 2.1 wrote none, and little-endian */
    char text[6] = {0};
    if (e->size == sizeof text) {
        cop_status status = zip_read(f->zip, e->offset, text, sizeof text, err);
        if (status) return status;
    }
    if (memcmp(text, "little", sizeof text) == 0) return COP_OK;
    return cop_fail(err, COP_EUNSUPPORTED, "its byte order is not little-endian");
}

static cop_status read_pickle(pt_file *f, cop_error *err) {
    const char *globals[N_STORAGES + 4] = {ORDERED_DICT, REBUILD_TENSOR, REBUILD_PARAMETER};
    for (int i = 0; i < N_STORAGES; i++) globals[3 + i] = storages[i].global;
    const zip_entry *e = zip_find(f->zip, "data.pkl");
    if (!e) return cop_fail(err, COP_EFORMAT, "it has no data.pkl: not a file of torch.save");
    if (e->size > MAX_PICKLE_BYTES)
        return cop_fail(err, COP_EUNSUPPORTED, "its data.pkl has %llu bytes, more than %d: not a state dict",
                        (unsigned long long)e->size, MAX_PICKLE_BYTES);
    uint8_t *bytes = mem_alloc((size_t)e->size, 1);
    if (!bytes) return cop_fail(err, COP_ENOMEM, "out of memory for data.pkl");
    cop_status status = zip_read(f->zip, e->offset, bytes, (size_t)e->size, err);
    if (status == COP_OK) status = pickle_read(&f->pickle, bytes, (size_t)e->size, globals, err);
    mem_free(bytes);
    return status;
}

cop_status pt_open(pt_file **out, const char *path, cop_error *err) {
    assert(out && path);
    *out = NULL;
    pt_file *f = mem_zalloc(1, sizeof *f);
    if (!f) return cop_fail(err, COP_ENOMEM, "out of memory to open \"%s\"", path);
    cop_status status = zip_open(&f->zip, path, err);
    if (status == COP_OK) {
        status = check_byteorder(f, err);
        if (status == COP_OK) status = read_pickle(f, err);
        if (status == COP_OK) status = read_table(f, err);
        if (status) cop_error_prefix(err, "cannot use \"%s\"", path);
    }
    if (status) {
        pt_close(f);
        return status;
    }
    *out = f;
    return COP_OK;
}

void pt_close(pt_file *f) {
    if (!f) return;
    mem_free(f->tensors);
    pickle_close(f->pickle);
    zip_close(f->zip);
    mem_free(f);
}

const zip_file *pt_zip(const pt_file *f) { return f->zip; }
int pt_n_tensors(const pt_file *f) { return f->n_tensors; }

const tensor_info *pt_tensor(const pt_file *f, int i) {
    assert(i >= 0 && i < f->n_tensors);
    return &f->tensors[i];
}

const tensor_info *pt_find(const pt_file *f, const char *name) {
    tensor_info key = {.name = name};
    return f->n_tensors ? bsearch(&key, f->tensors, (size_t)f->n_tensors, sizeof key, by_name) : NULL;
}

cop_status pt_read(const pt_file *f, const tensor_info *t, size_t first, size_t n, void *dst,
                   cop_error *err) {
    assert(first <= t->n_elements && n <= t->n_elements - first);
    size_t item = tensor_dtype_bytes(t->dtype);
    return zip_read(f->zip, t->offset + (uint64_t)first * item, dst, n * item, err);
}
