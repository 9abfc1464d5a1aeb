/* The bodies of measure.c with AVX2. */
#include "kernels/cpu/cpu.h"

#ifdef __AVX2__
#include <assert.h>
#include <immintrin.h>

#define READS 4
#define CHAINS                                                                                               \
    12 /* enough for two FMA units of latency 5, and with two constants they fit the 16 registers */

static uint64_t read_words(const uint64_t *words, size_t n) {
    __m256i sum[READS];
    uint64_t lanes[4];
    assert(n % (4 * READS) == 0);
    for (int j = 0; j < READS; j++) sum[j] = _mm256_setzero_si256();
    for (size_t i = 0; i < n; i += 4 * READS) {
#pragma GCC unroll 4
        for (int j = 0; j < READS; j++) {
            __m256i four = _mm256_load_si256((const __m256i *)(words + i) + j);
            sum[j] = _mm256_add_epi64(sum[j], four);
        }
    }
    for (int j = 1; j < READS; j++) sum[0] = _mm256_add_epi64(sum[0], sum[j]);
    _mm256_storeu_si256((__m256i *)lanes, sum[0]);
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

static double burn(float *sink, int n_rounds) {
    const __m256 half = _mm256_set1_ps(0.5f), one = _mm256_set1_ps(1.0f);
    __m256 chain[CHAINS];
    float lanes[8];
    for (int j = 0; j < CHAINS; j++) chain[j] = _mm256_set1_ps((float)j + *sink);
    for (int i = 0; i < n_rounds; i++) {
#pragma GCC unroll 12
        for (int j = 0; j < CHAINS; j++) chain[j] = _mm256_fmadd_ps(chain[j], half, one);
    }
    for (int j = 1; j < CHAINS; j++) chain[0] = _mm256_add_ps(chain[0], chain[j]);
    _mm256_storeu_ps(lanes, chain[0]);
    *sink += lanes[0] + lanes[7];
    return 2.0 * 8 * CHAINS * n_rounds;
}

const cpu_probe cpu_probe_avx2 = {.read = read_words, .burn = burn};
#endif
