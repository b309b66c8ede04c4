/* ce over given logits with each logit read once: a row lies on the chip, in the shared memory of a cluster
 * of blocks, from its arrival to the last element of its gradient.
 *
 *   a cluster     one row after another; block b holds canonical tiles [b tiles, (b + 1) tiles) of it, in
 *                 one of its slots; rows n, n + 1, ... of the cluster go round the slots
 *   load warp     starts the bulk copy of a row's part into a slot that is empty
 *   tile warps    statistics of row n, a lane a tile (ce_tile.cuh), sent to the block that finishes the
 *                 row; then the gradient of row n - slots + 1 in the same columns, from shared memory to
 *                 global
 *   finish warps  of block n % cluster, in turn: results of row n from all warps' records, in double, and
 *                 the coefficients of its gradient, sent to every block. That takes as long as the
 *                 statistics of several rows, which is why the gradient comes rows later, and rows are
 *                 finished side by side
 *
 * Barriers (mbarrier). Of a slot, in every block:
 *   full      the bytes of the row -> tile warps                    empty   tile warps -> load warp
 *   ready     the bytes of the coefficients -> tile warps, and the load warp before the slot is used again
 * Of a finish warp:
 *   gathered  the bytes of all records of its row -> itself
 * Records of a finish warp's next row come after its coefficients of this one have arrived everywhere: that
 * row is kFinishWarps x cluster rows later, which is no fewer than there are slots, and a slot is filled
 * again only after `ready`. So neither records nor coefficients need a second buffer.
 *
 * Sums are integers, so neither lanes, warps, blocks nor their order show in a bit.
 *
 * Bank conflicts: neighbouring lanes' tiles are 128 or 256 bytes apart, so each lane starts to read at
 * another 16-byte piece of its tile and goes round.
 *
 * Shared memory: slots x (tiles x 64 E) | block_state | kFinishWarps x cluster x tile warps x warp_record
 *                | tiles x 8 (twice with entropy).
 *
 * What lost (8192 x 128256 bf16, where a copy takes 1.0 ms): three blocks a multiprocessor with one slot each
 * and block barriers between the steps, 2.6 ms; every block finishing every row for itself, 2.4 ms. */
#define LLI_CALLS /* core/shared.h: before anything includes it */
#include "cuda/ce_finish_warp.cuh"
#include "cuda/ce_tile_warp.cuh"

/* ---- The load warp ---------------------------------------------------------------------------------- */

template <typename E> static __device__ inline void load_warp(const ce_block<E> *block, int64_t i) {
    const lli_cuda_ce *args = block->args;
    ce_turn turn = {0, 1}; /* the phase before a barrier's first counts as complete */
    if (lane_of() != 0) return;
    for (; i < args->row.n_rows; i += block->step) {
        slot_state *slot = &block->state->slots[turn.slot];
        const E *from = (const E *)args->logits.data + i * args->logits.row_stride + block->first;
        const uint32_t full = address_of(&slot->full);
        await(&slot->empty, turn.phase);
        await(&slot->ready, turn.phase);
        ptx_mbarrier_arrive_expect_tx(address_of(&slot->ready), sizeof(ce_grad_row));
        ptx_mbarrier_arrive_expect_tx(full, block->bulk_bytes);
        if (block->bulk_bytes) {
            ptx_cp_async_bulk(address_of(block->row(turn.slot)), from, block->bulk_bytes, full);
        }
        next_turn(&turn, block->slots);
    }
    /* the block may not end before its last coefficients are here */
    for (int32_t n = 0; n < block->slots; n++) {
        await(&block->state->slots[turn.slot].ready, turn.phase);
        next_turn(&turn, block->slots);
    }
}

/* ---- The kernel --------------------------------------------------------------------------------- */

template <typename E>
static __device__ inline void lay_out(const lli_cuda_ce *args, const lli_cuda_ce_shape *shape,
                                      unsigned char *memory, ce_block<E> *to) {
    ce_block<E> block = {.args = args, .rows = (E *)memory};
    memory += (int64_t)shape->slots * shape->tiles * kTileCols * sizeof(E);
    block.state = (block_state *)memory;
    block.records = (warp_record *)(memory + sizeof(block_state));
    block.sums = (uint64_t *)(block.records + kFinishWarps * shape->cluster * shape->tile_warps);
    block.u_sums = block.sums + shape->tiles;
    block.rank = (int32_t)ptx_cluster_ctarank();
    block.cluster = shape->cluster;
    block.slots = shape->slots;
    block.n_warps = shape->tile_warps;
    block.tiles = shape->tiles;
    block.step = gridDim.x / shape->cluster;
    block.first = (int64_t)block.rank * shape->tiles * kTileCols;
    const int64_t left = args->v - block.first, most = (int64_t)shape->tiles * kTileCols;
    block.n_cols = (int32_t)(left < 0 ? 0 : left < most ? left : most);
    block.n_tiles = (block.n_cols + kTileCols - 1) / kTileCols;
    block.bulk_bytes = (uint32_t)(block.n_cols * sizeof(E)) / 16 * 16;
    *to = block;
    for (int i = 0; i < kFinishWarps; i++)
        ptx_mbarrier_init(address_of(&block.state->gathers[i].gathered), 1);
    for (int i = 0; i < block.slots; i++) {
        slot_state *slot = &block.state->slots[i];
        ptx_mbarrier_init(address_of(&slot->full), 1);
        ptx_mbarrier_init(address_of(&slot->ready), 1);
        ptx_mbarrier_init(address_of(&slot->empty), (uint32_t)block.n_warps);
    }
    ptx_fence_mbarrier_init(); /* before the copy engine or another block arrives at them */
}

template <typename E, bool kEntropy, bool kPlain>
static __global__ void __launch_bounds__(32 * (kTileWarps + kOtherWarps), 1)
    rows(const __grid_constant__ lli_cuda_ce args, const __grid_constant__ lli_cuda_ce_shape shape) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ ce_block<E> block;
    if (threadIdx.x == 0) lay_out<E>(&args, &shape, memory, &block);
    /* The block is laid out; and every block runs before any stores into another's memory. */
    ptx_barrier_cluster_arrive();
    ptx_barrier_cluster_wait();
    const int64_t i = blockIdx.x / shape.cluster;
    if (warp_of() < shape.tile_warps) {
        tile_warp<E, kEntropy, kPlain>(&block, i);
    } else if (warp_of() < shape.tile_warps + kFinishWarps) {
        finish_warp<E, kEntropy>(&block, warp_of() - shape.tile_warps, i);
    } else {
        load_warp(&block, i);
    }
    /* No block may end while records or coefficients are on their way to it. */
    __syncwarp();
    ptx_barrier_cluster_arrive();
    ptx_barrier_cluster_wait();
#endif
}

typedef void rows_kernel(const lli_cuda_ce, const lli_cuda_ce_shape);

template <typename E> static rows_kernel *kernel_of(bool entropy, bool plain) {
    if (entropy) return plain ? rows<E, true, true> : rows<E, true, false>;
    return plain ? rows<E, false, true> : rows<E, false, false>;
}

static rows_kernel *kernel_for(int32_t dtype, bool entropy, bool plain) {
    if (dtype == LL_DTYPE_F32) return kernel_of<float>(entropy, plain);
    if (dtype == LL_DTYPE_BF16) return kernel_of<__nv_bfloat16>(entropy, plain);
    return kernel_of<__half>(entropy, plain);
}

static size_t shared_bytes(const lli_cuda_ce_shape *shape, int64_t element_bytes, bool entropy) {
    const int64_t row = shape->slots * kTileCols * element_bytes, records = entropy ? 16 : 8;
    return (size_t)(shape->tiles * (row + records)) + sizeof(block_state) +
           (size_t)(kFinishWarps * shape->cluster * shape->tile_warps) * sizeof(warp_record);
}

/* A row over `cluster` blocks; cluster 0 where it does not fit. */
static lli_cuda_ce_shape shape_of(int64_t v, int64_t element_bytes, int32_t cluster) {
    const int64_t tiles = (v + kTileCols - 1) / kTileCols, each = (tiles + cluster - 1) / cluster;
    const int64_t bytes = each * kTileCols * element_bytes;
    lli_cuda_ce_shape shape = {};
    if (bytes > kLargeKib * 1024) return shape;
    shape.cluster = cluster;
    shape.slots = cluster == 1 || bytes > kSmallKib * 1024 ? 2 : 3;
    shape.tiles = (int32_t)each;
    const int64_t rounds = (each + 32 * kTileWarps - 1) / (32 * kTileWarps);
    shape.tile_warps = (int32_t)(((each + rounds - 1) / rounds + 31) / 32);
    return shape;
}

static cudaLaunchConfig_t config_of(const lli_cuda_ce_shape *shape, int64_t clusters, size_t bytes,
                                    cudaLaunchAttribute *attribute, cudaStream_t stream) {
    cudaLaunchConfig_t config = {};
    attribute->id = cudaLaunchAttributeClusterDimension;
    attribute->val.clusterDim.x = (unsigned)shape->cluster;
    attribute->val.clusterDim.y = attribute->val.clusterDim.z = 1;
    config.gridDim = dim3((unsigned)(clusters * shape->cluster));
    config.blockDim = dim3((unsigned)(32 * (shape->tile_warps + kOtherWarps)));
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = attribute;
    config.numAttrs = 1;
    return config;
}

extern "C" int lli_cuda_ce_rows_launch(const lli_cuda_ce *args, const lli_cuda_ce_shape *shape,
                                       cudaStream_t stream) {
    const lli_cuda_finish *row = &args->row;
    const bool entropy = row->want_entropy;
    const bool plain = row->transform.softcap == 0.0f && row->transform.temperature == 1.0f;
    const int64_t element_bytes = args->logits.dtype == LL_DTYPE_F32 ? 4 : 2;
    const int64_t clusters = row->n_rows < shape->clusters ? row->n_rows : shape->clusters;
    cudaLaunchAttribute attribute;
    const cudaLaunchConfig_t config =
        config_of(shape, clusters, shared_bytes(shape, element_bytes, entropy), &attribute, stream);
    return (int)cudaLaunchKernelEx(&config, kernel_for(args->logits.dtype, entropy, plain), *args, *shape);
}

/* The kernel with the most shared memory decides how many clusters run at once; none of the others fits
 * fewer. A kernel's limits are the device's, not the shape's: plans of other shapes share the kernels. */
static int open_shape(int32_t dtype, lli_cuda_ce_shape *shape) {
    const int64_t element_bytes = dtype == LL_DTYPE_F32 ? 4 : 2;
    int device = 0, most = 0;
    int status = (int)cudaGetDevice(&device);
    if (!status) status = (int)cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (status) return status;
    for (int variant = 0; variant < 4; variant++) {
        const bool entropy = variant & 1;
        rows_kernel *kernel = kernel_for(dtype, entropy, variant & 2);
        const size_t bytes = shared_bytes(shape, element_bytes, entropy);
        cudaFuncAttributes attributes;
        if (!status) status = (int)cudaFuncGetAttributes(&attributes, kernel);
        if (status) return status;
        const int dynamic = most - (int)attributes.sharedSizeBytes;
        if (bytes > (size_t)dynamic) {
            shape->clusters = 0;
            return 0;
        }
        status = (int)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic);
        if (!status)
            status = (int)cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
        if (status) return status;
        cudaLaunchAttribute attribute;
        const cudaLaunchConfig_t config = config_of(shape, 1, bytes, &attribute, NULL);
        int clusters = 0;
        status = (int)cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
        if (variant == 0 || clusters < shape->clusters) shape->clusters = clusters;
    }
    return status;
}

/* The cluster with the most slots and tile warps at work on the device at once, the smallest of equal ones.
 * Sizes that fall badly into the groups of multiprocessors leave some idle. 16 blocks only for rows that need
 * them. */
extern "C" int lli_cuda_ce_rows_open(int32_t dtype, int64_t v, lli_cuda_ce_shape *shape) {
    const int64_t element_bytes = dtype == LL_DTYPE_F32 ? 4 : 2;
    int64_t best = 0;
    *shape = lli_cuda_ce_shape{};
    for (int32_t cluster = 1; cluster <= 2 * kPortable; cluster += cluster < kPortable ? 1 : kPortable) {
        lli_cuda_ce_shape tried = shape_of(v, element_bytes, cluster);
        const bool enough = best && (cluster > kPortable || (cluster > 2 && tried.tile_warps < 4));
        if (!tried.cluster || enough) continue;
        const int status = open_shape(dtype, &tried);
        if (status) return status;
        const int64_t work = (int64_t)tried.clusters * tried.cluster * tried.tile_warps * tried.slots;
        if (work <= best) continue;
        best = work;
        *shape = tried;
    }
    return 0;
}
