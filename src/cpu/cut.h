/* How the CPU backend cuts a problem, and the workspace that follows from it.
 *
 *              columns of w (padded to 64)
 *            +--------+--------+--------+--
 *   tokens   | task   | task   |        |        forward: one task = block_cols columns x some token groups;
 *   (chunk)  |        |        |        |        its logits live in a tile of kGroupPanels panels of tokens
 *            +--------+--------+--------+--
 *
 * Sums over the vocabulary (grad_x) run in blocks of kSumCols columns and sums over tokens (grad_w,
 * grad_bias) in blocks of kSumTokens tokens, each block a chain of its own that is then added, in ascending
 * order. Every chunk is a multiple of them, so neither chunks nor threads change a bit. */
#ifndef LLI_CPU_CUT_H
#define LLI_CPU_CUT_H

#include "core/integers.h"
#include "core/plan.h"
#include "cpu/finish.h"
#include "cpu/micro.h"

enum {
    kGroupPanels = 8, /* token panels whose logits are formed together: 112 x 128 floats stay in L2 */
    kSlab = 256,      /* steps of the contraction at a time: a 32-wide panel of w is then 32 KB, the L1 */
    kSumCols = 256,   /* numerics: see above */
    kSumTokens = 256, /* numerics: see above */
    kGradCols = 168,  /* columns of a grad_w task; a multiple of every panel height (14, 6, 4) */
    kSlabCols = 512   /* columns of x or w at a time in gradient products: 256 x 512 floats stay in L2 */
};

typedef struct lli_cut {
    int64_t mr, nr;
    int64_t d, d_cols; /* n_hidden, and rounded up to nr */
    /* Columns are counted from the start of the shard's first canonical tile: `base` on the global index. The
     * shard's own are [lead, v_end), v of them; row c - lead of w belongs to column c. v_cols: up to the end
     * of its last tile. */
    int64_t base, lead, v, v_end, v_cols;
    int64_t block_cols;             /* columns of a forward task: a multiple of 64 */
    int64_t forward_tokens;         /* chunk of the forward, 0 if the pass has none of its own */
    int64_t grad_tokens, grad_cols; /* chunk and columns of the gradient passes, 0 in a forward pass */
    int64_t block_tokens; /* depth of a panel over tokens: kSumTokens, or fewer where there are fewer */
    int64_t n_tokens_max, n_threads;
    ll_pass pass;
    bool one_pass, smoothing, in_group;
    bool has_edges;       /* a tile of this shard is shared with another rank */
    int64_t n_max, n_sum; /* integers a token that the ranks exchange */
    bool w_direct;        /* grad_w is f32: it is its own accumulator */
    bool keep_acc_w;      /* grad_w is narrower and several chunks add to it */
    /* recomputing: chunks of tokens outside, stretches of columns inside. Then grad_w is added to by every
     * chunk and grad_x is complete after one; the other way round where grad_w has no f32 memory of its own.
     */
    bool tokens_outside;
    bool want_x, want_w, want_bias, has_bias;
} lli_cut;

lli_cut lli_cut_make(const lli_problem *problem, const lli_config *config, const lli_micro *micro,
                     ll_pass pass);

/* One thread's private buffers. */
typedef struct lli_scratch {
    float *w_panels;  /* forward: block_cols x d; grad_x: kSumCols x kSlabCols, or what there is of either */
    float *tile;      /* kGroupPanels * mr x block_cols logits; forward without gradients */
    float *dz_panels; /* grad_w: block_tokens x kGradCols; grad_x: grad_tokens x kSumCols */
    float *acc_w;     /* kGradCols x d_cols; where grad_w needs an f32 sum and one chunk holds all tokens */
    lli_row_sums *sums; /* by row of the chunk */
    lli_exact *soft;    /* by row of the chunk; with label smoothing */
    lli_finish_sums finished;
} lli_scratch;

typedef struct lli_pieces {
    int64_t *rows;           /* token of each valid row */
    float *bias;             /* f32, v_cols long, zeros beyond v */
    lli_row_grad *grads;     /* by valid row; gradient passes */
    float *x_panels;         /* the chunk's tokens in mr-wide panels, d deep */
    lli_row_target *targets; /* by row of the chunk */
    int32_t *max;            /* chunk x n_max; exchange.h */
    int64_t *sum;            /* chunk x n_sum */
    int32_t *index;          /* by row of the chunk */
    float *edges;            /* chunk x 2 x 64: logits of the shard's first and last tile where shared */
    float *logits;           /* chunk x grad_cols; raw logits, then gradients */
    float *x_cols;           /* the chunk's tokens in nr-wide panels of d_cols, block_tokens deep */
    float *acc_x;            /* rows x d_cols: of a chunk, or of all tokens where columns are outside; x d
                              * once it has been added up over ranks */
    float *acc_w;            /* grad_cols x d_cols; where grad_w needs an f32 sum over several chunks */
    float *acc_bias;         /* v_cols */
    lli_scratch *scratch;    /* by thread */
} lli_pieces;

/* Sizes (arena.base NULL) or addresses of everything. */
void lli_cut_carve(const lli_cut *cut, lli_arena *arena, lli_pieces *pieces);

/* The plan's choice of chunks. */
ll_status lli_cut_configure(const lli_problem *problem, const lli_micro *micro, const lli_config *agreed,
                            lli_config *config);
size_t lli_cut_workspace(const lli_problem *problem, const lli_config *config, const lli_micro *micro,
                         ll_pass pass);

#endif
