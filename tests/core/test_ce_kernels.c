/* Every kernel of ce of this machine on every problem it accepts, all three passes, against the reference
 * within the bounds below. Leaves out equality of bits (test_ce_bits.c) and ranks (test_ce_ranks.c).
 *
 * Bounds, u = 2^-24, E[i] the error of a logit of row i: the logits are given, so only softcap and
 * temperature round, E = 16 u cap / T + 2 u max |z|, or 0 where neither is set
 *
 *   lse          5e-7 + 2 u |lse| + E                  nll       5e-7 + 2 u |nll| + 2 E
 *   entropy      1e-6 + 2 u H + 4 E (1 + ln V)         log p     5e-7 + 2 u |log p| + 2 E
 *   grad[i,v]    (8 u + 4 u |lse - z| + 4 E (1 + ln V)) (|grad| + A p / T) + smoothing's cancellation,
 *                A[i] the sum of the token's upstreams; then one rounding to the output's dtype
 *   ids' ranks, the top and argmax are equal; argmax may be another column of the reference's largest logit
 *                where softcap and temperature round neighbours together */
#define _POSIX_C_SOURCE 200809L
#include "ce_run.h"
#include "core/ce_problem_table.h"

#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#define REF "ce_ref"

static const double kU = 0x1p-24;

struct check {
    const struct problem *problem;
    const struct ce_operands *operands;
    const struct ce_results *want, *got;
    const char *kernel, *pass;
    int64_t failed, checked;
};

static void near(struct check *c, const char *name, int64_t r, int64_t v, double got, double want,
                 double bound) {
    ++c->checked;
    if ((isnan(got) && isnan(want)) || got == want || fabs(got - want) <= bound) return;
    if (c->failed++ < 3) {
        printf("FAIL %s %s %s: %s[%lld, %lld] got %.9g want %.9g, allowed %.3g\n", c->problem->text,
               c->kernel, c->pass, name, (long long)r, (long long)v, got, want, bound);
    }
}

static double logit(const struct check *c, int64_t i, int64_t v) {
    const ll_view *logits = &c->operands->args.logits;
    const ll_loss *loss = &c->problem->loss;
    double raw = (double)lli_load(lli_row(logits, i), logits->dtype, v), cap = loss->softcap;
    if (cap > 0.0) raw = cap * tanh(raw / cap);
    return raw / (double)loss->temperature;
}

static double logit_error(const struct check *c, int64_t i) {
    const ll_loss *loss = &c->problem->loss;
    double most = 0.0;
    if (loss->softcap == 0.0f && loss->temperature == 1.0f) return 0.0;
    for (int64_t v = 0; v < c->problem->v_total; ++v) {
        const double z = fabs(logit(c, i, v));
        if (isfinite(z)) most = fmax(most, z);
    }
    return 16.0 * kU * (double)loss->softcap / (double)loss->temperature + 2.0 * kU * most;
}

static double up_value(const float *up, int64_t i) {
    return up ? fabs((double)up[i]) : 0.0;
}

static double max_weight(const struct check *c) {
    double most = 1.0;
    for (int64_t v = 0; c->operands->args.class_weight && v < c->problem->v_total; ++v)
        most = fmax(most, (double)c->operands->args.class_weight[v]);
    return most;
}

/* s[i], and the divisor of the reduced loss. */
static double scale_of(const struct check *c, int64_t i) {
    const float *weight = c->operands->args.token_weight;
    double scale = weight ? fabs((double)weight[i]) : 1.0;
    if (c->problem->loss.token_scaling && scale != 0.0) scale *= exp(-(double)c->want->nll[i]);
    return scale;
}
static double divisor_of(const struct check *c) {
    if (c->problem->loss.reduction != LL_REDUCTION_MEAN) return 1.0;
    return c->operands->args.divisor ? *c->operands->args.divisor : c->want->sums->weight;
}

static void check_row(struct check *c, int64_t i, double *loss_bound) {
    const struct problem *p = c->problem;
    const struct ce_results *w = c->want, *g = c->got;
    const double E = logit_error(c, i), log_v = 1.0 + log((double)p->v_total), zl = p->loss.z_loss;
    const double lse = w->lse[i], lse_bound = 5e-7 + 2.0 * kU * fabs(lse) + E;
    const double z_bound =
        zl * (2.0 * fabs(lse) * lse_bound + lse_bound * lse_bound) + 4.0 * kU * w->z_loss[i];
    const double scale = scale_of(c, i);
    *loss_bound = scale == 0.0 ? 0.0
                               : scale * (max_weight(c) * (1e-6 + 4.0 * E + 4.0 * kU * fabs(lse)) + z_bound) +
                                     scale * (4.0 * E + 4e-7) *
                                         (max_weight(c) * fabs((double)w->nll[i]) + zl * lse * lse);
    if (p->loss.label_smoothing > 0.0f)
        *loss_bound += scale * max_weight(c) * 1e-6 * (10.0 + fabs(lse) + p->scale * 4);
    near(c, "nll", i, 0, g->nll[i], w->nll[i], 5e-7 + 2.0 * kU * fabs((double)w->nll[i]) + 2.0 * E);
    near(c, "lse", i, 0, g->lse[i], w->lse[i], lse_bound);
    near(c, "lse + lse_lo", i, 0, (double)g->lse[i] + g->lse_lo[i], lse + w->lse_lo[i], lse_bound);
    near(c, "entropy", i, 0, g->entropy[i], w->entropy[i],
         1e-6 + 2.0 * kU * fabs((double)w->entropy[i]) + 4.0 * E * log_v);
    near(c, "z_loss", i, 0, g->z_loss[i], w->z_loss[i], z_bound);
    if (g->argmax[i] != w->argmax[i] && (g->argmax[i] < 0 || w->argmax[i] < 0)) {
        near(c, "argmax", i, 0, (double)g->argmax[i], (double)w->argmax[i], 0.0);
    } else if (g->argmax[i] >= 0) {
        near(c, "logit at argmax", i, 0, logit(c, i, g->argmax[i]), logit(c, i, w->argmax[i]), E);
    }
    for (int64_t at = i * p->n_ids; at < (i + 1) * p->n_ids; ++at) {
        near(c, "id_logp", i, at - i * p->n_ids, g->id_logp[at], w->id_logp[at],
             5e-7 + 2.0 * kU * fabs((double)w->id_logp[at]) + 2.0 * E);
        near(c, "id_rank", i, at - i * p->n_ids, (double)g->id_rank[at], (double)w->id_rank[at], 0.0);
    }
    for (int64_t at = i * p->n_top; at < (i + 1) * p->n_top; ++at) {
        near(c, "top_ids", i, at - i * p->n_top, (double)g->top_ids[at], (double)w->top_ids[at], 0.0);
        near(c, "top_logp", i, at - i * p->n_top, g->top_logp[at], w->top_logp[at],
             5e-7 + 2.0 * kU * fabs((double)w->top_logp[at]) + 2.0 * E);
    }
}

static void check_forward(struct check *c) {
    const struct problem *p = c->problem;
    const double divisor = divisor_of(c);
    double total = 0.0;
    for (int64_t i = 0; i < p->n_tokens; ++i) {
        double bound;
        check_row(c, i, &bound);
        if (p->loss.reduction == LL_REDUCTION_NONE)
            near(c, "loss", i, 0, c->got->loss[i], c->want->loss[i],
                 bound + 4e-7 * fabs((double)c->want->loss[i]));
        if (isfinite(bound)) total += bound;
    }
    total += 4e-7 * fabs(c->want->sums->loss);
    if (p->loss.reduction != LL_REDUCTION_NONE)
        near(c, "loss", 0, 0, c->got->loss[0], c->want->loss[0], divisor > 0.0 ? total / divisor : 0.0);
    near(c, "sums.loss", 0, 0, c->got->sums->loss, c->want->sums->loss, total);
    near(c, "sums.z_loss", 0, 0, c->got->sums->z_loss, c->want->sums->z_loss, total);
    near(c, "sums.weight", 0, 0, c->got->sums->weight, c->want->sums->weight, 1e-12 * c->want->sums->weight);
    near(c, "sums.n_valid", 0, 0, (double)c->got->sums->n_valid, (double)c->want->sums->n_valid, 0.0);
    near(c, "sums.n_ignored", 0, 0, (double)c->got->sums->n_ignored, (double)c->want->sums->n_ignored, 0.0);
}

static void check_gradient_row(struct check *c, int64_t i) {
    const struct problem *p = c->problem;
    const ll_ce_args *a = &c->operands->args;
    const ll_view *got = &c->got->grad_logits, *want = &c->want->grad_logits;
    const double E = logit_error(c, i), log_v = 1.0 + log((double)p->v_total), T = p->loss.temperature;
    const double lse = (double)c->want->lse[i] + c->want->lse_lo[i], divisor = divisor_of(c);
    const double unit = got->dtype == LL_DTYPE_F32 ? 0x1p-24 : got->dtype == LL_DTYPE_BF16 ? 0x1p-8 : 0x1p-11;
    const double least = got->dtype == LL_DTYPE_F16 ? 0x1p-24 : FLT_MIN;
    const int64_t row = p->loss.reduction == LL_REDUCTION_NONE ? i : 0;
    const double up_loss = divisor > 0.0 ? up_value(a->up_loss, row) * scale_of(c, i) / divisor : 0.0;
    double upstream =
        up_value(a->up_nll, i) + up_value(a->up_lse, i) + 2.0 * log_v * up_value(a->up_entropy, i);
    if (up_loss > 0.0) upstream += up_loss * (max_weight(c) + 2.0 * (double)p->loss.z_loss * fabs(lse));
    const double smoothing = up_loss * (double)p->loss.label_smoothing * max_weight(c) / (double)p->v_total;
    for (int64_t v = 0; v < got->cols; ++v) {
        const double x = lli_load(lli_row(got, i), got->dtype, v),
                     y = lli_load(lli_row(want, i), want->dtype, v);
        double bound = 0.0;
        if (v < p->v_total && isfinite(lse) && lse != 0.0) {
            const double z = logit(c, i, v), far = isfinite(z) ? fabs(lse - z) : 0.0, prob = exp(z - lse) / T;
            double relative = 8.0 * kU + 4.0 * kU * far + 4.0 * E * log_v;
            if (p->loss.softcap > 0.0f) relative += 8.0 * kU + 2.0 * E * T / (double)p->loss.softcap;
            bound = relative * (fabs(y) + upstream * prob) + 8.0 * kU * smoothing / T + unit * fabs(y) +
                    least + FLT_MIN * upstream * (1.0 + far) / T;
        } else if (v < p->v_total) {
            bound = unit * fabs(y);
        }
        near(c, "grad_logits", i, v, x, y, bound);
    }
}

static void check_gradient(struct check *c) {
    for (int64_t i = 0; i < c->problem->n_tokens; ++i) check_gradient_row(c, i);
}

static void check_intact(struct check *c) {
    if (!ce_operands_intact(c->operands) || !ce_results_intact(c->got)) {
        printf("FAIL %s %s %s: an input, a guard byte or a gap changed\n", c->problem->text, c->kernel,
               c->pass);
        ++c->failed;
    }
}

static int64_t check_kernel(const struct problem *problem, const struct ce_operands *operands,
                            const struct ce_results *want, const char *kernel) {
    struct ce_results apart, both;
    assert_true(ce_results_create(problem, operands, &apart));
    assert_true(ce_results_create(problem, operands, &both));
    struct check c = {problem, operands, want, &apart, kernel, "forward", 0, 0};
    ll_ce_args args = ce_problem_args(problem, operands, &apart, LL_PASS_FORWARD);
    assert_int_equal(ce_kernel_run(kernel, problem, LL_PASS_FORWARD, &args), LL_STATUS_OK);
    check_forward(&c);
    c.pass = "backward";
    args = ce_problem_args(problem, operands, &apart, LL_PASS_BACKWARD);
    assert_int_equal(ce_kernel_run(kernel, problem, LL_PASS_BACKWARD, &args), LL_STATUS_OK);
    check_gradient(&c);
    check_intact(&c);
    c.pass = "forward_backward";
    c.got = &both;
    args = ce_problem_args(problem, operands, &both, LL_PASS_FORWARD_BACKWARD);
    assert_int_equal(ce_kernel_run(kernel, problem, LL_PASS_FORWARD_BACKWARD, &args), LL_STATUS_OK);
    check_forward(&c);
    check_gradient(&c);
    check_intact(&c);
    if (strcmp(kernel, REF) != 0) { /* what is saved in f32 is what the one call uses */
        c.failed += ce_differences(problem, kernel, &both, &apart, (1u << kCeFields) - 1);
    }
    ce_results_destroy(&both);
    ce_results_destroy(&apart);
    return c.failed;
}

static int64_t check_problem(const char *text, const struct kernel_list *list) {
    struct problem problem, apart;
    struct ce_operands operands;
    struct ce_results want;
    const char *why = problem_parse(text, &problem);
    if (why) fail_msg("%s", why);
    assert_true(ce_operands_create(&problem, &operands));
    apart = problem;
    apart.in_place = false;            /* the expectation keeps the logits, */
    apart.grad_x_dtype = LL_DTYPE_F32; /* and has not been rounded to 16 bits */
    assert_true(ce_results_create(&apart, &operands, &want));
    ll_ce_args args = ce_problem_args(&apart, &operands, &want, LL_PASS_FORWARD_BACKWARD);
    assert_int_equal(ce_kernel_run(REF, &apart, LL_PASS_FORWARD_BACKWARD, &args), LL_STATUS_OK);
    int64_t failed = 0;
    for (int32_t k = 0; k < list->count; ++k) {
        failed += check_kernel(&problem, &operands, &want, list->kernels[k].name);
    }
    ce_results_destroy(&want);
    ce_operands_destroy(&operands);
    return failed;
}

static void every_kernel_on_every_problem(void **state) {
    (void)state;
    const struct kernel_list list = kernels_of("ce_");
    const char *only = getenv("LL_PROBLEM"); /* reruns one string */
    int64_t failed = 0;
    /* the reference and at least one other; on a GPU its own alone (tests/cuda) */
    assert_true(list.count >= (getenv("LL_TEST_BACKEND") ? 1 : 2));
    for (int32_t p = 0; p < (only ? 1 : kCeProblems); ++p) {
        failed += check_problem(only ? only : ce_problem_table[p], &list);
    }
    assert_int_equal(failed, 0);
}

/* Sizes and options at random: what a table written by hand does not think of. */
static void random_problem(uint64_t seed, char *text, size_t text_bytes) {
    static const char *const dtypes[] = {"f32", "bf16", "f16"};
    static const char *const options[] = {
        "up",  "cap5",  "t0.6",   "ls0.1", "lso0.2", "zl0.01", "cw",     "cw0",  "tw",    "ts",   "ign3",
        "sum", "none",  "pad5",   "sx2",   "sgx1",   "sy3",    "i32",    "off1", "gxf32", "tie",  "id3",
        "th3", "conf9", "scale8", "add99", "ninf9",  "nan9",   "scale0", "ids3", "top4",  "ids1", "top1"};
    uint64_t state = seed * 0x9e3779b97f4a7c15u | 1u;
    const int n = 1 + (int)(problem_random(&state) % 40), v = 4 + (int)(problem_random(&state) % 2000);
    const int count = (int)(problem_random(&state) % 7);
    int used = snprintf(text, text_bytes, "ce:%s:n%d:v%d", dtypes[problem_random(&state) % 3], n, v);
    bool own_grad = false;
    for (int o = 0; o < count; ++o) {
        const char *option = options[problem_random(&state) % (sizeof options / sizeof options[0])];
        own_grad |= strcmp(option, "gxf32") == 0;
        used += snprintf(text + used, text_bytes - (size_t)used, ":%s", option);
    }
    if (!own_grad && seed % 3 == 0) snprintf(text + used, text_bytes - (size_t)used, ":inplace");
}

static void random_sizes_and_options(void **state) {
    (void)state;
    if (getenv("LL_PROBLEM")) skip();
    const struct kernel_list list = kernels_of("ce_");
    int64_t failed = 0;
    char text[160];
    for (uint64_t seed = 1; seed <= 200; ++seed) {
        random_problem(seed, text, sizeof text);
        failed += check_problem(text, &list);
    }
    assert_int_equal(failed, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_kernel_on_every_problem),
        cmocka_unit_test(random_sizes_and_options),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
