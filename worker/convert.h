/* Between the wire's structs and the engine's: errors, prompts, samples. */
#ifndef COP_CONVERT_H
#define COP_CONVERT_H

#include "engine/engine.h"
#include "proto/reply.h"
#include "proto/request.h"

/* The allocator that proto/ gets: mem_*. */
extern const wire_allocator worker_allocator;

/* What every reply to a request begins with. */
reply_head convert_head(const request *r);

/* A seed from the system, below 2^53, so that every JSON reader keeps it. */
uint64_t convert_seed(void);

/* The wire's error for one of ours: its code, key and message. */
void convert_error(wire_error *to, const cop_error *from);

/* Ids from the wire, checked against the vocabulary, into a new array (mem_free).  key names them in an
 * error. */
cop_status convert_ids(int32_t **out, wire_ids ids, int vocab, const char *key, cop_error *err);

/* Append the ids of an input.  TEXT gets BOS before it if `bos`; MESSAGES are primed for the assistant, cut
 * at `cut`. key names the input in an error ("prompts[3]", or "" for the request itself). */
cop_status convert_input(token_list *out, const request_input *input, const tokenizer *t, int vocab, bool bos,
                         size_t cut, const char *key, cop_error *err);

/* A rollout's spec, with the arrays that it points to. */
typedef struct converted_rollout {
    rollout_spec spec; /* without events */
    rollout_prompt *prompts;
    token_list *tokens; /* [n_prompts] */
    int32_t **prefixes; /* [n_prompts] NULL where there is none */
    int32_t *stop_tokens;
    stop_string *stop_strings; /* their bytes are the request's */
    size_t n_prompts;
} converted_rollout;

/* seed: the request's own, or the one that was drawn for it.  On failure *out is freed. */
cop_status convert_rollout(converted_rollout *out, const request_rollout *r, uint64_t seed, const engine *e,
                           const tokenizer *t, cop_error *err);
void converted_rollout_free(converted_rollout *c);

/* The decoded text of tokens, repaired; bytes and n as they are besides, if not NULL (mem_free both). */
cop_status convert_text(char **text, size_t *n_text, char **bytes, size_t *n_bytes, const tokenizer *t,
                        const int32_t *ids, size_t n, cop_error *err);

#endif
