/* The tokenizer alone. */
#include "worker/open_tokenizer.h"

#include <assert.h>
#include <stdio.h>
#include <unistd.h>

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

cop_status find_tokenizer(tokenizer **out, const model_options *m, const json_t *manifest, cop_error *err) {
    *out = NULL;
    if (m->model || m->tokenizer) return open_tokenizer(out, m, err);
    const char *made_with = json_string_value(json_object_get(json_object_get(manifest, "about"), "model"));
    if (!made_with || access(made_with, F_OK) != 0) return COP_OK;
    model_options guess = model_options_defaults();
    guess.model = made_with;
    cop_error why;
    if (open_tokenizer(out, &guess, &why) != COP_OK)
        fprintf(stderr, "coppice: note: without a tokenizer: %s\n", why.message);
    return COP_OK;
}
