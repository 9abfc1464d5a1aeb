/* Any bytes get an answer or no output, at once, and the same one twice. */
#include <stdlib.h>
#include <string.h>

#include "engine/calculator.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    char *first, *second;
    if (calculator_eval((const char *)data, n, &first, NULL) != COP_OK) abort();
    if (calculator_eval((const char *)data, n, &second, NULL) != COP_OK) abort();
    if (!first != !second || (first && strcmp(first, second) != 0)) abort();
    /* A number that was printed is an expression for itself (inf, nan and 1e+20 have letters; so have
     * strings). */
    if (first && strspn(first, "0123456789.-") == strlen(first)) {
        char *again;
        if (calculator_eval(first, strlen(first), &again, NULL) != COP_OK) abort();
        bool is_count =
            memchr(data, '\'', n) || memchr(data, '"', n); /* whose strings may print as anything */
        if (!is_count && (!again || strcmp(first, again) != 0)) abort();
        mem_free(again);
    }
    mem_free(first);
    mem_free(second);
    return 0;
}
