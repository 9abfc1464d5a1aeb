/* Samples for those who look at them: from a data set, a shard or JSON Lines, one prompt after the other, as
 * JSON objects (record_json.h).  One thread. */
#ifndef COP_SAMPLE_SOURCE_H
#define COP_SAMPLE_SOURCE_H

#include <jansson.h>

#include "kernels/base.h"

typedef struct sample_source sample_source;

/* path: a folder or a shard; a file of JSON Lines, as `generate -o -` and `export` print, told by its first
 * byte, "{" or space; or "-", either of the two from stdin. */
cop_status sample_source_open(sample_source **out, const char *path, cop_error *err);
void sample_source_close(sample_source *s); /* NULL does nothing */

/* The objects of the next prompt, a new array: all of a record, or the lines of JSON Lines that stand
 * together and have the same prompt and prompt_id; at least one.  Failures ({line, error}) stand alone.  NULL
 * at the end.  In JSON Lines the objects are what the lines hold, whatever that is.  Errors: as
 * record_source_next() and record_to_json(); as input_next() and jsonl_parse(). */
cop_status sample_source_next(sample_source *s, json_t **out, cop_error *err);

const json_t *sample_source_manifest(const sample_source *s); /* NULL: no folder */

/* A data set that is not complete grows: say on stderr that this is no more than what it holds by now. */
void sample_source_tell_state(const sample_source *s);

#endif
