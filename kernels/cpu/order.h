/* The total order of tokens, logit descending and id ascending, without comparisons: ids are packed below a
 * rank, and integers are selected and sorted by their digits.  The time depends on the count alone, not on
 * the values. */
#ifndef COP_CPU_ORDER_H
#define COP_CPU_ORDER_H

#include "kernels/cpu/math.h"

#include <stdint.h>

/* A logit's place in the order and the id: the smaller, the better.  -0 and +0 are one value. */
static inline uint64_t order_pack(float z, int32_t id) {
    uint32_t u = cop_bits(z + 0.0f); /* -0 becomes +0 */
    uint32_t descending = u & 0x80000000u ? u : ~(u | 0x80000000u);
    return (uint64_t)descending << 32 | (uint32_t)id;
}
static inline int32_t order_id(uint64_t packed) { return (int32_t)(packed & 0xffffffffu); }

/* Bring the k best of `items` [n], which stand in order of id, to the front, still in order of id.  k <= n.
 */
void order_select(uint64_t *items, int n, int k);

/* The last of the shortest run of the order whose weights [n] add up to `share` (as a double) or more.
 * Items [n] stand in order of id; 0 < share <= the sum of all. */
uint64_t order_reach(const uint64_t *items, const uint64_t *weights, int n, double share);

/* Sort items [n], which stand in order of id, best first.  spare: [n]. */
void order_sort(uint64_t *items, uint64_t *spare, int n);

#endif
