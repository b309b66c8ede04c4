/* Gradients of logits on Hopper: x w^T and, from the accumulators, dz in bf16; no logit leaves the registers.
 *
 *   loads, products    sm90_product.cuh: two blocks a cluster, tiles of 128 x 192, two warpgroups in turn
 *   dz                 dz.cuh, from rounded exponentials, a row after the other, one warpgroup's behind the
 *                      other's products
 *
 * Of a tile a lane has two neighbouring columns of each 8, in four rows; it writes them as 4 bytes, a quad 16
 * bytes in a row. The target's element is written by the lane that wrote the pair before, so it comes after
 * it. Rows beyond the float formula are computed from a copy of the row in shared memory.
 *
 * Shared memory, 227,408 bytes: the ring of 5 stages of 40 KiB and its barriers; for each warp the
 * coefficients of its 32 rows and a row of 192 logits. Registers: 24 for the loading warpgroup, 240 for the
 * others. Variants: with the entropy's gradient; without it, at two paces. Needs sm_90a. */
#include "cuda/dz.cuh"
#include "cuda/sm90_tiles.cuh"

#include <cuda_bf16.h>

enum { kPairs = (int)kTileCols / 8 }; /* of a lane in a row and canonical tile */

typedef struct dz_warp {
    dz_row rows[32]; /* by lane: row 64 (lane / 2 % 2) + 16 warp + 8 (lane % 2) + lane / 4 of the tile */
    float wide[kFusedCols];
} dz_warp;

typedef struct dz_shared {
    product_shared<fused_tile> product;
    dz_warp warps[kReadingWarps];
} dz_shared;

static_assert(sizeof(dz_shared) <= 232448, "a block has 227 KiB of shared memory");

/* A row from its copy in shared memory, all lanes together. */
static __device__ inline void wide_row(const float *z, const dz_row *row, uint16_t *out, int32_t limit,
                                       int lane) {
#pragma unroll 1
    for (int32_t c = 0; c < kFusedCols && c < limit; c += kTileCols) {
        float max = ptx_max_nan_f32(z[c + lane], z[c + lane + 32]);
        for (int mask = 16; mask > 0; mask /= 2) {
            max = ptx_max_nan_f32(max, __shfl_xor_sync(0xffffffffu, max, mask));
        }
#pragma unroll 1
        for (int i = lane; i < kTileCols; i += 32) {
            const __nv_bfloat16 dz = __float2bfloat16_rn(apart_dz(row, z[c + i], max));
            out[c + i] = *(const uint16_t *)&dz;
        }
    }
}

/* A canonical tile of one of the lane's four rows: r = 2 half + h. kSlow: each logit waits for the one
 * before, through `zero` (sm90_statistics.cuh says why). */
template <bool kGamma, bool kSlow>
static __device__ inline void dz_of_tile(const lli_cuda_fused_dz *args, const tile_logits z, int tile,
                                         int half, int h, float max, const dz_row *row, uint32_t *to) {
    const dz_factor factor = factor_of(row, kept_anchor(max));
    float minus_k = -bounded_anchor(max);
#pragma unroll
    for (int j = 0; j < kPairs; j++) {
        float dz[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float d;
            const float p = exp16_value(exp16_of(grid_power(z[half][logit_at(tile, j, h, e)], minus_k, &d)));
            dz[e] = dz_from<false>(&factor, row, p);
            if (kGamma) {
                const float with = dz_from<true>(&factor, row, p);
                dz[e] = row->gamma != 0.0f ? with : dz[e];
            }
            if (kSlow) {
                minus_k = __uint_as_float(__float_as_uint(minus_k) | (__float_as_uint(p) & args->zero));
            }
        }
        to[4 * j] = row->dead ? 0u : bf16_pair(dz[0], dz[1]);
    }
}

template <bool kGamma, bool kSlow>
static __device__ inline void write_tile(const lli_cuda_fused_dz *args, tile_logits z, int32_t first_row,
                                         int32_t column, dz_warp *memory) {
    int lane = this_lane();
    const int warp = (int)(ptx_tid_x() % 128 / 32);
    const int32_t left = (int32_t)(args->dz.n_cols - column),
                  limit = (int32_t)(args->dz.padded_cols - column);
    if (first_row + 16 * warp >= args->dz.padded_rows) return; /* a whole warp beyond the chunk */
    const int32_t mine = first_row + 64 * (lane / 2 % 2) + 16 * warp + 8 * (lane % 2) + lane / 4;
    dz_row loaded;
    load_row(&args->dz, mine, &loaded);
    loaded.target =
        loaded.target >= column && loaded.target < column + kFusedCols ? loaded.target - column : -1;
    memory->rows[lane] = loaded;
    if (left < kFusedCols) mask_columns(z, left, lane);
    __syncwarp(); /* every lane reads the four rows of its quad; those of the tile before it has read before
                     its products */
#pragma unroll
    for (int r = 0; r < 4; r++) {
        lane = this_lane();
        const int32_t row =
            first_row + 64 * (r / 2) + 16 * (int)(ptx_tid_x() % 128 / 32) + 8 * (r % 2) + lane / 4;
        const dz_row *coefficients = &memory->rows[lane / 4 * 4 + r];
        uint16_t *out = (uint16_t *)args->dz.dz + row * args->dz.dz_ld + column;
        const bool here = row < args->dz.padded_rows, wide = coefficients->apart && !coefficients->dead;
#pragma unroll
        for (int tile = 0; tile < kTilesOfWorker; tile++) {
            if (kTileCols * tile >= limit) break; /* the whole warp */
            const float max = quad_max(lane_max(z, tile, r / 2, r % 2));
            if (here && !wide) {
                dz_of_tile<kGamma, kSlow>(args, z, tile, r / 2, r % 2, max, coefficients,
                                          (uint32_t *)(out + kTileCols * tile + 2 * (lane % 4)));
            }
        }
        if (here && !wide && coefficients->target >= 0 && coefficients->target % 8 / 2 == lane % 4) {
            const __nv_bfloat16 dz = __float2bfloat16_rn(coefficients->target_dz);
            out[coefficients->target] = *(const uint16_t *)&dz;
        }
        for (uint32_t waiting = __ballot_sync(0xffffffffu, wide && here); waiting;) {
            const int quad = (__ffs((int)waiting) - 1) / 4;
            waiting &= ~(15u << 4 * quad);
            if (lane / 4 == quad) {
#pragma unroll
                for (int i = 0; i < kFusedCols / 8; i++) {
                    memory->wide[8 * i + 2 * (lane % 4)] = z[r / 2][4 * i + 2 * (r % 2)];
                    memory->wide[8 * i + 2 * (lane % 4) + 1] = z[r / 2][4 * i + 2 * (r % 2) + 1];
                }
            }
            __syncwarp(); /* the row's copy is complete */
            const dz_row *of_wide = &memory->rows[4 * quad + r];
            uint16_t *to = (uint16_t *)__shfl_sync(0xffffffffu, (unsigned long long)out, 4 * quad);
            wide_row(memory->wide, of_wide, to, limit, lane);
            __syncwarp(); /* and written before its target's element is, and before another copy */
            if (lane == 0 && of_wide->target >= 0) {
                const __nv_bfloat16 dz = __float2bfloat16_rn(of_wide->target_dz);
                to[of_wide->target] = *(const uint16_t *)&dz;
            }
        }
    }
}

template <bool kGamma, bool kSlow>
static __global__ void __cluster_dims__(kProductCluster, 1, 1) __launch_bounds__(kProductThreads, 1)
    fused_dz(const __grid_constant__ lli_cuda_fused_dz args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t memory[];
    for_tiles(&args.tiles, (dz_shared *)memory,
              [&args](tile_logits z, int32_t row, int32_t column, dz_warp *warp) {
                  write_tile<kGamma, kSlow>(&args, z, row, column, warp);
              });
#endif
}

typedef void dz_kernel(const lli_cuda_fused_dz);

enum { kPlain, kPlainSlow, kWithGamma };
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
