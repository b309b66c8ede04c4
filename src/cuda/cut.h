/* How the CUDA backend cuts a problem, and the workspace that follows.
 *
 *   forward       chunks of tokens outside; inside, blocks of columns whose f32 logits stay in the L2 cache
 *   one pass      chunks of tokens; the f32 logits of a chunk are kept for `kept_cols` columns and formed
 *                 again for the rest: 3 GEMMs and a part of a fourth
 *   exponentials  chunks of tokens; those of a chunk are kept (fused.h), in the memory of grad_x's sums,
 *                 in the workspace and, of the first chunk, in the memory of grad_w; the logits of what is
 *                 not kept are formed again: 3 GEMMs, or a part of a fourth where a narrow grad_w wants all
 *                 tokens in one chunk
 *   recompute     blocks of dz_cols columns and chunks of tokens, either outside; a block's logits are
 *                 formed and turned into dz in pieces that stay in the L2 cache
 *
 * Neither bits of rows nor of grad_x depend on the chunks; grad_w is a sum over chunks of tokens. */
#ifndef LLI_CUDA_CUT_H
#define LLI_CUDA_CUT_H

#include "core/integers.h"
#include "core/plan.h"
#include "cuda/work.h"

/* Outputs whose memory a chunk may use until they are written. */
typedef struct lli_cuda_lent {
    bool w, x;
} lli_cuda_lent;

typedef struct lli_cuda_cut {
    int64_t d, d_padded; /* n_hidden, and rounded up to 16 bytes */
    int64_t element_bytes;
    int64_t v, v_cols;    /* real columns, and rounded up to 64; in a group without edges, and at least 64 */
    int64_t v_real;       /* all real columns */
    int64_t n_max, n_sum; /* integers a token that ranks exchange (exchange.h); 0 without */
    int64_t n_tokens_max;
    int64_t forward_tokens;                  /* 0: no forward of its own */
    int64_t block_elems;                     /* f32 logits at a time */
    int64_t grad_tokens, dz_cols, kept_cols; /* 0 in a forward pass */
    int64_t acc_tokens;                      /* rows of acc_x */
    int64_t row_slots;                       /* lli_cuda_row of a chunk, all parts */
    int64_t x_pack_rows;
    size_t scratch_bytes;
    bool one_pass, columns_outside, gradient, keep_acc_w;
    bool want_x, want_w, want_bias, has_bias, smoothing, scaled;
    /* A chunk that keeps exponentials: bytes of them in the workspace, and anchors of all that are kept. */
    bool keeps;
    int64_t code_bytes, anchors;
    lli_cuda_lent lent; /* exponentials lie in the memory of grad_w too; the copy of x in that of grad_x */
    int32_t n_edges;
} lli_cuda_cut;

/* Columns [begin, begin + count) of the rank's; w has their rows. */
typedef struct lli_cuda_range {
    int64_t begin, count;
} lli_cuda_range;

/* The rank's own columns and its edges, the first one before the last (ranks.h); alone: all are its own. */
typedef struct lli_cuda_ranges {
    lli_cuda_range own, edges[2];
    int32_t n_edges;
} lli_cuda_ranges;
lli_cuda_ranges lli_cuda_ranges_of(const lli_problem *problem);

typedef struct lli_cuda_pieces {
    lli_cuda_totals *totals;
    float *bias;          /* f32, v_cols; then 64 an edge */
    lli_cuda_row *rows;   /* row_slots */
    lli_exact *soft;      /* by row of a chunk */
    lli_cuda_grad *grads; /* by token */
    float *logits;        /* block_elems */
    float *kept;          /* grad_tokens x kept_cols */
    void *dz;             /* grad_tokens rounded up to 64, x dz_cols */
    void *x_copy;         /* the same rows, x d_padded */
    float *acc_x;         /* acc_tokens x d_padded */
    float *acc_w;         /* dz_cols x d_padded, where a narrow grad_w is a sum over chunks */
    float *acc_bias;      /* v_cols; then 64 an edge */
    float *bias_parts;    /* groups of kBiasRows x kDzCols */
    uint16_t *codes;      /* code_bytes: exponentials */
    int32_t *anchors;
    float *edges;           /* n_edges x chunk x 64 */
    int32_t *max, *index;   /* by row of a chunk: n_max and kGivenInts; 1 */
    int64_t *sum;           /* likewise: n_sum */
    void *x_pack, *scratch; /* operands that do not start their rows on 16 bytes; f32 of narrow grad_w */
} lli_cuda_pieces;

lli_cuda_cut lli_cuda_cut_make(const lli_problem *problem, const lli_config *config, ll_pass pass);
/* Of a chunk that keeps exponentials. What lives longer than a chunk (totals, grads) lies in the workspace
 * where every cut of the plan has it. */
lli_cuda_cut lli_cuda_cut_kept(const lli_problem *problem, int64_t dz_cols, int64_t n_tokens,
                               int64_t code_bytes, lli_cuda_lent lent);
/* The cut of a chunk of a call: code_bytes are those of one that may use grad_x for its copy of x. */
lli_cuda_cut lli_cuda_cut_chunk(const lli_problem *problem, const lli_config *config, lli_cuda_lent lent);
/* Where the exponentials of the chunk's first n_tokens rows go (fused.h, lli_cuda_kept): ends of the
 * canonical tiles in the memory of grad_x's sums, in that of grad_w behind row w_row and w_stride_bytes
 * apart, and of all that are kept. No tile in grad_w begins before its own rows of it, so those may be
 * written tile by tile; tiles in the sums are of the first block of dz, which is formed before the sums
 * begin. */
typedef struct lli_cuda_places {
    int64_t sum_end, w_end, n_tiles, w_row, w_stride_bytes;
} lli_cuda_places;
lli_cuda_places lli_cuda_cut_places(const lli_problem *problem, const lli_cuda_cut *cut, int64_t n_tokens);

size_t lli_cuda_cut_carve(const lli_cuda_cut *cut, void *base, lli_cuda_pieces *pieces);

ll_status lli_cuda_configure(const lli_kernel *kernel, const lli_problem *problem, const lli_config *agreed,
                             lli_config *config);
size_t lli_cuda_workspace(const lli_kernel *kernel, const lli_problem *problem, const lli_config *config,
                          ll_pass pass);

/* Columns of n_rows tokens whose logits are formed at a time. */
int64_t lli_cuda_block_cols(const lli_cuda_cut *cut, int64_t n_rows);
/* Parts in which n_rows rows gather their statistics, of a block of n_cols. */
int32_t lli_cuda_parts(const lli_cuda_cut *cut, int64_t n_rows, int64_t n_cols);

#endif
