/* One call in flight: what its threads share, and the phases they go through together. */
#ifndef LLI_CPU_RUN_H
#define LLI_CPU_RUN_H

#include "core/dtype.h"
#include "core/exchange.h"
#include "core/pool.h"
#include "cpu/cut.h"

#include <stdatomic.h>

/* A chunk of valid rows: rows[begin .. begin + count). */
typedef struct lli_chunk {
    int64_t begin, count;
} lli_chunk;

typedef struct lli_run {
    const lli_problem *problem;
    const lli_call *call;
    const lli_micro *micro;
    lli_cut cut;
    lli_pieces pieces;
    lli_loss_terms terms;
    lli_transform transform;
    int32_t want; /* LLI_WANT_ bits of the statistics */
    atomic_llong next_task;
    lli_group *group; /* NULL: one rank */
    lli_exchange exchange;
    ll_status status; /* of the operations with other ranks; written by thread 0 before a barrier */
} lli_run;

/* One thread's part of a phase. */
typedef struct lli_worker {
    lli_run *run;
    const lli_team *team;
    lli_scratch *scratch;
    int32_t thread;
} lli_worker;

static inline lli_finish lli_run_finish(const lli_run *run) {
    return (lli_finish){run->problem, run->call, &run->terms, run->want};
}

/* Hands out 0 .. n_tasks - 1, each to one thread, then waits for all: what any task wrote is visible to
 * every thread after. */
typedef void lli_task(const lli_worker *worker, const void *context, int64_t task);
void lli_tasks(const lli_worker *worker, int64_t n_tasks, lli_task *task, const void *context);

/* Row of x of a valid row; row of w of a column: before the shard's first column some row that is there,
 * because what is computed from it is masked. */
static inline const void *lli_x_row(const lli_run *run, int64_t row) {
    return lli_row(&run->call->args->x, run->pieces.rows[row]);
}
static inline const void *lli_w_row(const lli_run *run, int64_t column) {
    return lli_row(&run->call->args->w, lli_max(0, column - run->cut.lead));
}
static inline int64_t lli_target(const lli_run *run, int64_t row) {
    return lli_id(&run->call->args->target, run->pieces.rows[row]);
}

/* Packs a chunk's tokens for the products that form logits. */
void lli_pack_tokens(const lli_worker *worker, const lli_chunk *chunk);

/* Raw logits of a chunk's tokens against columns [v_begin, v_begin + n_cols), v_begin a multiple of 64:
 * kept in pieces.logits if `keep`, and gathered into the threads' sums if `gather`. */
void lli_form_logits(const lli_worker *worker, const lli_chunk *chunk, int64_t v_begin, int64_t n_cols,
                     bool keep, bool gather);

/* Statistics of a chunk: clears, forms (keeping the logits if `keep`), and finishes its rows. False: the
 * ranks could not meet, run->status says why, and every thread leaves. */
bool lli_forward_chunk(const lli_worker *worker, const lli_chunk *chunk, bool keep);

/* Merges the threads' sums of a row of the chunk. */
lli_row_part lli_row_merge(const lli_worker *worker, const lli_chunk *chunk, int64_t row);

/* In a group, calls go through chunks by the number of tokens, valid or not, so that the number of operations
 * does not depend on targets: the last chunks may be empty. */
static inline int64_t lli_rounds_end(const lli_run *run) {
    return run->group ? run->call->n_tokens : run->call->n_valid;
}
static inline lli_chunk lli_chunk_at(const lli_run *run, int64_t begin, int64_t n_tokens) {
    const lli_chunk chunk = {begin, lli_max(0, lli_min(n_tokens, run->call->n_valid - begin))};
    return chunk;
}

/* The chunk's rows over all ranks, into pieces.max, .sum and .index; and its acc_x. Collective over threads;
 * false as above. */
bool lli_exchange_chunk(const lli_worker *worker, const lli_chunk *chunk);
bool lli_exchange_grad_x(const lli_worker *worker, const lli_chunk *chunk);

/* Gradient coefficients of every valid row from the caller's saved results. */
void lli_backward_prepare(const lli_worker *worker);
/* grad_w, grad_bias and grad_x from a chunk's logits, or from all chunks by recomputing them. */
void lli_gradient_one_pass(const lli_worker *worker);
void lli_gradient_recompute(const lli_worker *worker);

enum { kFinishRows = 64 }; /* of a task that finishes or exchanges rows */

#endif
