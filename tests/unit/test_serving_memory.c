/* A worker in this process, talked to through its socket: every single failure of our own allocator is
 * survived.  Requests come one after the other, so a failure meets one of them: that one ends in its results
 * or in one error that tells of memory, all others in the very results of an undisturbed run, and nothing
 * leaks. */
#include <ctype.h>
#include <jansson.h>
#include <msgpack.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <zmq.h>
#include <zstd.h>
#include <cmocka.h>

#include "engine/engine.h"
#include "worker/service.h"

enum { PATIENCE_MS = 60000, MOST_REPLIES = 8 };

/* ' stands for ", and %d for the number of the round, since an id is used once. */
static const char *const requests[] = {
    "{'type': 'ping', 'id': 'a%d'}",
    "{'type': 'rollout', 'id': 'b%d', 'seed': 7, 'n': 2, 'max_tokens': 24, 'top_k': 5, 'kept': true, 'text': "
    "true,"
    " 'prompts': [{'messages': [{'role': 'user', 'content': 'What is 1,234 * 56?'}], 'id': 'p'},"
    "             {'text': 'Three apples and four plums and ten times as many pears as both of them "
    "together'}],"
    " 'logprobs': ['sampling', 'model'], 'deliver': 'request'}",
    "{'type': 'rollout', 'id': 'c%d', 'seed': 8, 'n': 3, 'max_tokens': 6, 'deliver': 'prompt', 'tools': [],"
    " 'stop_tokens': [3, 4, 5], 'prompts': [{'tokens': [1, 2, 3, 4, 5, 6]}]}",
    "{'type': 'rollout', 'id': 'd%d', 'seed': 9, 'max_tokens': 8, 'compress': false,"
    " 'prompts': [{'tokens': [1, 2, 3], 'sample': 3, 'prefix': [9, 10, 11]}]}",
    "{'type': 'score', 'id': 'e%d', 'top': 3, 'temperature': 0.5,"
    " 'sequences': [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [11, 12], [13]]}",
    "{'type': 'tokenize', 'id': 'f%d', 'text': 'How many r are in strawberry?'}",
    "{'type': 'detokenize', 'id': 'g%d', 'tokens': [300, 301, 302]}",
    "{'type': 'status', 'id': 'h%d'}",
    "{'type': 'cancel', 'id': 'i%d', 'target': 'nobody'}",
    "{'type': 'rollout', 'id': 'j%d', 'prompts': [{'tokens': [5000]}]}",
    "{'type': 'rollout', 'id': 'k%d', 'prompts': [{'tokens': [1]}], 'temprature': 1}"};
enum { N_REQUESTS = sizeof requests / sizeof requests[0] };

/* ---- The worker. */

typedef struct hosted {
    tokenizer *tokenizer;
    engine *engine;
    char endpoint[64];
    pthread_t thread;
} hosted;

static service_options options_of(const hosted *h) {
    return (service_options){.bind = h->endpoint,
                             .model = "calc-d4",
                             .max_message = 1 << 20,
                             .max_backlog = 1 << 20,
                             .keep_bytes = 1 << 20,
                             .max_queue = 16,
                             .step_timeout_sec = 600,
                             .grace_sec = 1};
}

static void *serve(void *arg) {
    hosted *h = arg;
    service_options o = options_of(h);
    cop_error err;
    if (service_run(h->engine, h->tokenizer, &o, &err) != COP_OK) {
        fprintf(stderr, "%s\n", err.message);
        abort();
    }
    return NULL;
}

static void host_engine(hosted *h) {
    const char *path = "tests/models/calc-d4";
    cop_error err;
    checkpoint *c;
    checkpoint_options co = checkpoint_defaults();
    engine_options o = engine_defaults();
    o.n_threads = 1;
    o.kv_memory = 4 << 20;
    if (checkpoint_open(&c, path, &co, &err) != COP_OK) fail_msg("%s", err.message);
    if (tokenizer_open(&h->tokenizer, path, &err) != COP_OK) fail_msg("%s", err.message);
    if (engine_open(&h->engine, c, h->tokenizer, &o, &err) != COP_OK) fail_msg("%s", err.message);
    checkpoint_close(c);
    snprintf(h->endpoint, sizeof h->endpoint, "ipc://@coppice-test-%d", (int)getpid());
}

static void host_close(hosted *h) {
    engine_close(h->engine);
    tokenizer_close(h->tokenizer);
}

/* ---- Requests. */

static void pack_value(msgpack_packer *to, const json_t *value) {
    const char *key;
    json_t *part;
    size_t i;
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        msgpack_pack_map(to, json_object_size(value));
        json_object_foreach((json_t *)value, key, part) {
            msgpack_pack_str(to, strlen(key));
            msgpack_pack_str_body(to, key, strlen(key));
            pack_value(to, part);
        }
        break;
    case JSON_ARRAY:
        msgpack_pack_array(to, json_array_size(value));
        json_array_foreach(value, i, part) pack_value(to, part);
        break;
    case JSON_STRING:
        msgpack_pack_str(to, json_string_length(value));
        msgpack_pack_str_body(to, json_string_value(value), json_string_length(value));
        break;
    case JSON_INTEGER: msgpack_pack_uint64(to, (uint64_t)json_integer_value(value)); break;
    case JSON_REAL: msgpack_pack_double(to, json_real_value(value)); break;
    case JSON_TRUE: msgpack_pack_true(to); break;
    default: msgpack_pack_false(to);
    }
}

static void send_request(void *socket, const char *pattern, int round) {
    char text[1024];
    int n = snprintf(text, sizeof text, pattern, round);
    assert_in_range(n, 1, sizeof text - 1);
    for (char *p = text; *p; p++) {
        if (*p == '\'') *p = '"';
    }
    json_error_t err;
    json_t *value = json_loads(text, 0, &err);
    if (!value) fail_msg("%s: %s", text, err.text);
    msgpack_sbuffer bytes;
    msgpack_sbuffer_init(&bytes);
    msgpack_packer packer;
    msgpack_packer_init(&packer, &bytes, msgpack_sbuffer_write);
    pack_value(&packer, value);
    json_decref(value);
    assert_int_equal(zmq_send(socket, bytes.data, bytes.size, 0), bytes.size);
    msgpack_sbuffer_destroy(&bytes);
}

/* ---- Replies. */

typedef struct answer {
    msgpack_unpacked replies[MOST_REPLIES]; /* they point into bytes[] */
    char *bytes[MOST_REPLIES];
    int n;
} answer;

static const msgpack_object *value_of(const msgpack_object *map, const char *key) {
    assert_int_equal(map->type, MSGPACK_OBJECT_MAP);
    for (uint32_t i = 0; i < map->via.map.size; i++) {
        const msgpack_object_kv *kv = &map->via.map.ptr[i];
        if (kv->key.via.str.size == strlen(key) && !memcmp(kv->key.via.str.ptr, key, strlen(key)))
            return &kv->val;
    }
    return NULL;
}

static bool has_text(const msgpack_object *map, const char *key, const char *text) {
    const msgpack_object *value = value_of(map, key);
    return value && value->type == MSGPACK_OBJECT_STR && value->via.str.size == strlen(text) &&
           !memcmp(value->via.str.ptr, text, strlen(text));
}

/* Returns what *to points into. */
static char *unpack(msgpack_unpacked *to, const char *bytes, size_t n) {
    size_t at = 0, size = n;
    bool compressed = n > 4 && !memcmp(bytes, "\x28\xb5\x2f\xfd", 4);
    if (compressed) size = (size_t)ZSTD_getFrameContentSize(bytes, n);
    char *expanded = malloc(size);
    if (compressed)
        assert_int_equal(ZSTD_decompress(expanded, size, bytes, n), size);
    else
        memcpy(expanded, bytes, size);
    msgpack_unpacked_init(to);
    assert_int_equal(msgpack_unpack_next(to, expanded, size, &at), MSGPACK_UNPACK_SUCCESS);
    assert_int_equal(at, size);
    return expanded;
}

static bool is_last(const msgpack_object *reply) {
    return !has_text(reply, "type", "accepted") && !has_text(reply, "type", "samples");
}

/* All replies to one request. */
static void receive(void *socket, answer *a, const char *what) {
    a->n = 0;
    do {
        zmq_msg_t frame;
        zmq_msg_init(&frame);
        assert_true(a->n < MOST_REPLIES);
        if (zmq_msg_recv(&frame, socket, 0) < 0) fail_msg("%s: no answer after %d ms", what, PATIENCE_MS);
        a->bytes[a->n] = unpack(&a->replies[a->n], zmq_msg_data(&frame), zmq_msg_size(&frame));
        a->n++;
        zmq_msg_close(&frame);
    } while (!is_last(&a->replies[a->n - 1].data));
}

static void answer_free(answer *a) {
    for (int i = 0; i < a->n; i++) {
        msgpack_unpacked_destroy(&a->replies[i]);
        free(a->bytes[i]);
    }
}

/* Equal but for what differs from round to round. */
static bool same_reply(const msgpack_object *a, const msgpack_object *b) {
    static const char *const free_keys[] = {"id", "seconds", "cached_tokens"};
    if (a->via.map.size != b->via.map.size) return false;
    if (has_text(a, "type", "status")) return has_text(b, "type", "status");
    for (uint32_t i = 0; i < a->via.map.size; i++) {
        const msgpack_object_kv *x = &a->via.map.ptr[i], *y = &b->via.map.ptr[i];
        bool skip = false;
        for (size_t k = 0; k < sizeof free_keys / sizeof free_keys[0]; k++)
            skip = skip || (x->key.via.str.size == strlen(free_keys[k]) &&
                            !memcmp(x->key.via.str.ptr, free_keys[k], strlen(free_keys[k])));
        if (!msgpack_object_equal(x->key, y->key)) return false;
        if (!skip && !msgpack_object_equal(x->val, y->val)) return false;
    }
    return true;
}

static bool same_answer(const answer *a, const answer *b) {
    if (a->n != b->n) return false;
    for (int i = 0; i < a->n; i++) {
        if (!same_reply(&a->replies[i].data, &b->replies[i].data)) return false;
    }
    return true;
}

static bool tells_of_memory(const answer *a) {
    const msgpack_object *last = &a->replies[a->n - 1].data;
    return has_text(last, "type", "error") &&
           (has_text(last, "code", "overloaded") || has_text(last, "code", "internal"));
}

/* ---- The tests. */

/* The worker's threads free what they sent a moment after it has arrived. */
static void expect_live(long live, const char *what) {
    for (int i = 0; i < 1000 && mem_live() != live; i++) nanosleep(&(struct timespec){0, 1000000}, NULL);
    if (mem_live() != live) fail_msg("%s: %ld blocks, not %ld", what, mem_live(), live);
}

static void *connect_to(void *context, const hosted *h) {
    void *socket = zmq_socket(context, ZMQ_DEALER);
    int patience = PATIENCE_MS, none = 0;
    zmq_setsockopt(socket, ZMQ_RCVTIMEO, &patience, sizeof patience);
    zmq_setsockopt(socket, ZMQ_LINGER, &none, sizeof none);
    assert_int_equal(zmq_connect(socket, h->endpoint), 0);
    return socket;
}

/* One round; the number of requests that ended in another way than in `want`. */
static int disturbed_round(void *socket, long n, int round, const answer want[N_REQUESTS]) {
    int n_disturbed = 0;
    mem_fail_after(n);
    for (int i = 0; i < N_REQUESTS; i++) {
        char what[64];
        snprintf(what, sizeof what, "allocation %ld fails, request %d", n, i);
        answer got;
        send_request(socket, requests[i], round);
        receive(socket, &got, what);
        if (!same_answer(&got, &want[i])) {
            if (!tells_of_memory(&got)) {
                msgpack_object_print(stderr, got.replies[got.n - 1].data);
                fail_msg("%s: ends in something else", what);
            }
            n_disturbed++;
        }
        answer_free(&got);
    }
    return n_disturbed;
}

static void serving_survives_every_single_allocation_failure(void **state) {
    (void)state;
    hosted h;
    host_engine(&h);
    assert_int_equal(pthread_create(&h.thread, NULL, serve, &h), 0);
    void *context = zmq_ctx_new(), *socket = connect_to(context, &h);
    answer want[N_REQUESTS];
    for (int i = 0; i < N_REQUESTS; i++) {
        send_request(socket, requests[i], 0);
        receive(socket, &want[i], "undisturbed");
    }
    nanosleep(&(struct timespec){0, 50000000}, NULL); /* the last letter is freed */
    long live = mem_live();
    int n_disturbed = 0, round = 1;
    for (bool fired = true; fired; round++) {
        int n = disturbed_round(socket, round - 1, round, want);
        fired = mem_fail_stop();
        char what[64];
        snprintf(what, sizeof what, "allocation %d failed", round - 1);
        assert_in_range(n, 0, fired ? 1 : 0);
        expect_live(live, what);
        n_disturbed += n;
    }
    print_message("%d allocations, %d of them cost a request\n", round - 2, n_disturbed);
    assert_true(n_disturbed > 50);
    for (int i = 0; i < N_REQUESTS; i++) answer_free(&want[i]);
    zmq_close(socket);
    zmq_ctx_term(context);
    kill(getpid(), SIGTERM);
    pthread_join(h.thread, NULL);
    host_close(&h);
}

static void starting_and_ending_survive_every_single_allocation_failure(void **state) {
    (void)state;
    hosted h;
    host_engine(&h);
    long live = mem_live();
    service_options o = options_of(&h);
    sigset_t term;
    sigemptyset(&term);
    sigaddset(&term, SIGTERM);
    bool fired = true;
    for (long n = 0; fired; n++) {
        kill(getpid(), SIGTERM); /* it stops as soon as it runs */
        mem_fail_after(n);
        cop_error err;
        cop_status status = service_run(h.engine, h.tokenizer, &o, &err);
        fired = mem_fail_stop();
        assert_true(status == COP_OK || (fired && status == COP_ENOMEM));
        expect_live(live, "starting");
        sigtimedwait(&term, NULL, &(struct timespec){0, 0}); /* one that never ran left it pending */
    }
    host_close(&h);
}

/* In all threads: the service reads it from a descriptor. */
static int block_signals(void **state) {
    (void)state;
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    return pthread_sigmask(SIG_BLOCK, &set, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(starting_and_ending_survive_every_single_allocation_failure),
        cmocka_unit_test(serving_survives_every_single_allocation_failure),
    };
    return cmocka_run_group_tests(tests, block_signals, NULL);
}
