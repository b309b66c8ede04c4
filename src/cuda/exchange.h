/* A chunk's rows over the ranks of a group on a GPU: what the kernels of exchange.cu are told (ranks.c queues
 * them, with the group's operations between them).
 *
 *   place    products of a shared tile into its 64 places, as logits; -inf where another rank has the column
 *   max      a row's part of this rank -> its maxima                       [group: max_i32]
 *   sum      the part again, and the maxima -> its sums and its index      [group: sum_i64, max_i32]
 *   rows     both -> the whole row, as an lli_cuda_row that finish.cu takes
 *
 * The integers are those of core/exchange.h, whose lines are compiled here; two more of each row tell whether
 * all ranks were given the same target and divisor, which the host cannot see:
 *
 *   max[], by token:  [ core/exchange.h ][ given ][ ~given ]         alike on all ranks: the maxima are again
 *                                                                    one the other's complement
 *
 * Rows of ignored and bad targets send what no rank takes up: sizes follow from the number of tokens. */
#ifndef LLI_CUDA_EXCHANGE_H
#define LLI_CUDA_EXCHANGE_H

#include "core/exchange.h"
#include "cuda/work.h"

enum { kGivenInts = 2 };

typedef struct lli_cuda_place {
    float *z;          /* [n_rows, 64]: raw products of the columns at hand, in place to logits */
    const float *bias; /* of these columns, f32; or NULL */
    lli_cuda_transform transform;
    int64_t n_rows;
    int32_t at, count; /* place of the first column in its tile; columns */
} lli_cuda_place;
LLI_C int lli_cuda_place_launch(const lli_cuda_place *args, cudaStream_t stream);

typedef struct lli_cuda_exchange {
    lli_shards shards; /* .shared in device memory */
    lli_cuda_targets targets;
    int64_t first, n_rows; /* tokens of the chunk */
    lli_cuda_row *rows;    /* [parts, n_rows]; then the first n_rows of them */
    lli_exact *soft;       /* [n_rows], likewise; or NULL: no smoothing */
    const float *edges[2]; /* logits of the rank's first and last tile where shared, [n_rows, 64]; or NULL */
    const float *class_weight;
    int32_t *max;   /* [n_rows, n_max + kGivenInts] */
    int64_t *sum;   /* [n_rows, n_sum] */
    int32_t *index; /* [n_rows] */
    int64_t n_max, n_sum;
    lli_cuda_totals *totals;
    int64_t *bad_targets;
    int64_t column; /* what makes a row's argmax a global id */
    int32_t parts;  /* 0: the rank has no tile of its own */
    int32_t want_argmax;
} lli_cuda_exchange;
LLI_C int lli_cuda_exchange_max_launch(const lli_cuda_exchange *args, cudaStream_t stream);
LLI_C int lli_cuda_exchange_sum_launch(const lli_cuda_exchange *args, cudaStream_t stream);
LLI_C int lli_cuda_exchange_rows_launch(const lli_cuda_exchange *args, cudaStream_t stream);

LLI_C int lli_cuda_load_exchange(void);

/* ce_exchange.cu: of ce over given logits, whose rows lie where the caller has them.
 *
 *   local   targets as columns of this rank, for kernels that know of no others: -1 where ignored or bad
 *   place   as above, from logits
 *   sum     as above, by the arithmetic of bf16 and f16 logits (ce_tile.cuh) */
enum { kLocalIgnored = -1 };
typedef struct lli_cuda_ce_local {
    lli_cuda_targets targets;
    int64_t *local; /* [n_tokens] */
    int64_t n_tokens;
    int64_t column, count; /* global id of the first column; columns */
} lli_cuda_ce_local;
LLI_C int lli_cuda_ce_local_launch(const lli_cuda_ce_local *args, cudaStream_t stream);

typedef struct lli_cuda_ce_place {
    const void *logits; /* of the chunk's first row and the edge's first column */
    int64_t row_stride, n_rows;
    float *z; /* [n_rows, 64] */
    lli_cuda_transform transform;
    int32_t dtype, at, count;
} lli_cuda_ce_place;
LLI_C int lli_cuda_ce_place_launch(const lli_cuda_ce_place *args, cudaStream_t stream);
LLI_C int lli_cuda_ce_exchange_sum_launch(const lli_cuda_exchange *args, cudaStream_t stream);
LLI_C int lli_cuda_load_ce_exchange(void);

#endif
