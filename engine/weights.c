/* The life of a set of weights. */
#include "engine/weights.h"

#include "engine/weights_load.h"

enum { CHUNK_ELEMENTS = 1 << 18 }; /* a megabyte of fp32: it stays in a shared cache until it is packed */

static size_t packed_bytes(const weights *w) {
    size_t n = k_table_bytes(w->embed) + k_matrix_bytes(w->lm_head);
    for (int i = 0; i < w->n_layers; i++) {
        const layer_weights *l = &w->layers[i];
        const k_matrix *all[] = {l->q, l->k, l->v, l->attn_out, l->fc, l->mlp_out};
        for (size_t j = 0; j < sizeof all / sizeof all[0]; j++) n += k_matrix_bytes(all[j]);
        if (l->value_embed) n += k_table_bytes(l->value_embed);
    }
    return n;
}

cop_status weights_open(weights **out, k_ctx *k, checkpoint *c, cop_error *err) {
    const arch *a = checkpoint_arch(c);
    *out = NULL;
    weights *w = mem_zalloc(1, sizeof *w);
    if (w) {
        w->k = k;
        w->n_layers = a->n_layers;
        w->layers = mem_zalloc((size_t)a->n_layers, sizeof *w->layers);
    }
    cop_status status = COP_OK;
    if (!w || !w->layers) status = cop_fail(err, COP_ENOMEM, "could not allocate memory to load weights");
    for (int i = 0; status == COP_OK && i < a->n_layers; i++) w->layers[i].resid = 1.0f;
    if (status == COP_OK) status = weights_load(w, c, CHUNK_ELEMENTS, err);
    if (status != COP_OK) {
        weights_close(w);
        return status;
    }
    w->n_bytes = packed_bytes(w);
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
