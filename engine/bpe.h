/* Byte-pair encoding of one piece of text, with the very result of tiktoken: a piece that is a token is that
 * token; else the neighbours whose joined bytes are the token with the lowest id are joined, leftmost first
 * among equals, until none are.  Ids are ranks. */
#ifndef COP_BPE_H
#define COP_BPE_H

#include "engine/tokenizer.h"
#include "engine/vocab.h"

typedef struct bpe_part bpe_part;

/* Memory for bpe_encode, reused from piece to piece.  Zeroed: empty. */
typedef struct bpe_scratch {
    bpe_part *parts;
    uint64_t *queue;
    size_t parts_cap, queue_cap, n_queue;
} bpe_scratch;
void bpe_scratch_free(bpe_scratch *s);

/* Append the ids of a piece of n > 0 bytes.  Time is n log n; memory 16 to 40 bytes a byte for a piece that
 * is no token. `v` holds every single byte as a token.  Errors: COP_ENOMEM, also for a piece of 4 GiB or
 * more. */
cop_status bpe_encode(const vocab *v, bpe_scratch *s, const char *piece, size_t n, token_list *out,
                      cop_error *err);

#endif
