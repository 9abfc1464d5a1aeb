/* What an engine keeps of the checkpoint that it was opened with, to check new weights against.  Internal;
 * immutable after reload_model_init() but for `stop`; any thread. */
#ifndef COP_RELOAD_H
#define COP_RELOAD_H

#include <stdatomic.h>

#include "engine/tensor_table.h"

typedef struct reload_model {     /* zeroed: there was no checkpoint */
    tensor_table tensors;         /* n 0: new weights cannot be loaded */
    checkpoint_options overrides; /* what the user said about the architecture holds for later files too */
    char window_pattern[ARCH_MAX_LAYERS + 1]; /* that they point to */
    size_t n_bytes;                           /* of a packed set */
    atomic_bool stop;                         /* engine_stop_loading() */
} reload_model;

/* Nothing of `c` is borrowed.  Errors: COP_ENOMEM; *m can then be freed. */
cop_status reload_model_init(reload_model *m, const checkpoint *c, size_t n_bytes, cop_error *err);
void reload_model_free(reload_model *m);

#endif
