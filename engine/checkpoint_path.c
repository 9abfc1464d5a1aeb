/* Finding a checkpoint's files.  Where upstream leaves a choice to the order of a directory listing, names
 * decide. */
#include "engine/checkpoint_path.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* nanochat's directories, in the order of preference: its chat programs take the SFT model unless told
 * otherwise. */
static const char *const sources[] = {"chatsft_checkpoints", "sft_checkpoints", "chatrl_checkpoints",
                                      "mid_checkpoints", "base_checkpoints"};
enum { N_SOURCES = sizeof sources / sizeof sources[0], MAX_STEP_DIGITS = 18 };

static cop_status no_memory(cop_error *err) {
    return cop_fail(err, COP_ENOMEM, "out of memory for file names");
}

static char *join(const char *directory, const char *name) {
    size_t n = strlen(directory) + strlen(name) + 2;
    char *path = mem_alloc(n, 1);
    if (path) snprintf(path, n, "%s/%s", directory, name);
    return path;
}

static bool is_directory(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

static bool exists(const char *path) {
    struct stat st;
    return stat(path, &st) == 0;
}

static bool ends_with(const char *s, const char *end) {
    size_t n = strlen(s), m = strlen(end);
    return n >= m && !strcmp(s + n - m, end);
}

/* The step of "model_<digits>.pt", or -1. */
static int64_t model_step(const char *name) {
    if (strncmp(name, "model_", 6) != 0) return -1;
    size_t digits = strspn(name + 6, "0123456789");
    if (!digits || digits > MAX_STEP_DIGITS || strcmp(name + 6 + digits, ".pt") != 0) return -1;
    return strtoll(name + 6, NULL, 10);
}

static cop_status refuse_format(const char *name, const char *path, cop_error *err) {
    if (ends_with(name, ".gguf"))
        return cop_fail(err, COP_EUNSUPPORTED, "cannot open \"%s\": GGUF files are not supported yet", path);
    if (ends_with(name, ".safetensors") || ends_with(name, ".safetensors.index.json") ||
        !strcmp(name, "config.json") || !strcmp(name, "pytorch_model.bin"))
        return cop_fail(
            err, COP_EUNSUPPORTED,
            "cannot open \"%s\": Hugging Face models (config.json, safetensors) are not supported yet", path);
    if (ends_with(name, ".tar") || ends_with(name, ".tar.gz") || ends_with(name, ".zip"))
        return cop_fail(err, COP_EUNSUPPORTED, "cannot open \"%s\": unpack the archive first", path);
    return COP_OK;
}

/* ---- One directory. */

/* What lies in a directory: the model file that was asked for, and what else matters. */
typedef struct listing {
    int64_t step;            /* -1: no model file */
    char name[NAME_MAX + 1]; /* of the model file */
    bool any_model;          /* model files there are, if not of the step wanted */
    cop_status refusal;      /* of the first file of another format, told in `why` */
    cop_error why;
} listing;

/* Take the newest model file, or that of step `wanted`; of two with one step the name that upstream would
 * write. */
static void list_model(listing *l, const char *name, int64_t wanted) {
    int64_t step = model_step(name);
    char usual[64];
    if (step < 0) return;
    l->any_model = true;
    if ((wanted >= 0 && step != wanted) || step < l->step) return;
    snprintf(usual, sizeof usual, "model_%06lld.pt", (long long)step);
    if (step == l->step && strcmp(name, usual) != 0 && (!strcmp(l->name, usual) || strcmp(name, l->name) > 0))
        return;
    l->step = step;
    snprintf(l->name, sizeof l->name, "%s", name);
}

static cop_status list_directory(listing *l, const char *path, int64_t wanted, cop_error *err) {
    *l = (listing){.step = -1};
    DIR *d = opendir(path);
    if (!d)
        return cop_fail(err, errno == ENOENT ? COP_ENOTFOUND : COP_EIO, "could not open \"%s\": %s", path,
                        strerror(errno));
    for (struct dirent *e; (e = readdir(d));) {
        list_model(l, e->d_name, wanted);
        if (!l->refusal) l->refusal = refuse_format(e->d_name, path, &l->why);
    }
    closedir(d);
    return COP_OK;
}

/* ---- Choosing among subdirectories. */

typedef struct choice {
    char name[NAME_MAX + 1];
    int64_t depth; /* of a tag "d<number>..."; -1: another name */
    struct timespec changed;
    int n; /* candidates seen */
} choice;

static int64_t tag_depth(const char *name) {
    size_t digits = name[0] == 'd' ? strspn(name + 1, "0123456789") : 0;
    return digits && digits <= MAX_STEP_DIGITS ? strtoll(name + 1, NULL, 10) : -1;
}

/* Whether a is chosen before b: the deepest tag, "d12" before "d12_x"; without any such tag the newest. */
static bool chosen_before(const choice *a, const choice *b) {
    if (a->depth != b->depth) return a->depth > b->depth;
    if (a->depth < 0) {
        if (a->changed.tv_sec != b->changed.tv_sec) return a->changed.tv_sec > b->changed.tv_sec;
        if (a->changed.tv_nsec != b->changed.tv_nsec) return a->changed.tv_nsec > b->changed.tv_nsec;
    }
    return strcmp(a->name, b->name) < 0;
}

/* Choose a subdirectory that holds model files.  best->n is 0 if there is none. */
static cop_status choose_tag(choice *best, const char *path, cop_error *err) {
    *best = (choice){.depth = -1};
    DIR *d = opendir(path);
    if (!d) return cop_fail(err, COP_EIO, "could not open \"%s\": %s", path, strerror(errno));
    cop_status status = COP_OK;
    for (struct dirent *e; status == COP_OK && (e = readdir(d));) {
        if (e->d_name[0] == '.') continue;
        char *sub = join(path, e->d_name);
        if (!sub) status = no_memory(err);
        listing l;
        struct stat st;
        if (sub && is_directory(sub) && list_directory(&l, sub, -1, NULL) == COP_OK && l.any_model &&
            !stat(sub, &st)) {
            choice c = {.depth = tag_depth(e->d_name), .changed = st.st_mtim, .n = best->n + 1};
            snprintf(c.name, sizeof c.name, "%s", e->d_name);
            if (!best->n || chosen_before(&c, best)) *best = c;
            best->n = c.n;
        }
        mem_free(sub);
    }
    closedir(d);
    return status;
}

/* Replace *directory by the one that holds the model: down through a source and a tag, if it is not it
 * already. */
static cop_status descend(char **directory, note_list *notes, cop_error *err) {
    int n_sources = 0;
    const char *source = NULL;
    for (int i = 0; i < N_SOURCES; i++) {
        char *sub = join(*directory, sources[i]);
        if (!sub) return no_memory(err);
        choice c;
        cop_status status = is_directory(sub) ? choose_tag(&c, sub, err) : COP_OK;
        bool usable = is_directory(sub) && status == COP_OK && c.n > 0;
        mem_free(sub);
        if (status) return status;
        n_sources += usable;
        if (usable && !source) source = sources[i];
    }
    if (source) {
        char *sub = join(*directory, source);
        if (!sub) return no_memory(err);
        mem_free(*directory);
        *directory = sub;
        if (n_sources > 1) note_add(notes, "%s taken, of %d kinds of checkpoints there", source, n_sources);
    }
    choice c;
    cop_status status = choose_tag(&c, *directory, err);
    if (status) return status;
    if (!c.n) return cop_fail(err, COP_ENOTFOUND, "could not find a model_*.pt in \"%s\"", *directory);
    if (c.n > 1) note_add(notes, "model %.60s taken, of %d in %.120s", c.name, c.n, *directory);
    char *sub = join(*directory, c.name);
    if (!sub) return no_memory(err);
    mem_free(*directory);
    *directory = sub;
    return COP_OK;
}

/* ---- The tokenizer. */

/* *found = directory/tail if that exists. */
static cop_status try_tokenizer(char **found, const char *directory, const char *tail, cop_error *err) {
    char *path = join(directory, tail);
    if (!path) return no_memory(err);
    if (exists(path))
        *found = path;
    else
        mem_free(path);
    return COP_OK;
}

/* BASE/tokenizer of BASE/<source>/<tag>. */
static cop_status try_base_tokenizer(char **found, const char *directory, cop_error *err) {
    char real[PATH_MAX];
    if (!realpath(directory, real)) return COP_OK;
    char *tag = strrchr(real, '/');
    if (!tag || tag == real) return COP_OK;
    *tag = 0;
    char *source = strrchr(real, '/');
    if (!source) return COP_OK;
    *source++ = 0;
    for (int i = 0; i < N_SOURCES; i++)
        if (!strcmp(source, sources[i])) return try_tokenizer(found, real, "tokenizer/tokenizer.pkl", err);
    return COP_OK;
}

static cop_status find_tokenizer(checkpoint_paths *p, const char *directory, const checkpoint_options *o,
                                 note_list *notes, cop_error *err) {
    if (o->tokenizer) {
        if (is_directory(o->tokenizer)) {
            cop_status status = try_tokenizer(&p->tokenizer, o->tokenizer, "tokenizer.pkl", err);
            if (status) return status;
        } else if (exists(o->tokenizer) && !(p->tokenizer = mem_strdup(o->tokenizer)))
            return no_memory(err);
        return p->tokenizer
                   ? COP_OK
                   : cop_fail(err, COP_ENOTFOUND, "could not find a tokenizer at \"%s\"", o->tokenizer);
    }
    cop_status status = try_tokenizer(&p->tokenizer, directory, "tokenizer.pkl", err);
    if (!status && !p->tokenizer)
        status = try_tokenizer(&p->tokenizer, directory, "tokenizer/tokenizer.pkl", err);
    if (!status && !p->tokenizer) status = try_base_tokenizer(&p->tokenizer, directory, err);
    if (!status && !p->tokenizer) note_add(notes, "no tokenizer.pkl found; --tokenizer names one");
    return status;
}

/* ---- All together. */

/* The model and meta files for the model file `name` in `directory`. */
static cop_status set_model(checkpoint_paths *p, const char *directory, const char *name, cop_error *err) {
    char meta[64];
    int n_stem = (int)strlen(name) - (int)strlen("model_") - (int)strlen(".pt");
    snprintf(meta, sizeof meta, "meta_%.*s.json", n_stem, name + strlen("model_"));
    p->step = model_step(name);
    p->model = join(directory, name);
    p->meta = join(directory, meta);
    return p->model && p->meta ? COP_OK : no_memory(err);
}

static cop_status find_in(checkpoint_paths *p, char **directory, const checkpoint_options *o,
                          note_list *notes, cop_error *err) {
    listing l;
    cop_status status = list_directory(&l, *directory, o->step, err);
    if (status) return status;
    if (!l.any_model) {
        if (l.refusal) {
            if (err) *err = l.why;
            return l.refusal;
        }
        status = descend(directory, notes, err);
        if (status == COP_OK) status = list_directory(&l, *directory, o->step, err);
        if (status) return status;
    }
    if (l.step < 0)
        return cop_fail(err, COP_ENOTFOUND, "could not find step %lld in \"%s\": no such model_*.pt",
                        (long long)o->step, *directory);
    status = set_model(p, *directory, l.name, err);
    return status ? status : find_tokenizer(p, *directory, o, notes, err);
}

static cop_status find_file(checkpoint_paths *p, const char *path, const checkpoint_options *o,
                            note_list *notes, cop_error *err) {
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    cop_status status = refuse_format(name, path, err);
    if (status) return status;
    if (model_step(name) < 0)
        return cop_fail(err, COP_EUNSUPPORTED,
                        "cannot open \"%s\": neither a checkpoint directory nor a model_*.pt file", path);
    char *directory = slash ? mem_strdup(path) : mem_strdup(".");
    if (!directory) return no_memory(err);
    if (slash) directory[slash == path ? 1 : slash - path] = 0;
    status = set_model(p, directory, name, err);
    if (status == COP_OK) status = find_tokenizer(p, directory, o, notes, err);
    mem_free(directory);
    return status;
}

cop_status checkpoint_paths_find(checkpoint_paths *p, const char *path, const checkpoint_options *o,
                                 note_list *notes, cop_error *err) {
    assert(p && path && o && notes);
    *p = (checkpoint_paths){.step = -1};
    if (!exists(path))
        return cop_fail(err, COP_ENOTFOUND, "could not open \"%s\": %s", path, strerror(errno));
    if (!is_directory(path)) return find_file(p, path, o, notes, err);
    char *directory = mem_strdup(path);
    if (!directory) return no_memory(err);
    cop_status status = find_in(p, &directory, o, notes, err);
    mem_free(directory);
    return status;
}

cop_status checkpoint_paths_find_weights(checkpoint_paths *p, const char *path, cop_error *err) {
    *p = (checkpoint_paths){.step = -1};
    const char *slash = strrchr(path, '/');
    bool named = model_step(slash ? slash + 1 : path) >= 0;
    if (exists(path) && !is_directory(path) && !named) { /* its first bytes tell another format */
        p->model = mem_strdup(path);
        return p->model ? COP_OK : no_memory(err);
    }
    checkpoint_options options = checkpoint_defaults();
    note_list notes = {0};
    cop_status status = checkpoint_paths_find(p, path, &options, &notes, err);
    if (status != COP_OK || exists(p->meta)) return status;
    mem_free(p->meta);
    p->meta = NULL;
    return COP_OK;
}

/* ---- Where files may lie. */

bool path_lies_in(const char *path, const char *directory) {
    size_t n = strlen(directory);
    if (n == 1) return true; /* the root */
    return !strncmp(path, directory, n) && (path[n] == '/' || path[n] == '\0');
}

static cop_status confine(char **path, const char *within, cop_error *err) {
    char real[PATH_MAX];
    if (!realpath(*path, real))
        return cop_fail(err, errno == ENOENT ? COP_ENOTFOUND : COP_EIO, "could not open \"%s\": %s", *path,
                        strerror(errno));
    if (!path_lies_in(real, within))
        return cop_fail(err, COP_EINVAL, "cannot use \"%s\": a symbolic link leads out of \"%s\"", *path,
                        within);
    char *copy = mem_strdup(real);
    if (!copy) return no_memory(err);
    mem_free(*path);
    *path = copy;
    return COP_OK;
}

cop_status checkpoint_paths_confine(checkpoint_paths *p, const char *within, cop_error *err) {
    cop_status status = confine(&p->model, within, err);
    return status == COP_OK && p->meta ? confine(&p->meta, within, err) : status;
}

void checkpoint_paths_free(checkpoint_paths *p) {
    mem_free(p->model);
    mem_free(p->meta);
    mem_free(p->tokenizer);
    *p = (checkpoint_paths){0};
}
