/* The scalar bodies, for their table and for the remainders of vector bodies. */
#ifndef COP_CPU_SCALAR_H
#define COP_CPU_SCALAR_H

#include "kernels/cpu/cpu.h"

extern const cpu_gemm_body cpu_gemm_body_scalar;
void cpu_gemm_scalar(const cpu_gemm *g, int tile, int tile_end, int row, int row_end);
void cpu_attention_scalar(const cpu_attention *a, int kv_head, int first, int end, float *room);
float cpu_inverse_rms_scalar(const float *x, int n, float eps);
void cpu_scale_scalar(float *out, const float *x, float scale, int n, bool bf16);
void cpu_mix_scalar(float *x, const float *y, float a, float b, int n);
void cpu_sub_scaled_scalar(float *x, const float *y, float scale, size_t n);
void cpu_add_scaled_scalar(float *x, const void *y, float scale, int n, bool bf16);
void cpu_narrow_scalar(uint16_t *out, const float *x, int n);
void cpu_rotate_scalar(float *x, const float *cosines, const float *sines, int half);
void cpu_softcap_scalar(float *x, int n, float cap);
bool cpu_max_scalar(float *max, const float *x, int n);
bool cpu_block_max_scalar(float *max, const float *x, int n);
float cpu_exp_sum_scalar(const float *x, int n, float scale, float max);
float cpu_entropy_sum_scalar(const float *x, int n, float scale, float max);
uint64_t cpu_fixed_sum_scalar(const float *x, int n, float scale, float max);
int32_t cpu_draw_scalar(const float *x, int n, float scale, const cpu_noise *noise);
void cpu_map_scalar(cpu_function f, uint32_t *words, size_t n);

/* The noise of one id. */
float cpu_noise_of(const cpu_noise *noise, int32_t id);

/* The sum of 16 lanes: a[i] + a[i + s] for s = 8, 4, 2, 1. */
float cpu_lane_tree(float lanes[CPU_LANES]);

#endif
