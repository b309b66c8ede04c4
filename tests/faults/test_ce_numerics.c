/* Reported faults of cross-entropy over given logits: numerics, the true class, and what reinforcement
 * learning asks for; values from double precision. */
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

/* ---- Numerics ----------------------------------------------------------------------------------- */

static void b50_common_offsets(void **state) {
    const double offsets[] = {1e4, 1e8}, near_by[] = {10002, 9999};
    for (int o = 0; o < 2; ++o) {
        const double z[] = {offsets[o], offsets[o]};
        struct ce_rig *rig = one_row(state, z, 2, LL_DTYPE_F32);
        ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
        ce_near("nll", rig->nll[0], 0.693147181, 1e-6, 0);
        ce_near("dz", ce_rig_grad(rig, 0, 1), 0.5, 1e-6, 0);
        ce_rig_close(rig);
    }
    struct ce_rig *rig = one_row(state, near_by, 2, LL_DTYPE_F32);
    ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
    ce_near("nll", rig->nll[0], 0.04858735, 1e-6, 0);
    ce_near("dz", ce_rig_grad(rig, 0, 0), -0.04742587, 1e-6, 0);
    ce_rig_close(rig);
}

static void b51_confident_log_probs(void **state) {
    const double z17[] = {17, 0}, z80[] = {80, 0};
    const int64_t id = 0;
    float logp;
    struct ce_rig *rig = one_row(state, z17, 2, LL_DTYPE_F32);
    rig->desc.n_ids = 1;
    rig->args.ids = ll_view_matrix(&id, LL_DTYPE_I64, 1, 1, 0);
    rig->args.id_logp = &logp;
    ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
    ce_near("nll", rig->nll[0], 4.13993762e-8, 1e-6, 0);
    ce_near("dz", ce_rig_grad(rig, 0, 0), -4.13993754e-8, 1e-6, 0);
    assert_true(logp <= 0.0f && logp > -5e-7f);
    ce_rig_close(rig);
    rig = one_row(state, z80, 2, LL_DTYPE_F32);
    ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
    ce_near("nll", rig->nll[0], 1.80485139e-35, 1e-6, 0);
    ce_rig_close(rig);
}

/* lse is rounded: of a confident token it may lie below the logit by a little. */
static void log_probs_are_never_above_0(void **state) {
    enum { kRows = 400 };
    static int64_t ids[kRows], top[kRows];
    static float logp[kRows], top_logp[kRows];
    uint64_t random = 17;
    struct ce_rig *rig = ce_rig_open(kernel_of(state), kRows, 3, LL_DTYPE_F32);
    rig->desc.n_ids = rig->desc.n_top = 1;
    rig->args.ids = ll_view_matrix(ids, LL_DTYPE_I64, kRows, 1, 0);
    rig->args.id_logp = logp;
    rig->args.top_logp = top_logp;
    rig->args.top_ids = top;
    for (int64_t i = 0; i < kRows; ++i) {
        ids[i] = i % 3;
        ce_rig_set(rig, i, ids[i], 16.0 + 8.0 * fabs(problem_normal(&random)));
    }
    ce_rig_run(rig, LL_PASS_FORWARD);
    for (int64_t i = 0; i < kRows; ++i) {
        assert_true(logp[i] <= 0.0f && logp[i] > -1e-6f);
        assert_true(top[i] == ids[i] && top_logp[i] == logp[i]);
        assert_true(rig->nll[i] >= 0.0f);
    }
    ce_rig_close(rig);
}

static void b52_true_class_gradient_in_bf16(void **state) {
    struct ce_rig *rig = ce_rig_open(kernel_of(state), 1, 32000, LL_DTYPE_BF16);
    const double z[] = {7, 0};
    ce_rig_set(rig, 0, 0, 17.25);
    ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
    ce_near("dz", ce_rig_grad(rig, 0, 0), -0.00103064, 0x1p-8, 0);
    ce_rig_close(rig);
    rig = one_row(state, z, 2, LL_DTYPE_BF16);
    ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
    ce_near("dz", ce_rig_grad(rig, 0, 0), -0.000911051, 0x1p-8, 0);
    ce_rig_close(rig);
}

/* The value of one unit in the last place of a number in a dtype. */
static double ulp(double value, ll_dtype dtype) {
    int exponent;
    const int bits = dtype == LL_DTYPE_F32 ? 24 : dtype == LL_DTYPE_BF16 ? 8 : 11;
    const int least = dtype == LL_DTYPE_F16 ? -24 : -149;
    (void)frexp(value, &exponent);
    return ldexp(1.0, exponent - bits > least ? exponent - bits : least);
}

/* Many competitors of random logits, the target raised until p_y is about the wanted one; the exact p_y - 1
 * is then formed in long double from the logits as they are stored. */
static void true_class_within_one_ulp(void **state) {
    static const double wanted[] = {0.9, 0.99, 0.999, 1.0 - 1e-6};
    enum { kVocab = 1000 };
    uint64_t random = 7;
    for (int dtype = LL_DTYPE_F32; dtype <= LL_DTYPE_F16; ++dtype) {
        for (int w = 0; w < 4; ++w) {
            struct ce_rig *rig = ce_rig_open(kernel_of(state), 20, kVocab, (ll_dtype)dtype);
            rig->loss.reduction = LL_REDUCTION_SUM;
            for (int64_t i = 0; i < 20; ++i) {
                double others = 0.0;
                rig->target[i] = (int64_t)(problem_random(&random) % kVocab);
                for (int64_t v = 0; v < kVocab; ++v) {
                    ce_rig_set(rig, i, v, problem_normal(&random));
                    if (v != rig->target[i]) others += exp(ce_rig_logit(rig, i, v));
                }
                ce_rig_set(rig, i, rig->target[i], log(others * wanted[w] / (1.0 - wanted[w])));
            }
            ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
            for (int64_t i = 0; i < 20; ++i) {
                long double rest = 0.0L, all;
                for (int64_t v = 0; v < kVocab; ++v) {
                    if (v != rig->target[i]) rest += expl((long double)ce_rig_logit(rig, i, v));
                }
                all = rest + expl((long double)ce_rig_logit(rig, i, rig->target[i]));
                const double want = (double)(-rest / all), got = ce_rig_grad(rig, i, rig->target[i]);
                ce_near("p_y - 1", got, want, 0, ulp(want, (ll_dtype)dtype));
                /* Small p carry a common relative error of half a unit in the last place of log2 p, here
                 * about 20: 2^-20 ln 2. Subnormal f16 have an absolute one. */
                const double relative = dtype == LL_DTYPE_F32 ? 8.0 : 4.0;
                const double absolute = dtype == LL_DTYPE_F16 ? kVocab * 0x1p-25 : 0.0;
                ce_near("sum of dz", ce_rig_grad_sum(rig, i), 0.0, 0,
                        relative * fabs(want) * ulp(1.0, (ll_dtype)dtype) + absolute);
            }
            ce_rig_close(rig);
        }
    }
}

static void b53_sixteen_bit_logits_are_the_same_numbers(void **state) {
    enum { kRows = 8, kVocab = 3000 };
    uint64_t random = 3;
    struct ce_rig *narrow = ce_rig_open(kernel_of(state), kRows, kVocab, LL_DTYPE_BF16);
    struct ce_rig *wide = ce_rig_open(kernel_of(state), kRows, kVocab, LL_DTYPE_F32);
    for (int64_t i = 0; i < kRows; ++i) {
        for (int64_t v = 0; v < kVocab; ++v) {
            ce_rig_set(narrow, i, v, 4.0 * problem_normal(&random));
            ce_rig_set(wide, i, v, ce_rig_logit(narrow, i, v));
        }
    }
    ce_rig_run(narrow, LL_PASS_FORWARD);
    ce_rig_run(wide, LL_PASS_FORWARD);
    assert_memory_equal(narrow->nll, wide->nll, sizeof(float) * kRows);
    assert_memory_equal(narrow->entropy, wide->entropy, sizeof(float) * kRows);
    assert_true(narrow->loss_out[0] == wide->loss_out[0]);
    ce_rig_close(narrow);
    ce_rig_close(wide);
}

static void b59_infinite_logits(void **state) {
    const double z[] = {0, (double)INFINITY};
    struct ce_rig *rig = ce_rig_open(kernel_of(state), 3, 2, LL_DTYPE_F32);
    for (int64_t v = 0; v < 2; ++v) ce_rig_set(rig, 1, v, z[v]);
    rig->loss.reduction = LL_REDUCTION_NONE;
    ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
    assert_true(isnan(rig->nll[1]) && isnan(rig->loss_out[1]) && rig->argmax[1] == -1);
    assert_true(isnan(ce_rig_grad(rig, 1, 0)));
    for (int64_t i = 0; i < 3; i += 2) {
        ce_near("neighbour", rig->loss_out[i], 0.693147181, 1e-6, 0);
        ce_near("its dz", ce_rig_grad(rig, i, 0), -0.5, 1e-6, 0);
    }
    ce_rig_close(rig);
}

/* ---- Quantities of reinforcement learning ------------------------------------------------------- */

static void b82_entropy_with_masked_columns(void **state) {
    const double inf = (double)INFINITY, two[] = {0, 0, -inf}, three[] = {0, 1, -inf},
                 ends[] = {65504, -65504};
    const float up = 1.0f;
    struct ce_rig *rig = one_row(state, two, 3, LL_DTYPE_F32);
    rig->args.up_loss = NULL;
    rig->args.up_entropy = &up;
    ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
    ce_near("H", rig->entropy[0], 0.693147181, 1e-6, 0);
    for (int64_t v = 0; v < 3; ++v) ce_near("dH", ce_rig_grad(rig, 0, v), 0.0, 0, 1e-6);
    for (int64_t v = 0; v < 3; ++v) ce_rig_set(rig, 0, v, three[v]);
    ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
    ce_near("H", rig->entropy[0], 0.582203, 2e-6, 0);
    ce_near("dH", ce_rig_grad(rig, 0, 0), 0.196612, 1e-5, 0);
    ce_near("dH", ce_rig_grad(rig, 0, 1), -0.196612, 1e-5, 0);
    assert_true(ce_rig_grad(rig, 0, 2) == 0.0);
    ce_rig_close(rig);
    rig = one_row(state, ends, 2, LL_DTYPE_F16);
    rig->target[0] = 1;
    ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
    ce_near("H", rig->entropy[0], 0.0, 0, 0);
    ce_near("nll", rig->nll[0], 131008.0, 1e-7, 0);
    ce_rig_close(rig);
}

static void b83_near_deterministic_token(void **state) {
    const double tops[] = {100, 1e4};
    for (int t = 0; t < 2; ++t) {
        struct ce_rig *rig = ce_rig_open(kernel_of(state), 1, 128256, LL_DTYPE_F32);
        ce_rig_set(rig, 0, 0, tops[t]);
        ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
        assert_true(rig->nll[0] >= 0.0f && rig->nll[0] <= 1e-37f);
        assert_true(rig->entropy[0] >= 0.0f && rig->entropy[0] < 1e-6f);
        for (int64_t v = 0; v < 128256; v += 5000) assert_true(!isnan(ce_rig_grad(rig, 0, v)));
        ce_rig_close(rig);
    }
}

static void b84_target_masked(void **state) {
    float up = 1.0f;
    const double z[] = {-(double)INFINITY, 0, 0, 0};
    struct ce_rig *rig = one_row(state, z, 4, LL_DTYPE_F32);
    rig->args.up_loss = NULL;
    rig->args.up_nll = &up;
    ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
    assert_true(rig->nll[0] == INFINITY);
    ce_near("dz of the target", ce_rig_grad(rig, 0, 0), -1.0, 0, 0);
    ce_near("dz of another", ce_rig_grad(rig, 0, 1), 1.0 / 3.0, 1e-6, 0);
    up = 0.0f;
    ce_rig_run(rig, LL_PASS_FORWARD_BACKWARD);
    for (int64_t v = 0; v < 4; ++v) assert_true(ce_rig_grad(rig, 0, v) == 0.0);
    ce_rig_close(rig);
}

static void b88_ranks_with_ties(void **state) {
    const double z[] = {9, 9, 7};
    const int64_t ids[] = {0, 1, 2};
    int64_t ranks[3], top[3];
    float logp[3], top_logp[3];
    struct ce_rig *rig = one_row(state, z, 3, LL_DTYPE_F32);
    rig->desc.n_ids = 3;
    rig->desc.n_top = 3;
    rig->args.ids = ll_view_matrix(ids, LL_DTYPE_I64, 1, 3, 0);
    rig->args.id_rank = ranks;
    rig->args.id_logp = logp;
    rig->args.top_ids = top;
    rig->args.top_logp = top_logp;
    ce_rig_run(rig, LL_PASS_FORWARD);
    for (int64_t j = 0; j < 3; ++j) {
        assert_int_equal(ranks[j], j < 2 ? 1 : 3);
        assert_int_equal(top[j], j);
        assert_true(top_logp[j] == logp[j]);
    }
    assert_int_equal(rig->argmax[0], 0);
    ce_rig_set(rig, 0, 0, -0.0); /* the two zeros are one number */
    ce_rig_set(rig, 0, 1, 0.0);
    ce_rig_set(rig, 0, 2, -1.0);
    ce_rig_run(rig, LL_PASS_FORWARD);
    assert_true(ranks[0] == 1 && ranks[1] == 1 && top[0] == 0 && top[1] == 1);
    ce_rig_close(rig);
}

#define FAULT(name)                                                                                          \
    { #name, name }

int main(void) {
    static const struct ce_fault faults[] = {
        FAULT(b50_common_offsets),
        FAULT(b51_confident_log_probs),
        FAULT(log_probs_are_never_above_0),
        FAULT(b52_true_class_gradient_in_bf16),
        FAULT(b53_sixteen_bit_logits_are_the_same_numbers),
        FAULT(b59_infinite_logits),
        FAULT(b82_entropy_with_masked_columns),
        FAULT(b83_near_deterministic_token),
        FAULT(b84_target_masked),
        FAULT(b88_ranks_with_ties),
        FAULT(true_class_within_one_ulp),
    };
    return ce_faults_main(faults, (int)(sizeof faults / sizeof faults[0]));
}
