/* The gradient of one logit from its row's coefficients; of dz.cu, where logits lie in memory, dz_sm90.cu,
 * where they never do, and dz_kept.cu, where their exponentials do.
 *
 * In plain problems of bf16 operands (lli_cuda_dz_plain) all three go by the exponentials of the canonical
 * tile, rounded to 11 bits (exp16.cuh): which of them makes a dz then does not show in its bits. Elsewhere
 * dz_of, in f32. */
#ifndef LLI_CUDA_DZ_CUH
#define LLI_CUDA_DZ_CUH

#include "cuda/kept.cuh"
#include "cuda/ptx/lg2_approx.cuh"

#include <cuda_bf16.h>

/* What the inner loop needs of a row, in two 16-byte pieces, and the rest. */
typedef struct __align__(16) dz_row {
    float alpha, k, fraction, gamma;
    float entropy, epsilon, scale, target_dz;
    int32_t target; /* column in the block; -1: none of it */
    int32_t dead, wide;
    /* From exponentials: 2^(64 - fraction) alpha, and gamma; wide rows too are `apart` there. */
    int32_t apart;
    double lse;
    float unit_alpha, unit_gamma;
}
dz_row;

/* (p (alpha + gamma (lse - H - z)) - epsilon cw) slope / T; d = (z - lse) log2 e carries lse - z. */
template <bool kGamma, bool kPlain>
static __device__ inline float dz_of(const lli_cuda_transform *transform, const dz_row *row, float raw,
                                     float cw) {
    float slope, z = raw;
    if (!kPlain) z = logit_of(transform, raw, &slope);
    const float d = fmaf(z, LLI_LOG2E_LO, fmaf(z, LLI_LOG2E_HI, -row->k)) - row->fraction;
    const float bounded = -126.0f > d ? -126.0f : d;
    const float p = exp2_or_0(d);
    float dz = p * row->alpha;
    if (kGamma) {
        const float surprise = bounded * -0x1.62e430p-1f - row->entropy;
        dz = fmaf(p * row->gamma, surprise, dz);
    }
    if (kPlain) return dz;
    if (row->epsilon != 0.0f) dz = dz - row->epsilon * cw;
    if (transform->softcap != 0.0f) dz = dz * slope;
    return transform->temperature != 1.0f ? dz / transform->temperature : dz;
}

/* Beyond the float formula. */
static __device__ float wide_dz_of(const lli_cuda_transform *transform, const dz_row *row, float raw,
                                   float cw) {
    float slope;
    const float z = logit_of(transform, raw, &slope);
    lli_row_grad grad = {
        .alpha = row->alpha, .gamma = row->gamma, .epsilon = row->epsilon, .entropy = row->entropy};
    grad.lse = row->lse;
    float dz = lli_row_dz_wide(&grad, z, cw);
    if (transform->softcap != 0.0f) dz = dz * slope;
    return transform->temperature != 1.0f ? dz / transform->temperature : dz;
}

static __device__ inline float target_dz_of(const lli_cuda_transform *transform, const dz_row *row,
                                            float raw) {
    float slope, dz = row->target_dz;
    (void)logit_of(transform, raw, &slope);
    if (transform->softcap != 0.0f) dz = dz * slope;
    return transform->temperature != 1.0f ? dz / transform->temperature : dz;
}

static __device__ inline void load_row(const lli_cuda_dz *args, int64_t r, dz_row *row) {
    *row = dz_row{.scale = 1.0f, .target = -1, .dead = 1};
    if (r >= args->n_rows || args->grads[r].row.dead) return;
    const lli_row_grad *grad = &args->grads[r].row;
    const int64_t y = target_of(&args->targets, args->first + r), at = y - args->column;
    *row = dz_row{.alpha = grad->alpha,
                  .k = grad->k,
                  .fraction = grad->fraction,
                  .gamma = grad->gamma,
                  .entropy = grad->entropy,
                  .epsilon = grad->epsilon,
                  .scale = __uint_as_float((uint32_t)(127 - args->grads[r].exponent) << 23),
                  .target_dz = grad->target_dz,
                  .target = -1,
                  .dead = 0,
                  .wide = grad->wide};
    row->lse = grad->lse;
    const float f = -grad->fraction, unit = EXP16_UNIT * fmaf(exp2_quotient(f), f, 1.0f);
    row->unit_alpha = unit * grad->alpha;
    row->unit_gamma = unit * grad->gamma;
    /* a factor must stay finite; where alpha is no number either */
    row->apart = grad->wide || !(fabsf(grad->alpha) < 0x1p60f && fabsf(grad->gamma) < 0x1p60f);
    if (y >= 0 && grad->has_target && at >= 0 && at < args->n_cols) row->target = (int32_t)at;
}

/* ---- From exponentials -------------------------------------------------------------------------- */

/* Of a row and a canonical tile. */
typedef struct dz_factor {
    float alpha, gamma; /* times 2^(64 + k - lse log2 e), k the anchor */
    float shift;        /* 64 + k - lse log2 e */
} dz_factor;

/* Of a row that is not `apart`: a tile beyond the float formula then lies so far below the row that it is 0.
 */
static __device__ inline dz_factor factor_of(const dz_row *row, int32_t anchor) {
    const int32_t n = anchor - (int32_t)row->k, least = -126, most = 2;
    const float power = __uint_as_float((uint32_t)((n < most ? n : most) + 127) << 23);
    const bool counts = n >= least && !anchor_is_logit(anchor) && !row->dead;
    return (dz_factor){.alpha = counts ? row->unit_alpha * power : 0.0f,
                       .gamma = counts ? row->unit_gamma * power : 0.0f,
                       .shift = counts ? (float)(n + 64) - row->fraction : 0.0f};
}

/* p: an exponential 2^-64 (exp16_value). Entropy's surprise -ln p comes from the rounded p too. */
template <bool kGamma>
static __device__ inline float dz_from(const dz_factor *factor, const dz_row *row, float p) {
    const float dz = p * factor->alpha;
    if (!kGamma) return dz;
    const float bits = fmaxf(ptx_lg2_approx_f32(p), -200.0f) + factor->shift; /* finite where p is 0 */
    return fmaf(p * factor->gamma, bits * -0x1.62e430p-1f - row->entropy, dz);
}

/* Of a row that is `apart`: as lli_row_dz_wide. */
static __device__ float apart_dz_from(const dz_row *row, int32_t anchor, float p) {
    const double tile =
        anchor_is_logit(anchor) ? (double)__uint_as_float((uint32_t)anchor) : (double)anchor * LLI_LN2;
    const double exponential = (double)p * 0x1p64, whole = exponential * lli_exp(tile - row->lse);
    double value = masked(row->alpha, whole);
    if (row->gamma != 0.0f && whole != 0.0) {
        const double d = lli_log(exponential) + (tile - row->lse);
        value += (double)row->gamma * whole * (-d - (double)row->entropy);
    }
    return (float)value;
}

/* The same from the logit and its tile's largest. */
static __device__ float apart_dz(const dz_row *row, float z, float max) {
    const int32_t anchor = kept_anchor(max);
    if (anchor_is_logit(anchor)) return apart_dz_from(row, anchor, exp16_value(exp16_of_wide(z, max)));
    float d;
    return apart_dz_from(row, anchor, exp16_value(exp16_of(grid_power(z, (float)-anchor, &d))));
}

static __device__ inline uint32_t bf16_pair(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *(const uint32_t *)&pair;
}

/* Eight dz of a row that is neither apart nor has a gradient of its entropy, from pairs of exponentials. */
static __device__ inline uint4 fast_eight(const dz_row *row, const dz_factor *factor, uint4 pairs) {
    uint32_t words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
    for (int q = 0; q < 4; q++) {
        words[q] = bf16_pair(dz_from<false>(factor, row, exp16_low(words[q])),
                             dz_from<false>(factor, row, exp16_high(words[q])));
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

#endif
