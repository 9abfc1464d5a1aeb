/* The tokenizer alone. */
#include "worker/open_tokenizer.h"

#include <assert.h>

static cop_status open_of_model(tokenizer **t, const model_options *m, cop_error *err) {
    checkpoint_options options = model_checkpoint_options(m);
    checkpoint *c;
    cop_status status = checkpoint_open(&c, m->model, &options, err);
    if (status != COP_OK) return status;
    const char *path = checkpoint_tokenizer_path(c);
    if (path)
        status = tokenizer_open(t, path, err);
    else
        status = cop_fail(err, COP_ENOTFOUND,
                          "could not find a tokenizer for the model \"%s\": give --tokenizer PATH", m->model);
    int vocab = checkpoint_arch(c)->vocab;
    checkpoint_close(c);
    if (status != COP_OK || tokenizer_vocab(*t) == vocab) return status;
    status = cop_fail(err, COP_EINVAL, "the tokenizer has %d tokens, the model \"%s\" has %d",
                      tokenizer_vocab(*t), m->model, vocab);
    tokenizer_close(*t);
    *t = NULL;
    return status;
}

cop_status open_tokenizer(tokenizer **out, const model_options *m, cop_error *err) {
    assert(m->model || m->tokenizer);
    *out = NULL;
    return m->model ? open_of_model(out, m, err) : tokenizer_open(out, m->tokenizer, err);
}
