/* Telling the generations apart.
 *
 *   smear_*, backout_lambda   F      rope base, QK scale, gate factor and the divisor of short windows each
 * changed in the gates of 12 channels      E      same commit as one of these, so the tensors determine them
 * all.  What they do not gates of 32 channels      D      determine (softcap of D, a missing window pattern,
 * the rotary table) is decided by resid_lambdas             B, C   policy and noted. */
#include "engine/arch_detect.h"

#include <assert.h>
#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void note_add(note_list *l, const char *format, ...) {
    assert(l->n < MAX_NOTES);
    va_list args;
    va_start(args, format);
    vsnprintf(l->text[l->n++], NOTE_BYTES, format, args);
    va_end(args);
}

/* ---- Relatives that are refused by name. */

static const struct {
    const char *part; /* of a tensor's name */
    const char *what;
} relatives[] = {
    {".mlp.router.", "a mixture of experts"},
    {".mlp.experts.", "a mixture of experts"},
    {".mlp.shared_expert.", "a mixture of experts"},
    {"bigram_embed.", "the bigram experiment of January 2026 (engram)"},
    {"bigram_lambdas", "the bigram experiment of January 2026 (engram)"},
    {"value_embed_A.", "the value-embedding experiment V1 of January 2026"},
    {"value_embed.", "the value-embedding experiment V2 of January 2026"},
    {"v0_lambdas", "the value-embedding experiment V3 of January 2026"},
    {"model.embed_tokens.", "a model with Hugging Face's tensor names"},
};

static cop_status refuse_relatives(const pt_file *f, cop_error *err) {
    for (size_t r = 0; r < sizeof relatives / sizeof relatives[0]; r++) {
        for (int i = 0; i < pt_n_tensors(f); i++) {
            const char *name = pt_tensor(f, i)->name;
            if (strstr(name, relatives[r].part))
                return cop_fail(err, COP_EUNSUPPORTED, "tensor \"%s\" belongs to %s, which is not supported",
                                name, relatives[r].what);
        }
    }
    return COP_OK;
}

/* ---- Which parts there are. */

/* The columns of the first value-embedding gate; 0: there is none. */
static int64_t gate_columns(const pt_file *f) {
    for (int i = 0; i < pt_n_tensors(f); i++) {
        const tensor_info *t = pt_tensor(f, i);
        if (strstr(t->name, ".attn.ve_gate.weight") && t->n_dims == 2) return t->dims[1];
    }
    return 0;
}

static bool has_value_embeds(const pt_file *f) {
    for (int i = 0; i < pt_n_tensors(f); i++)
        if (!strncmp(pt_tensor(f, i)->name, "value_embeds.", 13)) return true;
    return false;
}

void arch_set_generation(arch *a, char generation) {
    static const struct {
        double rope_base;
        float qk_scale, gate_factor;
    } facts[] = {/* A to F */
                 {1e4, 1, 0}, {1e4, 1, 0}, {1e4, 1, 0}, {1e4, 1, 2}, {1e5, 1.15f, 3}, {1e5, 1.2f, 3}};
    assert(generation >= 'A' && generation <= 'F');
    snprintf(a->generation, sizeof a->generation, "%c", generation);
    a->rope_base = facts[generation - 'A'].rope_base;
    a->qk_scale = facts[generation - 'A'].qk_scale;
    a->gate_factor = facts[generation - 'A'].gate_factor;
    a->has_backout = generation == 'F';
    a->rope_bf16 = generation <= 'D';
    bool has_gates = a->gate_factor > 0;
    for (int i = 0; i < a->n_layers; i++) a->has_value_embed[i] = has_gates && i % 2 == (a->n_layers - 1) % 2;
}

static cop_status detect_generation(arch *a, const pt_file *f, const model_config *config, cop_error *err) {
    int n_smear = (pt_find(f, "smear_lambda") != NULL) + (pt_find(f, "smear_gate.weight") != NULL) +
                  (pt_find(f, "backout_lambda") != NULL);
    int64_t gate = gate_columns(f);
    if (n_smear != 0 && n_smear != 3)
        return cop_fail(err, COP_EUNSUPPORTED,
                        "smear_lambda, smear_gate.weight and backout_lambda belong together, and only %d of "
                        "them are there: a fork",
                        n_smear);
    if (gate != 0 && gate != 12 && !(gate == 32 && n_smear == 0))
        return cop_fail(err, COP_EUNSUPPORTED,
                        "value-embedding gates of %lld channels%s: a fork; nanochat's have 12 or 32",
                        (long long)gate, n_smear ? " with smear" : "");
    if (!gate && has_value_embeds(f))
        return cop_fail(err, COP_EUNSUPPORTED, "value embeddings without gates: a fork");
    a->has_lambdas = pt_find(f, "resid_lambdas") || pt_find(f, "x0_lambdas");
    arch_set_generation(a, n_smear                      ? 'F'
                           : gate == 12                 ? 'E'
                           : gate == 32                 ? 'D'
                           : !a->has_lambdas            ? 'A'
                           : config->has_window_pattern ? 'C'
                                                        : 'B');
    a->gate_channels = (int)gate;
    a->has_lambdas |= a->gate_factor > 0; /* a missing one is told with the other tensors */
    return COP_OK;
}

/* ---- Names and shapes. */

typedef struct check {
    const pt_file *f;
    int n_found, n_missing;
    char missing[96]; /* the first one */
    cop_status status;
    cop_error *err;
} check;

/* The tensor of that name must have the dims rows x columns, or just `rows` if columns is 0. */
static void expect(check *c, int64_t rows, int64_t columns, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
static void expect(check *c, int64_t rows, int64_t columns, const char *format, ...) {
    if (c->status) return;
    char name[96];
    va_list args;
    va_start(args, format);
    vsnprintf(name, sizeof name, format, args);
    va_end(args);
    const tensor_info *t = pt_find(c->f, name);
    if (!t) {
        if (!c->n_missing++) snprintf(c->missing, sizeof c->missing, "%s", name);
        return;
    }
    c->n_found++;
    int n_dims = columns ? 2 : 1;
    if (t->n_dims == n_dims && t->dims[0] == rows && (!columns || t->dims[1] == columns)) return;
    char has[96] = "", *at = has;
    for (int i = 0; i < t->n_dims; i++) at += sprintf(at, "%s%lld", i ? " x " : "", (long long)t->dims[i]);
    char wants[64];
    snprintf(wants, sizeof wants, columns ? "%lld x %lld" : "%lld", (long long)rows, (long long)columns);
    c->status = cop_fail(c->err, COP_EFORMAT, "tensor \"%s\" is %s, where model_config makes it %s", name,
                         t->n_dims ? has : "a scalar", wants);
}

static void expect_layer(check *c, const arch *a, int i) {
    int64_t dim = a->dim, kv = (int64_t)a->n_kv_heads * a->head_dim;
    expect(c, dim, dim, "transformer.h.%d.attn.c_q.weight", i);
    expect(c, kv, dim, "transformer.h.%d.attn.c_k.weight", i);
    expect(c, kv, dim, "transformer.h.%d.attn.c_v.weight", i);
    expect(c, dim, dim, "transformer.h.%d.attn.c_proj.weight", i);
    expect(c, a->ff_dim, dim, "transformer.h.%d.mlp.c_fc.weight", i);
    expect(c, dim, a->ff_dim, "transformer.h.%d.mlp.c_proj.weight", i);
    if (!a->has_value_embed[i]) return;
    expect(c, a->n_kv_heads, a->gate_channels, "transformer.h.%d.attn.ve_gate.weight", i);
    expect(c, a->rows, kv, "value_embeds.%d.weight", i);
}

/* Whether arch a has a tensor of that name.  Asked only once all that it must have were found. */
static bool belongs(const arch *a, const char *name) {
    static const char *const parts[] = {"attn.c_q.weight",    "attn.c_k.weight", "attn.c_v.weight",
                                        "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"};
    static const char *const singles[] = {
        "transformer.wte.weight", "lm_head.weight",    "resid_lambdas", "x0_lambdas",
        "smear_lambda",           "smear_gate.weight", "backout_lambda"};
    for (size_t i = 0; i < sizeof singles / sizeof singles[0]; i++)
        if (!strcmp(name, singles[i])) return true;
    for (int i = 0; i < a->n_layers; i++) {
        char prefix[32], wanted[96];
        int n = snprintf(prefix, sizeof prefix, "transformer.h.%d.", i);
        bool here = !strncmp(name, prefix, (size_t)n);
        for (size_t p = 0; here && p < sizeof parts / sizeof parts[0]; p++)
            if (!strcmp(name + n, parts[p])) return true;
        if (!a->has_value_embed[i]) continue;
        if (here && !strcmp(name + n, "attn.ve_gate.weight")) return true;
        snprintf(wanted, sizeof wanted, "value_embeds.%d.weight", i);
        if (!strcmp(name, wanted)) return true;
    }
    return false;
}

/* List the tensors that arch a lacks, up to the room in `list`; returns how many there are. */
static int list_unknown(const arch *a, const pt_file *f, char *list, size_t room) {
    int n = 0;
    size_t at = 0;
    list[0] = 0;
    for (int i = 0; i < pt_n_tensors(f); i++) {
        const char *name = pt_tensor(f, i)->name;
        if (belongs(a, name)) continue;
        if (at + strlen(name) + 6 < room) at += (size_t)sprintf(list + at, "%s\"%s\"", n ? ", " : "", name);
        n++;
    }
    return n;
}

static cop_status check_tensors(const arch *a, const pt_file *f, cop_error *err) {
    check c = {.f = f, .err = err};
    expect(&c, a->rows, a->dim, "transformer.wte.weight");
    expect(&c, a->rows, a->dim, "lm_head.weight");
    for (int i = 0; i < a->n_layers; i++) expect_layer(&c, a, i);
    if (a->has_lambdas) {
        expect(&c, a->n_layers, 0, "resid_lambdas");
        expect(&c, a->n_layers, 0, "x0_lambdas");
    }
    if (a->smear_channels) {
        expect(&c, 1, a->smear_channels, "smear_gate.weight");
        expect(&c, 1, 0, "smear_lambda");
        expect(&c, 1, 0, "backout_lambda");
    }
    if (c.status || (!c.n_missing && c.n_found == pt_n_tensors(f))) return c.status;
    char unknown[320];
    int n_unknown = list_unknown(a, f, unknown, sizeof unknown);
    if (n_unknown)
        return cop_fail(err, COP_EUNSUPPORTED,
                        "%d tensors that generation %s of %d layers does not have: %s%s%s", n_unknown,
                        a->generation, a->n_layers, unknown, c.n_missing ? "; missing " : "", c.missing);
    return cop_fail(err, COP_EFORMAT, "%d tensors are missing, the first is \"%s\"", c.n_missing, c.missing);
}

static cop_status set_dimensions(arch *a, const pt_file *f, const model_config *config, cop_error *err) {
    a->vocab = config->vocab;
    a->dim = config->dim;
    a->n_layers = config->n_layers;
    a->n_heads = config->n_heads;
    a->n_kv_heads = config->n_kv_heads;
    a->head_dim = config->dim / config->n_heads;
    a->ff_dim = 4 * config->dim;
    a->eps = FLT_EPSILON;
    const tensor_info *embed = pt_find(f, "transformer.wte.weight"), *smear = pt_find(f, "smear_gate.weight");
    a->rows = a->vocab;
    const tensor_info *head = pt_find(f, "lm_head.weight");
    /* A missing embedding is told as missing, not as a head of another shape. */
    if (!embed && head && head->n_dims == 2 && head->dims[0] > a->vocab) embed = head;
    if (embed && embed->n_dims == 2 && embed->dims[0] <= INT32_MAX) a->rows = (int)embed->dims[0];
    if (a->rows < a->vocab)
        return cop_fail(err, COP_EFORMAT, "the embedding has %d rows, fewer than vocab_size %d", a->rows,
                        a->vocab);
    if (smear && (smear->n_dims != 2 || smear->dims[1] > a->dim))
        return cop_fail(err, COP_EFORMAT, "smear_gate.weight does not fit a model of width %d", a->dim);
    if (gate_columns(f) > a->dim)
        return cop_fail(err, COP_EFORMAT,
                        "value-embedding gates of %lld channels do not fit a model of width %d",
                        (long long)gate_columns(f), a->dim);
    a->smear_channels = smear ? (int)smear->dims[1] : 0;
    return COP_OK;
}

/* ---- Policies and overrides. */

/* Upstream's arithmetic: half for C and D; a third or a quarter, rounded up to 128, for E and F. */
static int32_t short_window(const arch *a) {
    int divisor = a->generation[0] == 'E' ? 3 : a->generation[0] == 'F' ? 4 : 0;
    if (!divisor) return a->sequence_len / 2;
    int part = (a->sequence_len + divisor - 1) / divisor;
    return (part + 127) / 128 * 128;
}

bool arch_set_windows(arch *a, const char *pattern, int32_t window_s) {
    bool any_short = false;
    if (!window_s) window_s = short_window(a);
    for (int i = 0; i < a->n_layers; i++) {
        /* The last layer always sees everything. */
        bool is_short = pattern[i % (int)strlen(pattern)] == 'S' && i < a->n_layers - 1;
        a->window[i] = is_short ? window_s : a->sequence_len;
        any_short |= is_short;
    }
    return any_short;
}

static cop_status set_windows(arch *a, const model_config *config, const checkpoint_options *o,
                              note_list *notes, cop_error *err) {
    char pattern[ARCH_MAX_LAYERS + 1] = "L";
    bool known = config->has_window_pattern;
    if (known) memcpy(pattern, config->window_pattern, sizeof pattern);
    if (o->window_pattern && !window_pattern_copy(pattern, o->window_pattern, strlen(o->window_pattern)))
        return cop_fail(err, COP_EINVAL, "window pattern \"%s\" is not made of S and L", o->window_pattern);
    known |= o->window_pattern != NULL;
    bool unlimited = !known && (a->generation[0] == 'A' || a->generation[0] == 'B');
    bool any_short = arch_set_windows(a, pattern, o->short_window);
    for (int i = 0; i < a->n_layers && unlimited; i++) a->window[i] = ARCH_NO_WINDOW;
    if (o->short_window && !any_short)
        return cop_fail(err, COP_EINVAL, "short window %d given, but no layer has a short window",
                        o->short_window);
    if (!known && a->generation[0] == 'B')
        note_add(notes, "generation B by its tensors: context taken as unlimited; a mid-training or SFT file "
                        "of January 2026 "
                        "lost its window pattern: --window-pattern SSSL if so");
    else if (!known && !unlimited)
        note_add(notes, "no window_pattern in the meta file: L taken, as nanochat does; if the base model "
                        "was trained with "
                        "SSSL, use --window-pattern SSSL");
    if (any_short && !config->is_base && !o->sequence_len && !o->short_window)
        note_add(
            notes,
            "short windows follow from sequence_len %d of the meta file, which SFT and RL may have changed; "
            "--sequence-len or --short-window set another",
            a->sequence_len);
    return COP_OK;
}

static cop_status set_softcap(arch *a, const model_config *config, const checkpoint_options *o,
                              note_list *notes, cop_error *err) {
    bool is_d = a->generation[0] == 'D';
    a->softcap = is_d && config->softcap_20 ? 20 : 15;
    if (o->softcap != 0) {
        if (!(isfinite(o->softcap) && o->softcap > 0))
            return cop_fail(err, COP_EINVAL, "softcap %g is not a positive number", (double)o->softcap);
        a->softcap = o->softcap;
    } else if (is_d && config->softcap_20)
        note_add(notes, "softcap 20: the meta file is from the week of March 2026 in which nanochat used it; "
                        "--softcap 15 if not");
    else if (is_d)
        note_add(
            notes,
            "softcap 15 taken; files of 3 to 9 March 2026 need --softcap 20, and nothing in them says so");
    return COP_OK;
}

static cop_status set_rope_table(arch *a, const checkpoint_options *o, note_list *notes, cop_error *err) {
    if (o->rope_table) {
        bool bf16 = !strcmp(o->rope_table, "bf16");
        if (!bf16 && strcmp(o->rope_table, "fp32") != 0)
            return cop_fail(err, COP_EINVAL, "rope table \"%s\" is neither bf16 nor fp32", o->rope_table);
        a->rope_bf16 = bf16;
    } else
        note_add(
            notes,
            "rotary table in %s, as nanochat's CPU code for generation %s had it; --rope-table sets another",
            a->rope_bf16 ? "bf16" : "fp32", a->generation);
    return COP_OK;
}

static void note_rows(const arch *a, note_list *notes) {
    if (a->rows != a->vocab && a->rows != (a->vocab + 63) / 64 * 64)
        note_add(notes, "%d rows stored for a vocabulary of %d: the others are ignored", a->rows, a->vocab);
}

cop_status arch_detect(arch *out, const pt_file *f, const model_config *config, const checkpoint_options *o,
                       note_list *notes, cop_error *err) {
    arch a = {0};
    if (o->sequence_len < 0 || o->sequence_len > MODEL_MAX_SEQUENCE)
        return cop_fail(err, COP_EINVAL, "sequence length %d is not within 1 and %d", o->sequence_len,
                        MODEL_MAX_SEQUENCE);
    if (o->short_window < 0)
        return cop_fail(err, COP_EINVAL, "short window %d is not positive", o->short_window);
    a.sequence_len = o->sequence_len ? o->sequence_len : config->sequence_len;
    a.context = 10 * a.sequence_len;
    cop_status status = refuse_relatives(f, err);
    if (status == COP_OK) status = set_dimensions(&a, f, config, err);
    if (status == COP_OK) status = detect_generation(&a, f, config, err);
    if (status == COP_OK) status = check_tensors(&a, f, err);
    if (status == COP_OK) status = set_softcap(&a, config, o, notes, err);
    if (status == COP_OK) status = set_windows(&a, config, o, notes, err);
    if (status == COP_OK) status = set_rope_table(&a, o, notes, err);
    if (status) return status;
    note_rows(&a, notes);
    *out = a;
    return COP_OK;
}
