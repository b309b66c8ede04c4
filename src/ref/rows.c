/* The row part of the reference kernels (rows.h), straight from the formulas of logitless.h. */
#include "ref/rows.h"
#include "core/dtype.h"

#include <float.h>
#include <math.h>
#include <stdio.h>

void lli_ref_carve(const lli_problem *problem, lli_arena *arena, struct lli_ref_rows *ref) {
    ref->rows = lli_take(arena, problem->n_tokens_max, sizeof *ref->rows);
    ref->z = lli_take(arena, problem->v_total, sizeof *ref->z);
}

static double class_weight(const struct lli_ref_rows *ref, int64_t v) {
    return ref->args->class_weight ? (double)ref->args->class_weight[v] : 1.0;
}

void lli_ref_begin(const lli_problem *problem, const lli_call *call, struct lli_ref_rows *ref) {
    const ll_loss *loss = &problem->loss;
    ref->problem = problem;
    ref->args = call->args;
    ref->call = call;
    ref->V = problem->v_total;
    ref->smoothing_share = 0.0;
    ref->class_total = 0.0L;
    if (loss->label_smoothing > 0.0f) {
        int64_t classes = loss->smoothing_rule == LL_SMOOTHING_OTHERS ? ref->V - 1 : ref->V;
        ref->smoothing_share = (double)loss->label_smoothing / (double)classes;
    }
    for (int64_t v = 0; v < ref->V; ++v) ref->class_total += class_weight(ref, v);
    for (int64_t i = 0; i < call->n_tokens; ++i) {
        int64_t target = lli_id(&call->args->target, i);
        ref->rows[i].target = target == loss->ignore_index ? -1 : target;
    }
}

double lli_ref_masked(double factor, double value) {
    return factor == 0.0 ? 0.0 : factor * value;
}

/* ---- Logits ------------------------------------------------------------------------------------- */

static double beyond_f32_is_infinite(double value) {
    return fabs(value) > (double)FLT_MAX ? copysign((double)INFINITY, value) : value;
}

struct lli_ref_logit lli_ref_logit(const ll_loss *loss, double raw) {
    struct lli_ref_logit out;
    double temperature = loss->temperature, cap = loss->softcap;
    raw = beyond_f32_is_infinite(raw);
    out.slope = 1.0 / temperature;
    if (cap > 0.0) {
        double tanh_raw = tanh(raw / cap), cosh_raw = cosh(raw / cap);
        out.slope /= cosh_raw * cosh_raw; /* 1 - tanh^2 without cancellation near the cap */
        raw = cap * tanh_raw;
    }
    out.z = beyond_f32_is_infinite(raw / temperature);
    return out;
}

/* ---- Forward ------------------------------------------------------------------------------------ */

/* Lowest index of the largest logit; -1 where the row is NaN: a NaN or +inf logit, or -inf only. */
static int64_t row_argmax(const double *z, int64_t V) {
    int64_t best = 0;
    for (int64_t v = 0; v < V; ++v) {
        if (isnan(z[v]) || z[v] == (double)INFINITY) return -1;
        if (z[v] > z[best]) best = v;
    }
    return z[best] == -(double)INFINITY ? -1 : best;
}

/* Sum over the smoothed classes of cw[v] (lse - z[v]). */
static long double smoothed_sum(const struct lli_ref_rows *ref, long double max, long double log_sum,
                                int64_t target) {
    bool others = ref->problem->loss.smoothing_rule == LL_SMOOTHING_OTHERS;
    long double sum = 0.0L;
    for (int64_t v = 0; v < ref->V; ++v) {
        double weight = class_weight(ref, v);
        if (weight == 0.0 || (others && v == target)) continue;
        sum += weight * (log_sum + (max - (long double)ref->z[v]));
    }
    return sum;
}

/* s[i] = token_weight[i] * (token_scaling ? p[i, y_i] : 1) */
static double token_scale(const struct lli_ref_rows *ref, int64_t i, double nll) {
    double weight = ref->args->token_weight ? (double)ref->args->token_weight[i] : 1.0;
    return ref->problem->loss.token_scaling ? lli_ref_masked(weight, exp(-nll)) : weight;
}

/* ce = (1 - a) cw[y] nll + share * smoothed;  z_loss = c lse^2;  loss = s (ce + z_loss) */
static void row_loss(const struct lli_ref_rows *ref, int64_t i, int64_t target, double smoothed,
                     struct lli_ref_result *out) {
    const ll_loss *loss = &ref->problem->loss;
    double ce = lli_ref_masked((1.0 - (double)loss->label_smoothing) * class_weight(ref, target), out->nll);
    double scale = token_scale(ref, i, out->nll);
    ce += lli_ref_masked(ref->smoothing_share, smoothed);
    out->z_loss = lli_ref_masked(loss->z_loss, out->lse * out->lse);
    out->loss = lli_ref_masked(scale, ce + out->z_loss);
    out->loss_z_part = lli_ref_masked(scale, out->z_loss);
}

/* From ref->z. With e[v] = exp(z[v] - max) and rest = sum of e but for the largest one, which is 1:
 * ln sum_v e[v] = log1p(rest), and nll = log1p(rest) + (max - z[y]) adds two numbers >= 0, so a confident
 * token's nll is as exact as any other's. */
static void row_forward(const struct lli_ref_rows *ref, int64_t i, int64_t target,
                        struct lli_ref_result *out) {
    const double *z = ref->z;
    out->argmax = row_argmax(z, ref->V);
    if (out->argmax < 0) {
        out->nll = out->lse = out->entropy = (double)NAN;
        row_loss(ref, i, target, (double)NAN, out);
        return;
    }
    long double max = z[out->argmax], rest = 0.0L, log_sum, entropy = 0.0L, smoothed = 0.0L;
    for (int64_t v = 0; v < ref->V; ++v) {
        if (v != out->argmax) rest += expl((long double)z[v] - max);
    }
    log_sum = log1pl(rest);
    for (int64_t v = 0; v < ref->V; ++v) {
        long double minus_log_p = log_sum + (max - (long double)z[v]), p = expl(-minus_log_p);
        if (p > 0.0L) entropy += p * minus_log_p;
    }
    if (ref->smoothing_share > 0.0) smoothed = smoothed_sum(ref, max, log_sum, target);
    out->nll = (double)(log_sum + (max - (long double)z[target]));
    out->lse = (double)(max + log_sum);
    out->entropy = (double)entropy;
    row_loss(ref, i, target, (double)smoothed, out);
}

static void write_row(const struct lli_ref_rows *ref, int64_t i, const struct lli_ref_result *r) {
    const ll_linear_ce_args *args = ref->args;
    if (args->nll) args->nll[i] = (float)r->nll;
    if (args->lse) args->lse[i] = (float)r->lse;
    if (args->lse_lo) args->lse_lo[i] = (float)(r->lse - (double)(float)r->lse);
    if (args->entropy) args->entropy[i] = (float)r->entropy;
    if (args->z_loss) args->z_loss[i] = (float)r->z_loss;
    if (args->argmax) args->argmax[i] = r->argmax;
    if (args->loss && ref->problem->loss.reduction == LL_REDUCTION_NONE) args->loss[i] = (float)r->loss;
}

struct lli_ref_result lli_ref_forward_row(struct lli_ref_rows *ref, int64_t i,
                                          struct lli_ref_totals *totals) {
    struct lli_ref_row *row = &ref->rows[i];
    struct lli_ref_result result = {.argmax = -1};
    if (row->target >= 0) row_forward(ref, i, row->target, &result);
    write_row(ref, i, &result);
    /* As a backward would find them saved in f32, so that both ways give the same bits. */
    const float lse = (float)result.lse;
    row->nll = (double)(float)result.nll;
    row->lse = (double)lse + (double)(float)(result.lse - (double)lse);
    row->entropy = (double)(float)result.entropy;
    totals->loss += result.loss;
    totals->z_loss += result.loss_z_part;
    return result;
}

void lli_ref_forward_end(const struct lli_ref_rows *ref, const struct lli_ref_totals *totals) {
    const ll_linear_ce_args *args = ref->args;
    if (args->loss && ref->problem->loss.reduction != LL_REDUCTION_NONE) {
        args->loss[0] = ref->call->divisor == 0.0 ? 0.0f : (float)(totals->loss / ref->call->divisor);
    }
    if (args->sums) {
        int64_t n_valid = ref->call->n_valid;
        *args->sums = (ll_sums){(double)totals->loss, (double)totals->z_loss, ref->call->weight, n_valid,
                                ref->call->n_tokens - n_valid};
    }
}

/* ---- Gradients ---------------------------------------------------------------------------------- */

/* Spreads up_loss of token i over the coefficients:  up_loss dL/dz = up_loss s / divisor *
 *   ((1 - a) cw[y] (p - [v = y]) + share (sum_u cw[u] p - cw[v]) + 2 c lse p) */
static void spread_upstream(const struct lli_ref_rows *ref, int64_t i, struct lli_ref_row *row) {
    const ll_loss *loss = &ref->problem->loss;
    const ll_linear_ce_args *args = ref->args;
    row->up_nll = args->up_nll ? (double)args->up_nll[i] : 0.0;
    row->up_lse = args->up_lse ? (double)args->up_lse[i] : 0.0;
    row->up_entropy = args->up_entropy ? (double)args->up_entropy[i] : 0.0;
    row->up_smooth = 0.0;
    if (args->up_loss && ref->call->divisor != 0.0) {
        double up = loss->reduction == LL_REDUCTION_NONE ? (double)args->up_loss[i]
                                                         : (double)args->up_loss[0] / ref->call->divisor;
        up = lli_ref_masked(up, token_scale(ref, i, row->nll));
        row->up_nll +=
            lli_ref_masked(up, (1.0 - (double)loss->label_smoothing) * class_weight(ref, row->target));
        row->up_lse += lli_ref_masked(up * 2.0 * (double)loss->z_loss, row->lse);
        row->up_smooth = lli_ref_masked(ref->smoothing_share, up);
    }
    bool nothing =
        row->up_nll == 0.0 && row->up_lse == 0.0 && row->up_entropy == 0.0 && row->up_smooth == 0.0;
    if (nothing) row->target = -1; /* as good as ignored: 0 * NaN of its row of x must reach no gradient */
}

void lli_ref_spread(struct lli_ref_rows *ref) {
    for (int64_t i = 0; i < ref->call->n_tokens; ++i) {
        if (ref->rows[i].target >= 0) spread_upstream(ref, i, &ref->rows[i]);
    }
}

void lli_ref_load_saved(struct lli_ref_rows *ref) {
    const ll_linear_ce_args *args = ref->args;
    for (int64_t i = 0; i < ref->call->n_tokens; ++i) {
        struct lli_ref_row *row = &ref->rows[i];
        row->nll = args->nll ? (double)args->nll[i] : 0.0;
        row->lse = (double)args->lse[i] + (args->lse_lo ? (double)args->lse_lo[i] : 0.0);
        row->entropy = args->entropy ? (double)args->entropy[i] : 0.0;
    }
}

/* dz = up_nll (p - [v = y]) + up_lse p + up_entropy p (lse - H - z) + up_smooth (sum_u cw[u] p - cw[v]) */
double lli_ref_dz(const struct lli_ref_rows *ref, const struct lli_ref_row *row, int64_t v, double z) {
    double p = exp(z - row->lse);
    double p_minus_onehot = v == row->target ? expm1(-row->nll) : p;
    double dz = lli_ref_masked(row->up_nll, p_minus_onehot) + lli_ref_masked(row->up_lse, p);
    if (p != 0.0 && row->up_entropy != 0.0)
        dz += row->up_entropy * p * (row->lse - row->entropy - z); /* p = 0: 0 * inf */
    if (row->up_smooth != 0.0) {
        bool others = ref->problem->loss.smoothing_rule == LL_SMOOTHING_OTHERS;
        double total = (double)(ref->class_total - (others ? class_weight(ref, row->target) : 0.0));
        double own = others && v == row->target ? 0.0 : class_weight(ref, v);
        dz += row->up_smooth * (total * p - own);
    }
    return dz;
}

/* Rounds to odd, so that a second rounding to bf16 or f16 gives what one rounding would. */
static float f32_round_to_odd(double value) {
    float nearest = (float)value;
    if (isnan(value) || (double)nearest == value) return nearest;
    uint32_t bits = lli_bits(nearest);
    if (fabs((double)nearest) > fabs(value)) bits -= 1;
    return lli_float(bits | 1u);
}

void lli_ref_write(const ll_view *view, int64_t r, int64_t c, bool accumulate, long double sum) {
    char *row = (char *)view->data + (size_t)(r * view->row_stride) * ll_dtype_bytes((ll_dtype)view->dtype);
    if (accumulate) sum += lli_load(row, view->dtype, c);
    lli_store(row, view->dtype, c, view->dtype == LL_DTYPE_F32 ? (float)sum : f32_round_to_odd((double)sum));
}

/* ---- The records -------------------------------------------------------------------------------- */

bool lli_ref_machine_ok(char *why, size_t why_bytes) {
    if (why_bytes > 0) why[0] = '\0';
    return true;
}

bool lli_ref_accepts(const lli_problem *problem, char *why, size_t why_bytes) {
    if (problem->in_group) {
        snprintf(why, why_bytes, "the definition runs on one rank, without a communicator");
        return false;
    }
    return lli_ref_machine_ok(why, why_bytes);
}
