/* The reference kernel against a second writing of the definition: every output against a long double
 * evaluation of the header's formulas, every gradient against central differences of that evaluation, for
 * each option alone and for every pair of options. Leaves out speed, sizes and the other kernels
 * (tests/core). */
#define _POSIX_C_SOURCE 200809L
#include "kernel_run.h"
#include "core/dtype.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#define REF "linear_ce_ref"

enum { kTokens = 5, kHidden = 4, kVocab = 7 };

/* The operands as numbers that can be moved a little. */
struct model {
    const struct problem *problem;
    const ll_linear_ce_args *args;
    long double x[kTokens][kHidden], w[kVocab][kHidden], bias[kVocab];
    int64_t target[kTokens];    /* -1: ignored */
    long double scale[kTokens]; /* s[i], constant for the gradient */
    long double divisor;
};

struct token {
    long double nll, lse, entropy, z_loss, loss_unscaled;
};

static long double weight_of_class(const struct model *model, int64_t v) {
    return model->args->class_weight ? (long double)model->args->class_weight[v] : 1.0L;
}

static struct token token_values(const struct model *model, int64_t i) {
    const ll_loss *loss = &model->problem->loss;
    long double z[kVocab], sum = 0.0L, smooth = 0.0L, a = loss->label_smoothing;
    int64_t y = model->target[i];
    bool others = loss->smoothing_rule == LL_SMOOTHING_OTHERS;
    struct token token = {0};
    for (int64_t v = 0; v < kVocab; ++v) {
        long double raw = model->bias[v];
        for (int64_t k = 0; k < kHidden; ++k) raw += model->x[i][k] * model->w[v][k];
        if (loss->softcap > 0.0f) raw = loss->softcap * tanhl(raw / loss->softcap);
        z[v] = raw / loss->temperature;
        sum += expl(z[v]);
    }
    token.lse = token.entropy = logl(sum);
    for (int64_t v = 0; v < kVocab; ++v) {
        token.entropy -= expl(z[v] - token.lse) * z[v];
        if (!others || v != y) smooth += weight_of_class(model, v) * (token.lse - z[v]);
    }
    token.nll = token.lse - z[y];
    token.z_loss = loss->z_loss * token.lse * token.lse;
    token.loss_unscaled = (1.0L - a) * weight_of_class(model, y) * token.nll +
                          a / (others ? kVocab - 1 : kVocab) * smooth + token.z_loss;
    return token;
}

static long double upstream(const float *up, int64_t i) {
    return up ? (long double)up[i] : 0.0L;
}

static long double up_loss(const struct model *model, int64_t i) {
    bool none = model->problem->loss.reduction == LL_REDUCTION_NONE;
    return upstream(model->args->up_loss, none ? i : 0);
}

/* J, whose gradient the passes return. */
static long double objective(const struct model *model) {
    long double sum = 0.0L;
    for (int64_t i = 0; i < kTokens; ++i) {
        if (model->target[i] < 0) continue;
        struct token t = token_values(model, i);
        sum += up_loss(model, i) * model->scale[i] * t.loss_unscaled / model->divisor;
        sum += upstream(model->args->up_nll, i) * t.nll + upstream(model->args->up_lse, i) * t.lse +
               upstream(model->args->up_entropy, i) * t.entropy;
    }
    return sum;
}

static void model_load(struct model *model, const struct problem *problem, const ll_linear_ce_args *args) {
    long double weight = 0.0L;
    *model = (struct model){.problem = problem, .args = args};
    for (int64_t v = 0; v < kVocab; ++v) {
        for (int64_t k = 0; k < kHidden; ++k)
            model->w[v][k] = lli_load(lli_row(&args->w, v), args->w.dtype, k);
        if (args->bias.data)
            model->bias[v] = lli_load(args->bias.data, args->bias.dtype, v * args->bias.row_stride);
    }
    for (int64_t i = 0; i < kTokens; ++i) {
        int64_t y = lli_id(&args->target, i);
        model->target[i] = y == problem->loss.ignore_index ? -1 : y;
        if (model->target[i] < 0) continue;
        for (int64_t k = 0; k < kHidden; ++k)
            model->x[i][k] = lli_load(lli_row(&args->x, i), args->x.dtype, k);
        weight += weight_of_class(model, y);
        model->scale[i] = args->token_weight ? (long double)args->token_weight[i] : 1.0L;
        if (problem->loss.token_scaling) model->scale[i] *= expl(-token_values(model, i).nll);
    }
    model->divisor = problem->loss.reduction != LL_REDUCTION_MEAN ? 1.0L
                     : args->divisor                              ? *args->divisor
                                                                  : weight;
}

static void near(const char *text, const char *what, int64_t r, int64_t c, double got, long double want,
                 double tolerance) {
    if (fabsl(got - want) <= tolerance * (1.0L + fabsl(want))) return;
    fail_msg("%s: %s[%lld,%lld] got %.10g want %.10Lg", text, what, (long long)r, (long long)c, got, want);
}

static void check_values(const struct model *model, const struct results *results) {
    const char *text = model->problem->text;
    bool none = model->problem->loss.reduction == LL_REDUCTION_NONE;
    long double loss = 0.0L, z_loss = 0.0L;
    for (int64_t i = 0; i < kTokens; ++i) {
        struct token t = {0};
        if (model->target[i] >= 0) t = token_values(model, i);
        near(text, "nll", i, 0, results->nll[i], t.nll, 1e-7);
        near(text, "lse", i, 0, results->lse[i], t.lse, 1e-7);
        near(text, "lse + lse_lo", i, 0, (double)results->lse[i] + (double)results->lse_lo[i], t.lse, 1e-13);
        near(text, "entropy", i, 0, results->entropy[i], t.entropy, 1e-7);
        near(text, "z_loss", i, 0, results->z_loss[i], t.z_loss, 1e-7);
        if (none) near(text, "loss", i, 0, results->loss[i], model->scale[i] * t.loss_unscaled, 1e-7);
        loss += model->scale[i] * t.loss_unscaled;
        z_loss += model->scale[i] * t.z_loss;
    }
    if (!none) near(text, "loss", 0, 0, results->loss[0], loss / model->divisor, 1e-7);
    near(text, "sums.loss", 0, 0, results->sums->loss, loss, 1e-13);
    near(text, "sums.z_loss", 0, 0, results->sums->z_loss, z_loss, 1e-13);
}

/* Error of the central difference: step^2 times a third derivative of J, here at most some 1e-8. */
static void check_slope(struct model *model, long double *number, const char *what, const ll_view *gradient,
                        int64_t r, int64_t c, double tolerance) {
    const long double step = 1e-5L, at = *number;
    *number = at + step;
    long double above = objective(model);
    *number = at - step;
    long double slope = (above - objective(model)) / (2.0L * step);
    *number = at;
    near(model->problem->text, what, r, c, (double)lli_load(lli_row(gradient, r), gradient->dtype, c), slope,
         tolerance);
}

static void check_gradients(struct model *model, const struct results *results, double tolerance) {
    for (int64_t v = 0; v < kVocab; ++v) {
        for (int64_t k = 0; k < kHidden; ++k) {
            check_slope(model, &model->w[v][k], "grad_w", &results->grad_w, v, k, tolerance);
        }
        if (results->grad_bias.data) {
            check_slope(model, &model->bias[v], "grad_bias", &results->grad_bias, v, 0, tolerance);
        }
    }
    for (int64_t i = 0; i < kTokens; ++i) {
        for (int64_t k = 0; k < kHidden; ++k) {
            check_slope(model, &model->x[i][k], "grad_x", &results->grad_x, i, k, tolerance);
        }
    }
}

static void check_problem(const char *text) {
    struct problem problem;
    struct operands operands;
    struct results both, apart;
    struct model model;
    const char *why = problem_parse(text, &problem);
    if (why) fail_msg("%s", why);
    assert_true(operands_create(&problem, &operands));
    assert_true(results_create(&problem, &both) && results_create(&problem, &apart));
    model_load(&model, &problem, &operands.args);

    ll_linear_ce_args args = problem_args(&problem, &operands, &both, LL_PASS_FORWARD_BACKWARD);
    assert_int_equal(kernel_run(REF, &problem, LL_PASS_FORWARD_BACKWARD, &args), LL_STATUS_OK);
    check_values(&model, &both);
    check_gradients(&model, &both, 1e-6); /* from nll, lse and entropy as f32 would hold them */

    args = problem_args(&problem, &operands, &apart, LL_PASS_FORWARD);
    assert_int_equal(kernel_run(REF, &problem, LL_PASS_FORWARD, &args), LL_STATUS_OK);
    check_values(&model, &apart);
    args = problem_args(&problem, &operands, &apart, LL_PASS_BACKWARD);
    assert_int_equal(kernel_run(REF, &problem, LL_PASS_BACKWARD, &args), LL_STATUS_OK);
    check_gradients(&model, &apart, 1e-6);

    assert_true(operands_intact(&operands) && results_intact(&both) && results_intact(&apart));
    results_destroy(&apart);
    results_destroy(&both);
    operands_destroy(&operands);
}

static const char *const single_options[] = {
    "cap3",
    "t0.7",
    "ls0.2",
    "lso0.3",
    "zl0.05",
    "cw",
    "cw0",
    "tw",
    "ts",
    "bias",
    "ign3",
    "sum",
    "none",
    "div3.75",
    "up",
    "noloss:up",
    "pad3",
    "conf8",
    "i32:sy2:sx3:sw1",
    "sgx2:sgw3",
};

enum { kOptions = sizeof single_options / sizeof single_options[0] };

/* An explicit divisor is for the mean only. */
static bool compatible(const char *a, const char *b) {
    bool divided = strncmp(a, "div", 3) == 0 || strncmp(b, "div", 3) == 0;
    bool undivided = !strcmp(a, "sum") || !strcmp(b, "sum") || !strcmp(a, "none") || !strcmp(b, "none");
    return !(divided && undivided);
}

static void each_option_alone(void **state) {
    (void)state;
    char text[160];
    check_problem("fb:f32:n5:d4:v7");
    for (int32_t a = 0; a < kOptions; ++a) {
        snprintf(text, sizeof text, "fb:f32:n5:d4:v7:%s", single_options[a]);
        check_problem(text);
    }
}

static void each_pair_of_options(void **state) {
    (void)state;
    char text[160];
    for (int32_t a = 0; a < kOptions; ++a) {
        for (int32_t b = a + 1; b < kOptions; ++b) {
            if (!compatible(single_options[a], single_options[b])) continue;
            snprintf(text, sizeof text, "fb:f32:n5:d4:v7:%s:%s", single_options[a], single_options[b]);
            check_problem(text);
        }
    }
}

static void many_options_at_once(void **state) {
    (void)state;
    check_problem("fb:f32:n5:d4:v7:cap4:t1.3:ls0.1:zl0.01:cw:tw:ts:bias:ign4:up:pad2");
    check_problem("fb:f32:n5:d4:v7:cap4:t1.3:lso0.1:zl0.01:cw0:tw:ts:bias:ign4:up:none:conf5");
    check_problem("fb:bf16:n5:d4:v7:cap4:lso0.1:zl0.01:cw:biasf32:gxf32:gwf32:ign4:up:div2.5");
    check_problem("fb:f16-f32:n5:d4:v7:cap4:ls0.1:bias:gxf32:ign4:up:sum");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_option_alone),
        cmocka_unit_test(each_pair_of_options),
        cmocka_unit_test(many_options_at_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
