/* Statistics of rows from a block of f32 logits: the integer softmax of core/softmax.h, largest logit, and
 * the sum that label smoothing needs. The same operations in the same order as src/cpu/micro_row.h, so equal
 * logits give equal bits.
 *
 *   a warp         one row, 2048 columns at a time: cp.async into shared memory, 512 contiguous bytes a step
 *   a lane         one canonical tile of 64 columns: maximum, then 2^d on the integer grid
 *   then           lanes are added up by shuffles, and into the row's state in global memory by lane 0
 *
 * Shared memory: a tile has 68 floats, so that the 16-byte reads of 8 lanes at a stride of 272 bytes touch
 * every bank once. Nothing is shared between warps, so there are no block barriers. */
#include "cuda/lanes.cuh"
#include "cuda/ptx/max_nan.cuh"

#include <cuda_pipeline_primitives.h>

enum {
    kWarps = 2, /* of a block: few, so that a multiprocessor is refilled in small steps */
    kLanes = 32,
    kTileStride = kTileCols + 4,
    kStageCols = kLanes * kTileCols
};

typedef struct stats_row {
    lli_softmax sums;
    float max;
    int32_t max_tile; /* first column of the tile with the largest logit, in the block; -1: none */
} stats_row;

/* ---- One tile ----------------------------------------------------------------------------------- */

template <bool kEntropy>
static __device__ inline void tile_sums(const float *z, float zmax, lli_softmax *row) {
    if (zmax == -INFINITY) return;
    if (!(fabsf(zmax) < LLI_Z_FLOAT)) {
        lli_softmax_tile(row, z, kTileCols, zmax);
        return;
    }
    const float k = lli_softmax_anchor(zmax);
    uint64_t s = 0, u = 0;
#pragma unroll 4
    for (int q = 0; q < kTileCols / 4; q++) {
        const float4 x = ((const float4 *)z)[q];
        uint32_t s4[4], u4[4];
        grid_terms<kEntropy>(x.x, -k, &s4[0], &u4[0]);
        grid_terms<kEntropy>(x.y, -k, &s4[1], &u4[1]);
        grid_terms<kEntropy>(x.z, -k, &s4[2], &u4[2]);
        grid_terms<kEntropy>(x.w, -k, &s4[3], &u4[3]);
        /* terms of s are at most 2^30 and of u at most 0.54 2^30: a pair, and four, fit 32 bits */
        s += s4[0] + s4[1];
        s += s4[2] + s4[3];
        if (kEntropy) u += u4[0] + u4[1] + u4[2] + u4[3];
    }
    lli_softmax_add(row, (int32_t)k, (int64_t)s, (int64_t)u);
}

static __device__ inline float tile_max(const float *z) {
    float m = -INFINITY;
#pragma unroll 4
    for (int q = 0; q < kTileCols / 4; q++) {
        const float4 x = ((const float4 *)z)[q];
        m = ptx_max_nan_f32(ptx_max_nan_f32(m, ptx_max_nan_f32(x.x, x.y)), ptx_max_nan_f32(x.z, x.w));
    }
    return m;
}

/* Bias, softcap and temperature, in place; c: the tile's first column in the block. */
static __device__ void to_logits(const lli_cuda_stats *args, int64_t c, float *z) {
    float slope;
    for (int v = 0; v < kTileCols; v++) {
        float raw = z[v];
        if (args->bias) raw = raw + args->bias[c + v];
        z[v] = logit_of(&args->transform, raw, &slope);
    }
}

/* sum += sum_v cw[v] z_v on a grid of 2^-30 of the tile's largest magnitude; cw = 0 takes the column out. */
static __device__ void tile_soft_sum(const float *z, const float *class_weight, int n, lli_exact *sum) {
    float largest = 0.0f;
    for (int v = 0; v < n; v++) {
        const float cw = class_weight ? class_weight[v] : 1.0f, x = cw == 0.0f ? 0.0f : cw * z[v];
        largest = largest > fabsf(x) ? largest : fabsf(x);
    }
    if (largest == 0.0f) return;
    if (!(largest < INFINITY)) {
        for (int v = 0; v < n; v++) {
            const float cw = class_weight ? class_weight[v] : 1.0f, x = cw == 0.0f ? 0.0f : cw * z[v];
            if (!(fabsf(x) < INFINITY)) exact_add_parts(sum, lli_exact_split_f32(x));
        }
        return;
    }
    int32_t exponent = (int32_t)(lli_bits(largest) >> 23) - 126;
    if (exponent < -90) exponent = -90;
    const int32_t half = (30 - exponent) / 2;
    const float low = lli_float((uint32_t)(half + 127) << 23);
    const float high = lli_float((uint32_t)(30 - exponent - half + 127) << 23);
    int64_t total = 0;
    for (int v = 0; v < n; v++) {
        const float cw = class_weight ? class_weight[v] : 1.0f, x = cw == 0.0f ? 0.0f : cw * z[v];
        total += __float2int_rn(x * low * high);
    }
    exact_add_parts(sum, lli_exact_split(total, exponent - 30));
}

/* ---- One row ------------------------------------------------------------------------------------ */

/* The lane's tile, columns [c, c + 64) of the block, in z. */
template <bool kEntropy, bool kPlain>
static __device__ inline void gather_tile(const lli_cuda_stats *args, int64_t r, int64_t y, int64_t c,
                                          float *z, lli_cuda_row *out, stats_row *row) {
    const int64_t column = args->column + c, left = args->n_cols - c;
    const int n = left < kTileCols ? (int)left : kTileCols;
    if (!kPlain) to_logits(args, c, z);
    for (int v = n; v < kTileCols; v++) z[v] = -INFINITY;
    const float zmax = tile_max(z);
    if (zmax > row->max || (row->max_tile < 0 && zmax == zmax)) {
        row->max = zmax;
        row->max_tile = (int32_t)c;
    }
    if (!kPlain && args->soft) {
        tile_soft_sum(z, args->class_weight ? args->class_weight + column : NULL, n, &args->soft[r]);
    }
    const int64_t at = y - column;
    if (at < 0 || at >= kTileCols) {
        tile_sums<kEntropy>(z, zmax, &row->sums);
        return;
    }
    lli_softmax tile;
    lli_softmax_clear(&tile);
    out->z = z[at];
    out->has_target = 1;
    tile_sums<kEntropy>(z, zmax, &tile);
    out->whole = tile;
    lli_softmax_clear(&tile);
    z[at] = -INFINITY;
    tile_sums<false>(z, tile_max(z), &tile);
    out->rest = tile;
}

/* The lowest column of the tile whose logit is the row's largest. */
static __device__ inline int32_t find_max(const lli_cuda_stats *args, const float *logits, int lane,
                                          const stats_row *row) {
    int32_t at = kTileCols;
    for (int i = 1; i >= 0; i--) {
        const int64_t c = row->max_tile + 2 * lane + i;
        if (row->max_tile < 0 || c >= args->n_cols) continue;
        float slope, raw = logits[c];
        if (args->bias) raw = raw + args->bias[c];
        if (logit_of(&args->transform, raw, &slope) == row->max) at = 2 * lane + i;
    }
    for (int mask = kLanes / 2; mask > 0; mask /= 2) {
        const int32_t other = __shfl_xor_sync(0xffffffffu, at, mask);
        at = other < at ? other : at;
    }
    return at;
}

/* Starts to copy the row's next 2048 columns, of which `readable` are there: a half-warp a tile, two tiles a
 * step. */
static __device__ inline void load_stage(const float *logits, int64_t readable, int lane, float *stage) {
    const float *from = logits + 4 * lane;
    float *to = stage + lane / 16 * kTileStride + 4 * (lane % 16);
    if (readable >= kStageCols) {
#pragma unroll
        for (int step = 0; step < kLanes / 2; step++) {
            __pipeline_memcpy_async(to + 2 * step * kTileStride, from + 2 * step * kTileCols, 16);
        }
    } else {
        for (int step = 0; step < kLanes / 2; step++) {
            if (2 * step * kTileCols + 4 * lane >= readable) break;
            __pipeline_memcpy_async(to + 2 * step * kTileStride, from + 2 * step * kTileCols, 16);
        }
    }
}

/* The state that the row's sums will be added to, eight bytes a lane: fetched while the logits are on their
 * way. */
static __device__ inline void load_state(const lli_softmax *from, int lane, lli_softmax *to) {
    if (lane * 8 < (int)sizeof *from) {
        __pipeline_memcpy_async((char *)to + 8 * lane, (const char *)from + 8 * lane, 8);
    }
}

template <bool kEntropy, bool kPlain>
static __global__ void __launch_bounds__(32 * kWarps, 12) stats(const __grid_constant__ lli_cuda_stats args) {
    __shared__ __align__(16) float tiles[kWarps * kLanes * kTileStride];
    __shared__ lli_softmax states[kWarps];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t r = (int64_t)blockIdx.x * kWarps + warp;
    if (r >= args.n_rows) return; /* a whole warp */
    lli_cuda_row *out = &args.rows[blockIdx.y * args.row_stride + r];
    float *stage = tiles + warp * kLanes * kTileStride;
    const float *logits = args.logits + r * args.ld;
    const int64_t readable = (args.n_cols + kTileCols - 1) / kTileCols * kTileCols;
    const int64_t begin = (int64_t)blockIdx.y * kStageCols, step = (int64_t)gridDim.y * kStageCols;
    /* Before the target is known, whose address takes as long to come: an ignored row is read in vain. */
    if (begin < args.n_cols) load_stage(logits + begin, readable - begin, lane, stage);
    if (!args.fresh) load_state(&out->others, lane, &states[warp]);
    __pipeline_commit();
    const int64_t y = target_of(&args.targets, args.first + r);
    if (y < 0) { /* ignored or bad: its state is not looked at */
        __pipeline_wait_prior(0);
        return;
    }
    stats_row row = {.max = -INFINITY, .max_tile = -1};
    lli_softmax_clear(&row.sums);
    if (args.fresh && lane == 0) out->has_target = 0;
    __syncwarp(); /* before the lane that meets the target sets it */
    for (int64_t c0 = begin; c0 < args.n_cols; c0 += step) {
        if (c0 > begin) {
            load_stage(logits + c0, readable - c0, lane, stage);
            __pipeline_commit();
        }
        __pipeline_wait_prior(0);
        __syncwarp(); /* the other lanes' copies have landed too */
        const int64_t c = c0 + lane * kTileCols;
        if (c < args.n_cols) {
            gather_tile<kEntropy, kPlain>(&args, r, y, c, stage + lane * kTileStride, out, &row);
        }
        __syncwarp(); /* every lane has read its tile before the next stage is written */
    }
    /* A part beyond a short last block has gone round no loop: without this its state would not have landed.
     */
    __pipeline_wait_prior(0);
    __syncwarp(); /* lane 0 reads what seven lanes fetched */
    sum_lanes_softmax(&row.sums, kEntropy);
    if (args.want_argmax) max_lanes(&row.max, &row.max_tile);
    const int32_t at = args.want_argmax ? find_max(&args, logits, lane, &row) : 0;
    if (lane != 0) return;
    const bool found = args.want_argmax && row.max_tile >= 0;
    const int64_t argmax = found ? args.column + row.max_tile + at : -1;
    if (!args.fresh) {
        lli_softmax_merge(&row.sums, &states[warp]);
        out->others = row.sums;
        if (found && (out->argmax < 0 || row.max > out->max)) { /* blocks come in ascending order */
            out->max = row.max;
            out->argmax = argmax;
        }
    } else {
        out->others = row.sums;
        out->max = row.max;
        out->argmax = argmax;
    }
}

extern "C" int lli_cuda_stats_launch(const lli_cuda_stats *args, cudaStream_t stream) {
    const bool plain =
        !args->bias && !args->soft && args->transform.softcap == 0.0f && args->transform.temperature == 1.0f;
    const dim3 grid((unsigned)blocks_for(args->n_rows, kWarps), (unsigned)args->parts), block(32 * kWarps);
    if (plain && args->want_entropy) return launch(stats<true, true>, grid, block, 0, stream, *args);
    if (plain) return launch(stats<false, true>, grid, block, 0, stream, *args);
    if (args->want_entropy) return launch(stats<true, false>, grid, block, 0, stream, *args);
    return launch(stats<false, false>, grid, block, 0, stream, *args);
}

extern "C" int lli_cuda_load_stats(void) {
    cudaFuncAttributes a;
    int status = (int)cudaFuncGetAttributes(&a, stats<true, true>);
    if (!status) status = (int)cudaFuncGetAttributes(&a, stats<false, true>);
    if (!status) status = (int)cudaFuncGetAttributes(&a, stats<true, false>);
    return status ? status : (int)cudaFuncGetAttributes(&a, stats<false, false>);
}
