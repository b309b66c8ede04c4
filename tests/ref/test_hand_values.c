/* Small inputs whose results can be computed by hand, on every kernel of this machine: rules that a random
 * comparison with the reference would let pass if the reference itself were wrong. Numbers are from
 * double-precision evaluations of the formulas. Leaves out shapes, strides and dtypes (tests/core). */
#define _POSIX_C_SOURCE 200809L
#include "kernel_run.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

enum { kMaxTokens = 5, kMaxVocab = 200 };

#define INF ((float)INFINITY)
#define LN2 0.69314718055994531

static const char *kernel_name;

/* x is the identity and w the transpose of z, so that the logits are exactly z and grad_w[v,i] is dz[i,v] /
 * T. A bias is given only where a test sets one (that is how -inf gets in). */
struct hand {
    ll_loss loss;
    int64_t n_tokens, v_total;
    float z[kMaxTokens][kMaxVocab], bias[kMaxVocab];
    bool with_bias;
    int64_t target[kMaxTokens];
    const float *class_weight, *token_weight, *up_loss, *up_nll, *up_lse, *up_entropy;
    const double *divisor;
    /* results */
    float loss_out[kMaxTokens], nll[kMaxTokens], lse[kMaxTokens], lse_lo[kMaxTokens], entropy[kMaxTokens];
    float z_loss[kMaxTokens], grad_x[kMaxTokens][kMaxTokens], grad_w[kMaxVocab][kMaxTokens],
        grad_bias[kMaxVocab];
    int64_t argmax[kMaxTokens];
    ll_sums sums;
};

static struct hand hand_new(int64_t n_tokens, int64_t v_total) {
    struct hand hand = {.loss = LL_LOSS_INIT, .n_tokens = n_tokens, .v_total = v_total};
    return hand;
}

static void hand_run(struct hand *hand) {
    static const float one = 1.0f;
    float x[kMaxTokens][kMaxTokens] = {{0}}, w[kMaxVocab][kMaxTokens] = {{0}};
    int64_t n = hand->n_tokens, V = hand->v_total;
    for (int64_t i = 0; i < n; ++i) {
        x[i][i] = 1.0f;
        for (int64_t v = 0; v < V; ++v) w[v][i] = hand->z[i][v];
    }
    ll_plan_desc desc = LL_PLAN_DESC_INIT;
    desc.n_tokens_max = n;
    desc.n_hidden = n;
    desc.v_local = desc.v_total = V;
    desc.x_dtype = desc.w_dtype = LL_DTYPE_F32;
    desc.bias_dtype = hand->with_bias ? LL_DTYPE_F32 : LL_DTYPE_NONE;
    desc.loss = &hand->loss;
    ll_linear_ce_args args = LL_LINEAR_CE_ARGS_INIT;
    args.x = ll_view_matrix(x, LL_DTYPE_F32, n, n, kMaxTokens);
    args.w = ll_view_matrix(w, LL_DTYPE_F32, V, n, kMaxTokens);
    args.target = ll_view_vector(hand->target, LL_DTYPE_I64, n, 0);
    args.class_weight = hand->class_weight;
    args.token_weight = hand->token_weight;
    args.divisor = hand->divisor;
    args.loss = hand->loss_out;
    args.nll = hand->nll;
    args.lse = hand->lse;
    args.lse_lo = hand->lse_lo;
    args.entropy = hand->entropy;
    args.z_loss = hand->z_loss;
    args.argmax = hand->argmax;
    args.sums = &hand->sums;
    bool other_upstream = hand->up_nll || hand->up_lse || hand->up_entropy;
    args.up_loss = hand->up_loss || other_upstream ? hand->up_loss : &one;
    args.up_nll = hand->up_nll;
    args.up_lse = hand->up_lse;
    args.up_entropy = hand->up_entropy;
    args.grad_x = ll_view_matrix(hand->grad_x, LL_DTYPE_F32, n, n, kMaxTokens);
    args.grad_w = ll_view_matrix(hand->grad_w, LL_DTYPE_F32, V, n, kMaxTokens);
    if (hand->with_bias) {
        args.bias = ll_view_vector(hand->bias, LL_DTYPE_F32, V, 0);
        args.grad_bias = ll_view_vector(hand->grad_bias, LL_DTYPE_F32, V, 0);
    }
    ll_plan *plan = NULL;
    setenv("LL_KERNEL", kernel_name, 1);
    ll_status status = ll_plan_create(&desc, &plan);
    unsetenv("LL_KERNEL");
    if (status == LL_STATUS_OK) status = pass_run(plan, LL_PASS_FORWARD_BACKWARD, args);
    ll_plan_destroy(plan);
    if (status != LL_STATUS_OK) fail_msg("%s", ll_last_error());
}

/* Within 2e-6 of want, relative to it: some ulps of f32. */
static void near(double got, double want) {
    if (fabs(got - want) > 2e-6 * fabs(want)) fail_msg("got %.9g want %.9g", got, want);
}

static void mean_divides_by_valid_tokens(void **state) { /* B34 */
    (void)state;
    struct hand h = hand_new(4, 2);
    h.target[2] = h.target[3] = -100;
    hand_run(&h);
    near(h.loss_out[0], LN2);
    near(h.grad_w[0][0], -0.25);
    near(h.grad_w[1][1], 0.25);
    assert_true(h.grad_w[0][2] == 0.0f && h.grad_x[3][3] == 0.0f && h.argmax[3] == -1);
    assert_true(h.sums.n_valid == 2 && h.sums.n_ignored == 2 && h.sums.weight == 2.0);
}

static void divisor_of_the_caller(void **state) { /* B35 */
    (void)state;
    double divisor = 8.0;
    struct hand h = hand_new(2, 2);
    h.divisor = &divisor;
    hand_run(&h);
    near(h.loss_out[0], LN2 / 4);
    near(h.grad_w[0][0], -0.5 / 8);
    near(h.sums.loss, 2 * LN2);
}

static void smoothing_skips_ignored_rows(void **state) { /* B38 */
    (void)state;
    struct hand h = hand_new(2, 2);
    h.loss.label_smoothing = 0.2f;
    h.loss.reduction = LL_REDUCTION_SUM;
    h.z[1][0] = 10.0f;
    h.target[1] = -100;
    hand_run(&h);
    near(h.loss_out[0], LN2);
}

static void class_weights_scale_the_smoothed_part(void **state) { /* B40 */
    (void)state;
    const float weights[] = {0.1f, 0.9f};
    struct hand h = hand_new(1, 2);
    h.loss.label_smoothing = 0.1f;
    h.class_weight = weights;
    h.z[0][1] = 1.0f;
    hand_run(&h);
    near(h.loss_out[0], 1.388566);
}

static void both_smoothing_rules(void **state) { /* B41, B43 */
    (void)state;
    struct hand h = hand_new(1, 8);
    h.loss.label_smoothing = 0.1f;
    h.z[0][0] = 2.0f;
    hand_run(&h);
    near(h.loss_out[0], 0.841468);
    h.loss.smoothing_rule = LL_SMOOTHING_OTHERS;
    hand_run(&h);
    near(h.loss_out[0], 0.866468);
}

static void smoothing_of_large_gaps(void **state) { /* B42 */
    (void)state;
    struct hand h = hand_new(1, 4);
    h.loss.label_smoothing = 0.1f;
    h.z[0][1] = h.z[0][2] = h.z[0][3] = -200.0f;
    hand_run(&h);
    near(h.loss_out[0], 15.0);
    near(h.grad_w[1][0], -0.025);
}

static void z_loss_only_when_asked(void **state) { /* B44 */
    (void)state;
    struct hand h = hand_new(1, 4);
    hand_run(&h);
    near(h.loss_out[0], 1.386294361);
    assert_true(h.z_loss[0] == 0.0f);
    h.loss.z_loss = 1e-4f;
    hand_run(&h);
    near(h.loss_out[0], 1.386294361 + 1e-4 * 1.386294361 * 1.386294361);
    near(h.grad_w[1][0], 0.25 + 2e-4 * 1.386294361 * 0.25);
}

static void softcap_is_c_tanh_of_z_over_c(void **state) { /* B45 */
    (void)state;
    struct hand h = hand_new(1, 2);
    h.loss.softcap = 30.0f;
    h.z[0][0] = 124.0f;
    h.target[0] = 1;
    hand_run(&h);
    near(h.nll[0], 29.984588);
    if (fabs((double)h.grad_w[0][0] - 0.00102723) > 1e-6) fail_msg("dz_0 %.9g", (double)h.grad_w[0][0]);
}

static void temperature_scales_logits_and_gradient(void **state) { /* B47, B48 */
    (void)state;
    struct hand h = hand_new(1, 2);
    h.loss.temperature = 0.5f;
    h.z[0][0] = 2.0f;
    h.target[0] = 1;
    hand_run(&h);
    near(h.nll[0], 4.018150);
    near(h.grad_w[1][0], -2.0 / (1.0 + exp(-4.0)));
    h.loss.temperature = 1e-4f;
    h.z[0][0] = 20.0f;
    h.z[0][1] = 10.0f;
    hand_run(&h);
    near(h.nll[0], 100000.0);
    assert_true(h.entropy[0] == 0.0f);
}

static void bias_alone(void **state) { /* B49 */
    (void)state;
    struct hand h = hand_new(1, 2);
    h.with_bias = true;
    h.bias[0] = 1.0986122887f;
    hand_run(&h);
    near(h.nll[0], 0.287682072);
    near(h.grad_bias[0], -0.25);
    near(h.grad_bias[1], 0.25);
}

static void large_common_offset(void **state) { /* B50 */
    (void)state;
    const float offsets[] = {1e4f, 1e8f, -1e8f};
    struct hand h = hand_new(1, 2);
    for (int32_t o = 0; o < 3; ++o) {
        h.z[0][0] = h.z[0][1] = offsets[o];
        hand_run(&h);
        near(h.nll[0], LN2);
        near(h.entropy[0], LN2);
        near(h.grad_w[1][0], 0.5);
    }
    h.z[0][0] = 10002.0f;
    h.z[0][1] = 9999.0f;
    hand_run(&h);
    near(h.nll[0], 0.04858735157);
}

static void
confident_token(void **state) { /* B51, B52: never positive, never cancelled; 0 below the grid is allowed */
    (void)state;
    struct hand h = hand_new(1, 2);
    h.z[0][0] = 7.0f;
    hand_run(&h);
    if (fabs((double)h.grad_w[0][0] / -0.000911051 - 1.0) > 1e-4)
        fail_msg("dz_y %.9g", (double)h.grad_w[0][0]);
    h.z[0][0] = 80.0f;
    hand_run(&h);
    assert_true(h.nll[0] >= 0.0f && h.nll[0] < 1e-30f && h.grad_w[0][0] <= 0.0f);
}

static void vocabulary_of_one(void **state) { /* B18 */
    (void)state;
    struct hand h = hand_new(2, 1);
    h.z[0][0] = -20.0f;
    h.z[1][0] = 3.25f;
    hand_run(&h);
    assert_true(h.loss_out[0] == 0.0f && h.nll[0] == 0.0f && h.nll[1] == 0.0f && h.argmax[1] == 0);
    assert_true(h.grad_w[0][0] == 0.0f && h.grad_w[0][1] == 0.0f && h.grad_x[1][1] == 0.0f);
    near(h.lse[0], -20.0);
    near(h.lse[1], 3.25);
    assert_true(h.entropy[1] >= 0.0f && h.entropy[1] < 1e-7f); /* 0 up to the grid of the integer softmax */
}

static void tiles_of_minus_infinity(void **state) { /* B19, first and last column finite */
    (void)state;
    for (int64_t finite = 0; finite < 200; finite += 199) {
        struct hand h = hand_new(1, 200);
        h.with_bias = true;
        for (int64_t v = 0; v < 200; ++v) h.bias[v] = v == finite ? 0.0f : -INF;
        h.target[0] = finite;
        hand_run(&h);
        assert_true(h.loss_out[0] == 0.0f && h.entropy[0] == 0.0f && h.argmax[0] == finite);
        for (int64_t v = 0; v < 200; ++v) assert_true(h.grad_w[v][0] == 0.0f);
    }
}

static void masked_columns_and_entropy(void **state) { /* B82 */
    (void)state;
    const float up[] = {1.0f};
    struct hand h = hand_new(1, 3);
    h.with_bias = true;
    h.bias[1] = 1.0f;
    h.bias[2] = -INF;
    h.up_entropy = up;
    hand_run(&h);
    near(h.entropy[0], 0.5822029);
    if (fabs((double)h.grad_w[0][0] - 0.1966119) > 1e-6) fail_msg("dH_0 %.9g", (double)h.grad_w[0][0]);
    assert_true(h.grad_w[2][0] == 0.0f && h.grad_bias[2] == 0.0f);
}

static void target_at_minus_infinity(void **state) { /* B84 */
    (void)state;
    const float zero[] = {0.0f}, one[] = {1.0f};
    struct hand h = hand_new(1, 4);
    h.with_bias = true;
    h.bias[2] = -INF;
    h.target[0] = 2;
    h.up_nll = one;
    hand_run(&h);
    assert_true(h.nll[0] == INF);
    near(h.grad_w[2][0], -1.0);
    near(h.grad_w[0][0], 1.0 / 3.0);
    h.up_nll = zero;
    hand_run(&h);
    for (int64_t v = 0; v < 4; ++v) assert_true(h.grad_w[v][0] == 0.0f);
}

static void bad_rows_stay_alone(void **state) { /* B59 and the rules of ll_linear_ce_forward */
    (void)state;
    struct hand h = hand_new(5, 3);
    h.loss.reduction = LL_REDUCTION_NONE;
    h.with_bias = true;
    h.up_loss = (const float[]){1.0f, 1.0f, 1.0f, 1.0f, 1.0f};
    h.bias[1] = -INF;
    hand_run(&h); /* w finite: 0 * NaN would spread a NaN of w over all rows, here and in the formula */
    for (int64_t i = 0; i < 5; ++i) near(h.nll[i], LN2);
    h.bias[0] = h.bias[2] = -INF;
    hand_run(&h);
    for (int64_t i = 0; i < 5; ++i) {
        assert_true(isnan(h.nll[i]) && isnan(h.lse[i]) && isnan(h.entropy[i]) && isnan(h.loss_out[i]));
        assert_true(h.argmax[i] == -1 && isnan(h.grad_w[1][i]));
    }
    h.bias[2] = INF;
    hand_run(&h);
    assert_true(isnan(h.nll[4]) && isnan(h.lse_lo[4]) && h.argmax[4] == -1);
}

static void all_ignored_is_zero(void **state) { /* B27, B28, B101 */
    (void)state;
    struct hand h = hand_new(3, 4);
    for (int64_t i = 0; i < 3; ++i) {
        h.target[i] = -100;
        h.z[i][0] = (float)NAN;
    }
    memset(h.grad_w, 0xff, sizeof h.grad_w);
    memset(h.grad_x, 0xff, sizeof h.grad_x);
    memset(h.loss_out, 0xff, sizeof h.loss_out);
    h.z[0][0] = 0.0f;
    hand_run(&h);
    assert_true(h.loss_out[0] == 0.0f && h.sums.loss == 0.0 && h.sums.n_ignored == 3);
    for (int64_t i = 0; i < 3; ++i) {
        for (int64_t v = 0; v < 4; ++v) assert_true(h.grad_w[v][i] == 0.0f);
        for (int64_t k = 0; k < 3; ++k) assert_true(h.grad_x[i][k] == 0.0f);
    }
}

static void ignore_index_inside_the_vocabulary(void **state) { /* B33, B102 */
    (void)state;
    struct hand h = hand_new(4, 5);
    h.loss.ignore_index = 1;
    h.target[0] = 1;
    h.target[2] = 2;
    h.target[3] = 3;
    hand_run(&h);
    near(h.loss_out[0], 1.609437912);
    near(h.grad_w[0][1], -0.8 / 3);
    near(h.grad_w[1][1], 0.2 / 3); /* the class stays in the softmax */
    for (int64_t v = 0; v < 5; ++v) assert_true(h.grad_w[v][0] == 0.0f);
}

static void upstream_of_each_token(void **state) { /* B61, B67 */
    (void)state;
    const float up[] = {0.0f, -3.0f};
    const double want[] = {2.903824, -0.261433, -0.710648, -1.931743};
    struct hand h = hand_new(2, 4);
    for (int64_t v = 0; v < 4; ++v) h.z[0][v] = h.z[1][v] = (float)(v + 1);
    h.up_nll = up;
    hand_run(&h);
    near(h.nll[1], 3.440190);
    for (int64_t v = 0; v < 4; ++v) {
        assert_true(h.grad_w[v][0] == 0.0f);
        near(h.grad_w[v][1], want[v]);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(mean_divides_by_valid_tokens),
        cmocka_unit_test(divisor_of_the_caller),
        cmocka_unit_test(smoothing_skips_ignored_rows),
        cmocka_unit_test(class_weights_scale_the_smoothed_part),
        cmocka_unit_test(both_smoothing_rules),
        cmocka_unit_test(smoothing_of_large_gaps),
        cmocka_unit_test(z_loss_only_when_asked),
        cmocka_unit_test(softcap_is_c_tanh_of_z_over_c),
        cmocka_unit_test(temperature_scales_logits_and_gradient),
        cmocka_unit_test(bias_alone),
        cmocka_unit_test(large_common_offset),
        cmocka_unit_test(confident_token),
        cmocka_unit_test(vocabulary_of_one),
        cmocka_unit_test(tiles_of_minus_infinity),
        cmocka_unit_test(masked_columns_and_entropy),
        cmocka_unit_test(target_at_minus_infinity),
        cmocka_unit_test(bad_rows_stay_alone),
        cmocka_unit_test(all_ignored_is_zero),
        cmocka_unit_test(ignore_index_inside_the_vocabulary),
        cmocka_unit_test(upstream_of_each_token),
    };
    struct kernel_list list = kernels_here();
    int failed = 0;
    for (int32_t k = 0; k < list.count; ++k) {
        kernel_name = list.kernels[k].name;
        failed += cmocka_run_group_tests_name(kernel_name, tests, NULL, NULL);
    }
    return failed;
}
