/* The heap's counters, huge blocks, and the slabs that packed weights lie in. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <string.h>

#include "kernels/cpu/slab.h"

static void every_allocation_counts_and_freeing_does_not(void **state) {
    (void)state;
    long live = mem_live(), count = mem_count();
    void *p[6] = {mem_alloc(3, 4),         mem_zalloc(3, 4),
                  mem_alloc_aligned(3, 4), mem_alloc_huge(3 << 20, 1),
                  mem_strdup("text"),      mem_realloc(NULL, 1, 1)};
    assert_int_equal(mem_count() - count, 6);
    p[0] = mem_realloc(p[0], 300, 4);
    assert_int_equal(mem_count() - count, 7);
    assert_int_equal(mem_live() - live, 6);
    for (int i = 0; i < 6; i++) mem_free(p[i]);
    assert_int_equal(mem_count() - count, 7);
    assert_int_equal(mem_live(), live);
    mem_fail_after(0);
    assert_null(mem_alloc_huge(3 << 20, 1));
    assert_true(mem_fail_stop());
    assert_int_equal(mem_count() - count, 7);
}

#ifndef MEM_GUARDED
static size_t resident_bytes(void) {
    size_t pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (f && fscanf(f, "%*s %zu", &pages) != 1) pages = 0;
    if (f) fclose(f);
    return pages * 4096;
}
#endif

static void huge_blocks_are_aligned_and_cost_nothing_until_touched(void **state) {
    (void)state;
    assert_null(mem_alloc_huge(SIZE_MAX / 2, 4));
    assert_null(mem_alloc_huge(PTRDIFF_MAX, 1));
    static const size_t sizes[] = {0, 1, MEM_HUGE_BYTES - 1, MEM_HUGE_BYTES, MEM_HUGE_BYTES + 1, 5 << 20};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        char *p = mem_alloc_huge(sizes[i], 1);
        assert_non_null(p);
        memset(p, 1, sizes[i]);
        assert_int_equal((uintptr_t)p % 64, 0);
#ifndef MEM_GUARDED
        if (sizes[i] >= MEM_HUGE_BYTES) assert_int_equal((uintptr_t)p % MEM_HUGE_BYTES, 0);
        size_t before = resident_bytes();
        char *large = mem_alloc_huge((size_t)1 << 30, 1);
        large[0] = 1;
        assert_in_range(resident_bytes() - before, 0, 16 << 20);
        mem_free(large);
#endif
        mem_free(p);
    }
}

/* ---- Slabs. */

enum { BLOCKS = 200 };

static void blocks_are_aligned_and_apart(void **state) {
    (void)state;
    long live = mem_live();
    slab_pool pool;
    slab *owners[BLOCKS];
    slab_pool_init(&pool);
    unsigned char *blocks[BLOCKS];
    size_t sizes[BLOCKS];
    for (int i = 0; i < BLOCKS; i++) { /* from nothing to 9 MiB: three slabs and a few of their own */
        sizes[i] = i % 40 == 39 ? 9 << 20 : (size_t)(i % 7) * 100003;
        blocks[i] = slab_take(&pool, sizes[i], &owners[i]);
        assert_non_null(blocks[i]);
        assert_int_equal((uintptr_t)blocks[i] % 64, 0);
        memset(blocks[i], i, sizes[i]);
    }
    for (int i = 0; i < BLOCKS; i++)
        for (size_t at = 0; at < sizes[i]; at++)
            if (blocks[i][at] != i) fail_msg("block %d is overwritten at %zu", i, at);
#ifndef MEM_GUARDED
    assert_int_equal(mem_live() - live, 2 + 5);
#endif
    for (int i = 0; i < BLOCKS; i++) slab_drop(&pool, owners[i], blocks[i]);
    assert_null(pool.current);
    assert_int_equal(mem_live(), live);
    slab_drop(&pool, NULL, NULL);
    slab_pool_free(&pool);
}

static void a_slab_lives_until_its_last_block(void **state) {
    (void)state;
    long live = mem_live();
    slab_pool pool;
    slab *a, *b, *c;
    slab_pool_init(&pool);
    char *first = slab_take(&pool, 100, &a), *second = slab_take(&pool, 100, &b);
    slab_drop(&pool, a, first);
    char *third = slab_take(&pool, 100, &c);
    second[99] = third[99] = 1;
#ifndef MEM_GUARDED
    assert_ptr_equal(b, c);
    assert_int_equal(mem_live() - live, 1);
#endif
    slab_drop(&pool, c, third);
    slab_drop(&pool, b, second);
    assert_int_equal(mem_live(), live);
    assert_null(pool.current);
    slab_pool_free(&pool);
}

static void a_slab_that_cannot_be_had_is_told(void **state) {
    (void)state;
    slab_pool pool;
    slab *owner;
    slab_pool_init(&pool);
    static const size_t sizes[] = {100, 40 << 20};
    for (int i = 0; i < 2; i++) {
        mem_fail_after(0);
        assert_null(slab_take(&pool, sizes[i], &owner));
        assert_true(mem_fail_stop());
        assert_null(pool.current);
    }
    slab_pool_free(&pool);
}

/* A set of weights of a little over two slabs. */
enum { SET_BLOCKS = 70, SET_BLOCK_BYTES = 1 << 20 };
typedef struct block_set {
    slab *owners[SET_BLOCKS];
    void *blocks[SET_BLOCKS];
} block_set;

static void set_open(slab_pool *p, block_set *s) {
    for (int i = 0; i < SET_BLOCKS; i++) {
        s->blocks[i] = slab_take(p, SET_BLOCK_BYTES, &s->owners[i]);
        assert_non_null(s->blocks[i]);
    }
}

static void set_close(slab_pool *p, block_set *s) {
    for (int i = 0; i < SET_BLOCKS; i++) slab_drop(p, s->owners[i], s->blocks[i]);
}

static void of_closed_sets_only_shared_slabs_stay(void **state) {
    (void)state;
    long live = mem_live();
    slab_pool pool;
    block_set sets[2];
    slab_pool_init(&pool);
    set_open(&pool, &sets[0]);
    for (int i = 1; i <= 50; i++) { /* updates: the old set goes after the new one has come */
        set_open(&pool, &sets[i % 2]);
        set_close(&pool, &sets[(i - 1) % 2]);
#ifndef MEM_GUARDED
        assert_in_range(mem_live() - live, 3, 4); /* of one set, which begins anywhere in a slab */
#endif
    }
    for (int i = 0; i < 50; i++) { /* and sets that came to nothing */
        block_set failed;
        set_open(&pool, &failed);
        set_close(&pool, &failed);
#ifndef MEM_GUARDED
        assert_in_range(mem_live() - live, 3, 5);
#endif
    }
    set_close(&pool, &sets[0]);
    assert_int_equal(mem_live(), live);
    slab_pool_free(&pool);
}

static void *take_and_drop(void *arg) {
    slab_pool *p = arg;
    for (int round = 0; round < 200; round++) {
        slab *owners[20];
        unsigned char *blocks[20];
        for (int i = 0; i < 20; i++) {
            blocks[i] = slab_take(p, 100000 + (size_t)i, &owners[i]);
            if (!blocks[i]) return "no block";
            memset(blocks[i], i, 100000);
        }
        for (int i = 0; i < 20; i++) {
            if (blocks[i][0] != i || blocks[i][99999] != i) return "a block has two owners";
            slab_drop(p, owners[i], blocks[i]);
        }
    }
    return NULL;
}

static void two_threads_share_a_pool(void **state) {
    (void)state;
    long live = mem_live();
    slab_pool pool;
    pthread_t other;
    void *failure;
    slab_pool_init(&pool);
    assert_int_equal(pthread_create(&other, NULL, take_and_drop, &pool), 0);
    assert_null(take_and_drop(&pool));
    pthread_join(other, &failure);
    if (failure) fail_msg("%s", (const char *)failure);
    assert_int_equal(mem_live(), live);
    slab_pool_free(&pool);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_allocation_counts_and_freeing_does_not),
        cmocka_unit_test(huge_blocks_are_aligned_and_cost_nothing_until_touched),
        cmocka_unit_test(blocks_are_aligned_and_apart),
        cmocka_unit_test(a_slab_lives_until_its_last_block),
        cmocka_unit_test(a_slab_that_cannot_be_had_is_told),
        cmocka_unit_test(of_closed_sets_only_shared_slabs_stay),
        cmocka_unit_test(two_threads_share_a_pool),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
