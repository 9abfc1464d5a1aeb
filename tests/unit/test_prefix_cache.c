/* The index of full pages against a list that is searched from end to end. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "engine/prefix_cache.h"

static uint32_t random_state = 1;
static uint32_t random_below(uint32_t n) {
    random_state = random_state * 1664525u + 1013904223u;
    return (random_state >> 8) % n;
}

/* Keys that differ in the parent, the first or the last id alone. */
static prefix_key key_of(uint64_t parent, int32_t first, int32_t last) {
    prefix_key key = {.parent = parent};
    for (int i = 0; i < KV_PAGE_TOKENS; i++) key.ids[i] = 7;
    key.ids[0] = first;
    key.ids[KV_PAGE_TOKENS - 1] = last;
    return key;
}

static prefix_cache cache_of(int n_pages) {
    prefix_cache c;
    cop_error err;
    assert_int_equal(prefix_cache_init(&c, n_pages, &err), COP_OK);
    return c;
}

static void random_operations_agree_with_a_list(void **state) {
    (void)state;
    enum { PAGES = 13 }; /* 16 buckets for 3 x 3 x 3 keys: chains are common */
    prefix_cache c = cache_of(PAGES);
    prefix_key list[PAGES];
    bool listed[PAGES] = {false};
    uint64_t last_serial = 0;
    for (int n = 0; n < 30000; n++) {
        prefix_key key = key_of(random_below(3), (int32_t)random_below(3), (int32_t)random_below(3));
        int32_t want = NO_PAGE, page = (int32_t)random_below(PAGES);
        for (int i = 0; i < PAGES; i++) {
            if (listed[i] && !memcmp(&list[i], &key, sizeof key)) want = i;
        }
        assert_int_equal(prefix_cache_find(&c, &key), want);
        if (listed[page]) {
            prefix_cache_remove(&c, page);
            listed[page] = false;
            assert_int_equal(prefix_cache_serial(&c, page), 0);
        } else if (want == NO_PAGE) {
            prefix_cache_add(&c, page, &key);
            listed[page] = true;
            list[page] = key;
            assert_true(prefix_cache_serial(&c, page) > last_serial); /* never used again */
            last_serial = prefix_cache_serial(&c, page);
        }
    }
    prefix_cache_free(&c);
    assert_int_equal(mem_live(), 0);
}

static void what_followed_a_removed_page_is_never_found_again(void **state) {
    (void)state;
    prefix_cache c = cache_of(2);
    prefix_key parent = key_of(0, 1, 1), child;
    prefix_cache_add(&c, 0, &parent);
    child = key_of(prefix_cache_serial(&c, 0), 2, 2);
    prefix_cache_add(&c, 1, &child);
    prefix_cache_remove(&c, 0);
    prefix_cache_add(&c, 0, &parent); /* the same page with the same tokens */
    child.parent = prefix_cache_serial(&c, 0);
    assert_int_equal(prefix_cache_find(&c, &parent), 0);
    assert_int_equal(prefix_cache_find(&c, &child), NO_PAGE);
    prefix_cache_free(&c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_operations_agree_with_a_list),
        cmocka_unit_test(what_followed_a_removed_page_is_never_found_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
