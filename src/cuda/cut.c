/* Chunk sizes within the budget, and the carving of the workspace (cut.h). */
#include "cuda/cut.h"
#include "core/dtype.h"
#include "cuda/backend.h"
#include "cuda/exchange.h"

enum {
    kDefaultBudgetMib = 512,
    kForwardTokens = 4096,
    kOnePassTokens =
        1024, /* grad_w is read and written once a chunk: below this that costs more than the product */
    kRecomputeTokens = 4096,
    kLeastTokens = 128,
    kKeptCols = 1024,
    kTileTokens = 128, /* of cuBLASLt's tiles, and the tiles that fill an H200 twice */
    kTileColumns = 256,
    kTiles = 264,
    kPackMib = 8,
    kScratchMib = 16,
    kStageCols = 2048, /* a step of stats.cu */
    kRowSlots = 6400   /* rows x parts that keep all multiprocessors busy with statistics */
};

static const int64_t kMib = 1 << 20;

int64_t lli_cuda_block_cols(const lli_cuda_cut *cut, int64_t n_rows) {
    const int64_t tile_rows = (lli_max(1, n_rows) + kTileTokens - 1) / kTileTokens;
    int64_t cols = lli_max(1, kTiles / tile_rows) * kTileColumns;
    if (cut->block_elems) cols = lli_min(cols, cut->block_elems / lli_max(1, n_rows) / kTileCols * kTileCols);
    if (cols > kStageCols) cols = cols / kStageCols * kStageCols;
    return lli_max(kTileCols, lli_min(cols, cut->v_cols));
}

int32_t lli_cuda_parts(const lli_cuda_cut *cut, int64_t n_rows, int64_t n_cols) {
    const int64_t stages = (n_cols + kStageCols - 1) / kStageCols;
    int64_t parts = lli_min(kParts, cut->row_slots / lli_max(1, n_rows));
    parts = lli_max(1, lli_min(parts, stages));
    return (int32_t)((stages + (stages + parts - 1) / parts - 1) / ((stages + parts - 1) / parts));
}

lli_cuda_ranges lli_cuda_ranges_of(const lli_problem *problem) {
    const lli_shards *shards = problem->shards;
    if (!shards)
        return (lli_cuda_ranges){.own.count = lli_max(0, lli_min(problem->v_local, problem->v_total))};
    lli_cuda_ranges ranges = {0};
    const int64_t n = shards->end - shards->begin;
    const bool first = shards->first_shared >= 0, last = shards->last_shared >= 0;
    int64_t before = 0, after = 0;
    if (first) before = lli_min(n, kTileCols - shards->begin % kTileCols);
    if (last && shards->last_shared != shards->first_shared) after = shards->end % kTileCols;
    if (before) ranges.edges[ranges.n_edges++] = (lli_cuda_range){0, before};
    if (after) ranges.edges[ranges.n_edges++] = (lli_cuda_range){n - after, after};
    ranges.own = (lli_cuda_range){before, n - before - after};
    return ranges;
}

static bool any_gradient(const lli_problem *p) {
    return !(p->frozen & LL_FROZEN_X) || !(p->frozen & LL_FROZEN_W) ||
           (p->bias_dtype != LL_DTYPE_NONE && !(p->frozen & LL_FROZEN_BIAS));
}

lli_cuda_cut lli_cuda_cut_make(const lli_problem *p, const lli_config *config, ll_pass pass) {
    const int64_t element_bytes = (int64_t)lli_dtype_bytes(p->x_dtype);
    const lli_cuda_ranges ranges = lli_cuda_ranges_of(p);
    const int64_t v = ranges.own.count;
    lli_cuda_cut cut = {
        .d = p->n_hidden,
        .d_padded = lli_round_up(p->n_hidden, 16 / element_bytes),
        .element_bytes = element_bytes,
        .v = v,
        .v_cols = p->in_group ? lli_max(kTileCols, lli_round_up(v, kTileCols)) : lli_round_up(v, kTileCols),
        .v_real = v,
        .n_tokens_max = p->n_tokens_max,
        .gradient = pass != LL_PASS_FORWARD && any_gradient(p),
        .has_bias = p->bias_dtype != LL_DTYPE_NONE,
        .smoothing = p->loss.label_smoothing > 0.0f,
        .scaled = p->x_dtype == LL_DTYPE_F16,
        .n_edges = ranges.n_edges,
    };
    for (int32_t i = 0; i < ranges.n_edges; i++) cut.v_real += ranges.edges[i].count;
    if (p->shards) {
        cut.n_max = lli_exchange_n_max(p->shards->n_shared, cut.smoothing);
        cut.n_sum = lli_exchange_n_sum(p->shards->n_shared, cut.smoothing);
    }
    cut.one_pass = cut.gradient && pass == LL_PASS_FORWARD_BACKWARD && config->one_pass;
    if (pass != LL_PASS_BACKWARD && !cut.one_pass) {
        cut.forward_tokens = config->forward_tokens;
    }
    if (cut.gradient) {
        cut.want_x = !(p->frozen & LL_FROZEN_X);
        cut.want_w = !(p->frozen & LL_FROZEN_W);
        cut.want_bias = cut.has_bias && !(p->frozen & LL_FROZEN_BIAS);
        cut.grad_tokens = cut.one_pass ? config->one_pass_tokens : config->grad_tokens;
        cut.sum_cols = lli_min(kSumCols, cut.v_cols);
        cut.kept_cols = !cut.one_pass ? 0 : config->kept_cols ? config->kept_cols : cut.v_cols;
        const bool chunks = cut.n_tokens_max > cut.grad_tokens;
        cut.columns_outside = !cut.one_pass && config->columns_outside;
        cut.keep_acc_w = cut.want_w && cut.columns_outside && chunks && p->grad_w_dtype != LL_DTYPE_F32;
        cut.acc_tokens = !cut.want_x ? 0 : cut.columns_outside ? cut.n_tokens_max : cut.grad_tokens;
    }
    const int64_t chunk = lli_max(cut.forward_tokens, cut.grad_tokens);
    cut.block_elems = lli_max(config->forward_tokens * config->forward_cols, chunk * kTileCols);
    cut.row_slots = pass == LL_PASS_BACKWARD ? 0 : lli_max(chunk, lli_min(kRowSlots, chunk * kParts));
    const int64_t row_bytes = cut.d_padded * element_bytes;
    cut.x_pack_rows = lli_min(lli_round_up(chunk, 64), lli_max(64, kPackMib * kMib / row_bytes));
    const int64_t all_w = lli_max(cut.sum_cols, lli_min(cut.v_cols, kSumCols)) * cut.d_padded * 4;
    const int64_t wish = lli_min(all_w, (cut.gradient ? kScratchMib : kPackMib) * kMib);
    const int64_t least =
        lli_max(kTileCols * cut.d_padded * 4, cut.gradient ? cut.sum_cols * 8 * element_bytes : 0);
    cut.scratch_bytes = (size_t)lli_max(wish, least);
    return cut;
}

size_t lli_cuda_cut_carve(const lli_cuda_cut *cut, void *base, lli_cuda_pieces *pieces) {
    lli_arena arena = {.base = base};
    const int64_t chunk = lli_max(cut->forward_tokens, cut->grad_tokens);
    const int64_t padded = lli_round_up(cut->grad_tokens, 64);
    const bool all_kept = cut->one_pass && cut->kept_cols >= cut->v_cols && !cut->n_edges;
    const bool exchanges = cut->n_max > 0 && cut->row_slots > 0;
    const int64_t edge_cols = (int64_t)cut->n_edges * kTileCols;
    const int64_t groups = (cut->grad_tokens + kBiasRows - 1) / kBiasRows;
    const size_t e = (size_t)cut->element_bytes;
    *pieces = (lli_cuda_pieces){
        .totals = lli_take(&arena, 1, sizeof(lli_cuda_totals)),
        .bias = cut->has_bias ? lli_take(&arena, cut->v_cols + edge_cols, sizeof(float)) : NULL,
        .rows = lli_take(&arena, cut->row_slots, sizeof(lli_cuda_row)),
        .soft = cut->smoothing && cut->row_slots ? lli_take(&arena, chunk, sizeof(lli_exact)) : NULL,
        .grads = cut->gradient ? lli_take(&arena, cut->n_tokens_max, sizeof(lli_cuda_grad)) : NULL,
        .logits = lli_take(&arena, all_kept ? 0 : cut->block_elems, sizeof(float)),
        .kept = lli_take(&arena, cut->grad_tokens * cut->kept_cols, sizeof(float)),
        .dz = cut->gradient ? lli_take(&arena, padded * cut->sum_cols, e) : NULL,
        .x_copy = cut->want_w ? lli_take(&arena, padded * cut->d_padded, e) : NULL,
        .acc_x = cut->want_x ? lli_take(&arena, cut->acc_tokens * cut->d_padded, sizeof(float)) : NULL,
        .acc_w = cut->keep_acc_w ? lli_take(&arena, cut->sum_cols * cut->d_padded, sizeof(float)) : NULL,
        .acc_bias = cut->want_bias ? lli_take(&arena, cut->v_cols + edge_cols, sizeof(float)) : NULL,
        .bias_parts = cut->want_bias ? lli_take(&arena, groups * kSumCols, sizeof(float)) : NULL,
        .edges = exchanges ? lli_take(&arena, chunk * edge_cols, sizeof(float)) : NULL,
        .max = exchanges ? lli_take(&arena, chunk * (cut->n_max + kGivenInts), sizeof(int32_t)) : NULL,
        .index = exchanges ? lli_take(&arena, chunk, sizeof(int32_t)) : NULL,
        .sum = exchanges ? lli_take(&arena, chunk * cut->n_sum, sizeof(int64_t)) : NULL,
        .x_pack = lli_take(&arena, cut->x_pack_rows * cut->d_padded, e),
        .scratch = lli_take(&arena, (int64_t)cut->scratch_bytes, 1),
    };
    return arena.used;
}

size_t lli_cuda_workspace(const lli_kernel *kernel, const lli_problem *problem, const lli_config *config,
                          ll_pass pass) {
    (void)kernel;
    lli_cuda_pieces pieces;
    const lli_cuda_cut cut = lli_cuda_cut_make(problem, config, pass);
    return lli_cuda_cut_carve(&cut, NULL, &pieces);
}

static size_t bytes_of(const lli_problem *problem, const lli_config *config, ll_pass pass) {
    return lli_cuda_workspace(NULL, problem, config, pass);
}

static int64_t smaller(int64_t n) {
    return lli_max(kLeastTokens, n / 2 / kLeastTokens * kLeastTokens);
}

/* As many columns as the budget keeps: all, or a multiple of kKeptCols. 0: not worth it. */
static int64_t fit_kept(const lli_problem *problem, const lli_config *one, size_t budget, int64_t v_cols) {
    lli_config c = *one;
    c.kept_cols = 0;
    if (bytes_of(problem, &c, LL_PASS_FORWARD_BACKWARD) <= budget) return v_cols;
    for (c.kept_cols = v_cols / kKeptCols * kKeptCols; c.kept_cols >= v_cols / 4 && c.kept_cols > 0;
         c.kept_cols -= kKeptCols) {
        if (bytes_of(problem, &c, LL_PASS_FORWARD_BACKWARD) <= budget) return c.kept_cols;
    }
    return 0;
}

/* 3 GEMMs (and a part of a fourth) where grad_w can be added to chunk by chunk in f32, or one chunk is all.
 */
static void try_one_pass(const lli_kernel *kernel, const lli_problem *problem, size_t budget, int64_t v_cols,
                         lli_config *config) {
    const lli_cuda_variant *variant = kernel->isa;
    const bool narrow = !(problem->frozen & LL_FROZEN_W) && problem->grad_w_dtype != LL_DTYPE_F32;
    const int64_t n = lli_max(1, problem->n_tokens_max);
    lli_config one = *config;
    if (!any_gradient(problem)) return; /* the ranks of a group would go through other chunks than this one */
    one.one_pass = 1;
    one.one_pass_tokens = narrow ? n : lli_min(n, kRecomputeTokens);
    if (one.one_pass_tokens > kRecomputeTokens) return;
    int64_t kept = fit_kept(problem, &one, budget, v_cols);
    /* Fewer, larger chunks pass over grad_w less often, but only if no logits are formed twice for it. */
    while (!narrow && kept < v_cols && one.one_pass_tokens > kOnePassTokens) {
        one.one_pass_tokens = lli_max(kOnePassTokens, smaller(one.one_pass_tokens));
        kept = fit_kept(problem, &one, budget, v_cols);
    }
    /* Several chunks that keep a part lose to a recomputing pass with fewer, larger ones. */
    if (kept < v_cols && n > one.one_pass_tokens && variant && variant->cheap_logits) return;
    if (!kept) return;
    one.kept_cols = kept < v_cols ? kept : 0;
    *config = one;
}

/* What the ranks of a group go through together, within this rank's own choice. */
static void adopt(const lli_problem *problem, const lli_config *agreed, size_t budget, int64_t v_cols,
                  lli_config *config) {
    const bool narrow = !(problem->frozen & LL_FROZEN_W) && problem->grad_w_dtype != LL_DTYPE_F32;
    config->forward_tokens = agreed->forward_tokens;
    config->grad_tokens = agreed->grad_tokens;
    config->columns_outside = agreed->columns_outside && problem->n_tokens_max > agreed->grad_tokens;
    lli_config one = *config;
    config->one_pass = 0;
    config->one_pass_tokens = config->kept_cols = 0;
    if (!agreed->one_pass || (narrow && agreed->one_pass_tokens < problem->n_tokens_max)) return;
    one.one_pass = 1;
    one.one_pass_tokens = agreed->one_pass_tokens;
    const int64_t kept = fit_kept(problem, &one, budget, v_cols);
    if (!kept) return; /* then no rank does it (lli_agree_ready) */
    one.kept_cols = kept < v_cols ? kept : 0;
    *config = one;
}

static bool over(const lli_problem *problem, const lli_config *config, size_t budget) {
    return bytes_of(problem, config, LL_PASS_BACKWARD) > budget ||
           bytes_of(problem, config, LL_PASS_FORWARD_BACKWARD) > budget;
}

ll_status lli_cuda_configure(const lli_kernel *kernel, const lli_problem *problem, const lli_config *agreed,
                             lli_config *config) {
    const size_t budget =
        problem->budget_bytes ? problem->budget_bytes : (size_t)kDefaultBudgetMib * (size_t)kMib;
    const int64_t n = lli_max(1, problem->n_tokens_max);
    const bool narrow = !(problem->frozen & LL_FROZEN_W) && problem->grad_w_dtype != LL_DTYPE_F32;
    lli_config c = {.forward_tokens = lli_min(n, kForwardTokens),
                    .grad_tokens = lli_min(n, kRecomputeTokens)};
    const lli_config none = {0};
    lli_cuda_cut cut = lli_cuda_cut_make(problem, &none, LL_PASS_FORWARD);
    cut.block_elems = 0;
    c.forward_cols = lli_cuda_block_cols(&cut, c.forward_tokens);
    while (bytes_of(problem, &c, LL_PASS_FORWARD) > budget) {
        if (c.forward_cols > kTileColumns) {
            c.forward_cols = lli_max(kTileColumns, c.forward_cols / 2 / kTileCols * kTileCols);
        } else if (c.forward_tokens > kLeastTokens) {
            c.forward_tokens = smaller(c.forward_tokens);
        } else {
            break;
        }
    }
    c.columns_outside = narrow && problem->n_tokens_max > c.grad_tokens;
    const lli_config wide = c;
    size_t most = bytes_of(problem, &c, LL_PASS_FORWARD);
    for (int pass = LL_PASS_BACKWARD; pass <= LL_PASS_FORWARD_BACKWARD; pass++) {
        while (bytes_of(problem, &c, (ll_pass)pass) > budget) {
            if (c.grad_tokens > kOnePassTokens ||
                (c.forward_cols <= kTileColumns && c.grad_tokens > kLeastTokens)) {
                c.grad_tokens = smaller(c.grad_tokens);
                c.columns_outside = narrow && problem->n_tokens_max > c.grad_tokens;
            } else if (c.forward_cols > kTileColumns) {
                c.forward_cols = lli_max(kTileColumns, c.forward_cols / 2 / kTileCols * kTileCols);
            } else if (c.forward_tokens > kLeastTokens) {
                c.forward_tokens = smaller(c.forward_tokens);
            } else {
                break;
            }
        }
    }
    /* The default budget is a wish: where not even the least cuts fit (f32 sums of a wide narrow grad_w),
     * small chunks would cost time and still not keep it. */
    if (!problem->budget_bytes && over(problem, &c, budget)) {
        c = wide;
        c.grad_tokens = lli_min(n, kOnePassTokens);
        c.columns_outside = narrow && problem->n_tokens_max > c.grad_tokens;
    }
    try_one_pass(kernel, problem, budget, cut.v_cols, &c);
    /* A wish: other ranks may want smaller chunks, of which there are then several. */
    if (problem->in_group && !agreed) c.columns_outside = narrow;
    if (agreed) adopt(problem, agreed, budget, cut.v_cols, &c);
    for (int pass = LL_PASS_BACKWARD; pass <= LL_PASS_FORWARD_BACKWARD; pass++) {
        const size_t bytes = bytes_of(problem, &c, (ll_pass)pass);
        if (bytes > most) most = bytes;
    }
    LLI_REQUIRE(!problem->budget_bytes || most <= budget, LL_STATUS_WORKSPACE,
                "ll_plan_create: workspace_budget_bytes is %zu, want at least %zu for n_tokens_max %lld, "
                "n_hidden %lld and v_local %lld on a GPU",
                problem->budget_bytes, most, (long long)problem->n_tokens_max, (long long)problem->n_hidden,
                (long long)problem->v_local);
    *config = c;
    return LL_STATUS_OK;
}
