/* Chunk sizes within the budget and the carving of the workspace. */
#include "cpu/cut.h"
#include "core/exchange.h"

/* What chunks aim at where the budget leaves the choice. */
enum {
    kDefaultBudgetMib = 512,
    kForwardMib = 8,   /* packed tokens of a forward chunk: read from L3 once for each column block */
    kOnePassMib = 100, /* logits of a one-pass chunk: each chunk reads and writes all of grad_w once */
    kRecomputeMib = 16,
    kBlockKib = 512, /* packed columns of a forward task: half of a 1 MiB L2 */
    kForwardTokensMax = 4096,
    kGradTokens = 1024
};

static const int64_t kMib = 1 << 20;

lli_cut lli_cut_make(const lli_problem *problem, const lli_config *config, const lli_micro *micro,
                     ll_pass pass) {
    const int64_t v = lli_max(0, lli_min(problem->v_local, problem->v_total - problem->v_begin));
    const int64_t lead = v ? problem->v_begin % kTileCols : 0;
    int64_t by_cache = ((int64_t)kBlockKib << 10) / (4 * problem->n_hidden) / kTileCols * kTileCols;
    /* With every gradient frozen no gradient pass can be called, and none may shape the plan. */
    const bool wanted = (problem->frozen & (LL_FROZEN_X | LL_FROZEN_W)) != (LL_FROZEN_X | LL_FROZEN_W) ||
                        (problem->bias_dtype != LL_DTYPE_NONE && !(problem->frozen & LL_FROZEN_BIAS));
    const bool gradient = pass != LL_PASS_FORWARD && wanted;
    const bool one_pass = gradient && pass == LL_PASS_FORWARD_BACKWARD && config->one_pass;
    lli_cut cut = {
        .mr = micro->rows,
        .nr = micro->cols,
        .d = problem->n_hidden,
        .d_cols = lli_round_up(problem->n_hidden, micro->cols),
        .base = problem->v_begin - lead,
        .lead = lead,
        .v = v,
        .v_end = lead + v,
        .v_cols = lli_round_up(lead + v, kTileCols),
        .n_tokens_max = problem->n_tokens_max,
        .n_threads = problem->n_threads,
        .pass = pass,
        .one_pass = one_pass,
        .smoothing = problem->loss.label_smoothing > 0.0f,
        .in_group = problem->in_group,
        .want_x = gradient && !(problem->frozen & LL_FROZEN_X),
        .want_w = gradient && !(problem->frozen & LL_FROZEN_W),
        .want_bias = gradient && problem->bias_dtype != LL_DTYPE_NONE && !(problem->frozen & LL_FROZEN_BIAS),
        .has_bias = problem->bias_dtype != LL_DTYPE_NONE,
    };
    cut.block_cols = lli_max(kTileCols, lli_min(lli_min(by_cache, kSumCols), cut.v_cols));
    if (pass != LL_PASS_BACKWARD && !one_pass) cut.forward_tokens = config->forward_tokens;
    if (gradient) {
        cut.grad_tokens = one_pass ? config->one_pass_tokens : config->grad_tokens;
        cut.grad_cols = one_pass ? cut.v_cols : lli_min(config->grad_cols, cut.v_cols);
        cut.block_tokens = lli_min(kSumTokens, cut.grad_tokens);
    }
    cut.w_direct = problem->grad_w_dtype == LL_DTYPE_F32;
    cut.keep_acc_w = cut.want_w && !cut.w_direct && cut.n_tokens_max > cut.grad_tokens;
    cut.tokens_outside = one_pass || !config->columns_outside;
    if (problem->shards) {
        cut.has_edges = problem->shards->first_shared >= 0 || problem->shards->last_shared >= 0;
        cut.n_max = lli_exchange_n_max(problem->shards->n_shared, cut.smoothing);
        cut.n_sum = lli_exchange_n_sum(problem->shards->n_shared, cut.smoothing);
    }
    return cut;
}

void lli_cut_carve(const lli_cut *cut, lli_arena *arena, lli_pieces *pieces) {
    const bool gradient = cut->grad_tokens > 0, forward = cut->pass != LL_PASS_BACKWARD;
    const int64_t chunk = lli_max(cut->forward_tokens, cut->grad_tokens);
    const int64_t chunk_rows = lli_round_up(chunk, cut->mr);
    const int64_t grad_rows = lli_round_up(cut->grad_tokens, cut->mr);
    const int64_t acc_rows = cut->tokens_outside ? grad_rows : lli_round_up(cut->n_tokens_max, cut->mr);
    const int64_t x_cols_rows = gradient ? lli_round_up(cut->grad_tokens, cut->block_tokens) : 0;
    const int64_t sum_cols = lli_min(kSumCols, cut->grad_cols);
    *pieces = (lli_pieces){
        .rows = lli_take(arena, cut->n_tokens_max, sizeof(int64_t)),
        .bias = cut->has_bias ? lli_take(arena, cut->v_cols, sizeof(float)) : NULL,
        .grads = gradient ? lli_take(arena, cut->n_tokens_max, sizeof(lli_row_grad)) : NULL,
        .x_panels = lli_take(arena, chunk_rows * cut->d, sizeof(float)),
        .targets = forward ? lli_take(arena, chunk, sizeof(lli_row_target)) : NULL,
        .max = forward ? lli_take(arena, chunk * cut->n_max, sizeof(int32_t)) : NULL,
        .sum = forward ? lli_take(arena, chunk * cut->n_sum, sizeof(int64_t)) : NULL,
        .index = forward && cut->in_group ? lli_take(arena, chunk, sizeof(int32_t)) : NULL,
        .edges = forward && cut->has_edges ? lli_take(arena, chunk * 2 * kTileCols, sizeof(float)) : NULL,
        .logits = gradient ? lli_take(arena, grad_rows * cut->grad_cols, sizeof(float)) : NULL,
        .x_cols = cut->want_w ? lli_take(arena, x_cols_rows * cut->d_cols, sizeof(float)) : NULL,
        .acc_x = cut->want_x ? lli_take(arena, acc_rows * cut->d_cols, sizeof(float)) : NULL,
        .acc_w = cut->keep_acc_w ? lli_take(arena, cut->grad_cols * cut->d_cols, sizeof(float)) : NULL,
        .acc_bias = cut->want_bias ? lli_take(arena, cut->v_cols, sizeof(float)) : NULL,
        .scratch = lli_take(arena, cut->n_threads, sizeof(lli_scratch)),
    };
    const int64_t w_floats =
        lli_max(cut->block_cols * cut->d, cut->want_x ? sum_cols * lli_min(kSlabCols, cut->d_cols) : 0);
    const int64_t dz_floats =
        lli_max(cut->want_w ? cut->block_tokens * kGradCols : 0, cut->want_x ? grad_rows * sum_cols : 0);
    const bool own_acc_w = cut->want_w && !cut->w_direct && !cut->keep_acc_w;
    for (int64_t thread = 0; thread < cut->n_threads; thread++) {
        lli_scratch scratch = {
            .w_panels = lli_take(arena, w_floats, sizeof(float)),
            .tile = lli_take(arena, cut->forward_tokens ? kGroupPanels * cut->mr * cut->block_cols : 0,
                             sizeof(float)),
            .dz_panels = gradient ? lli_take(arena, dz_floats, sizeof(float)) : NULL,
            .acc_w = own_acc_w ? lli_take(arena, kGradCols * cut->d_cols, sizeof(float)) : NULL,
            .sums = forward ? lli_take(arena, chunk, sizeof(lli_row_sums)) : NULL,
            .soft = forward && cut->smoothing ? lli_take(arena, chunk, sizeof(lli_exact)) : NULL,
        };
        if (pieces->scratch) pieces->scratch[thread] = scratch;
    }
}

size_t lli_cut_workspace(const lli_problem *problem, const lli_config *config, const lli_micro *micro,
                         ll_pass pass) {
    lli_arena arena = {0};
    lli_pieces pieces;
    lli_cut cut = lli_cut_make(problem, config, micro, pass);
    lli_cut_carve(&cut, &arena, &pieces);
    return arena.used;
}

/* The next smaller chunk; the sums' blocks are the smallest. */
static int64_t smaller(int64_t n, int64_t unit) {
    return lli_max(unit, n / 2 / unit * unit);
}

/* A chunk of about `wanted` tokens: a multiple of kSumTokens, no more than there are. */
static int64_t tokens_near(const lli_problem *problem, int64_t wanted) {
    int64_t most = lli_max(1, problem->n_tokens_max);
    return lli_min(most, lli_max(kSumTokens, wanted / kSumTokens * kSumTokens));
}

/* What the hungriest pass takes. */
static size_t most_of_passes(const lli_problem *problem, const lli_config *config, const lli_micro *micro) {
    size_t most = 0;
    for (int pass = 0; pass < 3; pass++) {
        size_t bytes = lli_cut_workspace(problem, config, micro, (ll_pass)pass);
        if (bytes > most) most = bytes;
    }
    return most;
}

/* A caller that names a budget gets the largest chunk that fits it: every chunk reads and writes all of
 * grad_w. */
static int64_t one_pass_tokens_wanted(const lli_problem *problem, int64_t v_cols) {
    return problem->budget_bytes ? problem->n_tokens_max : kOnePassMib * kMib / (4 * v_cols);
}

/* Shrinks the cuts of the passes that recompute, in the order of what it costs, until they fit or are at
 * their least. Tokens that a group has agreed on stay. */
static void fit_recompute(const lli_problem *problem, const lli_micro *micro, size_t budget, bool agreed,
                          lli_config *c) {
    while (lli_cut_workspace(problem, c, micro, LL_PASS_BACKWARD) > budget ||
           lli_cut_workspace(problem, c, micro, LL_PASS_FORWARD_BACKWARD) > budget) {
        if (c->grad_cols > kSumCols) {
            c->grad_cols = smaller(c->grad_cols, kSumCols);
        } else if (!agreed && c->grad_tokens > kSumTokens) {
            c->grad_tokens = smaller(c->grad_tokens, kSumTokens);
        } else if (!agreed && c->forward_tokens > kSumTokens) {
            c->forward_tokens = smaller(c->forward_tokens, kSumTokens);
        } else {
            break;
        }
    }
}

/* One pass is tried with chunks from the wanted size down to the sums' blocks, and then with all tokens in
 * one chunk, which needs no f32 sum of a narrower grad_w. Returns what the hungriest pass takes then. */
static size_t fit_one_pass(const lli_problem *problem, const lli_micro *micro, size_t budget, int64_t v_cols,
                           lli_config *c) {
    c->one_pass = 1;
    c->one_pass_tokens = tokens_near(problem, one_pass_tokens_wanted(problem, v_cols));
    while (c->one_pass_tokens > kSumTokens &&
           lli_cut_workspace(problem, c, micro, LL_PASS_FORWARD_BACKWARD) > budget) {
        c->one_pass_tokens = smaller(c->one_pass_tokens, kSumTokens);
    }
    const size_t least = most_of_passes(problem, c, micro);
    if (least <= budget || problem->n_tokens_max <= c->one_pass_tokens) return least;
    lli_config whole = *c;
    whole.one_pass_tokens = problem->n_tokens_max;
    const size_t bytes = most_of_passes(problem, &whole, micro);
    if (bytes >= least) return least;
    *c = whole;
    return bytes;
}

static lli_config first_choice(const lli_problem *problem, const lli_micro *micro, size_t budget,
                               int64_t v_cols) {
    const bool want_w = !(problem->frozen & LL_FROZEN_W);
    lli_config c = {.columns_outside = want_w && problem->grad_w_dtype != LL_DTYPE_F32};
    c.forward_tokens =
        tokens_near(problem, lli_min(kForwardTokensMax, kForwardMib * kMib / (4 * problem->n_hidden)));
    while (c.forward_tokens > kSumTokens && lli_cut_workspace(problem, &c, micro, LL_PASS_FORWARD) > budget) {
        c.forward_tokens = smaller(c.forward_tokens, kSumTokens);
    }
    /* grad_cols never exceeds the vocabulary, so that equal cuts compare equal */
    c.grad_tokens = tokens_near(problem, kGradTokens);
    c.grad_cols = lli_max(kSumCols, kRecomputeMib * kMib / (4 * c.grad_tokens) / kSumCols * kSumCols);
    c.grad_cols = lli_min(c.grad_cols, lli_round_up(lli_max(v_cols, 1), kSumCols));
    return c;
}

ll_status lli_cut_configure(const lli_problem *problem, const lli_micro *micro, const lli_config *agreed,
                            lli_config *config) {
    const size_t budget =
        problem->budget_bytes ? problem->budget_bytes : (size_t)kDefaultBudgetMib * (size_t)kMib;
    const lli_config none = {0};
    const int64_t v_cols = lli_max(kTileCols, lli_cut_make(problem, &none, micro, LL_PASS_FORWARD).v_cols);
    lli_config c = first_choice(problem, micro, budget, v_cols);
    if (agreed) {
        const int64_t grad_cols = c.grad_cols;
        c = *agreed;
        c.one_pass = 0;
        c.grad_cols = grad_cols;
    }
    fit_recompute(problem, micro, budget, agreed != NULL, &c);
    size_t least = most_of_passes(problem, &c, micro);
    lli_config one = c;
    if (!agreed) {
        const size_t least_one_pass = fit_one_pass(problem, micro, budget, v_cols, &one);
        if (least_one_pass <= budget) c = one;
        least = least < least_one_pass ? least : least_one_pass;
    } else if (agreed->one_pass) {
        one.one_pass = 1;
        if (most_of_passes(problem, &one, micro) <= budget) c = one;
    }
    LLI_REQUIRE(!problem->budget_bytes || least <= budget, LL_STATUS_WORKSPACE,
                "ll_plan_create: workspace_budget_bytes is %zu, want at least %zu for n_tokens_max %lld, "
                "n_hidden %lld and v_local %lld on %d threads",
                problem->budget_bytes, least, (long long)problem->n_tokens_max, (long long)problem->n_hidden,
                (long long)problem->v_local, problem->n_threads);
    *config = c;
    return LL_STATUS_OK;
}
