/* ce over given logits with each logit read once: a row lies on the chip, in the shared memory of a cluster of
 * blocks, from its arrival to the last element of its gradient.
 *
 *   a cluster    one row after another; block b holds canonical tiles [b tiles, (b + 1) tiles) of it, in one of
 *                its slots; rows n, n + 1, ... of the cluster go round the slots
 *   load warp    starts the bulk copy of a row's part into a slot that is empty
 *   tile warps   statistics of row n, a lane a tile (ce_tile.cuh), then the gradient of row n - 1 in the same
 *                columns, from shared memory to global: what follows from row n's statistics takes its time
 *                meanwhile
 *   finish warps, in turn: the warps' sums and the target's tile -> a part of 200 bytes, into every block of the
 *                cluster -> results of all parts, in double -> coefficients of the gradient. Block 0 writes results
 *
 * Barriers (mbarrier), by slot:
 *   full    load warp and its bytes -> tile and finish warps         stats   tile warps -> finish warp
 *   ready   finish warp (coefficients) -> tile warps                 empty   tile and finish warps -> load warp
 * and by finish warp and parity of the rows that it exchanges:
 *   parts   bytes of every block's part -> finish warp. A peer sends the part of the warp's row after next only
 *           when it has this block's part of the next one, which is sent when this row's have been read: two
 *           suffice.
 * A slot's sums and coefficients are overwritten only after its row has been replaced, that is after empty.
 *
 * Sums are integers, so neither lanes, warps, blocks nor their order show in a bit.
 *
 * Bank conflicts: neighbouring lanes' tiles are 128 or 256 bytes apart, so each lane starts to read at another
 * 16-byte piece of its tile and goes round.
 *
 * Shared memory: slots x (tiles x 64 E) | block_state | 4 x cluster x ce_part | tiles x 8 (twice with entropy).
 *
 * What lost: three blocks a multiprocessor with one slot each and block barriers between the steps: 2.6 ms
 * instead of a copy's 1.0 at 8192 x 128256 bf16, with half of the issue slots empty. */
#include "cuda/ce.h"
#include "cuda/ce_tile.cuh"
#include "cuda/finish.cuh"
#include "cuda/lanes.cuh"
#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mbarrier.cuh"

enum {
    kTileWarps = 16,
    kFinishWarps = 2,
    kOtherWarps = kFinishWarps + 1, /* and load */
    kSlotsMax = 3,
    kSmallKib = 64, /* of a row in a block: three slots */
    kLargeKib = 96, /* two slots */
    kPortable = 8   /* blocks of a cluster on any device that has clusters */
};

typedef struct __align__(16) ce_part {
    lli_cuda_row row;
    lli_exact soft;
}
ce_part;
enum { kRowPieces = sizeof(lli_cuda_row) / 16, kPartPieces = sizeof(ce_part) / 16 };
static_assert(sizeof(lli_cuda_row) % 16 == 0 && sizeof(ce_part) % 16 == 0 && kPartPieces <= 32,
              "a part travels by 16 bytes a lane");

/* What a warp found in its tiles of a row. */
typedef struct warp_sums {
    lli_softmax row;
    float max;
    int32_t max_tile; /* -1: none */
    int32_t special;  /* kSome bits */
} warp_sums;
enum { kSomeNan = 1, kSomeWide = 2 };

typedef struct slot_state {
    uint64_t full, stats, ready, empty;
    warp_sums sums[kTileWarps];
    lli_exact soft; /* with smoothing; zero when the slot is empty */
    ce_grad_row grad;
} slot_state;

typedef struct __align__(16) block_state {
    ce_part mine[kFinishWarps];
    uint64_t parts[kFinishWarps][2];
    slot_state slots[kSlotsMax];
}
block_state;

/* What a block knows for the whole kernel; in shared memory, set once. */
template <typename E> struct ce_block {
    const lli_cuda_ce *args;
    E *rows; /* of slot 0 */
    block_state *state;
    ce_part *parts; /* [finish warp, parity, block] */
    uint64_t *records, *u_records; /* S 2^26 + anchor (signed, 26 bits); S = 0: nothing to add */
    int64_t first;                 /* column of the block's first */
    int64_t step;                  /* from one row of the cluster to its next */
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

/* Which row of the cluster's: its slot, and the parity of the slot's barriers. */
typedef struct ce_turn {
    int32_t slot;
    uint32_t phase;
} ce_turn;

static __device__ inline void next_turn(ce_turn *turn, int32_t slots) {
    if (++turn->slot < slots) return;
    turn->slot = 0;
    turn->phase ^= 1;
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

/* The target of a row to come, as it lies there: asked for a row ahead, looked at when its turn comes. */
static __device__ inline int64_t raw_target(const lli_cuda_finish *row, int64_t i) {
    return i < row->n_rows ? id_at(&row->targets, i) : 0;
}

/* ---- Tile warps: statistics --------------------------------------------------------------------- */

/* Group q of a tile, transformed; columns beyond the row are -inf. `turn`: see the top. */
template <typename E, bool kPlain> struct tile_load {
    const ce_block<E> *block;
    const uint4 *tile;
    int32_t column, turn; /* of the tile's first column, in the block */

    __device__ inline void operator()(int q, float *z) const {
        enum { kCount = piece_of<E>::kCount, kPieces = kTileCols / kCount };
        const int piece = (q + turn) & (kPieces - 1);
        piece_of<E>::widen(tile[piece], z);
        if constexpr (!kPlain) {
#pragma unroll
            for (int i = 0; i < kCount; i++) {
                const bool there = column + piece * kCount + i < block->n_cols;
                float slope;
                z[i] = there ? transformed(&block->args->row.transform, z[i], &slope) : -INFINITY;
            }
        }
    }
};

template <typename E, bool kPlain>
static __device__ inline tile_load<E, kPlain> load_of(const ce_block<E> *block, const E *row, int32_t t,
                                                      int32_t turn) {
    return tile_load<E, kPlain>{block, (const uint4 *)(row + (int64_t)t * kTileCols), t * kTileCols, turn};
}

/* Largest logit of a tile as it lies there, two columns of 16 bits at a time. */
template <typename E> static __device__ inline float packed_max(const uint4 *tile, int32_t turn) {
    enum { kPieces = kTileCols / piece_of<E>::kCount };
    uint4 m = tile[turn & (kPieces - 1)];
#pragma unroll
    for (int q = 1; q < kPieces; q++) {
        const uint4 x = tile[(q + turn) & (kPieces - 1)];
        m.x = piece_of<E>::max2(m.x, x.x);
        m.y = piece_of<E>::max2(m.y, x.y);
        m.z = piece_of<E>::max2(m.z, x.z);
        m.w = piece_of<E>::max2(m.w, x.w);
    }
    return piece_of<E>::max_of(piece_of<E>::max2(piece_of<E>::max2(m.x, m.y), piece_of<E>::max2(m.z, m.w)));
}

/* Records of the lane's tiles. Returns kSome bits; *top: the largest of floor(anchor / 32). */
template <typename E, bool kEntropy, bool kPlain>
static __device__ inline int32_t gather_tiles(const ce_block<E> *block, const E *row, lli_exact *soft,
                                              int32_t target_tile, int32_t *top, float *max, int32_t *max_tile) {
    const lli_cuda_finish *args = &block->args->row;
    const int32_t n_tiles = block->n_tiles, step = 32 * block->n_warps;
    uint64_t *records = block->records, *u_records = block->u_records;
    int32_t special = 0;
    *top = LLI_TOP_EMPTY;
    *max = -INFINITY;
    *max_tile = -1;
    for (int32_t t = threadIdx.x; t < n_tiles; t += step) {
        const tile_load<E, kPlain> load = load_of<E, kPlain>(block, row, t, lane_of());
        const float zmax =
            kPlain ? packed_max<E>(load.tile, load.turn) : tile_max<piece_of<E>::kCount>(load);
        if (zmax > *max || (*max_tile < 0 && zmax == zmax)) {
            *max = zmax;
            *max_tile = t;
        }
        if (!kPlain && args->smoothing) {
            const int64_t column = block->first + (int64_t)t * kTileCols;
            const float *cw = args->call.class_weight ? args->call.class_weight + column : NULL;
            tile_soft_sum<piece_of<E>::kCount>(load_of<E, kPlain>(block, row, t, 0), cw,
                                               min(kTileCols, block->n_cols - t * kTileCols), soft);
        }
        uint64_t record = 0;
        if (t == target_tile || zmax == -INFINITY) {
            /* the finish warp's, or nothing */
        } else if (is_plain_max(zmax)) {
            int32_t anchor;
            int64_t s, u;
            plain_tile<kEntropy, piece_of<E>::kCount>(load, zmax, &anchor, &s, &u);
            record = ((uint64_t)s << 26) | ((uint32_t)anchor & 0x3ffffffu);
            if (kEntropy) u_records[t] = (uint64_t)u;
            *top = ::max(*top, anchor >> 5);
        } else {
            special |= zmax < INFINITY ? kSomeWide : kSomeNan;
        }
        records[t] = record;
    }
    return special;
}

/* The records of the warp's tiles in the window of three limbs that hangs at row->top: what lli_softmax_add would
 * have left, summed over lanes. */
template <bool kEntropy>
static __device__ inline void hang_records(const uint64_t *records, const uint64_t *u_records, int32_t n_tiles,
                                           int32_t step, lli_softmax *row) {
    const int32_t top = row->top;
    bool lower = false; /* some record of the lane reaches below the two upper limbs */
    for (int32_t t = threadIdx.x; t < n_tiles; t += step) {
        const uint64_t record = records[t];
        const int32_t anchor = (int32_t)((uint32_t)record << 6) >> 6, shift = anchor & 31;
        const int32_t below = top - (anchor >> 5);
        if (!record || below > 2) continue;
        lower = lower || below > 0;
        const int64_t s = (int64_t)(record >> 26);
        const int64_t low = (int64_t)(((uint64_t)s << shift) & 0xffffffffu), high = s >> (32 - shift);
        row->s[0] += below == 1 ? low : below == 2 ? high : 0;
        row->s[1] += below == 0 ? low : below == 1 ? high : 0;
        row->s[2] += below == 0 ? high : 0;
        if (!kEntropy) continue;
        const int64_t u = (int64_t)u_records[t] + (32 - shift) * s, more = 32 * below;
        const int64_t low_u = (int64_t)(((uint64_t)u << shift) & 0xffffffffu) + more * low;
        const int64_t high_u = (u >> (32 - shift)) + more * high;
        row->u[0] += below == 1 ? low_u : below == 2 ? high_u : 0;
        row->u[1] += below == 0 ? low_u : below == 1 ? high_u : 0;
        row->u[2] += below == 0 ? high_u : 0;
    }
    /* Two records of a lane at most: each limb below 2^38, and u's below 2^45. */
    if (__any_sync(kAllLanes, lower)) {
        row->s[0] = sum_lanes<2>(row->s[0]);
        if (kEntropy) row->u[0] = sum_lanes(row->u[0]);
    }
    row->s[1] = sum_lanes<2>(row->s[1]);
    row->s[2] = sum_lanes<2>(row->s[2]);
    if (!kEntropy) return;
    row->u[1] = sum_lanes(row->u[1]);
    row->u[2] = sum_lanes(row->u[2]);
}

/* What a bulk copy cannot bring: a row's last bytes, and -inf up to the end of its tile. By the warp that has
 * the last tile. */
template <typename E> static __device__ inline void fill_tail(const ce_block<E> *block, E *row, int64_t i) {
    const int32_t there = (int32_t)(block->bulk_bytes / sizeof(E)), end = block->n_tiles * kTileCols;
    if (there == end || (block->n_tiles - 1) / 32 % block->n_warps != warp_of()) return;
    const E *from = (const E *)block->args->logits.data + i * block->args->logits.row_stride + block->first;
    for (int32_t c = there + lane_of(); c < end; c += 32) {
        if (c < block->n_cols) {
            row[c] = from[c];
        } else {
            put_element(row, block->args->logits.dtype, c, -INFINITY);
        }
    }
    __syncwarp(); /* before a lane reads what the others have put there */
}

/* The warp's sums of row i, whose target is y. */
template <typename E, bool kEntropy, bool kPlain>
static __device__ inline void row_statistics(const ce_block<E> *block, int32_t slot, int64_t i, int64_t y) {
    slot_state *state = &block->state->slots[slot];
    const int64_t at = y - block->first;
    const int32_t target_tile = at >= 0 && at < block->n_cols ? (int32_t)at / kTileCols : -1;
    E *row = block->row(slot);
    fill_tail(block, row, i);
    int32_t max_tile;
    float max;
    lli_softmax sums;
    lli_softmax_clear(&sums);
    int32_t special = gather_tiles<E, kEntropy, kPlain>(block, row, &state->soft, target_tile, &sums.top, &max,
                                                        &max_tile);
    sums.top = __reduce_max_sync(kAllLanes, sums.top);
    special = (int32_t)__reduce_or_sync(kAllLanes, (uint32_t)special);
    if (block->args->want_argmax) max_lanes(&max, &max_tile);
    hang_records<kEntropy>(block->records, block->u_records, block->n_tiles, 32 * block->n_warps, &sums);
    if (lane_of() == 0) state->sums[warp_of()] = warp_sums{sums, max, max_tile, special};
}

/* ---- Tile warps: gradient ----------------------------------------------------------------------- */

/* n pieces of a lane, 32 apart, from column c of the block on; `to` is at the block's first. */
template <typename E, bool kPlain, ce_way kWay>
static __device__ inline void write_pieces(const ce_block<E> *block, const E *logits, const ce_grad_row *row,
                                           char *to, int32_t c, int32_t n) {
    enum { kCount = piece_of<E>::kCount, kAhead = 16 / kCount }; /* short loops: see core/shared.h */
    const lli_cuda_ce *args = block->args;
    const float *class_weight = args->row.call.class_weight;
    const int32_t dtype = args->grad.dtype;
    const int64_t bytes = dtype == LL_DTYPE_F32 ? 4 : (int64_t)sizeof(E);
    const uint4 *from = (const uint4 *)(logits + c);
    if (class_weight) class_weight += block->first + c;
    to += c * bytes;
    int32_t p = 0;
    for (; p + kAhead <= n; p += kAhead) {
        uint4 pieces[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; j++) pieces[j] = from[32 * (p + j)];
#pragma unroll
        for (int j = 0; j < kAhead; j++) {
            const int64_t at = (int64_t)32 * kCount * (p + j);
            ce_dz_piece<E, kPlain, kWay>(&args->row.transform, row, pieces[j],
                                         class_weight ? class_weight + at : NULL, dtype, to + at * bytes);
        }
    }
#pragma unroll 1
    for (; p < n; p++) {
        const int64_t at = (int64_t)32 * kCount * p;
        ce_dz_piece<E, kPlain, kWay>(&args->row.transform, row, from[32 * p],
                                     class_weight ? class_weight + at : NULL, dtype, to + at * bytes);
    }
}

/* Row i of the gradient in the columns whose statistics the warp made. */
template <typename E, bool kPlain>
static __device__ inline void write_gradient(const ce_block<E> *block, int32_t slot, int64_t i) {
    enum { kCount = piece_of<E>::kCount, kStretch = 32 * kTileCols };
    const lli_cuda_ce *args = block->args;
    const lli_cuda_transform *transform = &args->row.transform;
    const ce_grad_row *shared = &block->state->slots[slot].grad, row = *shared; /* in registers */
    const E *logits = block->row(slot);
    const int32_t dtype = args->grad.dtype, n_cols = block->n_cols;
    const int64_t bytes = dtype == LL_DTYPE_F32 ? 4 : (int64_t)sizeof(E);
    char *whole = (char *)args->grad.data + i * args->grad.row_stride * bytes, *to = whole + block->first * bytes;
    const ce_way way = way_of(&row);
    for (int32_t begin = warp_of() * kStretch; begin < n_cols; begin += block->n_warps * kStretch) {
        const int32_t left = (n_cols - begin) / kCount - lane_of(), c = begin + lane_of() * kCount;
        const int32_t n = min(kStretch / (32 * kCount), (left + 31) / 32);
        switch (way) {
        case CE_DEAD: write_pieces<E, kPlain, CE_DEAD>(block, logits, &row, to, c, n); break;
        case CE_PLAIN: write_pieces<E, kPlain, CE_PLAIN>(block, logits, &row, to, c, n); break;
        case CE_GAMMA: write_pieces<E, kPlain, CE_GAMMA>(block, logits, &row, to, c, n); break;
        case CE_WIDE: write_pieces<E, kPlain, CE_WIDE>(block, logits, &row, to, c, n); break;
        }
        /* Single columns: the target over what its piece's lane has written there, and the last bytes. */
        const int32_t odd = n_cols / kCount * kCount + lane_of();
        if (odd < n_cols && odd / kStretch == begin / kStretch) {
            const float *cw = args->row.call.class_weight;
            ce_dz_column(transform, shared, element_at(logits, args->logits.dtype, odd),
                         cw ? cw[block->first + odd] : 1.0f, odd == row.target, dtype, to, odd);
        }
        if (row.target >= c && row.target < n_cols / kCount * kCount && row.target < begin + kStretch &&
            row.target / kCount % 32 == lane_of() && !row.dead) {
            ce_dz_column(transform, shared, element_at(logits, args->logits.dtype, row.target), 1.0f, true, dtype,
                         to, row.target);
        }
    }
    if (block->rank != block->cluster - 1) return;
    for (int64_t c = args->v + threadIdx.x; c < args->grad.cols; c += 32 * block->n_warps) {
        put_element(whole, dtype, c, 0.0f);
    }
}

template <typename E, bool kEntropy, bool kPlain> static __device__ inline void tile_warp(const ce_block<E> *block, int64_t i) {
    const lli_cuda_ce *args = block->args;
    const bool gradient = args->grad.data != NULL;
    slot_state *slots = block->state->slots;
    ce_turn turn = {0, 0}, last = {-1, 0}; /* last: of the row whose gradient is due */
    int64_t next = raw_target(&args->row, i);
    for (; i < args->row.n_rows; i += block->step) {
        const int64_t y = target_from(&args->row.targets, next);
        next = raw_target(&args->row, i + block->step);
        await(&slots[turn.slot].full, turn.phase);
        if (y >= 0) row_statistics<E, kEntropy, kPlain>(block, turn.slot, i, y);
        arrive(&slots[turn.slot].stats);
        if (!gradient) arrive(&slots[turn.slot].empty);
        if (gradient && last.slot >= 0) {
            await(&slots[last.slot].ready, last.phase);
            write_gradient<E, kPlain>(block, last.slot, i - block->step);
            arrive(&slots[last.slot].empty);
        }
        last = turn;
        next_turn(&turn, block->slots);
    }
    if (!gradient || last.slot < 0) return;
    await(&slots[last.slot].ready, last.phase);
    write_gradient<E, kPlain>(block, last.slot, i - block->step);
}

/* ---- Load warp ---------------------------------------------------------------------------------- */

template <typename E> static __device__ inline void load_warp(const ce_block<E> *block, int64_t i) {
    const lli_cuda_ce *args = block->args;
    slot_state *slots = block->state->slots;
    ce_turn turn = {0, 1}; /* the phase before a barrier's first counts as complete */
    if (lane_of() != 0) return;
    for (; i < args->row.n_rows; i += block->step) {
        const E *from = (const E *)args->logits.data + i * args->logits.row_stride + block->first;
        const uint32_t full = address_of(&slots[turn.slot].full);
        await(&slots[turn.slot].empty, turn.phase);
        ptx_mbarrier_arrive_expect_tx(full, block->bulk_bytes);
        if (block->bulk_bytes) {
            ptx_cp_async_bulk(address_of(block->row(turn.slot)), from, block->bulk_bytes, full);
        }
        next_turn(&turn, block->slots);
    }
}

/* ---- Finish warp -------------------------------------------------------------------------------- */

/* The target's tile, column `at` of the block. */
template <typename E, bool kEntropy, bool kPlain>
static __device__ inline void gather_target(const ce_block<E> *block, const E *row, int32_t at,
                                            lli_cuda_row *mine) {
    const int32_t first = at / kTileCols * kTileCols;
    float z[2], slope;
    for (int i = 0; i < 2; i++) {
        const int32_t c = first + 2 * lane_of() + i;
        z[i] = element_at(row, block->args->logits.dtype, c);
        if (!kPlain) {
            z[i] = c < block->n_cols ? transformed(&block->args->row.transform, z[i], &slope) : -INFINITY;
        }
    }
    lli_softmax whole, rest;
    warp_tile<kEntropy>(z, -1, lane_of(), &whole);
    warp_tile<false>(z, at % kTileCols, lane_of(), &rest);
    if (lane_of() == at % kTileCols / 2) {
        mine->whole = whole;
        mine->rest = rest;
        mine->z = z[at % 2];
    }
}

/* Rows with logits beyond the float formula, tile by tile. */
template <typename E, bool kEntropy, bool kPlain>
static __device__ __noinline__ void gather_wide(const ce_block<E> *block, const E *data, int32_t target_tile,
                                                lli_softmax *row) {
    lli_softmax_clear(row);
    for (int32_t t = lane_of(); t < block->n_tiles; t += 32) {
        if (t == target_tile) continue;
        const tile_load<E, kPlain> load = load_of<E, kPlain>(block, data, t, 0);
        any_tile<kEntropy, piece_of<E>::kCount>(load, tile_max<piece_of<E>::kCount>(load), row);
    }
    sum_states(kEntropy, row);
}

/* Lowest column of the block whose logit is the block's largest; -1 if it has none. */
template <typename E, bool kPlain>
static __device__ inline int64_t find_max(const ce_block<E> *block, const E *row, float max, int32_t tile) {
    float slope;
    int32_t at = kTileCols;
    for (int i = 1; i >= 0; i--) {
        const int32_t c = tile * kTileCols + 2 * lane_of() + i;
        if (tile < 0 || c >= block->n_cols) continue;
        float z = element_at(row, block->args->logits.dtype, c);
        if (!kPlain) z = transformed(&block->args->row.transform, z, &slope);
        if (z == max) at = 2 * lane_of() + i;
    }
    at = __reduce_min_sync(kAllLanes, at);
    return tile < 0 ? -1 : block->first + (int64_t)tile * kTileCols + at;
}

/* The block's part of the row in `slot`, from the tile warps' sums and the target's tile. */
template <typename E, bool kEntropy, bool kPlain>
static __device__ inline void make_part(const ce_block<E> *block, int32_t slot, int64_t y, ce_part *mine) {
    slot_state *state = &block->state->slots[slot];
    const int64_t at = y - block->first;
    const bool owner = at >= 0 && at < block->n_cols;
    const E *data = block->row(slot);
    warp_sums sums = {};
    lli_softmax_clear(&sums.row);
    sums.max = -INFINITY;
    sums.max_tile = -1;
    if (lane_of() < block->n_warps) sums = state->sums[lane_of()];
    const uint32_t special = __reduce_or_sync(kAllLanes, (uint32_t)sums.special);
    sum_states(kEntropy, &sums.row);
    if (special & kSomeNan) {
        sums.row.top = LLI_TOP_NAN;
    } else if (special & kSomeWide) {
        gather_wide<E, kEntropy, kPlain>(block, data, owner ? (int32_t)at / kTileCols : -1, &sums.row);
    }
    int64_t argmax = -1;
    if (block->args->want_argmax) {
        max_lanes(&sums.max, &sums.max_tile);
        argmax = find_max<E, kPlain>(block, data, sums.max, sums.max_tile);
    }
    if (owner) gather_target<E, kEntropy, kPlain>(block, data, (int32_t)at, &mine->row);
    if (lane_of() == 0) {
        mine->row.others = sums.row;
        mine->row.max = sums.max;
        mine->row.argmax = argmax;
        if (!kPlain) {
            mine->soft = state->soft;
            state->soft = lli_exact{};
        }
    }
    __syncwarp(); /* the part is whole before all lanes send it */
}

/* The part into every block of the cluster; `parts`: where the cluster's parts of this row gather. */
template <typename E>
static __device__ inline void send_part(const ce_block<E> *block, const ce_part *mine, const ce_part *parts,
                                        const uint64_t *gathered) {
    const uint4 *pieces = (const uint4 *)mine;
    const int n = block->args->row.smoothing ? kPartPieces : kRowPieces;
    const uint32_t to = address_of(&parts[block->rank]), barrier = address_of(gathered);
    if (lane_of() == 0) ptx_mbarrier_arrive_expect_tx(barrier, (uint32_t)(block->cluster * n * 16));
    if (lane_of() < n) {
        const uint4 piece = pieces[lane_of()];
        for (uint32_t peer = 0; peer < (uint32_t)block->cluster; peer++) {
            ptx_st_async_v4(ptx_mapa(to, peer) + 16 * lane_of(), piece, ptx_mapa(barrier, peer));
        }
    }
    __syncwarp(); /* all lanes have read the part before the next one is made */
}

/* Results of the row from all parts; every lane gets them. */
template <typename E, bool kEntropy>
static __device__ inline lli_row_result merge_parts(const ce_block<E> *block, const ce_part *parts,
                                                    int32_t owner, double class_total, int64_t *argmax) {
    const bool there = lane_of() < block->cluster;
    const lli_cuda_finish *args = &block->args->row;
    lli_softmax row;
    lli_softmax_clear(&row);
    if (there) row = parts[lane_of()].row.others;
    sum_states(kEntropy, &row);
    /* even lanes take the whole row, odd ones the row without its target */
    const lli_cuda_row *target = &parts[owner].row;
    lli_softmax tile = lane_of() % 2 ? target->rest : target->whole;
    lli_softmax_merge(&row, &tile);
    const double lse = lli_softmax_lse(&row), lse_whole = __shfl_sync(kAllLanes, lse, 0);
    const double entropy = kEntropy ? __shfl_sync(kAllLanes, lli_softmax_entropy(&row), 0) : 0.0;
    double soft = 0.0;
    if (args->smoothing) {
        lli_exact sum = {};
        for (int32_t p = 0; p < block->cluster; p++) lli_exact_merge(&sum, &parts[p].soft);
        soft = lli_exact_value(&sum);
    }
    *argmax = -1;
    if (block->args->want_argmax) {
        float max = there ? parts[lane_of()].row.max : -INFINITY;
        int32_t at = there ? (int32_t)parts[lane_of()].row.argmax : -1;
        max_lanes(&max, &at);
        if (lse_whole == lse_whole && lse_whole > -INFINITY) *argmax = at;
    }
    return result_of(args, lse_whole, __shfl_sync(kAllLanes, lse, 1), entropy, target->z, class_total, soft);
}

/* Results out, of block 0. By one thread. */
static __device__ inline void put_results(const lli_cuda_finish *args, int64_t i, int64_t y,
                                          const lli_loss_terms *terms, const lli_row_result *result,
                                          int64_t argmax) {
    double loss = 0.0, z_loss = 0.0;
    if (y != kIgnored) {
        lli_row_loss(terms, result, i, y < 0 ? 0 : y, &loss, &z_loss);
        exact_add_parts(&args->totals->loss, lli_exact_split_f32((float)loss));
        exact_add_parts(&args->totals->z_loss, lli_exact_split_f32((float)z_loss));
    }
    write_row(args, i, y, result, terms, loss, argmax);
}

/* The coefficients of the gradient for the block whose columns start at `first`. By one thread. */
static __device__ inline void put_coefficients(int64_t i, int64_t y, const lli_loss_terms *terms,
                                               const lli_row_result *result, int64_t first, ce_grad_row *grad) {
    grad->dead = y == kIgnored;
    if (grad->dead) return;
    const lli_row_result saved = as_saved(result);
    grad->grad = lli_row_gradient(terms, &saved, i, y < 0 ? 0 : y);
    grad->dead = grad->grad.dead;
    grad->target = y >= 0 && grad->grad.has_target ? y - first : -1;
}

/* A row with a target outside the vocabulary has terms of its own. Apart, because they take a copy of the call's
 * arguments. */
static __device__ __noinline__ void put_bad_row(const lli_cuda_finish *args, int64_t i, bool results,
                                                int64_t first, ce_grad_row *grad) {
    ll_linear_ce_args plain;
    const lli_loss_terms terms = terms_of(args, kBad, &plain);
    const lli_row_result result = {kNan, kNan, kNan, kNan};
    if (grad) put_coefficients(i, kBad, &terms, &result, first, grad);
    if (results) put_results(args, i, kBad, &terms, &result, -1);
}

template <typename E, bool kEntropy, bool kPlain>
static __device__ inline void finish_warp(const ce_block<E> *block, int32_t which, int64_t i) {
    const lli_cuda_ce *args = block->args;
    const int64_t n_rows = args->row.n_rows, stride = kFinishWarps * block->step;
    slot_state *slots = block->state->slots;
    ce_part *mine = &block->state->mine[which];
    ce_turn turn = {0, 0}, exchange = {0, 0}; /* exchange.slot: the parity of the rows that are exchanged */
    const lli_loss_terms terms = terms_of(&args->row, 0, NULL);
    for (int32_t n = 0; n < which; n++) next_turn(&turn, block->slots);
    i += which * block->step;
    int64_t next = raw_target(&args->row, i);
    for (; i < n_rows; i += stride) {
        const int64_t y = target_from(&args->row.targets, next);
        next = raw_target(&args->row, i + stride);
        const ce_part *parts = block->parts + (2 * which + exchange.slot) * block->cluster;
        const uint64_t *gathered = &block->state->parts[which][exchange.slot];
        ce_grad_row *grad = args->grad.data ? &slots[turn.slot].grad : NULL;
        lli_row_result result = {};
        int64_t argmax = -1;
        await(&slots[turn.slot].full, turn.phase);
        await(&slots[turn.slot].stats, turn.phase);
        if (y >= 0) {
            make_part<E, kEntropy, kPlain>(block, turn.slot, y, mine);
            send_part(block, mine, parts, gathered);
        }
        arrive(&slots[turn.slot].empty); /* this warp needs the row no more */
        if (y >= 0) {
            const int32_t owner = (int32_t)(y / ((int64_t)block->tiles * kTileCols));
            await(gathered, exchange.phase);
            result = merge_parts<E, kEntropy>(block, parts, owner, terms.class_total, &argmax);
            next_turn(&exchange, 2);
        }
        const bool bad = y == kBad, first_lane = lane_of() == 0;
        if (first_lane && bad) put_bad_row(&args->row, i, block->rank == 0, block->first, grad);
        if (first_lane && !bad && grad) put_coefficients(i, y, &terms, &result, block->first, grad);
        arrive(&slots[turn.slot].ready); /* before the results: nobody in the cluster waits for them */
        if (first_lane && !bad && block->rank == 0) put_results(&args->row, i, y, &terms, &result, argmax);
        for (int32_t n = 0; n < kFinishWarps; n++) next_turn(&turn, block->slots);
    }
}

/* ---- The kernel --------------------------------------------------------------------------------- */

template <typename E>
static __device__ inline void lay_out(const lli_cuda_ce *args, const lli_cuda_ce_shape *shape,
                                      unsigned char *memory, ce_block<E> *to) {
    ce_block<E> block = {.args = args, .rows = (E *)memory};
    memory += (int64_t)shape->slots * shape->tiles * kTileCols * sizeof(E);
    block.state = (block_state *)memory;
    block.parts = (ce_part *)(memory + sizeof(block_state));
    block.records = (uint64_t *)(block.parts + 2 * kFinishWarps * shape->cluster);
    block.u_records = block.records + shape->tiles;
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
    for (int i = 0; i < 2 * kFinishWarps; i++) ptx_mbarrier_init(address_of(&block.state->parts[i / 2][i % 2]), 1);
    for (int i = 0; i < block.slots; i++) {
        slot_state *slot = &block.state->slots[i];
        ptx_mbarrier_init(address_of(&slot->full), 1);
        ptx_mbarrier_init(address_of(&slot->stats), (uint32_t)block.n_warps);
        ptx_mbarrier_init(address_of(&slot->ready), 1);
        ptx_mbarrier_init(address_of(&slot->empty), (uint32_t)block.n_warps + 1);
        slot->soft = lli_exact{};
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
        finish_warp<E, kEntropy, kPlain>(&block, warp_of() - shape.tile_warps, i);
    } else {
        load_warp(&block, i);
    }
    /* No block may end while parts are on their way to it. */
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
           (size_t)(2 * kFinishWarps * shape->cluster) * sizeof(ce_part);
}

/* A row over `cluster` blocks; cluster 0 where it does not fit. */
static lli_cuda_ce_shape shape_of(int64_t v, int64_t element_bytes, int32_t cluster) {
    const int64_t tiles = (v + kTileCols - 1) / kTileCols, each = (tiles + cluster - 1) / cluster;
    const int64_t bytes = each * kTileCols * element_bytes;
    lli_cuda_ce_shape shape = {};
    if (bytes > kLargeKib * 1024) return shape;
    shape.cluster = cluster;
    shape.slots = bytes > kSmallKib * 1024 ? 2 : 3;
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
    const bool plain =
        !row->smoothing && row->transform.softcap == 0.0f && row->transform.temperature == 1.0f;
    const int64_t element_bytes = args->logits.dtype == LL_DTYPE_F32 ? 4 : 2;
    const int64_t clusters = row->n_rows < shape->clusters ? row->n_rows : shape->clusters;
    cudaLaunchAttribute attribute;
    const cudaLaunchConfig_t config =
        config_of(shape, clusters, shared_bytes(shape, element_bytes, entropy), &attribute, stream);
    return (int)cudaLaunchKernelEx(&config, kernel_for(args->logits.dtype, entropy, plain), *args, *shape);
}

/* The kernel with the most shared memory decides how many clusters run at once; none of the others fits fewer.
 * A kernel's limits are the device's, not the shape's: plans of other shapes share the kernels. */
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
        if (!status) status = (int)cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
        if (status) return status;
        cudaLaunchAttribute attribute;
        const cudaLaunchConfig_t config = config_of(shape, 1, bytes, &attribute, NULL);
        int clusters = 0;
        status = (int)cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
        if (variant == 0 || clusters < shape->clusters) shape->clusters = clusters;
    }
    return status;
}

/* The cluster with the most tile warps at work on the device at once, the smallest of equal ones. Sizes that
 * fall badly into the groups of multiprocessors leave some idle. 16 blocks only for rows that need them. */
extern "C" int lli_cuda_ce_rows_open(int32_t dtype, int64_t v, lli_cuda_ce_shape *shape) {
    const int64_t element_bytes = dtype == LL_DTYPE_F32 ? 4 : 2;
    *shape = lli_cuda_ce_shape{};
    for (int32_t cluster = 1; cluster <= 2 * kPortable; cluster += cluster < kPortable ? 1 : kPortable) {
        lli_cuda_ce_shape tried = shape_of(v, element_bytes, cluster);
        const bool enough = shape->cluster && (cluster > kPortable || (cluster > 1 && v * element_bytes < 65536));
        if (!tried.cluster || (tried.slots < kSlotsMax && cluster <= kPortable) || enough) continue;
        const int status = open_shape(dtype, &tried);
        if (status) return status;
        const int64_t warps = (int64_t)tried.clusters * tried.cluster * tried.tile_warps;
        if (warps > (int64_t)shape->clusters * shape->cluster * shape->tile_warps) *shape = tried;
    }
    return 0;
}
