/* Which rank holds which columns of the vocabulary, and the canonical tiles that a cut goes through.
 *
 *   tile        0               1               2               3
 *         |---------------|---------------|---------------|---------------|
 *   rank  |   0   |      2        |1|          3          |       0 ...
 *                 ^               ^ ^                     ^                  tiles 0, 1 and 2 are shared
 *
 * A shared tile is summed by its ranks together (exchange.h). Everything here is the same on every rank but
 * what lli_shards says of this rank. */
#ifndef LLI_CORE_SHARDS_H
#define LLI_CORE_SHARDS_H

#include "core/status.h"

/* w rows of the global columns [begin, begin + count), as the rank's caller gave them. */
typedef struct lli_shard {
    int64_t begin, count;
} lli_shard;

typedef struct lli_shards {
    int64_t *shared;                   /* shared tiles, ascending; tile t holds columns [64 t, 64 t + 64) */
    int32_t n_shared;                  /* at most one less than the ranks with columns */
    int32_t first_shared, last_shared; /* this rank's first and last tile in the list, or -1 */
    int64_t begin, end; /* this rank's columns inside the vocabulary; equal if there are none */
    int32_t rank, n_ranks;
} lli_shards;

/* INVALID_ARG, the same sentence on every rank, unless the shards of ranks 0..n_ranks cover [0, v_total)
 * once. Columns beyond v_total are padding and may lie on any rank; empty shards and any order of ranks are
 * fine. */
ll_status lli_shards_check(const lli_shard *shards, int32_t n_ranks, int64_t v_total);

/* Of checked shards, for `rank`. MEMORY. Release with lli_shards_free. */
ll_status lli_shards_make(const lli_shard *shards, int32_t n_ranks, int32_t rank, int64_t v_total,
                          lli_shards *result);
void lli_shards_free(lli_shards *shards);

/* Position of a tile in the list of shared ones, or -1. */
int32_t lli_shards_find(const lli_shards *shards, int64_t tile);

#endif
