/* Status and error, checked allocation, CPU features. */
#include "kernels/base.h"

#include <assert.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

const char *cop_status_text(cop_status status) {
#define COP_STATUS_CASE(name, text)                                                                          \
    case name: return text;
    switch (status) { COP_STATUS_LIST(COP_STATUS_CASE) }
    return "unknown status";
}

cop_status cop_fail_at(cop_error *err, cop_status status, const char *file, int line, const char *format,
                       ...) {
    assert(status != COP_OK);
    if (!err) return status;
    *err = (cop_error){.status = status, .file = file, .line = line};
    va_list args;
    va_start(args, format);
    vsnprintf(err->message, sizeof err->message, format, args);
    va_end(args);
    return status;
}

void cop_error_prefix(cop_error *err, const char *format, ...) {
    if (!err) return;
    char text[sizeof err->message];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    size_t n = strlen(text), room = sizeof err->message - 1;
    if (n + 2 > room) return; /* no room for both: keep the message, which says what failed */
    size_t kept = strlen(err->message);
    if (n + 2 + kept > room) kept = room - n - 2;
    memmove(err->message + n + 2, err->message, kept);
    err->message[n + 2 + kept] = '\0';
    memcpy(err->message, text, n);
    memcpy(err->message + n, ": ", 2);
}

/* ---- The heap. */

static atomic_long live_blocks, allocations;
static atomic_long fail_countdown = -1; /* < 0: off */
static atomic_bool fail_fired;

static bool fails_now(void) {
    if (atomic_load_explicit(&fail_countdown, memory_order_relaxed) < 0) return false;
    if (atomic_fetch_sub(&fail_countdown, 1) != 0) return false;
    atomic_store(&fail_fired, true);
    return true;
}

static void *counted(void *p) {
    if (!p) return NULL;
    atomic_fetch_add_explicit(&live_blocks, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&allocations, 1, memory_order_relaxed);
    return p;
}

static bool product(size_t n, size_t size, size_t *bytes) {
    return !__builtin_mul_overflow(n, size, bytes) && *bytes <= PTRDIFF_MAX;
}

void *mem_alloc(size_t n, size_t size) {
    size_t bytes;
    if (!product(n, size, &bytes) || fails_now()) return NULL;
    return counted(malloc(bytes ? bytes : 1));
}

void *mem_zalloc(size_t n, size_t size) {
    size_t bytes;
    if (!product(n, size, &bytes) || fails_now()) return NULL;
    return counted(calloc(bytes ? bytes : 1, 1));
}

void *mem_realloc(void *p, size_t n, size_t size) {
    if (!p) return mem_alloc(n, size);
    size_t bytes;
    if (!product(n, size, &bytes) || fails_now()) return NULL;
    void *moved = realloc(p, bytes ? bytes : 1);
    if (moved) atomic_fetch_add_explicit(&allocations, 1, memory_order_relaxed);
    return moved;
}

void *mem_alloc_aligned(size_t n, size_t size) {
    size_t bytes;
    if (!product(n, size, &bytes) || bytes > PTRDIFF_MAX - 64 || fails_now()) return NULL;
    return counted(aligned_alloc(64, bytes ? (bytes + 63) / 64 * 64 : 64));
}

void *mem_alloc_huge(size_t n, size_t size) {
    size_t bytes;
    bool large = product(n, size, &bytes) && bytes >= MEM_HUGE_BYTES && bytes <= PTRDIFF_MAX - MEM_HUGE_BYTES;
#ifdef MEM_GUARDED
    large = false;
#endif
    if (!large) return mem_alloc_aligned(n, size);
    if (fails_now()) return NULL;
    bytes = (bytes + MEM_HUGE_BYTES - 1) / MEM_HUGE_BYTES * MEM_HUGE_BYTES;
    void *p = aligned_alloc(MEM_HUGE_BYTES, bytes);
#ifdef MADV_HUGEPAGE
    if (p) (void)madvise(p, bytes, MADV_HUGEPAGE); /* an advice: without it pages are small */
#endif
    return counted(p);
}

char *mem_strdup(const char *s) {
    size_t n = strlen(s) + 1;
    char *copy = mem_alloc(n, 1);
    if (copy) memcpy(copy, s, n);
    return copy;
}

void mem_free(void *p) {
    if (p) atomic_fetch_sub_explicit(&live_blocks, 1, memory_order_relaxed);
    free(p);
}

bool mem_grow(void **p, size_t *cap, size_t want, size_t size) {
    if (want <= *cap) return true;
    size_t n = *cap + *cap / 2;
    if (n < want) n = want;
    if (n < 8) n = 8;
    void *grown = mem_realloc(*p, n, size);
    if (!grown) return false;
    *p = grown;
    *cap = n;
    return true;
}

void mem_fail_after(long n) {
    atomic_store(&fail_fired, false);
    atomic_store(&fail_countdown, n);
}

bool mem_fail_stop(void) {
    atomic_store(&fail_countdown, -1);
    return atomic_load(&fail_fired);
}

long mem_live(void) { return atomic_load(&live_blocks); }

long mem_count(void) { return atomic_load(&allocations); }

size_t mem_available(void) {
    size_t kib = 0;
    FILE *f = fopen("/proc/meminfo", "re");
    char line[128];
    while (f && fgets(line, sizeof line, f) && sscanf(line, "MemAvailable: %zu kB", &kib) != 1) continue;
    if (f) fclose(f);
    return kib ? kib * 1024 : (size_t)1 << 30;
}

/* ---- CPU. */

static cpu_isa best_isa(void) {
#ifdef COP_EMULATE_AVX512
    return CPU_AVX512BF16;
#elif defined __x86_64__
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return CPU_SCALAR;
    bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (!avx512) return CPU_AVX2;
    return __builtin_cpu_supports("avx512bf16") ? CPU_AVX512BF16 : CPU_AVX512;
#else
    return CPU_SCALAR;
#endif
}

const char *cpu_isa_name(cpu_isa isa) {
    static const char *const names[] = {[CPU_SCALAR] = "scalar",
                                        [CPU_AVX2] = "avx2",
                                        [CPU_AVX512] = "avx512",
                                        [CPU_AVX512BF16] = "avx512bf16"};
    return names[isa];
}

cop_status cpu_isa_pick(cpu_isa *isa, cop_error *err) {
    *isa = best_isa();
    const char *name = getenv("COPPICE_ISA");
    if (!name || !*name) return COP_OK;
    for (int i = CPU_SCALAR; i <= CPU_AVX512BF16; i++) {
        if (strcmp(name, cpu_isa_name((cpu_isa)i)) != 0) continue;
        if (i > (int)*isa)
            return cop_fail(err, COP_EINVAL, "cannot use COPPICE_ISA=%s: the best of this machine is %s",
                            name, cpu_isa_name(*isa));
        *isa = (cpu_isa)i;
        return COP_OK;
    }
    return cop_fail(err, COP_EINVAL, "unknown COPPICE_ISA \"%s\": it is scalar, avx2, avx512 or avx512bf16",
                    name);
}

double clock_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void cpu_flush_denormals(void) {
#ifdef __x86_64__
    _mm_setcsr(_mm_getcsr() | 0x8040); /* FTZ | DAZ */
#endif
}
