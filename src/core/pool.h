/* A plan's threads. One job at a time: every thread of the team runs fn(context, thread, n_threads).
 * A second call that finds the team busy runs its job alone on its own thread instead of waiting (the
 * results have the same bits for any number of threads), and so does a forked child, whose copy of the
 * plan has no workers. */
#ifndef LLI_CORE_POOL_H
#define LLI_CORE_POOL_H

#include "core/status.h"

enum { kPoolMaxThreads = 1024 };

typedef struct lli_pool lli_pool;
typedef struct lli_team lli_team; /* the threads of one running job */

typedef void lli_job(void *context, int32_t thread, const lli_team *team);

/* LL_NUM_THREADS, else the CPUs this process may run on. INVALID_ARG if the variable is no number. */
ll_status lli_pool_default_threads(int32_t *n_threads);

/* Starts n_threads - 1 workers. MEMORY if the system refuses one. */
ll_status lli_pool_create(int32_t n_threads, lli_pool **pool);
void lli_pool_destroy(lli_pool *pool);

/* Runs the job on at most n_threads threads and returns when all have finished. Every thread computes in
 * the default floating-point environment (round to nearest, subnormals kept), whatever the caller's. */
void lli_pool_run(lli_pool *pool, int32_t n_threads, lli_job *job, void *context);

int32_t lli_team_size(const lli_team *team);
/* Returns when every thread of the team has arrived; what they wrote before is visible after. */
void lli_team_barrier(const lli_team *team);

#endif
