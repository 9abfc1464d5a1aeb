/* Widening what a checkpoint holds to fp32. */
#ifndef COP_WIDEN_H
#define COP_WIDEN_H

#include "engine/checkpoint.h"

/* Elements of `dtype` to fp32: to[0, n).  bf16 and half widen exactly, doubles are rounded.  No alias. */
void widen(float *to, const void *from, size_t n, tensor_dtype dtype);

/* The first element that is NaN or infinite; n if there is none. */
size_t widen_find_infinite(const float *x, size_t n);

#endif
