/* The tile warps of ce_rows.cu: statistics of a row, and later its gradient in the same columns. */
#ifndef LLI_CUDA_CE_TILE_WARP_CUH
#define LLI_CUDA_CE_TILE_WARP_CUH

#include "cuda/ce_block.cuh"
#include "cuda/lanes.cuh"

/* ---- Statistics --------------------------------------------------------------------- */

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
static __device__ inline int32_t gather_tiles(const ce_block<E> *block, const E *row, int32_t target_tile,
                                              int32_t *top, float *max, int32_t *max_tile) {
    const int32_t n_tiles = block->n_tiles, step = 32 * block->n_warps;
    uint64_t *sums = block->sums, *u_sums = block->u_sums;
    int32_t special = 0;
    *top = LLI_TOP_EMPTY;
    *max = -INFINITY;
    *max_tile = -1;
    for (int32_t t = threadIdx.x; t < n_tiles; t += step) {
        const tile_load<E, kPlain> load = load_of<E, kPlain>(block, row, t, lane_of());
        const float zmax = kPlain ? packed_max<E>(load.tile, load.turn) : tile_max<piece_of<E>::kCount>(load);
        if (zmax > *max || (*max_tile < 0 && zmax == zmax)) {
            *max = zmax;
            *max_tile = t;
        }
        uint64_t record = 0;
        if (t == target_tile || zmax == -INFINITY) {
            /* apart, or nothing */
        } else if (is_plain_max(zmax)) {
            int32_t anchor;
            int64_t s, u;
            plain_tile<kEntropy, piece_of<E>::kCount>(load, zmax, &anchor, &s, &u);
            record = ((uint64_t)s << 26) | ((uint32_t)anchor & 0x3ffffffu);
            if (kEntropy) u_sums[t] = (uint64_t)u;
            *top = ::max(*top, anchor >> 5);
        } else {
            special |= zmax < INFINITY ? kSomeWide : kSomeNan;
        }
        sums[t] = record;
    }
    return special;
}

/* The records of the warp's tiles in the window of three limbs that hangs at row->top: what lli_softmax_add
 * would have left, summed over lanes. */
template <bool kEntropy>
static __device__ inline void hang_sums(const uint64_t *records, const uint64_t *u_records, int32_t n_tiles,
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
        row->s[0] = sum_lanes_narrow<2>(row->s[0]);
        if (kEntropy) row->u[0] = sum_lanes_narrow<3>(row->u[0]);
    }
    row->s[1] = sum_lanes_narrow<2>(row->s[1]);
    row->s[2] = sum_lanes_narrow<2>(row->s[2]);
    if (!kEntropy) return;
    row->u[1] = sum_lanes_narrow<3>(row->u[1]);
    row->u[2] = sum_lanes_narrow<3>(row->u[2]);
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

/* The lane's tiles one by one, of any range: where the warp has a tile beyond the float formula. */
template <typename E, bool kEntropy, bool kPlain>
static __device__ __noinline__ void gather_wide(const ce_block<E> *block, const E *data, int32_t target_tile,
                                                lli_softmax *row) {
    lli_softmax_clear(row);
    for (int32_t t = threadIdx.x; t < block->n_tiles; t += 32 * block->n_warps) {
        if (t == target_tile) continue;
        const tile_load<E, kPlain> load = load_of<E, kPlain>(block, data, t, 0);
        any_tile<kEntropy, piece_of<E>::kCount>(load, tile_max<piece_of<E>::kCount>(load), row);
    }
    sum_lanes_softmax(row, kEntropy);
}

/* Lowest column of the tile whose logit is `max`; -1 without a tile. */
template <typename E, bool kPlain>
static __device__ inline int32_t find_max(const ce_block<E> *block, const E *row, float max, int32_t tile) {
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
    return tile < 0 ? -1 : (int32_t)block->first + tile * kTileCols + at;
}

/* The target's tile, column `at` of the block, by the warp that has it. */
template <typename E, bool kEntropy, bool kPlain>
static __device__ __noinline__ void gather_target(const ce_block<E> *block, const E *row, int32_t at,
                                                  target_record *record) {
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
        record->whole = whole;
        record->rest = rest;
        record->z = z[at % 2];
    }
    __syncwarp(); /* whole before it is sent */
}

/* The warp's record to a row's finisher. */
template <typename E>
static __device__ inline void send_record(const ce_block<E> *block, const ce_finisher *finisher) {
    const int32_t from = finisher->warp * block->cluster + block->rank;
    send(&block->state->records[warp_of()], &block->records[from * block->n_warps + warp_of()], kRecordPieces,
         &block->state->gathers[finisher->warp].gathered, (uint32_t)finisher->block);
}

/* The warp's record of row i, whose target is y, to the row's finisher. */
template <typename E, bool kEntropy, bool kPlain>
static __device__ inline void row_statistics(const ce_block<E> *block, int32_t slot, int64_t i, int64_t y,
                                             const ce_finisher *finisher) {
    block_state *state = block->state;
    const int64_t at = y - block->first;
    const int32_t target_tile = at >= 0 && at < block->n_cols ? (int32_t)at / kTileCols : -1;
    E *row = block->row(slot);
    fill_tail(block, row, i);
    int32_t max_tile, argmax = -1;
    float max;
    lli_softmax sums;
    lli_softmax_clear(&sums);
    int32_t special = gather_tiles<E, kEntropy, kPlain>(block, row, target_tile, &sums.top, &max, &max_tile);
    sums.top = __reduce_max_sync(kAllLanes, sums.top);
    special = (int32_t)__reduce_or_sync(kAllLanes, (uint32_t)special);
    if (block->args->want_argmax) {
        max_lanes(&max, &max_tile);
        argmax = find_max<E, kPlain>(block, row, max, max_tile);
    }
    if (special & kSomeNan) {
        sums.top = LLI_TOP_NAN;
    } else if (special) {
        lli_softmax wide;
        gather_wide<E, kEntropy, kPlain>(block, row, target_tile, &wide);
        sums = wide;
    } else {
        hang_sums<kEntropy>(block->sums, block->u_sums, block->n_tiles, 32 * block->n_warps, &sums);
    }
    warp_record *record = &state->records[warp_of()];
    if (lane_of() == 0) {
        record->top = sums.top;
        record->max = max;
        record->argmax = argmax;
#pragma unroll
        for (int j = 0; j < 3; j++) {
            record->s[j] = sums.s[j];
            if (kEntropy) record->u[j] = sums.u[j];
        }
    }
    __syncwarp(); /* whole before it is sent */
    send_record(block, finisher);
    if (target_tile >= 0 && target_tile / 32 % block->n_warps == warp_of()) {
        gather_state *gather = &state->gathers[finisher->warp];
        gather_target<E, kEntropy, kPlain>(block, row, (int32_t)at, &state->targets[warp_of()]);
        send(&state->targets[warp_of()], &gather->target, kTargetPieces, &gather->gathered,
             (uint32_t)finisher->block);
    }
    __syncwarp(); /* sent before the next row's is written */
}

/* ---- Gradient ----------------------------------------------------------------------- */

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
    const ce_grad_row *shared = &block->state->slots[slot].grad;
    ce_grad_row row = *shared; /* in registers */
    row.target -= block->first;
    const E *logits = block->row(slot);
    const int32_t dtype = args->grad.dtype, n_cols = block->n_cols;
    const int64_t bytes = dtype == LL_DTYPE_F32 ? 4 : (int64_t)sizeof(E);
    char *whole = (char *)args->grad.data + i * args->grad.row_stride * bytes,
         *to = whole + block->first * bytes;
    const ce_way way = way_of(&row);
    for (int32_t begin = warp_of() * kStretch; begin < n_cols; begin += block->n_warps * kStretch) {
        const int32_t left = (n_cols - begin) / kCount - lane_of(), c = begin + lane_of() * kCount;
        const int32_t n = min(kStretch / (32 * kCount), (left + 31) / 32);
        switch (way) {
        case CE_DEAD:
            write_pieces<E, kPlain, CE_DEAD>(block, logits, &row, to, c, n);
            break;
        case CE_PLAIN:
            write_pieces<E, kPlain, CE_PLAIN>(block, logits, &row, to, c, n);
            break;
        case CE_GAMMA:
            write_pieces<E, kPlain, CE_GAMMA>(block, logits, &row, to, c, n);
            break;
        case CE_WIDE:
            write_pieces<E, kPlain, CE_WIDE>(block, logits, &row, to, c, n);
            break;
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
            ce_dz_column(transform, shared, element_at(logits, args->logits.dtype, row.target), 1.0f, true,
                         dtype, to, row.target);
        }
    }
    if (block->rank != block->cluster - 1) return;
    for (int64_t c = args->v + threadIdx.x; c < args->grad.cols; c += 32 * block->n_warps) {
        put_element(whole, dtype, c, 0.0f);
    }
}

template <typename E, bool kEntropy, bool kPlain>
static __device__ inline void tile_warp(const ce_block<E> *block, int64_t i) {
    const lli_cuda_ce *args = block->args;
    const bool gradient = args->grad.data != NULL;
    const int64_t n_rows = args->row.n_rows, lag = (block->slots - 1) * block->step;
    slot_state *slots = block->state->slots;
    ce_turn turn = {0, 0}, late = {0, 0}; /* late: of the row whose gradient is due, `lag` before */
    ce_finisher finisher = {0, 0};
    int64_t due = i, next = raw_target(&args->row, i);
    for (; due < n_rows; i += block->step) {
        if (i < n_rows) {
            const int64_t y = target_from(&args->row.targets, next);
            next = raw_target(&args->row, i + block->step);
            await(&slots[turn.slot].full, turn.phase);
            if (y >= 0) {
                row_statistics<E, kEntropy, kPlain>(block, turn.slot, i, y, &finisher);
            } else {
                send_record(block, &finisher); /* of no row: its finisher must not run ahead of the slots */
            }
            if (!gradient) arrive(&slots[turn.slot].empty);
            next_turn(&turn, block->slots);
            next_finisher(&finisher, block->cluster);
        }
        if (i < due + lag) continue;
        if (gradient) {
            await(&slots[late.slot].ready, late.phase);
            write_gradient<E, kPlain>(block, late.slot, due);
            arrive(&slots[late.slot].empty);
            next_turn(&late, block->slots);
        }
        due += block->step;
    }
}

#endif
