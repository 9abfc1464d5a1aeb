/* Filling a set of weights from a checkpoint. */
#ifndef COP_WEIGHTS_LOAD_H
#define COP_WEIGHTS_LOAD_H

#include "engine/weights.h"

/* Read every tensor of `c`, pack it and set the digest.  Reading and hashing run beside packing, on as many
 * threads as w->k has; they are the loader's own, so that nothing of a step has to wait for them.  Takes
 * megabytes of room, no matter how large the file is.
 *   w               as weights_open() makes it; on failure some of it is filled
 *   chunk_elements  read at a time, at least a group of rows; it changes nothing of the result
 * Errors: those of weights_open(). */
cop_status weights_load(weights *w, checkpoint *c, size_t chunk_elements, cop_error *err);

#endif
