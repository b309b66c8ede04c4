/* The forward on Hopper without logits in memory: what its kernels are told (fused.c queues them).
 *
 *   prepare   empty slots, no target seen yet
 *   fused     products and statistics of all tiles of 128 tokens and 192 columns
 *   merge     the slots of a row into its lli_cuda_row, which finish.cu takes
 *
 * A worker is one of the two warpgroups of a cluster that multiply: number q < 2 clusters does tiles q,
 * q + 2 clusters, ... of the launch. It adds a row's tiles to a slot of its own. With g the greatest common
 * divisor of 2 clusters and row_blocks, worker q meets the row blocks that are q modulo g, so a row has parts
 * = 2 clusters / g slots, and worker q owns part q / g of each row it meets:
 *
 *   slots [parts][n_rows]
 *
 * Slots are merged as integers: bits depend neither on the grid nor on the order. */
#ifndef LLI_CUDA_FUSED_H
#define LLI_CUDA_FUSED_H

#include "cuda/work.h"

#include <cuda.h>

enum {
    kFusedCols = 192,    /* of a tile: three canonical tiles */
    kFusedRows = 256,    /* of the two blocks of a cluster */
    kFusedMapRows = 128, /* of x, loaded by one block */
    kFusedMapCols = 96,  /* of w, loaded by one block for both */
    kFusedMapDepth = 64  /* elements of k: the 128 bytes of the swizzle */
};

/* A worker's statistics of one row. */
typedef struct lli_cuda_slot {
    lli_softmax sums; /* every tile but the target's */
    float max;        /* largest logit and its lowest column; -1 before the first */
    int32_t argmax;
} lli_cuda_slot;

typedef struct lli_cuda_fused {
    CUtensorMap x, w; /* bf16: the chunk's rows, the real columns; zeros beyond */
    uint32_t row_blocks, col_blocks, depth_blocks;
    uint32_t clusters, stride; /* stride: g */
    int64_t first, n_rows;     /* tokens of the chunk */
    int64_t n_cols;
    lli_cuda_targets targets;
    float temperature; /* 1: none */
    const float *bias; /* f32, padded to 64 columns; or NULL */
    lli_cuda_slot *slots;
    lli_cuda_row *rows;
    int32_t parts, want_entropy, want_argmax;
} lli_cuda_fused;

/* All three kernels, one after the other. */
LLI_C int lli_cuda_fused_launch(const lli_cuda_fused *args, cudaStream_t stream);
/* Loads them; their shared memory is asked for here. */
LLI_C int lli_cuda_load_fused(void);

#endif
