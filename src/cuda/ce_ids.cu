/* Log-probabilities and ranks of given ids, and the top of a row, from given logits.
 *
 *   gather     a block a row, before a gradient may be written over the logits: the logit of each id, the
 *              number of greater ones, and the n_top largest, lowest column first among equal ones; logits go
 *              where log-probabilities will be
 *   logp       a thread a row and position, once rows have their lse: min(0, z - lse)
 *
 * The top: each thread holds the best of its columns; in every round the block takes the best of all, and
 * only the thread it came from looks through its columns again. */
#include "cuda/ce.h"
#include "cuda/ce_tile.cuh"
#include "cuda/lanes.cuh"

enum { kThreads = 256, kWarps = kThreads / 32, kIdsAtOnce = 8 };

typedef unsigned long long top_key; /* greater: before, in the order of the top */

/* A logit and its column, below 2^20. NaN is the greatest, but its row is NaN. */
static __device__ inline top_key key_of(float z, int64_t column) {
    const uint32_t order = (uint32_t)lli_softmax_key(z) ^ 0x80000000u;
    return ((top_key)order << 32) | (0xffffffffu - (uint32_t)column);
}
static __device__ inline int64_t column_of(top_key key) {
    return (int64_t)(0xffffffffu - (uint32_t)key);
}

/* The order of columns is that of the logits as they are given: softcap and temperature could round
 * neighbours together, and each backend others. */
static __device__ inline float raw_at(const lli_cuda_ce_ids *args, int64_t i, int64_t c) {
    const int64_t bytes = args->logits.dtype == LL_DTYPE_F32 ? 4 : 2;
    const char *row = (const char *)args->logits.data + i * args->logits.row_stride * bytes;
    return element_at(row, args->logits.dtype, c);
}

static __device__ inline float logit_at(const lli_cuda_ce_ids *args, int64_t i, int64_t c) {
    float slope;
    return transformed(&args->transform, raw_at(args, i, c), &slope);
}

/* kIgnored: none (ignore_index, where that is no column); kBad: out of range. */
static __device__ inline int64_t id_of(const lli_cuda_ce_ids *args, int64_t i, int64_t j) {
    const int64_t at = i * args->ids.row_stride + j;
    const int64_t id = args->ids.dtype == LL_DTYPE_I64 ? ((const int64_t *)args->ids.data)[at]
                                                       : (int64_t)((const int32_t *)args->ids.data)[at];
    if (id >= 0 && id < args->targets.v_total) return id;
    return id == args->targets.ignore_index ? kIgnored : kBad;
}

/* Ranks of up to kIdsAtOnce ids at a time: the row is read once for them. */
static __device__ void gather_ids(const lli_cuda_ce_ids *args, int64_t i) {
    __shared__ unsigned long long greater[kIdsAtOnce];
    for (int64_t first = 0; first < args->ids.cols; first += kIdsAtOnce) {
        float raw[kIdsAtOnce];
        uint32_t count[kIdsAtOnce];
#pragma unroll
        for (int k = 0; k < kIdsAtOnce; k++) {
            const int64_t j = first + k, id = j < args->ids.cols ? id_of(args, i, j) : kIgnored;
            raw[k] = id >= 0 ? raw_at(args, i, id) : INFINITY;
            count[k] = 0;
            if (id == kBad && threadIdx.x == 0 && args->bad_targets) {
                atomicAdd((unsigned long long *)args->bad_targets, 1ull);
            }
        }
        if (threadIdx.x < kIdsAtOnce) greater[threadIdx.x] = 0;
        __syncthreads(); /* zero before anybody adds */
        for (int64_t c = threadIdx.x; args->id_rank && c < args->v; c += kThreads) {
            const float other = raw_at(args, i, c);
#pragma unroll
            for (int k = 0; k < kIdsAtOnce; k++) count[k] += other > raw[k];
        }
#pragma unroll
        for (int k = 0; k < kIdsAtOnce; k++) {
            count[k] = __reduce_add_sync(kAllLanes, count[k]);
            if (threadIdx.x % 32 == 0) atomicAdd(&greater[k], (unsigned long long)count[k]);
        }
        __syncthreads(); /* all have added */
#pragma unroll
        for (int k = 0; k < kIdsAtOnce; k++) {
            const int64_t j = first + k;
            if (threadIdx.x != k || j >= args->ids.cols) continue;
            const int64_t at = i * args->ids.cols + j;
            const int64_t id = id_of(args, i, j);
            if (args->id_logp && id >= 0) args->id_logp[at] = logit_at(args, i, id);
            if (args->id_rank) args->id_rank[at] = 1 + (int64_t)greater[k];
        }
        __syncthreads(); /* read before the next ids' zeros */
    }
}

/* The thread's best column after `last` in the order of the top; 0: it has none. */
static __device__ top_key best_after(const lli_cuda_ce_ids *args, int64_t i, top_key last) {
    top_key best = 0;
#pragma unroll 4
    for (int64_t c = threadIdx.x; c < args->v; c += kThreads) {
        const top_key key = key_of(raw_at(args, i, c), c);
        if (key < last && key > best) best = key;
    }
    return best;
}

static __device__ void gather_top(const lli_cuda_ce_ids *args, int64_t i) {
    __shared__ top_key of_warp[kWarps];
    top_key best = best_after(args, i, ~(top_key)0);
    for (int32_t k = 0; k < args->n_top; k++) {
        top_key most = best;
        for (int mask = 16; mask > 0; mask /= 2) {
            const top_key other = __shfl_xor_sync(kAllLanes, most, mask);
            most = other > most ? other : most;
        }
        if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = most;
        __syncthreads(); /* every warp's best */
        for (int w = 0; w < kWarps; w++) most = of_warp[w] > most ? of_warp[w] : most;
        __syncthreads(); /* read by all before the next round's */
        const int64_t at = i * args->n_top + k, column = column_of(most);
        if (column % kThreads != threadIdx.x) continue;
        if (args->top_ids) args->top_ids[at] = column;
        if (args->top_logp) args->top_logp[at] = logit_at(args, i, column);
        best = best_after(args, i, most);
    }
}

static __global__ void __launch_bounds__(kThreads) gather(const __grid_constant__ lli_cuda_ce_ids args) {
    const int64_t i = blockIdx.x;
    if (target_of(&args.targets, i) == kIgnored) return;
    if (args.ids.data && (args.id_logp || args.id_rank)) gather_ids(&args, i);
    if (args.top_ids || args.top_logp) gather_top(&args, i);
}

static __device__ inline float logp_of(float z, double lse) {
    const double logp = (double)z - lse;
    return logp < 0.0 ? (float)logp : 0.0f;
}

static __device__ void write_id(const lli_cuda_ce_ids *args, int64_t i, int64_t j, bool ignored, double lse) {
    const int64_t at = i * args->ids.cols + j, id = ignored ? kIgnored : id_of(args, i, j);
    const bool none = id == kIgnored, nan = !none && (id == kBad || lse != lse);
    if (args->id_logp) args->id_logp[at] = none ? 0.0f : nan ? NAN : logp_of(args->id_logp[at], lse);
    if (args->id_rank && (none || nan)) args->id_rank[at] = 0;
}

static __device__ void write_top(const lli_cuda_ce_ids *args, int64_t at, bool ignored, double lse) {
    const bool nan = lse != lse;
    if (args->top_ids && (ignored || nan)) args->top_ids[at] = -1;
    if (args->top_logp) args->top_logp[at] = ignored ? 0.0f : nan ? NAN : logp_of(args->top_logp[at], lse);
}

static __global__ void __launch_bounds__(kThreads) logp(const __grid_constant__ lli_cuda_ce_ids args) {
    const int64_t n_ids = args.ids.data ? args.ids.cols : 0, each = n_ids > args.n_top ? n_ids : args.n_top;
    const int64_t at = (int64_t)blockIdx.x * kThreads + threadIdx.x, i = at / each, j = at % each;
    if (i >= args.n_tokens) return;
    const bool ignored = target_of(&args.targets, i) == kIgnored;
    const double lse = args.row_lse[i];
    if (j < n_ids) write_id(&args, i, j, ignored, lse);
    if (j < args.n_top) write_top(&args, i * args.n_top + j, ignored, lse);
}

extern "C" int lli_cuda_ce_ids_launch(const lli_cuda_ce_ids *args, cudaStream_t stream) {
    return launch(gather, dim3((unsigned)args->n_tokens), dim3(kThreads), 0, stream, *args);
}

extern "C" int lli_cuda_ce_logp_launch(const lli_cuda_ce_ids *args, cudaStream_t stream) {
    const int64_t n_ids = args->ids.data ? args->ids.cols : 0,
                  each = n_ids > args->n_top ? n_ids : args->n_top;
    return launch(logp, dim3((unsigned)blocks_for(args->n_tokens * each, kThreads)), dim3(kThreads), 0,
                  stream, *args);
}

extern "C" int lli_cuda_load_ce_ids(void) {
    cudaFuncAttributes a;
    const int status = (int)cudaFuncGetAttributes(&a, gather);
    return status ? status : (int)cudaFuncGetAttributes(&a, logp);
}
