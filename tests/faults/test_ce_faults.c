/* Reported faults of cross-entropy over given logits: ignored tokens, options, upstreams and outputs, with
 * values from double precision; the names are the collection's. Numerics are in test_ce_numerics.c, sizes in
 * test_ce_sizes.c, arguments in test_ce_calls.c, ranks in tests/core/test_ce_ranks.c. */
#define _POSIX_C_SOURCE 200809L
#include "faults/ce_rig.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

static const char *kernel_of(void **state) {
    return (const char *)*state;
}

/* A rig of one row with the given logits. */
static struct ce_rig *one_row(void **state, const double *z, int64_t v, ll_dtype dtype) {
    struct ce_rig *rig = ce_rig_open(kernel_of(state), 1, v, dtype);
    for (int64_t c = 0; c < v; ++c) ce_rig_set(rig, 0, c, z[c]);
    return rig;
}

/* ---- Ignored tokens and normalisation ----------------------------------------------------------- */

static void b27_all_ignored(void **state) {
    for (int reduction = 0; reduction < 3; ++reduction) {
        struct ce_rig *rig = ce_rig_open(kernel_of(state), 5, 6, LL_DTYPE_F32);
        rig->loss.reduction = reduction;
        for (int64_t i = 0; i < 5; ++i) rig->target[i] = -100;
        ce_rig_fill(rig, (double)NAN);
        ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
        for (int64_t i = 0; i < (reduction == LL_REDUCTION_NONE ? 5 : 1); ++i)
            assert_true(rig->loss_out[i] == 0.0f);
        for (int64_t i = 0; i < 5; ++i) {
            for (int64_t v = 0; v < 6; ++v) assert_true(ce_rig_grad(rig, i, v) == 0.0);
        }
        assert_int_equal(rig->sums.n_ignored, 5);
        ce_rig_close(rig);
    }
}

static void b30_ignored_row_of_minus_infinity(void **state) {
    struct ce_rig *rig = ce_rig_open(kernel_of(state), 2, 4, LL_DTYPE_F32);
    for (int64_t v = 0; v < 4; ++v) ce_rig_set(rig, 1, v, -(double)INFINITY);
    rig->target[1] = -100;
    ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
    ce_near("loss", rig->loss_out[0], 1.386294361, 1e-6, 0);
    ce_near("dz", ce_rig_grad(rig, 0, 0), -0.75, 1e-6, 0);
    for (int64_t v = 0; v < 4; ++v) assert_true(ce_rig_grad(rig, 1, v) == 0.0);
    ce_rig_close(rig);
}

static void b32_b33_ignore_index_anywhere(void **state) {
    struct ce_rig *rig = ce_rig_open(kernel_of(state), 4, 3, LL_DTYPE_F32);
    const int64_t targets[] = {0, 1, 255, 2};
    memcpy(rig->target, targets, sizeof targets);
    rig->loss.ignore_index = 255;
    ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
    ce_near("mean over 3", rig->loss_out[0], 1.098612289, 1e-6, 0);
    ce_near("dz", ce_rig_grad(rig, 3, 2), -2.0 / 9.0, 1e-6, 0);
    assert_true(ce_rig_grad(rig, 2, 0) == 0.0);
    rig->loss.ignore_index = 0; /* stays in the denominator of the others (B33), and gets none (B102) */
    rig->target[2] = 1;
    ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
    ce_near("ln 3", rig->nll[1], 1.098612289, 1e-6, 0);
    assert_true(ce_rig_grad(rig, 0, 0) == 0.0 && ce_rig_grad(rig, 0, 1) == 0.0);
    ce_near("dz of the others", ce_rig_grad(rig, 1, 0), 1.0 / 9.0, 1e-6, 0);
    ce_rig_close(rig);
}

static void b34_b35_mean_by_valid_tokens_or_divisor(void **state) {
    struct ce_rig *rig = ce_rig_open(kernel_of(state), 4, 2, LL_DTYPE_F32);
    const double divisor = 4.0;
    rig->target[1] = rig->target[2] = -100;
    ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
    ce_near("mean of two", rig->loss_out[0], 0.693147181, 1e-6, 0);
    ce_near("dz", ce_rig_grad(rig, 0, 0), -0.25, 1e-6, 0);
    rig->args.divisor = &divisor;
    ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
    ce_near("over the caller's divisor", rig->loss_out[0], 0.346573590, 1e-6, 0);
    ce_near("dz", ce_rig_grad(rig, 0, 0), -0.125, 1e-6, 0);
    ce_rig_close(rig);
}

static void b58_count_in_f16(void **state) {
    struct ce_rig *rig = ce_rig_open(kernel_of(state), 65536, 8, LL_DTYPE_F16);
    ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
    ce_near("loss", rig->loss_out[0], 2.079441542, 1e-6, 0);
    ce_near("dz", ce_rig_grad(rig, 65535, 0), -0.875 / 65536, 1e-3, 1e-7);
    ce_rig_close(rig);
}

/* ---- Smoothing, weights, z-loss, softcap, temperature ------------------------------------------- */

static void b38_smoothing_of_ignored_rows(void **state) {
    struct ce_rig *rig = ce_rig_open(kernel_of(state), 2, 2, LL_DTYPE_F32);
    ce_rig_set(rig, 1, 0, 10.0);
    rig->target[1] = -100;
    rig->loss.label_smoothing = 0.2f;
    rig->loss.reduction = LL_REDUCTION_SUM;
    ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
    ce_near("loss", rig->loss_out[0], 0.693147181, 1e-6, 0);
    ce_rig_close(rig);
}

static void b40_class_weights_scale_the_smoothed_part(void **state) {
    const double z[] = {0, 1};
    const float weights[] = {0.1f, 0.9f};
    struct ce_rig *rig = one_row(state, z, 2, LL_DTYPE_F32);
    rig->loss.label_smoothing = 0.1f;
    rig->args.class_weight = weights;
    ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
    ce_near("loss", rig->loss_out[0], 1.388566, 2e-6, 0);
    ce_near("sum of dz", ce_rig_grad_sum(rig, 0), 0.0, 0, 1e-6);
    ce_rig_close(rig);
}

static void b41_b43_both_smoothing_rules(void **state) {
    const double z[] = {2, 0, 0, 0, 0, 0, 0, 0};
    struct ce_rig *rig = one_row(state, z, 8, LL_DTYPE_F32);
    rig->loss.label_smoothing = 0.1f;
    ce_rig_run(rig, LL_PASS_FORWARD);
    ce_near("over V", rig->loss_out[0], 0.841468, 2e-6, 0);
    rig->loss.smoothing_rule = LL_SMOOTHING_OTHERS;
    ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
    ce_near("over V - 1", rig->loss_out[0], 0.866468, 2e-6, 0);
    ce_near("sum of dz", ce_rig_grad_sum(rig, 0), 0.0, 0, 1e-6);
    ce_rig_close(rig);
}

static void b42_big_gaps_in_the_smoothed_loss(void **state) {
    const double z[] = {0, -200, -200, -200};
    struct ce_rig *rig = one_row(state, z, 4, LL_DTYPE_F32);
    rig->loss.label_smoothing = 0.1f;
    ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
    ce_near("loss", rig->loss_out[0], 15.0, 1e-6, 0);
    for (int64_t v = 0; v < 4; ++v) assert_true(isfinite(ce_rig_grad(rig, 0, v)));
    ce_rig_close(rig);
}

static void b44_z_loss(void **state) {
    struct ce_rig *rig = ce_rig_open(kernel_of(state), 2, 4, LL_DTYPE_F32);
    rig->target[1] = -100;
    ce_rig_run(rig, LL_PASS_FORWARD);
    ce_near("off", rig->loss_out[0], 1.386294361, 1e-6, 0);
    rig->loss.z_loss = 1e-4f;
    ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
    ce_near("on", rig->loss_out[0], 1.386486542, 1e-6, 0);
    ce_near("z_loss", rig->z_loss[0], 1.92181e-4, 1e-5, 0);
    assert_true(rig->z_loss[1] == 0.0f);
    ce_near("dz", ce_rig_grad(rig, 0, 1), 0.25 + 2e-4 * 1.386294361 * 0.25, 1e-6, 0);
    ce_rig_close(rig);
}

static void b45_softcap(void **state) {
    const double z[] = {124, 0};
    struct ce_rig *rig = one_row(state, z, 2, LL_DTYPE_F32);
    rig->loss.softcap = 30.0f;
    rig->target[0] = 1;
    ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
    ce_near("logp", -(double)rig->nll[0], -29.984588, 1e-6, 0);
    ce_near("dz of the capped", ce_rig_grad(rig, 0, 0), 0.00102723, 1e-5, 0);
    ce_rig_close(rig);
}

static void b47_b48_temperature(void **state) {
    const double z[] = {2, 0}, far[] = {20, 10};
    struct ce_rig *rig = one_row(state, z, 2, LL_DTYPE_F32);
    rig->loss.temperature = 0.5f;
    rig->target[0] = 1;
    ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
    ce_near("logp", -(double)rig->nll[0], -4.018150, 1e-6, 0);
    ce_near("dz carries 1/tau", ce_rig_grad(rig, 0, 0), 2.0 * 0.98201379, 1e-6, 0);
    ce_rig_close(rig);
    for (int dtype = LL_DTYPE_BF16; dtype <= LL_DTYPE_F16; ++dtype) {
        rig = one_row(state, far, 2, (ll_dtype)dtype);
        rig->loss.temperature = 1e-4f;
        ce_rig_run(rig, LL_PASS_FORWARD);
        ce_near("nll", rig->nll[0], 0.0, 0, 0);
        ce_near("entropy", rig->entropy[0], 0.0, 0, 5e-7); /* the bound of the contract */
        rig->target[0] = 1;
        ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
        ce_near("nll", rig->nll[0], 100000.0, 1e-6, 0);
        ce_rig_close(rig);
    }
}

/* ---- Upstreams and outputs ---------------------------------------------------------------------- */

static void b61_each_token_has_its_upstream(void **state) {
    const float up[] = {0, 1};
    struct ce_rig *rig = ce_rig_open(kernel_of(state), 2, 4, LL_DTYPE_F32);
    rig->args.up_loss = NULL;
    rig->args.up_nll = up;
    for (int64_t v = 0; v < 4; ++v) ce_rig_set(rig, 0, v, (double)NAN); /* 0 masks */
    ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
    for (int64_t v = 0; v < 4; ++v) {
        assert_true(ce_rig_grad(rig, 0, v) == 0.0);
        ce_near("dz", ce_rig_grad(rig, 1, v), v ? 0.25 : -0.75, 1e-6, 0);
    }
    ce_rig_close(rig);
}

static void b62_backward_may_be_repeated(void **state) {
    enum { kVocab = 300 };
    float up[3] = {1, 1, 1};
    double first[kVocab], logits[kVocab];
    uint64_t random = 5;
    struct ce_rig *rig = ce_rig_open(kernel_of(state), 3, kVocab, LL_DTYPE_F32);
    for (int64_t v = 0; v < kVocab; ++v) ce_rig_set(rig, 2, v, problem_normal(&random));
    ce_rig_run(rig, LL_PASS_FORWARD);
    rig->args.up_loss = NULL;
    rig->args.up_nll = up;
    ce_rig_run(rig, LL_PASS_BACKWARD);
    for (int64_t v = 0; v < kVocab; ++v) {
        first[v] = ce_rig_grad(rig, 2, v);
        logits[v] = ce_rig_logit(rig, 2, v);
    }
    up[2] = 2;
    ce_rig_run(rig, LL_PASS_BACKWARD);
    for (int64_t v = 0; v < kVocab; ++v) {
        assert_true(ce_rig_grad(rig, 2, v) == 2.0 * first[v]);
        assert_true(ce_rig_logit(rig, 2, v) == logits[v]);
    }
    ce_rig_close(rig);
}

/* B63, B99: any subset of the outputs has the bits of all of them. */
static void b63_b99_subsets_of_the_outputs(void **state) {
    enum { kVocab = 200, kOutputs = 8 };
    uint64_t random = 11;
    struct ce_rig *rig = ce_rig_open(kernel_of(state), 2, kVocab, LL_DTYPE_BF16);
    rig->loss.z_loss = 1e-3f;
    for (int64_t v = 0; v < kVocab; ++v) ce_rig_set(rig, 0, v, 3.0 * problem_normal(&random));
    ce_rig_run(rig, LL_PASS_FORWARD);
    const float loss = rig->loss_out[0], nll = rig->nll[0], lse = rig->lse[0], entropy = rig->entropy[0],
                z = rig->z_loss[0];
    const int64_t argmax = rig->argmax[0];
    for (unsigned subset = 1; subset < 1u << kOutputs; ++subset) {
        rig->args.loss = subset & 1 ? rig->loss_out : NULL;
        rig->args.nll = subset & 2 ? rig->nll : NULL;
        rig->args.lse = subset & 4 ? rig->lse : NULL;
        rig->args.entropy = subset & 8 ? rig->entropy : NULL;
        rig->args.z_loss = subset & 16 ? rig->z_loss : NULL;
        rig->args.argmax = subset & 32 ? rig->argmax : NULL;
        rig->args.lse_lo = subset & 64 ? rig->lse_lo : NULL;
        rig->args.sums = subset & 128 ? &rig->sums : NULL;
        rig->argmax[0] = -7;
        ce_rig_run(rig, LL_PASS_FORWARD);
        assert_true(subset & 1 ? rig->loss_out[0] == loss : isnan(rig->loss_out[0]));
        assert_true(subset & 2 ? rig->nll[0] == nll : isnan(rig->nll[0]));
        assert_true(subset & 4 ? rig->lse[0] == lse : isnan(rig->lse[0]));
        assert_true(subset & 8 ? rig->entropy[0] == entropy : isnan(rig->entropy[0]));
        assert_true(subset & 16 ? rig->z_loss[0] == z : isnan(rig->z_loss[0]));
        assert_int_equal(rig->argmax[0], subset & 32 ? argmax : -7);
    }
    ce_rig_close(rig);
}

/* B64: the gradient without any output of the forward. */
static void b64_gradient_alone(void **state) {
    struct ce_rig *rig = ce_rig_open(kernel_of(state), 2, 4, LL_DTYPE_F32);
    rig->args.loss = rig->args.nll = rig->args.lse = rig->args.lse_lo = rig->args.entropy = rig->args.z_loss =
        NULL;
    rig->args.argmax = NULL;
    rig->args.sums = NULL;
    ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
    ce_near("dz", ce_rig_grad(rig, 1, 0), -0.375, 1e-6, 0);
    ce_rig_close(rig);
}

static void b67_log_prob_as_it_is(void **state) {
    const double z[] = {1, 2, 3, 4}, want[] = {2.903824, -0.261433, -0.710648, -1.931743};
    const float up = -3.0f; /* of nll: logp with g = 3 */
    struct ce_rig *rig = one_row(state, z, 4, LL_DTYPE_F32);
    rig->args.up_loss = NULL;
    rig->args.up_nll = &up;
    ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
    ce_near("logp", -(double)rig->nll[0], -3.440190, 1e-6, 0);
    for (int64_t v = 0; v < 4; ++v) ce_near("dz", ce_rig_grad(rig, 0, v), want[v], 2e-6, 0);
    ce_rig_close(rig);
}

static void b100_reduction_none(void **state) {
    struct ce_rig *rig = ce_rig_open(kernel_of(state), 12, 5, LL_DTYPE_F32);
    rig->loss.reduction = LL_REDUCTION_NONE;
    for (int64_t i = 0; i < 12; i += 5) rig->target[i] = -100;
    ce_rig_run(rig, LL_PASS_FORWARD);
    for (int64_t i = 0; i < 12; ++i) ce_near("loss", rig->loss_out[i], i % 5 ? 1.609437912 : 0.0, 1e-6, 0);
    ce_rig_close(rig);
}

#define FAULT(name)                                                                                          \
    { #name, name }

int main(void) {
    static const struct ce_fault faults[] = {
        FAULT(b27_all_ignored),
        FAULT(b30_ignored_row_of_minus_infinity),
        FAULT(b32_b33_ignore_index_anywhere),
        FAULT(b34_b35_mean_by_valid_tokens_or_divisor),
        FAULT(b38_smoothing_of_ignored_rows),
        FAULT(b40_class_weights_scale_the_smoothed_part),
        FAULT(b41_b43_both_smoothing_rules),
        FAULT(b42_big_gaps_in_the_smoothed_loss),
        FAULT(b44_z_loss),
        FAULT(b45_softcap),
        FAULT(b47_b48_temperature),
        FAULT(b58_count_in_f16),
        FAULT(b61_each_token_has_its_upstream),
        FAULT(b62_backward_may_be_repeated),
        FAULT(b63_b99_subsets_of_the_outputs),
        FAULT(b64_gradient_alone),
        FAULT(b67_log_prob_as_it_is),
        FAULT(b100_reduction_none),
    };
    return ce_faults_main(faults, (int)(sizeof faults / sizeof faults[0]));
}
