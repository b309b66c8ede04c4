/* The CUDA kernel of linear_ce: cuBLASLt for the products, our kernels for everything around them.
 *
 * numerics "cublaslt-sm<arch>-v1": a raw logit is what cuBLASLt's fixed algorithm makes of the two rows
 * (gemm.h); from there on all is as on a CPU: integer softmax, results in double, order-free sums.
 * docs/cuda.md. */
#include "cuda/ranks.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- A call ------------------------------------------------------------------------------------- */

static lli_cuda_run run_of(const ll_plan *plan, const lli_call *call) {
    const ll_linear_ce_args *args = call->args;
    const ll_loss *loss = &plan->problem.loss;
    lli_cuda_run run = {
        .problem = &plan->problem,
        .config = &plan->config,
        .call = call,
        .device = plan->device,
        .pass = lli_cuda_pass_name(call->pass),
        .stream = call->stream,
        .cut = lli_cuda_cut_make(&plan->problem, &plan->config, call->pass),
        .targets = {args->target.data, args->target.row_stride, loss->ignore_index, plan->problem.v_total,
                    args->target.dtype},
        .transform = {loss->softcap, loss->temperature},
        .terms = lli_loss_constants(&plan->problem, args),
        .group = plan->group,
    };
    (void)lli_cuda_cut_carve(&run.cut, args->workspace, &run.pieces);
    return run;
}

static ll_status begin_call(const lli_cuda_run *run) {
    const ll_linear_ce_args *args = run->call->args;
    const lli_cuda_begin begin = {.totals = run->pieces.totals,
                                  .targets = run->targets,
                                  .n_tokens = run->call->n_tokens,
                                  .class_weight = args->class_weight,
                                  .divisor = args->divisor,
                                  .bad_targets = args->bad_targets,
                                  .mean = run->problem->loss.reduction == LL_REDUCTION_MEAN,
                                  .want_class_total = run->cut.smoothing,
                                  .want_max_weight = run->cut.scaled && run->cut.gradient};
    LLI_LAUNCH(run, "clearing totals",
               (int)cudaMemsetAsync(run->pieces.totals, 0, sizeof(lli_cuda_totals), run->stream));
    LLI_LAUNCH(run, "reading targets", lli_cuda_begin_launch(&begin, run->stream));
    return LL_STATUS_OK;
}

static ll_status read_bias(const lli_cuda_run *run) {
    if (!run->pieces.bias) return LL_STATUS_OK;
    LLI_LAUNCH(run, "reading bias",
               lli_cuda_widen_launch(&run->call->args->bias, run->cut.v, run->cut.v_cols, run->pieces.bias,
                                     run->stream));
    return LL_STATUS_OK;
}

static ll_status end_call(const lli_cuda_run *run) {
    const ll_linear_ce_args *args = run->call->args;
    const bool reduced = run->problem->loss.reduction != LL_REDUCTION_NONE;
    const lli_cuda_end end = {.totals = run->pieces.totals,
                              .loss = reduced ? args->loss : NULL,
                              .sums = args->sums,
                              .n_tokens = run->call->n_tokens};
    if (run->call->pass == LL_PASS_BACKWARD || (!end.loss && !end.sums)) return LL_STATUS_OK;
    LLI_LAUNCH(run, "the reduced loss", lli_cuda_end_launch(&end, run->stream));
    return LL_STATUS_OK;
}

static ll_status passes_of(const lli_cuda_run *run) {
    LLI_TRY(read_bias(run));
    for (int32_t i = 0; i < run->n_edges; i++) LLI_TRY(read_bias(&run->edges[i].run));
    if (lli_cuda_keeps(run)) return lli_cuda_one_pass_kept(run);
    if (run->cut.one_pass) return lli_cuda_one_pass(run);
    LLI_TRY(run->call->pass == LL_PASS_BACKWARD ? lli_cuda_prepare(run) : lli_cuda_forward(run));
    return run->call->pass == LL_PASS_FORWARD ? LL_STATUS_OK : lli_cuda_recompute(run);
}

static ll_status queue(const void *context) {
    const lli_cuda_run *run = context;
    lli_cuda_parts_of_call parts;
    LLI_TRY(begin_call(run));
    if (run->group) {
        lli_cuda_cut_call(run, &parts);
        LLI_TRY(passes_of(&parts.own.run));
    } else {
        LLI_TRY(passes_of(run));
    }
    if (run->call->pass != LL_PASS_FORWARD) LLI_TRY(lli_cuda_clear_rest(run));
    return end_call(run);
}

static ll_status run(const ll_plan *plan, const lli_call *call) {
    const lli_cuda_device *device = plan->device;
    const lli_cuda_run queued = run_of(plan, call);
    return lli_cuda_on_device(device->device, queued.pass, queue, &queued);
}

/* ---- The record --------------------------------------------------------------------------------- */

static const char *numerics_here(void) {
    return lli_cuda_numerics("cublaslt", 1);
}

static bool accepts(const lli_problem *problem, char *why, size_t why_bytes) {
    const char *const names[2] = {ll_dtype_name((ll_dtype)problem->x_dtype),
                                  ll_dtype_name((ll_dtype)problem->w_dtype)};
    if (problem->x_dtype != problem->w_dtype) {
        snprintf(why, why_bytes, "x is %s and w %s; on a GPU the two are of one dtype", names[0], names[1]);
        return false;
    }
    return lli_cuda_takes(problem, why, why_bytes);
}

static ll_status load_kernels(void) {
    int status = lli_cuda_load_begin();
    if (!status) status = lli_cuda_load_stats();
    if (!status) status = lli_cuda_load_finish();
    if (!status) status = lli_cuda_load_dz();
    if (!status) status = lli_cuda_load_move();
    return status ? lli_cuda_fail(status, "ll_plan_create", "loading kernels") : LL_STATUS_OK;
}

static ll_status open_plan(ll_plan *plan) {
    char why[160];
    lli_cuda_device *device = calloc(1, sizeof *device);
    LLI_REQUIRE(device, LL_STATUS_MEMORY, "ll_plan_create: no memory for the plan");
    plan->device = device; /* from here on close_plan releases it */
    LLI_REQUIRE(lli_cuda_here(why, sizeof why, &device->device, &device->arch), LL_STATUS_CUDA,
                "ll_plan_create: %s", why);
    device->dtype = plan->problem.x_dtype;
    snprintf(device->numerics, sizeof device->numerics, "%s", numerics_here());
    plan->numerics = device->numerics;
    LLI_TRY(load_kernels());
    if (plan->group) LLI_TRY(lli_cuda_ranks_open(plan, lli_cuda_most_bytes(plan), &device->ranks));
    const cublasStatus_t status = cublasLtCreate(&device->lt);
    LLI_REQUIRE(status == CUBLAS_STATUS_SUCCESS, LL_STATUS_CUDA, "ll_plan_create: cublasLtCreate failed: %s",
                cublasLtGetStatusString(status));
    return lli_gemm_open(device, plan->problem.n_hidden);
}

static ll_status check_in_group(const ll_plan *plan, const lli_call *call) {
    const lli_cuda_device *device = plan->device;
    return lli_cuda_refuse_capture(device->ranks, call);
}

/* ---- On Hopper ---------------------------------------------------------------------------------- */

/* The kernel's instructions are those of sm_90a and of no later device. */
static bool hopper_ok(char *why, size_t why_bytes) {
    int32_t device, arch;
    if (!lli_cuda_here(why, why_bytes, &device, &arch)) return false;
    if (arch != 90) {
        snprintf(why, why_bytes, "GPU %d has compute capability %d.%d, wanted 9.0", device, arch / 10,
                 arch % 10);
        return false;
    }
#ifndef LLI_CUDA_SM90A
    snprintf(why, why_bytes, "liblogitless_cuda was built without sm_90a (LL_CUDA_TARGETS)");
    return false;
#else
    return true;
#endif
}

static bool hopper_accepts(const lli_problem *problem, char *why, size_t why_bytes) {
    if (!accepts(problem, why, why_bytes)) return false;
    if (problem->x_dtype != LL_DTYPE_BF16) {
        snprintf(why, why_bytes, "x and w are %s, wanted bf16", ll_dtype_name((ll_dtype)problem->x_dtype));
        return false;
    }
    if (problem->n_hidden % 8 != 0) {
        snprintf(why, why_bytes, "n_hidden is %lld: rows of bf16 start on 16 bytes for multiples of 8",
                 (long long)problem->n_hidden);
        return false;
    }
    if (problem->loss.softcap != 0.0f || problem->loss.label_smoothing > 0.0f) {
        snprintf(why, why_bytes, "%s is not in this kernel",
                 problem->loss.softcap != 0.0f ? "a softcap" : "label smoothing");
        return false;
    }
    if (problem->v_local > INT32_MAX - kTileCols) {
        snprintf(why, why_bytes, "v_local is %lld, beyond 31 bits", (long long)problem->v_local);
        return false;
    }
    return true;
}

static ll_status open_hopper_plan(ll_plan *plan) {
    LLI_TRY(open_plan(plan));
    return lli_cuda_fused_open(plan->device);
}

static void close_plan(ll_plan *plan) {
    lli_cuda_device *device = plan->device;
    lli_cuda_ranks_close(device->ranks);
    if (device->lt) (void)cublasLtDestroy(device->lt);
    free(device);
}

const lli_kernel lli_linear_ce_cuda = {
    .name = "linear_ce_cuda",
    .backend = LL_BACKEND_CUDA,
    .machine_ok = lli_cuda_machine_ok,
    .accepts = accepts,
    .configure = lli_cuda_configure,
    .workspace = lli_cuda_workspace,
    .run = run,
    .open = open_plan,
    .close = close_plan,
    .check_in_group = check_in_group,
    .numerics_here = numerics_here,
};

static const lli_cuda_variant hopper = {.cheap_logits = true, .exponentials = true};

/* The same, but that no logits are kept: one kernel for products and what is made of them, and in one pass
 * exponentials in 16 bits (fused.h). */
const lli_kernel lli_linear_ce_cuda_sm90 = {
    .name = "linear_ce_cuda_sm90",
    .backend = LL_BACKEND_CUDA,
    .machine_ok = hopper_ok,
    .accepts = hopper_accepts,
    .configure = lli_cuda_configure,
    .workspace = lli_cuda_workspace,
    .run = run,
    .isa = &hopper,
    .open = open_hopper_plan,
    .close = close_plan,
    .check_in_group = check_in_group,
    .numerics_here = numerics_here,
};
