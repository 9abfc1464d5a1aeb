/* The vector bodies that lie in files of their own. */
#ifndef COP_CPU_SIMD_OPS_H
#define COP_CPU_SIMD_OPS_H

#include "kernels/cpu/cpu.h"

void cpu_attention_avx2(const cpu_attention *a, int kv_head, int first, int end, float *room);
void cpu_attention_avx512(const cpu_attention *a, int kv_head, int first, int end, float *room);
extern const cpu_gemm_body cpu_gemm_avx2, cpu_gemm_avx512,
    cpu_gemm_avx512bf16; /* the last: bf16 weights only */
extern const cpu_probe cpu_probe_avx2, cpu_probe_avx512, cpu_probe_avx512bf16;

#endif
