/* The bodies of measure.c with AVX-512 and vdpbf16ps, which multiplies and adds two pairs in each lane. */
#if defined __AVX512BF16__ || defined COP_EMULATE_AVX512
#include "kernels/cpu/simd_avx512.h"

static inline vf add_pairs(vf acc, vf x, vf y) {
#ifdef COP_EMULATE_AVX512
    const vi odd = vi_set(0xffff0000u);
    acc = v_fma(v_of(vi_and(vi_of(x), odd)), v_of(vi_and(vi_of(y), odd)), acc);
    return v_fma(v_of(vi_left(vi_of(x), 16)), v_of(vi_left(vi_of(y), 16)), acc);
#else
    return _mm512_dpbf16_ps(acc, (__m512bh)vi_of(x), (__m512bh)vi_of(y));
#endif
}

#define PROBE_NAME cpu_probe_avx512bf16
#define PROBE_OPERATIONS 4
#define PROBE_BURN(acc, x, y) add_pairs(acc, x, y)
#include "kernels/cpu/measure_simd.h"
#else
typedef int no_avx512bf16;
#endif
