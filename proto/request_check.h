/* One walk over a message before msgpack-c sees it.  Inside proto/ only.
 *
 * It allocates nothing, recurses nowhere, and proves what the decoder then relies on: every length and count
 * fits the bytes that are there, nesting and map sizes are bounded, keys are unique `str`, text is UTF-8,
 * there are no ext types and no trailing bytes, and the objects that msgpack-c builds stay within a budget.
 */
#ifndef WIRE_REQUEST_CHECK_H
#define WIRE_REQUEST_CHECK_H

#include "proto/wire.h"

typedef struct request_checked {
    wire_text id;        /* borrowed from the message; {0}: there is no usable one */
    bool compress;       /* false only where the message says so */
    size_t object_bytes; /* what msgpack-c allocates for arrays and maps */
} request_checked;

/* Check the n bytes of `message`; objects may take max_object_bytes.  False with *err filled (bad_request);
 * *out is valid even then, its id found wherever in the message it stands, unless the bytes are no
 * MessagePack map at all. */
bool request_check(request_checked *out, const uint8_t *message, size_t n, size_t max_object_bytes,
                   wire_error *err);

#endif
