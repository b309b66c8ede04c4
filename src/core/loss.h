/* From a row's softmax results to its loss and to the coefficients of its gradient, in double.
 *
 * With cw the class weights, V the vocabulary size, a' = a (LL_SMOOTHING_ALL) or a V / (V - 1) (_OTHERS),
 * both smoothing rules are
 *
 *   ce = (1 - a') cw[y] nll + a'/V sum_v cw[v] (lse - z_v)
 *
 * and the gradient of J with respect to a logit is, for any upstream,
 *
 *   dz_v = p_v (alpha + gamma (lse - H - z_v)) - epsilon cw[v] - delta [v = y]
 *   G       = up_loss s / divisor
 *   delta   = up_nll + G (1 - a') cw[y]            epsilon = G a' / V
 *   alpha   = up_nll + up_lse + G ((1 - a') cw[y] + a'/V sum cw + 2 c lse)        gamma = up_entropy
 *
 * A factor that is exactly 0 removes its term even where the other factor is infinite or NaN: weights
 * of 0 mask. The target's own dz is put together from p_y - 1 = expm1(-nll), which does not cancel. */
#ifndef LLI_CORE_LOSS_H
#define LLI_CORE_LOSS_H

#include "core/checked.h"
#include "core/shared.h"

/* The constants of a call. */
typedef struct lli_loss_terms {
    double hard;        /* 1 - a' */
    double soft;        /* a' / V; 0 without smoothing */
    double z_loss;      /* c */
    double class_total; /* sum_v cw[v], V without class weights; only set with smoothing */
    double inv_divisor; /* 0 when the divisor is */
    int32_t reduction, token_scaling;
    const ll_linear_ce_args *args;
} lli_loss_terms;

/* What does not depend on the tokens: class_total and inv_divisor are those of a call without class weights
 * and division. */
LLI_SHARED lli_loss_terms lli_loss_constants(const lli_problem *problem, const ll_linear_ce_args *args);
#ifndef __CUDACC__
lli_loss_terms lli_loss_prepare(const lli_problem *problem, const lli_call *call);
#endif

/* What the softmax of a valid row gave. */
typedef struct lli_row_result {
    double lse, nll, entropy;
    double soft_sum; /* sum_v cw[v] (lse - z_v); used with smoothing only */
} lli_row_result;

/* loss[i] before division and s[i] z_loss[i], of token i with target y. */
LLI_SHARED void lli_row_loss(const lli_loss_terms *terms, const lli_row_result *row, int64_t i, int64_t y,
                             double *loss, double *z_loss);

/* dz of one row as the kernels evaluate it, in f32. */
typedef struct lli_row_grad {
    float alpha, gamma, epsilon;
    float entropy;
    float k, fraction; /* lse log2 e = k + fraction, k an integer: p_v = 2^(z_v log2 e - k - fraction) */
    float target_dz;   /* the whole of dz_y where has_target, before the softcap slope and 1/T */
    int32_t has_target;
    int32_t dead; /* every coefficient is 0: dz is exactly 0, whatever the row holds */
    int32_t wide; /* lse is beyond the float formula or not finite: use lli_row_dz_wide */
    double lse;
} lli_row_grad;

/* What the target's own dz is put together from; none where delta is 0. */
typedef struct lli_target_terms {
    double delta, rest, gamma, epsilon; /* rest: alpha - delta; epsilon: times the class weight */
} lli_target_terms;

/* row holds the values that were saved in f32 (lse: the sum of its two parts), as the backward sees them. */
LLI_SHARED lli_row_grad lli_row_gradient(const lli_loss_terms *terms, const lli_row_result *row, int64_t i,
                                         int64_t y);

/* The same in three steps: what comes from above, for which row->nll is looked at if tokens are scaled, and
 * nothing else of the row; then all but the target's dz, for which nll is not needed; then that. */
typedef struct lli_row_upstream {
    double loss; /* G */
    double nll, lse, entropy, class_weight;
} lli_row_upstream;
LLI_WAITED lli_row_upstream lli_row_upstream_of(const lli_loss_terms *terms, const lli_row_result *row,
                                                int64_t i, int64_t y);
LLI_WAITED lli_row_grad lli_row_coefficients(const lli_loss_terms *terms, const lli_row_upstream *up,
                                             const lli_row_result *row, lli_target_terms *target);
LLI_SHARED float lli_row_target_dz(const lli_target_terms *terms, const lli_row_result *row);

/* dz_v of a wide row for one logit z (not the target's when has_target). */
LLI_SHARED float lli_row_dz_wide(const lli_row_grad *grad, float z, float class_weight);

#endif
