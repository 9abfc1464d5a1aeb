/* The tensors of a state dict that torch.save wrote: a table of names, types, shapes and places
 * (NANOCHAT.md 4.2).
 *
 * Only contiguous tensors of floating types are accepted; each lies wholly inside its storage, each storage
 * inside the file, and together they are no larger than the file, so that what a reader allocates is bounded
 * by it. Immutable after pt_open; any thread. */
#ifndef COP_PT_FILE_H
#define COP_PT_FILE_H

#include "engine/checkpoint.h"
#include "engine/zip_file.h"

typedef struct pt_file pt_file;

/* Open `path`.  Errors: those of zip_open and pickle_read, and COP_EFORMAT, COP_EUNSUPPORTED for what is not
 * a state dict of such tensors; *out is then NULL. */
cop_status pt_open(pt_file **out, const char *path, cop_error *err);
void pt_close(pt_file *f);

/* The container, to read from. */
const zip_file *pt_zip(const pt_file *f);

/* Tensors, sorted by name. */
int pt_n_tensors(const pt_file *f);
const tensor_info *pt_tensor(const pt_file *f, int i);
const tensor_info *pt_find(const pt_file *f, const char *name); /* NULL if there is none */

/* Read elements [first, first + n) of a tensor, as they are in the file, into dst.  COP_EIO if they are no
 * longer all there. */
cop_status pt_read(const pt_file *f, const tensor_info *t, size_t first, size_t n, void *dst, cop_error *err);

#endif
