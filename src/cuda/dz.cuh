/* The gradient of one logit from its row's coefficients; of dz.cu, where logits lie in memory, and
 * dz_sm90.cu, where they never do. */
#ifndef LLI_CUDA_DZ_CUH
#define LLI_CUDA_DZ_CUH

#include "cuda/device.cuh"

/* What the inner loop needs of a row, in two 16-byte pieces, and the rest. */
typedef struct __align__(16) dz_row {
    float alpha, k, fraction, gamma;
    float entropy, epsilon, scale, target_dz;
    int32_t target; /* column in the block; -1: none of it */
    int32_t dead, wide, reserved;
    double lse;
}
dz_row;

/* (p (alpha + gamma (lse - H - z)) - epsilon cw) slope / T; d = (z - lse) log2 e carries lse - z. */
template <bool kGamma, bool kPlain>
static __device__ inline float dz_of(const lli_cuda_transform *transform, const dz_row *row, float raw,
                                     float cw) {
    const float kShift = 0x1.8p23f;
    float slope, z = raw;
    if (!kPlain) z = logit_of(transform, raw, &slope);
    const float d = fmaf(z, LLI_LOG2E_LO, fmaf(z, LLI_LOG2E_HI, -row->k)) - row->fraction;
    const float bounded = -126.0f > d ? -126.0f : d;
    const float shifted = bounded + kShift, f = bounded - (shifted - kShift);
    const float near_one = fmaf(exp2_quotient(f), f, 1.0f);
    /* times 2^rint by the exponent field, exact: the product is normal where it is kept */
    const float p =
        d >= -126.0f ? __uint_as_float(__float_as_uint(near_one) + (__float_as_uint(shifted) << 23)) : 0.0f;
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
    if (y >= 0 && grad->has_target && at >= 0 && at < args->n_cols) row->target = (int32_t)at;
}

#endif
