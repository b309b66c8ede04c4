/* The forward on Hopper without logits in memory: what its kernels are told (fused.c queues them).
 *
 *   prepare   empty slots, no target seen yet
 *   fused     products and statistics of all tiles of 128 tokens and 192 columns
 *   merge     the slots of a row into its lli_cuda_row, which finish.cu takes
 *
 * A worker is one of the two warpgroups of a cluster that multiply: number q < W = 2 clusters does tiles q,
 * q + W, ... of the launch. It adds a row's tiles to a slot of its own. Tiles are numbered through a group of
 * row blocks, whose first tile is `base`, row blocks first (sm90_product.cuh). With h the group's row blocks
 * and g the greatest common divisor of W and h, worker q meets those row blocks that are q - base modulo g.
 * So a row has W / g slots, and the worker owns number ((q - base) mod W) / g of each row that it meets. The
 * last group may have fewer row blocks, and so another g:
 *
 *   slots [parts][last_row]      [last_parts][n_rows - last_row]        last_row: the last group's first
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

/* What a pass keeps of its logits for their gradients: 2^(z log2 e - k) in 16 bits (exp16.cuh), k the anchor
 * of the row and canonical tile. Canonical tile t of the chunk is [n_rows][64] codes,
 *
 *   t < sum_end    at in_sum + t n_rows 64: in grad_x's f32 sums, which begin when these have been read
 *   t < w_end      at in_w + (t - sum_end) w_stride: in grad_w, which is written behind them
 *   t < n_tiles    at in_work + (t - w_end) n_rows 64: in the workspace
 *   from n_tiles   nowhere: the logits are formed again
 *
 * A row's 64 codes lie as a quad of lanes holds them: column 8 j + 2 q + e is number 16 q + 2 j + e. An
 * anchor is k, below 2^23 in magnitude; or, beyond the float formula, the bits of the tile's largest logit,
 * which then is what the exponentials are relative to (kept.cuh). */
typedef struct lli_cuda_kept {
    uint16_t *in_sum, *in_w, *in_work;
    int32_t *anchors; /* [n_tiles][n_rows] */
    int64_t w_stride; /* codes */
    int32_t sum_end, w_end, n_tiles;
    int64_t n_rows;
} lli_cuda_kept;

/* The tiles of a launch and who does them. */
typedef struct lli_cuda_tiles {
    CUtensorMap x, w; /* bf16: the chunk's rows, the columns at hand; zeros beyond */
    uint32_t row_blocks, col_blocks, depth_blocks, group_rows;
    uint32_t clusters;
} lli_cuda_tiles;

typedef struct lli_cuda_fused {
    lli_cuda_tiles tiles;
    uint32_t stride, last_stride; /* g of a group, and of the last one */
    int32_t parts, last_parts;
    int64_t last_row;
    int64_t first, n_rows;  /* tokens of the chunk */
    int64_t n_cols, column; /* column: global id of the first */
    lli_cuda_targets targets;
    float temperature; /* 1: none */
    const float *bias; /* f32, padded to 64 columns; or NULL */
    lli_cuda_slot *slots;
    lli_cuda_row *rows;
    lli_cuda_kept kept; /* n_tiles 0: nothing */
    int32_t want_argmax;
    uint32_t zero; /* 0, which the compiler does not know (sm90_statistics.cuh) */
} lli_cuda_fused;

/* All three kernels, one after the other. */
LLI_C int lli_cuda_fused_launch(const lli_cuda_fused *args, cudaStream_t stream);
/* Loads them; their shared memory is asked for here. */
LLI_C int lli_cuda_load_fused(void);

/* dz_sm90.cu: gradients of the logits of a chunk and of columns [column, column + n_cols), without logits in
 * memory; of `dz` all but what concerns logits, a transform, weights and grad_bias: lli_cuda_dz_plain. */
typedef struct lli_cuda_fused_dz {
    lli_cuda_tiles tiles;
    lli_cuda_dz dz;
    int32_t want_gamma; /* a row's gamma may be other than 0 */
    uint32_t zero;      /* 0, which the compiler does not know */
} lli_cuda_fused_dz;
LLI_C int lli_cuda_fused_dz_launch(const lli_cuda_fused_dz *args, cudaStream_t stream);
LLI_C int lli_cuda_load_fused_dz(void);

/* dz_kept.cu: the same from what was kept, for columns below 64 n_tiles. */
LLI_C int lli_cuda_kept_dz_launch(const lli_cuda_kept *kept, const lli_cuda_dz *dz, cudaStream_t stream);
LLI_C int lli_cuda_load_kept_dz(void);

#endif
