/* ce over given logits with each logit read once from memory: a block keeps a row from its arrival to the
 * last element of its gradient, in shared memory and, what does not fit, in the L2 cache.
 *
 *   a block       one row after another
 *   a step        4096 bytes of a row, 32 or 16 canonical tiles; step s belongs to tile warp s % warps
 *   tile warp     statistics of its steps, ascending, a lane a tile (f32: two lanes); then, once the row's
 *                 coefficients are there, the gradient of its steps, descending
 *   finish warp   the target's tile meanwhile; then the row's softmax from all warps' records, in double, and
 *                 the coefficients of its gradient; then its results (ce_finish_warp.cuh)
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
 * Bank conflicts: neighbouring lanes' tiles are 128 bytes apart, so each lane starts to read at another
 * 16-byte piece of its part and goes round. */
#define LLI_CALLS /* core/shared.h: before anything includes it */
#include "cuda/ce_finish_warp.cuh"
#include "cuda/ptx/cp_async.cuh"

enum {
    kStepBytes = 4096,
    kPieces = 8,       /* of 16 bytes, a lane's of a step */
    kStepPieces = 256, /* all lanes' */
    kMostSlots = 4
};

template <typename E> struct step_of {
    enum {
        kCols = kStepBytes / sizeof(E),
        kLaneCols = kCols / 32,
        kTileLanes = kTileCols / kLaneCols /* lanes that share a canonical tile */
    };
};

/* ---- A warp's steps ----------------------------------------------------------------------------- */

/* The steps of a tile warp: which there are, and where they lie while it works on them. */
typedef struct warp_steps {
    int32_t first, stride, count; /* in a row */
    int32_t slots;
    int32_t turn, mirrored; /* of the row at work: step k lies in slot (k + turn) % slots, or mirrored */
    uint4 *memory;
} warp_steps;

static __device__ inline int32_t slot_of(const warp_steps *steps, int32_t k) {
    const int32_t slot = (k + steps->turn) % steps->slots;
    return steps->mirrored ? steps->slots - 1 - slot : slot;
}

/* Asks for step k of a row, into a slot. */
template <typename E>
static __device__ inline void load_step(const lli_cuda_ce *args, const warp_steps *steps, int64_t i,
                                        int32_t k, int32_t slot) {
    const int64_t at = (int64_t)(steps->first + k * steps->stride) * kStepBytes + lane_of() * 16;
    const char *from =
        (const char *)args->logits.data + i * args->logits.row_stride * (int64_t)sizeof(E) + at;
    const int64_t left = args->v * (int64_t)sizeof(E) - at;
    const uint32_t to = (uint32_t)__cvta_generic_to_shared(steps->memory + slot * kStepPieces + lane_of());
    if (left >= kStepBytes) { /* of every lane */
#pragma unroll
        for (int p = 0; p < kPieces; p++) ptx_cp_async_cg_16(to + p * 512, from + p * 512, 16);
        return;
    }
    for (int p = 0; p < kPieces; p++) {
        const int64_t bytes = left - p * 512;
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
    } else {
        ptx_cp_async_wait_group<kMostSlots - 1>();
    }
    __syncwarp();
}

/* ---- Statistics --------------------------------------------------------------------------------- */

/* `pieces` pieces of a step from shared memory, the first being `start`, going round; columns from `left` on
 * are -inf. */
template <typename E, bool kPlain> struct slot_columns {
    const uint4 *from;
    int32_t pieces, start;
    int64_t left;
    const lli_cuda_transform *transform;

    __device__ inline void operator()(int q, float *z) const {
        enum { kCount = piece_of<E>::kCount };
        const int32_t piece = (q + start) & (pieces - 1);
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
        const uint4 x = from[(q + start) & (kPieces - 1)];
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
static __device__ inline void gather_step(const lli_cuda_ce *args, const uint4 *step, int64_t c0, int64_t y,
                                          tile_record *state) {
    enum {
        kCount = piece_of<E>::kCount,
        kCols = step_of<E>::kCols,
        kLaneCols = step_of<E>::kLaneCols,
        kTileLanes = step_of<E>::kTileLanes
    };
    const int32_t lane = lane_of();
    const int64_t c = c0 + lane * kLaneCols;
    const slot_columns<E, kPlain> part = {step + lane * kPieces, kPieces, lane & (kPieces - 1), args->v - c,
                                          &args->row.transform};
    const bool whole = c0 + kCols <= args->v;
    float zmax = kPlain && whole ? part_max<E>(part.from, part.start) : -INFINITY;
    if (!kPlain || !whole) {
#pragma unroll 1
        for (int q = 0; q < kPieces; q++) {
            float z[kCount];
            part(q, z);
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
    if (whole) {
#pragma unroll 2
        for (int q = 0; q < kPieces; q++) {
            float z[kCount];
            if (kPlain) {
                piece_of<E>::widen(part.from[(q + part.start) & (kPieces - 1)], z);
            } else {
                part(q, z);
            }
#pragma unroll
            for (int j = 0; j < kCount; j++) sums.add(z[j], -k);
        }
    } else {
#pragma unroll 1
        for (int q = 0; q < kPieces; q++) {
            float z[kCount];
            part(q, z);
#pragma unroll
            for (int j = 0; j < kCount; j++) sums.add(z[j], -k);
        }
    }
    int64_t s = sums.s(kLaneCols), u = sums.u(kLaneCols);
#pragma unroll
    for (int mask = 1; mask < kTileLanes; mask *= 2) {
        s += (int64_t)__shfl_xor_sync(kAllLanes, (unsigned long long)s, mask);
        if (kEntropy) u += (int64_t)__shfl_xor_sync(kAllLanes, (unsigned long long)u, mask);
    }
    if (lane % kTileLanes != 0 || c >= args->v) return;
    if (zmax > state->max || (state->tile < 0 && zmax == zmax)) {
        state->max = zmax;
        state->tile = (int32_t)(c / kTileCols);
    }
    if ((uint64_t)(y - c) < kTileCols || zmax == -INFINITY) return;
    if (!is_plain_max(zmax)) {
        const slot_columns<E, kPlain> tile = {part.from, kPieces * kTileLanes, 0, part.left, part.transform};
        state->sums = with_wide_tile<E, kPlain>(state->sums, tile, zmax);
    } else {
        lli_softmax_add_tile(&state->sums, (int32_t)k, s, u);
    }
}

/* ---- The gradient ------------------------------------------------------------------------------- */

template <typename E, bool kPlain, ce_way kWay>
static __device__ inline void scatter_step(const lli_cuda_ce *args, const ce_grad_row *row, const uint4 *step,
                                           int64_t c0, char *to_row) {
    enum { kCount = piece_of<E>::kCount, kCols = step_of<E>::kCols };
    const int32_t dtype = args->grad.dtype;
    const int64_t to_bytes = dtype == LL_DTYPE_F32 ? 4 : 2;
    const float *class_weight = args->row.call.class_weight;
    const lli_cuda_transform *transform = &args->row.transform;
    const int32_t lane = lane_of();
    if (c0 + kCols <= args->v) {
#pragma unroll 4
        for (int p = 0; p < kPieces; p++) {
            const int64_t c = c0 + (p * 32 + lane) * kCount;
            ce_dz_piece<E, kPlain, kWay>(transform, row, step[p * 32 + lane],
                                         class_weight ? class_weight + c : NULL, c, dtype,
                                         to_row + c * to_bytes);
        }
        return;
    }
    const E *elements = (const E *)step;
#pragma unroll 1
    for (int at = lane; at < kCols && c0 + at < args->v; at += 32) {
        ce_dz_column<E, kPlain, kWay>(transform, row, element_at(elements, args->logits.dtype, at),
                                      class_weight, c0 + at, dtype, to_row);
    }
}

template <typename E, bool kPlain>
static __device__ inline void scatter(const lli_cuda_ce *args, const ce_grad_row *row, const uint4 *step,
                                      int64_t c0, char *to_row) {
    const ce_grad_row local = *row; /* in registers: hence not for the wide, who call */
    switch (row->way) {
    case CE_DEAD:
        scatter_step<E, kPlain, CE_DEAD>(args, row, step, c0, to_row);
        break;
    case CE_SHORT:
        scatter_step<E, kPlain, CE_SHORT>(args, &local, step, c0, to_row);
        break;
    case CE_PLAIN:
        scatter_step<E, kPlain, CE_PLAIN>(args, &local, step, c0, to_row);
        break;
    case CE_GAMMA:
        scatter_step<E, kPlain, CE_GAMMA>(args, &local, step, c0, to_row);
        break;
    case CE_WIDE:
        scatter_step<E, kPlain, CE_WIDE>(args, row, step, c0, to_row);
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

/* The block's next row from i on that is not ignored; gradients of those that are become 0. */
static __device__ int64_t row_from(const lli_cuda_ce *args, int64_t i, const warp_steps *steps) {
    for (; i < args->row.n_rows && target_of(&args->row.targets, i) == kIgnored; i += gridDim.x) {
        if (args->grad.data) clear_row(args, i, 0, steps);
    }
    return i;
}

template <typename E, bool kEntropy, bool kPlain>
static __device__ inline void tile_warp(const lli_cuda_ce *args, int32_t warps, warp_steps *steps,
                                        row_state *state) {
    enum { kCols = step_of<E>::kCols };
    const int32_t slots = steps->slots, count = steps->count, threads = 32 * (warps + 1);
    const bool grad = args->grad.data != NULL;
    int64_t i = row_from(args, blockIdx.x, steps);
    for (int32_t k = 0; k < slots; k++) {
        if (i < args->row.n_rows) load_step<E>(args, steps, i, k, slot_of(steps, k));
        ptx_cp_async_commit_group();
    }
    while (i < args->row.n_rows) {
        const int64_t y = target_of(&args->row.targets, i);
        int64_t next = i + gridDim.x;
        tile_record mine = {.max = -INFINITY, .tile = -1};
        lli_softmax_clear(&mine.sums);
        if (!grad) next = row_from(args, next, steps);
#pragma unroll 1
        for (int32_t k = 0; k < count; k++) {
            const int32_t slot = slot_of(steps, k);
            const int64_t c0 = (int64_t)(steps->first + k * steps->stride) * kCols;
            await_step(slots);
            gather_step<E, kEntropy, kPlain>(args, steps->memory + slot * kStepPieces, c0, y, &mine);
            __syncwarp(); /* read by every lane before it is loaded again */
            if (k + slots < count) {
                load_step<E>(args, steps, i, k + slots, slot);
            } else if (!grad && next < args->row.n_rows) {
                load_step<E>(args, steps, next, k + slots - count, slot);
            }
            ptx_cp_async_commit_group();
        }
        sum_lanes_row(&mine.sums, kEntropy);
        if (args->want_argmax) max_lanes(&mine.max, &mine.tile);
        if (lane_of() == 0) state->records[steps->first] = mine;
        __syncwarp(); /* the record is written */
        ptx_barrier_arrive(kRecords, threads);
        if (grad) next = row_from(args, next, steps);
        ptx_barrier_sync(kCoefficients, threads);
        if (grad) {
            char *to_row = grad_row_at(args, i);
#pragma unroll 1
            for (int32_t k = count - 1; k >= 0; k--) {
                const int32_t slot = slot_of(steps, k);
                const int64_t c0 = (int64_t)(steps->first + k * steps->stride) * kCols;
                await_step(slots);
                scatter<E, kPlain>(args, &state->grad, steps->memory + slot * kStepPieces, c0, to_row);
                __syncwarp(); /* read by every lane before it is loaded again */
                if (k >= slots) {
                    load_step<E>(args, steps, i, k - slots, slot);
                } else if (next < args->row.n_rows) {
                    load_step<E>(args, steps, next, slots - 1 - k, slot);
                }
                ptx_cp_async_commit_group();
            }
            clear_row(args, i, args->v, steps);
            steps->mirrored ^= 1;
        } else {
            steps->turn = (steps->turn + count) % slots;
        }
        i = next;
    }
}

/* ---- The kernel --------------------------------------------------------------------------------- */

template <typename E, bool kEntropy, bool kPlain>
static __global__ void __launch_bounds__(32 * (kMostTileWarps + 3), 1)
    rows(const __grid_constant__ lli_cuda_ce args, const __grid_constant__ lli_cuda_ce_shape shape) {
    extern __shared__ __align__(128) uint4 memory[];
    __shared__ row_state state;
    const int32_t warp = threadIdx.x / 32;
    if (warp == shape.warps) {
        finish_warp<E, kEntropy>(&args, shape.warps, &state);
        return;
    }
    const int32_t all = (int32_t)((args.v * (int64_t)sizeof(E) + kStepBytes - 1) / kStepBytes);
    warp_steps steps = {.first = warp, .stride = shape.warps};
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
    return (size_t)shape->warps * (size_t)shape->slots * kStepBytes;
}

extern "C" int lli_cuda_ce_rows_launch(const lli_cuda_ce *args, const lli_cuda_ce_shape *shape,
                                       cudaStream_t stream) {
    const lli_cuda_finish *row = &args->row;
    const int64_t blocks = row->n_rows < shape->blocks ? row->n_rows : shape->blocks;
    return launch(kernel_for(args->logits.dtype, row->want_entropy, is_plain(row)), dim3((unsigned)blocks),
                  dim3((unsigned)(32 * (shape->warps + 1))), shared_bytes(shape), stream, *args, *shape);
}

/* What decides a shape. */
typedef struct ce_chip {
    int multiprocessors, l2_bytes, shared_bytes, reserved_bytes, most_bytes;
} ce_chip;

static int read_chip(ce_chip *chip) {
    int device = 0, status = (int)cudaGetDevice(&device);
    const struct {
        int *to;
        cudaDeviceAttr from;
    } attributes[] = {{&chip->multiprocessors, cudaDevAttrMultiProcessorCount},
                      {&chip->l2_bytes, cudaDevAttrL2CacheSize},
                      {&chip->shared_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor},
                      {&chip->reserved_bytes, cudaDevAttrReservedSharedMemoryPerBlock},
                      {&chip->most_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin}};
    for (int a = 0; a < 5 && !status; a++) {
        status = (int)cudaDeviceGetAttribute(attributes[a].to, attributes[a].from, device);
    }
    return status;
}

static inline int64_t least_of(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* With `each` blocks a multiprocessor: as many tile warps as a row keeps equally busy, as many slots as fit.
 */
static lli_cuda_ce_shape shape_of(const ce_chip *chip, int64_t steps, int32_t each) {
    const int64_t own = (int64_t)sizeof(row_state) + 128;
    const int64_t share = chip->shared_bytes / each - chip->reserved_bytes - own;
    const int64_t fit = least_of(share, chip->most_bytes - own) / kStepBytes; /* slots of the block */
    const int64_t most = least_of(fit, kMostTileWarps / each);
    const int64_t rounds = blocks_for(steps, most > 0 ? most : 1), warps = blocks_for(steps, rounds);
    const int64_t slots = least_of(least_of(fit / warps, rounds), kMostSlots);
    return {.warps = (int32_t)warps, .slots = (int32_t)slots};
}

/* Two blocks of 12 tile warps share a multiprocessor: 72 registers a thread, hence the bound above.
 *
 * The most blocks a multiprocessor whose rows the L2 cache holds as far as shared memory does not; two where
 * it cannot, because one alone waits for its finish warp. */
extern "C" int lli_cuda_ce_rows_open(int32_t dtype, int64_t v, lli_cuda_ce_shape *shape) {
    enum { kMostEach = 12, kMostWarps = 27 }; /* of a multiprocessor: the most that gained */
    const int64_t row_bytes = v * (dtype == LL_DTYPE_F32 ? 4 : 2), steps = blocks_for(row_bytes, kStepBytes);
    ce_chip chip;
    int status = read_chip(&chip);
    if (status) return status;
    for (int32_t each = kMostEach; each > 0; each--) {
        *shape = shape_of(&chip, steps, each);
        const int64_t kept = (int64_t)shared_bytes(shape);
        const int64_t in_l2 = kept < row_bytes ? (row_bytes - kept) * each * chip.multiprocessors : 0;
        const bool small = each <= 2 || in_l2 <= chip.l2_bytes / 10 * 9;
        if (small && shape->slots > 0 && each * (shape->warps + 1) <= kMostWarps) break;
    }
    for (int variant = 0; variant < 4 && !status; variant++) {
        rows_kernel *kernel = kernel_for(dtype, variant & 1, variant & 2);
        cudaFuncAttributes attributes;
        int blocks = 0;
        status = (int)cudaFuncGetAttributes(&attributes, kernel);
        if (status) return status;
        const int dynamic = chip.most_bytes - (int)attributes.sharedSizeBytes;
        status = (int)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic);
        if (!status) {
            status = (int)cudaOccupancyMaxActiveBlocksPerMultiprocessor(
                &blocks, kernel, 32 * (shape->warps + 1), shared_bytes(shape));
        }
        blocks *= chip.multiprocessors;
        if (variant == 0 || blocks < shape->blocks) shape->blocks = blocks;
    }
    return status;
}
