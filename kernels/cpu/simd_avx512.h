/* Sixteen lanes: the primitives of simd_avx2.h with AVX-512 (F, BW, DQ, VL). */
#ifndef COP_CPU_SIMD_H
#define COP_CPU_SIMD_H

#ifdef COP_EMULATE_AVX512
#include "kernels/cpu/emulate_avx512.h"
#else
#include <immintrin.h>
#endif
#include <stdint.h>

#define V_LANES 16
#define V_NAME(name) name##_avx512

typedef __m512 vf;
typedef __m512i vi;
typedef __mmask16 vm;

static inline vf v_set(float x) { return _mm512_set1_ps(x); }
static inline vf v_zero(void) { return _mm512_setzero_ps(); }
static inline vf v_load(const float *p) { return _mm512_loadu_ps(p); }
static inline vf v_broadcast(const float *p) { return _mm512_set1_ps(*p); }
static inline void v_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
static inline vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); }

static inline vi vi_set(uint32_t x) { return _mm512_set1_epi32((int)x); }
static inline vi vi_lanes(void) {
    return _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
}
static inline vi vi_load(const void *p) { return _mm512_loadu_si512(p); }
static inline void vi_store(void *p, vi x) { _mm512_storeu_si512(p, x); }
static inline vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
static inline vi vi_sub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
static inline vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
static inline vi vi_or(vi a, vi b) { return _mm512_or_si512(a, b); }
static inline vi vi_xor(vi a, vi b) { return _mm512_xor_si512(a, b); }
static inline vi vi_max_unsigned(vi a, vi b) { return _mm512_max_epu32(a, b); }
static inline vi vi_left(vi a, int n) { return _mm512_slli_epi32(a, (unsigned)n); }
static inline vi vi_right(vi a, int n) { return _mm512_srli_epi32(a, (unsigned)n); }
static inline vi vi_right_signed(vi a, int n) { return _mm512_srai_epi32(a, (unsigned)n); }
static inline vf v_of(vi bits) { return _mm512_castsi512_ps(bits); }
static inline vi vi_of(vf x) { return _mm512_castps_si512(x); }
static inline vf v_from_int(vi x) { return _mm512_cvtepi32_ps(x); }
static inline vi vi_truncate(vf x) { return _mm512_cvttps_epi32(x); }

static inline vm vm_less(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
static inline vm vm_greater(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
static inline vm vm_nan(vf a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
static inline vm vm_below(vi a, vi b) { return _mm512_cmpgt_epi32_mask(b, a); }
static inline vm vm_at_least_unsigned(vi a, vi b) { return _mm512_cmpge_epu32_mask(a, b); }
static inline vm vm_and(vm a, vm b) { return (vm)(a & b); }
static inline vm vm_or(vm a, vm b) { return (vm)(a | b); }
static inline vm vm_none(void) { return 0; }
static inline uint32_t vm_bits(vm m) { return m; }
static inline vf v_select(vm m, vf yes, vf no) { return _mm512_mask_blend_ps(m, no, yes); }
static inline vi vi_select(vm m, vi yes, vi no) { return _mm512_mask_blend_epi32(m, no, yes); }

static inline float v_greatest(vf x) {
    __m128 low = _mm_max_ps(_mm512_extractf32x4_ps(x, 0), _mm512_extractf32x4_ps(x, 1));
    __m128 four = _mm_max_ps(low, _mm_max_ps(_mm512_extractf32x4_ps(x, 2), _mm512_extractf32x4_ps(x, 3)));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}

static inline vf v_widen(const uint16_t *p) {
    return v_of(vi_left(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}

static inline void vi_store_high(uint16_t *p, vi x) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(vi_right(x, 16)));
}

static inline void vi_multiply(vi a, uint32_t m, vi *high, vi *low) {
    __m512i even = _mm512_mul_epu32(a, vi_set(m));
    __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), vi_set(m));
    *low = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
    *high = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
}

static inline void vi_interleave(vi out[4], const vi c[4]) {
    __m512i r0 = _mm512_unpacklo_epi32(c[0], c[1]), r1 = _mm512_unpackhi_epi32(c[0], c[1]);
    __m512i r2 = _mm512_unpacklo_epi32(c[2], c[3]), r3 = _mm512_unpackhi_epi32(c[2], c[3]);
    /* s[i] holds blocks i, i + 4, i + 8, i + 12, one in each quarter: transpose the quarters. */
    __m512i s0 = _mm512_unpacklo_epi64(r0, r2), s1 = _mm512_unpackhi_epi64(r0, r2);
    __m512i s2 = _mm512_unpacklo_epi64(r1, r3), s3 = _mm512_unpackhi_epi64(r1, r3);
    __m512i t0 = _mm512_shuffle_i32x4(s0, s1, 0x44), t1 = _mm512_shuffle_i32x4(s2, s3, 0x44);
    __m512i t2 = _mm512_shuffle_i32x4(s0, s1, 0xee), t3 = _mm512_shuffle_i32x4(s2, s3, 0xee);
    out[0] = _mm512_shuffle_i32x4(t0, t1, 0x88);
    out[1] = _mm512_shuffle_i32x4(t0, t1, 0xdd);
    out[2] = _mm512_shuffle_i32x4(t2, t3, 0x88);
    out[3] = _mm512_shuffle_i32x4(t2, t3, 0xdd);
}

#if defined __AVX512BF16__ || defined COP_EMULATE_AVX512
/* Pairs of bf16 in each lane: acc plus the product of the odd ones, then of the even ones, each rounded. */
static inline vf v_pairs(vf acc, vi w, vi x) {
#ifdef COP_EMULATE_AVX512
    const vi odd = vi_set(0xffff0000u);
    acc = v_fma(v_of(vi_and(w, odd)), v_of(vi_and(x, odd)), acc);
    return v_fma(v_of(vi_left(w, 16)), v_of(vi_left(x, 16)), acc);
#else
    return _mm512_dpbf16_ps(acc, (__m512bh)w, (__m512bh)x);
#endif
}
#endif

#endif
