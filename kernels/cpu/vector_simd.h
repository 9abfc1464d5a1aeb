/* Everything that runs along one row, over the primitives of simd_*.h: included once per instruction set.
 * What is left over after whole vectors goes through the scalar functions, which do the same operations. */
#include "kernels/cpu/math_simd.h"
#include "kernels/cpu/scalar.h"
#include "kernels/cpu/simd_ops.h"

#include <assert.h>

#define V_PARTS (CPU_LANES / V_LANES) /* vectors that hold the lanes of rules 3 and 7 */

static float inverse_rms(const float *x, int n, float eps) {
    float sum = 0.0f;
    for (int first = 0; first < n; first += CPU_NORM_BLOCK) {
        int end = n - first < CPU_NORM_BLOCK ? n : first + CPU_NORM_BLOCK, i = first;
        vf part[V_PARTS];
        for (int j = 0; j < V_PARTS; j++) part[j] = v_zero();
        for (; i + CPU_LANES <= end; i += CPU_LANES)
            for (int j = 0; j < V_PARTS; j++) {
                vf a = v_load(x + i + V_LANES * j);
                part[j] = v_fma(a, a, part[j]);
            }
        float lanes[CPU_LANES];
        for (int j = 0; j < V_PARTS; j++) v_store(lanes + V_LANES * j, part[j]);
        for (; i < end; i++) lanes[i % CPU_LANES] = fmaf(x[i], x[i], lanes[i % CPU_LANES]);
        sum = sum + cpu_lane_tree(lanes);
    }
    return 1.0f / sqrtf(sum / (float)n + eps);
}

static void scale(float *out, const float *x, float factor, int n, bool bf16) {
    int i = 0;
    for (; i + V_LANES <= n; i += V_LANES) {
        vf y = v_mul(v_load(x + i), v_set(factor));
        v_store(out + i, bf16 ? v_round_bf16(y) : y);
    }
    cpu_scale_scalar(out + i, x + i, factor, n - i, bf16);
}

static void mix(float *x, const float *y, float a, float b, int n) {
    int i = 0;
    for (; i + V_LANES <= n; i += V_LANES) {
        vf ax = v_mul(v_set(a), v_load(x + i)), by = v_mul(v_set(b), v_load(y + i));
        v_store(x + i, v_add(ax, by));
    }
    cpu_mix_scalar(x + i, y + i, a, b, n - i);
}

static void sub_scaled(float *x, const float *y, float factor, size_t n) {
    size_t i = 0;
    for (; i + V_LANES <= n; i += V_LANES)
        v_store(x + i, v_sub(v_load(x + i), v_mul(v_set(factor), v_load(y + i))));
    cpu_sub_scaled_scalar(x + i, y + i, factor, n - i);
}

static void add_scaled(float *x, const void *y, float factor, int n, bool bf16) {
    const uint16_t *half = y;
    const float *whole = y;
    int i = 0;
    for (; i + V_LANES <= n; i += V_LANES) {
        vf b = bf16 ? v_widen(half + i) : v_load(whole + i);
        v_store(x + i, v_add(v_load(x + i), v_mul(v_set(factor), b)));
    }
    cpu_add_scaled_scalar(x + i, bf16 ? (const void *)(half + i) : whole + i, factor, n - i, bf16);
}

static void narrow(uint16_t *out, const float *x, int n) {
    int i = 0;
    for (; i + V_LANES <= n; i += V_LANES) vi_store_high(out + i, vi_round_bf16(v_load(x + i)));
    cpu_narrow_scalar(out + i, x + i, n - i);
}

static void rotate(float *x, const float *cosines, const float *sines, int half) {
    int i = 0;
    for (; i + V_LANES <= half; i += V_LANES) {
        vf a = v_load(x + i), b = v_load(x + i + half), c = v_load(cosines + i), s = v_load(sines + i);
        v_store(x + i, v_fma(b, s, v_mul(a, c)));
        v_store(x + i + half, v_fma(b, c, v_negate(v_mul(a, s))));
    }
    for (; i < half; i++) {
        float a = x[i], b = x[i + half], c = cosines[i], s = sines[i];
        x[i] = fmaf(b, s, a * c);
        x[i + half] = fmaf(b, c, cop_negate(a * s));
    }
}

static void softcap(float *x, int n, float cap) {
    int i = 0;
    for (; i + V_LANES <= n; i += V_LANES)
        v_store(x + i, v_mul(v_set(cap), v_tanh(v_div(v_load(x + i), v_set(cap)))));
    cpu_softcap_scalar(x + i, n - i, cap);
}

static bool max(float *greatest, const float *x, int n) {
    assert(n >= 1);
    if (n < V_LANES) return cpu_max_scalar(greatest, x, n);
    vf best = v_load(x);
    vm nan = vm_none();
    int i = 0;
    for (; i + V_LANES <= n; i += V_LANES) {
        vf v = v_load(x + i);
        nan = vm_or(nan, vm_nan(v));
        best = v_max(best, v);
    }
    if (vm_bits(nan)) return false;
    float last[2 * V_LANES];
    v_store(last, best);
    int count = V_LANES;
    for (; i < n; i++) last[count++] = x[i];
    return cpu_max_scalar(greatest, last, count);
}

static bool block_max(float *out, const float *x, int n) {
    vm nan = vm_none();
    int i = 0;
    for (; i + CPU_MAX_BLOCK <= n; i += CPU_MAX_BLOCK) {
        vf best = v_load(x + i);
        nan = vm_or(nan, vm_nan(best));
        for (int j = V_LANES; j < CPU_MAX_BLOCK; j += V_LANES) {
            vf v = v_load(x + i + j);
            nan = vm_or(nan, vm_nan(v));
            best = v_max(best, v);
        }
        *out++ = v_greatest(best);
    }
    return !vm_bits(nan) && cpu_block_max_scalar(out, x + i, n - i);
}

/* Rule 7: the sum of exp(y), y = x * factor - greatest, or of the terms of the entropy. */
static inline __attribute__((always_inline)) float tile_sum(const float *x, int n, float factor,
                                                            float greatest, bool entropy) {
    float sum = 0.0f;
    for (int first = 0; first < n; first += CPU_SOFTMAX_TILE) {
        int end = n - first < CPU_SOFTMAX_TILE ? n : first + CPU_SOFTMAX_TILE, i = first;
        vf part[V_PARTS];
        for (int j = 0; j < V_PARTS; j++) part[j] = v_zero();
        for (; i + CPU_LANES <= end; i += CPU_LANES)
            for (int j = 0; j < V_PARTS; j++) {
                vf y = v_sub(v_mul(v_load(x + i + V_LANES * j), v_set(factor)), v_set(greatest)),
                   e = v_exp(y);
                part[j] = v_add(part[j], entropy ? v_entropy_term(e, y) : e);
            }
        float lanes[CPU_LANES];
        for (int j = 0; j < V_PARTS; j++) v_store(lanes + V_LANES * j, part[j]);
        for (; i < end; i++) {
            float y = x[i] * factor - greatest, e = cop_exp(y);
            lanes[i % CPU_LANES] = lanes[i % CPU_LANES] + (entropy ? cop_entropy_term(e, y) : e);
        }
        sum = sum + cpu_lane_tree(lanes);
    }
    return sum;
}

static float exp_sum(const float *x, int n, float factor, float greatest) {
    return tile_sum(x, n, factor, greatest, false);
}

static float entropy_sum(const float *x, int n, float factor, float greatest) {
    return tile_sum(x, n, factor, greatest, true);
}

/* A weight times 2^40 is taken apart into whole multiples of 2^24, at most 2^16, and the rest below 2^24.
 * Both are exact: a weight has 24 bits, and scaling by a power of two rounds nothing.  A lane adds up at most
 * 128 of each per tile, so neither sum leaves 32 bits. */
static uint64_t fixed_sum(const float *x, int n, float factor, float greatest) {
    uint64_t sum = 0;
    int i = 0;
    while (i + V_LANES <= n) {
        int end = n - i < CPU_SOFTMAX_TILE ? n : i + CPU_SOFTMAX_TILE;
        vi high = vi_set(0), low = high;
        for (; i + V_LANES <= end; i += V_LANES) {
            vf y = v_mul(v_load(x + i), v_set(factor));
            vf weight = v_mul(v_exp(v_sub(y, v_set(greatest))), v_set(0x1p16f));
            vi whole = vi_truncate(weight);
            vf rest = v_sub(weight, v_from_int(whole));
            high = vi_add(high, whole);
            low = vi_add(low, vi_truncate(v_mul(rest, v_set(0x1p24f))));
        }
        uint32_t highs[V_LANES], lows[V_LANES];
        vi_store(highs, high);
        vi_store(lows, low);
        for (int j = 0; j < V_LANES; j++) sum += ((uint64_t)highs[j] << 24) + lows[j];
    }
    return sum + cpu_fixed_sum_scalar(x + i, n - i, factor, greatest);
}

/* The random words of ids [id, id + 4 * V_LANES), in order.  id % 4 == 0. */
static void noise_words(vi words[4], int32_t id, const cpu_noise *noise) {
    vi c[4] = {vi_add(vi_set((uint32_t)id / 4), vi_lanes()), vi_set(noise->index), vi_set(noise->sample),
               vi_set(noise->prompt_hash)};
    vi_philox(c, noise->key);
    vi_interleave(words, c);
}

#define NOISE_MAX 23.0f /* more than cop_gumbel ever gives */

/* Whether one of 4 * V_LANES words can give a score above a bar; a holds, for the greatest logit of a lane,
 * logit * factor - bar.  That takes noise g > -a.  As g = -ln E with E = -ln u >= 1 - u, it takes 1 - u <
 * e^a; 1 - u is the complement of a word.  The margin covers every rounding, those of g included, a hundred
 * times over. */
static bool can_beat(const vi words[4], vf a) {
    vi most = vi_max_unsigned(vi_max_unsigned(words[0], words[1]), vi_max_unsigned(words[2], words[3]));
    vf rest = v_mul(v_from_unsigned(vi_xor(most, vi_set(UINT32_MAX))), v_set(0x1p-32f));
    return vm_bits(vm_less(rest, v_mul(v_exp(a), v_set(1.001f)))) != 0;
}

/* Each lane keeps its first best; the best of the lanes is the lowest id of the greatest score.  Ids that
 * cannot beat the best so far, which are all lower, are passed over. */
static int32_t draw(const float *x, int n, float factor, const cpu_noise *noise) {
    vf best = v_set(-INFINITY);
    vi best_id = vi_set(0);
    float bar = -INFINITY;
    int32_t i = 0;
    for (; i + 4 * V_LANES <= n; i += 4 * V_LANES) {
        vf most = v_load(x + i);
        for (int j = 1; j < 4; j++) most = v_max(most, v_load(x + i + V_LANES * j));
        vf a = v_fma(most, v_set(factor), v_set(-bar));
        if (!vm_bits(vm_greater(a, v_set(-NOISE_MAX)))) continue;
        vi words[4];
        noise_words(words, i, noise);
        if (!can_beat(words, a)) continue;
        for (int j = 0; j < 4; j++) {
            vf score = v_fma(v_load(x + i + V_LANES * j), v_set(factor), v_gumbel(words[j]));
            vm better = vm_greater(score, best);
            best = v_select(better, score, best);
            best_id = vi_select(better, vi_add(vi_set((uint32_t)(i + V_LANES * j)), vi_lanes()), best_id);
        }
        bar = v_greatest(best);
    }
    float scores[V_LANES];
    int32_t ids[V_LANES];
    v_store(scores, best);
    vi_store(ids, best_id);
    float top = -INFINITY;
    int32_t winner = 0;
    for (int j = 0; j < V_LANES; j++)
        if (scores[j] > top || (scores[j] == top && ids[j] < winner)) top = scores[j], winner = ids[j];
    for (; i < n; i++) {
        float score = fmaf(x[i], factor, cpu_noise_of(noise, i));
        if (score > top) top = score, winner = i;
    }
    return winner;
}

static vf apply(cpu_function f, vf x) {
    switch (f) {
    case CPU_EXP: return v_exp(x);
    case CPU_LOG: return v_log(x);
    case CPU_TANH: return v_tanh(x);
    case CPU_SIGMOID: return v_sigmoid(x);
    case CPU_GUMBEL: return v_gumbel(vi_of(x));
    }
    return x;
}

static void map(cpu_function f, uint32_t *words, size_t n) {
    size_t i = 0;
    for (; i + V_LANES <= n; i += V_LANES) {
        float *x = (float *)(words + i);
        v_store(x, apply(f, v_load(x)));
    }
    cpu_map_scalar(f, words + i, n - i);
}

/* The table's fields that lie in this file. */
#define VECTOR_OPS                                                                                           \
    .inverse_rms = inverse_rms, .scale = scale, .mix = mix, .sub_scaled = sub_scaled,                        \
    .add_scaled = add_scaled, .narrow = narrow, .rotate = rotate, .softcap = softcap, .max = max,            \
    .block_max = block_max, .exp_sum = exp_sum, .entropy_sum = entropy_sum, .fixed_sum = fixed_sum,          \
    .draw = draw, .map = map
