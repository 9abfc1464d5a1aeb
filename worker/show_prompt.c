/* A prompt and its samples on a page. */
#include "worker/show_prompt.h"

#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <string.h>

#include "worker/json_ids.h"
#include "worker/jsonl.h"

enum { PROMPT_INDENT = 2, SAMPLE_INDENT = 4 };

static int vocab_of(const show_view *v) { return v->t ? tokenizer_vocab(v->t) : INT_MAX; }
static const char *plural(size_t n) { return n == 1 ? "" : "s"; }

/* A string within a line, in the ink that is at work there. */
static void put_word(const show_view *v, const json_t *string) {
    show_quoted(&v->page, SHOW_PLAIN, json_string_value(string), json_string_length(string));
}

/* ---- Tokens as text. */

/* Tokens of one ink: decoded together, so that a character may lie across several. */
static cop_status put_span(show_view *v, show_ink ink, const int32_t *ids, size_t n, int indent,
                           cop_error *err) {
    if (!v->t) {
        v->lacks_text = true;
        show_begin(&v->page, ink);
        for (size_t i = 0; i < n; i++) fprintf(v->page.out, "%s%" PRId32, i ? " " : "", ids[i]);
        show_end(&v->page, ink);
        return COP_OK;
    }
    char *bytes;
    size_t n_bytes;
    cop_status status = tokenizer_decode(v->t, ids, n, &bytes, &n_bytes, err);
    if (status != COP_OK) return status;
    show_text(&v->page, ink, bytes, n_bytes, indent);
    mem_free(bytes);
    return COP_OK;
}

static show_ink ink_of(const show_sample *s, size_t i) { return s->mask[i] ? SHOW_SAMPLED : SHOW_FORCED; }

static cop_status put_completion(show_view *v, const show_sample *s, cop_error *err) {
    cop_status status = COP_OK;
    fprintf(v->page.out, "%*s", SAMPLE_INDENT, "");
    if (!v->t && s->text) {
        show_text(&v->page, SHOW_PLAIN, json_string_value(s->text), json_string_length(s->text),
                  SAMPLE_INDENT);
    } else {
        for (size_t from = 0, to; from < s->tokens.n && status == COP_OK; from = to) {
            for (to = from + 1; to < s->tokens.n && s->mask[to] == s->mask[from];) to++;
            if (!v->t && from) putc(' ', v->page.out);
            status = put_span(v, ink_of(s, from), s->tokens.ids + from, to - from, SAMPLE_INDENT, err);
        }
    }
    putc('\n', v->page.out);
    return status;
}

/* ---- Token by token. */

static void put_table_head(const show_view *v, const show_sample *s) {
    static const char *const names[SHOW_N_REALS] = {"log-prob", "model", "entropy"};
    fprintf(v->page.out, "%*s%6s %7s", SAMPLE_INDENT, "", "at", "id");
    for (int k = 0; k < SHOW_N_REALS; k++)
        if (s->reals[k]) fprintf(v->page.out, " %9s", names[k]);
    fprintf(v->page.out, "%s\n", v->t ? "  text" : "");
}

/* The numbers of forced tokens say nothing: nothing was drawn there. */
static void put_row(const show_view *v, const show_sample *s, size_t i) {
    fprintf(v->page.out, "%*s%6zu %7" PRId32, SAMPLE_INDENT, "", i, s->tokens.ids[i]);
    for (int k = 0; k < SHOW_N_REALS; k++) {
        if (!s->reals[k]) continue;
        if (s->mask[i])
            fprintf(v->page.out, " %9.4f", s->reals[k][i]);
        else
            fprintf(v->page.out, " %9s", "forced");
    }
    if (v->t) {
        size_t n;
        const char *bytes = tokenizer_bytes(v->t, s->tokens.ids[i], &n);
        fputs("  ", v->page.out);
        show_quoted(&v->page, ink_of(s, i), bytes, n);
    }
    putc('\n', v->page.out);
}

static void put_table(const show_view *v, const show_sample *s) {
    put_table_head(v, s);
    for (size_t i = 0; i < s->tokens.n; i++) put_row(v, s, i);
}

/* ---- The line above a sample, all of it in one ink. */

static void put_logprob(const show_view *v, const show_sample *s, size_t n_drawn) {
    const double *p = s->reals[SHOW_LOGPROBS] ? s->reals[SHOW_LOGPROBS] : s->reals[SHOW_MODEL_LOGPROBS];
    if (!p || n_drawn == 0) return;
    double sum = 0;
    for (size_t i = 0; i < s->tokens.n; i++)
        if (s->mask[i]) sum += p[i];
    fprintf(v->page.out, "  log-prob %9.3f (mean %7.4f)", sum, sum / (double)n_drawn);
}

static void put_calls(const show_view *v, const show_sample *s) {
    if (s->n_calls) fprintf(v->page.out, "  %zu tool call%s", s->n_calls, plural(s->n_calls));
    if (s->n_failed_calls) fprintf(v->page.out, ", %zu without an answer", s->n_failed_calls);
}

static void put_stop(const show_view *v, const json_t *stop) {
    json_int_t id = json_integer_value(stop); /* 0 for a string */
    fputs("  at ", v->page.out);
    if (json_is_string(stop)) {
        put_word(v, stop);
    } else if (v->t && id >= 0 && id < vocab_of(v)) {
        size_t n;
        const char *bytes = tokenizer_bytes(v->t, (int32_t)id, &n);
        show_quoted(&v->page, SHOW_PLAIN, bytes, n);
    } else {
        fprintf(v->page.out, "token %lld", (long long)id);
    }
}

static void put_sample_head(const show_view *v, const show_sample *s, int width) {
    size_t n_drawn = show_sample_drawn(s);
    fprintf(v->page.out, "%*s", PROMPT_INDENT, "");
    show_begin(&v->page, SHOW_HEAD);
    fprintf(v->page.out, "sample %*" PRIu64 "  ", width, s->index);
    if (!strcmp(s->finish, "stop") || !strcmp(s->finish, "length"))
        fprintf(v->page.out, "%-6s", s->finish);
    else
        show_quoted(&v->page, SHOW_PLAIN, s->finish, strlen(s->finish));
    fprintf(v->page.out, " %5zu tokens (%zu sampled, %zu forced)", s->tokens.n, n_drawn,
            s->tokens.n - n_drawn);
    if (!isnan(s->reward)) fprintf(v->page.out, "  reward %g", s->reward);
    put_logprob(v, s, n_drawn);
    put_calls(v, s);
    if (s->stop) put_stop(v, s->stop);
    show_end(&v->page, SHOW_HEAD);
    putc('\n', v->page.out);
}

/* ---- The prompt. */

static void put_plain(const show_view *v, const json_t *string) {
    fprintf(v->page.out, "%*s", PROMPT_INDENT, "");
    show_text(&v->page, SHOW_PLAIN, json_string_value(string), json_string_length(string), PROMPT_INDENT);
    putc('\n', v->page.out);
}

/* What the input line says, where there is no tokenizer.  False if it does not say it in words. */
static bool put_input(const show_view *v, const json_t *input) {
    const json_t *text = json_object_get(input, "text"), *messages = json_object_get(input, "messages");
    if (json_is_string(text)) {
        put_plain(v, text);
        return true;
    }
    size_t i;
    json_t *message;
    json_array_foreach(messages, i, message) {
        const json_t *role = json_object_get(message, "role"), *content = json_object_get(message, "content");
        if (!json_is_string(role) || !json_is_string(content)) return i > 0;
        fprintf(v->page.out, "%*s", PROMPT_INDENT, "");
        show_begin(&v->page, SHOW_HEAD);
        put_word(v, role);
        show_end(&v->page, SHOW_HEAD);
        putc('\n', v->page.out);
        put_plain(v, content);
    }
    return i > 0;
}

static cop_status put_prompt_text(show_view *v, const json_t *object, const token_list *ids, cop_error *err) {
    if (!v->t && put_input(v, json_object_get(object, "input"))) return COP_OK;
    fprintf(v->page.out, "%*s", PROMPT_INDENT, "");
    cop_status status = put_span(v, SHOW_PLAIN, ids->ids, ids->n, PROMPT_INDENT, err);
    putc('\n', v->page.out);
    return status;
}

/* "line 3", and the id where that says more. */
static void put_name(const show_view *v, uint64_t line, const json_t *id) {
    char decimal[24];
    snprintf(decimal, sizeof decimal, "%" PRIu64, line);
    fprintf(v->page.out, "line %s", decimal);
    if (!json_is_string(id) || !strcmp(json_string_value(id), decimal)) return;
    putc(' ', v->page.out);
    put_word(v, id);
}

static cop_status put_prompt_head(show_view *v, const json_t *object, size_t n_samples, cop_error *err) {
    token_list ids = {0};
    uint64_t line;
    if (!json_u64_get(json_object_get(object, "prompt"), &line))
        return jsonl_refuse(err, "prompt", "it is missing, or no whole number");
    cop_status status =
        json_read_ids(json_object_get(object, "prompt_tokens"), "prompt_tokens", vocab_of(v), &ids, err);
    if (status == COP_OK) {
        show_begin(&v->page, SHOW_HEAD);
        put_name(v, line, json_object_get(object, "prompt_id"));
        fprintf(v->page.out, ": %zu token%s, %zu sample%s", ids.n, plural(ids.n), n_samples,
                plural(n_samples));
        show_end(&v->page, SHOW_HEAD);
        putc('\n', v->page.out);
        status = put_prompt_text(v, object, &ids, err);
    }
    token_list_free(&ids);
    return status;
}

/* ---- Choosing. */

static bool wants_prompt(const show_filter *f, const json_t *object, const char *line_key) {
    if (!f->prompt) return true;
    const char *id = json_string_value(json_object_get(object, "prompt_id"));
    char decimal[24];
    uint64_t line;
    bool has_line = json_u64_get(json_object_get(object, line_key), &line);
    if (has_line) snprintf(decimal, sizeof decimal, "%" PRIu64, line);
    return (id && !strcmp(id, f->prompt)) || (has_line && !strcmp(decimal, f->prompt));
}

static bool wants_sample(const show_filter *f, const show_sample *s) {
    if (f->finish && strcmp(f->finish, s->finish) != 0) return false;
    if (f->tool_calls && s->n_calls == 0) return false;
    if (f->failed_tools && s->n_failed_calls == 0) return false;
    if (f->best && isnan(s->reward)) return false;
    return f->sample < 0 || s->index == (uint64_t)f->sample;
}

/* Whether the filter is about samples, so that lines that have none are left out. */
static bool chooses_samples(const show_filter *f) {
    return f->finish || f->tool_calls || f->failed_tools || f->best || f->sample >= 0;
}

/* The samples of a prompt that are shown. */
typedef struct choice {
    show_sample *samples;
    size_t n;
} choice;

static void choice_free(choice *c) {
    for (size_t i = 0; i < c->n; i++) show_sample_free(&c->samples[i]);
    mem_free(c->samples);
}

static void keep_best(choice *c) {
    size_t best = 0;
    for (size_t i = 1; i < c->n; i++)
        if (c->samples[i].reward > c->samples[best].reward) best = i;
    for (size_t i = 0; i < c->n; i++)
        if (i != best) show_sample_free(&c->samples[i]);
    c->samples[0] = c->samples[best];
    c->n = 1;
}

static cop_status choose(choice *c, const show_view *v, const json_t *objects, cop_error *err) {
    *c = (choice){.samples = mem_alloc(json_array_size(objects), sizeof *c->samples)};
    if (!c->samples) return cop_fail(err, COP_ENOMEM, "could not keep the samples of a prompt");
    for (size_t i = 0; i < json_array_size(objects); i++) {
        show_sample *s = &c->samples[c->n];
        cop_status status = show_sample_init(s, json_array_get(objects, i), vocab_of(v), err);
        if (status != COP_OK) return status;
        if (wants_sample(&v->filter, s))
            c->n++;
        else
            show_sample_free(s);
    }
    if (v->filter.best && c->n > 0) keep_best(c);
    return COP_OK;
}

/* ---- The whole. */

static int index_width(const choice *c) {
    int width = 1;
    for (size_t i = 0; i < c->n; i++) {
        int digits = 1;
        for (uint64_t x = c->samples[i].index; x >= 10; x /= 10) digits++;
        if (digits > width) width = digits;
    }
    return width;
}

static cop_status put_samples(show_view *v, const choice *c, cop_error *err) {
    int width = index_width(c);
    cop_status status = COP_OK;
    for (size_t i = 0; i < c->n && status == COP_OK; i++) {
        put_sample_head(v, &c->samples[i], width);
        if (v->logprobs)
            put_table(v, &c->samples[i]);
        else
            status = put_completion(v, &c->samples[i], err);
    }
    putc('\n', v->page.out);
    return status;
}

static void put_failure(const show_view *v, const json_t *object) {
    uint64_t line;
    if (json_u64_get(json_object_get(object, "line"), &line)) {
        show_begin(&v->page, SHOW_HEAD);
        put_name(v, line, json_object_get(object, "prompt_id"));
        show_end(&v->page, SHOW_HEAD);
        fputs(": ", v->page.out);
    }
    const json_t *error = json_object_get(object, "error");
    const char *why = json_is_string(error) ? json_string_value(error) : "?";
    show_text(&v->page, SHOW_ERROR, why, strlen(why), PROMPT_INDENT);
    fputs("\n\n", v->page.out);
}

cop_status show_prompt(show_view *v, const json_t *objects, bool *shown, cop_error *err) {
    const json_t *first = json_array_get(objects, 0);
    const show_filter *f = &v->filter;
    *shown = false;
    if (json_object_get(first, "error")) {
        *shown = !chooses_samples(f) && wants_prompt(f, first, "line");
        if (*shown) put_failure(v, first);
        return COP_OK;
    }
    if (f->errors || !wants_prompt(f, first, "prompt")) return COP_OK;
    choice c;
    cop_status status = choose(&c, v, objects, err);
    *shown = status == COP_OK && c.n > 0;
    if (*shown) status = put_prompt_head(v, first, c.n, err);
    if (*shown && status == COP_OK) status = put_samples(v, &c, err);
    choice_free(&c);
    return status;
}
