/* Attention with AVX2. */
#if defined __AVX2__
#include "kernels/cpu/simd_avx2.h"

#define ATTENTION_VECTORS(rows) ((rows) == 1 ? 8 : (rows) <= 3 ? 4 : 2)
#define ATTENTION_NAME cpu_attention_avx2
#include "kernels/cpu/attention_simd.h"
#else
typedef int no_avx2;
#endif
