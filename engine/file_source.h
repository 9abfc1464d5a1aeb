/* The tensors of a .pt file as a source of weights.  One thread at a time. */
#ifndef COP_FILE_SOURCE_H
#define COP_FILE_SOURCE_H

#include "engine/engine.h"
#include "engine/pt_file.h"

typedef struct file_source {
    const pt_file *file; /* borrowed */
    int n_given;         /* tensors that next() gave */
} file_source;

/* A source that gives every tensor of the file; `s` is set up here and must stay where it is.  finish() looks
 * whether the file is still the one that was opened. */
weights_source file_source_of(file_source *s, const pt_file *file);

#endif
