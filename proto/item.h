/* The heads of MessagePack values, read without allocating or recursing: what a walk over bytes that nobody
 * has checked stands on.  Inside proto/ only. */
#ifndef WIRE_ITEM_H
#define WIRE_ITEM_H

#include <stddef.h>
#include <stdint.h>

typedef enum item_kind {
    ITEM_SCALAR, /* nil, numbers */
    ITEM_BOOL,
    ITEM_STR,
    ITEM_BIN,
    ITEM_EXT,
    ITEM_ARRAY,
    ITEM_MAP
} item_kind;

typedef struct item {
    item_kind kind;
    uint8_t first; /* the byte that it starts with */
    uint64_t n;    /* bytes of the body, or elements (a map has two per pair) */
    size_t start;  /* of the body, in the message */
} item;

typedef struct item_reader {
    const uint8_t *bytes;
    size_t n, pos;
} item_reader;

/* Read the head of the next item and step over it and its body (not over elements).  Returns NULL, or what is
 * wrong; every length and count then fits the bytes that are there. */
const char *item_next(item_reader *r, item *it);

/* Step over n items with all that is in them: a count is enough, whatever their nesting. */
const char *item_skip(item_reader *r, uint64_t n);

#endif
