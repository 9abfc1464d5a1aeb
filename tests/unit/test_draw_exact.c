/* Draws and tops against the obvious formulation: sort everything, cut, mask, sum over the whole vocabulary,
 * noise for each id.  Tokens, kept ids and the bits of the log-probabilities must be the same with every
 * instruction set. */
#include "tests/unit/kernel_test.h"

#include "kernels/cpu/math.h"
#include "kernels/cpu/order.h"

enum { MAX_VOCAB = 50304, MAX_ABSENT = 4 };

static const char *const isas[] = {"scalar", "avx2", "avx512"};
enum { N_ISAS = sizeof isas / sizeof isas[0] };

/* ---- The obvious formulation. */

static float *masked;   /* [MAX_VOCAB] */
static int32_t *sorted; /* [MAX_VOCAB] ids above -inf of `masked`, best first */

static int better_first(const void *a, const void *b) {
    int32_t i = *(const int32_t *)a, j = *(const int32_t *)b;
    if (masked[i] != masked[j]) return masked[i] > masked[j] ? -1 : 1;
    return (i > j) - (i < j);
}

static float plain_sum(const float *x, int n, float scale, float max) {
    float sum = 0.0f;
    for (int tile = 0; tile < n; tile += 1024) {
        float lanes[16] = {0};
        for (int i = tile; i < n && i < tile + 1024; i++)
            lanes[i % 16] = lanes[i % 16] + cop_exp(x[i] * scale - max);
        for (int s = 8; s > 0; s /= 2)
            for (int i = 0; i < s; i++) lanes[i] = lanes[i] + lanes[i + s];
        sum = sum + lanes[0];
    }
    return sum;
}

static float plain_entropy(const float *x, int n, float scale, float max, float sum) {
    float total = 0.0f;
    for (int tile = 0; tile < n; tile += 1024) {
        float lanes[16] = {0};
        for (int i = tile; i < n && i < tile + 1024; i++) {
            float y = x[i] * scale - max;
            float term = y < -87.0f ? 0.0f : cop_exp(y) * y;
            lanes[i % 16] = lanes[i % 16] + term;
        }
        for (int s = 8; s > 0; s /= 2)
            for (int i = 0; i < s; i++) lanes[i] = lanes[i] + lanes[i + s];
        total = total + lanes[0];
    }
    return cop_log(sum) - total / sum;
}

static uint64_t plain_weight(float scale, float max, int32_t id) {
    return (uint64_t)((double)cop_exp(masked[id] * scale - max) * 0x1p40);
}

/* How many of the n ids in `sorted` stay; max is scaled. */
static int plain_cut(const k_draw *d, int n, float max) {
    if (d->top_k > 0 && d->top_k < n) n = d->top_k;
    if (d->top_p < 1.0) {
        uint64_t total = 0, sum = 0;
        int kept = 0;
        for (int i = 0; i < n; i++) total += plain_weight(d->inv_temp, max, sorted[i]);
        do sum += plain_weight(d->inv_temp, max, sorted[kept++]);
        while (kept < n && (double)sum < d->top_p * (double)total);
        n = kept;
    }
    int kept = 0;
    for (int i = 0; i < n; i++) {
        bool keep = (double)plain_weight(d->inv_temp, max, sorted[i]) >= d->min_p * 0x1p40;
        if (d->min_p <= 0.0 || keep) sorted[kept++] = sorted[i];
    }
    return kept;
}

static int32_t plain_winner(const k_draw *d, int vocab) {
    int32_t winner = -1;
    float top = -INFINITY;
    for (int32_t id = 0; id < vocab; id++) {
        uint32_t counter[4] = {(uint32_t)id / 4, d->index, d->sample, d->prompt_hash}, words[4];
        cop_philox(counter, d->key, words);
        float score = fmaf(masked[id], d->inv_temp, cop_gumbel(words[id % 4]));
        if (score > top) top = score, winner = id;
    }
    return winner;
}

/* What k_sample must say of finite or -inf logits, at least one of which is finite and present.  The ids that
 * are kept are then sorted[0 .. returned). */
static int plain_draw(k_drawn *out, const float *z, int vocab, const k_draw *d) {
    float model_max = -INFINITY;
    for (int i = 0; i < vocab; i++) model_max = z[i] > model_max ? z[i] : model_max;
    memcpy(masked, z, (size_t)vocab * sizeof *z);
    for (int i = 0; i < d->n_absent; i++) masked[d->absent[i]] = -INFINITY;
    int n = 0;
    for (int32_t i = 0; i < vocab; i++)
        if (masked[i] > -INFINITY) sorted[n++] = i;
    qsort(sorted, (size_t)n, sizeof *sorted, better_first);
    *out = (k_drawn){.token = sorted[0], .model_logprob = 1.0f, .entropy = d->want_entropy ? 0.0f : 1.0f};
    if (d->inv_temp == 0.0f) {
        n = 1;
    } else {
        float max = masked[sorted[0]] * d->inv_temp;
        n = plain_cut(d, n, max);
        for (int32_t i = 0; i < vocab; i++) masked[i] = -INFINITY;
        for (int i = 0; i < n; i++) masked[sorted[i]] = z[sorted[i]];
        out->token = plain_winner(d, vocab);
        float sum = plain_sum(masked, vocab, d->inv_temp, max);
        out->logprob = (z[out->token] * d->inv_temp - max) - cop_log(sum);
        if (d->want_entropy) out->entropy = plain_entropy(masked, vocab, d->inv_temp, max, sum);
    }
    if (d->want_model)
        out->model_logprob = (z[out->token] - model_max) - cop_log(plain_sum(z, vocab, 1.0f, model_max));
    if (d->kept && d->top_k > 0) out->n_kept = n;
    return n;
}

/* ---- Logits and draws of many kinds. */

enum { N_SHAPES = 12 };

static uint32_t below(uint64_t *seed, uint32_t n) {
    next_random(seed);
    return (uint32_t)(*seed >> 33) % n;
}

static float logit(int shape, int i, int vocab, uint64_t *seed) {
    float u = next_random(seed), v = next_random(seed), w = next_random(seed);
    switch (shape) {
    case 0: return 0.25f;                                           /* all alike */
    case 1: return 8.0f * u;                                        /* flat */
    case 2: return 15.0f * tanhf((u + v + w) * 3.0f / 15.0f);       /* a bell, softcapped */
    case 3: return below(seed, 700) ? -8.0f + v : 12.0f + 3.0f * u; /* few stand out */
    case 4: return roundf(4.0f * u);                                /* many ties */
    case 5: return u < -0.3f ? -0.0f : u < 0.3f ? 0.0f : -1.0f;     /* zeros of both signs are ties */
    case 6: return u < 0.0f ? -INFINITY : 5.0f * v;
    case 7: return i % 97 == 3 ? 2.0f * u : -INFINITY;
    case 8: return 20.0f * (float)i / (float)vocab - 10.0f; /* the best come last */
    case 9: return 3000.0f * u;
    case 10: return 1e6f * roundf(1.5f * u);         /* scores tie: the noise is below their last place */
    default: return u < 0.0f ? 1e-40f * v : -1e-41f; /* denormals count as zeros */
    }
}

static const double top_ps[] = {1.0, 1.0, 1.0, 0.0, 0.1, 0.5, 0.9, 0.95, 0.999999, 1.0 - 0x1p-53};
static const double min_ps[] = {0.0, 0.0, 0.0, 1e-30, 1e-12, 1e-3, 0.05, 0.5, 1.0};
static const float inv_temps[] = {1.0f, 1.0f, 1.0f, 0.5f, 1.0f / 0.7f, 1000.0f, 1e-3f, 0.0f};
#define ANY_OF(seed, list) (list)[below(seed, sizeof(list) / sizeof(list)[0])]

static k_draw random_draw(uint64_t *seed, int vocab, int32_t *absent, int32_t *kept) {
    const int top_ks[] = {0, 0, 0, 1, 2, 7, 50, vocab / 40, vocab / 2, vocab - 1, vocab, vocab + 5};
    k_draw d = {.inv_temp = ANY_OF(seed, inv_temps),
                .top_k = ANY_OF(seed, top_ks),
                .top_p = ANY_OF(seed, top_ps),
                .min_p = ANY_OF(seed, min_ps),
                .key = {below(seed, 1000000), below(seed, 3)},
                .index = below(seed, 10),
                .sample = below(seed, 10),
                .prompt_hash = below(seed, 10),
                .absent = absent,
                .kept = below(seed, 4) ? kept : NULL,
                .want_model = below(seed, 2),
                .want_entropy = below(seed, 2)};
    d.n_absent = below(seed, 3) ? 0 : (int)below(seed, MAX_ABSENT + 1);
    for (int i = 0; i < d.n_absent; i++) absent[i] = (int32_t)below(seed, (uint32_t)vocab);
    return d;
}

static bool something_is_left(const float *z, int vocab, const k_draw *d) {
    for (int i = 0; i < vocab; i++) {
        bool absent = false;
        for (int j = 0; j < d->n_absent; j++) absent |= d->absent[j] == i;
        if (!absent && z[i] > -INFINITY) return true;
    }
    return false;
}

static void check_draw(k_ctx *const *k, const float *z, int vocab, const k_draw *d, int32_t *kept,
                       const char *what) {
    k_drawn want, got;
    int n = something_is_left(z, vocab, d) ? plain_draw(&want, z, vocab, d) : -1;
    for (int isa = 0; isa < N_ISAS; isa++) {
        if (!k[isa]) continue;
        memset(kept, 0xff, (size_t)vocab * sizeof *kept);
        k_sample(k[isa], &got, d, 1, z, vocab, vocab);
        if (n < 0 && got.token != -1)
            fail_msg("%s, %s: %d drawn from nothing", what, isas[isa], (int)got.token);
        if (n < 0) continue;
        if (got.token != want.token || got.n_kept != want.n_kept)
            fail_msg("%s, %s: token %d of %d, not %d of %d", what, isas[isa], (int)got.token, got.n_kept,
                     (int)want.token, want.n_kept);
        check_bits(&got.logprob, &want.logprob, 1, what);
        check_bits(&got.model_logprob, &want.model_logprob, 1, what);
        check_bits(&got.entropy, &want.entropy, 1, what);
        if (memcmp(kept, sorted, (size_t)want.n_kept * sizeof *kept))
            fail_msg("%s, %s: other ids kept", what, isas[isa]);
    }
}

static void open_all(k_ctx *k[N_ISAS]) {
    cpu_flush_denormals(); /* as the threads that draw do */
    for (int isa = 0; isa < N_ISAS; isa++) k[isa] = open_isa(isas[isa], PRECISION_F32, 1);
    masked = mem_alloc(MAX_VOCAB, sizeof *masked);
    sorted = mem_alloc(MAX_VOCAB, sizeof *sorted);
    assert_true(masked && sorted);
}

static void close_all(k_ctx *k[N_ISAS]) {
    for (int isa = 0; isa < N_ISAS; isa++) k_close(k[isa]);
    mem_free(masked);
    mem_free(sorted);
}

static const int vocabs[] = {1,  2,   15,   16,   17,   31,   32,   33,    63,       64,
                             65, 500, 1023, 1024, 1025, 2085, 4999, 32768, MAX_VOCAB};

static void draws_have_the_bits_of_the_obvious_formulation(void **state) {
    (void)state;
    k_ctx *k[N_ISAS];
    open_all(k);
    float *z = mem_alloc(MAX_VOCAB, sizeof *z);
    int32_t *kept = mem_alloc(MAX_VOCAB, sizeof *kept), absent[MAX_ABSENT];
    uint64_t seed = 31;
    for (size_t v = 0; v < sizeof vocabs / sizeof vocabs[0]; v++)
        for (int shape = 0; shape < N_SHAPES; shape++) {
            int vocab = vocabs[v];
            for (int i = 0; i < vocab; i++) z[i] = logit(shape, i, vocab, &seed);
            for (int i = 0; i < (vocab < 5000 ? 60 : 6); i++) {
                char what[80];
                snprintf(what, sizeof what, "vocabulary %d, shape %d, draw %d", vocab, shape, i);
                k_draw d = random_draw(&seed, vocab, absent, kept);
                check_draw(k, z, vocab, &d, kept, what);
            }
        }
    mem_free(z);
    mem_free(kept);
    close_all(k);
}

/* Many draws that nothing cuts: noise that is passed over must not have won. */
static void passing_over_noise_changes_no_token(void **state) {
    (void)state;
    enum { VOCAB = 1003, DRAWS = 400 };
    k_ctx *k[N_ISAS];
    open_all(k);
    float z[VOCAB];
    uint64_t seed = 32;
    for (int shape = 0; shape < N_SHAPES; shape++) {
        for (int i = 0; i < VOCAB; i++) z[i] = logit(shape, i, VOCAB, &seed);
        for (uint32_t i = 0; i < DRAWS; i++) {
            k_draw d = {.inv_temp = inv_temps[i % 7], .top_p = 1.0, .key = {i, 33}, .index = 5};
            int32_t unused[VOCAB];
            check_draw(k, z, VOCAB, &d, unused, "plain draw");
        }
    }
    close_all(k);
}

/* Keys under which an id has the word 2^32 - 1, the greatest noise: 22.87.  A draw may pass over noise by
 * what it can be at most, so logits are set such that this one just wins over id 0, and then just not. */
static void the_greatest_noise_wins_by_a_hair(void **state) {
    (void)state;
    static const struct {
        uint32_t key;
        int32_t id;
    } cases[] = {{74293844, 80}, {236901670, 82}, {256769190, 75}, {280267463, 88}};
    k_ctx *k[N_ISAS];
    open_all(k);
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        k_draw d = {.inv_temp = 1.0f, .top_p = 1.0, .key = {cases[c].key, 0}};
        uint32_t counter[4] = {(uint32_t)cases[c].id / 4}, first[4] = {0}, words[4];
        cop_philox(first, d.key, first);
        cop_philox(counter, d.key, words);
        assert_int_equal(words[cases[c].id % 4], UINT32_MAX);
        float z[128], bar = cop_gumbel(first[0]);
        for (int hair = -1; hair <= 1; hair += 2) {
            for (int i = 0; i < 128; i++) z[i] = -100.0f;
            z[0] = 0.0f;
            z[cases[c].id] = bar - cop_gumbel(UINT32_MAX) + (float)hair * 1e-5f;
            int32_t unused[128];
            check_draw(k, z, 128, &d, unused, "greatest noise");
            assert_int_equal(plain_winner(&d, 128), hair > 0 ? cases[c].id : 0);
        }
    }
    close_all(k);
}

static void tops_are_the_head_of_the_order(void **state) {
    (void)state;
    k_ctx *k[N_ISAS];
    open_all(k);
    float *z = mem_alloc(MAX_VOCAB, sizeof *z), *logprobs = mem_alloc(MAX_VOCAB, sizeof *logprobs);
    int32_t *ids = mem_alloc(MAX_VOCAB, sizeof *ids);
    uint64_t seed = 34;
    for (size_t v = 0; v < sizeof vocabs / sizeof vocabs[0]; v++)
        for (int shape = 0; shape < N_SHAPES; shape++) {
            int vocab = vocabs[v], tops[] = {1, vocab / 60, vocab / 2, vocab};
            for (int i = 0; i < vocab; i++) masked[i] = z[i] = logit(shape, i, vocab, &seed), sorted[i] = i;
            if (masked[0] == -INFINITY) masked[0] = z[0] = 1.0f;
            qsort(sorted, (size_t)vocab, sizeof *sorted, better_first);
            float max = z[sorted[0]], log_sum = cop_log(plain_sum(z, vocab, 1.0f, max)), unused;
            for (int i = 0; i < 4; i++) {
                k_target t = {
                    .token = -1, .inv_temp = 1.0f, .top = tops[i], .top_ids = ids, .top_logprobs = logprobs};
                for (int isa = 0; isa < N_ISAS; isa++) {
                    if (!k[isa]) continue;
                    assert_true(k_score(k[isa], &unused, &t, 1, z, vocab, vocab));
                    assert_memory_equal(ids, sorted, (size_t)t.top * sizeof *ids);
                    for (int at = 0; at < t.top; at += 1 + t.top / 9) {
                        float want = (z[ids[at]] - max) - log_sum;
                        check_bits(&logprobs[at], &want, 1, "top");
                    }
                }
            }
        }
    mem_free(z);
    mem_free(logprobs);
    mem_free(ids);
    close_all(k);
}

/* ---- The parts. */

static void the_share_is_reached_where_the_sorted_run_reaches_it(void **state) {
    (void)state;
    enum { N = 700 };
    static uint64_t items[N], order[N], spare[N], weights[N];
    uint64_t seed = 35;
    for (int round = 0; round < 300; round++) {
        int n = 1 + (int)below(&seed, N);
        uint64_t total = 0, sum = 0;
        for (int i = 0; i < n; i++) {
            float z = round % 2 ? roundf(next_random(&seed) * 20.0f) : next_random(&seed);
            items[i] = order[i] = order_pack(z, 2 * i);
            total += weights[i] = below(&seed, 5) ? below(&seed, 1000) : 0;
        }
        if (total == 0) continue;
        double share = round % 5 ? 1.0 + (double)below(&seed, (uint32_t)total) : (double)total;
        order_sort(order, spare, n);
        int last = -1;
        do sum += weights[order_id(order[++last]) / 2];
        while ((double)sum < share);
        assert_true(order_reach(items, weights, n, share) == order[last]);
    }
}

static void maxima_and_fixed_sums_are_those_of_single_logits(void **state) {
    (void)state;
    float *z = mem_alloc(5000, sizeof *z), blocks[5000 / CPU_MAX_BLOCK + 1];
    uint64_t seed = 36;
    cpu_flush_denormals();
    for (int isa = 0; isa < N_ISAS; isa++) {
        k_ctx *k = open_isa(isas[isa], PRECISION_F32, 1);
        if (!k) continue;
        for (int n = 1; n < 5000; n += n < 70 ? 1 : 617)
            for (int shape = 0; shape < N_SHAPES; shape++) {
                float max = -INFINITY;
                uint64_t sum = 0;
                for (int i = 0; i < n; i++) z[i] = logit(shape, i, n, &seed);
                for (int i = 0; i < n; i++) max = z[i] > max ? z[i] : max;
                if (max == -INFINITY) continue;
                for (int i = 0; i < n; i++)
                    sum += (uint64_t)((double)cop_exp(z[i] * 0.7f - max * 0.7f) * 0x1p40);
                assert_true(k->ops->fixed_sum(z, n, 0.7f, max * 0.7f) == sum);
                assert_true(k->ops->block_max(blocks, z, n));
                for (int b = 0; b * CPU_MAX_BLOCK < n; b++) {
                    float most = -INFINITY;
                    for (int i = b * CPU_MAX_BLOCK; i < n && i < (b + 1) * CPU_MAX_BLOCK; i++)
                        most = z[i] > most ? z[i] : most;
                    assert_true(blocks[b] == most);
                }
                z[below(&seed, (uint32_t)n)] = NAN;
                assert_false(k->ops->block_max(blocks, z, n));
            }
        k_close(k);
    }
    mem_free(z);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(draws_have_the_bits_of_the_obvious_formulation),
        cmocka_unit_test(passing_over_noise_changes_no_token),
        cmocka_unit_test(the_greatest_noise_wins_by_a_hair),
        cmocka_unit_test(tops_are_the_head_of_the_order),
        cmocka_unit_test(the_share_is_reached_where_the_sorted_run_reaches_it),
        cmocka_unit_test(maxima_and_fixed_sums_are_those_of_single_logits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
