/* dN to an architecture. */
#include "engine/shape.h"

#include <float.h>

#include "engine/arch_detect.h"

enum { HEAD_DIM = 64, SEQUENCE_LEN = 2048, VOCAB = 32768, GATE_CHANNELS = 12, SMEAR_CHANNELS = 24 };

/* The N of "dN", or 0. */
static int depth_of(const char *name) {
    int depth = 0;
    if (*name++ != 'd' || *name == '0') return 0;
    for (; *name; name++) {
        if (*name < '0' || *name > '9') return 0;
        depth = 10 * depth + (*name - '0');
        if (depth > SHAPE_MAX_DEPTH) return 0;
    }
    return depth;
}

cop_status shape_arch(arch *out, const char *name, cop_error *err) {
    int depth = depth_of(name);
    *out = (arch){0};
    if (!depth)
        return cop_fail(err, COP_EINVAL, "unknown shape \"%s\": there are d1 to d%d", name, SHAPE_MAX_DEPTH);
    arch a = {.vocab = VOCAB,
              .rows = VOCAB,
              .dim = HEAD_DIM * depth,
              .n_layers = depth,
              .n_heads = depth,
              .n_kv_heads = depth,
              .head_dim = HEAD_DIM,
              .ff_dim = 4 * HEAD_DIM * depth,
              .sequence_len = SEQUENCE_LEN,
              .context = 10 * SEQUENCE_LEN,
              .softcap = 15,
              .eps = FLT_EPSILON,
              .has_lambdas = true,
              .gate_channels = GATE_CHANNELS,
              .smear_channels = SMEAR_CHANNELS};
    arch_set_generation(&a, 'F');
    arch_set_windows(&a, "SSSL", 0);
    *out = a;
    return COP_OK;
}
