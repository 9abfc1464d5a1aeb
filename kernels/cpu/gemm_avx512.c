/* y = W x with AVX-512: blocks of up to 8 rows by three tiles hold 24 sums in the 32 registers. */
#if defined __AVX512F__ || defined COP_EMULATE_AVX512
#include "kernels/cpu/simd_avx512.h"

#define GEMM_NAME cpu_gemm_avx512
#define GEMM_ROWS_F32 8
#define GEMM_ROWS_BF16 7
#define GEMM_TILES_1 8
#define GEMM_TILES_2 4
#define GEMM_TILES 3
#include "kernels/cpu/gemm_simd.h"
#else
typedef int no_avx512;
#endif
