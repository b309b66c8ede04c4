/* Results do not depend on how the work is cut, over the public API: for every kernel, equal bits from
 * forward_backward and from forward then backward, with any set of outputs left out, for a row alone and in
 * any batch, for any thread count and workspace budget, from run to run; and from every kernel with the same
 * numerics id. Leaves out whether the bits are right (test_kernels.c). */
#define _POSIX_C_SOURCE 200809L
#include "core/compare.h"
#include "core/problem_table.h"
#include "kernel_run.h"
#include "sanitizer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

/* A problem on a kernel, with the results that every other way of computing them must repeat. */
struct bits {
    struct problem problem;
    struct operands operands;
    struct results want; /* forward_backward as the problem says */
    const char *kernel;
    bool exact_across_passes; /* not the reference, whose backward starts from results rounded to f32 */
    int64_t *failed;
};

static void results_new(const struct bits *bits, struct results *results) {
    if (!results_create(&bits->problem, results)) fail_msg("out of memory");
}

static bool run(const struct bits *bits, const struct problem *problem, ll_pass pass,
                const ll_linear_ce_args *args) {
    bool fine = kernel_run(bits->kernel, problem, pass, args) == LL_STATUS_OK;
    if (!fine) ++*bits->failed;
    return fine;
}

/* On a GPU grad_w and grad_bias are sums over chunks of tokens, of sizes that the pass and the budget give.
 */
static int32_t comparable(const struct bits *bits, const char *what, int32_t fields) {
    const char *backend = getenv("LL_TEST_BACKEND");
    const int64_t least_chunk = strstr(what, "budget") ? 128 : 1024;
    if (!backend || strcmp(backend, "cuda") != 0 || bits->problem.n_tokens <= least_chunk) return fields;
    return fields & ~(1 << FIELD_GRAD_W | 1 << FIELD_GRAD_BIAS);
}

static void same(const struct bits *bits, const char *what, const struct results *got, int32_t fields) {
    fields = comparable(bits, what, fields);
    bool fine = results_same_bits(&bits->problem, bits->kernel, what, got, &bits->want, fields, 0,
                                  bits->problem.n_tokens);
    if (!results_intact(got)) {
        printf("FAIL %s %s: %s: guard bytes changed\n", bits->problem.text, bits->kernel, what);
        fine = false;
    }
    if (!fine) ++*bits->failed;
}

/* The problem with other threads or another budget, by forward_backward and by forward, backward, backward.
 */
static void check_variant(const struct bits *bits, const struct problem *variant, const char *what) {
    struct results both, apart, again;
    char label[96];
    results_new(bits, &both);
    results_new(bits, &apart);
    results_new(bits, &again);
    ll_linear_ce_args args = problem_args(variant, &bits->operands, &both, LL_PASS_FORWARD_BACKWARD);
    snprintf(label, sizeof label, "%s, forward_backward", what);
    if (run(bits, variant, LL_PASS_FORWARD_BACKWARD, &args)) same(bits, label, &both, FIELDS_ALL);
    args = problem_args(variant, &bits->operands, &apart, LL_PASS_FORWARD);
    snprintf(label, sizeof label, "%s, forward", what);
    if (run(bits, variant, LL_PASS_FORWARD, &args)) same(bits, label, &apart, FIELDS_FORWARD);
    if (bits->exact_across_passes) {
        args = problem_args(variant, &bits->operands, &apart, LL_PASS_BACKWARD);
        snprintf(label, sizeof label, "%s, forward then backward", what);
        if (run(bits, variant, LL_PASS_BACKWARD, &args)) same(bits, label, &apart, FIELDS_GRADIENTS);
        args.grad_x = again.grad_x;
        args.grad_w = again.grad_w;
        args.grad_bias = again.grad_bias;
        snprintf(label, sizeof label, "%s, a second backward", what);
        if (run(bits, variant, LL_PASS_BACKWARD, &args)) same(bits, label, &again, FIELDS_GRADIENTS);
    }
    results_destroy(&again);
    results_destroy(&apart);
    results_destroy(&both);
}

static void check_threads(const struct bits *bits) {
    if (!bits->exact_across_passes) return; /* the reference has one thread */
    static const int32_t counts[] = {1, 2, 3, 8};
    for (size_t t = 0; t < sizeof counts / sizeof counts[0]; ++t) {
        struct problem variant = bits->problem;
        char what[32];
        variant.n_threads = counts[t];
        snprintf(what, sizeof what, "threads %d", counts[t]);
        check_variant(bits, &variant, what);
    }
}

/* From the smallest budget (in KiB, in steps of a half) that is accepted, four budgets up. */
static void check_budgets(const struct bits *bits) {
    int32_t accepted = 0, enough = bits->exact_across_passes ? 4 : 1; /* the reference has nothing to cut */
    for (int64_t kib = 1; kib < 65536 && accepted < enough; kib += kib / 2 + 1) {
        struct problem variant = bits->problem;
        ll_plan_desc desc;
        ll_plan *plan = NULL;
        char what[32];
        variant.workspace_kib = kib;
        problem_desc(&variant, &desc);
        setenv("LL_KERNEL", bits->kernel, 1);
        ll_status status = ll_plan_create(&desc, &plan);
        unsetenv("LL_KERNEL");
        for (int32_t pass = 0; status == LL_STATUS_OK && pass < 3; ++pass) {
            size_t bytes = 0;
            ll_plan_workspace(plan, (ll_pass)pass, &bytes);
            if (bytes <= (size_t)kib * 1024) continue;
            printf("FAIL %s %s: pass %d needs %zu bytes, over its budget of %lld KiB\n", bits->problem.text,
                   bits->kernel, pass, bytes, (long long)kib);
            ++*bits->failed;
        }
        ll_plan_destroy(plan);
        if (status != LL_STATUS_OK) continue;
        ++accepted;
        snprintf(what, sizeof what, "budget %lld KiB", (long long)kib);
        check_variant(bits, &variant, what);
    }
    if (accepted == 0) {
        printf("FAIL %s %s: no budget up to 64 MiB is enough\n", bits->problem.text, bits->kernel);
        ++*bits->failed;
    }
}

/* Tokens [first, first + count) as a call of their own, into the same rows of fresh results. */
static void check_slice(const struct bits *bits, int64_t first, int64_t count) {
    const struct problem *problem = &bits->problem;
    struct results part;
    double divisor = bits->operands.args.divisor ? *bits->operands.args.divisor : bits->want.sums->weight;
    bool none = problem->loss.reduction == LL_REDUCTION_NONE;
    int32_t fields = none ? FIELDS_FORWARD & ~FIELDS_SUMS : FIELDS_SAVED;
    char what[64];
    if (problem->loss.reduction == LL_REDUCTION_MEAN && divisor == 0.0) return; /* no divisor to hand on */
    results_new(bits, &part);
    ll_linear_ce_args args = problem_args(problem, &bits->operands, &part, LL_PASS_FORWARD_BACKWARD);
    problem_slice(problem, &args, first, count);
    if (problem->loss.reduction == LL_REDUCTION_MEAN) args.divisor = &divisor;
    snprintf(what, sizeof what, "tokens %lld to %lld alone", (long long)first,
             (long long)(first + count - 1));
    if (run(bits, problem, LL_PASS_FORWARD_BACKWARD, &args) &&
        !results_same_bits(problem, bits->kernel, what, &part, &bits->want, fields | 1 << FIELD_GRAD_X, first,
                           count)) {
        ++*bits->failed;
    }
    results_destroy(&part);
}

static void check_slices(const struct bits *bits) {
    int64_t n = bits->problem.n_tokens;
    if (n == 0) return;
    check_slice(bits, 0, 1);
    check_slice(bits, n / 2, 1);
    check_slice(bits, n - 1, 1);
    if (n < 4) return;
    check_slice(bits, 0, n / 3);
    check_slice(bits, n / 3, n - 1 - n / 3);
    check_slice(bits, 1, n - 1);
}

/* Takes from `args` the outputs whose bit in `keep` is not set. */
static void leave_out(ll_linear_ce_args *args, uint32_t keep) {
    float **floats[] = {&args->loss, &args->nll, &args->lse, &args->lse_lo, &args->entropy, &args->z_loss};
    for (int32_t f = 0; f < 6; ++f) {
        if (!(keep >> f & 1)) *floats[f] = NULL;
    }
    if (!(keep >> 6 & 1)) args->argmax = NULL;
    if (!(keep >> 7 & 1)) args->sums = NULL;
    ll_view *gradients[] = {&args->grad_x, &args->grad_w, &args->grad_bias};
    for (int32_t g = 0; g < 3; ++g) {
        if (keep >> (8 + g) & 1) continue;
        *gradients[g] = (ll_view){0};
        args->accumulate &= ~(1 << g); /* LL_ACCUMULATE_X, _W, _BIAS are 1, 2, 4 */
    }
}

/* The outputs of `keep` alone: the same bits, and nothing in the others. */
static void check_outputs(const struct bits *bits, ll_pass pass, uint32_t keep) {
    const struct problem *problem = &bits->problem;
    struct results part, untouched;
    char what[64];
    results_new(bits, &part);
    ll_linear_ce_args args = problem_args(problem, &bits->operands, &part, pass);
    leave_out(&args, keep);
    bool any_gradient = args.grad_x.data || args.grad_w.data || args.grad_bias.data;
    bool any_output = args.loss || args.nll || args.lse || args.lse_lo || args.entropy || args.z_loss ||
                      args.argmax || args.sums;
    if (pass == LL_PASS_FORWARD ? any_output : any_gradient) {
        int32_t fields = (int32_t)(keep & 0x7fu) | (int32_t)(keep >> 8 & 7u) << FIELD_GRAD_X;
        if (keep >> 7 & 1) fields |= FIELDS_SUMS;
        if (pass == LL_PASS_FORWARD) fields &= FIELDS_FORWARD;
        results_new(bits, &untouched);
        snprintf(what, sizeof what, "pass %d, only outputs %#x", (int)pass, keep);
        if (run(bits, problem, pass, &args)) {
            same(bits, what, &part, fields);
            bool clean = results_same_bits(problem, bits->kernel, "an output not asked for", &part,
                                           &untouched, FIELDS_ALL & ~fields, 0, problem->n_tokens);
            if (!clean) ++*bits->failed;
        }
        results_destroy(&untouched);
    }
    results_destroy(&part);
}

/* Each output left out, each alone, and each set of gradients with and without the other outputs. */
static void check_some_outputs(const struct bits *bits) {
    for (int32_t output = 0; output < 8; ++output) {
        check_outputs(bits, LL_PASS_FORWARD, 1u << output);
        check_outputs(bits, LL_PASS_FORWARD, 0xffu & ~(1u << output));
    }
    for (uint32_t gradients = 1; gradients < 8; ++gradients) {
        check_outputs(bits, LL_PASS_FORWARD_BACKWARD, gradients << 8);
        check_outputs(bits, LL_PASS_FORWARD_BACKWARD, gradients << 8 | 0xffu);
    }
}

/* One way of cutting or asking, over a problem: what a test below applies to each kernel and problem. */
typedef void (*bits_check)(const struct bits *bits);

static void check_as_given(const struct bits *bits) {
    check_variant(bits, &bits->problem, "again");
}

static void with_problem(const char *text, const ll_kernel_info *kernel, bits_check check, int64_t *failed) {
    struct bits bits = {.kernel = kernel->name, .failed = failed};
    const char *why = problem_parse(text, &bits.problem);
    if (why) fail_msg("%s", why);
    if (!kernel_accepts(kernel->name, &bits.problem)) return;
    bits.exact_across_passes = strcmp(kernel->backend, "ref") != 0;
    assert_true(operands_create(&bits.problem, &bits.operands));
    results_new(&bits, &bits.want);
    ll_linear_ce_args args =
        problem_args(&bits.problem, &bits.operands, &bits.want, LL_PASS_FORWARD_BACKWARD);
    if (run(&bits, &bits.problem, LL_PASS_FORWARD_BACKWARD, &args)) check(&bits);
    if (!operands_intact(&bits.operands)) {
        printf("FAIL %s %s: an input or its guard bytes changed\n", text, kernel->name);
        ++*failed;
    }
    results_destroy(&bits.want);
    operands_destroy(&bits.operands);
}

/* Under the thread sanitizer a part of what does not vary the threads. */
enum { kStep = WITH_TSAN ? 4 : 1, kSubsetStep = WITH_TSAN ? 29 : 1 };

/* Every step-th problem. */
static void over_the_table(bits_check check, int32_t step) {
    struct kernel_list list = kernels_here();
    int64_t failed = 0;
    const char *only = getenv("LL_PROBLEM"); /* reruns one string */
    for (int32_t k = 0; k < list.count; ++k) {
        const ll_kernel_info *kernel = &list.kernels[k];
        bool slow = strcmp(kernel->backend, "ref") == 0;
        for (int32_t p = 0; p < (only ? 1 : kProblems); p += step) {
            with_problem(only ? only : problem_table[p], kernel, check, &failed);
        }
        for (int32_t p = 0; p < (only || slow ? 0 : kLargeProblems); p += WITH_TSAN ? step : 1) {
            with_problem(large_table[p], kernel, check, &failed);
        }
    }
    assert_int_equal(failed, 0);
}

static void forward_backward_is_forward_then_backward(void **state) {
    (void)state;
    over_the_table(check_as_given, kStep);
}

static void any_thread_count(void **state) {
    (void)state;
    over_the_table(check_threads, 1);
}

static void any_workspace_budget(void **state) {
    (void)state;
    over_the_table(check_budgets, kStep);
}

static void rows_alone_and_batches_in_slices(void **state) {
    (void)state;
    over_the_table(check_slices, kStep);
}

static void outputs_left_out(void **state) {
    (void)state;
    over_the_table(check_some_outputs, 3 * kStep);
}

static void every_subset_of_outputs(void **state) {
    (void)state;
    struct kernel_list list = kernels_here();
    int64_t failed = 0;
    for (int32_t k = 0; k < list.count; ++k) {
        struct bits bits = {.kernel = list.kernels[k].name, .failed = &failed};
        assert_null(problem_parse("fb:f32:n9:d12:v70:bias:zl0.01:ls0.1:ign4:up", &bits.problem));
        if (!kernel_accepts(bits.kernel, &bits.problem)) {
            assert_null(problem_parse("fb:bf16:n9:d16:v70:bias:zl0.01:ign4:up", &bits.problem));
        }
        assert_true(operands_create(&bits.problem, &bits.operands));
        results_new(&bits, &bits.want);
        ll_linear_ce_args args =
            problem_args(&bits.problem, &bits.operands, &bits.want, LL_PASS_FORWARD_BACKWARD);
        if (run(&bits, &bits.problem, LL_PASS_FORWARD_BACKWARD, &args)) {
            for (uint32_t keep = 1; keep < 256; keep += kSubsetStep)
                check_outputs(&bits, LL_PASS_FORWARD, keep);
            for (uint32_t keep = 256; keep < 2048; keep += kSubsetStep)
                check_outputs(&bits, LL_PASS_FORWARD_BACKWARD, keep);
        }
        results_destroy(&bits.want);
        operands_destroy(&bits.operands);
    }
    assert_int_equal(failed, 0);
}

/* Against the first kernel with the same numerics id. */
static void kernels_of_one_numerics_id(void **state) {
    (void)state;
    struct kernel_list list = kernels_here();
    int64_t failed = 0, pairs = 0;
    for (int32_t k = 1; k < list.count; ++k) {
        int32_t first = 0;
        while (strcmp(list.kernels[first].numerics, list.kernels[k].numerics) != 0) ++first;
        if (first == k) continue;
        ++pairs;
        for (int32_t p = 0; p < kProblems; ++p) {
            struct bits bits = {
                .kernel = list.kernels[k].name, .exact_across_passes = true, .failed = &failed};
            assert_null(problem_parse(problem_table[p], &bits.problem));
            if (!kernel_accepts(list.kernels[first].name, &bits.problem) ||
                !kernel_accepts(bits.kernel, &bits.problem)) {
                continue;
            }
            assert_true(operands_create(&bits.problem, &bits.operands));
            results_new(&bits, &bits.want);
            ll_linear_ce_args args =
                problem_args(&bits.problem, &bits.operands, &bits.want, LL_PASS_FORWARD_BACKWARD);
            const char *other = list.kernels[first].name;
            if (kernel_run(other, &bits.problem, LL_PASS_FORWARD_BACKWARD, &args) != LL_STATUS_OK) ++failed;
            check_variant(&bits, &bits.problem, other);
            results_destroy(&bits.want);
            operands_destroy(&bits.operands);
        }
    }
    printf("%lld pairs of kernels share a numerics id\n", (long long)pairs);
    assert_int_equal(failed, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(forward_backward_is_forward_then_backward),
        cmocka_unit_test(any_thread_count),
        cmocka_unit_test(any_workspace_budget),
        cmocka_unit_test(rows_alone_and_batches_in_slices),
        cmocka_unit_test(outputs_left_out),
        cmocka_unit_test(every_subset_of_outputs),
        cmocka_unit_test(kernels_of_one_numerics_id),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
