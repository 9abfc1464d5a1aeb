/* Giving the tensors of a file one by one. */
#include "engine/file_source.h"

static cop_status next(void *context, const tensor_info **out, cop_error *err) {
    (void)err;
    file_source *s = context;
    *out = s->n_given < pt_n_tensors(s->file) ? pt_tensor(s->file, s->n_given++) : NULL;
    return COP_OK;
}

static cop_status read(void *context, size_t first, size_t n, void *to, cop_error *err) {
    const file_source *s = context;
    return pt_read(s->file, pt_tensor(s->file, s->n_given - 1), first, n, to, err);
}

static cop_status finish(void *context, const char *tensors_digest, cop_error *err) {
    (void)tensors_digest;
    const file_source *s = context;
    COP_TRY(zip_unchanged(pt_zip(s->file), err), err, "load weights");
    return COP_OK;
}

weights_source file_source_of(file_source *s, const pt_file *file) {
    *s = (file_source){.file = file};
    return (weights_source){s, next, read, finish};
}
