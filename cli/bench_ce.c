/* logitless bench of ce: cross-entropy over given logits, on a CPU. Nothing is multiplied, so what a machine
 * can do at most is its memory's rate. */
#define _POSIX_C_SOURCE 200809L
#include "bench.h"
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
} ce_run;

static ll_status call(void *context) {
    const ce_run *run = context;
    if (run->pass == LL_PASS_FORWARD) return ll_ce_forward(run->plan, &run->args, NULL);
    if (run->pass == LL_PASS_BACKWARD) return ll_ce_backward(run->plan, &run->args, NULL);
    return ll_ce_forward_backward(run->plan, &run->args, NULL);
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

int bench_ce(const struct problem *problem, const ll_plan *plan, double seconds, bench_row *row) {
    struct ce_operands operands = {0};
    struct ce_results results = {0};
    void *workspace = NULL;
    size_t forward_bytes = 0, pass_bytes = 0;
    int code = CLI_EXIT_OK;
    if (strstr(ll_plan_kernel(plan), "cuda")) { /* its operands would have to be in device memory */
        return cli_fail(CLI_EXIT_USAGE, "problem %s: ce is timed on a CPU only", row->problem);
    }
    ll_status status = ll_plan_workspace(plan, LL_PASS_FORWARD, &forward_bytes);
    if (status == LL_STATUS_OK) status = ll_plan_workspace(plan, problem->pass, &pass_bytes);
    const size_t bytes = forward_bytes > pass_bytes ? forward_bytes : pass_bytes;
    const bool made =
        ce_operands_create(problem, &operands) && ce_results_create(problem, &operands, &results);
    if (!made || posix_memalign(&workspace, 64, bytes + 64) != 0) {
        code = cli_fail(CLI_EXIT_RUNTIME, "problem %s: out of memory", row->problem);
        goto release;
    }
    ce_run run = {plan, args_of(problem, &operands, &results, LL_PASS_FORWARD, workspace, bytes),
                  LL_PASS_FORWARD};
    if (status == LL_STATUS_OK && problem->pass == LL_PASS_BACKWARD) status = call(&run);
    run.args = args_of(problem, &operands, &results, problem->pass, workspace, bytes);
    run.pass = problem->pass;
    if (status == LL_STATUS_OK) status = bench_time(call, &run, seconds, row);
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
