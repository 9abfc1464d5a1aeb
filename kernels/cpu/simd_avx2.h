/* Eight lanes: the primitives that vector bodies are written in, with AVX2 and FMA.  simd_avx512.h has the
 * same names for sixteen.  Each does one operation per lane, rounded once, so a body has the same bits over
 * either. */
#ifndef COP_CPU_SIMD_H
#define COP_CPU_SIMD_H

#include <immintrin.h>
#include <stdint.h>

#define V_LANES 8
#define V_NAME(name) name##_avx2

typedef __m256 vf;  /* floats */
typedef __m256i vi; /* 32-bit words */
typedef __m256 vm;  /* a choice per lane */

static inline vf v_set(float x) { return _mm256_set1_ps(x); }
static inline vf v_zero(void) { return _mm256_setzero_ps(); }
static inline vf v_load(const float *p) { return _mm256_loadu_ps(p); }
static inline vf v_broadcast(const float *p) { return _mm256_broadcast_ss(p); }
static inline void v_store(float *p, vf x) { _mm256_storeu_ps(p, x); }
static inline vf v_add(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf v_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
static inline vf v_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf v_div(vf a, vf b) { return _mm256_div_ps(a, b); }
static inline vf v_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); } /* a * b + c */
static inline vf v_max(vf a, vf b) { return _mm256_max_ps(a, b); }            /* b where one is a NaN */

static inline vi vi_set(uint32_t x) { return _mm256_set1_epi32((int)x); }
static inline vi vi_lanes(void) { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
static inline vi vi_load(const void *p) { return _mm256_loadu_si256(p); }
static inline void vi_store(void *p, vi x) { _mm256_storeu_si256(p, x); }
static inline vi vi_add(vi a, vi b) { return _mm256_add_epi32(a, b); }
static inline vi vi_sub(vi a, vi b) { return _mm256_sub_epi32(a, b); }
static inline vi vi_and(vi a, vi b) { return _mm256_and_si256(a, b); }
static inline vi vi_or(vi a, vi b) { return _mm256_or_si256(a, b); }
static inline vi vi_xor(vi a, vi b) { return _mm256_xor_si256(a, b); }
static inline vi vi_max_unsigned(vi a, vi b) { return _mm256_max_epu32(a, b); }
static inline vi vi_left(vi a, int n) { return _mm256_slli_epi32(a, n); }
static inline vi vi_right(vi a, int n) { return _mm256_srli_epi32(a, n); }
static inline vi vi_right_signed(vi a, int n) { return _mm256_srai_epi32(a, n); }
static inline vf v_of(vi bits) { return _mm256_castsi256_ps(bits); }
static inline vi vi_of(vf x) { return _mm256_castps_si256(x); }
static inline vf v_from_int(vi x) { return _mm256_cvtepi32_ps(x); }   /* signed */
static inline vi vi_truncate(vf x) { return _mm256_cvttps_epi32(x); } /* to signed */

static inline vm vm_less(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
static inline vm vm_greater(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
static inline vm vm_nan(vf a) { return _mm256_cmp_ps(a, a, _CMP_UNORD_Q); }
static inline vm vm_below(vi a, vi b) { return v_of(_mm256_cmpgt_epi32(b, a)); } /* signed a < b */
static inline vm vm_at_least_unsigned(vi a, vi b) {
    return v_of(_mm256_cmpeq_epi32(_mm256_max_epu32(a, b), a));
}
static inline vm vm_and(vm a, vm b) { return _mm256_and_ps(a, b); }
static inline vm vm_or(vm a, vm b) { return _mm256_or_ps(a, b); }
static inline vm vm_none(void) { return v_zero(); }
static inline uint32_t vm_bits(vm m) { return (uint32_t)_mm256_movemask_ps(m); } /* bit i: lane i */
static inline vf v_select(vm m, vf yes, vf no) { return _mm256_blendv_ps(no, yes, m); }
static inline vi vi_select(vm m, vi yes, vi no) { return vi_of(v_select(m, v_of(yes), v_of(no))); }

/* The greatest lane, if none is a NaN. */
static inline float v_greatest(vf x) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}

/* V_LANES bf16 as floats. */
static inline vf v_widen(const uint16_t *p) {
    return v_of(vi_left(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}

/* The high halves of V_LANES words. */
static inline void vi_store_high(uint16_t *p, vi x) {
    __m256i high = vi_right(x, 16);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(packed));
}

/* Both halves of a * m, unsigned. */
static inline void vi_multiply(vi a, uint32_t m, vi *high, vi *low) {
    __m256i even = _mm256_mul_epu32(a, vi_set(m));
    __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), vi_set(m));
    *low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
    *high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
}

/* c[w] lane b becomes word 4 b + w of the 4 * V_LANES words of out. */
static inline void vi_interleave(vi out[4], const vi c[4]) {
    __m256i r0 = _mm256_unpacklo_epi32(c[0], c[1]), r1 = _mm256_unpackhi_epi32(c[0], c[1]);
    __m256i r2 = _mm256_unpacklo_epi32(c[2], c[3]), r3 = _mm256_unpackhi_epi32(c[2], c[3]);
    __m256i s04 = _mm256_unpacklo_epi64(r0, r2), s15 = _mm256_unpackhi_epi64(r0, r2);
    __m256i s26 = _mm256_unpacklo_epi64(r1, r3), s37 = _mm256_unpackhi_epi64(r1, r3);
    out[0] = _mm256_permute2x128_si256(s04, s15, 0x20);
    out[1] = _mm256_permute2x128_si256(s26, s37, 0x20);
    out[2] = _mm256_permute2x128_si256(s04, s15, 0x31);
    out[3] = _mm256_permute2x128_si256(s26, s37, 0x31);
}

#endif
