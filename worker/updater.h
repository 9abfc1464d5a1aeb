/* The thread that reads new weights while rollouts run.
 *
 *   service thread -- weights --------> [path or stream, in order of arrival] --> updater's thread
 *                  -- weights_chunk --> [chunks of the stream, bounded] --------> engine_load_*()
 *                  -- weights_commit ->                                              |
 *   engine thread  <------------- parcel with the finished update: a set, or why there is none
 *
 * One update is read at a time.  At most one stream is open, and it is read as it comes: at most STREAM_BYTES
 * of chunks wait.  A stream whose sender is silent for SILENCE_SEC fails.  There are never more than
 * UPDATER_MAX_SETS in memory: where those in use (old ones by rows that still end on them) and those that the
 * engine's thread has not taken yet are so many, reading the next waits; a stream that is full meanwhile
 * waits no longer than SILENCE_SEC, then it is `overloaded`: nothing else can be received before that. */
#ifndef COP_UPDATER_H
#define COP_UPDATER_H

#include "worker/post.h"

#define UPDATER_MAX_SETS 3
#define UPDATER_SILENCE_SEC 60.0
#define UPDATER_STREAM_BYTES ((size_t)64 << 20)
#define UPDATER_MAX_PATHS 64 /* updates that wait their turn; further ones are overloaded */

struct update_gate; /* worker/updater.c: counts the sets that are on their way */

/* An update that was read, or failed.  Whoever takes it out of its parcel frees it, soon after its set is in
 * use, since the updater waits for that.  One that stays in a parcel is freed with that, but its set is the
 * engine's to drop: at the end the updater is closed first and then the engine's thread, which takes what is
 * still in the queue, so that no set is left in a parcel. */
typedef struct update {
    client_id client;
    request *request; /* the `weights` request */
    client_id commit_client;
    request *commit;  /* of a stream that was committed; else NULL */
    weights *weights; /* NULL: it failed */
    wire_error error; /* why */
    struct update_gate *gate;
} update;
/* Also the set, if it was not taken out; `e` may be NULL if it was.  NULL does nothing. */
void update_free(update *u, engine *e);

typedef struct updater updater;

/* Start the thread.  Finished updates go to `requests` as PARCEL_UPDATE; engine and queue are borrowed.
 * weights_dir: paths and the files that are read must lie in it (symbolic links resolved), relative ones too,
 * which begin where the process runs; NULL: anywhere.  silence_sec: UPDATER_SILENCE_SEC, or shorter for
 * tests. Errors: COP_ENOTFOUND, COP_EINVAL (weights_dir is no directory), COP_EIO, COP_ENOMEM. */
cop_status updater_open(updater **out, engine *e, const char *weights_dir, double silence_sec,
                        queue *requests, cop_error *err);
/* Give up what is being read and what waits: all of it fails soon, as `draining`.  Nothing may begin any
 * more.  The service's thread. */
void updater_stop(updater *u);
/* Stop and join.  The engine and the queue must still be there.  NULL does nothing. */
void updater_close(updater *u);

/* ---- The service's thread.  Each takes the request if it returns true; else *err says what to answer. */

/* A `weights` request.  Errors: overloaded with retry_after (a stream while another update is under way; too
 * many paths; no memory). */
bool updater_begin(updater *u, const client_id *client, request *r, wire_error *err);
/* A chunk of the stream that is open, whatever is in it.  What is wrong with it fails the update, whose error
 * tells it, once; chunks of a stream that has failed are dropped until its commit.  Errors: not_found (no
 * such stream). */
bool updater_chunk(updater *u, request *r, wire_error *err);
/* The end of the stream.  Errors: not_found; or, where the stream has failed, that failure again (once). */
bool updater_commit(updater *u, const client_id *client, request *r, wire_error *err);
/* As many chunks wait as may: receive nothing until this is false.  It becomes false without anybody's doing:
 * the thread reads what waits. */
bool updater_is_full(updater *u);

#endif
