/* The tokenizer alone, for commands that compute nothing. */
#ifndef COP_OPEN_TOKENIZER_H
#define COP_OPEN_TOKENIZER_H

#include "engine/tokenizer.h"
#include "worker/options.h"

/* Open the tokenizer of --model, or --tokenizer by itself; one of the two is given.  Errors: as
 * checkpoint_open() and tokenizer_open(); COP_ENOTFOUND where the model has none; COP_EINVAL where the two do
 * not fit. *out is then NULL. */
cop_status open_tokenizer(tokenizer **out, const model_options *m, cop_error *err);

#endif
