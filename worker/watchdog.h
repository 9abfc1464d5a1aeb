/* Ends the process when a step of the engine does not come back: a hanging device or a bug would otherwise
 * leave clients waiting for ever, and only a restart helps.
 *
 * A thread of its own, so that neither of the others can hold it up.  It counts the time in which it sees the
 * same step while it is awake itself: a process that was stopped as a whole, or a machine that slept, loses
 * nothing. */
#ifndef COP_WATCHDOG_H
#define COP_WATCHDOG_H

#include "engine/engine.h"

typedef struct watchdog watchdog;

/* Watch the steps of `e` (borrowed): one that takes longer than timeout_sec, by at most a quarter, ends the
 * process with WATCHDOG_STATUS and a log line that says where it is.  Errors: COP_ENOMEM, COP_EIO. */
#define WATCHDOG_STATUS 3
cop_status watchdog_open(watchdog **out, const engine *e, double timeout_sec, cop_error *err);
void watchdog_close(watchdog *w);

#endif
