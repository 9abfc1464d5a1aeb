/* The engine's thread: takes parcels from one queue, steps the engine, puts letters on another (post.h).
 * Nothing but the two queues is shared, and of tickets the requests. */
#ifndef COP_ENGINE_LOOP_H
#define COP_ENGINE_LOOP_H

#include "worker/post.h"

typedef struct engine_loop engine_loop;

/* Start the thread; returns when it runs.  engine, tokenizer (may be NULL) and queues are borrowed; the
 * engine belongs to the thread until engine_loop_close().  keep_bytes: of samples that wait to be sent with
 * the others of their prompt or request, and of a score. */
cop_status engine_loop_open(engine_loop **out, engine *e, const tokenizer *t, size_t keep_bytes,
                            queue *requests, queue *replies, cop_error *err);
void engine_loop_close(engine_loop *l); /* sends PARCEL_STOP and joins */

#endif
