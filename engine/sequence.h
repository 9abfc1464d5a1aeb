/* A sequence of tokens and how much of it is in the KV cache: what prompts, rows and scored sequences have in
 * common.
 *
 * Tokens [0, n_head) are borrowed (a row borrows its prompt's), tokens [n_head, n) are its own.  Positions
 * [0, n_computed) have their K and V in `pages`.  Whatever lies between n_computed and n is pending: a prompt
 * still to be prefilled, a forced span, the one token drawn last, or all after the pages were given back.
 *
 *   pages      | known | known | known |  full  |  part  |
 *   tokens     |.......|.......|.......|........|...     |......
 *                              n_known * 64          n_computed    n
 *
 * Pages are known to the prefix cache as soon as sequence_remember() saw them full.  Engine thread only. */
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
    int n_known; /* pages [0, n_known) are known to the cache */
} sequence;

/* Room for n_head + cap_tail tokens; no pages.  On failure the sequence is zeroed. */
cop_status sequence_init(sequence *s, const int32_t *head, int n_head, int cap_tail, cop_error *err);
/* Give the pages back and free the arrays.  `pool` may be NULL if it holds no pages. */
void sequence_free(sequence *s, kv_pool *pool);

int sequence_pages_for(int n_tokens); /* ceil(n_tokens / KV_PAGE_TOKENS) */
int32_t sequence_token(const sequence *s, int pos);
void sequence_push(sequence *s, int32_t token);
static inline int sequence_pending(const sequence *s) { return s->n - s->n_computed; }

/* Have pages for positions [0, n_tokens).  False: the pool has no more; it keeps those that it got. */
bool sequence_extend(sequence *s, kv_pool *pool, int n_tokens);

/* Give all pages back, the last one first; then nothing is computed. */
void sequence_release(sequence *s, kv_pool *pool);

/* Take further pages that the cache knows under this root, as many as lie within the first n_tokens.  They
 * count as computed.  A sequence whose last page the cache does not know has nothing to take. */
void sequence_restore(sequence *s, kv_pool *pool, uint64_t root, int n_tokens);

/* Let the cache know the pages that are full by now; all of them were computed under this root. */
void sequence_remember(sequence *s, kv_pool *pool, uint64_t root);

/* Let `to`, which has no pages and begins with all of `from`, share the full pages of `from`, all of which is
 * computed. */
void sequence_share(sequence *to, const sequence *from, kv_pool *pool);
/* After that: let it also take over the last page of `from`, which is not full. */
void sequence_take_over(sequence *to, sequence *from);

#endif
