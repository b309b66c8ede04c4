/* Gradients of logits from the exponentials that the forward kept (fused.h, lli_cuda_kept), in bf16, once the
 * rows' coefficients are known. Bound by memory: 2 bytes in and 2 out a logit, 4 for a row and canonical
 * tile.
 *
 *   a block     8 rows, 16 canonical tiles: 1024 columns. Its 128 factors of rows and tiles are made while
 *               the exponentials are on their way. Small, because a block loads, waits and writes: six of a
 *               multiprocessor are at different places
 *   a warp      four of the tiles; a row of them at a time, 512 bytes
 *   a lane      columns 8 j to 8 j + 7 of a tile: 4 bytes of what each lane of the quad kept, in sectors
 *               that its neighbours use up; it writes 16 bytes */
#define LLI_CALLS /* core functions, which rows that are apart need: called, not in line */
#include "cuda/dz.cuh"

#include <cuda_bf16.h>

enum {
    kThreads = 128,
    kRows = 8,
    kTiles = 16,
    kWarpTiles = 4,
    kGridRows = 65535 /* blocks that a grid has in its second dimension; more go to the third */
};

static_assert(kThreads == kRows * kTiles, "a thread makes a factor");
static_assert(kThreads / 32 * kWarpTiles == kTiles, "warps cover the block");

typedef struct kept_shared {
    dz_row rows[kRows];
    dz_factor factors[kRows][kTiles];
    int32_t anchors[kRows][kTiles]; /* for rows that are apart */
} kept_shared;

static __device__ inline float slow_dz(const dz_row *row, const dz_factor *factor, int32_t anchor, float p) {
    return row->apart ? apart_dz_from(row, anchor, p) : dz_from<true>(factor, row, p);
}

/* Eight dz of a row that is apart, or has a gradient of its entropy. */
static __device__ __noinline__ uint4 slow_eight(const dz_row *row, const dz_factor *factor, int32_t anchor,
                                                uint4 pairs) {
    uint32_t words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
    for (int q = 0; q < 4; q++) {
        words[q] = bf16_pair(slow_dz(row, factor, anchor, exp16_low(words[q])),
                             slow_dz(row, factor, anchor, exp16_high(words[q])));
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

static __global__ void __launch_bounds__(kThreads, 6)
    kept_dz(const __grid_constant__ lli_cuda_kept kept, const __grid_constant__ lli_cuda_dz args) {
    __shared__ kept_shared shared;
    const int64_t first = ((int64_t)blockIdx.z * gridDim.y + blockIdx.y) * kRows;
    const int32_t first_tile = (int32_t)blockIdx.x * kTiles,
                  n_tiles = (int32_t)(args.padded_cols / kTileCols);
    const int32_t of_all =
        (int32_t)(args.column / kTileCols) + first_tile; /* the chunk's number of first_tile */
    const int32_t n_rows = args.n_rows - first < kRows ? (int32_t)(args.n_rows - first) : (int32_t)kRows;
    const int32_t padded = args.padded_rows - first < kRows ? (int32_t)(args.padded_rows - first)
                                                            : (int32_t)kRows; /* both may be below 0 */
    int32_t anchor = 0;
    const int factor_row = threadIdx.x % kRows, factor_tile = threadIdx.x / kRows;
    if (first_tile + factor_tile < n_tiles && factor_row < n_rows) {
        anchor = kept.anchors[(of_all + factor_tile) * kept.n_rows + first + factor_row];
    }
    const int tile = threadIdx.x / 8, j = threadIdx.x % 8;
    const bool there = first_tile + tile < n_tiles;
    const uint16_t *codes = there ? kept_tile(&kept, of_all + tile) + first * kTileCols : NULL;
    uint4 pairs[kRows];
#pragma unroll
    for (int r = 0; r < kRows; r++) {
        const uint32_t *from = (const uint32_t *)codes + r * (kTileCols / 2) + j;
        pairs[r] = make_uint4(0, 0, 0, 0);
        if (there && r < n_rows) {
            pairs[r] = make_uint4(__ldcs(from), __ldcs(from + 8), __ldcs(from + 16), __ldcs(from + 24));
        }
    }
    if (threadIdx.x < kRows) load_row(&args, first + threadIdx.x, &shared.rows[threadIdx.x]);
    __syncthreads(); /* rows are there for the factors */
    shared.factors[factor_row][factor_tile] = factor_of(&shared.rows[factor_row], anchor);
    shared.anchors[factor_row][factor_tile] = anchor;
    __syncthreads(); /* and those for every warp */
    const int32_t column = (first_tile + tile) * kTileCols + 8 * j;
    uint16_t *to = (uint16_t *)args.dz + first * args.dz_ld + column;
#pragma unroll
    for (int r = 0; r < kRows; r++, to += args.dz_ld) {
        if (!there || r >= padded) break;
        const dz_row *row = &shared.rows[r];
        const dz_factor factor = shared.factors[r][tile];
        const int32_t target = row->target - column;
        *(uint4 *)to = row->apart || row->gamma != 0.0f
                           ? slow_eight(row, &factor, shared.anchors[r][tile], pairs[r])
                           : fast_eight(row, &factor, pairs[r]);
        if ((uint32_t)target < 8) { /* by the same lane, so after it */
            const __nv_bfloat16 dz = __float2bfloat16_rn(row->target_dz);
            to[target] = *(const uint16_t *)&dz;
        }
    }
}

extern "C" int lli_cuda_kept_dz_launch(const lli_cuda_kept *kept, const lli_cuda_dz *dz,
                                       cudaStream_t stream) {
    const int64_t rows = blocks_for(dz->padded_rows, kRows), layers = blocks_for(rows, kGridRows);
    const dim3 grid((unsigned)blocks_for(dz->padded_cols, (int)kTiles * (int)kTileCols),
                    (unsigned)blocks_for(rows, layers), (unsigned)layers);
    return launch(kept_dz, grid, dim3(kThreads), 0, stream, *kept, *dz);
}

extern "C" int lli_cuda_load_kept_dz(void) {
    cudaFuncAttributes a;
    return (int)cudaFuncGetAttributes(&a, kept_dz);
}
