/* Tensors that a client sends: chunks of bytes go in on the service's thread, and come out as a source of
 * weights on the updater's.
 *
 *   OPEN --- failure ----------------------> FAILED --- commit (gets the same error) ---> OVER
 *     |                                                                                    ^
 *     +----- commit -----------------------------------------------------------------------+
 *
 * A chunk is checked when it is read: the name, type and shape of the tensor, and that nothing is missing
 * before it.  What is wrong is told once, as the error of update_stream_end().  Two threads use a stream;
 * each function says which. */
#ifndef COP_UPDATE_STREAM_H
#define COP_UPDATE_STREAM_H

#include "worker/post.h"

#define UPDATE_STREAM_MAX_NAME 255 /* bytes of a tensor's name, printable ASCII: so files have them, too */

typedef struct update_stream update_stream;

/* For a `weights` request with a stream, which is borrowed for the call.  NULL without memory.
 *   silence_sec  a reader that waits longer for anything to come fails */
update_stream *update_stream_open(const request *r, double silence_sec);
void update_stream_close(update_stream *s); /* no thread uses it any more */

/* ---- The service's thread. */
/* Whether chunks with that target belong here. */
bool update_stream_is(const update_stream *s, wire_text target);
/* A chunk.  Taken, and dropped if the stream has failed; false: it is over or committed. */
bool update_stream_put(update_stream *s, request *chunk);
/* Taken if it returns true.  Else err->code is NULL where the stream is over, or tells how it failed. */
bool update_stream_commit(update_stream *s, const client_id *client, request *commit, wire_error *err);
/* Bytes of chunks that wait. */
size_t update_stream_waiting(update_stream *s);
/* The reader fails now, whatever it waits for. */
void update_stream_stop(update_stream *s);

/* ---- The updater's thread. */
weights_source update_stream_source(update_stream *s);
/* What the source found wrong; code NULL: nothing. */
const wire_error *update_stream_failure(const update_stream *s);
/* It was read, or failed (why not NULL).  *commit: the commit, which the caller then owns, or NULL. */
void update_stream_end(update_stream *s, const wire_error *why, client_id *client, request **commit);

#endif
