/* `coppice tokenize` and `coppice detokenize`: text or messages to ids, and back. */
#include <stdio.h>
#include <string.h>

#include "engine/tokenizer.h"
#include "worker/base64.h"
#include "worker/commands.h"
#include "worker/json_ids.h"
#include "worker/jsonl.h"
#include "worker/messages.h"
#include "worker/open_tokenizer.h"

/* ---- The command line. */

/* Parse the command line and open the tokenizer.  -1, or the exit status. */
static int start(const command *c, int argc, char **argv, tokenizer **t) {
    model_options m = model_options_defaults();
    option_spec rows[TOKENIZER_OPTION_ROWS];
    int n_args, n_rows = tokenizer_option_rows(&m, rows);
    int exit_status = options_parse(c, rows, n_rows, argc, argv, 0, &n_args);
    if (exit_status >= 0) return exit_status;
    cop_error err;
    if (!m.model && !m.tokenizer) {
        cop_fail(&err, COP_EINVAL, "%s needs --model PATH or --tokenizer PATH", c->name);
        return tell_error(&err, 2);
    }
    return open_tokenizer(t, &m, &err) == COP_OK ? -1 : tell_error(&err, 1);
}

static int run(const command *c, int argc, char **argv, jsonl_fn fn) {
    tokenizer *t;
    int exit_status = start(c, argc, argv, &t);
    if (exit_status >= 0) return exit_status;
    exit_status = jsonl_run("-", stdout, fn, t);
    tokenizer_close(t);
    return exit_status;
}

/* ---- What lines may hold. */

/* The only value of an object with just one key, which is a or b. */
static cop_status only_value(json_t *line, const char *a, const char *b, json_t **value, bool *is_b,
                             cop_error *err) {
    const char *key;
    json_object_foreach(line, key, *value) {
        if (strcmp(key, a) != 0 && strcmp(key, b) != 0) return jsonl_refuse(err, key, "unknown key");
    }
    json_t *first = json_object_get(line, a), *second = json_object_get(line, b);
    *is_b = !first;
    *value = first ? first : second;
    if (!*value) return jsonl_refuse(err, a, "the key is missing");
    return first && second && strcmp(a, b) != 0 ? jsonl_refuse(err, b, "only one of the two may be given")
                                                : COP_OK;
}

static cop_status no_memory(cop_error *err) {
    return cop_fail(err, COP_ENOMEM, "could not make the answer: out of memory");
}

/* ---- tokenize. */

static cop_status encode_value(const tokenizer *t, const json_t *value, bool is_messages, token_list *ids,
                               cop_error *err) {
    if (!is_messages && !json_is_string(value)) return jsonl_refuse(err, "text", "it is not a string");
    if (!is_messages)
        return tokenizer_encode(t, json_string_value(value), json_string_length(value), ids, err);
    message_list list;
    cop_status status = messages_read(&list, value, err);
    if (status != COP_OK) return status;
    status = chat_prompt(t, list.messages, list.n, CHAT_CUT, ids, err);
    messages_free(&list);
    return status;
}

static cop_status tokenize_line(void *context, json_t *line, uint64_t number, json_t **out, cop_error *err) {
    (void)number;
    *out = NULL;
    json_t *value;
    bool is_messages;
    cop_status status = only_value(line, "text", "messages", &value, &is_messages, err);
    if (status != COP_OK) return status;
    token_list ids = {0};
    status = encode_value(context, value, is_messages, &ids, err);
    if (status == COP_OK) *out = json_pack("{s:o*}", "tokens", json_of_ids(ids.ids, ids.n));
    token_list_free(&ids);
    return status == COP_OK && !*out ? no_memory(err) : status;
}

/* ---- detokenize. */

static cop_status decode_to_json(const tokenizer *t, const token_list *ids, json_t **out, cop_error *err) {
    char *bytes, *text = NULL;
    size_t n_bytes, n_text;
    cop_status status = tokenizer_decode(t, ids->ids, ids->n, &bytes, &n_bytes, err);
    if (status != COP_OK) return status;
    status = utf8_repair(bytes, n_bytes, &text, &n_text, err);
    char *base64 = status == COP_OK ? base64_encode(bytes, n_bytes) : NULL;
    if (base64) *out = json_pack("{s:o*, s:s}", "text", json_stringn(text, n_text), "bytes", base64);
    mem_free(base64);
    mem_free(text);
    mem_free(bytes);
    return status == COP_OK && !*out ? no_memory(err) : status;
}

static cop_status detokenize_line(void *context, json_t *line, uint64_t number, json_t **out,
                                  cop_error *err) {
    (void)number;
    *out = NULL;
    json_t *value;
    bool is_second;
    cop_status status = only_value(line, "tokens", "tokens", &value, &is_second, err);
    if (status != COP_OK) return status;
    token_list ids = {0};
    status = json_read_ids(value, "tokens", tokenizer_vocab(context), &ids, err);
    if (status == COP_OK) status = decode_to_json(context, &ids, out, err);
    token_list_free(&ids);
    return status;
}

/* ---- The commands. */

static int run_tokenize(int argc, char **argv) { return run(&command_tokenize, argc, argv, tokenize_line); }
static int run_detokenize(int argc, char **argv) {
    return run(&command_detokenize, argc, argv, detokenize_line);
}

const command command_tokenize = {
    .name = "tokenize",
    .arguments = "",
    .summary = "text or chat messages to token ids",
    .details = "Reads JSON Lines on stdin, {\"text\": ...} or {\"messages\": [...]}, and writes {\"tokens\": "
               "[...]}. A text gets no BOS, and special tokens in it are ordinary text. Messages become a "
               "prompt primed for the assistant, cut to 2048 tokens as nanochat's render_for_completion "
               "does; the last must be the user's.\n"
               "\n"
               "A bad line gives {\"line\": n, \"error\": ...} and exit status 1 at the end.",
    .example = "echo '{\"text\": \"hello\"}' | coppice tokenize --model tests/models/calc-d4",
    .run = run_tokenize,
};

const command command_detokenize = {
    .name = "detokenize",
    .arguments = "",
    .summary = "token ids to text and bytes",
    .details = "Reads JSON Lines on stdin, {\"tokens\": [...]}, and writes {\"text\": ..., \"bytes\": "
               "base64}. In the text, invalid UTF-8 is replaced by U+FFFD; the bytes are exact.\n"
               "\n"
               "A bad line gives {\"line\": n, \"error\": ...} and exit status 1 at the end.",
    .example = "echo '{\"tokens\": [104, 105]}' | coppice detokenize --model tests/models/calc-d4",
    .run = run_detokenize,
};
