/* Bits on a GPU: a row's results do not depend on how many tokens a call has, where the row stands, or how
 * the work is cut; and on logits that are exact in any arithmetic they are the CPU's. */
#define _POSIX_C_SOURCE 200809L
#include "core/compare.h"
#include "core/dtype.h"
#include "kernel_run.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

/* Every kernel of the backend that takes a problem is tested with it. */
static const char *const kernels[] = {"linear_ce_cuda", "linear_ce_cuda_sm90"};
enum { kKernels = 2 };

static void problem_open(const char *text, struct problem *problem, struct operands *operands) {
    const char *why = problem_parse(text, problem);
    if (why) fail_msg("%s", why);
    assert_true(operands_create(problem, operands));
}

/* Tokens [first, first + count) in a call, with a plan, of their own. */
static int64_t check_part(const char *kernel, const struct problem *problem, const struct operands *operands,
                          const struct results *want, int64_t first, int64_t count, int64_t kib) {
    struct problem part = *problem;
    struct results got;
    char what[64];
    const int32_t fields = FIELDS_SAVED | 1 << FIELD_GRAD_X;
    part.n_tokens = count;
    part.workspace_kib = kib;
    assert_true(results_create(problem, &got));
    snprintf(what, sizeof what, "tokens [%lld, +%lld) budget %lld KiB", (long long)first, (long long)count,
             (long long)kib);
    ll_linear_ce_args args = problem_args(problem, operands, &got, LL_PASS_FORWARD_BACKWARD);
    problem_slice(problem, &args, first, count);
    bool fine = kernel_run(kernel, &part, LL_PASS_FORWARD_BACKWARD, &args) == LL_STATUS_OK &&
                results_same_bits(problem, kernel, what, &got, want, fields, first, count);
    args = problem_args(problem, operands, &got, LL_PASS_FORWARD);
    problem_slice(problem, &args, first, count);
    fine = fine && kernel_run(kernel, &part, LL_PASS_FORWARD, &args) == LL_STATUS_OK &&
           results_same_bits(problem, kernel, what, &got, want, FIELDS_SAVED, first, count);
    results_destroy(&got);
    return fine ? 0 : 1;
}

static int64_t check_positions(const char *kernel, const char *text) {
    static const int64_t counts[] = {1, 2, 17, 33, 64, 128, 257, 1024, 4096};
    struct problem problem;
    struct operands operands;
    struct results want;
    int64_t failed = 0;
    problem_open(text, &problem, &operands);
    assert_true(results_create(&problem, &want));
    ll_linear_ce_args args = problem_args(&problem, &operands, &want, LL_PASS_FORWARD_BACKWARD);
    assert_int_equal(kernel_run(kernel, &problem, LL_PASS_FORWARD_BACKWARD, &args), LL_STATUS_OK);
    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; ++c) {
        const int64_t last = problem.n_tokens - counts[c];
        failed += check_part(kernel, &problem, &operands, &want, 0, counts[c], 0);
        if (last == 0) continue;
        failed += check_part(kernel, &problem, &operands, &want, 1, counts[c], 0);
        failed += check_part(kernel, &problem, &operands, &want, last - last % 3 / 2, counts[c], 0);
        if (c % 3 == 0) failed += check_part(kernel, &problem, &operands, &want, last / 2 + 1, counts[c], 0);
    }
    for (int64_t mib = 48; mib < 200; mib += mib / 2) {
        failed += check_part(kernel, &problem, &operands, &want, 0, problem.n_tokens, mib << 10);
    }
    results_destroy(&want);
    operands_destroy(&operands);
    return failed;
}

static bool takes(const char *kernel, const char *text) {
    struct problem problem;
    const char *why = problem_parse(text, &problem);
    if (why) fail_msg("%s", why);
    return kernel_accepts(kernel, &problem);
}

static void any_number_of_tokens_and_any_position(void **state) {
    (void)state;
    static const char *const texts[] = {
        "fb:bf16:n4096:d512:v2500:sum:up:gwf32",    "fb:bf16:n4096:d257:v1000:sum:bias:gwf32:sx3",
        "fb:f16:n4096:d320:v1500:sum:up:gwf32",     "fb:f32:n4096:d192:v1100:sum:up",
        "fb:bf16:n4096:d1024:v9000:sum:gwf32:ign7",
    };
    int64_t failed = 0;
    for (size_t t = 0; t < sizeof texts / sizeof texts[0]; ++t) {
        for (int k = 0; k < kKernels; ++k) {
            if (takes(kernels[k], texts[t])) failed += check_positions(kernels[k], texts[t]);
        }
    }
    assert_int_equal(failed, 0);
}

/* x holds one 1 a row, so a logit is an element of w whatever adds it up. */
static void make_exact(const struct problem *problem, struct operands *operands) {
    for (int64_t i = 0; i < problem->n_tokens; ++i) {
        for (int64_t k = 0; k < problem->n_hidden; ++k) {
            const int64_t at = i * operands->args.x.row_stride + k;
            lli_store((void *)operands->args.x.data, operands->args.x.dtype, at,
                      k == i % problem->n_hidden ? 1.0f : 0.0f);
        }
    }
}

/* Whether the fields have the bits of the plain CPU kernel on exact logits. */
static bool as_on_the_cpu(const char *kernel, const char *text, const char *what, int32_t fields) {
    struct problem problem;
    struct operands operands;
    struct results gpu, cpu;
    if (!takes(kernel, text)) return true;
    problem_open(text, &problem, &operands);
    make_exact(&problem, &operands);
    assert_true(results_create(&problem, &gpu) && results_create(&problem, &cpu));
    ll_linear_ce_args args = problem_args(&problem, &operands, &gpu, LL_PASS_FORWARD_BACKWARD);
    bool fine = kernel_run(kernel, &problem, LL_PASS_FORWARD_BACKWARD, &args) == LL_STATUS_OK;
    args = problem_args(&problem, &operands, &cpu, LL_PASS_FORWARD_BACKWARD);
    fine =
        fine && kernel_run("linear_ce_cpu_plain", &problem, LL_PASS_FORWARD_BACKWARD, &args) == LL_STATUS_OK;
    fine = fine && results_same_bits(&problem, kernel, what, &gpu, &cpu, fields, 0, problem.n_tokens);
    results_destroy(&cpu);
    results_destroy(&gpu);
    operands_destroy(&operands);
    return fine;
}

static void on_exact_logits_the_bits_of_the_cpu(void **state) {
    (void)state;
    static const char *const texts[] = {
        "fb:f32:n40:d8:v700:scale9",
        "fb:f32:n40:d8:v700:scale9:up:bias",
        "fb:f32:n40:d8:v1300:cap5:t0.7:bias:up",
        "fb:f32:n40:d8:v700:ls0.1:cw:zl0.01",
        "fb:f32:n40:d8:v700:lso0.2:cw0:bias:cap3:none",
        "fb:f32:n40:d8:v700:ts:tw:ign3:sum",
        "fb:f32:n40:d8:v700:scale3000:none",
        "fb:f32:n40:d8:v700:scale3e6:none",
        "fb:f32:n40:d8:v700:scale3e12:none",
        "fb:f32:n40:d8:v1:bias",
        "fb:f32:n40:d8:v64:tie",
        "fb:f32:n40:d8:v65:tie:bias:t3",
        "fb:bf16:n40:d16:v5000:scale8:up:gwf32:gxf32",
        "fb:f16:n40:d16:v5000:scale8:ls0.1",
        "fb:f32:n40:d8:v700:ninf3:up",
    };
    int64_t failed = 0;
    for (size_t t = 0; t < sizeof texts / sizeof texts[0]; ++t) {
        for (int k = 0; k < kKernels; ++k) {
            failed += !as_on_the_cpu(kernels[k], texts[t], "against the CPU", FIELDS_FORWARD);
        }
    }
    assert_int_equal(failed, 0);
}

/* With one token grad_bias is dr itself, in f32, before any rounding to the operands' dtype. */
static void on_exact_logits_the_gradients_of_the_cpu(void **state) {
    (void)state;
    static const char *const texts[] = {
        "fb:f32:n1:d8:v700:scale9:up:biasf32",          "fb:bf16:n1:d8:v700:scale4:up:biasf32:gbf32",
        "fb:f16:n1:d8:v700:scale4:up:biasf32:ls0.1:cw", "fb:f32:n1:d8:v700:cap5:t0.7:up:biasf32:zl0.1",
        "fb:f32:n1:d8:v700:scale3e6:none:up:biasf32",   "fb:f32:n1:d8:v70:scale3e12:none:biasf32",
        "fb:f32:n1:d8:v9000:lso0.3:cap2:t2:biasf32:up", "fb:f32:n1:d8:v700:conf40:biasf32",
    };
    int64_t failed = 0;
    for (size_t t = 0; t < sizeof texts / sizeof texts[0]; ++t) {
        for (int k = 0; k < kKernels; ++k) {
            failed += !as_on_the_cpu(kernels[k], texts[t], "dr against the CPU", 1 << FIELD_GRAD_BIAS);
        }
    }
    assert_int_equal(failed, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(on_exact_logits_the_bits_of_the_cpu),
        cmocka_unit_test(on_exact_logits_the_gradients_of_the_cpu),
        cmocka_unit_test(any_number_of_tokens_and_any_position),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
