/* A program of the user's that judges samples: one JSON object per line goes to its stdin, one number per
 * line comes back on its stdout, in the same order; or null: no reward.
 *
 *   asking thread --- reward_ask() ---> list of lines ----> writing thread ---> pipe ---> sh -c CMD
 *   asking thread <-- reward_take() --- list of answers <-- reading thread <--- pipe <------+
 *
 * It may read and answer as late as it likes: what was asked and not answered is the caller's to bound, since
 * a line that the program does not read waits in memory, freed as soon as it is in the pipe.  All functions
 * but reward_stop() are for one thread; the two others are inside.
 *
 * An answer is a JSON number or null, or an object whose `reward` is one ({"reward": 0.5, "why": ...}), of at
 * most REWARD_MAX_LINE bytes; the last one may lack its line feed.  NaN, inf, true, an empty line and words
 * are refused: a line that is no answer puts all that follow in doubt.  After a failure everything fails with
 * it.
 *
 * The program leads a process group of its own, so that Ctrl-C at the terminal does not reach it, with the
 * signal mask and dispositions that a login shell gives; of our descriptors it has only stderr and its two
 * pipes.  It has ended when the shell has, even if something that the shell left behind holds its stdout.
 * SIGPIPE is blocked in the writing thread: a program that ends is an error, not our death. */
#ifndef COP_REWARD_H
#define COP_REWARD_H

#include <jansson.h>

#include "kernels/base.h"

#define REWARD_MAX_LINE 65536

typedef struct reward reward;

/* Start `sh -c command`, with PYTHONUNBUFFERED=1 in its environment; its stderr is ours.  That the shell does
 * not find the command shows later, as exit status 127.  COP_EIO, COP_ENOMEM. */
cop_status reward_open(reward **out, const char *command, cop_error *err);
/* Kill it and its process group if it still runs; waits for nothing else.  NULL does nothing. */
void reward_close(reward *r);

/* Kill it now: whoever waits in reward_take() gets COP_EIO.  Any thread, but no signal handler. */
void reward_stop(reward *r);

/* Put a sample (borrowed) on the list of what the program is to read; waits for nothing.  COP_EIO: it has
 * ended, or closed its stdin before it got all; the message has its exit status or signal.  What it answered
 * before can still be taken.  Since a line is written later, reward_take() may be the first to tell.
 * COP_ENOMEM.  After an error the sample was not asked. */
cop_status reward_ask(reward *r, json_t *sample, cop_error *err);

/* The oldest answer that was not taken; *has is false if there is none by clock_seconds() == until.  NaN:
 * null.  COP_EFORMAT: the program printed something else (the line and its number are in the message);
 * COP_EINVAL: more lines than it was given, so that earlier answers may belong to other samples; COP_EIO: it
 * ended with answers owing, or closed its stdin before it got all.  How it ends is no matter when it owes
 * nothing: then *has is false at once.  So a last call after reward_no_more() with nothing owing waits for
 * the end, and finds a line too many. */
cop_status reward_take(reward *r, double until, double *value, bool *has, cop_error *err);

/* Nothing more is asked: its stdin is closed when all is written, so that a program that holds its answers
 * back gives them.  Go on with reward_take(). */
void reward_no_more(reward *r);

/* Bytes that were asked and that the program has not taken yet. */
size_t reward_waiting_bytes(reward *r);

uint64_t reward_owing(const reward *r); /* asked and not taken */

#endif
