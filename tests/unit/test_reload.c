/* Reading new weights for an engine that is open: from paths of every kind, from a source, while it steps. */
#include "tests/unit/engine_fixture.h"

#include <dirent.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/arch_compare.h"
#include "engine/engine_internal.h"
#include "engine/file_source.h"
#include "tests/unit/tensor_fixture.h"
#include "tests/unit/copy_file.h"

static char folder[] = "/tmp/coppice-reload-XXXXXX", file[64];
static const char *const generations[] = {"gen-A", "gen-Apad", "gen-B", "gen-C", "gen-D", "gen-E", "gen-F"};
enum { N_GENERATIONS = sizeof generations / sizeof generations[0] };

static int make_folder(void **state) {
    (void)state;
    if (!mkdtemp(folder)) return -1;
    snprintf(file, sizeof file, "%s/policy.pt", folder);
    return 0;
}

static int remove_folder(void **state) {
    (void)state;
    char path[512];
    DIR *d = opendir(folder);
    for (struct dirent *e; (e = readdir(d));) {
        snprintf(path, sizeof path, "%s/%s", folder, e->d_name);
        if (e->d_name[0] != '.') unlink(path);
    }
    closedir(d);
    return rmdir(folder);
}

static engine_options few(void) {
    engine_options o = engine_defaults();
    o.n_threads = 2;
    o.kv_memory = 16 << 20;
    o.max_rows = 32;
    return o;
}

static const char *path_of(const char *model) {
    static char path[128];
    snprintf(path, sizeof path, "tests/models/%s", model);
    return path;
}

static weights *load(engine *e, const char *path) {
    weights *w;
    cop_error err;
    if (engine_load_path(e, path, NULL, &w, &err) != COP_OK) fail_msg("%s", err.message);
    return w;
}

static void refuses(engine *e, const char *path, cop_status status, const char *words) {
    weights *w = (weights *)&w;
    long live = mem_live();
    cop_error err = {0};
    cop_status got = engine_load_path(e, path, NULL, &w, &err);
    if (got != status || !strstr(err.message, words))
        fail_msg("%s, not \"%s\": %s", cop_status_text(got), words, err.message);
    assert_int_equal(err.status, status);
    assert_null(w);
    assert_int_equal(mem_live(), live);
}

static int n_open_files(void) {
    int n = 0;
    DIR *d = opendir("/proc/self/fd");
    while (readdir(d)) n++;
    closedir(d);
    return n;
}

/* ---- What can be loaded. */

static void every_generation_loads_its_own_file_again(void **state) {
    (void)state;
    for (int i = 0; i < N_GENERATIONS; i++) {
        fixture f = fixture_open(generations[i], few());
        long live = mem_live();
        int n_files = n_open_files();
        weights *w = load(f.e, path_of(generations[i]));
        assert_string_equal(engine_weights_digest(w), engine_weights(f.e)->digest);
        check_packed(w, f.e->w);
        engine_drop_weights(f.e, w);
        char path[160];
        snprintf(path, sizeof path, "%s/model_000010.pt", path_of(generations[i]));
        w = load(f.e, path);
        assert_string_equal(engine_weights_digest(w), engine_weights(f.e)->digest);
        engine_drop_weights(f.e, w);
        assert_int_equal(mem_live(), live);
        assert_int_equal(n_open_files(), n_files);
        fixture_close(&f);
    }
}

static void a_file_of_any_name_needs_no_meta_file(void **state) {
    (void)state;
    fixture f = fixture_open("calc-d4", few()), early = fixture_open("calc-d4-early", few());
    static const char *const names[] = {"policy.pt", "model_000007.pt", "step", "model_x.pt"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char path[128];
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        copy_file("tests/models/calc-d4-early/model_000110.pt", path);
        weights *w = load(f.e, path);
        assert_string_equal(engine_weights_digest(w), engine_weights(early.e)->digest);
        assert_string_not_equal(engine_weights_digest(w), engine_weights(f.e)->digest);
        check_packed(w, early.e->w);
        engine_drop_weights(f.e, w);
        if (strcmp(names[i], "model_000007.pt") != 0) unlink(path);
    }
    weights *w = load(f.e, folder); /* the newest there, without a meta file */
    check_packed(w, early.e->w);
    engine_drop_weights(f.e, w);
    snprintf(file, sizeof file, "%s/model_000007.pt", folder);
    unlink(file);
    snprintf(file, sizeof file, "%s/policy.pt", folder);
    fixture_close(&f);
    fixture_close(&early);
}

static void every_type_of_numbers_is_taken(void **state) {
    (void)state;
    fixture f = fixture_open("gen-F", few());
    for (tensor_dtype type = TENSOR_F32; type <= TENSOR_F64; type++) {
        tensor_list *l = tensors_read("tests/models/gen-F");
        for (int i = 0; i < l->n; i++) tensor_convert(&l->t[i], type);
        tensors_write(l, file);
        weights *w = load(f.e, file);
        if (type == TENSOR_F32 || type == TENSOR_F64) check_packed(w, f.e->w); /* it holds every value */
        for (int i = 0; i < l->n; i++) tensor_convert(&l->t[i], TENSOR_F32);
        tensors_write(l, file);
        weights *wide = load(f.e, file);
        check_packed(w, wide);
        assert_int_equal(!strcmp(engine_weights_digest(w), engine_weights_digest(wide)), type == TENSOR_F32);
        engine_drop_weights(f.e, w);
        engine_drop_weights(f.e, wide);
        tensors_free(l);
    }
    fixture_close(&f);
}

/* ---- What is refused. */

static void tensors_must_be_the_models(void **state) {
    (void)state;
    fixture f = fixture_open("gen-F", few());
    struct {
        const char *remove, *add, *words;
    } cases[] = {
        {"backout_lambda", NULL, "tensor \"backout_lambda\" is missing: \"lm_head.weight\" came instead"},
        {"x0_lambdas", "x0_lambdaz", "tensor \"x0_lambdaz\" is unknown"},
        {"resid_lambdas", NULL, "tensor \"resid_lambdas\" is missing: \"smear_gate.weight\" came instead"},
        {NULL, "a", "tensor \"a\" is unknown: the model has no such tensor"},
        {NULL, "zzz", "tensor \"zzz\" is unknown"},
        {NULL, "transformer.h.4.attn.c_q.weight", "tensor \"transformer.h.4.attn.c_q.weight\" is unknown"},
        {"x0_lambdas", NULL, "tensor \"x0_lambdas\" is missing: only "},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        tensor_list *l = tensors_read("tests/models/gen-F");
        if (cases[i].remove) tensors_remove(l, cases[i].remove);
        if (cases[i].add) tensors_add(l, cases[i].add, 4);
        tensors_write(l, file);
        refuses(f.e, file, COP_EFORMAT, cases[i].words);
        tensors_free(l);
    }
    fixture_close(&f);
}

static void shapes_must_be_the_models(void **state) {
    (void)state;
    fixture f = fixture_open("gen-F", few());
    static const struct {
        const char *name, *words;
        int n_dims;
        int64_t dims[4];
    } cases[] = {
        {"lm_head.weight",
         "tensor \"lm_head.weight\" is 64 x 1024, where the model has 1024 x 64",
         2,
         {64, 1024}},
        {"transformer.wte.weight", "is 65536, where the model has 1024 x 64", 1, {65536}},
        {"resid_lambdas", "is 3, where the model has 4", 1, {3}},
        {"resid_lambdas", "is 4 x 1, where the model has 4", 2, {4, 1}},
        {"smear_lambda", "is a scalar, where the model has 1", 0, {0}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        tensor_list *l = tensors_read("tests/models/gen-F");
        tensor *t = tensor_named(l, cases[i].name);
        t->n_dims = cases[i].n_dims;
        t->n = 1;
        for (int d = 0; d < t->n_dims; d++) t->n *= (size_t)(t->dims[d] = cases[i].dims[d]);
        tensors_write(l, file);
        refuses(f.e, file, COP_EFORMAT, cases[i].words);
        tensors_free(l);
    }
    refuses(f.e, "tests/models/gen-A", COP_EFORMAT, "tensor \"backout_lambda\" is missing");
    refuses(f.e, "tests/models/calc-d4", COP_EFORMAT, "where the model has");
    fixture_close(&f);
}

static void a_number_that_is_not_finite_is_named(void **state) {
    (void)state;
    fixture f = fixture_open("gen-E", few());
    static const float bad[] = {NAN, INFINITY, -INFINITY, NAN};
    for (tensor_dtype type = TENSOR_F32; type <= TENSOR_F64; type++) {
        tensor_list *l = tensors_read("tests/models/gen-E");
        tensor *t = tensor_named(l, "transformer.h.2.mlp.c_fc.weight");
        tensor_convert(t, type);
        uint8_t *at = t->data + 777 * tensor_dtype_bytes(type);
        tensor_put(at, type, bad[type]);
        if (type == TENSOR_F16) memcpy(at, &(uint16_t){0xfc00}, 2);
        tensors_write(l, file);
        refuses(f.e, file, COP_EMODEL,
                "cannot use tensor \"transformer.h.2.mlp.c_fc.weight\": element 777 is not finite");
        tensors_free(l);
    }
    fixture_close(&f);
}

static void paths_that_lead_nowhere_are_told(void **state) {
    (void)state;
    fixture f = fixture_open("gen-A", few());
    refuses(f.e, "/nonexistent/model.pt", COP_ENOTFOUND, "\"/nonexistent/model.pt\": No such file");
    refuses(f.e, "", COP_ENOTFOUND, "No such file");
    refuses(f.e, "tests/unit", COP_ENOTFOUND, "could not find a model_*.pt in \"tests/unit\"");
    refuses(f.e, "/dev/null", COP_EUNSUPPORTED, "/dev/null");
    refuses(f.e, "Makefile", COP_EFORMAT, "Makefile");
    fixture_close(&f);
}

/* ---- The meta file. */

static void write_text(const char *name, const char *text) {
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "w");
    assert_true(f && fputs(text, f) >= 0);
    fclose(f);
}

static void where_there_is_a_meta_file_it_must_agree(void **state) {
    (void)state;
    fixture f = fixture_open("gen-E", few());
    char path[128], meta[1024];
    snprintf(path, sizeof path, "%s/model_000001.pt", folder);
    copy_file("tests/models/gen-E/model_000010.pt", path);
    static const struct {
        int sequence_len, vocab, n_heads, n_kv_heads;
        const char *pattern, *words;
    } cases[] = {
        {512, 1001, 4, 2, "SSSL", "sequence_len is 512, where the engine has 256"},
        {256, 1000, 4, 2, "SSSL", "vocab is 1000, where the engine has 1001"},
        {256, 1001, 4, 2, "LSSL", "the window of layer 0 is 256, where the engine has 128"},
        {256, 1001, 2, 1, "SSSL", "is 2 x 12, where model_config makes it 1 x 12"},
        {256, 1001, 4, 2, "SSSL", NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        snprintf(
            meta, sizeof meta,
            "{\"model_config\": {\"sequence_len\": %d, \"vocab_size\": %d, \"n_layer\": 4, \"n_head\": %d, "
            "\"n_kv_head\": %d, \"n_embd\": 64, \"window_pattern\": \"%s\"}}",
            cases[i].sequence_len, cases[i].vocab, cases[i].n_heads, cases[i].n_kv_heads, cases[i].pattern);
        write_text("meta_000001.json", meta);
        if (cases[i].words)
            refuses(f.e, path, COP_EFORMAT, cases[i].words);
        else
            engine_drop_weights(f.e, load(f.e, path));
    }
    write_text("meta_000001.json", "{");
    refuses(f.e, path, COP_EFORMAT, "is not JSON");
    write_text("meta_000002.json", meta); /* of another file */
    snprintf(meta, sizeof meta, "%s/meta_000001.json", folder);
    unlink(meta);
    engine_drop_weights(f.e, load(f.e, path));
    unlink(path);
    fixture_close(&f);
}

static void every_field_of_an_architecture_is_compared(void **state) {
    (void)state;
    checkpoint *c;
    cop_error err;
    assert_int_equal(checkpoint_open(&c, "tests/models/gen-F", NULL, &err), COP_OK);
    const arch a = *checkpoint_arch(c);
    checkpoint_close(c);
    assert_int_equal(arch_compare(&a, &a, &err), COP_OK);
#define DIFFERS(change, words)                                                                               \
    do {                                                                                                     \
        arch b = a;                                                                                          \
        change;                                                                                              \
        assert_int_equal(arch_compare(&b, &a, &err), COP_EFORMAT);                                           \
        assert_string_equal(err.message, words);                                                             \
    } while (0)
    DIFFERS(b.generation[0] = 'E', "the generation is E, where the engine has F");
    DIFFERS(b.n_layers = 5, "n_layers is 5, where the engine has 4");
    DIFFERS(b.dim++, "dim is 65, where the engine has 64");
    DIFFERS(b.n_heads++, "n_heads is 5, where the engine has 4");
    DIFFERS(b.n_kv_heads++, "n_kv_heads is 3, where the engine has 2");
    DIFFERS(b.head_dim++, "head_dim is 17, where the engine has 16");
    DIFFERS(b.ff_dim++, "ff_dim is 257, where the engine has 256");
    DIFFERS(b.vocab++, "vocab is 1002, where the engine has 1001");
    DIFFERS(b.rows++, "rows is 1025, where the engine has 1024");
    DIFFERS(b.sequence_len++, "sequence_len is 257, where the engine has 256");
    DIFFERS(b.context++, "context is 2561, where the engine has 2560");
    DIFFERS(b.softcap = 20, "softcap is 20, where the engine has 15");
    DIFFERS(b.rope_base = 1e4, "rope_base is 10000, where the engine has 100000");
    DIFFERS(b.rope_bf16 = true, "rope_bf16 is 1, where the engine has 0");
    DIFFERS(b.qk_scale = 1.15f, "qk_scale is 1.14999998, where the engine has 1.20000005");
    DIFFERS(b.eps = 1e-5f, "eps is 9.99999975e-06, where the engine has 1.1920929e-07");
    DIFFERS(b.has_lambdas = false, "has_lambdas is 0, where the engine has 1");
    DIFFERS(b.gate_channels = 32, "gate_channels is 32, where the engine has 12");
    DIFFERS(b.gate_factor = 2, "gate_factor is 2, where the engine has 3");
    DIFFERS(b.smear_channels = 0, "smear_channels is 0, where the engine has 24");
    DIFFERS(b.has_backout = false, "has_backout is 0, where the engine has 1");
    DIFFERS(b.window[3] = 128, "the window of layer 3 is 128, where the engine has 256");
    DIFFERS(b.has_value_embed[0] = true, "has_value_embed of layer 0 is 1, where the engine has 0");
#undef DIFFERS
}

static void what_the_user_said_of_the_architecture_holds_for_new_files(void **state) {
    (void)state;
    checkpoint *c;
    engine *e;
    cop_error err;
    engine_options o = few();
    char pattern[] = "ssl", table[] = "fp32";
    checkpoint_options options = checkpoint_defaults();
    options.window_pattern = pattern;
    options.rope_table = table;
    options.softcap = 7;
    options.sequence_len = 200;
    options.short_window = 50;
    assert_int_equal(checkpoint_open(&c, "tests/models/gen-D", &options, &err), COP_OK);
    memset(pattern, 'x', 3); /* it is copied */
    memset(table, 'x', 4);
    if (engine_open(&e, c, NULL, &o, &err) != COP_OK) fail_msg("%s", err.message);
    checkpoint_close(c);
    weights *w = load(e, "tests/models/gen-D");
    assert_string_equal(engine_weights_digest(w), engine_weights(e)->digest);
    engine_drop_weights(e, w);
    engine_close(e);
}

/* ---- Files that change. */

static void a_file_that_is_cut_short_is_refused(void **state) {
    (void)state;
    fixture f = fixture_open("gen-B", few());
    tensor_list *l = tensors_read("tests/models/gen-B");
    static const off_t lengths[] = {0, 10, 5000, 400000};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        tensors_write(l, file);
        assert_int_equal(truncate(file, lengths[i]), 0);
        refuses(f.e, file, COP_EFORMAT, file);
    }
    tensors_free(l);
    fixture_close(&f);
}

/* A file source that does something to the file before its third read. */
typedef struct meddler {
    file_source inner;
    weights_source source;
    int n_reads;
    bool cut;
} meddler;

static cop_status meddle_next(void *context, const tensor_info **out, cop_error *err) {
    meddler *m = context;
    return m->source.next(m->source.context, out, err);
}
static cop_status meddle_read(void *context, size_t first, size_t n, void *to, cop_error *err) {
    meddler *m = context;
    if (++m->n_reads == 3 && m->cut) assert_int_equal(truncate(file, 100000), 0);
    if (m->n_reads == 3 && !m->cut)
        assert_int_equal(utimensat(AT_FDCWD, file, (struct timespec[2]){{1, 0}, {1, 0}}, 0), 0);
    return m->source.read(m->source.context, first, n, to, err);
}
static cop_status meddle_finish(void *context, const char *digest, cop_error *err) {
    meddler *m = context;
    return m->source.finish(m->source.context, digest, err);
}

static void a_file_that_changes_while_it_is_read_is_an_error(void **state) {
    (void)state;
    fixture f = fixture_open("gen-B", few());
    tensor_list *l = tensors_read("tests/models/gen-B");
    for (int cut = 0; cut < 2; cut++) {
        pt_file *pt;
        weights *w;
        cop_error err;
        tensors_write(l, file);
        assert_int_equal(pt_open(&pt, file, &err), COP_OK);
        meddler m = {.cut = cut};
        m.source = file_source_of(&m.inner, pt);
        weights_source s = {&m, meddle_next, meddle_read, meddle_finish};
        assert_int_equal(engine_load_weights(f.e, &s, &w, &err), COP_EIO);
        assert_null(w);
        assert_non_null(strstr(err.message, "load "));
        pt_close(pt);
    }
    tensors_free(l);
    fixture_close(&f);
}

static atomic_bool touching;
static void *touch(void *arg) {
    (void)arg;
    for (long n = 1; atomic_load(&touching); n++)
        utimensat(AT_FDCWD, file,
                  (struct timespec[2]){{n / 1000000000, n % 1000000000}, {n / 1000000000, n % 1000000000}},
                  0);
    return NULL;
}

static void half_of_two_files_is_a_change_and_no_bad_model(void **state) {
    (void)state;
    fixture f = fixture_open("gen-B", few());
    tensor_list *l = tensors_read("tests/models/gen-B");
    tensor *last = &l->t[l->n - 1];
    pthread_t toucher;
    tensor_put(last->data, last->dtype, NAN);
    tensors_write(l, file);
    refuses(f.e, file, COP_EMODEL, "is not finite");
    atomic_store(&touching, true);
    assert_int_equal(pthread_create(&toucher, NULL, touch, NULL), 0);
    cop_status status = COP_EMODEL;
    for (int i = 0; i < 1000 && status == COP_EMODEL; i++) { /* until the other thread gets between */
        weights *w;
        status = engine_load_path(f.e, file, NULL, &w, NULL);
        assert_null(w);
    }
    atomic_store(&touching, false);
    pthread_join(toucher, NULL);
    assert_int_equal(status, COP_EIO);
    tensors_free(l);
    fixture_close(&f);
}

/* ---- Sources. */

typedef struct listed { /* a source of tensors in memory */
    tensor_list *l;
    int n_given;
    tensor_info info;
    size_t n_read;
    char digest[33]; /* what finish() was told */
    cop_status next, read, finish;
    int fail_at; /* the tensor at which `next` or `read` is returned */
} listed;

static cop_status listed_next(void *context, const tensor_info **out, cop_error *err) {
    listed *s = context;
    *out = NULL;
    if (s->n_given > 0) assert_int_equal(s->n_read, s->l->t[s->n_given - 1].n);
    if (s->next && s->n_given == s->fail_at) return cop_fail(err, s->next, "the next one failed");
    if (s->n_given == s->l->n) return COP_OK;
    const tensor *t = &s->l->t[s->n_given++];
    s->info = (tensor_info){.name = t->name, .dtype = t->dtype, .n_dims = t->n_dims, .n_elements = t->n};
    memcpy(s->info.dims, t->dims, sizeof t->dims);
    s->n_read = 0;
    *out = &s->info;
    return COP_OK;
}
static cop_status listed_read(void *context, size_t first, size_t n, void *to, cop_error *err) {
    listed *s = context;
    const tensor *t = &s->l->t[s->n_given - 1];
    size_t item = tensor_dtype_bytes(t->dtype);
    if (s->read && s->n_given - 1 == s->fail_at) return cop_fail(err, s->read, "reading failed");
    assert_int_equal(first, s->n_read);
    memcpy(to, t->data + first * item, n * item);
    s->n_read += n;
    return COP_OK;
}
static cop_status listed_finish(void *context, const char *tensors_digest, cop_error *err) {
    listed *s = context;
    snprintf(s->digest, sizeof s->digest, "%s", tensors_digest);
    return s->finish ? cop_fail(err, s->finish, "the end failed") : COP_OK;
}

static cop_status load_listed(engine *e, listed *s, weights **w, cop_error *err) {
    weights_source source = {s, listed_next, listed_read, listed_finish};
    return engine_load_weights(e, &source, w, err);
}

static void a_source_is_told_the_digest_of_its_tensors(void **state) {
    (void)state;
    fixture f = fixture_open("calc-d4", few());
    listed s = {.l = tensors_read("tests/models/calc-d4")};
    weights *w;
    cop_error err;
    char digest[33];
    if (load_listed(f.e, &s, &w, &err) != COP_OK) fail_msg("%s", err.message);
    tensors_digest(s.l, digest);
    assert_string_equal(s.digest, digest);
    assert_string_equal(engine_weights_digest(w), engine_weights(f.e)->digest);
    assert_string_not_equal(s.digest, engine_weights_digest(w));
    check_packed(w, f.e->w);
    engine_drop_weights(f.e, w);
    tensors_free(s.l);
    fixture_close(&f);
}

static void what_a_source_reports_is_passed_on(void **state) {
    (void)state;
    fixture f = fixture_open("gen-C", few());
    tensor_list *l = tensors_read("tests/models/gen-C");
    long live = mem_live();
    listed cases[] = {
        {.next = COP_EIO, .fail_at = 0},          {.next = COP_EIO, .fail_at = 3},
        {.next = COP_EIO, .fail_at = l->n},       {.read = COP_EUNSUPPORTED, .fail_at = 0},
        {.read = COP_EUNSUPPORTED, .fail_at = 7}, {.finish = COP_ENOTFOUND, .fail_at = -1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        listed *s = &cases[i];
        weights *w;
        cop_error err;
        s->l = l;
        assert_int_equal(load_listed(f.e, s, &w, &err), s->next | s->read | s->finish);
        assert_null(w);
        assert_non_null(strstr(err.message, "failed"));
        assert_int_equal(mem_live(), live);
    }
    tensors_free(l);
    fixture_close(&f);
}

static void tensors_out_of_order_are_refused(void **state) {
    (void)state;
    fixture f = fixture_open("gen-A", few());
    listed s = {.l = tensors_read("tests/models/gen-A")};
    weights *w;
    cop_error err;
    tensor first = s.l->t[0], second = s.l->t[1];
    s.l->t[1] = first;
    assert_int_equal(load_listed(f.e, &s, &w, &err), COP_EFORMAT);
    assert_non_null(strstr(err.message, "came again or out of order, after \"lm_head.weight\""));
    s = (listed){.l = s.l};
    s.l->t[0] = second;
    s.l->t[1] = first;
    assert_int_equal(load_listed(f.e, &s, &w, &err), COP_EFORMAT);
    assert_non_null(strstr(err.message, "tensor \"lm_head.weight\" is missing: \""));
    tensors_free(s.l);
    fixture_close(&f);
}

static void random_models_take_no_others(void **state) {
    (void)state;
    checkpoint *c;
    engine *e;
    cop_error err;
    engine_options o = few();
    assert_int_equal(checkpoint_open(&c, "tests/models/gen-A", NULL, &err), COP_OK);
    assert_int_equal(engine_open_random(&e, checkpoint_arch(c), 1, &o, &err), COP_OK);
    checkpoint_close(c);
    refuses(e, "tests/models/gen-A", COP_EUNSUPPORTED, "random");
    engine_close(e);
}

static void loading_can_be_stopped(void **state) {
    (void)state;
    fixture f = fixture_open("gen-A", few());
    engine_stop_loading(f.e, true);
    refuses(f.e, "tests/models/gen-A", COP_EIO, "loading was stopped");
    engine_stop_loading(f.e, false);
    engine_drop_weights(f.e, load(f.e, "tests/models/gen-A"));
    fixture_close(&f);
}

/* ---- Memory, and threads. */

static void every_allocation_failure_is_told(void **state) {
    (void)state;
    fixture f = fixture_open("gen-F", few());
    long live = mem_live(), n = 0;
    for (bool fired = true; fired; n++) {
        weights *w;
        cop_error err;
        mem_fail_after(n);
        cop_status status = engine_load_path(f.e, "tests/models/gen-F", NULL, &w, &err);
        fired = mem_fail_stop();
        assert_int_equal(status, fired ? COP_ENOMEM : COP_OK);
        assert_int_equal(w == NULL, fired);
        engine_drop_weights(f.e, w);
        assert_int_equal(mem_live(), live);
    }
    assert_true(n > 60);
    fixture_close(&f);
}

static void *load_many(void *arg) {
    static const char *const paths[] = {"tests/models/calc-d4", "tests/models/calc-d4-early"};
    engine *e = arg;
    for (int i = 0; i < 6; i++) {
        weights *w;
        if (engine_load_path(e, paths[i % 2], NULL, &w, NULL) != COP_OK) return "could not load";
        engine_drop_weights(e, w);
    }
    return NULL;
}

static void steps_and_loading_do_not_disturb_each_other(void **state) {
    (void)state;
    fixture f = fixture_open("calc-d4", few());
    int32_t tokens[] = {1000, 50, 60, 70, 80};
    rollout_prompt p = {.tokens = tokens, .n_tokens = 5, .seed = 5};
    rollout_spec spec = {.prompts = &p, .n_prompts = 1, .n = 16, .sampling = rollout_sampling_defaults()};
    spec.sampling.max_tokens = 120;
    outcome quiet = outcome_of(f.e, &spec);
    pthread_t loader;
    void *failure;
    assert_int_equal(pthread_create(&loader, NULL, load_many, f.e), 0);
    outcome busy = outcome_of(f.e, &spec);
    pthread_join(loader, &failure);
    if (failure) fail_msg("%s", (const char *)failure);
    for (uint32_t i = 0; i < spec.n; i++) {
        const sample *a = &quiet.samples[i], *b = &busy.samples[i];
        assert_int_equal(a->n, b->n);
        assert_memory_equal(a->tokens, b->tokens, (size_t)a->n * 4);
        assert_memory_equal(a->logprobs, b->logprobs, (size_t)a->n * 4);
    }
    outcome_free(&quiet, 1);
    outcome_free(&busy, 1);
    fixture_close(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_generation_loads_its_own_file_again),
        cmocka_unit_test(a_file_of_any_name_needs_no_meta_file),
        cmocka_unit_test(every_type_of_numbers_is_taken),
        cmocka_unit_test(tensors_must_be_the_models),
        cmocka_unit_test(shapes_must_be_the_models),
        cmocka_unit_test(a_number_that_is_not_finite_is_named),
        cmocka_unit_test(paths_that_lead_nowhere_are_told),
        cmocka_unit_test(where_there_is_a_meta_file_it_must_agree),
        cmocka_unit_test(every_field_of_an_architecture_is_compared),
        cmocka_unit_test(what_the_user_said_of_the_architecture_holds_for_new_files),
        cmocka_unit_test(a_file_that_is_cut_short_is_refused),
        cmocka_unit_test(a_file_that_changes_while_it_is_read_is_an_error),
        cmocka_unit_test(half_of_two_files_is_a_change_and_no_bad_model),
        cmocka_unit_test(a_source_is_told_the_digest_of_its_tensors),
        cmocka_unit_test(what_a_source_reports_is_passed_on),
        cmocka_unit_test(tensors_out_of_order_are_refused),
        cmocka_unit_test(random_models_take_no_others),
        cmocka_unit_test(loading_can_be_stopped),
        cmocka_unit_test(every_allocation_failure_is_told),
        cmocka_unit_test(steps_and_loading_do_not_disturb_each_other),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
