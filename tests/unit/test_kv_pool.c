/* The laws of engine/kv_pool.h, by number, and sequences on top of it against a naive model. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "engine/kv_pool.h"
#include "engine/sequence.h"

static kv_pool pool_of(int n, bool caches) {
    kv_pool p;
    cop_error err;
    assert_int_equal(kv_pool_init(&p, n, caches, &err), COP_OK);
    return p;
}

static void ids_of(int32_t ids[KV_PAGE_TOKENS], int32_t id) {
    for (int i = 0; i < KV_PAGE_TOKENS; i++) ids[i] = id;
}

static void law_1_pages_are_free_or_owned(void **state) {
    (void)state;
    kv_pool p = pool_of(3, false);
    bool seen[3] = {false};
    for (int used = 1; used <= 3; used++) {
        int32_t page = kv_pool_take(&p);
        assert_in_range(page, 0, 2);
        assert_false(seen[page]);
        seen[page] = true;
        assert_int_equal(p.n_free, 3 - used);
    }
    assert_int_equal(kv_pool_take(&p), NO_PAGE);
    kv_pool_free(&p);
}

static void law_2_shared_and_known_pages_are_not_written(void **state) {
    (void)state;
    kv_pool p = pool_of(2, true);
    int32_t ids[KV_PAGE_TOKENS], page = kv_pool_take(&p);
    ids_of(ids, 5);
    assert_true(kv_pool_may_write(&p, page));
    kv_pool_share(&p, page);
    assert_int_equal(kv_pool_shared(&p), 1);
    assert_false(kv_pool_may_write(&p, page));
    kv_pool_drop(&p, page);
    assert_int_equal(kv_pool_shared(&p), 0);
    assert_true(kv_pool_may_write(&p, page));
    assert_int_equal(kv_pool_keep(&p, page, 0, NO_PAGE, ids), page);
    assert_false(kv_pool_may_write(&p, page));
    kv_pool_free(&p);
}

static void law_3_what_is_idle_for_longest_is_taken_when_none_is_free(void **state) {
    (void)state;
    kv_pool p = pool_of(3, true);
    int32_t ids[KV_PAGE_TOKENS], pages[2];
    for (int i = 0; i < 2; i++) {
        ids_of(ids, i);
        pages[i] = kv_pool_keep(&p, kv_pool_take(&p), 0, NO_PAGE, ids);
    }
    kv_pool_drop(&p, pages[1]);
    kv_pool_drop(&p, pages[0]);
    assert_int_equal(p.n_idle, 2);
    int32_t third = kv_pool_take(&p);
    assert_true(third != pages[0] && third != pages[1]);
    assert_int_equal(kv_pool_take(&p), pages[1]);
    assert_int_equal(kv_pool_find(&p, 0, NO_PAGE, ids), NO_PAGE); /* forgotten */
    assert_int_equal(kv_pool_take(&p), pages[0]);
    assert_int_equal(kv_pool_take(&p), NO_PAGE);
    kv_pool_free(&p);
}

static void law_4_the_last_owner_leaves_a_page_free_or_idle(void **state) {
    (void)state;
    for (int caches = 0; caches < 2; caches++) {
        kv_pool p = pool_of(1, caches);
        int32_t ids[KV_PAGE_TOKENS], page = kv_pool_take(&p);
        ids_of(ids, 5);
        kv_pool_keep(&p, page, 0, NO_PAGE, ids);
        kv_pool_share(&p, page);
        kv_pool_drop(&p, page);
        assert_int_equal(kv_pool_available(&p), 0);
        kv_pool_drop(&p, page);
        assert_int_equal(p.n_idle, caches);
        assert_int_equal(p.n_free, !caches);
        assert_int_equal(kv_pool_find(&p, 0, NO_PAGE, ids), caches ? page : NO_PAGE);
        kv_pool_free(&p);
    }
}

static void a_page_with_known_tokens_gives_way_to_the_known_one(void **state) {
    (void)state;
    kv_pool p = pool_of(2, true);
    int32_t ids[KV_PAGE_TOKENS], first = kv_pool_take(&p), second = kv_pool_take(&p);
    ids_of(ids, 5);
    assert_int_equal(kv_pool_keep(&p, first, 0, NO_PAGE, ids), first);
    assert_int_equal(kv_pool_keep(&p, second, 0, NO_PAGE, ids), first);
    assert_int_equal(p.refs[first], 2);
    assert_int_equal(p.n_free, 1);
    kv_pool_free(&p);
}

static void a_sequence_takes_pages_as_it_grows_and_gives_all_back(void **state) {
    (void)state;
    kv_pool p = pool_of(3, false);
    const int32_t head[100] = {7};
    sequence s;
    cop_error err;
    assert_int_equal(sequence_init(&s, head, 100, 160, &err), COP_OK);
    assert_int_equal(s.cap_pages, 5);
    assert_true(sequence_extend(&s, &p, 64));
    assert_int_equal(s.n_pages, 1);
    assert_true(sequence_extend(&s, &p, 65));
    assert_int_equal(s.n_pages, 2);
    assert_int_equal(sequence_pending(&s), 100);
    sequence_push(&s, 42);
    assert_int_equal(sequence_token(&s, 0), 7);
    assert_int_equal(sequence_token(&s, 100), 42);
    assert_false(sequence_extend(&s, &p, 193)); /* it keeps the third */
    assert_int_equal(s.n_pages, 3);
    s.n_computed = 101;
    sequence_release(&s, &p);
    assert_int_equal(s.n_computed, 0);
    assert_int_equal(p.n_free, 3);
    sequence_free(&s, &p);
    kv_pool_free(&p);
    assert_int_equal(mem_live(), 0);
}

/* ---- Random sequences.  Each page of tokens is 64 times one letter, so a sequence is a word; the model
 * knows of each page who owns it, as what word the cache knows it, and since when it is idle. */

enum { PAGES = 9, SEQUENCES = 4, LONGEST = 5 };

typedef struct model {
    kv_pool pool;
    struct {
        sequence seq;
        int32_t tokens[LONGEST * KV_PAGE_TOKENS];
        char word[LONGEST + 1];
    } s[SEQUENCES];
    struct {
        int refs;
        char word[LONGEST + 1]; /* empty: not known */
        long idle_since;
    } pages[PAGES];
    long now;
    uint32_t random;
} model;

static uint32_t random_below(model *m, uint32_t n) {
    m->random = m->random * 1664525u + 1013904223u;
    return (m->random >> 8) % n;
}

/* The page that is known as the first n letters of the word, or NO_PAGE. */
static int known_as(const model *m, const char *word, int n) {
    for (int i = 0; i < PAGES; i++) {
        if ((int)strlen(m->pages[i].word) == n && !strncmp(m->pages[i].word, word, (size_t)n)) return i;
    }
    return NO_PAGE;
}

static void model_release(model *m, sequence *s) {
    for (int i = s->n_pages - 1; i >= 0; i--) {
        if (--m->pages[s->pages[i]].refs == 0) m->pages[s->pages[i]].idle_since = m->now++;
    }
}

static void restart(model *m, int i) {
    sequence *s = &m->s[i].seq;
    model_release(m, s);
    sequence_free(s, &m->pool);
    int n = 1 + (int)random_below(m, LONGEST);
    memset(m->s[i].word, 0, sizeof m->s[i].word);
    for (int p = 0; p < n; p++) {
        m->s[i].word[p] = (char)('a' + random_below(m, 2));
        ids_of(m->s[i].tokens + p * KV_PAGE_TOKENS, m->s[i].word[p]);
    }
    cop_error err;
    assert_int_equal(sequence_init(s, m->s[i].tokens, n * KV_PAGE_TOKENS, 0, &err), COP_OK);
    int n_tokens = (int)random_below(m, (uint32_t)(n * KV_PAGE_TOKENS + 1)), want = 0;
    while (want < n_tokens / KV_PAGE_TOKENS && known_as(m, m->s[i].word, want + 1) != NO_PAGE) want++;
    sequence_restore(s, &m->pool, 0, n_tokens);
    assert_int_equal(s->n_pages, want);
    assert_int_equal(s->n_computed, want * KV_PAGE_TOKENS);
    for (int p = 0; p < want; p++) {
        assert_int_equal(s->pages[p], known_as(m, m->s[i].word, p + 1));
        m->pages[s->pages[p]].refs++;
    }
}

/* The page that has to be taken next; `any`: one that is free. */
static int next_page(const model *m, bool *any) {
    int oldest = NO_PAGE;
    *any = false;
    for (int i = 0; i < PAGES; i++) {
        if (m->pages[i].refs > 0) continue;
        if (!m->pages[i].word[0])
            *any = true;
        else if (oldest == NO_PAGE || m->pages[i].idle_since < m->pages[oldest].idle_since)
            oldest = i;
    }
    return oldest;
}

static void grow(model *m, int i) {
    sequence *s = &m->s[i].seq;
    if (s->n_pages == s->cap_pages) return;
    bool any;
    int at = s->n_pages, want = next_page(m, &any);
    bool got = sequence_extend(s, &m->pool, (at + 1) * KV_PAGE_TOKENS);
    assert_int_equal(got, any || want != NO_PAGE);
    if (!got) return;
    int page = s->pages[at];
    assert_int_equal(m->pages[page].refs, 0);
    if (any)
        assert_false(m->pages[page].word[0]);
    else
        assert_int_equal(page, want);
    m->pages[page].word[0] = 0;
    assert_true(kv_pool_may_write(&m->pool, page));
    s->n_computed = s->n_pages * KV_PAGE_TOKENS;
    sequence_remember(s, &m->pool, 0);
    int known = known_as(m, m->s[i].word, at + 1);
    assert_int_equal(s->pages[at], known == NO_PAGE ? page : known);
    m->pages[s->pages[at]].refs++;
    memset(m->pages[s->pages[at]].word, 0, sizeof m->pages[0].word);
    memcpy(m->pages[s->pages[at]].word, m->s[i].word, (size_t)at + 1);
}

static void give_back(model *m, int i) {
    model_release(m, &m->s[i].seq);
    sequence_release(&m->s[i].seq, &m->pool);
}

static void compare(const model *m) {
    int n_idle = 0, n_free = 0, n_shared = 0;
    for (int i = 0; i < PAGES; i++) {
        int n = (int)strlen(m->pages[i].word);
        assert_int_equal(m->pool.refs[i], m->pages[i].refs);
        assert_int_equal(prefix_cache_serial(&m->pool.cache, i) != 0, n > 0);
        if (n > 1) assert_true(known_as(m, m->pages[i].word, n - 1) != NO_PAGE); /* law 5 */
        n_idle += m->pages[i].refs == 0 && n > 0;
        n_free += m->pages[i].refs == 0 && n == 0;
        n_shared += m->pages[i].refs > 1;
    }
    assert_int_equal(m->pool.n_idle, n_idle);
    assert_int_equal(m->pool.n_free, n_free);
    assert_int_equal(kv_pool_shared(&m->pool), n_shared);
}

static void law_5_random_sequences_agree_with_a_naive_model(void **state) {
    (void)state;
    static model m;
    m.pool = pool_of(PAGES, true);
    for (int n = 0; n < 50000; n++) {
        int i = (int)random_below(&m, SEQUENCES);
        switch (random_below(&m, 8)) {
        case 0: restart(&m, i); break;
        case 1: give_back(&m, i); break;
        default:
            if (m.s[i].seq.n > 0) grow(&m, i);
        }
        compare(&m);
    }
    for (int i = 0; i < SEQUENCES; i++) sequence_free(&m.s[i].seq, &m.pool);
    assert_int_equal(kv_pool_available(&m.pool), PAGES);
    kv_pool_free(&m.pool);
    assert_int_equal(mem_live(), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(law_1_pages_are_free_or_owned),
        cmocka_unit_test(law_2_shared_and_known_pages_are_not_written),
        cmocka_unit_test(law_3_what_is_idle_for_longest_is_taken_when_none_is_free),
        cmocka_unit_test(law_4_the_last_owner_leaves_a_page_free_or_idle),
        cmocka_unit_test(law_5_random_sequences_agree_with_a_naive_model),
        cmocka_unit_test(a_page_with_known_tokens_gives_way_to_the_known_one),
        cmocka_unit_test(a_sequence_takes_pages_as_it_grows_and_gives_all_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
