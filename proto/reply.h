/* Replies: from plain structs to the bytes of a frame.
 *
 * Every encoder borrows its struct for the call and gives one owned buffer, compressed as the protocol says:
 * 512 bytes or more, unless the request said `compress: false`; the content size is always declared.  All
 * return false when there is no memory, with *out zeroed.  Text must be valid UTF-8, numbers in range: they
 * come from us, so that is asserted, not reported.  Any thread. */
#ifndef WIRE_REPLY_H
#define WIRE_REPLY_H

#include "proto/wire.h"

/* What every reply has. */
typedef struct reply_head {
    wire_text id; /* of the request; empty where it could not be read */
    bool compress;
    const wire_allocator *allocator;
} reply_head;

/* A weights set: its version and digest (32 hex digits). */
typedef struct reply_weights {
    uint64_t version;
    wire_text digest;
} reply_weights;

typedef struct reply_pong {
    wire_text version; /* of the program; the protocol's is added */
    wire_text model, backend, numerics;
    wire_text state; /* "ready", "paused", "asleep", "draining" */
    reply_weights weights;
} reply_pong;

typedef struct reply_status {
    uint64_t rows, queued;                                      /* now */
    uint64_t pages_total, pages_used, pages_cached, pages_free; /* total = used + cached + free */
    uint64_t pages_shared;                                      /* of the used */
    reply_weights weights;
    uint64_t requests, samples, prompt_tokens, prefilled_tokens, cached_tokens; /* since start */
    uint64_t sampled_tokens, forced_tokens, preemptions, steps;
    double seconds;
} reply_status;

typedef struct reply_accepted {
    uint64_t samples;
    uint64_t seed;
    reply_weights weights;
    wire_text numerics;
} reply_accepted;

typedef struct reply_done {
    uint64_t samples, prompt_tokens, cached_tokens, sampled_tokens, forced_tokens;
    double seconds;
} reply_done;

/* ---- samples */
typedef struct reply_tool_call {
    uint32_t at; /* index in `tokens` of the token that closed the call */
    wire_text tool;
    bool ok; /* false: the tool gave no answer */
} reply_tool_call;

typedef struct reply_weights_run {
    uint32_t start; /* index in `tokens` of the first token of the run */
    reply_weights weights;
} reply_weights_run;

typedef enum reply_finish { REPLY_STOP, REPLY_LENGTH, REPLY_CANCELLED } reply_finish;

typedef struct reply_sample {
    uint32_t prompt, sample;
    wire_text prompt_id; /* {0}: not sent */
    uint64_t seed;
    bool has_prompt_tokens;
    wire_ids prompt_tokens; /* sent if has_prompt_tokens */
    size_t n_tokens;
    const uint32_t *tokens; /* [n_tokens] */
    const uint8_t *mask;    /* [n_tokens] 1 sampled, 0 forced */
    /* What was asked for; an empty sample has them too. */
    bool has_logprobs, has_model_logprobs, has_entropy, has_kept;
    const float *logprobs, *model_logprobs, *entropy; /* [n_tokens] each */
    wire_ids kept_ids;
    const uint32_t *kept_offsets; /* [n_tokens + 1], into kept_ids */
    reply_finish finish;
    bool has_stop;
    uint32_t stop;         /* the stop token that was hit, if has_stop */
    wire_text stop_string; /* the stop string that was hit, if !has_stop; {0}: none */
    const reply_tool_call *tool_calls;
    size_t n_tool_calls;
    const reply_weights_run *weights;
    size_t n_weights;
    wire_text text; /* {0}: not sent */
} reply_sample;

/* ---- scores */
typedef struct reply_score {
    size_t n;              /* tokens of the sequence */
    const float *logprobs; /* [n]; entry 0 is 1.0 */
    /* The rest is sent if the request's `top` is not 0: */
    const uint32_t *top_ids;    /* [n, top] */
    const float *top_logprobs;  /* [n, top] */
    const uint32_t *next_ids;   /* [top] */
    const float *next_logprobs; /* [top] */
} reply_score;

typedef struct reply_scores {
    const reply_score *scores; /* [n_scores] */
    size_t n_scores;
    uint32_t top;
    reply_weights weights;
    wire_text numerics;
} reply_scores;

bool reply_encode_pong(wire_buffer *out, const reply_head *head, const reply_pong *pong);
bool reply_encode_status(wire_buffer *out, const reply_head *head, const reply_status *status);
bool reply_encode_accepted(wire_buffer *out, const reply_head *head, const reply_accepted *accepted);
bool reply_encode_done(wire_buffer *out, const reply_head *head,
                       const reply_done *done); /* NULL: a bare `done` */
bool reply_encode_weights(wire_buffer *out, const reply_head *head, reply_weights weights);
bool reply_encode_error(wire_buffer *out, const reply_head *head, const wire_error *error);
bool reply_encode_scores(wire_buffer *out, const reply_head *head, const reply_scores *scores);
bool reply_encode_tokens(wire_buffer *out, const reply_head *head, wire_ids tokens);
/* `text` is the repaired UTF-8, `bytes` what the tokens really hold. */
bool reply_encode_text(wire_buffer *out, const reply_head *head, wire_text text, const void *bytes,
                       size_t n_bytes);

/* One or more `samples` messages, in order, so that none passes WIRE_SPLIT_BYTES before compression unless it
 * holds a single sample.  n >= 1.  *out is an array of *n_out buffers; end with reply_messages_free(). */
bool reply_encode_samples(wire_buffer **out, size_t *n_out, const reply_head *head,
                          const reply_sample *samples, size_t n);
void reply_messages_free(wire_buffer *messages, size_t n, const wire_allocator *allocator);

#endif
