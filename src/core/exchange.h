/* One token over the ranks of a group: from every rank's part to the whole row, by maxima of int32 and sums
 * of int64 alone.
 *
 *   part of each rank -> lli_exchange_max -> max over ranks -> lli_exchange_sum -> sum over ranks
 *                     -> lli_exchange_row: the same part as one rank alone would have
 *
 * max[], by token:
 *   always              whole.top | rest.top | key of the largest logit
 *   with shared tiles   key of the largest logit of the target's tile but for the target
 *                       | key of the largest logit of shared tile 0, 1, ...
 *   and smoothing       | bits of the largest |cw z| of shared tile 0, 1, ...
 * sum[], by token:
 *   always              whole.s[3] | whole.u[3] | rest.s[3] | bits of the target's logit
 *   with shared tiles   | S of the target's tile but for the target | S, U of shared tile 0, 1, ...
 *   and smoothing       | soft sum of shared tile 0, 1, ...
 *   with smoothing      | limbs of the soft sum of all other tiles [13] | its flags
 *
 * That is 12 bytes and 80 bytes a token where no cut goes through a tile, whatever the vocabulary. A shared
 * tile's integers are added up before the tile enters the row: a tile that entered in parts could carry
 * differently into a limb that later falls out. The index of the largest logit follows in a maximum of its
 * own (lli_exchange_index), because it needs to know which logit is the largest. */
#ifndef LLI_CORE_EXCHANGE_H
#define LLI_CORE_EXCHANGE_H

#include "core/exact_sum.h"
#include "core/shards.h"
#include "core/softmax.h"

#include <stdbool.h>

/* What a rank knows of a row. */
typedef struct lli_row_part {
    lli_softmax whole, rest; /* its tiles; rest: without the target. Shared tiles are left out */
    lli_exact soft;          /* sum_v cw[v] z_v of the same tiles; with smoothing */
    const float *edges[2];   /* its first and last tile where shared: 64 logits, -inf where not its own */
    float z;                 /* the target's logit */
    float max; /* largest of its logits (-inf: none), the lowest column that has it (-1: none) */
    int64_t argmax;
    int32_t has_target;
} lli_row_part;

typedef struct lli_exchange {
    const lli_shards *shards;
    const float *class_weight; /* by global column, or NULL */
    bool smoothing;
} lli_exchange;

/* Integers a token. */
LLI_SHARED int64_t lli_exchange_n_max(int32_t n_shared, bool smoothing);
LLI_SHARED int64_t lli_exchange_n_sum(int32_t n_shared, bool smoothing);

/* target: global column of the row's target. */
LLI_SHARED void lli_exchange_max(const lli_exchange *exchange, const lli_row_part *part, int64_t target,
                                 int32_t *max);
LLI_SHARED void lli_exchange_sum(const lli_exchange *exchange, const lli_row_part *part, int64_t target,
                                 const int32_t *max, int64_t *sum);
LLI_SHARED void lli_exchange_row(const lli_exchange *exchange, const int32_t *max, const int64_t *sum,
                                 int64_t target, lli_row_part *row);

/* Its maximum over ranks is minus the lowest column that has the largest logit. */
LLI_SHARED int32_t lli_exchange_index(const lli_row_part *part, const int32_t *max);

#endif
