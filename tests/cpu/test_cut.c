/* The cuts: legal for many problems, inside every budget they accept, and never growing with tokens times
 * vocabulary. */
#include "cpu/cut.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static lli_problem problem_of(int64_t n, int64_t d, int64_t v, int32_t dtype, int32_t threads) {
    return (lli_problem){.n_tokens_max = n,
                         .n_hidden = d,
                         .v_local = v,
                         .v_total = v,
                         .x_dtype = dtype,
                         .w_dtype = dtype,
                         .grad_x_dtype = dtype,
                         .grad_w_dtype = dtype,
                         .n_threads = threads,
                         .loss = LL_LOSS_INIT};
}

static size_t most(const lli_problem *problem, const lli_config *config) {
    size_t bytes = 0;
    for (int pass = 0; pass < 3; pass++) {
        size_t b = lli_cut_workspace(problem, config, &lli_micro_plain, (ll_pass)pass);
        if (b > bytes) bytes = b;
    }
    return bytes;
}

/* Chunks are what the numerics need: multiples of the blocks of the sums, or everything. */
static void assert_legal(const lli_problem *problem, const lli_config *c) {
    const int64_t n = problem->n_tokens_max > 1 ? problem->n_tokens_max : 1;
    assert_true(c->forward_tokens >= 1 && c->grad_tokens >= 1 && c->grad_cols >= 1);
    assert_true(c->forward_tokens <= n && c->grad_tokens <= n);
    assert_true(c->grad_tokens == n || c->grad_tokens % kSumTokens == 0);
    assert_true(c->grad_cols % kSumCols == 0);
    if (c->one_pass) assert_true(c->one_pass_tokens == n || c->one_pass_tokens % kSumTokens == 0);
}

static void legal_and_inside_budgets(void **unused) {
    (void)unused;
    static const int64_t tokens[] = {0, 1, 7, 255, 256, 257, 1000, 4096, 65536}, hidden[] = {1, 7, 769, 4096};
    static const int64_t vocab[] = {1, 31, 64, 257, 50257, 151936, LL_VOCAB_MAX};
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++) {
        for (size_t j = 0; j < sizeof hidden / sizeof *hidden; j++) {
            for (size_t k = 0; k < sizeof vocab / sizeof *vocab; k++) {
                for (int32_t dtype = LL_DTYPE_F32; dtype <= LL_DTYPE_BF16; dtype++) {
                    lli_problem problem = problem_of(tokens[i], hidden[j], vocab[k], dtype, 3);
                    lli_config config;
                    assert_int_equal(lli_cut_configure(&problem, &lli_micro_plain, NULL, &config),
                                     LL_STATUS_OK);
                    assert_legal(&problem, &config);
                    size_t bytes = most(&problem, &config);
                    for (int step = 0; step < 12; step++) { /* ever tighter, until refused */
                        problem.budget_bytes = bytes;
                        if (lli_cut_configure(&problem, &lli_micro_plain, NULL, &config) != LL_STATUS_OK)
                            break;
                        assert_legal(&problem, &config);
                        assert_true(most(&problem, &config) <= problem.budget_bytes);
                        bytes = bytes / 4 * 3;
                    }
                }
            }
        }
    }
}

static void bounded(void **unused) {
    (void)unused;
    const int64_t mib = 1 << 20;
    lli_config config;
    for (int64_t n = 4096; n <= 1 << 20; n *= 4) {
        lli_problem problem = problem_of(n, 4096, 131072, LL_DTYPE_F32, 2);
        assert_int_equal(lli_cut_configure(&problem, &lli_micro_plain, NULL, &config), LL_STATUS_OK);
        /* 128 bytes of row results a token and a constant */
        assert_true((int64_t)most(&problem, &config) <= 512 * mib + 128 * n);
        assert_true((int64_t)lli_cut_workspace(&problem, &config, &lli_micro_plain, LL_PASS_FORWARD) <=
                    64 * mib + 128 * n);
        assert_true(config.one_pass);
    }
    lli_problem frozen = problem_of(4096, 4096, 131072, LL_DTYPE_F32, 2);
    frozen.frozen = LL_FROZEN_X | LL_FROZEN_W;
    assert_int_equal(lli_cut_configure(&frozen, &lli_micro_plain, NULL, &config), LL_STATUS_OK);
    assert_true((int64_t)most(&frozen, &config) <= 64 * mib);
    /* 512 tokens' logits take 250 MiB, an f32 copy of grad_w would take 1 GiB: all tokens at once */
    lli_problem narrow = problem_of(512, 2048, 128256, LL_DTYPE_BF16, 2);
    assert_int_equal(lli_cut_configure(&narrow, &lli_micro_plain, NULL, &config), LL_STATUS_OK);
    assert_true(config.one_pass && config.one_pass_tokens == 512);
    assert_true((int64_t)most(&narrow, &config) <= 512 * mib);
    narrow.n_tokens_max = 2048; /* neither fits: logits twice */
    assert_int_equal(lli_cut_configure(&narrow, &lli_micro_plain, NULL, &config), LL_STATUS_OK);
    assert_true(!config.one_pass && (int64_t)most(&narrow, &config) <= 512 * mib);
    /* a budget buys larger chunks */
    lli_problem rich = problem_of(4096, 1024, 131072, LL_DTYPE_F32, 2), poor = rich;
    rich.budget_bytes = (size_t)3 << 30;
    lli_config richer;
    assert_int_equal(lli_cut_configure(&rich, &lli_micro_plain, NULL, &richer), LL_STATUS_OK);
    assert_int_equal(lli_cut_configure(&poor, &lli_micro_plain, NULL, &config), LL_STATUS_OK);
    assert_true(richer.one_pass_tokens > config.one_pass_tokens);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(legal_and_inside_budgets),
        cmocka_unit_test(bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
