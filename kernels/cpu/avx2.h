/* The AVX2 bodies that lie in files of their own. */
#ifndef COP_CPU_AVX2_H
#define COP_CPU_AVX2_H

#include "kernels/cpu/cpu.h"

void cpu_gemm_avx2(const cpu_gemm *g, int tile, int tile_end, int row, int row_end);
void cpu_attention_avx2(const cpu_attention *a, int t, int head);

#endif
