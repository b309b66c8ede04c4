/* A step of the gradients: a chunk of tokens and a block of columns. gradient.c says in which order steps
 * come. */
#ifndef LLI_CUDA_GRAD_STEP_H
#define LLI_CUDA_GRAD_STEP_H

#include "cuda/fused.h"
#include "cuda/run.h"

/* A chunk and a block, and where the sum over chunks stands. */
typedef struct lli_cuda_grad_step {
    const lli_cuda_chunk *chunk;
    int64_t begin, count; /* the block's columns */
    bool first_block, first_chunk, last_chunk;
    float *acc_x;              /* of the chunk's first token */
    const lli_cuda_kept *kept; /* of the chunk; or NULL */
} lli_cuda_grad_step;

/* Rows of dz, and of the copy of x that grad_w reads. */
static inline int64_t lli_cuda_padded_rows(const lli_cuda_chunk *chunk) {
    return lli_round_up(chunk->count, 64);
}
/* x of the chunk as grad_w reads it, before its first step. */
ll_status lli_cuda_copy_x(const lli_cuda_run *run, const lli_cuda_chunk *chunk);
/* dz of the step, acc_x (+)= dz w, grad_w (+)= dz^T x: in one launch on Hopper where that applies, else by
 * cuBLASLt; the same bits. */
ll_status lli_cuda_take_step(const lli_cuda_run *run, const lli_cuda_grad_step *step);
/* All steps of a chunk in one launch, where all its exponentials are kept and two blocks of dz have room: a
 * block's dz are made behind the products of the one before, but for those whose exponentials lie in the sums
 * of grad_x. `all` has every column. */
ll_status lli_cuda_take_all_steps(const lli_cuda_run *run, const lli_cuda_grad_step *all, bool *taken);
/* grad_x of the chunk from its sums, after its last step. */
ll_status lli_cuda_emit_x(const lli_cuda_run *run, const lli_cuda_chunk *chunk, float *acc_x);

#endif
