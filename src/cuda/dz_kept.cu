/* Gradients of logits from the exponentials that the forward kept (fused.h, lli_cuda_kept), in bf16, once the rows'
 * coefficients are known. Bound by memory: 2 bytes in and 2 out a logit, 4 for a row and canonical tile.
 *
 *   a block     16 rows, 16 canonical tiles: 1024 columns; its 256 factors of rows and tiles first, in shared memory
 *   a warp      four tiles of a row at a time: 512 bytes, eight lanes a tile
 *   a lane      columns 8 j to 8 j + 7 of its tile: a pair of each of the quad's four lanes, 4 bytes each, whose
 *               sectors its neighbours use up; it writes 16 bytes */
#define LLI_CALLS /* core functions for rows that are apart: called, not in line eight times */
#include "cuda/dz.cuh"

#include <cuda_bf16.h>

enum { kThreads = 256, kRows = 16, kTiles = 16, kWarps = kThreads / 32, kTilesOfWarp = 4 };
enum { kSteps = kRows * kTiles / kTilesOfWarp / kWarps }; /* of a warp, all on their way at once */

static_assert(kThreads == kRows * kTiles, "a thread makes a factor");

typedef struct kept_shared {
    dz_row rows[kRows];
    dz_factor factors[kRows][kTiles];
    int32_t anchors[kRows][kTiles]; /* of rows that are apart */
} kept_shared;

/* A lane's place in step s of its warp. */
typedef struct place {
    int row, tile; /* of the block */
} place;

static __device__ inline place place_of(int step) {
    const int of_block = (threadIdx.x / 32 * kSteps + step), quads = kTiles / kTilesOfWarp;
    return (place){of_block / quads, of_block % quads * kTilesOfWarp + (int)(threadIdx.x % 32 / 8)};
}

static __device__ __noinline__ float apart(const dz_row *row, const int32_t *anchor, float p) {
    return apart_dz_from(row, *anchor, p);
}

/* Eight neighbouring dz from four pairs. */
static __device__ inline uint4 eight(const dz_row *row, const dz_factor *factor, const int32_t *anchor,
                                     const uint32_t *pairs, int32_t column) {
    uint32_t out[4];
#pragma unroll
    for (int q = 0; q < 4; q++) {
        const float p[2] = {exp16_low(pairs[q]), exp16_high(pairs[q])};
        float dz[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            if (row->apart) {
                dz[e] = apart(row, anchor, p[e]);
            } else if (row->gamma != 0.0f) {
                dz[e] = dz_from<true>(factor, row, p[e]);
            } else {
                dz[e] = dz_from<false>(factor, row, p[e]);
            }
            if (row->target == column + 2 * q + e) dz[e] = row->target_dz;
        }
        const __nv_bfloat162 pair = __floats2bfloat162_rn(dz[0], dz[1]);
        out[q] = row->dead ? 0u : *(const uint32_t *)&pair;
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
}

static __global__ void __launch_bounds__(kThreads, 3)
    kept_dz(const __grid_constant__ lli_cuda_kept kept, const __grid_constant__ lli_cuda_dz args) {
    __shared__ kept_shared shared;
    const int64_t first = (int64_t)blockIdx.y * kRows;
    const int32_t first_tile = (int32_t)blockIdx.x * kTiles, n_tiles = (int32_t)(args.padded_cols / kTileCols);
    const int32_t of_all = (int32_t)(args.column / kTileCols) + first_tile; /* the chunk's number of first_tile */
    int32_t anchor = 0;
    const int factor_row = threadIdx.x % kRows, factor_tile = threadIdx.x / kRows;
    if (first_tile + factor_tile < n_tiles && first + factor_row < args.n_rows) {
        anchor = kept.anchors[(of_all + factor_tile) * kept.n_rows + first + factor_row];
    }
    uint32_t pairs[kSteps][4];
#pragma unroll
    for (int step = 0; step < kSteps; step++) {
        const place at = place_of(step);
        const bool there = first_tile + at.tile < n_tiles && first + at.row < args.n_rows;
        const uint16_t *rows = there ? kept_tile(&kept, of_all + at.tile) : NULL;
        const uint32_t *from = (const uint32_t *)(rows + (first + at.row) * kTileCols) + threadIdx.x % 8;
#pragma unroll
        for (int q = 0; q < 4; q++) pairs[step][q] = rows ? __ldcs(from + 8 * q) : 0u;
    }
    if (threadIdx.x < kRows) load_row(&args, first + threadIdx.x, &shared.rows[threadIdx.x]);
    __syncthreads(); /* rows are there for the factors */
    shared.factors[factor_row][factor_tile] = factor_of(&shared.rows[factor_row], anchor);
    shared.anchors[factor_row][factor_tile] = anchor;
    __syncthreads(); /* and those for every warp */
#pragma unroll
    for (int step = 0; step < kSteps; step++) {
        const place at = place_of(step);
        if (first_tile + at.tile >= n_tiles || first + at.row >= args.padded_rows) continue;
        const int32_t column = (first_tile + at.tile) * kTileCols + 8 * (int)(threadIdx.x % 8);
        uint16_t *to = (uint16_t *)args.dz + (first + at.row) * args.dz_ld + column;
        *(uint4 *)to = eight(&shared.rows[at.row], &shared.factors[at.row][at.tile],
                             &shared.anchors[at.row][at.tile], pairs[step], column);
    }
}

extern "C" int lli_cuda_kept_dz_launch(const lli_cuda_kept *kept, const lli_cuda_dz *dz, cudaStream_t stream) {
    const dim3 grid((unsigned)blocks_for(dz->padded_cols, (int)kTiles * (int)kTileCols),
                    (unsigned)blocks_for(dz->padded_rows, kRows));
    return launch(kept_dz, grid, dim3(kThreads), 0, stream, *kept, *dz);
}

extern "C" int lli_cuda_load_kept_dz(void) {
    cudaFuncAttributes a;
    return (int)cudaFuncGetAttributes(&a, kept_dz);
}
