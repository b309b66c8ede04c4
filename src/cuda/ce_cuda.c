/* The CUDA kernel of ce over given logits.
 *
 *   forward            rows on the chip (ce_rows.cu)
 *   forward_backward   likewise, with the gradient
 *   backward           coefficients -> the gradient (ce_dz.cu)
 *   ids, the top       gathered before anything is written, turned into log-probabilities at the end
 *
 * Calls whose rows do not start on 16 bytes, or with label smoothing, go another way, to the same bits:
 * chunks of tokens: statistics (ce_stats.cu) -> finish, then the gradient of all rows. So do all calls over
 * ranks, with an exchange (ce_exchange.cu) before finish. numerics "ce-cuda-sm<arch>-v2": docs/cuda-ce.md. */
#include "core/dtype.h"
#include "core/integers.h"
#include "core/workspace.h"
#include "cuda/backend.h"
#include "cuda/ce.h"
#include "cuda/exchange.h"
#include "cuda/ranks.h"

#include <stdio.h>
#include <stdlib.h>

enum {
    kChunkTokens = 65536, /* of statistics that wait for being finished */
    kRanksTokens = 4096,  /* likewise, where ranks exchange them */
    kLeastTokens = 128,
    kPartCols = 8192, /* of a step of ce_stats.cu */
    kPartsInFlight = 1056
};

/* What a plan keeps of its device. */
typedef struct ce_device {
    int32_t device, arch;
    char numerics[32];
    lli_cuda_ce_shape shape;
    lli_cuda_ranks *ranks; /* of a plan with a communicator; NULL: none */
} ce_device;

typedef struct ce_pieces {
    lli_cuda_totals *totals;
    lli_cuda_row *rows;
    lli_exact *soft;
    lli_cuda_grad *grads; /* by token */
    double *row_lse;      /* by token */
    int64_t *local;       /* over ranks: targets as columns of this rank, by token */
    float *edges[2];      /* likewise, and by row of a chunk: logits of tiles that a cut goes through */
    int32_t *max, *index;
    int64_t *sum;
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
    struct lli_group *group; /* NULL: one rank */
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

static int64_t n_max_of(const lli_problem *p) {
    return lli_exchange_n_max(p->shards->n_shared, p->loss.label_smoothing > 0.0f);
}

static int64_t n_sum_of(const lli_problem *p) {
    return lli_exchange_n_sum(p->shards->n_shared, p->loss.label_smoothing > 0.0f);
}

static void carve_exchange(const lli_problem *p, int64_t chunk, lli_arena *arena, ce_pieces *pieces) {
    const lli_cuda_ranges ranges = lli_cuda_ranges_of(p);
    pieces->local = lli_take(arena, p->n_tokens_max, sizeof(int64_t));
    for (int32_t i = 0; i < ranges.n_edges; i++) {
        pieces->edges[i] = lli_take(arena, chunk * kTileCols, sizeof(float));
    }
    pieces->max = lli_take(arena, chunk * (n_max_of(p) + kGivenInts), sizeof(int32_t));
    pieces->index = lli_take(arena, chunk, sizeof(int32_t));
    pieces->sum = lli_take(arena, chunk * n_sum_of(p), sizeof(int64_t));
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
    if (p->shards) carve_exchange(p, chunk, &arena, pieces);
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
    const int64_t most = problem->in_group ? kRanksTokens : kChunkTokens;
    *config = (lli_config){.forward_tokens = lli_min(lli_max(1, problem->n_tokens_max), most)};
    if (agreed) config->forward_tokens = agreed->forward_tokens;
    const size_t budget = problem->budget_bytes;
    while (budget && !agreed && config->forward_tokens > kLeastTokens &&
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
                  .stream = call->stream,
                  .group = plan->group};
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

/* A chunk of a call's rows, from token `first` on. */
static lli_cuda_ce chunk_of(const ce_run *run, const lli_cuda_ce *rows, int64_t first) {
    lli_cuda_ce chunk = *rows;
    chunk.row.first = first;
    chunk.row.n_rows = chunk.row.row_stride =
        lli_min(run->config->forward_tokens, run->call->n_tokens - first);
    return chunk;
}

/* Row results and gradients with each logit read once, by chunks of tokens. */
static ll_status chunks_on_chip(const ce_run *run) {
    for (int64_t first = 0; first < run->call->n_tokens; first += run->config->forward_tokens) {
        lli_cuda_ce args = chunk_of(run, &run->args, first);
        args.row.parts = 1;
        LAUNCH(run, "rows on the chip", lli_cuda_ce_rows_launch(&args, &run->device->shape, run->stream));
        LAUNCH(run, "finishing rows", lli_cuda_finish_launch(&args.row, run->stream));
        if (args.grad.data)
            LAUNCH(run, "gradients of targets", lli_cuda_ce_targets_launch(&args, run->stream));
    }
    return LL_STATUS_OK;
}

/* Row results, and the coefficients of their gradients, by chunks of tokens. */
static ll_status chunks(const ce_run *run) {
    for (int64_t first = 0; first < run->call->n_tokens; first += run->config->forward_tokens) {
        lli_cuda_ce args = chunk_of(run, &run->args, first);
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

/* ---- Over ranks --------------------------------------------------------------------------------- */

/* `columns` of the rank's as if there were no others, for kernels that know of one rank: targets, class
 * weights and logits are theirs. */
static ll_status only_columns(const ce_run *run, lli_cuda_range columns, lli_cuda_ce *args) {
    const int64_t column = run->problem->shards->begin + columns.begin;
    const lli_cuda_ce_local local = {.targets = run->args.row.targets,
                                     .local = run->pieces.local,
                                     .n_tokens = run->call->n_tokens,
                                     .column = column,
                                     .count = columns.count};
    LAUNCH(run, "targets of this rank", lli_cuda_ce_local_launch(&local, run->stream));
    args->row.targets = (lli_cuda_targets){run->pieces.local, 1, kLocalIgnored, INT64_MAX, LL_DTYPE_I64};
    if (args->row.call.class_weight) args->row.call.class_weight += column;
    if (args->logits.data) {
        args->logits.data =
            (char *)args->logits.data + columns.begin * (int64_t)lli_dtype_bytes(args->logits.dtype);
    }
    args->v = columns.count;
    return LL_STATUS_OK;
}

static ll_status place_edge(const ce_run *run, const lli_cuda_ce *args, lli_cuda_range edge, float *z) {
    const ll_view *logits = &run->args.logits;
    const lli_cuda_ce_place place = {.logits = (const char *)lli_row(logits, args->row.first) +
                                               edge.begin * (int64_t)lli_dtype_bytes(logits->dtype),
                                     .row_stride = logits->row_stride,
                                     .n_rows = args->row.n_rows,
                                     .z = z,
                                     .transform = args->row.transform,
                                     .dtype = logits->dtype,
                                     .at = (int32_t)((run->problem->shards->begin + edge.begin) % kTileCols),
                                     .count = (int32_t)edge.count};
    LAUNCH(run, "the logits of shared tiles", lli_cuda_ce_place_launch(&place, run->stream));
    return LL_STATUS_OK;
}

/* A chunk's rows from this rank's parts of them. args: of the whole row. */
static ll_status exchange(const ce_run *run, const lli_cuda_ranges *ranges, const lli_cuda_ce *args) {
    const lli_problem *p = run->problem;
    const lli_cuda_meeting meeting = {run->group, run->device->ranks, run->call->name, run->stream};
    lli_cuda_exchange exchange = {.shards = *p->shards,
                                  .targets = args->row.targets,
                                  .first = args->row.first,
                                  .n_rows = args->row.n_rows,
                                  .rows = args->row.rows,
                                  .soft = args->row.soft,
                                  .class_weight = args->row.call.class_weight,
                                  .max = run->pieces.max,
                                  .sum = run->pieces.sum,
                                  .index = run->pieces.index,
                                  .n_max = n_max_of(p),
                                  .n_sum = n_sum_of(p),
                                  .totals = args->row.totals,
                                  .bad_targets = args->row.call.bad_targets,
                                  .column = p->shards->begin + ranges->own.begin,
                                  .parts = ranges->own.count ? args->row.parts : 0,
                                  .want_argmax = args->want_argmax};
    exchange.shards.shared = run->device->ranks->shared;
    for (int32_t i = 0; i < ranges->n_edges; i++) {
        const bool first = i == 0 && p->shards->first_shared >= 0;
        LLI_TRY(place_edge(run, args, ranges->edges[i], run->pieces.edges[i]));
        exchange.edges[first ? 0 : 1] = run->pieces.edges[i];
    }
    return lli_cuda_exchange_rows(&meeting, &exchange,
                                  p->logits_dtype == LL_DTYPE_F32 ? lli_cuda_exchange_sum_launch
                                                                  : lli_cuda_ce_exchange_sum_launch);
}

/* What chunks() does, with an exchange between statistics and finishing. */
static ll_status chunks_over_ranks(const ce_run *run) {
    const lli_cuda_ranges ranges = lli_cuda_ranges_of(run->problem);
    lli_cuda_ce of_rank = run->args;
    LLI_TRY(only_columns(run, ranges.own, &of_rank));
    for (int64_t first = 0; first < run->call->n_tokens; first += run->config->forward_tokens) {
        lli_cuda_ce own = chunk_of(run, &of_rank, first), whole = chunk_of(run, &run->args, first);
        own.row.parts = whole.row.parts = parts_of(own.row.n_rows, own.v);
        if (own.row.soft) {
            LAUNCH(run, "clearing sums",
                   (int)cudaMemsetAsync(own.row.soft, 0, (size_t)own.row.n_rows * sizeof(lli_exact),
                                        run->stream));
        }
        if (own.v) LAUNCH(run, "the statistics of logits", lli_cuda_ce_stats_launch(&own, run->stream));
        LLI_TRY(exchange(run, &ranges, &whole));
        whole.row.parts = 1;
        LAUNCH(run, "finishing rows", lli_cuda_finish_launch(&whole.row, run->stream));
    }
    return LL_STATUS_OK;
}

static ll_status gradient_over_ranks(const ce_run *run) {
    const lli_shards *shards = run->problem->shards;
    const lli_cuda_range all = {0, shards->end - shards->begin};
    lli_cuda_ce args = run->args;
    if (!args.grad.data || args.grad.cols == 0) return LL_STATUS_OK;
    LLI_TRY(only_columns(run, all, &args));
    LAUNCH(run, "the gradient", lli_cuda_ce_dz_launch(&args, run->stream));
    return LL_STATUS_OK;
}

static ll_status queue_over_ranks(const ce_run *run) {
    if (run->call->pass == LL_PASS_BACKWARD) {
        LAUNCH(run, "preparing gradients", lli_cuda_prepare_launch(&run->args.row, run->stream));
    } else {
        LLI_TRY(chunks_over_ranks(run));
    }
    LLI_TRY(gradient_over_ranks(run));
    return end_call(run);
}

static ll_status queue(const void *context) {
    const ce_run *run = context;
    LLI_TRY(begin_call(run));
    if (run->call->n_tokens == 0) return end_call(run);
    if (run->group) return queue_over_ranks(run);
    if (run->call->pass == LL_PASS_BACKWARD) {
        LAUNCH(run, "preparing gradients", lli_cuda_prepare_launch(&run->args.row, run->stream));
        LAUNCH(run, "the gradient", lli_cuda_ce_dz_launch(&run->args, run->stream));
    } else if (on_chip(run)) {
        LLI_TRY(chunks_on_chip(run));
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
    return lli_cuda_numerics("ce-cuda", 2);
}

static bool accepts(const lli_problem *problem, char *why, size_t why_bytes) {
    if (problem->in_group && (problem->n_ids > 0 || problem->n_top > 0)) {
        snprintf(why, why_bytes, "ids and the top over ranks are not on a GPU in this version");
        return false;
    }
    return lli_cuda_takes(problem, why, why_bytes);
}

static ll_status check_in_group(const ll_plan *plan, const lli_call *call) {
    const ce_device *device = plan->device;
    return lli_cuda_refuse_capture(device->ranks, call);
}

/* Of the largest array that a call hands to the group. */
static size_t most_bytes(const ll_plan *plan) {
    const lli_problem *p = &plan->problem;
    const int64_t maxima = (n_max_of(p) + kGivenInts) * (int64_t)sizeof(int32_t);
    const int64_t sums = n_sum_of(p) * (int64_t)sizeof(int64_t);
    return (size_t)(plan->config.forward_tokens * lli_max(maxima, sums));
}

static ll_status load_kernels(void) {
    int status = lli_cuda_load_begin();
    if (!status) status = lli_cuda_load_finish();
    if (!status) status = lli_cuda_load_ce_stats();
    if (!status) status = lli_cuda_load_ce_dz();
    if (!status) status = lli_cuda_load_ce_ids();
    if (!status) status = lli_cuda_load_ce_exchange();
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
    if (plan->group) return lli_cuda_ranks_open(plan, most_bytes(plan), &device->ranks);
    const int status = lli_cuda_ce_rows_open(problem->logits_dtype, problem->v_total, &device->shape);
    if (status) return lli_cuda_fail(status, "ll_plan_create", "fitting rows on the chip");
    return LL_STATUS_OK;
}

static void close_plan(ll_plan *plan) {
    ce_device *device = plan->device;
    lli_cuda_ranks_close(device->ranks);
    free(device);
}

const lli_kernel lli_ce_cuda = {
    .name = "ce_cuda",
    .op = LL_OP_CE,
    .backend = LL_BACKEND_CUDA,
    .machine_ok = lli_cuda_machine_ok,
    .accepts = accepts,
    .configure = configure,
    .workspace = workspace,
    .run = run,
    .open = open_plan,
    .close = close_plan,
    .check_in_group = check_in_group,
    .numerics_here = numerics_here,
};
