/* Life of a plan and the entry of every pass: check, then hand over to the chosen kernel. */
#include "core/agree.h"
#include "core/backends.h"
#include "core/pool.h"
#include "core/problem.h"

#include <fenv.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char cuda_prefix[] = "linear_ce_cuda"; /* of the names of all CUDA kernels */
static const char *const backend_names[] = {"auto", "cpu", "ref", "cuda"};

/* First kernel of the table that takes the problem; every refusal before it is kept as a line of text. */
static ll_status choose_kernel(ll_plan *plan) {
    const char *forced = getenv("LL_KERNEL");
    bool known = false;
    size_t used = 0;
    char why[160];
    const bool by_name = forced && *forced;
    /* CUDA's library is opened only for who asks for it: auto never picks a kernel that wants device memory.
     */
    const bool cuda = by_name ? strncmp(forced, cuda_prefix, sizeof cuda_prefix - 1) == 0
                              : plan->problem.backend == LL_BACKEND_CUDA;
    const lli_kernel *kernel;
    for (int32_t i = 0; (cuda || lli_linear_ce_kernels[i]) && (kernel = lli_kernel_at(i)); i++) {
        if (by_name) {
            if (strcmp(forced, kernel->name) != 0) continue;
            known = true;
        } else if (plan->problem.backend == LL_BACKEND_AUTO
                       ? kernel->backend == LL_BACKEND_CUDA
                       : plan->problem.backend != (int32_t)kernel->backend) {
            continue;
        }
        if (kernel->machine_ok(why, sizeof why) && kernel->accepts(&plan->problem, why, sizeof why)) {
            plan->kernel = kernel;
            plan->numerics = kernel->numerics;
            return LL_STATUS_OK;
        }
        int length =
            snprintf(plan->refusals + used, sizeof plan->refusals - used, "%s: %s\n", kernel->name, why);
        used += (size_t)length;
        if (used >= sizeof plan->refusals) used = sizeof plan->refusals - 1;
    }
    if (by_name && !known) {
        return lli_fail(
            LL_STATUS_INVALID_ARG,
            "ll_plan_create: LL_KERNEL is \"%s\", which is no kernel of this build (logitless info lists "
            "them)",
            forced);
    }
    return lli_fail(LL_STATUS_UNSUPPORTED, "ll_plan_create: no kernel for backend %s: %s",
                    backend_names[plan->problem.backend], *plan->refusals ? plan->refusals : "none built");
}

/* What a rank can do alone before it meets the others. */
static ll_status describe_and_choose(const ll_plan_desc *desc, ll_plan *plan) {
    LLI_TRY(lli_problem_check(desc, &plan->problem));
    return choose_kernel(plan);
}

static ll_status start_threads(ll_plan *plan) {
    const bool cpu = plan->kernel->backend == LL_BACKEND_CPU;
    return lli_pool_create(cpu ? plan->problem.n_threads : 1, &plan->pool);
}

static ll_status create_alone(const ll_plan_desc *desc, ll_plan *plan) {
    LLI_TRY(describe_and_choose(desc, plan));
    LLI_TRY(plan->kernel->configure(plan->kernel, &plan->problem, NULL, &plan->config));
    if (plan->kernel->open) LLI_TRY(plan->kernel->open(plan));
    return start_threads(plan);
}

/* Three meetings: descriptions and shards; the cuts that each rank would choose; the plan with the agreed
 * ones. What fails on one rank between two meetings is told in the next. */
static ll_status create_in_group(const ll_plan_desc *desc, ll_plan *plan) {
    lli_group *group = plan->group;
    ll_status status = describe_and_choose(desc, plan);
    LLI_TRY(lli_agree_plan(group, status, &plan->problem, plan->kernel));
    const lli_kernel *kernel = plan->kernel;
    plan->problem.shards = &group->shards;
    status = group->shards.shared ? LL_STATUS_OK : LL_STATUS_MEMORY; /* the sentence is set */
    if (status == LL_STATUS_OK) status = kernel->configure(kernel, &plan->problem, NULL, &plan->config);
    lli_config agreed = plan->config;
    LLI_TRY(lli_agree_cuts(group, status, &agreed));
    status = kernel->configure(kernel, &plan->problem, &agreed, &plan->config);
    if (status == LL_STATUS_OK) status = start_threads(plan);
    return lli_agree_ready(group, status, &plan->config);
}

ll_status ll_plan_create(const ll_plan_desc *desc, ll_plan **result) {
    LLI_REQUIRE(result, LL_STATUS_INVALID_ARG, "ll_plan_create: plan is NULL");
    *result = NULL;
    LLI_REQUIRE(desc, LL_STATUS_INVALID_ARG, "ll_plan_create: desc is NULL");
    ll_plan_desc whole;
    LLI_TRY(lli_struct_copy(&whole, sizeof whole, desc, sizeof(size_t), "ll_plan_create: ll_plan_desc"));
    ll_plan *plan = calloc(1, sizeof *plan);
    if (!plan) {
        if (whole.comm) ll_comm_abort(whole.comm, "ll_plan_create: a rank has no memory for the plan");
        return lli_fail(LL_STATUS_MEMORY, "ll_plan_create: no memory for the plan");
    }
    ll_status status = whole.comm ? lli_group_create(whole.comm, &plan->group) : LL_STATUS_OK;
    if (status == LL_STATUS_OK) {
        status = plan->group ? create_in_group(&whole, plan) : create_alone(&whole, plan);
    }
    if (status != LL_STATUS_OK) {
        ll_plan_destroy(plan);
        return status;
    }
    for (int pass = 0; pass < 3; pass++) {
        plan->workspace_bytes[pass] =
            plan->kernel->workspace(plan->kernel, &plan->problem, &plan->config, (ll_pass)pass);
    }
    *result = plan;
    return LL_STATUS_OK;
}

void ll_plan_destroy(ll_plan *plan) {
    if (!plan) return;
    if (plan->device) plan->kernel->close(plan);
    lli_pool_destroy(plan->pool);
    lli_group_destroy(plan->group);
    free(plan);
}

ll_status ll_plan_workspace(const ll_plan *plan, ll_pass pass, size_t *bytes) {
    LLI_REQUIRE(plan, LL_STATUS_INVALID_ARG, "ll_plan_workspace: plan is NULL");
    LLI_REQUIRE(bytes, LL_STATUS_INVALID_ARG, "ll_plan_workspace: bytes is NULL");
    LLI_REQUIRE((int)pass >= 0 && pass <= LL_PASS_FORWARD_BACKWARD, LL_STATUS_INVALID_ARG,
                "ll_plan_workspace: pass is %d, want an ll_pass", (int)pass);
    *bytes = plan->workspace_bytes[pass];
    return LL_STATUS_OK;
}

ll_status ll_plan_describe(const ll_plan *plan, char *text, size_t text_bytes) {
    LLI_REQUIRE(plan, LL_STATUS_INVALID_ARG, "ll_plan_describe: plan is NULL");
    LLI_REQUIRE(text && text_bytes, LL_STATUS_INVALID_ARG,
                "ll_plan_describe: text is %p with %zu bytes, want room", (void *)text, text_bytes);
    const lli_problem *p = &plan->problem;
    const ll_loss *loss = &p->loss;
    static const char *const reductions[] = {"mean", "sum", "none"};
    const lli_config *c = &plan->config;
    char cuts[160] = "", shard[128] = "";
    if (plan->group) {
        snprintf(shard, sizeof shard, "rank %d of %d, columns [%lld, %lld)%s\n", plan->group->comm.rank,
                 plan->group->comm.size, (long long)p->shards->begin, (long long)p->shards->end,
                 plan->group->debug ? ", debug" : "");
    }
    if (c->one_pass && c->kept_cols) {
        snprintf(cuts, sizeof cuts,
                 "; forward_backward in 3 GEMMs for %lld columns, 4 for the rest, %lld tokens at a time",
                 (long long)c->kept_cols, (long long)c->one_pass_tokens);
    } else if (c->one_pass) {
        snprintf(cuts, sizeof cuts, "; forward_backward in 3 GEMMs, %lld tokens at a time",
                 (long long)c->one_pass_tokens);
    } else if (c->grad_tokens && !c->grad_cols) {
        snprintf(cuts, sizeof cuts, "; forward_backward in 4 GEMMs, %lld tokens at a time",
                 (long long)c->grad_tokens);
    } else if (c->grad_tokens) {
        snprintf(cuts, sizeof cuts, "; forward_backward in 4 GEMMs, %lld tokens and %lld columns at a time",
                 (long long)c->grad_tokens, (long long)c->grad_cols);
    }
    snprintf(text, text_bytes,
             "linear_ce x:%s w:%s n%lld:d%lld:v%lld rows:%lld bias:%s t%g:cap%g:ls%g%s:zl%g:ign%lld:%s%s\n"
             "%skernel %s numerics %s threads %d%s\n"
             "workspace bytes: forward %zu, backward %zu, forward_backward %zu\n%s%s",
             ll_dtype_name((ll_dtype)p->x_dtype), ll_dtype_name((ll_dtype)p->w_dtype),
             (long long)p->n_tokens_max, (long long)p->n_hidden, (long long)p->v_total, (long long)p->v_local,
             ll_dtype_name((ll_dtype)p->bias_dtype), (double)loss->temperature, (double)loss->softcap,
             (double)loss->label_smoothing, loss->smoothing_rule == LL_SMOOTHING_OTHERS ? "(others)" : "",
             (double)loss->z_loss, (long long)loss->ignore_index, reductions[loss->reduction],
             loss->token_scaling ? ":token_scaling" : "", shard, plan->kernel->name, plan->numerics,
             ll_plan_threads(plan), cuts, plan->workspace_bytes[0], plan->workspace_bytes[1],
             plan->workspace_bytes[2], *plan->refusals ? "refused:\n" : "", plan->refusals);
    return LL_STATUS_OK;
}

const char *ll_plan_kernel(const ll_plan *plan) {
    return plan ? plan->kernel->name : NULL;
}
const char *ll_plan_numerics(const ll_plan *plan) {
    return plan ? plan->numerics : NULL;
}
int32_t ll_plan_threads(const ll_plan *plan) {
    return !plan ? 0 : plan->kernel->backend == LL_BACKEND_CPU ? plan->problem.n_threads : 1;
}

ll_status ll_kernel_get(int32_t index, ll_kernel_info *info) {
    LLI_REQUIRE(info, LL_STATUS_INVALID_ARG, "ll_kernel_get: info is NULL");
    int32_t count = 0;
    while (lli_kernel_at(count)) count++;
    LLI_REQUIRE(index >= 0 && index < count, LL_STATUS_INVALID_ARG,
                "ll_kernel_get: index is %d, want 0 .. %d", index, count - 1);
    const lli_kernel *kernel = lli_kernel_at(index);
    *info = (ll_kernel_info){.name = kernel->name,
                             .backend = backend_names[kernel->backend],
                             .numerics = kernel->numerics ? kernel->numerics : kernel->numerics_here()};
    if (kernel->machine_ok(info->why_not, sizeof info->why_not)) info->why_not[0] = 0;
    return LL_STATUS_OK;
}

/* A rank's own checks of a call. */
static ll_status check(const ll_plan *plan, const ll_linear_ce_args *args, ll_stream stream,
                       ll_linear_ce_args *whole, lli_call *call) {
    const ll_pass pass = call->pass;
    LLI_REQUIRE(args, LL_STATUS_INVALID_ARG, "%s: args is NULL", lli_pass_names[pass]);
    const bool cpu = plan->kernel->backend != LL_BACKEND_CUDA;
    LLI_REQUIRE(!stream || !cpu, LL_STATUS_INVALID_ARG, "%s: stream is set, want NULL on a CPU",
                lli_pass_names[pass]);
    LLI_TRY(lli_struct_copy(whole, sizeof *whole, args, sizeof(size_t), lli_pass_names[pass]));
    LLI_TRY(lli_call_check(&plan->problem, pass, whole, plan->workspace_bytes[pass], call));
    call->stream = stream;
    /* What lies in device memory is looked at by the device. */
    return cpu ? lli_call_check_contents(&plan->problem, call) : LL_STATUS_OK;
}

static ll_status run_alone(const ll_plan *plan, const ll_linear_ce_args *args, ll_stream stream,
                           ll_linear_ce_args *whole, lli_call *call) {
    LLI_TRY(check(plan, args, stream, whole, call));
    return plan->kernel->run(plan, call);
}

static ll_status run_in_group(const ll_plan *plan, const ll_linear_ce_args *args, ll_stream stream,
                              ll_linear_ce_args *whole, lli_call *call) {
    lli_group *group = plan->group;
    LLI_REQUIRE(!atomic_flag_test_and_set(&group->busy), LL_STATUS_INVALID_ARG,
                "%s: the plan is in use by another thread; with a communicator its calls follow one another",
                lli_pass_names[call->pass]);
    ll_status status = check(plan, args, stream, whole, call);
    status = lli_agree_call(group, status, &plan->problem, call);
    if (status == LL_STATUS_OK) status = plan->kernel->run(plan, call);
    atomic_flag_clear(&group->busy);
    return status;
}

static ll_status run(const ll_plan *plan, ll_pass pass, const ll_linear_ce_args *args, ll_stream stream) {
    LLI_REQUIRE(plan, LL_STATUS_INVALID_ARG, "%s: plan is NULL", lli_pass_names[pass]);
    ll_linear_ce_args whole;
    lli_call call = {.pass = pass};
    /* A caller that rounds upwards or flushes subnormals gets the same bits as everybody. */
    fenv_t callers;
    fegetenv(&callers);
    fesetenv(FE_DFL_ENV);
    const ll_status status = plan->group ? run_in_group(plan, args, stream, &whole, &call)
                                         : run_alone(plan, args, stream, &whole, &call);
    fesetenv(&callers);
    return status;
}

ll_status ll_linear_ce_forward(const ll_plan *plan, const ll_linear_ce_args *args, ll_stream stream) {
    return run(plan, LL_PASS_FORWARD, args, stream);
}

ll_status ll_linear_ce_backward(const ll_plan *plan, const ll_linear_ce_args *args, ll_stream stream) {
    return run(plan, LL_PASS_BACKWARD, args, stream);
}

ll_status ll_linear_ce_forward_backward(const ll_plan *plan, const ll_linear_ce_args *args,
                                        ll_stream stream) {
    return run(plan, LL_PASS_FORWARD_BACKWARD, args, stream);
}
