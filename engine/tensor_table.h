/* The tensors that a model consists of: names and shapes, sorted by name.  What new weights are checked
 * against as they come.  Immutable once it was made; any thread. */
#ifndef COP_TENSOR_TABLE_H
#define COP_TENSOR_TABLE_H

#include "engine/checkpoint.h"

typedef struct tensor_table { /* zeroed: no tensors */
    int n;
    tensor_info *tensors; /* [n] the dtypes and offsets are those of the checkpoint that it was made from */
    char *names;          /* that they point to */
} tensor_table;

/* The tensors of a checkpoint, whose shapes checkpoint_open() has checked; nothing of it is borrowed.
 * Errors: COP_ENOMEM; *out is then zeroed. */
cop_status tensor_table_init(tensor_table *out, const checkpoint *c, cop_error *err);
void tensor_table_free(tensor_table *t);

/* Whether `got` is the tensor with index `i`, of 0 to n: that name and shape, of any dtype.  NULL: nothing
 * more came, as it should be at n.  Errors: COP_EFORMAT, which tells what is missing, unknown, out of order
 * or misshaped. */
cop_status tensor_table_expect(const tensor_table *t, int i, const tensor_info *got, cop_error *err);

#endif
