/* Opening a checkpoint: find the files, read the meta file and the table of tensors, tell the generation, and
 * look at the few scalars that nanochat once left uninitialized. */
#include "engine/checkpoint.h"

#include <assert.h>
#include <string.h>

#include "engine/arch_detect.h"
#include "engine/checkpoint_path.h"

struct checkpoint {
    checkpoint_paths paths;
    pt_file *file;
    arch arch;
    note_list notes;
    checkpoint_options overrides;
    char window_pattern[ARCH_MAX_LAYERS + 1]; /* that they point to */
};

const char *tensor_dtype_name(tensor_dtype dtype) {
    switch (dtype) {
    case TENSOR_F32: return "F32";
    case TENSOR_BF16: return "BF16";
    case TENSOR_F16: return "F16";
    case TENSOR_F64: return "F64";
    }
    return "unknown";
}

size_t tensor_dtype_bytes(tensor_dtype dtype) {
    switch (dtype) {
    case TENSOR_F32: return 4;
    case TENSOR_BF16:
    case TENSOR_F16: return 2;
    case TENSOR_F64: return 8;
    }
    return 0;
}

checkpoint_options checkpoint_defaults(void) { return (checkpoint_options){.step = -1}; }

/* ---- Scalars. */

/* Whether the little-endian number at p is finite: not all bits of its exponent are set. */
static bool is_finite(const uint8_t *p, tensor_dtype dtype) {
    static const uint16_t exponents[] = {
        [TENSOR_F32] = 0x7f80, [TENSOR_BF16] = 0x7f80, [TENSOR_F16] = 0x7c00, [TENSOR_F64] = 0x7ff0};
    size_t n = tensor_dtype_bytes(dtype);
    uint16_t top = (uint16_t)(p[n - 1] << 8 | p[n - 2]);
    return (top & exponents[dtype]) != exponents[dtype];
}

static cop_status check_scalars(checkpoint *c, const char *name, cop_error *err) {
    const tensor_info *t = checkpoint_find(c, name);
    if (!t) return COP_OK;
    uint8_t bytes[ARCH_MAX_LAYERS * 8];
    assert(t->n_elements <= ARCH_MAX_LAYERS);
    cop_status status = checkpoint_read(c, t, 0, t->n_elements, bytes, err);
    for (size_t i = 0; status == COP_OK && i < t->n_elements; i++) {
        if (!is_finite(bytes + i * tensor_dtype_bytes(t->dtype), t->dtype))
            status = cop_fail(err, COP_EFORMAT, "cannot use \"%s\": \"%s\" holds a number that is not finite",
                              c->paths.model, name);
    }
    return status;
}

/* ---- Opening. */

/* Options that arch_detect() has accepted. */
static void keep_overrides(checkpoint *c, const checkpoint_options *o) {
    c->overrides = *o;
    c->overrides.step = -1;
    c->overrides.tokenizer = NULL;
    if (o->rope_table) c->overrides.rope_table = c->arch.rope_bf16 ? "bf16" : "fp32";
    if (!o->window_pattern) return;
    window_pattern_copy(c->window_pattern, o->window_pattern, strlen(o->window_pattern));
    c->overrides.window_pattern = c->window_pattern;
}

static cop_status open_all(checkpoint *c, const char *path, const checkpoint_options *o, cop_error *err) {
    static const char *const scalars[] = {"resid_lambdas", "x0_lambdas", "smear_lambda", "backout_lambda"};
    model_config config;
    cop_status status = checkpoint_paths_find(&c->paths, path, o, &c->notes, err);
    if (status == COP_OK) status = model_config_read(&config, c->paths.meta, err);
    if (status == COP_OK) status = pt_open(&c->file, c->paths.model, err);
    if (status) return status;
    status = arch_detect(&c->arch, c->file, &config, o, &c->notes, err);
    if (status) {
        if (status != COP_EINVAL) cop_error_prefix(err, "cannot use \"%s\"", c->paths.model);
        return status;
    }
    keep_overrides(c, o);
    for (size_t i = 0; status == COP_OK && i < sizeof scalars / sizeof scalars[0]; i++)
        status = check_scalars(c, scalars[i], err);
    return status ? status : checkpoint_unchanged(c, err);
}

cop_status checkpoint_open(checkpoint **out, const char *path, const checkpoint_options *options,
                           cop_error *err) {
    assert(out && path);
    *out = NULL;
    checkpoint_options defaults = checkpoint_defaults();
    checkpoint *c = mem_zalloc(1, sizeof *c);
    if (!c) return cop_fail(err, COP_ENOMEM, "out of memory to open \"%s\"", path);
    cop_status status = open_all(c, path, options ? options : &defaults, err);
    if (status) {
        checkpoint_close(c);
        return status;
    }
    *out = c;
    return COP_OK;
}

void checkpoint_close(checkpoint *c) {
    if (!c) return;
    pt_close(c->file);
    checkpoint_paths_free(&c->paths);
    mem_free(c);
}

const arch *checkpoint_arch(const checkpoint *c) { return &c->arch; }
const pt_file *checkpoint_file(const checkpoint *c) { return c->file; }
const checkpoint_options *checkpoint_overrides(const checkpoint *c) { return &c->overrides; }
const char *checkpoint_model_path(const checkpoint *c) { return c->paths.model; }
const char *checkpoint_tokenizer_path(const checkpoint *c) { return c->paths.tokenizer; }
int64_t checkpoint_step(const checkpoint *c) { return c->paths.step; }
int checkpoint_n_notes(const checkpoint *c) { return c->notes.n; }

const char *checkpoint_note(const checkpoint *c, int i) {
    assert(i >= 0 && i < c->notes.n);
    return c->notes.text[i];
}

int checkpoint_n_tensors(const checkpoint *c) { return pt_n_tensors(c->file); }
const tensor_info *checkpoint_tensor(const checkpoint *c, int i) { return pt_tensor(c->file, i); }
const tensor_info *checkpoint_find(const checkpoint *c, const char *name) { return pt_find(c->file, name); }

cop_status checkpoint_read(checkpoint *c, const tensor_info *t, size_t first, size_t n, void *dst,
                           cop_error *err) {
    return pt_read(c->file, t, first, n, dst, err);
}

cop_status checkpoint_unchanged(checkpoint *c, cop_error *err) { return zip_unchanged(pt_zip(c->file), err); }
