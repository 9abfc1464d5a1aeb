/* Allocation, errors, and the Zstandard frame around a message. */
#include "proto/wire.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zstd.h>

#include "proto/wire_utf8.h"

#define SKIPPABLE_MAGIC 0x184D2A50u /* the lowest of sixteen */

void *wire_resize(const wire_allocator *allocator, void *block, size_t n_bytes) {
    assert(n_bytes > 0);
    return allocator ? allocator->resize(allocator->context, block, n_bytes) : realloc(block, n_bytes);
}

void wire_release(const wire_allocator *allocator, void *block) {
    if (allocator)
        allocator->release(allocator->context, block);
    else
        free(block);
}

wire_text wire_text_of(const char *string) {
    return string ? (wire_text){string, strlen(string)} : (wire_text){0};
}

void wire_buffer_free(wire_buffer *buffer, const wire_allocator *allocator) {
    wire_release(allocator, buffer->bytes);
    *buffer = (wire_buffer){0};
}

/* ---- Errors. */

/* `text` holds what snprintf() wrote of a string of n bytes: end it between two characters. */
static void end_text(char *text, size_t size, int n) {
    if (n < 0 || (size_t)n < size) return;
    size_t end = size - 1;
    /* The cut may have split a character: step back over its continuation bytes, then over its lead byte if
     * short. */
    size_t lead = end;
    while (lead > 0 && ((unsigned char)text[lead - 1] & 0xC0) == 0x80) lead--;
    if (lead > 0) lead--;
    text[wire_utf8_valid(text + lead, end - lead) ? end : lead] = 0;
}

bool wire_fail(wire_error *err, const char *code, const char *key, const char *format, ...) {
    va_list args;
    *err = (wire_error){.code = code};
    int n = snprintf(err->key, sizeof err->key, "%s", key ? key : "");
    end_text(err->key, sizeof err->key, n);
    va_start(args, format);
    n = vsnprintf(err->message, sizeof err->message, format, args);
    va_end(args);
    end_text(err->message, sizeof err->message, n);
    return false;
}

/* ---- Expanding. */

static uint32_t magic_of(const uint8_t *bytes, size_t n) {
    if (n < 4) return 0;
    return (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
}

static bool no_memory(wire_error *err, size_t n_bytes) {
    return wire_fail(err, WIRE_INTERNAL, NULL, "could not allocate %zu bytes for a message", n_bytes);
}

static bool too_long(wire_error *err, size_t max_message) {
    return wire_fail(
        err, WIRE_BAD_REQUEST, NULL,
        "cannot take a message of more than %zu bytes (--max-message): send fewer prompts at once",
        max_message);
}

static bool broken(wire_error *err, const char *why) {
    return wire_fail(err, WIRE_BAD_REQUEST, NULL, "cannot expand the Zstandard frame: %s", why);
}

/* The content of a frame that declares its size, into one block of that size. */
static bool expand_declared(wire_buffer *out, const void *bytes, size_t n_bytes, size_t size,
                            const wire_allocator *allocator, wire_error *err) {
    out->bytes = wire_resize(allocator, NULL, size ? size : 1);
    if (!out->bytes) return no_memory(err, size);
    out->n = ZSTD_decompress(out->bytes, size, bytes, n_bytes);
    if (ZSTD_isError(out->n)) return broken(err, ZSTD_getErrorName(out->n));
    return true;
}

/* Give *out room for more, at most max_message + 1 bytes in all: the one more tells "as long as the limit"
 * from "longer". */
static bool grow(wire_buffer *out, size_t *cap, size_t max_message, const wire_allocator *allocator) {
    size_t want = *cap ? *cap * 2 : 4096;
    if (want > max_message + 1) want = max_message + 1;
    void *block = wire_resize(allocator, out->bytes, want);
    if (!block) return false;
    out->bytes = block;
    *cap = want;
    return true;
}

static bool expand_stream(wire_buffer *out, ZSTD_DCtx *context, ZSTD_inBuffer in, size_t max_message,
                          const wire_allocator *allocator, wire_error *err) {
    size_t cap = 0, hint;
    do {
        if (out->n == cap && !grow(out, &cap, max_message, allocator)) return no_memory(err, cap * 2);
        ZSTD_outBuffer block = {out->bytes, cap, out->n};
        hint = ZSTD_decompressStream(context, &block, &in);
        if (ZSTD_isError(hint)) return broken(err, ZSTD_getErrorName(hint));
        if (block.pos > max_message) return too_long(err, max_message);
        if (hint && block.pos == out->n && in.pos == in.size) return broken(err, "it ends too early");
        out->n = block.pos;
    } while (hint);
    return true;
}

/* The content of a frame that does not tell its size: block by block, stopping at the limit. */
static bool expand_undeclared(wire_buffer *out, const void *bytes, size_t n_bytes, size_t max_message,
                              const wire_allocator *allocator, wire_error *err) {
    ZSTD_DCtx *context = ZSTD_createDCtx();
    if (!context) return no_memory(err, ZSTD_CStreamInSize());
    int window_log = 10; /* zstd's least; a window larger than the limit cannot be of use */
    while (window_log < 27 && (size_t)1 << window_log < max_message) window_log++;
    ZSTD_DCtx_setParameter(context, ZSTD_d_windowLogMax, window_log);
    bool ok = expand_stream(out, context, (ZSTD_inBuffer){bytes, n_bytes, 0}, max_message, allocator, err);
    ZSTD_freeDCtx(context);
    return ok;
}

static bool expand(wire_buffer *out, const void *bytes, size_t n_bytes, size_t max_message,
                   const wire_allocator *allocator, wire_error *err) {
    size_t frame_bytes = ZSTD_findFrameCompressedSize(bytes, n_bytes);
    if (ZSTD_isError(frame_bytes)) return broken(err, ZSTD_getErrorName(frame_bytes));
    if (frame_bytes != n_bytes)
        return wire_fail(
            err, WIRE_BAD_REQUEST, NULL,
            "cannot expand the message: %zu bytes follow its Zstandard frame, expected exactly one frame",
            n_bytes - frame_bytes);
    if (ZSTD_getDictID_fromFrame(bytes, n_bytes)) return broken(err, "it needs a dictionary");
    unsigned long long size = ZSTD_getFrameContentSize(bytes, n_bytes);
    if (size == ZSTD_CONTENTSIZE_ERROR) return broken(err, "its header is invalid");
    if (size == ZSTD_CONTENTSIZE_UNKNOWN)
        return expand_undeclared(out, bytes, n_bytes, max_message, allocator, err);
    if (size > max_message) return too_long(err, max_message);
    return expand_declared(out, bytes, n_bytes, (size_t)size, allocator, err);
}

bool wire_unwrap(wire_frame *out, const void *bytes, size_t n_bytes, size_t max_message,
                 const wire_allocator *allocator, wire_error *err) {
    assert(max_message > 0 && max_message < SIZE_MAX / 4);
    *out = (wire_frame){0};
    uint32_t magic = magic_of(bytes, n_bytes);
    if ((magic & ~15u) == SKIPPABLE_MAGIC)
        return wire_fail(
            err, WIRE_BAD_REQUEST, NULL,
            "cannot read a skippable Zstandard frame, expected a MessagePack map or one frame that holds it");
    if (magic != ZSTD_MAGICNUMBER) {
        if (n_bytes > max_message) return too_long(err, max_message);
        out->message = bytes, out->n = n_bytes;
        return true;
    }
    if (!expand(&out->owned, bytes, n_bytes, max_message, allocator, err)) {
        wire_frame_free(out, allocator);
        return false;
    }
    out->message = out->owned.bytes, out->n = out->owned.n;
    return true;
}

void wire_frame_free(wire_frame *frame, const wire_allocator *allocator) {
    wire_buffer_free(&frame->owned, allocator);
    *frame = (wire_frame){0};
}

/* ---- Compressing. */

bool wire_wrap(wire_buffer *message, bool compress, const wire_allocator *allocator) {
    if (!compress || message->n < WIRE_COMPRESS_BYTES) return true;
    size_t bound = ZSTD_compressBound(message->n);
    wire_buffer frame = {wire_resize(allocator, NULL, bound), 0};
    if (!frame.bytes) return false;
    frame.n = ZSTD_compress(frame.bytes, bound, message->bytes, message->n, ZSTD_CLEVEL_DEFAULT);
    if (ZSTD_isError(frame.n)) { /* there is room for any result, so zstd had no memory */
        wire_buffer_free(&frame, allocator);
        return false;
    }
    void *shorter = wire_resize(allocator, frame.bytes, frame.n);
    if (shorter) frame.bytes = shorter;
    wire_buffer_free(message, allocator);
    *message = frame;
    return true;
}
