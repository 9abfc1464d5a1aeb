/* The bodies of measure.c with AVX-512 and vdpbf16ps, which multiplies and adds two pairs in each lane. */
#if defined __AVX512BF16__ || defined COP_EMULATE_AVX512
#include "kernels/cpu/simd_avx512.h"

#define PROBE_NAME cpu_probe_avx512bf16
#define PROBE_OPERATIONS 4
#define PROBE_BURN(acc, x, y) v_pairs(acc, vi_of(x), vi_of(y))
#include "kernels/cpu/measure_simd.h"
#else
typedef int no_avx512bf16;
#endif
