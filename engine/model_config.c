/* Reading meta_*.json.  Python writes NaN and Infinity there, which JSON lacks, so they become null first. */
#include "engine/model_config.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_META_BYTES = 1 << 20, MAX_VOCAB = 1 << 24, MAX_DIM = 1 << 16, MAX_HEADS = 4096 };

bool window_pattern_copy(char to[ARCH_MAX_LAYERS + 1], const char *pattern, size_t n) {
    for (size_t i = 0; i < n; i++) {
        char c = pattern[i];
        if (c != 'S' && c != 'L' && c != 's' && c != 'l') return false;
        if (i < ARCH_MAX_LAYERS) to[i] = c == 'S' || c == 's' ? 'S' : 'L';
    }
    to[n < ARCH_MAX_LAYERS ? n : ARCH_MAX_LAYERS] = 0;
    return n > 0;
}

/* ---- The file. */

static cop_status read_all(int fd, const char *path, char **bytes, size_t *n, cop_error *err) {
    struct stat st;
    if (fstat(fd, &st)) return cop_fail(err, COP_EIO, "could not read \"%s\": %s", path, strerror(errno));
    if (!S_ISREG(st.st_mode)) return cop_fail(err, COP_EUNSUPPORTED, "\"%s\" is not a regular file", path);
    if (st.st_size > MAX_META_BYTES)
        return cop_fail(err, COP_EFORMAT, "cannot use \"%s\": a meta file of %lld bytes, more than %d", path,
                        (long long)st.st_size, MAX_META_BYTES);
    *n = (size_t)st.st_size;
    *bytes = mem_alloc(*n, 1);
    if (!*bytes) return cop_fail(err, COP_ENOMEM, "out of memory to read \"%s\"", path);
    for (size_t done = 0; done < *n;) {
        ssize_t got = read(fd, *bytes + done, *n - done);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return cop_fail(err, COP_EIO, "could not read \"%s\": %s", path, strerror(errno));
        if (got == 0) return cop_fail(err, COP_EIO, "could not read \"%s\": it shrank meanwhile", path);
        done += (size_t)got;
    }
    return COP_OK;
}

/* A copy of the text in which NaN, Infinity and -Infinity outside of strings are null. */
static char *without_nan(const char *s, size_t n, size_t *n_out) {
    static const char *const words[] = {"NaN", "Infinity", "-Infinity"};
    char *out = mem_alloc(n + n / 3 + 1, 1); /* NaN grows by a third */
    size_t at = 0;
    bool in_string = false;
    for (size_t i = 0; out && i < n;) {
        size_t skip = 0;
        for (size_t w = 0; !in_string && w < 3; w++) {
            size_t len = strlen(words[w]);
            if (n - i >= len && !memcmp(s + i, words[w], len)) skip = len;
        }
        if (skip) {
            memcpy(out + at, "null", 4);
            at += 4;
            i += skip;
            continue;
        }
        if (in_string && s[i] == '\\' && i + 1 < n)
            out[at++] = s[i++]; /* and what it escapes */
        else if (s[i] == '"')
            in_string = !in_string;
        out[at++] = s[i++];
    }
    *n_out = at;
    return out;
}

static cop_status parse(json_t **root, const char *bytes, size_t n, const char *path, cop_error *err) {
    size_t n_text;
    char *text = without_nan(bytes, n, &n_text);
    if (!text) return cop_fail(err, COP_ENOMEM, "out of memory to read \"%s\"", path);
    json_error_t why;
    *root = json_loadb(text, n_text, JSON_ALLOW_NUL | JSON_REJECT_DUPLICATES, &why);
    mem_free(text);
    if (*root) return COP_OK;
    if (json_error_code(&why) == json_error_out_of_memory)
        return cop_fail(err, COP_ENOMEM, "out of memory to read \"%s\"", path);
    return cop_fail(err, COP_EFORMAT, "\"%s\" is not JSON: line %d: %s", path, why.line, why.text);
}

/* ---- What it says. */

static const struct {
    const char *key;
    size_t offset;
    int max;
} fields[] = {
    {"sequence_len", offsetof(model_config, sequence_len), MODEL_MAX_SEQUENCE},
    {"vocab_size", offsetof(model_config, vocab), MAX_VOCAB},
    {"n_layer", offsetof(model_config, n_layers), ARCH_MAX_LAYERS},
    {"n_head", offsetof(model_config, n_heads), MAX_HEADS},
    {"n_kv_head", offsetof(model_config, n_kv_heads), MAX_HEADS},
    {"n_embd", offsetof(model_config, dim), MAX_DIM},
};
enum { N_FIELDS = sizeof fields / sizeof fields[0] };

static bool is_field(const char *key) {
    for (int i = 0; i < N_FIELDS; i++)
        if (!strcmp(key, fields[i].key)) return true;
    return !strcmp(key, "window_pattern");
}

static cop_status check_keys(json_t *object, cop_error *err) {
    if (json_object_get(object, "num_experts") || json_object_get(object, "top_k"))
        return cop_fail(err, COP_EUNSUPPORTED,
                        "model_config has num_experts or top_k: mixtures of experts are not supported");
    const char *key;
    json_t *value;
    char unknown[160] = "";
    size_t n = 0;
    json_object_foreach(object, key, value) {
        if (is_field(key) || n >= sizeof unknown - 1) continue;
        n += (size_t)snprintf(unknown + n, sizeof unknown - n, "%s\"%.40s\"", n ? ", " : "", key);
    }
    if (!n) return COP_OK;
    return cop_fail(err, COP_EUNSUPPORTED, "model_config has keys that nanochat never wrote: %s", unknown);
}

static cop_status read_fields(model_config *c, json_t *object, cop_error *err) {
    for (int i = 0; i < N_FIELDS; i++) {
        const json_t *value = json_object_get(object, fields[i].key);
        if (!value) return cop_fail(err, COP_EFORMAT, "model_config lacks %s", fields[i].key);
        if (!json_is_integer(value))
            return cop_fail(err, COP_EFORMAT, "model_config: %s is not a whole number", fields[i].key);
        json_int_t x = json_integer_value(value);
        if (x < 1 || x > fields[i].max)
            return cop_fail(err, COP_EFORMAT, "model_config: %s is %lld, not within 1 and %d", fields[i].key,
                            (long long)x, fields[i].max);
        int small = (int)x;
        memcpy((char *)c + fields[i].offset, &small, sizeof small);
    }
    if (c->dim % c->n_heads)
        return cop_fail(err, COP_EFORMAT, "model_config: n_embd %d is not a multiple of n_head %d", c->dim,
                        c->n_heads);
    if (c->n_heads % c->n_kv_heads)
        return cop_fail(err, COP_EFORMAT, "model_config: n_head %d is not a multiple of n_kv_head %d",
                        c->n_heads, c->n_kv_heads);
    if (c->dim / c->n_heads % 2)
        return cop_fail(err, COP_EFORMAT, "model_config: heads have an odd width, %d", c->dim / c->n_heads);
    return COP_OK;
}

static cop_status read_pattern(model_config *c, const json_t *object, cop_error *err) {
    const json_t *value = json_object_get(object, "window_pattern");
    if (!value) return COP_OK;
    c->has_window_pattern = true;
    if (json_is_string(value) &&
        window_pattern_copy(c->window_pattern, json_string_value(value), json_string_length(value)))
        return COP_OK;
    return cop_fail(err, COP_EFORMAT, "model_config: window_pattern is not made of S and L");
}

static cop_status read_root(model_config *c, const json_t *root, cop_error *err) {
    json_t *object = json_object_get(root, "model_config");
    if (!json_is_object(object)) return cop_fail(err, COP_EFORMAT, "it has no model_config");
    cop_status status = check_keys(object, err);
    if (status == COP_OK) status = read_fields(c, object, err);
    if (status == COP_OK) status = read_pattern(c, object, err);
    c->is_base = json_object_get(root, "max_seq_len") != NULL;
    const json_t *user = json_object_get(root, "user_config");
    c->softcap_20 = c->is_base && json_object_get(user, "adam_beta1") &&
                    json_integer_value(json_object_get(user, "eval_tokens")) == 41943040;
    return status;
}

cop_status model_config_read(model_config *c, const char *path, cop_error *err) {
    assert(c && path);
    *c = (model_config){0};
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return cop_fail(err, errno == ENOENT ? COP_ENOTFOUND : COP_EIO, "could not open \"%s\": %s", path,
                        strerror(errno));
    char *bytes = NULL;
    size_t n = 0;
    json_t *root = NULL;
    cop_status status = read_all(fd, path, &bytes, &n, err);
    close(fd);
    if (status == COP_OK) status = parse(&root, bytes, n, path, err);
    mem_free(bytes);
    if (status) return status;
    status = read_root(c, root, err);
    json_decref(root);
    if (status) cop_error_prefix(err, "cannot use \"%s\"", path);
    return status;
}
