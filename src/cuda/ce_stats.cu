/* Statistics of given logits for calls that ce_rows.cu does not take: rows off 16 bytes, label smoothing. The
 * same tiles by the same arithmetic (ce_tile.cuh), so the same bits.
 *
 *   a block       a part of a row: every gridDim.y-th step of kWarps stages
 *   a warp        a stage of 2048 columns: element by element, neighbouring lanes neighbouring columns, into
 *                 shared memory as f32; then a lane a tile
 *   then          lanes and warps are added up, and the part's state is written for finish.cu
 *
 * Shared memory: a tile has 65 floats, so that column v of 32 tiles lies in 32 banks. */
#include "cuda/ce_tile.cuh"
#include "cuda/lanes.cuh"

enum {
    kWarps = 4,
    kTileStride = kTileCols + 1,
    kStageCols = 32 * kTileCols,
    kGroup = 8,
    kAhead = 8 /* loads of a lane that are on their way at once */
};

typedef struct lane_state {
    lli_softmax sums;
    float max;
    int32_t argmax; /* lowest column of it; -1 before the first */
} lane_state;

struct staged_tile {
    const float *tile;
    __device__ inline void operator()(int q, float *z) const {
#pragma unroll
        for (int i = 0; i < kGroup; i++) z[i] = tile[q * kGroup + i];
    }
};

/* Columns [c0, c0 + 2048) of a row, -inf behind its end. */
template <typename E>
static __device__ inline void load_stage(const lli_cuda_ce *args, const E *row, int64_t c0, int lane,
                                         float *stage) {
#pragma unroll 1
    for (int step = 0; step < kStageCols / 32; step += kAhead) {
        float z[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; i++) {
            const int64_t c = c0 + (step + i) * 32 + lane;
            z[i] = c < args->v ? (float)row[c] : -INFINITY;
        }
#pragma unroll
        for (int i = 0; i < kAhead; i++) {
            const int at = (step + i) * 32 + lane;
            stage[at / kTileCols * kTileStride + at % kTileCols] = z[i];
        }
    }
}

static __device__ void note_max(const float *z, float zmax, int64_t column, lane_state *state) {
    if (!(zmax > state->max || (state->argmax < 0 && zmax == zmax))) return;
    int v = 0;
    while (z[v] != zmax) v++;
    state->max = zmax;
    state->argmax = (int32_t)column + v;
}

/* The lane's tile, whose first column is `column`. */
template <typename E, bool kEntropy>
static __device__ inline void gather_tile(const lli_cuda_ce *args, int64_t r, int64_t y, int64_t column,
                                          float *z, lli_cuda_row *out, lane_state *state) {
    const lli_cuda_finish *row = &args->row;
    const int64_t left = args->v - column;
    const int n = left < kTileCols ? (int)left : kTileCols;
    const staged_tile load = {z};
    if (row->transform.softcap != 0.0f || row->transform.temperature != 1.0f) {
        float slope;
        for (int v = 0; v < n; v++) z[v] = transformed(&row->transform, z[v], &slope);
    }
    const float zmax = tile_max<kGroup>(load);
    if (args->want_argmax) note_max(z, zmax, column, state);
    if (row->smoothing) {
        const float *cw = row->call.class_weight ? row->call.class_weight + column : NULL;
        tile_soft_sum<kGroup>(load, cw, n, &row->soft[r]);
    }
    const int64_t at = y - column;
    if (at < 0 || at >= kTileCols) {
        any_tile<E, kEntropy, kGroup>(load, zmax, &state->sums);
        return;
    }
    lli_softmax tile;
    lli_softmax_clear(&tile);
    out->z = z[at];
    out->has_target = 1;
    any_tile<E, kEntropy, kGroup>(load, zmax, &tile);
    out->whole = tile;
    lli_softmax_clear(&tile);
    z[at] = -INFINITY;
    any_tile<E, false, kGroup>(load, tile_max<kGroup>(load), &tile);
    out->rest = tile;
}

template <typename E, bool kEntropy>
static __global__ void __launch_bounds__(32 * kWarps, 4) stats(const __grid_constant__ lli_cuda_ce args) {
    __shared__ float tiles[kWarps * 32 * kTileStride];
    __shared__ lane_state of_warp[kWarps];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t r = blockIdx.x, i = args.row.first + r;
    const int64_t y = target_of(&args.row.targets, i);
    if (y < 0) return; /* ignored or bad: its state is not looked at */
    lli_cuda_row *out = &args.row.rows[blockIdx.y * args.row.row_stride + r];
    const E *row = (const E *)args.logits.data + i * args.logits.row_stride;
    float *stage = tiles + warp * 32 * kTileStride;
    lane_state state = {.max = -INFINITY, .argmax = -1};
    lli_softmax_clear(&state.sums);
    if (threadIdx.x == 0) out->has_target = 0;
    __syncthreads(); /* before the lane that meets the target sets it */
    const int64_t step = (int64_t)gridDim.y * kWarps * kStageCols;
    for (int64_t c0 = ((int64_t)blockIdx.y * kWarps + warp) * kStageCols; c0 < args.v; c0 += step) {
        load_stage<E>(&args, row, c0, lane, stage);
        __syncwarp(); /* the other lanes' columns are there */
        const int64_t column = c0 + lane * kTileCols;
        if (column < args.v) {
            gather_tile<E, kEntropy>(&args, r, y, column, stage + lane * kTileStride, out, &state);
        }
        __syncwarp(); /* every lane has read its tile before the next stage is written */
    }
    sum_lanes_softmax(&state.sums, kEntropy);
    max_lanes(&state.max, &state.argmax);
    if (lane == 0) of_warp[warp] = state;
    __syncthreads(); /* every warp's state */
    if (warp != 0) return;
    lli_softmax_clear(&state.sums);
    state.max = -INFINITY;
    state.argmax = -1;
    if (lane < kWarps) state = of_warp[lane];
    sum_lanes_softmax(&state.sums, kEntropy);
    max_lanes(&state.max, &state.argmax);
    if (lane != 0) return;
    out->others = state.sums;
    out->max = state.max;
    out->argmax = state.argmax;
}

typedef void stats_kernel(const lli_cuda_ce);

static stats_kernel *kernel_for(int32_t dtype, bool entropy) {
    if (dtype == LL_DTYPE_F32) return entropy ? stats<float, true> : stats<float, false>;
    if (dtype == LL_DTYPE_BF16) return entropy ? stats<__nv_bfloat16, true> : stats<__nv_bfloat16, false>;
    return entropy ? stats<__half, true> : stats<__half, false>;
}

extern "C" int lli_cuda_ce_stats_launch(const lli_cuda_ce *args, cudaStream_t stream) {
    const dim3 grid((unsigned)args->row.n_rows, (unsigned)args->row.parts);
    return launch(kernel_for(args->logits.dtype, args->row.want_entropy), grid, dim3(32 * kWarps), 0, stream,
                  *args);
}

extern "C" int lli_cuda_load_ce_stats(void) {
    static const int32_t dtypes[] = {LL_DTYPE_F32, LL_DTYPE_BF16, LL_DTYPE_F16};
    cudaFuncAttributes a;
    int status = 0;
    for (int i = 0; i < 6 && !status; i++) {
        status = (int)cudaFuncGetAttributes(&a, kernel_for(dtypes[i / 2], i % 2));
    }
    return status;
}
