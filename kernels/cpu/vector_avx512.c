/* The tables of AVX-512 bodies, and those that run along one row. */
#include "kernels/cpu/simd_ops.h"

#if defined __AVX512F__ || defined COP_EMULATE_AVX512
#include "kernels/cpu/simd_avx512.h"
#include "kernels/cpu/vector_simd.h"

static const cpu_ops table = {
    .gemm = &cpu_gemm_avx512, .attention = cpu_attention_avx512, VECTOR_OPS, .probe = &cpu_probe_avx512};
static const cpu_ops table_bf16 = {.gemm = &cpu_gemm_avx512bf16,
                                   .attention = cpu_attention_avx512,
                                   VECTOR_OPS,
                                   .probe = &cpu_probe_avx512bf16};

const cpu_ops *cpu_ops_avx512(void) { return &table; }
const cpu_ops *cpu_ops_avx512bf16(void) { return &table_bf16; }
#else
const cpu_ops *cpu_ops_avx512(void) { return NULL; }
const cpu_ops *cpu_ops_avx512bf16(void) { return NULL; }
#endif
