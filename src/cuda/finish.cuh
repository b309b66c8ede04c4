/* From a row's integer sums to its results, loss and gradient coefficients, in double: the formulas of
 * core/softmax.c and core/loss.c. What src/cpu/finish.c does. */
#ifndef LLI_CUDA_FINISH_CUH
#define LLI_CUDA_FINISH_CUH

#include "cuda/device.cuh"

/* ln(e^a + e^b) - b with x = a - b */
static __device__ double softplus(double x) {
    return x > 0.0 ? x + lli_log1p(lli_exp(-x)) : lli_log1p(lli_exp(x));
}

static __device__ const double kNan = NAN;

/* A bad target has no class, so it takes weight 1: the weight of another class, perhaps 0, must not mask it.
 */
static __device__ lli_loss_terms terms_of(const lli_cuda_finish *args, int64_t y, ll_linear_ce_args *plain) {
    lli_loss_terms terms = args->terms;
    terms.inv_divisor = args->totals->inv_divisor;
    if (args->smoothing) terms.class_total = args->totals->class_total_value;
    terms.args = &args->call;
    if (y == kBad && args->call.class_weight) {
        *plain = args->call;
        plain->class_weight = NULL;
        terms.args = plain;
    }
    return terms;
}

/* What a row's results say of its softmax alone; z: the target's logit. */
static __device__ lli_row_result softmax_of(const lli_cuda_finish *args, double lse, double entropy,
                                            float z) {
    lli_row_result result = {.lse = lse};
    if (!(lse > -INFINITY)) { /* only -inf, NaN or +inf among the logits */
        result.lse = result.nll = result.entropy = result.soft_sum = kNan;
        return result;
    }
    result.entropy = entropy;
    if (args->targets.v_total == 1) { /* exactly, where the grid would leave 2^-31 */
        result.lse = (double)z;
        result.entropy = 0.0;
    }
    return result;
}

/* lse: of the whole row and of the row without its target; soft_sum: sum_v cw[v] z_v. */
static __device__ lli_row_result result_of(const lli_cuda_finish *args, double lse, double lse_rest,
                                           double entropy, float z, double class_total, double soft_sum) {
    lli_row_result result = softmax_of(args, lse, entropy, z);
    if (!(lse > -INFINITY)) return result;
    result.nll = softplus(lse_rest - (double)z);
    if (args->smoothing) result.soft_sum = class_total * result.lse - soft_sum;
    return result;
}

/* What a backward pass would have got. */
static __device__ lli_row_result as_saved(const lli_row_result *result) {
    const float lse = (float)result->lse;
    lli_row_result saved = {.lse = (double)lse + (double)(float)(result->lse - (double)lse)};
    saved.nll = (float)result->nll;
    saved.entropy = (float)result->entropy;
    return saved;
}

/* Row results of token i; y: kIgnored, kBad or its target. `loss` is what the reduced loss adds up. */
static __device__ void write_row(const lli_cuda_finish *args, int64_t i, int64_t y,
                                 const lli_row_result *result, const lli_loss_terms *terms, double loss,
                                 int64_t argmax) {
    const ll_linear_ce_args *out = &args->call;
    const float lse = (float)result->lse;
    const double z_loss =
        y == kIgnored || terms->z_loss == 0.0 ? 0.0 : terms->z_loss * result->lse * result->lse;
    if (out->loss && args->terms.reduction == LL_REDUCTION_NONE) out->loss[i] = (float)loss;
    if (out->nll) out->nll[i] = (float)result->nll;
    if (out->lse) out->lse[i] = lse;
    if (out->lse_lo) out->lse_lo[i] = (float)(result->lse - (double)lse);
    if (out->entropy) out->entropy[i] = (float)result->entropy;
    if (out->z_loss) out->z_loss[i] = (float)z_loss;
    if (out->argmax) out->argmax[i] = argmax;
    if (args->row_lse) args->row_lse[i] = result->lse;
}

#endif
