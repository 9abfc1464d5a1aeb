/* y = W x with vdpbf16ps, for bf16 weights: fma of the odd inputs, then of the even ones, each rounded to
 * nearest with denormals flushed, which is rule 1's chain. */
#if defined __AVX512BF16__ || defined COP_EMULATE_AVX512
#include "kernels/cpu/simd_avx512.h"

static inline vf v_pairs(vf acc, vi w, vi x) {
#ifdef COP_EMULATE_AVX512
    const vi odd = vi_set(0xffff0000u);
    acc = v_fma(v_of(vi_and(w, odd)), v_of(vi_and(x, odd)), acc);
    return v_fma(v_of(vi_left(w, 16)), v_of(vi_left(x, 16)), acc);
#else
    return _mm512_dpbf16_ps(acc, (__m512bh)w, (__m512bh)x);
#endif
}

#define GEMM_NAME cpu_gemm_avx512bf16
#define GEMM_ROWS_F32 8
#define GEMM_ROWS_BF16 8
#define GEMM_TILES_1 8
#define GEMM_TILES_2 4
#define GEMM_TILES 3
#define GEMM_PAIRS
#include "kernels/cpu/gemm_simd.h"
#else
typedef int no_avx512bf16;
#endif
