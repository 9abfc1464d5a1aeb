/* Everything that runs along one row: norms, rotation, softcap, sums of exponentials, the draw. */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/math.h"
#include "kernels/cpu/scalar.h"

#include <assert.h>

float cpu_lane_tree(float lanes[CPU_LANES]) {
    for (int s = CPU_LANES / 2; s > 0; s /= 2)
        for (int i = 0; i < s; i++) lanes[i] = lanes[i] + lanes[i + s];
    return lanes[0];
}

float cpu_inverse_rms_scalar(const float *x, int n, float eps) {
    float sum = 0.0f;
    for (int first = 0; first < n; first += CPU_NORM_BLOCK) {
        int end = n - first < CPU_NORM_BLOCK ? n : first + CPU_NORM_BLOCK;
        float lanes[CPU_LANES] = {0};
        for (int i = first; i < end; i++) lanes[i % CPU_LANES] = fmaf(x[i], x[i], lanes[i % CPU_LANES]);
        sum = sum + cpu_lane_tree(lanes);
    }
    return 1.0f / sqrtf(sum / (float)n + eps);
}

void cpu_scale_scalar(float *out, const float *x, float scale, int n, bool bf16) {
    for (int i = 0; i < n; i++) out[i] = bf16 ? cop_round_bf16(x[i] * scale) : x[i] * scale;
}

void cpu_mix_scalar(float *x, const float *y, float a, float b, int n) {
    for (int i = 0; i < n; i++) x[i] = a * x[i] + b * y[i];
}

void cpu_sub_scaled_scalar(float *x, const float *y, float scale, size_t n) {
    for (size_t i = 0; i < n; i++) x[i] = x[i] - scale * y[i];
}

void cpu_add_scaled_scalar(float *x, const void *y, float scale, int n, bool bf16) {
    for (int i = 0; i < n; i++)
        x[i] = x[i] + scale * (bf16 ? cop_widen(((const uint16_t *)y)[i]) : ((const float *)y)[i]);
}

void cpu_narrow_scalar(uint16_t *out, const float *x, int n) {
    for (int i = 0; i < n; i++) out[i] = cop_bf16(x[i]);
}

void cpu_rotate_scalar(float *x, const float *cosines, const float *sines, int half) {
    for (int i = 0; i < half; i++) {
        float a = x[i], b = x[i + half], c = cosines[i], s = sines[i];
        x[i] = fmaf(b, s, a * c);
        x[i + half] = fmaf(b, c, cop_negate(a * s));
    }
}

void cpu_softcap_scalar(float *x, int n, float cap) {
    for (int i = 0; i < n; i++) x[i] = cap * cop_tanh(x[i] / cap);
}

bool cpu_max_scalar(float *max, const float *x, int n) {
    assert(n >= 1);
    *max = x[0];
    for (int i = 0; i < n; i++) {
        if (x[i] != x[i]) return false;
        if (x[i] > *max) *max = x[i];
    }
    return true;
}

bool cpu_block_max_scalar(float *max, const float *x, int n) {
    for (int first = 0; first < n; first += CPU_MAX_BLOCK) {
        int length = n - first < CPU_MAX_BLOCK ? n - first : CPU_MAX_BLOCK;
        if (!cpu_max_scalar(max++, x + first, length)) return false;
    }
    return true;
}

/* Element i of a tile of 1024 goes to lane i % 16 by plain addition. */
float cpu_exp_sum_scalar(const float *x, int n, float scale, float max) {
    float sum = 0.0f;
    for (int first = 0; first < n; first += CPU_SOFTMAX_TILE) {
        int end = n - first < CPU_SOFTMAX_TILE ? n : first + CPU_SOFTMAX_TILE;
        float lanes[CPU_LANES] = {0};
        for (int i = first; i < end; i++) {
            float y = x[i] * scale;
            lanes[i % CPU_LANES] = lanes[i % CPU_LANES] + cop_exp(y - max);
        }
        sum = sum + cpu_lane_tree(lanes);
    }
    return sum;
}

float cpu_entropy_sum_scalar(const float *x, int n, float scale, float max) {
    float sum = 0.0f;
    for (int first = 0; first < n; first += CPU_SOFTMAX_TILE) {
        int end = n - first < CPU_SOFTMAX_TILE ? n : first + CPU_SOFTMAX_TILE;
        float lanes[CPU_LANES] = {0};
        for (int i = first; i < end; i++) {
            float y = x[i] * scale - max;
            lanes[i % CPU_LANES] = lanes[i % CPU_LANES] + cop_entropy_term(cop_exp(y), y);
        }
        sum = sum + cpu_lane_tree(lanes);
    }
    return sum;
}

uint64_t cpu_fixed_sum_scalar(const float *x, int n, float scale, float max) {
    uint64_t sum = 0;
    for (int i = 0; i < n; i++) {
        float y = x[i] * scale;
        sum += (uint64_t)((double)cop_exp(y - max) * CPU_FIXED_ONE);
    }
    return sum;
}

float cpu_noise_of(const cpu_noise *noise, int32_t id) {
    uint32_t counter[4] = {(uint32_t)id / 4, noise->index, noise->sample, noise->prompt_hash}, words[4];
    cop_philox(counter, noise->key, words);
    return cop_gumbel(words[id % 4]);
}

int32_t cpu_draw_scalar(const float *x, int n, float scale, const cpu_noise *noise) {
    assert(n >= 1);
    int32_t best = 0;
    float best_score = -INFINITY;
    uint32_t counter[4] = {0, noise->index, noise->sample, noise->prompt_hash}, words[4];
    for (int32_t i = 0; i < n; i++) {
        if (i % 4 == 0) {
            counter[0] = (uint32_t)i / 4;
            cop_philox(counter, noise->key, words);
        }
        float score = fmaf(x[i], scale, cop_gumbel(words[i % 4]));
        if (!(score > best_score)) continue;
        best_score = score;
        best = i;
    }
    return best;
}

void cpu_map_scalar(cpu_function f, uint32_t *words, size_t n) {
    for (size_t i = 0; i < n; i++) {
        float x = cop_float(words[i]);
        switch (f) {
        case CPU_EXP: x = cop_exp(x); break;
        case CPU_LOG: x = cop_log(x); break;
        case CPU_TANH: x = cop_tanh(x); break;
        case CPU_SIGMOID: x = cop_sigmoid(x); break;
        case CPU_GUMBEL: x = cop_gumbel(words[i]); break;
        }
        words[i] = cop_bits(x);
    }
}

const cpu_ops cpu_ops_scalar = {
    .gemm = &cpu_gemm_body_scalar,
    .attention = cpu_attention_scalar,
    .inverse_rms = cpu_inverse_rms_scalar,
    .scale = cpu_scale_scalar,
    .mix = cpu_mix_scalar,
    .sub_scaled = cpu_sub_scaled_scalar,
    .add_scaled = cpu_add_scaled_scalar,
    .narrow = cpu_narrow_scalar,
    .rotate = cpu_rotate_scalar,
    .softcap = cpu_softcap_scalar,
    .max = cpu_max_scalar,
    .block_max = cpu_block_max_scalar,
    .exp_sum = cpu_exp_sum_scalar,
    .entropy_sum = cpu_entropy_sum_scalar,
    .fixed_sum = cpu_fixed_sum_scalar,
    .draw = cpu_draw_scalar,
    .map = cpu_map_scalar,
    .probe = &cpu_probe_scalar,
};
