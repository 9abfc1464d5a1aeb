/* Heads of MessagePack values. */
#include "proto/item.h"

/* By what follows the first byte, for C0..DF: how many bytes of length, and the fixed part of the body. */
typedef struct item_form {
    item_kind kind;
    uint8_t length_bytes, body_bytes;
} item_form;

static const item_form forms[32] = {
    {ITEM_SCALAR, 0, 0},                                        /* C0 nil */
    {ITEM_SCALAR, 0, 0},                                        /* C1 is never used; the walk refuses it */
    {ITEM_BOOL, 0, 0},   {ITEM_BOOL, 0, 0},                     /* C2 C3 */
    {ITEM_BIN, 1, 0},    {ITEM_BIN, 2, 0},    {ITEM_BIN, 4, 0}, /* C4.. */
    {ITEM_EXT, 1, 1},    {ITEM_EXT, 2, 1},    {ITEM_EXT, 4, 1}, /* C7..: the type is a byte */
    {ITEM_SCALAR, 0, 4}, {ITEM_SCALAR, 0, 8},                   /* CA CB floats */
    {ITEM_SCALAR, 0, 1}, {ITEM_SCALAR, 0, 2}, {ITEM_SCALAR, 0, 4}, {ITEM_SCALAR, 0, 8}, /* CC.. */
    {ITEM_SCALAR, 0, 1}, {ITEM_SCALAR, 0, 2}, {ITEM_SCALAR, 0, 4}, {ITEM_SCALAR, 0, 8}, /* D0.. */
    {ITEM_EXT, 0, 2},    {ITEM_EXT, 0, 3},    {ITEM_EXT, 0, 5},    {ITEM_EXT, 0, 9},    /* D4.. */
    {ITEM_EXT, 0, 17},                                                                  /* D8 */
    {ITEM_STR, 1, 0},    {ITEM_STR, 2, 0},    {ITEM_STR, 4, 0},                         /* D9.. */
    {ITEM_ARRAY, 2, 0},  {ITEM_ARRAY, 4, 0},                                            /* DC DD */
    {ITEM_MAP, 2, 0},    {ITEM_MAP, 4, 0},                                              /* DE DF */
};

const char *item_next(item_reader *r, item *it) {
    if (r->pos >= r->n) return "it ends too early";
    uint8_t b = r->bytes[r->pos++];
    *it = (item){ITEM_SCALAR, b, 0, 0};
    if (b >= 0x80 && b <= 0x8F)
        it->kind = ITEM_MAP, it->n = b & 0x0F;
    else if (b >= 0x90 && b <= 0x9F)
        it->kind = ITEM_ARRAY, it->n = b & 0x0F;
    else if (b >= 0xA0 && b <= 0xBF)
        it->kind = ITEM_STR, it->n = b & 0x1F;
    else if (b == 0xC1)
        return "byte C1 has no meaning";
    else if (b >= 0xC0 && b <= 0xDF) {
        const item_form *form = &forms[b - 0xC0];
        if (form->length_bytes > r->n - r->pos) return "it ends too early";
        for (int i = 0; i < form->length_bytes; i++) it->n = it->n << 8 | r->bytes[r->pos++];
        it->kind = form->kind;
        it->n += form->body_bytes;
    }
    it->start = r->pos;
    if (it->kind == ITEM_MAP) it->n *= 2;
    if (it->n > r->n - r->pos) return "it ends too early"; /* an element takes at least a byte */
    if (it->kind < ITEM_ARRAY) r->pos += it->n;
    return NULL;
}

const char *item_skip(item_reader *r, uint64_t n) {
    while (n > 0) {
        item it;
        const char *why = item_next(r, &it);
        if (why) return why;
        n--;
        if (it.kind >= ITEM_ARRAY) n += it.n;
    }
    return NULL;
}
