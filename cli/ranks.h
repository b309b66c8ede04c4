/* Calls of the library on ranks that are threads of this process, each with its own plan, shard of the
 * vocabulary and workspace; on a GPU rank r is on device r modulo those that there are. With one rank there
 * is no communicator and no further thread. */
#ifndef LL_CLI_RANKS_H
#define LL_CLI_RANKS_H

#include "cut.h"

#include <logitless/comm.h>

typedef ll_status cli_rank_work(void *context, int32_t rank);

/* Calls work(context, r) for every rank at once, rank 0 on this thread, and returns when all have ended. A
 * rank that fails aborts its end of the group, so that no other one waits for it. Of several failures it
 * returns the one to blame: the first that is not a broken group (LL_STATUS_COMM), else the first; its
 * sentence is this thread's ll_last_error. comms may be NULL for one rank. MEMORY if a thread is refused. */
ll_status cli_ranks_at_once(const ll_comm *comms, int32_t n_ranks, cli_rank_work *work, void *context);

/* total / n_ranks, at least 1; total 0: the library's default. */
ll_status cli_ranks_threads(int32_t total, int32_t n_ranks, int32_t *n_threads);

typedef struct cli_ranks cli_ranks;

/* Bits of cli_ranks_create's `passes`. */
enum { CLI_FORWARD = 1 << LL_PASS_FORWARD, CLI_FORWARD_BACKWARD = 1 << LL_PASS_FORWARD_BACKWARD };
enum { CLI_BACKWARD = 1 << LL_PASS_BACKWARD };

/* desc is that of the whole problem: v_begin 0, v_local the rows that `cut` cuts, comm NULL; n_threads is the
 * total. count_bytes: cli_ranks_counts may be asked. Errors: those of ll_plan_create and ll_comm_threads. */
ll_status cli_ranks_create(const ll_plan_desc *desc, const cli_cut *cut, int32_t passes, bool count_bytes,
                           cli_ranks **ranks);
void cli_ranks_destroy(cli_ranks *ranks); /* NULL is fine */

/* One call with the operands and results of the whole problem; args->workspace is not looked at. Results are
 * those of rank 0 (all ranks have the same), grad_w and grad_bias come from each rank's rows. `pass` must be
 * among `passes`. */
ll_status cli_ranks_run(cli_ranks *ranks, ll_pass pass, const ll_linear_ce_args *args);

/* The last call once more, with operands and results where it left them: on a GPU nothing is copied. */
ll_status cli_ranks_again(cli_ranks *ranks);

/* Rank 0's plan: kernel, numerics, threads of one rank. */
const ll_plan *cli_ranks_plan(const cli_ranks *ranks);
/* Threads and bytes of workspace of all ranks together. */
int32_t cli_ranks_n_threads(const cli_ranks *ranks);
size_t cli_ranks_workspace_bytes(const cli_ranks *ranks);
/* What rank 0 has handed to the group so far; all zeros for one rank. */
ll_status cli_ranks_counts(const cli_ranks *ranks, ll_comm_counts *counts);

#endif
