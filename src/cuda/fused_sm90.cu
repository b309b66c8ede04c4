/* Forward on Hopper: x w^T and the statistics of its rows in one kernel; no logit leaves the registers.
 *
 *   loads, products    sm90_product.cuh: two blocks a cluster, tiles of 128 x 192, two warpgroups in turn
 *   statistics         sm90_statistics.cuh: one warpgroup's behind the other's products
 *   merge              slots of a row together, into what finish.cu takes
 *
 * Shared memory, 227,408 bytes: the ring of 5 stages of 40 KiB and its barriers; 2816 bytes a warp for what
 * its rows gather over a tile. Registers: 24 for the loading warpgroup, 240 for the others, of which a tile
 * takes 192. Variants: bias, temperature and argmax apart, so that the plain case does not carry them; each
 * also with exponentials kept for a gradient (lli_cuda_kept); the entropy's sums are always made: without
 * them the kernel was no faster. Needs sm_90a. */
#include "cuda/lanes.cuh"
#include "cuda/sm90_statistics.cuh"
#include "cuda/sm90_tiles.cuh"

#include <stddef.h>

enum {
    kPrepareThreads = 256,
    kMergeThreads = 128,
    kSlow = 1,
    kFast = 16 /* paces (sm90_statistics.cuh) */
};

typedef struct fused_shared {
    product_shared<fused_tile> product;
    warp_memory warps[kReadingWarps];
} fused_shared;

static_assert(sizeof(fused_shared) <= 232448, "a block has 227 KiB of shared memory");
static_assert(sizeof(lli_cuda_slot) == 64 && offsetof(lli_cuda_slot, sums.top) == 48 &&
                  offsetof(lli_cuda_slot, max) == 56,
              "prepare writes the last 16 bytes of a slot by hand");

/* ---- Before and after --------------------------------------------------------------------------- */

static __device__ __host__ inline int64_t slots_of(const lli_cuda_fused *args) {
    return args->parts * args->last_row + args->last_parts * (args->n_rows - args->last_row);
}

/* Sixteen bytes a thread: the last of a slot's four tell that it is empty. */
static __global__ void __launch_bounds__(kPrepareThreads)
    prepare(const __grid_constant__ lli_cuda_fused args) {
    const int64_t i = (int64_t)blockIdx.x * kPrepareThreads + threadIdx.x;
    if (i < args.n_rows) args.rows[i].has_target = 0;
    if (i >= 4 * slots_of(&args)) return;
    const int4 empty = {LLI_TOP_EMPTY, 0, (int)__float_as_uint(-INFINITY), -1};
    ((int4 *)args.slots)[i] = i % 4 == 3 ? empty : int4{0, 0, 0, 0};
}

/* A warp a row, a lane a slot. */
static __global__ void __launch_bounds__(kMergeThreads) merge(const __grid_constant__ lli_cuda_fused args) {
    const int64_t row = ((int64_t)blockIdx.x * kMergeThreads + threadIdx.x) / 32;
    const int lane = threadIdx.x % 32;
    if (row >= args.n_rows) return; /* a whole warp */
    lli_softmax sums;
    lli_softmax_clear(&sums);
    float max = -INFINITY;
    int32_t argmax = -1;
    const bool last = row >= args.last_row;
    const lli_cuda_slot *first = args.slots + (last ? args.parts * args.last_row + row - args.last_row : row);
    const int64_t step = last ? args.n_rows - args.last_row : args.last_row;
    for (int32_t part = lane; part < (last ? args.last_parts : args.parts); part += 32) {
        const lli_cuda_slot *slot = first + part * step;
        lli_softmax_merge(&sums, &slot->sums);
        keep_larger(&max, &argmax, slot->max, slot->argmax);
    }
    __syncwarp();
    sum_lanes_softmax(&sums, true);
    max_lanes(&max, &argmax);
    if (lane != 0) return;
    args.rows[row].others = sums;
    args.rows[row].max = max;
    args.rows[row].argmax = argmax < 0 ? -1 : args.column + argmax;
}

/* ---- The kernel --------------------------------------------------------------------------------- */

template <bool kOptions, int kPace, bool kKeep>
static __global__ void __cluster_dims__(kProductCluster, 1, 1) __launch_bounds__(kProductThreads, 1)
    fused(const __grid_constant__ lli_cuda_fused args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t memory[];
    for_tiles(&args.tiles, (fused_shared *)memory,
              [&args](tile_logits z, int32_t row, int32_t column, warp_memory *warp) {
                  gather_tile<kOptions, kPace, kKeep>(&args, z, row, column, warp);
              });
#endif
}

/* ---- Host --------------------------------------------------------------------------------------- */

typedef void fused_kernel(const lli_cuda_fused);

enum { kPlain, kPlainSlow, kOptions, kKernels };
static fused_kernel *const kernels[2][kKernels] = {
    {fused<false, kFast, false>, fused<false, kSlow, false>, fused<true, kFast, false>},
    {fused<false, kFast, true>, fused<false, kSlow, true>, fused<true, kFast, true>}, /* with what is kept */
};

static int launch_forward(const lli_cuda_fused *args, fused_kernel *kernel, cudaStream_t stream) {
    const int64_t words = 4 * slots_of(args);
    int status = launch(prepare, dim3((unsigned)blocks_for(words, kPrepareThreads)), dim3(kPrepareThreads), 0,
                        stream, *args);
    if (status) return status;
    status = launch(kernel, dim3(kProductCluster * args->tiles.clusters), dim3(kProductThreads),
                    sizeof(fused_shared), stream, *args);
    if (status) return status;
    return launch(merge, dim3((unsigned)blocks_for(args->n_rows, kMergeThreads / 32)), dim3(kMergeThreads), 0,
                  stream, *args);
}

extern "C" int lli_cuda_fused_launch(const lli_cuda_fused *args, cudaStream_t stream) {
    const bool options = args->bias || args->temperature != 1.0f || args->want_argmax;
    const int plain = args->tiles.depth_blocks >= kSlowDepth ? kPlainSlow : kPlain;
    return launch_forward(args, kernels[args->kept.n_tiles > 0][options ? kOptions : plain], stream);
}

extern "C" int lli_cuda_load_fused(void) {
    cudaFuncAttributes a;
    int status = (int)cudaFuncGetAttributes(&a, prepare);
    if (!status) status = (int)cudaFuncGetAttributes(&a, merge);
    for (int i = 0; i < 2 * kKernels; i++) {
        fused_kernel *kernel = kernels[i / kKernels][i % kKernels];
        if (!status) {
            status = (int)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               (int)sizeof(fused_shared));
        }
        if (!status) status = (int)cudaFuncGetAttributes(&a, kernel);
    }
    return status;
}
