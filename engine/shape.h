/* Architectures by name, for models that are made in memory: nanochat's of generation F in the sizes that its
 * depth alone determines. */
#ifndef COP_SHAPE_H
#define COP_SHAPE_H

#include "engine/arch.h"

#define SHAPE_MAX_DEPTH 48

/* dN, N from 1 to SHAPE_MAX_DEPTH: N layers of width 64 N, N heads of 64 and as many KV heads, windows SSSL
 * of a sequence_len of 2048, a vocabulary of 32768, and every optional part of generation F. Errors:
 * COP_EINVAL (no such name). */
cop_status shape_arch(arch *out, const char *name, cop_error *err);

#endif
