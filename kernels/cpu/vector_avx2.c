/* The table of AVX2 bodies, and those that run along one row. */
#include "kernels/cpu/simd_ops.h"

#ifdef __AVX2__
#include "kernels/cpu/simd_avx2.h"
#include "kernels/cpu/vector_simd.h"

static const cpu_ops table = {
    .gemm = &cpu_gemm_avx2, .attention = cpu_attention_avx2, VECTOR_OPS, .probe = &cpu_probe_avx2};

const cpu_ops *cpu_ops_avx2(void) { return &table; }
#else
const cpu_ops *cpu_ops_avx2(void) { return NULL; }
#endif
