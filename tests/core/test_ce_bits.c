/* Equal bits of ce: for every kernel of one numerics id, any number of threads, a row alone and anywhere in a
 * batch, from call to call, and from equal f32 logits of linear_ce. Ranks are in test_ce_ranks.c. */
#define _POSIX_C_SOURCE 200809L
#include "ce_run.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

enum { kAllFields = (1 << kCeFields) - 1 };

/* Rows of any size and every option whose value a row carries alone. */
static const char *const texts[] = {
    "ce:f32:n37:v1500:up:none:ids3:top9",
    "ce:bf16:n37:v1500:up:none:ids3:top9:ign5",
    "ce:f16:n21:v3111:up:none:zl0.01:pad9:sx3",
    "ce:f32:n33:v700:cap5:t0.7:ls0.1:up:none:ids2:top3",
    "ce:bf16:n33:v2100:ls0.2:cw:none:tw:gxf32",
    "ce:f32:n20:v333:lso0.1:cw0:ts:none:up:scale9",
    "ce:f32:n20:v1333:tie:none:top30:ids4",
    "ce:f32:n20:v1333:ninf7:none:top30:ids4:up",
    "ce:f32:n20:v500:add30000:none:up",
    "ce:f32:n18:v777:nan5:none:up:top4",
    "ce:f32:n600:v20:none:up",
};
enum { kTexts = sizeof texts / sizeof texts[0] };

/* A problem with its operands, and the results of one kernel. */
struct fixture {
    struct problem problem;
    struct ce_operands operands;
    struct ce_results results;
};

static void make(struct fixture *f, const char *text) {
    const char *why = problem_parse(text, &f->problem);
    if (why) fail_msg("%s", why);
    assert_true(ce_operands_create(&f->problem, &f->operands));
    assert_true(ce_results_create(&f->problem, &f->operands, &f->results));
}

static void drop(struct fixture *f) {
    ce_results_destroy(&f->results);
    ce_operands_destroy(&f->operands);
}

static void run_into(const char *kernel, const struct problem *problem, const struct ce_operands *operands,
                     struct ce_results *results) {
    ll_ce_args args = ce_problem_args(problem, operands, results, LL_PASS_FORWARD_BACKWARD);
    assert_int_equal(ce_kernel_run(kernel, problem, LL_PASS_FORWARD_BACKWARD, &args), LL_STATUS_OK);
}

static void kernels_and_threads(void **state) {
    (void)state;
    const struct kernel_list list = kernels_of("ce_cpu");
    int64_t failed = 0;
    for (int t = 0; t < kTexts; ++t) {
        struct fixture f;
        make(&f, texts[t]);
        f.problem.n_threads = 1;
        run_into(best_kernel_of("ce_cpu"), &f.problem, &f.operands, &f.results);
        for (int32_t k = 0; k < list.count; ++k) {
            for (int32_t threads = 1; threads <= 5; threads += 2) {
                struct ce_results other;
                f.problem.n_threads = threads;
                assert_string_equal(list.kernels[k].numerics, list.kernels[0].numerics);
                assert_true(ce_results_create(&f.problem, &f.operands, &other));
                run_into(list.kernels[k].name, &f.problem, &f.operands, &other);
                failed += ce_differences(&f.problem, list.kernels[k].name, &other, &f.results, kAllFields);
                ce_results_destroy(&other);
            }
        }
        drop(&f);
    }
    assert_int_equal(failed, 0);
}

/* B75, B76: pieces of 1, 2, 7 and 16 rows, everything but the sums over the call. */
static void rows_in_any_batch(void **state) {
    (void)state;
    static const int64_t sizes[] = {1, 2, 7, 16};
    int64_t failed = 0;
    for (int t = 0; t < kTexts; ++t) {
        struct fixture f;
        make(&f, texts[t]);
        run_into(best_kernel_of("ce_cpu"), &f.problem, &f.operands, &f.results);
        for (int s = 0; s < 4; ++s) {
            struct ce_results pieces;
            assert_true(ce_results_create(&f.problem, &f.operands, &pieces));
            for (int64_t first = 0; first < f.problem.n_tokens; first += sizes[s]) {
                const int64_t left = f.problem.n_tokens - first, count = left < sizes[s] ? left : sizes[s];
                ll_ce_args args = ce_problem_args(&f.problem, &f.operands, &pieces, LL_PASS_FORWARD_BACKWARD);
                ce_problem_slice(&f.problem, &args, first, count);
                assert_int_equal(
                    ce_kernel_run(best_kernel_of("ce_cpu"), &f.problem, LL_PASS_FORWARD_BACKWARD, &args),
                    LL_STATUS_OK);
            }
            *pieces.sums = *f.results.sums;
            failed += ce_differences(&f.problem, "in pieces", &pieces, &f.results, kAllFields);
            ce_results_destroy(&pieces);
        }
        drop(&f);
    }
    assert_int_equal(failed, 0);
}

/* B81: twenty calls on three threads. */
static void calls_repeat(void **state) {
    (void)state;
    struct fixture f;
    int64_t failed = 0;
    make(&f, "ce:bf16:n200:v900:ls0.1:cw:tw:zl0.01:up:th3");
    run_into(best_kernel_of("ce_cpu"), &f.problem, &f.operands, &f.results);
    for (int repeat = 0; repeat < 20; ++repeat) {
        struct ce_results again;
        assert_true(ce_results_create(&f.problem, &f.operands, &again));
        run_into(best_kernel_of("ce_cpu"), &f.problem, &f.operands, &again);
        failed += ce_differences(&f.problem, "again", &again, &f.results, kAllFields);
        ce_results_destroy(&again);
    }
    drop(&f);
    assert_int_equal(failed, 0);
}

/* ---- The other operation ------------------------------------------------------------------------ */

/* linear_ce with w the identity and x the logits forms exactly them, and grad_x is their gradient. */
static void linear_ce_has_the_same_bits(void **state) {
    (void)state;
    static const char *const equal[] = {
        "ce:f32:n9:v257:up",
        "ce:f32:n9:v130:cap3:t0.7:up:zl0.01",
        "ce:f32:n9:v200:ls0.1:cw:tw",
        "ce:f32:n9:v64:lso0.2:none",
        "ce:f32:n9:v191:scale12:ts:up:sum",
        "ce:f32:n9:v300:conf20:ign4",
        "ce:f32:n9:v100:add1000:up",
        "ce:f32:n3:v1:up",
    };
    for (size_t t = 0; t < sizeof equal / sizeof equal[0]; ++t) {
        struct fixture f;
        make(&f, equal[t]);
        const struct problem *p = &f.problem;
        const int64_t n = p->n_tokens, v = p->v_total;
        struct ce_results other;
        assert_true(ce_results_create(p, &f.operands, &other));
        run_into(best_kernel_of("ce_cpu"), p, &f.operands, &f.results);
        float *w = calloc((size_t)(v * v), sizeof *w);
        assert_non_null(w);
        for (int64_t c = 0; c < v; ++c) w[c * v + c] = 1.0f;
        const ll_ce_args ce = ce_problem_args(p, &f.operands, &other, LL_PASS_FORWARD_BACKWARD);
        ll_linear_ce_args args = LL_LINEAR_CE_ARGS_INIT;
        args.x = ce.logits;
        args.w = ll_view_matrix(w, LL_DTYPE_F32, v, v, 0);
        args.target = ce.target;
        args.class_weight = ce.class_weight;
        args.token_weight = ce.token_weight;
        args.divisor = ce.divisor;
        args.loss = ce.loss;
        args.nll = ce.nll;
        args.lse = ce.lse;
        args.lse_lo = ce.lse_lo;
        args.entropy = ce.entropy;
        args.z_loss = ce.z_loss;
        args.argmax = ce.argmax;
        args.sums = ce.sums;
        args.up_loss = ce.up_loss;
        args.up_nll = ce.up_nll;
        args.up_lse = ce.up_lse;
        args.up_entropy = ce.up_entropy;
        args.grad_x = ce.grad_logits;
        struct problem linear = *p;
        linear.op = LL_OP_LINEAR_CE;
        linear.n_hidden = v;
        linear.w_dtype = LL_DTYPE_F32;
        linear.frozen = LL_FROZEN_W;
        assert_int_equal(kernel_run(best_kernel_of("linear_ce_"), &linear, LL_PASS_FORWARD_BACKWARD, &args),
                         LL_STATUS_OK);
        /* A product's chain starts from +0, so a zero of ours may be the other's of other sign. */
        for (int64_t i = 0; i < n * v; ++i) {
            float *g = (float *)f.results.grad_logits.data + i;
            if (*g == 0.0f) *g = 0.0f;
        }
        assert_int_equal(ce_differences(p, "linear_ce", &other, &f.results, kAllFields), 0);
        free(w);
        ce_results_destroy(&other);
        drop(&f);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kernels_and_threads),
        cmocka_unit_test(rows_in_any_batch),
        cmocka_unit_test(calls_repeat),
        cmocka_unit_test(linear_ce_has_the_same_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
