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

/* grad_sm90.cu: the gradients' products of blocks of kSumCols columns, from dz in memory, bf16,
 *
 *   grad_x   of[0]   c [tokens, n_hidden] (+)= dz w       k: columns, block by block
 *   grad_w   of[1]   c [columns, n_hidden] (+)= dz^T x    k: tokens
 *
 * in tiles of 256 rows and 192 columns; where n_hidden is no multiple of 192, the last tile of a row is
 * narrower. n_hidden is a multiple of kGradBlock; beyond their rows operands are read as zeros. The columns
 * of grad_x are a multiple of 64 (the rest is a product of its own, work.h); those of grad_w need not be.
 *
 * The dz of block b are columns b % 2 * kSumCols on of the memory of dz. From block `ready` on the kernel
 * makes them itself, from what was kept: those of a block behind the products of the one before. */
enum {
    kGradBlock = 64,     /* an operand's elements along the index that is not k; of k, a stage */
    kGradRuns = 4,       /* wide and narrow tiles of both products */
    kGradHalfDepth = 32, /* of k, which a block of a cluster loads for both */
    kGradTileWarps = 8,  /* that write a tile, of both blocks */
    kKeptRows = 8,       /* of a piece of dz that is made from what was kept ... */
    kKeptTiles = 16      /* ... and its canonical tiles */
};

typedef enum lli_cuda_grad_form { kGradOverwrite, kGradAdd, kGradNarrow } lli_cuda_grad_form;

typedef struct lli_cuda_grad_product {
    CUtensorMap a, b;
    void *c; /* f32, or bf16 where the form is kGradNarrow */
    int64_t c_ld, n_rows;
    uint32_t group_rows;
    int32_t form; /* of grad_x's first block; it adds the others */
} lli_cuda_grad_product;

/* Tiles of equal cost; a block's runs are one behind the other. */
typedef struct lli_cuda_grad_run {
    uint32_t of_w;              /* 0: of grad_x */
    uint32_t tiles, row_blocks; /* row_blocks of 256 */
    uint32_t first_col, n_cols; /* in 192 columns */
    uint32_t width;             /* of a tile, in kGradBlock */
} lli_cuda_grad_run;

typedef struct lli_cuda_grad_block {
    lli_cuda_grad_run runs[kGradRuns];
    uint32_t tiles, x_tiles; /* of all runs, of grad_x */
    uint32_t depth[2];       /* stages of a tile, by product */
    uint32_t pieces;         /* of dz to be made */
} lli_cuda_grad_block;

typedef struct lli_cuda_grad_products {
    lli_cuda_grad_product of[2];
    lli_cuda_grad_block block, last; /* all but the last are alike */
    uint32_t n_blocks, ready, clusters;
    lli_cuda_grad_queue *queue;
    lli_cuda_kept kept; /* used where ready < n_blocks */
    lli_cuda_dz dz;     /* of block 0 */
} lli_cuda_grad_products;
LLI_C int lli_cuda_grad_launch(const lli_cuda_grad_products *args, cudaStream_t stream);
LLI_C int lli_cuda_load_grad(void);

/* The tiles of a block of n_cols columns; grad_x has whole ones of 64 only. The costliest are first, so that
 * clusters end at about one time. */
static inline lli_cuda_grad_block lli_cuda_grad_block_of(int64_t n_tokens, int64_t n_cols, int64_t n_hidden,
                                                         int want_x, int want_w) {
    const uint32_t wide = (uint32_t)(n_hidden / kFusedCols),
                   width = (uint32_t)(n_hidden % kFusedCols / kGradBlock);
    const int64_t rows[2] = {want_x && n_cols >= kTileCols ? n_tokens : 0, want_w ? n_cols : 0};
    lli_cuda_grad_block block;
    block.depth[0] = (uint32_t)(n_cols / kTileCols);
    block.depth[1] = (uint32_t)((n_tokens + kGradBlock - 1) / kGradBlock);
    block.tiles = block.x_tiles = 0;
    for (uint32_t i = 0; i < kGradRuns; i++) {
        const uint32_t of_w = i % 2 ^ (block.depth[1] > block.depth[0]), narrow = i / 2;
        lli_cuda_grad_run *run = &block.runs[i];
        run->of_w = of_w;
        run->row_blocks = (uint32_t)((rows[of_w] + kFusedRows - 1) / kFusedRows);
        run->first_col = narrow ? wide : 0;
        run->n_cols = narrow ? width > 0 : wide;
        run->width = narrow ? width : (uint32_t)kFusedCols / (uint32_t)kGradBlock;
        run->tiles = run->row_blocks * run->n_cols;
        block.tiles += run->tiles;
        if (!of_w) block.x_tiles += run->tiles;
    }
    const uint32_t of_rows = kGradBlock, piece_rows = kKeptRows,
                   piece_cols = (uint32_t)kKeptTiles * (uint32_t)kTileCols;
    block.pieces =
        block.depth[1] * (of_rows / piece_rows) * (uint32_t)((n_cols + piece_cols - 1) / piece_cols);
    return block;
}

#endif
