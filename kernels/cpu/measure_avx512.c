/* The bodies of measure.c with AVX-512. */
#if defined __AVX512F__ || defined COP_EMULATE_AVX512
#include "kernels/cpu/simd_avx512.h"

#define PROBE_NAME cpu_probe_avx512
#define PROBE_OPERATIONS 2
#define PROBE_BURN(acc, x, y) v_fma(x, y, acc)
#include "kernels/cpu/measure_simd.h"
#else
typedef int no_avx512;
#endif
