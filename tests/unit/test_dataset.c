/* Data sets on disk: whatever stops the process, the same command goes on and each record stands once. */
#include "tests/unit/dataset_fixture.h"

#include <zstd.h>

static void test_records_come_back_from_folder_and_shard(void **state) {
    (void)state;
    job j = job_defaults(in_scratch("plain"));
    finish_and_check(&j);
    cop_error err;
    json_t *m;
    assert_int_equal(manifest_read(&m, j.dir, &err), COP_OK);
    assert_true(manifest_n_shards(m) >= 3);
    uint64_t last = manifest_shard_at(m, 0).last_line;
    assert_true(manifest_shard_at(m, 0).bytes >= j.shard_bytes);
    assert_int_equal(json_integer_value(json_object_get(json_object_get(m, "input"), "lines")), JOB_LINES);
    assert_string_equal(json_string_value(json_object_get(json_object_get(m, "about"), "program")), "test");
    json_decref(m);
    check_records(in_scratch("plain/shard-00000.zst"), 0, 1, last + 1);
}

static void test_records_come_back_through_a_pipe(void **state) {
    (void)state;
    job j = job_defaults(in_scratch("piped"));
    finish_and_check(&j);
    int saved = dup(STDIN_FILENO);
    char command[600];
    snprintf(command, sizeof command, "cat %s/shard-*.zst", j.dir);
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    assert_int_equal(dup2(fileno(pipe), STDIN_FILENO), STDIN_FILENO);
    check_records("-", 0, 1, JOB_LINES);
    pclose(pipe);
    dup2(saved, STDIN_FILENO);
    close(saved);
}

static void test_counts_are_those_of_the_records(void **state) {
    (void)state;
    job j = job_defaults(in_scratch("counts"));
    j.unfinished = true;
    cop_error err;
    dataset_writer *w;
    dataset_counts before;
    assert_int_equal(open_job(&w, &j, &err), COP_OK);
    assert_int_equal(dataset_next_line(w), 0);
    assert_int_equal(write_lines(w, &j, &err), COP_OK);
    before = *dataset_totals(w);
    dataset_close(w);
    assert_int_equal(before.records, 30);
    assert_int_equal(before.errors, 4);
    assert_int_equal(before.samples, 52);
    assert_int_equal(before.sampled_tokens, 26 * (18 + 4));
    assert_int_equal(before.forced_tokens, 26 * (6 + 1));
    assert_int_equal(open_job(&w, &j, &err), COP_OK); /* counts the growing shard's records */
    assert_memory_equal(dataset_totals(w), &before, sizeof before);
    assert_int_equal(dataset_next_line(w), JOB_LINES);
    assert_int_equal(json_integer_value(json_object_get(dataset_noted(w, "input"), "lines")), JOB_LINES);
    dataset_close(w);
}

static void test_nothing_is_in_the_file_before_a_frame_is_full(void **state) {
    (void)state;
    job j = job_defaults(in_scratch("buffered"));
    cop_error err;
    dataset_writer *w;
    assert_int_equal(open_job(&w, &j, &err), COP_OK);
    assert_false(dataset_has_unflushed(w));
    assert_int_equal(append_line(w, 0, &err), COP_OK);
    assert_true(dataset_has_unflushed(w));
    assert_int_not_equal(access(in_scratch("buffered/shard-00000.zst"), F_OK), 0);
    uint64_t line = 1;
    while (dataset_has_unflushed(w)) assert_int_equal(append_line(w, line++, &err), COP_OK);
    assert_true(line > 100); /* a frame's worth */
    assert_int_equal(access(in_scratch("buffered/shard-00000.zst"), F_OK), 0);
    dataset_close(w);
    check_records(j.dir, 0, 1, line);
}

static void test_an_empty_data_set_is_complete_too(void **state) {
    (void)state;
    job j = job_defaults(in_scratch("empty"));
    j.n_lines = 0;
    finish_and_check(&j);
    finish_and_check(&j);
}

/* ---- Crashes. */

static int run_job_alone(const void *context) {
    cop_error err;
    return run_job(context, &err) == COP_OK ? 0 : 1;
}

static void crash_at_every_call(fault_kind kind, const char *dir) {
    job j = job_defaults(dir);
    int n = 0;
    for (bool crashed = true; crashed; n++) {
        shell("rm -rf '%s'", j.dir);
        crashed = crashes(run_job_alone, &j, kind, n);
        finish_and_check(&j);
    }
    assert_true(n > 50);
}

static void test_a_crash_before_any_system_call(void **state) {
    (void)state;
    crash_at_every_call(CRASH_BEFORE, in_scratch("before"));
}

static void test_a_crash_in_the_middle_of_any_write(void **state) {
    (void)state;
    crash_at_every_call(CRASH_MIDWAY, in_scratch("midway"));
}

static void test_a_crash_after_any_system_call(void **state) {
    (void)state;
    crash_at_every_call(CRASH_AFTER, in_scratch("after"));
}

static void test_crashes_again_and_again(void **state) {
    (void)state;
    job j = job_defaults(in_scratch("again"));
    int rounds = 1;
    while (crashes(run_job_alone, &j, CRASH_MIDWAY, 12 + rounds % 7)) rounds++;
    assert_true(rounds > 5);
    finish_and_check(&j);
}

/* Between the fsync of a full shard and the manifest: the shard is complete when the folder is opened. */
static void test_a_full_shard_becomes_complete_on_opening(void **state) {
    (void)state;
    job j = job_defaults(in_scratch("full"));
    j.unfinished = true;
    j.shard_bytes = 1 << 20;
    cop_error err;
    json_t *m;
    assert_int_equal(run_job(&j, &err), COP_OK);
    check_manifest(j.dir, false);
    j.shard_bytes = file_size(in_scratch("full/shard-00000.zst"));
    dataset_writer *w;
    assert_int_equal(open_job(&w, &j, &err), COP_OK);
    assert_int_equal(manifest_read(&m, j.dir, &err), COP_OK);
    assert_int_equal(manifest_n_shards(m), 1);
    assert_int_equal(manifest_shard_at(m, 0).counts.records, JOB_LINES);
    json_decref(m);
    assert_int_equal(dataset_finish(w, &err), COP_OK);
    dataset_close(w);
    check_manifest(j.dir, true);
    check_records(j.dir, 0, 1, JOB_LINES);
}

static void test_an_empty_shard_is_no_part_of_a_complete_set(void **state) {
    (void)state;
    job j = job_defaults(in_scratch("hollow"));
    j.n_lines = 0;
    j.unfinished = true;
    cop_error err;
    assert_int_equal(run_job(&j, &err), COP_OK);
    write_file(in_scratch("hollow/shard-00000.zst"), "\x28\xB5", 2);
    j.unfinished = false;
    finish_and_check(&j);
    assert_int_not_equal(access(in_scratch("hollow/shard-00000.zst"), F_OK), 0);
}

static void test_what_the_manifest_tells_is_durable(void **state) {
    (void)state;
    job j = job_defaults(in_scratch("durable"));
    volatile_state.watching = true;
    finish_and_check(&j);
    assert_true(volatile_state.n_shards >= 3);
    assert_false(volatile_state.shard || volatile_state.entry || volatile_state.temporary);
}

static int stop_watching(void **state) {
    (void)state;
    volatile_state.watching = false;
    return 0;
}

/* ---- Errors of the disk. */

static void test_a_full_disk_is_told_and_a_rerun_goes_on(void **state) {
    (void)state;
    job j = job_defaults(in_scratch("nospace"));
    int n = 0, cut = 0, harmless = 0;
    cop_error err;
    for (bool fired = true; fired; n++) {
        shell("rm -rf '%s'", j.dir);
        arm(FAIL, n);
        cop_status status = run_job(&j, &err);
        fired = fault.fired;
        arm(NO_FAULT, 0);
        harmless += fired && status == COP_OK;
        if (status != COP_OK) {
            assert_true(fired);
            assert_int_equal(status, COP_EIO);
            assert_non_null(strstr(err.message, "No space left on device"));
            assert_non_null(strstr(err.message, j.dir));
            cut += strstr(err.message, "could not write") && strstr(err.message, "shard-");
        }
        finish_and_check(&j);
    }
    assert_true(n > 50 && cut > 5);
    assert_int_equal(harmless, 1); /* opening the folder's parent, to make the new folder durable */
}

static void test_the_same_writer_may_try_again(void **state) {
    (void)state;
    job j = job_defaults(in_scratch("retry"));
    j.retries = 1;
    cop_error err;
    bool fired = true;
    for (int n = 11; fired; n++) { /* past opening the folder, which is not tried again */
        shell("rm -rf '%s'", j.dir);
        arm(FAIL, n);
        cop_status status = run_job(&j, &err);
        fired = fault.fired;
        arm(NO_FAULT, 0);
        if (status != COP_OK) fail_msg("call %d: %s", n, err.message);
        check_manifest(j.dir, true);
        check_records(j.dir, 0, 1, JOB_LINES);
    }
}

/* The manifest that completes a shard was renamed, though an error came after: the shard must not grow. */
static void test_a_shard_that_may_be_told_complete_grows_no_more(void **state) {
    (void)state;
    job j = job_defaults(in_scratch("told"));
    j.shard_bytes = 1;
    cop_error err;
    dataset_writer *w;
    bool fired = true;
    for (int n = 0; fired; n++) {
        shell("rm -rf '%s'", j.dir);
        assert_int_equal(open_job(&w, &j, &err), COP_OK);
        assert_int_equal(append_line(w, 0, &err), COP_OK);
        arm(FAIL, 9); /* create, write, two fsyncs, five calls for the manifest, and the folder's fsync */
        assert_int_equal(dataset_flush(w, &err), COP_EIO);
        assert_non_null(strstr(err.message, "manifest.json"));
        arm(NO_FAULT, 0);
        assert_int_equal(append_line(w, 1, &err), COP_OK);
        arm(FAIL, n);
        cop_status status = dataset_flush(w, &err);
        fired = fault.fired;
        arm(NO_FAULT, 0);
        assert_int_equal(status, fired ? COP_EIO : COP_OK);
        dataset_close(w);
        finish_and_check(&j);
    }
}

/* A short write: what was written is cut off at once, so that readers see whole frames. */
static void test_a_torn_frame_is_cut_off_at_once(void **state) {
    (void)state;
    job j = job_defaults(in_scratch("short"));
    j.shard_bytes = 1 << 20;
    j.unfinished = true;
    cop_error err;
    dataset_writer *w;
    assert_int_equal(open_job(&w, &j, &err), COP_OK);
    assert_int_equal(write_lines(w, &j, &err), COP_OK);
    size_t before = file_size(in_scratch("short/shard-00000.zst"));
    assert_int_equal(append_line(w, JOB_LINES, &err), COP_OK);
    arm(FAIL, 0);
    assert_int_equal(dataset_flush(w, &err), COP_EIO);
    arm(NO_FAULT, 0);
    assert_int_equal(file_size(in_scratch("short/shard-00000.zst")), before);
    assert_true(dataset_has_unflushed(w));
    assert_int_equal(dataset_flush(w, &err), COP_OK);
    dataset_close(w);
    check_records(j.dir, 0, 1, JOB_LINES + 1);
}

/* Records may be behind what the manifest notes, never before it. */
static void test_a_note_is_written_before_the_records(void **state) {
    (void)state;
    job j = job_defaults(in_scratch("note"));
    cop_error err;
    dataset_writer *w;
    assert_int_equal(open_job(&w, &j, &err), COP_OK);
    dataset_note(w, "input", json_pack("{s:i}", "lines", 7));
    assert_int_equal(append_line(w, 0, &err), COP_OK);
    arm(FAIL, 6); /* writing the manifest takes six calls, the next makes the shard */
    assert_int_equal(dataset_flush(w, &err), COP_EIO);
    arm(NO_FAULT, 0);
    assert_non_null(strstr(err.message, "could not create"));
    json_t *m;
    assert_int_equal(manifest_read(&m, j.dir, &err), COP_OK);
    assert_int_equal(json_integer_value(json_object_get(json_object_get(m, "input"), "lines")), 7);
    json_decref(m);
    dataset_close(w);
}

/* ---- Torn and damaged shards. */

/* Put the shard and the manifest back as they were. */
static void restore(const char *shard, const uint8_t *bytes, size_t n, const char *manifest,
                    const uint8_t *text, size_t n_text) {
    write_file(shard, bytes, n);
    write_file(manifest, text, n_text);
}

static void test_a_shard_cut_anywhere_goes_on(void **state) {
    (void)state;
    job j = growing_job(in_scratch("cut"));
    uint64_t starts[JOB_LINES];
    int n_frames = grow(&j, starts);
    assert_int_equal(n_frames, JOB_LINES / FRAME_LINES);
    char shard[300], manifest[300];
    snprintf(shard, sizeof shard, "%s/shard-00000.zst", j.dir);
    snprintf(manifest, sizeof manifest, "%s/manifest.json", j.dir);
    size_t n, n_text;
    uint8_t *bytes = read_file(shard, &n), *text = read_file(manifest, &n_text);
    j.unfinished = false;
    for (size_t cut = starts[n_frames - 2]; cut <= n; cut++) {
        restore(shard, bytes, cut, manifest, text, n_text);
        /* What a reader sees before the repair: the whole frames. */
        uint64_t whole = cut == n ? JOB_LINES : JOB_LINES - (cut < starts[n_frames - 1] ? 6 : 3);
        check_records(j.dir, 0, 1, whole);
        finish_and_check(&j);
    }
    /* Zeros in place of the last frame and far beyond, as a power failure may leave them. */
    uint8_t *zeros = calloc(1, n + 5000);
    memcpy(zeros, bytes, starts[n_frames - 1]);
    restore(shard, zeros, n + 5000, manifest, text, n_text);
    free(zeros);
    finish_and_check(&j);
    free(bytes);
    free(text);
}

static void test_a_flipped_byte_is_torn_at_the_end_and_damage_elsewhere(void **state) {
    (void)state;
    job j = growing_job(in_scratch("flip"));
    uint64_t starts[JOB_LINES];
    int n_frames = grow(&j, starts), refused = 0;
    char shard[300], manifest[300];
    snprintf(shard, sizeof shard, "%s/shard-00000.zst", j.dir);
    snprintf(manifest, sizeof manifest, "%s/manifest.json", j.dir);
    size_t n, n_text;
    uint8_t *bytes = read_file(shard, &n), *text = read_file(manifest, &n_text);
    j.unfinished = false;
    for (size_t at = starts[n_frames - 2]; at < n; at++) {
        bytes[at] ^= 0xFF;
        restore(shard, bytes, n, manifest, text, n_text);
        cop_error err;
        if (at >= starts[n_frames - 1]) {
            finish_and_check(&j);
        } else {
            assert_int_equal(run_job(&j, &err), COP_EFORMAT);
            assert_non_null(strstr(err.message, "is damaged"));
            assert_int_equal(file_size(shard), n);
            refused++;
        }
        bytes[at] ^= 0xFF;
    }
    assert_true(refused > 100);
    free(bytes);
    free(text);
}

/* Who reads while a run goes on may have read zeros where it cuts them off and writes frames: no damage. */
static void test_a_frame_that_became_whole_meanwhile_is_no_damage(void **state) {
    (void)state;
    job j = growing_job(in_scratch("meanwhile"));
    uint64_t starts[JOB_LINES], n_records = 0;
    int n_frames = grow(&j, starts);
    size_t n;
    const char *path = in_scratch("meanwhile/shard-00000.zst");
    uint8_t *bytes = read_file(path, &n);
    for (int damaged = 0; damaged < 2; damaged++) {
        uint8_t *zeros = calloc(1, n);
        memcpy(zeros, bytes, starts[n_frames - 2]);
        write_file(path, zeros, n);
        free(zeros);
        record_source *s;
        const shard_view *v;
        cop_error err;
        bool more = true;
        assert_int_equal(record_source_open(&s, j.dir, &err), COP_OK);
        assert_int_equal(record_source_next(s, &v, &more, &err), COP_OK); /* all that is there by now */
        if (damaged) bytes[starts[n_frames - 2] + 10] ^= 0xFF;
        write_file(path, bytes, n);
        cop_status status = COP_OK;
        for (n_records = 1; status == COP_OK && more; n_records += status == COP_OK && more)
            status = record_source_next(s, &v, &more, &err);
        assert_int_equal(status, damaged ? COP_EFORMAT : COP_OK);
        record_source_close(s);
    }
    free(bytes);
}

static void test_records_that_are_none_are_refused(void **state) {
    (void)state;
    static const struct {
        uint64_t lines[2];
        const char *bytes, *why;
    } cases[] = {
        {{5, 5}, NULL, "line 5 comes where line 6"},
        {{5, 4}, NULL, "line 4 comes where line 6"},
        {{0}, "\x01\x02", "it is no map"},
        {{0}, "\xC1", "frame at byte 0"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        job j = growing_job(in_scratch("wrong"));
        shell("rm -rf '%s'", j.dir);
        cop_error err;
        j.n_lines = 0;
        assert_int_equal(run_job(&j, &err), COP_OK);
        uint8_t content[8192];
        size_t n = 0, n_frame;
        const uint8_t *made;
        for (int k = 0; k < 2 && !cases[i].bytes; k++) {
            wire_buffer b = record_of(cases[i].lines[k]);
            memcpy(content + n, b.bytes, b.n);
            n += b.n;
            wire_buffer_free(&b, NULL);
        }
        if (cases[i].bytes) memcpy(content, cases[i].bytes, n = strlen(cases[i].bytes));
        frame_encoder *e;
        assert_int_equal(frame_encoder_open(&e, &err), COP_OK);
        assert_int_equal(frame_encode(e, content, n, &made, &n_frame, &err), COP_OK);
        write_file(in_scratch("wrong/shard-00000.zst"), made, n_frame);
        frame_encoder_close(e);
        assert_int_equal(run_job(&j, &err), COP_EFORMAT);
        if (!strstr(err.message, cases[i].why)) fail_msg("%s", err.message);
        assert_int_equal(file_size(in_scratch("wrong/shard-00000.zst")), n_frame);
    }
}

/* ---- Hostile manifests and streams. */

#define SHARD(number, more)                                                                                  \
    "{\"file\": \"shard-0000" number                                                                         \
    ".zst\", \"bytes\": 9, \"xxh128\": \"00000000000000000000000000000000\", "                               \
    "\"records\": 1, \"errors\": 0, \"samples\": 1, \"sampled_tokens\": 1, \"forced_tokens\": 0, " more "}"
#define MANIFEST(state, shards)                                                                              \
    "{\"format\": \"coppice.shards\", \"version\": 1, \"state\": \"" state "\", \"shards\": " shards "}"

static void test_manifests_that_are_none_are_refused(void **state) {
    (void)state;
    static const char *const bad[] = {
        "",
        "{",
        "[]",
        "{}",
        "{\"format\": \"other\"}",
        "{\"format\": \"coppice.shards\", \"version\": 2}",
        "{\"version\": 1, \"version\": 1}",
        MANIFEST("stopped", "[]"),
        MANIFEST("running", "{}"),
        MANIFEST("running", "[7]"),
        MANIFEST("running", "[{\"file\": \"../../etc/passwd\"}]"),
        MANIFEST("running", "[" SHARD("0", "\"first_line\": 2, \"last_line\": 1") "]"),
        MANIFEST("running", "[" SHARD("0", "\"first_line\": 0, \"last_line\": \"18446744073709551615\"") "]"),
        MANIFEST("running", "[" SHARD("0", "\"first_line\": 0, \"last_line\": -1") "]"),
        MANIFEST("running", "[" SHARD("0", "\"first_line\": 0") "]"),
        MANIFEST("running", "[" SHARD("1", "\"first_line\": 0, \"last_line\": 1") "]"),
        MANIFEST("running", "[" SHARD("0", "\"first_line\": 0, \"last_line\": 3") ", " SHARD(
                                "1", "\"first_line\": 3, \"last_line\": 4") "]"),
    };
    job j = job_defaults(in_scratch("hostile"));
    mkdir(j.dir, 0777);
    const char *path = in_scratch("hostile/manifest.json");
    cop_error err;
    json_t *m;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        write_file(path, bad[i], strlen(bad[i]));
        if (manifest_read(&m, j.dir, &err) != COP_EFORMAT) fail_msg("was taken: %s", bad[i]);
        assert_null(m);
        assert_int_equal(run_job(&j, &err), COP_EFORMAT);
        size_t n;
        char *still = (char *)read_file(path, &n);
        assert_string_equal(still, bad[i]);
        free(still);
    }
    static const char good[] =
        MANIFEST("running", "[" SHARD("0", "\"first_line\": 0, \"last_line\": 3") ", " SHARD(
                                "1", "\"first_line\": 4, \"last_line\": 4") "]");
    write_file(path, good, sizeof good - 1);
    assert_int_equal(manifest_read(&m, j.dir, &err), COP_OK);
    json_decref(m);
    unlink(path);
    assert_int_equal(mkfifo(path, 0666), 0); /* must not block */
    assert_int_equal(manifest_read(&m, j.dir, &err), COP_EFORMAT);
}

static cop_status read_all(const char *path, int *n_records, cop_error *err) {
    record_source *s;
    const shard_view *v;
    bool more = true;
    *n_records = 0;
    cop_status status = record_source_open(&s, path, err);
    while (status == COP_OK && more) {
        status = record_source_next(s, &v, &more, err);
        *n_records += status == COP_OK && more;
    }
    record_source_close(s);
    return status;
}

static void test_a_broken_shard_is_told_with_its_offset(void **state) {
    (void)state;
    job j = growing_job(in_scratch("broken"));
    uint64_t starts[JOB_LINES];
    int n_frames = grow(&j, starts), n_records;
    size_t n;
    uint8_t *bytes = read_file(in_scratch("broken/shard-00000.zst"), &n);
    const char *copy = in_scratch("broken.zst");
    char due[64];
    snprintf(due, sizeof due, "frame at byte %d", (int)starts[n_frames - 1]);
    cop_error err;
    for (size_t cut = starts[n_frames - 1] + 1; cut < n; cut++) { /* torn, and no growing shard */
        write_file(copy, bytes, cut);
        assert_int_equal(read_all(copy, &n_records, &err), COP_EFORMAT);
        assert_non_null(strstr(err.message, due));
        assert_int_equal(n_records, JOB_LINES - FRAME_LINES);
    }
    for (size_t at = starts[n_frames - 1]; at < n; at++) {
        bytes[at] ^= 0xFF;
        write_file(copy, bytes, n);
        assert_int_equal(read_all(copy, &n_records, &err), COP_EFORMAT);
        bytes[at] ^= 0xFF;
    }
    write_file(copy, "not a shard", 11);
    assert_int_equal(read_all(copy, &n_records, &err), COP_EFORMAT);
    assert_int_equal(read_all(in_scratch("nowhere"), &n_records, &err), COP_EIO);
    assert_int_equal(read_all(scratch, &n_records, &err), COP_ENOTFOUND);
    write_file(copy, "", 0);
    assert_int_equal(read_all(copy, &n_records, &err), COP_OK);
    assert_int_equal(n_records, 0);
    free(bytes);
}

/* The only record of `path` has these bytes. */
static void check_only_record(const char *path, const wire_buffer *due) {
    cop_error err;
    record_source *s;
    const shard_view *v;
    bool more;
    assert_int_equal(record_source_open(&s, path, &err), COP_OK);
    if (record_source_next(s, &v, &more, &err) != COP_OK) fail_msg("%s", err.message);
    assert_true(more);
    assert_int_equal(v->n_bytes, due->n);
    assert_memory_equal(v->bytes, due->bytes, due->n);
    assert_int_equal(record_source_next(s, &v, &more, &err), COP_OK);
    assert_false(more);
    record_source_close(s);
}

/* A record far longer than a frame's worth; and in a frame of another program, without a checksum. */
static void test_large_records_come_back(void **state) {
    (void)state;
    job j = job_defaults(in_scratch("large"));
    cop_error err;
    dataset_writer *w;
    const size_t n = 3 << 20;
    char *text = malloc(n);
    for (size_t i = 0; i < n; i++) text[i] = (char)('a' + i * i % 23);
    shard_failure f = {.line = 4, .prompt_id = wire_text_of("4"), .error = {text, n}};
    wire_buffer b;
    assert_true(shard_encode_failure(&b, &f, NULL));
    assert_int_equal(open_job(&w, &j, &err), COP_OK);
    dataset_counts one = {.records = 1, .errors = 1};
    assert_int_equal(dataset_append(w, 4, b.bytes, b.n, &one, &err), COP_OK);
    assert_false(dataset_has_unflushed(w));
    assert_int_equal(dataset_finish(w, &err), COP_OK);
    dataset_close(w);
    check_only_record(j.dir, &b);
    size_t cap = ZSTD_compressBound(b.n);
    uint8_t *plain = malloc(cap);
    size_t n_plain = ZSTD_compress(plain, cap, b.bytes, b.n, 1);
    assert_false(ZSTD_isError(n_plain));
    write_file(in_scratch("plain.zst"), plain, n_plain);
    check_only_record(in_scratch("plain.zst"), &b);
    free(plain);
    wire_buffer_free(&b, NULL);
    free(text);
}

static void test_every_allocation_may_fail(void **state) {
    (void)state;
    job j = job_defaults(in_scratch("memory"));
    int n_records;
    cop_error err;
    long live = mem_live();
    bool fired = true;
    for (int n = 0; fired; n++) {
        shell("rm -rf '%s'", j.dir);
        mem_fail_after(n);
        cop_status status = run_job(&j, &err);
        fired = mem_fail_stop();
        assert_int_equal(status, fired ? COP_ENOMEM : COP_OK);
        assert_int_equal(mem_live(), live);
        finish_and_check(&j);
    }
    fired = true;
    for (int n = 0; fired; n++) {
        mem_fail_after(n);
        cop_status status = read_all(j.dir, &n_records, &err);
        fired = mem_fail_stop();
        assert_int_equal(status, fired ? COP_ENOMEM : COP_OK);
        assert_int_equal(mem_live(), live);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_records_come_back_from_folder_and_shard),
        cmocka_unit_test(test_records_come_back_through_a_pipe),
        cmocka_unit_test(test_counts_are_those_of_the_records),
        cmocka_unit_test(test_nothing_is_in_the_file_before_a_frame_is_full),
        cmocka_unit_test(test_an_empty_data_set_is_complete_too),
        cmocka_unit_test(test_a_crash_before_any_system_call),
        cmocka_unit_test(test_a_crash_in_the_middle_of_any_write),
        cmocka_unit_test(test_a_crash_after_any_system_call),
        cmocka_unit_test(test_crashes_again_and_again),
        cmocka_unit_test(test_a_full_shard_becomes_complete_on_opening),
        cmocka_unit_test(test_an_empty_shard_is_no_part_of_a_complete_set),
        cmocka_unit_test_teardown(test_what_the_manifest_tells_is_durable, stop_watching),
        cmocka_unit_test(test_a_full_disk_is_told_and_a_rerun_goes_on),
        cmocka_unit_test(test_the_same_writer_may_try_again),
        cmocka_unit_test(test_a_shard_that_may_be_told_complete_grows_no_more),
        cmocka_unit_test(test_a_torn_frame_is_cut_off_at_once),
        cmocka_unit_test(test_a_note_is_written_before_the_records),
        cmocka_unit_test(test_a_shard_cut_anywhere_goes_on),
        cmocka_unit_test(test_a_flipped_byte_is_torn_at_the_end_and_damage_elsewhere),
        cmocka_unit_test(test_a_frame_that_became_whole_meanwhile_is_no_damage),
        cmocka_unit_test(test_records_that_are_none_are_refused),
        cmocka_unit_test(test_manifests_that_are_none_are_refused),
        cmocka_unit_test(test_a_broken_shard_is_told_with_its_offset),
        cmocka_unit_test(test_large_records_come_back),
        cmocka_unit_test(test_every_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, make_scratch, remove_scratch);
}
