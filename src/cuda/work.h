/* What lies in the workspace during a call, and what the kernels are told; shared by the C glue and the
 * kernels.
 *
 *   tokens    a chunk at a time; row r of a chunk is token `first + r`, ignored or not: shapes follow from
 *             n_tokens alone, so a captured graph stays right when targets change
 *   columns   a block at a time, from a multiple of 64
 */
#ifndef LLI_CUDA_WORK_H
#define LLI_CUDA_WORK_H

#include "core/exact_sum.h"
#include "core/loss.h"
#include "core/softmax.h"

#include <cuda_runtime_api.h>

#ifdef __cplusplus
#define LLI_C extern "C"
#else
#define LLI_C
#endif

enum {
    kSumCols = 8192, /* numerics: grad_x is a sum over blocks of this many columns, ascending */
    kDzCols = 16384, /* the most columns whose dz are formed at a time: a multiple of kSumCols, or kSumCols */
    kTailCols = 64,  /* numerics: the last block's part beyond a multiple of this is a block of its own */
    kBiasRows = 16,  /* numerics: grad_bias is a sum over groups of this many tokens, ascending */
    kParts = 64      /* the most parts of a row whose statistics are gathered side by side */
};

/* What the clusters of a launch of grad_sm90.cu tell one another; zeros before and after it. Blocks of
 * columns that share a half of dz's memory share a count: of the later one nothing is done before the earlier
 * one is through. */
typedef struct lli_cuda_grad_queue {
    uint32_t tiles, pieces;                 /* handed out: tiles of products, pieces of dz */
    uint32_t x_warps[2], warps[2], made[2]; /* by half: warps that wrote a tile of grad_x, of any; pieces */
    uint32_t left;                          /* clusters that are through */
} lli_cuda_grad_queue;

/* Sums and scalars of one call; zero at its start. */
typedef struct lli_cuda_totals {
    lli_exact weight, class_total, loss, z_loss;
    unsigned long long n_valid, n_bad;
    double divisor, inv_divisor, weight_value, class_total_value;
    uint32_t max_class_weight; /* bits of an f32 >= 0 */
    uint32_t arrived;          /* blocks of the first kernel that are done */
    /* f16: grad_w of a chunk is alpha times a product of scaled operands (dz.cu) */
    int32_t chunk_exponent;
    float alpha, zero, one;
    lli_cuda_grad_queue queue;
} lli_cuda_totals;

/* A row's statistics as they are gathered; each row has `parts` of them, to be merged. */
typedef struct lli_cuda_row {
    lli_softmax others;      /* every tile but the target's */
    lli_softmax whole, rest; /* the target's tile, with and without the target */
    float z;                 /* the target's logit */
    int32_t has_target;
    float max; /* largest logit and its lowest column; argmax -1 before the first */
    int32_t reserved;
    int64_t argmax;
} lli_cuda_row;

typedef struct lli_cuda_grad {
    lli_row_grad row;
    int32_t exponent; /* f16: dz of the row is kept as dz 2^-exponent */
    int32_t reserved;
} lli_cuda_grad;

/* Token ids; ignored ones and those outside [0, v_total) are told apart on the device. */
typedef struct lli_cuda_targets {
    const void *ids;
    int64_t step, ignore_index, v_total;
    int32_t dtype;
} lli_cuda_targets;

typedef struct lli_cuda_transform {
    float softcap, temperature; /* 0: none; 1: none */
} lli_cuda_transform;

/* begin.cu: counts, class weights, divisor. */
typedef struct lli_cuda_begin {
    lli_cuda_totals *totals;
    lli_cuda_targets targets;
    int64_t n_tokens;
    const float *class_weight;
    const double *divisor;
    int64_t *bad_targets;
    int32_t mean, want_class_total, want_max_weight;
} lli_cuda_begin;
LLI_C int lli_cuda_begin_launch(const lli_cuda_begin *args, cudaStream_t stream);

/* stats.cu: a block of logits into the rows' statistics. */
typedef struct lli_cuda_stats {
    const float *logits; /* [n_rows, ld]; readable up to the next multiple of 64 columns */
    int64_t ld, n_rows, n_cols;
    int64_t column; /* global id of the block's first column */
    int64_t first;  /* token of row 0 */
    lli_cuda_targets targets;
    lli_cuda_transform transform;
    const float *bias;         /* of the block's columns, f32; or NULL */
    const float *class_weight; /* by global id; or NULL */
    lli_cuda_row *rows;        /* [parts, row_stride] */
    int64_t row_stride;
    int32_t parts;
    int32_t fresh;   /* the block is the row's first: rows and soft are overwritten */
    lli_exact *soft; /* [row_stride] sum_v cw[v] z_v; or NULL */
    int32_t want_entropy, want_argmax;
} lli_cuda_stats;
LLI_C int lli_cuda_stats_launch(const lli_cuda_stats *args, cudaStream_t stream);

/* finish.cu: results of a chunk's rows, and their gradient coefficients. */
typedef struct lli_cuda_finish {
    ll_linear_ce_args call;
    lli_loss_terms terms; /* .args is set on the device */
    lli_cuda_totals *totals;
    lli_cuda_targets targets;
    lli_cuda_transform transform;
    int64_t first, n_rows;
    lli_cuda_row *rows; /* [parts, row_stride] */
    int64_t row_stride;
    int32_t parts;
    lli_exact *soft;
    lli_cuda_grad *grads; /* by token; NULL: not wanted */
    double *row_lse;      /* by token; NULL: not wanted */
    int32_t smoothing, want_entropy, scaled;
} lli_cuda_finish;
LLI_C int lli_cuda_finish_launch(const lli_cuda_finish *args, cudaStream_t stream);
/* Coefficients from the caller's saved results; n_rows tokens from `first`. */
LLI_C int lli_cuda_prepare_launch(const lli_cuda_finish *args, cudaStream_t stream);
/* f16: the chunk's largest exponent, into totals. */
LLI_C int lli_cuda_chunk_scale_launch(const lli_cuda_grad *grads, int64_t n_rows, lli_cuda_totals *totals,
                                      cudaStream_t stream);
/* The reduced loss and ll_sums. */
typedef struct lli_cuda_end {
    lli_cuda_totals *totals;
    float *loss; /* NULL: none, or one a token */
    ll_sums *sums;
    int64_t n_tokens;
} lli_cuda_end;
LLI_C int lli_cuda_end_launch(const lli_cuda_end *args, cudaStream_t stream);

/* dz.cu: logits of a block into gradients with respect to them. */
typedef struct lli_cuda_dz {
    const float *logits;
    int64_t ld, n_rows, n_cols, first;
    int64_t column; /* global id of the block's first column */
    lli_cuda_targets targets;
    lli_cuda_transform transform;
    const float *bias, *class_weight; /* of the block's columns; by global id; or NULL */
    int32_t smoothing;                /* epsilon of a row may be other than 0 */
    const lli_cuda_grad *grads;       /* of the chunk's rows */
    void *dz; /* [padded_rows, dz_ld]; zeros beyond n_rows and from n_cols to padded_cols */
    int64_t dz_ld, padded_rows, padded_cols;
    int32_t dtype;
    float *bias_parts; /* [ceil(n_rows / kBiasRows)] rows kDzCols apart; or NULL */
} lli_cuda_dz;
/* Logits are the products themselves. */
static inline int lli_cuda_dz_plain(const lli_cuda_dz *dz) {
    return !dz->bias && !dz->smoothing && dz->transform.softcap == 0.0f && dz->transform.temperature == 1.0f;
}
LLI_C int lli_cuda_dz_launch(const lli_cuda_dz *args, cudaStream_t stream);
/* sum[column ...] (+)= the parts, ascending. */
LLI_C int lli_cuda_bias_add_launch(const float *parts, int64_t n_parts, int64_t n_cols, float *sum,
                                   int32_t fresh, cudaStream_t stream);

/* move.cu */
typedef struct lli_cuda_pack { /* to[r, c] = from[r, c]; zeros beyond n_rows and n_cols */
    const void *from;
    void *to;
    int64_t from_ld, to_ld, n_rows, n_cols, padded_rows, padded_cols;
    int32_t dtype;
    /* The copy of x for grad_w: rows of tokens that have no gradient are zeros, whatever they hold; f16 rows
     * are scaled by 2^(exponent - totals->chunk_exponent). NULL: a plain copy. */
    const lli_cuda_grad *grads;
    const lli_cuda_totals *totals;
} lli_cuda_pack;
LLI_C int lli_cuda_pack_launch(const lli_cuda_pack *args, cudaStream_t stream);

typedef struct lli_cuda_emit { /* out[r, c] (+)= sum[r, c] 2^exponent[r], rounded once */
    const float *sum;
    void *out;
    int64_t sum_ld, out_ld, out_step, n_rows, n_cols;
    int32_t dtype, accumulate;
    const lli_cuda_grad *grads; /* of the rows: zeros where dead. NULL: plain */
} lli_cuda_emit;
LLI_C int lli_cuda_emit_launch(const lli_cuda_emit *args, cudaStream_t stream);
/* Zeros into rows [begin, end) of a view. */
LLI_C int lli_cuda_clear_launch(const ll_view *view, int64_t begin, int64_t end, cudaStream_t stream);
/* to[i] = the element as f32; zeros from n to padded. */
LLI_C int lli_cuda_widen_launch(const ll_view *from, int64_t n, int64_t padded, float *to,
                                cudaStream_t stream);

/* Load a file's kernels, so that no call has to: loading allocates. */
LLI_C int lli_cuda_load_begin(void);
LLI_C int lli_cuda_load_stats(void);
LLI_C int lli_cuda_load_finish(void);
LLI_C int lli_cuda_load_dz(void);
LLI_C int lli_cuda_load_move(void);

#endif
