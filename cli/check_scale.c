/* How near the results of `logitless check` have to be to the reference.
 *
 * delta bounds the error of one logit; u is the rounding unit of the dtype: 2^-24 (f32), 2^-11 (f16), 2^-8
 * (bf16). Logits have a standard deviation of 2.5 and stay below 16.
 *
 *   fp32      a chain of d multiply-adds in f32, then sums in blocks of 256: each rounding errs by at most
 *             2^-24 of a partial sum of at most 2.5 standard deviation; at random, and six standard
 *             deviations of that: delta = 6 * 2.5 * 2^-24 * sqrt(d + 256)
 *   matching  both sides have that, and the reference rounds logits below 16 to the dtype (half a unit of
 *             the last place in [8, 16) is 8 u): delta = 2 * 6 * 2.5 * 2^-24 * sqrt(d + 256) + 8 u
 *   on a GPU  twice the chain: tensor cores cut off where it rounds
 *
 * Errors of the logits move the gradient of logit v, dz = p c - up_nll [v = y] with c = up_nll + up_lse +
 * up_entropy (lse - H - z), by at most delta times p (2 |c| + 4 |up_entropy|); roundings of dz and of sums
 * move it by parts of |dz|. With t = p (2 |c| + 4 |up_entropy|) + |dz| the rows of a gradient have the scales
 *
 *   s of grad_x[i]    = rms(w) sqrt(sum_v t^2)       terms of both signs add up like the root of
 *   s of grad_w[v]    = rms(x) sqrt(sum_i t^2)       their squares
 *   s of grad_bias[v] =        sqrt(sum_i t^2)
 *
 *   line               atol         rtol
 *   output             4 delta      2^-23          |d nll|, |d lse|, |d H| <= 2 delta times a mean below 2
 *   *_grad, fp32       4 delta s    u + 2^-24      4: elements of x and w are below 3.5 rms
 *   *_grad, matching   4 delta s    2 u + 2^-24    both sides round once
 *
 * On a GPU dz itself is rounded to bf16 or f16 before two products: an error of each term of up to u, some
 * 0.4 u at random, and six standard deviations of that: 3 u s more for the gradients.
 *
 * --atol and --rtol replace both numbers on every line; then s is 1. */
#include "check.h"

#include "core/dtype.h"
#include "core/status.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static bool is_matching(const check_options *options) {
    return strcmp(options->reference_mode, "matching") == 0;
}

static double unit_of(ll_dtype dtype) {
    return dtype == LL_DTYPE_F32 ? 0x1p-24 : dtype == LL_DTYPE_F16 ? 0x1p-11 : 0x1p-8;
}

bool check_on_gpu(const check_options *options) {
    return strcmp(options->backend, "cuda") == 0;
}

const ll_comm *check_plan_comm(const check_options *options, const ll_comm *comm) {
    return check_on_gpu(options) && comm->size == 1 ? NULL : comm;
}

static double delta_of(const check_options *options, const check_shape *shape) {
    const double rounding = check_on_gpu(options) ? 0x1p-23 : 0x1p-24;
    const double chain = 6 * CHECK_LOGIT_STD * rounding * sqrt((double)shape->n_hidden + 256);
    return is_matching(options) ? 2 * chain + CHECK_LOGIT_MAX / 2 * unit_of(shape->dtype) : chain;
}

typedef struct token_scale {
    const check_inputs *in;
    const check_results *want;
    double least; /* eta / delta of a dz */
} token_scale;

/* t of token i, added up in squares over v, which is its own scale, and into `columns`. */
static double add_token(const token_scale *scale, int64_t i, double *columns) {
    const check_inputs *in = scale->in;
    const double lse = (double)scale->want->lse[i], entropy = (double)scale->want->entropy[i];
    const double up_nll = (double)in->up_nll[i] + (double)in->up_loss / (double)in->n_valid;
    const double up_lse = (double)in->up_lse[i], up_entropy = (double)in->up_entropy[i];
    double sum = 0;
    for (int64_t v = 0; v < in->shape.n_vocab; v++) {
        const double z = check_logit(in, i, v), p = exp(z - lse);
        const double c = up_nll + up_lse + up_entropy * (lse - entropy - z);
        const double dz = p * c - (v == in->target[i] ? up_nll : 0);
        const double t = p * (2 * fabs(c) + 4 * fabs(up_entropy)) + fabs(dz) + scale->least;
        columns[v] += t * t;
        sum += t * t;
    }
    return sum;
}

ll_status check_scales_create(const check_options *options, const check_inputs *in, const check_results *want,
                              check_scales *scales) {
    const check_shape *shape = &in->shape;
    scales->token = calloc((size_t)shape->n_tokens, sizeof *scales->token);
    scales->column = calloc((size_t)shape->n_vocab, sizeof *scales->column);
    LLI_REQUIRE(scales->token && scales->column, LL_STATUS_MEMORY, "check: no memory for %lld columns",
                (long long)shape->n_vocab);
    const double rounding = shape->dtype == LL_DTYPE_F16 ? 0x1p-25 / delta_of(options, shape) : 0;
    const token_scale scale = {.in = in, .want = want, .least = is_matching(options) ? rounding : 0};
    const double rms_w = CHECK_LOGIT_STD / sqrt((double)shape->n_hidden);
    for (int64_t i = 0; i < shape->n_tokens; i++) {
        if (in->target[i] < 0) continue; /* ignored: its gradients are 0, and nothing of it may be wrong */
        scales->token[i] = rms_w * sqrt(add_token(&scale, i, scales->column)) + rounding;
    }
    for (int64_t v = 0; v < shape->n_vocab; v++) scales->column[v] = sqrt(scales->column[v]) + rounding;
    return LL_STATUS_OK;
}

void check_scales_free(check_scales *scales) {
    free(scales->token);
    free(scales->column);
    *scales = (check_scales){0};
}

static double root_mean_square(const void *data, ll_dtype dtype, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        double value = (double)lli_load(data, (int32_t)dtype, i);
        sum += value * value;
    }
    return n > 0 ? sqrt(sum / (double)n) : 0;
}

void check_tolerances(const check_options *options, const check_shape *shape, const check_results *want,
                      check_line lines[CHECK_LINES]) {
    const int64_t d = shape->n_hidden, n_vocab = shape->n_vocab;
    const double u = unit_of(shape->dtype), delta = delta_of(options, shape);
    const ll_dtype grad = want->grad_dtype;
    const double dz = check_on_gpu(options) && shape->dtype != LL_DTYPE_F32 ? 3 * u : 0;
    memset(lines, 0, CHECK_LINES * sizeof *lines);
    lines[CHECK_OUTPUT].rms = root_mean_square(want->lse, LL_DTYPE_F32, shape->n_tokens);
    lines[CHECK_HIDDEN_GRAD].rms = root_mean_square(want->grad_x, grad, shape->n_tokens * d);
    lines[CHECK_WEIGHT_GRAD].rms = root_mean_square(want->grad_w, grad, n_vocab * d);
    if (shape->bias) lines[CHECK_BIAS_GRAD].rms = root_mean_square(want->grad_bias, grad, n_vocab);
    for (int l = 0; l < CHECK_LINES; l++) {
        lines[l].atol = options->atol >= 0 ? options->atol : 4 * delta + (l == CHECK_OUTPUT ? 0 : dz);
        lines[l].rtol = options->rtol >= 0  ? options->rtol
                        : l == CHECK_OUTPUT ? 0x1p-23
                                            : (is_matching(options) ? 2 * u : u) + 0x1p-24;
    }
}
