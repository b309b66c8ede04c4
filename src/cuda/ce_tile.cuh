/* Arithmetic of ce over given logits: one canonical tile into integers, one logit into its gradient.
 *
 *   d = (z - anchor) log2 e as in core/softmax.h        p = ex2.approx(d)
 *   S = sum of rint(2^30 p)    U = sum of rint(2^30 p (-d)), d no lower than -64
 *
 * The polynomial of core/softmax.c costs 11 instructions and is what the row kernels would wait for; the
 * special function unit costs one and errs by 2^-22 of p. The rounding to the grid is exact all the same, by
 * additions alone, which leave the unit's slot to ex2:
 *
 *   t = p + 1           bits(t) - bits(1) = h, p to the grid 2^-23; p <= 1, so t stays below 2^1
 *   r = p - (t - 1)     exact, |r| <= 2^-24
 *   w = r + 1.5 2^-7    bits(w) - bits(1.5 2^-7) = l, r to the grid 2^-30
 *   rint(2^30 p) = 2^7 h + l
 *
 * Sums of bits over 64 columns wrap around in 32 bits, and so do the 64 constants that are taken off.
 *
 * A tile is read in groups of kGroup columns by whoever calls: `load(q, z)` gives group q, transformed. */
#ifndef LLI_CUDA_CE_TILE_CUH
#define LLI_CUDA_CE_TILE_CUH

#include "cuda/device.cuh"
#include "cuda/ptx/ex2_approx.cuh"
#include "cuda/ptx/max_nan.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

/* ---- Elements ----------------------------------------------------------------------------------- */

/* 16 bytes of a row: kCount columns, and the largest of two such pieces element by element (NaN wins). */
template <typename E> struct piece_of;

template <> struct piece_of<float> {
    enum { kCount = 4 };
    static __device__ inline void widen(uint4 x, float *z) {
        z[0] = __uint_as_float(x.x);
        z[1] = __uint_as_float(x.y);
        z[2] = __uint_as_float(x.z);
        z[3] = __uint_as_float(x.w);
    }
    static __device__ inline uint32_t max2(uint32_t a, uint32_t b) {
        return __float_as_uint(ptx_max_nan_f32(__uint_as_float(a), __uint_as_float(b)));
    }
    static __device__ inline float max_of(uint32_t a) { return __uint_as_float(a); }
    static __device__ inline uint4 narrow(const float *z) {
        return make_uint4(__float_as_uint(z[0]), __float_as_uint(z[1]), __float_as_uint(z[2]),
                          __float_as_uint(z[3]));
    }
};

template <> struct piece_of<__nv_bfloat16> {
    enum { kCount = 8 };
    static __device__ inline void widen2(uint32_t x, float *z) {
        z[0] = __uint_as_float(x << 16);
        z[1] = __uint_as_float(x & 0xffff0000u);
    }
    static __device__ inline void widen(uint4 x, float *z) {
        widen2(x.x, z);
        widen2(x.y, z + 2);
        widen2(x.z, z + 4);
        widen2(x.w, z + 6);
    }
    static __device__ inline uint32_t max2(uint32_t a, uint32_t b) {
        const __nv_bfloat162 m = __hmax2_nan(*(__nv_bfloat162 *)&a, *(__nv_bfloat162 *)&b);
        return *(const uint32_t *)&m;
    }
    static __device__ inline float max_of(uint32_t a) {
        float z[2];
        widen2(a, z);
        return ptx_max_nan_f32(z[0], z[1]);
    }
    static __device__ inline uint32_t narrow2(float a, float b) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
        return *(const uint32_t *)&pair;
    }
    static __device__ inline uint4 narrow(const float *z) {
        return make_uint4(narrow2(z[0], z[1]), narrow2(z[2], z[3]), narrow2(z[4], z[5]), narrow2(z[6], z[7]));
    }
};

template <> struct piece_of<__half> {
    enum { kCount = 8 };
    static __device__ inline void widen2(uint32_t x, float *z) {
        const float2 pair = __half22float2(*(__half2 *)&x);
        z[0] = pair.x;
        z[1] = pair.y;
    }
    static __device__ inline void widen(uint4 x, float *z) {
        widen2(x.x, z);
        widen2(x.y, z + 2);
        widen2(x.z, z + 4);
        widen2(x.w, z + 6);
    }
    static __device__ inline uint32_t max2(uint32_t a, uint32_t b) {
        const __half2 m = __hmax2_nan(*(__half2 *)&a, *(__half2 *)&b);
        return *(const uint32_t *)&m;
    }
    static __device__ inline float max_of(uint32_t a) {
        float z[2];
        widen2(a, z);
        return ptx_max_nan_f32(z[0], z[1]);
    }
    static __device__ inline uint32_t narrow2(float a, float b) {
        const __half2 pair = __floats2half2_rn(a, b);
        return *(const uint32_t *)&pair;
    }
    static __device__ inline uint4 narrow(const float *z) {
        return make_uint4(narrow2(z[0], z[1]), narrow2(z[2], z[3]), narrow2(z[4], z[5]), narrow2(z[6], z[7]));
    }
};

static __device__ inline float element_at(const void *row, int32_t dtype, int64_t c) {
    if (dtype == LL_DTYPE_F32) return ((const float *)row)[c];
    if (dtype == LL_DTYPE_BF16) return __bfloat162float(((const __nv_bfloat16 *)row)[c]);
    return __half2float(((const __half *)row)[c]);
}

static __device__ inline void put_element(void *row, int32_t dtype, int64_t c, float value) {
    if (dtype == LL_DTYPE_F32) {
        ((float *)row)[c] = value;
    } else if (dtype == LL_DTYPE_BF16) {
        ((__nv_bfloat16 *)row)[c] = __float2bfloat16_rn(value);
    } else {
        ((__half *)row)[c] = __float2half_rn(value);
    }
}

/* ---- A tile ------------------------------------------------------------------------------------- */

/* Sums of bits; see the top. */
typedef struct tile_bits {
    uint32_t s_high, s_low, u_high, u_low;
} tile_bits;

static __device__ inline void to_grid(float p, uint32_t *high, uint32_t *low) {
    const float t = p + 1.0f;
    const float r = p - (t - 1.0f);
    *high += __float_as_uint(t);
    *low += __float_as_uint(r + 0x1.8p-7f);
}

template <bool kEntropy> static __device__ inline void add_column(float z, float minus_k, tile_bits *bits) {
    float d = fmaf(z, LLI_LOG2E_LO, fmaf(z, LLI_LOG2E_HI, minus_k));
    if (kEntropy) d = fmaxf(d, -64.0f); /* p of -inf is 0, and 0 times infinity no entropy */
    const float p = ptx_ex2_approx_ftz_f32(d);
    to_grid(p, &bits->s_high, &bits->s_low);
    if (kEntropy) to_grid(p * -d, &bits->u_high, &bits->u_low);
}

/* From the sums over a whole tile of 64 columns. */
static __device__ inline int64_t grid_sum(uint32_t high, uint32_t low) {
    const uint32_t one = 0x3f800000u, shift = 0x3c400000u; /* bits of 1 and of 1.5 2^-7 */
    return (int64_t)(high - kTileCols * one) * 128 + (int32_t)(low - kTileCols * shift);
}

/* Is the tile one of the float formula? Others: nothing to add (-inf), NaN or +inf, or beyond it. */
static __device__ inline bool is_plain_max(float zmax) {
    return fabsf(zmax) < LLI_Z_FLOAT;
}

/* S and U of a tile with a plain maximum. */
template <bool kEntropy, int kGroup, typename Load>
static __device__ inline void plain_tile(Load load, float zmax, int32_t *anchor, int64_t *s, int64_t *u) {
    const float k = lli_softmax_anchor(zmax);
    tile_bits bits = {0, 0, 0, 0};
#pragma unroll 2 /* short loops: see core/shared.h */
    for (int q = 0; q < kTileCols / kGroup; q++) {
        float z[kGroup];
        load(q, z);
#pragma unroll
        for (int i = 0; i < kGroup; i++) add_column<kEntropy>(z[i], -k, &bits);
    }
    *anchor = (int32_t)k;
    *s = grid_sum(bits.s_high, bits.s_low);
    *u = kEntropy ? grid_sum(bits.u_high, bits.u_low) : 0;
}

/* Any tile into a row's state, by one thread. The wide ones go the way of core/softmax.c. */
template <bool kEntropy, int kGroup, typename Load>
static __device__ void any_tile(Load load, float zmax, lli_softmax *row) {
    if (zmax == -INFINITY) return;
    if (is_plain_max(zmax)) {
        int32_t anchor;
        int64_t s, u;
        plain_tile<kEntropy, kGroup>(load, zmax, &anchor, &s, &u);
        lli_softmax_add(row, anchor, s, u);
        return;
    }
    float z[kTileCols];
    for (int q = 0; q < kTileCols / kGroup; q++) load(q, z + q * kGroup);
    lli_softmax_tile(row, z, kTileCols, zmax);
}

template <int kGroup, typename Load> static __device__ inline float tile_max(Load load) {
    float m = -INFINITY;
#pragma unroll 4
    for (int q = 0; q < kTileCols / kGroup; q++) {
        float z[kGroup];
        load(q, z);
#pragma unroll
        for (int i = 0; i < kGroup; i++) m = ptx_max_nan_f32(m, z[i]);
    }
    return m;
}

/* The target's tile with and without the target (position `at`), two columns a lane of one warp; z: the
 * lane's columns 2 lane and 2 lane + 1. Every lane gets the results. */
template <bool kEntropy>
static __device__ inline void warp_tile(const float *z, int at, int lane, lli_softmax *row) {
    lli_softmax_clear(row);
    float two[2] = {2 * lane == at ? -INFINITY : z[0], 2 * lane + 1 == at ? -INFINITY : z[1]};
    const bool any_nan = __any_sync(0xffffffffu, two[0] != two[0] || two[1] != two[1]);
    const int32_t key = __reduce_max_sync(0xffffffffu, lli_softmax_key(fmaxf(two[0], two[1])));
    const float zmax = any_nan ? NAN : lli_softmax_key_value(key);
    if (zmax == -INFINITY) return;
    if (!is_plain_max(zmax)) {
        float all[kTileCols];
        for (int l = 0; l < 32; l++) {
            all[2 * l] = __shfl_sync(0xffffffffu, two[0], l);
            all[2 * l + 1] = __shfl_sync(0xffffffffu, two[1], l);
        }
        lli_softmax_tile(row, all, kTileCols, zmax);
        return;
    }
    const float k = lli_softmax_anchor(zmax);
    tile_bits bits = {0, 0, 0, 0};
    add_column<kEntropy>(two[0], -k, &bits);
    add_column<kEntropy>(two[1], -k, &bits);
    const int64_t s =
        grid_sum(__reduce_add_sync(0xffffffffu, bits.s_high), __reduce_add_sync(0xffffffffu, bits.s_low));
    const int64_t u = kEntropy ? grid_sum(__reduce_add_sync(0xffffffffu, bits.u_high),
                                          __reduce_add_sync(0xffffffffu, bits.u_low))
                               : 0;
    lli_softmax_add(row, (int32_t)k, s, u);
}

/* sum += sum_v cw[v] z_v on a grid of 2^-30 of the tile's largest magnitude, columns from n on left out; cw =
 * 0 takes a column out. class_weight: of the tile's columns, or NULL. `load` gives groups in ascending order.
 */
template <int kGroup, typename Load>
static __device__ void tile_soft_sum(Load load, const float *class_weight, int n, lli_exact *sum) {
    float largest = 0.0f;
    bool special = false;
    for (int q = 0; q < kTileCols / kGroup; q++) {
        float z[kGroup];
        load(q, z);
        for (int i = 0; i < kGroup; i++) {
            const int v = q * kGroup + i;
            const float cw = v >= n         ? 0.0f
                             : class_weight ? class_weight[v]
                                            : 1.0f,
                        x = cw == 0.0f ? 0.0f : cw * z[i];
            special = special || !(fabsf(x) < INFINITY);
            largest = largest > fabsf(x) ? largest : fabsf(x);
        }
    }
    if (!special && largest == 0.0f) return;
    int32_t exponent = (int32_t)(lli_bits(largest) >> 23) - 126;
    if (exponent < -90) exponent = -90;
    const int32_t half = (30 - exponent) / 2;
    const float low = lli_float((uint32_t)(half + 127) << 23);
    const float high = lli_float((uint32_t)(30 - exponent - half + 127) << 23);
    int64_t total = 0;
    for (int q = 0; q < kTileCols / kGroup; q++) {
        float z[kGroup];
        load(q, z);
        for (int i = 0; i < kGroup; i++) {
            const int v = q * kGroup + i;
            const float cw = v >= n         ? 0.0f
                             : class_weight ? class_weight[v]
                                            : 1.0f,
                        x = cw == 0.0f ? 0.0f : cw * z[i];
            if (special) {
                if (!(fabsf(x) < INFINITY)) exact_add_parts(sum, lli_exact_split_f32(x));
            } else {
                total += __float2int_rn(x * low * high);
            }
        }
    }
    if (!special) exact_add_parts(sum, lli_exact_split(total, exponent - 30));
}

/* ---- A gradient --------------------------------------------------------------------------------- */

/* What a row's columns need. */
typedef struct __align__(16) ce_grad_row {
    lli_row_grad grad;
    int64_t target; /* column; negative, also less any block's first: none has the target's own gradient */
    int32_t dead, reserved;
}
ce_grad_row;
enum { kNoTarget = -1 };

/* Softcap and temperature. A call, because loops over columns would grow tenfold with it in line. */
static __device__ __noinline__ float transformed(const lli_cuda_transform *transform, float raw,
                                                 float *slope) {
    return logit_of(transform, raw, slope);
}

/* The chain rule, from dz to the gradient of the raw logit. */
static __device__ inline float to_raw(const lli_cuda_transform *transform, float dz, float slope) {
    if (transform->softcap != 0.0f) dz = dz * slope;
    return transform->temperature != 1.0f ? dz / transform->temperature : dz;
}

/* Beyond the float formula. */
static __device__ __noinline__ float ce_dz_wide(const lli_cuda_transform *transform, const lli_row_grad *grad,
                                                float raw, float cw) {
    float slope;
    const float z = logit_of(transform, raw, &slope);
    return to_raw(transform, lli_row_dz_wide(grad, z, cw), slope);
}

/* (p (alpha + gamma (lse - H - z)) - epsilon cw) slope / T, of a raw logit. Without branches: neighbouring
 * columns then run into one another. */
template <bool kPlain, bool kGamma>
static __device__ inline float ce_dz(const lli_cuda_transform *transform, const lli_row_grad *grad, float raw,
                                     float cw) {
    float slope = 1.0f, z = raw;
    if (!kPlain) z = transformed(transform, raw, &slope);
    const float d = fmaf(z, LLI_LOG2E_LO, fmaf(z, LLI_LOG2E_HI, -grad->k)) - grad->fraction;
    const float p = ptx_ex2_approx_ftz_f32(d);
    float dz = p * grad->alpha;
    if (kGamma) { /* p is 0 below -126, where lse - z may be infinite */
        dz = fmaf(p * grad->gamma, fmaxf(d, -126.0f) * -0x1.62e430p-1f - grad->entropy, dz);
    }
    if (kPlain) return dz;
    return to_raw(transform, dz - grad->epsilon * cw, slope);
}

/* dz of the target's column, exact in grad->target_dz before the chain rule. */
static __device__ __noinline__ float ce_target_dz(const lli_cuda_transform *transform,
                                                  const lli_row_grad *grad, float raw) {
    float slope;
    (void)logit_of(transform, raw, &slope);
    return to_raw(transform, grad->target_dz, slope);
}

/* How a row's columns are computed; the same for all of them. */
typedef enum ce_way { CE_DEAD, CE_PLAIN, CE_GAMMA, CE_WIDE } ce_way;

static __device__ inline ce_way way_of(const ce_grad_row *row) {
    return row->dead ? CE_DEAD : row->grad.wide ? CE_WIDE : row->grad.gamma != 0.0f ? CE_GAMMA : CE_PLAIN;
}

/* dz of kCount neighbouring raw logits, the target's too as if it were none. cw: their class weights. */
template <bool kPlain, ce_way kWay, int kCount>
static __device__ inline void ce_dz_columns(const lli_cuda_transform *transform, const ce_grad_row *row,
                                            const float *z, const float *cw, float *dz) {
#pragma unroll
    for (int j = 0; j < kCount; j++) {
        const float weight = kPlain ? 1.0f : cw[j];
        if (kWay == CE_DEAD) {
            dz[j] = 0.0f;
        } else if (kWay == CE_WIDE) {
            dz[j] = ce_dz_wide(transform, &row->grad, z[j], weight);
        } else {
            dz[j] = ce_dz<kPlain, kWay == CE_GAMMA>(transform, &row->grad, z[j], weight);
        }
    }
}

/* 16 bytes of logits into as many elements of the gradient at `to`, on 16 bytes, of f32 or of the logits'
 * type. class_weight: of the columns, or NULL. */
template <typename E, bool kPlain, ce_way kWay>
static __device__ inline void ce_dz_piece(const lli_cuda_transform *transform, const ce_grad_row *row,
                                          uint4 piece, const float *class_weight, int32_t dtype, void *to) {
    enum { kCount = piece_of<E>::kCount };
    float z[kCount], cw[kCount], dz[kCount];
    piece_of<E>::widen(piece, z);
    if constexpr (!kPlain) {
#pragma unroll
        for (int j = 0; j < kCount; j++) cw[j] = class_weight ? class_weight[j] : 1.0f;
    }
    ce_dz_columns<kPlain, kWay, kCount>(transform, row, z, cw, dz);
    if (sizeof(E) == 4 || dtype != LL_DTYPE_F32) {
        *(uint4 *)to = piece_of<E>::narrow(dz);
    } else {
#pragma unroll
        for (int j = 0; j < kCount; j += 4) {
            ((float4 *)to)[j / 4] = make_float4(dz[j], dz[j + 1], dz[j + 2], dz[j + 3]);
        }
    }
}

/* One column, the target or not. */
static __device__ __noinline__ void ce_dz_column(const lli_cuda_transform *transform, const ce_grad_row *row,
                                                 float z, float class_weight, bool target, int32_t dtype,
                                                 void *to, int64_t c) {
    float dz = 0.0f;
    if (row->dead) {
        /* ignored, or no upstream reaches it */
    } else if (target) {
        dz = ce_target_dz(transform, &row->grad, z);
    } else if (row->grad.wide) {
        dz = ce_dz_wide(transform, &row->grad, z, class_weight);
    } else if (transform->softcap == 0.0f && transform->temperature == 1.0f && row->grad.epsilon == 0.0f) {
        dz = row->grad.gamma != 0.0f ? ce_dz<true, true>(transform, &row->grad, z, class_weight)
                                     : ce_dz<true, false>(transform, &row->grad, z, class_weight);
    } else {
        dz = row->grad.gamma != 0.0f ? ce_dz<false, true>(transform, &row->grad, z, class_weight)
                                     : ce_dz<false, false>(transform, &row->grad, z, class_weight);
    }
    put_element(to, dtype, c, dz);
}

#endif
