/* A prompt and its samples on a page.
 *
 *   line 3 "apples": 24 tokens, 2 samples
 *     <|bos|><|user_start|>What is 7*8?<|user_end|><|assistant_start|>
 *     sample  0  stop      15 tokens (12 sampled, 3 forced)  reward 1  log-prob -0.12 (mean -0.01)  1 call
 *       The answer is ...
 *
 * One thread. */
#ifndef COP_SHOW_PROMPT_H
#define COP_SHOW_PROMPT_H

#include "worker/show_sample.h"
#include "worker/show_text.h"

/* Which samples; zeroed but for sample = -1: all. */
typedef struct show_filter {
    const char *finish; /* NULL: any */
    bool tool_calls;    /* only samples with a tool call */
    bool failed_tools;  /* only samples with one that gave no answer */
    bool best;          /* of those, only the prompt's one with the highest reward; the first of equals */
    bool errors;        /* no samples: only lines that have none */
    const char *prompt; /* the prompt's id or its line in decimal; NULL: any */
    int64_t sample;     /* the index; < 0: any */
} show_filter;

typedef struct show_view {
    show_page page;
    const tokenizer *t; /* NULL: the samples' own text, or else ids */
    bool logprobs;      /* token by token */
    show_filter filter;
    bool lacks_text; /* out: something was shown as ids for want of a tokenizer */
} show_view;

/* Show what the filter leaves of a prompt's objects (sample_source_next()); *shown tells whether that was
 * anything.  Errors: COP_EINVAL where an object is no sample; COP_ENOMEM.  Whether all could be written is
 * for the caller to ask of the stream. */
cop_status show_prompt(show_view *v, const json_t *objects, bool *shown, cop_error *err);

#endif
