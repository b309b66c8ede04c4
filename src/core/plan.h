/* What a plan holds: the checked problem, the chosen kernel and its configuration. */
#ifndef LLI_CORE_PLAN_H
#define LLI_CORE_PLAN_H

#include "core/group.h"
#include "core/workspace.h"

/* The description after every check, defaults filled in. Gradient dtypes are never NONE. */
typedef struct lli_problem {
    int64_t n_tokens_max, n_hidden;
    int64_t v_begin, v_local, v_total;
    int32_t x_dtype, w_dtype, bias_dtype; /* bias_dtype NONE: no bias */
    int32_t grad_x_dtype, grad_w_dtype, grad_bias_dtype;
    int32_t frozen, backend, n_threads;
    size_t budget_bytes; /* 0: the default, a wish and not a bound */
    ll_loss loss;
    bool in_group;            /* with a communicator, be it of one rank */
    const lli_shards *shards; /* of the group, once the ranks have met; NULL without */
} lli_problem;

/* How a kernel cuts its work; chosen once, in plan_create. Zero where a kernel has no such cut. */
typedef struct lli_config {
    int64_t forward_tokens;  /* tokens at a time where no gradient follows at once */
    int32_t one_pass;        /* forward_backward keeps a chunk's logits (3 GEMMs), not recomputing them */
    int64_t one_pass_tokens; /* its chunk */
    int64_t grad_tokens, grad_cols; /* tokens and columns at a time where logits are recomputed */
    int32_t columns_outside;        /* recomputing: columns outside, chunks of tokens inside */
} lli_config;

/* One checked call: shapes, dtypes, strides and targets fit the problem. */
typedef struct lli_call {
    const ll_linear_ce_args *args; /* complete: a shorter struct of the caller was extended by zeros */
    ll_pass pass;
    int64_t n_tokens, n_valid;
    double divisor; /* of the loss: the caller's, the sum of class weights of valid targets, or 1 */
    double weight;  /* sum of class weights of valid targets */
    bool want_entropy, want_argmax; /* on this rank, or on any rank of the group */
} lli_call;

typedef struct lli_kernel lli_kernel;
struct lli_kernel {
    const char *name, *numerics;
    ll_backend backend;
    /* False and a sentence where this machine, or this problem, is not for the kernel. */
    bool (*machine_ok)(char *why, size_t why_bytes);
    bool (*accepts)(const lli_problem *problem, char *why, size_t why_bytes);
    /* Chooses the cuts within the budget; WORKSPACE with the least if none fits. `agreed`: NULL, or what the
     * ranks of a group go through together, to be kept; of one_pass a rank may then still say no. */
    ll_status (*configure)(const lli_kernel *kernel, const lli_problem *problem, const lli_config *agreed,
                           lli_config *config);
    size_t (*workspace)(const lli_kernel *kernel, const lli_problem *problem, const lli_config *config,
                        ll_pass pass);
    ll_status (*run)(const ll_plan *plan, const lli_call *call);
    const void *isa; /* what kernels of one driver differ in; the backend's own */
};

/* Best first, the reference last, NULL at the end (src/core/kernels.c). */
extern const lli_kernel *const lli_linear_ce_kernels[];

struct lli_pool;

struct ll_plan {
    lli_problem problem;
    lli_config config;
    const lli_kernel *kernel;
    size_t workspace_bytes[3]; /* by ll_pass */
    struct lli_pool *pool;     /* CPU threads */
    lli_group *group;          /* NULL: no communicator */
    char refusals[1024];       /* one line for each better kernel */
};

#define LLI_FORMAT_PROBLEM "n%lld:d%lld:v%lld"

#endif
