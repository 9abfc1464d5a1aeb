/* A program of the user's that judges samples: one JSON object per line goes to its stdin, one number per
 * line comes back on its stdout, in the same order; or null: no reward.
 *
 *   asking thread --- reward_ask() ---> pipe ---> sh -c CMD
 *   asking thread <-- reward_take() --- reading thread <--- pipe
 *
 * It may answer as late as it likes: what was asked and not answered is the caller's to bound.  All functions
 * are for one thread but for that reading one, which is inside. */
#ifndef COP_REWARD_H
#define COP_REWARD_H

#include <jansson.h>

#include "kernels/base.h"

typedef struct reward reward;

/* Start `sh -c command`, with PYTHONUNBUFFERED=1 in its environment; its stderr is ours.  COP_EIO. */
cop_status reward_open(reward **out, const char *command, cop_error *err);
/* Kill it if it still runs.  NULL does nothing. */
void reward_close(reward *r);

/* Hand over a sample.  Waits while the program's pipe is full.  COP_EIO: it has ended; the message has its
 * exit status or signal. */
cop_status reward_ask(reward *r, json_t *sample, cop_error *err);

/* The oldest answer that was not taken; *has is false if there is none by clock_seconds() == until.  NaN:
 * null. COP_EFORMAT: the program printed something else (the line and its number are in the message) or more
 * lines than it was asked; COP_EIO: it ended with answers owing. */
cop_status reward_take(reward *r, double until, double *value, bool *has, cop_error *err);

/* Nothing more is asked: close its stdin, so that a program that holds its answers back gives them.  Go on
 * with reward_take(). */
void reward_no_more(reward *r);

uint64_t reward_owing(const reward *r); /* asked and not taken */

#endif
