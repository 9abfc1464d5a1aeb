/* What the engine computes side by side: prompts, rows (samples being generated) and sequences to be scored.
 *
 *     its turn              all computed, samples
 *     and room  +---------+ started, sample ended
 *   -----------> |  runs   | ----------------------> dropped by the sweep
 *                +---------+
 *      pages are  |       ^  room again, and nothing
 *      short and  v       |  older waits
 *      it is the +---------+
 *      youngest  |  waits  |  no pages; tokens stay, and are computed again
 *                +---------+
 *
 * A row whose K and V were kept when weights changed never waits: it stands still, or ends (plan.c).
 *
 * The engine lists its tasks by age, the oldest first: arrival of the job, prompt, sample.  A prompt stays in
 * the list until its last sample has started, behind the rows of those that have: its age is that of its next
 * sample.  New tasks are younger than all that are listed, so age is never compared: it is the order.
 *
 * A task is the first member of what it stands for: prompt, live_row, scored.  Engine thread only. */
#ifndef COP_TASK_H
#define COP_TASK_H

#include <stdbool.h>

typedef enum task_kind { TASK_PROMPT, TASK_ROW, TASK_SCORE } task_kind;

typedef struct task {
    task_kind kind;
    bool runs;  /* may hold pages, and is computed; false: it waits for room, without pages */
    int n_step; /* tokens that it has in the step at hand */
} task;

#endif
