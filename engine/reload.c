/* Reading new weights for an engine that runs.  Nothing here touches what a step does: of the engine only the
 * backend, whose weights any thread may open, the architecture, and what reload.h keeps. */
#include "engine/reload.h"

#include <string.h>

#include "engine/arch_compare.h"
#include "engine/checkpoint_path.h"
#include "engine/engine_internal.h"
#include "engine/file_source.h"
#include "engine/weights_load.h"

cop_status reload_model_init(reload_model *m, const checkpoint *c, size_t n_bytes, cop_error *err) {
    m->n_bytes = n_bytes;
    m->overrides = *checkpoint_overrides(c);
    if (m->overrides.rope_table) m->overrides.rope_table = checkpoint_arch(c)->rope_bf16 ? "bf16" : "fp32";
    if (m->overrides.window_pattern) {
        memcpy(m->window_pattern, m->overrides.window_pattern, strlen(m->overrides.window_pattern) + 1);
        m->overrides.window_pattern = m->window_pattern;
    }
    return tensor_table_init(&m->tensors, c, err);
}

void reload_model_free(reload_model *m) { tensor_table_free(&m->tensors); }

void engine_stop_loading(engine *e, bool stop) { atomic_store(&e->reload.stop, stop); }

/* ---- From a source. */

static cop_status check_possible(const engine *e, cop_error *err) {
    if (e->reload.tensors.n > 0) return COP_OK;
    return cop_fail(err, COP_EUNSUPPORTED,
                    "cannot load weights into a model of random ones: it was opened without a checkpoint");
}

/* A machine that lacks the memory would rather kill the process than refuse it. */
static cop_status check_room(const engine *e, cop_error *err) {
    size_t wanted = e->reload.n_bytes, room = mem_available();
    if (wanted <= room) return COP_OK;
    return cop_fail(err, COP_ENOMEM, "could not load weights of %zu MiB: %zu MiB are free", wanted >> 20,
                    room >> 20);
}

cop_status engine_load_weights(engine *e, const weights_source *s, weights **out, cop_error *err) {
    *out = NULL;
    cop_status status = check_possible(e, err);
    if (status == COP_OK) status = check_room(e, err);
    if (status != COP_OK) return status;
    weights_loading l = {.arch = &e->a,
                         .tensors = &e->reload.tensors,
                         .source = s,
                         .chunk_elements = WEIGHTS_CHUNK_ELEMENTS,
                         .stop = &e->reload.stop};
    return weights_open_source(out, e->k, &l, err);
}

/* ---- From a file. */

/* All tensors at once, so that a wrong one is told before anything is read. */
static cop_status check_tensors(const engine *e, const pt_file *f, cop_error *err) {
    const tensor_table *t = &e->reload.tensors;
    for (int i = 0; i <= t->n; i++) {
        cop_status status = tensor_table_expect(t, i, i < pt_n_tensors(f) ? pt_tensor(f, i) : NULL, err);
        if (status != COP_OK) return status;
    }
    return COP_OK;
}

/* What the tensors do not show. */
static cop_status check_meta(const engine *e, const pt_file *f, const char *meta, cop_error *err) {
    model_config config;
    arch a;
    note_list notes = {0}; /* the same was told when the engine was opened */
    cop_status status = model_config_read(&config, meta, err);
    if (status == COP_OK) status = arch_detect(&a, f, &config, &e->reload.overrides, &notes, err);
    if (status != COP_OK) return status;
    COP_TRY(arch_compare(&a, &e->a, err), err, "cannot use the architecture of \"%s\"", meta);
    return COP_OK;
}

static cop_status load_file(engine *e, const pt_file *f, const char *meta, weights **out, cop_error *err) {
    cop_status status = check_tensors(e, f, err);
    if (status == COP_OK && meta) status = check_meta(e, f, meta, err);
    if (status != COP_OK) return status;
    file_source file;
    weights_source source = file_source_of(&file, f);
    status = engine_load_weights(e, &source, out, err);
    /* Half of one file and half of the next may hold any number. */
    if (status == COP_EMODEL && zip_unchanged(pt_zip(f), NULL) != COP_OK)
        return zip_unchanged(pt_zip(f), err);
    return status;
}

cop_status engine_load_path(engine *e, const char *path, const char *within, weights **out, cop_error *err) {
    *out = NULL;
    checkpoint_paths paths = {0};
    pt_file *f = NULL;
    cop_status status = check_possible(e, err);
    if (status == COP_OK) status = checkpoint_paths_find_weights(&paths, path, err);
    if (status == COP_OK && within) status = checkpoint_paths_confine(&paths, within, err);
    if (status == COP_OK) status = pt_open(&f, paths.model, err);
    if (status == COP_OK) status = load_file(e, f, paths.meta, out, err);
    if (status != COP_OK) cop_error_prefix(err, "load weights \"%s\"", path);
    pt_close(f);
    checkpoint_paths_free(&paths);
    return status;
}
