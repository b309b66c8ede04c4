/* The product x w^T of a block of tokens and a block of columns on Hopper: copy engine, mbarriers, wgmma.
 *
 *   cluster         two blocks, one above the other: 2 x 128 rows of x, the same kCols rows of w. Each loads
 *                   its own rows of x and half of w's, that half into both blocks' shared memory
 *   warpgroup 0     one thread of it asks for the loads; 24 registers
 *   1 and 2         multiply; 240 registers. In turn, a whole tile each, so that one's epilogue runs behind
 *                   the other's products (kTurns), or 64 rows each of the same tile
 *
 * Shared memory is a ring of kStages, each with 64 of k (one 128-byte row of the 128-byte swizzle):
 *
 *   a [kStages][128][64]   b [kStages][kCols][64]   full [kStages]   empty [kStages]
 *
 *   full[s]    1 arrival and kStageBytes of loads     producer -> the warpgroups that multiply
 *   empty[s]   an arrival of every warp that read the stage, of both blocks: the peer's half of w lands here
 *   turn       named barriers, one a warpgroup: it may take its stages, the other has taken all of its own.
 *              A parity tells only two phases apart, so a warpgroup that looked at a stage two rounds ahead
 *              would take the round before for its own
 *
 * A sum is added up in ascending k by one instruction kind, never split: its bits do not depend on the tile,
 * the grid or the number of tokens. */
#ifndef LLI_CUDA_SM90_PRODUCT_CUH
#define LLI_CUDA_SM90_PRODUCT_CUH

#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/named_barrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"

enum {
    kProductThreads = 384,
    kProductCluster = 2,
    kProductRows = 128, /* of a block */
    kProductDepth = 64, /* of k, a stage */
    kProducerRegisters = 24,
    kConsumerRegisters = 240, /* 128 (24 + 2 * 240) = 64512 of 65536 */
    kWaitLimit = 1 << 26      /* tries, each of which sleeps: a fault traps instead of hanging */
};

/* Named barriers; 0 is __syncthreads. */
enum product_barrier { kFirstsTurn = 1, kSecondsTurn = 2, kTurnThreads = 256 };

template <int kColsOf, int kStagesOf, bool kTurnsOf> struct product_tile {
    static constexpr int kCols = kColsOf, kStages = kStagesOf;
    static constexpr bool kTurns = kTurnsOf;
    static constexpr int kHalves = kTurns ? 2 : 1; /* products of 64 rows in a warpgroup */
    static constexpr int kSums = kCols / 2;        /* registers of one */
    static constexpr int kStageBytes = (kProductRows + kCols) * kProductDepth * 2;
    static constexpr int kReaders = kProductCluster * (kTurns ? 4 : 8); /* warps */
};

template <typename Tile> struct product_shared {
    uint16_t a[Tile::kStages][kProductRows * kProductDepth];
    uint16_t b[Tile::kStages][Tile::kCols * kProductDepth];
    uint64_t full[Tile::kStages], empty[Tile::kStages];
};

/* Tiles of a launch: row blocks (of 256 rows) in groups, a group's columns one after the other, and of each
 * column all the group's rows. The clusters at work at one time share a group's rows of x, which stay in the
 * L2 cache, and few columns of w, which pass through it once a group. */
typedef struct product_grid {
    uint32_t row_blocks, col_blocks, depth_blocks;
    uint32_t group_rows; /* row blocks of a group; the last may have fewer */
} product_grid;

typedef struct product_place {
    uint32_t row_block, col_block;
} product_place;

static __device__ inline product_place product_place_of(const product_grid *grid, uint32_t t) {
    const uint32_t group_tiles = grid->group_rows * grid->col_blocks,
                   first = t / group_tiles * grid->group_rows;
    const uint32_t rest = grid->row_blocks - first, rows = rest < grid->group_rows ? rest : grid->group_rows;
    const uint32_t within = t % group_tiles;
    return (product_place){first + within % rows, within / rows};
}

static __device__ inline uint32_t shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

static __device__ inline void product_wait(uint32_t barrier, uint32_t parity) {
    for (int32_t tries = 0; !ptx_mbarrier_try_wait_parity(barrier, parity); tries++) {
        if (tries == kWaitLimit) __trap();
    }
}

/* Every thread of the cluster comes here before anything else. */
template <typename Tile> static __device__ inline void product_open(product_shared<Tile> *shared) {
    if (threadIdx.x == 0) {
        for (int s = 0; s < Tile::kStages; s++) {
            ptx_mbarrier_init(shared_address(&shared->full[s]), 1);
            ptx_mbarrier_init(shared_address(&shared->empty[s]), Tile::kReaders);
        }
        ptx_fence_mbarrier_init();
    }
    __syncwarp();
    ptx_barrier_cluster_arrive(); /* the peer's loads and arrivals find initialised barriers */
    ptx_barrier_cluster_wait();
}

/* And here at the end: shared memory of a block that has left could still be arrived at. */
static __device__ inline void product_close(void) {
    __syncwarp();
    ptx_barrier_cluster_arrive();
    ptx_barrier_cluster_wait();
}

/* Asks for all loads of the cluster's tiles, as stages become free. One thread. */
template <typename Tile>
static __device__ inline void product_load(product_shared<Tile> *shared, const CUtensorMap *x,
                                           const CUtensorMap *w, const product_grid *grid) {
    constexpr int kHalfCols = Tile::kCols / kProductCluster;
    const uint32_t rank = ptx_cluster_ctarank(), clusters = gridDim.x / kProductCluster;
    const uint64_t x_policy = ptx_createpolicy_evict_last(), w_policy = ptx_createpolicy_evict_first();
    uint32_t stage = 0, parity = 1; /* nobody has to leave a fresh stage */
    for (uint32_t t = blockIdx.x / kProductCluster; t < grid->row_blocks * grid->col_blocks; t += clusters) {
        const product_place place = product_place_of(grid, t);
        const int32_t row = (int32_t)((place.row_block * kProductCluster + rank) * kProductRows);
        const int32_t col = (int32_t)(place.col_block * Tile::kCols + rank * kHalfCols);
        for (uint32_t k = 0; k < grid->depth_blocks; k++) {
            const uint32_t full = shared_address(&shared->full[stage]);
            product_wait(shared_address(&shared->empty[stage]), parity);
            ptx_mbarrier_arrive_expect_tx(full, Tile::kStageBytes);
            ptx_tma_load_2d(shared_address(shared->a[stage]), x, (int32_t)(k * kProductDepth), row, full,
                            x_policy);
            ptx_tma_load_2d_multicast(shared_address(shared->b[stage] + rank * kHalfCols * kProductDepth), w,
                                      (int32_t)(k * kProductDepth), col, full, (1 << kProductCluster) - 1,
                                      w_policy);
            if (++stage == Tile::kStages) {
                stage = 0;
                parity ^= 1;
            }
        }
    }
}

/* An operand whose rows of 64 elements (128 bytes) lie one behind the other, swizzled by 128 bytes: groups of
 * 8 rows are 1024 bytes apart. Only the low word depends on the address: 16 elements further in k is 32
 * bytes, a low word 2 higher. */
static __device__ inline uint32_t product_operand(uint32_t address) {
    return (address >> 4 & 0x3fff) | 1u << 16;
}
static __device__ inline uint64_t product_descriptor(uint32_t operand) {
    return (uint64_t)(1u << 30 | 1024 >> 4) << 32 | operand;
}

static __device__ inline void product_step(float (&acc)[96], uint64_t a, uint64_t b, int32_t add) {
    ptx_wgmma_m64n192k16_bf16(acc, a, b, add);
}
static __device__ inline void product_step(float (&acc)[128], uint64_t a, uint64_t b, int32_t add) {
    ptx_wgmma_m64n256k16_bf16(acc, a, b, add);
}

/* Tells both blocks that this warp has read the stage. */
template <typename Tile>
static __device__ inline void product_release(product_shared<Tile> *shared, uint32_t stage) {
    const uint32_t lane = threadIdx.x % 32;
    if (lane < kProductCluster) {
        ptx_mbarrier_arrive_cluster(ptx_mapa(shared_address(&shared->empty[stage]), lane));
    }
}

/* Before the first tile of a warpgroup: `second` of the two lets the first one begin. */
template <typename Tile> static __device__ inline void product_take_turns(bool second) {
    if (Tile::kTurns && second) ptx_barrier_arrive(kFirstsTurn, kTurnThreads);
}

template <typename Tile> static __device__ inline void product_await_turn(bool second) {
    if (Tile::kTurns) ptx_barrier_sync(second ? kSecondsTurn : kFirstsTurn, kTurnThreads);
}

template <typename Tile> static __device__ inline void product_pass_turn(bool second) {
    if (Tile::kTurns) ptx_barrier_arrive(second ? kFirstsTurn : kSecondsTurn, kTurnThreads);
}

/* The stages of one tile, from the cluster's stage number `step` on, counted from 0: multiply(stage, add)
 * queues the products of a stage. In its turn, which it passes on. All 128 threads of a warpgroup; `second`:
 * of the two.
 */
template <typename Tile, typename Multiply>
static __device__ inline void product_stages(product_shared<Tile> *shared, uint32_t step, bool second,
                                             uint32_t depth_blocks, Multiply multiply) {
    uint32_t stage = step % Tile::kStages, parity = step / Tile::kStages & 1, before = 0;
    uint32_t k = 0;
    do { /* at least once: without a path on which the sums are not set, what follows is compiled once */
        product_wait(shared_address(&shared->full[stage]), parity);
        ptx_wgmma_fence();
        multiply(stage, k > 0);
        ptx_wgmma_commit_group();
        ptx_wgmma_wait_group<1>(); /* the stage before has been read: one in flight, one done */
        if (k > 0) product_release(shared, before);
        before = stage;
        if (++stage == Tile::kStages) {
            stage = 0;
            parity ^= 1;
        }
    } while (++k < depth_blocks);
    product_pass_turn<Tile>(second);
    ptx_wgmma_wait_group<0>();
    product_release(shared, before);
}

/* No use of a sum moves above the wait. */
template <typename Tile>
static __device__ inline void product_done(float (&acc)[Tile::kHalves][Tile::kSums]) {
#pragma unroll
    for (int half = 0; half < Tile::kHalves; half++) {
#pragma unroll
        for (int i = 0; i < Tile::kSums; i++) asm volatile("" : "+f"(acc[half][i])::"memory");
    }
}

/* The sums of the cluster's tile number `tile`, counted from 0; `first_row`: of the warpgroup, in the block's
 * rows. All 128 threads of a warpgroup. */
template <typename Tile>
static __device__ inline void product_multiply(product_shared<Tile> *shared, uint32_t tile,
                                               uint32_t depth_blocks, uint32_t first_row,
                                               float (&acc)[Tile::kHalves][Tile::kSums]) {
    const uint32_t a0 = product_operand(shared_address(shared->a[0] + first_row * kProductDepth));
    const uint32_t b0 = product_operand(shared_address(shared->b[0]));
    product_await_turn<Tile>(tile % 2);
    product_stages(shared, tile * depth_blocks, tile % 2, depth_blocks, [&](uint32_t stage, bool add) {
        const uint32_t a = a0 + stage * (sizeof shared->a[0] >> 4);
        const uint32_t b = b0 + stage * (sizeof shared->b[0] >> 4);
#pragma unroll
        for (int slice = 0; slice < kProductDepth / 16; slice++) {
#pragma unroll
            for (int half = 0; half < Tile::kHalves; half++) {
                product_step(acc[half],
                             product_descriptor(a + half * (64 * kProductDepth * 2 >> 4) + 2 * slice),
                             product_descriptor(b + 2 * slice), add || slice > 0);
            }
        }
    });
    product_done<Tile>(acc);
}

#endif
