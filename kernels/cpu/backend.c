/* The CPU backend's life, memory, weights and tables.  Operations: ops.c and sample.c. */
#include "kernels/cores.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/math.h"

#include <assert.h>
#include <string.h>

/* Every instruction set that cpu_isa_pick() can name on this machine was built for it. */
static const cpu_ops *ops_of(cpu_isa isa, precision profile) {
    switch (isa) {
    case CPU_AVX2: return cpu_ops_avx2();
    case CPU_AVX512: return cpu_ops_avx512();
    case CPU_AVX512BF16: return profile == PRECISION_BF16 ? cpu_ops_avx512bf16() : cpu_ops_avx512();
    case CPU_SCALAR: break;
    }
    return &cpu_ops_scalar;
}

/* The cores that n pinned threads get, one each. */
static cop_status choose_cores(k_ctx *k, int n, cop_error *err) {
    k->cores = mem_alloc((size_t)n, sizeof *k->cores);
    if (!k->cores) return cop_fail(err, COP_ENOMEM, "could not allocate the CPU backend");
    int n_allowed = cores_allowed(k->cores, n);
    if (n_allowed >= n) return COP_OK;
    if (n_allowed < 0) return cop_fail(err, COP_ENOMEM, "could not list the cores of the process");
    return cop_fail(err, COP_EINVAL, "cannot bind %d threads to a core each: the process may use %d", n,
                    n_allowed);
}

static bool scratch_open(k_ctx *k, int n_threads) {
    k->scratch = mem_zalloc((size_t)n_threads, sizeof *k->scratch);
    for (int i = 0; k->scratch && i < n_threads; i++) {
        k->scratch[i].attention = mem_alloc_aligned(CPU_GANG * 2 * K_MAX_HEAD_DIM, sizeof(float));
        if (!k->scratch[i].attention) return false;
    }
    return k->scratch != NULL;
}

cop_status k_open(k_ctx **out, precision profile, int n_threads, bool pin, cop_error *err) {
    assert(out && n_threads >= 1);
    *out = NULL;
    cpu_isa isa;
    COP_TRY(cpu_isa_pick(&isa, err), err, "could not open the CPU backend");
    k_ctx *k = mem_zalloc(1, sizeof *k);
    if (!k) return cop_fail(err, COP_ENOMEM, "could not allocate the CPU backend");
    slab_pool_init(&k->weights);
    k->profile = profile;
    k->isa = isa;
    k->ops = ops_of(isa, profile);
    cop_status status = pin ? choose_cores(k, n_threads, err) : COP_OK;
    if (status == COP_OK) status = threads_open(&k->threads, n_threads, k->cores, err);
    if (status == COP_OK && !scratch_open(k, n_threads))
        status = cop_fail(err, COP_ENOMEM, "could not allocate the CPU backend");
    if (status != COP_OK) {
        k_close(k);
        return status;
    }
    *out = k;
    return COP_OK;
}

void k_bind(k_ctx *k) {
    cop_error err;
    if (!k->cores || cores_pin(pthread_self(), k->cores[0], &err) == COP_OK) return;
    if (k->failure.status == COP_OK) k->failure = err;
}

static void scratch_free(k_ctx *k) {
    for (int i = 0; k->scratch && i < k_threads(k); i++) {
        mem_free(k->scratch[i].masked);
        mem_free(k->scratch[i].blocks);
        mem_free(k->scratch[i].order);
        mem_free(k->scratch[i].spare);
        mem_free(k->scratch[i].weights);
        k->scratch[i].masked = k->scratch[i].blocks = k->scratch[i].weights = NULL;
        k->scratch[i].order = k->scratch[i].spare = NULL;
    }
    k->scratch_vocab = 0;
}

/* Room for a matrix's inputs, so that no step allocates.  Steps use it: it is replaced only for a matrix with
 * longer rows than any before, and those are opened by the thread that steps. */
static cop_status reserve_packed(k_ctx *k, int n_in, cop_error *err) {
    int n_chunks = (n_in + 2 * CPU_CHUNK_PAIRS - 1) / (2 * CPU_CHUNK_PAIRS);
    if (n_chunks <= k->packed_chunks) return COP_OK;
    for (int i = 0; i < k_threads(k); i++) {
        void *room =
            mem_alloc_aligned((size_t)n_chunks, CPU_PANEL_ROWS * 2 * CPU_CHUNK_PAIRS * sizeof(float));
        if (!room) return cop_fail(err, COP_ENOMEM, "could not allocate room for rows of %d", n_in);
        mem_free(k->scratch[i].packed);
        k->scratch[i].packed = room;
    }
    k->packed_chunks = n_chunks;
    return COP_OK;
}

void k_close(k_ctx *k) {
    if (!k) return;
    scratch_free(k);
    for (int i = 0; k->scratch && i < k_threads(k); i++) {
        mem_free(k->scratch[i].packed);
        mem_free(k->scratch[i].attention);
    }
    mem_free(k->scratch);
    threads_close(k->threads);
    mem_free(k->cores);
    slab_pool_free(&k->weights);
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

cop_status k_reserve(k_ctx *k, int vocab, cop_error *err) {
    assert(vocab >= 0);
    if (vocab <= k->scratch_vocab) return COP_OK;
    scratch_free(k);
    for (int i = 0; i < k_threads(k); i++) {
        cpu_scratch *s = &k->scratch[i];
        s->masked = mem_alloc_aligned((size_t)vocab, sizeof *s->masked);
        s->blocks = mem_alloc_aligned((size_t)(vocab + CPU_MAX_BLOCK - 1) / CPU_MAX_BLOCK, sizeof *s->blocks);
        s->order = mem_alloc_aligned((size_t)vocab, sizeof *s->order);
        s->spare = mem_alloc_aligned((size_t)vocab, sizeof *s->spare);
        s->weights = mem_alloc_aligned((size_t)vocab, sizeof *s->weights);
        if (s->masked && s->blocks && s->order && s->spare && s->weights) continue;
        scratch_free(k);
        return cop_fail(err, COP_ENOMEM, "could not allocate the sampler's scratch for %d tokens", vocab);
    }
    k->scratch_vocab = vocab;
    return COP_OK;
}

void *k_alloc(k_ctx *k, size_t n, size_t size) {
    (void)k;
    return mem_alloc_huge(n, size);
}

void k_free(k_ctx *k, void *p) {
    (void)k;
    mem_free(p);
}

void k_write(k_ctx *k, void *to, const void *from, size_t n_bytes) {
    (void)k;
    if (n_bytes) memcpy(to, from, n_bytes);
}

void k_read(k_ctx *k, void *to, const void *from, size_t n_bytes) {
    (void)k;
    if (n_bytes) memcpy(to, from, n_bytes);
}

/* ---- Weights. */

size_t k_matrix_bytes(const k_matrix *m) {
    return (size_t)m->tiles * (size_t)m->pairs * CPU_TILE * (m->bf16 ? sizeof(uint32_t) : 2 * sizeof(float));
}

cop_status k_matrix_open(k_ctx *k, k_matrix **out, int n_out, int n_in, cop_error *err) {
    assert(n_out >= 0 && n_in >= 0);
    *out = NULL;
    COP_TRY(reserve_packed(k, n_in, err), err, "could not open a matrix");
    k_matrix *m = mem_zalloc(1, sizeof *m);
    if (!m) return cop_fail(err, COP_ENOMEM, "could not allocate a matrix of %d x %d", n_out, n_in);
    m->n_out = n_out;
    m->n_in = n_in;
    m->tiles = n_out / CPU_TILE + (n_out % CPU_TILE != 0);
    m->pairs = n_in / 2 + n_in % 2;
    m->bf16 = k->profile == PRECISION_BF16;
    m->data = slab_take(&k->weights, k_matrix_bytes(m), &m->slab);
    if (!m->data) {
        k_matrix_close(k, m);
        return cop_fail(err, COP_ENOMEM, "could not allocate a matrix of %d x %d", n_out, n_in);
    }
    if (n_out % CPU_TILE) {
        size_t tile_bytes = k_matrix_bytes(m) / (size_t)m->tiles;
        memset((char *)m->data + (size_t)(m->tiles - 1) * tile_bytes, 0, tile_bytes);
    }
    *out = m;
    return COP_OK;
}

void k_matrix_pack(k_ctx *k, k_matrix *m, int first, int n, const float *rows) {
    assert(first >= 0 && n >= 0 && first + n <= m->n_out);
    cpu_pack(k->ops, m, first, n, rows);
}

void k_matrix_close(k_ctx *k, k_matrix *m) {
    if (!m) return;
    slab_drop(&k->weights, m->slab, m->data);
    mem_free(m);
}

size_t k_table_bytes(const k_table *t) {
    return (size_t)t->n_rows * (size_t)t->dim * (t->bf16 ? sizeof(uint16_t) : sizeof(float));
}

cop_status k_table_open(k_ctx *k, k_table **out, int n_rows, int dim, cop_error *err) {
    assert(n_rows >= 0 && dim >= 0);
    *out = NULL;
    k_table *t = mem_zalloc(1, sizeof *t);
    if (!t) return cop_fail(err, COP_ENOMEM, "could not allocate a table of %d x %d", n_rows, dim);
    t->n_rows = n_rows;
    t->dim = dim;
    t->bf16 = k->profile == PRECISION_BF16;
    t->data = slab_take(&k->weights, k_table_bytes(t), &t->slab);
    if (!t->data) {
        k_table_close(k, t);
        return cop_fail(err, COP_ENOMEM, "could not allocate a table of %d x %d", n_rows, dim);
    }
    *out = t;
    return COP_OK;
}

void k_table_pack(k_ctx *k, k_table *t, int first, int n, const float *rows) {
    assert(first >= 0 && n >= 0 && first + n <= t->n_rows);
    size_t dim = (size_t)t->dim, at = (size_t)first * dim;
    if (!t->bf16) {
        if (n) memcpy((float *)t->data + at, rows, (size_t)n * dim * sizeof(float));
        return;
    }
    for (size_t r = 0; r < (size_t)n; r++)
        k->ops->narrow((uint16_t *)t->data + at + r * dim, rows + r * dim, t->dim);
}

void k_table_close(k_ctx *k, k_table *t) {
    if (!t) return;
    slab_drop(&k->weights, t->slab, t->data);
    mem_free(t);
}

/* Rule 4: the frequency and the angle are fp32, as the reference computes them; libm's pow, cos and sin in
 * double serve only here, when a model is loaded. */
typedef struct rope_job {
    k_rope *rope;
    double base;
    bool bf16;
} rope_job;

/* Positions [first, end). */
static void rope_part(const void *job, int first, int end, int thread) {
    (void)thread;
    const rope_job *a = job;
    const k_rope *r = a->rope;
    for (int j = 0; j < r->half; j++) {
        double exponent = (double)((float)(2 * j) / (float)(2 * r->half));
        float inverse = 1.0f / (float)pow(a->base, exponent);
        for (int t = first; t < end; t++) {
            double angle = (double)((float)t * inverse);
            float c = (float)cos(angle), s = (float)sin(angle);
            float *row = r->data + (size_t)t * 2 * (size_t)r->half;
            row[j] = a->bf16 ? cop_round_bf16(c) : c;
            row[r->half + j] = a->bf16 ? cop_round_bf16(s) : s;
        }
    }
}

cop_status k_rope_open(k_ctx *k, k_rope **out, int n_pos, int head_dim, double base, bool bf16,
                       cop_error *err) {
    assert(n_pos >= 0 && head_dim >= 2 && head_dim % 2 == 0);
    *out = NULL;
    k_rope *r = mem_zalloc(1, sizeof *r);
    if (r) {
        r->n_pos = n_pos;
        r->half = head_dim / 2;
        r->data = mem_alloc_huge((size_t)n_pos * (size_t)head_dim, sizeof(float));
    }
    if (!r || !r->data) {
        k_rope_close(k, r);
        return cop_fail(err, COP_ENOMEM, "could not allocate the rotary table of %d positions", n_pos);
    }
    rope_job job = {r, base, bf16};
    cpu_spread(k, rope_part, &job, n_pos, 50.0 * n_pos * head_dim);
    *out = r;
    return COP_OK;
}

void k_rope_close(k_ctx *k, k_rope *r) {
    (void)k;
    if (!r) return;
    mem_free(r->data);
    mem_free(r);
}
