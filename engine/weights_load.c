/* Reading a source into packed weights.
 *
 * Tensors come in order of their names.  Each is compared with the one that the model has there before
 * anything of it is read, then read a chunk of rows at a time: hashed as it comes, widened to fp32, checked,
 * packed.  Nothing of the source stays in memory.
 *
 *   round    thread 0                        the others
 *   i        read and hash chunk i + 1,      pack chunk i, group by group of 16 rows,
 *            then help                       until none is left
 *
 * The digest is XXH3-128 over, for each tensor in order of name: name, NUL, then as little-endian u64 the
 * dtype (tensor_dtype), the rank and the dims, then the bytes: so far the source gets it, to compare; and
 * after the tensors the resolved architecture, each field as a little-endian u64 in the order of
 * digest_arch(), floats as the bits of a double. */
#include "engine/weights_load.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

#include "engine/widen.h"
#include "kernels/threads.h"

static void digest_u64(XXH3_state_t *h, uint64_t v) {
    uint8_t bytes[8];
    for (int i = 0; i < 8; i++) bytes[i] = (uint8_t)(v >> 8 * i);
    XXH3_128bits_update(h, bytes, sizeof bytes);
}

static void digest_real(XXH3_state_t *h, double v) {
    uint64_t bits;
    memcpy(&bits, &v, sizeof bits);
    digest_u64(h, bits);
}

static void digest_arch(XXH3_state_t *h, const arch *a) {
    const int64_t counts[] = {a->vocab,      a->dim,         a->n_layers,      a->n_heads,
                              a->n_kv_heads, a->head_dim,    a->ff_dim,        a->sequence_len,
                              a->rope_bf16,  a->has_lambdas, a->gate_channels, a->smear_channels,
                              a->has_backout};
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) digest_u64(h, (uint64_t)counts[i]);
    const double reals[] = {a->softcap, a->rope_base, a->qk_scale, a->eps, a->gate_factor};
    for (size_t i = 0; i < sizeof reals / sizeof reals[0]; i++) digest_real(h, reals[i]);
    for (int i = 0; i < a->n_layers; i++) {
        digest_u64(h, (uint64_t)a->window[i]);
        digest_u64(h, a->has_value_embed[i]);
    }
}

static void digest_text(const XXH3_state_t *h, char text[33]) {
    XXH128_hash_t digest = XXH3_128bits_digest(h);
    snprintf(text, 33, "%016llx%016llx", (unsigned long long)digest.high64, (unsigned long long)digest.low64);
}

/* ---- Where a tensor goes. */

typedef struct target {
    k_matrix **matrix; /* one of these three */
    k_table **table;
    float *scalars; /* spaced `stride` floats apart */
    size_t stride;
} target;

static bool layer_target(const char *rest, layer_weights *l, target *t) {
    struct {
        const char *name;
        k_matrix **matrix;
    } names[] = {{"attn.c_q.weight", &l->q},       {"attn.c_k.weight", &l->k},
                 {"attn.c_v.weight", &l->v},       {"attn.c_proj.weight", &l->attn_out},
                 {"mlp.c_fc.weight", &l->fc},      {"mlp.c_proj.weight", &l->mlp_out},
                 {"attn.ve_gate.weight", &l->gate}};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (strcmp(rest, names[i].name) != 0) continue;
        t->matrix = names[i].matrix;
        return true;
    }
    return false;
}

static bool find_target(weights *w, const char *name, target *t) {
    *t = (target){.stride = 1};
    int layer, used = 0;
    if (sscanf(name, "transformer.h.%d.%n", &layer, &used) == 1 && used > 0 && layer >= 0 &&
        layer < w->n_layers)
        return layer_target(name + used, &w->layers[layer], t);
    if (sscanf(name, "value_embeds.%d.weight%n", &layer, &used) == 1 && used > 0 && layer >= 0 &&
        layer < w->n_layers) {
        t->table = &w->layers[layer].value_embed;
        return true;
    }
    if (!strcmp(name, "transformer.wte.weight"))
        t->table = &w->embed;
    else if (!strcmp(name, "lm_head.weight"))
        t->matrix = &w->lm_head;
    else if (!strcmp(name, "smear_gate.weight"))
        t->matrix = &w->smear_gate;
    else if (!strcmp(name, "smear_lambda"))
        t->scalars = &w->smear_lambda;
    else if (!strcmp(name, "backout_lambda"))
        t->scalars = &w->backout;
    else if (!strcmp(name, "resid_lambdas"))
        t->scalars = &w->layers[0].resid;
    else if (!strcmp(name, "x0_lambdas"))
        t->scalars = &w->layers[0].x0;
    else
        return false;
    if (strstr(name, "_lambdas")) t->stride = sizeof(layer_weights) / sizeof(float);
    return true;
}

/* Open the packed form; n_rows of the tensor go into it. */
static cop_status open_target(weights *w, const target *t, int n_rows, int n_columns, cop_error *err) {
    if (t->matrix) return k_matrix_open(w->k, t->matrix, n_rows, n_columns, err);
    if (t->table) return k_table_open(w->k, t->table, n_rows, n_columns, err);
    return COP_OK;
}

/* Any thread, as k_matrix_pack(). */
static void put_rows(weights *w, const target *t, int first, int n, int n_columns, const float *rows) {
    if (t->matrix)
        k_matrix_pack(w->k, *t->matrix, first, n, rows);
    else if (t->table)
        k_table_pack(w->k, *t->table, first, n, rows);
    else
        for (int i = 0; i < n * n_columns; i++)
            t->scalars[(size_t)(first * n_columns + i) * t->stride] = rows[i];
}

/* ---- Chunks. */

/* Rows [first, first + n) of a tensor, on their way. */
typedef struct chunk {
    const tensor_info *info; /* as the model has it; its type is `dtype` */
    tensor_dtype dtype;
    target to;
    int n_columns; /* a vector of scalars is rows of one */
    int n_used;    /* rows of the tensor that are packed: of a padded vocabulary, those that stand for ids */
    int first, n;
    void *raw; /* [cap] elements of at most 8 bytes */
} chunk;

typedef struct loader {
    weights *w;
    const weights_loading *from;
    XXH3_state_t *hash;
    threads *pool;
    chunk chunks[2];
    float *wide; /* [threads, group_elements] */
    size_t cap;  /* elements of a chunk */
    size_t group_elements;
    int n_begun; /* tensors */

    /* A round. */
    chunk *next;  /* to be read, or NULL: there is none */
    chunk *ready; /* to be packed, or NULL */
    cop_status read_status;
    cop_error read_error;
    atomic_int next_group;
    atomic_int bad_group; /* the first group of `ready` with a number that is not finite, or INT32_MAX */
} loader;

static void digest_tensor(XXH3_state_t *h, const tensor_info *t) {
    XXH3_128bits_update(h, t->name, strlen(t->name) + 1);
    digest_u64(h, t->dtype);
    digest_u64(h, (uint64_t)t->n_dims);
    for (int i = 0; i < t->n_dims; i++) digest_u64(h, (uint64_t)t->dims[i]);
}

static int rows_of(const chunk *c) { return (int)(c->info->n_elements / (size_t)c->n_columns); }

/* The next tensor that the source has, of which nothing is in *c yet; l->next stays NULL after the last. */
static cop_status begin_tensor(loader *l, chunk *c, cop_error *err) {
    const tensor_info *got;
    const tensor_table *expected = l->from->tensors;
    cop_status status = l->from->source->next(l->from->source->context, &got, err);
    if (status == COP_OK) status = tensor_table_expect(expected, l->n_begun, got, err);
    if (status != COP_OK || !got) return status;
    const tensor_info *info = &expected->tensors[l->n_begun++];
    c->info = info;
    c->dtype = got->dtype;
    c->first = c->n = 0;
    bool known = find_target(l->w, info->name, &c->to);
    assert(known); /* the table is of a checkpoint that could be opened */
    digest_tensor(l->hash, got);
    c->n_columns = info->n_dims == 2 ? (int)info->dims[1] : 1;
    bool by_id = c->to.table || c->to.matrix == &l->w->lm_head;
    c->n_used = by_id ? l->from->arch->vocab : rows_of(c);
    COP_TRY(open_target(l->w, &c->to, c->n_used, c->n_columns, err), err, "load tensor \"%s\"", info->name);
    l->next = c;
    return COP_OK;
}

/* What follows `c`, whose bytes have been hashed, in the other chunk; l->next is NULL after the last. */
static cop_status plan(loader *l, const chunk *c, cop_error *err) {
    chunk *next = &l->chunks[c == &l->chunks[0]];
    void *raw = next->raw;
    l->next = NULL;
    if (c && c->first + c->n < rows_of(c)) {
        *next = *c;
        next->first += c->n;
        next->raw = raw;
        l->next = next;
    } else {
        cop_status status = begin_tensor(l, next, err);
        if (status != COP_OK || !l->next) return status;
    }
    int n_groups = (int)(l->cap / (size_t)next->n_columns / K_PACK_ROWS), left = rows_of(next) - next->first;
    next->n = n_groups * K_PACK_ROWS < left ? n_groups * K_PACK_ROWS : left;
    return COP_OK;
}

static void read_chunk(loader *l) {
    const chunk *c = l->next;
    size_t first = (size_t)c->first * (size_t)c->n_columns, n = (size_t)c->n * (size_t)c->n_columns;
    const weights_source *s = l->from->source;
    l->read_status = s->read(s->context, first, n, c->raw, &l->read_error);
    if (l->read_status == COP_OK)
        XXH3_128bits_update(l->hash, c->raw, n * tensor_dtype_bytes(c->dtype));
    else
        cop_error_prefix(&l->read_error, "load tensor \"%s\"", c->info->name);
}

/* Group `group` of a chunk in fp32: its rows as they are, or widened. */
static const float *group_rows(const loader *l, const chunk *c, int group, float *wide, int *n) {
    int first = group * K_PACK_ROWS;
    *n = c->n - first < K_PACK_ROWS ? c->n - first : K_PACK_ROWS;
    size_t columns = (size_t)c->n_columns, at = (size_t)first * columns;
    const char *raw = (const char *)c->raw + at * tensor_dtype_bytes(c->dtype);
    if (c->dtype == TENSOR_F32) return (const float *)raw;
    assert((size_t)*n * columns <= l->group_elements);
    widen(wide, raw, (size_t)*n * columns, c->dtype);
    return wide;
}

static void pack_group(loader *l, int group, float *wide) {
    const chunk *c = l->ready;
    int n, first = c->first + group * K_PACK_ROWS;
    const float *rows = group_rows(l, c, group, wide, &n);
    size_t n_elements = (size_t)n * (size_t)c->n_columns;
    if (widen_find_infinite(rows, n_elements) < n_elements) {
        int seen = atomic_load(&l->bad_group);
        while (group < seen && !atomic_compare_exchange_weak(&l->bad_group, &seen, group)) continue;
    } else if (first < c->n_used) {
        put_rows(l->w, &c->to, first, c->n_used - first < n ? c->n_used - first : n, c->n_columns, rows);
    }
}

static void work(void *arg, int index, int n_threads) {
    (void)n_threads;
    loader *l = arg;
    if (index == 0 && l->next) read_chunk(l);
    if (!l->ready) return;
    int n_groups = (l->ready->n + K_PACK_ROWS - 1) / K_PACK_ROWS;
    float *wide = l->wide + (size_t)index * l->group_elements;
    for (int g; (g = atomic_fetch_add(&l->next_group, 1)) < n_groups;) pack_group(l, g, wide);
}

static cop_status tell_infinite(const loader *l, int group, cop_error *err) {
    const chunk *c = l->ready;
    int n;
    const float *rows = group_rows(l, c, group, l->wide, &n);
    size_t columns = (size_t)c->n_columns, at = widen_find_infinite(rows, (size_t)n * columns);
    size_t element = (size_t)(c->first + group * K_PACK_ROWS) * columns + at;
    return cop_fail(err, COP_EMODEL, "cannot use tensor \"%s\": element %zu is not finite", c->info->name,
                    element);
}

static cop_status run_round(loader *l, cop_error *err) {
    l->read_status = COP_OK;
    atomic_store(&l->next_group, 0);
    atomic_store(&l->bad_group, INT32_MAX);
    threads_run(l->pool, work, l);
    int bad = atomic_load(&l->bad_group);
    if (bad < INT32_MAX) return tell_infinite(l, bad, err); /* it stands before what was read meanwhile */
    if (l->read_status != COP_OK && err) *err = l->read_error;
    return l->read_status;
}

static cop_status load_tensors(loader *l, cop_error *err) {
    cop_status status = plan(l, NULL, err);
    while (status == COP_OK && (l->next || l->ready)) {
        if (l->from->stop && atomic_load(l->from->stop))
            return cop_fail(err, COP_EIO, "could not load weights: loading was stopped");
        status = run_round(l, err);
        l->ready = l->next;
        if (status == COP_OK && l->ready) status = plan(l, l->ready, err);
    }
    return status;
}

static cop_status load_all(loader *l, cop_error *err) {
    cpu_flush_denormals(); /* as the other threads: what widens to a denormal is packed as zero */
    XXH3_128bits_reset(l->hash);
    cop_status status = load_tensors(l, err);
    if (status != COP_OK) return status;
    char tensors_digest[33];
    digest_text(l->hash, tensors_digest);
    status = l->from->source->finish(l->from->source->context, tensors_digest, err);
    if (status != COP_OK) return status;
    digest_arch(l->hash, l->from->arch);
    digest_text(l->hash, l->w->digest);
    return COP_OK;
}

/* ---- The loader. */

static size_t longest_row(const tensor_table *tensors) {
    size_t longest = 1;
    for (int i = 0; i < tensors->n; i++) {
        const tensor_info *t = &tensors->tensors[i];
        if (t->n_dims == 2 && (size_t)t->dims[1] > longest) longest = (size_t)t->dims[1];
    }
    return longest;
}

cop_status weights_load(weights *w, const weights_loading *from, cop_error *err) {
    int n_threads = k_threads(w->k);
    loader l = {.w = w, .from = from, .group_elements = K_PACK_ROWS * longest_row(from->tensors)};
    l.cap = l.group_elements > from->chunk_elements ? l.group_elements : from->chunk_elements;
    l.wide = mem_alloc((size_t)n_threads, l.group_elements * sizeof *l.wide);
    l.chunks[0].raw = mem_alloc(l.cap, sizeof(double));
    l.chunks[1].raw = mem_alloc(l.cap, sizeof(double));
    l.hash = XXH3_createState();
    cop_status status = COP_OK;
    if (!l.wide || !l.chunks[0].raw || !l.chunks[1].raw || !l.hash)
        status = cop_fail(err, COP_ENOMEM, "could not allocate memory to load weights");
    if (status == COP_OK) status = threads_open(&l.pool, n_threads, NULL, err);
    if (status == COP_OK) status = load_all(&l, err);
    threads_close(l.pool);
    XXH3_freeState(l.hash);
    mem_free(l.chunks[0].raw);
    mem_free(l.chunks[1].raw);
    mem_free(l.wide);
    return status;
}
