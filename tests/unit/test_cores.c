/* Cores: the affinity mask, and quotas found in cgroup trees as kernels and container engines lay them out.
 */
#include "kernels/cores.h"

#include <ftw.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

static char root[64]; /* of the tree of the test that runs */

static int make_tree(void **state) {
    (void)state;
    strcpy(root, "/tmp/coppice-cores-XXXXXX");
    return mkdtemp(root) ? 0 : -1;
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *where) {
    (void)st, (void)type, (void)where;
    return remove(path);
}

static int remove_tree(void **state) {
    (void)state;
    return nftw(root, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

/* Write a file of the tree; folders on the way are made. */
static void put(const char *path, const char *text) {
    char whole[512];
    snprintf(whole, sizeof whole, "%s%s", root, path);
    for (char *at = strchr(whole + 1, '/'); at; at = strchr(at + 1, '/')) {
        *at = 0;
        mkdir(whole, 0777);
        *at = '/';
    }
    FILE *f = fopen(whole, "w");
    if (!f) fail_msg("could not write %s", whole);
    fputs(text, f);
    fclose(f);
}

#define MOUNTS_2                                                                                             \
    "24 1 0:5 / /proc rw - proc proc rw\n31 24 0:28 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 "        \
    "cgroup2 rw,nsdelegate\n"
#define MOUNTS_1                                                                                             \
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n33 31 0:30 / /sys/fs/cgroup/cpuset rw - "     \
    "cgroup cgroup rw,cpuset\n"                                                                              \
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"

static void without_groups_there_is_no_quota(void **state) {
    (void)state;
    assert_int_equal(cores_quota(root), 0);
    put("/proc/self/cgroup", "");
    assert_int_equal(cores_quota(root), 0);
    put("/proc/self/cgroup", "0::/\n");
    put("/proc/self/mountinfo", MOUNTS_2);
    assert_int_equal(cores_quota(root), 0); /* the root group has no cpu.max */
}

static void version_2_takes_the_least_of_the_group_and_all_above(void **state) {
    (void)state;
    put("/proc/self/cgroup", "0::/pods/pod1/main\n");
    put("/proc/self/mountinfo", MOUNTS_2);
    put("/sys/fs/cgroup/pods/pod1/main/cpu.max", "max 100000\n");
    assert_int_equal(cores_quota(root), 0);
    put("/sys/fs/cgroup/pods/cpu.max", "1600000 100000\n");
    assert_int_equal(cores_quota(root), 16);
    put("/sys/fs/cgroup/pods/pod1/cpu.max", "350000 100000\n");
    assert_int_equal(cores_quota(root), 4); /* three and a half, rounded up */
    put("/sys/fs/cgroup/pods/pod1/main/cpu.max", "50000 100000\n");
    assert_int_equal(cores_quota(root), 1);
    put("/sys/fs/cgroup/pods/pod1/other/cpu.max", "1000 100000\n");
    put("/sys/fs/cgroup/pods/pod1/main/cpu.max", "800000 100000\n");
    assert_int_equal(cores_quota(root), 4); /* a sister's does not count */
    put("/sys/fs/cgroup/cpu.max", "200000 100000\n");
    assert_int_equal(cores_quota(root), 2);
    put("/sys/fs/cpu.max", "100000 100000\n");
    assert_int_equal(cores_quota(root), 2); /* and nothing above the mount */
}

static void a_container_sees_its_own_group_at_the_mount(void **state) {
    (void)state;
    put("/proc/self/cgroup", "0::/\n");
    put("/proc/self/mountinfo", MOUNTS_2);
    put("/sys/fs/cgroup/cpu.max", "300000 100000\n");
    assert_int_equal(cores_quota(root), 3);
    /* Without a namespace: the path is the host's, the mount shows the tree from there. */
    put("/proc/self/cgroup", "0::/docker/ab\n");
    put("/proc/self/mountinfo", "31 24 0:28 /docker/ab /sys/fs/cgroup ro - cgroup2 cgroup ro\n");
    assert_int_equal(cores_quota(root), 3);
    put("/proc/self/cgroup", "0::/docker/ab/inner\n");
    put("/sys/fs/cgroup/inner/cpu.max", "200000 100000\n");
    assert_int_equal(cores_quota(root), 2);
    /* Paths outside of what is mounted. */
    put("/proc/self/cgroup", "0::/docker/abc\n");
    put("/sys/fs/cgroup/docker/abc/cpu.max", "100000 100000\n");
    assert_int_equal(cores_quota(root), 3);
    put("/proc/self/mountinfo", MOUNTS_2);
    put("/proc/self/cgroup", "0::/../inner\n");
    assert_int_equal(cores_quota(root), 3);
}

static void version_1_reads_the_cpu_controller(void **state) {
    (void)state;
    put("/proc/self/cgroup", "9:cpuset:/wrong\n4:cpu,cpuacct:/docker/ab\n2:memory:/wrong\n0::/\n");
    put("/proc/self/mountinfo", MOUNTS_1);
    put("/sys/fs/cgroup/cpu,cpuacct/docker/ab/cpu.cfs_quota_us", "-1\n");
    put("/sys/fs/cgroup/cpu,cpuacct/docker/ab/cpu.cfs_period_us", "100000\n");
    put("/sys/fs/cgroup/cpu,cpuacct/wrong/cpu.cfs_quota_us", "1000\n");
    put("/sys/fs/cgroup/cpu,cpuacct/wrong/cpu.cfs_period_us", "100000\n");
    assert_int_equal(cores_quota(root), 0);
    put("/sys/fs/cgroup/cpu,cpuacct/docker/cpu.cfs_quota_us", "250000\n");
    put("/sys/fs/cgroup/cpu,cpuacct/docker/cpu.cfs_period_us", "50000\n");
    assert_int_equal(cores_quota(root), 5);
    put("/sys/fs/cgroup/cpu,cpuacct/docker/ab/cpu.cfs_quota_us", "200001\n");
    assert_int_equal(cores_quota(root), 3);
    /* A container without namespace: the mount's root is the group. */
    put("/proc/self/mountinfo",
        "32 31 0:29 /docker/ab /sys/fs/cgroup/a\\040b ro master:1 - cgroup cgroup rw,cpu\n");
    put("/sys/fs/cgroup/a b/cpu.cfs_quota_us", "700000\n");
    put("/sys/fs/cgroup/a b/cpu.cfs_period_us", "100000\n");
    assert_int_equal(cores_quota(root), 7);
    remove_tree(NULL), mkdir(root, 0777); /* where nothing is known of mounts, the usual place */
    put("/proc/self/cgroup", "1:cpu:/\n");
    put("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "600000\n");
    put("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000");
    assert_int_equal(cores_quota(root), 6);
}

static void both_versions_count_where_there_are_both(void **state) {
    (void)state;
    put("/proc/self/cgroup", "1:cpu:/a\n0::/b\n");
    put("/proc/self/mountinfo", MOUNTS_1 "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
    put("/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "400000");
    put("/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", "100000");
    assert_int_equal(cores_quota(root), 4);
    put("/sys/fs/cgroup/unified/b/cpu.max", "300000 100000");
    assert_int_equal(cores_quota(root), 3);
    put("/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "200000");
    assert_int_equal(cores_quota(root), 2);
}

static void nonsense_is_no_quota(void **state) {
    (void)state;
    static const char *const texts[] = {"",       "max",      "0 100000", "-5 100000",
                                        "100000", "100000 0", "a b",      "100000 -1"};
    put("/proc/self/cgroup", "0::/\n");
    put("/proc/self/mountinfo", "x\n - \n1 2 3\n1 2 3 / /a - \n" MOUNTS_2);
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        put("/sys/fs/cgroup/cpu.max", texts[i]);
        assert_int_equal(cores_quota(root), 0);
    }
    put("/sys/fs/cgroup/cpu.max", "9223372036854775807 1");
    assert_int_equal(cores_quota(root), 0);
    char *line = malloc(9000); /* longer than any buffer */
    memset(line, 'a', 8998);
    memcpy(line, "0::/", 4);
    strcpy(line + 8998, "\n");
    put("/proc/self/cgroup", line);
    assert_int_equal(cores_quota(root), 0);
    free(line);
}

static void the_count_respects_the_mask(void **state) {
    (void)state;
    int ids[2], n = cores_allowed(ids, 2);
    assert_in_range(n, 1, sysconf(_SC_NPROCESSORS_CONF));
    assert_in_range(cpu_count(), 1, n);
    cpu_set_t before, one;
    assert_int_equal(sched_getaffinity(0, sizeof before, &before), 0);
    int last = ids[n > 1];
    CPU_ZERO(&one);
    CPU_SET(last, &one);
    assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
    assert_int_equal(cores_allowed(ids, 2), 1);
    assert_int_equal(ids[0], last);
    assert_int_equal(cpu_count(), 1);
    assert_int_equal(sched_setaffinity(0, sizeof before, &before), 0);
    assert_int_equal(cores_allowed(NULL, 0), n);
}

int main(void) {
#define TEST(f) cmocka_unit_test_setup_teardown(f, make_tree, remove_tree)
    const struct CMUnitTest tests[] = {
        TEST(without_groups_there_is_no_quota),
        TEST(version_2_takes_the_least_of_the_group_and_all_above),
        TEST(a_container_sees_its_own_group_at_the_mount),
        TEST(version_1_reads_the_cpu_controller),
        TEST(both_versions_count_where_there_are_both),
        TEST(nonsense_is_no_quota),
        TEST(the_count_respects_the_mask),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
