/* Opening what a command computes with. */
#include "worker/open_model.h"

#include <stdio.h>
#include <string.h>

engine_options model_engine_options(const model_options *m) {
    engine_options e = engine_defaults();
    e.profile = strcmp(m->precision, "f32") ? PRECISION_BF16 : PRECISION_F32;
    e.n_threads = (int)m->threads;
    e.pin = m->pin;
    e.context = (int)m->context;
    e.kv_memory = m->kv_memory;
    if (m->max_rows > 0) e.max_rows = (int)m->max_rows;
    e.no_prefix_cache = m->no_prefix_cache;
    if (m->step_tokens > 0) e.step_tokens = (int)m->step_tokens;
    return e;
}

static cop_status open_engine(open_model *o, checkpoint *c, const model_options *m, cop_error *err) {
    const char *path = checkpoint_tokenizer_path(c);
    if (path) COP_TRY(tokenizer_open(&o->tokenizer, path, err), err, "open tokenizer");
    engine_options e = model_engine_options(m);
    return engine_open(&o->engine, c, o->tokenizer, &e, err);
}

cop_status open_model_init(open_model *out, const model_options *m, cop_error *err) {
    *out = (open_model){0};
    if (!m->model) return cop_fail(err, COP_EINVAL, "no model given: use --model PATH");
    checkpoint *c;
    checkpoint_options options = model_checkpoint_options(m);
    COP_TRY(checkpoint_open(&c, m->model, &options, err), err, "open model \"%s\"", m->model);
    for (int i = 0; i < checkpoint_n_notes(c); i++)
        fprintf(stderr, "coppice: note: %s\n", checkpoint_note(c, i));
    cop_status status = open_engine(out, c, m, err);
    checkpoint_close(c);
    if (status != COP_OK) {
        cop_error_prefix(err, "open model \"%s\"", m->model);
        open_model_free(out);
    }
    return status;
}

void open_model_free(open_model *o) {
    engine_close(o->engine);
    tokenizer_close(o->tokenizer);
    *o = (open_model){0};
}
