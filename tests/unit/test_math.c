/* The normative functions: known answers, accuracy against libm in double, and the hash of a sweep over all
 * bit patterns that every instruction set must give. */
#include "tests/unit/kernel_test.h"

#include <xxhash.h>

#include "kernels/cpu/math.h"

static void philox_gives_the_known_answers(void **state) {
    (void)state;
    static const uint32_t cases[3][10] = {
        {0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
        {~0u, ~0u, ~0u, ~0u, ~0u, ~0u, 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
        {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, 0xd16cfe09, 0x94fdcceb,
         0x5001e420, 0x24126ea1},
    };
    for (int i = 0; i < 3; i++) {
        uint32_t out[4];
        cop_philox(cases[i], cases[i] + 4, out);
        assert_memory_equal(out, cases[i] + 6, sizeof out);
    }
}

static void exp_is_accurate(void **state) {
    (void)state;
    assert_true(cop_exp(0.0f) == 1.0f && cop_exp(-0.0f) == 1.0f);
    assert_true(cop_exp(-87.1f) == 0.0f && cop_exp(-INFINITY) == 0.0f);
    assert_true(cop_exp(INFINITY) == cop_exp(88.0f) && cop_exp(88.5f) == cop_exp(88.0f));
    assert_true(isnan(cop_exp(NAN)));
    double worst = 0;
    for (float x = -87.0f; x <= 88.0f; x += 0.00037f)
        worst = fmax(worst, fabs(cop_exp(x) / exp((double)x) - 1));
    if (worst > 1.2e-7) fail_msg("exp is off by %.3g", worst);
}

static void log_is_accurate(void **state) {
    (void)state;
    assert_true(cop_log(1.0f) == 0.0f);
    double worst = 0;
    for (uint32_t u = 0x00800000u; u < 0x7f800000u; u += 1009) {
        double want = log((double)cop_float(u));
        double error = fabs(cop_log(cop_float(u)) - want) / fmax(fabs(want), 0.5);
        worst = fmax(worst, error);
    }
    if (worst > 1.5e-7) fail_msg("log is off by %.3g", worst);
}

static void tanh_and_sigmoid_are_accurate(void **state) {
    (void)state;
    assert_true(cop_tanh(INFINITY) == 1.0f && cop_tanh(-INFINITY) == -1.0f);
    assert_true(cop_tanh(-0.0f) == 0.0f && isnan(cop_tanh(NAN)));
    assert_true(cop_sigmoid(0.0f) == 0.5f && isnan(cop_sigmoid(NAN)));
    double worst_tanh = 0, worst_sigmoid = 0;
    for (float x = -20.0f; x <= 20.0f; x += 0.00011f) {
        worst_tanh =
            fmax(worst_tanh, fabs(cop_tanh(x) - tanh((double)x)) / fmax(fabs(tanh((double)x)), 1e-3));
        worst_sigmoid = fmax(worst_sigmoid, fabs(cop_sigmoid(x) * (1 + exp(-(double)x)) - 1));
    }
    if (worst_tanh > 2.5e-7) fail_msg("tanh is off by %.3g", worst_tanh);
    if (worst_sigmoid > 2.5e-7) fail_msg("sigmoid is off by %.3g", worst_sigmoid);
}

static void gumbel_is_accurate_and_monotone(void **state) {
    (void)state;
    double worst = 0;
    for (uint64_t x = 0; x <= UINT32_MAX; x += (x < 50000 || x > UINT32_MAX - 50000ull) ? 1 : 2999) {
        long double e = -logl(((long double)x + 0.5L) * 0x1p-32L);
        worst = fmax(worst, fabs((double)((long double)cop_gumbel((uint32_t)x) + logl(e))));
    }
    if (worst > 1.1e-6) fail_msg("gumbel is off by %.3g", worst);
    float last = -4.0f;
    for (uint64_t x = 0; x <= UINT32_MAX; x += 4099) {
        float g = cop_gumbel((uint32_t)x);
        assert_true(g >= last);
        last = g;
    }
    assert_true(cop_gumbel(0) > -3.131f && cop_gumbel(UINT32_MAX) < 22.875f);
}

static void bf16_rounds_to_nearest_even(void **state) {
    (void)state;
    assert_int_equal(cop_bf16(1.0f), 0x3f80);
    assert_int_equal(cop_bf16(cop_float(0x3f808000)), 0x3f80); /* a tie goes to the even one */
    assert_int_equal(cop_bf16(cop_float(0x3f818000)), 0x3f82);
    assert_int_equal(cop_bf16(cop_float(0x3f808001)), 0x3f81);
    assert_int_equal(cop_bf16(cop_float(0x7f7fffff)), 0x7f80); /* past the greatest: infinity */
    assert_int_equal(cop_bf16(cop_float(0xffffffff)), 0x7fc0);
    assert_int_equal(cop_bf16(-0.0f), 0x8000);
}

/* The hash of f over every 1021st bit pattern, all NaN taken for one. */
static uint64_t sweep(const cpu_ops *ops, cpu_function f) {
    enum { N = 4096 };
    static uint32_t words[N];
    XXH3_state_t *hash = XXH3_createState();
    XXH3_64bits_reset(hash);
    for (uint64_t u = 0; u <= UINT32_MAX;) {
        size_t n = 0;
        for (; n < N && u <= UINT32_MAX; n++, u += 1021) words[n] = (uint32_t)u;
        ops->map(f, words, n);
        for (size_t i = 0; i < n; i++)
            if ((words[i] & 0x7fffffffu) > 0x7f800000u) words[i] = 0x7fc00000u;
        XXH3_64bits_update(hash, words, n * sizeof words[0]);
    }
    uint64_t digest = XXH3_64bits_digest(hash);
    XXH3_freeState(hash);
    return digest;
}

static void sweeps_have_their_hashes(void **state) {
    (void)state;
    static const struct {
        cpu_function f;
        const char *name;
        uint64_t hash;
    } cases[] = {
        {CPU_EXP, "exp", 0xc6ee6348558db962},       {CPU_LOG, "log", 0x295443393938c3d1},
        {CPU_TANH, "tanh", 0xe7421defa4b1df02},     {CPU_SIGMOID, "sigmoid", 0x283856a6af20d4ba},
        {CPU_GUMBEL, "gumbel", 0x8a365b1df72c578c},
    };
    const char *const isas[] = {"scalar", "avx2", "avx512"};
    for (size_t isa = 0; isa < sizeof isas / sizeof isas[0]; isa++) {
        k_ctx *k = open_isa(isas[isa], PRECISION_F32, 1);
        if (!k) continue;
        cpu_flush_denormals();
        for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
            uint64_t got = sweep(k->ops, cases[i].f);
            if (got != cases[i].hash)
                fail_msg("%s, %s: 0x%016llx", cases[i].name, isas[isa], (unsigned long long)got);
        }
        k_close(k);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(philox_gives_the_known_answers),
        cmocka_unit_test(exp_is_accurate),
        cmocka_unit_test(log_is_accurate),
        cmocka_unit_test(tanh_and_sigmoid_are_accurate),
        cmocka_unit_test(gumbel_is_accurate_and_monotone),
        cmocka_unit_test(bf16_rounds_to_nearest_even),
        cmocka_unit_test(sweeps_have_their_hashes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
