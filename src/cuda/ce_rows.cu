/* ce over given logits with each logit read once from memory: a block keeps a row from its arrival to the
 * last element of its gradient, in shared memory and, what does not fit, in the L2 cache.
 *
 *   a block       one row after another
 *   a step        4096 bytes of a row, 32 or 16 canonical tiles; step s belongs to tile warp s % warps
 *   tile warp     statistics of its steps, ascending, a lane a tile (f32: two lanes); then, once the row's
 *                 coefficients are there, the gradient of its steps, descending
 *   finish warp   the target's tile meanwhile; then, from all warps' records, the row's lse in double and the
 *                 coefficients of its gradient (ce_finish_warp.cuh)
 *
 * What it leaves is each row's integer sums, for finish.cu, and the gradient without the targets' entries.
 *
 * A tile warp has `slots` steps in shared memory, and loads for itself by asynchronous copies:
 *
 *   visits of a row with 5 steps, 2 slots   statistics 0 1 2 3 4   gradient 4 3 2 1 0   next row 0 1 ...
 *   asked for after the visit                          2 3 4 - -            2 1 0 0' 1'         2' ...
 *
 * so steps 4 and 3 are still there when the gradient begins; 2, 1, 0 come from L2, where they were put a few
 * microseconds before; and the next row arrives while the gradient of this one is made. Every visit ends with
 * one group of copies, an empty one too, and the group that a visit needs is always the slots-th last.
 *
 * Warps meet twice a row, at named barriers: kRecords, when the finish warp may read what they found, and
 * kCoefficients, when they may go on. Between rows they do not: each warp writes and reads its own steps.
 *
 * Sums are integers, so neither lanes, warps nor their order show in a bit. Ignored rows are not read.
 *
 * Bank conflicts: neighbouring lanes' tiles are 128 bytes apart, so lane l reads the 16-byte pieces of its
 * part in the order q xor l. The loops are what the kernel's time is made of: 12 instructions a logit in all.
 */
#define LLI_CALLS /* core/shared.h: before anything includes it */
#include "cuda/ce_finish_warp.cuh"
#include "cuda/ce_lane_sums.cuh"
#include "cuda/ptx/cp_async.cuh"

enum {
    kPieces = 8,      /* of 16 bytes, a lane's of a step */
    kStepPieces = 256 /* all lanes' */
};

template <typename E> struct step_of {
    enum {
        kCols = kCeStepBytes / sizeof(E),
        kLaneCols = kCols / 32,
        kTileLanes = kTileCols / kLaneCols /* lanes that share a canonical tile */
    };
};

/* What a lane finds in a row. */
template <bool kEntropy> struct lane_state {
    lane_sums<kEntropy> sums;
    float max;
    int32_t tile; /* the first with that maximum; -1: none */
};

/* ---- A warp's steps ----------------------------------------------------------------------------- */

/* The steps of a tile warp: which there are, and where they lie. A walker goes from slot to slot, round and
 * round, and turns back where a row's gradient begins. */
typedef struct warp_steps {
    int32_t first, stride, count; /* in a row */
    int32_t slots;
    int32_t slot, direction; /* of the walker; 1 or -1 */
    uint4 *memory;
} warp_steps;

static __device__ inline void walk(warp_steps *steps, int32_t direction) {
    const int32_t slot = steps->slot + direction;
    steps->slot = slot == steps->slots ? 0 : slot < 0 ? steps->slots - 1 : slot;
}

static __device__ inline uint4 *slot_at(const warp_steps *steps) {
    return steps->memory + steps->slot * kStepPieces;
}

/* logits_row_at with the bytes of an element known to the compiler: a register less, which would spill. */
static __device__ inline const char *row_at(const lli_cuda_ce *args, int64_t i, int64_t element_bytes) {
    return (const char *)args->logits.data + i * args->logits.row_stride * element_bytes;
}

/* Asks for step k of a row, into a slot. */
template <typename E>
static __device__ inline void load_step(const lli_cuda_ce *args, const warp_steps *steps, const char *row,
                                        int32_t k, uint4 *slot) {
    const int32_t at = (steps->first + k * steps->stride) * kCeStepBytes + lane_of() * 16;
    const int32_t left = (int32_t)args->v * (int32_t)sizeof(E) - at;
    const char *from = row + at;
    const uint32_t to = (uint32_t)__cvta_generic_to_shared(slot + lane_of());
    if (left >= kCeStepBytes) { /* of every lane */
#pragma unroll
        for (int p = 0; p < kPieces; p++) ptx_cp_async_cg_16(to + p * 512, from + p * 512, 16);
        return;
    }
#pragma unroll 1
    for (int p = 0; p < kPieces; p++) {
        const int32_t bytes = left - p * 512;
        if (bytes > 0) ptx_cp_async_cg_16(to + p * 512, from + p * 512, bytes < 16 ? (uint32_t)bytes : 16u);
    }
}

/* Waits for the group that the next visit needs, and for every lane's part of it. */
static __device__ inline void await_step(int32_t slots) {
    if (slots == 1) {
        ptx_cp_async_wait_group<0>();
    } else if (slots == 2) {
        ptx_cp_async_wait_group<1>();
    } else if (slots == 3) {
        ptx_cp_async_wait_group<2>();
    } else if (slots == 4) {
        ptx_cp_async_wait_group<3>();
    } else if (slots == 5) {
        ptx_cp_async_wait_group<4>();
    } else {
        ptx_cp_async_wait_group<kCeMostSlots - 1>();
    }
    __syncwarp();
}

/* ---- Statistics --------------------------------------------------------------------------------- */

/* -inf in the columns from `left` on of a row's last step. All lanes. */
template <typename E> static __device__ __noinline__ void end_step(uint4 *step, int32_t left) {
    enum { kCount = piece_of<E>::kCount };
    const uint32_t pair = piece_of<E>::kMinusInfinity;
    for (int q = lane_of(); q < kStepPieces; q += 32) {
        if (q * kCount >= left) step[q] = make_uint4(pair, pair, pair, pair);
    }
    const int32_t c = left + lane_of();
    if (c < (left + kCount - 1) / kCount * kCount) put_element(step, piece_of<E>::kDtype, c, -INFINITY);
    __syncwarp(); /* before other lanes read it */
}

/* `pieces` pieces of a tile from shared memory; columns from `left` on are -inf, transformed or not. */
template <typename E, bool kPlain> struct slot_columns {
    const uint4 *from;
    int32_t left;
    const lli_cuda_transform *transform;

    __device__ inline void operator()(int piece, float *z) const {
        enum { kCount = piece_of<E>::kCount };
        piece_of<E>::widen(from[piece], z);
        if (!kPlain) {
            float slope;
#pragma unroll
            for (int j = 0; j < kCount; j++) z[j] = transformed(transform, z[j], &slope);
        }
        if ((piece + 1) * kCount <= left) return;
#pragma unroll
        for (int j = 0; j < kCount; j++) {
            if (piece * kCount + j >= left) z[j] = -INFINITY;
        }
    }
};

/* Largest of the lane's whole part, raw. */
template <typename E> static __device__ inline float part_max(const uint4 *from, int32_t start) {
    uint4 m = from[start];
#pragma unroll
    for (int q = 1; q < kPieces; q++) {
        const uint4 x = from[q ^ start];
        m.x = piece_of<E>::max2(m.x, x.x);
        m.y = piece_of<E>::max2(m.y, x.y);
        m.z = piece_of<E>::max2(m.z, x.z);
        m.w = piece_of<E>::max2(m.w, x.w);
    }
    return piece_of<E>::max_of(piece_of<E>::max2(piece_of<E>::max2(m.x, m.y), piece_of<E>::max2(m.z, m.w)));
}

/* row and a tile that holds NaN or logits beyond the float formula. By value: a row whose address is known
 * elsewhere would not stay in registers. */
template <typename E, bool kPlain>
static __device__ __noinline__ lli_softmax with_wide_tile(lli_softmax row, slot_columns<E, kPlain> columns,
                                                          float zmax) {
    enum { kCount = piece_of<E>::kCount };
    float z[kTileCols];
    for (int q = 0; q < kTileCols / kCount; q++) columns(q, z + q * kCount);
    lli_softmax_tile(&row, z, kTileCols, zmax);
    return row;
}

/* The statistics of a step whose first column is c0; the tile of target y is left to the finish warp. */
template <typename E, bool kEntropy, bool kPlain>
static __device__ inline void gather_step(const lli_cuda_ce *args, const uint4 *step, int32_t c0, int32_t y,
                                          lane_state<kEntropy> *state) {
    enum {
        kCount = piece_of<E>::kCount,
        kLaneCols = step_of<E>::kLaneCols,
        kTileLanes = step_of<E>::kTileLanes
    };
    const int32_t lane = lane_of(), start = lane & (kPieces - 1);
    const int32_t c = c0 + lane * kLaneCols, v = (int32_t)args->v;
    const uint4 *from = step + lane * kPieces;
    const slot_columns<E, kPlain> part = {from, v - c, &args->row.transform};
    float zmax = kPlain ? part_max<E>(from, start) : -INFINITY;
    if (!kPlain) {
#pragma unroll 1
        for (int q = 0; q < kPieces; q++) {
            float z[kCount];
            part(q ^ start, z);
#pragma unroll
            for (int j = 0; j < kCount; j++) zmax = ptx_max_nan_f32(zmax, z[j]);
        }
    }
#pragma unroll
    for (int mask = 1; mask < kTileLanes; mask *= 2) {
        zmax = ptx_max_nan_f32(zmax, __shfl_xor_sync(kAllLanes, zmax, mask));
    }
    const float k = is_plain_max(zmax) ? lli_softmax_anchor(zmax) : 0.0f;
    column_sums<E, kEntropy> sums;
#pragma unroll(kPlain ? 2 : 1)
    for (int q = 0; q < kPieces; q++) {
        float z[kCount];
        if (kPlain) {
            piece_of<E>::widen(from[q ^ start], z);
        } else {
            part(q ^ start, z);
        }
#pragma unroll
        for (int j = 0; j < kCount; j++) sums.add(z[j], -k);
    }
    int64_t s = sums.s(), u = sums.u();
#pragma unroll
    for (int mask = 1; mask < kTileLanes; mask *= 2) {
        s += (int64_t)__shfl_xor_sync(kAllLanes, (unsigned long long)s, mask);
        if (kEntropy) u += (int64_t)__shfl_xor_sync(kAllLanes, (unsigned long long)u, mask);
    }
    if (lane % kTileLanes != 0 || c >= v) return;
    if (zmax > state->max || (state->tile < 0 && zmax == zmax)) {
        state->max = zmax;
        state->tile = c / kTileCols;
    }
    if ((uint32_t)(y - c) < kTileCols || zmax == -INFINITY) return;
    if (!is_plain_max(zmax)) {
        state->sums.set(with_wide_tile<E, kPlain>(state->sums.whole(), part, zmax));
    } else {
        state->sums.add_tile((int32_t)k, s, u);
    }
}

/* ---- The gradient ------------------------------------------------------------------------------- */

/* How most rows' columns are computed. */
template <typename E> struct usual_way {
    static constexpr ce_way kWay = sizeof(E) == 4 ? CE_PLAIN : CE_SHORT;
};

/* A whole step that does not hold the target, in the usual way. */
template <typename E>
static __device__ inline void scatter_usual(const lli_cuda_transform *transform, const ce_grad_row *row,
                                            const uint4 *step, char *to) {
    enum { kCount = piece_of<E>::kCount };
    const uint4 *from = step + lane_of();
    uint4 *piece_to = (uint4 *)to + lane_of();
#pragma unroll 4
    for (int p = 0; p < kPieces; p++) {
        float z[kCount], dz[kCount];
        piece_of<E>::widen(from[p * 32], z);
        ce_dz_columns<E, true, usual_way<E>::kWay, kCount>(transform, row, z, z, dz);
        piece_to[p * 32] = piece_of<E>::narrow(dz);
    }
}

template <typename E, bool kPlain, ce_way kWay>
static __device__ inline void scatter_way(const lli_cuda_ce *args, const ce_grad_row *row, const uint4 *step,
                                          int64_t c0, char *to_row) {
    enum { kCount = piece_of<E>::kCount };
    const int32_t dtype = args->grad.dtype;
    const int64_t to_bytes = dtype == LL_DTYPE_F32 ? 4 : 2;
    const float *class_weight = args->row.call.class_weight;
    const lli_cuda_transform *transform = &args->row.transform;
#pragma unroll 1
    for (int q = lane_of(); q < kStepPieces; q += 32) {
        const int64_t c = c0 + q * kCount;
        if (c + kCount <= args->v) {
            ce_dz_piece<E, kPlain, kWay>(transform, row, step[q], class_weight ? class_weight + c : NULL, c,
                                         dtype, to_row + c * to_bytes);
            continue;
        }
        for (int j = 0; c + j < args->v; j++) {
            const float z = element_at(step + q, args->logits.dtype, j);
            ce_dz_column<E, kPlain, kWay>(transform, row, z, class_weight, c + j, dtype, to_row);
        }
    }
}

/* Any step. */
template <typename E, bool kPlain>
static __device__ __noinline__ void scatter(const lli_cuda_ce *args, const ce_grad_row *row,
                                            const uint4 *step, int64_t c0, char *to_row) {
    const ce_grad_row local = *row; /* in registers: hence not for the wide, who call */
    switch (row->way) {
    case CE_DEAD:
        scatter_way<E, kPlain, CE_DEAD>(args, row, step, c0, to_row);
        break;
    case CE_SHORT:
        scatter_way<E, kPlain, CE_SHORT>(args, &local, step, c0, to_row);
        break;
    case CE_PLAIN:
        scatter_way<E, kPlain, CE_PLAIN>(args, &local, step, c0, to_row);
        break;
    case CE_GAMMA:
        scatter_way<E, kPlain, CE_GAMMA>(args, &local, step, c0, to_row);
        break;
    case CE_WIDE:
        scatter_way<E, kPlain, CE_WIDE>(args, row, step, c0, to_row);
        break;
    }
}

/* Zeros from column c on: a tile warp's share of them. */
static __device__ void clear_row(const lli_cuda_ce *args, int64_t i, int64_t c, const warp_steps *steps) {
    char *to = grad_row_at(args, i);
    for (c += steps->first * 32 + lane_of(); c < args->grad.cols; c += steps->stride * 32) {
        put_element(to, args->grad.dtype, c, 0.0f);
    }
}

/* ---- A tile warp -------------------------------------------------------------------------------- */

/* One behind the last row. */
static __device__ inline int64_t end_of(const lli_cuda_ce *args) {
    return args->row.first + args->row.n_rows;
}

/* The block's next row from i on that is not ignored; gradients of those that are become 0. */
static __device__ int64_t row_from(const lli_cuda_ce *args, int64_t i, const warp_steps *steps) {
    for (; i < end_of(args) && target_of(&args->row.targets, i) == kIgnored; i += gridDim.x) {
        if (args->grad.data) clear_row(args, i, 0, steps);
    }
    return i;
}

/* Of row i, with its steps in their slots or on their way; row `next` follows. */
template <typename E, bool kEntropy, bool kPlain>
static __device__ inline void gather_row(const lli_cuda_ce *args, warp_steps *steps, int64_t i, int64_t next,
                                         lane_state<kEntropy> *mine) {
    enum { kCols = step_of<E>::kCols };
    const int32_t y = (int32_t)target_of(&args->row.targets, i), v = (int32_t)args->v;
    const char *row = row_at(args, i, sizeof(E)), *next_row = row_at(args, next, sizeof(E));
    const bool goes_on = !args->grad.data && next < end_of(args);
#pragma unroll 1
    for (int32_t k = 0; k < steps->count; k++) {
        const int32_t c0 = (steps->first + k * steps->stride) * kCols;
        uint4 *step = slot_at(steps);
        await_step(steps->slots);
        if (kPlain && c0 + kCols > v) end_step<E>(step, v - c0);
        gather_step<E, kEntropy, kPlain>(args, step, c0, y, mine);
        __syncwarp(); /* read by every lane before it is loaded again */
        const int32_t ahead = k + steps->slots;
        const bool here = ahead < steps->count;
        if (here || goes_on) {
            load_step<E>(args, steps, here ? row : next_row, here ? ahead : ahead - steps->count, step);
        }
        ptx_cp_async_commit_group();
        walk(steps, steps->direction);
    }
}

template <typename E, bool kPlain>
static __device__ inline void scatter_row(const lli_cuda_ce *args, warp_steps *steps, int64_t i, int64_t next,
                                          const ce_grad_row *grad) {
    enum { kCols = step_of<E>::kCols };
    const char *row = row_at(args, i, sizeof(E)), *next_row = row_at(args, next, sizeof(E));
    char *to_row = grad_row_at(args, i);
    const ce_grad_row local = *grad; /* in registers */
    const bool usual = kPlain && local.way == usual_way<E>::kWay;
    const int32_t target = (int32_t)local.target, v = (int32_t)args->v;
#pragma unroll 1
    for (int32_t k = steps->count - 1; k >= 0; k--) {
        const int32_t c0 = (steps->first + k * steps->stride) * kCols;
        walk(steps, -steps->direction);
        uint4 *step = slot_at(steps);
        await_step(steps->slots);
        if (usual && c0 + kCols <= v && (uint32_t)(target - c0) >= kCols) {
            scatter_usual<E>(&args->row.transform, &local, step, to_row + c0 * (int32_t)sizeof(E));
        } else {
            scatter<E, kPlain>(args, grad, step, c0, to_row);
        }
        __syncwarp(); /* read by every lane before it is loaded again */
        const int32_t ahead = k - steps->slots;
        const bool here = ahead >= 0;
        if (here || next < end_of(args)) {
            load_step<E>(args, steps, here ? row : next_row, here ? ahead : -1 - ahead, step);
        }
        ptx_cp_async_commit_group();
    }
    clear_row(args, i, args->v, steps);
    walk(steps, -steps->direction); /* to the next row's first step */
    steps->direction = -steps->direction;
}

template <typename E, bool kEntropy, bool kPlain>
static __device__ inline void tile_warp(const lli_cuda_ce *args, int32_t warps, warp_steps *steps,
                                        row_state *state) {
    const int32_t threads = 32 * (warps + 1);
    const bool grad = args->grad.data != NULL;
    int64_t i = row_from(args, args->row.first + blockIdx.x, steps);
    int32_t turn = 0;
    for (int32_t k = 0; k < steps->slots; k++) {
        if (i < end_of(args)) {
            load_step<E>(args, steps, row_at(args, i, sizeof(E)), k, steps->memory + k * kStepPieces);
        }
        ptx_cp_async_commit_group();
    }
    while (i < end_of(args)) {
        lane_state<kEntropy> mine = {.sums = {.top = LLI_TOP_EMPTY}, .max = -INFINITY, .tile = -1};
        int64_t next = grad ? i : row_from(args, i + gridDim.x, steps);
        gather_row<E, kEntropy, kPlain>(args, steps, i, next, &mine);
        tile_record record = {mine.sums.whole(), mine.max, mine.tile};
        sum_lanes_row(&record.sums, kEntropy);
        if (args->want_argmax) max_lanes(&record.max, &record.tile);
        turn ^= 1;
        if (lane_of() == 0) state->records[turn][steps->first] = record;
        __syncwarp(); /* the record is written */
        ptx_barrier_arrive(kRecords, threads);
        if (grad) next = row_from(args, i + gridDim.x, steps);
        ptx_barrier_sync(kCoefficients, threads);
        if (grad) scatter_row<E, kPlain>(args, steps, i, next, &state->grad);
        i = next;
    }
}

/* ---- The kernel --------------------------------------------------------------------------------- */

template <typename E, bool kEntropy, bool kPlain>
static __global__ void __launch_bounds__(32 * (kCeMostTileWarps + 1), 1)
    rows(const __grid_constant__ lli_cuda_ce args, const __grid_constant__ lli_cuda_ce_shape shape) {
    extern __shared__ __align__(128) uint4 memory[];
    __shared__ row_state state;
    const int32_t warp = threadIdx.x / 32;
    if (warp == shape.warps) {
        finish_warp<E, kEntropy, kPlain>(&args, shape.warps, &state);
        return;
    }
    const int32_t all = (int32_t)((args.v * (int64_t)sizeof(E) + kCeStepBytes - 1) / kCeStepBytes);
    warp_steps steps = {.first = warp, .stride = shape.warps, .direction = 1};
    steps.count = (all - warp + shape.warps - 1) / shape.warps;
    steps.slots = shape.slots < steps.count ? shape.slots : steps.count;
    steps.memory = memory + warp * shape.slots * kStepPieces;
    tile_warp<E, kEntropy, kPlain>(&args, shape.warps, &steps, &state);
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

static size_t shared_bytes(const lli_cuda_ce_shape *shape) {
    return (size_t)shape->warps * (size_t)shape->slots * kCeStepBytes;
}

extern "C" int lli_cuda_ce_rows_launch(const lli_cuda_ce *args, const lli_cuda_ce_shape *shape,
                                       cudaStream_t stream) {
    const lli_cuda_finish *row = &args->row;
    const int64_t blocks = row->n_rows < shape->blocks ? row->n_rows : shape->blocks;
    return launch(kernel_for(args->logits.dtype, row->want_entropy, is_plain(row)), dim3((unsigned)blocks),
                  dim3((unsigned)(32 * (shape->warps + 1))), shared_bytes(shape), stream, *args, *shape);
}

extern "C" int lli_cuda_ce_rows_open(int32_t dtype, int64_t v, lli_cuda_ce_shape *shape) {
    lli_cuda_ce_chip chip = {};
    cudaFuncAttributes attributes;
    int status = (int)cudaFuncGetAttributes(&attributes, kernel_for(dtype, false, true));
    chip.own_bytes = (int)attributes.sharedSizeBytes; /* of every variant */
    if (!status) status = lli_cuda_ce_chip_read(&chip);
    if (status) return status;
    *shape = lli_cuda_ce_shape_for(&chip, v * (dtype == LL_DTYPE_F32 ? 4 : 2));
    for (int variant = 0; variant < 4 && !status; variant++) {
        rows_kernel *kernel = kernel_for(dtype, variant & 1, variant & 2);
        int blocks = 0;
        status = (int)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           chip.most_bytes - chip.own_bytes);
        if (!status) {
            status = (int)cudaOccupancyMaxActiveBlocksPerMultiprocessor(
                &blocks, kernel, 32 * (shape->warps + 1), shared_bytes(shape));
        }
        blocks *= chip.multiprocessors;
        if (variant == 0 || blocks < shape->blocks) shape->blocks = blocks;
    }
    return status;
}
