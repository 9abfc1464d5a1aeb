/* The ZIP container of torch.save, read with pread: entries are stored, never compressed, in one folder, and
 * their places are checked before anything of them is read (NANOCHAT.md 4.1, 4.3).
 *
 * The central directory is the truth; local headers only have to agree on name and method.  zip64 is
 * supported, since every file that torch writes has its records.  CRCs are not verified: torch can be told to
 * write wrong ones.  The file is never mapped, so one that shrinks meanwhile is an error and not a crash.
 * Immutable after zip_open; any thread. */
#ifndef COP_ZIP_FILE_H
#define COP_ZIP_FILE_H

#include "kernels/base.h"

typedef struct zip_entry {
    const char *name; /* without the folder; NUL-terminated */
    uint64_t offset;  /* of its bytes in the file */
    uint64_t size;
} zip_entry;

typedef struct zip_file zip_file;

/* Open the archive at `path`, a regular file.
 * Errors: COP_ENOTFOUND, COP_EIO, COP_EFORMAT, COP_EUNSUPPORTED (other formats by name, compression,
 * encryption), COP_ENOMEM; *out is then NULL. */
cop_status zip_open(zip_file **out, const char *path, cop_error *err);
void zip_close(zip_file *z);
const char *zip_path(const zip_file *z);
uint64_t zip_file_bytes(const zip_file *z);

/* The entry of that name below the folder ("data.pkl", "data/0"), or NULL. */
const zip_entry *zip_find(const zip_file *z, const char *name);

/* Read `n` bytes at `offset` of the file into dst.  COP_EIO if they are no longer all there. */
cop_status zip_read(const zip_file *z, uint64_t offset, void *dst, size_t n, cop_error *err);

/* COP_EIO unless the path still leads to the file that was opened, with the same size and time of change. */
cop_status zip_unchanged(const zip_file *z, cop_error *err);

#endif
