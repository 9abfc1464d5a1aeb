/* Drawing: the distribution (chi-square with fixed seeds), the noise, truncation by hand, and equal bits
 * whatever the instruction set, the number of threads and the neighbours. */
#include "tests/unit/kernel_test.h"

#include "kernels/cpu/math.h"
#include "kernels/cpu/order.h"

static k_ctx *best(int n_threads) {
    k_ctx *k;
    cop_error err = {0};
    if (k_open(&k, PRECISION_BF16, n_threads, false, &err) != COP_OK) fail_msg("%s", err.message);
    return k;
}

static const k_draw plain = {.inv_temp = 1.0f, .top_p = 1.0, .want_model = true};

/* ---- The noise. */

static int ascending(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static void noise_is_gumbel(void **state) {
    (void)state;
    enum { N = 1000000 };
    float *g = mem_alloc(N, sizeof *g);
    const uint32_t key[2] = {12345, 678};
    for (uint32_t i = 0; i < N / 4; i++) {
        uint32_t counter[4] = {i, 1, 2, 3}, words[4];
        cop_philox(counter, key, words);
        for (int w = 0; w < 4; w++) g[4 * i + (uint32_t)w] = cop_gumbel(words[w]);
    }
    qsort(g, N, sizeof *g, ascending);
    double worst = 0;
    for (int i = 0; i < N; i++) worst = fmax(worst, fabs(exp(-exp(-(double)g[i])) - (i + 0.5) / N));
    if (worst * sqrt(N) > 1.63) fail_msg("Kolmogorov-Smirnov distance %.3g", worst * sqrt(N)); /* 1 % */
    mem_free(g);
}

/* Flat logits make the drawn token a function of the noise alone. */
static void every_coordinate_changes_the_noise(void **state) {
    (void)state;
    enum { VOCAB = 4096, N = 7 };
    k_ctx *k = best(1);
    float *z = mem_zalloc(VOCAB, sizeof *z);
    k_draw d[N];
    for (int i = 0; i < N; i++) d[i] = plain;
    d[1].key[0] = 1, d[2].key[1] = 1, d[3].index = 1, d[4].sample = 1,
    d[5].prompt_hash = 1; /* d[6] as d[0] */
    int equal = 0;
    for (uint32_t round = 0; round < 200; round++) {
        k_drawn out[N];
        for (int i = 0; i < N; i++) d[i].index += round ? 1 : 0, d[i].key[0] += 1000;
        k_sample(k, out, d, N, z, VOCAB, VOCAB);
        assert_int_equal(out[6].token, out[0].token);
        for (int i = 1; i < 6; i++) equal += out[i].token == out[0].token;
    }
    assert_true(equal <= 4); /* of 1000, chance 1/4096 each; shared noise would give 200 per coordinate */
    mem_free(z);
    k_close(k);
}

static void noise_follows_the_protocol(void **state) {
    (void)state;
    enum { VOCAB = 1003 };
    const char *const isas[] = {"scalar", "avx2", "avx512"};
    float *z = random_floats(VOCAB, 20, 2.0f);
    for (size_t isa = 0; isa < sizeof isas / sizeof isas[0]; isa++) {
        k_ctx *k = open_isa(isas[isa], PRECISION_F32, 1);
        if (!k) continue;
        for (uint32_t i = 0; i < 300; i++) {
            k_draw d = {.inv_temp = 1.0f / 0.7f,
                        .top_p = 1,
                        .key = {i, 9},
                        .index = i / 2,
                        .sample = i / 3,
                        .prompt_hash = 77 * i};
            float top = -INFINITY;
            int32_t want = -1;
            for (int32_t id = 0; id < VOCAB; id++) {
                uint32_t counter[4] = {(uint32_t)id / 4, d.index, d.sample, d.prompt_hash}, words[4];
                cop_philox(counter, d.key, words);
                float score = fmaf(z[id], d.inv_temp, cop_gumbel(words[id & 3]));
                if (score > top) top = score, want = id;
            }
            k_drawn out;
            k_sample(k, &out, &d, 1, z, VOCAB, VOCAB);
            assert_int_equal(out.token, want);
        }
        k_close(k);
    }
    mem_free(z);
}

/* ---- The distribution. */

enum { CHI_VOCAB = 48, CHI_DRAWS = 200000, CHI_BATCH = 500 };

/* The probabilities of a draw in double: an independent reading of the protocol. */
static void probabilities(double *p, const float *z, const k_draw *d) {
    int order[CHI_VOCAB], n = CHI_VOCAB;
    for (int i = 0; i < n; i++) {
        int at = i;
        for (; at > 0 && z[order[at - 1]] < z[i]; at--) order[at] = order[at - 1];
        order[at] = i;
    }
    if (d->top_k > 0 && d->top_k < n) n = d->top_k;
    double w[CHI_VOCAB], total = 0, sum = 0;
    for (int i = 0; i < n; i++) total += w[i] = exp(((double)z[order[i]] - z[order[0]]) * d->inv_temp);
    int kept = 0;
    do sum += w[kept++];
    while (kept < n && sum < d->top_p * total);
    while (kept > 1 && w[kept - 1] < d->min_p) sum -= w[--kept];
    for (int i = 0; i < CHI_VOCAB; i++) p[i] = 0;
    for (int i = 0; i < kept; i++) p[order[i]] = w[i] / sum;
}

static void check_distribution(k_ctx *k, const float *z, k_draw d, const char *what) {
    double p[CHI_VOCAB];
    probabilities(p, z, &d);
    double entropy = 0;
    for (int i = 0; i < CHI_VOCAB; i++) entropy -= p[i] > 0 ? p[i] * log(p[i]) : 0;
    long counts[CHI_VOCAB] = {0};
    for (int i = 0; i < CHI_DRAWS; i += CHI_BATCH) {
        k_draw draws[CHI_BATCH];
        k_drawn out[CHI_BATCH];
        for (int j = 0; j < CHI_BATCH; j++) {
            draws[j] = d;
            draws[j].key[0] = 4711;
            draws[j].want_entropy = true;
            draws[j].sample = (uint32_t)(i + j);
        }
        k_sample(k, out, draws, CHI_BATCH, z, CHI_VOCAB, CHI_VOCAB);
        for (int j = 0; j < CHI_BATCH; j++) {
            counts[out[j].token]++;
            check_near(out[j].logprob, log(p[out[j].token]), 4e-6, what, (size_t)out[j].token);
            check_near(out[j].entropy, entropy, 4e-6, what, (size_t)j);
        }
    }
    double chi = 0, degrees = -1;
    for (int i = 0; i < CHI_VOCAB; i++) {
        if (p[i] == 0 && counts[i]) fail_msg("%s: dropped token %d was drawn", what, i);
        if (p[i] * CHI_DRAWS < 5) continue;
        chi += (counts[i] - p[i] * CHI_DRAWS) * (counts[i] - p[i] * CHI_DRAWS) / (p[i] * CHI_DRAWS);
        degrees++;
    }
    if (chi > degrees + 3.1 * sqrt(2 * degrees) + 4)
        fail_msg("%s: chi-square %.1f at %.0f degrees", what, chi, degrees);
}

static void draws_have_the_distribution(void **state) {
    (void)state;
    k_ctx *k = best(2);
    float *z = random_floats(CHI_VOCAB, 21, 3.0f);
    k_draw cool = plain, hot = plain, top_k = plain, top_p = plain, min_p = plain, all = plain;
    cool.inv_temp = 2.0f, hot.inv_temp = 0.5f;
    top_k.top_k = 7, top_p.top_p = 0.8, min_p.min_p = 0.1;
    all.top_k = 20, all.top_p = 0.9, all.min_p = 0.05, all.inv_temp = 0.7f;
    check_distribution(k, z, plain, "plain");
    check_distribution(k, z, cool, "temperature 0.5");
    check_distribution(k, z, hot, "temperature 2");
    check_distribution(k, z, top_k, "top_k");
    check_distribution(k, z, top_p, "top_p");
    check_distribution(k, z, min_p, "min_p");
    check_distribution(k, z, all, "all");
    mem_free(z);
    k_close(k);
}

/* ---- Truncation by hand. */

/* Draw once; what is kept must be `want`, in that order. */
static k_drawn check_kept(k_ctx *k, const float *z, int vocab, k_draw d, const int32_t *want, int n) {
    int32_t kept[16];
    k_drawn out;
    if (d.top_k == 0) d.top_k = vocab;
    d.kept = kept;
    k_sample(k, &out, &d, 1, z, vocab, vocab);
    if (out.n_kept != n) fail_msg("%d kept, not %d", out.n_kept, n);
    assert_memory_equal(kept, want, (size_t)n * sizeof *want);
    bool drawn_is_kept = false;
    for (int i = 0; i < n; i++) drawn_is_kept |= want[i] == out.token;
    assert_true(drawn_is_kept);
    return out;
}
#define KEPT(k, z, vocab, d, ...)                                                                            \
    check_kept(k, z, vocab, d, (const int32_t[]){__VA_ARGS__}, (int)(sizeof((int32_t[]){__VA_ARGS__}) / 4))

static void truncation_keeps_the_right_ids(void **state) {
    (void)state;
    k_ctx *k = best(1);
    static const float z[] = {1, 3, -0.0f, 3, 0.0f, 2}; /* order: 1 3 5 0 2 4; -0 and 0 tie */
    k_draw d = plain;
    KEPT(k, z, 6, d, 1, 3, 5, 0, 2, 4);
    d.top_k = 1;
    KEPT(k, z, 6, d, 1);
    d.top_k = 5;
    KEPT(k, z, 6, d, 1, 3, 5, 0, 2);
    d.top_k = 100;
    d.kept = NULL;
    KEPT(k, z, 6, d, 1, 3, 5, 0, 2, 4);

    d = plain;
    d.top_p = 0.0; /* at least one */
    KEPT(k, z, 6, d, 1);
    d.min_p = 1.0; /* the best and its ties; top_p came first */
    KEPT(k, z, 6, d, 1);
    d.top_p = 1.0;
    KEPT(k, z, 6, d, 1, 3);
    d.min_p = 0.36; /* e^-1 = 0.368 stays */
    KEPT(k, z, 6, d, 1, 3, 5);
    d.min_p = 0.37;
    KEPT(k, z, 6, d, 1, 3);

    /* Four equal ones: exactly a half is reached by two, a hair more needs three. */
    static const float flat[] = {1, 1, 1, 1};
    d = plain;
    d.top_p = 0.5;
    KEPT(k, flat, 4, d, 0, 1);
    d.top_p = 0.5000001;
    KEPT(k, flat, 4, d, 0, 1, 2);
    d.top_k = 2; /* top_k first: half of two */
    d.top_p = 0.5;
    KEPT(k, flat, 4, d, 0);
    k_close(k);
}

static void absent_ids_are_not_drawn(void **state) {
    (void)state;
    k_ctx *k = best(1);
    static const float z[] = {1, 3, 0, 3, 0, 2};
    static const int32_t absent[] = {1, 5, 1,
                                     99}; /* a repetition and an id outside the vocabulary do no harm */
    k_draw d = plain;
    d.absent = absent;
    d.n_absent = 4;
    KEPT(k, z, 6, d, 3, 0, 2, 4);
    d.top_k = 2;
    KEPT(k, z, 6, d, 3, 0);
    d.top_k = 0;
    double sum = 0, model_sum = 0;
    for (int i = 0; i < 6; i++) {
        model_sum += exp((double)z[i]);
        if (i != 1 && i != 5) sum += exp((double)z[i]);
    }
    for (uint32_t i = 0; i < 100; i++) {
        k_drawn out;
        d.index = i;
        k_sample(k, &out, &d, 1, z, 6, 6);
        assert_true(out.token != 1 && out.token != 5);
        check_near(out.logprob, z[out.token] - log(sum), 1e-6, "logprob", i);
        check_near(out.model_logprob, z[out.token] - log(model_sum), 1e-6, "model logprob", i);
    }
    d.inv_temp = 0.0f;
    k_drawn greedy = KEPT(k, z, 6, d, 3);
    assert_true(greedy.token == 3 && greedy.logprob == 0.0f);
    k_close(k);
}

static void temperature_0_takes_the_first_best(void **state) {
    (void)state;
    k_ctx *k = best(1);
    static const float z[] = {-5, -3, -3, -4};
    k_draw d = {
        .inv_temp = 0.0f, .top_p = 0.5, .min_p = 0.5, .top_k = 3, .want_model = true, .want_entropy = true};
    k_drawn out = KEPT(k, z, 4, d, 1);
    assert_true(out.logprob == 0.0f && out.entropy == 0.0f && out.model_logprob < -0.5f);
    k_close(k);
}

static void nan_is_told(void **state) {
    (void)state;
    const char *const isas[] = {"scalar", "avx2", "avx512"};
    for (size_t isa = 0; isa < sizeof isas / sizeof isas[0]; isa++) {
        k_ctx *k = open_isa(isas[isa], PRECISION_F32, 1);
        if (!k) continue;
        for (int at = 0; at < 37; at++) {
            float z[37] = {0}, logprob;
            z[at] = NAN;
            for (int i = 0; i < 4; i++) {
                k_drawn out;
                k_draw d = plain;
                if (i == 1) d.top_k = 5;
                if (i == 2) d.top_p = 0.5;
                if (i == 3) d.inv_temp = 0.0f;
                k_sample(k, &out, &d, 1, z, 37, 37);
                assert_int_equal(out.token, -1);
            }
            k_target t = {.token = 0, .inv_temp = 1.0f};
            assert_false(k_score(k, &logprob, &t, 1, z, 37, 37));
        }
        assert_int_equal(k_sync(k, NULL), COP_OK);
        k_close(k);
    }
}

static void nan_fails_its_own_row_alone(void **state) {
    (void)state;
    enum { VOCAB = 300, ROWS = 5 };
    for (int n_threads = 1; n_threads <= 3; n_threads += 2) {
        k_ctx *k = best(n_threads);
        float *z = random_floats(ROWS * VOCAB, 24, 5.0f), logprobs[2 * ROWS];
        z[1 * VOCAB + 299] = NAN;
        z[3 * VOCAB + 7] = INFINITY; /* leaves no distribution either */
        k_target targets[2 * ROWS];
        k_draw draws[ROWS];
        k_drawn drawn[ROWS];
        for (int i = 0; i < ROWS; i++) {
            targets[2 * i] = (k_target){.row = i, .token = 5, .inv_temp = 1.0f};
            targets[2 * i + 1] = (k_target){.row = i, .token = -1, .inv_temp = 1.0f};
            draws[i] = plain;
            draws[i].row = i;
        }
        assert_false(k_score(k, logprobs, targets, 2 * ROWS, z, VOCAB, VOCAB));
        k_sample(k, drawn, draws, ROWS, z, VOCAB, VOCAB);
        for (int i = 0; i < ROWS; i++) {
            bool bad = i == 1 || i == 3;
            assert_int_equal(isnan(logprobs[2 * i]), bad);
            assert_int_equal(isnan(logprobs[2 * i + 1]), bad);
            assert_true(bad || (logprobs[2 * i] < 0.0f && logprobs[2 * i + 1] == 1.0f));
            assert_int_equal(drawn[i].token < 0, bad);
        }
        mem_free(z);
        k_close(k);
    }
}

/* ---- Scores. */

static void scores_match_the_draws(void **state) {
    (void)state;
    enum { VOCAB = 2500, STRIDE = 2560, ROWS = 3 };
    k_ctx *k = best(2);
    float *z = random_floats(ROWS * STRIDE, 22, 8.0f);
    for (int row = 0; row < ROWS; row++) {
        float temperature_inverse = row == 2 ? 1.0f / 1.3f : 1.0f, logprob = 7, top[4];
        int32_t ids[4];
        k_draw d = plain;
        d.row = row;
        d.inv_temp = temperature_inverse;
        k_drawn out;
        k_sample(k, &out, &d, 1, z, VOCAB, STRIDE);
        k_target t = {row, out.token, temperature_inverse, 4, ids, top};
        assert_true(k_score(k, &logprob, &t, 1, z, VOCAB, STRIDE));
        assert_true(logprob == out.logprob);
        if (row < 2) assert_true(out.logprob == out.model_logprob); /* nothing cut at temperature 1 */
        const float *x = z + row * STRIDE;
        double sum = 0;
        for (int i = 0; i < VOCAB; i++) sum += exp((double)x[i] * temperature_inverse);
        check_near(logprob, (double)x[out.token] * temperature_inverse - log(sum), 3e-6, "score",
                   (size_t)row);
        for (int i = 0; i < 4; i++) {
            int better = 0;
            for (int j = 0; j < VOCAB; j++) better += x[j] > x[ids[i]];
            assert_int_equal(better, i);
            check_near(top[i], (double)x[ids[i]] * temperature_inverse - log(sum), 3e-6, "top", (size_t)i);
        }
        t.token = -1;
        logprob = 7;
        assert_true(k_score(k, &logprob, &t, 1, z, VOCAB, STRIDE));
        assert_true(logprob == 1.0f);
    }
    mem_free(z);
    k_close(k);
}

/* ---- One row, whatever is around it. */

static void draws_do_not_depend_on_anything_else(void **state) {
    (void)state;
    enum { STRIDE = 5000, N = 24 };
    static const int vocabs[] = {1, 5, 31, 1024, 1040, 4999};
    static const struct {
        const char *isa;
        int n_threads;
    } variants[] = {{"scalar", 1}, {"avx2", 1}, {"avx2", 2}, {"scalar", 2}, {"avx512", 2}};
    float *z = random_floats((size_t)N * STRIDE, 23, 5.0f);
    for (size_t v = 0; v < sizeof vocabs / sizeof vocabs[0]; v++) {
        static k_draw d[N];
        for (int i = 0; i < N; i++) {
            d[i] = (k_draw){.row = i,
                            .inv_temp = i % 3 ? 1.0f / 0.7f : 1.0f,
                            .top_p = i % 4 == 1 ? 0.9 : 1.0,
                            .min_p = i % 5 == 2 ? 0.02 : 0.0,
                            .top_k = i % 6 == 3 ? 50 : 0,
                            .key = {1, 2},
                            .index = 7,
                            .want_entropy = true};
        }
        k_drawn first[N];
        for (int i = 0; i < 5; i++) {
            k_ctx *k = open_isa(variants[i].isa, PRECISION_F32, variants[i].n_threads);
            if (!k) continue;
            k_drawn out[N], one;
            assert_int_equal(k_reserve(k, i % 2 ? STRIDE : 1, NULL), COP_OK);
            k_sample(k, out, d, N, z, vocabs[v], STRIDE);
            if (i == 0) memcpy(first, out, sizeof out);
            assert_memory_equal(first, out, sizeof out);
            for (int j = 0; j < N; j += 5) {
                k_sample(k, &one, &d[j], 1, z, vocabs[v], STRIDE);
                assert_memory_equal(&first[j], &one, sizeof one);
            }
            k_close(k);
        }
    }
    mem_free(z);
}

static void order_is_total(void **state) {
    (void)state;
    enum { N = 3000 };
    static uint64_t items[N], spare[N], sorted[N];
    uint64_t seed = 24;
    for (int i = 0; i < N; i++) sorted[i] = order_pack(roundf(next_random(&seed) * 20.0f), i); /* many ties */
    order_sort(sorted, spare, N);
    for (int i = 1; i < N; i++) assert_true(sorted[i - 1] < sorted[i]);
    for (int k = 0; k <= N; k += k < 5 ? 1 : 333) {
        seed = 24;
        for (int i = 0; i < N; i++) items[i] = order_pack(roundf(next_random(&seed) * 20.0f), i);
        order_select(items, N, k);
        order_sort(items, spare, k);
        assert_memory_equal(items, sorted, (size_t)k * sizeof *items);
    }
    assert_true(order_pack(1.0f, 9) < order_pack(0.5f, 0) && order_pack(-1.0f, 0) < order_pack(-2.0f, 0));
    assert_true(order_pack(0.0f, 1) < order_pack(-1e-6f, 0) && order_pack(-0.0f, 0) < order_pack(0.0f, 1));
}

static void failed_scratch_is_told_by_sync(void **state) {
    (void)state;
    k_ctx *k = best(1);
    float z[8] = {0};
    k_draw d = plain;
    k_drawn out;
    mem_fail_after(1);
    k_sample(k, &out, &d, 1, z, 8, 8);
    assert_true(mem_fail_stop());
    assert_int_equal(out.token, -1);
    cop_error err = {0};
    assert_int_equal(k_sync(k, &err), COP_ENOMEM);
    assert_int_equal(k_sync(k, &err), COP_OK);
    k_sample(k, &out, &d, 1, z, 8, 8);
    assert_true(out.token >= 0);
    k_close(k);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(noise_is_gumbel),
        cmocka_unit_test(every_coordinate_changes_the_noise),
        cmocka_unit_test(noise_follows_the_protocol),
        cmocka_unit_test(draws_have_the_distribution),
        cmocka_unit_test(truncation_keeps_the_right_ids),
        cmocka_unit_test(absent_ids_are_not_drawn),
        cmocka_unit_test(temperature_0_takes_the_first_best),
        cmocka_unit_test(nan_is_told),
        cmocka_unit_test(nan_fails_its_own_row_alone),
        cmocka_unit_test(scores_match_the_draws),
        cmocka_unit_test(draws_do_not_depend_on_anything_else),
        cmocka_unit_test(order_is_total),
        cmocka_unit_test(failed_scratch_is_told_by_sync),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
