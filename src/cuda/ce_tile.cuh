/* Arithmetic of ce over given logits: one canonical tile into integers, one logit into its gradient.
 *
 *   d = (z - anchor) log2 e as in core/softmax.h        p = 2^d
 *   S = sum of rint(2^30 p)    U = sum of rint(2^30 p (-d)), d no lower than -64
 *
 * f32 logits: the lines of core/softmax.c, hence a CPU's bits. They pay for it in memory that is twice as
 * large a logit. bf16 and f16 logits: p = ex2.approx(d), and floor instead of rint. The polynomial costs 11
 * instructions and is what the kernels would wait for; the special function unit costs one and errs by 2^-22
 * of p. The sum of floor(2^30 p) is exact all the same, by four additions of floats, which leave the unit's
 * slot to ex2. Two sums, high from 2^6 on and low from 1.5 2^-7 on, of at most 64 terms below 1 + 2^-21:
 *
 *   t = high + p                      to the grid 2^-17 (2^-16, if it ends beyond 2^7)
 *   r = p - (t - high)                exact, |r| <= 2^-17
 *   low = low + r, rounded down       to the grid 2^-30: low stays between 2^-7 and 2^-6
 *   high = t
 *
 * What falls off low is what 2^30 p has behind the point, whatever high was: so the order does not show.
 *
 * A tile is read in groups of kGroup columns by whoever calls: `load(q, z)` gives group q, transformed. E is
 * the type of the logits. */
#ifndef LLI_CUDA_CE_TILE_CUH
#define LLI_CUDA_CE_TILE_CUH

#include "cuda/ce.h"
#include "cuda/device.cuh"
#include "cuda/ptx/ex2_approx.cuh"
#include "cuda/ptx/max_nan.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

/* ---- Elements ----------------------------------------------------------------------------------- */

/* 16 bytes of a row: kCount columns, and the largest of two such pieces element by element (NaN wins). */
template <typename E> struct piece_of;

template <> struct piece_of<float> {
    enum { kCount = 4, kDtype = LL_DTYPE_F32 };
    static constexpr uint32_t kMinusInfinity = 0xff800000u;
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
    enum { kCount = 8, kDtype = LL_DTYPE_BF16 };
    static constexpr uint32_t kMinusInfinity = 0xff80ff80u; /* all of 4 bytes */
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
    enum { kCount = 8, kDtype = LL_DTYPE_F16 };
    static constexpr uint32_t kMinusInfinity = 0xfc00fc00u;
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

static __device__ inline const char *logits_row_at(const lli_cuda_ce *args, int64_t i) {
    return (const char *)args->logits.data +
           i * args->logits.row_stride * (args->logits.dtype == LL_DTYPE_F32 ? 4 : 2);
}

static __device__ inline char *grad_row_at(const lli_cuda_ce *args, int64_t i) {
    return (char *)args->grad.data + i * args->grad.row_stride * (args->grad.dtype == LL_DTYPE_F32 ? 4 : 2);
}

/* ---- A tile ------------------------------------------------------------------------------------- */

static __device__ const float kHighStart = 0x1p6f, kLowStart = 0x1.8p-7f;

/* The sum of floor(2^30 p), see the top. */
struct grid_sum {
    float high = kHighStart, low = kLowStart;

    __device__ inline void add(float p) {
        const float t = high + p;
        low = __fadd_rd(low, p - (t - high));
        high = t;
    }
    __device__ inline int64_t value() const {
        const int32_t of_low = (int32_t)(__float_as_uint(low) - __float_as_uint(kLowStart));
        return (int64_t)__float2int_rz((high - kHighStart) * 0x1p17f) * 8192 + of_low;
    }
};

/* Sums over columns of one tile, 64 at most; see the top. */
template <typename E, bool kEntropy> struct column_sums {
    grid_sum s_sum, u_sum;

    __device__ inline void add(float z, float minus_k) {
        float d = fmaf(z, LLI_LOG2E_LO, fmaf(z, LLI_LOG2E_HI, minus_k));
        if (kEntropy) d = fmaxf(d, -64.0f); /* p of -inf is 0, and 0 times infinity no entropy */
        const float p = ptx_ex2_approx_ftz_f32(d);
        s_sum.add(p);
        if (kEntropy) u_sum.add(p * -d);
    }
    __device__ inline int64_t s() const { return s_sum.value(); }
    __device__ inline int64_t u() const { return kEntropy ? u_sum.value() : 0; }
};

template <bool kEntropy> struct column_sums<float, kEntropy> {
    int64_t s_sum = 0, u_sum = 0;

    __device__ inline void add(float z, float minus_k) {
        uint32_t s, u = 0;
        grid_terms<kEntropy>(z, minus_k, &s, &u);
        s_sum += s;
        if (kEntropy) u_sum += u;
    }
    __device__ inline int64_t s() const { return s_sum; }
    __device__ inline int64_t u() const { return u_sum; }
};

/* Is the tile one of the float formula? Others: nothing to add (-inf), NaN or +inf, or beyond it. */
static __device__ inline bool is_plain_max(float zmax) {
    return fabsf(zmax) < LLI_Z_FLOAT;
}

/* Any tile into a row's state, by one thread. The wide ones go the way of core/softmax.c. */
template <typename E, bool kEntropy, int kGroup, typename Load>
static __device__ void any_tile(Load load, float zmax, lli_softmax *row) {
    if (zmax == -INFINITY) return;
    if (is_plain_max(zmax)) {
        const float k = lli_softmax_anchor(zmax);
        column_sums<E, kEntropy> sums;
#pragma unroll 2 /* short loops: see core/shared.h */
        for (int q = 0; q < kTileCols / kGroup; q++) {
            float z[kGroup];
            load(q, z);
#pragma unroll
            for (int i = 0; i < kGroup; i++) sums.add(z[i], -k);
        }
        lli_softmax_add(row, (int32_t)k, sums.s(), sums.u());
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

/* Beyond the float formula. */
static __device__ __noinline__ lli_softmax warp_tile_wide(float first, float second, float zmax) {
    float all[kTileCols];
    lli_softmax row;
    lli_softmax_clear(&row);
    for (int l = 0; l < 32; l++) {
        all[2 * l] = __shfl_sync(0xffffffffu, first, l);
        all[2 * l + 1] = __shfl_sync(0xffffffffu, second, l);
    }
    lli_softmax_tile(&row, all, kTileCols, zmax);
    return row;
}

/* A tile as a row of its own, by a warp; z: the lane's columns 2 lane and 2 lane + 1. Every lane gets it. */
template <typename E, bool kEntropy> static __device__ inline lli_softmax warp_tile(const float *z) {
    const bool any_nan = __any_sync(0xffffffffu, z[0] != z[0] || z[1] != z[1]);
    const int32_t key = __reduce_max_sync(0xffffffffu, lli_softmax_key(fmaxf(z[0], z[1])));
    const float zmax = any_nan ? NAN : lli_softmax_key_value(key);
    if (zmax == -INFINITY) return (lli_softmax){.top = LLI_TOP_EMPTY};
    if (!is_plain_max(zmax)) return warp_tile_wide(z[0], z[1], zmax);
    const float k = lli_softmax_anchor(zmax);
    column_sums<E, kEntropy> sums;
    sums.add(z[0], -k);
    sums.add(z[1], -k);
    return lli_softmax_of_tile((int32_t)k, sum_lanes(sums.s()), kEntropy ? sum_lanes(sums.u()) : 0);
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

/* How a row's columns are computed; the same for all of them.
 *
 *   CE_SHORT   dz = 2^(z log2 e + offset), the offset with log2 alpha: within 2^-17, for 16-bit results
 *   CE_PLAIN   dz = p alpha - epsilon cw
 *   CE_GAMMA   dz = p (alpha + gamma (lse - H - z)) - epsilon cw
 *   CE_WIDE    in double: lse beyond the float formula, or NaN
 *   CE_DEAD    0 */
typedef enum ce_way { CE_DEAD, CE_SHORT, CE_PLAIN, CE_GAMMA, CE_WIDE } ce_way;

/* What a row's columns need. The target's own entry is written apart, by whoever knows its dz. */
typedef struct __align__(16) ce_grad_row {
    lli_row_grad grad;
    int64_t target; /* column that is left out; kNoTarget: none */
    float offset;   /* of CE_SHORT */
    int32_t way;
}
ce_grad_row;
enum { kNoTarget = -1 };

static __device__ const float kShortOffset = 64.0f; /* the largest: it is then rounded to 2^-18 */

static __host__ __device__ inline bool is_plain(const lli_cuda_finish *args) {
    return !args->smoothing && args->transform.softcap == 0.0f && args->transform.temperature == 1.0f;
}

/* Sets way and offset from grad. */
static __device__ inline void set_way(const lli_cuda_ce *args, ce_grad_row *row) {
    const bool narrow = args->logits.dtype != LL_DTYPE_F32 && args->grad.dtype != LL_DTYPE_F32;
    const lli_row_grad *grad = &row->grad;
    row->way = grad->dead ? CE_DEAD : grad->wide ? CE_WIDE : grad->gamma != 0.0f ? CE_GAMMA : CE_PLAIN;
    row->offset = log2f(grad->alpha) - (grad->k + grad->fraction);
    if (row->way != CE_PLAIN || !is_plain(&args->row) || !narrow || grad->epsilon != 0.0f) return;
    if (grad->alpha > 0.0f && fabsf(grad->k) < kShortOffset && fabsf(row->offset) < kShortOffset) {
        row->way = CE_SHORT;
    }
}

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

/* 2^d, d <= 0 or NaN; see the top. */
template <typename E> static __device__ inline float ce_exp2(float d) {
    if constexpr (sizeof(E) == 4) {
        return exp2_or_0(d);
    } else {
        return ptx_ex2_approx_ftz_f32(d);
    }
}

/* (p (alpha + gamma (lse - H - z)) - epsilon cw) slope / T, of a raw logit. Without branches: neighbouring
 * columns then run into one another. */
template <typename E, bool kPlain, bool kGamma>
static __device__ inline float ce_dz(const lli_cuda_transform *transform, const lli_row_grad *grad, float raw,
                                     float cw) {
    float slope = 1.0f, z = raw;
    if (!kPlain) z = transformed(transform, raw, &slope);
    const float d = fmaf(z, LLI_LOG2E_LO, fmaf(z, LLI_LOG2E_HI, -grad->k)) - grad->fraction;
    const float p = ce_exp2<E>(d);
    float dz = p * grad->alpha;
    if (kGamma) { /* p is 0 below -126, where lse - z may be infinite */
        dz = fmaf(p * grad->gamma, fmaxf(d, -126.0f) * -0x1.62e430p-1f - grad->entropy, dz);
    }
    if (kPlain) return dz;
    return to_raw(transform, dz - grad->epsilon * cw, slope);
}

/* The gradient at the target's column from its dz, exact before the chain rule. */
static __device__ __noinline__ float target_gradient(const lli_cuda_transform *transform, float dz,
                                                     float raw) {
    float slope;
    (void)logit_of(transform, raw, &slope);
    return to_raw(transform, dz, slope);
}

/* The target's entry of row i, whose logit is still where it was. By one thread. */
static __device__ inline void put_target(const lli_cuda_ce *args, int64_t i, int64_t y, float target_dz) {
    const float raw = element_at(logits_row_at(args, i), args->logits.dtype, y);
    put_element(grad_row_at(args, i), args->grad.dtype, y,
                target_gradient(&args->row.transform, target_dz, raw));
}

/* Gradients of kCount neighbouring raw logits, the target's too as if it were none. cw: their class weights.
 */
template <typename E, bool kPlain, ce_way kWay, int kCount>
static __device__ inline void ce_dz_columns(const lli_cuda_transform *transform, const ce_grad_row *row,
                                            const float *z, const float *cw, float *dz) {
#pragma unroll
    for (int j = 0; j < kCount; j++) {
        const float weight = kPlain ? 1.0f : cw[j];
        if (kWay == CE_DEAD) {
            dz[j] = 0.0f;
        } else if (kWay == CE_SHORT) {
            dz[j] = ptx_ex2_approx_ftz_f32(fmaf(z[j], LLI_LOG2E_HI, row->offset));
        } else if (kWay == CE_WIDE) {
            dz[j] = ce_dz_wide(transform, &row->grad, z[j], weight);
        } else {
            dz[j] = ce_dz<E, kPlain, kWay == CE_GAMMA>(transform, &row->grad, z[j], weight);
        }
    }
}

/* kCount elements at `to` but for number `but`. */
template <int kCount>
static __device__ __noinline__ void put_others(void *to, int32_t dtype, const float *dz, int but) {
    for (int j = 0; j < kCount; j++) {
        if (j != but) put_element(to, dtype, j, dz[j]);
    }
}

/* 16 bytes of logits, column c the first, into as many elements of the gradient at `to`, on 16 bytes, of f32
 * or of the logits' type. class_weight: of column c on, or NULL. */
template <typename E, bool kPlain, ce_way kWay>
static __device__ inline void ce_dz_piece(const lli_cuda_transform *transform, const ce_grad_row *row,
                                          uint4 piece, const float *class_weight, int64_t c, int32_t dtype,
                                          void *to) {
    enum { kCount = piece_of<E>::kCount };
    float z[kCount], cw[kCount], dz[kCount];
    piece_of<E>::widen(piece, z);
    if constexpr (!kPlain) {
#pragma unroll
        for (int j = 0; j < kCount; j++) cw[j] = class_weight ? class_weight[j] : 1.0f;
    }
    ce_dz_columns<E, kPlain, kWay, kCount>(transform, row, z, cw, dz);
    if ((uint64_t)(row->target - c) < kCount) {
        float copy[kCount]; /* an array whose address is known elsewhere would not stay in registers */
#pragma unroll
        for (int j = 0; j < kCount; j++) copy[j] = dz[j];
        put_others<kCount>(to, dtype, copy, (int)(row->target - c));
    } else if (kWay == CE_SHORT || sizeof(E) == 4 || dtype != LL_DTYPE_F32) {
        *(uint4 *)to = piece_of<E>::narrow(dz);
    } else {
#pragma unroll
        for (int j = 0; j < kCount; j += 4) {
            ((float4 *)to)[j / 4] = make_float4(dz[j], dz[j + 1], dz[j + 2], dz[j + 3]);
        }
    }
}

/* One column. */
template <typename E, bool kPlain, ce_way kWay>
static __device__ inline void ce_dz_column(const lli_cuda_transform *transform, const ce_grad_row *row,
                                           float z, const float *class_weight, int64_t c, int32_t dtype,
                                           void *to_row) {
    const float cw = class_weight ? class_weight[c] : 1.0f;
    float dz;
    if (c == row->target) return;
    ce_dz_columns<E, kPlain, kWay, 1>(transform, row, &z, &cw, &dz);
    put_element(to_row, dtype, c, dz);
}

#endif
