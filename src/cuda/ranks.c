/* See ranks.h. */
#include "cuda/ranks.h"
#include "cuda/exchange.h"

#include <stdlib.h>

enum { kStagingMib = 8 };

/* ---- A plan's part ------------------------------------------------------------------------------ */

size_t lli_cuda_most_bytes(const ll_plan *plan) {
    size_t most = 64;
    for (int pass = LL_PASS_FORWARD; pass <= LL_PASS_FORWARD_BACKWARD; pass++) {
        const lli_cuda_cut cut = lli_cuda_cut_make(&plan->problem, &plan->config, (ll_pass)pass);
        const int64_t chunk = lli_max(cut.forward_tokens, cut.grad_tokens);
        const int64_t sums = chunk * cut.n_sum * (int64_t)sizeof(int64_t);
        const int64_t maxima = chunk * (cut.n_max + kGivenInts) * (int64_t)sizeof(int32_t);
        const int64_t grad = cut.acc_tokens * cut.d_padded * (int64_t)sizeof(float);
        most = (size_t)lli_max((int64_t)most, lli_max(grad, lli_max(sums, maxima)));
    }
    return most;
}

ll_status lli_cuda_ranks_open(const ll_plan *plan, size_t most_bytes, lli_cuda_ranks **result) {
    const lli_shards *shards = plan->problem.shards;
    lli_cuda_ranks *ranks = calloc(1, sizeof *ranks);
    *result = ranks;
    LLI_REQUIRE(ranks, LL_STATUS_MEMORY, "ll_plan_create: no memory for the plan");
    int status = lli_cuda_load_exchange();
    if (!status && shards->n_shared) {
        const size_t bytes = (size_t)shards->n_shared * sizeof *ranks->shared;
        status = (int)cudaMalloc((void **)&ranks->shared, bytes);
        if (!status) status = (int)cudaMemcpy(ranks->shared, shards->shared, bytes, cudaMemcpyHostToDevice);
    }
    if (!status && plan->group->comm.memory == LL_COMM_MEMORY_HOST) {
        const size_t limit = (size_t)kStagingMib << 20;
        ranks->staging_bytes = most_bytes < limit ? most_bytes : limit;
        status = (int)cudaHostAlloc(&ranks->staging, ranks->staging_bytes, cudaHostAllocPortable);
        if (!status) status = (int)cudaEventCreateWithFlags(&ranks->staged, cudaEventDisableTiming);
    }
    return status ? lli_cuda_fail(status, "ll_plan_create", "making room for the ranks' sums") : LL_STATUS_OK;
}

void lli_cuda_ranks_close(lli_cuda_ranks *ranks) {
    if (!ranks) return;
    if (ranks->staged) (void)cudaEventSynchronize(ranks->staged); /* copies out of it may be queued still */
    if (ranks->staged) (void)cudaEventDestroy(ranks->staged);
    if (ranks->staging) (void)cudaFreeHost(ranks->staging);
    (void)cudaFree(ranks->shared);
    free(ranks);
}

ll_status lli_cuda_refuse_capture(const lli_cuda_ranks *ranks, const lli_call *call) {
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    if (!ranks->staging) return LL_STATUS_OK;
    const cudaError_t status = cudaStreamIsCapturing(call->stream, &capture);
    LLI_REQUIRE(
        status == cudaSuccess && capture == cudaStreamCaptureStatusNone, LL_STATUS_INVALID_ARG,
        "%s: the stream is being captured, but comm.memory is LL_COMM_MEMORY_HOST: its operations wait "
        "for the stream; a graph wants a communicator that takes device memory",
        call->name);
    return LL_STATUS_OK;
}

/* ---- The group's operations --------------------------------------------------------------------- */

typedef enum operation { OPERATION_MAX, OPERATION_SUM, OPERATION_SUM_F32 } operation;

static ll_status operate(lli_group *group, operation what, void *values, int64_t n, ll_stream stream) {
    const lli_host *host = lli_cuda_host();
    if (what == OPERATION_MAX) return host->group_max(group, values, n, stream);
    if (what == OPERATION_SUM) return host->group_sum(group, values, n, stream);
    return host->group_sum_f32(group, values, n, stream);
}

/* Through pinned memory, a piece at a time. The plan's next call may be on another stream, so what was copied
 * back is waited for before the memory is written again. */
static ll_status operate_on_host(const lli_cuda_meeting *run, operation what, void *values, int64_t n) {
    const lli_cuda_ranks *ranks = run->ranks;
    const int64_t bytes = what == OPERATION_SUM ? 8 : 4;
    const int64_t room = (int64_t)ranks->staging_bytes / bytes;
    for (int64_t at = 0, count; at < n || at == 0; at += count) {
        count = lli_min(room, n - at);
        char *device = (char *)values + at * bytes;
        const size_t piece = (size_t)(count * bytes);
        LLI_LAUNCH(run, "waiting for staged memory", (int)cudaStreamWaitEvent(run->stream, ranks->staged, 0));
        LLI_LAUNCH(run, "a copy to the host",
                   (int)cudaMemcpyAsync(ranks->staging, device, piece, cudaMemcpyDeviceToHost, run->stream));
        LLI_LAUNCH(run, "the work before an exchange", (int)cudaStreamSynchronize(run->stream));
        LLI_TRY(operate(run->group, what, ranks->staging, count, NULL));
        LLI_LAUNCH(run, "a copy from the host",
                   (int)cudaMemcpyAsync(device, ranks->staging, piece, cudaMemcpyHostToDevice, run->stream));
        LLI_LAUNCH(run, "marking staged memory", (int)cudaEventRecord(ranks->staged, run->stream));
        if (n == 0) break;
    }
    return LL_STATUS_OK;
}

static ll_status over_ranks(const lli_cuda_meeting *meeting, operation what, void *values, int64_t n) {
    return meeting->ranks->staging ? operate_on_host(meeting, what, values, n)
                                   : operate(meeting->group, what, values, n, meeting->stream);
}

ll_status lli_cuda_exchange_rows(const lli_cuda_meeting *meeting, const lli_cuda_exchange *args,
                                 lli_cuda_exchange_launch *sum) {
    const int64_t n = args->n_rows;
    LLI_LAUNCH(meeting, "the ranks' maxima", lli_cuda_exchange_max_launch(args, meeting->stream));
    LLI_TRY(over_ranks(meeting, OPERATION_MAX, args->max, n * (args->n_max + kGivenInts)));
    LLI_LAUNCH(meeting, "the ranks' sums", sum(args, meeting->stream));
    LLI_TRY(over_ranks(meeting, OPERATION_SUM, args->sum, n * args->n_sum));
    if (args->want_argmax) LLI_TRY(over_ranks(meeting, OPERATION_MAX, args->index, n));
    LLI_LAUNCH(meeting, "the ranks' rows", lli_cuda_exchange_rows_launch(args, meeting->stream));
    return LL_STATUS_OK;
}

static lli_cuda_meeting meeting_of(const lli_cuda_run *run) {
    return (lli_cuda_meeting){run->group, run->device->ranks, run->pass, run->stream};
}

/* ---- A call's columns --------------------------------------------------------------------------- */

static void cut_rows(ll_view *view, int64_t begin, int64_t count) {
    if (!view->data) return;
    view->data = (void *)lli_row(view, begin);
    view->rows = count;
}

/* offset: of the range's bias and grad_bias among the pieces. */
static void cut_part(const lli_cuda_run *whole, lli_cuda_range range, int64_t offset, lli_cuda_part *part) {
    part->run = *whole;
    part->call = *whole->call;
    part->args = *whole->call->args;
    part->call.args = &part->args;
    part->run.call = &part->call;
    part->run.column = whole->problem->shards->begin + range.begin;
    part->run.cut.v = range.count;
    if (part->run.pieces.bias) part->run.pieces.bias += offset;
    if (part->run.pieces.acc_bias) part->run.pieces.acc_bias += offset;
    cut_rows(&part->args.w, range.begin, range.count);
    cut_rows(&part->args.bias, range.begin, range.count);
    cut_rows(&part->args.grad_w, range.begin, range.count);
    cut_rows(&part->args.grad_bias, range.begin, range.count);
}

void lli_cuda_cut_call(const lli_cuda_run *whole, lli_cuda_parts_of_call *parts) {
    const lli_cuda_ranges ranges = lli_cuda_ranges_of(whole->problem);
    cut_part(whole, ranges.own, 0, &parts->own);
    for (int32_t i = 0; i < ranges.n_edges; i++) {
        lli_cuda_run *edge = &parts->edges[i].run;
        cut_part(whole, ranges.edges[i], whole->cut.v_cols + (int64_t)i * kTileCols, &parts->edges[i]);
        edge->cut.v_cols = kTileCols;
        edge->cut.kept_cols = 0; /* logits are formed again: of so few columns that is nothing */
    }
    parts->own.run.edges = parts->edges;
    parts->own.run.n_edges = ranges.n_edges;
}

/* ---- A chunk's exchange ------------------------------------------------------------------------- */

/* Logits of edge i of the chunk's rows. */
static ll_status place_edge(const lli_cuda_run *run, const lli_cuda_chunk *chunk, int32_t i, float *z) {
    const lli_cuda_run *edge = &run->edges[i].run;
    const lli_cuda_block block = {0, edge->cut.v, z, kTileCols};
    const lli_cuda_place place = {.z = z,
                                  .bias = edge->pieces.bias,
                                  .transform = run->transform,
                                  .n_rows = chunk->count,
                                  .at = (int32_t)(edge->column % kTileCols),
                                  .count = (int32_t)edge->cut.v};
    LLI_TRY(lli_cuda_form_logits(edge, chunk, &block));
    LLI_LAUNCH(run, "the logits of shared tiles", lli_cuda_place_launch(&place, run->stream));
    return LL_STATUS_OK;
}

ll_status lli_cuda_exchange_chunk(const lli_cuda_run *run, const lli_cuda_chunk *chunk, int32_t parts) {
    const lli_shards *shards = run->problem->shards;
    const lli_cuda_cut *cut = &run->cut;
    const int64_t n = chunk->count;
    lli_cuda_exchange args = {.shards = *shards,
                              .targets = run->targets,
                              .first = chunk->first,
                              .n_rows = n,
                              .rows = run->pieces.rows,
                              .soft = run->pieces.soft,
                              .class_weight = run->call->args->class_weight,
                              .max = run->pieces.max,
                              .sum = run->pieces.sum,
                              .index = run->pieces.index,
                              .n_max = cut->n_max,
                              .n_sum = cut->n_sum,
                              .totals = run->pieces.totals,
                              .bad_targets = run->call->args->bad_targets,
                              .parts = cut->v ? parts : 0,
                              .want_argmax = run->call->want_argmax};
    args.shards.shared = run->device->ranks->shared;
    for (int32_t i = 0; i < run->n_edges; i++) {
        float *z = run->pieces.edges + i * lli_max(cut->forward_tokens, cut->grad_tokens) * kTileCols;
        const bool first = i == 0 && shards->first_shared >= 0;
        LLI_TRY(place_edge(run, chunk, i, z));
        args.edges[first ? 0 : 1] = z;
    }
    const lli_cuda_meeting meeting = meeting_of(run);
    return lli_cuda_exchange_rows(&meeting, &args, lli_cuda_exchange_sum_launch);
}

ll_status lli_cuda_sum_over_ranks(const lli_cuda_run *run, float *acc_x, int64_t n) {
    if (!run->cut.v_real) {
        LLI_LAUNCH(run, "clearing grad_x",
                   (int)cudaMemsetAsync(acc_x, 0, (size_t)n * sizeof *acc_x, run->stream));
    }
    const lli_cuda_meeting meeting = meeting_of(run);
    return over_ranks(&meeting, OPERATION_SUM_F32, acc_x, n);
}
