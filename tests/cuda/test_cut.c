/* The CUDA backend's cuts, which need no GPU: inside every budget that they accept, and exponentials that are
 * kept in outputs' memory where nothing overwrites them before they are read. */
#include "cuda/backend.h"
#include "cuda/cut.h"
#include "cuda/fused.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static const lli_cuda_variant hopper = {.cheap_logits = true, .exponentials = true};
static const lli_kernel sm90 = {.name = "linear_ce_cuda_sm90", .isa = &hopper},
                        plain = {.name = "linear_ce_cuda"};

static lli_problem problem_of(int64_t n, int64_t d, int64_t v, ll_dtype grad_w, int32_t frozen) {
    return (lli_problem){.n_tokens_max = n,
                         .n_hidden = d,
                         .v_local = v,
                         .v_total = v,
                         .x_dtype = LL_DTYPE_BF16,
                         .w_dtype = LL_DTYPE_BF16,
                         .grad_x_dtype = LL_DTYPE_BF16,
                         .grad_w_dtype = grad_w,
                         .frozen = frozen,
                         .loss = LL_LOSS_INIT};
}

static size_t most(const lli_kernel *kernel, const lli_problem *problem, const lli_config *config) {
    size_t bytes = 0;
    for (int pass = 0; pass < 3; pass++) {
        const size_t b = lli_cuda_workspace(kernel, problem, config, (ll_pass)pass);
        if (b > bytes) bytes = b;
    }
    return bytes;
}

/* Every tile that is kept has memory of its own from the forward until its dz. */
static void assert_places(const lli_problem *p, const lli_cuda_cut *cut, int64_t n) {
    const lli_cuda_places at = lli_cuda_cut_places(p, cut, n);
    const int64_t tile_bytes = n * kTileCols * 2,
                  row_bytes = p->n_hidden * (p->grad_w_dtype == LL_DTYPE_F32 ? 4 : 2);
    assert_true(0 <= at.sum_end && at.sum_end <= at.w_end && at.w_end <= at.n_tiles);
    assert_true(at.n_tiles * kTileCols <= cut->v_cols && at.n_tiles * n <= cut->anchors);
    /* in the sums of grad_x, which the first product begins */
    assert_true(at.sum_end * tile_bytes <= cut->acc_tokens * cut->d_padded * 4);
    assert_true(at.sum_end * kTileCols <= cut->dz_cols);
    /* in grad_w: one behind the other, none before its own rows, none beyond the last row */
    for (int64_t t = at.sum_end; t < at.w_end; t++) {
        const int64_t begin = at.w_row * row_bytes + (t - at.sum_end) * at.w_stride_bytes;
        assert_true(cut->lent.w && at.w_stride_bytes >= tile_bytes && begin % 16 == 0);
        assert_true(begin >= t * kTileCols * row_bytes && begin + tile_bytes <= p->v_local * row_bytes);
    }
    assert_true((at.n_tiles - at.w_end) * tile_bytes <= cut->code_bytes);
}

static void assert_legal(const lli_problem *p, const lli_config *c) {
    lli_cuda_pieces pieces;
    const int64_t n = p->n_tokens_max > 1 ? p->n_tokens_max : 1;
    if (!c->exponentials) return;
    assert_true(c->one_pass_tokens >= 1 && c->one_pass_tokens <= n && c->first_tokens <= n);
    if (p->grad_w_dtype != LL_DTYPE_F32 && !(p->frozen & LL_FROZEN_W)) {
        assert_true(c->first_tokens == n && c->one_pass_tokens == n); /* a narrow grad_w is written once */
    }
    for (int way = 0; way < 4; way++) {
        const lli_cuda_lent lent = {.w = (way & 1) && !(p->frozen & LL_FROZEN_W), .x = way & 2};
        const lli_cuda_cut cut = lli_cuda_cut_chunk(p, c, lent);
        assert_true(lli_cuda_cut_carve(&cut, NULL, &pieces) <=
                    lli_cuda_workspace(&sm90, p, c, LL_PASS_FORWARD_BACKWARD));
        for (int64_t count = cut.grad_tokens; count > 0; count = count * 2 / 3) assert_places(p, &cut, count);
    }
}

static void inside_budgets_and_in_place(void **unused) {
    (void)unused;
    static const int64_t tokens[] = {0, 1, 100, 255, 257, 4096, 8191, 8192, 16384, 100000};
    static const int64_t hidden[] = {8, 264, 2048, 4096, 7168},
                         vocab[] = {1, 64, 65, 8193, 32000, 151936, LL_VOCAB_MAX};
    static const int32_t frozen[] = {0, LL_FROZEN_X, LL_FROZEN_W};
    int64_t kept = 0, partly = 0, chunks = 0;
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++) {
        for (size_t j = 0; j < sizeof hidden / sizeof *hidden; j++) {
            for (size_t k = 0; k < sizeof vocab / sizeof *vocab; k++) {
                for (int way = 0; way < 6; way++) {
                    lli_problem p = problem_of(tokens[i], hidden[j], vocab[k],
                                               way % 2 ? LL_DTYPE_BF16 : LL_DTYPE_F32, frozen[way / 2]);
                    lli_config config;
                    assert_int_equal(lli_cuda_configure(&sm90, &p, NULL, &config), LL_STATUS_OK);
                    assert_legal(&p, &config);
                    size_t bytes = most(&sm90, &p, &config);
                    for (int step = 0; step < 10; step++) { /* ever tighter, until refused */
                        p.budget_bytes = bytes;
                        if (lli_cuda_configure(&sm90, &p, NULL, &config) != LL_STATUS_OK) break;
                        assert_legal(&p, &config);
                        assert_true(most(&sm90, &p, &config) <= p.budget_bytes);
                        kept += config.exponentials;
                        partly += config.exponentials && config.kept_cols;
                        chunks += config.exponentials && config.first_tokens < p.n_tokens_max;
                        bytes = bytes / 4 * 3;
                    }
                }
            }
        }
    }
    assert_true(kept && partly && chunks);
}

/* Tokens times vocabulary is in no workspace: a constant, and for each token grad_x's sums and coefficients.
 */
static void bounded(void **unused) {
    (void)unused;
    const int64_t mib = 1 << 20;
    for (int64_t n = 4096; n <= 1 << 18; n *= 4) {
        for (int narrow = 0; narrow < 2; narrow++) {
            const lli_problem p = problem_of(n, 4096, 131072, narrow ? LL_DTYPE_BF16 : LL_DTYPE_F32, 0);
            lli_config config;
            assert_int_equal(lli_cuda_configure(&sm90, &p, NULL, &config), LL_STATUS_OK);
            assert_true((int64_t)most(&sm90, &p, &config) <= 512 * mib + n * (narrow ? 4096 * 4 + 128 : 128));
        }
    }
}

static void others_keep_no_exponentials(void **unused) {
    (void)unused;
    lli_problem p = problem_of(4096, 4096, 131072, LL_DTYPE_F32, 0);
    lli_config config;
    assert_int_equal(lli_cuda_configure(&plain, &p, NULL, &config), LL_STATUS_OK);
    assert_int_equal(config.exponentials, 0);
    p.loss.temperature = 0.5f;
    assert_int_equal(lli_cuda_configure(&sm90, &p, NULL, &config), LL_STATUS_OK);
    assert_int_equal(config.exponentials, 0);
    p.loss.temperature = 1.0f;
    p.bias_dtype = LL_DTYPE_BF16;
    assert_int_equal(lli_cuda_configure(&sm90, &p, NULL, &config), LL_STATUS_OK);
    assert_int_equal(config.exponentials, 0);
}

/* Of the gradients' products of a block of columns: every row and column of both is in one tile. */
static void tiles_cover_both_products(void **unused) {
    static const int64_t tokens[] = {256, 257, 4096, 9000}, columns[] = {1, 63, 64, 200, 4097, kSumCols};
    (void)unused;
    for (int64_t d = kGradBlock; d <= 7168; d += kGradBlock) {
        for (int i = 0; i < 24; i++) {
            const int64_t n = tokens[i / 6], cols = columns[i % 6];
            const lli_cuda_grad_block block = lli_cuda_grad_block_of(n, cols, d, 1, 1);
            int64_t covered[2] = {0, 0}, tiles[2] = {0, 0};
            for (int r = 0; r < kGradRuns; r++) {
                const lli_cuda_grad_run *run = &block.runs[r];
                const int64_t rows = run->of_w ? cols : cols < kTileCols ? 0 : n;
                assert_int_equal(run->row_blocks, (rows + kFusedRows - 1) / kFusedRows);
                tiles[run->of_w] += run->tiles;
                if (!run->tiles) continue;
                assert_int_equal(run->first_col * kFusedCols, covered[run->of_w]);
                covered[run->of_w] += (int64_t)run->n_cols * run->width * kGradBlock;
            }
            assert_int_equal(covered[1], d);
            assert_int_equal(covered[0], cols < kTileCols ? 0 : d);
            assert_int_equal(block.x_tiles, tiles[0]);
            assert_int_equal(block.tiles, tiles[0] + tiles[1]);
            assert_int_equal(block.depth[0], cols / kTileCols);
            assert_int_equal(block.depth[1], (n + kGradBlock - 1) / kGradBlock);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tiles_cover_both_products),
        cmocka_unit_test(inside_budgets_and_in_place),
        cmocka_unit_test(bounded),
        cmocka_unit_test(others_keep_no_exponentials),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
