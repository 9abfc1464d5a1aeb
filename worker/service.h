/* The service: a ROUTER socket, requests in, replies out (PROTOCOL.md).  It decodes, answers what needs no
 * engine, and hands the rest to the engine's thread, or, new weights, to the updater's.  It never waits for a
 * client: what a full pipe does not take stays in a backlog of that client, and when that is full, the
 * client's requests wait. */
#ifndef COP_SERVICE_H
#define COP_SERVICE_H

#include "engine/engine.h"

typedef struct service_options {
    const char *bind;          /* tcp://127.0.0.1:5555, ipc://... */
    const char *endpoint_file; /* NULL, or where the endpoint in use is written */
    const char *model;         /* what `pong` calls the model */
    size_t max_message;        /* bytes of a message after expansion */
    size_t max_backlog; /* bytes of replies that a client leaves unread until its requests wait; as many
                           bytes of requests then wait */
    size_t keep_bytes;  /* of results that wait: for others of their prompt or request, for a client, or to
                           be asked for again */
    double keep_results_sec;    /* that the results of a finished rollout can be asked for again */
    double weights_silence_sec; /* that the sender of a stream of weights may say nothing */
    const char *weights_dir;    /* where new weights must lie; NULL: anywhere */
    int max_queue;              /* rollouts and scores that wait to be started; further ones are refused */
    double step_timeout_sec;    /* a step that takes longer ends the process */
    double grace_sec;           /* after SIGTERM, until what runs is cancelled */
} service_options;

/* Bind, serve until SIGTERM or SIGINT, drain, return.  Both signals must be blocked in all threads of the
 * process.  The engine and tokenizer (may be NULL) are borrowed.  Errors: COP_EINVAL (an endpoint that is not
 * loopback), COP_EIO. */
cop_status service_run(engine *e, const tokenizer *t, const service_options *o, cop_error *err);

#endif
