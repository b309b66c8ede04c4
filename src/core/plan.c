/* Life of a plan and the entry of every pass: check, then hand over to the chosen kernel. */
#include "core/agree.h"
#include "core/backends.h"
#include "core/pool.h"
#include "core/problem.h"

#include <fenv.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const op_names[] = {"linear_ce", "ce"};
static const char *const backend_names[] = {"auto", "cpu", "ref", "cuda"};

/* The kernel that LL_KERNEL names; NULL if it names none. What is not of this library is looked for in those
 * that are opened on demand. */
static const lli_kernel *kernel_named(const char *name) {
    const lli_kernel *kernel;
    for (int32_t i = 0; (kernel = lli_kernel_at(i)); i++) {
        if (strcmp(name, kernel->name) == 0) return kernel;
    }
    return NULL;
}

/* Is the kernel among those that the plan's backend stands for? CUDA's library is opened only for who asks
 * for it: auto never picks a kernel that wants device memory. */
static bool of_backend(const lli_kernel *kernel, int32_t backend) {
    return backend == LL_BACKEND_AUTO ? kernel->backend != LL_BACKEND_CUDA
                                      : backend == (int32_t)kernel->backend;
}

/* First kernel of the table that takes the problem; every refusal before it is kept as a line of text. */
static ll_status choose_kernel(ll_plan *plan) {
    const char *name = getenv("LL_KERNEL");
    const lli_problem *problem = &plan->problem;
    const lli_kernel *forced = NULL;
    size_t used = 0;
    char why[160];
    if (name && *name) {
        forced = kernel_named(name);
        LLI_REQUIRE(forced, LL_STATUS_INVALID_ARG,
                    "ll_plan_create: LL_KERNEL is \"%s\", which is no kernel of this build (logitless info "
                    "lists them)",
                    name);
        if ((int32_t)forced->op != problem->op)
            forced = NULL; /* plans of the other operation choose freely */
    }
    const bool cuda = (forced ? (int32_t)forced->backend : problem->backend) == LL_BACKEND_CUDA;
    const lli_kernel *kernel;
    for (int32_t i = 0; (kernel = cuda ? lli_kernel_at(i) : lli_kernel_built_in(i)); i++) {
        if ((int32_t)kernel->op != problem->op) continue;
        if (forced ? kernel != forced : !of_backend(kernel, problem->backend)) continue;
        if (kernel->machine_ok(why, sizeof why) &&
            (!kernel->accepts || kernel->accepts(problem, why, sizeof why))) {
            plan->kernel = kernel;
            plan->numerics = kernel->numerics;
            return LL_STATUS_OK;
        }
        int length =
            snprintf(plan->refusals + used, sizeof plan->refusals - used, "%s: %s\n", kernel->name, why);
        used += (size_t)length;
        if (used >= sizeof plan->refusals) used = sizeof plan->refusals - 1;
    }
    return lli_fail(LL_STATUS_UNSUPPORTED, "ll_plan_create: no kernel of %s for backend %s: %s",
                    op_names[problem->op], backend_names[problem->backend],
                    *plan->refusals ? plan->refusals : "none built");
}

/* What a rank can do alone before it meets the others. */
static ll_status describe_and_choose(const ll_plan_desc *desc, ll_plan *plan) {
    LLI_TRY(lli_problem_check(desc, &plan->problem));
    LLI_TRY(choose_kernel(plan));
    LLI_REQUIRE(!plan->group || plan->group->comm.memory != LL_COMM_MEMORY_DEVICE ||
                    plan->kernel->backend == LL_BACKEND_CUDA,
                LL_STATUS_INVALID_ARG,
                "ll_plan_create: comm.memory is LL_COMM_MEMORY_DEVICE, want a communicator that takes host "
                "memory for backend %s",
                backend_names[plan->kernel->backend]);
    return LL_STATUS_OK;
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
    if (status == LL_STATUS_OK && kernel->open) status = kernel->open(plan);
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

static void describe_operands(const lli_problem *p, char *text, size_t text_bytes) {
    if (p->op == LL_OP_CE) {
        snprintf(text, text_bytes, "logits:%s grad:%s n%lld:v%lld cols:%lld ids:%d top:%d",
                 ll_dtype_name((ll_dtype)p->logits_dtype), ll_dtype_name((ll_dtype)p->grad_logits_dtype),
                 (long long)p->n_tokens_max, (long long)p->v_total, (long long)p->v_local, p->n_ids,
                 p->n_top);
        return;
    }
    snprintf(text, text_bytes, "x:%s w:%s n%lld:d%lld:v%lld rows:%lld bias:%s",
             ll_dtype_name((ll_dtype)p->x_dtype), ll_dtype_name((ll_dtype)p->w_dtype),
             (long long)p->n_tokens_max, (long long)p->n_hidden, (long long)p->v_total, (long long)p->v_local,
             ll_dtype_name((ll_dtype)p->bias_dtype));
}

ll_status ll_plan_describe(const ll_plan *plan, char *text, size_t text_bytes) {
    LLI_REQUIRE(plan, LL_STATUS_INVALID_ARG, "ll_plan_describe: plan is NULL");
    LLI_REQUIRE(text && text_bytes, LL_STATUS_INVALID_ARG,
                "ll_plan_describe: text is %p with %zu bytes, want room", (void *)text, text_bytes);
    const lli_problem *p = &plan->problem;
    const ll_loss *loss = &p->loss;
    static const char *const reductions[] = {"mean", "sum", "none"};
    const lli_config *c = &plan->config;
    char cuts[160] = "", shard[128] = "", operands[160];
    if (plan->group) {
        snprintf(shard, sizeof shard, "rank %d of %d, columns [%lld, %lld)%s\n", plan->group->comm.rank,
                 plan->group->comm.size, (long long)p->shards->begin, (long long)p->shards->end,
                 plan->group->debug ? ", debug" : "");
    }
    if (p->op == LL_OP_CE && plan->group) {
        snprintf(cuts, sizeof cuts, "; %lld tokens at a time", (long long)c->forward_tokens);
    } else if (c->exponentials && c->kept_cols) {
        snprintf(cuts, sizeof cuts,
                 "; forward_backward in 3 GEMMs for %lld columns, 4 for the rest, %lld tokens at a time, "
                 "exponentials kept",
                 (long long)c->kept_cols, (long long)c->first_tokens);
    } else if (c->exponentials) {
        snprintf(cuts, sizeof cuts,
                 "; forward_backward in 3 GEMMs, first %lld, then %lld tokens at a time, exponentials kept",
                 (long long)c->first_tokens, (long long)c->one_pass_tokens);
    } else if (c->one_pass && c->kept_cols) {
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
    describe_operands(p, operands, sizeof operands);
    snprintf(text, text_bytes,
             "%s %s t%g:cap%g:ls%g%s:zl%g:ign%lld:%s%s\n"
             "%skernel %s numerics %s threads %d%s\n"
             "workspace bytes: forward %zu, backward %zu, forward_backward %zu\n%s%s",
             op_names[p->op], operands, (double)loss->temperature, (double)loss->softcap,
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

/* ---- Calls -------------------------------------------------------------------------------------- */

/* A caller's struct, extended by zeros to what this library knows. */
typedef struct whole_args {
    ll_linear_ce_args rows; /* linear_ce's, or the row part of ce's */
    ll_ce_args ce;
} whole_args;

/* What is being called, by whom. */
typedef struct entry {
    const ll_plan *plan;
    ll_op op;
    const void *args;
    ll_stream stream;
} entry;

/* A rank's own checks of a call. */
static ll_status check(const entry *entry, whole_args *whole, lli_call *call) {
    const ll_plan *plan = entry->plan;
    LLI_REQUIRE(entry->args, LL_STATUS_INVALID_ARG, "%s: args is NULL", call->name);
    LLI_REQUIRE(plan->problem.op == (int32_t)entry->op, LL_STATUS_INVALID_ARG,
                "%s: the plan is of %s, want one of %s (ll_plan_desc.op)", call->name,
                op_names[plan->problem.op], op_names[entry->op]);
    const bool cpu = plan->kernel->backend != LL_BACKEND_CUDA;
    LLI_REQUIRE(!entry->stream || !cpu, LL_STATUS_INVALID_ARG, "%s: stream is set, want NULL on a CPU",
                call->name);
    if (entry->op == LL_OP_CE) {
        LLI_TRY(lli_struct_copy(&whole->ce, sizeof whole->ce, entry->args, sizeof(size_t), call->name));
        whole->rows = lli_ce_row_args(&whole->ce);
        call->ce = &whole->ce;
    } else {
        LLI_TRY(lli_struct_copy(&whole->rows, sizeof whole->rows, entry->args, sizeof(size_t), call->name));
    }
    call->args = &whole->rows;
    call->stream = entry->stream;
    LLI_TRY(lli_call_check(&plan->problem, plan->workspace_bytes[call->pass], call));
    /* What lies in device memory is looked at by the device. */
    return cpu ? lli_call_check_contents(&plan->problem, call) : LL_STATUS_OK;
}

static ll_status run_kernel(const ll_plan *plan, const lli_call *call) {
    lli_ce_state_begin(call);
    LLI_TRY(plan->kernel->run(plan, call));
    lli_ce_state_end(call);
    return LL_STATUS_OK;
}

static ll_status run_alone(const entry *entry, whole_args *whole, lli_call *call) {
    LLI_TRY(check(entry, whole, call));
    return run_kernel(entry->plan, call);
}

static ll_status run_in_group(const entry *entry, whole_args *whole, lli_call *call) {
    lli_group *group = entry->plan->group;
    LLI_REQUIRE(!atomic_flag_test_and_set(&group->busy), LL_STATUS_INVALID_ARG,
                "%s: the plan is in use by another thread; with a communicator its calls follow one another",
                call->name);
    const lli_kernel *kernel = entry->plan->kernel;
    const bool on_host = kernel->backend != LL_BACKEND_CUDA;
    ll_status status = check(entry, whole, call);
    if (status == LL_STATUS_OK && kernel->check_in_group) {
        status = kernel->check_in_group(entry->plan, call);
    }
    status = lli_agree_call(group, status, &entry->plan->problem, entry->op, on_host, call);
    if (status == LL_STATUS_OK) {
        status = run_kernel(entry->plan, call);
        /* The peers have started too, and would wait for this rank. */
        if (status != LL_STATUS_OK && status != LL_STATUS_COMM) ll_comm_abort(&group->comm, ll_last_error());
    }
    atomic_flag_clear(&group->busy);
    return status;
}

static ll_status run(const ll_plan *plan, ll_op op, ll_pass pass, const void *args, ll_stream stream) {
    lli_call call = {.pass = pass, .name = lli_pass_names[3 * (int)op + (int)pass]};
    LLI_REQUIRE(plan, LL_STATUS_INVALID_ARG, "%s: plan is NULL", call.name);
    const entry entry = {plan, op, args, stream};
    whole_args whole;
    /* A caller that rounds upwards or flushes subnormals gets the same bits as everybody. */
    fenv_t callers;
    fegetenv(&callers);
    fesetenv(FE_DFL_ENV);
    const ll_status status =
        plan->group ? run_in_group(&entry, &whole, &call) : run_alone(&entry, &whole, &call);
    fesetenv(&callers);
    return status;
}

ll_status ll_linear_ce_forward(const ll_plan *plan, const ll_linear_ce_args *args, ll_stream stream) {
    return run(plan, LL_OP_LINEAR_CE, LL_PASS_FORWARD, args, stream);
}

ll_status ll_linear_ce_backward(const ll_plan *plan, const ll_linear_ce_args *args, ll_stream stream) {
    return run(plan, LL_OP_LINEAR_CE, LL_PASS_BACKWARD, args, stream);
}

ll_status ll_linear_ce_forward_backward(const ll_plan *plan, const ll_linear_ce_args *args,
                                        ll_stream stream) {
    return run(plan, LL_OP_LINEAR_CE, LL_PASS_FORWARD_BACKWARD, args, stream);
}

ll_status ll_ce_forward(const ll_plan *plan, const ll_ce_args *args, ll_stream stream) {
    return run(plan, LL_OP_CE, LL_PASS_FORWARD, args, stream);
}

ll_status ll_ce_backward(const ll_plan *plan, const ll_ce_args *args, ll_stream stream) {
    return run(plan, LL_OP_CE, LL_PASS_BACKWARD, args, stream);
}

ll_status ll_ce_forward_backward(const ll_plan *plan, const ll_ce_args *args, ll_stream stream) {
    return run(plan, LL_OP_CE, LL_PASS_FORWARD_BACKWARD, args, stream);
}
