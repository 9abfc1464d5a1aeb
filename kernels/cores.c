/* Affinity and cgroup quotas.
 *
 *   /proc/self/cgroup      0::/kubepods/pod1            version 2
 *                          4:cpu,cpuacct:/docker/ab     version 1, the hierarchy of the cpu controller
 *   /proc/self/mountinfo   .. .. .. /docker /sys/fs/cgroup/cpu .. - cgroup cgroup rw,cpu
 *                                   root    place                   type          options
 *
 * A mount shows the tree of groups from `root` down, so the group's folder is place + (path - root); a path
 * that is not below the root belongs to another namespace, and what can be seen of it is the place itself. */
#include "kernels/cores.h"

#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { PATH_BYTES = 1024, LINE_BYTES = 4 * PATH_BYTES, MAX_CORES = 1 << 20 };

/* ---- Affinity. */

/* The mask of this thread, of *n cores, 0 if it cannot be had.  NULL without memory; ends with mem_free(). */
static cpu_set_t *read_mask(int *n) {
    for (*n = CPU_SETSIZE; *n <= MAX_CORES; *n *= 2) { /* the kernel refuses a mask smaller than its own */
        cpu_set_t *mask = mem_zalloc(1, CPU_ALLOC_SIZE(*n));
        if (!mask) return NULL;
        if (sched_getaffinity(0, CPU_ALLOC_SIZE(*n), mask) == 0) return mask;
        mem_free(mask);
    }
    *n = 0;
    return mem_zalloc(1, CPU_ALLOC_SIZE(1));
}

int cores_allowed(int *ids, int cap) {
    int n, n_found = 0;
    cpu_set_t *mask = read_mask(&n);
    if (!mask) return -1;
    for (int id = 0; id < n; id++) {
        if (!CPU_ISSET_S(id, CPU_ALLOC_SIZE(n), mask)) continue;
        if (n_found < cap) ids[n_found] = id;
        n_found++;
    }
    mem_free(mask);
    return n_found;
}

cop_status cores_pin(pthread_t thread, int id, cop_error *err) {
    size_t bytes = CPU_ALLOC_SIZE(id + 1);
    cpu_set_t *mask = mem_zalloc(1, bytes);
    if (!mask) return cop_fail(err, COP_ENOMEM, "could not bind a thread to core %d", id);
    CPU_SET_S(id, bytes, mask);
    int e = pthread_setaffinity_np(thread, bytes, mask);
    mem_free(mask);
    if (e) return cop_fail(err, COP_EIO, "could not bind a thread to core %d: %s", id, strerror(e));
    return COP_OK;
}

/* ---- Quotas. */

static FILE *open_at(const char *prefix, const char *path) {
    char whole[4 * PATH_BYTES];
    int n = snprintf(whole, sizeof whole, "%s%s", prefix, path);
    return n > 0 && n < (int)sizeof whole ? fopen(whole, "re") : NULL;
}

static bool copy_path(char out[PATH_BYTES], const char *path) {
    int n = snprintf(out, PATH_BYTES, "%s", path);
    return n >= 0 && n < PATH_BYTES;
}

/* Whether a list that is separated by commas holds the word. */
static bool has_word(const char *list, const char *word) {
    size_t n = strlen(word);
    for (const char *at = list;; at++) {
        size_t length = strcspn(at, ",\n");
        if (length == n && !memcmp(at, word, n)) return true;
        at += length;
        if (*at != ',') return false;
    }
}

/* The path of this process's group in the hierarchy of that version. */
static bool find_path(const char *prefix, int version, char path[PATH_BYTES]) {
    FILE *f = open_at(prefix, "/proc/self/cgroup");
    char line[LINE_BYTES];
    bool found = false;
    while (f && !found && fgets(line, sizeof line, f)) {
        char *controllers = strchr(line, ':'), *at = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!at) continue;
        *at++ = 0;
        at[strcspn(at, "\n")] = 0;
        bool right = version == 2 ? !strcmp(line, "0:") : has_word(controllers + 1, "cpu");
        found = right && copy_path(path, at);
    }
    if (f) fclose(f);
    return found;
}

/* Mountinfo writes spaces and the like as \\ and three octal digits. */
static void unescape(char *s) {
    char *to = s;
    for (; *s; s++) {
        bool octal = s[0] == '\\' && strspn(s + 1, "01234567") >= 3;
        *to++ = octal ? (char)((s[1] - '0') * 64 + (s[2] - '0') * 8 + (s[3] - '0')) : *s;
        if (octal) s += 3;
    }
    *to = 0;
}

typedef struct mount {
    char root[PATH_BYTES], place[PATH_BYTES];
} mount;

/* Where the hierarchy of that version, with the cpu controller, is mounted. */
static bool find_mount(const char *prefix, int version, mount *m) {
    FILE *f = open_at(prefix, "/proc/self/mountinfo");
    char line[LINE_BYTES];
    bool found = false;
    while (f && !found && fgets(line, sizeof line, f)) {
        char root[LINE_BYTES], place[LINE_BYTES], type[64], options[LINE_BYTES];
        const char *rest = strstr(line, " - ");
        if (!rest || sscanf(line, "%*s %*s %*s %4095s %4095s", root, place) != 2) continue;
        if (sscanf(rest, " - %63s %*s %4095s", type, options) != 2) continue;
        bool right =
            version == 2 ? !strcmp(type, "cgroup2") : !strcmp(type, "cgroup") && has_word(options, "cpu");
        if (!right) continue;
        unescape(root);
        unescape(place);
        found = copy_path(m->root, root) && copy_path(m->place, place);
    }
    if (f) fclose(f);
    return found;
}

/* A number of a file that holds one; `otherwise` if there is none. */
static long long read_number(const char *prefix, const char *folder, const char *name, long long otherwise) {
    char path[2 * PATH_BYTES + 64];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = open_at(prefix, path);
    long long x;
    if (!f || fscanf(f, "%lld", &x) != 1) x = otherwise;
    if (f) fclose(f);
    return x;
}

/* The quota that stands in one folder, in whole cores; INT_MAX if there is none ("max", or -1). */
static int quota_of(const char *prefix, const char *folder, int version) {
    long long quota = -1, period = 0;
    if (version == 2) {
        char path[2 * PATH_BYTES + 64];
        snprintf(path, sizeof path, "%s/cpu.max", folder);
        FILE *f = open_at(prefix, path);
        if (f && fscanf(f, "%lld %lld", &quota, &period) != 2) quota = -1;
        if (f) fclose(f);
    } else {
        quota = read_number(prefix, folder, "cpu.cfs_quota_us", -1);
        period = read_number(prefix, folder, "cpu.cfs_period_us", 0);
    }
    if (quota <= 0 || period <= 0) return INT_MAX;
    long long cores = quota / period + (quota % period != 0);
    return cores < INT_MAX ? (int)cores : INT_MAX;
}

/* The part of a path below the mount's root: "" for the root itself and for what cannot be seen from here. */
static const char *below_root(const char *path, const char *root) {
    size_t n = strcmp(root, "/") ? strlen(root) : 0;
    bool below = !strncmp(path, root, n) && (path[n] == '/' || !path[n]);
    return below && strcmp(path + n, "/") != 0 && !strstr(path, "/..") ? path + n : "";
}

/* The least quota of the group and all above it. */
static int quota_of_version(const char *prefix, int version) {
    char path[PATH_BYTES], folder[2 * PATH_BYTES];
    mount m = {.root = "/", .place = "/sys/fs/cgroup/cpu"};
    if (!find_path(prefix, version, path)) return INT_MAX;
    if (!find_mount(prefix, version, &m) && version == 2) copy_path(m.place, "/sys/fs/cgroup");
    size_t n_place = strlen(m.place);
    int n = snprintf(folder, sizeof folder, "%s%s", m.place, below_root(path, m.root)), least = INT_MAX;
    if (n < 0 || n >= PATH_BYTES) return INT_MAX;
    while (true) {
        int quota = quota_of(prefix, folder, version);
        if (quota < least) least = quota;
        char *end = strrchr(folder, '/');
        if (!end || (size_t)(end - folder) < n_place) return least;
        *end = 0;
    }
}

int cores_quota(const char *prefix) {
    int v1 = quota_of_version(prefix, 1), v2 = quota_of_version(prefix, 2); /* a system may have both */
    int least = v1 < v2 ? v1 : v2;
    return least == INT_MAX ? 0 : least;
}

int cpu_count(void) {
    int n = cores_allowed(NULL, 0), quota = cores_quota("");
    if (n < 1) n = (int)sysconf(_SC_NPROCESSORS_ONLN);
    if (quota > 0 && quota < n) n = quota;
    return n < 1 ? 1 : n;
}
