/* Reported faults of section 3: bad targets and ignored rows. */
#include "harness.h"

#include <stdio.h>

/* The same refusal in every reduction and pass, with the row and the value in the sentence. */
static void b24_target_out_of_range(void **state) {
    (void)state;
    if (on_gpu()) skip(); /* a NaN row and a count there: tests/cuda */
    const int64_t bad[] = {8, -1, -4, INT32_MIN, 9, 1 << 20, INT64_C(1) << 40, INT64_MIN, -99};
    for (size_t i = 0; i < COUNT(bad); i++) {
        for (int reduction = LL_REDUCTION_MEAN; reduction <= LL_REDUCTION_NONE; reduction++) {
            rig *r = rig_open(5, 3, 8, LL_DTYPE_F32);
            r->options.reduction = reduction;
            rig_random(r, 24, 1, 1);
            rig_run(r);
            int64_t good = r->y[3];
            int narrow = bad[i] >= INT32_MIN && bad[i] <= INT32_MAX && i % 2 == 1;
            int32_t ids[5];
            r->y[3] = bad[i];
            for (int t = 0; t < 5; t++) ids[t] = (int32_t)r->y[t];
            if (narrow) r->args.target = ll_view_vector(ids, LL_DTYPE_I32, 5, 0);
            char value[32];
            snprintf(value, sizeof value, "%lld", (long long)bad[i]);
            for (int pass = LL_PASS_FORWARD; pass <= LL_PASS_FORWARD_BACKWARD; pass++) {
                if (pass != LL_PASS_BACKWARD) r->sums.n_valid = 12345;
                assert_int_equal(rig_call(r, (ll_pass)pass), LL_STATUS_INVALID_ARG);
                assert_non_null(strstr(ll_last_error(), "target"));
                assert_non_null(strstr(ll_last_error(), value));
                assert_non_null(strstr(ll_last_error(), "3"));
                if (pass == LL_PASS_BACKWARD) continue;
                for (int t = 0; t < 5; t++) assert_true(isnan(r->args.nll[t])); /* not a row was written */
                assert_true(isnan(r->args.loss[0]));
            }
            r->y[3] = ids[3] = (int32_t)good; /* B25: the next good call works */
            rig_run(r);
            assert_true(r->args.nll[3] > 0);
            rig_close(r);
        }
    }
}

/* B27 loss, B28 gradients: the mean over no valid token is 0, and every gradient exactly 0. */
static void b27_all_ignored(void **state) {
    (void)state;
    for (int reduction = LL_REDUCTION_MEAN; reduction <= LL_REDUCTION_NONE; reduction++) {
        for (int options = 0; options < 2; options++) {
            rig *r = rig_open(5, 3, 70, LL_DTYPE_F32);
            r->options.reduction = reduction;
            rig_bias(r);
            rig_random(r, 27, 1, 1);
            float weights[70];
            for (int j = 0; j < 70; j++) weights[j] = 0.5f;
            if (options) {
                r->options.label_smoothing = 0.1f;
                r->options.z_loss = 1e-3f;
                r->options.token_scaling = 1;
                r->args.class_weight = weights;
            }
            for (int t = 0; t < 5; t++) r->y[t] = -100;
            rig_run(r);
            for (int t = 0; t < (reduction == LL_REDUCTION_NONE ? 5 : 1); t++)
                assert_true(r->args.loss[t] == 0);
            assert_int_equal(r->sums.n_valid, 0);
            assert_int_equal(r->sums.n_ignored, 5);
            assert_true(r->sums.loss == 0 && r->sums.z_loss == 0 && r->sums.weight == 0);
            for (int i = 0; i < 15; i++) assert_true(((float *)r->args.grad_x.data)[i] == 0);
            for (int i = 0; i < 210; i++) assert_true(((float *)r->args.grad_w.data)[i] == 0);
            for (int i = 0; i < 70; i++) assert_true(((float *)r->args.grad_bias.data)[i] == 0);
            for (int t = 0; t < 5; t++) {
                assert_true(r->args.nll[t] == 0 && r->args.lse[t] == 0 && r->args.entropy[t] == 0);
                assert_true(r->args.lse_lo[t] == 0 && r->args.z_loss[t] == 0);
                assert_int_equal(r->args.argmax[t], -1);
            }
            rig_close(r);
        }
    }
}

/* An ignored row of NaN, infinities or overflowing values reaches nothing. Row 0 is as alone. */
static void b30_ignored_row_is_garbage(void **state) {
    (void)state;
    const double garbage[] = {NAN, INFINITY, -INFINITY, 3e38, -3e38};
    const ll_dtype dtypes[] = {LL_DTYPE_F32, LL_DTYPE_BF16};
    const int64_t d = 4, v = 67;
    for (size_t i = 0; i < COUNT(garbage) * COUNT(dtypes); i++) {
        ll_dtype dtype = dtypes[i % 2];
        rig *one = rig_open(1, d, v, dtype), *two = rig_open(3, d, v, dtype);
        rig_bias(one);
        rig_bias(two);
        rig_random(one, 30, 1, 1);
        size_t bytes = ll_dtype_bytes(dtype);
        memcpy(two->args.w.data, one->args.w.data, bytes * (size_t)(v * d));
        memcpy(two->args.bias.data, one->args.bias.data, sizeof(float) * (size_t)v);
        for (int64_t k = 0; k < d; k++) {
            rig_set(&two->args.x, 1, k, rig_get(&one->args.x, 0, k));
            rig_set(&two->args.x, 0, k, garbage[i / 2]);
            rig_set(&two->args.x, 2, k, garbage[i / 2]);
        }
        two->y[0] = two->y[2] = -100;
        two->y[1] = one->y[0];
        float *up = rig_tokens(two, NAN); /* nor may the upstream of an ignored token */
        up[1] = 2;
        two->args.up_nll = two->args.up_lse = two->args.up_entropy = up;
        one->args.up_nll = one->args.up_lse = one->args.up_entropy = rig_tokens(one, 2);
        rig_run(one);
        rig_run(two);
        assert_true(same_bits(one->args.loss[0], two->args.loss[0]));
        assert_true(isfinite(one->args.loss[0]));
        assert_true(same_bits(one->args.nll[0], two->args.nll[1]));
        for (int64_t k = 0; k < d; k++) {
            assert_true(rig_get(&two->args.grad_x, 0, k) == 0 && rig_get(&two->args.grad_x, 2, k) == 0);
            assert_true(rig_get(&two->args.grad_x, 1, k) == rig_get(&one->args.grad_x, 0, k));
        }
        for (int64_t e = 0; e < v * d; e++)
            assert_true(rig_get(&two->args.grad_w, e / d, e % d) == rig_get(&one->args.grad_w, e / d, e % d));
        for (int64_t j = 0; j < v; j++)
            assert_true(rig_get(&two->args.grad_bias, j, 0) == rig_get(&one->args.grad_bias, j, 0));
        rig_close(one);
        rig_close(two);
    }
}

/* Any value may be the ignored one, and only that one is. */
static void b32_ignore_index_beyond_vocabulary(void **state) {
    (void)state;
    const int64_t ignore[] = {255, 3, -1, -100, INT64_MIN, INT64_MAX};
    const double z[12] = {0, 1, 2, 3, 1, 0, 5, 5, 5, 0, 0, 3};
    for (size_t i = 0; i < COUNT(ignore); i++) {
        for (int reduction = LL_REDUCTION_MEAN; reduction <= LL_REDUCTION_NONE; reduction++) {
            rig *r = rig_exact(4, 3, LL_DTYPE_F32, z);
            const int64_t y[] = {0, 1, ignore[i], 2};
            double want[4] = {0};
            memcpy(r->y, y, sizeof y);
            r->options.ignore_index = ignore[i];
            r->options.reduction = reduction;
            rig_run(r);
            for (int t = 0; t < 4; t++) {
                const double *row = z + 3 * t;
                if (t != 2) want[t] = log(exp(row[0]) + exp(row[1]) + exp(row[2])) - row[y[t]];
                NEAR(r->args.nll[t], want[t]);
            }
            double sum = want[0] + want[1] + want[3];
            if (reduction == LL_REDUCTION_MEAN) NEAR(r->args.loss[0], sum / 3);
            if (reduction == LL_REDUCTION_SUM) NEAR(r->args.loss[0], sum);
            for (int t = 0; t < 4 && reduction == LL_REDUCTION_NONE; t++) NEAR(r->args.loss[t], want[t]);
            assert_true(r->args.nll[2] == 0);
            for (int j = 0; j < 3; j++) assert_true(rig_dz(r, 2, j) == 0);
            assert_int_equal(r->sums.n_valid, 3);
            rig_close(r);
        }
    }
}

static void b33_ignored_class_stays_in_softmax(void **state) {
    (void)state;
    rig *r = rig_open(1, 1, 3, LL_DTYPE_F32);
    rig_bias(r);
    r->options.ignore_index = 0;
    r->y[0] = 1;
    rig_run(r);
    NEAR(r->args.loss[0], log(3));
    NEAR(rig_get(&r->args.grad_bias, 0, 0), 1.0 / 3);
    rig_close(r);
}

static void b34_mean_over_valid_tokens(void **state) {
    (void)state;
    const double z[8] = {0};
    rig *r = rig_exact(4, 2, LL_DTYPE_F32, z);
    r->options.reduction = LL_REDUCTION_MEAN;
    r->y[0] = r->y[2] = -100;
    rig_run(r);
    NEAR(r->args.loss[0], log(2));
    for (int t = 0; t < 4; t++) {
        NEAR(rig_dz(r, t, 0), t % 2 ? -0.25 : 0);
        NEAR(rig_dz(r, t, 1), t % 2 ? 0.25 : 0);
    }
    rig_close(r);
}

static void b38_smoothing_leaves_ignored_rows_out(void **state) {
    (void)state;
    const double z[4] = {0, 0, 10, 0};
    rig *r = rig_exact(2, 2, LL_DTYPE_F32, z);
    r->options.label_smoothing = 0.2f;
    r->y[1] = -100;
    rig_run(r);
    NEAR(r->args.loss[0], 0.69314718056);
    assert_true(rig_dz(r, 1, 0) == 0 && rig_dz(r, 1, 1) == 0);
    rig_close(r);
}

static void b100_none_gives_every_token(void **state) {
    (void)state;
    rig *r = rig_open(12, 3, 5, LL_DTYPE_F32);
    r->options.reduction = LL_REDUCTION_NONE;
    rig_random(r, 100, 1, 1);
    r->y[0] = r->y[5] = r->y[11] = -100;
    float *loss = r->args.loss, out[13];
    rig_run(r);
    for (int t = 0; t < 12; t++)
        assert_true(r->y[t] < 0 ? loss[t] == 0 : loss[t] == r->args.nll[t] && loss[t] > 0);
    out[12] = 4321;
    r->args.loss = out;
    rig_forward(r);
    assert_memory_equal(out, loss, sizeof(float) * 12);
    assert_true(out[12] == 4321);
    rig_close(r);
}

/* B101: with beta = 0 and nothing valid, the NaN that stood in every gradient is gone; with accumulate
 * what stood there stays. */
static void b101_masked_batch_writes_gradients(void **state) {
    (void)state;
    const ll_dtype dtypes[] = {LL_DTYPE_F32, LL_DTYPE_BF16, LL_DTYPE_F16};
    for (size_t i = 0; i < COUNT(dtypes); i++) {
        rig *r = rig_open(7, 5, 130, dtypes[i]);
        r->desc.grad_x_dtype = r->desc.grad_w_dtype = LL_DTYPE_NONE; /* the input's */
        r->args.grad_x.dtype = r->args.grad_w.dtype = (int32_t)dtypes[i];
        rig_random(r, 101, 1, 1);
        for (int t = 0; t < 7; t++) r->y[t] = -100;
        rig_run(r);
        for (int e = 0; e < 35; e++) assert_true(rig_get(&r->args.grad_x, e / 5, e % 5) == 0);
        for (int e = 0; e < 650; e++) assert_true(rig_get(&r->args.grad_w, e / 5, e % 5) == 0);
        for (int e = 0; e < 650; e++) rig_set(&r->args.grad_w, e / 5, e % 5, e % 50);
        r->args.accumulate = LL_ACCUMULATE_W;
        rig_backward(r);
        for (int e = 0; e < 650; e++) assert_true(rig_get(&r->args.grad_w, e / 5, e % 5) == e % 50);
        rig_close(r);
    }
}

static void b102_ignored_class_inside_vocabulary(void **state) {
    (void)state;
    const double z[20] = {0, 1, 2, 3, 4, 4, 3, 2, 1, 0, 1, 1, 1, 1, 1, 0, 2, 0, 2, 0};
    const int64_t y[4] = {1, 0, 2, 3};
    rig *r = rig_exact(4, 5, LL_DTYPE_F32, z);
    r->options.ignore_index = 1;
    r->options.reduction = LL_REDUCTION_MEAN;
    memcpy(r->y, y, sizeof y);
    rig_run(r);
    for (int t = 0; t < 4; t++) {
        double sum = 0;
        for (int j = 0; j < 5; j++) sum += exp(z[5 * t + j]);
        for (int j = 0; j < 5; j++) {
            double want = t == 0 ? 0 : (exp(z[5 * t + j]) / sum - (j == y[t])) / 3;
            NEAR_TO(rig_dz(r, t, j), want, 1e-6, 1e-9);
        }
    }
    rig_close(r);
}

int main(int argc, char **argv) {
    const fault_test tests[] = {
        FAULT(b24_target_out_of_range),
        FAULT(b27_all_ignored),
        FAULT(b30_ignored_row_is_garbage),
        FAULT(b32_ignore_index_beyond_vocabulary),
        FAULT(b33_ignored_class_stays_in_softmax),
        FAULT(b34_mean_over_valid_tokens),
        FAULT(b38_smoothing_leaves_ignored_rows_out),
        FAULT(b100_none_gives_every_token),
        FAULT(b101_masked_batch_writes_gradients),
        FAULT(b102_ignored_class_inside_vocabulary),
    };
    return faults_main("faults: targets", tests, COUNT(tests), argc, argv);
}
