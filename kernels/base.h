/* What everything below the worker shares: status and error, checked allocation, CPU features.
 *
 * Errors come in three tiers.  A bug of ours is an assert (asserts stay on in release builds).  A failure of
 * the world or of input is a cop_status with a filled cop_error.  Streams of small operations keep their
 * first error and are checked once at the end. */
#ifndef COP_BASE_H
#define COP_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define COP_VERSION "0.1.0"

/* Every status and its text.  COP_OK is the only success value in the tree. */
#define COP_STATUS_LIST(X)                                                                                   \
    X(COP_OK, "ok")                                                                                          \
    X(COP_EINVAL, "invalid value")                                                                           \
    X(COP_EIO, "input or output failed")                                                                     \
    X(COP_ENOMEM, "out of memory")                                                                           \
    X(COP_EFORMAT, "malformed file or message")                                                              \
    X(COP_EUNSUPPORTED, "not supported")                                                                     \
    X(COP_ETOOLONG, "too long for the context")                                                              \
    X(COP_ETOOLARGE, "too large for the page pool")                                                          \
    X(COP_ENOTFOUND, "not found")                                                                            \
    X(COP_EMODEL, "the model computed no valid number")

#define COP_STATUS_ENUM(name, text) name,
typedef enum cop_status { COP_STATUS_LIST(COP_STATUS_ENUM) } cop_status;

/* The text of a status, for example "out of memory".  Any thread. */
const char *cop_status_text(cop_status status);

/* One failure: what, where in the input (`key`, a path such as "prompts[3].tokens", or ""), and where in the
 * code. */
typedef struct cop_error {
    cop_status status;
    int line;
    const char *file;
    char key[96];
    char message[640]; /* lower case, no period: what could not be done, to which value, why */
} cop_error;

/* Fill *err (which may be NULL) and return `status`, so that a function can `return cop_fail(err, ...)`. */
#define cop_fail(err, status, ...) cop_fail_at(err, status, __FILE__, __LINE__, __VA_ARGS__)
cop_status cop_fail_at(cop_error *err, cop_status status, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

/* Put "<text>: " before the message of *err (which may be NULL). */
void cop_error_prefix(cop_error *err, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Return from the calling function if `call` fails, adding what the caller was doing to the message. */
#define COP_TRY(call, err, ...)                                                                              \
    do {                                                                                                     \
        cop_status cop_try_status = (call);                                                                  \
        if (cop_try_status != COP_OK) {                                                                      \
            cop_error_prefix(err, __VA_ARGS__);                                                              \
            return cop_try_status;                                                                           \
        }                                                                                                    \
    } while (0)

/* ---- The heap.  Any thread.  A product that overflows fails like an allocation that does.  All return NULL
 * on failure; mem_free(NULL) does nothing.  `n` of 0 gives a unique pointer that must be freed. */
void *mem_alloc(size_t n, size_t size);
void *mem_zalloc(size_t n, size_t size);
void *mem_realloc(void *p, size_t n, size_t size); /* keeps *p valid on failure */
void *mem_alloc_aligned(size_t n, size_t size); /* 64-byte aligned, pages untouched; ends with mem_free too */
/* The same for what is large and read all the time: from MEM_HUGE_BYTES on it starts at a multiple of that
 * and lies on huge pages, where the system gives them; then at least so much is touched at a time. */
void *mem_alloc_huge(size_t n, size_t size);
#define MEM_HUGE_BYTES ((size_t)2 << 20)
char *mem_strdup(const char *s);
void mem_free(void *p);

/* Make room for `want` items of `size` bytes in *p (capacity *cap items), growing by half.  False on failure,
 * with *p and *cap unchanged. */
bool mem_grow(void **p, size_t *cap, size_t want, size_t size);

/* Tests: let the n-th allocation from now on fail (0: the next), once.  mem_fail_stop() ends that and tells
 * whether it happened.  mem_live() counts blocks that are not freed, mem_count() what any thread allocated so
 * far (growing a block counts too): where nothing may be allocated, it stands still. */
void mem_fail_after(long n);
bool mem_fail_stop(void);
long mem_live(void);
long mem_count(void);

/* AddressSanitizer sees an overflow only at the end of an allocation of its own: then blocks get one each. */
#ifdef __SANITIZE_ADDRESS__
#define MEM_GUARDED 1
#elif defined __has_feature
#if __has_feature(address_sanitizer)
#define MEM_GUARDED 1
#endif
#endif

/* Bytes that new allocations could take without swapping, as the kernel estimates; 1 GiB where it does not
 * say. */
size_t mem_available(void);

/* ---- CPU.  Instruction sets that kernels are written for, worst first. */
typedef enum cpu_isa { CPU_SCALAR, CPU_AVX2, CPU_AVX512, CPU_AVX512BF16 } cpu_isa;

/* The best of this machine, or the one that the environment variable COPPICE_ISA names (scalar, avx2,
 * avx512, avx512bf16), if this machine has it.  COP_EINVAL for an unknown name or one that the machine lacks.
 */
cop_status cpu_isa_pick(cpu_isa *isa, cop_error *err);
const char *cpu_isa_name(cpu_isa isa);

/* Cores that this process may use: its affinity mask, and the quotas of its cgroups; at least 1. */
int cpu_count(void);

/* Seconds on the monotonic clock.  Any thread. */
double clock_seconds(void);

/* Flush denormals to zero in the calling thread.  Every thread that computes calls it once at its start, so
 * that all instruction sets agree (vdpbf16ps always flushes). */
void cpu_flush_denormals(void);

#endif
