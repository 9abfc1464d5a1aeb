/* Folders of data sets: which may be written into, and what in them is not ours. */
#include "tests/unit/dataset_fixture.h"

static void test_another_identity_is_refused_with_every_difference(void **state) {
    (void)state;
    job j = job_defaults(in_scratch("identity"));
    finish_and_check(&j);
    j.parameter = "b";
    j.of = 2;
    cop_error err;
    assert_int_equal(run_job(&j, &err), COP_EINVAL);
    assert_non_null(strstr(err.message, "parameters.name was \"a\" and is \"b\""));
    assert_non_null(strstr(err.message, "split.of was 1 and is 2"));
    assert_null(strstr(err.message, "temperature"));
    j = job_defaults(in_scratch("identity"));
    finish_and_check(&j);
}

static void test_differences_fill_the_room_and_are_counted_beyond(void **state) {
    (void)state;
    json_t *was = json_pack("{s:{s:f, s:i, s:[i]}}", "p", "temperature", 1.0, "gone", 5, "list", 1);
    json_t *is = json_pack("{s:{s:f, s:[i], s:s}}", "p", "temperature", 0.1 + 0.2, "list", 2, "new", "x");
    char text[400];
    assert_int_equal(manifest_differences(text, sizeof text, was, was), 0);
    assert_string_equal(text, "");
    assert_int_equal(manifest_differences(text, sizeof text, was, is), 4);
    assert_string_equal(text,
                        "p.temperature was 1.0 and is 0.30000000000000004; p.gone was 5 and is not set; "
                        "p.list was [1] and is [2]; p.new was not set and is \"x\"");
    assert_int_equal(manifest_differences(text, 80, was, is), 4);
    assert_string_equal(text, "p.temperature was 1.0 and is 0.30000000000000004; and 3 more");
    json_decref(was);
    json_decref(is);
}

static void test_foreign_files_are_left_alone(void **state) {
    (void)state;
    job j = job_defaults(in_scratch("foreign"));
    cop_error err;
    dataset_writer *w;
    assert_int_equal(open_job(&w, &j, &err), COP_OK);
    dataset_close(w);
    static const char *const names[] = {"foreign/notes.txt", "foreign/shard-1.zst",
                                        "foreign/shard-00001.zst.bak", "foreign/shard-000001.zst",
                                        "foreign/shard-00002.zs"};
    for (int i = 0; i < 5; i++) write_file(in_scratch(names[i]), "mine", 4);
    finish_and_check(&j);
    for (int i = 0; i < 5; i++) {
        size_t n;
        char *bytes = (char *)read_file(in_scratch(names[i]), &n);
        assert_string_equal(bytes, "mine");
        free(bytes);
    }
}

static void test_a_folder_of_other_things_is_refused(void **state) {
    (void)state;
    job j = job_defaults(in_scratch("house"));
    cop_error err;
    char due[400];
    snprintf(due, sizeof due,
             "cannot write into \"%s\": it is no data set and not empty; give a folder of its own", j.dir);
    static const char *const names[] = {"house/notes.txt", "house/.hidden", "house/shard-00000.zst",
                                        "house/held.zst", "house/manifest.json.bak"};
    for (int i = 0; i < 5; i++) {
        mkdir(j.dir, 0777);
        write_file(in_scratch(names[i]), "mine", 4);
        assert_int_equal(run_job(&j, &err), COP_EINVAL);
        assert_string_equal(err.message, due);
        assert_int_equal(file_size(in_scratch(names[i])), 4);
        shell("test $(ls -A '%s' | wc -l) = 1 && rm -r '%s'", j.dir, j.dir);
    }
    mkdir(j.dir, 0777); /* but a crash may leave this one */
    write_file(in_scratch("house/manifest.json.tmp"), "{", 1);
    finish_and_check(&j);
}

/* Nothing would be lost: a mistyped option must not tie up the folder. */
static void test_an_empty_set_takes_another_identity(void **state) {
    (void)state;
    static const struct {
        const char *shard;
        size_t n;
    } empty[] = {{NULL, 0}, {"", 0}, {"\x28\xB5", 2}, {"\x28\xB5\x2F\xFD\x64 torn", 10}, {"\0\0\0\0\0", 5}};
    for (size_t i = 0; i < sizeof empty / sizeof empty[0]; i++) {
        job j = job_defaults(in_scratch("anew"));
        shell("rm -rf '%s'", j.dir);
        cop_error err;
        dataset_writer *w;
        j.n_lines = 0;
        j.unfinished = i != 0; /* the first is complete */
        assert_int_equal(open_job(&w, &j, &err), COP_OK);
        dataset_note(w, "input", json_pack("{s:i}", "lines", 7));
        assert_int_equal(write_lines(w, &j, &err), COP_OK);
        dataset_close(w);
        if (empty[i].shard) write_file(in_scratch("anew/shard-00000.zst"), empty[i].shard, empty[i].n);
        j.parameter = "b";
        if (open_job(&w, &j, &err) != COP_OK) fail_msg("case %zu: %s", i, err.message);
        assert_false(dataset_complete(w));
        assert_null(dataset_noted(w, "input")); /* that was the other one's */
        dataset_close(w);
        j = job_defaults(in_scratch("anew"));
        j.parameter = "b";
        finish_and_check(&j);
        json_t *m;
        assert_int_equal(manifest_read(&m, j.dir, &err), COP_OK);
        assert_string_equal(json_string_value(json_object_get(json_object_get(m, "parameters"), "name")),
                            "b");
        json_decref(m);
    }
}

static void test_what_holds_anything_keeps_its_identity(void **state) {
    (void)state;
    job j = growing_job(in_scratch("bound"));
    uint64_t starts[JOB_LINES];
    cop_error err;
    grow(&j, starts);
    const char *shard = in_scratch("bound/shard-00000.zst"), *held = in_scratch("bound/held.zst");
    size_t n;
    uint8_t *bytes = read_file(shard, &n);
    j.parameter = "b";
    assert_int_equal(truncate(shard, (off_t)starts[1]), 0); /* a single frame */
    assert_int_equal(run_job(&j, &err), COP_EINVAL);
    assert_non_null(strstr(err.message, "parameters.name was \"a\" and is \"b\""));
    bytes[starts[0]] ^= 0xFF; /* a damaged one, and whole ones */
    write_file(shard, bytes, n);
    assert_int_equal(run_job(&j, &err), COP_EINVAL);
    assert_int_equal(file_size(shard), n);
    unlink(shard);
    write_file(held, "held", 4);
    assert_int_equal(run_job(&j, &err), COP_EINVAL);
    unlink(held);
    write_file(in_scratch("bound/shard-00003.zst"), "mine",
               4); /* of no identity, but not ours to write around */
    assert_int_equal(run_job(&j, &err), COP_EINVAL);
    assert_non_null(strstr(err.message, "shard-00003.zst"));
    unlink(in_scratch("bound/shard-00003.zst"));
    assert_int_equal(run_job(&j, &err), COP_OK);
    free(bytes);
}

static void test_a_growing_shard_that_is_none_of_ours_is_left_alone(void **state) {
    (void)state;
    static const char *const foreign[] = {"mine", "m", "\x28mine", "\x28\xB5\x2Fmine", "\x1F\x8B\x08"};
    for (size_t i = 0; i < sizeof foreign / sizeof foreign[0]; i++) {
        for (int other = 0; other < 2; other++) { /* with the same identity and another one */
            job j = growing_job(in_scratch("alien"));
            shell("rm -rf '%s'", j.dir);
            cop_error err;
            dataset_writer *w;
            assert_int_equal(open_job(&w, &j, &err), COP_OK);
            dataset_close(w);
            const char *path = in_scratch("alien/shard-00000.zst");
            write_file(path, foreign[i], strlen(foreign[i]));
            if (other) j.parameter = "b";
            assert_int_equal(run_job(&j, &err), COP_EFORMAT);
            assert_non_null(strstr(err.message, path));
            assert_non_null(strstr(err.message, "it is no shard"));
            assert_int_equal(file_size(path), strlen(foreign[i]));
            json_t *m;
            assert_int_equal(manifest_read(&m, j.dir, &err), COP_OK);
            assert_string_equal(json_string_value(json_object_get(json_object_get(m, "parameters"), "name")),
                                "a");
            json_decref(m);
        }
    }
}

static void test_shards_that_the_manifest_does_not_know_are_refused(void **state) {
    (void)state;
    job j = job_defaults(in_scratch("beyond"));
    cop_error err;
    j.unfinished = true;
    assert_int_equal(run_job(&j, &err), COP_OK);
    write_file(in_scratch("beyond/shard-00042.zst"), "mine", 4);
    j.unfinished = false;
    assert_int_equal(run_job(&j, &err), COP_EINVAL);
    assert_non_null(strstr(err.message, "shard-00042.zst"));
    unlink(in_scratch("beyond/shard-00042.zst"));
    finish_and_check(&j);
    json_t *m;
    assert_int_equal(manifest_read(&m, j.dir, &err), COP_OK);
    char next[64];
    snprintf(next, sizeof next, "beyond/shard-%05d.zst", (int)manifest_n_shards(m));
    json_decref(m);
    write_file(in_scratch(next), "", 0); /* behind a complete set there is no growing shard */
    assert_int_equal(run_job(&j, &err), COP_EINVAL);
}

static void test_complete_shards_must_be_there(void **state) {
    (void)state;
    job j = job_defaults(in_scratch("there"));
    finish_and_check(&j);
    const char *path = in_scratch("there/shard-00001.zst");
    cop_error err;
    size_t n;
    uint8_t *bytes = read_file(path, &n);
    write_file(path, bytes, n - 1);
    assert_int_equal(run_job(&j, &err), COP_EIO);
    assert_non_null(strstr(err.message, "\"shard-00001.zst\" has"));
    record_source *s;
    const shard_view *v;
    bool more = true;
    cop_status status = record_source_open(&s, j.dir, &err);
    while (status == COP_OK && more) status = record_source_next(s, &v, &more, &err);
    assert_int_equal(status, COP_EIO);
    record_source_close(s);
    unlink(path);
    assert_int_equal(run_job(&j, &err), COP_EIO);
    assert_non_null(strstr(err.message, "No such file"));
    free(bytes);
}

static void test_one_process_writes_at_a_time(void **state) {
    (void)state;
    job j = job_defaults(in_scratch("lock"));
    cop_error err;
    dataset_writer *w, *other;
    assert_int_equal(open_job(&w, &j, &err), COP_OK);
    assert_int_equal(open_job(&other, &j, &err), COP_EUNSUPPORTED);
    assert_null(other);
    assert_non_null(strstr(err.message, "another process"));
    dataset_close(w);
    finish_and_check(&j);
}

static void test_a_complete_set_stays_as_it_is(void **state) {
    (void)state;
    job j = job_defaults(in_scratch("complete"));
    finish_and_check(&j);
    struct stat before, after;
    assert_int_equal(stat(in_scratch("complete/manifest.json"), &before), 0);
    cop_error err;
    dataset_writer *w;
    j.shard_bytes = 1;
    assert_int_equal(open_job(&w, &j, &err), COP_OK);
    assert_true(dataset_complete(w));
    assert_int_equal(dataset_next_line(w), JOB_LINES);
    assert_int_equal(dataset_totals(w)->records, JOB_LINES);
    assert_int_equal(dataset_finish(w, &err), COP_OK);
    dataset_close(w);
    assert_int_equal(stat(in_scratch("complete/manifest.json"), &after), 0);
    assert_int_equal(before.st_ino, after.st_ino);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_another_identity_is_refused_with_every_difference),
        cmocka_unit_test(test_differences_fill_the_room_and_are_counted_beyond),
        cmocka_unit_test(test_foreign_files_are_left_alone),
        cmocka_unit_test(test_a_folder_of_other_things_is_refused),
        cmocka_unit_test(test_an_empty_set_takes_another_identity),
        cmocka_unit_test(test_what_holds_anything_keeps_its_identity),
        cmocka_unit_test(test_a_growing_shard_that_is_none_of_ours_is_left_alone),
        cmocka_unit_test(test_shards_that_the_manifest_does_not_know_are_refused),
        cmocka_unit_test(test_complete_shards_must_be_there),
        cmocka_unit_test(test_one_process_writes_at_a_time),
        cmocka_unit_test(test_a_complete_set_stays_as_it_is),
    };
    return cmocka_run_group_tests(tests, make_scratch, remove_scratch);
}
