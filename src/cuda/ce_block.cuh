/* What the roles of ce_rows.cu share: a block's memory, its barriers, whose turn it is, and sending. */
#ifndef LLI_CUDA_CE_BLOCK_CUH
#define LLI_CUDA_CE_BLOCK_CUH

#include "cuda/ce.h"
#include "cuda/ce_tile.cuh"
#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mbarrier.cuh"

enum {
    kTileWarps = 16,
    kFinishWarps = 2,
    kOtherWarps = kFinishWarps + 1, /* and load */
    kSlotsMax = 3,  /* no more than there are finish warps in a cluster; a single block has two */
    kSmallKib = 64, /* of a row in a block with three slots */
    kLargeKib = 96, /* with two */
    kPortable = 8   /* blocks of a cluster on any device that has clusters */
};

/* What a warp found in its tiles of a row. */
typedef struct __align__(16) warp_record {
    int64_t s[3], u[3]; /* u: with entropy */
    int32_t top;
    float max;
    int32_t argmax; /* column; -1: none */
    int32_t reserved;
}
warp_record;
/* The target's tile. */
typedef struct __align__(16) target_record {
    lli_softmax whole, rest;
    float z;
    int32_t reserved[3];
}
target_record;
enum {
    kRecordPieces = sizeof(warp_record) / 16,
    kTargetPieces = sizeof(target_record) / 16,
    kGradPieces = sizeof(ce_grad_row) / 16
};
static_assert(sizeof(warp_record) == 64 && sizeof(target_record) == 128 && sizeof(ce_grad_row) == 64,
              "they travel by 16 bytes a lane");

enum { kSomeNan = 1, kSomeWide = 2 };

typedef struct __align__(16) slot_state {
    ce_grad_row grad; /* target: column of the whole row */
    uint64_t full, ready, empty, reserved;
}
slot_state;

/* A row that is being finished. */
typedef struct __align__(16) gather_state {
    target_record target;
    ce_grad_row grad;
    uint64_t gathered, reserved;
}
gather_state;

typedef struct __align__(16) block_state {
    slot_state slots[kSlotsMax];
    gather_state gathers[kFinishWarps];
    warp_record records[kTileWarps]; /* on their way out */
    target_record targets[kTileWarps];
}
block_state;

/* What a block knows for the whole kernel; in shared memory, set once. */
template <typename E> struct ce_block {
    const lli_cuda_ce *args;
    E *rows; /* of slot 0 */
    block_state *state;
    warp_record *records;    /* [finish warp, block, tile warp] */
    uint64_t *sums, *u_sums; /* S 2^26 + anchor (signed, 26 bits); S = 0: nothing to add */
    int64_t first;           /* column of the block's first */
    int64_t step;            /* from one row of the cluster to its next */
    int32_t rank, cluster, slots, n_warps;
    int32_t n_cols, n_tiles;
    int32_t tiles; /* of every block but the last ones: a slot holds so many */
    uint32_t bulk_bytes;

    __device__ inline E *row(int slot) const { return rows + (int64_t)slot * tiles * kTileCols; }
};

static __device__ inline int lane_of(void) {
    return threadIdx.x % 32;
}
static __device__ inline int warp_of(void) {
    return threadIdx.x / 32;
}

/* A row of the cluster's: its slot, and the parity of the slot's barriers. */
typedef struct ce_turn {
    int32_t slot;
    uint32_t phase;
} ce_turn;

static __device__ inline void next_turn(ce_turn *turn, int32_t slots) {
    if (++turn->slot < slots) return;
    turn->slot = 0;
    turn->phase ^= 1;
}

/* Who finishes it: block, and warp of that block. */
typedef struct ce_finisher {
    int32_t block, warp;
} ce_finisher;

static __device__ inline void next_finisher(ce_finisher *finisher, int32_t cluster) {
    if (++finisher->block < cluster) return;
    finisher->block = 0;
    if (++finisher->warp == kFinishWarps) finisher->warp = 0;
}

static __device__ inline uint32_t address_of(const void *shared) {
    return (uint32_t)__cvta_generic_to_shared(shared);
}
static __device__ inline void await(const uint64_t *barrier, uint32_t phase) {
    const uint32_t address = address_of(barrier);
    while (!ptx_mbarrier_try_wait_parity(address, phase)) continue;
}
/* By a whole warp, for all that its lanes did before. */
static __device__ inline void arrive(const uint64_t *barrier) {
    __syncwarp();
    if (lane_of() == 0) ptx_mbarrier_arrive(address_of(barrier));
}

/* n pieces of 16 bytes from the own block's memory to the same variable of another's, whose barrier counts
 * them. By a whole warp, whose lanes see what is sent. */
static __device__ inline void send(const void *from, const void *to, int n, const uint64_t *barrier,
                                   uint32_t peer) {
    if (lane_of() < n) {
        ptx_st_async_v4(ptx_mapa(address_of(to), peer) + 16 * lane_of(), ((const uint4 *)from)[lane_of()],
                        ptx_mapa(address_of(barrier), peer));
    }
}

/* The target of a row to come, as it lies there: asked for a row ahead, looked at when its turn comes. */
static __device__ inline int64_t raw_target(const lli_cuda_finish *row, int64_t i) {
    return i < row->n_rows ? id_at(&row->targets, i) : 0;
}

#endif
