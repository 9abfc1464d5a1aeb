/* A finished sample that outlives its event: the engine's result copied into a reply.  Any thread. */
#ifndef COP_SAMPLE_COPY_H
#define COP_SAMPLE_COPY_H

#include "engine/engine.h"
#include "proto/reply.h"

/* Copy all of a sample but for what only the caller knows: prompt_id and the prompt's tokens.  text: decode
 * the tokens too.  False without memory; *out is then empty. */
bool sample_copy(reply_sample *out, const sample_result *s, const tokenizer *text);
/* Free what sample_copy() made; all other pointers are left alone.  Zeroed does nothing. */
void sample_copy_free(reply_sample *s);

/* A new copy of n items, also of none; NULL without memory, and then *ok is false. */
void *copy_items(const void *from, size_t n, size_t size, bool *ok);

/* Bytes that a copy holds, near enough to bound memory with. */
size_t sample_copy_bytes(const reply_sample *s);

#endif
