/* What has passed every check: a problem and a call of it. Kept apart from the plan, because code that runs
 * on a GPU needs these and nothing else of it. */
#ifndef LLI_CORE_CHECKED_H
#define LLI_CORE_CHECKED_H

#include <logitless/logitless.h>

#include <stdbool.h>

/* The description after every check, defaults filled in. Gradient dtypes are never NONE. */
typedef struct lli_problem {
    int64_t n_tokens_max, n_hidden;
    int64_t v_begin, v_local, v_total;
    int32_t x_dtype, w_dtype, bias_dtype; /* bias_dtype NONE: no bias */
    int32_t grad_x_dtype, grad_w_dtype, grad_bias_dtype;
    int32_t frozen, backend, n_threads;
    size_t budget_bytes; /* 0: the default, a wish and not a bound */
    ll_loss loss;
    bool in_group;                   /* with a communicator, be it of one rank */
    const struct lli_shards *shards; /* of the group, once the ranks have met; NULL without */
    int32_t op;                      /* ll_op */
    /* ce; 0 for linear_ce, which has n_hidden and the dtypes of x, w, bias, which are 0 here. */
    int32_t logits_dtype, grad_logits_dtype, n_ids, n_top;
} lli_problem;

/* One checked call: shapes, dtypes and strides fit the problem. On a CPU the contents of targets, weights and
 * divisor are checked too, and the fields from n_valid to weight are set; a GPU finds them itself. */
typedef struct lli_call {
    /* Complete: a shorter struct of the caller was extended by zeros. For ce its row part (targets, weights,
     * row results, upstreams, workspace, bad_targets) is the call's, and its operands and gradients are
     * zeros. */
    const ll_linear_ce_args *args;
    const ll_ce_args *ce; /* NULL for linear_ce */
    const char *name;     /* of the function that runs the pass: the first words of its error sentences */
    ll_pass pass;
    ll_stream stream; /* CUDA */
    int64_t n_tokens, n_valid;
    double divisor; /* of the loss: the caller's, the sum of class weights of valid targets, or 1 */
    double weight;  /* sum of class weights of valid targets */
    bool want_entropy, want_argmax; /* on this rank, or on any rank of the group */
    bool want_rank, want_top;       /* ce: likewise, of ids; the top-k */
} lli_call;

#endif
