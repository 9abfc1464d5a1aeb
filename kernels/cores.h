/* The cores of this process: which it may use, what its cgroups leave of them, and binding a thread to one.
 * Any thread. */
#ifndef COP_CORES_H
#define COP_CORES_H

#include <pthread.h>

#include "kernels/base.h"

/* The cores in the calling thread's affinity mask, ascending; the first `cap` of them go to `ids` (NULL if
 * cap is 0).  Returns how many there are, 0 where the system does not say, -1 without memory. */
int cores_allowed(int *ids, int cap);

/* Bind a thread to core `id`.  Threads that it starts later are bound to it too.  Errors: COP_EIO,
 * COP_ENOMEM. */
cop_status cores_pin(pthread_t thread, int id, cop_error *err);

/* What the CPU quotas of this process's cgroup and of all above it allow, in whole cores, rounded up; 0:
 * there is no quota.  Versions 1 and 2. prefix  put before /proc/self and the cgroup mounts: "" but for tests
 */
int cores_quota(const char *prefix);

#endif
