/* Records that are finished but wait for older lines: DIR/held.zst, so that a slow line costs nothing that
 * was finished behind it when the run is stopped.
 *
 * The file is a snapshot, replaced at one stroke; lines that have got into a shard since then may still be in
 * it. It belongs to whoever has the folder's lock (dataset.h).  One thread. */
#ifndef COP_HELD_RECORDS_H
#define COP_HELD_RECORDS_H

#include "kernels/base.h"

#define HELD_FILE "held.zst"

typedef struct held_record {
    uint64_t line;
    const uint8_t *bytes; /* [n] an encoded record */
    size_t n;
} held_record;

/* Replace the snapshot by these n records, or remove it if there are none.  COP_EIO, COP_ENOMEM. */
cop_status held_records_write(const char *dir, const held_record *records, size_t n, cop_error *err);

typedef struct held_records {
    held_record *records; /* [n] by line */
    size_t n, cap;
} held_records;

/* The records of lines >= next_line.  A snapshot that is missing or damaged holds fewer, or none: those lines
 * are generated again.  COP_EIO, COP_ENOMEM. */
cop_status held_records_read(held_records *out, const char *dir, uint64_t next_line, cop_error *err);
void held_records_free(held_records *h); /* zeroed does nothing */

#endif
