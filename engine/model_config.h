/* The meta_*.json of a checkpoint: the model's configuration, and what else in it bears on the architecture.
 */
#ifndef COP_MODEL_CONFIG_H
#define COP_MODEL_CONFIG_H

#include "engine/arch.h"

/* Longest sequence_len.  The rotary table is ten times that, whatever the size of the file. */
enum { MODEL_MAX_SEQUENCE = 1 << 17 };

typedef struct model_config {
    int sequence_len, vocab, n_layers, n_heads, n_kv_heads, dim;
    bool has_window_pattern;
    char window_pattern[ARCH_MAX_LAYERS + 1]; /* S and L, at least one; what is longer cannot matter */
    bool is_base;    /* written by base training, whose sequence_len is the model's own */
    bool softcap_20; /* a base model from the week in which the softcap was 20 (NANOCHAT.md 1.5) */
} model_config;

/* Read and check the file at `path`.
 * Errors: COP_ENOTFOUND, COP_EIO, COP_EFORMAT (also values out of range), COP_EUNSUPPORTED (MoE and unknown
 * keys, by name), COP_ENOMEM. */
cop_status model_config_read(model_config *c, const char *path, cop_error *err);

/* Copy a window pattern in upper case.  False unless it is one or more S and L. */
bool window_pattern_copy(char to[ARCH_MAX_LAYERS + 1], const char *pattern, size_t n);

#endif
