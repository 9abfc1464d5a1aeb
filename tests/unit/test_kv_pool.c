/* The laws of engine/kv_pool.h, by number, and sequences on top of it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "engine/kv_pool.h"
#include "engine/sequence.h"

static kv_pool pool_of(int n) {
    kv_pool p;
    cop_error err;
    assert_int_equal(kv_pool_init(&p, n, &err), COP_OK);
    return p;
}

static void law_1_pages_are_free_or_owned(void **state) {
    (void)state;
    kv_pool p = pool_of(3);
    bool seen[3] = {false};
    assert_true(kv_pool_reserve(&p, 3));
    for (int used = 1; used <= 3; used++) {
        int32_t page = kv_pool_take(&p);
        assert_in_range(page, 0, 2);
        assert_false(seen[page]);
        seen[page] = true;
        assert_int_equal(p.n_free, 3 - used);
    }
    kv_pool_free(&p);
}

static void law_2_sharing_adds_an_owner(void **state) {
    (void)state;
    kv_pool p = pool_of(2);
    assert_true(kv_pool_reserve(&p, 1));
    int32_t page = kv_pool_take(&p);
    assert_int_equal(kv_pool_shared(&p), 0);
    kv_pool_share(&p, page);
    assert_int_equal(kv_pool_shared(&p), 1);
    assert_int_equal(p.n_free, 1);
    kv_pool_free(&p);
}

static void law_3_reservations_are_kept(void **state) {
    (void)state;
    kv_pool p = pool_of(4);
    assert_true(kv_pool_reserve(&p, 3));
    assert_false(kv_pool_reserve(&p, 2));
    assert_true(kv_pool_reserve(&p, 1));
    assert_int_equal(p.n_free, 4);
    for (int i = 0; i < 4; i++) kv_pool_take(&p);
    assert_int_equal(p.n_reserved, 0);
    assert_false(kv_pool_reserve(&p, 1));
    kv_pool_free(&p);

    p = pool_of(1);
    assert_true(kv_pool_reserve(&p, 1));
    kv_pool_unreserve(&p, 1);
    assert_true(kv_pool_reserve(&p, 1));
    kv_pool_free(&p);
}

static void law_4_the_last_owner_gives_a_page_back(void **state) {
    (void)state;
    kv_pool p = pool_of(1);
    assert_true(kv_pool_reserve(&p, 1));
    int32_t page = kv_pool_take(&p);
    kv_pool_share(&p, page);
    kv_pool_drop(&p, page);
    assert_false(kv_pool_reserve(&p, 1));
    kv_pool_drop(&p, page);
    assert_true(kv_pool_reserve(&p, 1));
    assert_int_equal(kv_pool_take(&p), page);
    kv_pool_free(&p);
}

static void a_sequence_takes_pages_as_it_grows_and_gives_all_back(void **state) {
    (void)state;
    kv_pool p = pool_of(4);
    const int32_t head[100] = {7};
    sequence s;
    cop_error err;
    assert_int_equal(sequence_init(&s, head, 100, 60, &err), COP_OK);
    assert_int_equal(s.cap_pages, 3);
    assert_true(kv_pool_reserve(&p, 3));
    s.n_reserved = 3;
    sequence_extend(&s, &p, 64);
    assert_int_equal(s.n_pages, 1);
    sequence_extend(&s, &p, 65);
    assert_int_equal(s.n_pages, 2);
    assert_int_equal(sequence_pending(&s), 100);
    sequence_push(&s, 42);
    assert_int_equal(sequence_token(&s, 0), 7);
    assert_int_equal(sequence_token(&s, 100), 42);
    s.n_computed = 101;
    sequence_truncate(&s, &p, 1);
    assert_int_equal(s.n_computed, 64);
    sequence_free(&s, &p);
    assert_int_equal(p.n_free, 4);
    assert_int_equal(p.n_reserved, 0);
    kv_pool_free(&p);
    assert_int_equal(mem_live(), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(law_1_pages_are_free_or_owned),
        cmocka_unit_test(law_2_sharing_adds_an_owner),
        cmocka_unit_test(law_3_reservations_are_kept),
        cmocka_unit_test(law_4_the_last_owner_gives_a_page_back),
        cmocka_unit_test(a_sequence_takes_pages_as_it_grows_and_gives_all_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
