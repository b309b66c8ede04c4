/* What a plan holds: the checked problem, the chosen kernel and its configuration. */
#ifndef LLI_CORE_PLAN_H
#define LLI_CORE_PLAN_H

#include "core/checked.h"
#include "core/group.h"
#include "core/workspace.h"

/* How a kernel cuts its work; chosen once, in plan_create. Zero where a kernel has no such cut. */
typedef struct lli_config {
    int64_t forward_tokens;  /* tokens at a time where no gradient follows at once */
    int32_t one_pass;        /* forward_backward keeps a chunk's logits (3 GEMMs), not recomputing them */
    int64_t one_pass_tokens; /* its chunk */
    int64_t grad_tokens, grad_cols; /* tokens and columns at a time where logits are recomputed */
    int32_t columns_outside;        /* recomputing: columns outside, chunks of tokens inside */
    int64_t forward_cols;           /* columns at a time beside forward_tokens */
    int64_t kept_cols;              /* of one_pass: columns whose logits are kept, if not all are */
    /* of one_pass on Hopper (cuda/fused.h): exponentials are kept, not logits; of a chunk so many bytes in
     * the workspace; tokens and such bytes of a first chunk whose exponentials lie in grad_w's memory too */
    int32_t exponentials;
    int64_t dz_cols; /* CUDA: columns whose dz are formed at a time; 0: as many as there can be */
    int64_t code_bytes, first_tokens, first_code_bytes;
} lli_config;

typedef struct lli_kernel lli_kernel;
struct lli_kernel {
    const char *name, *numerics; /* the name starts with the operation's */
    ll_op op;
    ll_backend backend;
    /* False and a sentence where this machine, or this problem, is not for the kernel; accepts NULL: takes
     * all. */
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
    /* Of a backend that keeps something in its plans (a device, handles); NULL otherwise. `open` runs after
     * configure and sets plan->device, and plan->numerics where that depends on the machine. */
    ll_status (*open)(ll_plan *plan);
    void (*close)(ll_plan *plan);
    /* What only the backend can say of a call in a group, before the ranks meet; NULL: nothing. */
    ll_status (*check_in_group)(const ll_plan *plan, const lli_call *call);
    const char *(*numerics_here)(void); /* of this machine, where `numerics` is NULL */
};

/* Kernels of this library by operation, each list best first, the reference last (src/core/kernels.c);
 * backends.h has those of other libraries. NULL behind the last. */
const lli_kernel *lli_kernel_built_in(int32_t index);

struct lli_pool;

struct ll_plan {
    lli_problem problem;
    lli_config config;
    const lli_kernel *kernel;
    const char *numerics;
    void *device;              /* the kernel's own, from open to close */
    size_t workspace_bytes[3]; /* by ll_pass */
    struct lli_pool *pool;     /* CPU threads */
    lli_group *group;          /* NULL: no communicator */
    char refusals[1024];       /* one line for each better kernel */
};

#define LLI_FORMAT_PROBLEM "n%lld:d%lld:v%lld"

#endif
