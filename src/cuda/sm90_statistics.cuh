/* Statistics of a tile of raw logits that lies in a warpgroup's registers as wgmma leaves it: the integer
 * softmax of core/softmax.h, as stats.cu makes it from memory, with the same bits.
 *
 *   a lane       16 columns of every canonical tile of its four rows (sm90_tiles.cuh)
 *   a quad       maxima go to all four lanes; sums are exchanged so that lane q of the quad ends with those
 *                of row r = q: it is the row's owner, adds to the row's slot and knows its target
 *
 * A tile that holds the row's target, or logits beyond the float formula, is set apart: its row of 64 logits
 * is written to the warp's shared memory, and the warp looks at it together. */
#ifndef LLI_CUDA_SM90_STATISTICS_CUH
#define LLI_CUDA_SM90_STATISTICS_CUH

#include "cuda/kept.cuh"
#include "cuda/sm90_tiles.cuh"

/* In shared memory, for each warp: a row that is looked at by itself, and what the owner of a row (a lane)
 * gathers over the tiles at hand, so that it takes no registers beside the logits. */
typedef struct warp_memory {
    float apart[kTileCols];
    uint64_t s[kTilesOfWorker][32], u[kTilesOfWorker][32];
    int32_t k[kTilesOfWorker][32];
    uint32_t counted[32]; /* bit t: canonical tile t is to be added */
    uint32_t wide[32];    /* bit t: its logits are beyond the float formula */
    int32_t row[32];      /* of the chunk; from n_rows on: no token */
    int32_t target[32];   /* column within the worker's tile; below -kFusedCols: elsewhere */
    float max[32];
    int32_t argmax[32];
    uint16_t *kept[kTilesOfWorker]; /* kept_tile of the tiles at hand */
} warp_memory;

/* What was written to the warp's memory is read from there again, not kept in registers meanwhile. */
static __device__ inline void out_of_registers(void) {
    asm volatile("" ::: "memory");
}

/* The worker's slot of the row (fused.h). */
static __device__ inline lli_cuda_slot *slot_of(const lli_cuda_fused *args, int32_t row) {
    const uint32_t second = ptx_tid_x() / 128 - 1, workers = 2 * args->tiles.clusters;
    const uint32_t worker = ptx_ctaid_x() / 2 + args->tiles.clusters * second;
    const uint32_t group = (uint32_t)row / kFusedRows / args->tiles.group_rows;
    const uint32_t base = group * args->tiles.group_rows * args->tiles.col_blocks % workers;
    const uint32_t turn = (worker + workers - base) % workers, last_row = (uint32_t)args->last_row;
    if ((uint32_t)row < last_row) return args->slots + turn / args->stride * args->last_row + row;
    return args->slots + args->parts * args->last_row +
           turn / args->last_stride * (args->n_rows - args->last_row) + (row - args->last_row);
}

/* ---- Logits ------------------------------------------------------------------------------------- */

static __device__ inline void add_bias(tile_logits z, const lli_cuda_fused *args, int32_t column, int lane) {
#pragma unroll
    for (int j = 0; j < kHalfSums / 4; j++) {
        const int32_t c = column + 8 * j + 2 * (lane % 4);
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

/* Half of the lane's exponentials of a row of the tile, given by its owner, to where they are kept, unless
 * keep_wide has written them. Past the caches' other lines: nobody reads them in this kernel. */
static __device__ inline void keep_codes(const lli_cuda_fused *args, const warp_memory *memory, int tile,
                                         int owner, int half, const uint32_t *pairs) {
    uint16_t *rows = memory->kept[tile];
    const int32_t row = memory->row[owner];
    if (!rows || row >= args->n_rows || memory->wide[owner] >> tile & 1) return;
    __stcs((uint4 *)(rows + row * (int64_t)kTileCols) + 2 * (this_lane() % 4) + half,
           make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
}

/* Pace: the arithmetic of one warpgroup takes cycles from the other's products, and the more so the denser it
 * comes. So each kPace logits wait for those before, through `zero`, which is 0. kPace 16: as they come.
 * kKeep: the exponentials are kept. */
template <int kPace, bool kKeep>
static __device__ inline void lane_sums(const lli_cuda_fused *args, const warp_memory *memory,
                                        const tile_logits z, int tile, int half, int h, uint64_t *s_sum,
                                        uint64_t *u_sum) {
    const int owner = this_lane() / 4 * 4 + 2 * half + h;
    float minus_k = -(float)memory->k[tile][owner];
    uint64_t s = 0, u = 0;
    uint32_t s_few = 0, u_few = 0, before = 0, codes[2], pairs[4];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        uint32_t s1, u1;
        if (i && i % kPace == 0) {
            minus_k = __uint_as_float(__float_as_uint(minus_k) | (before & args->zero));
        }
        const float scaled = grid_terms<true>(z[half][logit_at(tile, i / 2, h, i % 2)], minus_k, &s1, &u1);
        before = s1;
        if (kKeep) {
            codes[i % 2] = exp16_of(scaled);
            if (i % 2 == 1) pairs[i / 2 % 4] = exp16_pair(codes[0], codes[1]);
            if (i % 8 == 7) keep_codes(args, memory, tile, owner, i / 8, pairs);
        }
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

/* The exponentials of a row's tile that is beyond the float formula; every lane calls it. */
static __device__ inline void keep_wide(const warp_memory *memory, int tile, int32_t row, int lane) {
    const float *z = memory->apart;
    uint16_t *rows = memory->kept[tile];
    float max = ptx_max_nan_f32(z[lane], z[lane + 32]);
    for (int mask = 16; mask > 0; mask /= 2) {
        max = ptx_max_nan_f32(max, __shfl_xor_sync(0xffffffffu, max, mask));
    }
    if (!rows || !beyond_float(max)) return;
#pragma unroll 1
    for (int c = lane; c < kTileCols; c += 32) {
        rows[row * (int64_t)kTileCols + kept_place(c)] = (uint16_t)(exp16_of_wide(z[c], max) >> 13);
    }
}

/* What of a tile is looked at by itself. m: the largest logit of the lane's own row. */
static __device__ inline void gather_rows_apart(const lli_cuda_fused *args, const tile_logits z, int tile,
                                                float m, bool keep, warp_memory *memory) {
    const int lane = this_lane();
    const bool in_range = fabsf(m) < LLI_Z_FLOAT, real = memory->row[lane] < args->n_rows;
    const int32_t own_target = memory->target[lane] - kTileCols * tile;
    const bool has_target = own_target >= 0 && own_target < kTileCols;
    if (real && in_range && !has_target) memory->counted[lane] |= 1u << tile;
    if (keep && beyond_float(m)) memory->wide[lane] |= 1u << tile;
    const bool apart = real && (has_target || (!in_range && m != -INFINITY));
    for (uint32_t left = __ballot_sync(0xffffffffu, apart); left; left &= left - 1) {
        const int owner = __ffs((int)left) - 1;
        const int32_t at = memory->target[owner] - kTileCols * tile;
        if (lane / 4 == owner / 4) dump_row(z, tile, owner % 4, lane, memory->apart);
        __syncwarp(); /* the quad's 64 logits are in before the warp reads them */
        if (keep) {
            keep_wide(memory, tile, memory->row[owner], lane);
            __syncwarp(); /* all have read the logits before the target's is taken out */
        }
        gather_apart(args, memory->apart, memory->row[owner], at, lane == owner, lane);
        __syncwarp(); /* and read before the next row overwrites them */
    }
}

/* One canonical tile of the warp's 32 rows; `tile` is a constant where this is inlined. Maxima and what is
 * apart first: from then on a logit's register is free once its exponential is added. */
template <bool kOptions, int kPace, bool kKeep>
static __device__ inline void gather_columns(const lli_cuda_fused *args, const tile_logits z, int tile,
                                             int32_t column, warp_memory *memory) {
    int lane = this_lane();
    float own_max[2]; /* of the two rows that this lane may own, one in each half */
    int32_t own_at[2] = {kTileCols, kTileCols};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float max[2];
        int32_t at[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            max[h] = quad_max(lane_max(z, tile, half, h));
            if (kOptions && args->want_argmax) at[h] = lane_find(z, tile, half, h, max[h], lane);
        }
        own_max[half] = lane & 1 ? max[1] : max[0];
        if (kOptions && args->want_argmax) own_at[half] = keep_min(at[0], at[1], lane, 1);
    }
    const float m = lane & 2 ? own_max[1] : own_max[0];
    if (kOptions && args->want_argmax) {
        const int32_t at = keep_min(own_at[0], own_at[1], lane, 2);
        if (m > memory->max[lane] ||
            (memory->argmax[lane] < 0 && m == m)) { /* tiles come in ascending order */
            memory->max[lane] = m;
            memory->argmax[lane] = column + at;
        }
    }
    memory->k[tile][lane] = (int32_t)bounded_anchor(m);
    if (kKeep && memory->kept[tile] && memory->row[lane] < args->n_rows) {
        args->kept.anchors[column / kTileCols * args->n_rows + memory->row[lane]] = kept_anchor(m);
    }
    gather_rows_apart(args, z, tile, m, kKeep, memory);
    __syncwarp(); /* owners' anchors are there for the other lanes of a quad */
    out_of_registers();
    lane = this_lane();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint64_t s[2], u[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            lane_sums<kPace, kKeep>(args, memory, z, tile, half, h, &s[h], &u[h]);
        }
        s[0] = keep_sum(s[0], s[1], lane, 1);
        u[0] = keep_sum(u[0], u[1], lane, 1);
        if (half == 0) {
            memory->s[tile][lane] = s[0];
            memory->u[tile][lane] = u[0];
            out_of_registers();
        } else {
            memory->s[tile][lane] = keep_sum(memory->s[tile][lane], s[0], lane, 2);
            memory->u[tile][lane] = keep_sum(memory->u[tile][lane], u[0], lane, 2);
        }
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
template <bool kOptions, int kPace, bool kKeep>
static __device__ inline void gather_tile(const lli_cuda_fused *args, tile_logits z, int32_t row,
                                          int32_t column, warp_memory *memory) {
    const int lane = this_lane(), warp = (int)(ptx_tid_x() % 128 / 32);
    if (row + 16 * warp >= args->n_rows) return; /* a whole warp without tokens */
    if (kKeep && lane < kTilesOfWorker) {
        memory->kept[lane] = kept_tile(&args->kept, column / kTileCols + lane);
    }
    row += 64 * (lane / 2 % 2) + 16 * warp + 8 * (lane % 2) + lane / 4 % 8;
    const int64_t y =
        row < args->n_rows ? target_of(&args->targets, args->first + row) - (args->column + column) : -1;
    memory->row[lane] = row;
    const int64_t left = args->n_cols - column; /* beyond them, the target is another rank's */
    memory->target[lane] = y >= 0 && y < kFusedCols && y < left ? (int32_t)y : -1 - kFusedCols;
    memory->counted[lane] = 0;
    if (kKeep) memory->wide[lane] = 0;
    memory->max[lane] = -INFINITY;
    memory->argmax[lane] = -1;
    if (kOptions && args->bias) add_bias(z, args, column, lane);
    if (kOptions && args->temperature != 1.0f) divide(z, args->temperature);
    if (left < kFusedCols) mask_columns(z, (int32_t)left, lane);
#pragma unroll
    for (int tile = 0; tile < kTilesOfWorker; tile++) {
        __syncwarp(); /* what owners wrote is there for all lanes */
        out_of_registers();
        gather_columns<kOptions, kPace, kKeep>(args, z, tile, column + kTileCols * tile, memory);
    }
    out_of_registers();
    add_to_slot<kOptions>(args, memory);
}

#endif
