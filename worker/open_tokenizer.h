/* The tokenizer alone, for commands that compute nothing. */
#ifndef COP_OPEN_TOKENIZER_H
#define COP_OPEN_TOKENIZER_H

#include <jansson.h>

#include "engine/tokenizer.h"
#include "worker/options.h"

/* Open the tokenizer of --model, or --tokenizer by itself; one of the two is given.  Errors: as
 * checkpoint_open() and tokenizer_open(); COP_ENOTFOUND where the model has none; COP_EINVAL where the two do
 * not fit. *out is then NULL. */
cop_status open_tokenizer(tokenizer **out, const model_options *m, cop_error *err);

/* The same for a data set: without --model and --tokenizer that of the model which its manifest (NULL: none)
 * names, if it is still there; else *out is NULL, which is no error. */
cop_status find_tokenizer(tokenizer **out, const model_options *m, const json_t *manifest, cop_error *err);

#endif
