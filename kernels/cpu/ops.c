/* The CPU backend: k_open and friends, and each operation of backend.h cut into parts for the threads.
 *
 * How the work is cut never matters to a bit: parts are whole rows, whole tiles of outputs, or whole heads.
 */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/math.h"

#include <assert.h>
#include <string.h>

/* Below this many arithmetic operations waking the threads costs more than it gains (some 5 microseconds). */
#define SPREAD_WORK 60000.0

/* ---- Life. */

cop_status k_open(k_ctx **out, precision profile, int n_threads, cop_error *err) {
    assert(n_threads >= 1);
    *out = NULL;
    k_ctx *k = mem_zalloc(1, sizeof *k);
    if (!k) return cop_fail(err, COP_ENOMEM, "could not allocate the CPU backend");
    k->profile = profile;
    cop_status status = cpu_isa_pick(&k->isa, err);
    if (status == COP_OK) status = threads_open(&k->threads, n_threads, err);
    if (status == COP_OK) {
        k->scratch = mem_zalloc((size_t)n_threads, sizeof *k->scratch);
        if (!k->scratch) status = cop_fail(err, COP_ENOMEM, "could not allocate the CPU backend");
    }
    if (status != COP_OK) {
        k_close(k);
        return status;
    }
    k->ops = k->isa == CPU_AVX2 && cpu_ops_avx2() ? cpu_ops_avx2() : &cpu_ops_scalar;
    cpu_flush_denormals();
    *out = k;
    return COP_OK;
}

void k_close(k_ctx *k) {
    if (!k) return;
    for (int i = 0; k->scratch && i < threads_count(k->threads); i++) cpu_scratch_free(&k->scratch[i]);
    mem_free(k->scratch);
    threads_close(k->threads);
    mem_free(k);
}

precision k_precision(const k_ctx *k) { return k->profile; }
cpu_isa k_isa(const k_ctx *k) { return k->isa; }
int k_threads(const k_ctx *k) { return threads_count(k->threads); }

cop_status k_sync(k_ctx *k, cop_error *err) {
    cop_status status = k->failure.status;
    if (status != COP_OK && err) *err = k->failure;
    k->failure = (cop_error){0};
    return status;
}

void *k_alloc(k_ctx *k, size_t n, size_t size) {
    (void)k;
    return mem_alloc_aligned(n, size);
}

void k_free(k_ctx *k, void *p) {
    (void)k;
    mem_free(p);
}

void k_write(k_ctx *k, void *to, const void *from, size_t n_bytes) {
    (void)k;
    memcpy(to, from, n_bytes);
}

void k_read(k_ctx *k, void *to, const void *from, size_t n_bytes) {
    (void)k;
    memcpy(to, from, n_bytes);
}

/* ---- Threads. */

typedef struct spread {
    cpu_part *part;
    const void *job;
    int n_items;
} spread;

static void run_part(void *arg, int index, int n) {
    const spread *s = arg;
    int first = (int)((int64_t)s->n_items * index / n), end = (int)((int64_t)s->n_items * (index + 1) / n);
    if (first < end) s->part(s->job, first, end, index);
}

void cpu_spread(k_ctx *k, cpu_part *part, const void *job, int n_items, double work) {
    spread s = {part, job, n_items};
    if (n_items > 1 && work >= SPREAD_WORK)
        threads_run(k->threads, run_part, &s);
    else
        run_part(&s, 0, 1);
}

/* ---- Weights. */

static bool is_bf16(const k_ctx *k) { return k->profile == PRECISION_BF16; }

cop_status k_matrix_open(k_ctx *k, k_matrix **out, int n_out, int n_in, cop_error *err) {
    assert(n_out > 0 && n_in > 0);
    *out = NULL;
    k_matrix *m = mem_zalloc(1, sizeof *m);
    if (m) {
        *m = (k_matrix){.n_out = n_out, .n_in = n_in, .bf16 = is_bf16(k)};
        m->tiles = (n_out + CPU_TILE - 1) / CPU_TILE;
        m->pairs = (n_in + 1) / 2;
        m->data = mem_alloc_aligned(k_matrix_bytes(m), 1);
    }
    if (!m || !m->data) {
        k_matrix_close(k, m);
        return cop_fail(err, COP_ENOMEM, "could not allocate a matrix of %d x %d", n_out, n_in);
    }
    memset(m->data, 0, k_matrix_bytes(m));
    *out = m;
    return COP_OK;
}

size_t k_matrix_bytes(const k_matrix *m) {
    return (size_t)m->tiles * (size_t)m->pairs * CPU_TILE * (m->bf16 ? sizeof(uint32_t) : 2 * sizeof(float));
}

void k_matrix_pack(k_ctx *k, k_matrix *m, int first, int n, const float *rows) {
    (void)k;
    assert(first >= 0 && n >= 0 && first + n <= m->n_out);
    for (int r = 0; r < n; r++) {
        const float *row = rows + (size_t)r * (size_t)m->n_in;
        size_t tile = (size_t)((first + r) / CPU_TILE) * (size_t)m->pairs,
               column = (size_t)((first + r) % CPU_TILE);
        for (int pair = 0; pair < m->pairs; pair++) {
            float even = row[2 * pair], odd = 2 * pair + 1 < m->n_in ? row[2 * pair + 1] : 0.0f;
            size_t at = tile + (size_t)pair;
            if (m->bf16) {
                ((uint32_t *)m->data)[at * CPU_TILE + column] =
                    (uint32_t)cop_bf16(odd) << 16 | cop_bf16(even);
            } else {
                ((float *)m->data)[at * 2 * CPU_TILE + column] = even;
                ((float *)m->data)[(at * 2 + 1) * CPU_TILE + column] = odd;
            }
        }
    }
}

void k_matrix_close(k_ctx *k, k_matrix *m) {
    (void)k;
    if (m) mem_free(m->data);
    mem_free(m);
}

cop_status k_table_open(k_ctx *k, k_table **out, int n_rows, int dim, cop_error *err) {
    assert(n_rows > 0 && dim > 0);
    *out = NULL;
    k_table *t = mem_zalloc(1, sizeof *t);
    if (t) {
        *t = (k_table){.n_rows = n_rows, .dim = dim, .bf16 = is_bf16(k)};
        t->data = mem_alloc_aligned(k_table_bytes(t), 1);
    }
    if (!t || !t->data) {
        k_table_close(k, t);
        return cop_fail(err, COP_ENOMEM, "could not allocate a table of %d x %d", n_rows, dim);
    }
    *out = t;
    return COP_OK;
}

size_t k_table_bytes(const k_table *t) {
    return (size_t)t->n_rows * (size_t)t->dim * (t->bf16 ? sizeof(uint16_t) : sizeof(float));
}

void k_table_pack(k_ctx *k, k_table *t, int first, int n, const float *rows) {
    (void)k;
    assert(first >= 0 && n >= 0 && first + n <= t->n_rows);
    size_t at = (size_t)first * (size_t)t->dim, count = (size_t)n * (size_t)t->dim;
    for (size_t i = 0; i < count; i++) {
        if (t->bf16)
            ((uint16_t *)t->data)[at + i] = cop_bf16(rows[i]);
        else
            ((float *)t->data)[at + i] = rows[i];
    }
}

void k_table_close(k_ctx *k, k_table *t) {
    (void)k;
    if (t) mem_free(t->data);
    mem_free(t);
}

static float table_value(const k_table *t, int32_t row, int column) {
    size_t at = (size_t)row * (size_t)t->dim + (size_t)column;
    return t->bf16 ? cop_widen(((const uint16_t *)t->data)[at]) : ((const float *)t->data)[at];
}

/* Rule 4: the frequency and the angle in fp32, their sine and cosine in double. */
cop_status k_rope_open(k_ctx *k, k_rope **out, int n_pos, int head_dim, double base, bool bf16,
                       cop_error *err) {
    (void)k;
    assert(n_pos > 0 && head_dim > 0 && head_dim % 2 == 0);
    *out = NULL;
    k_rope *r = mem_zalloc(1, sizeof *r);
    if (r) {
        *r = (k_rope){.n_pos = n_pos, .half = head_dim / 2};
        r->data = mem_alloc_aligned((size_t)n_pos * (size_t)head_dim, sizeof(float));
    }
    if (!r || !r->data) {
        k_rope_close(k, r);
        return cop_fail(err, COP_ENOMEM, "could not allocate the rotary table of %d positions", n_pos);
    }
    for (int j = 0; j < r->half; j++) {
        float exponent = (float)(2 * j) / (float)head_dim;
        float inverse = 1.0f / (float)pow(base, (double)exponent);
        for (int pos = 0; pos < n_pos; pos++) {
            float angle = (float)pos * inverse, c = (float)cos((double)angle), s = (float)sin((double)angle);
            float *row = r->data + (size_t)pos * (size_t)head_dim;
            row[j] = bf16 ? cop_round_bf16(c) : c;
            row[r->half + j] = bf16 ? cop_round_bf16(s) : s;
        }
    }
    *out = r;
    return COP_OK;
}

void k_rope_close(k_ctx *k, k_rope *r) {
    (void)k;
    if (r) mem_free(r->data);
    mem_free(r);
}

/* ---- Pages. */

static size_t element_bytes(const k_ctx *k) { return is_bf16(k) ? sizeof(uint16_t) : sizeof(float); }

size_t k_page_bytes(const k_ctx *k, int n_layers, int n_kv_heads, int head_dim) {
    k_kv kv = {.n_layers = n_layers, .n_kv_heads = n_kv_heads, .head_dim = head_dim};
    return cpu_page_elements(&kv) * element_bytes(k);
}

void k_page_copy(k_ctx *k, const k_kv *kv, int to, int from, int n_tokens) {
    (void)n_tokens; /* keys lie across all positions, so whole pages are copied */
    size_t n = cpu_page_elements(kv) * element_bytes(k);
    memcpy((char *)kv->arena + (size_t)to * n, (const char *)kv->arena + (size_t)from * n, n);
}

/* ---- The stream. */

typedef struct embed_job {
    k_ctx *k;
    float *x;
    const k_table *wte;
    const k_batch *b;
    int dim, channels;
    float eps, lambda;
    const k_matrix *gate;
} embed_job;

static void embed_one(const embed_job *j, float *e, int32_t id) {
    const cpu_ops *ops = j->k->ops;
    for (int i = 0; i < j->dim; i++) e[i] = table_value(j->wte, id, i);
    ops->scale(e, e, ops->inverse_rms(e, j->dim, j->eps), j->dim, false);
}

/* lambda * sigmoid(gate . e[0:channels]); the matrix reads e rounded. */
static float smear_gate(const embed_job *j, const float *e) {
    float x[2 * CPU_CHUNK_PAIRS], sum = 0.0f;
    for (int first = 0, chunk = 0; first < j->channels; first += 2 * CPU_CHUNK_PAIRS, chunk++) {
        int n = j->channels - first < 2 * CPU_CHUNK_PAIRS ? j->channels - first : 2 * CPU_CHUNK_PAIRS;
        for (int i = 0; i < n; i++) x[i] = is_bf16(j->k) ? cop_round_bf16(e[first + i]) : e[first + i];
        sum = sum + cpu_chain(j->gate, 0, chunk, x);
    }
    return j->lambda * cop_sigmoid(sum);
}

static void embed_part(const void *job, int first, int end, int thread) {
    (void)thread;
    const embed_job *j = job;
    for (int t = first; t < end; t++) {
        float *x = j->x + (size_t)t * (size_t)j->dim;
        embed_one(j, x, j->b->ids[t]);
    }
}

/* The second pass: needs the normed embedding of the token before, which is made again for each token, so
 * that it does not matter whether that token is in the batch. */
static void smear_part(const void *job, int first, int end, int thread) {
    const embed_job *j = job;
    float *before = j->k->scratch[thread].row;
    for (int t = first; t < end; t++) {
        if (j->b->pos[t] == 0) continue;
        float *x = j->x + (size_t)t * (size_t)j->dim;
        float gate = smear_gate(j, x);
        embed_one(j, before, j->b->prev[t]);
        for (int i = 0; i < j->dim; i++) x[i] = x[i] + gate * before[i];
    }
}

void k_embed(k_ctx *k, float *x, const k_table *wte, const k_batch *b, int dim, float eps,
             const k_matrix *gate, int channels, float lambda) {
    embed_job j = {k, x, wte, b, dim, channels, eps, lambda, gate};
    cpu_spread(k, embed_part, &j, b->n, 4.0 * b->n * dim);
    if (!gate || channels == 0) return;
    if (!cpu_scratch_row(k, dim)) return;
    cpu_spread(k, smear_part, &j, b->n, 6.0 * b->n * dim);
}

typedef struct norm_job {
    const k_ctx *k;
    float *h, *x;
    const float *x0;
    const int32_t *index;
    float resid, x0_lambda, eps;
    int dim;
} norm_job;

static void norm_part(const void *job, int first, int end, int thread) {
    (void)thread;
    const norm_job *j = job;
    const cpu_ops *ops = j->k->ops;
    size_t dim = (size_t)j->dim;
    for (int t = first; t < end; t++) {
        float *x = j->x + (j->index ? (size_t)j->index[t] : (size_t)t) * dim;
        if (j->x0) ops->mix(x, j->x0 + (size_t)t * dim, j->resid, j->x0_lambda, j->dim);
        ops->scale(j->h + (size_t)t * dim, x, ops->inverse_rms(x, j->dim, j->eps), j->dim, is_bf16(j->k));
    }
}

void k_mix_norm(k_ctx *k, float *h, float *x, const float *x0, float resid, float x0_lambda, int n, int dim,
                float eps) {
    norm_job j = {k, h, x, x0, NULL, resid, x0_lambda, eps, dim};
    cpu_spread(k, norm_part, &j, n, 6.0 * n * dim);
}

void k_gather_norm(k_ctx *k, float *h, const float *x, const int32_t *index, int n, int dim, float eps) {
    norm_job j = {k, h, (float *)x, NULL, index, 1.0f, 0.0f, eps, dim}; /* x is only read without x0 */
    cpu_spread(k, norm_part, &j, n, 4.0 * n * dim);
}

typedef struct elements_job {
    const k_ctx *k;
    float *x;
    const float *y;
    float scale;
    size_t n;
    int stride, n_cols;
} elements_job;

/* Elements are cut in blocks of this many. */
enum { BLOCK = 4096 };

static void sub_part(const void *job, int first, int end, int thread) {
    (void)thread;
    const elements_job *j = job;
    size_t from = (size_t)first * BLOCK, to = (size_t)end * BLOCK < j->n ? (size_t)end * BLOCK : j->n;
    j->k->ops->sub_scaled(j->x + from, j->y + from, j->scale, to - from);
}

void k_sub_scaled(k_ctx *k, float *x, const float *y, float scale, size_t n) {
    elements_job j = {.k = k, .x = x, .y = y, .scale = scale, .n = n};
    cpu_spread(k, sub_part, &j, (int)((n + BLOCK - 1) / BLOCK), 2.0 * (double)n);
}

void k_copy(k_ctx *k, float *to, const float *from, size_t n) {
    (void)k;
    memcpy(to, from, n * sizeof *to);
}

static void softcap_part(const void *job, int first, int end, int thread) {
    (void)thread;
    const elements_job *j = job;
    for (int r = first; r < end; r++)
        j->k->ops->softcap(j->x + (size_t)r * (size_t)j->stride, j->n_cols, j->scale);
}

void k_softcap(k_ctx *k, float *logits, int n, int n_cols, int stride, float cap) {
    elements_job j = {.k = k, .x = logits, .scale = cap, .stride = stride, .n_cols = n_cols};
    cpu_spread(k, softcap_part, &j, n, 40.0 * n * n_cols);
}

/* ---- Matrices. */

typedef struct gemm_job {
    const k_ctx *k;
    cpu_gemm g;
    int row_blocks; /* items are (tile block, row block) pairs, tile blocks outermost */
} gemm_job;

enum { TILE_BLOCK = 4, ROW_BLOCK = 48 }; /* a block of tiles stays in the cache while the rows go by */

static void gemm_part(const void *job, int first, int end, int thread) {
    (void)thread;
    const gemm_job *j = job;
    for (int i = first; i < end; i++) {
        int tile = i / j->row_blocks * TILE_BLOCK, row = i % j->row_blocks * ROW_BLOCK;
        int tile_end = tile + TILE_BLOCK < j->g.w->tiles ? tile + TILE_BLOCK : j->g.w->tiles;
        int row_end = row + ROW_BLOCK < j->g.n ? row + ROW_BLOCK : j->g.n;
        j->k->ops->gemm(&j->g, tile, tile_end, row, row_end);
    }
}

void k_gemm(k_ctx *k, float *y, const k_matrix *w, const float *x, int x_stride, int n, k_epilogue epilogue) {
    assert(x_stride >= w->n_in);
    gemm_job j = {k, {y, w, x, x_stride, n, epilogue}, (n + ROW_BLOCK - 1) / ROW_BLOCK};
    int tile_blocks = (w->tiles + TILE_BLOCK - 1) / TILE_BLOCK;
    cpu_spread(k, gemm_part, &j, tile_blocks * j.row_blocks, 2.0 * n * w->n_out * w->n_in);
}

/* ---- Attention. */

typedef struct qkv_job {
    const k_ctx *k;
    const k_qkv *a;
    const k_rope *rope;
    const k_batch *b;
    const k_kv *kv;
} qkv_job;

static void prepare_head(const qkv_job *j, float *x, int32_t pos) {
    const cpu_ops *ops = j->k->ops;
    int dim = j->kv->head_dim;
    const float *row = j->rope->data + (size_t)pos * (size_t)dim;
    ops->rotate(x, row, row + dim / 2, dim / 2);
    ops->scale(x, x, ops->inverse_rms(x, dim, j->a->eps), dim, false);
    if (j->a->qk_scale != 1.0f) ops->scale(x, x, j->a->qk_scale, dim, false);
}

static void put_element(const k_ctx *k, void *page, size_t at, float x) {
    if (is_bf16(k))
        ((uint16_t *)page)[at] = cop_bf16(x);
    else
        ((float *)page)[at] = x;
}

static void store_token(const qkv_job *j, int t) {
    const k_qkv *a = j->a;
    const k_kv *kv = j->kv;
    int dim = kv->head_dim;
    int32_t pos = j->b->pos[t], slot = pos % KV_PAGE_TOKENS;
    assert(pos >= 0 && pos < j->rope->n_pos);
    for (int h = 0; h < a->n_heads; h++)
        prepare_head(j, a->q + ((size_t)t * (size_t)a->n_heads + (size_t)h) * (size_t)dim, pos);
    int32_t page =
        j->b->pages[(size_t)j->b->table[t] * (size_t)j->b->page_stride + (size_t)(pos / KV_PAGE_TOKENS)];
    char *data = (char *)kv->arena + (size_t)page * cpu_page_elements(kv) * element_bytes(j->k);
    for (int h = 0; h < kv->n_kv_heads; h++) {
        size_t head = (size_t)t * (size_t)kv->n_kv_heads + (size_t)h;
        float *key = a->k + head * (size_t)dim, *value = a->v + head * (size_t)dim;
        prepare_head(j, key, pos);
        if (a->ve) {
            float gate = a->gate_factor * cop_sigmoid(a->gate[head]);
            for (int d = 0; d < dim; d++)
                value[d] = value[d] + gate * table_value(a->ve, j->b->ids[t], h * dim + d);
        }
        size_t keys = cpu_key_offset(kv, a->layer, h) + (size_t)slot;
        size_t values = cpu_value_offset(kv, a->layer, h) + (size_t)slot * (size_t)dim;
        for (int d = 0; d < dim; d++) {
            put_element(j->k, data, keys + (size_t)d * KV_PAGE_TOKENS, key[d]);
            put_element(j->k, data, values + (size_t)d, value[d]);
        }
    }
}

static void qkv_part(const void *job, int first, int end, int thread) {
    (void)thread;
    for (int t = first; t < end; t++) store_token(job, t);
}

void k_qkv_store(k_ctx *k, const k_qkv *a, const k_rope *rope, const k_batch *b, const k_kv *kv) {
    qkv_job j = {k, a, rope, b, kv};
    cpu_spread(k, qkv_part, &j, b->n, 10.0 * b->n * (a->n_heads + 2 * kv->n_kv_heads) * kv->head_dim);
}

typedef struct attention_job {
    const k_ctx *k;
    cpu_attention a;
} attention_job;

static void attention_part(const void *job, int first, int end, int thread) {
    (void)thread;
    const attention_job *j = job;
    for (int i = first; i < end; i++) j->k->ops->attention(&j->a, i / j->a.n_heads, i % j->a.n_heads);
}

void k_attention(k_ctx *k, float *out, const float *q, const k_batch *b, const k_kv *kv, int n_heads,
                 int layer, int32_t window) {
    attention_job j = {k,
                       {.out = out,
                        .q = q,
                        .b = b,
                        .kv = kv,
                        .page_bytes = cpu_page_elements(kv) * element_bytes(k),
                        .n_heads = n_heads,
                        .layer = layer,
                        .window = window,
                        .bf16 = is_bf16(k),
                        .scale = 1.0f / sqrtf((float)kv->head_dim)}};
    double keys = 0;
    for (int t = 0; t < b->n; t++) keys += b->pos[t] < window ? b->pos[t] + 1 : window + 1;
    cpu_spread(k, attention_part, &j, b->n * n_heads, 4.0 * keys * n_heads * kv->head_dim);
}
