/* Property: any bytes give a request that keeps every promise of request.h, or one error that can be sent;
 * nothing leaks, nothing asks for a block out of proportion, and decoding twice gives the same. */
#include <stdlib.h>
#include <string.h>

#include "proto/reply.h"
#include "proto/request.h"

#define MAX_MESSAGE ((size_t)1 << 20)

static void require(bool holds) {
    if (!holds) abort();
}

/* Blocks that are alive, and a bound on each. */
static void *bounded_resize(void *context, void *block, size_t n_bytes) {
    require(n_bytes <= (REQUEST_OBJECT_MULTIPLE + 1) * MAX_MESSAGE);
    void *p = realloc(block, n_bytes);
    if (p && !block) ++*(long *)context;
    return p;
}

static void bounded_release(void *context, void *block) {
    if (block) --*(long *)context;
    free(block);
}

/* Touch every id, so that a sanitizer sees whether it is there. */
static void check_ids(wire_ids ids) {
    static volatile uint32_t sink;
    for (size_t i = 0; i < ids.n; i++) sink = ids.ids[i];
    (void)sink;
}

static void check_text(wire_text t) { require(t.bytes && t.bytes[t.n] == 0); }

static void check_input(const request_input *input) {
    if (input->kind == REQUEST_INPUT_TOKENS) require(input->tokens.n > 0), check_ids(input->tokens);
    if (input->kind == REQUEST_INPUT_TEXT) check_text(input->text);
    if (input->kind != REQUEST_INPUT_MESSAGES) return;
    require(input->n_messages > 0 && input->messages[input->n_messages - 1].role == REQUEST_USER);
    for (size_t i = 0; i < input->n_messages; i++) {
        const request_message *m = &input->messages[i];
        require(!m->is_string || (m->n_parts == 1 && m->parts[0].kind == REQUEST_TEXT));
        for (size_t j = 0; j < m->n_parts; j++) check_text(m->parts[j].text);
    }
}

static void check_rollout(const request_rollout *q) {
    require(q->n_prompts >= 1 && q->n_prompts <= REQUEST_MAX_PROMPTS && q->n >= 1);
    require(q->n_prompts * q->n <= REQUEST_MAX_SAMPLES);
    require(q->max_tokens >= 1 && q->min_tokens <= q->max_tokens);
    require(q->temperature == 0 ||
            (q->temperature >= REQUEST_LEAST_TEMPERATURE && q->temperature <= REQUEST_MOST_TEMPERATURE));
    require(q->top_p >= 0 && q->top_p <= 1 && q->min_p >= 0 && q->min_p <= 1);
    require(q->timeout == 0 || (q->timeout >= REQUEST_LEAST_TIMEOUT && q->timeout <= REQUEST_MOST_TIMEOUT));
    require(q->weights_timeout >= REQUEST_LEAST_TIMEOUT && q->weights_timeout <= REQUEST_MOST_TIMEOUT);
    require(!q->kept || (q->top_k >= 1 && q->top_k <= REQUEST_MAX_KEPT));
    check_ids(q->stop_tokens);
    for (size_t i = 0; i < q->n_tools; i++) check_text(q->tools[i]);
    for (size_t i = 0; i < q->n_prompts; i++) {
        const request_prompt *p = &q->prompts[i];
        check_input(&p->input);
        check_ids(p->prefix);
        require(!p->has_sample || q->n == 1);
        require(!p->has_prefix || (p->has_sample && p->prefix.n <= q->max_tokens));
    }
}

static void check_name(wire_text t, size_t most) {
    check_text(t);
    require(t.n >= 1 && t.n <= most);
}

static void check_weights(const request_weights *w) {
    require(w->version >= 1 && w->policy <= REQUEST_ABORT);
    if (!w->path.bytes) {
        require(w->tensors >= 1 && w->bytes >= 1);
        return;
    }
    check_name(w->path, REQUEST_MAX_PATH);
    require(strlen(w->path.bytes) == w->path.n && !w->tensors && !w->bytes);
}

/* The bytes of the tensor are counted anew, in numbers that do not wrap. */
static void check_chunk(const request_chunk *c) {
    static const uint8_t element_bytes[] = {4, 2, 2, 8};
    static volatile uint8_t sink;
    check_name(c->target, WIRE_ID_BYTES);
    check_name(c->name, REQUEST_MAX_TENSOR_NAME);
    require(strlen(c->name.bytes) == c->name.n);
    require(c->dtype <= REQUEST_F64 && c->n_dims <= REQUEST_MAX_DIMS && c->shape && c->data);
    long double n_bytes = element_bytes[c->dtype];
    for (size_t i = 0; i < c->n_dims; i++) n_bytes *= (long double)c->shape[i];
    require(n_bytes >= 1 && n_bytes < 0x1p63L);
    require(c->offset % element_bytes[c->dtype] == 0 && c->n_data % element_bytes[c->dtype] == 0);
    require((long double)c->offset + (long double)c->n_data <= n_bytes);
    for (size_t i = 0; i < c->n_data; i++) sink = c->data[i];
    (void)sink;
}

static void check_commit(const request_commit *c) {
    check_name(c->target, WIRE_ID_BYTES);
    check_text(c->digest);
    require(c->digest.n == REQUEST_DIGEST && strspn(c->digest.bytes, "0123456789abcdef") == REQUEST_DIGEST);
}

static void check_request(const request *q) {
    require(q->id.n >= 1 && q->id.n <= WIRE_ID_BYTES);
    if (q->type == REQUEST_CANCEL) check_name(q->cancel.target, WIRE_ID_BYTES);
    if (q->type == REQUEST_ACK) check_name(q->ack.target, WIRE_ID_BYTES);
    if (q->type == REQUEST_PAUSE) require(q->pause.mode <= REQUEST_PAUSE_ABORT);
    if (q->type == REQUEST_WEIGHTS) check_weights(&q->weights);
    if (q->type == REQUEST_WEIGHTS_CHUNK) check_chunk(&q->chunk);
    if (q->type == REQUEST_WEIGHTS_COMMIT) check_commit(&q->commit);
    if (q->type == REQUEST_TOKENIZE) check_input(&q->tokenize);
    if (q->type == REQUEST_DETOKENIZE) check_ids(q->detokenize.tokens);
    if (q->type == REQUEST_ROLLOUT) check_rollout(&q->rollout);
    if (q->type != REQUEST_SCORE) return;
    require(q->score.n_sequences >= 1 && q->score.top <= REQUEST_MAX_TOP);
    for (size_t i = 0; i < q->score.n_sequences; i++) check_ids(q->score.sequences[i]);
}

/* The error can be sent: the encoder asserts that its text is UTF-8. */
static void check_failure(const request_failure *failure, const wire_allocator *allocator) {
    const reply_head head = {{failure->id, failure->n_id}, failure->compress, allocator};
    wire_buffer out;
    require(failure->error.code && failure->error.message[0]);
    require(strcmp(failure->error.code, WIRE_INTERNAL) != 0);
    require(reply_encode_error(&out, &head, &failure->error));
    wire_buffer_free(&out, allocator);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    long n_live = 0;
    const wire_allocator allocator = {bounded_resize, bounded_release, &n_live};
    request *q, *again;
    request_failure failure;
    if (request_decode(&q, data, size, MAX_MESSAGE, &allocator, &failure)) {
        check_request(q);
        require(request_decode(&again, data, size, MAX_MESSAGE, &allocator, &failure));
        require(q->type == again->type && q->id.n == again->id.n);
        if (q->type == REQUEST_ROLLOUT) require(request_rollout_equal(&q->rollout, &again->rollout));
        request_free(again);
    } else {
        require(q == NULL);
        check_failure(&failure, &allocator);
    }
    request_free(q);
    require(n_live == 0);
    return 0;
}
