/* Reported faults of section 4: normalisation, smoothing, weights, z-loss, softcap, scale. */
#include "harness.h"
#include "oracle.h"

/* Four tokens at once, or one and three with the caller's divisor: the same loss and the same grad_w. */
static void b35_micro_batches(void **state) {
    (void)state;
    const double z[8] = {0, log(exp(4) - 1), 200, 0, 200, 0, 200, 0}; /* losses 4, 0, 0, 0 */
    const double four = 4;
    rig *all = rig_exact(4, 2, LL_DTYPE_F32, z), *parts = rig_exact(4, 2, LL_DTYPE_F32, z);
    all->options.reduction = parts->options.reduction = LL_REDUCTION_MEAN;
    rig_run(all);
    NEAR(all->args.loss[0], 1);

    rig_plan(parts);
    ll_linear_ce_args a = parts->args;
    a.divisor = &four;
    a.x.rows = a.grad_x.rows = a.target.rows = 1;
    OK(ll_linear_ce_forward_backward(parts->plan, &a, NULL));
    double loss = a.loss[0];
    NEAR(loss, 1);
    a.x = ll_view_matrix((float *)parts->args.x.data + 8, LL_DTYPE_F32, 3, 8, 0);
    a.grad_x = ll_view_matrix((float *)parts->args.grad_x.data + 8, LL_DTYPE_F32, 3, 8, 0);
    a.target = ll_view_vector(parts->y + 1, LL_DTYPE_I64, 3, 0);
    a.accumulate = LL_ACCUMULATE_W;
    OK(ll_linear_ce_forward_backward(parts->plan, &a, NULL));
    NEAR(loss + a.loss[0], 1);
    for (int e = 0; e < 16; e++)
        NEAR_TO(rig_get(&parts->args.grad_w, e / 8, e % 8), rig_get(&all->args.grad_w, e / 8, e % 8), 1e-6,
                1e-12);
    rig_close(all);
    rig_close(parts);
}

/* A mean and its gradient in one call, in seven, and by finite differences of the exact sum. */
static void b36_chunked_mean(void **state) {
    (void)state;
    const int64_t n = 1000, d = 3, v = 70;
    const double thousand = 1000;
    rig *r = rig_open(n, d, v, LL_DTYPE_F32);
    r->options.reduction = LL_REDUCTION_MEAN;
    rig_random(r, 36, 1, 1);
    rig_run(r);
    oracle *o = oracle_of(r);
    oracle_check(o, r, 2e-6);
    oracle_free(o);
    double mean = r->args.loss[0], parts = 0;
    snapshot *whole = snapshot_take(r);

    float *gx = r->args.grad_x.data, *x = r->args.x.data, *gw = r->args.grad_w.data;
    memset(gw, 0, sizeof *gw * (size_t)(v * d));
    for (int64_t begin = 0, i = 0; i < 7; i++) {
        int64_t rows = i < 6 ? 143 : n - begin;
        ll_linear_ce_args a = r->args;
        float loss;
        a.loss = &loss;
        a.nll += begin;
        a.lse += begin;
        a.lse_lo += begin;
        a.entropy += begin;
        a.z_loss += begin;
        a.argmax += begin;
        a.divisor = &thousand;
        a.x = ll_view_matrix(x + begin * d, LL_DTYPE_F32, rows, d, 0);
        a.grad_x = ll_view_matrix(gx + begin * d, LL_DTYPE_F32, rows, d, 0);
        a.target = ll_view_vector(r->y + begin, LL_DTYPE_I64, rows, 0);
        a.accumulate = LL_ACCUMULATE_W;
        OK(ll_linear_ce_forward_backward(r->plan, &a, NULL));
        parts += loss;
        begin += rows;
    }
    NEAR(parts, mean);
    float *want_w = rig_alloc(r, sizeof *gw * (size_t)(v * d), 0);
    memcpy(want_w, gw, sizeof *gw * (size_t)(v * d));
    rig_forward_backward(r);
    snapshot_equal(whole, r);
    for (int64_t e = 0; e < v * d; e++) NEAR_TO(want_w[e], gw[e], 1e-5, 1e-7);

    for (int64_t e = 0; e < 5; e++) { /* central differences in w: 1/64 keeps the third-order term at 1e-5 */
        float *w = (float *)r->args.w.data + 37 * e, keep = *w;
        double grad = gw[37 * e], step = 1.0 / 64, up, down;
        *w = keep + (float)step;
        rig_forward(r);
        up = r->sums.loss / thousand;
        *w = keep - (float)step;
        rig_forward(r);
        down = r->sums.loss / thousand;
        *w = keep;
        NEAR_TO((up - down) / (2 * step), grad, 1e-3, 2e-5);
    }
    snapshot_free(whole);
    rig_close(r);
}

static void b37_class_weighted_shards(void **state) {
    (void)state;
    const float weights[2] = {1, 3};
    const double first[2] = {0, log(exp(2) - 1)}, second[2] = {0, 200};
    rig *a = rig_exact(1, 2, LL_DTYPE_F32, first), *b = rig_exact(1, 2, LL_DTYPE_F32, second);
    a->args.class_weight = b->args.class_weight = weights;
    a->options.reduction = b->options.reduction = LL_REDUCTION_MEAN;
    b->y[0] = 1;
    rig_run(a);
    rig_run(b);
    NEAR(a->args.loss[0], 2);
    assert_true(b->args.loss[0] == 0);
    NEAR(a->sums.loss, 2);
    NEAR(a->sums.weight, 1);
    NEAR(b->sums.weight, 3);
    NEAR((a->sums.loss + b->sums.loss) / (a->sums.weight + b->sums.weight), 0.5);
    rig_close(a);
    rig_close(b);
}

static void b40_class_weights_scale_smoothing(void **state) {
    (void)state;
    const float weights[2] = {0.1f, 0.9f};
    const double z[2] = {0, 1};
    rig *r = rig_exact(1, 2, LL_DTYPE_F32, z);
    r->args.class_weight = weights;
    r->options.label_smoothing = 0.1f;
    r->options.reduction = LL_REDUCTION_MEAN;
    rig_run(r);
    NEAR(r->args.loss[0], 1.388566);
    oracle *o = oracle_of(r);
    oracle_check(o, r, 1e-6);
    oracle_free(o);
    rig_close(r);
}

/* B41 on one rank, B43: both rules. */
static void b43_smoothing_rules(void **state) {
    (void)state;
    const double z[8] = {2}, want[2] = {0.841468, 0.866468};
    for (int rule = LL_SMOOTHING_ALL; rule <= LL_SMOOTHING_OTHERS; rule++) {
        rig *r = rig_exact(1, 8, LL_DTYPE_F32, z);
        r->options.label_smoothing = 0.1f;
        r->options.smoothing_rule = rule;
        rig_run(r);
        NEAR(r->args.loss[0], want[rule]);
        double p0 = exp(2) / (exp(2) + 7), p1 = 1 / (exp(2) + 7);
        double spread = rule == LL_SMOOTHING_ALL ? 0.1f / 8 : 0.1f / 7.0;
        NEAR_TO(rig_dz(r, 0, 0), p0 - (1 - (double)0.1f) - (rule == LL_SMOOTHING_ALL ? spread : 0), 1e-6,
                1e-7);
        NEAR_TO(rig_dz(r, 0, 1), p1 - spread, 1e-6, 1e-7);
        rig_close(r);
    }
}

static void b42_smoothing_with_large_gaps(void **state) {
    (void)state;
    const double z[4] = {0, -200, -200, -200};
    const double want[2] = {15, 20};
    for (int rule = LL_SMOOTHING_ALL; rule <= LL_SMOOTHING_OTHERS; rule++) {
        rig *r = rig_exact(1, 4, LL_DTYPE_F32, z);
        r->options.label_smoothing = 0.1f;
        r->options.smoothing_rule = rule;
        rig_run(r);
        NEAR(r->args.loss[0], want[rule]);
        double share = rule == LL_SMOOTHING_ALL ? 0.025 : 0.1 / 3;
        NEAR(rig_dz(r, 0, 0), 3 * share);
        NEAR(rig_dz(r, 0, 3), -share);
        rig_close(r);
    }
}

static void b44_z_loss(void **state) {
    (void)state;
    const double z[8] = {0};
    for (int on = 0; on < 2; on++) {
        for (int reported = 0; reported < 2; reported++) {
            rig *r = rig_exact(2, 4, LL_DTYPE_F32, z);
            double c = on ? (double)1e-4f : 0, lse = log(4);
            r->options.z_loss = on ? 1e-4f : 0;
            r->y[1] = -100;
            if (!reported) r->args.z_loss = NULL;
            rig_run(r);
            NEAR(r->args.loss[0], lse + c * lse * lse);
            NEAR(r->sums.z_loss, c * lse * lse);
            if (reported) NEAR(r->args.z_loss[0], c * lse * lse);
            if (reported) assert_true(r->args.z_loss[1] == 0);
            for (int j = 0; j < 4; j++) {
                NEAR(rig_dz(r, 0, j), 0.25 - (j == 0) + 2 * c * lse * 0.25);
                assert_true(rig_dz(r, 1, j) == 0);
            }
            rig_close(r);
        }
    }
}

static void b45_softcap(void **state) {
    (void)state;
    const double z[2] = {124, 0};
    rig *r = rig_exact(1, 2, LL_DTYPE_F32, z);
    r->options.softcap = 30;
    r->y[0] = 1;
    rig_run(r);
    NEAR(r->args.nll[0], 29.984588);
    NEAR_TO(rig_dz(r, 0, 0), 0.00102723, 2e-5, 0); /* 1 - tanh^2 from an f32 tanh keeps 4 digits here */
    NEAR(rig_dz(r, 0, 1), -1);
    rig_close(r);
}

/* ---- B46: every option alone, against the formulas and against its absence ---- */

typedef void set_option(rig *r);
static void opt_temperature(rig *r) {
    r->options.temperature = 0.7f;
}
static void opt_softcap(rig *r) {
    r->options.softcap = 1.5f;
}
static void opt_smoothing(rig *r) {
    r->options.label_smoothing = 0.2f;
}
static void opt_others(rig *r) {
    r->options.label_smoothing = 0.2f;
    r->options.smoothing_rule = LL_SMOOTHING_OTHERS;
}
static void opt_z_loss(rig *r) {
    r->options.z_loss = 0.01f;
}
static void opt_token_scaling(rig *r) {
    r->options.token_scaling = 1;
}
static void opt_ignore(rig *r) {
    r->options.ignore_index = r->y[1];
}
static void opt_mean(rig *r) {
    r->options.reduction = LL_REDUCTION_MEAN;
}
static void opt_divisor(rig *r) {
    static const double divisor = 3.5;
    r->options.reduction = LL_REDUCTION_MEAN;
    r->args.divisor = &divisor;
}
static void opt_token_weight(rig *r) {
    float *weights = rig_tokens(r, 1);
    for (int64_t t = 0; t < r->n; t++) weights[t] = 0.25f * (float)(t + 1);
    r->args.token_weight = weights;
}
static void opt_class_weight(rig *r) {
    float *weights = rig_alloc(r, sizeof *weights * (size_t)r->v, 0);
    for (int64_t j = 0; j < r->v; j++) weights[j] = 0.5f + 0.125f * (float)(j % 7);
    r->args.class_weight = weights;
}
static void opt_bias(rig *r) {
    float *bias = rig_bias(r);
    for (int64_t j = 0; j < r->v; j++) bias[j] = 0.2f * (float)(j % 5);
}

static const struct {
    const char *name;
    set_option *set;
} kOptions[] = {
    {"temperature", opt_temperature},
    {"softcap", opt_softcap},
    {"smoothing", opt_smoothing},
    {"smoothing over others", opt_others},
    {"z_loss", opt_z_loss},
    {"token_scaling", opt_token_scaling},
    {"ignore_index", opt_ignore},
    {"mean", opt_mean},
    {"divisor", opt_divisor},
    {"token_weight", opt_token_weight},
    {"class_weight", opt_class_weight},
    {"bias", opt_bias},
};

static rig *option_rig(void) {
    rig *r = rig_open(6, 5, 75, LL_DTYPE_F32);
    rig_random(r, 46, 1, 1);
    r->up_loss[0] = 1.75f;
    return r;
}

static void b46_each_option_alone(void **state) {
    (void)state;
    rig *plain = option_rig();
    rig_run(plain);
    for (size_t i = 0; i < COUNT(kOptions); i++) {
        rig *r = option_rig();
        kOptions[i].set(r);
        rig_run(r);
        if (r->args.loss[0] == plain->args.loss[0]) fail_msg("%s changes nothing", kOptions[i].name);
        oracle *o = oracle_of(r);
        print_message("%s: loss %.7g\n", kOptions[i].name, (double)r->args.loss[0]);
        oracle_check(o, r, 2e-6);
        oracle_free(o);
        rig_close(r);
    }
    rig_close(plain);
}

static void b46_pairs_of_options(void **state) {
    (void)state;
    for (size_t i = 0; i < COUNT(kOptions); i++) {
        for (size_t j = 0; j < i; j++) {
            rig *r = option_rig();
            kOptions[i].set(r);
            kOptions[j].set(r);
            rig_run(r);
            oracle *o = oracle_of(r);
            oracle_check(o, r, 2e-6);
            oracle_free(o);
            rig_close(r);
        }
    }
}

static void b46_all_options_without_reduction(void **state) {
    (void)state;
    rig *r = option_rig();
    for (size_t i = 0; i < COUNT(kOptions); i++)
        if (kOptions[i].set != opt_mean && kOptions[i].set != opt_divisor) kOptions[i].set(r);
    r->options.reduction = LL_REDUCTION_NONE;
    for (int64_t t = 0; t < r->n; t++) r->up_loss[t] = (float)(t - 2);
    rig_run(r);
    oracle *o = oracle_of(r);
    oracle_check(o, r, 2e-6);
    oracle_free(o);
    rig_close(r);
}

static void b47_temperature_on_both_sides(void **state) {
    (void)state;
    const double z[2] = {2, 0};
    rig *r = rig_exact(1, 2, LL_DTYPE_F32, z);
    r->options.temperature = 0.5f;
    r->y[0] = 1;
    rig_run(r);
    NEAR(r->args.nll[0], 4.018150);
    double p0 = 1 / (1 + exp(-4));
    NEAR(rig_dz(r, 0, 0), 2 * p0);
    NEAR(rig_dz(r, 0, 1), -2 * p0);
    rig_close(r);
}

static void b48_tiny_temperature(void **state) {
    (void)state;
    const double z[4] = {20, 10, 20, 10};
    const ll_dtype dtypes[] = {LL_DTYPE_F16, LL_DTYPE_BF16, LL_DTYPE_F32};
    for (size_t i = 0; i < COUNT(dtypes); i++) {
        rig *r = rig_exact(2, 2, dtypes[i], z);
        r->options.temperature = 1e-4f;
        r->y[1] = 1;
        rig_run(r);
        assert_true(r->args.nll[0] == 0 && r->args.entropy[0] == 0 && r->args.entropy[1] == 0);
        NEAR(r->args.nll[1], 100000);
        assert_true(rig_dz(r, 0, 0) == 0 && rig_dz(r, 0, 1) == 0);
        NEAR_TO(rig_dz(r, 1, 0), 1e4, 1e-6 + dz_rounding(dtypes[i]), 0);
        NEAR_TO(rig_dz(r, 1, 1), -1e4, 1e-6 + dz_rounding(dtypes[i]), 0);
        rig_close(r);
    }
    const float bad[] = {0, -1, NAN, 1e-45f, INFINITY, -0.0f};
    for (size_t i = 0; i < COUNT(bad); i++) {
        rig *r = rig_exact(2, 2, LL_DTYPE_F32, z);
        r->options.temperature = bad[i];
        assert_int_equal(ll_plan_create(&r->desc, &r->plan), LL_STATUS_INVALID_ARG);
        assert_null(r->plan);
        assert_non_null(strstr(ll_last_error(), "temperature"));
        rig_close(r);
    }
}

static void b49_bias_alone(void **state) {
    (void)state;
    for (int y = 0; y < 2; y++) {
        rig *r = rig_open(1, 3, 2, LL_DTYPE_F32);
        float *bias = rig_bias(r);
        bias[0] = (float)log(3);
        r->y[0] = y;
        rig_run(r);
        NEAR(r->args.nll[0], y ? 1.386294361 : 0.287682072);
        NEAR(rig_get(&r->args.grad_bias, 0, 0), y ? 0.75 : -0.25);
        NEAR(rig_get(&r->args.grad_bias, 1, 0), y ? -0.75 : 0.25);
        rig_close(r);
    }
}

int main(int argc, char **argv) {
    const fault_test tests[] = {
        FAULT(b35_micro_batches),
        FAULT(b36_chunked_mean),
        FAULT(b37_class_weighted_shards),
        FAULT(b40_class_weights_scale_smoothing),
        FAULT(b43_smoothing_rules),
        FAULT(b42_smoothing_with_large_gaps),
        FAULT(b44_z_loss),
        FAULT(b45_softcap),
        FAULT(b46_each_option_alone),
        FAULT(b46_pairs_of_options),
        FAULT(b46_all_options_without_reduction),
        FAULT(b47_temperature_on_both_sides),
        FAULT(b48_tiny_temperature),
        FAULT(b49_bias_alone),
    };
    return faults_main("faults: options", tests, COUNT(tests), argc, argv);
}
