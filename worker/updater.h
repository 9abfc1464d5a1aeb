/* The thread that reads new weights while rollouts run.
 *
 *   service thread -- weights --------> [path or stream, in order of arrival] --> updater's thread
 *                  -- weights_chunk --> [chunks of the stream, bounded] --------> engine_load_*()
 *                  -- weights_commit ->                                              |
 *   engine thread  <------------- parcel with the finished update: a set, or why there is none
 *
 * One update is read at a time.  At most one stream is open, and it is read as it comes: at most STREAM_BYTES
 * of chunks wait.  A stream whose sender is silent for SILENCE_SEC fails.  While two sets are in use (the old
 * one by rows that still end on it), reading the next waits, so that there are never more than three in
 * memory. */
#ifndef COP_UPDATER_H
#define COP_UPDATER_H

#include "worker/post.h"

#define UPDATER_SILENCE_SEC 60.0
#define UPDATER_STREAM_BYTES ((size_t)64 << 20)
#define UPDATER_MAX_PATHS 64 /* updates that wait their turn; further ones are overloaded */

/* An update that was read, or failed.  Ends with update_free(). */
typedef struct update {
    client_id client;
    request *request; /* the `weights` request */
    client_id commit_client;
    request *commit;  /* of a stream that was committed; else NULL */
    weights *weights; /* NULL: it failed */
    wire_error error; /* why */
} update;
void update_free(update *u, engine *e); /* also the set, if it was not taken out */

typedef struct updater updater;

/* Start the thread.  Finished updates go to `requests` as PARCEL_UPDATE; engine and queue are borrowed.
 * weights_dir: paths must lie in it (symbolic links resolved); NULL: anywhere.  silence_sec:
 * UPDATER_SILENCE_SEC, or shorter for tests. */
cop_status updater_open(updater **out, engine *e, const char *weights_dir, double silence_sec,
                        queue *requests, cop_error *err);
/* Join: what is being read is given up, without a parcel.  The engine and the queue must still be there. */
void updater_close(updater *u);

/* ---- The service's thread.  Each takes the request if it returns true; else *err says what to answer. */

/* A `weights` request.  Errors: overloaded (a stream while another update is under way: retry_after; too many
 * paths). */
bool updater_begin(updater *u, const client_id *client, request *r, wire_error *err);
/* A chunk of the stream that is open.  What is wrong with it fails the update, whose error tells it, once;
 * chunks of a stream that has failed are dropped until its commit.  Errors: not_found (no such stream). */
bool updater_chunk(updater *u, request *r, wire_error *err);
/* The end of the stream.  Errors: not_found; or, where the stream has failed, that failure again. */
bool updater_commit(updater *u, const client_id *client, request *r, wire_error *err);
/* As many chunks wait as may: receive nothing until this is false.  It becomes false without anybody's doing:
 * the thread reads what waits. */
bool updater_is_full(updater *u);

#endif
