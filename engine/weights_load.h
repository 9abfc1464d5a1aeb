/* Filling a set of weights from a source. */
#ifndef COP_WEIGHTS_LOAD_H
#define COP_WEIGHTS_LOAD_H

#include <stdatomic.h>

#include "engine/engine.h"
#include "engine/tensor_table.h"
#include "engine/weights.h"

enum {
    WEIGHTS_CHUNK_ELEMENTS = 1 << 18
}; /* a megabyte of fp32: it stays in a shared cache until it is packed */

typedef struct weights_loading { /* everything is borrowed */
    const arch *arch;            /* the model that the weights are for */
    const tensor_table *tensors; /* and what it consists of */
    const weights_source *source;
    size_t chunk_elements;   /* read at a time, at least a group of rows; it changes nothing of the result */
    const atomic_bool *stop; /* give up once it is true; NULL: never */
} weights_loading;

/* Read every tensor, pack it and set the digest.  Reading and hashing run beside packing, on as many threads
 * as w->k has; they are the loader's own, so that nothing of a step has to wait for them.  Takes megabytes of
 * room, no matter how large the tensors are.  Any thread, while the engine's steps.
 *   w  as weights_new() makes it; on failure some of it is filled
 * Errors: COP_EFORMAT (tensor_table_expect), COP_EMODEL (a tensor holds NaN or infinity), COP_ENOMEM, COP_EIO
 * (stopped, no threads), those of the source. */
cop_status weights_load(weights *w, const weights_loading *from, cop_error *err);

/* The same from nothing; *out is NULL on failure. */
cop_status weights_open_source(weights **out, k_ctx *k, const weights_loading *l, cop_error *err);

#endif
