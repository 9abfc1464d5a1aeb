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

static uint32_t rank_of(uint64_t packed) { return (uint32_t)(packed >> 32); }

/* The digits above the one at `shift`. */
static uint32_t above(int shift) { return shift == 24 ? 0 : UINT32_MAX << (shift + 8); }

void order_select(uint64_t *items, int n, int k) {
    assert(k >= 0 && k <= n);
    if (k == n || k == 0) return;
    /* Find the k-th rank digit by digit: `want` of the items that share `prefix` so far are to be taken. */
    uint32_t prefix = 0;
    int want = k;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int counts[256] = {0};
        uint32_t mask = above(shift);
        for (int i = 0; i < n; i++) counts[digit(items[i], shift)] += (rank_of(items[i]) & mask) == prefix;
        unsigned d = 0;
        for (; counts[d] < want; d++) want -= counts[d];
        prefix |= d << shift;
    }
    int kept = 0;
    for (int i = 0; i < n; i++) {
        uint32_t rank = rank_of(items[i]);
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
        uint32_t mask = above(shift);
        for (int i = 0; i < n; i++)
            sums[digit(items[i], shift)] += (rank_of(items[i]) & mask) == prefix ? weights[i] : 0;
        unsigned d = 0;
        for (; d < 255 && (double)(sum + sums[d]) < share; d++) sum += sums[d];
        prefix |= d << shift;
    }
    uint64_t last = 0;
    for (int i = 0; i < n && (double)sum < share; i++) {
        if (rank_of(items[i]) != prefix) continue;
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
