/* One call in flight: what its threads share, and the phases they go through together. */
#ifndef LLI_CPU_RUN_H
#define LLI_CPU_RUN_H

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
} lli_run;

/* One thread's part of a phase. */
typedef struct lli_worker {
    lli_run *run;
    const lli_team *team;
    lli_scratch *scratch;
    int32_t thread;
} lli_worker;

/* Hands out 0 .. n_tasks - 1, each to one thread, then waits for all: what any task wrote is visible to
 * every thread after. */
typedef void lli_task(const lli_worker *worker, const void *context, int64_t task);
void lli_tasks(const lli_worker *worker, int64_t n_tasks, lli_task *task, const void *context);

/* Row of x, or of w, of the valid row / column. */
static inline const void *lli_x_row(const lli_run *run, int64_t row) {
    return lli_row(&run->call->args->x, run->pieces.rows[row]);
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

/* Statistics of a chunk: clears, forms (keeping the logits if `keep`), and finishes its rows. */
void lli_forward_chunk(const lli_worker *worker, const lli_chunk *chunk, bool keep);

/* Gradient coefficients of every valid row from the caller's saved results. */
void lli_backward_prepare(const lli_worker *worker);
/* grad_w, grad_bias and grad_x from a chunk's logits, or from all chunks by recomputing them. */
void lli_gradient_one_pass(const lli_worker *worker);
void lli_gradient_recompute(const lli_worker *worker);

#endif
