/* Reading a checkpoint into packed weights: the digest, every type of number, numbers that are not finite. */
#include "engine/weights.h"

#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

#include "engine/file_source.h"
#include "engine/weights_load.h"
#include "engine/widen.h"
#include "kernels/cpu/cpu.h"
#include "tests/unit/copy_file.h"

/* ---- Widening. */

static void halves_widen_exactly(void **state) {
    (void)state;
    static uint16_t halves[1 << 16];
    static float wide[1 << 16];
    for (int i = 0; i < 1 << 16; i++) halves[i] = (uint16_t)i;
    cpu_flush_denormals(); /* as every thread that computes: a small half is no denormal in fp32 */
    widen(wide, halves, 1 << 16, TENSOR_F16);
    for (int i = 0; i < 1 << 16; i++) {
        int exponent = i >> 10 & 31, fraction = i & 1023;
        double want = exponent == 0 ? ldexp(fraction, -24) : ldexp(fraction + 1024, exponent - 25);
        if (exponent == 31) want = fraction ? NAN : INFINITY;
        if (i >> 15) want = -want;
        bool same = isnan(want) ? isnan(wide[i]) : wide[i] == want && !signbit(wide[i]) == !signbit(want);
        if (!same) fail_msg("half %#x is %a, not %a", i, (double)wide[i], want);
    }
}

static void other_types_widen(void **state) {
    (void)state;
    float got[3];
    widen(got, (const uint16_t[]){0x3f80, 0xbf80, 0x4049}, 3, TENSOR_BF16);
    assert_true(got[0] == 1 && got[1] == -1 && got[2] == 0x1.92p1f);
    widen(got, (const double[]){0.1, -1e300, 2}, 3, TENSOR_F64);
    assert_true(got[0] == 0.1f && got[1] == -INFINITY && got[2] == 2);
    widen(got, (const float[]){0.1f, -7, 1e-30f}, 3, TENSOR_F32);
    assert_true(got[0] == 0.1f && got[1] == -7 && got[2] == 1e-30f);
}

static void the_first_number_that_is_not_finite_is_found(void **state) {
    (void)state;
    float x[100];
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < 100; i++) x[i] = i % 2 ? 3.4e38f : -1e-40f;
    for (size_t n = 0; n <= 100; n++) assert_int_equal(widen_find_infinite(x, n), n);
    for (size_t at = 0; at < 100; at++) {
        float old = x[at];
        x[at] = bad[at % 3];
        assert_int_equal(widen_find_infinite(x, 100), at);
        assert_int_equal(widen_find_infinite(x, at), at);
        x[at] = old;
    }
}

/* ---- Loading. */

static char folder[] = "/tmp/coppice-weights-XXXXXX", model[64];

/* A copy of calc-d4, whose bytes a test may change. */
static int make_copy(void **state) {
    (void)state;
    char meta[64];
    if (!mkdtemp(folder)) return -1;
    snprintf(model, sizeof model, "%s/model_005426.pt", folder);
    snprintf(meta, sizeof meta, "%s/meta_005426.json", folder);
    copy_file("tests/models/calc-d4/model_005426.pt", model);
    copy_file("tests/models/calc-d4/meta_005426.json", meta);
    return 0;
}

static int remove_copy(void **state) {
    (void)state;
    char meta[64];
    snprintf(meta, sizeof meta, "%s/meta_005426.json", folder);
    return unlink(model) || unlink(meta) || rmdir(folder);
}

/* Load it on n threads; NULL and *err if that fails. */
static weights *load(k_ctx **k, int n_threads, precision profile, cop_error *err) {
    checkpoint *c;
    weights *w;
    *err = (cop_error){0};
    if (checkpoint_open(&c, folder, NULL, err) != COP_OK) fail_msg("%s", err->message);
    if (k_open(k, profile, n_threads, false, err) != COP_OK) fail_msg("%s", err->message);
    (void)weights_open(&w, *k, c, err);
    checkpoint_close(c);
    return w;
}

static void the_digest_is_the_files_whatever_reads_it(void **state) {
    (void)state;
    for (int n = 1; n <= 4; n++) {
        k_ctx *k;
        cop_error err;
        weights *w = load(&k, n, n % 2 ? PRECISION_BF16 : PRECISION_F32, &err);
        if (!w) fail_msg("%s", err.message);
        assert_string_equal(w->digest, "b22bd38783162f81521d0709660b3849");
        weights_close(w);
        k_close(k);
    }
}

static void check_same(const weights *a, const weights *b) {
    assert_string_equal(a->digest, b->digest);
    assert_memory_equal(a->embed->data, b->embed->data, k_table_bytes(a->embed));
    assert_memory_equal(a->lm_head->data, b->lm_head->data, k_matrix_bytes(a->lm_head));
    for (int i = 0; i < a->n_layers; i++) {
        const layer_weights *x = &a->layers[i], *y = &b->layers[i];
        assert_memory_equal(x->q->data, y->q->data, k_matrix_bytes(x->q));
        assert_memory_equal(x->fc->data, y->fc->data, k_matrix_bytes(x->fc));
        assert_memory_equal(x->mlp_out->data, y->mlp_out->data, k_matrix_bytes(x->mlp_out));
        assert_true(x->x0 == y->x0);
    }
}

static void chunks_and_threads_change_nothing(void **state) {
    (void)state;
    k_ctx *k;
    cop_error err;
    weights *whole = load(&k, 1, PRECISION_BF16, &err);
    if (!whole) fail_msg("%s", err.message);
    static const size_t chunks[] = {1, 5000, 30000};
    for (int n_threads = 1; n_threads <= 3; n_threads += 2)
        for (size_t i = 0; i < sizeof chunks / sizeof chunks[0]; i++) {
            k_ctx *other;
            checkpoint *c;
            assert_int_equal(checkpoint_open(&c, folder, NULL, &err), COP_OK);
            assert_int_equal(k_open(&other, PRECISION_BF16, n_threads, false, &err), COP_OK);
            tensor_table tensors;
            file_source file;
            weights *w;
            assert_int_equal(tensor_table_init(&tensors, c, &err), COP_OK);
            weights_source source = file_source_of(&file, checkpoint_file(c));
            weights_loading l = {checkpoint_arch(c), &tensors, &source, chunks[i], NULL};
            if (weights_open_source(&w, other, &l, &err) != COP_OK) fail_msg("%s", err.message);
            check_same(whole, w);
            weights_close(w);
            tensor_table_free(&tensors);
            checkpoint_close(c);
            k_close(other);
        }
    weights_close(whole);
    k_close(k);
}

/* Where element `at` of a tensor lies in the file, and of which type it is. */
static off_t place_of(const char *name, size_t at, tensor_dtype *dtype) {
    checkpoint *c;
    assert_int_equal(checkpoint_open(&c, folder, NULL, NULL), COP_OK);
    const tensor_info *t = checkpoint_find(c, name);
    assert_non_null(t);
    assert_true(at < t->n_elements);
    *dtype = t->dtype;
    off_t place = (off_t)(t->offset + at * tensor_dtype_bytes(t->dtype));
    checkpoint_close(c);
    return place;
}

static void the_first_bad_element_is_told(void **state) {
    (void)state;
    static const size_t elements[] = {130000, 70001, 128, 0}; /* each before the one written earlier */
    static const char name[] = "transformer.wte.weight";
    uint8_t old[4][4];
    tensor_dtype dtype;
    int fd = open(model, O_RDWR);
    for (int i = 0; i < 4; i++) {
        static const uint8_t nan[4] = {0, 0, 0xc0, 0x7f}, nan_bf16[2] = {0xc0, 0x7f};
        off_t place = place_of(name, elements[i], &dtype);
        size_t size = tensor_dtype_bytes(dtype);
        assert_int_equal(pread(fd, old[i], size, place), size);
        assert_int_equal(pwrite(fd, dtype == TENSOR_BF16 ? nan_bf16 : nan, size, place), size);
        for (int n = 1; n <= 3; n += 2) {
            k_ctx *k;
            cop_error err;
            char want[64];
            assert_null(load(&k, n, PRECISION_BF16, &err));
            assert_int_equal(err.status, COP_EMODEL);
            snprintf(want, sizeof want, "\"%s\": element %zu is not finite", name, elements[i]);
            if (!strstr(err.message, want)) fail_msg("%s", err.message);
            k_close(k);
        }
    }
    for (int i = 0; i < 4; i++) {
        off_t place = place_of(name, elements[i], &dtype);
        size_t size = tensor_dtype_bytes(dtype);
        assert_int_equal(pwrite(fd, old[i], size, place), size);
    }
    close(fd);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(halves_widen_exactly),
        cmocka_unit_test(other_types_widen),
        cmocka_unit_test(the_first_number_that_is_not_finite_is_found),
        cmocka_unit_test(the_digest_is_the_files_whatever_reads_it),
        cmocka_unit_test(chunks_and_threads_change_nothing),
        cmocka_unit_test(the_first_bad_element_is_told),
    };
    return cmocka_run_group_tests(tests, make_copy, remove_copy);
}
