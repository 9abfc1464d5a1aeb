/* Opening what a command computes with: checkpoint, tokenizer, engine. */
#ifndef COP_OPEN_MODEL_H
#define COP_OPEN_MODEL_H

#include "engine/engine.h"
#include "worker/options.h"

typedef struct open_model {
    tokenizer *tokenizer; /* NULL: the checkpoint has none beside it */
    engine *engine;
} open_model;

/* What the options say about computing; the rest as engine_defaults(). */
engine_options model_engine_options(const model_options *m);

/* Open the model that the options name; notes about what had to be assumed go to stderr.  On failure *out is
 * zeroed. */
cop_status open_model_init(open_model *out, const model_options *m, cop_error *err);
void open_model_free(open_model *o);

#endif
