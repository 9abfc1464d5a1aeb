/* A sample for showing: a JSON object (record_json.h) checked and unpacked.  The objects may come from a file
 * that anybody wrote.  One thread. */
#ifndef COP_SHOW_SAMPLE_H
#define COP_SHOW_SAMPLE_H

#include <jansson.h>

#include "engine/tokenizer.h"

enum { SHOW_LOGPROBS, SHOW_MODEL_LOGPROBS, SHOW_ENTROPY, SHOW_N_REALS };

/* Zeroed: empty.  Texts are borrowed from the object, which must outlive this. */
typedef struct show_sample {
    uint64_t index; /* of the sample in its prompt */
    token_list tokens;
    uint8_t *mask;               /* [tokens.n] 1 sampled, 0 forced */
    double *reals[SHOW_N_REALS]; /* [tokens.n] each; NULL: the sample lacks it */
    const char *finish;
    const json_t *stop; /* a token or a string; NULL: none */
    size_t n_calls, n_failed_calls;
    double reward;      /* NaN: none */
    const json_t *text; /* a string; NULL: none */
} show_sample;

/* vocab: ids are below it.  Errors: COP_EINVAL with the key of what is missing or wrong; COP_ENOMEM.  *out is
 * then empty. */
cop_status show_sample_init(show_sample *out, const json_t *object, int vocab, cop_error *err);
void show_sample_free(show_sample *s);

/* Tokens that the model drew. */
size_t show_sample_drawn(const show_sample *s);

#endif
