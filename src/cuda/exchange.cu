/* The integers of a row from its part on this rank, and the whole row from those of all ranks (exchange.h):
 * one thread a row, which reads its part anew in each phase, as src/cpu/exchange.c does. `place` has a warp a
 * row. */
#include "cuda/device.cuh"
#include "cuda/exchange.h"

#include "core/exchange.c"

enum { kThreads = 64, kPlaceThreads = 128 };

/* ---- Shared tiles ------------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(kPlaceThreads) place(const __grid_constant__ lli_cuda_place args) {
    const int64_t r = ((int64_t)blockIdx.x * kPlaceThreads + threadIdx.x) / 32;
    const int lane = threadIdx.x % 32;
    if (r >= args.n_rows) return; /* a whole warp */
    float *row = args.z + r * kTileCols, z[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int column = lane + 32 * i - args.at;
        z[i] = -INFINITY;
        if (column < 0 || column >= args.count) continue;
        float slope, raw = row[column];
        if (args.bias) raw = raw + args.bias[column];
        z[i] = logit_of(&args.transform, raw, &slope);
    }
    __syncwarp(); /* all products are read before the first is overwritten */
    row[lane] = z[0];
    row[lane + 32] = z[1];
}

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
                                 (row->max == part->max && row->argmax < part->argmax))) {
            part->max = row->max;
            part->argmax = row->argmax;
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

/* ---- Phases ------------------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(kThreads)
    exchange_max(const __grid_constant__ lli_cuda_exchange args) {
    const int64_t r = (int64_t)blockIdx.x * kThreads + threadIdx.x;
    if (r >= args.n_rows) return;
    const int64_t y = target_of(&args.targets, args.first + r);
    int32_t *max = args.max + r * (args.n_max + kGivenInts);
    if (y < 0) {
        for (int64_t i = 0; i < args.n_max; i++) max[i] = lli_softmax_key_none;
    } else {
        const lli_exchange core = core_of(&args);
        lli_row_part part;
        part_of(&args, r, y, &part);
        lli_exchange_max(&core, &part, y, max);
    }
    max[args.n_max] = given_of(&args, y);
    max[args.n_max + 1] = ~max[args.n_max];
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

/* Ranks that were given other targets or divisors have added up what does not belong together: the row is
 * NaN, and so is the reduced loss, also on a rank that was told to ignore the row. */
static __device__ void refuse_row(const lli_cuda_exchange *args, lli_row_part *row) {
    row->whole.top = row->rest.top = LLI_TOP_NAN;
    atomicOr(&args->totals->loss.flags, (int32_t)LLI_EXACT_NAN);
    if (args->bad_targets) atomicAdd((unsigned long long *)args->bad_targets, 1ull);
}

static __global__ void __launch_bounds__(kThreads)
    exchange_rows(const __grid_constant__ lli_cuda_exchange args) {
    const int64_t r = (int64_t)blockIdx.x * kThreads + threadIdx.x;
    if (r >= args.n_rows) return;
    const int64_t y = target_of(&args.targets, args.first + r);
    const int32_t *max = args.max + r * (args.n_max + kGivenInts);
    const bool agreed = max[args.n_max + 1] == ~max[args.n_max];
    if (y < 0 && agreed) return;
    const lli_exchange core = core_of(&args);
    lli_row_part part;
    lli_exchange_row(&core, max, args.sum + r * args.n_sum, y < 0 ? 0 : y, &part);
    if (!agreed) refuse_row(&args, &part);
    lli_cuda_row *row = &args.rows[r];
    lli_softmax_clear(&row->others);
    row->whole = part.whole;
    row->rest = part.rest;
    row->z = part.z;
    row->has_target = 1;
    row->max = part.max;
    const bool none = !args.want_argmax || args.index[r] == lli_softmax_key_none;
    row->argmax = none ? -1 : -(int64_t)args.index[r];
    if (args.soft) args.soft[r] = part.soft;
}

/* ---- Host --------------------------------------------------------------------------------------- */

static dim3 grid_of(int64_t n_rows) {
    return dim3((unsigned)blocks_for(n_rows, kThreads));
}

extern "C" int lli_cuda_place_launch(const lli_cuda_place *args, cudaStream_t stream) {
    return launch(place, dim3((unsigned)blocks_for(args->n_rows, kPlaceThreads / 32)), dim3(kPlaceThreads), 0,
                  stream, *args);
}

extern "C" int lli_cuda_exchange_max_launch(const lli_cuda_exchange *args, cudaStream_t stream) {
    return launch(exchange_max, grid_of(args->n_rows), dim3(kThreads), 0, stream, *args);
}

extern "C" int lli_cuda_exchange_sum_launch(const lli_cuda_exchange *args, cudaStream_t stream) {
    return launch(exchange_sum, grid_of(args->n_rows), dim3(kThreads), 0, stream, *args);
}

extern "C" int lli_cuda_exchange_rows_launch(const lli_cuda_exchange *args, cudaStream_t stream) {
    return launch(exchange_rows, grid_of(args->n_rows), dim3(kThreads), 0, stream, *args);
}

extern "C" int lli_cuda_load_exchange(void) {
    const void *const kernels[] = {(const void *)place, (const void *)exchange_max,
                                   (const void *)exchange_sum, (const void *)exchange_rows};
    cudaFuncAttributes a;
    for (const void *kernel : kernels) {
        const int status = (int)cudaFuncGetAttributes(&a, kernel);
        if (status) return status;
    }
    return 0;
}
