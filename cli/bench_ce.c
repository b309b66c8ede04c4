/* logitless bench of ce: cross-entropy over given logits. Nothing is multiplied, so what a machine can do at
 * most is its memory's rate. */
#define _POSIX_C_SOURCE 200809L
#include "bench.h"
#include "bench_ce_gpu.h"
#include "ce_problems.h"
#include "cli.h"

#include "core/status.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct ce_run {
    const ll_plan *plan;
    ll_ce_args args;
    ll_pass pass;
    const ce_gpu *gpu; /* NULL: operands in host memory */
} ce_run;

static ll_status call(void *context) {
    static ll_status (*const passes[])(const ll_plan *, const ll_ce_args *,
                                       ll_stream) = {ll_ce_forward, ll_ce_backward, ll_ce_forward_backward};
    const ce_run *run = context;
    LLI_TRY(passes[run->pass](run->plan, &run->args, NULL));
    return run->gpu ? run->gpu->memory->wait() : LL_STATUS_OK;
}

/* What a call gives to someone who trains: the loss, and the saved values that the backward needs. */
static ll_ce_args args_of(const struct problem *problem, const struct ce_operands *operands,
                          struct ce_results *results, ll_pass pass, void *workspace, size_t bytes) {
    ll_ce_args args = ce_problem_args(problem, operands, results, pass);
    args.z_loss = NULL;
    args.argmax = NULL;
    args.sums = NULL;
    if (!problem->upstream) args.entropy = NULL;
    args.workspace = workspace;
    args.workspace_bytes = bytes;
    return args;
}

static void rate(const struct problem *problem, const ce_run *run, bench_row *row) {
    const double elems = (double)problem->n_tokens * (double)problem->v_total;
    double bytes = elems * (double)ll_dtype_bytes(problem->x_dtype);
    if (run->pass != LL_PASS_FORWARD) {
        bytes += elems * (double)ll_dtype_bytes((ll_dtype)run->args.grad_logits.dtype);
    }
    row->gbytes_per_s = bytes / (1e-3 * row->median_ms) * 1e-9;
}

/* The forward's saved values for a backward, in host memory. */
static ll_status saved(const ce_run *forward, const struct problem *problem,
                       const struct ce_results *results) {
    ce_run run = *forward;
    ce_gpu gpu = {0};
    if (!run.gpu) return call(&run);
    run.gpu = &gpu;
    LLI_TRY(ce_gpu_open(&gpu));
    ll_status status = ce_gpu_bind(&gpu, &forward->args, problem->v_total,
                                   problem->loss.reduction == LL_REDUCTION_NONE, &run.args);
    if (status == LL_STATUS_OK) status = call(&run);
    const struct {
        void *host;
        const void *device;
    } fields[] = {{results->nll, run.args.nll},
                  {results->lse, run.args.lse},
                  {results->lse_lo, run.args.lse_lo},
                  {results->entropy, run.args.entropy}};
    for (int i = 0; i < 4 && status == LL_STATUS_OK; i++) {
        if (!fields[i].device) continue;
        status =
            gpu.memory->to_host(fields[i].host, fields[i].device, sizeof(float) * (size_t)problem->n_tokens);
    }
    ce_gpu_close(&gpu);
    return status;
}

int bench_ce(const struct problem *problem, const ll_plan *plan, double seconds, bench_row *row) {
    struct ce_operands operands = {0};
    struct ce_results results = {0};
    const bool on_gpu = strncmp(ll_plan_kernel(plan), "ce_cuda", 7) == 0;
    ce_gpu gpu = {0};
    void *workspace = NULL;
    size_t forward_bytes = 0, pass_bytes = 0;
    int code = CLI_EXIT_OK;
    ll_status status = ll_plan_workspace(plan, LL_PASS_FORWARD, &forward_bytes);
    if (status == LL_STATUS_OK) status = ll_plan_workspace(plan, problem->pass, &pass_bytes);
    const size_t bytes = forward_bytes > pass_bytes ? forward_bytes : pass_bytes;
    const bool made =
        ce_operands_create(problem, &operands) && ce_results_create(problem, &operands, &results);
    if (!made || posix_memalign(&workspace, 64, bytes + 64) != 0) {
        code = cli_fail(CLI_EXIT_RUNTIME, "problem %s: out of memory", row->problem);
        goto release;
    }
    const bool by_token = problem->loss.reduction == LL_REDUCTION_NONE;
    ce_run run = {plan, args_of(problem, &operands, &results, LL_PASS_FORWARD, workspace, bytes),
                  LL_PASS_FORWARD, on_gpu ? &gpu : NULL};
    if (status == LL_STATUS_OK && problem->pass == LL_PASS_BACKWARD) status = saved(&run, problem, &results);
    run.args = args_of(problem, &operands, &results, problem->pass, workspace, bytes);
    run.pass = problem->pass;
    if (status == LL_STATUS_OK && on_gpu) status = ce_gpu_open(&gpu);
    if (status == LL_STATUS_OK && on_gpu) {
        const ll_ce_args on_host = run.args;
        status = ce_gpu_bind(&gpu, &on_host, problem->v_total, by_token, &run.args);
    }
    if (status == LL_STATUS_OK) status = bench_time(call, &run, seconds, row);
    if (status == LL_STATUS_OK && on_gpu) status = ce_gpu_loss(&gpu, &run.args, results.loss);
    ce_gpu_close(&gpu);
    if (status != LL_STATUS_OK) {
        code = cli_fail_status(status);
        goto release;
    }
    rate(problem, &run, row);
    row->workspace_mb = (double)pass_bytes / 0x1p20;
    row->loss = results.loss[0];
    if (!isfinite(row->loss) && !problem->nan_every) {
        code = cli_fail(CLI_EXIT_CHECK, "problem %s: found a loss of %g, wanted a finite number",
                        row->problem, row->loss);
    }
release:
    free(workspace);
    ce_results_destroy(&results);
    ce_operands_destroy(&operands);
    return code;
}
