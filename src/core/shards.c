/* The shard table of shards.h. */
#include "core/shards.h"
#include "core/softmax.h"

#include <stdbool.h>
#include <stdlib.h>

#define BAD(...) return lli_fail(LL_STATUS_INVALID_ARG, "ll_plan_create: " __VA_ARGS__)

static int64_t end_of(const lli_shard *shard) {
    return shard->begin + shard->count;
}

/* Rank whose shard comes next: the smallest begin at or beyond `column`, not empty; -1 if there is none. */
static int32_t next_rank(const lli_shard *shards, int32_t n_ranks, int64_t column) {
    int32_t best = -1;
    for (int32_t r = 0; r < n_ranks; r++) {
        if (shards[r].count == 0 || shards[r].begin < column) continue;
        if (best < 0 || shards[r].begin < shards[best].begin) best = r;
    }
    return best;
}

/* Two shards that overlap, told by the ranks. */
static ll_status check_overlap(const lli_shard *shards, int32_t n_ranks, int32_t rank) {
    for (int32_t r = 0; r < n_ranks; r++) {
        if (r == rank || shards[r].count == 0) continue;
        if (shards[r].begin < end_of(&shards[rank]) && shards[rank].begin < end_of(&shards[r])) {
            const int32_t low = r < rank ? r : rank, high = r < rank ? rank : r;
            BAD("the shards of ranks %d [%lld, %lld) and %d [%lld, %lld) overlap", low,
                (long long)shards[low].begin, (long long)end_of(&shards[low]), high,
                (long long)shards[high].begin, (long long)end_of(&shards[high]));
        }
    }
    return LL_STATUS_OK;
}

/* Ranks that each hold as many rows as the whole vocabulary has were given the full weights: all but one of
 * them would count as padding, and get gradients of 0 without a word. */
static ll_status check_full(const lli_shard *shards, int32_t n_ranks, int64_t v_total) {
    int64_t rows = 0;
    int32_t full = 0;
    for (int32_t r = 0; r < n_ranks; r++) {
        rows += shards[r].count;
        full += shards[r].count >= v_total;
    }
    if (full > 1) {
        BAD("%d ranks hold at least v_total %lld rows each, %lld in all: want a part of w on each rank, not "
            "the "
            "full weights",
            full, (long long)v_total, (long long)rows);
    }
    return LL_STATUS_OK;
}

ll_status lli_shards_check(const lli_shard *shards, int32_t n_ranks, int64_t v_total) {
    LLI_TRY(check_full(shards, n_ranks, v_total));
    for (int32_t r = 0; r < n_ranks; r++) LLI_TRY(check_overlap(shards, n_ranks, r));
    int64_t column = 0;
    while (column < v_total) {
        const int32_t rank = next_rank(shards, n_ranks, column);
        if (rank < 0) {
            BAD("the shards end at column %lld of v_total %lld", (long long)column, (long long)v_total);
        }
        if (shards[rank].begin != column) {
            BAD("no rank holds the columns [%lld, %lld): the next shard is rank %d's [%lld, %lld)",
                (long long)column, (long long)shards[rank].begin, rank, (long long)shards[rank].begin,
                (long long)end_of(&shards[rank]));
        }
        column = end_of(&shards[rank]);
    }
    return LL_STATUS_OK;
}

ll_status lli_shards_make(const lli_shard *shards, int32_t n_ranks, int32_t rank, int64_t v_total,
                          lli_shards *result) {
    *result = (lli_shards){.first_shared = -1, .last_shared = -1, .rank = rank, .n_ranks = n_ranks};
    result->shared = calloc((size_t)n_ranks, sizeof *result->shared);
    LLI_REQUIRE(result->shared, LL_STATUS_MEMORY, "ll_plan_create: no memory for the shards of %d ranks",
                n_ranks);
    int64_t column = 0;
    for (;;) {
        column = end_of(&shards[next_rank(shards, n_ranks, column)]);
        if (column >= v_total) break;
        const int64_t tile = column / kTileCols;
        const bool known = result->n_shared > 0 && result->shared[result->n_shared - 1] == tile;
        if (column % kTileCols != 0 && !known) result->shared[result->n_shared++] = tile;
    }
    const int64_t begin = shards[rank].begin;
    const int64_t end = end_of(&shards[rank]) < v_total ? end_of(&shards[rank]) : v_total;
    if (begin < end) {
        result->begin = begin;
        result->end = end;
        result->first_shared = lli_shards_find(result, begin / kTileCols);
        result->last_shared = lli_shards_find(result, (end - 1) / kTileCols);
    }
    return LL_STATUS_OK;
}

void lli_shards_free(lli_shards *shards) {
    free(shards->shared);
    *shards = (lli_shards){.first_shared = -1, .last_shared = -1};
}

int32_t lli_shards_find(const lli_shards *shards, int64_t tile) {
    int32_t low = 0, high = shards->n_shared;
    while (low < high) {
        const int32_t middle = low + (high - low) / 2;
        if (shards->shared[middle] < tile) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < shards->n_shared && shards->shared[low] == tile ? low : -1;
}
