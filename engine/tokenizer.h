/* nanochat's tokenizer: tokenizer.pkl (a pickled tiktoken Encoding), byte-level BPE, the split pattern by
 * hand (NANOCHAT.md 3), chat rendering (3.5).  Immutable after open; any thread. */
#ifndef COP_TOKENIZER_H
#define COP_TOKENIZER_H

#include "kernels/base.h"

/* The nine special tokens, in the order of their ids. */
typedef enum token_special {
    TOKEN_BOS,
    TOKEN_USER_START,
    TOKEN_USER_END,
    TOKEN_ASSISTANT_START,
    TOKEN_ASSISTANT_END,
    TOKEN_PYTHON_START,
    TOKEN_PYTHON_END,
    TOKEN_OUTPUT_START,
    TOKEN_OUTPUT_END,
    TOKEN_N_SPECIALS
} token_special;

typedef struct tokenizer tokenizer;

/* A growing array of ids.  Zeroed: empty.  Ends with token_list_free(). */
typedef struct token_list {
    int32_t *ids;
    size_t n, cap;
} token_list;
void token_list_free(token_list *l);
cop_status token_list_push(token_list *l, int32_t id, cop_error *err);

/* Open tokenizer.pkl at `path` (a file, or a directory that holds it).  Errors: COP_EIO, COP_EFORMAT,
 * COP_EUNSUPPORTED, COP_ENOMEM; *out is then NULL. */
cop_status tokenizer_open(tokenizer **out, const char *path, cop_error *err);
void tokenizer_close(tokenizer *t);
int tokenizer_vocab(const tokenizer *t);                            /* ordinary and special ids together */
int32_t tokenizer_special(const tokenizer *t, token_special which); /* -1 if the tokenizer lacks it */

/* Append the ids of `n` bytes of text; special tokens' text is ordinary text.  Invalid UTF-8 is replaced by
 * U+FFFD, one per maximal invalid subpart.  Time is n log n even for one unbroken run.  Errors: COP_ENOMEM;
 * the list is then unchanged. */
cop_status tokenizer_encode(const tokenizer *t, const char *text, size_t n, token_list *out, cop_error *err);

/* Append the ids of a prompt of text: bos, then the text.  Errors: COP_EUNSUPPORTED if the tokenizer lacks
 * bos; COP_ENOMEM.  The list is then unchanged. */
cop_status tokenizer_encode_prompt(const tokenizer *t, const char *text, size_t n, token_list *out,
                                   cop_error *err);

/* The bytes of one id (special tokens: their text).  Asserts 0 <= id < vocab. */
const char *tokenizer_bytes(const tokenizer *t, int32_t id, size_t *n);

/* XXH3-128 of all that decides which ids a text gets, as 32 hex digits. */
void tokenizer_digest(const tokenizer *t, char hex[33]);

/* The ids' bytes, concatenated, into a new NUL-terminated block (mem_free).  Errors: COP_EINVAL for an id
 * outside the vocabulary, COP_ENOMEM. */
cop_status tokenizer_decode(const tokenizer *t, const int32_t *ids, size_t n, char **bytes, size_t *n_bytes,
                            cop_error *err);

/* A copy of `n` bytes with one U+FFFD per maximal invalid subpart (mem_free), as Python's errors="replace".
 */
cop_status utf8_repair(const char *bytes, size_t n, char **text, size_t *n_text, cop_error *err);

/* ---- Chat rendering. */
typedef enum chat_part_kind { CHAT_TEXT, CHAT_PYTHON, CHAT_PYTHON_OUTPUT } chat_part_kind;
typedef struct chat_part {
    chat_part_kind kind;
    const char *text;
    size_t n;
} chat_part;
typedef enum chat_role { CHAT_SYSTEM, CHAT_USER, CHAT_ASSISTANT } chat_role;
typedef struct chat_message {
    chat_role role;
    bool is_string; /* content was a string: exactly one CHAT_TEXT part */
    const chat_part *parts;
    size_t n_parts;
} chat_message;

#define CHAT_CUT 2048

/* Append the ids of a whole conversation (render_conversation) and its mask (1: the assistant's own tokens),
 * cut to `cut` ids (0: not).  mask may be NULL; else it is a token_list of zeros and ones of the same length.
 * Errors: COP_EINVAL with key "messages[i]..." for roles out of order, a user without string content, ...;
 * COP_EUNSUPPORTED if the tokenizer lacks a special token that is needed; COP_ENOMEM.  The lists are then
 * unchanged. */
cop_status chat_render(const tokenizer *t, const chat_message *messages, size_t n, size_t cut,
                       token_list *ids, token_list *mask, cop_error *err);

/* Append the ids of a prompt primed for the assistant: bos, the messages, assistant_start.  The last message
 * must be the user's.  `cut`: cut like nanochat's render_for_completion before assistant_start is appended
 * (0: not). */
cop_status chat_prompt(const tokenizer *t, const chat_message *messages, size_t n, size_t cut,
                       token_list *ids, cop_error *err);

#endif
