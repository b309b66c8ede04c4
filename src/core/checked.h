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
} lli_problem;

/* One checked call: shapes, dtypes and strides fit the problem. On a CPU the contents of targets, weights and
 * divisor are checked too, and the fields from n_valid to weight are set; a GPU finds them itself. */
typedef struct lli_call {
    const ll_linear_ce_args *args; /* complete: a shorter struct of the caller was extended by zeros */
    ll_pass pass;
    ll_stream stream; /* CUDA */
    int64_t n_tokens, n_valid;
    double divisor; /* of the loss: the caller's, the sum of class weights of valid targets, or 1 */
    double weight;  /* sum of class weights of valid targets */
    bool want_entropy, want_argmax; /* on this rank, or on any rank of the group */
} lli_call;

#endif
