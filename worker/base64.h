/* Base64 (RFC 4648, with padding).  Pure; any thread. */
#ifndef COP_BASE64_H
#define COP_BASE64_H

#include <stddef.h>

/* The encoding of `n` bytes as a new NUL-terminated string (mem_free), or NULL if there is no memory. */
char *base64_encode(const char *bytes, size_t n);

#endif
