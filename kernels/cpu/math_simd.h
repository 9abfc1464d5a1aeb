/* math.h, V_LANES at a time: the same operations in the same order, so the same bits.  Include after
 * simd_*.h. */
#ifndef COP_CPU_MATH_SIMD_H
#define COP_CPU_MATH_SIMD_H

#include "kernels/cpu/math.h"

static inline vf v_negate(vf x) { return v_of(vi_xor(vi_of(x), vi_set(0x80000000u))); }

static inline vi vi_round_bf16(vf x) { /* the rounded value in the high half; the low half is undefined */
    vi u = vi_of(x), last = vi_and(vi_right(u, 16), vi_set(1));
    return vi_select(vm_nan(x), vi_set(0x7fc00000), vi_add(vi_add(u, vi_set(0x7fff)), last));
}

static inline vf v_round_bf16(vf x) { return v_of(vi_and(vi_round_bf16(x), vi_set(0xffff0000u))); }

static inline vf v_exp(vf x) {
    vf c = v_select(vm_greater(x, v_set(88.0f)), v_set(88.0f), x);
    vf t = v_fma(c, v_set(1.44269504f), v_set(COP_ROUND_MAGIC));
    vf k = v_sub(t, v_set(COP_ROUND_MAGIC));
    vf r = v_fma(k, v_set(-COP_LN2_HIGH), c);
    r = v_fma(k, v_set(COP_LN2_LOW), r);
    vf p = v_set(1.9875691500e-4f);
    p = v_fma(p, r, v_set(1.3981999507e-3f));
    p = v_fma(p, r, v_set(8.3334519073e-3f));
    p = v_fma(p, r, v_set(4.1665795894e-2f));
    p = v_fma(p, r, v_set(1.6666665459e-1f));
    p = v_fma(p, r, v_set(5.0000001201e-1f));
    p = v_add(v_fma(v_mul(p, r), r, r), v_set(1.0f));
    vf y = v_of(vi_add(vi_of(p), vi_left(vi_of(t), 23)));
    y = v_select(vm_less(x, v_set(-87.0f)), v_zero(), y);
    return v_select(vm_nan(x), x, y);
}

static inline vf v_log(vf x) {
    vi u = vi_of(x);
    vi e = vi_right_signed(vi_sub(u, vi_set(0x3f3504f3)), 23);
    vf f = v_sub(v_of(vi_sub(u, vi_left(e, 23))), v_set(1.0f)), z = v_mul(f, f);
    vf p = v_set(7.0376836292e-2f);
    p = v_fma(p, f, v_set(-1.1514610310e-1f));
    p = v_fma(p, f, v_set(1.1676998740e-1f));
    p = v_fma(p, f, v_set(-1.2420140846e-1f));
    p = v_fma(p, f, v_set(1.4249322787e-1f));
    p = v_fma(p, f, v_set(-1.6668057665e-1f));
    p = v_fma(p, f, v_set(2.0000714765e-1f));
    p = v_fma(p, f, v_set(-2.4999993993e-1f));
    p = v_fma(p, f, v_set(3.3333331174e-1f));
    vf y = v_mul(v_mul(p, f), z), k = v_from_int(e);
    y = v_fma(k, v_set(-COP_LN2_LOW), y);
    y = v_fma(v_set(-0.5f), z, y);
    return v_fma(k, v_set(COP_LN2_HIGH), v_add(f, y));
}

static inline vf v_entropy_term(vf exp_y, vf y) {
    return v_select(vm_greater(exp_y, v_zero()), v_mul(exp_y, y), v_zero());
}

static inline vf v_sigmoid(vf x) { return v_div(v_set(1.0f), v_add(v_set(1.0f), v_exp(v_negate(x)))); }

static inline vf v_tanh(vf x) {
    vf a = v_of(vi_and(vi_of(x), vi_set(0x7fffffff)));
    vf z = v_mul(x, x);
    vf p = v_set(-5.70498872745e-3f);
    p = v_fma(p, z, v_set(2.06390887954e-2f));
    p = v_fma(p, z, v_set(-5.37397155531e-2f));
    p = v_fma(p, z, v_set(1.33314422036e-1f));
    p = v_fma(p, z, v_set(-3.33332819422e-1f));
    vf near = v_fma(v_mul(p, z), x, x);
    vf e = v_add(v_exp(v_add(a, a)), v_set(1.0f));
    vf far = v_sub(v_set(1.0f), v_div(v_set(2.0f), e));
    far = v_of(vi_xor(vi_of(far), vi_and(vi_of(x), vi_set(0x80000000u))));
    return v_select(vm_less(a, v_set(0.625f)), near, far);
}

/* Unsigned integers, rounded once: both halves are exact and their sum is the only rounding. */
static inline vf v_from_unsigned(vi x) {
    vf high = v_from_int(vi_right(x, 16)), low = v_from_int(vi_and(x, vi_set(0xffff)));
    return v_fma(high, v_set(65536.0f), low);
}

static inline vf v_gumbel(vi x) {
    vi complement = vi_xor(x, vi_set(UINT32_MAX));
    vf v = v_mul(v_add(v_from_unsigned(complement), v_set(0.5f)), v_set(0x1p-32f));
    vf s = v_div(v, v_sub(v_set(2.0f), v)), q = v_mul(s, s);
    vf p = v_set(1.0f / 13);
    p = v_fma(p, q, v_set(1.0f / 11));
    p = v_fma(p, q, v_set(1.0f / 9));
    p = v_fma(p, q, v_set(1.0f / 7));
    p = v_fma(p, q, v_set(0.2f));
    p = v_fma(p, q, v_set(1.0f / 3));
    vf high = v_mul(v_set(2.0f), v_fma(s, v_mul(p, q), s));
    vf u = v_mul(v_add(v_from_unsigned(x), v_set(0.5f)), v_set(0x1p-32f));
    vf low = v_negate(v_log(u));
    return v_negate(v_log(v_select(vm_at_least_unsigned(x, vi_set(0xC0000000u)), high, low)));
}

/* V_LANES blocks of Philox at once; c holds the four words of the counters, then of the outputs. */
static inline void vi_philox(vi c[4], const uint32_t key[2]) {
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        vi a_high, a_low, b_high, b_low;
        vi_multiply(c[0], 0xD2511F53u, &a_high, &a_low);
        vi_multiply(c[2], 0xCD9E8D57u, &b_high, &b_low);
        c[0] = vi_xor(vi_xor(b_high, c[1]), vi_set(k0));
        c[1] = b_low;
        c[2] = vi_xor(vi_xor(a_high, c[3]), vi_set(k1));
        c[3] = a_low;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

#endif
