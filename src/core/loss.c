/* The loss and gradient coefficients of loss.h. */
#include "core/loss.h"
#include "core/exact_sum.h"
#include "core/math64.h"
#include "core/softmax.h"

#include <math.h>

/* factor * value, with 0 a mask. */
LLI_LOCAL double masked(double factor, double value) {
    return factor == 0.0 ? 0.0 : factor * value;
}

LLI_SHARED lli_loss_terms lli_loss_constants(const lli_problem *problem, const ll_linear_ce_args *args) {
    const ll_loss *loss = &problem->loss;
    double v_total = (double)problem->v_total, mass = loss->label_smoothing;
    if (loss->smoothing_rule == LL_SMOOTHING_OTHERS && mass > 0.0) mass = mass * v_total / (v_total - 1.0);
    lli_loss_terms terms = {
        .hard = 1.0 - mass,
        .soft = mass / v_total,
        .z_loss = loss->z_loss,
        .class_total = v_total,
        .inv_divisor = 1.0,
        .reduction = loss->reduction,
        .token_scaling = loss->token_scaling,
        .args = args,
    };
    return terms;
}

#ifndef __CUDACC__
lli_loss_terms lli_loss_prepare(const lli_problem *problem, const lli_call *call) {
    const ll_linear_ce_args *args = call->args;
    lli_loss_terms terms = lli_loss_constants(problem, args);
    terms.inv_divisor = call->divisor > 0.0 ? 1.0 / call->divisor : 0.0;
    if (terms.soft > 0.0 && args->class_weight) {
        lli_exact total = {0};
        for (int64_t v = 0; v < problem->v_total; v++) lli_exact_add_f32(&total, args->class_weight[v]);
        terms.class_total = lli_exact_value(&total);
    }
    return terms;
}
#endif

LLI_LOCAL double class_weight(const lli_loss_terms *terms, int64_t y) {
    return terms->args->class_weight ? (double)terms->args->class_weight[y] : 1.0;
}

/* s[i] */
LLI_LOCAL double token_scale(const lli_loss_terms *terms, const lli_row_result *row, int64_t i) {
    double scale = terms->args->token_weight ? (double)terms->args->token_weight[i] : 1.0;
    return terms->token_scaling ? masked(scale, lli_exp(-row->nll)) : scale;
}

LLI_SHARED void lli_row_loss(const lli_loss_terms *terms, const lli_row_result *row, int64_t i, int64_t y,
                             double *loss, double *z_loss) {
    double scale = token_scale(terms, row, i);
    double ce = masked(terms->hard * class_weight(terms, y), row->nll) + masked(terms->soft, row->soft_sum);
    double z = masked(terms->z_loss, row->lse * row->lse);
    *loss = masked(scale, ce + z);
    *z_loss = masked(scale, z);
}

LLI_WAITED lli_row_upstream lli_row_upstream_of(const lli_loss_terms *terms, const lli_row_result *row,
                                                int64_t i, int64_t y) {
    const ll_linear_ce_args *args = terms->args;
    lli_row_upstream up = {
        .nll = args->up_nll ? (double)args->up_nll[i] : 0.0,
        .lse = args->up_lse ? (double)args->up_lse[i] : 0.0,
        .entropy = args->up_entropy ? (double)args->up_entropy[i] : 0.0,
        .class_weight = class_weight(terms, y),
    };
    if (args->up_loss) {
        up.loss = args->up_loss[terms->reduction == LL_REDUCTION_NONE ? i : 0] * terms->inv_divisor;
        up.loss = masked(up.loss, token_scale(terms, row, i));
    }
    return up;
}

LLI_WAITED lli_row_grad lli_row_coefficients(const lli_loss_terms *terms, const lli_row_upstream *up,
                                             const lli_row_result *row, lli_target_terms *target) {
    double up_loss = up->loss, gamma = up->entropy;
    double delta = up->nll + masked(up_loss, terms->hard * up->class_weight);
    double epsilon = masked(up_loss, terms->soft);
    /* alpha - delta, kept apart so that the target's dz needs no difference of the two */
    double rest = up->lse + masked(epsilon, terms->class_total) +
                  masked(up_loss, 2.0 * masked(terms->z_loss, row->lse));
    double bits = row->lse * LLI_LOG2E, k = rint(bits);
    lli_row_grad grad = {
        .alpha = (float)(delta + rest),
        .gamma = (float)gamma,
        .epsilon = (float)epsilon,
        .entropy = (float)row->entropy,
        .dead = delta == 0.0 && rest == 0.0 && gamma == 0.0 && epsilon == 0.0,
        .wide = !(fabs(row->lse) < LLI_Z_FLOAT),
        .lse = row->lse,
    };
    if (!grad.wide) {
        grad.k = (float)k;
        grad.fraction = (float)(bits - k);
    }
    *target = (lli_target_terms){delta, rest, gamma, masked(epsilon, up->class_weight)};
    return grad;
}

LLI_SHARED float lli_row_target_dz(const lli_target_terms *terms, const lli_row_result *row) {
    double p = lli_exp(-row->nll);
    double inner = terms->rest + masked(terms->gamma, p > 0.0 ? row->nll - row->entropy : 0.0);
    return (float)(terms->delta * lli_expm1(-row->nll) + masked(p, inner) - terms->epsilon);
}

LLI_SHARED lli_row_grad lli_row_gradient(const lli_loss_terms *terms, const lli_row_result *row, int64_t i,
                                         int64_t y) {
    lli_target_terms target;
    const lli_row_upstream up = lli_row_upstream_of(terms, row, i, y);
    lli_row_grad grad = lli_row_coefficients(terms, &up, row, &target);
    if (target.delta != 0.0) {
        grad.has_target = 1;
        grad.target_dz = lli_row_target_dz(&target, row);
    }
    return grad;
}

LLI_SHARED float lli_row_dz_wide(const lli_row_grad *grad, float z, float class_weight) {
    double d = (double)z - grad->lse, p = lli_exp(d);
    double value = masked(grad->alpha, p);
    if (grad->gamma != 0.0f && p != 0.0) value += grad->gamma * p * (-d - grad->entropy);
    return (float)(value - masked(grad->epsilon, class_weight));
}
