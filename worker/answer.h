/* The built-in reward `answer`: 1 if a sample ends in the answer of its line, else 0; and pass@k.  Nothing
 * here holds state; any thread. */
#ifndef COP_ANSWER_H
#define COP_ANSWER_H

#include <jansson.h>

#include "engine/tokenizer.h"

/* What a sample (tokens[0 .. n), with its mask) answers: the last number in its text or the last result of a
 * tool, whichever comes later, as a new string (mem_free); *out NULL where it has neither.  Thousands
 * separators are left out of numbers.
 * A result is what was forced (mask 0) between output_start and output_end; a call, from python_start to the
 * next special token, is no text; what the model itself writes as output is.  A number is "7", "-0.25",
 * "1,234.5" or "1e-05": no point or comma that ends a sentence, no minus that subtracts ("9-4" ends in 4),
 * nothing inside a word ("x2").
 * Errors: COP_EINVAL for an id outside the vocabulary, COP_ENOMEM; *out is then NULL. */
cop_status answer_of_sample(char **out, const tokenizer *t, const int32_t *tokens, const uint8_t *mask,
                            size_t n, cop_error *err);

/* Whether two answers are the same: as decimal numbers, exactly, where both are ("1,200" is "1200.0"), else
 * as text but for space around it. */
bool answer_equal(const char *a, const char *b);

/* The reward of an answer (NULL: none was found) for a line's `answer` field, a string or a number: 1, 0, or
 * NaN where the line has none (null, absent, or of another type).  A number stands for the shortest decimal
 * that reads as it, as Python and JSON print it. */
double answer_reward(const char *answer, const json_t *expected);

/* Pass@k as nanochat's scripts/chat_rl.py reports it: the share of prompts of which one of the first k
 * samples has a reward of 1 or more. */
typedef struct pass_counts {
    uint64_t n_prompts;
    uint64_t *n_passed; /* [n] by k - 1 */
    size_t n;
} pass_counts;
cop_status pass_init(pass_counts *p, size_t n, cop_error *err);
void pass_free(pass_counts *p);
/* A prompt's rewards; one with a NaN first is not counted.  Fewer than p->n stand for all larger k too. */
void pass_add(pass_counts *p, const double *rewards, size_t n);
double pass_at(const pass_counts *p, size_t k); /* k from 1 to n; 0 without prompts */

#endif
