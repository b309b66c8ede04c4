/* How the kernels of fused.h use the product: their tile, its grid, and the boxes that the host describes. */
#ifndef LLI_CUDA_SM90_TILES_CUH
#define LLI_CUDA_SM90_TILES_CUH

#include "cuda/fused.h"
#include "cuda/ptx/special.cuh"
#include "cuda/sm90_product.cuh"

typedef product_tile<kFusedCols, 5, true> fused_tile;

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

#endif
