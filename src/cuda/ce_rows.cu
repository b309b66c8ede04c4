/* ce over given logits with each logit read once: a row lies on the chip, in the shared memory of a cluster of
 * blocks, from its arrival to the last element of its gradient.
 *
 *   a cluster     one row after another; block b holds canonical tiles [b tiles, (b + 1) tiles) of it
 *   arrival       one bulk copy a block, completing on `full`
 *   statistics    a thread a tile and round: maximum, then integers (ce_tile.cuh); the target's tile is left to
 *                 the last warp, which also sums it without the target
 *   sums          tile records -> limbs of the block (core/softmax.h) -> a part of 300 bytes, stored into every
 *                 block of the cluster; integers, so that no order shows
 *   results       each block's first warp makes them of all parts, in double; block 0 writes them
 *   gradient      a thread 16 bytes at a time, from shared memory to global
 *
 * Several clusters share a multiprocessor: while one waits for its row, its peers or the double arithmetic of
 * one thread, the others compute. Shared memory of a block, in bytes:
 *
 *   | row: 64 tiles E | block_state | parts: 2 cluster ce_part | records: 8 tiles | u: 8 tiles, with entropy |
 *
 * Parts are double: a block may store its part of the next row while a peer still reads those of this one, but
 * not that of the one after, because between them every block has passed the next row's cluster barrier.
 *
 * Bank conflicts: neighbouring threads' tiles are 128 or 256 bytes apart, so each thread starts to read at
 * another 16-byte piece of its tile and goes round. */
#include "cuda/ce.h"
#include "cuda/ce_tile.cuh"
#include "cuda/finish.cuh"
#include "cuda/lanes.cuh"
#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mbarrier.cuh"

enum {
    kThreadsMax = 320,
    kBlocks = 3, /* of kThreadsMax threads a multiprocessor: 64 registers a thread */
    kWarpsMax = kThreadsMax / 32,
    kSmallKib = 64, /* of a row in a block, so that kBlocks of them fit a multiprocessor */
    kLargeKib = 192
};

typedef struct ce_part {
    lli_cuda_row row;
    lli_exact soft;
} ce_part;
enum { kRowWords = sizeof(lli_cuda_row) / 4, kPartWords = sizeof(ce_part) / 4 };

typedef struct block_state {
    uint64_t full; /* mbarrier: one arrival (the thread that starts the copy) and its bytes */
    ce_grad_row grad;
    ce_part mine;
    int64_t s[kWarpsMax][3], u[kWarpsMax][3];
    int32_t top[kWarpsMax];
    float max[kWarpsMax];
    int32_t max_tile[kWarpsMax];
} block_state;

/* What a block knows for the whole kernel; in shared memory, set once. */
template <typename E> struct ce_block {
    const lli_cuda_ce *args;
    E *row;
    block_state *state;
    ce_part *parts;
    uint64_t *records, *u_records; /* S 2^26 + anchor (signed, 26 bits); S = 0: nothing to add */
    int32_t rank, cluster, n_warps;
    int64_t first; /* column of row[0] */
    int32_t n_cols, n_tiles;
    int32_t tiles; /* of every block but the last ones */
    uint32_t bulk_bytes;
};

static __device__ inline int lane_of(void) {
    return threadIdx.x % 32;
}
static __device__ inline int warp_of(void) {
    return threadIdx.x / 32;
}

/* ---- A block's tiles ---------------------------------------------------------------------------- */

/* Group q of tile t, transformed; columns beyond the row are -inf. `turn`: see the top. */
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
static __device__ inline tile_load<E, kPlain> load_of(const ce_block<E> *block, int32_t t, int32_t turn) {
    return tile_load<E, kPlain>{block, (const uint4 *)(block->row + (int64_t)t * kTileCols), t * kTileCols,
                                turn};
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

enum { kSomeNan = 1, kSomeWide = 2 };

/* Records of the thread's tiles. Returns kSome bits; *top: the largest of floor(anchor / 32). */
template <typename E, bool kEntropy, bool kPlain>
static __device__ inline int gather_tiles(const ce_block<E> *block, int32_t target_tile, int32_t *top,
                                          float *max, int32_t *max_tile) {
    const lli_cuda_finish *row = &block->args->row;
    const int32_t n_tiles = block->n_tiles;
    uint64_t *records = block->records, *u_records = block->u_records;
    const uint4 *tiles = (const uint4 *)block->row;
    int special = 0;
    *top = LLI_TOP_EMPTY;
    *max = -INFINITY;
    *max_tile = -1;
    for (int32_t t = threadIdx.x; t < n_tiles; t += blockDim.x) {
        const tile_load<E, kPlain> load = {block, tiles + t * (kTileCols / piece_of<E>::kCount), t * kTileCols,
                                           lane_of()};
        const float zmax = kPlain ? packed_max<E>(load.tile, load.turn)
                                  : tile_max<piece_of<E>::kCount>(load);
        if (zmax > *max || (*max_tile < 0 && zmax == zmax)) {
            *max = zmax;
            *max_tile = t;
        }
        if (!kPlain && row->smoothing) {
            const int64_t column = block->first + (int64_t)t * kTileCols;
            const float *cw = row->call.class_weight ? row->call.class_weight + column : NULL;
            tile_soft_sum<piece_of<E>::kCount>(load_of<E, kPlain>(block, t, 0), cw,
                                               min(kTileCols, block->n_cols - t * kTileCols),
                                               &block->state->mine.soft);
        }
        uint64_t record = 0;
        if (t == target_tile || zmax == -INFINITY) {
            /* the last warp's, or nothing */
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

/* The thread's records in the window of three limbs that hangs at `top`: what lli_softmax_add would have left in
 * it. */
template <bool kEntropy>
static __device__ inline void hang_records(const uint64_t *records, const uint64_t *u_records, int32_t n_tiles,
                                           int32_t top, int64_t *s, int64_t *u) {
    for (int i = 0; i < 3; i++) s[i] = u[i] = 0;
    for (int32_t t = threadIdx.x; t < n_tiles; t += blockDim.x) {
        const uint64_t record = records[t];
        if (!record) continue;
        const int32_t anchor = (int32_t)((uint32_t)record << 6) >> 6, shift = anchor & 31;
        const int32_t below = top - (anchor >> 5);
        if (below > 2) continue;
        const int64_t whole = (int64_t)(record >> 26);
        const int64_t low = (int64_t)(((uint64_t)whole << shift) & 0xffffffffu), high = whole >> (32 - shift);
        s[0] += below == 1 ? low : below == 2 ? high : 0;
        s[1] += below == 0 ? low : below == 1 ? high : 0;
        s[2] += below == 0 ? high : 0;
        if (!kEntropy) continue;
        const int64_t whole_u = (int64_t)u_records[t] + (32 - shift) * whole, more = 32 * below;
        const int64_t low_u = (int64_t)(((uint64_t)whole_u << shift) & 0xffffffffu) + more * low;
        const int64_t high_u = (whole_u >> (32 - shift)) + more * high;
        u[0] += below == 1 ? low_u : below == 2 ? high_u : 0;
        u[1] += below == 0 ? low_u : below == 1 ? high_u : 0;
        u[2] += below == 0 ? high_u : 0;
    }
}

/* The target's tile, by the last warp. */
template <typename E, bool kEntropy, bool kPlain>
static __device__ __noinline__ void gather_target(const ce_block<E> *block, int32_t at) {
    const int32_t first = at / kTileCols * kTileCols;
    lli_cuda_row *mine = &block->state->mine.row;
    float z[2], slope;
    for (int i = 0; i < 2; i++) {
        const int32_t c = first + 2 * lane_of() + i;
        z[i] = c < block->n_cols ? element_at(block->row, block->args->logits.dtype, c) : -INFINITY;
        if (!kPlain && c < block->n_cols) z[i] = logit_of(&block->args->row.transform, z[i], &slope);
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

/* Rows with logits beyond the float formula: the first warp alone, tile by tile. */
template <typename E, bool kEntropy, bool kPlain>
static __device__ __noinline__ void gather_wide(const ce_block<E> *block, int32_t target_tile, lli_softmax *row) {
    lli_softmax_clear(row);
    for (int32_t t = lane_of(); t < block->n_tiles; t += 32) {
        if (t == target_tile) continue;
        const tile_load<E, kPlain> load = load_of<E, kPlain>(block, t, 0);
        any_tile<kEntropy, piece_of<E>::kCount>(load, tile_max<piece_of<E>::kCount>(load), row);
    }
    sum_states(kEntropy, row);
}

/* Lowest column of the block whose logit is the block's largest; -1 if it has none. */
template <typename E, bool kPlain>
static __device__ inline int64_t find_max(const ce_block<E> *block, float max, int32_t tile) {
    float slope;
    int32_t at = kTileCols;
    for (int i = 1; i >= 0; i--) {
        const int32_t c = tile * kTileCols + 2 * lane_of() + i;
        if (tile < 0 || c >= block->n_cols) continue;
        float z = element_at(block->row, block->args->logits.dtype, c);
        if (!kPlain) z = logit_of(&block->args->row.transform, z, &slope);
        if (z == max) at = 2 * lane_of() + i;
    }
    at = __reduce_min_sync(kAllLanes, at);
    return tile < 0 ? -1 : block->first + (int64_t)tile * kTileCols + at;
}

/* The block's part, by its first warp, once all warps have left theirs in the state. */
template <typename E, bool kEntropy, bool kPlain>
static __device__ __noinline__ void make_part(const ce_block<E> *block, int32_t top, int special, int32_t target_tile) {
    block_state *state = block->state;
    lli_softmax row;
    lli_softmax_clear(&row);
    if (special & kSomeNan) {
        row.top = LLI_TOP_NAN;
    } else if (special & kSomeWide) {
        gather_wide<E, kEntropy, kPlain>(block, target_tile, &row);
    } else {
        const bool there = lane_of() < block->n_warps;
        row.top = top;
        for (int i = 0; i < 3; i++) {
            row.s[i] = sum_lanes(there ? state->s[lane_of()][i] : 0);
            if (kEntropy) row.u[i] = sum_lanes(there ? state->u[lane_of()][i] : 0);
        }
    }
    float max = -INFINITY;
    int64_t argmax = -1;
    if (block->args->want_argmax) {
        const bool there = lane_of() < block->n_warps;
        int32_t tile = there ? state->max_tile[lane_of()] : -1;
        max = there ? state->max[lane_of()] : -INFINITY;
        max_lanes(&max, &tile);
        argmax = find_max<E, kPlain>(block, max, tile);
    }
    if (lane_of() == 0) {
        state->mine.row.others = row;
        state->mine.row.max = max;
        state->mine.row.argmax = argmax;
    }
    __syncwarp(); /* the part is whole before all lanes send it */
}

/* The part into every block of the cluster. */
template <typename E> static __device__ inline void send_part(const ce_block<E> *block, int parity) {
    const uint32_t *words = (const uint32_t *)&block->state->mine;
    const int n = block->args->row.smoothing ? kPartWords : kRowWords;
    const uint32_t to =
        (uint32_t)__cvta_generic_to_shared(&block->parts[parity * block->cluster + block->rank]);
    for (int32_t peer = 0; peer < block->cluster; peer++) {
        const uint32_t there = ptx_mapa(to, (uint32_t)peer);
        for (int i = lane_of(); i < n; i += 32) ptx_st_shared_cluster_u32(there + 4 * i, words[i]);
    }
}

/* ---- A row -------------------------------------------------------------------------------------- */

/* Results of row r from all parts, by the first warp; every lane gets them. */
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

/* Results out (block 0), and the coefficients of the gradient for the block. */
template <typename E>
static __device__ void finish_row(const ce_block<E> *block, int64_t i, int64_t y, bool gradient,
                                         const lli_loss_terms *terms, const lli_row_result *result,
                                         int64_t argmax) {
    const lli_cuda_finish *args = &block->args->row;
    const int64_t known = y < 0 ? 0 : y;
    if (block->rank == 0) {
        double loss = 0.0, z_loss = 0.0;
        if (y != kIgnored) {
            lli_row_loss(terms, result, i, known, &loss, &z_loss);
            exact_add_parts(&args->totals->loss, lli_exact_split_f32((float)loss));
            exact_add_parts(&args->totals->z_loss, lli_exact_split_f32((float)z_loss));
        }
        write_row(args, i, y, result, terms, loss, argmax);
    }
    if (!gradient) return;
    ce_grad_row *grad = &block->state->grad;
    grad->dead = y == kIgnored;
    if (grad->dead) return;
    const lli_row_result saved = as_saved(result);
    grad->grad = lli_row_gradient(terms, &saved, i, known);
    grad->dead = grad->grad.dead;
    grad->target = y >= 0 && grad->grad.has_target ? y - block->first : -1;
}

/* Row i from all parts, by the first warp. Not inlined: its double arithmetic must not take registers from the
 * loops over columns. */
template <typename E, bool kEntropy>
static __device__ __noinline__ void finish_parts(const ce_block<E> *block, int64_t i, int64_t y, bool gradient,
                                                 int parity) {
    ll_linear_ce_args unused;
    const lli_loss_terms terms = terms_of(&block->args->row, y, &unused);
    const ce_part *parts = block->parts + parity * block->cluster;
    const int32_t owner = (int32_t)(y / ((int64_t)block->tiles * kTileCols));
    int64_t argmax;
    const lli_row_result result = merge_parts<E, kEntropy>(block, parts, owner, terms.class_total, &argmax);
    if (lane_of() == 0) finish_row(block, i, y, gradient, &terms, &result, argmax);
}

/* A row without statistics: ignored, or with a target outside the vocabulary. */
template <typename E>
static __device__ __noinline__ void other_row(const ce_block<E> *block, int64_t i, int64_t y, bool gradient) {
    if (threadIdx.x != 0) return;
    ll_linear_ce_args plain;
    const lli_loss_terms terms = terms_of(&block->args->row, y, &plain);
    lli_row_result result = {};
    if (y == kBad) result.lse = result.nll = result.entropy = result.soft_sum = kNan;
    finish_row(block, i, y, gradient, &terms, &result, -1);
}

/* The block's columns of row i of the gradient. */
template <typename E, bool kPlain>
static __device__ inline void write_gradient(const ce_block<E> *block, int64_t i) {
    enum { kCount = piece_of<E>::kCount };
    const lli_cuda_ce *args = block->args;
    const lli_cuda_transform *transform = &args->row.transform;
    const float *class_weight = args->row.call.class_weight;
    const ce_grad_row *row = &block->state->grad;
    const E *logits = block->row;
    const bool dead = row->dead;
    const int32_t n_cols = block->n_cols, dtype = args->grad.dtype;
    const int64_t bytes = dtype == LL_DTYPE_F32 ? 4 : (int64_t)sizeof(E);
    char *whole = (char *)args->grad.data + i * args->grad.row_stride * bytes, *to = whole + block->first * bytes;
    for (int32_t c = threadIdx.x * kCount; c < n_cols; c += blockDim.x * kCount) {
        float z[kCount], cw[kCount], dz[kCount];
        if (dead) {
#pragma unroll
            for (int j = 0; j < kCount; j++) dz[j] = 0.0f;
        } else {
            piece_of<E>::widen(*(const uint4 *)(logits + c), z);
            if constexpr (!kPlain) {
#pragma unroll
                for (int j = 0; j < kCount; j++) {
                    cw[j] = class_weight && c + j < n_cols ? class_weight[block->first + c + j] : 1.0f;
                }
            }
            ce_dz_columns<kPlain, kCount>(transform, row, z, cw, c, dz);
        }
        if (c + kCount > n_cols) {
            for (int j = 0; c + j < n_cols; j++) put_element(to, dtype, c + j, dz[j]);
        } else if (bytes == sizeof(E)) {
            *(uint4 *)((E *)to + c) = piece_of<E>::narrow(dz);
        } else {
#pragma unroll
            for (int j = 0; j < kCount; j += 4) {
                *(float4 *)((float *)to + c + j) = make_float4(dz[j], dz[j + 1], dz[j + 2], dz[j + 3]);
            }
        }
    }
    if (block->rank != block->cluster - 1) return;
    for (int64_t c = args->v + threadIdx.x; c < args->grad.cols; c += blockDim.x) {
        put_element(whole, dtype, c, 0.0f);
    }
}

/* Starts the arrival of the block's columns of row i. */
template <typename E> static __device__ inline void start_row(const ce_block<E> *block, int64_t i) {
    if (!block->bulk_bytes || i >= block->args->row.n_rows) return;
    const uint32_t full = (uint32_t)__cvta_generic_to_shared(&block->state->full);
    const E *from = (const E *)block->args->logits.data + i * block->args->logits.row_stride + block->first;
    ptx_mbarrier_arrive_expect_tx(full, block->bulk_bytes);
    ptx_cp_async_bulk((uint32_t)__cvta_generic_to_shared(block->row), from, block->bulk_bytes, full);
}

/* Waits for it, and adds what a bulk copy cannot: the last bytes of a row, and -inf up to the tile's end. */
template <typename E> static __device__ inline void await_row(const ce_block<E> *block, int64_t i, uint32_t phase) {
    if (block->bulk_bytes) {
        const uint32_t full = (uint32_t)__cvta_generic_to_shared(&block->state->full);
        while (!ptx_mbarrier_try_wait_parity(full, phase)) continue;
    }
    const int32_t there = (int32_t)(block->bulk_bytes / sizeof(E)), end = block->n_tiles * kTileCols;
    if (there == end) return; /* of the whole block */
    const E *from = (const E *)block->args->logits.data + i * block->args->logits.row_stride + block->first;
    for (int32_t c = there + threadIdx.x; c < end; c += blockDim.x) {
        if (c < block->n_cols) {
            block->row[c] = from[c];
        } else {
            put_element(block->row, block->args->logits.dtype, c, -INFINITY);
        }
    }
    __syncthreads(); /* before any thread reads what others have put there */
}

/* Statistics of row i and its results; y is its target. */
template <typename E, bool kEntropy, bool kPlain>
static __device__ inline void row_statistics(const ce_block<E> *block, int64_t i, int64_t y, bool gradient,
                                             int parity, int64_t next) {
    block_state *state = block->state;
    const int64_t at = y - block->first;
    const bool mine = at >= 0 && at < block->n_cols;
    const int32_t target_tile = mine ? (int32_t)at / kTileCols : -1;
    if (!kPlain) {
        if (threadIdx.x < kExactLimbs) state->mine.soft.limb[threadIdx.x] = 0;
        if (threadIdx.x == 0) state->mine.soft.flags = 0;
        __syncthreads(); /* before sums are added */
    }
    int32_t top, max_tile;
    float max;
    int special = gather_tiles<E, kEntropy, kPlain>(block, target_tile, &top, &max, &max_tile);
    if (mine && warp_of() == block->n_warps - 1) gather_target<E, kEntropy, kPlain>(block, (int32_t)at);
    top = __reduce_max_sync(kAllLanes, top);
    if (block->args->want_argmax) max_lanes(&max, &max_tile);
    if (lane_of() == 0) {
        state->top[warp_of()] = top;
        state->max[warp_of()] = max;
        state->max_tile[warp_of()] = max_tile;
    }
    special = __syncthreads_or(special); /* all warps' tops are there */
    for (int w = 0; w < block->n_warps; w++) top = ::max(top, state->top[w]);
    int64_t s[3], u[3];
    hang_records<kEntropy>(block->records, block->u_records, block->n_tiles, top, s, u);
#pragma unroll
    for (int j = 0; j < 3; j++) {
        s[j] = sum_lanes(s[j]);
        if (kEntropy) u[j] = sum_lanes(u[j]);
        if (lane_of() == 0) {
            state->s[warp_of()][j] = s[j];
            if (kEntropy) state->u[warp_of()][j] = u[j];
        }
    }
    __syncthreads(); /* all warps' sums, and the target's tile, before the first warp makes the part */
    if (warp_of() == 0) {
        make_part<E, kEntropy, kPlain>(block, top, special, target_tile);
        send_part(block, parity);
    }
    ptx_barrier_cluster_arrive(); /* release: the parts sent */
    ptx_barrier_cluster_wait();   /* acquire: everybody's */
    if (!gradient && threadIdx.x == 0) start_row(block, next); /* nobody reads the row any more */
    if (warp_of() == 0) finish_parts<E, kEntropy>(block, i, y, gradient, parity);
}

/* ---- The kernel --------------------------------------------------------------------------------- */

template <typename E>
static __device__ inline void lay_out(const lli_cuda_ce *args, const lli_cuda_ce_shape *shape,
                                      unsigned char *memory, ce_block<E> *to) {
    ce_block<E> block = {.args = args, .row = (E *)memory};
    memory += (int64_t)shape->tiles * kTileCols * sizeof(E);
    block.state = (block_state *)memory;
    block.parts = (ce_part *)(memory + sizeof(block_state));
    block.records = (uint64_t *)(block.parts + 2 * shape->cluster);
    block.u_records = block.records + shape->tiles;
    block.rank = (int32_t)ptx_cluster_ctarank();
    block.cluster = shape->cluster;
    block.n_warps = blockDim.x / 32;
    block.tiles = shape->tiles;
    block.first = (int64_t)block.rank * shape->tiles * kTileCols;
    const int64_t left = args->v - block.first, most = (int64_t)shape->tiles * kTileCols;
    block.n_cols = (int32_t)(left < 0 ? 0 : left < most ? left : most);
    block.n_tiles = (block.n_cols + kTileCols - 1) / kTileCols;
    block.bulk_bytes = (uint32_t)(block.n_cols * sizeof(E)) / 16 * 16;
    *to = block;
}

template <typename E, bool kEntropy, bool kPlain>
static __global__ void __launch_bounds__(kThreadsMax, kBlocks)
    rows(const __grid_constant__ lli_cuda_ce args, const __grid_constant__ lli_cuda_ce_shape shape) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ ce_block<E> block;
    const bool gradient = args.grad.data != NULL;
    if (threadIdx.x == 0) {
        lay_out<E>(&args, &shape, memory, &block);
        ptx_mbarrier_init((uint32_t)__cvta_generic_to_shared(&block.state->full), 1);
        ptx_fence_mbarrier_init(); /* before the copy engine arrives at it */
    }
    /* The block is laid out; and every block runs before any stores into another's memory. */
    ptx_barrier_cluster_arrive();
    ptx_barrier_cluster_wait();
    const int64_t step = gridDim.x / shape.cluster;
    int64_t i = blockIdx.x / shape.cluster;
    uint32_t phase = 0;
    int parity = 0;
    if (threadIdx.x == 0) start_row(&block, i);
    for (; i < args.row.n_rows; i += step) {
        const int64_t y = target_of(&args.row.targets, i);
        await_row(&block, i, phase);
        phase ^= 1;
        if (y >= 0) {
            row_statistics<E, kEntropy, kPlain>(&block, i, y, gradient, parity, i + step);
            parity ^= 1;
        } else {
            other_row(&block, i, y, gradient);
        }
        if (gradient) {
            __syncthreads(); /* the coefficients are there */
            write_gradient<E, kPlain>(&block, i);
        }
        if (gradient || y < 0) {
            __syncthreads(); /* every thread has waited for this row and read it */
            if (threadIdx.x == 0) start_row(&block, i + step);
        }
    }
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
    return (size_t)(shape->tiles * (kTileCols * element_bytes + (entropy ? 16 : 8))) + sizeof(block_state) +
           (size_t)(2 * shape->cluster) * sizeof(ce_part);
}

/* As few blocks a row as keep kBlocks of them on a multiprocessor; the largest rows have one on each of 16. */
extern "C" lli_cuda_ce_shape lli_cuda_ce_shape_of(int64_t v, int64_t element_bytes) {
    static const struct {
        int32_t cluster, kib;
    } sizes[] = {{1, kSmallKib}, {2, kSmallKib}, {4, kSmallKib}, {8, kSmallKib}, {16, kSmallKib}, {16, kLargeKib}};
    const int64_t tiles = (v + kTileCols - 1) / kTileCols;
    lli_cuda_ce_shape shape = {};
    for (int i = 0; i < (int)(sizeof sizes / sizeof sizes[0]) && !shape.cluster; i++) {
        const int64_t each = (tiles + sizes[i].cluster - 1) / sizes[i].cluster;
        if (each * kTileCols * element_bytes > (int64_t)sizes[i].kib * 1024) continue;
        shape.cluster = sizes[i].cluster;
        shape.tiles = (int32_t)each;
    }
    if (!shape.cluster) return shape;
    int64_t rounds = 1;
    while ((shape.tiles + rounds - 1) / rounds > kThreadsMax) rounds++;
    const int64_t threads = ((shape.tiles + rounds - 1) / rounds + 31) / 32 * 32;
    shape.threads = (int32_t)(threads < 64 ? 64 : threads);
    return shape;
}

static cudaLaunchConfig_t config_of(const lli_cuda_ce_shape *shape, int64_t clusters, size_t bytes,
                                    cudaLaunchAttribute *attribute, cudaStream_t stream) {
    cudaLaunchConfig_t config = {};
    attribute->id = cudaLaunchAttributeClusterDimension;
    attribute->val.clusterDim.x = (unsigned)shape->cluster;
    attribute->val.clusterDim.y = attribute->val.clusterDim.z = 1;
    config.gridDim = dim3((unsigned)(clusters * shape->cluster));
    config.blockDim = dim3((unsigned)shape->threads);
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

/* The number of clusters is that of the kernel with the most shared memory; none of the others fits fewer. */
extern "C" int lli_cuda_ce_rows_open(int32_t dtype, lli_cuda_ce_shape *shape) {
    const int64_t element_bytes = dtype == LL_DTYPE_F32 ? 4 : 2;
    shape->clusters = 0;
    for (int variant = 0; variant < 4; variant++) {
        const bool entropy = variant & 1;
        rows_kernel *kernel = kernel_for(dtype, entropy, variant & 2);
        const size_t bytes = shared_bytes(shape, element_bytes, entropy);
        int status = (int)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
        if (!status && shape->cluster > 8) {
            status = (int)cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
        }
        if (status) return status;
        cudaLaunchAttribute attribute;
        const cudaLaunchConfig_t config = config_of(shape, 1, bytes, &attribute, NULL);
        int clusters = 0;
        status = (int)cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
        if (status) return status;
        if (variant == 0 || clusters < shape->clusters) shape->clusters = clusters;
    }
    return 0;
}
