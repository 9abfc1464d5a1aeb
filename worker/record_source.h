/* Records of a data set, read one after the other: from a folder, a shard, or stdin.  One thread. */
#ifndef COP_RECORD_SOURCE_H
#define COP_RECORD_SOURCE_H

#include <jansson.h>

#include "kernels/base.h"
#include "proto/shard.h"

typedef struct record_source record_source;

/* path: a folder (its shards in the order of the manifest, then one that is still growing), a shard, or "-".
 */
cop_status record_source_open(record_source **out, const char *path, cop_error *err);
void record_source_close(record_source *s); /* NULL does nothing */

/* The next record, borrowed until the next call or the end of the source.  *more is false at the end.  What
 * stands behind the whole frames of a folder's growing shard is no error, it is not there yet or was left by
 * a crash, unless whole frames follow it; anywhere else COP_EFORMAT names file and offset. */
cop_status record_source_next(record_source *s, const shard_view **out, bool *more, cop_error *err);

const json_t *record_source_manifest(const record_source *s); /* NULL: no folder */

#endif
