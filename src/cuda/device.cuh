/* Device code of more than one kernel: the core's functions, targets, logits from raw products. Built with
 * -fmad=false: a * b + c rounds twice, as on the CPU; fused steps are written fmaf. */
#ifndef LLI_CUDA_DEVICE_CUH
#define LLI_CUDA_DEVICE_CUH

#include "core/dtype.h"
#include "cuda/work.h"

#include "core/exact_sum.c"
#include "core/loss.c"
#include "core/softmax.c"

enum { kIgnored = -1, kBad = -2 };

static __device__ inline int64_t id_at(const lli_cuda_targets *targets, int64_t token) {
    const int64_t at = token * targets->step;
    return targets->dtype == LL_DTYPE_I64 ? ((const int64_t *)targets->ids)[at]
                                          : (int64_t)((const int32_t *)targets->ids)[at];
}

/* An id as a target: itself, kIgnored or kBad. */
static __device__ inline int64_t target_from(const lli_cuda_targets *targets, int64_t id) {
    if (id == targets->ignore_index) return kIgnored;
    return id < 0 || id >= targets->v_total ? kBad : id;
}

static __device__ inline int64_t target_of(const lli_cuda_targets *targets, int64_t token) {
    return target_from(targets, id_at(targets, token));
}

/* q with 2^f = 1 + f q, |f| <= 1/2. */
static __device__ inline float exp2_quotient(float f) {
    float q = fmaf(LLI_EXP2_C5, f, LLI_EXP2_C4);
    q = fmaf(q, f, LLI_EXP2_C3);
    q = fmaf(q, f, LLI_EXP2_C2);
    q = fmaf(q, f, LLI_EXP2_C1);
    return fmaf(q, f, LLI_EXP2_C0);
}

/* rint for |d| < 2^22 and the integer itself, by two additions: the conversion unit is slower. */
static __device__ inline float rint_small(float d, int32_t *n) {
    const float shifted = d + 0x1.8p23f;
    *n = (int32_t)(__float_as_uint(shifted) - 0x4b400000u);
    return shifted - 0x1.8p23f;
}

/* 2^d for d <= 0, 0 below -126. */
static __device__ inline float exp2_or_0(float d) {
    const float kShift = 0x1.8p23f;
    const float bounded = -126.0f > d ? -126.0f : d;
    const float shifted = bounded + kShift, f = bounded - (shifted - kShift);
    const float near_one = fmaf(exp2_quotient(f), f, 1.0f);
    /* times 2^rint by the exponent field, exact: the product is normal where it is kept */
    return d >= -126.0f ? __uint_as_float(__float_as_uint(near_one) + (__float_as_uint(shifted) << 23))
                        : 0.0f;
}

/* 2^30 p = 2^(30 + d), d = z log2 e - k, with the power of two put on by the exponent field: the result is
 * normal and exact. d is cut off at -63, where a term of either sum is 0 on the grid already, and a kept one
 * too (exp16.cuh). */
static __device__ inline float grid_power(float z, float minus_k, float *cut_d) {
    const float kShift = 0x1.8p23f + kGridBits; /* leaves rint(d) + 30 in the low bits */
    const float d = fmaxf(fmaf(z, LLI_LOG2E_LO, fmaf(z, LLI_LOG2E_HI, minus_k)), -63.0f);
    const float shifted = d + kShift;
    const float f = d - (shifted - kShift);
    const float p = fmaf(exp2_quotient(f), f, 1.0f);
    *cut_d = d;
    return __uint_as_float(__float_as_uint(p) + (__float_as_uint(shifted) << 23));
}

/* 2^30 p and 2^30 p (-d) of a logit, rounded to nearest even: core/softmax.c (grid_float). Returns 2^30 p. */
template <bool kEntropy>
static __device__ inline float grid_terms(float z, float minus_k, uint32_t *s, uint32_t *u) {
    float d;
    const float scaled = grid_power(z, minus_k, &d);
    *s = __float2uint_rn(scaled);
    if (kEntropy) *u = __float2uint_rn(scaled * -d);
    return scaled;
}

/* C tanh(raw / C), and its slope 1 - tanh^2 without cancellation; see src/cpu/micro_row.h. */
static __device__ inline float softcap_of(float raw, float cap, float *slope) {
    const float u = raw / cap;
    float d = fabsf(u) * (-2.0f * LLI_LOG2E_HI);
    d = -126.0f > d ? -126.0f : d; /* NaN stays */
    int32_t n;
    const float f = d - rint_small(d, &n), scale = __uint_as_float((uint32_t)(n + 127) << 23);
    const float fraction = exp2_quotient(f) * f;
    const float m = fmaf(scale, fraction, scale - 1.0f), e = fmaf(scale, fraction, scale);
    const float sum = 2.0f + m;
    *slope = (4.0f * e) / (sum * sum);
    return copysignf(cap * ((0.0f - m) / sum), u);
}

static __device__ inline float logit_of(const lli_cuda_transform *transform, float raw, float *slope) {
    *slope = 1.0f;
    if (transform->softcap != 0.0f) raw = softcap_of(raw, transform->softcap, slope);
    return transform->temperature != 1.0f ? raw / transform->temperature : raw;
}

/* ---- A warp ------------------------------------------------------------------------------------- */

static __device__ inline int64_t sum_lanes(int64_t value) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
        value += (int64_t)__shfl_xor_sync(0xffffffffu, (unsigned long long)value, mask);
    }
    return value;
}

/* Every lane gets the sum of all lanes' rows: hung at one height, limbs add up. Integers, so the order does
 * not matter. */
static __device__ inline void sum_lanes_softmax(lli_softmax *row, bool entropy) {
    lli_softmax_raise(row, __reduce_max_sync(0xffffffffu, row->top));
#pragma unroll
    for (int i = 0; i < 3; i++) {
        row->s[i] = sum_lanes(row->s[i]);
        if (entropy) row->u[i] = sum_lanes(row->u[i]);
    }
}

/* ---- Exact sums --------------------------------------------------------------------------------- */

/* acc += value, by several threads at once; integer additions, so in any order. */
static __device__ inline void exact_add_parts(lli_exact *acc, lli_exact_parts parts) {
    for (int i = 0; i < 3; i++) {
        if (parts.part[i]) {
            atomicAdd((unsigned long long *)&acc->limb[parts.limb + i], (unsigned long long)parts.part[i]);
        }
    }
    if (parts.flags) atomicOr(&acc->flags, parts.flags);
}

/* A block's own accumulator into another one; every thread of the block calls it, after a barrier. */
static __device__ inline void exact_flush(lli_exact *to, const lli_exact *from) {
    if (threadIdx.x < kExactLimbs && from->limb[threadIdx.x]) {
        atomicAdd((unsigned long long *)&to->limb[threadIdx.x], (unsigned long long)from->limb[threadIdx.x]);
    }
    if (threadIdx.x == 0 && from->flags) atomicOr(&to->flags, from->flags);
}

/* The launch's own status, not an error that earlier work of the caller left behind. */
template <typename... Params, typename... Args>
static int launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                  Args... args) {
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    return (int)cudaLaunchKernelEx(&config, kernel, args...);
}

static inline int64_t blocks_for(int64_t n, int64_t per_block) {
    return (n + per_block - 1) / per_block;
}

#endif
