/* nanochat's forward pass, generations A to F, over the backend's fused operations (NANOCHAT 1.1). */
#include "engine/forward.h"

struct forward {
    k_ctx *k;
    const arch *a;
    where *at;
    k_rope *rope;
    float *x, *x0,
        *middle; /* [max_tokens, dim]: residual stream, its start, its copy after layer n_layers / 2 */
    float *h;    /* [max_tokens, dim]: what a matrix reads */
    float *q, *key, *value; /* [max_tokens, heads * head_dim] */
    float *gate;            /* [max_tokens, n_kv_heads] */
    float *hidden;          /* [max_tokens, ff_dim] */
    float *last;            /* [max_logits, dim] */
    float *logits;          /* [max_logits, vocab] */
};

cop_status forward_open(forward **out, k_ctx *k, const arch *a, where *at, int context, int max_tokens,
                        int max_logits, cop_error *err) {
    *out = NULL;
    forward *f = mem_zalloc(1, sizeof *f);
    if (!f) return cop_fail(err, COP_ENOMEM, "could not allocate the forward pass");
    *f = (forward){.k = k, .a = a, .at = at};
    int kv = a->n_kv_heads * a->head_dim;
    struct {
        float **p;
        int n_rows, n_columns;
    } scratch[] = {{&f->x, max_tokens, a->dim},
                   {&f->x0, max_tokens, a->dim},
                   {&f->middle, max_tokens, a->dim},
                   {&f->h, max_tokens, a->dim},
                   {&f->q, max_tokens, a->n_heads * a->head_dim},
                   {&f->key, max_tokens, kv},
                   {&f->value, max_tokens, kv},
                   {&f->gate, max_tokens, a->n_kv_heads},
                   {&f->hidden, max_tokens, a->ff_dim},
                   {&f->last, max_logits, a->dim},
                   {&f->logits, max_logits, a->vocab}};
    cop_status status = k_rope_open(k, &f->rope, context, a->head_dim, a->rope_base, a->rope_bf16, err);
    for (size_t i = 0; i < sizeof scratch / sizeof scratch[0] && status == COP_OK; i++) {
        *scratch[i].p = k_alloc(k, (size_t)scratch[i].n_rows * (size_t)scratch[i].n_columns, sizeof(float));
        if (!*scratch[i].p)
            status = cop_fail(err, COP_ENOMEM, "could not allocate the scratch of %d tokens", max_tokens);
    }
    if (status != COP_OK) {
        forward_close(f);
        return status;
    }
    *out = f;
    return COP_OK;
}

void forward_close(forward *f) {
    if (!f) return;
    float *all[] = {f->x,     f->x0,   f->middle, f->h,    f->q,     f->key,
                    f->value, f->gate, f->hidden, f->last, f->logits};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) k_free(f->k, all[i]);
    k_rope_close(f->k, f->rope);
    mem_free(f);
}

void forward_run(forward *f, const weights *w, const k_batch *b, const k_kv *kv) {
    k_ctx *k = f->k;
    const arch *a = f->a;
    const int n = b->n, dim = a->dim;
    const size_t n_stream = (size_t)n * (size_t)dim;

    where_is(f->at, "embedding", -1);
    k_embed(k, f->x, w->embed, b, dim, a->eps, w->smear_gate, a->smear_channels, w->smear_lambda);
    if (a->has_lambdas) k_copy(k, f->x0, f->x, n_stream);

    for (int i = 0; i < a->n_layers; i++) {
        const layer_weights *l = &w->layers[i];

        /* Attention reads the normed stream. */
        where_is(f->at, "projections", i);
        k_mix_norm(k, f->h, f->x, a->has_lambdas ? f->x0 : NULL, l->resid, l->x0, n, dim, a->eps);
        const k_product from_h[] = {
            {f->q, l->q, f->h, dim, K_STORE},
            {f->key, l->k, f->h, dim, K_STORE},
            {f->value, l->v, f->h, dim, K_STORE},
            {f->gate, l->gate, f->h, dim, K_STORE}}; /* reads the first channels of h */
        k_gemms(k, from_h, l->gate ? 4 : 3, n);

        /* Rotate, norm and scale q and k, mix the value embedding into v, fill the pages. */
        k_qkv_store(k,
                    &(k_qkv){.q = f->q,
                             .k = f->key,
                             .v = f->value,
                             .gate = l->gate ? f->gate : NULL,
                             .ve = l->value_embed,
                             .gate_factor = a->gate_factor,
                             .qk_scale = a->qk_scale,
                             .eps = a->eps,
                             .n_heads = a->n_heads,
                             .layer = i},
                    f->rope, b, kv);
        where_is(f->at, "attention", i);
        k_attention(k, f->q, f->q, b, kv, a->n_heads, i, a->window[i]);
        k_gemm(k, f->x, l->attn_out, f->q, a->n_heads * a->head_dim, n, K_ADD);

        /* The MLP: relu squared. */
        where_is(f->at, "mlp", i);
        k_mix_norm(k, f->h, f->x, NULL, 1.0f, 0.0f, n, dim, a->eps);
        k_gemm(k, f->hidden, l->fc, f->h, dim, n, K_RELU2);
        k_gemm(k, f->x, l->mlp_out, f->hidden, a->ff_dim, n, K_ADD);

        if (a->has_backout && i == a->n_layers / 2) k_copy(k, f->middle, f->x, n_stream);
    }
    if (a->has_backout) k_sub_scaled(k, f->x, f->middle, w->backout, n_stream);
}

float *forward_logits(forward *f, const weights *w, const int32_t *index, int n) {
    const arch *a = f->a;
    where_is(f->at, "logits", -1);
    k_gather_norm(f->k, f->last, f->x, index, n, a->dim, a->eps);
    k_gemm(f->k, f->logits, w->lm_head, f->last, a->dim, n, K_STORE);
    k_softcap(f->k, f->logits, n, a->vocab, a->vocab, a->softcap);
    return f->logits;
}
