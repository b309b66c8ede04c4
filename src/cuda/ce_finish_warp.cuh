/* The finish warp of ce_rows.cu: the target's tile; then, from the tile warps' records, the row's lse and the
 * coefficients of its gradient, for which they wait; then the row's sums into memory, from which finish.cu
 * makes its results. Short, and without local memory, whose reads take longer than all the arithmetic here.
 */
#ifndef LLI_CUDA_CE_FINISH_WARP_CUH
#define LLI_CUDA_CE_FINISH_WARP_CUH

#include "cuda/ce_tile.cuh"
#include "cuda/finish.cuh"
#include "cuda/lanes.cuh"
#include "cuda/ptx/named_barrier.cuh"

enum { kRecords = 1, kCoefficients = 2 /* named barriers */ };

/* What a tile warp found in its part of a row, but for the target's tile. */
typedef struct tile_record {
    lli_softmax sums;
    float max;
    int32_t tile; /* the lowest with that maximum, the target's too; -1: none */
} tile_record;

/* Of the row at work. */
typedef struct row_state {
    /* The tile warps', and behind them the target's tile; in turns, because tile warps may be a row ahead. */
    tile_record records[2][kCeMostTileWarps + 1];
    lli_row_upstream up; /* the finish warp's own: its registers do not hold it */
    ce_grad_row grad;
} row_state;

static __device__ inline int32_t lane_of(void) {
    return (int32_t)(threadIdx.x % 32);
}

/* Two columns a lane of a canonical tile of row i, from memory; -inf beyond the vocabulary. */
template <typename E, bool kPlain>
static __device__ inline void tile_columns(const lli_cuda_ce *args, int64_t i, int32_t tile, float *z) {
    const E *row = (const E *)args->logits.data + i * args->logits.row_stride;
    const int32_t c = tile * kTileCols + 2 * lane_of(), v = (int32_t)args->v;
    float slope;
    z[0] = c < v ? (float)row[c] : -INFINITY;
    z[1] = c + 1 < v ? (float)row[c + 1] : -INFINITY;
    if (kPlain) return;
    if (c < v) z[0] = transformed(&args->row.transform, z[0], &slope);
    if (c + 1 < v) z[1] = transformed(&args->row.transform, z[1], &slope);
}

/* The target's tile with and without the target. */
typedef struct target_tile {
    lli_softmax whole, rest;
    float z;
} target_tile;

template <typename E, bool kEntropy, bool kPlain>
static __device__ inline void read_target(const lli_cuda_ce *args, int64_t i, int32_t y, target_tile *tile) {
    float z[2];
    const int32_t at = y % kTileCols, lane = lane_of();
    tile_columns<E, kPlain>(args, i, y / kTileCols, z);
    tile->z = __shfl_sync(kAllLanes, at % 2 ? z[1] : z[0], at / 2);
    tile->whole = warp_tile<E, kEntropy>(z);
    if (2 * lane == at) z[0] = -INFINITY;
    if (2 * lane + 1 == at) z[1] = -INFINITY;
    tile->rest = warp_tile<E, false>(z);
}

/* The lowest column of a tile that has this logit. */
template <typename E, bool kPlain>
static __device__ inline int64_t column_of(const lli_cuda_ce *args, int64_t i, int32_t tile, float max) {
    float z[2];
    tile_columns<E, kPlain>(args, i, tile, z);
    const unsigned at = z[0] == max   ? 2u * (unsigned)lane_of()
                        : z[1] == max ? 2u * (unsigned)lane_of() + 1u
                                      : (unsigned)kTileCols;
    return (int64_t)tile * kTileCols + (int64_t)__reduce_min_sync(kAllLanes, at);
}

/* The lowest column with the row's largest logit; -1: none. mine: the lane's record. */
template <typename E, bool kPlain>
static __device__ inline int64_t argmax_of(const lli_cuda_ce *args, int64_t i, tile_record *mine) {
    max_lanes(&mine->max, &mine->tile);
    return mine->tile >= 0 ? column_of<E, kPlain>(args, i, mine->tile, mine->max) : -1;
}

/* For calls that scale tokens by their probability: what comes from above, for which nll is needed. others:
 * the row but for its target's tile, which `out` has. */
static __device__ __noinline__ lli_row_upstream scaled_upstream(const lli_cuda_ce *args,
                                                                const lli_loss_terms *terms,
                                                                const lli_cuda_row *out, lli_softmax others,
                                                                double lse, int64_t i, int64_t y) {
    lli_softmax_merge(&others, &out->rest);
    const lli_row_result result = result_of(&args->row, lse, lli_softmax_lse(&others), 0.0, out->z, 0.0, 0.0);
    const lli_row_result saved = as_saved(&result);
    return lli_row_upstream_of(terms, &saved, i, y);
}

/* The coefficients of the gradient of a row that is not ignored. By one thread. */
static __device__ inline void put_coefficients(const lli_cuda_ce *args, int64_t y,
                                               const lli_loss_terms *terms, const lli_row_upstream *up,
                                               const lli_row_result *result, ce_grad_row *grad) {
    const lli_row_result saved = as_saved(result);
    lli_target_terms target;
    grad->grad = lli_row_coefficients(terms, up, &saved, &target);
    grad->target = y >= 0 && target.delta != 0.0 ? y : kNoTarget;
    set_way(args, grad);
}

/* A row with a target outside the vocabulary has terms of its own. Apart, because they take a copy of the
 * call's arguments. */
static __device__ __noinline__ void put_bad_row(const lli_cuda_ce *args, int64_t i, ce_grad_row *grad) {
    ll_linear_ce_args plain;
    const lli_loss_terms terms = terms_of(&args->row, kBad, &plain);
    const lli_row_result result = {kNan, kNan, kNan, kNan};
    const lli_row_upstream up = lli_row_upstream_of(&terms, &result, i, 0);
    put_coefficients(args, kBad, &terms, &up, &result, grad);
}

/* A row with a target in the vocabulary. What must outlive a barrier waits in memory: registers that the
 * kernel has not got would lie in local memory. */
template <typename E, bool kEntropy, bool kPlain>
static __device__ inline void finish_row(const lli_cuda_ce *args, int64_t i, int32_t y,
                                         const lli_loss_terms *terms, int32_t warps, tile_record *records,
                                         row_state *state) {
    const int32_t threads = 32 * (warps + 1), lane = lane_of();
    const bool grad = args->grad.data != NULL;
    lli_cuda_row *out = args->row.rows + (i - args->row.first);
    target_tile target;
    read_target<E, kEntropy, kPlain>(args, i, y, &target);
    const float z = target.z;
    if (lane == 0) {
        records[warps] = (tile_record){target.whole, -INFINITY, -1};
        if (grad && !terms->token_scaling) state->up = lli_row_upstream_of(terms, NULL, i, y);
        out->whole = target.whole;
        out->rest = target.rest;
        out->z = z;
        out->has_target = 1;
    }
    __syncwarp(); /* the target's record is written */
    ptx_barrier_sync(kRecords, threads);
    tile_record mine = {.max = -INFINITY, .tile = -1};
    lli_softmax_clear(&mine.sums);
    if (lane <= warps) mine = records[lane];
    int64_t argmax = -1;
    if (args->want_argmax) argmax = argmax_of<E, kPlain>(args, i, &mine); /* before a gradient in place */
    if (grad) { /* the tile warps wait: only what they need */
        lli_softmax all = mine.sums;
        sum_lanes_row(&all, kEntropy);
        const double entropy = kEntropy && args->row.call.up_entropy ? lli_softmax_entropy(&all) : 0.0;
        const double lse = lli_softmax_lse(&all);
        const lli_row_result result = softmax_of(&args->row, lse, entropy, z);
        if (terms->token_scaling) {
            lli_softmax others = mine.sums;
            if (lane == warps) lli_softmax_clear(&others);
            sum_lanes_row(&others, kEntropy);
            if (lane == 0) state->up = scaled_upstream(args, terms, out, others, lse, i, y);
        }
        if (lane == 0) put_coefficients(args, y, terms, &state->up, &result, &state->grad);
        __syncwarp(); /* the coefficients are written */
    }
    ptx_barrier_arrive(kCoefficients, threads);
    if (lane < warps) {
        mine.sums = records[lane].sums;
    } else {
        lli_softmax_clear(&mine.sums);
    }
    sum_lanes_row(&mine.sums, kEntropy);
    if (lane == 0) {
        out->others = mine.sums;
        out->max = mine.max;
        out->argmax = argmax;
    }
}

template <typename E, bool kEntropy, bool kPlain>
static __device__ inline void finish_warp(const lli_cuda_ce *args, int32_t warps, row_state *state) {
    const int32_t threads = 32 * (warps + 1);
    const lli_loss_terms terms = terms_of(&args->row, 0, NULL);
    const int64_t end = args->row.first + args->row.n_rows;
    int32_t turn = 0;
    for (int64_t i = args->row.first + blockIdx.x; i < end; i += gridDim.x) {
        const int64_t y = target_of(&args->row.targets, i);
        if (y != kIgnored) turn ^= 1; /* tile warps do not stop at those */
        if (y >= 0) {
            finish_row<E, kEntropy, kPlain>(args, i, (int32_t)y, &terms, warps, state->records[turn], state);
        } else if (y == kBad) {
            ptx_barrier_sync(kRecords, threads);
            if (lane_of() == 0 && args->grad.data) put_bad_row(args, i, &state->grad);
            __syncwarp(); /* the coefficients are written */
            ptx_barrier_arrive(kCoefficients, threads);
        }
        __syncwarp(); /* together again before the next barrier */
    }
}

#endif
