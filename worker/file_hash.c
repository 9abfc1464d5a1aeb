/* XXH3-128 of a file's bytes. */
#include "worker/file_hash.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

void file_hash_hex(const XXH3_state_t *state, char hex[FILE_HASH_CHARS]) {
    XXH128_hash_t hash = XXH3_128bits_digest(state);
    snprintf(hex, FILE_HASH_CHARS, "%016llx%016llx", (unsigned long long)hash.high64,
             (unsigned long long)hash.low64);
}

cop_status file_hash_add(XXH3_state_t *state, int fd, const char *name, uint64_t n_bytes, cop_error *err) {
    uint8_t block[64 << 10];
    for (uint64_t done = 0; done < n_bytes;) {
        uint64_t left = n_bytes - done;
        ssize_t n = pread(fd, block, left < sizeof block ? (size_t)left : sizeof block, (off_t)done);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0)
            return cop_fail(err, COP_EIO, "could not read \"%s\": %s", name,
                            n < 0 ? strerror(errno) : "it became shorter");
        XXH3_128bits_update(state, block, (size_t)n);
        done += (uint64_t)n;
    }
    return COP_OK;
}
