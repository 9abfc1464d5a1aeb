/* Selection and sorting by digits of 8 bits of the rank; both keep the order of equal ranks, which is that of
 * the ids. */
#include "kernels/cpu/order.h"
#include "kernels/cpu/math.h"

#include <assert.h>
#include <stdbool.h>

uint64_t order_pack(float z, int32_t id) {
    uint32_t u = cop_bits(z + 0.0f); /* -0 becomes +0 */
    uint32_t ascending = u & 0x80000000u ? ~u : u | 0x80000000u;
    return (uint64_t)~ascending << 32 | (uint32_t)id;
}

static unsigned digit(uint64_t packed, int shift) { return (unsigned)(packed >> (32 + shift)) & 0xffu; }

/* Whether the digits above `shift` are those of `prefix`. */
static bool shares_prefix(uint64_t packed, uint32_t prefix, int shift) {
    return shift == 24 || (uint32_t)(packed >> 32) >> (shift + 8) == prefix >> (shift + 8);
}

void order_select(uint64_t *items, int n, int k) {
    assert(k >= 0 && k <= n);
    if (k == n || k == 0) return;
    /* Find the k-th rank digit by digit: `want` of the items that share `prefix` so far are to be taken. */
    uint32_t prefix = 0;
    int want = k;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int counts[256] = {0};
        for (int i = 0; i < n; i++)
            if (shares_prefix(items[i], prefix, shift)) counts[digit(items[i], shift)]++;
        unsigned d = 0;
        for (; counts[d] < want; d++) want -= counts[d];
        prefix |= d << shift;
    }
    int kept = 0;
    for (int i = 0; i < n; i++) {
        uint32_t rank = (uint32_t)(items[i] >> 32);
        if (rank > prefix || (rank == prefix && want == 0)) continue;
        want -= rank == prefix;
        items[kept++] = items[i];
    }
    assert(kept == k);
}

uint64_t order_reach(const uint64_t *items, const uint64_t *weights, int n, double share) {
    assert(share > 0.0);
    /* As above with sums for counts.  `sum` is that of all better ranks than `prefix`, and below the share. */
    uint32_t prefix = 0;
    uint64_t sum = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        uint64_t sums[256] = {0};
        for (int i = 0; i < n; i++)
            if (shares_prefix(items[i], prefix, shift)) sums[digit(items[i], shift)] += weights[i];
        unsigned d = 0;
        for (; d < 255 && (double)(sum + sums[d]) < share; d++) sum += sums[d];
        prefix |= d << shift;
    }
    uint64_t last = 0;
    for (int i = 0; i < n && (double)sum < share; i++) {
        if ((uint32_t)(items[i] >> 32) != prefix) continue;
        sum += weights[i];
        last = items[i];
    }
    return last;
}

void order_sort(uint64_t *items, uint64_t *spare, int n) {
    uint64_t *from = items, *to = spare;
    for (int shift = 0; shift < 32; shift += 8) { /* an even number of passes: the result is in `items` */
        int starts[257] = {0};
        for (int i = 0; i < n; i++) starts[digit(from[i], shift) + 1]++;
        for (int d = 0; d < 256; d++) starts[d + 1] += starts[d];
        for (int i = 0; i < n; i++) to[starts[digit(from[i], shift)]++] = from[i];
        uint64_t *swap = from;
        from = to;
        to = swap;
    }
}
