/* Selection and sorting by digits of the rank, of 8 bits but for order_reach; all keep the order of equal
 * ranks, which is that of the ids. */
#include "kernels/cpu/order.h"

#include <assert.h>
#include <stdbool.h>

enum { WIDE_BITS = 11, WIDE_DIGITS = 1 << WIDE_BITS }; /* three of them hold a rank */

static unsigned digit(uint64_t packed, int shift) { return (unsigned)(packed >> (32 + shift)) & 0xffu; }

static uint32_t rank_of(uint64_t packed) { return (uint32_t)(packed >> 32); }

void order_select(uint64_t *items, int n, int k) {
    assert(k >= 0 && k <= n);
    if (k == n || k == 0) return;
    /* Find the k-th rank digit by digit: `want` of the items that share `prefix` so far are to be taken. */
    uint32_t prefix = 0;
    int want = k;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int counts[256] = {0};
        uint32_t mask = shift == 24 ? 0 : UINT32_MAX << (shift + 8);
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
    /* As above with sums for counts, and wider digits: the ranks of logits crowd in few of them, and each
     * addition to one sum waits for the last.  `sum` is that of all ranks better than `prefix`; it is below
     * the share. */
    uint32_t prefix = 0;
    uint64_t sum = 0;
    for (int shift = 2 * WIDE_BITS; shift >= 0; shift -= WIDE_BITS) {
        uint64_t sums[WIDE_DIGITS] = {0};
        uint32_t mask = shift + WIDE_BITS < 32 ? UINT32_MAX << (shift + WIDE_BITS) : 0;
        for (int i = 0; i < n; i++)
            sums[rank_of(items[i]) >> shift & (WIDE_DIGITS - 1)] +=
                (rank_of(items[i]) & mask) == prefix ? weights[i] : 0;
        unsigned d = 0;
        for (; d < WIDE_DIGITS - 1 && (double)(sum + sums[d]) < share; d++) sum += sums[d];
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
