/* The bodies of measure.c over the lanes of simd_avx2.h or simd_avx512.h.  Before including it, a file
 * defines PROBE_NAME    the table PROBE_BURN(acc, x, y)   the multiply-add of a lane that its matrices use
 *   PROBE_OPERATIONS        arithmetic operations of one such, in each lane */
#include "kernels/cpu/simd_ops.h"

#include <assert.h>

#define READS 4
#define CHAINS 12 /* enough for two units with a latency of 6; with two constants they fit 16 registers */

static uint32_t read_words(const uint32_t *words, size_t n) {
    vi sum[READS];
    uint32_t lanes[V_LANES], all = 0;
    assert(n % (V_LANES * READS) == 0);
    for (int j = 0; j < READS; j++) sum[j] = vi_set(0);
    for (size_t i = 0; i < n; i += V_LANES * READS) {
#pragma GCC unroll 4
        for (int j = 0; j < READS; j++) sum[j] = vi_add(sum[j], vi_load(words + i + V_LANES * j));
    }
    for (int j = 1; j < READS; j++) sum[0] = vi_add(sum[0], sum[j]);
    vi_store(lanes, sum[0]);
    for (int j = 0; j < V_LANES; j++) all += lanes[j];
    return all;
}

static double burn(float *sink, int n_rounds) {
    const vf x = v_set(0.5f),
             y = v_set(*sink + 1.0f); /* sums grow slowly: neither denormals nor infinities */
    vf chain[CHAINS];
    float lanes[V_LANES];
    for (int j = 0; j < CHAINS; j++) chain[j] = v_set((float)j);
    for (int i = 0; i < n_rounds; i++) {
#pragma GCC unroll 12
        for (int j = 0; j < CHAINS; j++) chain[j] = PROBE_BURN(chain[j], x, y);
    }
    for (int j = 1; j < CHAINS; j++) chain[0] = v_add(chain[0], chain[j]);
    v_store(lanes, chain[0]);
    *sink = lanes[0] > 0.0f ? 1.0f : 2.0f;
    return (double)PROBE_OPERATIONS * V_LANES * CHAINS * n_rounds;
}

const cpu_probe PROBE_NAME = {.read = read_words, .burn = burn};
