/* One rank's part of `logitless check`: its shard's calls, what it found, and the records of all ranks. Every
 * decision that a rank takes from the records is the same on all ranks, because they all have them. */
#include "check.h"

#include "core/dtype.h"
#include "core/status.h"
#include "gpu.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

ll_status check_gather(const ll_comm *comm, const void *mine, void *all, size_t bytes) {
    ll_status status = comm->all_gather(comm->self, mine, all, bytes);
    if (status == LL_STATUS_OK) return status;
    return lli_fail(status, "check: %s", comm->error ? comm->error(comm->self) : "all_gather failed");
}

bool check_report_create(int32_t n_ranks, check_report *report) {
    *report = (check_report){.one_rank_at = -1, .passes_at = -1, .shared_at = -1};
    report->records = calloc((size_t)n_ranks, sizeof *report->records);
    report->stress = calloc((size_t)n_ranks, sizeof *report->stress);
    return report->records && report->stress;
}

void check_report_free(check_report *report) {
    free(report->records);
    free(report->stress);
    report->records = NULL;
    report->stress = NULL;
}

/* Both ways to the gradients, against the reference, one rank and each other. */
static ll_status run_calls(const check_world *world, check_call *call, check_record *record,
                           check_report *report, bool *mine) {
    const check_shape *shape = &world->shape;
    check_results once = {0}, twice = {0};
    ll_status status = check_results_create(shape, call->v_local, shape->dtype, &once);
    if (status == LL_STATUS_OK) status = check_results_create(shape, call->v_local, shape->dtype, &twice);
    *mine = status != LL_STATUS_OK;
    if (status == LL_STATUS_OK) status = check_call_run(call, LL_PASS_FORWARD_BACKWARD, &once);
    if (status == LL_STATUS_OK) status = check_call_run(call, LL_PASS_FORWARD, &twice);
    if (status == LL_STATUS_OK) status = check_call_run(call, LL_PASS_BACKWARD, &twice);
    if (status == LL_STATUS_OK) {
        check_tolerances(world->options, shape, &world->want, record->lines);
        check_compare(world, call, &once, record->lines);
        record->one_rank = check_bits(shape, &once, &world->one_rank);
        record->passes = check_all_bits(shape, call->v_local, &twice, &once);
        if (record->passes.part >= CHECK_GRAD_W) record->passes.row += call->v_begin; /* rows of w */
        record->shared_hash = check_hash_shared(shape, &once);
        report->digest = cli_digest(once.nll, shape->n_tokens);
    }
    check_results_free(&twice);
    check_results_free(&once);
    return status;
}

static ll_status run_shard(const check_world *world, const ll_comm *comm, check_record *record,
                           check_report *report, bool *mine) {
    const int64_t *begins = world->cut.begins + comm->rank;
    check_call call = {.inputs = &world->inputs,
                       .v_begin = begins[0],
                       .v_local = begins[1] - begins[0],
                       .comm = check_plan_comm(world->options, comm),
                       .backend = cli_backend(world->options->backend),
                       .grad_dtype = world->shape.dtype,
                       .n_threads = world->n_threads};
    ll_status status = check_call_create(&call);
    /* Without its workspace a rank stands alone: its plan was made with the others. */
    *mine = status == LL_STATUS_MEMORY;
    if (status == LL_STATUS_OK) {
        record->workspace_bytes = call.workspace_bytes;
        record->n_threads = ll_plan_threads(call.plan);
        snprintf(report->kernel, sizeof report->kernel, "%s", ll_plan_kernel(call.plan));
        snprintf(report->numerics, sizeof report->numerics, "%s", ll_plan_numerics(call.plan));
        status = run_calls(world, &call, record, report, mine);
    }
    check_call_free(&call);
    return status;
}

/* Ranks on other machines must have made the same numbers, or all that follows means nothing. */
static ll_status compare_inputs(const check_world *world, const ll_comm *comm, check_record *record,
                                check_report *report) {
    record->inputs_hash = check_inputs_hash(&world->inputs);
    LLI_TRY(check_gather(comm, record, report->records, sizeof *record));
    for (int32_t r = 1; r < comm->size; r++) {
        LLI_REQUIRE(report->records[r].inputs_hash == report->records[0].inputs_hash, LL_STATUS_INVALID_ARG,
                    "check: rank %d has other inputs than rank 0: start every rank with the same options and "
                    "the same program",
                    (int)r);
    }
    return LL_STATUS_OK;
}

/* Of each line the largest errors and the element that used most of the tolerance, over all ranks. */
static void merge(const check_world *world, check_report *report) {
    for (int32_t r = world->cut.n_ranks - 1; r >= 0; r--) {
        const check_record *record = &report->records[r];
        if (record->one_rank.differs) report->one_rank_at = r;
        if (record->passes.differs) report->passes_at = r;
        if (record->shared_hash != report->records[0].shared_hash) report->shared_at = r;
        for (int l = 0; l < CHECK_LINES; l++) {
            check_line *line = &report->lines[l];
            const check_line *found = &record->lines[l];
            const double max_abs = fmax(line->max_abs, found->max_abs);
            const double max_rel = fmax(line->max_rel, found->max_rel);
            if (r == world->cut.n_ranks - 1 || found->used >= line->used) {
                *line = *found;
                line->rank = r;
            }
            line->max_abs = max_abs;
            line->max_rel = max_rel;
        }
    }
}

ll_status check_rank(const check_world *world, const ll_comm *comm, check_report *report, bool *mine) {
    const bool prints = comm->rank == 0 && !world->options->json;
    check_record record = {0};
    check_stress stress = {0};
    *mine = false;
    if (check_on_gpu(world->options)) LLI_TRY(cli_gpu_use(comm->rank));
    LLI_TRY(compare_inputs(world, comm, &record, report));
    LLI_TRY(run_shard(world, comm, &record, report, mine));
    LLI_TRY(check_gather(comm, &record, report->records, sizeof record));
    merge(world, report);
    if (prints) {
        check_print_header(world, comm, report);
        check_print_lines(world, report);
    }
    if (!world->options->run_stress) return LL_STATUS_OK;
    LLI_TRY(check_stress_run(world, comm, &stress, mine));
    LLI_TRY(check_gather(comm, &stress, report->stress, sizeof stress));
    report->stress_ran = true;
    if (prints) check_print_stress(world, report);
    return LL_STATUS_OK;
}
