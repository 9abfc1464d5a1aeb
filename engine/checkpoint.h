/* A nanochat checkpoint on disk: the newest model_*.pt (or --step) with its meta_*.json, its tensors by name,
 * and the architecture that keys, shapes and meta imply.  Reads with pread and never maps the file, so one
 * that changes or shrinks meanwhile is an error and not a crash.  One thread at a time. */
#ifndef COP_CHECKPOINT_H
#define COP_CHECKPOINT_H

#include "engine/arch.h"

typedef enum tensor_dtype { TENSOR_F32, TENSOR_BF16, TENSOR_F16, TENSOR_F64 } tensor_dtype;
const char *tensor_dtype_name(tensor_dtype dtype); /* "F32", ... */
size_t tensor_dtype_bytes(tensor_dtype dtype);

typedef struct tensor_info {
    const char *name; /* `_orig_mod.` stripped */
    tensor_dtype dtype;
    int n_dims;
    int64_t dims[4];
    size_t n_elements;
    uint64_t offset; /* of the first element in the file; elements are contiguous, row-major, little-endian */
} tensor_info;

/* What the user may override or choose.  Zeroed: nothing. */
typedef struct checkpoint_options {
    int64_t step;               /* < 0: the newest */
    const char *tokenizer;      /* directory or file, NULL: found as nanochat lays it out */
    float softcap;              /* 0: as detected */
    const char *window_pattern; /* NULL: as detected */
    const char *rope_table;     /* "bf16", "fp32", NULL */
    int sequence_len;           /* 0: the meta file's */
    int short_window;           /* 0: as the generation says */
} checkpoint_options;
checkpoint_options checkpoint_defaults(void);

typedef struct checkpoint checkpoint;
struct pt_file; /* engine/pt_file.h */

/* Open the checkpoint at `path`: a directory that holds model_*.pt and meta_*.json (flat, as published), or
 * nanochat's own layout.  Everything about shapes, dtypes and config is checked here. Errors: COP_ENOTFOUND,
 * COP_EIO, COP_EFORMAT, COP_EUNSUPPORTED (other formats, V1 to V3, engram, MoE and forks, each by name),
 * COP_EINVAL (an override), COP_ENOMEM; *out is then NULL. */
cop_status checkpoint_open(checkpoint **out, const char *path, const checkpoint_options *options,
                           cop_error *err);
void checkpoint_close(checkpoint *c);

const arch *checkpoint_arch(const checkpoint *c);
const char *checkpoint_model_path(const checkpoint *c);     /* the .pt file */
const char *checkpoint_tokenizer_path(const checkpoint *c); /* tokenizer.pkl, or NULL if none was found */
int64_t checkpoint_step(const checkpoint *c);

const struct pt_file *checkpoint_file(const checkpoint *c); /* the same, to read from */
/* What bears on the architecture among the options that it was opened with; the strings live as long as it.
 */
const checkpoint_options *checkpoint_overrides(const checkpoint *c);

/* What had to be assumed (softcap, window pattern, ...), one sentence each, for inspect and for warnings. */
int checkpoint_n_notes(const checkpoint *c);
const char *checkpoint_note(const checkpoint *c, int i);

/* Tensors, sorted by name. */
int checkpoint_n_tensors(const checkpoint *c);
const tensor_info *checkpoint_tensor(const checkpoint *c, int i);
const tensor_info *checkpoint_find(const checkpoint *c, const char *name); /* NULL if there is none */

/* Read elements [first, first + n) of a tensor, as they are in the file, into dst.  COP_EIO if the file
 * changed. */
cop_status checkpoint_read(checkpoint *c, const tensor_info *t, size_t first, size_t n, void *dst,
                           cop_error *err);

/* Fail with COP_EIO if the file is no longer the one that was opened (size, mtime, inode).  Call after the
 * last read. */
cop_status checkpoint_unchanged(checkpoint *c, cop_error *err);

#endif
