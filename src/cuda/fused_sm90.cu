/* Forward on Hopper: x w^T and the statistics of its rows in one kernel; no logit leaves the registers.
 *
 *   loads, products    sm90_product.cuh: two blocks a cluster, tiles of 128 x 192, two warpgroups in turn
 *   statistics         sm90_statistics.cuh: one warpgroup's behind the other's products
 *   merge              slots of a row together, into what finish.cu takes
 *
 * Shared memory, 227,408 bytes: the ring of 5 stages of 40 KiB and its barriers; 2816 bytes a warp for what
 * its rows gather over a tile. Registers: 24 for the loading warpgroup, 240 for the others, of which a tile
 * takes 192. Variants: bias, temperature and argmax apart, so that the plain case does not carry them; the
 * entropy's sums are always made: without them the kernel was no faster. Needs sm_90a. */
#include "cuda/sm90_tiles.cuh"
#include "cuda/sm90_statistics.cuh"

#include <stddef.h>

enum {
    kPrepareThreads = 256,
    kMergeThreads = 128,
    kReadingWarps = 8,
    kSlow = 1,
    kFast = 16,     /* paces (sm90_statistics.cuh) */
    kSlowDepth = 64 /* steps of k behind which slow statistics hide: at 64, 3 % faster than fast ones; at 32,
                       2 % slower */
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

/* Sixteen bytes a thread: the last of a slot's four tell that it is empty. */
static __global__ void __launch_bounds__(kPrepareThreads)
    prepare(const __grid_constant__ lli_cuda_fused args) {
    const int64_t i = (int64_t)blockIdx.x * kPrepareThreads + threadIdx.x;
    if (i < args.n_rows) args.rows[i].has_target = 0;
    if (i >= 4 * args.parts * args.n_rows) return;
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
    for (int32_t part = lane; part < args.parts; part += 32) {
        const lli_cuda_slot *slot = &args.slots[part * args.n_rows + row];
        lli_softmax_merge(&sums, &slot->sums);
        if (slot->argmax >= 0 &&
            (argmax < 0 || slot->max > max || (slot->max == max && slot->argmax < argmax))) {
            max = slot->max;
            argmax = slot->argmax;
        }
    }
    __syncwarp();
    sum_lanes_softmax(&sums, true);
    for (int mask = 16; mask > 0; mask /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, max, mask);
        const int32_t at = __shfl_xor_sync(0xffffffffu, argmax, mask);
        if (at >= 0 && (argmax < 0 || other > max || (other == max && at < argmax))) {
            max = other;
            argmax = at;
        }
    }
    if (lane != 0) return;
    args.rows[row].others = sums;
    args.rows[row].max = max;
    args.rows[row].argmax = argmax < 0 ? -1 : args.column + argmax;
}

/* ---- The kernel --------------------------------------------------------------------------------- */

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
template <bool kOptions, int kPace>
static __device__ inline void work(const lli_cuda_fused *args, fused_shared *shared) {
    const uint32_t second = threadIdx.x / 128 - 1;
    tile_logits z;
    product_take_turns<fused_tile>(second);
    for (uint32_t tile = second;
         tile_of(&args->tiles, tile) < args->tiles.row_blocks * args->tiles.col_blocks; tile += 2) {
        product_multiply<fused_tile>(&shared->product, tile, args->tiles.depth_blocks, 0, z);
        const product_grid grid = grid_of(&args->tiles);
        const product_place place = product_place_of(&grid, tile_of(&args->tiles, tile));
        const uint32_t block = place.row_block * kProductCluster + ptx_cluster_ctarank();
        gather_tile<kOptions, kPace>(args, z, (int32_t)(block * kProductRows),
                                     (int64_t)place.col_block * kFusedCols,
                                     &shared->warps[ptx_tid_x() / 32 - 4]);
    }
}
#endif

template <bool kOptions, int kPace>
static __global__ void __cluster_dims__(kProductCluster, 1, 1) __launch_bounds__(kProductThreads, 1)
    fused(const __grid_constant__ lli_cuda_fused args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t memory[];
    fused_shared *shared = (fused_shared *)memory;
    product_open(&shared->product);
    if (threadIdx.x < 128) {
        ptx_setmaxnreg_dec<kProducerRegisters>();
        const product_grid grid = grid_of(&args.tiles);
        if (threadIdx.x == 0) {
            product_load(&shared->product, &args.tiles.x, &args.tiles.w, &grid);
        }
    } else {
        ptx_setmaxnreg_inc<kConsumerRegisters>();
        work<kOptions, kPace>(&args, shared);
    }
    product_close();
#endif
}

/* ---- Host --------------------------------------------------------------------------------------- */

typedef void fused_kernel(const lli_cuda_fused);

enum { kPlain, kPlainSlow, kOptions };
static fused_kernel *const kernels[] = {fused<false, kFast>, fused<false, kSlow>, fused<true, kFast>};

static int launch_forward(const lli_cuda_fused *args, fused_kernel *kernel, cudaStream_t stream) {
    const int64_t words = 4 * args->parts * args->n_rows;
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
    return launch_forward(args, kernels[options ? kOptions : plain], stream);
}

extern "C" int lli_cuda_load_fused(void) {
    cudaFuncAttributes a;
    int status = (int)cudaFuncGetAttributes(&a, prepare);
    if (!status) status = (int)cudaFuncGetAttributes(&a, merge);
    for (fused_kernel *kernel : kernels) {
        if (!status) {
            status = (int)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               (int)sizeof(fused_shared));
        }
        if (!status) status = (int)cudaFuncGetAttributes(&a, kernel);
    }
    return status;
}
