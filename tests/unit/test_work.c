/* Counting bytes and operations, by hand for a tiny model; and the shapes that models have by name. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "engine/shape.h"
#include "engine/work.h"

/* Two layers of width 4 with two heads of 2 that share one KV head; the first layer sees the token and two
 * before. */
static arch tiny(void) {
    return (arch){.vocab = 10,
                  .rows = 16,
                  .dim = 4,
                  .n_layers = 2,
                  .n_heads = 2,
                  .n_kv_heads = 1,
                  .head_dim = 2,
                  .ff_dim = 16,
                  .window = {2, ARCH_NO_WINDOW},
                  .has_lambdas = true,
                  .has_value_embed = {false, true},
                  .gate_channels = 3,
                  .smear_channels = 2,
                  .has_backout = true};
}

/* A layer: q 16, k 8, v 8, out 16, MLP 2 x 64 = 176.  Two of them, a gate of 3 and the smear gate of 2. */
enum { TOKEN_WEIGHTS = 176 + 176 + 3 + 2, LM_HEAD = 10 * 4 };

static void parameters_are_what_is_stored(void **state) {
    (void)state;
    arch a = tiny();
    /* wte and lm_head of 16 rows each, 16 rows of value embeddings; 4 lambdas, smear, backout. */
    assert_int_equal(work_parameters(&a), TOKEN_WEIGHTS + 2 * 64 + 16 * 2 + 6);
    a.has_lambdas = a.has_backout = false;
    a.smear_channels = 0;
    assert_int_equal(work_parameters(&a), TOKEN_WEIGHTS - 2 + 2 * 64 + 16 * 2);
}

static void prefill_counts_visible_keys_and_one_row_of_logits(void **state) {
    (void)state;
    arch a = tiny();
    /* Keys that positions 0 to 4 see: 1 + 2 + 3 + 3 + 3 with the window, 1 + 2 + 3 + 4 + 5 without; 2 x 2 x 2
     * heads x 2 operations for each. */
    double expected = 2 * (5 * TOKEN_WEIGHTS + LM_HEAD) + 16 * (12 + 15);
    assert_true(work_prefill_flops(&a, 5) == expected);
}

static void a_decode_step_reads_a_shared_prefix_once(void **state) {
    (void)state;
    arch a = tiny();
    assert_int_equal(work_kv_bytes(&a, 2), 2 * 8);
    /* Three rows at position 5, a prefix of 4: with the window keys 3 to 5, of which one is shared; without
     * it 0 to 5, of which four are.  8 bytes for the key and value of a layer in bf16. */
    work w = work_of_decode(&a, 2, 3, 5, 4);
    assert_true(w.bytes == 2 * (TOKEN_WEIGHTS + LM_HEAD) + 8 * ((1 + 3 * 2) + (4 + 3 * 2)));
    assert_true(w.flops == 3 * (2 * (TOKEN_WEIGHTS + LM_HEAD) + 16 * (3 + 6)));
    /* Nothing shared: the same operations, more bytes. */
    work alone = work_of_decode(&a, 2, 3, 5, 0);
    assert_true(alone.bytes == 2 * (TOKEN_WEIGHTS + LM_HEAD) + 8 * 3 * (3 + 6));
    assert_true(alone.flops == w.flops);
    /* Twice the bytes in fp32. */
    assert_true(work_of_decode(&a, 4, 3, 5, 4).bytes == 2 * w.bytes);
}

static void a_prefix_behind_the_window_is_not_read(void **state) {
    (void)state;
    arch a = tiny();
    work w = work_of_decode(&a, 2, 1, 9, 4), same = work_of_decode(&a, 2, 1, 9, 0);
    assert_true(w.bytes == same.bytes);
    assert_true(w.bytes == 2 * (TOKEN_WEIGHTS + LM_HEAD) + 8 * (3 + 10));
}

static void a_shape_is_what_its_depth_says(void **state) {
    (void)state;
    arch a;
    cop_error err;
    assert_int_equal(shape_arch(&a, "d12", &err), COP_OK);
    assert_int_equal(a.dim, 768);
    assert_int_equal(a.n_layers, 12);
    assert_int_equal(a.n_heads, 12);
    assert_int_equal(a.n_kv_heads, 12);
    assert_int_equal(a.ff_dim, 3072);
    assert_string_equal(a.generation, "F");
    assert_true(a.rope_base == 1e5 && a.qk_scale == 1.2f && a.gate_factor == 3 && !a.rope_bf16);
    for (int i = 0; i < 12; i++) {
        assert_int_equal(a.window[i], i % 4 == 3 ? 2048 : 512); /* SSSL; S is a quarter */
        assert_int_equal(a.has_value_embed[i], i % 2 == 1);
    }
    /* The d12 of nanochat has 6 heads of 128, so its gates are half as many: 286,261,730 parameters. */
    assert_int_equal(work_parameters(&a), 286261730 + 6 * 6 * 12);
    assert_int_equal(shape_arch(&a, "d5", &err), COP_OK);
    assert_int_equal(a.window[4], 2048); /* the last layer sees everything */
    assert_true(a.has_value_embed[4] && !a.has_value_embed[3]);
}

static void other_names_are_no_shapes(void **state) {
    (void)state;
    const char *const wrong[] = {"",    "d",    "d0",  "d49", "12",
                                 "D12", "d012", "d1x", "d-1", "d99999999999999999999"};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        arch a;
        cop_error err;
        if (shape_arch(&a, wrong[i], &err) != COP_EINVAL) fail_msg("\"%s\" was taken for a shape", wrong[i]);
    }
    arch a;
    cop_error err;
    assert_int_equal(shape_arch(&a, "d1", &err), COP_OK);
    assert_int_equal(shape_arch(&a, "d48", &err), COP_OK);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parameters_are_what_is_stored),
        cmocka_unit_test(prefill_counts_visible_keys_and_one_row_of_logits),
        cmocka_unit_test(a_decode_step_reads_a_shared_prefix_once),
        cmocka_unit_test(a_prefix_behind_the_window_is_not_read),
        cmocka_unit_test(a_shape_is_what_its_depth_says),
        cmocka_unit_test(other_names_are_no_shapes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
