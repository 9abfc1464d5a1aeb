/* Requests: from the bytes of a frame to plain structs, or to the one error that the client gets.
 *
 * Everything that can be judged without a model is judged here: the frame, MessagePack, types, keys, ranges,
 * and what this version has not built (`unsupported`).  Left to the worker, because they need the model or
 * its state: ids outside the vocabulary, the context, the page pool, names of tools, a stop token or string
 * inside a `prefix`, the order of roles.
 *
 * A decoded request is one owned object: every pointer in it lives until request_free().  It never changes
 * after decoding.  Any thread. */
#ifndef WIRE_REQUEST_H
#define WIRE_REQUEST_H

#include "proto/wire.h"

#define REQUEST_MAX_DEPTH 16      /* nesting of maps and arrays */
#define REQUEST_MAX_KEYS 64       /* keys of one map */
#define REQUEST_MAX_PROMPTS 4096  /* also sequences of `score`, and `n` */
#define REQUEST_MAX_SAMPLES 65536 /* prompts x n */
#define REQUEST_MAX_TOP 20
#define REQUEST_MAX_STOP 16        /* stop strings */
#define REQUEST_MAX_STOP_BYTES 256 /* of each */
#define REQUEST_MAX_KEPT 1024      /* `top_k` where `kept` is asked for */
#define REQUEST_MAX_PROMPT_ID 1024 /* bytes of a prompt's `id` */
#define REQUEST_OBJECT_MULTIPLE 4  /* decoded objects may take this many times max_message */
#define REQUEST_LEAST_TEMPERATURE 1e-3
#define REQUEST_MOST_TEMPERATURE 100.0
#define REQUEST_LEAST_TIMEOUT 1e-3 /* seconds */
#define REQUEST_MOST_TIMEOUT 1e9
#define REQUEST_WEIGHTS_TIMEOUT 600.0 /* seconds, the default of `weights_timeout` */
#define REQUEST_MAX_DIMS 4
#define REQUEST_MAX_PATH 4096        /* bytes */
#define REQUEST_MAX_TENSOR_NAME 1024 /* bytes */
#define REQUEST_DIGEST 32            /* hex digits */

typedef enum request_type {
    REQUEST_PING,
    REQUEST_STATUS,
    REQUEST_CANCEL,
    REQUEST_SCORE,
    REQUEST_TOKENIZE,
    REQUEST_DETOKENIZE,
    REQUEST_ROLLOUT,
    REQUEST_ACK,
    REQUEST_PAUSE,
    REQUEST_RESUME,
    REQUEST_WEIGHTS,
    REQUEST_WEIGHTS_CHUNK,
    REQUEST_WEIGHTS_COMMIT
} request_type;

/* ---- Messages of a chat. */
typedef enum request_role { REQUEST_SYSTEM, REQUEST_USER, REQUEST_ASSISTANT } request_role;
typedef enum request_part_kind { REQUEST_TEXT, REQUEST_PYTHON, REQUEST_PYTHON_OUTPUT } request_part_kind;

typedef struct request_part {
    request_part_kind kind;
    wire_text text;
} request_part;

typedef struct request_message {
    request_role role;
    bool is_string;            /* content was a string: exactly one REQUEST_TEXT part */
    const request_part *parts; /* [n_parts]; an array may have none */
    size_t n_parts;
} request_message;

/* What is to be tokenized, or is already. */
typedef enum request_input_kind {
    REQUEST_INPUT_TOKENS,
    REQUEST_INPUT_TEXT,
    REQUEST_INPUT_MESSAGES
} request_input_kind;
typedef struct request_input {
    request_input_kind kind;
    wire_ids tokens;                 /* TOKENS: at least one id (of any u32) */
    wire_text text;                  /* TEXT: may be empty */
    const request_message *messages; /* MESSAGES: [n_messages], at least one, the last one the user's */
    size_t n_messages;
} request_input;

/* ---- rollout */
typedef enum request_deliver {
    REQUEST_DELIVER_SAMPLE,
    REQUEST_DELIVER_PROMPT,
    REQUEST_DELIVER_REQUEST
} request_deliver;

typedef struct request_prompt {
    request_input input;
    wire_text id;    /* {0}: none */
    uint64_t seed;   /* valid if has_seed; else the request's holds */
    uint32_t sample; /* valid if has_sample; then `n` is 1 */
    uint32_t enough; /* 1..4096; 0: not given */
    wire_ids prefix; /* valid if has_prefix, which has_sample goes with; at most max_tokens ids, maybe none */
    bool has_seed, has_sample, has_prefix;
} request_prompt;

typedef struct request_rollout {
    const request_prompt *prompts; /* [n_prompts], 1..4096 */
    size_t n_prompts;
    uint32_t n;    /* samples per prompt, 1..4096; n_prompts * n <= 65536 */
    uint64_t seed; /* valid if has_seed; else the worker draws one below 2^53 */
    uint32_t max_tokens, min_tokens;
    double temperature; /* 0, or 0.001..100 */
    uint32_t top_k;     /* 0: off */
    double top_p, min_p;
    wire_ids stop_tokens;  /* valid if has_stop_tokens; else the model's */
    const wire_text *stop; /* [n_stop] of 1 to 256 bytes, at most 16 */
    size_t n_stop;
    const wire_text *tools; /* [n_tools], valid if has_tools; else the model's default */
    size_t n_tools;
    request_deliver deliver;
    double timeout;         /* seconds from acceptance; 0: none */
    uint64_t min_weights;   /* hold the request until a version as high is in use */
    double weights_timeout; /* seconds for that */
    bool has_seed, has_stop_tokens, has_tools;
    bool logprobs, model_logprobs; /* which log-probabilities to return */
    bool entropy;                  /* return the entropies */
    bool kept;                     /* return the kept ids; 0 < top_k <= 1024 then */
    bool text;                     /* also decode the completions */
} request_rollout;

/* ---- score */
typedef struct request_score {
    const wire_ids *sequences; /* [n_sequences], 1..4096, each of at least one id */
    size_t n_sequences;
    uint32_t top;       /* 0..20 */
    double temperature; /* 0.001..100 */
} request_score;

/* ---- pause */
typedef enum request_pause_mode {
    REQUEST_PAUSE_FINISH, /* the default */
    REQUEST_PAUSE_KEEP,
    REQUEST_PAUSE_ABORT
} request_pause_mode;

/* ---- weights */
typedef enum request_policy { REQUEST_FINISH, REQUEST_KEEP, REQUEST_RECOMPUTE, REQUEST_ABORT } request_policy;

typedef struct request_weights {
    uint64_t version; /* at least 1 */
    wire_text path;   /* 1 to REQUEST_MAX_PATH bytes without NUL; {0}: a stream */
    uint64_t tensors; /* of a stream: how many, and the bytes of all; both at least 1 */
    uint64_t bytes;
    request_policy policy; /* REQUEST_FINISH is the default */
} request_weights;

/* The types of torch and safetensors; none has NaN, infinity or order in common with integers. */
typedef enum request_dtype { REQUEST_F32, REQUEST_BF16, REQUEST_F16, REQUEST_F64 } request_dtype;

typedef struct request_chunk {
    wire_text target; /* the id of a `weights` request with a stream */
    wire_text name;   /* of the tensor, 1 to REQUEST_MAX_TENSOR_NAME bytes without NUL */
    request_dtype dtype;
    const uint64_t *shape; /* [n_dims], at most REQUEST_MAX_DIMS; none: a single number */
    size_t n_dims;
    uint64_t offset; /* of the first byte, in the tensor */
    const uint8_t
        *data; /* [n_data], little-endian, row-major; lies inside the tensor, whole elements; maybe none */
    size_t n_data;
} request_chunk;

typedef struct request_commit {
    wire_text target;
    wire_text digest; /* REQUEST_DIGEST lower-case hex digits */
} request_commit;

typedef struct request_arena request_arena; /* the blocks that a request owns */

typedef struct request {
    request_type type;
    wire_text id;   /* 1..128 bytes */
    bool compress;  /* replies of 512 bytes or more are compressed */
    size_t n_bytes; /* of the message after expansion */
    union {
        struct {
            wire_text target; /* 1..128 bytes */
        } cancel;
        request_score score;
        request_input tokenize; /* TEXT or MESSAGES */
        struct {
            wire_ids tokens; /* maybe none */
        } detokenize;
        request_rollout rollout;
        struct {
            wire_text target; /* 1..128 bytes */
        } ack;
        struct {
            request_pause_mode mode;
        } pause;
        request_weights weights;
        request_chunk chunk;
        request_commit commit;
    };
    request_arena *arena;
} request;

/* Why there is no request, and how to tell the client. */
typedef struct request_failure {
    char id[WIRE_ID_BYTES + 1]; /* the request's id where it could be read, NUL-terminated; n_id 0: none */
    size_t n_id;                /* ids may hold NUL bytes */
    bool compress;              /* what the request says of its replies; true if it could not be read */
    wire_error error;
} request_failure;

/* Decode one frame.
 *   bytes        [n_bytes], borrowed for the call only
 *   max_message  bytes that the message may have after expansion
 * Cost: one walk that allocates nothing checks the structure first; memory is then at most about
 * (2 + REQUEST_OBJECT_MULTIPLE) * max_message.
 * Returns false with *failure filled and *out NULL; else *out is owned by the caller and ends with
 * request_free(), the allocator staying alive until then. */
bool request_decode(request **out, const void *bytes, size_t n_bytes, size_t max_message,
                    const wire_allocator *allocator, request_failure *failure);
void request_free(request *r); /* NULL does nothing */

/* Whether two rollouts ask for the same, compared after decoding and defaults, the ids and seeds of the
 * requests aside (those of prompts are compared): what decides between attaching to a known id and
 * `duplicate_id`.  The seeds are the caller's matter: who repeats a request may leave out the one that was
 * drawn for it, or give it. */
bool request_rollout_equal(const request_rollout *a, const request_rollout *b);

#endif
