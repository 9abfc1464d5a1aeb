/* tokenizer.pkl: any bytes are refused with a message or give a tokenizer whose encoding decodes to what went
 * in. */
#include <assert.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "engine/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    int fd = memfd_create("tokenizer", 0);
    assert(fd >= 0 && write(fd, data, size) == (ssize_t)size);
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    tokenizer *t;
    cop_error err = {0};
    if (tokenizer_open(&t, path, &err) != COP_OK) {
        assert(!t && err.message[0]);
    } else {
        static const char text[] = "It's 1234 words\r\n and \xe4\xbd\xa0\xe5\xa5\xbd  x";
        token_list ids = {0};
        char *bytes;
        size_t n;
        assert(tokenizer_encode(t, text, sizeof text - 1, &ids, &err) == COP_OK);
        assert(tokenizer_decode(t, ids.ids, ids.n, &bytes, &n, &err) == COP_OK);
        assert(n == sizeof text - 1 && !memcmp(bytes, text, n));
        mem_free(bytes);
        token_list_free(&ids);
        tokenizer_close(t);
    }
    close(fd);
    return 0;
}
