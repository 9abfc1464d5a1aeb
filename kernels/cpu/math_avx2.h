/* math.h, eight lanes at a time: the same operations in the same order, so the same bits. */
#ifndef COP_CPU_MATH_AVX2_H
#define COP_CPU_MATH_AVX2_H

#include <immintrin.h>

#include "kernels/cpu/math.h"

#define V_SET _mm256_set1_ps
#define V_FMA _mm256_fmadd_ps

static inline __m256 v_xor_sign(__m256 x, __m256 sign_of) {
    return _mm256_xor_ps(x, _mm256_and_ps(sign_of, _mm256_castsi256_ps(_mm256_set1_epi32(INT32_MIN))));
}

static inline __m256 v_negate(__m256 x) {
    return _mm256_xor_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(INT32_MIN)));
}

/* Eight bf16 as fp32. */
static inline __m256 v_widen(const uint16_t *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

static inline __m256 v_round_bf16(__m256 x) {
    __m256i u = _mm256_castps_si256(x);
    __m256i last = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i up = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), last);
    __m256 rounded = _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32((int)0xffff0000u)));
    __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
    return _mm256_blendv_ps(rounded, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

static inline __m256 v_exp(__m256 x) {
    __m256 c = _mm256_blendv_ps(x, V_SET(88.0f), _mm256_cmp_ps(x, V_SET(88.0f), _CMP_GT_OQ));
    __m256 t = V_FMA(c, V_SET(1.44269504f), V_SET(COP_ROUND_MAGIC));
    __m256 k = _mm256_sub_ps(t, V_SET(COP_ROUND_MAGIC));
    __m256 r = V_FMA(k, V_SET(-COP_LN2_HIGH), c);
    r = V_FMA(k, V_SET(COP_LN2_LOW), r);
    __m256 p = V_SET(1.9875691500e-4f);
    p = V_FMA(p, r, V_SET(1.3981999507e-3f));
    p = V_FMA(p, r, V_SET(8.3334519073e-3f));
    p = V_FMA(p, r, V_SET(4.1665795894e-2f));
    p = V_FMA(p, r, V_SET(1.6666665459e-1f));
    p = V_FMA(p, r, V_SET(5.0000001201e-1f));
    p = _mm256_add_ps(V_FMA(_mm256_mul_ps(p, r), r, r), V_SET(1.0f));
    __m256i shift = _mm256_slli_epi32(_mm256_castps_si256(t), 23);
    __m256 y = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), shift));
    y = _mm256_andnot_ps(_mm256_cmp_ps(x, V_SET(-87.0f), _CMP_LT_OQ), y);
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

static inline __m256 v_log(__m256 x) {
    __m256i u = _mm256_castps_si256(x);
    __m256i e = _mm256_srai_epi32(_mm256_sub_epi32(u, _mm256_set1_epi32(0x3f3504f3)), 23);
    __m256 m = _mm256_castsi256_ps(_mm256_sub_epi32(u, _mm256_slli_epi32(e, 23)));
    __m256 f = _mm256_sub_ps(m, V_SET(1.0f)), z = _mm256_mul_ps(f, f);
    __m256 p = V_SET(7.0376836292e-2f);
    p = V_FMA(p, f, V_SET(-1.1514610310e-1f));
    p = V_FMA(p, f, V_SET(1.1676998740e-1f));
    p = V_FMA(p, f, V_SET(-1.2420140846e-1f));
    p = V_FMA(p, f, V_SET(1.4249322787e-1f));
    p = V_FMA(p, f, V_SET(-1.6668057665e-1f));
    p = V_FMA(p, f, V_SET(2.0000714765e-1f));
    p = V_FMA(p, f, V_SET(-2.4999993993e-1f));
    p = V_FMA(p, f, V_SET(3.3333331174e-1f));
    __m256 y = _mm256_mul_ps(_mm256_mul_ps(p, f), z), k = _mm256_cvtepi32_ps(e);
    y = V_FMA(k, V_SET(-COP_LN2_LOW), y);
    y = V_FMA(V_SET(-0.5f), z, y);
    return V_FMA(k, V_SET(COP_LN2_HIGH), _mm256_add_ps(f, y));
}

static inline __m256 v_sigmoid(__m256 x) {
    return _mm256_div_ps(V_SET(1.0f), _mm256_add_ps(V_SET(1.0f), v_exp(v_negate(x))));
}

static inline __m256 v_tanh(__m256 x) {
    __m256 a = _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)));
    __m256 z = _mm256_mul_ps(x, x);
    __m256 p = V_SET(-5.70498872745e-3f);
    p = V_FMA(p, z, V_SET(2.06390887954e-2f));
    p = V_FMA(p, z, V_SET(-5.37397155531e-2f));
    p = V_FMA(p, z, V_SET(1.33314422036e-1f));
    p = V_FMA(p, z, V_SET(-3.33332819422e-1f));
    __m256 near = V_FMA(_mm256_mul_ps(p, z), x, x);
    __m256 e = _mm256_add_ps(v_exp(_mm256_add_ps(a, a)), V_SET(1.0f));
    __m256 far = _mm256_sub_ps(V_SET(1.0f), _mm256_div_ps(V_SET(2.0f), e));
    return _mm256_blendv_ps(v_xor_sign(far, x), near, _mm256_cmp_ps(a, V_SET(0.625f), _CMP_LT_OQ));
}

/* Unsigned integers, rounded once: both halves are exact and their sum is the only rounding. */
static inline __m256 v_unsigned(__m256i x) {
    __m256 high = _mm256_cvtepi32_ps(_mm256_srli_epi32(x, 16));
    __m256 low = _mm256_cvtepi32_ps(_mm256_and_si256(x, _mm256_set1_epi32(0xffff)));
    return V_FMA(high, V_SET(65536.0f), low);
}

static inline __m256 v_gumbel(__m256i x) {
    __m256i complement = _mm256_xor_si256(x, _mm256_set1_epi32(-1));
    __m256 v = _mm256_mul_ps(_mm256_add_ps(v_unsigned(complement), V_SET(0.5f)), V_SET(0x1p-32f));
    __m256 s = _mm256_div_ps(v, _mm256_sub_ps(V_SET(2.0f), v)), q = _mm256_mul_ps(s, s);
    __m256 p = V_SET(1.0f / 13);
    p = V_FMA(p, q, V_SET(1.0f / 11));
    p = V_FMA(p, q, V_SET(1.0f / 9));
    p = V_FMA(p, q, V_SET(1.0f / 7));
    p = V_FMA(p, q, V_SET(0.2f));
    p = V_FMA(p, q, V_SET(1.0f / 3));
    __m256 high = _mm256_mul_ps(V_SET(2.0f), V_FMA(s, _mm256_mul_ps(p, q), s));
    __m256 u = _mm256_mul_ps(_mm256_add_ps(v_unsigned(x), V_SET(0.5f)), V_SET(0x1p-32f));
    __m256 low = v_negate(v_log(u));
    __m256i border = _mm256_set1_epi32((int)0xC0000000u);
    __m256i is_high = _mm256_cmpeq_epi32(_mm256_max_epu32(x, border), x);
    return v_negate(v_log(_mm256_blendv_ps(low, high, _mm256_castsi256_ps(is_high))));
}

static inline void v_multiply(__m256i a, __m256i m, __m256i *high, __m256i *low) {
    __m256i even = _mm256_mul_epu32(a, m), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), m);
    *low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
    *high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
}

/* Eight blocks of Philox at once; c holds the four words of the counters, then of the outputs. */
static inline void v_philox(__m256i c[4], const uint32_t key[2]) {
    const __m256i m0 = _mm256_set1_epi32((int)0xD2511F53u), m1 = _mm256_set1_epi32((int)0xCD9E8D57u);
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        __m256i a_high, a_low, b_high, b_low;
        v_multiply(c[0], m0, &a_high, &a_low);
        v_multiply(c[2], m1, &b_high, &b_low);
        c[0] = _mm256_xor_si256(_mm256_xor_si256(b_high, c[1]), _mm256_set1_epi32((int)k0));
        c[1] = b_low;
        c[2] = _mm256_xor_si256(_mm256_xor_si256(a_high, c[3]), _mm256_set1_epi32((int)k1));
        c[3] = a_low;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

#endif
