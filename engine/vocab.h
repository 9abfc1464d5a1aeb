/* The tokens of a byte-level vocabulary: id to bytes, bytes to id.
 *
 * Filled once, with every id set exactly once, then immutable and free for any thread.  A struct of the
 * owner's; zeroed: empty. */
#ifndef COP_VOCAB_H
#define COP_VOCAB_H

#include "kernels/base.h"

typedef struct vocab_token {
    const char *bytes; /* NULL: not set yet */
    uint32_t len;
} vocab_token;

typedef struct vocab {
    vocab_token *tokens; /* [n_tokens] by id */
    int32_t n_tokens;
    size_t longest;   /* bytes of the longest ordinary token; vocab_find need not look for more */
    int32_t *slots;   /* open addressing with linear probing: an id, or -1 */
    size_t slot_mask; /* slots - 1; slots are a power of two and at most half of them are used */
    char *heap;       /* the tokens' bytes, each NUL-terminated */
    size_t heap_used, heap_size;
} vocab;

/* Make room for `n_tokens` ids whose bytes add up to `n_bytes`.  Errors: COP_ENOMEM. */
cop_status vocab_init(vocab *v, int32_t n_tokens, size_t n_bytes, cop_error *err);
void vocab_free(vocab *v);

/* Set the bytes (copied) of one id, 0 <= id < n_tokens.  Special tokens are not ordinary: vocab_find never
 * gives them. Errors: COP_EFORMAT if the id is set already, or an ordinary token has these very bytes. */
cop_status vocab_set(vocab *v, int32_t id, const char *bytes, size_t len, bool ordinary, cop_error *err);

/* The id of the ordinary token with exactly these bytes, or -1. */
int32_t vocab_find(const vocab *v, const char *bytes, size_t len);

#endif
