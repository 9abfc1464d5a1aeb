/* Everything that runs along one row, with AVX2, and the table of AVX2 bodies.  What is left over after whole
 * vectors goes through the scalar functions, which do the same operations. */
#include "kernels/cpu/avx2.h"

#ifdef __AVX2__
#include "kernels/cpu/math_avx2.h"
#include "kernels/cpu/scalar.h"

#include <assert.h>

static float inverse_rms(const float *x, int n, float eps) {
    float sum = 0.0f;
    for (int first = 0; first < n; first += CPU_NORM_BLOCK) {
        int end = n - first < CPU_NORM_BLOCK ? n : first + CPU_NORM_BLOCK, i = first;
        __m256 low = _mm256_setzero_ps(), high = low;
        for (; i + CPU_LANES <= end; i += CPU_LANES) {
            __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + i + 8);
            low = V_FMA(a, a, low);
            high = V_FMA(b, b, high);
        }
        float lanes[CPU_LANES];
        _mm256_storeu_ps(lanes, low);
        _mm256_storeu_ps(lanes + 8, high);
        for (; i < end; i++) lanes[i % CPU_LANES] = fmaf(x[i], x[i], lanes[i % CPU_LANES]);
        sum = sum + cpu_lane_tree(lanes);
    }
    return 1.0f / sqrtf(sum / (float)n + eps);
}

static void scale(float *out, const float *x, float factor, int n, bool bf16) {
    int i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 y = _mm256_mul_ps(_mm256_loadu_ps(x + i), V_SET(factor));
        _mm256_storeu_ps(out + i, bf16 ? v_round_bf16(y) : y);
    }
    cpu_scale_scalar(out + i, x + i, factor, n - i, bf16);
}

static void mix(float *x, const float *y, float a, float b, int n) {
    int i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 ax = _mm256_mul_ps(V_SET(a), _mm256_loadu_ps(x + i)),
               by = _mm256_mul_ps(V_SET(b), _mm256_loadu_ps(y + i));
        _mm256_storeu_ps(x + i, _mm256_add_ps(ax, by));
    }
    cpu_mix_scalar(x + i, y + i, a, b, n - i);
}

static void sub_scaled(float *x, const float *y, float factor, size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 sy = _mm256_mul_ps(V_SET(factor), _mm256_loadu_ps(y + i));
        _mm256_storeu_ps(x + i, _mm256_sub_ps(_mm256_loadu_ps(x + i), sy));
    }
    cpu_sub_scaled_scalar(x + i, y + i, factor, n - i);
}

static void rotate(float *x, const float *cosines, const float *sines, int half) {
    int i = 0;
    for (; i + 8 <= half; i += 8) {
        __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + i + half);
        __m256 c = _mm256_loadu_ps(cosines + i), s = _mm256_loadu_ps(sines + i);
        _mm256_storeu_ps(x + i, V_FMA(b, s, _mm256_mul_ps(a, c)));
        _mm256_storeu_ps(x + i + half, V_FMA(b, c, v_negate(_mm256_mul_ps(a, s))));
    }
    for (; i < half; i++) {
        float a = x[i], b = x[i + half], c = cosines[i], s = sines[i];
        x[i] = fmaf(b, s, a * c);
        x[i + half] = fmaf(b, c, cop_negate(a * s));
    }
}

static void softcap(float *x, int n, float cap) {
    int i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 y = v_tanh(_mm256_div_ps(_mm256_loadu_ps(x + i), V_SET(cap)));
        _mm256_storeu_ps(x + i, _mm256_mul_ps(V_SET(cap), y));
    }
    cpu_softcap_scalar(x + i, n - i, cap);
}

static bool max(float *greatest, const float *x, int n) {
    assert(n >= 1);
    if (n < 8) return cpu_max_scalar(greatest, x, n);
    __m256 best = _mm256_loadu_ps(x), nan = _mm256_setzero_ps();
    int i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 v = _mm256_loadu_ps(x + i);
        nan = _mm256_or_ps(nan, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
        best = _mm256_max_ps(best, v);
    }
    if (_mm256_movemask_ps(nan)) return false;
    float last[16];
    _mm256_storeu_ps(last, best);
    int count = 8;
    for (; i < n; i++) last[count++] = x[i];
    return cpu_max_scalar(greatest, last, count);
}

static float greatest_lane(__m256 x) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}

static bool block_max(float *out, const float *x, int n) {
    __m256 nan = _mm256_setzero_ps();
    int i = 0;
    for (; i + CPU_MAX_BLOCK <= n; i += CPU_MAX_BLOCK) {
        __m256 best = _mm256_loadu_ps(x + i);
        nan = _mm256_or_ps(nan, _mm256_cmp_ps(best, best, _CMP_UNORD_Q));
        for (int j = 8; j < CPU_MAX_BLOCK; j += 8) {
            __m256 v = _mm256_loadu_ps(x + i + j);
            nan = _mm256_or_ps(nan, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
            best = _mm256_max_ps(best, v);
        }
        *out++ = greatest_lane(best);
    }
    return !_mm256_movemask_ps(nan) && cpu_block_max_scalar(out, x + i, n - i);
}

static float exp_sum(const float *x, int n, float factor, float greatest) {
    float sum = 0.0f;
    for (int first = 0; first < n; first += CPU_SOFTMAX_TILE) {
        int end = n - first < CPU_SOFTMAX_TILE ? n : first + CPU_SOFTMAX_TILE, i = first;
        __m256 part[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
        for (; i + CPU_LANES <= end; i += CPU_LANES)
            for (int j = 0; j < 2; j++) {
                __m256 y = _mm256_mul_ps(_mm256_loadu_ps(x + i + 8 * j), V_SET(factor));
                part[j] = _mm256_add_ps(part[j], v_exp(_mm256_sub_ps(y, V_SET(greatest))));
            }
        float lanes[CPU_LANES];
        _mm256_storeu_ps(lanes, part[0]);
        _mm256_storeu_ps(lanes + 8, part[1]);
        for (; i < end; i++) {
            float y = x[i] * factor;
            lanes[i % CPU_LANES] = lanes[i % CPU_LANES] + cop_exp(y - greatest);
        }
        sum = sum + cpu_lane_tree(lanes);
    }
    return sum;
}

/* A weight w times 2^40 is taken apart into whole multiples of 2^24, at most 2^16, and the rest below 2^24:
 * both are exact, since w has 24 bits and scaling by a power of two rounds nothing.  A lane adds up 128 of
 * each per tile, so neither sum leaves 32 bits. */
static uint64_t fixed_sum(const float *x, int n, float factor, float greatest) {
    uint64_t sum = 0;
    int i = 0;
    while (i + 8 <= n) {
        int end = n - i < CPU_SOFTMAX_TILE ? n : i + CPU_SOFTMAX_TILE;
        __m256i high = _mm256_setzero_si256(), low = high;
        for (; i + 8 <= end; i += 8) {
            __m256 y = _mm256_mul_ps(_mm256_loadu_ps(x + i), V_SET(factor));
            __m256 w = _mm256_mul_ps(v_exp(_mm256_sub_ps(y, V_SET(greatest))), V_SET(0x1p16f));
            __m256i whole = _mm256_cvttps_epi32(w);
            __m256 rest = _mm256_mul_ps(_mm256_sub_ps(w, _mm256_cvtepi32_ps(whole)), V_SET(0x1p24f));
            high = _mm256_add_epi32(high, whole);
            low = _mm256_add_epi32(low, _mm256_cvttps_epi32(rest));
        }
        uint32_t highs[8], lows[8];
        _mm256_storeu_si256((__m256i *)highs, high);
        _mm256_storeu_si256((__m256i *)lows, low);
        for (int j = 0; j < 8; j++) sum += ((uint64_t)highs[j] << 24) + lows[j];
    }
    return sum + cpu_fixed_sum_scalar(x + i, n - i, factor, greatest);
}

/* The random words of ids [id, id + 32), eight ids to a vector, in order.  id % 4 == 0. */
static void noise_words(__m256i words[4], int32_t id, const cpu_noise *noise) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i c[4] = {_mm256_add_epi32(_mm256_set1_epi32(id / 4), lane), _mm256_set1_epi32((int)noise->index),
                    _mm256_set1_epi32((int)noise->sample), _mm256_set1_epi32((int)noise->prompt_hash)};
    v_philox(c, noise->key); /* c[w] lane b: word w of block b; to be transposed */
    __m256i r0 = _mm256_unpacklo_epi32(c[0], c[1]), r1 = _mm256_unpackhi_epi32(c[0], c[1]);
    __m256i r2 = _mm256_unpacklo_epi32(c[2], c[3]), r3 = _mm256_unpackhi_epi32(c[2], c[3]);
    __m256i s04 = _mm256_unpacklo_epi64(r0, r2), s15 = _mm256_unpackhi_epi64(r0, r2);
    __m256i s26 = _mm256_unpacklo_epi64(r1, r3), s37 = _mm256_unpackhi_epi64(r1, r3);
    words[0] = _mm256_permute2x128_si256(s04, s15, 0x20);
    words[1] = _mm256_permute2x128_si256(s26, s37, 0x20);
    words[2] = _mm256_permute2x128_si256(s04, s15, 0x31);
    words[3] = _mm256_permute2x128_si256(s26, s37, 0x31);
}

#define NOISE_MAX 23.0f /* more than cop_gumbel ever gives */

/* Whether one of 32 words can give a score above `bar`, where no lane's logits exceed `x`: score > bar needs
 * noise g > -a with a = x * factor - bar.  As g = -ln E with E = -ln u >= 1 - u, it needs 1 - u < e^a; 1 - u
 * is the complement of a word.  The margin covers every rounding, those of g included, a hundred times over.
 */
static bool can_beat(const __m256i words[4], __m256 a) {
    __m256i most =
        _mm256_max_epu32(_mm256_max_epu32(words[0], words[1]), _mm256_max_epu32(words[2], words[3]));
    __m256 rest = _mm256_mul_ps(v_unsigned(_mm256_xor_si256(most, _mm256_set1_epi32(-1))), V_SET(0x1p-32f));
    __m256 chance = _mm256_mul_ps(v_exp(a), V_SET(1.001f));
    return _mm256_movemask_ps(_mm256_cmp_ps(rest, chance, _CMP_LE_OQ)) != 0;
}

/* Each lane keeps its first best; the best of the lanes is the lowest id of the greatest score.  32 ids that
 * cannot beat the best so far, all of lower ids, are passed over. */
static int32_t draw(const float *x, int n, float factor, const cpu_noise *noise) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256 best = V_SET(-INFINITY);
    __m256i best_id = _mm256_setzero_si256();
    float bar = -INFINITY;
    int32_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m256 most = _mm256_max_ps(_mm256_max_ps(_mm256_loadu_ps(x + i), _mm256_loadu_ps(x + i + 8)),
                                    _mm256_max_ps(_mm256_loadu_ps(x + i + 16), _mm256_loadu_ps(x + i + 24)));
        __m256 a = V_FMA(most, V_SET(factor), V_SET(-bar));
        if (!_mm256_movemask_ps(_mm256_cmp_ps(a, V_SET(-NOISE_MAX), _CMP_GT_OQ))) continue;
        __m256i words[4];
        noise_words(words, i, noise);
        if (!can_beat(words, a)) continue;
        for (int j = 0; j < 4; j++) {
            __m256 score = V_FMA(_mm256_loadu_ps(x + i + 8 * j), V_SET(factor), v_gumbel(words[j]));
            __m256 better = _mm256_cmp_ps(score, best, _CMP_GT_OQ);
            __m256i id = _mm256_add_epi32(_mm256_set1_epi32(i + 8 * j), lane);
            best = _mm256_blendv_ps(best, score, better);
            best_id = _mm256_blendv_epi8(best_id, id, _mm256_castps_si256(better));
        }
        bar = greatest_lane(best);
    }
    float scores[8];
    int32_t ids[8];
    _mm256_storeu_ps(scores, best);
    _mm256_storeu_si256((__m256i *)ids, best_id);
    float top = -INFINITY;
    int32_t winner = 0;
    for (int j = 0; j < 8; j++)
        if (scores[j] > top || (scores[j] == top && ids[j] < winner)) top = scores[j], winner = ids[j];
    for (; i < n; i++) {
        float score = fmaf(x[i], factor, cpu_noise_of(noise, i));
        if (score > top) top = score, winner = i;
    }
    return winner;
}

static __m256 apply(cpu_function f, __m256 x) {
    switch (f) {
    case CPU_EXP: return v_exp(x);
    case CPU_LOG: return v_log(x);
    case CPU_TANH: return v_tanh(x);
    case CPU_SIGMOID: return v_sigmoid(x);
    case CPU_GUMBEL: return v_gumbel(_mm256_castps_si256(x));
    }
    return x;
}

static void map(cpu_function f, uint32_t *words, size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps((float *)(words + i), apply(f, _mm256_loadu_ps((float *)(words + i))));
    cpu_map_scalar(f, words + i, n - i);
}

static const cpu_ops table = {
    .gemm = cpu_gemm_avx2,
    .attention = cpu_attention_avx2,
    .inverse_rms = inverse_rms,
    .scale = scale,
    .mix = mix,
    .sub_scaled = sub_scaled,
    .rotate = rotate,
    .softcap = softcap,
    .max = max,
    .block_max = block_max,
    .exp_sum = exp_sum,
    .fixed_sum = fixed_sum,
    .draw = draw,
    .map = map,
};

const cpu_ops *cpu_ops_avx2(void) { return &table; }
#else
const cpu_ops *cpu_ops_avx2(void) { return NULL; }
#endif
