/* Comparing architectures field by field, so that an error can name one. */
#include "engine/arch_compare.h"

#include <stddef.h>
#include <string.h>

typedef enum field_kind { FIELD_INT, FIELD_BOOL, FIELD_FLOAT, FIELD_DOUBLE } field_kind;

#define FIELD(name, kind)                                                                                    \
    { #name, offsetof(arch, name), kind }
static const struct {
    const char *name;
    size_t offset;
    field_kind kind;
} fields[] = {
    FIELD(n_layers, FIELD_INT),       FIELD(dim, FIELD_INT),           FIELD(n_heads, FIELD_INT),
    FIELD(n_kv_heads, FIELD_INT),     FIELD(head_dim, FIELD_INT),      FIELD(ff_dim, FIELD_INT),
    FIELD(vocab, FIELD_INT),          FIELD(rows, FIELD_INT),          FIELD(sequence_len, FIELD_INT),
    FIELD(context, FIELD_INT),        FIELD(softcap, FIELD_FLOAT),     FIELD(rope_base, FIELD_DOUBLE),
    FIELD(rope_bf16, FIELD_BOOL),     FIELD(qk_scale, FIELD_FLOAT),    FIELD(eps, FIELD_FLOAT),
    FIELD(has_lambdas, FIELD_BOOL),   FIELD(gate_channels, FIELD_INT), FIELD(gate_factor, FIELD_FLOAT),
    FIELD(smear_channels, FIELD_INT), FIELD(has_backout, FIELD_BOOL)};

static double value_of(const arch *a, size_t offset, field_kind kind) {
    const char *p = (const char *)a + offset;
    switch (kind) {
    case FIELD_INT: return *(const int *)p;
    case FIELD_BOOL: return *(const bool *)p;
    case FIELD_FLOAT: return (double)*(const float *)p;
    case FIELD_DOUBLE: return *(const double *)p;
    }
    return 0;
}

static cop_status compare_layer(const arch *got, const arch *want, int i, cop_error *err) {
    if (got->window[i] != want->window[i])
        return cop_fail(err, COP_EFORMAT, "the window of layer %d is %d, where the engine has %d", i,
                        (int)got->window[i], (int)want->window[i]);
    if (got->has_value_embed[i] != want->has_value_embed[i])
        return cop_fail(err, COP_EFORMAT, "has_value_embed of layer %d is %d, where the engine has %d", i,
                        got->has_value_embed[i], want->has_value_embed[i]);
    return COP_OK;
}

cop_status arch_compare(const arch *got, const arch *want, cop_error *err) {
    if (strcmp(got->generation, want->generation) != 0)
        return cop_fail(err, COP_EFORMAT, "the generation is %s, where the engine has %s", got->generation,
                        want->generation);
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        double a = value_of(got, fields[i].offset, fields[i].kind);
        double b = value_of(want, fields[i].offset, fields[i].kind);
        if (a != b)
            return cop_fail(err, COP_EFORMAT, "%s is %.9g, where the engine has %.9g", fields[i].name, a, b);
    }
    for (int i = 0; i < want->n_layers; i++) {
        cop_status status = compare_layer(got, want, i, err);
        if (status != COP_OK) return status;
    }
    return COP_OK;
}
