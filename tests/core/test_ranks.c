/* The vocabulary cut over ranks, over the public API: for every kernel that takes a communicator, any number
 * of ranks and any cut give the bits of one rank (nll, lse, lse_lo, entropy, z_loss, argmax, loss, sums,
 * grad_w, grad_bias), every rank the same grad_x, and a grad_x within the bounds of any kernel. Leaves out
 * the faults of ranks (tests/faults/test_faults_ranks.c) and MPI (tests/mpi). */
#define _POSIX_C_SOURCE 200809L
#include "core/expect.h"
#include "kernel_run.h"
#include "rank_run.h"
#include "sanitizer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

/* Every option once, and what cuts could break: targets in shared tiles, -inf columns, NaN rows, ties, all
 * sizes around a tile, confident targets, offsets that need lse_lo, wide logits. */
static const char *const problems[] = {
    "fb:f32:n9:d7:v5:up",
    "fb:f32:n40:d8:v64:up:bias",
    "fb:f32:n70:d16:v129:up:ign3",
    "fb:f32:n33:d24:v700:up:bias:ls0.1:zl1e-3",
    "fb:f32:n19:d40:v180:cap5:lso0.2:up",
    "fb:f32:n21:d24:v300:cw0:ls0.1:ign4:bias:ninf3",
    "fb:f32:n21:d24:v150:ninf7:up",
    "fb:f32:n21:d24:v150:tie:up:nan5",
    "fb:f32:n24:d24:v200:conf40:up",
    "fb:f32:n24:d24:v200:add10000:up",
    "fb:f32:n24:d24:v200:scale200000:up",
    "fb:f32:n12:d24:v200:scale1e8",
    "fb:bf16:n29:d33:v333:up:bias:pad50:tw0:ts:ign5",
    "fb:f16:n12:d65:v130:gxf32:gwf32:biasf32:up:t0.7",
    "fb:bf16:n300:d20:v600:up:none:sx3:sw5:sgx2:sgw7",
    "fb:f32:n300:d20:v600:acc:up:cw:div37.5",
    "fb:f32:n17:d24:v150:ignall:up:bias",
    "fb:f32:n0:d5:v90:bias:up",
    "fb:f32:n21:d24:v150:bias:fx",
    "fb:f32:n21:d24:v150:bias:fx:fw",
    "fb:f32:n3:d2:v1:ls0.1:zl0.1:bias:up",
    "fb:f32:n2500:d16:v90:up:ign7",
};

static const int32_t sizes[] = {1, 2, 3, 4, 7, 8, 16};

struct group_case {
    struct problem problem;
    struct operands operands;
    struct results want; /* forward_backward on one rank */
    struct expectation expect;
    const char *kernel;
    int64_t *failed, *checked;
    struct expect_stats *stats;
};

static void fail_case(const struct group_case *c, const struct rank_cut *cut, const char *what,
                      const char *why) {
    printf("FAIL %s %s: %d ranks %s: %s: %s\n", c->problem.text, c->kernel, cut->n, rank_cut_text(cut), what,
           why);
    ++*c->failed;
}

static bool run(const struct group_case *c, struct rank_run *rank_run, const struct results *results,
                ll_pass pass, const char *what) {
    ll_plan_desc desc;
    problem_desc(&c->problem, &desc);
    const ll_linear_ce_args args = problem_args(&c->problem, &c->operands, results, pass);
    if (ranks_run(rank_run, &desc, &args, pass) == LL_STATUS_OK) return true;
    const char *why = rank_run->difference;
    for (int32_t r = 0; r < rank_run->cut->n && !*why; r++) why = rank_run->sentence[r];
    fail_case(c, rank_run->cut, what, why);
    return false;
}

static void same(const struct group_case *c, const struct rank_cut *cut, const char *what,
                 const struct results *got, const struct results *want, int32_t fields) {
    char label[256];
    ++*c->checked;
    snprintf(label, sizeof label, "%d ranks, %.160s, %s", cut->n, rank_cut_text(cut), what);
    if (!results_same_bits(&c->problem, c->kernel, label, got, want, fields, 0, c->problem.n_tokens) ||
        !results_intact(got)) {
        fail_case(c, cut, what, "not the same bits, or guard bytes changed");
    }
}

static void new_results(const struct group_case *c, struct results *results) {
    if (!results_create(&c->problem, results)) fail_msg("out of memory");
}

/* forward_backward, and forward followed by backward. */
static void check_cut(const struct group_case *c, const struct rank_cut *cut, const ll_comm_double *script) {
    enum { kAll = FIELDS_ALL & ~(1 << FIELD_GRAD_X) };
    struct results both, apart;
    struct rank_run both_run = {.cut = cut, .script = script}, apart_run = both_run;
    new_results(c, &both);
    new_results(c, &apart);
    if (run(c, &both_run, &both, LL_PASS_FORWARD_BACKWARD, "forward_backward")) {
        same(c, cut, "forward_backward", &both, &c->want, kAll);
        expectation_check(&c->expect, c->kernel, "ranks", &both, 1 << FIELD_GRAD_X, c->stats);
    }
    if (run(c, &apart_run, &apart, LL_PASS_FORWARD, "forward") &&
        run(c, &apart_run, &apart, LL_PASS_BACKWARD, "backward")) {
        same(c, cut, "forward then backward", &apart, &both, FIELDS_ALL);
    }
    results_destroy(&apart);
    results_destroy(&both);
}

static void check_cuts(const struct group_case *c, bool all) {
    static const ll_comm_double script = {
        .struct_bytes = sizeof script, .seed = 7, .delay_us = 200, .pieces = 5};
    const int64_t n_rows = c->problem.v_total + c->problem.v_pad;
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        for (int kind = CUT_EVEN; kind <= CUT_PERMUTED; kind++) {
            if (!all && ((int)s + kind) % 4 != 0) continue; /* slower: a quarter of the cuts */
            if (sizes[s] == 1 && kind != CUT_EVEN) continue;
            const struct rank_cut cut =
                rank_cut_make((enum rank_cut_kind)kind, sizes[s], n_rows, c->problem.seed);
            check_cut(c, &cut, kind == CUT_UNEVEN ? &script : NULL);
        }
    }
}

static bool takes_ranks(const ll_kernel_info *kernel) {
    return strcmp(kernel->backend, "ref") != 0;
}

static void each_kernel_each_cut(void **state) {
    (void)state;
    const struct kernel_list list = kernels_here();
    int64_t failed = 0, checked = 0;
    struct expect_stats stats = {0};
    for (size_t p = 0; p < sizeof problems / sizeof problems[0]; p++) {
        struct group_case c = {.failed = &failed, .checked = &checked, .stats = &stats};
        const char *why = problem_parse(problems[p], &c.problem);
        if (why) fail_msg("%s: %s", problems[p], why);
        if (!operands_create(&c.problem, &c.operands) ||
            !expectation_create(&c.problem, &c.operands, &c.expect)) {
            fail_msg("out of memory");
        }
        for (int32_t k = 0; k < list.count; k++) {
            if (!takes_ranks(&list.kernels[k])) continue;
            c.kernel = list.kernels[k].name;
            new_results(&c, &c.want);
            const ll_linear_ce_args args =
                problem_args(&c.problem, &c.operands, &c.want, LL_PASS_FORWARD_BACKWARD);
            assert_int_equal(kernel_run(c.kernel, &c.problem, LL_PASS_FORWARD_BACKWARD, &args), LL_STATUS_OK);
            setenv("LL_KERNEL", c.kernel, 1);
            check_cuts(&c, k == 0 && !WITH_TSAN);
            unsetenv("LL_KERNEL");
            results_destroy(&c.want);
        }
        if (!operands_intact(&c.operands)) {
            printf("FAIL %s: an input changed\n", problems[p]);
            failed++;
        }
        expectation_destroy(&c.expect);
        operands_destroy(&c.operands);
    }
    printf("%lld comparisons over ranks\n", (long long)checked);
    assert_true(checked > 100);
    assert_int_equal(failed + stats.failed, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(each_kernel_each_cut)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
