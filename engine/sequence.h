/* A sequence of tokens and how much of it is in the KV cache: what prompts, rows and scored sequences have in
 * common.
 *
 * Tokens [0, n_head) are borrowed (a row borrows its prompt's), tokens [n_head, n) are its own.  Positions
 * [0, n_computed) have their K and V in `pages`.  Whatever lies between n_computed and n is pending: a prompt
 * still to be prefilled, a forced span, or the one token drawn last.  Engine thread only. */
#ifndef COP_SEQUENCE_H
#define COP_SEQUENCE_H

#include "engine/kv_pool.h"

typedef struct sequence {
    const int32_t *head;
    int n_head;
    int32_t *tail; /* [cap_tail] owned */
    int n;         /* all tokens */
    int cap_tail;
    int n_computed;
    int32_t *pages; /* [cap_pages] owned */
    int n_pages, cap_pages;
    int n_reserved; /* pages promised to it by the pool and not taken */
} sequence;

/* Room for n_head + cap_tail tokens.  On failure the sequence is zeroed. */
cop_status sequence_init(sequence *s, const int32_t *head, int n_head, int cap_tail, cop_error *err);
/* Give pages and promises back and free the arrays. */
void sequence_free(sequence *s, kv_pool *pool);

int sequence_pages_for(int n_tokens); /* ceil(n_tokens / KV_PAGE_TOKENS) */
int32_t sequence_token(const sequence *s, int pos);
void sequence_push(sequence *s, int32_t token);
static inline int sequence_pending(const sequence *s) { return s->n - s->n_computed; }

/* Have pages for positions [0, n_tokens), drawn on the sequence's reservation. */
void sequence_extend(sequence *s, kv_pool *pool, int n_tokens);

/* Drop the pages from index `first` on; what they held is no longer computed. */
void sequence_truncate(sequence *s, kv_pool *pool, int first);

#endif
