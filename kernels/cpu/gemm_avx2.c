/* y = W x with AVX2 and FMA: blocks of up to 6 rows by a tile of 16 outputs hold 12 sums, two weights and one
 * input in the 16 registers. */
#ifdef __AVX2__
#include "kernels/cpu/simd_avx2.h"

#define GEMM_NAME cpu_gemm_avx2
#define GEMM_ROWS_F32 6
#define GEMM_ROWS_BF16 5
#define GEMM_TILES_1 4
#define GEMM_TILES_2 2
#define GEMM_TILES 1
#include "kernels/cpu/gemm_simd.h"
#else
typedef int no_avx2;
#endif
