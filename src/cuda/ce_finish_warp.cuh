/* The finish warp of ce_rows.cu: the target's tile; then, from the tile warps' records, the row's softmax and
 * the coefficients of its gradient, for which they wait; then its results, for which nobody does. Long
 * straight code that runs once a row: most of its time goes into fetching instructions. */
#ifndef LLI_CUDA_CE_FINISH_WARP_CUH
#define LLI_CUDA_CE_FINISH_WARP_CUH

#include "cuda/ce_tile.cuh"
#include "cuda/finish.cuh"
#include "cuda/lanes.cuh"
#include "cuda/ptx/named_barrier.cuh"

enum { kMostTileWarps = 24, kRecords = 1, kCoefficients = 2 /* named barriers */ };

/* What a tile warp found in its part of a row, but for the target's tile. */
typedef struct tile_record {
    lli_softmax sums;
    float max;
    int32_t tile; /* the lowest with that maximum, the target's too; -1: none */
} tile_record;

/* A row's softmax; lse_rest: without the target. */
typedef struct row_softmax {
    double lse, lse_rest, entropy;
} row_softmax;

/* Of the row at work. */
typedef struct row_state {
    tile_record records[kMostTileWarps];
    ce_grad_row grad;
} row_state;

static __device__ inline int32_t lane_of(void) {
    return (int32_t)(threadIdx.x % 32);
}

static __device__ inline char *grad_row_at(const lli_cuda_ce *args, int64_t i) {
    return (char *)args->grad.data + i * args->grad.row_stride * (args->grad.dtype == LL_DTYPE_F32 ? 4 : 2);
}

/* Two columns a lane of a canonical tile of row i, from memory; -inf beyond the vocabulary. */
static __device__ inline void tile_columns(const lli_cuda_ce *args, int64_t i, int64_t tile, float *z) {
    const int64_t bytes = args->logits.dtype == LL_DTYPE_F32 ? 4 : 2;
    const char *row = (const char *)args->logits.data + i * args->logits.row_stride * bytes;
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const int64_t c = tile * kTileCols + 2 * lane_of() + j;
        float slope;
        z[j] = c < args->v ? transformed(&args->row.transform, element_at(row, args->logits.dtype, c), &slope)
                           : -INFINITY;
    }
}

/* The target's tile with and without the target. */
typedef struct target_tile {
    lli_softmax whole, rest;
    float z, raw;
} target_tile;

template <typename E, bool kEntropy>
static __device__ inline void read_target(const lli_cuda_ce *args, int64_t i, int64_t y, target_tile *tile) {
    float z[2];
    const int32_t at = (int32_t)(y % kTileCols), lane = lane_of();
    const int64_t bytes = args->logits.dtype == LL_DTYPE_F32 ? 4 : 2;
    tile_columns(args, i, y / kTileCols, z);
    tile->raw = element_at((const char *)args->logits.data + i * args->logits.row_stride * bytes,
                           args->logits.dtype, y);
    tile->z = __shfl_sync(kAllLanes, at % 2 ? z[1] : z[0], at / 2);
    warp_tile<E, kEntropy>(z, &tile->whole);
    if (2 * lane == at) z[0] = -INFINITY;
    if (2 * lane + 1 == at) z[1] = -INFINITY;
    warp_tile<E, false>(z, &tile->rest);
}

/* The lowest column of a tile that has this logit. */
static __device__ inline int64_t column_of(const lli_cuda_ce *args, int64_t i, int32_t tile, float max) {
    float z[2];
    tile_columns(args, i, tile, z);
    const unsigned at = z[0] == max   ? 2u * (unsigned)lane_of()
                        : z[1] == max ? 2u * (unsigned)lane_of() + 1u
                                      : (unsigned)kTileCols;
    return (int64_t)tile * kTileCols + (int64_t)__reduce_min_sync(kAllLanes, at);
}

/* All records together; every lane gets the result. mine: the lane's record. */
template <bool kEntropy>
static __device__ inline row_softmax merge_records(tile_record *mine, const target_tile *target) {
    sum_lanes_row(&mine->sums, kEntropy);
    /* even lanes take the whole row, odd ones the row without its target */
    lli_softmax sums = mine->sums;
    lli_softmax_merge(&sums, lane_of() % 2 ? &target->rest : &target->whole);
    const double lse = lli_softmax_lse(&sums), entropy = kEntropy ? lli_softmax_entropy(&sums) : 0.0;
    const row_softmax row = {__shfl_sync(kAllLanes, lse, 0), __shfl_sync(kAllLanes, lse, 1),
                             kEntropy ? __shfl_sync(kAllLanes, entropy, 0) : 0.0};
    return row;
}

static __device__ inline int64_t argmax_of(const lli_cuda_ce *args, int64_t i, tile_record *mine,
                                           double lse) {
    if (!args->want_argmax) return -1;
    max_lanes(&mine->max, &mine->tile);
    return lse > -INFINITY ? column_of(args, i, mine->tile, mine->max) : -1;
}

/* Results out. By one thread. */
static __device__ inline void put_results(const lli_cuda_finish *args, int64_t i, int64_t y,
                                          const lli_loss_terms *terms, const lli_row_result *result,
                                          int64_t argmax) {
    double loss = 0.0, z_loss = 0.0;
    if (y != kIgnored) {
        lli_row_loss(terms, result, i, y < 0 ? 0 : y, &loss, &z_loss);
        exact_add_parts(&args->totals->loss, lli_exact_split_f32((float)loss));
        exact_add_parts(&args->totals->z_loss, lli_exact_split_f32((float)z_loss));
    }
    write_row(args, i, y, result, terms, loss, argmax);
}

/* The coefficients of the gradient of a row that is not ignored. By one thread. */
static __device__ inline void put_coefficients(const lli_cuda_ce *args, int64_t i, int64_t y,
                                               const lli_loss_terms *terms, const lli_row_result *result,
                                               lli_target_terms *target, ce_grad_row *grad) {
    const lli_row_result saved = as_saved(result);
    grad->grad = lli_row_coefficients(terms, &saved, i, y < 0 ? 0 : y, target);
    grad->target = y >= 0 && target->delta != 0.0 ? y : kNoTarget;
    set_way(args, grad);
}

/* The target's entry of the gradient. By one thread. */
static __device__ inline void put_target(const lli_cuda_ce *args, int64_t i, int64_t y,
                                         const lli_target_terms *target, const lli_row_result *result,
                                         float raw) {
    const lli_row_result saved = as_saved(result);
    const float dz = lli_row_target_dz(target, &saved);
    put_element(grad_row_at(args, i), args->grad.dtype, y, target_gradient(&args->row.transform, dz, raw));
}

/* A row with a target outside the vocabulary has terms of its own. Apart, because they take a copy of the
 * call's arguments. */
static __device__ __noinline__ void put_bad_row(const lli_cuda_ce *args, int64_t i, ce_grad_row *grad) {
    ll_linear_ce_args plain;
    lli_target_terms target;
    const lli_loss_terms terms = terms_of(&args->row, kBad, &plain);
    const lli_row_result result = {kNan, kNan, kNan, kNan};
    if (args->grad.data) put_coefficients(args, i, kBad, &terms, &result, &target, grad);
    put_results(&args->row, i, kBad, &terms, &result, -1);
}

/* A row with a target in the vocabulary. */
template <typename E, bool kEntropy>
static __device__ inline void finish_row(const lli_cuda_ce *args, int64_t i, int64_t y,
                                         const lli_loss_terms *terms, int32_t warps, row_state *state) {
    const int32_t threads = 32 * (warps + 1), lane = lane_of();
    const bool grad = args->grad.data != NULL;
    target_tile target;
    lli_row_result result = {};
    lli_target_terms target_terms = {};
    read_target<E, kEntropy>(args, i, y, &target);
    ptx_barrier_sync(kRecords, threads);
    tile_record mine = {.max = -INFINITY, .tile = -1};
    lli_softmax_clear(&mine.sums);
    if (lane < warps) mine = state->records[lane];
    __syncwarp(); /* the records are read */
    if (!grad) ptx_barrier_arrive(kCoefficients, threads);
    const row_softmax row = merge_records<kEntropy>(&mine, &target);
    const int64_t argmax = argmax_of(args, i, &mine, row.lse); /* before a gradient in place */
    if (grad) {                                                /* the tile warps wait: only what they need */
        if (lane == 0) {
            result = terms->token_scaling
                         ? result_of(&args->row, row.lse, row.lse_rest, row.entropy, target.z, 0.0, 0.0)
                         : softmax_of(&args->row, row.lse, row.entropy, target.z);
            put_coefficients(args, i, y, terms, &result, &target_terms, &state->grad);
        }
        __syncwarp(); /* the coefficients are written */
        ptx_barrier_arrive(kCoefficients, threads);
    }
    if (lane == 0) {
        result = result_of(&args->row, row.lse, row.lse_rest, row.entropy, target.z, 0.0, 0.0);
        if (target_terms.delta != 0.0) put_target(args, i, y, &target_terms, &result, target.raw);
        put_results(&args->row, i, y, terms, &result, argmax);
    }
}

template <typename E, bool kEntropy>
static __device__ inline void finish_warp(const lli_cuda_ce *args, int32_t warps, row_state *state) {
    const int32_t threads = 32 * (warps + 1);
    const lli_loss_terms terms = terms_of(&args->row, 0, NULL);
    const lli_row_result zeros = {};
    for (int64_t i = blockIdx.x; i < args->row.n_rows; i += gridDim.x) {
        const int64_t y = target_of(&args->row.targets, i);
        if (y >= 0) {
            finish_row<E, kEntropy>(args, i, y, &terms, warps, state);
        } else if (y == kBad) {
            ptx_barrier_sync(kRecords, threads);
            if (lane_of() == 0) put_bad_row(args, i, &state->grad);
            __syncwarp(); /* the coefficients are written */
            ptx_barrier_arrive(kCoefficients, threads);
        } else if (lane_of() == 0) { /* ignored: tile warps do not stop at it */
            put_results(&args->row, i, y, &terms, &zeros, -1);
        }
        __syncwarp(); /* together again before the next barrier */
    }
}

#endif
