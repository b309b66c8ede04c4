/* See expect.h. The token-by-token gradients of the reference give the size of every term of the sums. */
#define _POSIX_C_SOURCE 200809L
#include "core/expect.h"
#include "core/dtype.h"
#include "kernel_run.h"

#include <float.h>
#include <math.h>

#define REF "linear_ce_ref"

static const double kU = 0x1p-24; /* half an ulp of f32, relative */

/* Rounding of a result to its dtype, relative and (subnormals) absolute; at which share of the bound a check
 * warns, and at which multiple of it the check fails. */
static const struct tolerance {
    ll_dtype dtype;
    double unit, least, warn, fail;
} tolerances[] = {
    {LL_DTYPE_F32, 0x1p-24, FLT_MIN, 0.5, 1.0},
    {LL_DTYPE_BF16, 0x1p-8, FLT_MIN, 0.9, 1.0}, /* a tie rounded the other way is a whole unit */
    {LL_DTYPE_F16, 0x1p-11, 0x1p-24, 0.9, 1.0},
};

struct expect_rounding expect_rounding_here(const struct problem *problem) {
    static const struct expect_rounding none = {0}, f32 = {.logit = 2.0}, bf16 = {.logit = 2.0, .dr = 0x1p-8},
                                        plain = {.logit = 2.0, .dr = 0x1p-8, .p = 0x1p-11},
                                        f16 = {.logit = 2.0, .dr = 0x1p-11, .floor = 0x1p-36, .x = 0x1p-14};
    const char *backend = getenv("LL_TEST_BACKEND");
    if (!backend || strcmp(backend, "cuda") != 0) return none;
    const bool rounded = problem->x_dtype == LL_DTYPE_BF16 && problem->bias_dtype == LL_DTYPE_NONE &&
                         problem->loss.temperature == 1.0f && problem->loss.softcap == 0.0f &&
                         problem->loss.label_smoothing == 0.0f;
    if (rounded) return plain;
    return problem->x_dtype == LL_DTYPE_BF16 ? bf16 : problem->x_dtype == LL_DTYPE_F16 ? f16 : f32;
}

static const struct tolerance *tolerance_of(int32_t dtype) {
    for (size_t t = 0; t < sizeof tolerances / sizeof tolerances[0]; ++t) {
        if ((int32_t)tolerances[t].dtype == dtype) return &tolerances[t];
    }
    return &tolerances[0];
}

/* What one token contributes; V long arrays are reused from token to token. */
struct token_sizes {
    bool masked; /* no upstream reaches it */
    double logit_error, loss, dr_floor;
    double *dr, *dr_error; /* [V] absolute */
};

static void token_logits(const struct expectation *expect, int64_t i, double *z, struct token_sizes *token) {
    const struct problem *p = expect->problem;
    const ll_linear_ce_args *a = &expect->operands->args;
    double temperature = p->loss.temperature, cap = p->loss.softcap,
           chain = 2.0 + 4.0 * sqrt((double)p->n_hidden);
    token->logit_error = 0.0;
    for (int64_t v = 0; v < p->v_total; ++v) {
        double raw = 0.0, squares = 0.0, bias = 0.0;
        for (int64_t k = 0; k < p->n_hidden; ++k) {
            double product = view_value(&a->x, i, k) * view_value(&a->w, v, k);
            raw += product;
            squares += product * product;
        }
        if (a->bias.data) bias = view_value(&a->bias, v, 0);
        raw += bias;
        z[v] = (cap > 0.0 ? cap * tanh(raw / cap) : raw) / temperature;
        if (bias == -(double)INFINITY) continue;
        double error = kU * chain * (sqrt(squares) + fabs(bias)) / temperature + 4.0 * kU * fabs(z[v]);
        if (expect->rounding.logit > 0.0) error *= expect->rounding.logit;
        if (error > token->logit_error) token->logit_error = error;
    }
}

/* The reference on token i alone, with a bias (of zeros if there is none), whose gradient is dr. */
static bool token_gradient(const struct expectation *expect, int64_t i, struct token_sizes *token) {
    struct problem p = *expect->problem;
    const ll_linear_ce_args *inputs = &expect->operands->args;
    int64_t v_local = p.v_total + p.v_pad;
    double divisor = inputs->divisor ? *inputs->divisor : expect->want.sums->weight;
    ll_sums sums;
    bool mean = p.loss.reduction == LL_REDUCTION_MEAN, own_bias = p.bias_dtype == LL_DTYPE_NONE;
    float *zeros = calloc((size_t)v_local, sizeof *zeros),
          *gradient = calloc((size_t)v_local, sizeof *gradient);
    bool fine = zeros && gradient;
    p.n_tokens = 1;
    p.frozen = LL_FROZEN_X | LL_FROZEN_W;
    p.grad_bias_dtype = LL_DTYPE_F32;
    ll_linear_ce_args args = *inputs;
    problem_slice(expect->problem, &args, i, 1);
    if (own_bias) {
        p.bias_dtype = LL_DTYPE_F32;
        args.bias = ll_view_vector(zeros, LL_DTYPE_F32, v_local, 0);
    }
    args.grad_bias = ll_view_vector(gradient, LL_DTYPE_F32, v_local, 0);
    args.sums = &sums;
    args.divisor = mean ? &divisor : NULL;
    if (mean && divisor == 0.0) args.divisor = NULL; /* no loss, hence no gradient of it */
    fine = fine && kernel_run(REF, &p, LL_PASS_FORWARD_BACKWARD, &args) == LL_STATUS_OK;
    token->loss = fine ? sums.loss : (double)NAN;
    for (int64_t v = 0; fine && v < p.v_total; ++v) token->dr[v] = fabs((double)gradient[v]);
    free(gradient);
    free(zeros);
    return fine;
}

static double up_value(const float *up, int64_t i) {
    return up ? fabs((double)up[i]) : 0.0;
}

static double max_class_weight(const struct expectation *expect) {
    double most = 1.0;
    const float *weights = expect->operands->args.class_weight;
    for (int64_t v = 0; weights && v < expect->problem->v_total; ++v) most = fmax(most, weights[v]);
    return most;
}

/* Bounds of the values of one token, and of its dr. Adds its part to the bound of the reduced loss. */
static void token_bounds(struct expectation *expect, int64_t i, double *z, struct token_sizes *token) {
    const struct problem *p = expect->problem;
    const ll_linear_ce_args *a = &expect->operands->args;
    const struct results *want = &expect->want;
    double E = token->logit_error, log_v = 1.0 + log((double)p->v_total), weight = max_class_weight(expect);
    double lse = (double)want->lse[i] + (double)want->lse_lo[i], temperature = p->loss.temperature;
    double scale = a->token_weight ? fabs((double)a->token_weight[i]) : 1.0;
    bool none = p->loss.reduction == LL_REDUCTION_NONE, mean = p->loss.reduction == LL_REDUCTION_MEAN;
    double divisor = !mean ? 1.0 : a->divisor ? *a->divisor : want->sums->weight;
    double lse_bound = 5e-7 + 2.0 * kU * fabs(lse) + E, z_loss = (double)p->loss.z_loss;
    double z_bound =
        z_loss * (2.0 * fabs(lse) * lse_bound + lse_bound * lse_bound) + 4.0 * kU * want->z_loss[i];
    if (p->loss.token_scaling && scale != 0.0) scale *= exp(-(double)want->nll[i]);
    double loss_bound = scale * (weight * (1e-6 + 4.0 * E) + z_bound) + (4.0 * E + 4e-7) * fabs(token->loss);
    if (scale == 0.0) loss_bound = 0.0; /* a mask: also of NaN */
    expect->allowed[FIELD_NLL][i] = 5e-7 + 2.0 * kU * fabs((double)want->nll[i]) + 2.0 * E;
    expect->allowed[FIELD_LSE][i] = lse_bound;
    expect->allowed[FIELD_ENTROPY][i] = 1e-6 + 2.0 * kU * fabs((double)want->entropy[i]) + 4.0 * E * log_v;
    expect->allowed[FIELD_Z_LOSS][i] = z_bound;
    if (none) expect->allowed[FIELD_LOSS][i] = loss_bound;
    if (!none && divisor > 0.0) expect->allowed[FIELD_LOSS][0] += loss_bound / divisor;
    if (isfinite(loss_bound)) expect->allowed_loss_sum += loss_bound;
    if (isfinite(lse) && scale > 0.0)
        expect->allowed_z_sum += scale * z_bound + (4.0 * E + 4e-7) * scale * want->z_loss[i];

    double up_loss = divisor > 0.0 ? up_value(a->up_loss, none ? i : 0) * scale / divisor : 0.0;
    double upstream =
        up_value(a->up_nll, i) + up_value(a->up_lse, i) + 2.0 * log_v * up_value(a->up_entropy, i);
    if (up_loss > 0.0) upstream += up_loss * (weight + 2.0 * z_loss * fabs(lse));
    token->masked = upstream == 0.0 || (isnan(lse) && token->dr[0] == 0.0); /* NaN reaches nothing */
    token->dr_floor = expect->rounding.floor * upstream / temperature;
    if (token->masked) return;
    double smoothing = up_loss * (double)p->loss.label_smoothing * weight / (double)p->v_total;
    for (int64_t v = 0; v < p->v_total; ++v) {
        double p_scaled = exp(z[v] - lse) / temperature;
        token->dr_error[v] =
            (8.0 * kU + 4.0 * E * log_v + expect->rounding.p) * (token->dr[v] + upstream * p_scaled) +
            8.0 * kU * smoothing / temperature;
        if (isfinite(z[v])) /* p below the least normal f32 may be 0 */
            token->dr_error[v] += FLT_MIN * upstream * (1.0 + fabs(lse - z[v])) / temperature;
        if (p->loss.softcap > 0.0f) /* 1 - tanh^2 near the cap; the slope's own dependence on the logit */
            token->dr_error[v] +=
                upstream * p_scaled * (8.0 * kU + 2.0 * E * temperature / (double)p->loss.softcap);
    }
}

static double *field_bounds(struct expectation *expect, enum field field, int64_t count) {
    expect->allowed[field] = calloc((size_t)(count > 0 ? count : 1), sizeof(double));
    return expect->allowed[field];
}

/* Adds token i's terms to the bounds of the gradients. */
static void token_gradient_bounds(struct expectation *expect, int64_t i, const struct token_sizes *token) {
    const struct problem *p = expect->problem;
    const ll_linear_ce_args *a = &expect->operands->args;
    double sum_v = kU * (4.0 + sqrt((double)p->v_total)), sum_n = kU * (4.0 + sqrt((double)p->n_tokens));
    for (int64_t v = 0; v < p->v_total; ++v) {
        double rounding = expect->rounding.dr * (token->dr[v] + token->dr_error[v]) + token->dr_floor;
        double by_v = token->dr_error[v] + sum_v * token->dr[v] + rounding,
               by_n = token->dr_error[v] + sum_n * token->dr[v];
        for (int64_t k = 0; k < p->n_hidden; ++k) {
            expect->allowed[FIELD_GRAD_X][i * p->n_hidden + k] += by_v * fabs(view_value(&a->w, v, k));
            expect->allowed[FIELD_GRAD_W][v * p->n_hidden + k] +=
                (by_n + rounding) * fabs(view_value(&a->x, i, k)) + expect->rounding.x * token->dr[v];
        }
        expect->allowed[FIELD_GRAD_BIAS][v] += by_n;
    }
}

bool expectation_create(const struct problem *problem, const struct operands *operands,
                        struct expectation *expect) {
    return expectation_create_for(problem, operands, &(struct expect_rounding){0}, expect);
}

bool expectation_create_for(const struct problem *problem, const struct operands *operands,
                            const struct expect_rounding *rounding, struct expectation *expect) {
    const struct problem *p = problem;
    int64_t n = p->n_tokens, v_local = p->v_total + p->v_pad;
    *expect = (struct expectation){.problem = p, .rounding = *rounding, .operands = operands};
    struct token_sizes token = {.dr = calloc((size_t)p->v_total, sizeof(double)),
                                .dr_error = calloc((size_t)p->v_total, sizeof(double))};
    expect->z = calloc((size_t)(n * p->v_total + 1), sizeof(double));
    bool fine = results_create(p, &expect->want) && token.dr && token.dr_error && expect->z;
    fine = field_bounds(expect, FIELD_LOSS, expect->want.n_loss) && fine;
    for (int32_t field = FIELD_NLL; field <= FIELD_Z_LOSS; ++field) {
        fine = (field == FIELD_LSE_LO || field_bounds(expect, (enum field)field, n)) && fine;
    }
    fine = field_bounds(expect, FIELD_GRAD_X, n * p->n_hidden) && fine;
    fine = field_bounds(expect, FIELD_GRAD_W, v_local * p->n_hidden) && fine;
    fine = field_bounds(expect, FIELD_GRAD_BIAS, v_local) && fine;
    if (fine) {
        ll_linear_ce_args args = problem_args(p, operands, &expect->want, LL_PASS_FORWARD_BACKWARD);
        fine = kernel_run(REF, p, LL_PASS_FORWARD_BACKWARD, &args) == LL_STATUS_OK;
    }
    for (int64_t i = 0; fine && i < n; ++i) {
        if (lli_id(&operands->args.target, i) == p->loss.ignore_index) continue;
        token_logits(expect, i, expect->z + i * p->v_total, &token);
        fine = token_gradient(expect, i, &token);
        token_bounds(expect, i, expect->z + i * p->v_total, &token);
        if (!token.masked) token_gradient_bounds(expect, i, &token);
    }
    free(token.dr_error);
    free(token.dr);
    return fine;
}

void expectation_destroy(struct expectation *expect) {
    for (int32_t field = 0; field < kFields; ++field) free(expect->allowed[field]);
    free(expect->z);
    results_destroy(&expect->want);
}

/* ---- Checking ----------------------------------------------------------------------------------- */

static void report(const struct expectation *expect, const char *kernel, const char *what, const char *name,
                   int64_t r, int64_t c, double got, double want, double allowed,
                   struct expect_stats *stats) {
    ++stats->failed;
    if (++stats->printed <= 3) {
        printf("FAIL %s %s %s: %s[%lld,%lld] got %.9g want %.9g (allowed %.3g)\n", expect->problem->text,
               kernel, what, name, (long long)r, (long long)c, got, want, allowed);
    }
}

static void check_field(const struct expectation *expect, const char *kernel, const char *what,
                        const struct results *results, enum field field, struct expect_stats *stats) {
    ll_view got = results_field(expect->problem, results, field);
    ll_view want = results_field(expect->problem, &expect->want, field);
    const struct tolerance *tolerance = tolerance_of(want.dtype);
    for (int64_t r = 0; got.data && r < got.rows; ++r) {
        for (int64_t c = 0; c < got.cols; ++c) {
            double g = view_value(&got, r, c), w = view_value(&want, r, c);
            double allowed = expect->allowed[field][r * got.cols + c];
            ++stats->checked;
            if (g == w || (isnan(g) && isnan(w))) continue;
            allowed += 2.0 * tolerance->unit * fabs(w) + tolerance->least;
            double share = fabs(g - w) / allowed;
            if (share > stats->worst[field]) stats->worst[field] = share;
            if (share > tolerance->warn) ++stats->warned;
            if (!(share <= tolerance->fail)) {
                report(expect, kernel, what, field_names[field], r, c, g, w, allowed, stats);
            }
        }
    }
}

/* nll >= 0 and entropy >= 0 by definition; lse + lse_lo as exact as the sum, however large lse is. */
static void check_invariants(const struct expectation *expect, const char *kernel, const char *what,
                             const struct results *got, struct expect_stats *stats) {
    const struct results *want = &expect->want;
    for (int64_t i = 0; i < expect->problem->n_tokens; ++i) {
        double sum = (double)got->lse[i] + (double)got->lse_lo[i];
        double wanted = (double)want->lse[i] + (double)want->lse_lo[i];
        double allowed = expect->allowed[FIELD_LSE][i] - 2.0 * kU * fabs(wanted);
        if (got->nll[i] < 0.0f) report(expect, kernel, what, "nll", i, 0, got->nll[i], 0, 0, stats);
        if (got->entropy[i] < 0.0f)
            report(expect, kernel, what, "entropy", i, 0, got->entropy[i], 0, 0, stats);
        if (isnan(sum) != isnan(wanted) || fabs(sum - wanted) > allowed) {
            report(expect, kernel, what, "lse + lse_lo", i, 0, sum, wanted, allowed, stats);
        }
    }
}

/* Another column than the reference's only if the two logits are nearer than their errors, and, where they
 * are equal, never a higher one. */
static void check_argmax(const struct expectation *expect, const char *kernel, const char *what,
                         const struct results *got, struct expect_stats *stats) {
    for (int64_t i = 0; i < expect->problem->n_tokens; ++i) {
        int64_t g = got->argmax[i], w = expect->want.argmax[i], V = expect->problem->v_total;
        bool fine = g == w;
        if (!fine && g >= 0 && g < V && w >= 0) {
            double gap = expect->z[i * V + w] - expect->z[i * V + g];
            fine = gap > 0.0 && gap <= 2.0 * expect->allowed[FIELD_LSE][i];
        }
        if (!fine) report(expect, kernel, what, "argmax", i, 0, (double)g, (double)w, 0, stats);
    }
}

static void check_sums(const struct expectation *expect, const char *kernel, const char *what,
                       const ll_sums *got, struct expect_stats *stats) {
    const ll_sums *want = expect->want.sums;
    const double pairs[][3] = {{got->loss, want->loss, expect->allowed_loss_sum},
                               {got->z_loss, want->z_loss, expect->allowed_z_sum},
                               {got->weight, want->weight, 0.0},
                               {(double)got->n_valid, (double)want->n_valid, 0.0},
                               {(double)got->n_ignored, (double)want->n_ignored, 0.0}};
    for (int64_t s = 0; s < 5; ++s) {
        double g = pairs[s][0], w = pairs[s][1];
        if (g == w || (isnan(g) && isnan(w)) || fabs(g - w) <= pairs[s][2]) continue;
        report(expect, kernel, what, "sums", s, 0, g, w, pairs[s][2], stats);
    }
}

void expectation_check(const struct expectation *expect, const char *kernel, const char *what,
                       const struct results *got, int32_t fields, struct expect_stats *stats) {
    for (int32_t field = 0; field < kFields; ++field) {
        if ((fields >> field & 1) && expect->allowed[field]) {
            check_field(expect, kernel, what, got, (enum field)field, stats);
        }
    }
    if (fields & 1 << FIELD_ARGMAX) {
        check_invariants(expect, kernel, what, got, stats);
        check_argmax(expect, kernel, what, got, stats);
        check_sums(expect, kernel, what, got->sums, stats);
    }
}
