/* The thread that reads new weights: paths, streams, what is wrong with them, and its end. */
#include "tests/unit/engine_fixture.h"

#include <math.h>
#include <pthread.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "engine/engine_internal.h"
#include "proto/request_read.h"
#include "tests/unit/tensor_fixture.h"
#include "worker/updater.h"

static const client_id trainer = {"trainer", 7}, other = {"other", 5};

/* ---- An updater with an engine, and requests by hand. */

typedef struct bench {
    fixture f;
    queue *q;
    updater *u;
    long live;
} bench;

static bench bench_open(const char *model, const char *weights_dir, double silence_sec) {
    bench b = {0};
    cop_error err;
    engine_options o = engine_defaults();
    o.n_threads = 2;
    o.kv_memory = 8 << 20;
    o.max_rows = 8;
    b.f = fixture_open(model, o);
    assert_int_equal(queue_open(&b.q, &err), COP_OK);
    b.live = mem_live();
    if (updater_open(&b.u, b.f.e, weights_dir, silence_sec, b.q, &err) != COP_OK) fail_msg("%s", err.message);
    return b;
}

/* Other weights for calc-d4. */
static fixture early_open(void) {
    engine_options o = engine_defaults();
    o.max_rows = 4;
    o.kv_memory = 8 << 20;
    return fixture_open("calc-d4-early", o);
}

static void bench_close(bench *b) {
    updater_close(b->u);
    assert_int_equal(mem_live(), b->live);
    queue_close(b->q);
    fixture_close(&b->f);
}

static request *new_request(request_type type, const char *id) {
    request_arena *arena = request_arena_open(&worker_allocator);
    request *r = request_arena_take(arena, 1, sizeof *r);
    *r = (request){.type = type, .id = wire_text_of(id), .arena = arena};
    return r;
}

static void *keep(request *r, const void *bytes, size_t n) {
    char *copy = request_arena_take(r->arena, n + 1, 1);
    if (n) memcpy(copy, bytes, n);
    copy[n] = '\0';
    return copy;
}

static request *path_request(const char *id, const char *path) {
    request *r = new_request(REQUEST_WEIGHTS, id);
    r->weights = (request_weights){.version = 1, .path = {keep(r, path, strlen(path)), strlen(path)}};
    return r;
}

static request *stream_request(const char *id, uint64_t tensors, uint64_t bytes) {
    request *r = new_request(REQUEST_WEIGHTS, id);
    r->weights = (request_weights){.version = 1, .tensors = tensors, .bytes = bytes};
    return r;
}

/* Bytes [offset, offset + n) of a tensor; where it has no more, zeros. */
static request *chunk_request(const char *target, const tensor *t, size_t offset, size_t n) {
    request *r = new_request(REQUEST_WEIGHTS_CHUNK, "c");
    uint64_t *shape = request_arena_take(r->arena, 4, sizeof *shape);
    uint8_t *data = request_arena_take(r->arena, n + 1, 1);
    size_t left = offset < tensor_bytes(t) ? tensor_bytes(t) - offset : 0;
    for (int i = 0; i < t->n_dims; i++) shape[i] = (uint64_t)t->dims[i];
    memset(data, 0, n + 1);
    if (left > 0) memcpy(data, t->data + offset, n < left ? n : left);
    r->n_bytes = n + 100;
    r->chunk = (request_chunk){.target = wire_text_of(target),
                               .name = {keep(r, t->name, strlen(t->name)), strlen(t->name)},
                               .dtype = (request_dtype)t->dtype,
                               .shape = shape,
                               .n_dims = (size_t)t->n_dims,
                               .offset = offset,
                               .data = data,
                               .n_data = n};
    return r;
}

static request *commit_request(const char *target, const char *digest) {
    request *r = new_request(REQUEST_WEIGHTS_COMMIT, "commit");
    r->commit.target = wire_text_of(target);
    r->commit.digest = (wire_text){keep(r, digest, strlen(digest)), strlen(digest)};
    return r;
}

static void begin(bench *b, request *r) {
    wire_error err;
    if (!updater_begin(b->u, &trainer, r, &err)) fail_msg("%s", err.message);
}

static void begin_stream(bench *b, const char *id, const tensor_list *l) {
    uint64_t bytes = 0;
    for (int i = 0; i < l->n; i++) bytes += tensor_bytes(&l->t[i]);
    begin(b, stream_request(id, (uint64_t)l->n, bytes));
}

static void chunk(bench *b, request *r) {
    wire_error err;
    if (!updater_chunk(b->u, r, &err)) fail_msg("%s", err.message);
}

/* A tensor in chunks of `step` elements. */
static void send_tensor(bench *b, const char *target, const tensor *t, size_t step) {
    size_t item = tensor_dtype_bytes(t->dtype);
    for (size_t at = 0; at < t->n; at += step)
        chunk(b, chunk_request(target, t, at * item, (t->n - at < step ? t->n - at : step) * item));
}

static void send_tensors(bench *b, const char *target, const tensor_list *l, int first, int end) {
    for (int i = first; i < end; i++) send_tensor(b, target, &l->t[i], 10000);
}

static void commit(bench *b, const char *target, const tensor_list *l) {
    wire_error err;
    char digest[33];
    tensors_digest(l, digest);
    if (!updater_commit(b->u, &other, commit_request(target, digest), &err)) fail_msg("%s", err.message);
}

/* The update that comes within `seconds`; NULL: none does. */
static update *take_within(bench *b, double seconds) {
    parcel *p = (parcel *)queue_wait_until(b->q, clock_seconds() + seconds);
    if (!p) return NULL;
    assert_int_equal(p->kind, PARCEL_UPDATE);
    update *u = p->update;
    p->update = NULL;
    assert_true(client_equal(&p->client, &trainer) && client_equal(&u->client, &trainer));
    parcel_free(p);
    assert_int_equal(u->weights == NULL, u->error.code != NULL);
    return u;
}

static update *take(bench *b) {
    update *u = take_within(b, 120);
    assert_non_null(u);
    return u;
}

static void take_good(bench *b, const weights *same) {
    update *u = take(b);
    if (u->error.code) fail_msg("%s", u->error.message);
    if (same) check_packed(u->weights, same);
    update_free(u, b->f.e);
}

static void expect_error(const wire_error *e, const char *code, const char *key, const char *words) {
    if (!e->code || strcmp(e->code, code) != 0 || strcmp(e->key, key) != 0 || !strstr(e->message, words))
        fail_msg("%s (%s): %s, not %s (%s): %s", e->code, e->key, e->message, code, key, words);
    assert_int_equal(e->retry_after > 0, !strcmp(code, WIRE_OVERLOADED));
}

static void take_failed(bench *b, const char *code, const char *key, const char *words) {
    update *u = take(b);
    assert_non_null(u->error.code);
    expect_error(&u->error, code, key, words);
    update_free(u, b->f.e);
}

/* ---- Paths. */

static void paths_are_read_in_order(void **state) {
    (void)state;
    fixture early = early_open();
    bench b = bench_open("calc-d4", NULL, 60);
    static const char *const ids[] = {"1", "2", "3", "4"};
    static const char *const paths[] = {"tests/models/calc-d4-early", "/nonexistent", "tests/models/gen-B",
                                        "tests/models/calc-d4/model_005426.pt"};
    for (int i = 0; i < 4; i++) begin(&b, path_request(ids[i], paths[i]));
    for (int i = 0; i < 4; i++) {
        update *u = take(&b);
        assert_string_equal(u->request->id.bytes, ids[i]);
        assert_null(u->commit);
        if (i == 0) check_packed(u->weights, early.e->w);
        if (i == 1) expect_error(&u->error, WIRE_NOT_FOUND, "source.path", "\"/nonexistent\": No such file");
        if (i == 2)
            expect_error(&u->error, WIRE_BAD_REQUEST, "source.path", "tensor \"backout_lambda\" is missing");
        if (i == 3) assert_string_equal(engine_weights_digest(u->weights), engine_weights(b.f.e)->digest);
        update_free(u, b.f.e);
    }
    bench_close(&b);
    fixture_close(&early);
}

static char folder[] = "/tmp/coppice-updater-XXXXXX";

static const char *in_folder(const char *name) {
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void paths_must_lie_in_the_directory_given(void **state) {
    (void)state;
    static char allowed[128], outside[128], link[128];
    assert_non_null(mkdtemp(folder));
    snprintf(allowed, sizeof allowed, "%s", in_folder("allowed"));
    snprintf(outside, sizeof outside, "%s", in_folder("allowed-not"));
    assert_int_equal(mkdir(allowed, 0700) | mkdir(outside, 0700), 0);
    tensor_list *l = tensors_read("tests/models/gen-A");
    tensors_write(l, in_folder("allowed/good.pt"));
    tensors_write(l, in_folder("allowed-not/bad.pt"));
    tensors_free(l);
    assert_int_equal(symlink(outside, in_folder("allowed/out")), 0);
    assert_int_equal(symlink("good.pt", in_folder("allowed/same.pt")), 0);
    assert_int_equal(symlink(allowed, in_folder("link")), 0);
    snprintf(link, sizeof link, "%s", in_folder("link"));
    static const struct {
        const char *path, *code, *words;
    } cases[] = {
        {"allowed/good.pt", NULL, NULL},
        {"allowed/same.pt", NULL, NULL},
        {"link/../allowed/./good.pt", NULL, NULL},
        {"link/good.pt", NULL, NULL},
        {"allowed/out/bad.pt", WIRE_BAD_REQUEST, "does not lie in --weights-dir"},
        {"allowed/../allowed-not/bad.pt", WIRE_BAD_REQUEST, "does not lie in --weights-dir"},
        {"allowed-not/bad.pt", WIRE_BAD_REQUEST, "does not lie in --weights-dir"},
        {"allowed/..", WIRE_BAD_REQUEST, "does not lie in --weights-dir"},
        {"allowed/none.pt", WIRE_NOT_FOUND, "none.pt\": No such file"},
        {"allowed/good.pt/x", WIRE_NOT_FOUND, "Not a directory"},
        {"allowed", WIRE_NOT_FOUND, "could not find a model_*.pt"},
    };
    for (int d = 0; d < 2; d++) { /* a symbolic link as the directory means where it leads */
        bench b = bench_open("gen-A", d ? link : allowed, 60);
        for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
            begin(&b, path_request("w", in_folder(cases[i].path)));
            if (cases[i].code)
                take_failed(&b, cases[i].code, "source.path", cases[i].words);
            else
                take_good(&b, b.f.e->w);
        }
        bench_close(&b);
    }
    bench b = bench_open("gen-A", "/", 60);
    begin(&b, path_request("w", in_folder("allowed/good.pt")));
    take_good(&b, b.f.e->w);
    updater *u;
    cop_error err;
    assert_int_equal(updater_open(&u, b.f.e, in_folder("none"), 60, b.q, &err), COP_ENOTFOUND);
    assert_int_equal(updater_open(&u, b.f.e, in_folder("allowed/good.pt"), 60, b.q, &err), COP_EINVAL);
    assert_null(u);
    bench_close(&b);
    static const char *const files[] = {"allowed/good.pt", "allowed/same.pt", "allowed/out",
                                        "allowed-not/bad.pt", "link"};
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++)
        assert_int_equal(unlink(in_folder(files[i])), 0);
    assert_int_equal(rmdir(allowed) | rmdir(outside) | rmdir(folder), 0);
}

static void no_more_than_three_sets_are_in_memory(void **state) {
    (void)state;
    bench b = bench_open("gen-A", NULL, 60);
    for (int i = 0; i < 3; i++) begin(&b, path_request("w", "tests/models/gen-A"));
    update *first = take(&b), *second = take(&b);
    assert_null(take_within(&b, 0.3)); /* with the engine's own set there are three */
    update_free(first, b.f.e);
    update *third = take(&b);
    for (int i = 0; i <= UPDATER_MAX_PATHS; i++) begin(&b, path_request("w", "tests/models/gen-A"));
    wire_error err;
    request *r = path_request("w", "tests/models/gen-A");
    assert_false(updater_begin(b.u, &trainer, r, &err));
    expect_error(&err, WIRE_OVERLOADED, "", "as many updates wait as may");
    request_free(r);
    updater_close(b.u); /* with a line of updates; those that were told outlive it */
    b.u = NULL;
    for (int i = 0; i <= UPDATER_MAX_PATHS; i++) take_failed(&b, WIRE_DRAINING, "", "shutting down");
    update_free(second, b.f.e);
    update_free(third, b.f.e);
    bench_close(&b);
}

static void a_model_of_random_weights_takes_none(void **state) {
    (void)state;
    bench b = bench_open("gen-A", NULL, 60);
    engine *e;
    updater *u;
    engine_options o = {.max_rows = 4, .step_tokens = 16, .kv_memory = 8 << 20};
    assert_int_equal(engine_open_random(&e, engine_arch(b.f.e), 1, &o, NULL), COP_OK);
    assert_int_equal(updater_open(&u, e, NULL, 60, b.q, NULL), COP_OK);
    wire_error err;
    assert_true(updater_begin(u, &trainer, path_request("w", "tests/models/gen-A"), &err));
    take_failed(&b, WIRE_UNSUPPORTED, "source.path", "random");
    updater_close(u);
    engine_close(e);
    bench_close(&b);
}

/* ---- Streams. */

static void a_stream_becomes_a_set(void **state) {
    (void)state;
    tensor_list *l = tensors_read("tests/models/calc-d4-early");
    fixture early = early_open();
    bench b = bench_open("calc-d4", NULL, 60);
    static const size_t steps[] = {1u << 30, 4097, 65536, 333};
    for (size_t s = 0; s < sizeof steps / sizeof steps[0]; s++) {
        begin_stream(&b, "stream", l);
        for (int i = 0; i < l->n; i++) {
            if (s == 1) chunk(&b, chunk_request("stream", &l->t[i], 0, 0));
            send_tensor(&b, "stream", &l->t[i], steps[s]);
            if (s == 2) chunk(&b, chunk_request("stream", &l->t[i], tensor_bytes(&l->t[i]), 0));
        }
        commit(&b, "stream", l);
        update *u = take(&b);
        if (u->error.code) fail_msg("%s", u->error.message);
        assert_string_equal(u->request->id.bytes, "stream");
        assert_int_equal(u->commit->type, REQUEST_WEIGHTS_COMMIT);
        assert_true(client_equal(&u->commit_client, &other));
        assert_string_equal(engine_weights_digest(u->weights), engine_weights(early.e)->digest);
        check_packed(u->weights, early.e->w);
        update_free(u, b.f.e);
    }
    bench_close(&b);
    fixture_close(&early);
    tensors_free(l);
}

static void a_stream_may_come_in_any_type(void **state) {
    (void)state;
    bench b = bench_open("gen-E", NULL, 60);
    tensor_list *l = tensors_read("tests/models/gen-E");
    for (int i = 0; i < l->n; i++) tensor_convert(&l->t[i], i % 2 ? TENSOR_F64 : TENSOR_F32);
    begin_stream(&b, "s", l);
    send_tensors(&b, "s", l, 0, l->n);
    commit(&b, "s", l);
    take_good(&b, b.f.e->w);
    bench_close(&b);
    tensors_free(l);
}

/* After a failure: chunks that still come are dropped, and the commit is told the same, once. */
static void check_failed_stream(bench *b, const char *target, const tensor *t, const char *code,
                                const char *words) {
    wire_error err;
    chunk(b, chunk_request(target, t, 0, 0));
    request *r = commit_request(target, "00000000000000000000000000000000");
    assert_false(updater_commit(b->u, &other, r, &err));
    expect_error(&err, code, "", words);
    assert_false(updater_commit(b->u, &other, r, &err));
    expect_error(&err, WIRE_NOT_FOUND, "target", "no stream");
    request_free(r);
    r = chunk_request(target, t, 0, 0);
    assert_false(updater_chunk(b->u, r, &err));
    expect_error(&err, WIRE_NOT_FOUND, "target", "no stream");
    request_free(r);
}

typedef struct bad_chunk {
    const char *name;
    int dtype;
    int64_t dims[4];
    int n_dims;
    size_t offset, n;
    const char *words;
} bad_chunk;

/* Tensor 2 is transformer.h.0.attn.c_k.weight, F32 [32, 64], 8192 bytes; 4 bytes of it in what `goes_on`
 * sends. */
static void check_bad_chunk(bench *b, const tensor_list *l, const bad_chunk *bad, bool goes_on) {
    begin_stream(b, "s", l);
    send_tensors(b, "s", l, 0, 2);
    if (goes_on) chunk(b, chunk_request("s", &l->t[2], 0, 4));
    tensor t = l->t[2];
    t.dtype = (tensor_dtype)bad->dtype;
    t.n_dims = bad->n_dims;
    memcpy(t.dims, bad->dims, sizeof t.dims);
    snprintf(t.name, sizeof t.name, "%s", bad->name);
    chunk(b, chunk_request("s", &t, bad->offset, bad->n));
    take_failed(b, WIRE_BAD_REQUEST, "", bad->words); /* at once: nothing else was sent */
    check_failed_stream(b, "s", &l->t[0], WIRE_BAD_REQUEST, bad->words);
}

#define C_K "transformer.h.0.attn.c_k.weight"
#define C_Q "transformer.h.0.attn.c_q.weight"

static void the_first_chunk_of_a_tensor_is_checked(void **state) {
    (void)state;
    bench b = bench_open("gen-B", NULL, 60);
    tensor_list *l = tensors_read("tests/models/gen-B");
    assert_string_equal(l->t[2].name, C_K);
    assert_int_equal(tensor_bytes(&l->t[2]), 32 * 64 * 4);
    static const bad_chunk cases[] = {
        {C_K, TENSOR_F32, {64, 32}, 2, 0, 4, "tensor \"" C_K "\" is 64 x 32, where the model has 32 x 64"},
        {C_K, TENSOR_F32, {2048}, 1, 0, 4, "tensor \"" C_K "\" is 2048, where the model has 32 x 64"},
        {C_Q, TENSOR_F32, {64, 64}, 2, 0, 4, "tensor \"" C_K "\" is missing: \"" C_Q "\" came instead"},
        {"transformer.h.0.attn.c_z",
         TENSOR_F32,
         {4},
         1,
         0,
         4,
         "tensor \"transformer.h.0.attn.c_z\" is unknown"},
        {"a", TENSOR_F32, {4}, 1, 0, 4, "tensor \"a\" came after \"resid_lambdas\": they come in order"},
        {"resid_lambdas",
         TENSOR_F32,
         {4},
         1,
         0,
         4,
         "tensor \"resid_lambdas\" is at offset 0, where 16 should"},
        {"resid_lambdas",
         TENSOR_F32,
         {4},
         1,
         16,
         4,
         "\"resid_lambdas\" has 4 bytes at offset 16, but the tensor only 16"},
        {"", TENSOR_F32, {4}, 1, 0, 4, "the name of the tensor after \"resid_lambdas\", of 0 bytes"},
        {"transformer\x80", TENSOR_F32, {4}, 1, 0, 4, "of 12 bytes: names are"},
        {C_K, TENSOR_F32, {32, 64}, 2, 4, 4, "is at offset 4, where 0 should follow"},
        {C_K, TENSOR_F32, {32, 64}, 2, 0, 8196, "has 8196 bytes at offset 0, but the tensor only 8192"},
        {C_K, TENSOR_F32, {32, 64}, 2, 0, 7, "has 7 bytes at offset 0, which are no whole elements of 4"},
        {C_K, TENSOR_F64, {32, 64}, 2, 0, 4, "which are no whole elements of 8"},
        {C_K, TENSOR_F32, {INT64_MAX, INT64_MAX}, 2, 0, 4, "has more than 2^63 elements"},
        {C_K, TENSOR_F32, {1 << 30}, 1, 0, 4, "has 4294967296 bytes, more than the "},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) check_bad_chunk(&b, l, &cases[i], false);
    bench_close(&b);
    tensors_free(l);
}

static void the_chunks_after_it_are_checked(void **state) {
    (void)state;
    bench b = bench_open("gen-B", NULL, 60);
    tensor_list *l = tensors_read("tests/models/gen-B");
    static const bad_chunk cases[] = {
        {C_K, TENSOR_BF16, {32, 64}, 2, 4, 4, "changed its dtype from F32 to BF16 at offset 4"},
        {C_K, TENSOR_F32, {64, 32}, 2, 4, 4, "changed its shape at offset 4"},
        {C_K, TENSOR_F32, {2048}, 1, 4, 4, "changed its shape at offset 4"},
        {C_K, TENSOR_F32, {32, 64}, 2, 0, 4, "is at offset 0, where 4 should follow"},
        {C_K, TENSOR_F32, {32, 64}, 2, 8, 4, "is at offset 8, where 4 should follow"},
        {C_K, TENSOR_F32, {32, 64}, 2, 4, 8192, "has 8192 bytes at offset 4, but the tensor only 8192"},
        {C_K, TENSOR_F32, {32, 64}, 2, 4, 1, "has 1 bytes at offset 4, which are no whole elements of 4"},
        {C_Q,
         TENSOR_F32,
         {64, 64},
         2,
         0,
         4,
         "tensor \"" C_Q "\" came after 4 of 8192 bytes of tensor \"" C_K "\""},
        {"\n", TENSOR_F32, {64, 64}, 2, 0, 4, "the name of the tensor after \"" C_K "\", of 1 bytes"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) check_bad_chunk(&b, l, &cases[i], true);
    bench_close(&b);
    tensors_free(l);
}

static void the_commit_is_checked(void **state) {
    (void)state;
    bench b = bench_open("gen-B", NULL, 60);
    tensor_list *l = tensors_read("tests/models/gen-B");
    uint64_t bytes = 0, n = (uint64_t)l->n;
    for (int i = 0; i < l->n; i++) bytes += tensor_bytes(&l->t[i]);
    const struct {
        uint64_t tensors, bytes;
        int sent;     /* tensors */
        size_t extra; /* bytes of the one after */
        const char *digest, *words;
    } cases[] = {
        {n, bytes, 2, 0, NULL, "committed after 2 of 28 tensors, the last \"resid_lambdas\""},
        {n, bytes, 2, 400, NULL, "committed after 400 of 8192 bytes of tensor \"" C_K "\""},
        {n, bytes + 1, l->n, 0, NULL, "bytes, but "},
        {n + 1, bytes, l->n, 0, NULL, "committed after 28 of 29 tensors"},
        {2, bytes, 2, 0, NULL, "committed after "},
        {n, bytes, 0, 0, NULL, "committed after 0 of 28 tensors"},
        {n, bytes, l->n, 0, "0123456789abcdef0123456789abcdef",
         "but the commit says 0123456789abcdef0123456789abcdef"},
        {n, bytes, l->n, 0, "", "but the commit says"},
    };
    assert_int_equal(l->n, 28);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        wire_error err;
        char digest[33];
        tensors_digest(l, digest);
        begin(&b, stream_request("s", cases[i].tensors, cases[i].bytes));
        send_tensors(&b, "s", l, 0, cases[i].sent);
        if (cases[i].extra) chunk(&b, chunk_request("s", &l->t[cases[i].sent], 0, cases[i].extra));
        assert_true(updater_commit(b.u, &other,
                                   commit_request("s", cases[i].digest ? cases[i].digest : digest), &err));
        update *u = take(&b); /* which tells it to both */
        expect_error(&u->error, WIRE_BAD_REQUEST, "", cases[i].words);
        assert_non_null(u->commit);
        update_free(u, b.f.e);
        request *r = commit_request("s", digest);
        assert_false(updater_commit(b.u, &other, r, &err));
        expect_error(&err, WIRE_NOT_FOUND, "target", "no stream");
        request_free(r);
    }
    /* Announced too small: told when the tensor comes that is too much. */
    begin(&b, stream_request("s", 2, bytes));
    send_tensors(&b, "s", l, 0, 3);
    take_failed(&b, WIRE_BAD_REQUEST, "", "tensor \"" C_K "\" is one more than the 2 that were announced");
    bench_close(&b);
    tensors_free(l);
}

static void a_number_that_is_not_finite_is_a_model_error(void **state) {
    (void)state;
    bench b = bench_open("gen-B", NULL, 60);
    tensor_list *l = tensors_read("tests/models/gen-B");
    tensor_put(l->t[2].data + 5 * 4, TENSOR_F32, INFINITY);
    begin_stream(&b, "s", l);
    send_tensors(&b, "s", l, 0, 5); /* no commit is needed to find it */
    take_failed(&b, WIRE_MODEL_ERROR, "", "cannot use tensor \"" C_K "\": element 5 is not finite");
    check_failed_stream(&b, "s", &l->t[5], WIRE_MODEL_ERROR, "element 5");
    bench_close(&b);
    tensors_free(l);
}

static void a_silent_sender_is_given_up(void **state) {
    (void)state;
    bench b = bench_open("gen-B", NULL, 0.1);
    tensor_list *l = tensors_read("tests/models/gen-B");
    begin_stream(&b, "s", l);
    take_failed(&b, WIRE_TIMEOUT, "", "no chunk came for 0.1 seconds");
    check_failed_stream(&b, "s", &l->t[0], WIRE_TIMEOUT, "no chunk");
    begin_stream(&b, "t", l);
    send_tensors(&b, "t", l, 0, 2);
    chunk(&b, chunk_request("t", &l->t[2], 0, 64));
    take_failed(&b, WIRE_TIMEOUT, "", "after 64 of 8192 bytes of tensor \"" C_K "\" (3 of 28 tensors)");
    begin_stream(&b, "s", l); /* another stream replaces the one that failed */
    wire_error err;
    request *r = chunk_request("t", &l->t[2], 64, 64);
    assert_false(updater_chunk(b.u, r, &err));
    expect_error(&err, WIRE_NOT_FOUND, "target", "no stream");
    request_free(r);
    take_failed(&b, WIRE_TIMEOUT, "", "no chunk came");
    bench_close(&b);
    tensors_free(l);
}

static void one_stream_is_open_at_a_time(void **state) {
    (void)state;
    bench b = bench_open("gen-B", NULL, 60);
    tensor_list *l = tensors_read("tests/models/gen-B");
    wire_error err;
    request *second = stream_request("second", 1, 1), *lost = chunk_request("second", &l->t[0], 0, 4);
    request *early = commit_request("second", "");
    assert_false(updater_chunk(b.u, lost, &err));
    expect_error(&err, WIRE_NOT_FOUND, "target", "no stream");
    assert_false(updater_commit(b.u, &other, early, &err));
    expect_error(&err, WIRE_NOT_FOUND, "target", "no stream");
    begin_stream(&b, "first", l);
    assert_false(updater_begin(b.u, &other, second, &err));
    expect_error(&err, WIRE_OVERLOADED, "", "another update is under way");
    assert_false(updater_chunk(b.u, lost, &err));
    assert_false(updater_commit(b.u, &other, early, &err));
    begin(&b, path_request("path", "tests/models/gen-B")); /* waits for the stream */
    send_tensors(&b, "first", l, 0, l->n);
    commit(&b, "first", l);
    take_good(&b, b.f.e->w);
    update *u = take(&b);
    assert_string_equal(u->request->id.bytes, "path");
    update_free(u, b.f.e);
    begin_stream(&b, "first", l); /* an id may serve again */
    send_tensors(&b, "first", l, 0, l->n);
    commit(&b, "first", l);
    take_good(&b, b.f.e->w);
    request_free(second);
    request_free(lost);
    request_free(early);
    bench_close(&b);
    tensors_free(l);
}

/* Two sets that nobody has taken: the next update waits before anything of it is read. */
static void block(bench *b, update *held[2]) {
    for (int i = 0; i < 2; i++) {
        begin(b, path_request("w", "tests/models/gen-A"));
        held[i] = take(b);
        assert_non_null(held[i]->weights);
    }
}

static void unblock(bench *b, update *held[2]) {
    for (int i = 0; i < 2; i++) update_free(held[i], b->f.e);
}

static void chunks_that_wait_are_bounded(void **state) {
    (void)state;
    bench b = bench_open("gen-A", NULL, 60);
    tensor_list *l = tensors_read("tests/models/gen-A");
    update *held[2];
    block(&b, held);
    begin_stream(&b, "s", l);
    request *r = chunk_request("s", &l->t[0], 0, tensor_bytes(&l->t[0]));
    r->n_bytes = UPDATER_STREAM_BYTES - 1000; /* as if it were so large */
    chunk(&b, r);
    assert_false(updater_is_full(b.u));
    send_tensor(&b, "s", &l->t[1], 1u << 30);
    assert_true(updater_is_full(b.u));
    unblock(&b, held);
    while (updater_is_full(b.u)) nanosleep(&(struct timespec){0, 1000000}, NULL);
    send_tensors(&b, "s", l, 2, l->n);
    commit(&b, "s", l);
    take_good(&b, b.f.e->w);
    bench_close(&b);
    tensors_free(l);
}

static void a_full_stream_does_not_wait_for_ever(void **state) {
    (void)state;
    bench b = bench_open("gen-A", NULL, 0.1);
    tensor_list *l = tensors_read("tests/models/gen-A");
    update *held[2];
    block(&b, held);
    begin_stream(&b, "s", l);
    assert_null(take_within(&b, 0.3)); /* it is silent, but nobody listens either */
    request *r = chunk_request("s", &l->t[0], 0, 64);
    r->n_bytes = UPDATER_STREAM_BYTES;
    chunk(&b, r);
    take_failed(&b, WIRE_OVERLOADED, "", "3 sets of weights are in memory");
    assert_false(updater_is_full(b.u));
    check_failed_stream(&b, "s", &l->t[0], WIRE_OVERLOADED, "3 sets");
    unblock(&b, held);
    bench_close(&b);
    tensors_free(l);
}

static void a_chunk_without_memory_fails_the_stream(void **state) {
    (void)state;
    bench b = bench_open("gen-A", NULL, 60);
    tensor_list *l = tensors_read("tests/models/gen-A");
    update *held[2];
    block(&b, held); /* so that no other thread allocates */
    begin_stream(&b, "s", l);
    send_tensor(&b, "s", &l->t[0], 1u << 30);
    request *r = chunk_request("s", &l->t[1], 0, 128), *after = chunk_request("s", &l->t[1], 128, 128);
    mem_fail_after(0);
    chunk(&b, r);
    assert_true(mem_fail_stop());
    chunk(&b, after);
    unblock(&b, held);
    take_failed(&b, WIRE_OVERLOADED, "", "no memory for a chunk after 1 tensors");
    check_failed_stream(&b, "s", &l->t[2], WIRE_OVERLOADED, "no memory for a chunk");
    for (int n = 0; n < 4; n++) { /* its end could be told only with what is allocated at the beginning */
        wire_error err;
        request *w = n < 3 ? stream_request("w", 1, 1) : path_request("w", "tests/models/gen-A");
        mem_fail_after(n % 3);
        assert_false(updater_begin(b.u, &trainer, w, &err));
        assert_true(mem_fail_stop());
        expect_error(&err, WIRE_OVERLOADED, "", "no memory for the update");
        request_free(w);
    }
    bench_close(&b);
    tensors_free(l);
}

static void every_allocation_failure_is_told(void **state) {
    (void)state;
    bench b = bench_open("gen-A", NULL, 60);
    tensor_list *l = tensors_read("tests/models/gen-A");
    char digest[33];
    tensors_digest(l, digest);
    uint64_t bytes = 0;
    for (int i = 0; i < l->n; i++) bytes += tensor_bytes(&l->t[i]);
    for (long n = 0, fired = 1; fired; n++) {
        wire_error err;
        request *w = stream_request("s", (uint64_t)l->n, bytes), *c = commit_request("s", digest),
                *chunks[128];
        for (int i = 0; i < l->n; i++) chunks[i] = chunk_request("s", &l->t[i], 0, tensor_bytes(&l->t[i]));
        mem_fail_after(n);
        bool begun = updater_begin(b.u, &trainer, w, &err);
        if (!begun) request_free(w);
        for (int i = 0; i < l->n; i++)
            if (!updater_chunk(b.u, chunks[i], &err)) request_free(chunks[i]);
        if (!updater_commit(b.u, &other, c, &err)) request_free(c);
        update *u = begun ? take(&b) : NULL;
        fired = mem_fail_stop();
        assert_true(begun || fired);
        if (u) assert_int_equal(u->weights == NULL, fired);
        if (u && fired) expect_error(&u->error, WIRE_OVERLOADED, "", "");
        update_free(u, b.f.e);
        assert_true(n < 1000);
    }
    bench_close(&b);
    tensors_free(l);
}

/* ---- The end. */

static void it_can_be_closed_at_any_time(void **state) {
    (void)state;
    tensor_list *l = tensors_read("tests/models/calc-d4");
    double start = clock_seconds();
    for (int i = 0; i < 12; i++) {
        bench b = bench_open("calc-d4", NULL, 60);
        if (i < 10) begin_stream(&b, "s", l);
        if (i < 8) send_tensors(&b, "s", l, 0, i < 6 ? i : l->n);
        if (i >= 3 && i < 6) chunk(&b, chunk_request("s", &l->t[i], 0, 4));
        if (i == 6) commit(&b, "s", l);
        for (int p = 0; p < 5 && i >= 9; p++) begin(&b, path_request("w", "tests/models/calc-d4"));
        if (i % 2) nanosleep(&(struct timespec){0, 5000000}, NULL);
        updater_close(b.u);
        b.u = NULL;
        int n = (i < 10) + (i >= 9 ? 5 : 0); /* each is told its end, which may be that it can be used */
        for (parcel *p; (p = (parcel *)queue_take(b.q)); n--) {
            if (!p->update->weights)
                expect_error(&p->update->error, WIRE_DRAINING, "", "shutting down");
            else
                assert_true(i == 6 || i >= 9);
            update_free(p->update, b.f.e);
            p->update = NULL;
            parcel_free(p);
        }
        assert_int_equal(n, 0);
        bench_close(&b);
    }
    assert_true(clock_seconds() - start < 55); /* nobody waited for the sender */
    updater_close(NULL);
    tensors_free(l);
}

static void loading_works_again_after_an_updater(void **state) {
    (void)state;
    bench b = bench_open("gen-A", NULL, 60);
    updater_close(b.u);
    cop_error err;
    assert_int_equal(updater_open(&b.u, b.f.e, NULL, 60, b.q, &err), COP_OK);
    begin(&b, path_request("w", "tests/models/gen-A"));
    take_good(&b, b.f.e->w);
    bench_close(&b);
}

static void *take_four(void *arg) {
    bench *b = arg;
    for (int i = 0; i < 4; i++) take_good(b, b->f.e->w);
    return NULL;
}

static void updates_come_while_rollouts_run(void **state) {
    (void)state;
    bench b = bench_open("calc-d4", NULL, 60);
    tensor_list *l = tensors_read("tests/models/calc-d4");
    int32_t tokens[] = {1000, 50, 60, 70, 80};
    rollout_prompt p = {.tokens = tokens, .n_tokens = 5, .seed = 5};
    rollout_spec spec = {.prompts = &p, .n_prompts = 1, .n = 8, .sampling = rollout_sampling_defaults()};
    pthread_t taker;
    assert_int_equal(pthread_create(&taker, NULL, take_four, &b), 0);
    begin_stream(&b, "s", l);
    for (int i = 0; i < 3; i++) begin(&b, path_request("w", "tests/models/calc-d4"));
    send_tensors(&b, "s", l, 0, l->n);
    commit(&b, "s", l);
    outcome o = outcome_of(b.f.e, &spec);
    pthread_join(taker, NULL);
    outcome_free(&o, 1);
    assert_int_equal(o.n_done, 1);
    bench_close(&b);
    tensors_free(l);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(paths_are_read_in_order),
        cmocka_unit_test(paths_must_lie_in_the_directory_given),
        cmocka_unit_test(no_more_than_three_sets_are_in_memory),
        cmocka_unit_test(a_model_of_random_weights_takes_none),
        cmocka_unit_test(a_stream_becomes_a_set),
        cmocka_unit_test(a_stream_may_come_in_any_type),
        cmocka_unit_test(the_first_chunk_of_a_tensor_is_checked),
        cmocka_unit_test(the_chunks_after_it_are_checked),
        cmocka_unit_test(the_commit_is_checked),
        cmocka_unit_test(a_number_that_is_not_finite_is_a_model_error),
        cmocka_unit_test(a_silent_sender_is_given_up),
        cmocka_unit_test(one_stream_is_open_at_a_time),
        cmocka_unit_test(chunks_that_wait_are_bounded),
        cmocka_unit_test(a_full_stream_does_not_wait_for_ever),
        cmocka_unit_test(a_chunk_without_memory_fails_the_stream),
        cmocka_unit_test(every_allocation_failure_is_told),
        cmocka_unit_test(it_can_be_closed_at_any_time),
        cmocka_unit_test(loading_works_again_after_an_updater),
        cmocka_unit_test(updates_come_while_rollouts_run),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
