/* The bodies of measure.c with AVX2. */
#if defined __AVX2__
#include "kernels/cpu/simd_avx2.h"

#define PROBE_NAME cpu_probe_avx2
#define PROBE_OPERATIONS 2
#define PROBE_BURN(acc, x, y) v_fma(x, y, acc)
#include "kernels/cpu/measure_simd.h"
#else
typedef int no_avx2;
#endif
