/* Reading a checkpoint into packed weights.
 *
 * Tensors are read in order of their names, a few rows at a time: hashed as they are in the file, widened to
 * fp32, checked, packed.  Nothing of the file stays in memory.
 *
 * The digest is XXH3-128 over, for each tensor in order of name: name, NUL, then as little-endian u64 the
 * dtype (tensor_dtype), the rank and the dims, then the bytes; and after the tensors the resolved
 * architecture, each field as a little-endian u64 in the order of digest_arch(), floats as the bits of a
 * double. */
#include "engine/weights.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

enum { READ_ELEMENTS = 1 << 18 }; /* elements read at a time, at least one row */

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

/* ---- Widening to fp32. */

static float f16_value(uint16_t bits) {
    uint32_t exponent = bits >> 10 & 31, fraction = bits & 1023;
    float magnitude = exponent == 31  ? (fraction ? NAN : INFINITY)
                      : exponent == 0 ? ldexpf((float)fraction, -24)
                                      : ldexpf((float)(fraction | 1024), (int)exponent - 25);
    return bits >> 15 ? -magnitude : magnitude;
}

static void widen(float *to, const void *from, size_t n, tensor_dtype dtype) {
    for (size_t i = 0; i < n; i++) {
        switch (dtype) {
        case TENSOR_F32: to[i] = ((const float *)from)[i]; break;
        case TENSOR_F64: to[i] = (float)((const double *)from)[i]; break;
        case TENSOR_F16: to[i] = f16_value(((const uint16_t *)from)[i]); break;
        case TENSOR_BF16: {
            uint32_t bits = (uint32_t)((const uint16_t *)from)[i] << 16;
            memcpy(&to[i], &bits, sizeof bits);
            break;
        }
        }
    }
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

static void put_rows(weights *w, const target *t, int first, int n, int n_columns, const float *rows) {
    if (t->matrix)
        k_matrix_pack(w->k, *t->matrix, first, n, rows);
    else if (t->table)
        k_table_pack(w->k, *t->table, first, n, rows);
    else
        for (int i = 0; i < n * n_columns; i++)
            t->scalars[(size_t)(first * n_columns + i) * t->stride] = rows[i];
}

typedef struct reader {
    checkpoint *c;
    XXH3_state_t *hash;
    void *raw;   /* [cap] elements of at most 8 bytes */
    float *wide; /* [cap] */
    size_t cap;
} reader;

static cop_status read_tensor(weights *w, reader *r, const tensor_info *info, const arch *a, cop_error *err) {
    target t;
    if (!find_target(w, info->name, &t))
        return cop_fail(err, COP_EUNSUPPORTED, "cannot use tensor \"%s\"", info->name);
    XXH3_128bits_update(r->hash, info->name, strlen(info->name) + 1);
    digest_u64(r->hash, info->dtype);
    digest_u64(r->hash, (uint64_t)info->n_dims);
    for (int i = 0; i < info->n_dims; i++) digest_u64(r->hash, (uint64_t)info->dims[i]);

    /* A vector of scalars is read as rows of one. */
    int n_columns = info->n_dims == 2 ? (int)info->dims[1] : 1;
    int n_rows = (int)(info->n_elements / (size_t)n_columns);
    int n_used = t.matrix == &w->lm_head || t.table ? a->vocab : n_rows;
    COP_TRY(open_target(w, &t, n_used, n_columns, err), err, "load tensor \"%s\"", info->name);
    int n_chunk = (int)(r->cap / (size_t)n_columns);
    for (int first = 0; first < n_rows; first += n_chunk) {
        int n = n_rows - first < n_chunk ? n_rows - first : n_chunk;
        size_t n_elements = (size_t)n * (size_t)n_columns;
        COP_TRY(checkpoint_read(r->c, info, (size_t)first * (size_t)n_columns, n_elements, r->raw, err), err,
                "load tensor \"%s\"", info->name);
        XXH3_128bits_update(r->hash, r->raw, n_elements * tensor_dtype_bytes(info->dtype));
        widen(r->wide, r->raw, n_elements, info->dtype);
        for (size_t i = 0; i < n_elements; i++) {
            if (!isfinite(r->wide[i]))
                return cop_fail(err, COP_EMODEL, "cannot use tensor \"%s\": element %zu is not finite",
                                info->name, (size_t)first * (size_t)n_columns + i);
        }
        if (first < n_used)
            put_rows(w, &t, first, n_used - first < n ? n_used - first : n, n_columns, r->wide);
    }
    return COP_OK;
}

static cop_status read_all(weights *w, reader *r, const arch *a, cop_error *err) {
    for (int i = 0; i < checkpoint_n_tensors(r->c); i++) {
        cop_status status = read_tensor(w, r, checkpoint_tensor(r->c, i), a, err);
        if (status != COP_OK) return status;
    }
    COP_TRY(checkpoint_unchanged(r->c, err), err, "load weights");
    digest_arch(r->hash, a);
    XXH128_hash_t digest = XXH3_128bits_digest(r->hash);
    snprintf(w->digest, sizeof w->digest, "%016llx%016llx", (unsigned long long)digest.high64,
             (unsigned long long)digest.low64);
    return COP_OK;
}

size_t weights_packed_bytes(const weights *w) {
    size_t n = k_table_bytes(w->embed) + k_matrix_bytes(w->lm_head);
    for (int i = 0; i < w->n_layers; i++) {
        const layer_weights *l = &w->layers[i];
        const k_matrix *all[] = {l->q, l->k, l->v, l->attn_out, l->fc, l->mlp_out};
        for (size_t j = 0; j < sizeof all / sizeof all[0]; j++) n += k_matrix_bytes(all[j]);
        if (l->value_embed) n += k_table_bytes(l->value_embed);
    }
    return n;
}

static size_t longest_row(const checkpoint *c) {
    size_t longest = 1;
    for (int i = 0; i < checkpoint_n_tensors(c); i++) {
        const tensor_info *t = checkpoint_tensor(c, i);
        if (t->n_dims == 2 && (size_t)t->dims[1] > longest) longest = (size_t)t->dims[1];
    }
    return longest;
}

weights *weights_new(k_ctx *k, int n_layers) {
    weights *w = mem_zalloc(1, sizeof *w);
    layer_weights *layers = mem_zalloc((size_t)n_layers, sizeof *layers);
    if (!w || !layers) {
        mem_free(w);
        mem_free(layers);
        return NULL;
    }
    *w = (weights){.k = k, .n_layers = n_layers, .layers = layers};
    for (int i = 0; i < n_layers; i++) layers[i].resid = 1.0f;
    return w;
}

cop_status weights_open(weights **out, k_ctx *k, checkpoint *c, cop_error *err) {
    const arch *a = checkpoint_arch(c);
    *out = NULL;
    cop_status status = COP_ENOMEM;
    weights *w = weights_new(k, a->n_layers);
    reader r = {.c = c, .cap = longest_row(c) > READ_ELEMENTS ? longest_row(c) : READ_ELEMENTS};
    r.raw = mem_alloc(r.cap, sizeof(double));
    r.wide = mem_alloc(r.cap, sizeof(float));
    r.hash = XXH3_createState();
    if (w && r.raw && r.wide && r.hash) {
        XXH3_128bits_reset(r.hash);
        status = read_all(w, &r, a, err);
    } else {
        cop_fail(err, COP_ENOMEM, "could not allocate memory to load weights");
    }
    mem_free(r.raw);
    mem_free(r.wide);
    XXH3_freeState(r.hash);
    if (status != COP_OK) {
        weights_close(w);
        return status;
    }
    w->n_bytes = weights_packed_bytes(w);
    *out = w;
    return COP_OK;
}

void weights_close(weights *w) {
    if (!w) return;
    for (int i = 0; w->layers && i < w->n_layers; i++) {
        layer_weights *l = &w->layers[i];
        k_matrix *all[] = {l->q, l->k, l->v, l->attn_out, l->fc, l->mlp_out, l->gate};
        for (size_t j = 0; j < sizeof all / sizeof all[0]; j++) k_matrix_close(w->k, all[j]);
        k_table_close(w->k, l->value_embed);
    }
    k_table_close(w->k, w->embed);
    k_matrix_close(w->k, w->lm_head);
    k_matrix_close(w->k, w->smear_gate);
    mem_free(w->layers);
    mem_free(w);
}
