/* For tests that change a file's bytes: a copy of it. */
#ifndef COPY_FILE_H
#define COPY_FILE_H

#include <stdio.h>

static inline void copy_file(const char *from, const char *to) {
    char bytes[4096];
    size_t n;
    FILE *in = fopen(from, "rb"), *out = fopen(to, "wb");
    assert_true(in && out);
    while ((n = fread(bytes, 1, sizeof bytes, in)) > 0) assert_int_equal(fwrite(bytes, 1, n, out), n);
    fclose(in);
    fclose(out);
}

#endif
