/* The vocabulary cut over ranks, over the public API: for every kernel that takes a communicator, any number
 * of ranks and any cut give the bits of one rank (nll, lse, lse_lo, entropy, z_loss, argmax, loss, sums,
 * grad_w, grad_bias), every rank the same grad_x, and a grad_x within the bounds of any kernel. Leaves out
 * the faults of ranks (tests/faults/test_faults_ranks.c) and MPI (tests/mpi). */
#define _POSIX_C_SOURCE 200809L
#include "kernel_run.h"
#include "rank_case.h"
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

static void check_cuts(struct rank_case *c, bool all) {
    static const ll_comm_double script = {
        .struct_bytes = sizeof script, .seed = 7, .delay_us = 200, .pieces = 5};
    const int64_t n_rows = c->problem.v_total + c->problem.v_pad;
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        for (int kind = CUT_EVEN; kind <= CUT_PERMUTED; kind++) {
            if (!all && ((int)s + kind) % 4 != 0) continue; /* slower: a quarter of the cuts */
            if (sizes[s] == 1 && kind != CUT_EVEN) continue;
            const struct rank_cut cut =
                rank_cut_make((enum rank_cut_kind)kind, sizes[s], n_rows, c->problem.seed);
            rank_case_cut(c, &cut, kind == CUT_UNEVEN ? &script : NULL, 1 << FIELD_GRAD_X);
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
    for (size_t p = 0; p < sizeof problems / sizeof problems[0]; p++) {
        struct rank_case c;
        rank_case_open(problems[p], &c);
        rank_case_expect(&c);
        for (int32_t k = 0; k < list.count; k++) {
            if (!takes_ranks(&list.kernels[k])) continue;
            c.kernel = list.kernels[k].name;
            rank_case_want(&c);
            setenv("LL_KERNEL", c.kernel, 1);
            check_cuts(&c, k == 0 && !SANITIZED);
            unsetenv("LL_KERNEL");
            results_destroy(&c.want);
        }
        rank_case_close(&c);
        failed += c.failed + c.stats.failed;
        checked += c.checked;
    }
    printf("%lld comparisons over ranks\n", (long long)checked);
    assert_true(checked > 100);
    assert_int_equal(failed, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(each_kernel_each_cut)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
