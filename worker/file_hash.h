/* XXH3-128 of a file's bytes, in canonical hex: what `xxhsum -H2 FILE` prints.  Any thread. */
#ifndef COP_FILE_HASH_H
#define COP_FILE_HASH_H

#include <xxhash.h>

#include "kernels/base.h"

#define FILE_HASH_CHARS 33

void file_hash_hex(const XXH3_state_t *state, char hex[FILE_HASH_CHARS]);

/* Add the first n_bytes of the file.  `name` is for messages.  The file's position stays.  COP_EIO, also
 * where it has fewer. */
cop_status file_hash_add(XXH3_state_t *state, int fd, const char *name, uint64_t n_bytes, cop_error *err);

#endif
