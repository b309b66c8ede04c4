/* The integers of a row from its part on this rank, and the whole row from those of all ranks (exchange.h):
 * one thread a row, which reads its part anew in each phase, as src/cpu/exchange.c does. `place` has a warp a
 * row. */
#include "cuda/device.cuh"
#include "cuda/exchange.h"

#include "core/exchange.c"

#include "cuda/exchange.cuh"

enum { kPlaceThreads = 128 };

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
