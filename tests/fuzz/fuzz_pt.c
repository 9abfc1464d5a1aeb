/* Property: any bytes as a .pt file give a table of tensors whose elements can all be read, or an error;
 * nothing leaks. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "engine/pt_file.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool holds) {
    if (!holds) abort();
}

static void check_tensor(const pt_file *f, const tensor_info *t, size_t file_bytes) {
    size_t n = 1, bytes = t->n_elements * tensor_dtype_bytes(t->dtype);
    require(t->n_dims >= 0 && t->n_dims <= 4 && strlen(t->name) <= 200);
    for (int i = 0; i < t->n_dims; i++) n *= (size_t)t->dims[i];
    require(n == t->n_elements && n > 0 && bytes <= file_bytes);
    uint8_t *copy = malloc(bytes);
    require(copy && zip_read(pt_zip(f), t->offset, copy, bytes, NULL) == COP_OK);
    free(copy);
    require(pt_find(f, t->name) == t);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    int fd = memfd_create("pt", MFD_CLOEXEC);
    char path[64];
    require(fd >= 0 && write(fd, data, size) == (ssize_t)size);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    pt_file *f;
    cop_error err = {0};
    long live = mem_live();
    cop_status status = pt_open(&f, path, &err);
    require((f != NULL) == (status == COP_OK) && (status == COP_OK || err.message[0]));
    for (int i = 0; f && i < pt_n_tensors(f); i++) check_tensor(f, pt_tensor(f, i), size);
    pt_close(f);
    close(fd);
    require(mem_live() == live);
    return 0;
}
