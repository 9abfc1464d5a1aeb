/* Zstandard frames of a shard: made one at a time, and read one after the other with their offsets.
 *
 * A frame declares its content size and ends with a checksum of its content, so that a whole frame is told
 * from a torn one.  One thread. */
#ifndef COP_FRAMES_H
#define COP_FRAMES_H

#include "kernels/base.h"

#define FRAME_BYTES ((size_t)64 << 10)    /* records are collected until they are so many bytes */
#define FRAME_MAX_BYTES ((size_t)1 << 30) /* the longest content that is written or read */

typedef struct frame_encoder frame_encoder;

/* COP_ENOMEM. */
cop_status frame_encoder_open(frame_encoder **out, cop_error *err);
void frame_encoder_close(frame_encoder *e); /* NULL does nothing */

/* The frame of the n bytes (1 .. FRAME_MAX_BYTES); it is borrowed until the next call.  COP_ENOMEM. */
cop_status frame_encode(frame_encoder *e, const uint8_t *bytes, size_t n, const uint8_t **frame,
                        size_t *n_frame, cop_error *err);

/* write(2) all n bytes.  False: errno tells. */
bool write_all(int fd, const void *bytes, size_t n);

typedef enum frame_kind {
    FRAME_WHOLE,
    FRAME_END,   /* the bytes end here, between two frames */
    FRAME_TORN,  /* the bytes end within this frame */
    FRAME_BROKEN /* this is no frame, or its content is not what its checksum says; `why` tells */
} frame_kind;

/* What stands at bytes [start, end) of what is read.  After anything but FRAME_WHOLE nothing follows, and
 * `end` is how far was read. */
typedef struct shard_frame {
    frame_kind kind;
    uint64_t start, end;
    const uint8_t *bytes; /* [n] the content of a whole frame, borrowed until the next call */
    size_t n;
    const char *why;
} shard_frame;

typedef struct frame_reader frame_reader;

/* Read from where `fd` stands, which may be a pipe; offsets count from there.  fd and `name`, which messages
 * call it, are borrowed until the reader is closed.  COP_ENOMEM. */
cop_status frame_reader_open(frame_reader **out, int fd, const char *name, cop_error *err);
void frame_reader_close(frame_reader *r); /* NULL does nothing */

/* The next frame.  Memory: in proportion to the content of the longest frame so far.  COP_EIO, COP_ENOMEM. */
cop_status frame_reader_next(frame_reader *r, shard_frame *out, cop_error *err);

/* Whether a whole frame with content begins anywhere from `offset` on in the file: then what stands there is
 * no torn end.  Moves the file's position. */
cop_status frames_follow(bool *out, int fd, const char *name, uint64_t offset, cop_error *err);

#endif
