/* One call in flight: everything that is queued on the caller's stream. */
#ifndef LLI_CUDA_RUN_H
#define LLI_CUDA_RUN_H

#include "core/dtype.h"
#include "cuda/backend.h"
#include "cuda/cut.h"
#include "cuda/gemm.h"

typedef struct lli_cuda_run {
    const lli_problem *problem;
    const lli_config *config;
    const lli_call *call;
    const lli_cuda_device *device;
    const char *pass; /* its name, for sentences */
    cudaStream_t stream;
    lli_cuda_cut cut;
    lli_cuda_pieces pieces;
    lli_cuda_targets targets;
    lli_cuda_transform transform;
    lli_loss_terms terms;
    int64_t column; /* global id of column 0 */
    /* In a group, whose other columns of this rank are edges (ranks.h); NULL and 0 without. */
    struct lli_group *group;
    const struct lli_cuda_part *edges;
    int32_t n_edges;
} lli_cuda_run;

/* Leaves the function where a launch fails, with what it was. */
#define LLI_LAUNCH(run, what, call)                                                                          \
    do {                                                                                                     \
        const int lli_launch_status = (call);                                                                \
        if (lli_launch_status) return lli_cuda_fail(lli_launch_status, (run)->pass, what);                   \
    } while (0)

/* Tokens [first, first + count). */
typedef struct lli_cuda_chunk {
    int64_t first, count;
} lli_cuda_chunk;

/* Columns [begin, begin + count) of the run's, with their raw logits where they are formed. */
typedef struct lli_cuda_block {
    int64_t begin, count;
    float *logits;
    int64_t ld;
} lli_cuda_block;

/* True if cuBLASLt may read (or write) the matrix where it lies. */
bool lli_cuda_aligned(const ll_view *view);

/* Raw logits of the chunk's tokens against the block's columns. */
ll_status lli_cuda_form_logits(const lli_cuda_run *run, const lli_cuda_chunk *chunk,
                               const lli_cuda_block *block);
/* Into the rows' statistics; `fresh`: the chunk's first block. */
ll_status lli_cuda_gather(const lli_cuda_run *run, const lli_cuda_chunk *chunk, const lli_cuda_block *block,
                          int32_t parts, bool fresh);
/* The same of all columns at once, without logits in memory. False where the operands do not lie as the copy
 * engine reads them, or there is no kernel for this device: bits are the same either way. */
struct lli_cuda_fused;
struct lli_cuda_kept;
/* kept: where exponentials go; NULL: nowhere. */
bool lli_cuda_fused_takes(const lli_cuda_run *run, const lli_cuda_chunk *chunk,
                          const struct lli_cuda_kept *kept, struct lli_cuda_fused *fused);
ll_status lli_cuda_fused_gather(const lli_cuda_run *run, const struct lli_cuda_fused *fused);
/* Likewise dz of the chunk and the columns that `dz` names. */
struct lli_cuda_fused_dz;
bool lli_cuda_fused_dz_takes(const lli_cuda_run *run, const lli_cuda_chunk *chunk, const lli_cuda_dz *dz,
                             struct lli_cuda_fused_dz *fused);
ll_status lli_cuda_fused_form_dz(const lli_cuda_run *run, const struct lli_cuda_fused_dz *fused);

/* Both products of columns [begin, begin + count) of the run, a chunk of tokens and their dz in memory (or,
 * from what was kept, in the making), in one launch (fused.h). */
typedef struct lli_cuda_grad_job {
    const lli_cuda_chunk *chunk;
    int64_t begin, count;
    float *grad_x; /* NULL: not wanted */
    bool add_x;
    void *grad_w; /* NULL: not wanted */
    int64_t grad_w_ld;
    int32_t form_w;
    const struct lli_cuda_kept *kept; /* NULL: all dz are there; else those of `ready` columns */
    lli_cuda_dz dz;                   /* of all columns */
    int64_t ready;
} lli_cuda_grad_job;
struct lli_cuda_grad_products;
bool lli_cuda_grad_takes(const lli_cuda_run *run, const lli_cuda_grad_job *job,
                         struct lli_cuda_grad_products *products);
ll_status lli_cuda_grad_multiply(const lli_cuda_run *run, const struct lli_cuda_grad_products *products);

/* A box of a bf16 matrix as the copy engine loads it; and its rules: rows start on 16 bytes, no further apart
 * than 2^40. */
typedef struct lli_cuda_box {
    const void *data;
    uint32_t rank;
    uint64_t sizes[3], strides[2]; /* elements; bytes */
    uint32_t box[3];
} lli_cuda_box;
bool lli_cuda_readable(const void *data, int64_t row_stride);
struct CUtensorMap_st;
bool lli_cuda_map(const lli_cuda_device *device, const lli_cuda_box *of, struct CUtensorMap_st *map);

/* Results of the chunk's rows. */
ll_status lli_cuda_finish_rows(const lli_cuda_run *run, const lli_cuda_chunk *chunk, int32_t parts);

ll_status lli_cuda_forward(const lli_cuda_run *run);
/* grad_x, grad_w and grad_bias: with the forward in one pass, or by forming the logits again. */
ll_status lli_cuda_one_pass(const lli_cuda_run *run);
/* One pass by exponentials; `keeps`: the plan and the operands allow it. */
bool lli_cuda_keeps(const lli_cuda_run *run);
ll_status lli_cuda_one_pass_kept(const lli_cuda_run *run);
ll_status lli_cuda_recompute(const lli_cuda_run *run);
/* Zeros for rows of w beyond the vocabulary, and for all where there is no token; of a rank's whole call. */
ll_status lli_cuda_clear_rest(const lli_cuda_run *run);
/* The coefficients of every token from the caller's saved results. */
ll_status lli_cuda_prepare(const lli_cuda_run *run);

#endif
