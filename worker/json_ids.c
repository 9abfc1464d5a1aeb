/* Arrays of numbers as JSON. */
#include "worker/json_ids.h"

#include <stdio.h>

static cop_status refuse_id(cop_error *err, const char *key, size_t i, int vocab) {
    cop_status status = cop_fail(err, COP_EINVAL, "it is not a token id: the vocabulary is 0..%d", vocab - 1);
    if (err) snprintf(err->key, sizeof err->key, "%s[%zu]", key, i);
    return status;
}

cop_status json_read_ids(const json_t *array, const char *key, int vocab, token_list *ids, cop_error *err) {
    if (!json_is_array(array)) {
        cop_fail(err, COP_EINVAL, "it is not a list of token ids");
        if (err) snprintf(err->key, sizeof err->key, "%s", key);
        return COP_EINVAL;
    }
    for (size_t i = 0; i < json_array_size(array); i++) {
        const json_t *value = json_array_get(array, i);
        json_int_t id = json_integer_value(value); /* 0 for anything else */
        if (!json_is_integer(value) || id < 0 || id >= vocab) return refuse_id(err, key, i, vocab);
        cop_status status = token_list_push(ids, (int32_t)id, err);
        if (status != COP_OK) return status;
    }
    return COP_OK;
}

/* Append and take a value; false without memory, *array then gone. */
static bool append(json_t **array, json_t *value) {
    if (*array && json_array_append_new(*array, value) == 0) return true;
    json_decref(*array);
    *array = NULL;
    return false;
}

json_t *json_of_ids(const int32_t *ids, size_t n) {
    json_t *array = json_array();
    for (size_t i = 0; i < n; i++)
        if (!append(&array, json_integer(ids[i]))) break;
    return array;
}

json_t *json_of_reals(const float *reals, size_t n) {
    json_t *array = json_array();
    for (size_t i = 0; i < n; i++)
        if (!append(&array, json_real(reals[i]))) break;
    return array;
}
