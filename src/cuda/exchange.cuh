/* A row's part on this rank, and the kernel that makes its sums, of exchange.cu and of ce_exchange.cu, which
 * differ in the arithmetic of a tile: whoever includes this has included core/exchange.c before. */
#ifndef LLI_CUDA_EXCHANGE_CUH
#define LLI_CUDA_EXCHANGE_CUH

#include "cuda/device.cuh"
#include "cuda/exchange.h"

enum { kThreads = 64 };

/* The rank's columns of a shared tile: largest logit, and the target's. */
static __device__ void look_at_edge(const lli_cuda_exchange *args, int side, int64_t y, lli_row_part *part) {
    const lli_shards *shards = &args->shards;
    const float *z = part->edges[side];
    const int64_t tile = shards->shared[side ? shards->last_shared : shards->first_shared] * kTileCols;
    const int64_t begin = shards->begin > tile ? shards->begin : tile;
    const int64_t end = shards->end < tile + kTileCols ? shards->end : tile + kTileCols;
    for (int64_t v = begin; args->want_argmax && v < end; v++) {
        const float x = z[v - tile];
        const bool first = part->argmax < 0 && x == x;
        if (first || x > part->max || (x == part->max && v < part->argmax)) {
            part->max = x;
            part->argmax = v;
        }
    }
    if (y >= begin && y < end) {
        part->z = z[y - tile];
        part->has_target = 1;
    }
}

/* What this rank knows of row r, whose target is y. */
static __device__ void part_of(const lli_cuda_exchange *args, int64_t r, int64_t y, lli_row_part *part) {
    memset(part, 0, sizeof *part);
    lli_softmax_clear(&part->whole);
    lli_softmax_clear(&part->rest);
    part->max = -INFINITY;
    part->argmax = -1;
    for (int32_t i = 0; i < args->parts; i++) {
        const lli_cuda_row *row = &args->rows[i * args->n_rows + r];
        lli_softmax_merge(&part->whole, &row->others);
        lli_softmax_merge(&part->rest, &row->others);
        if (row->has_target) {
            lli_softmax_merge(&part->whole, &row->whole);
            lli_softmax_merge(&part->rest, &row->rest);
            part->z = row->z;
            part->has_target = 1;
        }
        if (row->argmax >= 0 && (part->argmax < 0 || row->max > part->max ||
                                 (row->max == part->max && args->column + row->argmax < part->argmax))) {
            part->max = row->max;
            part->argmax = args->column + row->argmax;
        }
    }
    if (args->soft && args->parts) part->soft = args->soft[r];
    for (int side = 0; side < 2; side++) {
        if (!args->edges[side]) continue;
        part->edges[side] = args->edges[side] + r * kTileCols;
        look_at_edge(args, side, y, part);
    }
}

static __device__ lli_exchange core_of(const lli_cuda_exchange *args) {
    const lli_exchange core = {&args->shards, args->class_weight, args->soft != NULL};
    return core;
}

/* What all ranks must have been given alike, of row r: its target and the divisor. */
static __device__ int32_t given_of(const lli_cuda_exchange *args, int64_t y) {
    const uint64_t bits = (uint64_t)__double_as_longlong(args->totals->divisor);
    return (int32_t)y ^ (int32_t)(uint32_t)(bits ^ bits >> 32); /* targets are below LL_VOCAB_MAX */
}

static __global__ void __launch_bounds__(kThreads)
    exchange_sum(const __grid_constant__ lli_cuda_exchange args) {
    const int64_t r = (int64_t)blockIdx.x * kThreads + threadIdx.x;
    if (r >= args.n_rows) return;
    const int64_t y = target_of(&args.targets, args.first + r);
    const int32_t *max = args.max + r * (args.n_max + kGivenInts);
    int64_t *sum = args.sum + r * args.n_sum;
    int32_t index = lli_softmax_key_none;
    if (y < 0) {
        for (int64_t i = 0; i < args.n_sum; i++) sum[i] = 0;
    } else {
        const lli_exchange core = core_of(&args);
        lli_row_part part;
        part_of(&args, r, y, &part);
        lli_exchange_sum(&core, &part, y, max, sum);
        index = lli_exchange_index(&part, max);
    }
    args.index[r] = index;
}

static inline dim3 grid_of(int64_t n_rows) {
    return dim3((unsigned)blocks_for(n_rows, kThreads));
}

#endif
