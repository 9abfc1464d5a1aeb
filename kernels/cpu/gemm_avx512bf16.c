/* y = W x with vdpbf16ps, for bf16 weights: fma of the odd inputs, then of the even ones, each rounded to
 * nearest with denormals flushed, which is rule 1's chain. */
#if defined __AVX512BF16__ || defined COP_EMULATE_AVX512
#include "kernels/cpu/simd_avx512.h"

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
