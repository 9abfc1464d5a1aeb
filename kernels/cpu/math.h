/* The functions whose bits every backend and instruction set shares: exp, log, tanh, sigmoid, bf16 rounding,
 * Philox and Gumbel noise.  This header is normative: other bodies (AVX2, CUDA) repeat its operations one by
 * one.
 *
 * Only integer operations and IEEE add, mul, div and fma are used, each rounded once to nearest; choices are
 * selects, and signs are flipped by xor because 0 - x is not -x at 0.  Threads that call these flush
 * denormals (FTZ and DAZ). */
#ifndef COP_CPU_MATH_H
#define COP_CPU_MATH_H

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline uint32_t cop_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

static inline float cop_float(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}

static inline float cop_negate(float x) { return cop_float(cop_bits(x) ^ 0x80000000u); }

/* ---- bf16: the high half of an fp32. */

/* Round to nearest even; every NaN becomes 0x7FC0. */
static inline uint16_t cop_bf16(float x) {
    uint32_t u = cop_bits(x);
    uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

static inline float cop_widen(uint16_t b) { return cop_float((uint32_t)b << 16); }

static inline float cop_round_bf16(float x) { return cop_widen(cop_bf16(x)); }

/* ---- Elementary functions. */

#define COP_LN2_HIGH 0.693359375f /* ln 2 = high - low; the high part times an exponent is exact */
#define COP_LN2_LOW 2.12194440e-4f
#define COP_ROUND_MAGIC 0x1.8p23f /* adding it leaves the nearest integer in the low bits */

/* e^x, relative error below 1.2e-7.  exp(0) is 1; above 88 as at 88; below -87 it is 0; NaN stays. */
static inline float cop_exp(float x) {
    float c = x > 88.0f ? 88.0f : x;
    float t = fmaf(c, 1.44269504f, COP_ROUND_MAGIC);
    float k = t - COP_ROUND_MAGIC;
    float r = fmaf(k, -COP_LN2_HIGH, c);
    r = fmaf(k, COP_LN2_LOW, r);
    float p = 1.9875691500e-4f;
    p = fmaf(p, r, 1.3981999507e-3f);
    p = fmaf(p, r, 8.3334519073e-3f);
    p = fmaf(p, r, 4.1665795894e-2f);
    p = fmaf(p, r, 1.6666665459e-1f);
    p = fmaf(p, r, 5.0000001201e-1f);
    p = fmaf(p * r, r, r) + 1.0f;
    float y = cop_float(cop_bits(p) + (cop_bits(t) << 23)); /* times 2^k */
    y = x < -87.0f ? 0.0f : y;
    return x != x ? x : y;
}

/* ln x for normal positive x; for other patterns some finite number. */
static inline float cop_log(float x) {
    uint32_t u = cop_bits(x);
    int32_t e = (int32_t)(u - 0x3f3504f3u) >> 23; /* so that x = m 2^e with m in [sqrt 1/2, sqrt 2) */
    float f = cop_float(u - ((uint32_t)e << 23)) - 1.0f;
    float z = f * f;
    float p = 7.0376836292e-2f;
    p = fmaf(p, f, -1.1514610310e-1f);
    p = fmaf(p, f, 1.1676998740e-1f);
    p = fmaf(p, f, -1.2420140846e-1f);
    p = fmaf(p, f, 1.4249322787e-1f);
    p = fmaf(p, f, -1.6668057665e-1f);
    p = fmaf(p, f, 2.0000714765e-1f);
    p = fmaf(p, f, -2.4999993993e-1f);
    p = fmaf(p, f, 3.3333331174e-1f);
    float y = (p * f) * z;
    float k = (float)e;
    y = fmaf(k, -COP_LN2_LOW, y);
    y = fmaf(-0.5f, z, y);
    return fmaf(k, COP_LN2_HIGH, f + y);
}

/* y e^y, given e^y: a term of the entropy.  +0 where e^y is 0, even if y is -inf. */
static inline float cop_entropy_term(float exp_y, float y) { return exp_y > 0.0f ? exp_y * y : 0.0f; }

static inline float cop_sigmoid(float x) { return 1.0f / (1.0f + cop_exp(cop_negate(x))); }

/* tanh x: an odd polynomial below 0.625, beyond it 1 - 2 / (e^2|x| + 1) with the sign of x.  tanh(-0) is
 * +0. */
static inline float cop_tanh(float x) {
    float a = cop_float(cop_bits(x) & 0x7fffffffu);
    float z = x * x;
    float p = -5.70498872745e-3f;
    p = fmaf(p, z, 2.06390887954e-2f);
    p = fmaf(p, z, -5.37397155531e-2f);
    p = fmaf(p, z, 1.33314422036e-1f);
    p = fmaf(p, z, -3.33332819422e-1f);
    float near = fmaf(p * z, x, x);
    float far = 1.0f - 2.0f / (cop_exp(a + a) + 1.0f);
    far = cop_float(cop_bits(far) ^ (cop_bits(x) & 0x80000000u));
    return a < 0.625f ? near : far;
}

/* ---- Noise. */

/* Philox4x32-10. */
static inline void cop_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3], k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * c0, b = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

/* -ln((x + 1/2) 2^-32), a standard exponential variate.  fp32 cannot hold a uniform near 1, so the upper
 * quarter takes the complement v and -ln(1 - v) = 2 atanh(v / (2 - v)). */
static inline float cop_exponential(uint32_t x) {
    float v = ((float)~x + 0.5f) * 0x1p-32f;
    float s = v / (2.0f - v), q = s * s;
    float p = 1.0f / 13;
    p = fmaf(p, q, 1.0f / 11);
    p = fmaf(p, q, 1.0f / 9);
    p = fmaf(p, q, 1.0f / 7);
    p = fmaf(p, q, 0.2f);
    p = fmaf(p, q, 1.0f / 3);
    float high = 2.0f * fmaf(s, p * q, s);
    float low = cop_negate(cop_log(((float)x + 0.5f) * 0x1p-32f));
    return x >= 0xC0000000u ? high : low;
}

/* Standard Gumbel noise from 32 random bits: between -3.131 and 22.875, absolute error below 1.1e-6 (half an
 * ulp at the top). */
static inline float cop_gumbel(uint32_t x) { return cop_negate(cop_log(cop_exponential(x))); }

#endif
