/* The checkpoints of tests/models: what is told about each, overrides, and what happens when a file changes
 * or memory runs out.  Hostile files are in test_checkpoint_hostile.py. */
#include "engine/checkpoint.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

enum { NONE = ARCH_NO_WINDOW };

static const struct {
    const char *folder, *generation;
    int vocab, rows, gate;
    float gate_factor, qk_scale;
    double rope_base;
    bool rope_bf16, lambdas, smear;
    int32_t window[4];
    size_t n_parameters;
    int64_t step;
} models[] = {
    {"gen-A", "A", 1024, 1024, 0, 0, 1, 1e4, true, false, false, {NONE, NONE, NONE, NONE}, 311296, 10},
    {"gen-Apad", "A", 1001, 1024, 0, 0, 1, 1e4, true, false, false, {NONE, NONE, NONE, NONE}, 311296, 10},
    {"gen-B", "B", 1001, 1024, 0, 0, 1, 1e4, true, true, false, {NONE, NONE, NONE, NONE}, 311304, 10},
    {"gen-C", "C", 1001, 1024, 0, 0, 1, 1e4, true, true, false, {128, 128, 128, 256}, 311304, 10},
    {"gen-D", "D", 1001, 1024, 32, 2, 1, 1e4, true, true, false, {128, 128, 128, 256}, 376968, 10},
    {"gen-E", "E", 1001, 1024, 12, 3, 1.15f, 1e5, false, true, false, {128, 128, 128, 256}, 376888, 10},
    {"gen-F", "F", 1001, 1024, 12, 3, 1.2f, 1e5, false, true, true, {128, 128, 128, 256}, 376914, 10},
    {"calc-d4", "F", 1024, 1024, 12, 3, 1.2f, 1e5, false, true, true, {128, 128, 128, 512}, 1114194, 5426},
    {"calc-d4-early",
     "F",
     1024,
     1024,
     12,
     3,
     1.2f,
     1e5,
     false,
     true,
     true,
     {128, 128, 128, 512},
     1114194,
     110},
};
enum { N_MODELS = sizeof models / sizeof models[0] };

static const char *path_of(const char *folder) {
    static char path[256];
    snprintf(path, sizeof path, "tests/models/%s", folder);
    return path;
}

static checkpoint *open_model(const char *path, const checkpoint_options *o) {
    checkpoint *c;
    cop_error err;
    if (checkpoint_open(&c, path, o, &err) != COP_OK) fail_msg("%s", err.message);
    return c;
}

static void each_generation_is_told_from_its_tensors(void **state) {
    (void)state;
    for (int i = 0; i < N_MODELS; i++) {
        checkpoint *c = open_model(path_of(models[i].folder), NULL);
        const arch *a = checkpoint_arch(c);
        assert_string_equal(a->generation, models[i].generation);
        assert_int_equal(a->vocab, models[i].vocab);
        assert_int_equal(a->rows, models[i].rows);
        assert_int_equal(a->gate_channels, models[i].gate);
        assert_true(a->gate_factor == models[i].gate_factor);
        assert_true(a->qk_scale == models[i].qk_scale);
        assert_true(a->rope_base == models[i].rope_base);
        assert_true(a->softcap == 15);
        assert_int_equal(a->rope_bf16, models[i].rope_bf16);
        assert_int_equal(a->has_lambdas, models[i].lambdas);
        assert_int_equal(a->has_backout, models[i].smear);
        assert_int_equal(a->smear_channels, models[i].smear ? 24 : 0);
        assert_int_equal(a->n_layers, 4);
        assert_int_equal(a->ff_dim, 4 * a->dim);
        assert_int_equal(a->head_dim * a->n_heads, a->dim);
        assert_int_equal(a->context, 10 * a->sequence_len);
        for (int l = 0; l < 4; l++) {
            assert_int_equal(a->window[l], models[i].window[l]);
            assert_int_equal(a->has_value_embed[l], models[i].gate > 0 && l % 2 == 1);
        }
        checkpoint_close(c);
    }
}

static void parameters_add_up(void **state) {
    (void)state;
    for (int i = 0; i < N_MODELS; i++) {
        checkpoint *c = open_model(path_of(models[i].folder), NULL);
        size_t n = 0;
        for (int t = 0; t < checkpoint_n_tensors(c); t++) n += checkpoint_tensor(c, t)->n_elements;
        assert_int_equal(n, models[i].n_parameters);
        assert_int_equal(checkpoint_step(c), models[i].step);
        assert_non_null(strstr(checkpoint_tokenizer_path(c), "tokenizer.pkl"));
        checkpoint_close(c);
    }
}

static void tensors_are_sorted_and_found_by_name(void **state) {
    (void)state;
    checkpoint *c = open_model(path_of("calc-d4"), NULL);
    for (int i = 1; i < checkpoint_n_tensors(c); i++)
        assert_true(strcmp(checkpoint_tensor(c, i - 1)->name, checkpoint_tensor(c, i)->name) < 0);
    const tensor_info *t = checkpoint_find(c, "transformer.wte.weight");
    assert_int_equal(t->dtype, TENSOR_BF16);
    assert_int_equal(t->n_dims, 2);
    assert_int_equal(t->dims[0], 1024);
    assert_int_equal(t->dims[1], 128);
    assert_null(checkpoint_find(c, "transformer.wte"));
    checkpoint_close(c);
}

/* The bits of resid_lambdas of gen-F, as Python's zipfile finds them. */
static void elements_are_read_where_torch_put_them(void **state) {
    (void)state;
    checkpoint *c = open_model(path_of("gen-F"), NULL);
    cop_error err;
    float whole[4], part[2];
    const tensor_info *t = checkpoint_find(c, "resid_lambdas");
    assert_int_equal(checkpoint_read(c, t, 0, 4, whole, &err), COP_OK);
    assert_int_equal(checkpoint_read(c, t, 2, 2, part, &err), COP_OK);
    assert_memory_equal(part, whole + 2, sizeof part);
    static const uint32_t expected[4] = {0x3f822846, 0x3f6ba365, 0x3f94269d, 0x3f72debd};
    assert_memory_equal(whole, expected, sizeof whole);
    assert_int_equal(checkpoint_unchanged(c, &err), COP_OK);
    checkpoint_close(c);
}

static void overrides_replace_what_was_detected(void **state) {
    (void)state;
    checkpoint_options o = checkpoint_defaults();
    o.softcap = 20;
    o.window_pattern = "sl";
    o.rope_table = "bf16";
    o.sequence_len = 1000;
    checkpoint *c = open_model(path_of("gen-F"), &o);
    const arch *a = checkpoint_arch(c);
    assert_true(a->softcap == 20 && a->rope_bf16);
    assert_int_equal(a->context, 10000);
    const int32_t windows[] = {256, 1000, 256,
                               1000}; /* a quarter of 1000 in steps of 128; the last is always long */
    assert_memory_equal(a->window, windows, sizeof windows);
    checkpoint_close(c);
    o.short_window = 77;
    c = open_model(path_of("gen-E"), &o);
    assert_int_equal(checkpoint_arch(c)->window[0], 77);
    checkpoint_close(c);
}

static void windows_follow_each_generations_arithmetic(void **state) {
    (void)state;
    static const struct {
        int sequence_len, d, e, f; /* NANOCHAT.md 1.3 */
    } rows[] = {{256, 128, 128, 128},
                {512, 256, 256, 128},
                {1024, 512, 384, 256},
                {2048, 1024, 768, 512},
                {4096, 2048, 1408, 1024}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        static const char *const folders[] = {"gen-D", "gen-E", "gen-F"};
        const int expected[] = {rows[i].d, rows[i].e, rows[i].f};
        for (int g = 0; g < 3; g++) {
            checkpoint_options o = checkpoint_defaults();
            o.sequence_len = rows[i].sequence_len;
            checkpoint *c = open_model(path_of(folders[g]), &o);
            assert_int_equal(checkpoint_arch(c)->window[0], expected[g]);
            assert_int_equal(checkpoint_arch(c)->window[3], rows[i].sequence_len);
            checkpoint_close(c);
        }
    }
}

static void refuses(const char *path, const checkpoint_options *o, cop_status status, const char *words) {
    checkpoint *c = (checkpoint *)&c;
    cop_error err = {0};
    long live = mem_live();
    cop_status got = checkpoint_open(&c, path, o, &err);
    if (got != status || !strstr(err.message, words))
        fail_msg("%s: got %d \"%s\", expected %d \"%s\"", path, got, err.message, status, words);
    assert_null(c);
    assert_int_equal(mem_live(), live);
}

static void wrong_overrides_are_refused(void **state) {
    (void)state;
    const char *f = "tests/models/gen-F";
    checkpoint_options o = checkpoint_defaults();
    o.softcap = -1;
    refuses(f, &o, COP_EINVAL, "softcap -1");
    o = checkpoint_defaults();
    o.window_pattern = "SX";
    refuses(f, &o, COP_EINVAL, "window pattern \"SX\"");
    o.window_pattern = "";
    refuses(f, &o, COP_EINVAL, "window pattern \"\"");
    o.window_pattern = "L";
    o.short_window = 5;
    refuses(f, &o, COP_EINVAL, "no layer has a short window");
    o = checkpoint_defaults();
    o.rope_table = "fp16";
    refuses(f, &o, COP_EINVAL, "rope table \"fp16\"");
    o = checkpoint_defaults();
    o.sequence_len = INT32_MAX;
    refuses(f, &o, COP_EINVAL, "sequence length 2147483647");
    o = checkpoint_defaults();
    o.step = 11;
    refuses(f, &o, COP_ENOTFOUND, "could not find step 11");
    o = checkpoint_defaults();
    o.tokenizer = "tests/golden";
    refuses(f, &o, COP_ENOTFOUND, "could not find a tokenizer at \"tests/golden\"");
    refuses("tests/models/nowhere", NULL, COP_ENOTFOUND, "could not open \"tests/models/nowhere\"");
    refuses("tests/golden", NULL, COP_ENOTFOUND, "could not find a model_*.pt");
    refuses("tests/models/README.md", NULL, COP_EUNSUPPORTED,
            "neither a checkpoint directory nor a model_*.pt file");
}

/* ---- A copy that may be damaged. */

static char folder[] = "/tmp/coppice-test-XXXXXX", model_file[64];

static void copy(const char *from, const char *to) {
    FILE *in = fopen(from, "rb"), *out = fopen(to, "wb");
    assert_true(in && out);
    static char buffer[1 << 16];
    for (size_t n; (n = fread(buffer, 1, sizeof buffer, in)) > 0;)
        assert_int_equal(fwrite(buffer, 1, n, out), n);
    fclose(in);
    assert_int_equal(fclose(out), 0);
}

static int make_folder(void **state) {
    (void)state;
    strcpy(folder + strlen(folder) - 6, "XXXXXX");
    char meta[64];
    if (!mkdtemp(folder)) return -1;
    snprintf(model_file, sizeof model_file, "%s/model_000010.pt", folder);
    snprintf(meta, sizeof meta, "%s/meta_000010.json", folder);
    copy("tests/models/gen-F/model_000010.pt", model_file);
    copy("tests/models/gen-F/meta_000010.json", meta);
    return 0;
}

static int remove_folder(void **state) {
    (void)state;
    char meta[64];
    snprintf(meta, sizeof meta, "%s/meta_000010.json", folder);
    unlink(model_file);
    unlink(meta);
    return rmdir(folder);
}

static void a_file_that_shrinks_is_an_error(void **state) {
    (void)state;
    checkpoint *c = open_model(folder, NULL);
    assert_int_equal(truncate(model_file, 100), 0);
    uint8_t bytes[1024 * 64 * 2];
    cop_error err;
    const tensor_info *t = checkpoint_find(c, "transformer.wte.weight");
    assert_int_equal(checkpoint_read(c, t, 0, t->n_elements, bytes, &err), COP_EIO);
    assert_non_null(strstr(err.message, "shrank"));
    assert_int_equal(checkpoint_unchanged(c, &err), COP_EIO);
    checkpoint_close(c);
}

static void a_file_that_is_replaced_or_written_is_noticed(void **state) {
    (void)state;
    checkpoint *c = open_model(folder, NULL);
    cop_error err;
    char other[80];
    snprintf(other, sizeof other, "%s.new", model_file);
    copy("tests/models/gen-F/model_000010.pt", other);
    assert_int_equal(checkpoint_unchanged(c, &err), COP_OK);
    assert_int_equal(rename(other, model_file), 0);
    assert_int_equal(checkpoint_unchanged(c, &err), COP_EIO);
    assert_non_null(strstr(err.message, "changed while it was read"));
    checkpoint_close(c);

    c = open_model(folder, NULL);
    const struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_sec = 1}};
    assert_int_equal(utimensat(AT_FDCWD, model_file, times, 0), 0);
    assert_int_equal(checkpoint_unchanged(c, &err), COP_EIO);
    checkpoint_close(c);

    c = open_model(folder, NULL);
    assert_int_equal(unlink(model_file), 0);
    assert_int_equal(checkpoint_unchanged(c, &err), COP_EIO);
    checkpoint_close(c);
}

static void every_allocation_failure_is_told_and_leaks_nothing(void **state) {
    (void)state;
    long live = mem_live();
    for (long n = 0;; n++) {
        checkpoint *c;
        cop_error err;
        mem_fail_after(n);
        cop_status status = checkpoint_open(&c, "tests/models/gen-F/", NULL, &err);
        bool fired = mem_fail_stop();
        checkpoint_close(c);
        assert_int_equal(mem_live(), live);
        assert_int_equal(status, fired ? COP_ENOMEM : COP_OK);
        if (!fired) {
            assert_true(n > 10);
            return;
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_generation_is_told_from_its_tensors),
        cmocka_unit_test(parameters_add_up),
        cmocka_unit_test(tensors_are_sorted_and_found_by_name),
        cmocka_unit_test(elements_are_read_where_torch_put_them),
        cmocka_unit_test(overrides_replace_what_was_detected),
        cmocka_unit_test(windows_follow_each_generations_arithmetic),
        cmocka_unit_test(wrong_overrides_are_refused),
        cmocka_unit_test_setup_teardown(a_file_that_shrinks_is_an_error, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(a_file_that_is_replaced_or_written_is_noticed, make_folder,
                                        remove_folder),
        cmocka_unit_test(every_allocation_failure_is_told_and_leaks_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
