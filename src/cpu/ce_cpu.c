/* The CPU kernels of ce: one driver over the micro-kernels of each instruction set.
 *
 * numerics "ce-v1": a logit is the given one in f32, then softcap and temperature in f32 (micro_row.h); row
 * results are the integer softmax of core/softmax.h. From equal f32 logits they have the bits of linear_ce.
 */
#include "cpu/ce.h"
#include "cpu/cpu.h"
#include "cpu/detect.h"

static const char numerics[] = "ce-v1";

/* ---- Rows of one rank --------------------------------------------------------------------------- */

static void forward_row(const lli_ce_worker *worker, int64_t i) {
    const lli_ce_run *run = worker->run;
    float raw[LL_CE_IDS_MAX];
    int64_t greater[LL_CE_IDS_MAX];
    int64_t *top = run->call->want_top ? worker->scratch->top : NULL;
    for (int64_t j = 0; j < run->n_ids; j++) {
        if (!lli_ce_raw(run, i, lli_id_at(&run->call->ce->ids, i, j), &raw[j])) raw[j] = 0.0f;
        greater[j] = 0;
    }
    const lli_ce_count count = {run->call->want_rank ? run->n_ids : 0, raw, greater};
    const lli_row_part part = lli_ce_gather(run, i, NULL, top, count.n ? &count : NULL);
    const lli_row_result result =
        lli_finish_row(&run->finish, &part, i, lli_ce_target(run, i), &worker->scratch->finished);
    if (run->n_ids) lli_ce_write_ids(run, i, result.lse, raw, greater);
    if (top) lli_ce_write_top(run, i, result.lse, top);
    if (run->call->pass == LL_PASS_FORWARD_BACKWARD) {
        const lli_row_result saved = lli_finish_saved(&result);
        lli_ce_gradient(run, i, &saved);
    }
}

static void row(const lli_ce_worker *worker, int64_t i) {
    const lli_ce_run *run = worker->run;
    const ll_pass pass = run->call->pass;
    if (lli_ce_ignored(run, i)) {
        if (pass != LL_PASS_BACKWARD) lli_ce_write_ignored(run, i);
        if (pass != LL_PASS_FORWARD) lli_ce_gradient_zero(run, i);
    } else if (pass == LL_PASS_BACKWARD) {
        const lli_row_result saved = lli_finish_load(run->call->args, i);
        lli_ce_gradient(run, i, &saved);
    } else {
        forward_row(worker, i);
    }
}

static void job(void *context, int32_t thread, const lli_team *team) {
    lli_ce_run *run = context;
    const lli_ce_worker worker = {run, team, &run->pieces.scratch[thread], thread};
    int64_t begin, end;
    if (run->group && run->call->pass != LL_PASS_BACKWARD) {
        lli_ce_group_job(&worker);
        return;
    }
    while (lli_ce_next(run, run->call->n_tokens, &begin, &end)) {
        for (int64_t i = begin; i < end; i++) row(&worker, i);
    }
}

/* ---- The call ----------------------------------------------------------------------------------- */

enum { kTaskElems = 1 << 15 }; /* of a thread's turn: short rows are taken several at a time */

static void end_call(lli_ce_run *run) {
    lli_finish_sums sums = {0};
    for (int64_t thread = 0; thread < run->cut.n_threads; thread++) {
        lli_finish_merge(&sums, &run->pieces.scratch[thread].finished);
    }
    lli_finish_call(&run->finish, &sums);
}

static ll_status run_call(const ll_plan *plan, const lli_call *call) {
    const ll_loss *loss = &plan->problem.loss;
    lli_ce_run run = {
        .problem = &plan->problem,
        .call = call,
        .micro = plan->kernel->isa,
        .cut = lli_ce_cut_make(&plan->problem, &plan->config, call->pass),
        .terms = lli_loss_prepare(&plan->problem, call),
        .transform = {loss->softcap, loss->temperature},
        .finish = {&plan->problem, call, &run.terms, 0},
        .n_ids = call->ce->ids.cols,
        .group = plan->group,
        .exchange = {plan->problem.shards, call->args->class_weight, loss->label_smoothing > 0.0f},
        .status = LL_STATUS_OK,
    };
    run.task_rows = lli_max(1, lli_min(256, kTaskElems / lli_max(1, run.cut.v)));
    if (call->want_entropy) run.finish.want |= LLI_WANT_ENTROPY;
    if (call->want_argmax) run.finish.want |= LLI_WANT_ARGMAX;
    if (run.cut.smoothing) run.finish.want |= LLI_WANT_SOFT_SUM;
    lli_arena arena = {.base = call->args->workspace};
    lli_ce_carve(&run.cut, &arena, &run.pieces);
    lli_pool_run(plan->pool, plan->problem.n_threads, job, &run);
    if (run.status == LL_STATUS_OK && call->pass != LL_PASS_BACKWARD) end_call(&run);
    lli_arena_release(&arena);
    return run.status;
}

/* ---- Records ------------------------------------------------------------------------------------ */

static ll_status configure(const lli_kernel *kernel, const lli_problem *problem, const lli_config *agreed,
                           lli_config *config) {
    (void)kernel;
    return lli_ce_configure(problem, agreed, config);
}

static size_t workspace(const lli_kernel *kernel, const lli_problem *problem, const lli_config *config,
                        ll_pass pass) {
    (void)kernel;
    return lli_ce_workspace(problem, config, pass);
}

#define RECORD(isa_name)                                                                                     \
    .numerics = numerics, .op = LL_OP_CE, .backend = LL_BACKEND_CPU, .machine_ok = lli_cpu_has_##isa_name,   \
    .configure = configure, .workspace = workspace, .run = run_call, .isa = &lli_micro_##isa_name

const lli_kernel lli_ce_cpu_plain = {.name = "ce_cpu_plain", RECORD(plain)};
#ifdef LLI_HAVE_AVX2
const lli_kernel lli_ce_cpu_avx2 = {.name = "ce_cpu_avx2", RECORD(avx2)};
#endif
#ifdef LLI_HAVE_AVX512
const lli_kernel lli_ce_cpu_avx512 = {.name = "ce_cpu_avx512", RECORD(avx512)};
#endif
