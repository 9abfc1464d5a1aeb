/* Reading the container of torch.save.
 *
 *   local header, name, extra | data | descriptor     once per entry
 *   central directory                                  one record per entry: name, size, place of its local
 * header zip64 end record, zip64 locator                    64-bit count, size and place of the directory end
 * record                                         the same in 16 and 32 bits, all ones where they do not fit
 *
 * Everything is found from the end backwards; each place and length is compared with what precedes it before
 * use. */
#include "engine/zip_file.h"

#include <assert.h>
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    LOCAL_BYTES = 30,
    CENTRAL_BYTES = 46,
    END_BYTES = 22,
    LOCATOR_BYTES = 20,
    END64_BYTES = 56,
    MAX_COMMENT = 65535,
    MAX_ENTRIES = 100000,
    MAX_DIRECTORY_BYTES = 16 << 20,
    MAX_NAME = 255
};
static const uint32_t LOCAL_MAGIC = 0x04034b50, CENTRAL_MAGIC = 0x02014b50, END_MAGIC = 0x06054b50,
                      LOCATOR_MAGIC = 0x07064b50, END64_MAGIC = 0x06064b50;

typedef struct entry {
    zip_entry public;         /* first, so that zip_find can return it */
    const uint8_t *full_name; /* in the directory, not terminated */
    size_t full_name_len;
    uint64_t header; /* place of the local header */
} entry;

struct zip_file {
    int fd;
    char *path;
    struct stat stat; /* when it was opened */
    uint64_t size;
    uint64_t directory, directory_bytes; /* place of the central directory */
    uint64_t end;                        /* where the first of the end records starts */
    uint8_t *central;                    /* the central directory's bytes */
    char *names;
    entry *entries; /* sorted by name */
    size_t n_entries;
};

/* ---- Bytes. */

static uint64_t le(const uint8_t *p, int n) {
    uint64_t x = 0;
    while (n--) x = x << 8 | p[n];
    return x;
}
static uint16_t le16(const uint8_t *p) { return (uint16_t)le(p, 2); }
static uint32_t le32(const uint8_t *p) { return (uint32_t)le(p, 4); }
static uint64_t le64(const uint8_t *p) { return le(p, 8); }

/* Whether [at, at + n) lies within [0, limit). */
static bool within(uint64_t at, uint64_t n, uint64_t limit) { return at <= limit && n <= limit - at; }

cop_status zip_read(const zip_file *z, uint64_t offset, void *dst, size_t n, cop_error *err) {
    if (!within(offset, n, z->size))
        return cop_fail(err, COP_EFORMAT, "\"%s\" has no %zu bytes at %llu: it is cut off", z->path, n,
                        (unsigned long long)offset);
    for (size_t done = 0; done < n;) {
        ssize_t got = pread(z->fd, (char *)dst + done, n - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return cop_fail(err, COP_EIO, "could not read \"%s\": %s", z->path, strerror(errno));
        if (got == 0) return cop_fail(err, COP_EIO, "could not read \"%s\": it shrank meanwhile", z->path);
        done += (size_t)got;
    }
    return COP_OK;
}

static bool same_file(const struct stat *a, const struct stat *b) {
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino && a->st_size == b->st_size &&
           a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

cop_status zip_unchanged(const zip_file *z, cop_error *err) {
    struct stat now, there;
    if (fstat(z->fd, &now) || stat(z->path, &there) || !same_file(&now, &z->stat) ||
        !same_file(&there, &z->stat))
        return cop_fail(err, COP_EIO, "\"%s\" changed while it was read", z->path);
    return COP_OK;
}

/* ---- What kind of file it is. */

/* Refuse other known formats by name, from the first bytes. */
static cop_status check_magic(const zip_file *z, cop_error *err) {
    static const uint8_t legacy[] = {0x80, 2,    0x8a, 10,   0x6c, 0xfc, 0x9c, 0x46,
                                     0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19, 0x2e};
    uint8_t head[265] = {0};
    size_t n = z->size < sizeof head ? (size_t)z->size : sizeof head;
    cop_status status = zip_read(z, 0, head, n, err);
    if (status) return status;
    if (n >= 4 && le32(head) == LOCAL_MAGIC) return COP_OK;
    const char *other = NULL;
    if (!memcmp(head, legacy, sizeof legacy))
        other = "torch's format from before 1.6: save it again with a newer torch";
    else if (!memcmp(head, "GGUF", 4))
        other = "a GGUF file, which is not supported yet";
    else if (!memcmp(head + 257, "ustar", 5))
        other = "a tar archive: unpack it";
    else if (head[8] == '{')
        other = "a safetensors file, which is not supported yet";
    if (other) return cop_fail(err, COP_EUNSUPPORTED, "\"%s\" is %s", z->path, other);
    return cop_fail(err, COP_EFORMAT,
                    "\"%s\" is not a file of torch.save: it does not start as a ZIP archive", z->path);
}

static cop_status open_regular(zip_file *z, cop_error *err) {
    /* O_NONBLOCK: a FIFO must not hang us before we know what it is. */
    z->fd = open(z->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (z->fd < 0)
        return cop_fail(err, errno == ENOENT ? COP_ENOTFOUND : COP_EIO, "could not open \"%s\": %s", z->path,
                        strerror(errno));
    if (fstat(z->fd, &z->stat))
        return cop_fail(err, COP_EIO, "could not read \"%s\": %s", z->path, strerror(errno));
    if (!S_ISREG(z->stat.st_mode))
        return cop_fail(err, COP_EUNSUPPORTED, "\"%s\" is not a regular file", z->path);
    z->size = (uint64_t)z->stat.st_size;
    return check_magic(z, err);
}

/* ---- The end records. */

#define malformed(z, err, ...) malformed_at(z, err, __LINE__, __VA_ARGS__)
static cop_status malformed_at(const zip_file *z, cop_error *err, int line, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
static cop_status malformed_at(const zip_file *z, cop_error *err, int line, const char *format, ...) {
    char why[256];
    va_list args;
    va_start(args, format);
    vsnprintf(why, sizeof why, format, args);
    va_end(args);
    return cop_fail_at(err, COP_EFORMAT, __FILE__, line, "\"%s\" is a malformed ZIP archive: %s", z->path,
                       why);
}

/* The end record, whose comment reaches exactly to the end of the file.  Two that fit would be two archives
 * in one. */
static cop_status find_end(const zip_file *z, uint64_t *at, uint8_t record[END_BYTES], cop_error *err) {
    size_t n = z->size < END_BYTES + MAX_COMMENT ? (size_t)z->size : END_BYTES + MAX_COMMENT;
    uint8_t *tail = mem_alloc(n, 1);
    if (!tail) return cop_fail(err, COP_ENOMEM, "out of memory to read \"%s\"", z->path);
    cop_status status = zip_read(z, z->size - n, tail, n, err);
    int found = 0;
    for (size_t i = 0; status == COP_OK && i + END_BYTES <= n; i++) {
        if (le32(tail + i) != END_MAGIC || le16(tail + i + 20) != n - i - END_BYTES) continue;
        found++;
        *at = z->size - n + i;
        memcpy(record, tail + i, END_BYTES);
    }
    mem_free(tail);
    if (status) return status;
    if (!found) return malformed(z, err, "no directory at its end: it may be cut off");
    return found == 1 ? COP_OK : malformed(z, err, "more than one end record");
}

static cop_status read_end64(zip_file *z, const uint8_t *locator, uint64_t locator_at, uint64_t *count,
                             cop_error *err) {
    uint64_t at = le64(locator + 8);
    if (le32(locator + 4) != 0 || le32(locator + 16) != 1) return malformed(z, err, "it has several disks");
    if (!within(at, END64_BYTES, locator_at))
        return malformed(z, err, "the zip64 locator points outside of the file");
    uint8_t r[END64_BYTES];
    cop_status status = zip_read(z, at, r, sizeof r, err);
    if (status) return status;
    uint64_t record_bytes = le64(r + 4);
    if (le32(r) != END64_MAGIC || record_bytes < END64_BYTES - 12 ||
        !within(at + 12, record_bytes, locator_at))
        return malformed(z, err, "no zip64 end record where the locator points");
    if (le32(r + 16) != 0 || le32(r + 20) != 0 || le64(r + 24) != le64(r + 32))
        return malformed(z, err, "it has several disks");
    *count = le64(r + 32);
    z->directory_bytes = le64(r + 40);
    z->directory = le64(r + 48);
    z->end = at;
    return COP_OK;
}

/* Whether a field of the end record is the 64-bit value, or says that it stands in the zip64 record. */
static bool agrees(uint64_t narrow, uint64_t ones, uint64_t wide) { return narrow == ones || narrow == wide; }

static cop_status find_directory(zip_file *z, uint64_t *count, cop_error *err) {
    uint8_t e[END_BYTES], locator[LOCATOR_BYTES];
    cop_status status = find_end(z, &z->end, e, err);
    if (status) return status;
    if (le16(e + 4) != 0 || le16(e + 6) != 0 || le16(e + 8) != le16(e + 10))
        return malformed(z, err, "it has several disks");
    *count = le16(e + 10);
    z->directory_bytes = le32(e + 12);
    z->directory = le32(e + 16);
    if (z->end >= LOCATOR_BYTES) {
        uint64_t at = z->end - LOCATOR_BYTES;
        status = zip_read(z, at, locator, sizeof locator, err);
        if (status == COP_OK && le32(locator) == LOCATOR_MAGIC)
            status = read_end64(z, locator, at, count, err);
        if (status) return status;
    }
    if (!agrees(le16(e + 10), 0xffff, *count) || !agrees(le32(e + 12), 0xffffffff, z->directory_bytes) ||
        !agrees(le32(e + 16), 0xffffffff, z->directory))
        return malformed(z, err, "its two end records disagree");
    if (!within(z->directory, z->directory_bytes, z->end))
        return malformed(z, err, "its directory lies outside of the file");
    if (*count > MAX_ENTRIES || z->directory_bytes > MAX_DIRECTORY_BYTES ||
        *count > z->directory_bytes / CENTRAL_BYTES)
        return malformed(z, err, "%llu entries in a directory of %llu bytes", (unsigned long long)*count,
                         (unsigned long long)z->directory_bytes);
    return COP_OK;
}

/* ---- Entries. */

static const char *shown(char out[64], const entry *e) {
    size_t n = e->full_name_len < 60 ? e->full_name_len : 60;
    for (size_t i = 0; i < n; i++) out[i] = isprint(e->full_name[i]) ? (char)e->full_name[i] : '?';
    out[n] = 0;
    return out;
}

static size_t root_len(const entry *e) {
    const uint8_t *slash = memchr(e->full_name, '/', e->full_name_len);
    return slash ? (size_t)(slash - e->full_name) + 1 : 0;
}

/* Names are relative, plain, and all in the folder of the first. */
static bool name_fits(const entry *e, const entry *first) {
    const uint8_t *s = e->full_name;
    size_t n = e->full_name_len, root = root_len(e);
    if (n > MAX_NAME || root < 2 || root == n || memchr(s, 0, n) || memchr(s, '\\', n)) return false;
    for (size_t i = 0; i < n; i++) {
        size_t end = i;
        while (end < n && s[end] != '/') end++;
        if (end - i == 2 && s[i] == '.' && s[i + 1] == '.') return false;
        i = end;
    }
    return root == root_len(first) && !memcmp(s, first->full_name, root);
}

/* Fill in from the zip64 extra field what did not fit into 32 bits. */
static bool widen_sizes(const uint8_t *extra, size_t n, uint64_t *size, uint64_t *packed, uint64_t *header) {
    uint64_t *wanted[] = {size, packed, header};
    bool needed = *size == 0xffffffff || *packed == 0xffffffff || *header == 0xffffffff;
    while (needed && n >= 4) {
        size_t field = le16(extra + 2);
        if (field > n - 4) return false;
        if (le16(extra) == 1) {
            const uint8_t *p = extra + 4;
            for (int i = 0; i < 3; i++) {
                if (*wanted[i] != 0xffffffff) continue;
                if (field < 8) return false;
                *wanted[i] = le64(p);
                p += 8;
                field -= 8;
            }
            return true;
        }
        extra += 4 + field;
        n -= 4 + field;
    }
    return !needed;
}

/* One record of the central directory at p, of which `left` bytes remain.  *used: its length. */
static cop_status read_central(const zip_file *z, const uint8_t *p, size_t left, entry *e, size_t *used,
                               cop_error *err) {
    if (left < CENTRAL_BYTES || le32(p) != CENTRAL_MAGIC)
        return malformed(z, err, "its directory is cut off or damaged");
    size_t n_name = le16(p + 28), n_extra = le16(p + 30), n_comment = le16(p + 32);
    *used = CENTRAL_BYTES + n_name + n_extra + n_comment;
    if (*used > left) return malformed(z, err, "its directory is cut off or damaged");
    *e = (entry){.full_name = p + CENTRAL_BYTES, .full_name_len = n_name};
    uint64_t packed = le32(p + 20);
    e->public.size = le32(p + 24);
    e->header = le32(p + 42);
    char name[64];
    shown(name, e);
    if (le16(p + 8) & 0x2041)
        return cop_fail(err, COP_EUNSUPPORTED, "entry \"%s\" of \"%s\" is encrypted", name, z->path);
    if (le16(p + 10) != 0)
        return cop_fail(err, COP_EUNSUPPORTED, "entry \"%s\" of \"%s\" is compressed: torch.save only stores",
                        name, z->path);
    if (!widen_sizes(e->full_name + n_name, n_extra, &e->public.size, &packed, &e->header))
        return malformed(z, err, "entry \"%s\" lacks its 64-bit sizes", name);
    if (packed != e->public.size) return malformed(z, err, "entry \"%s\" is stored, yet has two sizes", name);
    if (le16(p + 34) != 0) return malformed(z, err, "it has several disks");
    return COP_OK;
}

/* Find where the data of e starts, from its local header, which must agree with the directory. */
static cop_status read_local(const zip_file *z, entry *e, cop_error *err) {
    uint8_t h[LOCAL_BYTES + MAX_NAME];
    char name[64];
    shown(name, e);
    size_t n = LOCAL_BYTES + e->full_name_len;
    if (!within(e->header, n, z->directory))
        return malformed(z, err, "entry \"%s\" lies outside of its data", name);
    cop_status status = zip_read(z, e->header, h, n, err);
    if (status) return status;
    if (le32(h) != LOCAL_MAGIC || le16(h + 8) != 0 || le16(h + 6) & 0x2041 ||
        le16(h + 26) != e->full_name_len || memcmp(h + LOCAL_BYTES, e->full_name, e->full_name_len))
        return malformed(z, err, "the header of entry \"%s\" is not what the directory says", name);
    e->public.offset = e->header + n + le16(h + 28);
    if (!within(e->public.offset, e->public.size, z->directory))
        return malformed(z, err, "entry \"%s\" reaches beyond its data", name);
    return COP_OK;
}

static int by_header(const void *a, const void *b) {
    uint64_t x = ((const entry *)a)->header, y = ((const entry *)b)->header;
    return (x > y) - (x < y);
}

static int by_name(const void *a, const void *b) {
    return strcmp(((const entry *)a)->public.name, ((const entry *)b)->public.name);
}

static cop_status check_places(zip_file *z, cop_error *err) {
    char name[64];
    qsort(z->entries, z->n_entries, sizeof *z->entries, by_header);
    for (size_t i = 1; i < z->n_entries; i++) {
        const entry *before = &z->entries[i - 1];
        if (before->public.offset + before->public.size > z->entries[i].header)
            return malformed(z, err, "entry \"%s\" overlaps another", shown(name, before));
    }
    qsort(z->entries, z->n_entries, sizeof *z->entries, by_name);
    for (size_t i = 1; i < z->n_entries; i++) {
        if (!by_name(&z->entries[i - 1], &z->entries[i]))
            return malformed(z, err, "two entries \"%s\"", shown(name, &z->entries[i]));
    }
    return COP_OK;
}

static cop_status read_entries(zip_file *z, size_t count, cop_error *err) {
    const uint8_t *p = z->central;
    size_t left = (size_t)z->directory_bytes;
    char *names = z->names, name[64];
    for (size_t used = 0; z->n_entries < count; z->n_entries++, p += used, left -= used) {
        entry *e = &z->entries[z->n_entries];
        cop_status status = read_central(z, p, left, e, &used, err);
        if (status) return status;
        if (!name_fits(e, &z->entries[0])) return malformed(z, err, "bad entry name \"%s\"", shown(name, e));
        status = read_local(z, e, err);
        if (status) return status;
        size_t root = root_len(e), n = e->full_name_len - root;
        memcpy(names, e->full_name + root, n);
        names[n] = 0;
        e->public.name = names;
        names += n + 1;
    }
    return left ? malformed(z, err, "%zu bytes too many in its directory", left) : check_places(z, err);
}

static cop_status read_directory(zip_file *z, cop_error *err) {
    uint64_t count = 0;
    cop_status status = find_directory(z, &count, err);
    if (status) return status;
    z->central = mem_alloc((size_t)z->directory_bytes, 1);
    /* A name and its NUL need less than the record that it comes from. */
    z->names = mem_alloc((size_t)z->directory_bytes, 1);
    z->entries = mem_alloc((size_t)count, sizeof *z->entries);
    if (!z->central || !z->names || !z->entries)
        return cop_fail(err, COP_ENOMEM, "out of memory for the directory of \"%s\"", z->path);
    status = zip_read(z, z->directory, z->central, (size_t)z->directory_bytes, err);
    return status ? status : read_entries(z, (size_t)count, err);
}

cop_status zip_open(zip_file **out, const char *path, cop_error *err) {
    assert(out && path);
    *out = NULL;
    zip_file *z = mem_zalloc(1, sizeof *z);
    if (!z) return cop_fail(err, COP_ENOMEM, "out of memory to open \"%s\"", path);
    z->fd = -1;
    z->path = mem_strdup(path);
    cop_status status =
        z->path ? open_regular(z, err) : cop_fail(err, COP_ENOMEM, "out of memory to open \"%s\"", path);
    if (status == COP_OK) status = read_directory(z, err);
    if (status) {
        zip_close(z);
        return status;
    }
    *out = z;
    return COP_OK;
}

void zip_close(zip_file *z) {
    if (!z) return;
    if (z->fd >= 0) close(z->fd);
    mem_free(z->path);
    mem_free(z->central);
    mem_free(z->names);
    mem_free(z->entries);
    mem_free(z);
}

const char *zip_path(const zip_file *z) { return z->path; }
uint64_t zip_file_bytes(const zip_file *z) { return z->size; }

const zip_entry *zip_find(const zip_file *z, const char *name) {
    entry key = {.public.name = name};
    const entry *e = z->n_entries ? bsearch(&key, z->entries, z->n_entries, sizeof key, by_name) : NULL;
    return e ? &e->public : NULL;
}
