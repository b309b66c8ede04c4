/* Results of finish.h. */
#include "cpu/finish.h"
#include "core/math64.h"
#include "cpu/micro.h"

#include <math.h>

/* ln(e^a + e^b) - b with x = a - b */
static double softplus(double x) {
    return x > 0.0 ? x + lli_log1p(lli_exp(-x)) : lli_log1p(lli_exp(x));
}

/* A row whose logits are all -inf, or that holds NaN or +inf, is NaN. */
static lli_row_result result_of(const lli_finish *finish, const lli_row_part *part) {
    lli_row_result result = {.lse = lli_softmax_lse(&part->whole)};
    if (!(result.lse > -INFINITY)) {
        result.lse = result.nll = result.entropy = result.soft_sum = NAN;
        return result;
    }
    result.nll = softplus(lli_softmax_lse(&part->rest) - (double)part->z);
    result.entropy = finish->want & LLI_WANT_ENTROPY ? lli_softmax_entropy(&part->whole) : 0.0;
    if (finish->problem->v_total == 1) { /* exactly, where the grid would leave 2^-31 */
        result.lse = (double)part->z;
        result.entropy = 0.0;
    }
    if (finish->want & LLI_WANT_SOFT_SUM) {
        result.soft_sum = finish->terms->class_total * result.lse - lli_exact_value(&part->soft);
    }
    return result;
}

lli_row_result lli_finish_row(const lli_finish *finish, const lli_row_part *part, int64_t i, int64_t y,
                              lli_finish_sums *sums) {
    const ll_linear_ce_args *args = finish->call->args;
    const lli_loss_terms *terms = finish->terms;
    const lli_row_result result = result_of(finish, part);
    double loss, z_loss;
    lli_row_loss(terms, &result, i, y, &loss, &z_loss);
    lli_exact_add_f32(&sums->loss, (float)loss);
    lli_exact_add_f32(&sums->z_loss, (float)z_loss);
    const float lse = (float)result.lse;
    if (args->loss && terms->reduction == LL_REDUCTION_NONE) args->loss[i] = (float)loss;
    if (args->nll) args->nll[i] = (float)result.nll;
    if (args->lse) args->lse[i] = lse;
    if (args->lse_lo) args->lse_lo[i] = (float)(result.lse - (double)lse);
    if (args->entropy) args->entropy[i] = (float)result.entropy;
    if (args->z_loss) {
        args->z_loss[i] = terms->z_loss == 0.0 ? 0.0f : (float)(terms->z_loss * result.lse * result.lse);
    }
    if (args->argmax) args->argmax[i] = result.lse == result.lse ? part->argmax : -1;
    return result;
}

lli_row_result lli_finish_saved(const lli_row_result *result) {
    const float lse = (float)result->lse, lse_lo = (float)(result->lse - (double)lse);
    return (lli_row_result){
        .lse = (double)lse + (double)lse_lo, .nll = (float)result->nll, .entropy = (float)result->entropy};
}

lli_row_result lli_finish_load(const ll_linear_ce_args *args, int64_t i) {
    return (lli_row_result){
        .lse = (double)args->lse[i] + (args->lse_lo ? (double)args->lse_lo[i] : 0.0),
        .nll = args->nll ? (double)args->nll[i] : 0.0,
        .entropy = args->entropy ? (double)args->entropy[i] : 0.0,
    };
}

void lli_finish_ignored(const lli_finish *finish, int64_t i) {
    const ll_linear_ce_args *args = finish->call->args;
    if (args->loss && finish->terms->reduction == LL_REDUCTION_NONE) args->loss[i] = 0.0f;
    if (args->nll) args->nll[i] = 0.0f;
    if (args->lse) args->lse[i] = 0.0f;
    if (args->lse_lo) args->lse_lo[i] = 0.0f;
    if (args->entropy) args->entropy[i] = 0.0f;
    if (args->z_loss) args->z_loss[i] = 0.0f;
    if (args->argmax) args->argmax[i] = -1;
}

void lli_finish_merge(lli_finish_sums *sums, const lli_finish_sums *other) {
    lli_exact_merge(&sums->loss, &other->loss);
    lli_exact_merge(&sums->z_loss, &other->z_loss);
}

void lli_finish_call(const lli_finish *finish, const lli_finish_sums *sums) {
    const lli_call *call = finish->call;
    const ll_linear_ce_args *args = call->args;
    const double total = lli_exact_value(&sums->loss);
    if (args->loss && finish->terms->reduction != LL_REDUCTION_NONE) {
        args->loss[0] = call->divisor > 0.0 ? (float)(total / call->divisor) : 0.0f;
    }
    if (args->sums) {
        *args->sums = (ll_sums){.loss = total,
                                .z_loss = lli_exact_value(&sums->z_loss),
                                .weight = call->weight,
                                .n_valid = call->n_valid,
                                .n_ignored = call->n_tokens - call->n_valid};
    }
}
