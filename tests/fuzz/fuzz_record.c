/* Property: any bytes are refused as a record, or are one that is converted to JSON or refused; what was
 * converted can be printed, and shown without a control character reaching the terminal. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "worker/record_json.h"
#include "worker/show_prompt.h"

static void require(bool holds) {
    if (!holds) abort();
}

static void check_shown(const json_t *objects, bool logprobs) {
    char *text = NULL;
    size_t n = 0;
    FILE *out = open_memstream(&text, &n);
    require(out);
    show_view view = {.page.out = out, .logprobs = logprobs, .filter.sample = -1};
    cop_error err;
    bool shown;
    cop_status status = show_prompt(&view, objects, &shown, &err);
    require(status == COP_OK || status == COP_EINVAL); /* an id beyond 2^31 */
    fclose(out);
    for (size_t i = 0; i < n; i++)
        require((unsigned char)text[i] >= 0x20 ? text[i] != 0x7F : text[i] == '\n' || text[i] == '\t');
    free(text);
}

static void check_objects(const json_t *objects) {
    char *text = json_dumps(objects, JSON_REAL_PRECISION(9));
    require(text);
    free(text);
    if (json_array_size(objects) == 0) return;
    check_shown(objects, false);
    check_shown(objects, true);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    shard_view view;
    wire_error why;
    if (!shard_read(&view, data, size, &why)) return 0;
    cop_error err;
    json_t *objects;
    cop_status status = record_to_json(&objects, &view, &err);
    require(status == COP_OK || status == COP_EFORMAT);
    require((status == COP_OK) == (objects != NULL));
    if (objects) check_objects(objects);
    json_decref(objects);
    shard_view_free(&view);
    require(mem_live() == 0);
    return 0;
}
