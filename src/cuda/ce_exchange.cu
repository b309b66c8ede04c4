/* What ce over given logits has of its own in a group (exchange.h): edges come from the caller's logits, and
 * the sums of a shared tile of bf16 and f16 logits are those of ce_tile.cuh; f32 logits have
 * core/softmax.c's. */
#include "cuda/ce_tile.cuh"
#include "cuda/exchange.h"

/* S and U of a tile, or of the columns of it that z has (-inf elsewhere), against the whole tile's maximum.
 */
static __device__ void ce_tile_sums(const float *z, int n, float zmax, int64_t *s, int64_t *u) {
    if (!is_plain_max(zmax)) {
        lli_softmax_tile_sums(z, n, zmax, s, u);
        return;
    }
    const float k = lli_softmax_anchor(zmax);
    column_sums<__nv_bfloat16, true> sums;
    for (int v = 0; v < n; v++) sums.add(z[v], -k);
    *s = sums.s();
    *u = sums.u();
}

#define LLI_TILE_SUMS ce_tile_sums
#include "core/exchange.c"

#include "cuda/exchange.cuh"

enum { kPlaceThreads = 128, kLocalThreads = 256 };

static __device__ const int64_t kElsewhere = (int64_t)1 << 40; /* beyond every column */

static __global__ void __launch_bounds__(kLocalThreads)
    local_targets(const __grid_constant__ lli_cuda_ce_local args) {
    const int64_t i = (int64_t)blockIdx.x * kLocalThreads + threadIdx.x;
    if (i >= args.n_tokens) return;
    const int64_t y = target_of(&args.targets, i), at = y - args.column;
    args.local[i] = y < 0 ? kLocalIgnored : at >= 0 && at < args.count ? at : kElsewhere;
}

static __global__ void __launch_bounds__(kPlaceThreads)
    place_logits(const __grid_constant__ lli_cuda_ce_place args) {
    const int64_t r = ((int64_t)blockIdx.x * kPlaceThreads + threadIdx.x) / 32;
    const int lane = threadIdx.x % 32;
    if (r >= args.n_rows) return;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int place = lane + 32 * i, column = place - args.at;
        float slope, z = -INFINITY;
        if (column >= 0 && column < args.count) {
            z = logit_of(&args.transform, element_at(args.logits, args.dtype, r * args.row_stride + column),
                         &slope);
        }
        args.z[r * kTileCols + place] = z;
    }
}

extern "C" int lli_cuda_ce_local_launch(const lli_cuda_ce_local *args, cudaStream_t stream) {
    return launch(local_targets, dim3((unsigned)blocks_for(args->n_tokens, kLocalThreads)),
                  dim3(kLocalThreads), 0, stream, *args);
}

extern "C" int lli_cuda_ce_place_launch(const lli_cuda_ce_place *args, cudaStream_t stream) {
    return launch(place_logits, dim3((unsigned)blocks_for(args->n_rows, kPlaceThreads / 32)),
                  dim3(kPlaceThreads), 0, stream, *args);
}

extern "C" int lli_cuda_ce_exchange_sum_launch(const lli_cuda_exchange *args, cudaStream_t stream) {
    return launch(exchange_sum, grid_of(args->n_rows), dim3(kThreads), 0, stream, *args);
}

extern "C" int lli_cuda_load_ce_exchange(void) {
    const void *const kernels[] = {(const void *)local_targets, (const void *)place_logits,
                                   (const void *)exchange_sum};
    cudaFuncAttributes a;
    for (const void *kernel : kernels) {
        const int status = (int)cudaFuncGetAttributes(&a, kernel);
        if (status) return status;
    }
    return 0;
}
