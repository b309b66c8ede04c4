/* The vocabulary over ranks on a GPU. Every option, on every kernel that takes it, over cuts on tiles, inside
 * tiles, all inside one tile, with empty ranks and in any order: row results, loss, grad_w and grad_bias have
 * one rank's bits (but see rounds_by_parts), grad_x is the same on every rank and within the bounds of one
 * kernel. Ranks are threads on one GPU. What a rank does wrong: test_cuda_rank_calls.c; the reported faults
 * of ranks: tests/faults/test_faults_ranks.c. */
#define _POSIX_C_SOURCE 200809L
#include "cuda/cuda_ranks.h"

/* One chunk of tokens each, so that grad_w is one sum as on one rank. */
static const char *const problems[] = {
    /* f32: linear_ce_cuda alone */
    "fb:f32:n9:d7:v5:up",
    "fb:f32:n70:d16:v129:up:ign3",
    "fb:f32:n33:d24:v700:up:bias:ls0.1:zl1e-3",
    "fb:f32:n19:d40:v180:cap5:lso0.2:up",
    "fb:f32:n21:d24:v300:cw0:ls0.1:ign4:bias:ninf3",
    "fb:f32:n21:d24:v150:tie:up:nan5",
    "fb:f32:n24:d24:v200:conf40:up",
    "fb:f32:n24:d24:v200:scale200000:up",
    "fb:f32:n12:d24:v200:scale1e8",
    "fb:f32:n300:d20:v600:acc:up:cw:div37.5",
    "fb:f32:n3:d2:v1:ls0.1:zl0.1:bias:up",
    "fb:f16:n12:d65:v130:gxf32:gwf32:biasf32:up:t0.7",
    "fb:f16:n70:d64:v300:ls0.1:cw:bias:ign5",
    "fb:bf16:n29:d33:v333:up:bias:pad50:tw0:ts:ign5",
    /* both */
    "fb:bf16:n130:d64:v700:up:ign7",
    "fb:bf16:n140:d72:v2500:up:gwf32:none:sx8:sw8:sgx2:sgw7",
    "fb:bf16:n64:d72:v450:up:bias:t0.7:zl1e-3:cw:pad70",
    "fb:bf16:n257:d24:v600:tie:bias:up:nan9:ts:tw0",
    "fb:bf16:n40:d64:v300:conf15:up:gxf32:gwf32",
    "fb:bf16:n33:d64:v500:ninf3:up",
    "fb:bf16:n20:d64:v260:fx:bias",
    "fb:bf16:n20:d64:v260:fw:up",
    "fb:bf16:n17:d64:v150:ignall:up:bias",
    "fb:bf16:n0:d64:v90:bias:up",
};

/* ---- Cuts --------------------------------------------------------------------------------------- */

enum { kCuts = 11 };

static struct rank_cut cut_number(int number, int64_t n_rows, uint64_t seed) {
    static const int64_t on_tiles[] = {64, 192}, in_one_tile[] = {70, 80, 90}, one_column[] = {64, 65},
                         tile_and_rest[] = {128, 191}, around[] = {63, 129};
    switch (number) {
    case 0:
        return cut_at(n_rows, 2, on_tiles);
    case 1:
        return cut_at(n_rows, 3, in_one_tile);
    case 2:
        return cut_at(n_rows, 2, one_column);
    case 3:
        return cut_at(n_rows, 2, tile_and_rest);
    case 4:
        return cut_at(n_rows, 2, around);
    case 5:
        return rank_cut_make(CUT_EVEN, 2, n_rows, seed);
    case 6:
        return rank_cut_make(CUT_EVEN, 1, n_rows, seed);
    case 7:
        return rank_cut_make(CUT_TINY, 4, n_rows, seed);
    case 8:
        return rank_cut_make(CUT_EMPTY, 4, n_rows, seed);
    case 9:
        return rank_cut_make(CUT_PERMUTED, 4, n_rows, seed);
    default:
        return rank_cut_make(CUT_UNEVEN, 3, n_rows, seed);
    }
}

/* ---- Bits and bounds ---------------------------------------------------------------------------- */

/* dz of a plain bf16 problem is made of exponentials that are rounded relative to the largest logit of their
 * tile (cuda/exp16.cuh): where a cut goes through the tile, of the rank's part of it. */
static bool rounds_by_parts(const struct rank_case *c, const struct rank_cut *cut) {
    bool inside = false;
    for (int32_t r = 0; r < cut->n; r++) {
        inside = inside || cut->begin[r] % 64 != 0 || (cut->begin[r] + cut->count[r]) % 64 != 0;
    }
    return inside && c->expect.rounding.p > 0.0;
}

/* Every cut of a problem on linear_ce_cuda_sm90, every third on linear_ce_cuda; two of three where that is
 * alone. */
static void each_option_each_cut(void **state) {
    (void)state;
    static const ll_comm_double script = {
        .struct_bytes = sizeof script, .seed = 7, .delay_us = 100, .pieces = 5};
    int64_t failed = 0, checked = 0;
    for (size_t p = 0; p < sizeof problems / sizeof problems[0]; p++) {
        struct rank_case c;
        rank_case_open(problems[p], &c);
        rank_case_expect(&c);
        bool taken = false;
        for (int k = kKernels - 1; k >= 0; k--) {
            c.kernel = kernels[k];
            if (!kernel_accepts(c.kernel, &c.problem)) continue;
            rank_case_want(&c);
            setenv("LL_KERNEL", c.kernel, 1);
            for (int number = 0; number < kCuts; number++) {
                if (taken && (number + (int)p) % 3 != 0) continue;
                if (!taken && k == 0 && (number + (int)p) % 3 == 0) continue;
                const struct rank_cut cut =
                    cut_number(number, c.problem.v_total + c.problem.v_pad, c.problem.seed);
                const int32_t sums = rounds_by_parts(&c, &cut) ? FIELDS_GRADIENTS : 1 << FIELD_GRAD_X;
                rank_case_cut(&c, &cut, number == kCuts - 1 ? &script : NULL, sums);
            }
            unsetenv("LL_KERNEL");
            results_destroy(&c.want);
            taken = true;
        }
        assert_true(taken);
        rank_case_close(&c);
        failed += c.failed + c.stats.failed;
        checked += c.checked;
    }
    printf("%lld comparisons over ranks\n", (long long)checked);
    assert_true(checked > 300);
    assert_int_equal(failed, 0);
}

/* Several chunks of tokens, other ones on each rank's own wish: the ranks go through the same. Rows, loss and
 * grad_x need no more; grad_w is a sum over chunks, checked by its bounds. */
static void chunks_that_ranks_agree_on(void **state) {
    (void)state;
    static const char *const texts[] = {
        "fb:bf16:n2500:d16:v700:up:ign7:bias",
        "fb:bf16:n2500:d16:v700:up:gwf32:ws4000",
        "fb:f32:n2500:d16:v500:up:ls0.1:ws4000",
    };
    int64_t failed = 0;
    for (size_t t = 0; t < sizeof texts / sizeof texts[0]; t++) {
        struct rank_case c;
        rank_case_open(texts[t], &c);
        rank_case_expect(&c);
        struct results both, apart;
        rank_case_results(&c, &both);
        rank_case_results(&c, &apart);
        c.kernel = kernels[kernel_accepts(kernels[1], &c.problem)];
        rank_case_want(&c);
        setenv("LL_KERNEL", c.kernel, 1);
        const struct rank_cut cut = rank_cut_make(CUT_UNEVEN, 3, c.problem.v_total, 5);
        struct rank_run both_run = {.cut = &cut}, apart_run = both_run;
        if (rank_case_run(&c, &both_run, &both, LL_PASS_FORWARD_BACKWARD, "forward_backward")) {
            rank_case_same(&c, &cut, "forward_backward", &both, &c.want, FIELDS_FORWARD);
            expectation_check(&c.expect, c.kernel, "ranks", &both, FIELDS_GRADIENTS, &c.stats);
        }
        if (rank_case_run(&c, &apart_run, &apart, LL_PASS_FORWARD, "forward") &&
            rank_case_run(&c, &apart_run, &apart, LL_PASS_BACKWARD, "backward")) {
            rank_case_same(&c, &cut, "forward then backward", &apart, &both,
                           FIELDS_FORWARD | 1 << FIELD_GRAD_X);
            expectation_check(&c.expect, c.kernel, "ranks, apart", &apart, FIELDS_GRADIENTS, &c.stats);
        }
        unsetenv("LL_KERNEL");
        results_destroy(&both);
        results_destroy(&apart);
        results_destroy(&c.want);
        rank_case_close(&c);
        failed += c.failed + c.stats.failed;
    }
    assert_int_equal(failed, 0);
}

/* ---- Operations --------------------------------------------------------------------------------- */

struct counted {
    int64_t max, sum, sum_f32;
};

static struct counted count(struct rank_case *c, struct rank_run *run, const struct results *results,
                            ll_pass pass) {
    ll_plan_desc desc;
    problem_desc(&c->problem, &desc);
    desc.backend = LL_BACKEND_CUDA;
    const ll_linear_ce_args args = problem_args(&c->problem, &c->operands, results, pass);
    if (ranks_run(run, &desc, &args, pass) != LL_STATUS_OK) fail_msg("%s", run->sentence[0]);
    for (int32_t r = 1; r < run->cut->n; r++) {
        assert_true(run->counts[r].order == run->counts[0].order);
    }
    return (struct counted){run->counts[0].max_i32, run->counts[0].sum_i64, run->counts[0].sum_f32};
}

/* Two maxima (one for argmax) and one sum a chunk of the forward, one sum of grad_x a backward's, whatever
 * the targets are. */
static void operations_depend_on_shapes_alone(void **state) {
    (void)state;
    static const ll_comm_double script = {.struct_bytes = sizeof script};
    static const char *const texts[] = {"fb:bf16:n300:d64:v700:up", "fb:bf16:n300:d64:v700:up:ignall"};
    for (size_t t = 0; t < sizeof texts / sizeof texts[0]; t++) {
        struct rank_case c;
        struct results results;
        rank_case_open(texts[t], &c);
        rank_case_results(&c, &results);
        const struct rank_cut cut = rank_cut_make(CUT_UNEVEN, 3, 700, 1);
        struct rank_run run = {.cut = &cut, .script = &script};
        struct counted n = count(&c, &run, &results, LL_PASS_FORWARD);
        assert_true(n.max == 2 && n.sum == 1 && n.sum_f32 == 0);
        n = count(&c, &run, &results, LL_PASS_BACKWARD);
        assert_true(n.max == 0 && n.sum == 0 && n.sum_f32 == 1);
        n = count(&c, &run, &results, LL_PASS_FORWARD_BACKWARD);
        assert_true(n.max == 2 && n.sum == 1 && n.sum_f32 == 1);
        results_destroy(&results);
        rank_case_close(&c);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_option_each_cut),
        cmocka_unit_test(chunks_that_ranks_agree_on),
        cmocka_unit_test(operations_depend_on_shapes_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
