/* Base64. */
#include "worker/base64.h"

#include <stdint.h>

#include "kernels/base.h"

char *base64_encode(const char *bytes, size_t n) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    size_t n_groups = n / 3 + (n % 3 != 0);
    char *text = n_groups < SIZE_MAX / 4 ? mem_alloc(4 * n_groups + 1, 1) : NULL;
    if (!text) return NULL;
    char *to = text;
    for (size_t i = 0; i < n; i += 3, to += 4) {
        size_t n_here = n - i < 3 ? n - i : 3;
        uint32_t group = 0; /* 24 bits, missing bytes 0 */
        for (size_t j = 0; j < 3; j++) group = group << 8 | (j < n_here ? (uint8_t)bytes[i + j] : 0);
        for (size_t j = 0; j < 4; j++) to[j] = j <= n_here ? digits[group >> (18 - 6 * j) & 63] : '=';
    }
    *to = '\0';
    return text;
}
