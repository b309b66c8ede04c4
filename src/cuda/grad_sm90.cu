/* Gradients' products on Hopper: grad_x += dz w and grad_w (+)= dz^T x of blocks of columns, one launch.
 *
 *   loads, products    the ring, barriers and turns of sm90_product.cuh: two blocks a cluster, tiles of
 *                      128 x 192 a block, two warpgroups in turn
 *   sums               f32, onto what is there or over it; or bf16. One warpgroup's are written behind the
 *                      other's products
 *   dz                 of the next block, from kept exponentials, by the three warps beside the one that
 * loads
 *
 * Which operand has its k where:
 *
 *   grad_x    a = dz     [tokens][columns]   k (columns) one behind the other, as in the forward
 *             b = w      [columns][hidden]   turned: hidden one behind the other
 *   grad_w    a = dz^T   [tokens][columns]   turned: columns one behind the other
 *             b = x      [tokens][hidden]    turned
 *
 * A turned operand comes by boxes of 64 elements (the 128 bytes of the swizzle) by rows of k:
 *
 *   a   [2 blocks of 64 columns][64 of k][64]            b   [2 halves of k][3 blocks of 64][32 of k][64]
 *
 * Each block of the cluster loads one half of b's k into both. For wgmma, 8 rows of k are 1024 bytes, and
 * blocks of 64 lie 4096 bytes apart in b; in a, a product has one.
 *
 * An element is one sum a block of columns in ascending k, and one addition to what is there, block by block:
 * its bits depend neither on the grid nor on the tile. 192 columns hardly ever divide n_hidden; the last tile
 * of a row has 64 or 128, by instructions of that width.
 *
 * Tiles differ in cost, so clusters ask for them: numbers are handed out in ascending order, block by block.
 * A tile of block b waits for
 *
 *   made       all dz of the block, where the kernel makes them
 *   x_warps    the sums of grad_x of block b - 1
 *
 * and a piece of dz of block b for `warps`, all tiles of block b - 2, whose dz it writes over. Whoever holds
 * a number is running, and waits for earlier numbers only: any number of clusters at work gets to the end.
 *
 * Shared memory: the ring, 204,880 bytes; orders of tiles; rows of the warps that make dz. Registers: 56 for
 * the first warpgroup, 224 for the others: 64,512 of 65,536. */
#include "cuda/dz.cuh"
#include "cuda/ptx/counter.cuh"
#include "cuda/sm90_tiles.cuh"

#include <cuda_bf16.h>

enum {
    kLoadRegisters = 56,
    kMultiplyRegisters = 224,
    kAhead = 2, /* orders behind a tile's own that are written before its loads: its warpgroup's next */
    kBlocks = (int)kFusedCols / (int)kGradBlock,
    kOrders = 16, /* the loads are at most 7 tiles ahead of a tile whose sums are being written */
    kMakers = 3,
    kLoaderLooks = 200,    /* nanoseconds between two looks at a count */
    kMakerLooks = 2000,    /* some 400 warps that make dz are early, and look at one word */
    kStoreCols = 32,       /* of a row at a time */
    kPaceNanoseconds = 150 /* between those and the next: many stores at once take cycles from the
                                products of the other warpgroup; grad_x is read first, which is pace enough */
};

/* A tile, from the thread that loads it to the warpgroup that multiplies. It is written before the loads of
 * the warpgroup's tile before, and may be read once those have come. (A barrier of its own would be a loop
 * between tiles: with one, or with a turn passed on behind the last tile, the compiler finds no registers for
 * the sums and serializes the products.) */
typedef struct grad_order {
    uint32_t step, depth; /* the cluster's first stage, and their number; 0: there are no more tiles */
    uint32_t kind;        /* kBlocks of_w + width */
    uint32_t block;
    int32_t row, column; /* of the block's product */
} grad_order;

typedef struct grad_shared {
    product_shared<fused_tile> product;
    uint64_t told[kOrders]; /* in the cluster's second block: a number has come */
    grad_order orders[kOrders];
    uint32_t numbers[kOrders];
    dz_row rows[kMakers][kKeptRows];
} grad_shared;

static_assert(sizeof(grad_shared) <= 232448, "a block has 227 KiB of shared memory");
static_assert(2 * (int)kGradHalfDepth == (int)kProductDepth && (int)kGradBlock == (int)kProductDepth);
static_assert((int)kSumCols % (int)kFusedRows == 0, "a tile of grad_w has columns of one block");

/* ---- Who does what ------------------------------------------------------------------------------ */

static __device__ inline const lli_cuda_grad_block *block_of(const lli_cuda_grad_products *args,
                                                             uint32_t block) {
    return block + 1 < args->n_blocks ? &args->block : &args->last;
}

/* Tile `number` of the launch; `step`: the cluster's first stage of it. */
static __device__ inline grad_order order_of(const lli_cuda_grad_products *args, uint32_t number,
                                             uint32_t step) {
    const uint32_t before = args->n_blocks - 1; /* blocks that are alike */
    const uint32_t block = number < before * args->block.tiles ? number / args->block.tiles : before;
    const lli_cuda_grad_block *tiles = block_of(args, block);
    number -= block * args->block.tiles;
    uint32_t i = 0;
    for (; i < kGradRuns && number >= tiles->runs[i].tiles; i++) number -= tiles->runs[i].tiles;
    if (i == kGradRuns) return grad_order{};
    const lli_cuda_grad_run *run = &tiles->runs[i];
    const product_grid grid = {run->row_blocks, run->n_cols, 0, args->of[run->of_w].group_rows};
    const product_place place = product_place_of(&grid, number);
    const uint32_t row_block = place.row_block * kProductCluster + ptx_cluster_ctarank();
    return grad_order{step,
                      tiles->depth[run->of_w],
                      kBlocks * run->of_w + run->width,
                      block,
                      (int32_t)(row_block * kProductRows),
                      (int32_t)(place.col_block + run->first_col) * (int32_t)kFusedCols};
}

/* A tile's number goes to whichever cluster asks. Its first block does, and tells the second. */
static __device__ inline uint32_t next_number(const lli_cuda_grad_products *args, grad_shared *shared,
                                              uint32_t turn) {
    const uint32_t slot = turn % kOrders, told = shared_address(&shared->told[slot]),
                   number = shared_address(&shared->numbers[slot]);
    if (ptx_cluster_ctarank() == 0) {
        const uint32_t next = atomicAdd(&args->queue->tiles, 1);
        ptx_st_async_b32(ptx_mapa(number, 1), next, ptx_mapa(told, 1));
        return next;
    }
    ptx_mbarrier_arrive_expect_tx(told, sizeof(uint32_t));
    product_wait(told, turn / kOrders & 1);
    return *(volatile uint32_t *)&shared->numbers[slot];
}

static __device__ inline void next_order(const lli_cuda_grad_products *args, grad_shared *shared,
                                         uint32_t turn) {
    uint32_t step = 0;
    if (turn > 0) {
        const grad_order *before = &shared->orders[(turn - 1) % kOrders];
        step = before->step + before->depth;
    }
    shared->orders[turn % kOrders] = order_of(args, next_number(args, shared, turn), step);
}

/* A fault traps, after some 17 s, instead of hanging. */
static __device__ inline void wait_for(const uint32_t *count, uint32_t wanted, uint32_t nanoseconds) {
    for (uint64_t slept = 0; ptx_ld_acquire_gpu_u32(count) < wanted; slept += nanoseconds) {
        if (slept >> 34) __trap();
        __nanosleep(nanoseconds);
    }
}

/* Before the first loads of a block's tiles. */
static __device__ inline void wait_for_block(const lli_cuda_grad_products *args, uint32_t block) {
    const lli_cuda_grad_queue *queue = args->queue;
    if (block > 0) {
        wait_for(&queue->x_warps[(block - 1) % 2],
                 ((block - 1) / 2 + 1) * kGradTileWarps * args->block.x_tiles, kLoaderLooks);
    }
    if (block >= args->ready) {
        wait_for(&queue->made[block % 2],
                 (block - args->ready) / 2 * args->block.pieces + block_of(args, block)->pieces,
                 kLoaderLooks);
        ptx_fence_proxy_async(); /* what others wrote, before the copy engine reads it */
    }
}

/* The last cluster leaves the queue as it was found. */
static __device__ inline void leave_queue(const lli_cuda_grad_products *args) {
    if (atomicAdd(&args->queue->left, 1) == args->clusters - 1) *args->queue = lli_cuda_grad_queue{};
}

/* ---- Loads -------------------------------------------------------------------------------------- */

static __device__ inline void load_tile(const lli_cuda_grad_products *args, product_shared<fused_tile> *ring,
                                        const grad_order *order) {
    const uint32_t rank = ptx_cluster_ctarank(), of_w = order->kind > kBlocks;
    const lli_cuda_grad_product *product = &args->of[of_w];
    const uint64_t policy = ptx_createpolicy_evict_last();
    const int32_t in_dz = (int32_t)(order->block % 2 * kSumCols),
                  in_b = of_w ? 0 : (int32_t)(order->block * kSumCols);
    uint32_t stage = order->step % fused_tile::kStages, parity = (order->step / fused_tile::kStages & 1) ^ 1;
    for (uint32_t d = 0; d < order->depth; d++) {
        const uint32_t full = shared_address(&ring->full[stage]), a = shared_address(ring->a[stage]);
        const uint32_t b = shared_address(ring->b[stage] + rank * kGradHalfDepth * kFusedCols);
        const int32_t k = (int32_t)(d * kProductDepth);
        product_wait(shared_address(&ring->empty[stage]), parity); /* nobody has to leave a fresh stage */
        ptx_mbarrier_arrive_expect_tx(full, fused_tile::kStageBytes);
        if (of_w) {
            ptx_tma_load_3d(a, &product->a, 0, k, (in_dz + order->row) / kGradBlock, full, policy);
        } else {
            ptx_tma_load_2d(a, &product->a, in_dz + k, order->row, full, policy);
        }
        ptx_tma_load_3d_multicast(b, &product->b, 0, in_b + k + (int32_t)(rank * kGradHalfDepth),
                                  order->column / kGradBlock, full, (1 << kProductCluster) - 1, policy);
        if (++stage == fused_tile::kStages) {
            stage = 0;
            parity ^= 1;
        }
    }
}

/* One thread; the first kAhead orders are there. */
static __device__ inline void load_tiles(const lli_cuda_grad_products *args, grad_shared *shared) {
    uint32_t waited = 0; /* blocks */
    for (uint32_t turn = 0;; turn++) {
        const grad_order *order = &shared->orders[turn % kOrders];
        if (order->depth == 0) break;
        next_order(args, shared, turn + kAhead);
        if (order->block >= waited) {
            wait_for_block(args, order->block);
            waited = order->block + 1;
        }
        load_tile(args, &shared->product, order);
    }
}

/* ---- Products ----------------------------------------------------------------------------------- */

/* The low word of a turned operand's descriptor: blocks of 64 elements lie kApart bytes from one another. */
template <int kApart> static __device__ inline uint32_t turned_operand(uint32_t address) {
    return (address >> 4 & 0x3fff) | (uint32_t)kApart >> 4 << 16;
}

template <int kTurnedA, int kWidth>
static __device__ inline void grad_step(float (&acc)[kHalfSums], uint64_t a, uint64_t b, int32_t add) {
    if (kWidth == 1) ptx_wgmma_m64n64k16_bf16<kTurnedA, 1>(acc, a, b, add);
    if (kWidth == 2) ptx_wgmma_m64n128k16_bf16<kTurnedA, 1>(acc, a, b, add);
    if (kWidth == 3) ptx_wgmma_m64n192k16_bf16<kTurnedA, 1>(acc, a, b, add);
}

template <int kTurnedA, int kWidth>
static __device__ inline void grad_multiply(product_shared<fused_tile> *shared, const grad_order *order,
                                            bool second, float (&sums)[2][kHalfSums]) {
    constexpr int kBlockBytes = kGradBlock * kProductDepth * 2, kSliceBytes = 16 * kGradBlock * 2;
    const uint32_t address = shared_address(shared->a[0]);
    const uint32_t a0 = kTurnedA ? turned_operand<kBlockBytes>(address) : product_operand(address);
    const uint32_t b0 = turned_operand<kBlockBytes / 2>(shared_address(shared->b[0]));
    product_stages(shared, order->step, second, order->depth, [&](uint32_t stage, bool add) {
        const uint32_t a = a0 + stage * (sizeof shared->a[0] >> 4);
        const uint32_t b = b0 + stage * (sizeof shared->b[0] >> 4);
#pragma unroll
        for (int slice = 0; slice < kProductDepth / 16; slice++) {
            const uint32_t in_a = (uint32_t)slice * (kTurnedA ? kSliceBytes >> 4 : 2),
                           in_b = ((uint32_t)slice / 2 * (kBlocks * kBlockBytes / 2) +
                                   (uint32_t)slice % 2 * kSliceBytes) >>
                                  4;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                grad_step<kTurnedA, kWidth>(sums[half],
                                            product_descriptor(a + half * (kBlockBytes >> 4) + in_a),
                                            product_descriptor(b + in_b), add || slice > 0);
            }
        }
    });
    product_done<fused_tile>(sums);
}

/* ---- Sums --------------------------------------------------------------------------------------- */

/* Of 16 columns of a row a lane has two in the first 8 and two in the second. Neighbouring lanes swap: the
 * even one then has four in a row of the first, the odd one of the second; a quad has 64 bytes of f32. */
static __device__ inline float4 four_of_sixteen(const tile_logits acc, int half, int i, int lane) {
    const bool odd = lane & 1;
    const float first[2] = {acc[half][i], acc[half][i + 1]}, second[2] = {acc[half][i + 4], acc[half][i + 5]};
    const float x = __shfl_xor_sync(0xffffffffu, odd ? first[0] : second[0], 1),
                y = __shfl_xor_sync(0xffffffffu, odd ? first[1] : second[1], 1);
    return odd ? make_float4(x, y, second[0], second[1]) : make_float4(first[0], first[1], x, y);
}

static __device__ inline float4 plus(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

template <int kForm, int kWidth>
static __device__ inline void store_sums(const lli_cuda_grad_product *product, const tile_logits acc,
                                         int32_t first_row, int32_t first_column) {
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const int lane = this_lane(), warp = (int)(ptx_tid_x() % 128 / 32);
        const int32_t row = first_row + 64 * (r / 2) + 16 * warp + 8 * (r % 2) + lane / 4;
        const bool here = row < product->n_rows;
        const int64_t at = row * product->c_ld + first_column + 8 * (lane % 2) + 4 * (lane / 2 % 2);
#pragma unroll
        for (int c = 0; c < kWidth * kGradBlock; c += kStoreCols) {
            float4 sums[kStoreCols / 16];
#pragma unroll
            for (int j = 0; j < kStoreCols / 16; j++) {
                sums[j] = four_of_sixteen(acc, r / 2, 4 * (c / 8 + 2 * j) + 2 * (r % 2), lane);
            }
            if (!here) continue;
            if (kForm == kGradNarrow) {
                uint2 *to = (uint2 *)((uint16_t *)product->c + at + c);
#pragma unroll
                for (int j = 0; j < kStoreCols / 16; j++) {
                    to[4 * j] = make_uint2(bf16_pair(sums[j].x, sums[j].y), bf16_pair(sums[j].z, sums[j].w));
                }
            } else {
                float4 *to = (float4 *)((float *)product->c + at + c);
                float4 before[kStoreCols / 16]; /* past L1, which would not see others' sums */
#pragma unroll
                for (int j = 0; kForm == kGradAdd && j < kStoreCols / 16; j++) before[j] = __ldcg(&to[4 * j]);
#pragma unroll
                for (int j = 0; j < kStoreCols / 16; j++) {
                    to[4 * j] = kForm == kGradAdd ? plus(before[j], sums[j]) : sums[j];
                }
            }
            if (kForm != kGradAdd) __nanosleep(kPaceNanoseconds);
        }
    }
}

template <int kTurnedA, int kWidth>
static __device__ inline void tile_of_grad(const lli_cuda_grad_products *args, grad_shared *shared,
                                           const grad_order *order, bool second) {
    const lli_cuda_grad_product *product = &args->of[kTurnedA];
    tile_logits sums;
    grad_multiply<kTurnedA, kWidth>(&shared->product, order, second, sums);
    const uint32_t block = order->block;
    const int32_t form = !kTurnedA && block > 0 ? (int32_t)kGradAdd : product->form;
    const int32_t row = order->row + (kTurnedA ? (int32_t)(block * kSumCols) : 0);
    const int32_t column = order->column;
    if (form == kGradAdd) store_sums<kGradAdd, kWidth>(product, sums, row, column);
    if (form == kGradOverwrite) store_sums<kGradOverwrite, kWidth>(product, sums, row, column);
    if (kTurnedA && form == kGradNarrow) store_sums<kGradNarrow, kWidth>(product, sums, row, column);
    __syncwarp(); /* the warp's sums are written before it is counted */
    if (this_lane() == 0) {
        if (!kTurnedA) ptx_red_release_gpu_add_u32(&args->queue->x_warps[block % 2], 1);
        ptx_red_release_gpu_add_u32(&args->queue->warps[block % 2], 1);
    }
}

/* ---- dz ----------------------------------------------------------------------------------------- */

/* Eight dz of row `of`, whose factor for the lane's tile is lane `owner`'s. */
static __device__ inline uint4 eight_dz(const dz_row *of, const dz_factor *mine, int32_t anchor, int owner,
                                        const uint32_t *pairs) {
    dz_factor factor = {.alpha = __shfl_sync(0xffffffffu, mine->alpha, owner)};
    uint32_t words[4];
    if (of->apart || of->gamma != 0.0f) { /* the whole warp */
        factor.gamma = __shfl_sync(0xffffffffu, mine->gamma, owner);
        factor.shift = __shfl_sync(0xffffffffu, mine->shift, owner);
        anchor = __shfl_sync(0xffffffffu, anchor, owner);
#pragma unroll
        for (int q = 0; q < 4; q++) {
            float dz[2];
#pragma unroll 1
            for (int e = 0; e < 2; e++) {
                const float p = e ? exp16_high(pairs[q]) : exp16_low(pairs[q]);
                dz[1] = of->apart ? apart_dz_from(of, anchor, p) : dz_from<true>(&factor, of, p);
                if (e == 0) dz[0] = dz[1];
            }
            words[q] = bf16_pair(dz[0], dz[1]);
        }
        return make_uint4(words[0], words[1], words[2], words[3]);
    }
    return fast_eight(of, &factor, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
}

/* Rows [first, first + kKeptRows) of four canonical tiles: as dz_kept.cu, a warp in the place of a block. */
static __device__ inline void make_four_tiles(const lli_cuda_grad_products *args, const dz_row *rows,
                                              int64_t first, uint32_t block, int32_t tile_in_block) {
    const int lane = this_lane(), j = lane % 8;
    const int32_t tile = (int32_t)block * (kSumCols / kTileCols) + tile_in_block;
    const bool there = (int64_t)tile * kTileCols < args->dz.padded_cols;
    const uint16_t *codes = there ? kept_tile(&args->kept, tile) + first * kTileCols : NULL;
    uint16_t *to = (uint16_t *)args->dz.dz + first * args->dz.dz_ld + block % 2 * kSumCols +
                   tile_in_block * kTileCols + 8 * j;
    const int32_t column = tile * kTileCols + 8 * j;
    int32_t anchor = 0;
    if (there && first + j < args->dz.n_rows) {
        anchor = args->kept.anchors[tile * args->kept.n_rows + first + j];
    }
    const dz_factor factor = factor_of(&rows[j], anchor);
#pragma unroll 1
    for (int r0 = 0; r0 < kKeptRows; r0 += 4) {
        uint32_t pairs[4][4];
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const uint32_t *from = (const uint32_t *)codes + (r0 + r) * (kTileCols / 2) + j;
            const bool real = there && first + r0 + r < args->dz.n_rows;
#pragma unroll
            for (int q = 0; q < 4; q++) pairs[r][q] = real ? __ldcs(from + 8 * q) : 0;
        }
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const dz_row *row = &rows[r0 + r];
            const uint4 dz = eight_dz(row, &factor, anchor, (lane & 24) | (r0 + r), pairs[r]);
            const int32_t target = row->target - column;
            if (!there) continue;
            uint16_t *at = to + (r0 + r) * args->dz.dz_ld;
            *(uint4 *)at = dz;
            if ((uint32_t)target < 8) { /* by the same lane, so after it */
                const __nv_bfloat16 of_target = __float2bfloat16_rn(row->target_dz);
                at[target] = *(const uint16_t *)&of_target;
            }
        }
    }
}

/* One warp. */
static __device__ inline void make_dz(const lli_cuda_grad_products *args, dz_row *rows) {
    const int lane = this_lane();
    const uint32_t alike = args->n_blocks - 1 - args->ready,
                   all = alike * args->block.pieces + args->last.pieces;
    for (;;) {
        uint32_t piece = 0;
        if (lane == 0) piece = atomicAdd(&args->queue->pieces, 1);
        piece = __shfl_sync(0xffffffffu, piece, 0);
        if (piece >= all) return;
        const uint32_t of = piece < alike * args->block.pieces ? piece / args->block.pieces : alike;
        const uint32_t block = args->ready + of, within = piece - of * args->block.pieces;
        const uint32_t across =
            block_of(args, block)->pieces / (args->block.depth[1] * (kGradBlock / kKeptRows));
        const int64_t first = (int64_t)(within / across) * kKeptRows;
        if (lane == 0)
            wait_for(&args->queue->warps[block % 2], block / 2 * kGradTileWarps * args->block.tiles,
                     kMakerLooks);
        if (lane < kKeptRows) load_row(&args->dz, first + lane, &rows[lane]);
        __syncwarp(); /* the rows, and that the memory is free */
#pragma unroll 1
        for (uint32_t q = 0; q < kKeptTiles / 4; q++) {
            make_four_tiles(args, rows, first, block,
                            (int32_t)(within % across * kKeptTiles + 4 * q) + lane / 8);
        }
        ptx_fence_proxy_async(); /* what was written, before the copy engine reads it */
        __syncwarp();            /* all of it before it is counted, and the rows before they change */
        if (lane == 0) ptx_red_release_gpu_add_u32(&args->queue->made[block % 2], 1);
    }
}

/* ---- The kernel --------------------------------------------------------------------------------- */

static __global__ void __cluster_dims__(kProductCluster, 1, 1) __launch_bounds__(kProductThreads, 1)
    grad_products(const __grid_constant__ lli_cuda_grad_products args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t memory[];
    grad_shared *shared = (grad_shared *)memory;
    if (threadIdx.x == 0) {
        for (int i = 0; i < kOrders; i++) ptx_mbarrier_init(shared_address(&shared->told[i]), 1);
    }
    product_open(&shared->product);
    if (threadIdx.x == 0) {
        for (uint32_t turn = 0; turn < kAhead; turn++) next_order(&args, shared, turn);
    }
    __syncthreads(); /* each warpgroup finds its first order */
    if (threadIdx.x < 128) {
        ptx_setmaxnreg_dec<kLoadRegisters>();
        if (threadIdx.x == 0) load_tiles(&args, shared);
        if (threadIdx.x >= 32 && args.ready < args.n_blocks)
            make_dz(&args, shared->rows[threadIdx.x / 32 - 1]);
    } else {
        ptx_setmaxnreg_inc<kMultiplyRegisters>();
        const uint32_t second = threadIdx.x / 128 - 1;
        product_take_turns<fused_tile>(second);
        for (uint32_t turn = second;; turn += 2) {
            const grad_order *order = &shared->orders[turn % kOrders];
            if (order->depth == 0) break;
            product_await_turn<fused_tile>(second);
            switch (order->kind) {
            case 1:
                tile_of_grad<0, 1>(&args, shared, order, second);
                break;
            case 2:
                tile_of_grad<0, 2>(&args, shared, order, second);
                break;
            case 3:
                tile_of_grad<0, 3>(&args, shared, order, second);
                break;
            case 4:
                tile_of_grad<1, 1>(&args, shared, order, second);
                break;
            case 5:
                tile_of_grad<1, 2>(&args, shared, order, second);
                break;
            default:
                tile_of_grad<1, 3>(&args, shared, order, second);
                break;
            }
        }
    }
    product_close();
    if (threadIdx.x == 0 && ptx_cluster_ctarank() == 0) leave_queue(&args);
#endif
}

extern "C" int lli_cuda_grad_launch(const lli_cuda_grad_products *args, cudaStream_t stream) {
    return launch(grad_products, dim3(kProductCluster * args->clusters), dim3(kProductThreads),
                  sizeof(grad_shared), stream, *args);
}

extern "C" int lli_cuda_load_grad(void) {
    cudaFuncAttributes a;
    const int status = (int)cudaFuncSetAttribute(grad_products, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 (int)sizeof(grad_shared));
    return status ? status : (int)cudaFuncGetAttributes(&a, grad_products);
}
