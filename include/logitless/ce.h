/* logitless/ce.h: cross-entropy over logits that the caller has. The loss, its options, plans, views and
 * status codes are those of logitless.h, which includes this file at its end.
 *
 *   z[i,v] = softcap(logits[i,v]) / T          logits [n_tokens, v_local], bf16, f16 or f32
 *
 * Life of a plan: desc.op = LL_OP_CE, desc.logits_dtype -> ll_plan_create -> ll_plan_workspace ->
 * ll_ce_forward / _backward / _forward_backward, many times -> ll_plan_destroy. */
#ifndef LOGITLESS_CE_H
#define LOGITLESS_CE_H

#include <logitless/logitless.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Whether the logits of a call still are what the caller put there: written and read by the passes below, on
 * the host, when they are called. The caller owns it, one for each buffer of logits that is overwritten in
 * place: ll_ce_state state = LL_CE_STATE_INIT. It is no memory of results and may be dropped at any time. */
typedef struct ll_ce_state {
    size_t struct_bytes;
    const void *logits; /* of the last forward that was given this state */
    int64_t n_tokens;
    int32_t intact; /* 0: no forward yet, or the gradient has been written over the logits */
    int32_t reserved;
} ll_ce_state;

#ifdef __cplusplus
#define LL_CE_STATE_INIT lli_ce_state_init()
static inline ll_ce_state lli_ce_state_init(void) {
    ll_ce_state state = ll_ce_state();
    state.struct_bytes = sizeof(ll_ce_state);
    return state;
}
#else
#define LL_CE_STATE_INIT                                                                                     \
    { .struct_bytes = sizeof(ll_ce_state) }
#endif

/* Operands and results of the three passes over given logits. F forward, B backward, FB forward_backward;
 * n = n_tokens, the rows of logits. A field that a pass does not take must be left zero.
 *
 *   field          shape, dtype                     F     B     FB
 *   logits         [n, v_local] logits_dtype        read  read  read   raw: before softcap and temperature
 *   target, class_weight, token_weight, divisor                        as for linear_ce
 *   loss, nll, lse, lse_lo, entropy, z_loss, argmax, sums              as for linear_ce
 *   up_loss, up_nll, up_lse, up_entropy                                as for linear_ce
 *   grad_logits    [n, v_local] grad_logits_dtype   -     out   out    needed
 *   in_place       0, or 1: grad_logits is the same view as logits
 *   state          NULL, or this buffer of logits'  set   both  set    needed where in_place
 *   ids            [n, m] i32 or i64, m <= n_ids    read  -     read   all zeros: none; any row stride
 *   id_logp        [n, m] f32, contiguous           out   -     out    log p of the ids, or NULL
 *   id_rank        [n, m] i64, contiguous           out   -     out    1 + columns of greater logit, or NULL
 *   top_ids        [n, n_top] i64, contiguous       out   -     out    largest logits first, or NULL
 *   top_logp       [n, n_top] f32, contiguous       out   -     out    log p of them, or NULL
 *
 * Rows of logits may be any row stride >= v_local apart, so a slice of a padded matrix is a view. Columns at
 * or beyond v_total are padding: they are not read and get gradient 0.
 *
 * grad_logits may not overlap the logits unless it is the very same view and in_place is 1; then the call
 * needs no memory beyond the logits and the workspace, and the logits are gone afterwards. `state` keeps that
 * from becoming a wrong number: a forward (or forward_backward) given a state notes in it that these logits
 * are intact, a pass in place notes that they are not, and a backward given a state that is not intact, or is
 * another buffer's, is INVALID_ARG. A backward that is not in place may be repeated and needs no state.
 *
 * An id is a global column, or ignore_index where that is none (-100: a row with fewer than m ids). log p of
 * ids and of the top is min(0, z - lse) from the row's lse in double, rounded once: within 5e-7 where nll,
 * formed from the other columns' sum, has a relative error. Ranks and the top go by the given logits
 * themselves, whose order softcap and temperature keep. Equal ones: the lower column comes first, and both
 * have the same rank.
 *
 *                      id_logp   id_rank   top_ids   top_logp
 *   ignored row        0         0         -1        0
 *   row that is NaN    NaN       0         -1        NaN
 *   id ignore_index    0         0
 *   id out of range    refused with row and column on a CPU; on CUDA NaN, 0, and counted in *bad_targets */
typedef struct ll_ce_args {
    size_t struct_bytes;
    ll_view logits, target;
    const float *class_weight, *token_weight;
    const double *divisor;
    float *loss;
    float *nll, *lse, *lse_lo, *entropy;
    float *z_loss;
    int64_t *argmax;
    ll_sums *sums;
    const float *up_loss, *up_nll, *up_lse, *up_entropy;
    ll_view grad_logits;
    int32_t in_place;
    int32_t reserved;
    ll_ce_state *state; /* host memory */
    ll_view ids;
    float *id_logp;
    int64_t *id_rank;
    int64_t *top_ids;
    float *top_logp;
    void *workspace; /* 64-byte aligned */
    size_t workspace_bytes;
    int64_t *bad_targets; /* [1], CUDA: added to, once for each target and id outside [0, v_total); or NULL */
} ll_ce_args;

#ifdef __cplusplus
#define LL_CE_ARGS_INIT lli_ce_args_init()
static inline ll_ce_args lli_ce_args_init(void) {
    ll_ce_args args = ll_ce_args();
    args.struct_bytes = sizeof(ll_ce_args);
    return args;
}
#else
#define LL_CE_ARGS_INIT                                                                                      \
    { .struct_bytes = sizeof(ll_ce_args) }
#endif

/* Per-token results and the reduced loss of given logits, as ll_linear_ce_forward has them, and log p and
 * ranks of ids and the top-k on request, all from one pass over the logits, which stay as they are. Equal f32
 * logits give the same bits of nll, lse, entropy, argmax and loss as linear_ce.
 *
 * In a group: logits are each rank's columns; everything else that is read is the same on every rank. nll,
 * ids' log p and ranks, and the top come out on every rank that asks. Two operations a chunk of tokens, three
 * with argmax (max_i32 and sum_i64); with the top, 8 n_top bytes a token and rank in the sum. Ranks of ids
 * read the logits a second time there. Errors: as for ll_linear_ce_forward; also an id outside [0, v_total).
 */
LL_API ll_status ll_ce_forward(const ll_plan *plan, const ll_ce_args *args, ll_stream stream);

/* grad_logits of J for any per-token upstream, from the forward's saved results: dr of ll_linear_ce_backward
 * with r the given logit, rounded once to grad_logits_dtype. The entry of the target comes from p[y] - 1 =
 * expm1(-nll), which does not cancel however confident the token. Which saved results are needed: as for
 * ll_linear_ce_backward. In a group local, but for the meeting that every pass starts with.
 * Errors: as for the forward; INVALID_ARG where `state` says that the logits are not intact. */
LL_API ll_status ll_ce_backward(const ll_plan *plan, const ll_ce_args *args, ll_stream stream);

/* Forward and gradient in one call, for upstreams known beforehand (up_loss: {1} gives dL); the same bits as
 * forward followed by backward with nll, lse, lse_lo and entropy passed on. Every logit is read from memory
 * once and its gradient written once (one rank; a row stays in the cache between). In a group the logits are
 * read a second time after the exchange. */
LL_API ll_status ll_ce_forward_backward(const ll_plan *plan, const ll_ce_args *args, ll_stream stream);

#ifdef __cplusplus
}
#endif
#endif
