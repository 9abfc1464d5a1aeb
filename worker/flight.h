/* Rollouts and scores in the engine's hands, from their parcel to their last letter.
 *
 *   held       it waits for `min_weights`: not submitted, not accepted
 *   submitted  the engine has it; its events become letters
 *
 * The engine's thread only. */
#ifndef COP_FLIGHT_H
#define COP_FLIGHT_H

#include "worker/post.h"

typedef struct flight flight;

/* All of them, and what they share; engine, tokenizer (may be NULL) and queue are borrowed. */
typedef struct flights {
    engine *engine;
    const tokenizer *tokenizer;
    queue *replies;
    size_t keep_bytes, kept_bytes; /* of samples that wait for others: at most, and now */
    flight *first, *last;          /* in order of arrival */
} flights;

/* Begin what a parcel holds, which is taken out of it; the request is borrowed until the last letter. */
void flights_begin(flights *fs, parcel *p);

/* Those of a ticket; nothing happens where there is none. */
void flights_cancel(flights *fs, const struct ticket *t); /* tells its samples and its end */
void flights_park(flights *fs, const struct ticket *t, bool parked);

void flights_cancel_all(flights *fs);

/* Submit those that waited for weights which are in use now. */
void flights_release(flights *fs);

/* Cancel what is late, fail what has waited for weights too long. */
void flights_end_late(flights *fs, double now);
double flights_next_deadline(const flights *fs); /* clock_seconds(); INFINITY: none */

/* After a step: end those whose results could not be told, and tell which no longer wait. */
void flights_sweep(flights *fs);

#endif
