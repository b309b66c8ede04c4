/* How the kernels of fused.h use the product: their tile, its grid, and what all of them do with a tile of
 * raw logits that lies in a warpgroup's registers as wgmma leaves it.
 *
 *   a lane       four rows: r = 2 half + h is row 64 half + 16 warp + 8 h + lane / 4; of each, 16 columns of
 *                every canonical tile
 *   four lanes   a quad, which holds four rows together */
#ifndef LLI_CUDA_SM90_TILES_CUH
#define LLI_CUDA_SM90_TILES_CUH

#include "cuda/device.cuh"
#include "cuda/fused.h"
#include "cuda/ptx/max_nan.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/sm90_product.cuh"

typedef product_tile<kFusedCols, 5, true> fused_tile;

enum {
    kHalfSums = kFusedCols / 2,
    kTilesOfWorker = (int)kFusedCols / (int)kTileCols,
    kReadingWarps = 8,
    kSlowDepth = 64 /* steps of k behind which slow arithmetic hides (sm90_statistics.cuh): at 64, 3 % faster
                       than fast ones; at 32, 2 % slower */
};

typedef float tile_logits[2][kHalfSums];

/* The boxes that the host describes are those that a stage holds. */
static_assert((int)kFusedRows == (int)kProductCluster * (int)kProductRows);
static_assert((int)kFusedMapRows == (int)kProductRows && (int)kFusedMapDepth == (int)kProductDepth);
static_assert((int)kFusedMapCols == (int)kFusedCols / (int)kProductCluster);

static __device__ inline product_grid grid_of(const lli_cuda_tiles *tiles) {
    return (product_grid){tiles->row_blocks, tiles->col_blocks, tiles->depth_blocks, tiles->group_rows};
}

/* The launch's number of the cluster's tile. */
static __device__ inline uint32_t tile_of(const lli_cuda_tiles *tiles, uint32_t tile) {
    return ptx_ctaid_x() / kProductCluster + tiles->clusters * tile;
}

static __device__ inline int this_lane(void) {
    return (int)(ptx_tid_x() % 32);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
/* All of a kernel: loads by the first warpgroup, products in turn by the two others, and of each tile
 * epilogue(z, first row, first column, the warp's memory). */
template <typename Shared, typename Epilogue>
static __device__ inline void for_tiles(const lli_cuda_tiles *tiles, Shared *shared, Epilogue epilogue) {
    product_open(&shared->product);
    if (threadIdx.x < 128) {
        ptx_setmaxnreg_dec<kProducerRegisters>();
        const product_grid grid = grid_of(tiles);
        if (threadIdx.x == 0) {
            product_load(&shared->product, &tiles->x, &tiles->w, &grid);
        }
    } else {
        ptx_setmaxnreg_inc<kConsumerRegisters>();
        const uint32_t second = threadIdx.x / 128 - 1;
        tile_logits z;
        product_take_turns<fused_tile>(second);
        for (uint32_t tile = second; tile_of(tiles, tile) < tiles->row_blocks * tiles->col_blocks;
             tile += 2) {
            product_multiply<fused_tile>(&shared->product, tile, tiles->depth_blocks, 0, z);
            const product_grid grid = grid_of(tiles);
            const product_place place = product_place_of(&grid, tile_of(tiles, tile));
            const uint32_t block = place.row_block * kProductCluster + ptx_cluster_ctarank();
            epilogue(z, (int32_t)(block * kProductRows), (int32_t)(place.col_block * kFusedCols),
                     &shared->warps[ptx_tid_x() / 32 - 4]);
        }
    }
    product_close();
}
#endif

/* ---- Logits of a lane --------------------------------------------------------------------------- */

/* Element e of the pair j of the canonical tile `tile`, in row h of a half. */
static __device__ constexpr int logit_at(int tile, int j, int h, int e) {
    return 4 * (8 * tile + j) + 2 * h + e;
}

/* -inf where there is no column. */
static __device__ inline void mask_columns(tile_logits z, int32_t left, int lane) {
#pragma unroll
    for (int i = 0; i < kHalfSums; i++) {
        const bool real = 8 * (i / 4) + 2 * (lane % 4) + i % 2 < left;
#pragma unroll
        for (int half = 0; half < 2; half++) z[half][i] = real ? z[half][i] : -INFINITY;
    }
}

static __device__ inline float lane_max(const tile_logits z, int tile, int half, int h) {
    float m = ptx_max_nan_f32(z[half][logit_at(tile, 0, h, 0)], z[half][logit_at(tile, 0, h, 1)]);
#pragma unroll
    for (int j = 1; j < 8; j++) {
        m = ptx_max_nan_f32(
            m, ptx_max_nan_f32(z[half][logit_at(tile, j, h, 0)], z[half][logit_at(tile, j, h, 1)]));
    }
    return m;
}

static __device__ inline float quad_max(float m) {
    m = ptx_max_nan_f32(m, __shfl_xor_sync(0xffffffffu, m, 1));
    return ptx_max_nan_f32(m, __shfl_xor_sync(0xffffffffu, m, 2));
}

#endif
