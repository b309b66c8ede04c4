/* The CPU kernels of linear_ce: one driver over the micro-kernels of each instruction set.
 *
 * numerics "cpu-fma-v1": a raw logit is the f32 fused-multiply-add chain over k = 0 .. n_hidden - 1 in
 * ascending order, plus the bias; statistics are the integer softmax of core/softmax.h; docs/numerics.md has
 * the rest. */
#include "core/dtype.h"
#include "cpu/cpu.h"
#include "cpu/detect.h"
#include "cpu/run.h"

#include <math.h>
#include <string.h>

static const char numerics[] = "cpu-fma-v1";

/* ---- What no product reaches -------------------------------------------------------------------- */

static void clear_rows(const ll_view *view, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
        memset((void *)lli_row(view, r), 0, (size_t)view->cols * ll_dtype_bytes((ll_dtype)view->dtype));
    }
}

/* Lists the valid tokens; zeros for ignored tokens, for columns beyond the vocabulary, and for everything
 * where no token is valid. */
static void begin_call(lli_run *run) {
    const ll_linear_ce_args *args = run->call->args;
    const bool backward = run->call->pass == LL_PASS_BACKWARD;
    const bool clear_x = args->grad_x.data && !(args->accumulate & LL_ACCUMULATE_X);
    const lli_finish finish = lli_run_finish(run);
    int64_t n = 0;
    for (int64_t i = 0; i < run->call->n_tokens; i++) {
        if (lli_id(&args->target, i) != run->problem->loss.ignore_index) {
            run->pieces.rows[n++] = i;
            continue;
        }
        if (!backward) lli_finish_ignored(&finish, i);
        if (clear_x) clear_rows(&args->grad_x, i, i + 1);
    }
    const int64_t v = n ? run->cut.v : 0; /* columns that a product will reach */
    if (args->grad_w.data && !(args->accumulate & LL_ACCUMULATE_W)) {
        clear_rows(&args->grad_w, v, run->problem->v_local);
    }
    if (args->grad_bias.data && !(args->accumulate & LL_ACCUMULATE_BIAS)) {
        clear_rows(&args->grad_bias, v, run->problem->v_local);
    }
    for (int64_t c = 0; run->pieces.bias && c < run->cut.v_cols; c++) {
        const int64_t row = c - run->cut.lead;
        run->pieces.bias[c] = row >= 0 && row < run->cut.v
                                  ? lli_load(args->bias.data, args->bias.dtype, row * args->bias.row_stride)
                                  : 0.0f;
    }
    for (int64_t thread = 0; thread < run->cut.n_threads; thread++) {
        run->pieces.scratch[thread].finished = (lli_finish_sums){0};
    }
}

static void end_call(lli_run *run) {
    if (run->call->pass == LL_PASS_BACKWARD) return;
    const lli_finish finish = lli_run_finish(run);
    lli_finish_sums sums = {0};
    for (int64_t thread = 0; thread < run->cut.n_threads; thread++) {
        lli_finish_merge(&sums, &run->pieces.scratch[thread].finished);
    }
    lli_finish_call(&finish, &sums);
}

/* ---- The job of a call -------------------------------------------------------------------------- */

static void job(void *context, int32_t thread, const lli_team *team) {
    lli_run *run = context;
    const lli_worker worker = {run, team, &run->pieces.scratch[thread], thread};
    const int64_t end = lli_rounds_end(run), step = run->cut.forward_tokens;
    if (thread == 0) begin_call(run);
    lli_team_barrier(team);
    if (run->cut.one_pass) {
        lli_gradient_one_pass(&worker);
        return;
    }
    for (int64_t begin = 0; step && begin < end; begin += step) {
        const lli_chunk chunk = lli_chunk_at(run, begin, step);
        if (!lli_forward_chunk(&worker, &chunk, false)) return;
    }
    if (run->call->pass == LL_PASS_FORWARD) return;
    if (run->call->pass == LL_PASS_BACKWARD) lli_backward_prepare(&worker);
    lli_gradient_recompute(&worker);
}

static ll_status run(const ll_plan *plan, const lli_call *call) {
    const lli_micro *micro = plan->kernel->isa;
    const ll_loss *loss = &plan->problem.loss;
    const ll_linear_ce_args *args = call->args;
    lli_run state = {
        .problem = &plan->problem,
        .call = call,
        .micro = micro,
        .cut = lli_cut_make(&plan->problem, &plan->config, micro, call->pass),
        .terms = lli_loss_prepare(&plan->problem, call),
        .transform = {loss->softcap, loss->temperature},
        .group = plan->group,
        .exchange = {plan->problem.shards, args->class_weight, loss->label_smoothing > 0.0f},
        .status = LL_STATUS_OK,
    };
    if (call->want_entropy) state.want |= LLI_WANT_ENTROPY;
    if (call->want_argmax) state.want |= LLI_WANT_ARGMAX;
    if (state.cut.smoothing) state.want |= LLI_WANT_SOFT_SUM;
    lli_arena arena = {.base = args->workspace};
    lli_cut_carve(&state.cut, &arena, &state.pieces);
    lli_pool_run(plan->pool, plan->problem.n_threads, job, &state);
    if (state.status == LL_STATUS_OK) end_call(&state);
    lli_arena_release(&arena);
    return state.status;
}

/* ---- Records ------------------------------------------------------------------------------------ */

static ll_status configure(const lli_kernel *kernel, const lli_problem *problem, const lli_config *agreed,
                           lli_config *config) {
    return lli_cut_configure(problem, kernel->isa, agreed, config);
}

static size_t workspace(const lli_kernel *kernel, const lli_problem *problem, const lli_config *config,
                        ll_pass pass) {
    return lli_cut_workspace(problem, config, kernel->isa, pass);
}

#define RECORD(isa_name)                                                                                     \
    .numerics = numerics, .backend = LL_BACKEND_CPU, .machine_ok = lli_cpu_has_##isa_name,                   \
    .configure = configure, .workspace = workspace, .run = run, .isa = &lli_micro_##isa_name

const lli_kernel lli_linear_ce_cpu_plain = {.name = "linear_ce_cpu_plain", RECORD(plain)};
#ifdef LLI_HAVE_AVX2
const lli_kernel lli_linear_ce_cpu_avx2 = {.name = "linear_ce_cpu_avx2", RECORD(avx2)};
#endif
#ifdef LLI_HAVE_AVX512
const lli_kernel lli_linear_ce_cpu_avx512 = {.name = "linear_ce_cpu_avx512", RECORD(avx512)};
#endif
