/* tokenizer.pkl: a pickled tiktoken Encoding, checked thoroughly once (NANOCHAT.md 3.4), then a vocabulary.
 *
 *   ids   0 ................. n - 1 | n ......... n + k - 1
 *         mergeable_ranks            special_tokens */
#include "engine/tokenizer.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#define XXH_STATIC_LINKING_ONLY /* for a state on the stack */
#include <xxhash.h>

#include "engine/bpe.h"
#include "engine/pickle.h"
#include "engine/split.h"
#include "engine/utf8.h"
#include "engine/vocab.h"

#define MAX_FILE_BYTES ((size_t)256 << 20) /* a vocabulary of 65536 takes 0.8 MB */
#define MAX_SPECIALS 1024 /* nanochat has 9; the limit keeps the search for equal ones short */

struct tokenizer {
    vocab vocab; /* special tokens included */
    int max_numbers;
    int32_t special[TOKEN_N_SPECIALS]; /* -1: none */
};

static const char *const special_text[TOKEN_N_SPECIALS] = {
    [TOKEN_BOS] = "<|bos|>",
    [TOKEN_USER_START] = "<|user_start|>",
    [TOKEN_USER_END] = "<|user_end|>",
    [TOKEN_ASSISTANT_START] = "<|assistant_start|>",
    [TOKEN_ASSISTANT_END] = "<|assistant_end|>",
    [TOKEN_PYTHON_START] = "<|python_start|>",
    [TOKEN_PYTHON_END] = "<|python_end|>",
    [TOKEN_OUTPUT_START] = "<|output_start|>",
    [TOKEN_OUTPUT_END] = "<|output_end|>",
};

/* ---- Lists of ids. */

void token_list_free(token_list *l) {
    mem_free(l->ids);
    *l = (token_list){0};
}

cop_status token_list_push(token_list *l, int32_t id, cop_error *err) {
    if (!mem_grow((void **)&l->ids, &l->cap, l->n + 1, sizeof *l->ids))
        return cop_fail(err, COP_ENOMEM, "could not hold %zu tokens: out of memory", l->n + 1);
    l->ids[l->n++] = id;
    return COP_OK;
}

/* ---- The file. */

static cop_status read_all(int fd, uint8_t *bytes, size_t n, cop_error *err) {
    for (size_t done = 0; done < n;) {
        ssize_t got = read(fd, bytes + done, n - done);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return cop_fail(err, COP_EIO, "could not read it: %s", strerror(errno));
        if (got == 0)
            return cop_fail(err, COP_EIO, "it shrank from %zu to %zu bytes while it was read", n, done);
        done += (size_t)got;
    }
    return COP_OK;
}

/* The whole of an open file in a new block. */
static cop_status read_open_file(int fd, uint8_t **bytes, size_t *n, cop_error *err) {
    struct stat st;
    if (fstat(fd, &st) != 0) return cop_fail(err, COP_EIO, "could not examine it: %s", strerror(errno));
    if (!S_ISREG(st.st_mode)) return cop_fail(err, COP_EIO, "it is not a regular file");
    if ((uint64_t)st.st_size > MAX_FILE_BYTES)
        return cop_fail(err, COP_EFORMAT, "it has %lld bytes, which no tokenizer has (at most %zu)",
                        (long long)st.st_size, MAX_FILE_BYTES);
    *n = (size_t)st.st_size;
    *bytes = mem_alloc(*n, 1);
    if (!*bytes) return cop_fail(err, COP_ENOMEM, "could not hold its %zu bytes: out of memory", *n);
    cop_status status = read_all(fd, *bytes, *n, err);
    if (status == COP_OK) return COP_OK;
    mem_free(*bytes);
    *bytes = NULL;
    return status;
}

/* Open the file, or the tokenizer.pkl in the directory; -1 with errno set.  O_NONBLOCK: a FIFO must not hang
 * us. */
static int open_file(const char *path) {
    int flags = O_RDONLY | O_NONBLOCK | O_CLOEXEC;
    int fd = open(path, flags);
    struct stat st;
    if (fd < 0 || fstat(fd, &st) != 0 || !S_ISDIR(st.st_mode)) return fd;
    int inner = openat(fd, "tokenizer.pkl", flags);
    int saved = errno;
    close(fd);
    errno = saved;
    return inner;
}

static cop_status read_file(const char *path, uint8_t **bytes, size_t *n, cop_error *err) {
    int fd = open_file(path);
    if (fd < 0) return cop_fail(err, COP_EIO, "%s", strerror(errno));
    cop_status status = read_open_file(fd, bytes, n, err);
    close(fd);
    return status;
}

/* ---- The pickle. */

/* The state of the pickled Encoding, its four values checked for their kinds. */
typedef struct encoding {
    const pickle_value *pattern, *ranks, *specials;
} encoding;

static cop_status check_root(const pickle_value *root, cop_error *err) {
    bool is_object = root->kind == PICKLE_OBJECT && root->callee->kind == PICKLE_GLOBAL;
    if (!is_object || root->args->n_items > 0 || root->n_items > 0 || !root->state)
        return cop_fail(err, COP_EFORMAT, "it does not hold a pickled tiktoken Encoding");
    if (root->state->kind == PICKLE_STR)
        return cop_fail(err, COP_EUNSUPPORTED,
                        "it only names tiktoken's encoding \"%.40s\" and does not hold it",
                        root->state->text);
    if (root->state->kind != PICKLE_DICT)
        return cop_fail(err, COP_EFORMAT, "the state of its Encoding is not a dict");
    return COP_OK;
}

static cop_status read_encoding(const pickle_value *root, encoding *e, cop_error *err) {
    COP_TRY(check_root(root, err), err, "not a tokenizer");
    static const struct {
        const char *key;
        pickle_kind kind;
        const char *kind_name;
    } wanted[] = {
        {"name", PICKLE_STR, "a string"},
        {"pat_str", PICKLE_STR, "a string"},
        {"mergeable_ranks", PICKLE_DICT, "a dict"},
        {"special_tokens", PICKLE_DICT, "a dict"},
    };
    enum { N_WANTED = sizeof wanted / sizeof wanted[0] };
    const pickle_value *values[N_WANTED];
    for (int i = 0; i < N_WANTED; i++) {
        values[i] = pickle_get(root->state, wanted[i].key);
        if (!values[i]) return cop_fail(err, COP_EFORMAT, "its Encoding lacks \"%s\"", wanted[i].key);
        if (values[i]->kind != wanted[i].kind)
            return cop_fail(err, COP_EFORMAT, "\"%s\" of its Encoding is not %s", wanted[i].key,
                            wanted[i].kind_name);
    }
    if (root->state->n_items != 2 * N_WANTED)
        return cop_fail(err, COP_EFORMAT, "its Encoding has %zu values and not the 4 of nanochat's",
                        root->state->n_items / 2);
    *e = (encoding){values[1], values[2], values[3]};
    return COP_OK;
}

/* ---- The vocabulary. */

/* Add the tokens of one dict, whose ids must fill first .. first + n - 1; vocab_set sees to it that no two
 * are equal. */
static cop_status add_tokens(vocab *v, const pickle_value *dict, pickle_kind key_kind, size_t first,
                             cop_error *err) {
    bool ordinary = key_kind == PICKLE_BYTES;
    for (size_t i = 0; i < dict->n_items; i += 2) {
        const pickle_value *key = dict->items[i], *id = dict->items[i + 1];
        if (key->kind != key_kind || id->kind != PICKLE_INT)
            return cop_fail(err, COP_EFORMAT, "entry %zu is not %s", i / 2,
                            ordinary ? "bytes and their id" : "a string and its id");
        if (key->text_len == 0) return cop_fail(err, COP_EFORMAT, "entry %zu is empty", i / 2);
        int64_t low = (int64_t)first, high = low + (int64_t)(dict->n_items / 2) - 1;
        if (id->integer < low || id->integer > high)
            return cop_fail(err, COP_EFORMAT, "entry %zu has the id %lld, outside %lld..%lld", i / 2,
                            (long long)id->integer, (long long)low, (long long)high);
        cop_status status = vocab_set(v, (int32_t)id->integer, key->text, key->text_len, ordinary, err);
        if (status != COP_OK) return status;
    }
    return COP_OK;
}

/* The bytes of a dict's keys.  A pickle may refer to one long key many times, so the sum can pass the file's
 * size; it cannot overflow, for pickle_read limits the nodes and MAX_FILE_BYTES each key. */
static size_t key_bytes(const pickle_value *dict) {
    size_t n = 0;
    for (size_t i = 0; i < dict->n_items; i += 2) n += dict->items[i]->text_len;
    return n;
}

static cop_status check_single_bytes(const vocab *v, cop_error *err) {
    for (int b = 0; b < 256; b++) {
        char byte = (char)b;
        if (vocab_find(v, &byte, 1) < 0)
            return cop_fail(err, COP_EFORMAT, "mergeable_ranks lacks the single byte 0x%02x", (unsigned)b);
    }
    return COP_OK;
}

static void find_specials(tokenizer *t, size_t n_ranks) {
    for (int s = 0; s < TOKEN_N_SPECIALS; s++) {
        t->special[s] = -1;
        for (int32_t id = (int32_t)n_ranks; id < t->vocab.n_tokens; id++) {
            const vocab_token *token = &t->vocab.tokens[id];
            if (token->len == strlen(special_text[s]) && !memcmp(token->bytes, special_text[s], token->len))
                t->special[s] = id;
        }
    }
}

static cop_status check_specials_differ(const pickle_value *dict, cop_error *err) {
    for (size_t i = 0; i < dict->n_items; i += 2) {
        for (size_t j = 0; j < i; j += 2) {
            const pickle_value *a = dict->items[i], *b = dict->items[j];
            if (a->text_len == b->text_len && !memcmp(a->text, b->text, a->text_len))
                return cop_fail(err, COP_EFORMAT, "two entries are \"%.60s\"", a->text);
        }
    }
    return COP_OK;
}

static cop_status fill(tokenizer *t, const pickle_value *root, size_t n_file, cop_error *err) {
    encoding e = {0};
    cop_status status = read_encoding(root, &e, err);
    if (status != COP_OK) return status;
    status = split_pattern(e.pattern->text, e.pattern->text_len, &t->max_numbers, err);
    if (status != COP_OK) return status;
    size_t n_ranks = e.ranks->n_items / 2, n_specials = e.specials->n_items / 2;
    if (n_specials > MAX_SPECIALS)
        return cop_fail(err, COP_EFORMAT, "it has %zu special tokens, at most %d are allowed", n_specials,
                        MAX_SPECIALS);
    size_t n_bytes = key_bytes(e.ranks) + key_bytes(e.specials);
    if (n_bytes > n_file) return cop_fail(err, COP_EFORMAT, "many of its tokens have the same bytes");
    status = vocab_init(&t->vocab, (int32_t)(n_ranks + n_specials), n_bytes, err);
    if (status != COP_OK) return status;
    COP_TRY(add_tokens(&t->vocab, e.ranks, PICKLE_BYTES, 0, err), err, "mergeable_ranks");
    COP_TRY(add_tokens(&t->vocab, e.specials, PICKLE_STR, n_ranks, err), err, "special_tokens");
    COP_TRY(check_specials_differ(e.specials, err), err, "special_tokens");
    find_specials(t, n_ranks);
    return check_single_bytes(&t->vocab, err);
}

static cop_status parse(tokenizer *t, const uint8_t *bytes, size_t n, cop_error *err) {
    static const char *const globals[] = {"tiktoken.core Encoding", NULL};
    pickle *p;
    cop_status status = pickle_read(&p, bytes, n, globals, err);
    if (status != COP_OK) return status;
    status = fill(t, pickle_root(p), n, err);
    pickle_close(p);
    return status;
}

cop_status tokenizer_open(tokenizer **out, const char *path, cop_error *err) {
    *out = NULL;
    uint8_t *bytes = NULL;
    size_t n = 0;
    COP_TRY(read_file(path, &bytes, &n, err), err, "could not open the tokenizer \"%s\"", path);
    tokenizer *t = mem_zalloc(1, sizeof *t);
    cop_status status = t ? parse(t, bytes, n, err) : cop_fail(err, COP_ENOMEM, "out of memory");
    mem_free(bytes);
    if (status != COP_OK) {
        cop_error_prefix(err, "could not open the tokenizer \"%s\"", path);
        tokenizer_close(t);
        return status;
    }
    *out = t;
    return COP_OK;
}

void tokenizer_close(tokenizer *t) {
    if (!t) return;
    vocab_free(&t->vocab);
    mem_free(t);
}

int tokenizer_vocab(const tokenizer *t) { return t->vocab.n_tokens; }

int32_t tokenizer_special(const tokenizer *t, token_special which) {
    assert(which >= 0 && which < TOKEN_N_SPECIALS);
    return t->special[which];
}

void tokenizer_digest(const tokenizer *t, char hex[33]) {
    XXH3_state_t h;
    XXH3_128bits_reset(&h);
    XXH3_128bits_update(&h, &t->max_numbers, sizeof t->max_numbers);
    XXH3_128bits_update(&h, t->special, sizeof t->special);
    for (int32_t id = 0; id < t->vocab.n_tokens; id++) {
        const vocab_token *token = &t->vocab.tokens[id];
        XXH3_128bits_update(&h, &token->len, sizeof token->len);
        XXH3_128bits_update(&h, token->bytes, token->len);
    }
    XXH128_hash_t d = XXH3_128bits_digest(&h);
    snprintf(hex, 33, "%016llx%016llx", (unsigned long long)d.high64, (unsigned long long)d.low64);
}

/* ---- Text to ids. */

static cop_status encode_valid(const tokenizer *t, const char *text, size_t n, token_list *out,
                               cop_error *err) {
    bpe_scratch scratch = {0};
    cop_status status = COP_OK;
    for (size_t pos = 0; pos < n && status == COP_OK;) {
        size_t len = split_piece(text + pos, n - pos, t->max_numbers);
        status = bpe_encode(&t->vocab, &scratch, text + pos, len, out, err);
        pos += len;
    }
    bpe_scratch_free(&scratch);
    return status;
}

cop_status tokenizer_encode(const tokenizer *t, const char *text, size_t n, token_list *out, cop_error *err) {
    size_t n_before = out->n;
    char *repaired = NULL;
    cop_status status = COP_OK;
    if (utf8_valid_prefix(text, n) < n) {
        status = utf8_repair(text, n, &repaired, &n, err);
        text = repaired;
    }
    if (status == COP_OK) status = encode_valid(t, text, n, out, err);
    if (status != COP_OK) out->n = n_before;
    mem_free(repaired);
    return status;
}

/* ---- Ids to bytes. */

cop_status tokenizer_encode_prompt(const tokenizer *t, const char *text, size_t n, token_list *out,
                                   cop_error *err) {
    int32_t bos = tokenizer_special(t, TOKEN_BOS);
    size_t n_before = out->n;
    if (bos < 0) return cop_fail(err, COP_EUNSUPPORTED, "the tokenizer has no <|bos|>: give token ids");
    cop_status status = token_list_push(out, bos, err);
    if (status == COP_OK) status = tokenizer_encode(t, text, n, out, err);
    if (status != COP_OK) out->n = n_before;
    return status;
}

const char *tokenizer_bytes(const tokenizer *t, int32_t id, size_t *n) {
    assert(id >= 0 && id < t->vocab.n_tokens);
    *n = t->vocab.tokens[id].len;
    return t->vocab.tokens[id].bytes;
}

static cop_status decoded_size(const tokenizer *t, const int32_t *ids, size_t n, size_t *size,
                               cop_error *err) {
    *size = 0;
    for (size_t i = 0; i < n; i++) {
        if (ids[i] < 0 || ids[i] >= t->vocab.n_tokens)
            return cop_fail(err, COP_EINVAL, "cannot decode token %d at index %zu: the vocabulary is 0..%d",
                            (int)ids[i], i, (int)t->vocab.n_tokens - 1);
        if (__builtin_add_overflow(*size, t->vocab.tokens[ids[i]].len, size))
            return cop_fail(err, COP_ENOMEM, "could not decode %zu tokens: out of memory", n);
    }
    return COP_OK;
}

cop_status tokenizer_decode(const tokenizer *t, const int32_t *ids, size_t n, char **bytes, size_t *n_bytes,
                            cop_error *err) {
    *bytes = NULL;
    *n_bytes = 0;
    size_t size;
    cop_status status = decoded_size(t, ids, n, &size, err);
    if (status != COP_OK) return status;
    char *all = size < SIZE_MAX ? mem_alloc(size + 1, 1) : NULL;
    if (!all) return cop_fail(err, COP_ENOMEM, "could not decode %zu tokens: out of memory", n);
    size_t pos = 0;
    for (size_t i = 0; i < n; i++) {
        const vocab_token *token = &t->vocab.tokens[ids[i]];
        memcpy(all + pos, token->bytes, token->len);
        pos += token->len;
    }
    all[size] = '\0';
    *bytes = all;
    *n_bytes = size;
    return COP_OK;
}
