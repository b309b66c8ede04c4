/* Every kernel of this machine on every problem it accepts, all three passes, against the reference within
 * the bounds of expect.h. Leaves out equality of bits (test_kernel_bits.c) and large sizes. */
#define _POSIX_C_SOURCE 200809L
#include "core/expect.h"
#include "core/problem_table.h"
#include "kernel_run.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

static void check_intact(const struct problem *problem, const char *kernel, const struct operands *operands,
                         const struct results *results, struct expect_stats *stats) {
    if (!operands_intact(operands)) {
        printf("FAIL %s %s: an input or its guard bytes changed\n", problem->text, kernel);
        ++stats->failed;
    }
    if (!results_intact(results)) {
        printf("FAIL %s %s: guard bytes of an output or a gap between its rows changed\n", problem->text,
               kernel);
        ++stats->failed;
    }
}

static void check_kernel(const struct expectation *expect, const char *kernel, struct expect_stats *stats) {
    const struct problem *problem = expect->problem;
    const struct operands *operands = expect->operands;
    struct results apart, both;
    bool fine = results_create(problem, &apart);
    fine = results_create(problem, &both) && fine;
    assert_true(fine);
    ll_linear_ce_args args = problem_args(problem, operands, &apart, LL_PASS_FORWARD);
    if (kernel_run(kernel, problem, LL_PASS_FORWARD, &args) == LL_STATUS_OK) {
        expectation_check(expect, kernel, "forward", &apart, FIELDS_FORWARD, stats);
        args = problem_args(problem, operands, &apart, LL_PASS_BACKWARD);
        if (kernel_run(kernel, problem, LL_PASS_BACKWARD, &args) != LL_STATUS_OK) ++stats->failed;
        expectation_check(expect, kernel, "backward", &apart, FIELDS_GRADIENTS, stats);
    } else {
        ++stats->failed;
    }
    args = problem_args(problem, operands, &both, LL_PASS_FORWARD_BACKWARD);
    if (kernel_run(kernel, problem, LL_PASS_FORWARD_BACKWARD, &args) != LL_STATUS_OK) ++stats->failed;
    expectation_check(expect, kernel, "forward_backward", &both, FIELDS_ALL, stats);
    check_intact(problem, kernel, operands, &apart, stats);
    check_intact(problem, kernel, operands, &both, stats);
    results_destroy(&both);
    results_destroy(&apart);
}

static void check_problem(const char *text, const struct kernel_list *list, struct expect_stats *stats) {
    struct problem problem;
    struct operands operands;
    struct expectation expect;
    const char *why = problem_parse(text, &problem);
    if (why) fail_msg("%s", why);
    assert_true(operands_create(&problem, &operands));
    const struct expect_rounding rounding = expect_rounding_here(&problem);
    assert_true(expectation_create_for(&problem, &operands, &rounding, &expect));
    for (int32_t k = 0; k < list->count; ++k) {
        if (!kernel_accepts(list->kernels[k].name, &problem)) continue;
        stats[k].printed = 0;
        check_kernel(&expect, list->kernels[k].name, &stats[k]);
    }
    expectation_destroy(&expect);
    operands_destroy(&operands);
}

/* Prints how near each kernel came to its bounds; returns the number of failures. */
static int64_t summarise(const struct kernel_list *list, const struct expect_stats *stats) {
    int64_t failed = 0;
    for (int32_t k = 0; k < list->count; ++k) {
        printf("%-24s %lld values, %lld warnings; largest error as a share of its bound:",
               list->kernels[k].name, (long long)stats[k].checked, (long long)stats[k].warned);
        for (int32_t f = 0; f < kFields; ++f) printf(" %s %.2f", field_names[f], stats[k].worst[f]);
        printf("\n");
        failed += stats[k].failed;
    }
    return failed;
}

static void every_kernel_on_every_problem(void **state) {
    (void)state;
    struct kernel_list list = kernels_here();
    struct expect_stats stats[16] = {{0}};
    const char *only = getenv("LL_PROBLEM"); /* reruns one string */
    if (only) {
        check_problem(only, &list, stats);
    } else {
        for (int32_t p = 0; p < kProblems; ++p) check_problem(problem_table[p], &list, stats);
        for (int32_t p = 0; p < kLargeProblems; ++p) check_problem(large_table[p], &list, stats);
    }
    assert_int_equal(summarise(&list, stats), 0);
}

/* Sizes and options at random: what a table written by hand does not think of. */
static void random_problem(uint64_t seed, char *text, size_t text_bytes) {
    static const char *const dtypes[] = {"f32", "f32", "bf16", "f16", "bf16-f32", "f32-f16"};
    static const char *const options[] = {
        "up",   "bias",  "biasf32", "cap5",  "t0.6",   "ls0.1",  "lso0.2", "zl0.01", "cw",  "cw0",
        "tw",   "ts",    "ign3",    "ign1",  "sum",    "none",   "acc",    "pad5",   "sx2", "sw3",
        "sgx1", "sgw2",  "sy3",     "i32",   "off1",   "gxf32",  "gwf32",  "fx",     "tie", "id3",
        "th3",  "conf9", "scale8",  "add99", "ws4000", "ninf40", "nan9",   "scale0"};
    uint64_t state = seed * 0x9e3779b97f4a7c15u | 1u;
    int n = 1 + (int)(problem_random(&state) % 40), d = 1 + (int)(problem_random(&state) % 90);
    int v = 2 + (int)(problem_random(&state) % 400), count = (int)(problem_random(&state) % 7);
    int used = snprintf(text, text_bytes, "fb:%s:n%d:d%d:v%d", dtypes[problem_random(&state) % 6], n, d, v);
    for (int o = 0; o < count; ++o) {
        const char *option = options[problem_random(&state) % (sizeof options / sizeof options[0])];
        used += snprintf(text + used, text_bytes - (size_t)used, ":%s", option);
    }
}

static void random_sizes_and_options(void **state) {
    (void)state;
    if (getenv("LL_PROBLEM")) skip();
    struct kernel_list list = kernels_here();
    struct expect_stats stats[16] = {{0}};
    char text[160];
    for (uint64_t seed = 1; seed <= 150; ++seed) {
        random_problem(seed, text, sizeof text);
        check_problem(text, &list, stats);
    }
    assert_int_equal(summarise(&list, stats), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_kernel_on_every_problem),
        cmocka_unit_test(random_sizes_and_options),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
