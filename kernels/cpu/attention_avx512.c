/* Attention with AVX-512. */
#if defined __AVX512F__ || defined COP_EMULATE_AVX512
#include "kernels/cpu/simd_avx512.h"

#define ATTENTION_VECTORS(rows) 4
#define ATTENTION_NAME cpu_attention_avx512
#include "kernels/cpu/attention_simd.h"
#else
typedef int no_avx512;
#endif
