/* `coppice merge`: the parts of a split run become what the whole run would have been. */
#include "tests/unit/dataset_fixture.h"

#include "worker/commands.h"

#define N_PARTS 3
#define MERGE_LINES 900 /* several frames of merged records, and of shards */

static char said[4096]; /* on stderr by the last merge */

/* Merge the folders `in` (ended by NULL) of the scratch folder into `out`; returns the exit status. */
static int merge(const char *out, const char *const in[]) {
    char paths[N_PARTS + 2][256], shard_bytes[] = "700";
    char *argv[N_PARTS + 8] = {"merge"};
    int argc = 1;
    for (int i = 0; in[i]; i++) {
        snprintf(paths[i], sizeof paths[i], "%s/%s", scratch, in[i]);
        argv[argc++] = paths[i];
    }
    char target[256];
    snprintf(target, sizeof target, "%s/%s", scratch, out);
    argv[argc++] = "-o";
    argv[argc++] = target;
    argv[argc++] = "--shard-bytes";
    argv[argc++] = shard_bytes;
    FILE *told = tmpfile();
    fflush(stderr);
    int saved = dup(STDERR_FILENO);
    dup2(fileno(told), STDERR_FILENO);
    int exit_status = command_merge.run(argc, argv);
    fflush(stderr);
    dup2(saved, STDERR_FILENO);
    close(saved);
    rewind(told);
    said[fread(said, 1, sizeof said - 1, told)] = 0;
    fclose(told);
    return exit_status;
}

static const char *const parts[] = {"part-2", "part-0", "part-1", NULL};

static job part_job(const char *name, uint64_t index) {
    job j = job_defaults(in_scratch(name));
    j.index = index;
    j.of = N_PARTS;
    j.shard_bytes = 20000;
    j.n_lines = MERGE_LINES;
    return j;
}

static job whole_job(const char *name) {
    job j = job_defaults(in_scratch(name));
    j.n_lines = MERGE_LINES;
    return j;
}

static int make_parts(void **state) {
    if (make_scratch(state) != 0) return -1;
    for (uint64_t i = 0; i < N_PARTS; i++) {
        char name[16];
        snprintf(name, sizeof name, "part-%d", (int)i);
        job j = part_job(name, i);
        finish_and_check(&j);
    }
    return 0;
}

static void expect_merged(const char *out) {
    check_manifest(in_scratch(out), true);
    check_records(in_scratch(out), 0, 1, MERGE_LINES);
}

static void expect_refused(const char *const in[], const char *why) {
    assert_int_equal(merge("refused", in), 1);
    if (!strstr(said, why)) fail_msg("it said: %s", said);
}

static void test_parts_become_the_whole(void **state) {
    (void)state;
    assert_int_equal(merge("whole", parts), 0);
    assert_non_null(strstr(said, "900 records (128 of them errors) of 3 parts, 1544 samples"));
    expect_merged("whole");
    cop_error err;
    json_t *m;
    assert_int_equal(manifest_read(&m, in_scratch("whole"), &err), COP_OK);
    assert_int_equal(json_integer_value(json_object_get(json_object_get(m, "input"), "lines")), JOB_LINES);
    assert_true(manifest_n_shards(m) > 1);
    json_decref(m);
    job j = whole_job("whole"); /* the run without a split finds it complete */
    dataset_writer *w;
    assert_int_equal(open_job(&w, &j, &err), COP_OK);
    assert_true(dataset_complete(w));
    dataset_close(w);
}

static void test_a_finished_merge_says_so(void **state) {
    (void)state;
    assert_int_equal(merge("twice", parts), 0);
    assert_non_null(strstr(said, "merged"));
    assert_int_equal(merge("twice", parts), 0);
    assert_non_null(strstr(said, "already complete"));
    expect_merged("twice");
}

static void test_one_data_set_is_verified_and_copied(void **state) {
    (void)state;
    job j = whole_job("single");
    finish_and_check(&j);
    static const char *const one[] = {"single", NULL};
    assert_int_equal(merge("copy", one), 0);
    expect_merged("copy");
    assert_int_equal(merge("single", one), 0); /* into itself: it is there */
    assert_non_null(strstr(said, "already complete"));
    expect_merged("single");
}

static int merge_alone(const void *out) { return merge(out, parts); }

static void test_a_merge_that_crashed_goes_on(void **state) {
    (void)state;
    int n = 0;
    for (bool crashed = true; crashed; n++) {
        shell("rm -rf '%s'", in_scratch("crashed"));
        crashed = crashes(merge_alone, "crashed", CRASH_MIDWAY, n);
        assert_int_equal(merge("crashed", parts), 0);
        expect_merged("crashed");
    }
    assert_true(n > 20);
}

/* What was copied already stays where it is, whole shards and a growing one. */
static void test_a_merge_goes_on_anywhere(void **state) {
    (void)state;
    for (uint64_t n = 0; n <= MERGE_LINES; n += 75) {
        shell("rm -rf '%s'", in_scratch("resumed"));
        job j = whole_job("resumed");
        j.n_lines = n;
        j.unfinished = true;
        cop_error err;
        assert_int_equal(run_job(&j, &err), COP_OK);
        assert_int_equal(merge("resumed", parts), 0);
        expect_merged("resumed");
    }
}

static void test_parts_must_be_all_there_once(void **state) {
    (void)state;
    static const char *const missing[] = {"part-2", "part-0", NULL};
    expect_refused(missing, "part 1 of 3 (from 0) is missing");
    static const char *const twice[] = {"part-0", "part-1", "part-1", NULL};
    expect_refused(twice, "are both part 1 of 3");
    static const char *const absent[] = {"part-0", "nowhere", NULL};
    expect_refused(absent, "nowhere\": it is no data set");
    mkdir(in_scratch("bare"), 0777);
    static const char *const bare[] = {"bare", NULL};
    expect_refused(bare, "bare\": it is no data set");
    assert_int_not_equal(access(in_scratch("refused"), F_OK), 0);
}

static void test_parts_must_be_complete(void **state) {
    (void)state;
    job j = part_job("running", 1);
    j.unfinished = true;
    cop_error err;
    assert_int_equal(run_job(&j, &err), COP_OK);
    static const char *const in[] = {"part-0", "running", "part-2", NULL};
    expect_refused(in, "running\": it is not complete; the `coppice generate` that wrote it goes on");
}

static void test_parts_must_be_of_one_run(void **state) {
    (void)state;
    job j = part_job("other", 1);
    j.parameter = "b";
    finish_and_check(&j);
    static const char *const in[] = {"part-0", "other", "part-2", NULL};
    expect_refused(in, "of another run: parameters.name was \"a\" and is \"b\"");
    j = part_job("quarter", 1);
    j.of = 4;
    finish_and_check(&j);
    static const char *const quarter[] = {"part-0", "quarter", "part-2", NULL};
    expect_refused(quarter, "one of 4");
}

static void test_damaged_parts_are_refused(void **state) {
    (void)state;
    shell("cp -r '%s' '%s'", in_scratch("part-1"), in_scratch("damaged"));
    const char *shard = in_scratch("damaged/shard-00000.zst");
    size_t n;
    uint8_t *bytes = read_file(shard, &n);
    for (size_t at = 0; at < n; at += n / 7) {
        bytes[at] ^= 1;
        write_file(shard, bytes, n);
        static const char *const in[] = {"part-0", "damaged", "part-2", NULL};
        expect_refused(in, "it is damaged: its xxh128 is");
        bytes[at] ^= 1;
    }
    write_file(shard, bytes, n - 1);
    static const char *const in[] = {"part-0", "damaged", "part-2", NULL};
    expect_refused(in, "it became shorter");
    write_file(shard, bytes, n); /* mended, the merge goes on in the same folder */
    assert_int_equal(merge("refused", in), 0);
    expect_merged("refused");
    free(bytes);
}

/* The manifest of a part claims lines that are another part's. */
static void test_records_out_of_place_are_refused(void **state) {
    (void)state;
    shell("cp -r '%s' '%s'", in_scratch("part-1"), in_scratch("moved"));
    shell("sed -i 's/\"index\": 1/\"index\": 2/' '%s'", in_scratch("moved/manifest.json"));
    static const char *const in[] = {"part-0", "part-1", "moved", NULL};
    assert_int_equal(merge("misplaced", in), 1);
    assert_non_null(strstr(said, "a record of line 1 is out of place in part 2 of 3"));
}

static void test_what_is_there_must_be_of_the_parts(void **state) {
    (void)state;
    job j = job_defaults(in_scratch("short"));
    j.n_lines = 25;
    finish_and_check(&j);
    assert_int_equal(merge("short", parts), 1);
    assert_non_null(strstr(said, "it has 25 records"));
    j = job_defaults(in_scratch("foreign"));
    j.parameter = "b";
    finish_and_check(&j);
    assert_int_equal(merge("foreign", parts), 1);
    assert_non_null(strstr(said, "parameters.name was \"b\" and is \"a\""));
}

static void test_wrong_command_lines_are_told(void **state) {
    (void)state;
    static const char *const none[] = {NULL};
    assert_int_equal(merge("nothing", none), 2);
    assert_non_null(strstr(said, "merge needs data sets"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_parts_become_the_whole),
        cmocka_unit_test(test_a_finished_merge_says_so),
        cmocka_unit_test(test_one_data_set_is_verified_and_copied),
        cmocka_unit_test(test_a_merge_that_crashed_goes_on),
        cmocka_unit_test(test_a_merge_goes_on_anywhere),
        cmocka_unit_test(test_parts_must_be_all_there_once),
        cmocka_unit_test(test_damaged_parts_are_refused),
        cmocka_unit_test(test_records_out_of_place_are_refused),
        cmocka_unit_test(test_parts_must_be_complete),
        cmocka_unit_test(test_parts_must_be_of_one_run),
        cmocka_unit_test(test_what_is_there_must_be_of_the_parts),
        cmocka_unit_test(test_wrong_command_lines_are_told),
    };
    return cmocka_run_group_tests(tests, make_parts, remove_scratch);
}
