/* Gradients of logits on Hopper: x w^T and, from the accumulators, dz in bf16; no logit leaves the registers.
 *
 *   loads, products    sm90_product.cuh: two blocks a cluster, tiles of 128 x 192, two warpgroups in turn
 *   dz                 dz.cuh, a row after the other, one warpgroup's behind the other's products
 *
 * Of a tile a lane has two neighbouring columns of each 8, in four rows; it writes them as 4 bytes, a quad 16
 * bytes in a row. The target's element, and zeros beyond the last column, are written by the lane that wrote
 * the pair before, so they come after it. Rows beyond the float formula are computed from a copy of the row
 * in shared memory.
 *
 * Shared memory, 227,408 bytes: the ring of 5 stages of 40 KiB and its barriers; for each warp the
 * coefficients of its 32 rows and a row of 192 logits. Registers: 24 for the loading warpgroup, 240 for the
 * others. Variants: with the entropy's gradient; without it, at two paces. Needs sm_90a. */
#include "cuda/dz.cuh"
#include "cuda/sm90_tiles.cuh"

#include <cuda_bf16.h>

enum { kReadingWarps = 8, kHalfSums = kFusedCols / 2, kGroups = kFusedCols / 8, kGroupsOf64 = 8 };

typedef struct dz_warp {
    dz_row rows[32]; /* by lane: row 64 (lane / 2 % 2) + 16 warp + 8 (lane % 2) + lane / 4 of the tile */
    float wide[kFusedCols];
} dz_warp;

typedef struct dz_shared {
    product_shared<fused_tile> product;
    dz_warp warps[kReadingWarps];
} dz_shared;

static_assert(sizeof(dz_shared) <= 232448, "a block has 227 KiB of shared memory");

static __device__ inline uint32_t bf16_pair(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *(const uint32_t *)&pair;
}

/* A row from its copy in shared memory, all lanes together. */
static __device__ inline void wide_row(const lli_cuda_dz *args, const float *z, const dz_row *row,
                                       uint16_t *out, int32_t limit, int lane) {
    for (int32_t c = lane; c < kFusedCols && c < limit; c += 32) {
        const __nv_bfloat16 dz = __float2bfloat16_rn(wide_dz_of(&args->transform, row, z[c], 1.0f));
        out[c] = *(const uint16_t *)&dz;
    }
}

/* One of the lane's four rows: r = 2 half + h. `limit`: columns of the tile that are written, a multiple of
 * 64; `left`: those that are real. kSlow: each logit waits for the one before, through `zero`
 * (sm90_statistics.cuh says why). */
template <bool kGamma, bool kSlow>
static __device__ inline void dz_of_row(const lli_cuda_fused_dz *args, const float (&z)[kHalfSums], int h,
                                        const dz_row *coefficients, uint16_t *out, int32_t limit,
                                        int32_t left, int lane) {
    dz_row row = *coefficients;
    const int pair = 2 * (lane % 4);
    uint32_t *to = (uint32_t *)(out + pair);
#pragma unroll
    for (int j = 0; j < kGroups; j++) {
        float dz[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float raw = z[4 * j + 2 * h + e];
            dz[e] = dz_of<false, true>(&args->dz.transform, &row, raw, 1.0f);
            if (kGamma) {
                const float with = dz_of<true, true>(&args->dz.transform, &row, raw, 1.0f);
                dz[e] = row.gamma != 0.0f ? with : dz[e];
            }
            if (kSlow)
                row.k = __uint_as_float(__float_as_uint(row.k) | (__float_as_uint(dz[e]) & args->zero));
        }
        if (8 * (j / kGroupsOf64 * kGroupsOf64) < limit) to[4 * j] = row.dead ? 0u : bf16_pair(dz[0], dz[1]);
    }
    if (left < limit) {
        for (int32_t c = pair; c < limit && c < kFusedCols; c += 8) {
            if (c >= left) out[c] = 0;
            if (c + 1 >= left) out[c + 1] = 0;
        }
    }
    if (row.target >= 0 && row.target % 8 / 2 == lane % 4) {
        const __nv_bfloat16 dz = __float2bfloat16_rn(row.target_dz);
        out[row.target] = *(const uint16_t *)&dz;
    }
}

template <bool kGamma, bool kSlow>
static __device__ inline void write_tile(const lli_cuda_fused_dz *args, float (&z)[2][kHalfSums],
                                         int32_t first_row, int32_t column, dz_warp *memory) {
    const int lane = (int)(ptx_tid_x() % 32), warp = (int)(ptx_tid_x() % 128 / 32);
    const int32_t left = (int32_t)(args->dz.n_cols - column),
                  limit = (int32_t)(args->dz.padded_cols - column);
    if (first_row + 16 * warp >= args->dz.padded_rows) return; /* a whole warp beyond the chunk */
    const int32_t mine = first_row + 64 * (lane / 2 % 2) + 16 * warp + 8 * (lane % 2) + lane / 4;
    dz_row loaded;
    load_row(&args->dz, mine, &loaded);
    loaded.target =
        loaded.target >= column && loaded.target < column + kFusedCols ? loaded.target - column : -1;
    memory->rows[lane] = loaded;
    __syncwarp(); /* every lane reads the four rows of its quad; those of the tile before it has read before
                     its products */
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const int32_t row = first_row + 64 * (r / 2) + 16 * warp + 8 * (r % 2) + lane / 4;
        const dz_row *coefficients = &memory->rows[lane / 4 * 4 + r];
        uint16_t *out = (uint16_t *)args->dz.dz + row * args->dz.dz_ld + column;
        const bool wide = coefficients->wide && !coefficients->dead;
        if (row < args->dz.padded_rows && !wide) {
            dz_of_row<kGamma, kSlow>(args, z[r / 2], r % 2, coefficients, out, limit, left, lane);
        }
        for (uint32_t waiting = __ballot_sync(0xffffffffu, wide && row < args->dz.padded_rows); waiting;) {
            const int quad = (__ffs((int)waiting) - 1) / 4;
            waiting &= ~(15u << 4 * quad);
            if (lane / 4 == quad) {
#pragma unroll
                for (int i = 0; i < kGroups; i++) {
                    memory->wide[8 * i + 2 * (lane % 4)] = z[r / 2][4 * i + 2 * (r % 2)];
                    memory->wide[8 * i + 2 * (lane % 4) + 1] = z[r / 2][4 * i + 2 * (r % 2) + 1];
                }
            }
            __syncwarp(); /* the row's copy is complete */
            const dz_row *of_wide = &memory->rows[4 * quad + r];
            uint16_t *to = (uint16_t *)__shfl_sync(0xffffffffu, (unsigned long long)out, 4 * quad);
            wide_row(&args->dz, memory->wide, of_wide, to, left < limit ? left : limit, lane);
            __syncwarp(); /* and written before its target's element is, and before another copy */
            if (lane == 0) {
                for (int32_t c = left; c < limit && c < kFusedCols; c++) to[c] = 0;
                const __nv_bfloat16 dz = __float2bfloat16_rn(of_wide->target_dz);
                if (of_wide->target >= 0) to[of_wide->target] = *(const uint16_t *)&dz;
            }
        }
    }
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
template <bool kGamma, bool kSlow>
static __device__ inline void work(const lli_cuda_fused_dz *args, dz_shared *shared) {
    const uint32_t second = threadIdx.x / 128 - 1;
    float z[2][kHalfSums];
    product_take_turns<fused_tile>(second);
    for (uint32_t tile = second;
         tile_of(&args->tiles, tile) < args->tiles.row_blocks * args->tiles.col_blocks; tile += 2) {
        product_multiply<fused_tile>(&shared->product, tile, args->tiles.depth_blocks, 0, z);
        const product_grid grid = grid_of(&args->tiles);
        const product_place place = product_place_of(&grid, tile_of(&args->tiles, tile));
        const uint32_t block = place.row_block * kProductCluster + ptx_cluster_ctarank();
        write_tile<kGamma, kSlow>(args, z, (int32_t)(block * kProductRows),
                                  (int32_t)(place.col_block * kFusedCols),
                                  &shared->warps[ptx_tid_x() / 32 - 4]);
    }
}
#endif

template <bool kGamma, bool kSlow>
static __global__ void __cluster_dims__(kProductCluster, 1, 1) __launch_bounds__(kProductThreads, 1)
    fused_dz(const __grid_constant__ lli_cuda_fused_dz args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t memory[];
    dz_shared *shared = (dz_shared *)memory;
    product_open(&shared->product);
    if (threadIdx.x < 128) {
        ptx_setmaxnreg_dec<kProducerRegisters>();
        const product_grid grid = grid_of(&args.tiles);
        if (threadIdx.x == 0) {
            product_load(&shared->product, &args.tiles.x, &args.tiles.w, &grid);
        }
    } else {
        ptx_setmaxnreg_inc<kConsumerRegisters>();
        work<kGamma, kSlow>(&args, shared);
    }
    product_close();
#endif
}

typedef void dz_kernel(const lli_cuda_fused_dz);

enum { kPlain, kPlainSlow, kWithGamma, kSlowDepth = 64 /* as in fused_sm90.cu */ };
static dz_kernel *const kernels[] = {fused_dz<false, false>, fused_dz<false, true>, fused_dz<true, false>};

extern "C" int lli_cuda_fused_dz_launch(const lli_cuda_fused_dz *args, cudaStream_t stream) {
    const int plain = args->tiles.depth_blocks >= kSlowDepth ? kPlainSlow : kPlain;
    return launch(kernels[args->want_gamma ? kWithGamma : plain],
                  dim3(kProductCluster * args->tiles.clusters), dim3(kProductThreads), sizeof(dz_shared),
                  stream, *args);
}

extern "C" int lli_cuda_load_fused_dz(void) {
    cudaFuncAttributes a;
    int status = 0;
    for (dz_kernel *kernel : kernels) {
        if (!status) {
            status = (int)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               (int)sizeof(dz_shared));
        }
        if (!status) status = (int)cudaFuncGetAttributes(&a, kernel);
    }
    return status;
}
