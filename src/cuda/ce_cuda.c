/* The CUDA kernel of ce over given logits.
 *
 *   forward            rows on the chip (ce_rows.cu)
 *   forward_backward   likewise, with the gradient
 *   backward           coefficients -> the gradient (ce_dz.cu)
 *   ids, the top       gathered before anything is written, turned into log-probabilities at the end
 *
 * Calls whose rows do not start on 16 bytes, or with label smoothing, go another way, to the same bits:
 * chunks of tokens: statistics (ce_stats.cu) -> finish, then the gradient of all rows. numerics
 * "ce-cuda-sm<arch>-v1": docs/cuda-ce.md. */
#include "core/dtype.h"
#include "core/integers.h"
#include "core/workspace.h"
#include "cuda/backend.h"
#include "cuda/ce.h"

#include <stdio.h>
#include <stdlib.h>

enum {
    kChunkTokens = 4096, /* of statistics that wait for being finished */
    kLeastTokens = 128,
    kPartCols = 8192, /* of a step of ce_stats.cu */
    kPartsInFlight = 1056
};

/* What a plan keeps of its device. */
typedef struct ce_device {
    int32_t device, arch;
    char numerics[32];
    lli_cuda_ce_shape shape;
} ce_device;

typedef struct ce_pieces {
    lli_cuda_totals *totals;
    lli_cuda_row *rows;
    lli_exact *soft;
    lli_cuda_grad *grads; /* by token */
    double *row_lse;      /* by token */
} ce_pieces;

typedef struct ce_run {
    const lli_problem *problem;
    const lli_config *config;
    const lli_call *call;
    const ce_device *device;
    ce_pieces pieces;
    lli_cuda_ce args; /* of the whole call; chunks change row.first, n_rows, row_stride and parts */
    lli_cuda_ce_ids ids;
    bool wants_ids;
    cudaStream_t stream;
} ce_run;

#define LAUNCH(run, what, launched)                                                                          \
    do {                                                                                                     \
        const int launch_status = (launched);                                                                \
        if (launch_status) return lli_cuda_fail(launch_status, (run)->call->name, what);                     \
    } while (0)

/* ---- Memory ------------------------------------------------------------------------------------- */

static int32_t parts_of(int64_t n_rows, int64_t v) {
    const int64_t most = (v + kPartCols - 1) / kPartCols;
    const int64_t parts = lli_min(kParts, kPartsInFlight / lli_max(1, n_rows));
    return (int32_t)lli_max(1, lli_min(parts, most));
}

static size_t carve(const lli_problem *p, const lli_config *config, ll_pass pass, void *base,
                    ce_pieces *pieces) {
    lli_arena arena = {.base = base};
    const int64_t chunk = pass == LL_PASS_BACKWARD ? 0 : config->forward_tokens, n = p->n_tokens_max;
    const bool logp = pass != LL_PASS_BACKWARD && (p->n_ids > 0 || p->n_top > 0);
    const int64_t slots = lli_max(chunk, lli_min(kPartsInFlight, chunk * kParts));
    *pieces = (ce_pieces){
        .totals = lli_take(&arena, 1, sizeof(lli_cuda_totals)),
        .rows = lli_take(&arena, slots, sizeof(lli_cuda_row)),
        .soft = p->loss.label_smoothing > 0.0f ? lli_take(&arena, chunk, sizeof(lli_exact)) : NULL,
        .grads = pass != LL_PASS_FORWARD ? lli_take(&arena, n, sizeof(lli_cuda_grad)) : NULL,
        .row_lse = logp ? lli_take(&arena, n, sizeof(double)) : NULL,
    };
    return arena.used;
}

static size_t workspace(const lli_kernel *kernel, const lli_problem *problem, const lli_config *config,
                        ll_pass pass) {
    (void)kernel;
    ce_pieces pieces;
    return carve(problem, config, pass, NULL, &pieces);
}

static ll_status configure(const lli_kernel *kernel, const lli_problem *problem, const lli_config *agreed,
                           lli_config *config) {
    (void)agreed;
    *config = (lli_config){.forward_tokens = lli_min(lli_max(1, problem->n_tokens_max), kChunkTokens)};
    const size_t budget = problem->budget_bytes;
    while (budget && config->forward_tokens > kLeastTokens &&
           workspace(kernel, problem, config, LL_PASS_FORWARD_BACKWARD) > budget) {
        config->forward_tokens = lli_max(kLeastTokens, config->forward_tokens / 2);
    }
    const size_t needed = workspace(kernel, problem, config, LL_PASS_FORWARD_BACKWARD);
    LLI_REQUIRE(
        !budget || needed <= budget, LL_STATUS_WORKSPACE,
        "ll_plan_create: workspace_budget_bytes is %zu, want at least %zu for ce of n_tokens_max %lld on "
        "a GPU",
        budget, needed, (long long)problem->n_tokens_max);
    return LL_STATUS_OK;
}

/* ---- A call ------------------------------------------------------------------------------------- */

static ce_run run_of(const ll_plan *plan, const lli_call *call) {
    const lli_problem *problem = &plan->problem;
    const ll_ce_args *ce = call->ce;
    const ll_loss *loss = &problem->loss;
    ce_run run = {.problem = problem,
                  .config = &plan->config,
                  .call = call,
                  .device = plan->device,
                  .stream = call->stream};
    (void)carve(problem, &plan->config, call->pass, call->args->workspace, &run.pieces);
    const bool forward = call->pass != LL_PASS_BACKWARD;
    const bool ids = forward && ce->ids.data && (ce->id_logp || ce->id_rank);
    run.wants_ids = call->n_tokens > 0 && (ids || (forward && call->want_top));
    run.args = (lli_cuda_ce){
        .row = {.call = *call->args,
                .terms = lli_loss_constants(problem, call->args),
                .totals = run.pieces.totals,
                .targets = {ce->target.data, ce->target.row_stride, loss->ignore_index, problem->v_total,
                            ce->target.dtype},
                .transform = {loss->softcap, loss->temperature},
                .n_rows = call->n_tokens,
                .rows = run.pieces.rows,
                .soft = run.pieces.soft,
                .grads = call->pass == LL_PASS_FORWARD ? NULL : run.pieces.grads,
                .row_lse = run.wants_ids ? run.pieces.row_lse : NULL,
                .smoothing = loss->label_smoothing > 0.0f,
                .want_entropy = call->want_entropy},
        .logits = ce->logits,
        .grad = ce->grad_logits,
        .v = problem->v_total,
        .want_argmax = call->want_argmax,
    };
    run.ids = (lli_cuda_ce_ids){.logits = ce->logits,
                                .targets = run.args.row.targets,
                                .transform = run.args.row.transform,
                                .v = problem->v_total,
                                .n_tokens = call->n_tokens,
                                .row_lse = run.pieces.row_lse,
                                .bad_targets = ce->bad_targets};
    if (ids) {
        run.ids.ids = ce->ids;
        run.ids.id_logp = ce->id_logp;
        run.ids.id_rank = ce->id_rank;
    }
    if (forward && call->want_top) {
        run.ids.n_top = problem->n_top;
        run.ids.top_ids = ce->top_ids;
        run.ids.top_logp = ce->top_logp;
    }
    return run;
}

static ll_status begin_call(const ce_run *run) {
    const ll_linear_ce_args *args = run->call->args;
    const lli_cuda_begin begin = {.totals = run->pieces.totals,
                                  .targets = run->args.row.targets,
                                  .n_tokens = run->call->n_tokens,
                                  .class_weight = args->class_weight,
                                  .divisor = args->divisor,
                                  .bad_targets = args->bad_targets,
                                  .mean = run->problem->loss.reduction == LL_REDUCTION_MEAN,
                                  .want_class_total = run->args.row.smoothing};
    LAUNCH(run, "clearing totals",
           (int)cudaMemsetAsync(run->pieces.totals, 0, sizeof(lli_cuda_totals), run->stream));
    LAUNCH(run, "reading targets", lli_cuda_begin_launch(&begin, run->stream));
    if (run->wants_ids) LAUNCH(run, "gathering ids", lli_cuda_ce_ids_launch(&run->ids, run->stream));
    return LL_STATUS_OK;
}

static ll_status end_call(const ce_run *run) {
    const ll_linear_ce_args *args = run->call->args;
    const bool reduced = run->problem->loss.reduction != LL_REDUCTION_NONE;
    const lli_cuda_end end = {.totals = run->pieces.totals,
                              .loss = reduced ? args->loss : NULL,
                              .sums = args->sums,
                              .n_tokens = run->call->n_tokens};
    if (run->wants_ids)
        LAUNCH(run, "log-probabilities of ids", lli_cuda_ce_logp_launch(&run->ids, run->stream));
    if (run->call->pass == LL_PASS_BACKWARD || (!end.loss && !end.sums)) return LL_STATUS_OK;
    LAUNCH(run, "the reduced loss", lli_cuda_end_launch(&end, run->stream));
    return LL_STATUS_OK;
}

static bool on_chip(const ce_run *run) {
    return !run->args.row.smoothing && lli_cuda_on_16_bytes(&run->args.logits) &&
           (!run->args.grad.data || lli_cuda_on_16_bytes(&run->args.grad));
}

/* Row results, and the coefficients of their gradients, by chunks of tokens. */
static ll_status chunks(const ce_run *run) {
    const int64_t n = run->call->n_tokens;
    for (int64_t first = 0; first < n; first += run->config->forward_tokens) {
        lli_cuda_ce args = run->args;
        args.row.first = first;
        args.row.n_rows = args.row.row_stride = lli_min(run->config->forward_tokens, n - first);
        args.row.parts = parts_of(args.row.n_rows, args.v);
        if (args.row.soft) {
            LAUNCH(run, "clearing sums",
                   (int)cudaMemsetAsync(args.row.soft, 0, (size_t)args.row.n_rows * sizeof(lli_exact),
                                        run->stream));
        }
        LAUNCH(run, "the statistics of logits", lli_cuda_ce_stats_launch(&args, run->stream));
        LAUNCH(run, "finishing rows", lli_cuda_finish_launch(&args.row, run->stream));
    }
    return LL_STATUS_OK;
}

static ll_status queue(const void *context) {
    const ce_run *run = context;
    LLI_TRY(begin_call(run));
    if (run->call->n_tokens == 0) return end_call(run);
    if (run->call->pass == LL_PASS_BACKWARD) {
        LAUNCH(run, "preparing gradients", lli_cuda_prepare_launch(&run->args.row, run->stream));
        LAUNCH(run, "the gradient", lli_cuda_ce_dz_launch(&run->args, run->stream));
    } else if (on_chip(run)) {
        LAUNCH(run, "rows on the chip",
               lli_cuda_ce_rows_launch(&run->args, &run->device->shape, run->stream));
    } else {
        LLI_TRY(chunks(run));
        if (run->args.grad.data) LAUNCH(run, "the gradient", lli_cuda_ce_dz_launch(&run->args, run->stream));
    }
    return end_call(run);
}

static ll_status run(const ll_plan *plan, const lli_call *call) {
    const ce_run queued = run_of(plan, call);
    return lli_cuda_on_device(queued.device->device, call->name, queue, &queued);
}

/* ---- The records -------------------------------------------------------------------------------- */

static const char *numerics_here(void) {
    return lli_cuda_numerics("ce-cuda");
}

static ll_status load_kernels(void) {
    int status = lli_cuda_load_begin();
    if (!status) status = lli_cuda_load_finish();
    if (!status) status = lli_cuda_load_ce_stats();
    if (!status) status = lli_cuda_load_ce_dz();
    if (!status) status = lli_cuda_load_ce_ids();
    return status ? lli_cuda_fail(status, "ll_plan_create", "loading kernels") : LL_STATUS_OK;
}

static ll_status open_plan(ll_plan *plan) {
    char why[160];
    const lli_problem *problem = &plan->problem;
    ce_device *device = calloc(1, sizeof *device);
    LLI_REQUIRE(device, LL_STATUS_MEMORY, "ll_plan_create: no memory for the plan");
    plan->device = device; /* from here on close_plan releases it */
    LLI_REQUIRE(lli_cuda_here(why, sizeof why, &device->device, &device->arch), LL_STATUS_CUDA,
                "ll_plan_create: %s", why);
    snprintf(device->numerics, sizeof device->numerics, "%s", numerics_here());
    plan->numerics = device->numerics;
    LLI_TRY(load_kernels());
    const int status = lli_cuda_ce_rows_open(problem->logits_dtype, problem->v_total, &device->shape);
    if (status) return lli_cuda_fail(status, "ll_plan_create", "fitting rows on the chip");
    return LL_STATUS_OK;
}

static void close_plan(ll_plan *plan) {
    free(plan->device);
}

const lli_kernel lli_ce_cuda = {
    .name = "ce_cuda",
    .op = LL_OP_CE,
    .backend = LL_BACKEND_CUDA,
    .machine_ok = lli_cuda_machine_ok,
    .accepts = lli_cuda_takes,
    .configure = configure,
    .workspace = workspace,
    .run = run,
    .open = open_plan,
    .close = close_plan,
    .numerics_here = numerics_here,
};
