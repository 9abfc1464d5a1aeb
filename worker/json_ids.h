/* Arrays of numbers as JSON.  Pure functions; any thread. */
#ifndef COP_JSON_IDS_H
#define COP_JSON_IDS_H

#include <jansson.h>

#include "engine/tokenizer.h"

/* Append the ids of a JSON array to *ids.  Errors: COP_EINVAL with key `key` or `key[i]` where it is no array
 * of ids within 0 .. vocab - 1; COP_ENOMEM. */
cop_status json_read_ids(const json_t *array, const char *key, int vocab, token_list *ids, cop_error *err);

/* New arrays, or NULL without memory. */
json_t *json_of_ids(const int32_t *ids, size_t n);
json_t *json_of_reals(const float *reals, size_t n);

#endif
