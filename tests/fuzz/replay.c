/* Instead of libFuzzer: call the target once for each file named on the command line. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The whole file in a block of exactly its size, so that a sanitizer sees a read past its end. */
static uint8_t *read_file(const char *path, size_t *n) {
    FILE *f = fopen(path, "rb");
    if (!f || fseek(f, 0, SEEK_END)) return NULL;
    long size = ftell(f);
    if (size < 0) return NULL;
    rewind(f);
    uint8_t *data = malloc(size ? (size_t)size : 1);
    *n = data ? fread(data, 1, (size_t)size, f) : 0;
    fclose(f);
    if (data && *n == (size_t)size) return data;
    free(data);
    return NULL;
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        size_t n = 0;
        uint8_t *data = read_file(argv[i], &n);
        if (!data) {
            fprintf(stderr, "could not read %s\n", argv[i]);
            return 1;
        }
        LLVMFuzzerTestOneInput(data, n);
        free(data);
    }
    printf("%d inputs replayed\n", argc - 1);
    return 0;
}
