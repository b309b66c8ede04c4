/* A plan with a communicator on a GPU: the rank's columns, the group's operations, a chunk's exchange.
 *
 * A rank's columns are what a cut makes of them. Canonical tiles that lie on it whole are its own, and all
 * the kernels know of: they see a vocabulary that starts on a tile. The columns of a tile that a cut goes
 * through are an edge, at most 63 of them on each side, with products of their own; their logits are kept
 * until the ranks have agreed on the tile's maximum (exchange.h).
 *
 *   tile      |---------------|---------------|---------------|---------------|
 *   rank              [ edge  |             own               | edge ]
 *
 * A gradient goes through its own columns in blocks, then through each edge as a block by itself. */
#ifndef LLI_CUDA_RANKS_H
#define LLI_CUDA_RANKS_H

#include "cuda/run.h"

#include "core/group.h"

/* What a plan keeps for its group. */
typedef struct lli_cuda_ranks {
    int64_t *shared; /* shards.shared in device memory */
    void *staging;   /* pinned host memory; NULL where the communicator takes device memory */
    size_t staging_bytes;
    cudaEvent_t staged; /* the last copy out of it */
} lli_cuda_ranks;

/* Of a plan in a group whose calls hand over arrays of at most most_bytes. *ranks: to be closed in any case.
 * MEMORY, CUDA. */
ll_status lli_cuda_ranks_open(const ll_plan *plan, size_t most_bytes, lli_cuda_ranks **ranks);
void lli_cuda_ranks_close(lli_cuda_ranks *ranks); /* NULL is fine */

/* For lli_kernel.check_in_group: a capture cannot go through host memory. */
ll_status lli_cuda_refuse_capture(const lli_cuda_ranks *ranks, const lli_call *call);

/* Who meets in a call, and on which stream. */
typedef struct lli_cuda_meeting {
    lli_group *group;
    const lli_cuda_ranks *ranks;
    const char *pass; /* its name, for sentences */
    cudaStream_t stream;
} lli_cuda_meeting;

/* The part of rows in args->rows -> the whole rows there, by the kernels of exchange.h and the group's
 * operations. sum: lli_cuda_exchange_sum_launch, or the one of ce. */
struct lli_cuda_exchange;
typedef int lli_cuda_exchange_launch(const struct lli_cuda_exchange *args, cudaStream_t stream);
ll_status lli_cuda_exchange_rows(const lli_cuda_meeting *meeting, const struct lli_cuda_exchange *args,
                                 lli_cuda_exchange_launch *sum);

/* ---- linear_ce ---------------------------------------------------------------------------------- */

/* Bytes of the largest array that a call hands over. */
size_t lli_cuda_most_bytes(const ll_plan *plan);

/* A call on a range of the rank's columns: their rows of w, bias and gradients, as if there were no others.
 */
typedef struct lli_cuda_part {
    lli_cuda_run run;
    lli_call call;
    ll_linear_ce_args args;
} lli_cuda_part;

/* `own` and `edges` of the call, which point to each other: not to be copied. */
typedef struct lli_cuda_parts_of_call {
    lli_cuda_part own, edges[2];
} lli_cuda_parts_of_call;
void lli_cuda_cut_call(const lli_cuda_run *whole, lli_cuda_parts_of_call *parts);

/* The chunk's statistics, `parts` of each row, over all ranks: one part is left. */
ll_status lli_cuda_exchange_chunk(const lli_cuda_run *run, const lli_cuda_chunk *chunk, int32_t parts);
/* acc_x[0 .. n) of all ranks. */
ll_status lli_cuda_sum_over_ranks(const lli_cuda_run *run, float *acc_x, int64_t n);

#endif
