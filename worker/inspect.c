/* `coppice inspect`: what a checkpoint holds, what it needs, and what had to be assumed about it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/tokenizer.h"
#include "kernels/backend.h"
#include "worker/commands.h"
#include "worker/jsonl.h"

static const char *const special_names[TOKEN_N_SPECIALS] = {
    "<|bos|>",          "<|user_start|>", "<|user_end|>",     "<|assistant_start|>", "<|assistant_end|>",
    "<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>",
};
static const char *const kv_names[] = {"bf16", "f32"};
enum { N_KV = 2 };

/* Everything that both forms of the answer tell. */
typedef struct facts {
    checkpoint *c;
    const arch *a;
    tokenizer *t; /* NULL: none, or it could not be read */
    size_t n_parameters, n_bytes;
    size_t dtype_bytes[TENSOR_F64 + 1];
    size_t kv_memory;
    int context_pages;           /* of one row that fills the context */
    size_t kv_token_bytes[N_KV]; /* K and V of all layers, as kv_names */
    size_t rows_that_fit[N_KV];  /* at full context */
} facts;

static void count(facts *f, size_t kv_memory) {
    for (int i = 0; i < checkpoint_n_tensors(f->c); i++) {
        const tensor_info *t = checkpoint_tensor(f->c, i);
        size_t bytes = t->n_elements * tensor_dtype_bytes(t->dtype);
        f->n_parameters += t->n_elements;
        f->n_bytes += bytes;
        f->dtype_bytes[t->dtype] += bytes;
    }
    const arch *a = f->a;
    f->kv_memory = kv_memory ? kv_memory : mem_available() / 4;
    f->context_pages = (a->context + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
    for (int i = 0; i < N_KV; i++) {
        size_t item = i == 0 ? 2 : 4;
        f->kv_token_bytes[i] = 2 * item * (size_t)a->n_layers * (size_t)a->n_kv_heads * (size_t)a->head_dim;
        size_t n_pages = f->kv_memory / (KV_PAGE_TOKENS * f->kv_token_bytes[i]);
        f->rows_that_fit[i] = n_pages / (size_t)f->context_pages;
    }
}

/* ---- As text. */

/* 1234567 as "1,234,567". */
static const char *grouped(char out[32], uint64_t n) {
    char digits[24];
    int len = snprintf(digits, sizeof digits, "%llu", (unsigned long long)n), at = 0;
    for (int i = 0; i < len; i++) {
        if (i && (len - i) % 3 == 0) out[at++] = ',';
        out[at++] = digits[i];
    }
    out[at] = 0;
    return out;
}

static const char *size_text(char out[32], size_t n) {
    static const char units[] = "KMGT";
    double x = (double)n;
    int unit = -1;
    while (x >= 1024 && unit < 3) x /= 1024, unit++;
    if (unit < 0)
        snprintf(out, 32, "%zu B", n);
    else
        snprintf(out, 32, "%.1f %ciB", x, units[unit]);
    return out;
}

/* Start a line with its aligned label. */
static void label(const char *name) { printf("%-14s", name); }

static void print_windows(const arch *a) {
    label("windows");
    for (int i = 0, n; i < a->n_layers; i += n) {
        for (n = 1; i + n < a->n_layers && a->window[i + n] == a->window[i];) n++;
        if (i) printf(", ");
        if (n > 1) printf("%d x ", n);
        if (a->window[i] == ARCH_NO_WINDOW)
            printf("unlimited");
        else
            printf("%d", a->window[i]);
    }
    printf("\n");
}

static void print_model(const facts *f) {
    char number[32];
    const arch *a = f->a;
    label("model"), printf("%s\n", checkpoint_model_path(f->c));
    label("step"), printf("%lld\n", (long long)checkpoint_step(f->c));
    label("architecture"), printf("nanochat, generation %s\n", a->generation);
    label("parameters"),
        printf("%s in %d tensors\n", grouped(number, f->n_parameters), checkpoint_n_tensors(f->c));
    label("bytes"), printf("%s", size_text(number, f->n_bytes));
    for (int d = 0; d <= TENSOR_F64; d++)
        if (f->dtype_bytes[d])
            printf(", %s %s", tensor_dtype_name((tensor_dtype)d), size_text(number, f->dtype_bytes[d]));
    printf("\n");
    label("layers"), printf("%d, width %d, MLP %d\n", a->n_layers, a->dim, a->ff_dim);
    label("heads"), printf("%d of %d, %d for keys and values\n", a->n_heads, a->head_dim, a->n_kv_heads);
    label("vocabulary"), printf("%d, %d rows stored\n", a->vocab, a->rows);
    label("context"), printf("%d, trained on sequences of %d\n", a->context, a->sequence_len);
    print_windows(a);
    label("softcap"), printf("%g\n", (double)a->softcap);
    label("rotary"), printf("base %g, table in %s\n", a->rope_base, a->rope_bf16 ? "bf16" : "fp32");
    label("QK scale"), printf("%g\n", (double)a->qk_scale);
    label("extras");
    if (a->has_lambdas) printf("residual scalars");
    if (a->gate_channels)
        printf(", value embeddings (gates of %d channels, factor %g)", a->gate_channels,
               (double)a->gate_factor);
    if (a->smear_channels) printf(", smear (%d channels)", a->smear_channels);
    if (a->has_backout) printf(", backout");
    printf("%s\n", a->has_lambdas ? "" : "none");
}

static void print_tokenizer(const facts *f) {
    label("tokenizer");
    const char *path = checkpoint_tokenizer_path(f->c);
    if (!f->t) {
        printf("%s\n", path ? path : "none found");
        return;
    }
    printf("%s, %d tokens\n", path, tokenizer_vocab(f->t));
    label("special");
    for (int i = 0, column = 0; i < TOKEN_N_SPECIALS; i++) {
        int32_t id = tokenizer_special(f->t, (token_special)i);
        if (id < 0) continue;
        if (column++) printf(column % 3 == 1 ? "\n%14s" : "  ", "");
        printf("%-19s %d", special_names[i], id);
    }
    printf("\n");
}

static void print_memory(const facts *f) {
    char a[32], b[32];
    label("KV per token"), printf("bf16 %s bytes, f32 %s bytes\n", grouped(a, f->kv_token_bytes[0]),
                                  grouped(b, f->kv_token_bytes[1]));
    label("rows that fit"), printf("bf16 %s, f32 ", grouped(a, f->rows_that_fit[0]));
    printf("%s", grouped(b, f->rows_that_fit[1]));
    printf(" at full context (%d pages of %d tokens) in %s\n", f->context_pages, KV_PAGE_TOKENS,
           size_text(a, f->kv_memory));
}

/* The name with its first number replaced by *, so that layers can be told together. */
static void pattern_of(char out[256], const char *name) {
    size_t before = strcspn(name, "0123456789");
    size_t digits = strspn(name + before, "0123456789");
    /* "c_fc2" would be no layer: the number stands between dots. */
    bool is_index = digits && before && name[before - 1] == '.' && name[before + digits] == '.';
    if (is_index)
        snprintf(out, 256, "%.*s*%s", (int)before, name, name + before + digits);
    else
        snprintf(out, 256, "%s", name);
}

static bool same_kind(const tensor_info *a, const tensor_info *b) {
    char x[256], y[256];
    pattern_of(x, a->name);
    pattern_of(y, b->name);
    return a->dtype == b->dtype && a->n_dims == b->n_dims &&
           !memcmp(a->dims, b->dims, (size_t)a->n_dims * sizeof a->dims[0]) && !strcmp(x, y);
}

static void print_tensors(const facts *f) {
    printf("\n%-38s %5s  %-5s %s\n", "tensor", "count", "type", "shape");
    int n = checkpoint_n_tensors(f->c);
    for (int i = 0; i < n; i++) {
        const tensor_info *t = checkpoint_tensor(f->c, i);
        int n_same = 0;
        bool told = false;
        for (int j = 0; j < n && !told; j++) {
            if (!same_kind(t, checkpoint_tensor(f->c, j))) continue;
            told = j < i;
            n_same++;
        }
        if (told) continue;
        char name[256];
        pattern_of(name, t->name);
        printf("%-38s %5d  %-5s ", n_same > 1 ? name : t->name, n_same, tensor_dtype_name(t->dtype));
        for (int d = 0; d < t->n_dims; d++) printf("%s%lld", d ? " x " : "", (long long)t->dims[d]);
        printf("\n");
    }
}

static void print_text(const facts *f) {
    print_model(f);
    print_tokenizer(f);
    print_memory(f);
    print_tensors(f);
    if (checkpoint_n_notes(f->c)) printf("\nassumed\n");
    for (int i = 0; i < checkpoint_n_notes(f->c); i++) printf("  %s\n", checkpoint_note(f->c, i));
}

/* ---- As JSON.  A NULL from jansson makes the whole document NULL. */

static json_t *windows_json(const arch *a) {
    json_t *list = json_array();
    for (int i = 0; i < a->n_layers; i++)
        json_array_append_new(list,
                              a->window[i] == ARCH_NO_WINDOW ? json_null() : json_integer(a->window[i]));
    return list;
}

static json_t *arch_json(const arch *a) {
    return json_pack("{s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:f, s:f, s:s, s:f, s:f, s:o, "
                     "s:b, s:i, s:f, s:i, s:b}",
                     "generation", a->generation, "vocab", a->vocab, "rows", a->rows, "dim", a->dim, "layers",
                     a->n_layers, "heads", a->n_heads, "kv_heads", a->n_kv_heads, "head_dim", a->head_dim,
                     "ff_dim", a->ff_dim, "sequence_len", a->sequence_len, "context", a->context, "softcap",
                     (double)a->softcap, "rope_base", a->rope_base, "rope_table",
                     a->rope_bf16 ? "bf16" : "fp32", "qk_scale", (double)a->qk_scale, "eps", (double)a->eps,
                     "windows", windows_json(a), "lambdas", a->has_lambdas, "gate_channels", a->gate_channels,
                     "gate_factor", (double)a->gate_factor, "smear_channels", a->smear_channels, "backout",
                     a->has_backout);
}

static json_t *tokenizer_json(const facts *f) {
    const char *path = checkpoint_tokenizer_path(f->c);
    if (!path || !f->t) return json_pack("{s:s?}", "path", path);
    json_t *special = json_object();
    for (int i = 0; i < TOKEN_N_SPECIALS; i++) {
        int32_t id = tokenizer_special(f->t, (token_special)i);
        if (id >= 0) json_object_set_new(special, special_names[i], json_integer(id));
    }
    return json_pack("{s:s, s:i, s:o}", "path", path, "vocab", tokenizer_vocab(f->t), "special", special);
}

static json_t *tensors_json(const facts *f) {
    json_t *list = json_array();
    for (int i = 0; i < checkpoint_n_tensors(f->c); i++) {
        const tensor_info *t = checkpoint_tensor(f->c, i);
        json_t *shape = json_array();
        for (int d = 0; d < t->n_dims; d++) json_array_append_new(shape, json_integer(t->dims[d]));
        json_array_append_new(list, json_pack("{s:s, s:s, s:o}", "name", t->name, "dtype",
                                              tensor_dtype_name(t->dtype), "shape", shape));
    }
    return list;
}

static json_t *kv_json(const facts *f) {
    json_t *per_token = json_object(), *rows = json_object();
    for (int i = 0; i < N_KV; i++) {
        json_object_set_new(per_token, kv_names[i], json_u64(f->kv_token_bytes[i]));
        json_object_set_new(rows, kv_names[i], json_u64(f->rows_that_fit[i]));
    }
    return json_pack("{s:o, s:o, s:o, s:i, s:i}", "bytes_per_token", per_token, "rows_that_fit", rows,
                     "memory", json_u64(f->kv_memory), "page_tokens", KV_PAGE_TOKENS, "context_pages",
                     f->context_pages);
}

static bool print_json(const facts *f) {
    json_t *notes = json_array(), *dtypes = json_object();
    for (int i = 0; i < checkpoint_n_notes(f->c); i++)
        json_array_append_new(notes, json_string(checkpoint_note(f->c, i)));
    for (int d = 0; d <= TENSOR_F64; d++)
        if (f->dtype_bytes[d])
            json_object_set_new(dtypes, tensor_dtype_name((tensor_dtype)d), json_u64(f->dtype_bytes[d]));
    json_t *document =
        json_pack("{s:s, s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "model", checkpoint_model_path(f->c),
                  "step", (json_int_t)checkpoint_step(f->c), "parameters", json_u64(f->n_parameters), "bytes",
                  json_u64(f->n_bytes), "dtype_bytes", dtypes, "arch", arch_json(f->a), "tokenizer",
                  tokenizer_json(f), "kv", kv_json(f), "tensors", tensors_json(f), "assumed", notes);
    bool printed = document && jsonl_print(stdout, document);
    json_decref(document);
    return printed;
}

/* ---- The command. */

/* Open the tokenizer, if there is one, and compare it with the model.  A failure is told at the end, after
 * all else. */
static cop_status open_tokenizer(facts *f, cop_error *err) {
    const char *path = checkpoint_tokenizer_path(f->c);
    if (!path) return COP_OK;
    cop_status status = tokenizer_open(&f->t, path, err);
    if (status == COP_OK && tokenizer_vocab(f->t) != f->a->vocab)
        status = cop_fail(err, COP_EFORMAT, "the tokenizer \"%s\" has %d tokens, the model %d", path,
                          tokenizer_vocab(f->t), f->a->vocab);
    return status;
}

static int inspect(const model_options *m, bool as_json) {
    facts f = {0};
    cop_error err;
    checkpoint_options o = model_checkpoint_options(m);
    if (checkpoint_open(&f.c, m->model, &o, &err) != COP_OK) return tell_error(&err, 1);
    f.a = checkpoint_arch(f.c);
    cop_status status = open_tokenizer(&f, &err);
    count(&f, m->kv_memory);
    bool printed = true;
    if (as_json)
        printed = print_json(&f);
    else
        print_text(&f);
    if (status == COP_OK && (!printed || fflush(stdout) != 0))
        status = cop_fail(&err, COP_EIO, "could not write the answer");
    tokenizer_close(f.t);
    checkpoint_close(f.c);
    return status == COP_OK ? 0 : tell_error(&err, 1);
}

static int run(int argc, char **argv) {
    model_options m = model_options_defaults();
    bool as_json = false;
    option_spec rows[MODEL_OPTION_ROWS + 2];
    int n_args, n = model_option_rows(&m, false, rows);
    rows[n++] = (option_spec){
        .name = "kv-memory",
        .kind = OPTION_BYTES,
        .value = &m.kv_memory,
        .arg = "BYTES",
        .help = "memory for keys and values, such as 4G; default: a quarter of the free memory"};
    rows[n++] = (option_spec){
        .name = "json", .kind = OPTION_FLAG, .value = &as_json, .help = "print one JSON document"};
    int exit_status = options_parse(&command_inspect, rows, n, argc, argv, 1, &n_args);
    if (exit_status >= 0) return exit_status;
    if (n_args == 1) m.model = argv[1];
    if (m.model) return inspect(&m, as_json);
    cop_error err;
    cop_fail(&err, COP_EINVAL, "inspect needs a checkpoint: coppice inspect PATH");
    return tell_error(&err, 2);
}

const command command_inspect = {
    .name = "inspect",
    .arguments = "PATH",
    .summary = "what a checkpoint holds, and what had to be assumed",
    .details = "Tells the architecture and its generation, shapes, types, bytes, the tokenizer and its "
               "special tokens, "
               "KV bytes per token, how many rows fit, and everything that the files leave open.\n"
               "PATH is a directory as nanochat writes it, or a model_*.pt file in one.",
    .example = "coppice inspect tests/models/calc-d4",
    .run = run,
};
