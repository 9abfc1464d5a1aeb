/* What every wire message shares: text, buffers, the error that goes to a client, the Zstandard frame around
 * a message.
 *
 * proto/ knows libc, msgpack-c and zstd and nothing else of this project, so that it can be fuzzed and
 * shipped alone. Blocks that a caller keeps come from the caller's wire_allocator; msgpack-c and zstd use
 * malloc for their scratch, which is bounded (README.md, "Limits") and gone when a function returns.  No
 * state is shared: any thread. */
#ifndef WIRE_WIRE_H
#define WIRE_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define WIRE_PROTOCOL 1
#define WIRE_MAX_MESSAGE ((size_t)64 << 20) /* the default of `max_message`, in bytes */
#define WIRE_COMPRESS_BYTES 512             /* replies at least this long are compressed */
#define WIRE_SPLIT_BYTES ((size_t)16 << 20) /* a `samples` message longer than this is sent as several */
#define WIRE_ID_BYTES 128                   /* the longest `id` of a request */

/* Memory.  NULL in place of a wire_allocator means realloc and free. */
typedef struct wire_allocator {
    void *(*resize)(void *context, void *block,
                    size_t n_bytes);             /* like realloc: block NULL allocates, NULL fails and
                                                    keeps the block; n_bytes is never 0 */
    void (*release)(void *context, void *block); /* like free: NULL does nothing */
    void *context;
} wire_allocator;

void *wire_resize(const wire_allocator *allocator, void *block, size_t n_bytes);
void wire_release(const wire_allocator *allocator, void *block);

/* UTF-8 that may hold NUL bytes.  Decoded text also has a NUL after its n bytes.  {0}: absent, where that is
 * possible; the empty string has bytes != NULL. */
typedef struct wire_text {
    const char *bytes;
    size_t n;
} wire_text;

wire_text wire_text_of(const char *string); /* borrows a C string; NULL gives {0} */

/* Token ids. */
typedef struct wire_ids {
    const uint32_t *ids;
    size_t n;
} wire_ids;

/* An encoded message, ready for a socket.  Ends with wire_buffer_free() and the allocator that made it. */
typedef struct wire_buffer {
    uint8_t *bytes;
    size_t n;
} wire_buffer;

void wire_buffer_free(wire_buffer *buffer, const wire_allocator *allocator); /* leaves it zeroed */

/* ---- Errors: the codes of the protocol. */
#define WIRE_BAD_REQUEST "bad_request"
#define WIRE_TOO_LONG "too_long"
#define WIRE_TOO_LARGE "too_large"
#define WIRE_UNKNOWN_TYPE "unknown_type"
#define WIRE_UNSUPPORTED "unsupported"
#define WIRE_OVERLOADED "overloaded"
#define WIRE_DRAINING "draining"
#define WIRE_ASLEEP "asleep"
#define WIRE_NOT_FOUND "not_found"
#define WIRE_DUPLICATE_ID "duplicate_id"
#define WIRE_MODEL_ERROR "model_error"
#define WIRE_TIMEOUT "timeout"
#define WIRE_INTERNAL "internal"

typedef struct wire_error {
    const char *code; /* one of the above; NULL: no error */
    char key[160]; /* path of the offending key, such as "prompts[3].tokens"; "": none.  Valid UTF-8, cut if
                      longer */
    char message[512];  /* what was wrong and what would be right.  Valid UTF-8 */
    double retry_after; /* seconds, with `overloaded`; 0: not told */
} wire_error;

/* Fill *err and return false.  `code` is one of the constants, key may be NULL, text that is too long is cut
 * between two characters. */
bool wire_fail(wire_error *err, const char *code, const char *key, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* ---- Frames. */

/* The message inside a frame.  `message` borrows the frame, or `owned` where it had to be expanded. */
typedef struct wire_frame {
    const uint8_t *message;
    size_t n;
    wire_buffer owned;
} wire_frame;

/* Find the message in the n_bytes of `bytes`: bare MessagePack as it stands, or the content of exactly one
 * Zstandard frame.  Memory: at most max_message bytes, whatever the frame declares; without a declared size
 * never more than about twice what came out.  Returns false with *err filled (bad_request: too long, broken,
 * several frames, trailing bytes, a skippable frame, a dictionary; internal: no memory); *out is then zeroed.
 * End with wire_frame_free(). */
bool wire_unwrap(wire_frame *out, const void *bytes, size_t n_bytes, size_t max_message,
                 const wire_allocator *allocator, wire_error *err);
void wire_frame_free(wire_frame *frame, const wire_allocator *allocator);

/* Replace *message by its Zstandard frame, content size declared, if `compress` and it has
 * WIRE_COMPRESS_BYTES or more. False without memory; *message is then unchanged. */
bool wire_wrap(wire_buffer *message, bool compress, const wire_allocator *allocator);

#endif
