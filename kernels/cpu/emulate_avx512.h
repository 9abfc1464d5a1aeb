/* AVX-512 intrinsics in plain C, for the tests' flavour EMULATE=1: SIMDe, and what its release lacks. */
#ifndef COP_CPU_EMULATE_AVX512_H
#define COP_CPU_EMULATE_AVX512_H

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <stdint.h>
#include <string.h>

static inline __m512i emulate_widen_epu16(__m256i x) {
    uint16_t in[16];
    uint32_t out[16];
    memcpy(in, &x, sizeof in);
    for (int i = 0; i < 16; i++) out[i] = in[i];
    return _mm512_loadu_si512(out);
}

static inline __m256i emulate_low_epi16(__m512i x) {
    uint32_t in[16];
    uint16_t out[16];
    memcpy(in, &x, sizeof in);
    for (int i = 0; i < 16; i++) out[i] = (uint16_t)in[i];
    return _mm256_loadu_si256((const __m256i *)out);
}

static inline __m512i emulate_right_signed(__m512i x, unsigned n) {
    int32_t words[16];
    memcpy(words, &x, sizeof words);
    for (int i = 0; i < 16; i++) words[i] = words[i] >> n;
    return _mm512_loadu_si512(words);
}

static inline __m512 emulate_from_int(__m512i x) {
    int32_t words[16];
    float out[16];
    memcpy(words, &x, sizeof words);
    for (int i = 0; i < 16; i++) out[i] = (float)words[i];
    return _mm512_loadu_ps(out);
}

static inline __m512i emulate_truncate(__m512 x) {
    float in[16];
    int32_t out[16];
    memcpy(in, &x, sizeof in);
    for (int i = 0; i < 16; i++) out[i] = (int32_t)in[i];
    return _mm512_loadu_si512(out);
}

#define _mm512_cvttps_epi32 emulate_truncate
#define _mm512_cvtepi32_ps emulate_from_int
#define _mm512_cvtepu16_epi32 emulate_widen_epu16
#define _mm512_cvtepi32_epi16 emulate_low_epi16
#define _mm512_srai_epi32 emulate_right_signed

#endif
