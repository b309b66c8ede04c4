/* Reported faults of section 5 (numerics), B77 of section 8, and section 9 (quantities of RL). */
#include "harness.h"
#include "oracle.h"

static void b50_common_offset(void **state) {
    (void)state;
    const double z[5][2] = {{1e4, 1e4}, {1e8, 1e8}, {10002, 9999}, {-1e8, -1e8}, {1e30, 1e30}};
    for (size_t i = 0; i < COUNT(z); i++) {
        rig *r = rig_exact(1, 2, LL_DTYPE_F32, z[i]);
        double p1 = 1 / (1 + exp(z[i][0] - z[i][1])), h = -p1 * log(p1) - (1 - p1) * log1p(-p1);
        /* lse + lse_lo holds 48 bits: enough for the gradients at 1e8, not at 1e30 */
        int forward_only = fabs(z[i][0]) > 1e9;
        if (forward_only)
            rig_forward(r);
        else
            rig_run(r);
        NEAR(r->args.nll[0], -log1p(-p1));
        NEAR(r->args.loss[0], -log1p(-p1));
        NEAR(r->args.entropy[0], h);
        if (!forward_only) {
            NEAR(rig_dz(r, 0, 0), -p1);
            NEAR(rig_dz(r, 0, 1), p1);
        }
        rig_close(r);
    }
}

/* B51: the grid of the integer sums is 2^-30, so a log-prob below that is a documented 0. */
static void b51_confident_token(void **state) {
    (void)state;
    const double z[3][2] = {{17, 0}, {80, 0}, {12, 0}}, want[3] = {4.13994e-8, 1.80485e-35, 6.144193e-6};
    for (int i = 0; i < 3; i++) {
        rig *r = rig_exact(1, 2, LL_DTYPE_F32, z[i]);
        rig_run(r);
        assert_true(r->args.nll[0] >= 0);
        NEAR_TO(r->args.nll[0], want[i], 1e-6, 0x1p-30);
        assert_true(rig_dz(r, 0, 0) <= 0 && rig_dz(r, 0, 1) >= 0);
        NEAR_TO(rig_dz(r, 0, 0), -want[i], 1e-5, 0x1p-30);
        NEAR_TO(rig_dz(r, 0, 1), want[i], 1e-5, 0x1p-30);
        rig_close(r);
    }
}

/* B52: through grad_w, grad_bias and a bf16 grad_w. */
static void b52_true_class_gradient(void **state) {
    (void)state;
    const int64_t sizes[] = {32000, 2};
    const double z_y[] = {17.25, 7}, want[] = {-0.00103064, -0.000911051};
    for (int i = 0; i < 2; i++) {
        for (int narrow = 0; narrow < 2; narrow++) {
            double *z = calloc((size_t)sizes[i], sizeof *z);
            assert_non_null(z);
            int64_t y = sizes[i] / 3;
            z[y] = z_y[i];
            rig *r = rig_exact(1, sizes[i], LL_DTYPE_BF16, z);
            free(z);
            rig_bias(r);
            if (narrow) r->desc.grad_w_dtype = r->args.grad_w.dtype = LL_DTYPE_BF16;
            r->y[0] = y;
            rig_run(r);
            NEAR_TO(rig_dz(r, 0, y), want[i], (narrow ? 4e-3 : 1e-4) + dz_rounding(LL_DTYPE_BF16), 0);
            NEAR_TO(rig_get(&r->args.grad_bias, y, 0), want[i], 1e-4, 0);
            rig_close(r);
        }
    }
}

/* Half operands are widened, never results narrowed: the same values in f32 give the same bits. */
static void b53_half_operands(void **state) {
    (void)state;
    if (on_gpu()) skip(); /* tensor cores add up otherwise than f32 units */
    const ll_dtype dtypes[] = {LL_DTYPE_BF16, LL_DTYPE_F16};
    const int64_t n = 16, d = 8, v = 16001;
    for (size_t i = 0; i < COUNT(dtypes); i++) {
        rig *narrow = rig_open(n, d, v, dtypes[i]), *wide = rig_open(n, d, v, LL_DTYPE_F32);
        rig_random(narrow, 53, 3, 3);
        for (int64_t e = 0; e < n * d; e++)
            ((float *)wide->args.x.data)[e] = (float)rig_get(&narrow->args.x, e / d, e % d);
        for (int64_t e = 0; e < v * d; e++)
            ((float *)wide->args.w.data)[e] = (float)rig_get(&narrow->args.w, e / d, e % d);
        memcpy(wide->y, narrow->y, sizeof *wide->y * (size_t)n);
        rig_run(narrow);
        rig_run(wide);
        snapshot *s = snapshot_take(wide);
        snapshot_equal(s, narrow);
        snapshot_free(s);
        rig_close(narrow);
        rig_close(wide);
    }
}

/* B66: mixed operand types, each way round, and gradients in the input's type. */
static void b66_mixed_dtypes(void **state) {
    (void)state;
    if (on_gpu()) skip();
    const ll_dtype dtypes[] = {LL_DTYPE_F32, LL_DTYPE_BF16, LL_DTYPE_F16};
    const int64_t n = 5, d = 9, v = 133;
    for (int i = 0; i < 9; i++) {
        ll_dtype xt = dtypes[i / 3], wt = dtypes[i % 3];
        rig *r = rig_open(n, d, v, LL_DTYPE_F32);
        rig_random(r, 66, 1, 1);
        ll_view x = ll_view_matrix(rig_alloc(r, sizeof(float) * (size_t)(n * d), 0), xt, n, d, 0);
        ll_view w = ll_view_matrix(rig_alloc(r, sizeof(float) * (size_t)(v * d), 0), wt, v, d, 0);
        for (int64_t e = 0; e < n * d; e++) rig_set(&x, e / d, e % d, rig_get(&r->args.x, e / d, e % d));
        for (int64_t e = 0; e < v * d; e++) rig_set(&w, e / d, e % d, rig_get(&r->args.w, e / d, e % d));
        r->args.x = x;
        r->args.w = w;
        r->desc.x_dtype = xt;
        r->desc.w_dtype = wt;
        rig_run(r);
        oracle *o = oracle_of(r);
        oracle_check(o, r, 2e-6);
        r->desc.grad_x_dtype = r->desc.grad_w_dtype = LL_DTYPE_NONE;
        r->args.grad_x.dtype = (int32_t)xt;
        r->args.grad_w.dtype = (int32_t)wt;
        rig_plan(r);
        rig_run(r);
        oracle_check(o, r, 4e-3); /* half an ulp of bf16 */
        oracle_free(o);
        rig_close(r);
    }
}

static void b55_flat_sums(void **state) {
    (void)state;
    const int64_t sizes[] = {512, 262144};
    const double want[] = {6.238325, 12.476649};
    for (int i = 0; i < 2; i++) {
        rig *r = rig_open(2, 1, sizes[i], LL_DTYPE_BF16);
        rig_set(&r->args.x, 0, 0, 1);
        rig_run(r);
        NEAR(r->args.nll[0], want[i]);
        NEAR(r->args.nll[0], log((double)sizes[i]));
        NEAR(r->args.entropy[0], log((double)sizes[i]));
        NEAR(rig_get(&r->args.grad_w, sizes[i] - 1, 0), 1 / (double)sizes[i]);
        rig_close(r);
    }
}

static void b56_grad_w_over_many_tokens(void **state) {
    (void)state;
    const size_t budgets[] = {0, (size_t)64 << 20}; /* 256 bytes a token */
    for (int i = 0; i < 4; i++) {
        rig *r = rig_open(262144, 1, 2, LL_DTYPE_BF16);
        r->desc.workspace_budget_bytes = budgets[i % 2];
        if (i < 2) r->desc.grad_w_dtype = r->args.grad_w.dtype = LL_DTYPE_BF16;
        for (int64_t t = 0; t < r->n; t++) rig_set(&r->args.x, t, 0, 1);
        rig_run(r);
        assert_true(rig_get(&r->args.grad_w, 0, 0) == -131072);
        assert_true(rig_get(&r->args.grad_w, 1, 0) == 131072);
        NEAR(r->args.loss[0], 262144 * log(2));
        rig_close(r);
    }
}

static void b58_count_beyond_half(void **state) {
    (void)state;
    rig *r = rig_open(65536, 1, 8, LL_DTYPE_F16);
    r->options.reduction = LL_REDUCTION_MEAN;
    rig_run(r);
    NEAR(r->args.loss[0], 2.0794415417);
    assert_int_equal(r->sums.n_valid, 65536);
    NEAR(r->sums.weight, 65536);
    rig_close(r);
}

/* Rows with +inf, NaN or nothing but -inf are NaN; rows beside them have the bits that they have alone. */
static void b59_infinite_logits(void **state) {
    (void)state;
    const double rows[][2] = {
        {0, INFINITY}, {INFINITY, INFINITY}, {-INFINITY, -INFINITY}, {INFINITY, -INFINITY}};
    for (size_t i = 0; i <= COUNT(rows); i++) {
        const double *bad = rows[i < COUNT(rows) ? i : 0];
        const double z[6] = {0.5, 0.25, bad[0], bad[1], -3, 2};
        rig *r = rig_exact(3, 2, LL_DTYPE_F32, z);
        if (i == COUNT(rows)) rig_set(&r->args.x, 1, 0, NAN);
        r->options.reduction = LL_REDUCTION_NONE;
        rig_run(r);
        assert_true(isnan(r->args.nll[1]) && isnan(r->args.lse[1]) && isnan(r->args.entropy[1]));
        assert_true(isnan(r->args.loss[1]));
        assert_int_equal(r->args.argmax[1], -1);
        float nll[2] = {r->args.nll[0], r->args.nll[2]},
              entropy[2] = {r->args.entropy[0], r->args.entropy[2]};
        for (int64_t k = 0; k < r->d; k++) {
            assert_true(isfinite(rig_get(&r->args.grad_x, 0, k)));
            assert_true(isfinite(rig_get(&r->args.grad_x, 2, k)));
        }
        NEAR(nll[0], log1p(exp(-0.25)));
        NEAR(nll[1], log1p(exp(5)));
        r->y[1] = -100;
        rig_run(r);
        assert_true(same_bits(nll[0], r->args.nll[0]) && same_bits(nll[1], r->args.nll[2]));
        assert_true(same_bits(entropy[0], r->args.entropy[0]) && same_bits(entropy[1], r->args.entropy[2]));
        rig_close(r);
    }
}

/* Logits beyond the range of f16, from f16 operands. */
static void b59_finite_beyond_half(void **state) {
    (void)state;
    rig *r = rig_open(2, 64, 2, LL_DTYPE_F16);
    for (int k = 0; k < 64; k++) {
        rig_set(&r->args.x, 0, k, 32);
        rig_set(&r->args.x, 1, k, 32);
        rig_set(&r->args.w, 0, k, 40);
    }
    r->y[1] = 1;
    rig_run(r);
    assert_true(r->args.nll[0] == 0 && r->args.lse[0] == 81920 && r->args.nll[1] == 81920);
    assert_true(rig_get(&r->args.grad_w, 0, 0) == 32 && rig_get(&r->args.grad_w, 1, 0) == -32);
    rig_close(r);
}

static void b60_classifier_gradient(void **state) {
    (void)state;
    rig *r = rig_open(2048, 128, 32, LL_DTYPE_BF16);
    rig_random(r, 60, 1, 0.5);
    rig_run(r);
    oracle *o = oracle_of(r);
    oracle_check(o, r, 5e-6);
    oracle_free(o);
    rig_close(r);
}

static void b77_no_truncated_products(void **state) {
    (void)state;
    const double z[2] = {2049, 2048};
    rig *r = rig_exact(1, 2, LL_DTYPE_F32, z);
    rig_run(r);
    NEAR(r->args.nll[0], 0.3132616875);
    rig_close(r);
    r = rig_open(1, 1, 2, LL_DTYPE_F32); /* products of 13-bit operands: 2^24 - 1 and 2^24 + 4096 */
    rig_set(&r->args.x, 0, 0, 4097);
    rig_set(&r->args.w, 0, 0, 4095);
    rig_set(&r->args.w, 1, 0, 4096);
    r->y[0] = 1;
    rig_run(r);
    assert_true(r->args.nll[0] == 0);
    r->y[0] = 0;
    rig_run(r);
    NEAR(r->args.nll[0], 4097);
    rig_close(r);
}

/* Entropy and its gradient where p = 0, by an overflowing product and by a -inf bias. */
static void b82_entropy_with_masked_columns(void **state) {
    (void)state;
    const double z[2][3] = {{0, 0, -INFINITY}, {0, 1, -INFINITY}}, want[2] = {0.69314718056, 0.582203109};
    const double slope[2] = {0, 0.196611933};
    for (int i = 0; i < 4; i++) {
        const double *logits = z[i % 2], plain[3] = {0, i % 2, 0};
        int by_bias = i >= 2;
        rig *r = rig_exact(1, 3, by_bias ? LL_DTYPE_F16 : LL_DTYPE_F32, by_bias ? plain : logits);
        if (by_bias) rig_bias(r)[2] = -INFINITY;
        r->args.up_loss = NULL;
        r->args.up_entropy = rig_tokens(r, 1);
        rig_run(r);
        NEAR(r->args.entropy[0], want[i % 2]);
        const double rel = 1e-6 + dz_rounding((ll_dtype)r->args.x.dtype);
        NEAR_TO(rig_dz(r, 0, 0), slope[i % 2], rel, 1e-7);
        NEAR_TO(rig_dz(r, 0, 1), -slope[i % 2], rel, 1e-7);
        assert_true(rig_dz(r, 0, 2) == 0);
        for (int64_t k = 0; k < r->d; k++) assert_true(isfinite(rig_get(&r->args.grad_x, 0, k)));
        rig_close(r);
    }
    const double wide[4] = {65504, -65504, 65504, -65504};
    rig *r = rig_exact(2, 2, LL_DTYPE_F16, wide);
    r->y[1] = 1;
    r->args.up_entropy = rig_tokens(r, 1);
    rig_run(r);
    assert_true(r->args.entropy[0] == 0 && r->args.nll[0] == 0 && r->args.nll[1] == 131008);
    assert_true(rig_dz(r, 0, 0) == 0 && rig_dz(r, 0, 1) == 0);
    rig_close(r);
}

/* B103's kind: a weight of 0 at a -inf logit, in the smoothed sum of both rules. */
static void b103_zero_weight_at_masked_column(void **state) {
    (void)state;
    const double z[3] = {0, 1, -INFINITY};
    const float weights[3] = {1, 1, 0};
    for (int rule = LL_SMOOTHING_ALL; rule <= LL_SMOOTHING_OTHERS; rule++) {
        rig *r = rig_exact(1, 3, LL_DTYPE_F32, z);
        r->args.class_weight = weights;
        r->options.label_smoothing = 0.3f;
        r->options.smoothing_rule = rule;
        rig_run(r);
        double a = 0.3f, lse = log(1 + exp(1)), p0 = 1 / (1 + exp(1));
        double share = rule == LL_SMOOTHING_ALL ? a / 3 : a / 2, taken = rule == LL_SMOOTHING_ALL ? 1 : 0;
        NEAR(r->args.loss[0], (1 - a) * lse + share * (taken * lse + lse - 1));
        NEAR(rig_dz(r, 0, 0), (1 - a) * (p0 - 1) + share * ((1 + taken) * p0 - taken));
        assert_true(rig_dz(r, 0, 2) == 0);
        rig_close(r);
    }
}

static void b83_near_deterministic(void **state) {
    (void)state;
    const int64_t v = 128256;
    const double top[] = {100, 1e4};
    double *z = calloc((size_t)v, sizeof *z);
    assert_non_null(z);
    for (int i = 0; i < 2; i++) {
        z[0] = top[i];
        rig *r = rig_exact(1, v, LL_DTYPE_F32, z);
        r->args.up_entropy = rig_tokens(r, 1);
        rig_run(r);
        assert_true(r->args.nll[0] >= 0 && r->args.nll[0] <= 1e-37f);
        assert_true(r->args.entropy[0] >= 0 && r->args.entropy[0] <= 1e-7f);
        for (int64_t j = 0; j < v; j++) assert_true(fabs(rig_dz(r, 0, j)) <= 1e-7);
        rig_close(r);
    }
    free(z);
}

static void b84_masked_target(void **state) {
    (void)state;
    const double z[4] = {0, -INFINITY, 0, 0};
    for (int g = 0; g < 2; g++) {
        for (int by_loss = 0; by_loss < 2; by_loss++) {
            rig *r = rig_exact(1, 4, LL_DTYPE_F32, z);
            if (by_loss)
                r->up_loss[0] = (float)g;
            else
                r->args.up_loss = NULL, r->args.up_nll = rig_tokens(r, (float)g);
            r->y[0] = 1;
            rig_run(r);
            assert_true(isinf(r->args.nll[0]) && r->args.nll[0] > 0);
            NEAR(r->args.entropy[0], log(3));
            for (int j = 0; j < 4; j++) NEAR_TO(rig_dz(r, 0, j), g * (j == 1 ? -1 : 1.0 / 3), 1e-6, 0);
            rig_close(r);
        }
    }
}

/* A token of weight 0 is out, whatever its loss: finite and huge, or infinite. */
static void b85_weight_zero_is_a_mask(void **state) {
    (void)state;
    const double masked[][3] = {{-9.5e4, 9.5e4, 9e4}, {-INFINITY, 1, 2}};
    for (int i = 0; i < 4; i++) {
        const double *m = masked[i / 2], clean[3] = {0.5, 1.5, -2};
        const double z[6] = {m[0], m[1], m[2], clean[0], clean[1], clean[2]};
        rig *one = rig_exact(1, 3, LL_DTYPE_F32, clean), *two = rig_exact(2, 3, LL_DTYPE_F32, z);
        float *weight = rig_tokens(two, 1);
        weight[0] = 0;
        two->args.token_weight = weight;
        one->options.z_loss = two->options.z_loss = 1e-4f;
        if (i % 2) one->options.token_scaling = two->options.token_scaling = 1;
        rig_run(one);
        rig_run(two);
        assert_true(isfinite(one->args.loss[0]));
        assert_true(same_bits(one->args.loss[0], two->args.loss[0]));
        for (int j = 0; j < 3; j++) {
            assert_true(rig_dz(two, 0, j) == 0);
            assert_true(rig_dz(two, 1, j) == rig_dz(one, 0, j));
        }
        rig_close(one);
        rig_close(two);
    }
}

int main(int argc, char **argv) {
    const fault_test tests[] = {
        FAULT(b50_common_offset),
        FAULT(b51_confident_token),
        FAULT(b52_true_class_gradient),
        FAULT(b53_half_operands),
        FAULT(b66_mixed_dtypes),
        FAULT(b55_flat_sums),
        FAULT(b56_grad_w_over_many_tokens),
        FAULT(b58_count_beyond_half),
        FAULT(b59_infinite_logits),
        FAULT(b59_finite_beyond_half),
        FAULT(b60_classifier_gradient),
        FAULT(b77_no_truncated_products),
        FAULT(b82_entropy_with_masked_columns),
        FAULT(b103_zero_weight_at_masked_column),
        FAULT(b83_near_deterministic),
        FAULT(b84_masked_target),
        FAULT(b85_weight_zero_is_a_mask),
    };
    return faults_main("faults: numerics", tests, COUNT(tests), argc, argv);
}
