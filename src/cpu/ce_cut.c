/* How ce cuts a shard into tiles and a group's rows into chunks, and the workspace that follows. */
#include "cpu/ce.h"

lli_ce_cut lli_ce_cut_make(const lli_problem *problem, const lli_config *config, ll_pass pass) {
    const lli_shards *shards = problem->shards;
    const int64_t v = lli_max(0, lli_min(problem->v_local, problem->v_total - problem->v_begin));
    const int64_t lead = v ? problem->v_begin % kTileCols : 0;
    lli_ce_cut cut = {
        .base = problem->v_begin - lead,
        .lead = lead,
        .v = v,
        .v_end = lead + v,
        .v_cols = lli_round_up(lead + v, kTileCols),
        .n_tokens_max = problem->n_tokens_max,
        .n_threads = problem->n_threads,
        .n_ids = problem->n_ids,
        .n_top = problem->n_top,
        .forward = pass != LL_PASS_BACKWARD,
        .smoothing = problem->loss.label_smoothing > 0.0f,
        .in_group = problem->in_group,
    };
    cut.whole_end = cut.v_end;
    if (!shards) return cut;
    if (shards->first_shared >= 0) cut.whole_begin = kTileCols;
    if (shards->last_shared >= 0) cut.whole_end = cut.v_cols - kTileCols;
    cut.has_edges = shards->first_shared >= 0 || shards->last_shared >= 0;
    cut.chunk = cut.forward ? config->forward_tokens : 0;
    cut.n_max = lli_exchange_n_max(shards->n_shared, cut.smoothing);
    cut.n_sum = lli_exchange_n_sum(shards->n_shared, cut.smoothing);
    cut.max_room = cut.n_max + cut.n_ids;
    cut.sum_room = cut.n_sum + cut.n_ids + shards->n_ranks * cut.n_top;
    return cut;
}

void lli_ce_carve(const lli_ce_cut *cut, lli_arena *arena, lli_ce_pieces *pieces) {
    const int64_t chunk = cut->chunk;
    *pieces = (lli_ce_pieces){
        .parts = lli_take(arena, chunk, sizeof(lli_row_part)),
        .edges = cut->has_edges ? lli_take(arena, chunk * 2 * kTileCols, sizeof(float)) : NULL,
        .max = lli_take(arena, chunk * cut->max_room, sizeof(int32_t)),
        .sum = lli_take(arena, chunk * cut->sum_room, sizeof(int64_t)),
        .index = lli_take(arena, chunk, sizeof(int32_t)),
        .top = lli_take(arena, chunk * cut->n_top, sizeof(int64_t)),
        .scratch = lli_take(arena, cut->n_threads, sizeof(lli_ce_scratch)),
    };
    for (int64_t thread = 0; thread < cut->n_threads; thread++) {
        const lli_ce_scratch scratch = {.top = lli_take(arena, cut->n_top, sizeof(int64_t))};
        if (pieces->scratch) pieces->scratch[thread] = scratch;
    }
}

size_t lli_ce_workspace(const lli_problem *problem, const lli_config *config, ll_pass pass) {
    lli_arena arena = {0};
    lli_ce_pieces pieces;
    const lli_ce_cut cut = lli_ce_cut_make(problem, config, pass);
    lli_ce_carve(&cut, &arena, &pieces);
    return arena.used;
}

/* Rows that the ranks exchange at a time, where the budget leaves the choice: few enough that what is kept of
 * them, 1 to 10 KB a row, stays in L2 or L3, and many enough that an operation's latency is shared by many.
 */
enum { kChunkMib = 8, kChunkMax = 4096 };

ll_status lli_ce_configure(const lli_problem *problem, const lli_config *agreed, lli_config *config) {
    const size_t budget =
        problem->budget_bytes ? lli_min((int64_t)problem->budget_bytes, kChunkMib << 20) : kChunkMib << 20;
    lli_config c = {.forward_tokens = lli_max(1, lli_min(kChunkMax, problem->n_tokens_max))};
    if (agreed) {
        c = *agreed;
    } else {
        while (c.forward_tokens > 1 && lli_ce_workspace(problem, &c, LL_PASS_FORWARD) > budget) {
            c.forward_tokens /= 2;
        }
    }
    const size_t least = lli_ce_workspace(problem, &c, LL_PASS_FORWARD);
    LLI_REQUIRE(
        !problem->budget_bytes || least <= problem->budget_bytes, LL_STATUS_WORKSPACE,
        "ll_plan_create: workspace_budget_bytes is %zu, want at least %zu for n_ids %d and n_top %d on "
        "%d threads",
        problem->budget_bytes, least, problem->n_ids, problem->n_top, problem->n_threads);
    *config = c;
    return LL_STATUS_OK;
}
