/* Widening to fp32.  Built with -O3: every loop here vectorizes. */
#include "engine/widen.h"

#include <string.h>

static float of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* A half: 5 bits of exponent with bias 15, 10 bits of fraction; the least exponent holds multiples of 2^-24.
 */
static float f16_value(uint16_t half) {
    uint32_t exponent = half >> 10 & 31, fraction = half & 1023;
    uint32_t normal = (exponent + 112) << 23 | fraction << 13;
    uint32_t special = 0x7f800000u | fraction << 13;
    uint32_t small = bits_of((float)(int32_t)fraction * 0x1p-24f);
    uint32_t magnitude = exponent == 0 ? small : exponent == 31 ? special : normal;
    return of_bits(magnitude | (uint32_t)(half >> 15) << 31);
}

void widen(float *restrict to, const void *restrict from, size_t n, tensor_dtype dtype) {
    const uint16_t *halves = from;
    const double *doubles = from;
    switch (dtype) {
    case TENSOR_F32:
        if (n) memcpy(to, from, n * sizeof *to);
        return;
    case TENSOR_F64:
        for (size_t i = 0; i < n; i++) to[i] = (float)doubles[i];
        return;
    case TENSOR_F16:
        for (size_t i = 0; i < n; i++) to[i] = f16_value(halves[i]);
        return;
    case TENSOR_BF16:
        for (size_t i = 0; i < n; i++) to[i] = of_bits((uint32_t)halves[i] << 16);
        return;
    }
}

static bool is_infinite(float x) { return (bits_of(x) & 0x7f800000u) == 0x7f800000u; }

size_t widen_find_infinite(const float *x, size_t n) {
    uint32_t any = 0;
    for (size_t i = 0; i < n; i++) any |= is_infinite(x[i]);
    if (!any) return n;
    size_t at = 0;
    while (!is_infinite(x[at])) at++;
    return at;
}
