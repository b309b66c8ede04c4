/* Statistics of rows from a block of f32 logits: the integer softmax of core/softmax.h, largest logit, and the sum
 * that label smoothing needs. The same operations in the same order as src/cpu/micro_row.h, so equal logits give
 * equal bits.
 *
 *   a half-warp    one row, 1024 columns at a time: cp.async into shared memory, 256 contiguous bytes a step
 *   a lane         one canonical tile of 64 columns: maximum, then 2^d on the integer grid
 *   then           lanes are merged by shuffles, and the row's state in global memory by lane 0
 *
 * Shared memory: a tile has 68 floats, so that the 16-byte reads of 8 lanes at a stride of 272 bytes touch every
 * bank once. Nothing is shared between warps, so there are no block barriers. A row that is ignored is not read. */
#include "cuda/device.cuh"
#include "cuda/ptx/max_nan.cuh"

#include <cuda_pipeline_primitives.h>

enum {
    kWarps = 4,
    kLanes = 16, /* of a row */
    kTileStride = kTileCols + 4,
    kStageCols = kLanes * kTileCols
};

typedef struct stats_row {
    lli_softmax sums;
    float max;
    int32_t max_tile; /* first column of the tile with the largest logit, in the block; -1: none */
} stats_row;

/* ---- One tile ----------------------------------------------------------------------------------- */

/* 2^30 p and 2^30 p (-d) of two logits: each is at most 2^30, so a pair fits 32 bits. */
template <bool kEntropy>
static __device__ inline void add_pair(float z0, float z1, float minus_k, uint64_t *s, uint64_t *u) {
    uint32_t s2 = 0, u2 = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float z = i ? z1 : z0;
        const float d = fmaxf(fmaf(z, LLI_LOG2E_LO, fmaf(z, LLI_LOG2E_HI, minus_k)), -64.0f);
        const float shifted = d + 0x1.8p23f; /* rint(d) in the low bits */
        const float f = d - (shifted - 0x1.8p23f);
        const float p = fmaf(exp2_quotient(f), f, 1.0f);
        /* times 2^(rint(d) + 30) by the exponent field: the product is normal and exact */
        const float scaled =
            __uint_as_float(__float_as_uint(p) + (__float_as_uint(shifted) << 23) + ((uint32_t)kGridBits << 23));
        s2 += __float2uint_rn(scaled);
        if (kEntropy) u2 += __float2uint_rn(scaled * -d);
    }
    *s += s2;
    if (kEntropy) *u += u2;
}

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
        add_pair<kEntropy>(x.x, x.y, -k, &s, &u);
        add_pair<kEntropy>(x.z, x.w, -k, &s, &u);
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

/* Bias, softcap and temperature, in place. */
static __device__ void to_logits(const lli_cuda_stats *args, int64_t column, float *z) {
    float slope;
    for (int v = 0; v < kTileCols; v++) {
        float raw = z[v];
        if (args->bias) raw = raw + args->bias[column + v];
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
static __device__ inline void gather_tile(const lli_cuda_stats *args, int64_t r, int64_t y, int64_t c, float *z,
                                          lli_cuda_row *out, stats_row *row) {
    const int64_t column = args->column + c, left = args->n_cols - c;
    const int n = left < kTileCols ? (int)left : kTileCols;
    if (!kPlain) to_logits(args, column, z);
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

static __device__ inline int64_t shuffle64(int64_t value, int mask) {
    return (int64_t)__shfl_xor_sync(0xffffffffu, (unsigned long long)value, mask);
}

/* Every lane of the row gets the merge of all; integers, so the order does not matter. */
static __device__ inline void merge_lanes(stats_row *row) {
#pragma unroll 1
    for (int mask = kLanes / 2; mask > 0; mask /= 2) {
        lli_softmax other;
#pragma unroll
        for (int i = 0; i < 3; i++) {
            other.s[i] = shuffle64(row->sums.s[i], mask);
            other.u[i] = shuffle64(row->sums.u[i], mask);
        }
        other.top = __shfl_xor_sync(0xffffffffu, row->sums.top, mask);
        lli_softmax_merge(&row->sums, &other);
        const float max = __shfl_xor_sync(0xffffffffu, row->max, mask);
        const int32_t tile = __shfl_xor_sync(0xffffffffu, row->max_tile, mask);
        if (tile >= 0 && (row->max_tile < 0 || max > row->max || (max == row->max && tile < row->max_tile))) {
            row->max = max;
            row->max_tile = tile;
        }
    }
}

/* The lowest column of the tile whose logit is the row's largest. */
static __device__ inline int32_t find_max(const lli_cuda_stats *args, const float *logits, int lane,
                                          const stats_row *row) {
    int32_t at = kTileCols;
    for (int i = 3; i >= 0; i--) {
        const int64_t c = row->max_tile + 4 * lane + i;
        if (row->max_tile < 0 || c >= args->n_cols) continue;
        float slope, raw = logits[c];
        if (args->bias) raw = raw + args->bias[args->column + c];
        if (logit_of(&args->transform, raw, &slope) == row->max) at = 4 * lane + i;
    }
    for (int mask = kLanes / 2; mask > 0; mask /= 2) {
        const int32_t other = __shfl_xor_sync(0xffffffffu, at, mask);
        at = other < at ? other : at;
    }
    return at;
}

template <bool kEntropy, bool kPlain>
static __global__ void __launch_bounds__(32 * kWarps, 6)
    stats(const __grid_constant__ lli_cuda_stats args) {
    __shared__ __align__(16) float tiles[kWarps * 2 * kLanes * kTileStride];
    const int warp = threadIdx.x / 32, half = threadIdx.x % 32 / kLanes, lane = threadIdx.x % kLanes;
    const int64_t r = ((int64_t)blockIdx.x * kWarps + warp) * 2 + half;
    const int64_t y = r < args.n_rows ? target_of(&args.targets, args.first + r) : kIgnored;
    const bool active = y >= 0;
    float *stage = tiles + (warp * 2 + half) * kLanes * kTileStride;
    const float *logits = args.logits + r * args.ld;
    lli_cuda_row *out = &args.rows[blockIdx.y * args.row_stride + r];
    stats_row row = {.max = -INFINITY, .max_tile = -1};
    lli_softmax_clear(&row.sums);
    if (active && args.fresh && lane == 0) out->has_target = 0;
    __syncwarp(); /* before the lane that meets the target sets it */
    const int64_t readable = (args.n_cols + kTileCols - 1) / kTileCols * kTileCols;
    for (int64_t c0 = (int64_t)blockIdx.y * kStageCols; c0 < args.n_cols; c0 += (int64_t)gridDim.y * kStageCols) {
        for (int tile = 0; active && tile < kLanes; tile++) {
            const int64_t c = c0 + tile * kTileCols;
            if (c < readable) {
                __pipeline_memcpy_async(stage + tile * kTileStride + 4 * lane, logits + c + 4 * lane, 16);
            }
        }
        __pipeline_commit();
        __pipeline_wait_prior(0);
        __syncwarp(); /* the other lanes' copies have landed too */
        const int64_t c = c0 + lane * kTileCols;
        if (active && c < args.n_cols) {
            gather_tile<kEntropy, kPlain>(&args, r, y, c, stage + lane * kTileStride, out, &row);
        }
        __syncwarp(); /* every lane has read its tile before the next stage is written */
    }
    merge_lanes(&row);
    const int32_t at = args.want_argmax ? find_max(&args, logits, lane, &row) : 0;
    if (!active || lane != 0) return;
    const bool found = args.want_argmax && row.max_tile >= 0;
    const int64_t argmax = found ? args.column + row.max_tile + at : -1;
    if (!args.fresh) {
        lli_softmax before = out->others;
        lli_softmax_merge(&before, &row.sums);
        out->others = before;
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
    const bool plain = !args->bias && !args->soft && args->transform.softcap == 0.0f &&
                       args->transform.temperature == 1.0f;
    const dim3 grid((unsigned)blocks_for(args->n_rows, 2 * kWarps), (unsigned)args->parts), block(32 * kWarps);
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
