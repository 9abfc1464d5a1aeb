/* The life of a set of weights. */
#include "engine/weights.h"

#include "engine/file_source.h"
#include "engine/weights_load.h"

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
    *out = NULL;
    tensor_table tensors;
    COP_TRY(tensor_table_init(&tensors, c, err), err, "load weights");
    file_source file;
    weights_source source = file_source_of(&file, checkpoint_file(c));
    weights_loading l = {.arch = checkpoint_arch(c),
                         .tensors = &tensors,
                         .source = &source,
                         .chunk_elements = WEIGHTS_CHUNK_ELEMENTS};
    cop_status status = weights_open_source(out, k, &l, err);
    tensor_table_free(&tensors);
    return status;
}

cop_status weights_open_source(weights **out, k_ctx *k, const weights_loading *l, cop_error *err) {
    *out = NULL;
    weights *w = weights_new(k, l->arch->n_layers);
    if (!w) return cop_fail(err, COP_ENOMEM, "could not allocate memory to load weights");
    cop_status status = weights_load(w, l, err);
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
