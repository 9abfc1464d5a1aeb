/* What the tests of the kernels share: both instruction sets, reproducible numbers, comparison of bits. */
#ifndef COP_KERNEL_TEST_H
#define COP_KERNEL_TEST_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

/* A backend of the named instruction set; NULL if this machine lacks it. */
static inline k_ctx *open_isa(const char *isa, precision profile, int n_threads) {
    k_ctx *k;
    cop_error err = {0};
    setenv("COPPICE_ISA", isa, 1);
    cop_status status = k_open(&k, profile, n_threads, false, &err);
    unsetenv("COPPICE_ISA");
    if (status != COP_OK && strcmp(isa, "scalar") == 0) fail_msg("%s", err.message);
    return k;
}

/* Uniform in [-1, 1), the same on every run. */
static inline float next_random(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)(int32_t)(uint32_t)(*state >> 32) * 0x1p-31f;
}

static inline float *random_floats(size_t n, uint64_t seed, float scale) {
    float *x = mem_alloc_aligned(n, sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = next_random(&seed) * scale;
    return x;
}

static inline void check_bits(const float *a, const float *b, size_t n, const char *what) {
    for (size_t i = 0; i < n; i++)
        if (memcmp(&a[i], &b[i], sizeof a[i]) != 0)
            fail_msg("%s: element %zu is %a here and %a there", what, i, (double)a[i], (double)b[i]);
}

static inline void check_near(double got, double want, double tolerance, const char *what, size_t i) {
    if (!(fabs(got - want) <= tolerance)) fail_msg("%s: element %zu is %.9g, not %.9g", what, i, got, want);
}

#endif
