/* One measured rollout: how long its prompt and its steps take.  The engine is the caller's, idle, with
 * hold_rows set, and has room for all samples at once (bench_fits). */
#ifndef COP_BENCH_RUN_H
#define COP_BENCH_RUN_H

#include "engine/engine.h"

typedef struct bench_load {
    const int32_t *tokens; /* [n_tokens] the prompt */
    int n_tokens;
    int n_decode;  /* tokens of each sample: the first comes from the prompt, each further one from a step */
    int n;         /* samples */
    bool separate; /* each has a prompt of its own, with the same tokens but nothing shared */
    double temperature;
    int top_k;
} bench_load;

typedef struct bench_timing { /* seconds */
    double first_token;       /* from submitting until every sample has its first token */
    double decode;            /* from there to the last token; 0 if n_decode is 1 */
    double step;              /* median of the steps in between */
    double sample;            /* part of `decode` that went into drawing tokens and log-probabilities */
} bench_timing;

/* Errors: COP_ETOOLONG and COP_ETOOLARGE, as bench_fits; COP_ENOMEM, COP_EMODEL. */
cop_status bench_run(engine *e, const bench_load *l, bench_timing *out, cop_error *err);

/* Whether the load's samples can run side by side.  Errors: COP_ETOOLONG (longer than the context),
 * COP_ETOOLARGE (more pages than the engine has). */
cop_status bench_fits(const engine *e, const bench_load *l, cop_error *err);

/* Sorts the values, n >= 1; of an even number the mean of the middle two. */
double bench_median(double *values, int n);

#endif
