/* Statistics of a tile of raw logits that lies in a warpgroup's registers as wgmma leaves it: the integer
 * softmax of core/softmax.h, as stats.cu makes it from memory, with the same bits.
 *
 *   a lane       four rows: r = 2 half + h is row 64 half + 16 warp + 8 h + lane / 4; of each, 16 columns of
 *                every canonical tile
 *   four lanes   a quad, which holds four rows together. Maxima go to all four; sums are exchanged so that
 *                lane q of the quad ends with those of row r = q: it is the row's owner, adds to the row's
 *                slot and knows its target
 *
 * A tile that holds the row's target, or logits beyond the float formula, is set apart: its row of 64 logits
 * is written to the warp's shared memory, and the warp looks at it together. */
#ifndef LLI_CUDA_SM90_STATISTICS_CUH
#define LLI_CUDA_SM90_STATISTICS_CUH

#include "cuda/device.cuh"
#include "cuda/fused.h"
#include "cuda/ptx/max_nan.cuh"
#include "cuda/ptx/special.cuh"

enum { kHalfSums = kFusedCols / 2, kTilesOfWorker = (int)kFusedCols / (int)kTileCols };

typedef float tile_logits[2][kHalfSums];

/* Element e of the pair j of the canonical tile `tile`, in row h of a half. */
static __device__ constexpr int logit_at(int tile, int j, int h, int e) {
    return 4 * (8 * tile + j) + 2 * h + e;
}

/* In shared memory, for each warp: a row that is looked at by itself, and what the owner of a row (a lane)
 * gathers over the tiles at hand, so that it takes no registers beside the logits. */
typedef struct warp_memory {
    float apart[kTileCols];
    uint64_t s[kTilesOfWorker][32], u[kTilesOfWorker][32];
    int32_t k[kTilesOfWorker][32];
    uint32_t counted[32]; /* bit t: canonical tile t is to be added */
    int32_t row[32];      /* of the chunk; from n_rows on: no token */
    int32_t target[32];   /* column within the worker's tile; below -kFusedCols: elsewhere */
    float max[32];
    int32_t argmax[32];
} warp_memory;

/* What was written to the warp's memory is read from there again, not kept in registers meanwhile. */
static __device__ inline void out_of_registers(void) {
    asm volatile("" ::: "memory");
}

static __device__ inline int this_lane(void) {
    return (int)(ptx_tid_x() % 32);
}

/* The worker's slot of the row (fused.h). */
static __device__ inline lli_cuda_slot *slot_of(const lli_cuda_fused *args, int32_t row) {
    const uint32_t second = ptx_tid_x() / 128 - 1, workers = 2 * args->tiles.clusters;
    const uint32_t worker = ptx_ctaid_x() / 2 + args->tiles.clusters * second;
    const uint32_t group = (uint32_t)row / kFusedRows / args->tiles.group_rows;
    const uint32_t base = group * args->tiles.group_rows * args->tiles.col_blocks % workers;
    const bool last = (group + 1) * args->tiles.group_rows >= args->tiles.row_blocks;
    const uint32_t part = (worker + workers - base) % workers / (last ? args->last_stride : args->stride);
    return args->slots + part * args->n_rows + row;
}

/* ---- Logits ------------------------------------------------------------------------------------- */

/* -inf where there is no column. */
static __device__ inline void mask_columns(tile_logits z, int32_t left, int lane) {
#pragma unroll
    for (int i = 0; i < kHalfSums; i++) {
        const bool real = 8 * (i / 4) + 2 * (lane % 4) + i % 2 < left;
#pragma unroll
        for (int half = 0; half < 2; half++) z[half][i] = real ? z[half][i] : -INFINITY;
    }
}

static __device__ inline void add_bias(tile_logits z, const lli_cuda_fused *args, int64_t column, int lane) {
#pragma unroll
    for (int j = 0; j < kHalfSums / 4; j++) {
        const int64_t c = column + 8 * j + 2 * (lane % 4);
        float2 bias = {0.0f, 0.0f};
        if (c < args->n_cols) bias = *(const float2 *)(args->bias + c);
#pragma unroll
        for (int i = 0; i < 4; i++) { /* both rows of both halves */
            float *pair = &z[i / 2][4 * j + 2 * (i % 2)];
            pair[0] = pair[0] + bias.x;
            pair[1] = pair[1] + bias.y;
        }
    }
}

static __device__ inline void divide(tile_logits z, float temperature) {
#pragma unroll
    for (int i = 0; i < kHalfSums; i++) {
        z[0][i] = z[0][i] / temperature;
        z[1][i] = z[1][i] / temperature;
    }
}

/* ---- A lane's 16 logits of a row and canonical tile --------------------------------------------- */

static __device__ inline float lane_max(const tile_logits z, int tile, int half, int h) {
    float m = ptx_max_nan_f32(z[half][logit_at(tile, 0, h, 0)], z[half][logit_at(tile, 0, h, 1)]);
#pragma unroll
    for (int j = 1; j < 8; j++) {
        m = ptx_max_nan_f32(
            m, ptx_max_nan_f32(z[half][logit_at(tile, j, h, 0)], z[half][logit_at(tile, j, h, 1)]));
    }
    return m;
}

/* The lowest column of the tile whose logit is `max`; 64: none of this lane's. */
static __device__ inline int32_t lane_find(const tile_logits z, int tile, int half, int h, float max,
                                           int lane) {
    int32_t at = kTileCols;
#pragma unroll
    for (int j = 7; j >= 0; j--) {
#pragma unroll
        for (int e = 1; e >= 0; e--) {
            if (z[half][logit_at(tile, j, h, e)] == max) at = 8 * j + 2 * (lane % 4) + e;
        }
    }
    return at;
}

/* Pace: the arithmetic of one warpgroup takes cycles from the other's products, and the more so the denser it
 * comes. So each kPace logits wait for those before, through `zero`, which is 0. kPace 16: as they come. */
template <int kPace>
static __device__ inline void lane_sums(const tile_logits z, int tile, int half, int h, float minus_k,
                                        uint32_t zero, uint64_t *s_sum, uint64_t *u_sum) {
    uint64_t s = 0, u = 0;
    uint32_t s_few = 0, u_few = 0, before = 0;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        uint32_t s1, u1;
        if (i && i % kPace == 0) {
            minus_k = __uint_as_float(__float_as_uint(minus_k) | (before & zero));
        }
        grid_terms<true>(z[half][logit_at(tile, i / 2, h, i % 2)], minus_k, &s1, &u1);
        before = s1;
        /* terms of s are at most 2^30 and of u at most 0.54 2^30: three, and seven, fit 32 bits */
        s_few += s1;
        if (i % 3 == 2 || i == 15) {
            s += s_few;
            s_few = 0;
        }
        u_few += u1;
        if (i % 7 == 6 || i == 15) {
            u += u_few;
            u_few = 0;
        }
    }
    *s_sum = s;
    *u_sum = u;
}

/* ---- Exchange within a quad --------------------------------------------------------------------- */

static __device__ inline float quad_max(float m) {
    m = ptx_max_nan_f32(m, __shfl_xor_sync(0xffffffffu, m, 1));
    return ptx_max_nan_f32(m, __shfl_xor_sync(0xffffffffu, m, 2));
}

/* The lane whose bit is 0 keeps `a`, the other `b`, each with the partner's share added. */
static __device__ inline uint64_t keep_sum(uint64_t a, uint64_t b, int lane, int bit) {
    const bool upper = lane & bit;
    return (upper ? b : a) + __shfl_xor_sync(0xffffffffu, (unsigned long long)(upper ? a : b), bit);
}

static __device__ inline int32_t keep_min(int32_t a, int32_t b, int lane, int bit) {
    const bool upper = lane & bit;
    const int32_t mine = upper ? b : a, other = __shfl_xor_sync(0xffffffffu, upper ? a : b, bit);
    return mine < other ? mine : other;
}

/* ---- A row of a tile by itself ------------------------------------------------------------------ */

/* The sums of 64 logits in shared memory, of any range; every lane gets them. */
static __device__ inline lli_softmax whole_tile(const float *z, int lane) {
    lli_softmax sums;
    lli_softmax_clear(&sums);
    const float z0 = z[lane], z1 = z[lane + 32];
    float max = ptx_max_nan_f32(z0, z1);
    for (int mask = 16; mask > 0; mask /= 2) {
        max = ptx_max_nan_f32(max, __shfl_xor_sync(0xffffffffu, max, mask));
    }
    if (max == -INFINITY) return sums;
    if (!(fabsf(max) < LLI_Z_FLOAT)) {
        lli_softmax_tile(&sums, z, kTileCols, max);
        return sums;
    }
    const float k = lli_softmax_anchor(max);
    uint32_t s0, s1, u0, u1;
    grid_terms<true>(z0, -k, &s0, &u0);
    grid_terms<true>(z1, -k, &s1, &u1);
    lli_softmax_add(&sums, (int32_t)k, sum_lanes((int64_t)s0 + s1), sum_lanes((int64_t)u0 + u1));
    return sums;
}

/* The tile in `z`: with the row's target at column `at`, or, where that is not of the tile, with logits
 * beyond the float formula. */
static __device__ inline void gather_apart(const lli_cuda_fused *args, float *z, int32_t row, int32_t at,
                                           bool owner, int lane) {
    const bool has_target = at >= 0 && at < kTileCols;
#pragma unroll 1
    for (int pass = 0; pass < 2; pass++) {
        const lli_softmax sums = whole_tile(z, lane);
        __syncwarp(); /* all have read z before its owner changes it */
        if (owner && !has_target) lli_softmax_merge(&slot_of(args, row)->sums, &sums);
        if (!has_target) return;
        if (owner && pass == 0) {
            args->rows[row].whole = sums;
            args->rows[row].z = z[at];
            args->rows[row].has_target = 1;
            z[at] = -INFINITY;
        } else if (owner) {
            args->rows[row].rest = sums;
        }
        __syncwarp(); /* z is without the target before it is read again */
    }
}

/* Writes the quad's row r of the canonical tile `tile`. */
static __device__ inline void dump_row(const tile_logits z, int tile, int r, int lane, float *to) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int column = 8 * j + 2 * (lane % 4) + e;
            if (r == 0) to[column] = z[0][logit_at(tile, j, 0, e)];
            if (r == 1) to[column] = z[0][logit_at(tile, j, 1, e)];
            if (r == 2) to[column] = z[1][logit_at(tile, j, 0, e)];
            if (r == 3) to[column] = z[1][logit_at(tile, j, 1, e)];
        }
    }
}

/* ---- A tile ------------------------------------------------------------------------------------- */

/* One canonical tile of the warp's 32 rows; `tile` is a constant where this is inlined. */
template <bool kOptions, int kPace>
static __device__ inline void gather_columns(const lli_cuda_fused *args, const tile_logits z, int tile,
                                             int64_t column, warp_memory *memory) {
    const int lane = this_lane();
    float own_max[2]; /* of the two rows that this lane may own, one in each half */
    int32_t own_at[2] = {kTileCols, kTileCols};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float max[2];
        uint64_t s[2], u[2];
        int32_t at[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            max[h] = quad_max(lane_max(z, tile, half, h));
            /* beyond the float formula, where the sums are not used, any anchor */
            const float k = lli_softmax_anchor(fminf(fmaxf(max[h], -LLI_Z_FLOAT), LLI_Z_FLOAT));
            lane_sums<kPace>(z, tile, half, h, -k, args->zero, &s[h], &u[h]);
            if (kOptions && args->want_argmax) at[h] = lane_find(z, tile, half, h, max[h], lane);
        }
        own_max[half] = lane & 1 ? max[1] : max[0];
        s[0] = keep_sum(s[0], s[1], lane, 1);
        u[0] = keep_sum(u[0], u[1], lane, 1);
        if (kOptions && args->want_argmax) own_at[half] = keep_min(at[0], at[1], lane, 1);
        if (half == 0) {
            memory->s[tile][lane] = s[0];
            memory->u[tile][lane] = u[0];
            out_of_registers();
        } else {
            memory->s[tile][lane] = keep_sum(memory->s[tile][lane], s[0], lane, 2);
            memory->u[tile][lane] = keep_sum(memory->u[tile][lane], u[0], lane, 2);
        }
    }
    const float m = lane & 2 ? own_max[1] : own_max[0];
    if (kOptions && args->want_argmax) {
        const int32_t at = keep_min(own_at[0], own_at[1], lane, 2);
        if (m > memory->max[lane] ||
            (memory->argmax[lane] < 0 && m == m)) { /* tiles come in ascending order */
            memory->max[lane] = m;
            memory->argmax[lane] = (int32_t)(column + at);
        }
    }
    const bool in_range = fabsf(m) < LLI_Z_FLOAT, real = memory->row[lane] < args->n_rows;
    const int32_t own_target = memory->target[lane] - kTileCols * tile;
    const bool has_target = own_target >= 0 && own_target < kTileCols;
    memory->k[tile][lane] = (int32_t)lli_softmax_anchor(fminf(fmaxf(m, -LLI_Z_FLOAT), LLI_Z_FLOAT));
    if (real && in_range && !has_target) memory->counted[lane] |= 1u << tile;
    const bool apart = real && (has_target || (!in_range && m != -INFINITY));
    for (uint32_t left = __ballot_sync(0xffffffffu, apart); left; left &= left - 1) {
        const int owner = __ffs((int)left) - 1;
        const int32_t at = memory->target[owner] - kTileCols * tile;
        if (lane / 4 == owner / 4) dump_row(z, tile, owner % 4, lane, memory->apart);
        __syncwarp(); /* the quad's 64 logits are in before the warp reads them */
        gather_apart(args, memory->apart, memory->row[owner], at, lane == owner, lane);
        __syncwarp(); /* and read before the next row overwrites them */
    }
}

/* The tiles gathered, into the row's slot, which is the worker's own. */
template <bool kOptions>
static __device__ inline void add_to_slot(const lli_cuda_fused *args, const warp_memory *memory) {
    const int lane = this_lane();
    const int32_t row = memory->row[lane];
    if (row >= args->n_rows) return;
    lli_cuda_slot *slot = slot_of(args, row);
    const uint32_t counted = memory->counted[lane];
    if (counted) {
        lli_softmax sums = slot->sums;
#pragma unroll 1
        for (int tile = 0; tile < kTilesOfWorker; tile++) {
            if (!(counted >> tile & 1)) continue;
            lli_softmax_add(&sums, memory->k[tile][lane], (int64_t)memory->s[tile][lane],
                            (int64_t)memory->u[tile][lane]);
        }
        slot->sums = sums;
    }
    if (kOptions && args->want_argmax && memory->argmax[lane] >= 0 &&
        (slot->argmax < 0 || memory->max[lane] > slot->max)) {
        slot->max = memory->max[lane];
        slot->argmax = memory->argmax[lane];
    }
}

/* All of a worker's tile: rows [row, row + 128) of the chunk, columns [column, column + 192). */
template <bool kOptions, int kPace>
static __device__ inline void gather_tile(const lli_cuda_fused *args, tile_logits z, int32_t row,
                                          int64_t column, warp_memory *memory) {
    const int lane = this_lane(), warp = (int)(ptx_tid_x() % 128 / 32);
    if (row + 16 * warp >= args->n_rows) return; /* a whole warp without tokens */
    row += 64 * (lane / 2 % 2) + 16 * warp + 8 * (lane % 2) + lane / 4 % 8;
    const int64_t y =
        row < args->n_rows ? target_of(&args->targets, args->first + row) - (args->column + column) : -1;
    memory->row[lane] = row;
    const int64_t left = args->n_cols - column; /* beyond them, the target is another rank's */
    memory->target[lane] = y >= 0 && y < kFusedCols && y < left ? (int32_t)y : -1 - kFusedCols;
    memory->counted[lane] = 0;
    memory->max[lane] = -INFINITY;
    memory->argmax[lane] = -1;
    if (kOptions && args->bias) add_bias(z, args, column, lane);
    if (kOptions && args->temperature != 1.0f) divide(z, args->temperature);
    if (left < kFusedCols) mask_columns(z, (int32_t)left, lane);
#pragma unroll
    for (int tile = 0; tile < kTilesOfWorker; tile++) {
        __syncwarp(); /* what owners wrote is there for all lanes */
        out_of_registers();
        gather_columns<kOptions, kPace>(args, z, tile, column + kTileCols * tile, memory);
    }
    out_of_registers();
    add_to_slot<kOptions>(args, memory);
}

#endif
