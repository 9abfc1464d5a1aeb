/* From a frame to a request: unwrap, check, unpack, read.
 *
 *   frame --wire_unwrap--> message --request_check--> --msgpack-c--> objects --tables of fields--> request
 *
 * The objects borrow the message and live in one zone, sized by the check; both are gone when
 * request_decode() returns. */
#include "proto/request.h"

#include <string.h>

#include "proto/request_check.h"
#include "proto/request_read.h"
#include "proto/wire_utf8.h"

/* ---- The small types. */

static const request_field plain_fields[] = {REQUEST_COMMON_FIELDS};

static bool read_plain(request_reader *r, const msgpack_object *map, request *q) {
    return request_read_map(r, NULL, map, plain_fields, sizeof plain_fields / sizeof *plain_fields, q);
}

static const request_field cancel_fields[] = {
    REQUEST_COMMON_FIELDS,
    {"target", request_read_text, offsetof(request, cancel.target), REQUEST_NO_FLAG, 1, WIRE_ID_BYTES},
};

static bool read_cancel(request_reader *r, const msgpack_object *map, request *q) {
    if (!request_read_map(r, NULL, map, cancel_fields, sizeof cancel_fields / sizeof *cancel_fields, q))
        return false;
    return q->cancel.target.bytes || request_read_missing(r, NULL, "target", "the id of a rollout");
}

static const request_field ack_fields[] = {
    REQUEST_COMMON_FIELDS,
    {"target", request_read_text, offsetof(request, ack.target), REQUEST_NO_FLAG, 1, WIRE_ID_BYTES},
};

static bool read_ack(request_reader *r, const msgpack_object *map, request *q) {
    if (!request_read_map(r, NULL, map, ack_fields, sizeof ack_fields / sizeof *ack_fields, q)) return false;
    return q->ack.target.bytes || request_read_missing(r, NULL, "target", "the id of a rollout");
}

static bool read_mode(request_reader *r, const request_place *place, const msgpack_object *value,
                      const request_field *field, void *out) {
    (void)field;
    static const char *const modes[] = {"finish", "keep", "abort"};
    int mode = request_read_name(r, place, value, modes, 3);
    if (mode >= 0) *(request_pause_mode *)out = (request_pause_mode)mode;
    return mode >= 0;
}

static const request_field pause_fields[] = {
    REQUEST_COMMON_FIELDS,
    {"mode", read_mode, offsetof(request, pause.mode), REQUEST_NO_FLAG, 0, 0},
};

static bool read_pause(request_reader *r, const msgpack_object *map, request *q) {
    return request_read_map(r, NULL, map, pause_fields, sizeof pause_fields / sizeof *pause_fields, q);
}

static bool read_sequences(request_reader *r, const request_place *place, const msgpack_object *value,
                           const request_field *field, void *out) {
    request_score *score = out;
    if (!request_read_array(r, place, value, 1, REQUEST_MAX_PROMPTS)) return false;
    score->n_sequences = value->via.array.size;
    wire_ids *sequences = request_read_take(r, score->n_sequences, sizeof *sequences);
    if (!sequences) return false;
    score->sequences = sequences;
    for (size_t i = 0; i < score->n_sequences; i++) {
        request_place here = request_place_index(place, i);
        if (!request_read_ids(r, &here, &value->via.array.ptr[i], field, &sequences[i])) return false;
        if (!sequences[i].n)
            return request_read_fail(r, &here, WIRE_BAD_REQUEST,
                                     "cannot score an empty sequence: expected at least one token");
    }
    return true;
}

static const request_field score_fields[] = {
    REQUEST_COMMON_FIELDS,
    {"sequences", read_sequences, offsetof(request, score), REQUEST_NO_FLAG, 0, 0},
    {"top", request_read_u32, offsetof(request, score.top), REQUEST_NO_FLAG, 0, REQUEST_MAX_TOP},
    {"temperature", request_read_real, offsetof(request, score.temperature), REQUEST_NO_FLAG,
     REQUEST_LEAST_TEMPERATURE, REQUEST_MOST_TEMPERATURE},
    {"model", request_read_unbuilt, 0, REQUEST_NO_FLAG, 0, 0},
};

static bool read_score(request_reader *r, const msgpack_object *map, request *q) {
    q->score.temperature = 1.0;
    if (!request_read_map(r, NULL, map, score_fields, sizeof score_fields / sizeof *score_fields, q))
        return false;
    return q->score.sequences ||
           request_read_missing(r, NULL, "sequences", "an array of sequences of token ids");
}

typedef struct tokenize_draft {
    request_draft draft;
} tokenize_draft;

static const request_field tokenize_fields[] = {
    REQUEST_COMMON_FIELDS,
    REQUEST_DRAFT_FIELDS(tokenize_draft, draft),
};

static bool read_tokenize(request_reader *r, const msgpack_object *map, request *q) {
    tokenize_draft d = {0};
    if (!request_read_map(r, NULL, map, tokenize_fields, sizeof tokenize_fields / sizeof *tokenize_fields,
                          &d) ||
        !request_draft_finish(r, NULL, &d.draft, "\"text\", \"messages\""))
        return false;
    q->tokenize = d.draft.input;
    return true;
}

static const request_field detokenize_fields[] = {
    REQUEST_COMMON_FIELDS,
    {"tokens", request_read_ids, offsetof(request, detokenize.tokens), REQUEST_NO_FLAG, 0, 0},
};

static bool read_detokenize(request_reader *r, const msgpack_object *map, request *q) {
    if (!request_read_map(r, NULL, map, detokenize_fields,
                          sizeof detokenize_fields / sizeof *detokenize_fields, q))
        return false;
    return q->detokenize.tokens.ids || request_read_missing(r, NULL, "tokens", "token ids");
}

static bool read_rollout(request_reader *r, const msgpack_object *map, request *q) {
    return request_read_rollout(r, map, &q->rollout);
}

static bool read_weights(request_reader *r, const msgpack_object *map, request *q) {
    return request_read_weights(r, map, &q->weights);
}

static bool read_chunk(request_reader *r, const msgpack_object *map, request *q) {
    return request_read_chunk(r, map, &q->chunk);
}

static bool read_commit(request_reader *r, const msgpack_object *map, request *q) {
    return request_read_commit(r, map, &q->commit);
}

/* ---- Types. */

typedef struct type_entry {
    const char *name;
    request_type type;
    bool (*read)(request_reader *r, const msgpack_object *map, request *q); /* NULL: not built yet */
} type_entry;

static const type_entry types[] = {
    {"ping", REQUEST_PING, read_plain},
    {"status", REQUEST_STATUS, read_plain},
    {"cancel", REQUEST_CANCEL, read_cancel},
    {"score", REQUEST_SCORE, read_score},
    {"tokenize", REQUEST_TOKENIZE, read_tokenize},
    {"detokenize", REQUEST_DETOKENIZE, read_detokenize},
    {"rollout", REQUEST_ROLLOUT, read_rollout},
    {"ack", REQUEST_ACK, read_ack},
    {"pause", REQUEST_PAUSE, read_pause},
    {"resume", REQUEST_RESUME, read_plain},
    {"weights", REQUEST_WEIGHTS, read_weights},
    {"weights_chunk", REQUEST_WEIGHTS_CHUNK, read_chunk},
    {"weights_commit", REQUEST_WEIGHTS_COMMIT, read_commit},
    {"sleep", 0, NULL},
    {"wake", 0, NULL},
};

static const type_entry *find_type(request_reader *r, const msgpack_object *map) {
    request_place place = request_place_key(NULL, "type");
    const msgpack_object *type = request_read_find(map, "type");
    if (!type) {
        request_read_missing(r, NULL, "type", "a str such as \"rollout\"");
        return NULL;
    }
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (!request_read_is(type, types[i].name)) continue;
        if (types[i].read) return &types[i];
        request_read_fail(r, &place, WIRE_UNSUPPORTED,
                          "cannot serve \"%s\": this version does not have it yet", types[i].name);
        return NULL;
    }
    if (type->type != MSGPACK_OBJECT_STR)
        request_read_fail(r, &place, WIRE_BAD_REQUEST, "cannot accept a value of type %s: expected a str",
                          request_read_kind(type));
    else
        request_read_fail(r, &place, WIRE_UNKNOWN_TYPE,
                          "unknown type \"%s\": expected one such as \"rollout\", \"ping\"",
                          wire_quote((wire_text){type->via.str.ptr, type->via.str.size}).text);
    return NULL;
}

/* ---- Decoding. */

static bool read_request(request_reader *r, const msgpack_object *map, request *q) {
    const request_field id_field = {.min = 1, .max = WIRE_ID_BYTES};
    request_place place = request_place_key(NULL, "id");
    const msgpack_object *id = request_read_find(map, "id");
    if (!id) return request_read_missing(r, NULL, "id", "a str of 1 to 128 bytes");
    if (!request_read_text(r, &place, id, &id_field, &q->id)) return false;
    const type_entry *type = find_type(r, map);
    if (!type) return false;
    q->type = type->type;
    return type->read(r, map, q);
}

/* Build the request in an arena of its own. */
static request *build(const msgpack_object *map, bool compress, const wire_allocator *allocator,
                      wire_error *err) {
    request_reader r = {request_arena_open(allocator), err};
    request *q = r.arena ? request_arena_take(r.arena, 1, sizeof *q) : NULL;
    if (!q)
        request_read_fail(&r, NULL, WIRE_INTERNAL, "could not allocate %zu bytes for a request", sizeof *q);
    else {
        *q = (request){.compress = compress, .arena = r.arena};
        if (read_request(&r, map, q)) return q;
    }
    request_arena_close(r.arena);
    return NULL;
}

/* Unpack a message that has been checked, and build. */
static request *unpack(const wire_frame *frame, const request_checked *checked,
                       const wire_allocator *allocator, wire_error *err) {
    msgpack_zone zone;
    msgpack_object map;
    size_t offset = 0;
    request *q = NULL;
    if (!msgpack_zone_init(&zone, checked->object_bytes + 64)) {
        wire_fail(err, WIRE_INTERNAL, NULL, "could not allocate %zu bytes to unpack a message",
                  checked->object_bytes);
        return NULL;
    }
    int status = msgpack_unpack((const char *)frame->message, frame->n, &offset, &zone, &map);
    if (status == MSGPACK_UNPACK_SUCCESS)
        q = build(&map, checked->compress, allocator, err);
    else
        wire_fail(err, WIRE_INTERNAL, NULL, "could not unpack a message of %zu bytes (status %d)", frame->n,
                  status);
    msgpack_zone_destroy(&zone);
    return q;
}

bool request_decode(request **out, const void *bytes, size_t n_bytes, size_t max_message,
                    const wire_allocator *allocator, request_failure *failure) {
    wire_frame frame;
    request_checked checked;
    wire_error *err = &failure->error;
    *out = NULL;
    *failure = (request_failure){.compress = true};
    if (!wire_unwrap(&frame, bytes, n_bytes, max_message, allocator, err)) return false;
    bool valid = request_check(&checked, frame.message, frame.n, REQUEST_OBJECT_MULTIPLE * max_message, err);
    if (checked.id.n) memcpy(failure->id, checked.id.bytes, checked.id.n);
    failure->n_id = checked.id.n;
    failure->compress = checked.compress;
    if (valid) *out = unpack(&frame, &checked, allocator, err);
    if (*out) (*out)->n_bytes = frame.n;
    wire_frame_free(&frame, allocator);
    return *out != NULL;
}

void request_free(request *r) {
    if (r) request_arena_close(r->arena);
}
