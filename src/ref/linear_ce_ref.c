/* linear_ce_ref: loss, log-probabilities, entropy and gradients, straight from the formulas of logitless.h.
 *
 * Separate from every other kernel on purpose: it is what they are tested against, so it shares none of
 * their arithmetic. Leaves out every idea of speed; logits are recomputed wherever they are needed.
 *
 *   forward    row by row: z[0..V) -> row results (rows.h)
 *   gradients  grad_w, grad_bias row by row of w; grad_x row by row of x; long double sums, rounded once
 *
 * Letters: D hidden size, and those of rows.h. */
#include "ref/ref.h"
#include "core/dtype.h"
#include "ref/rows.h"

#include <stdio.h>

/* Everything of a call; the two row buffers lie in the workspace. */
struct ref_call {
    struct lli_ref_rows rows;
    int64_t D;
    double *operand;  /* [D] the row of x or w at hand, widened */
    long double *sum; /* [D] the gradient row at hand */
};

static size_t carve(const lli_problem *problem, lli_arena *arena, struct ref_call *ref) {
    lli_ref_carve(problem, arena, &ref->rows);
    ref->operand = lli_take(arena, problem->n_hidden, sizeof *ref->operand);
    ref->sum = lli_take(arena, problem->n_hidden, sizeof *ref->sum);
    return arena->used;
}

/* ---- Logits ------------------------------------------------------------------------------------- */

/* Logit from the widened row in ref->operand and a row in memory: the same products in the same order whether
 * the token's or the class's row is the widened one. */
static struct lli_ref_logit logit(const struct ref_call *ref, const char *row, int32_t dtype, int64_t v) {
    const ll_view *bias = &ref->rows.args->bias;
    double raw = 0.0;
    for (int64_t k = 0; k < ref->D; ++k) raw += ref->operand[k] * (double)lli_load(row, dtype, k);
    if (bias->data) raw += (double)lli_load(bias->data, bias->dtype, v * bias->row_stride);
    return lli_ref_logit(&ref->rows.problem->loss, raw);
}

static void widen_row(struct ref_call *ref, const ll_view *view, int64_t r) {
    const char *row = lli_row(view, r);
    for (int64_t k = 0; k < ref->D; ++k) ref->operand[k] = (double)lli_load(row, view->dtype, k);
}

/* ---- Forward ------------------------------------------------------------------------------------ */

static void forward(struct ref_call *ref) {
    struct lli_ref_rows *rows = &ref->rows;
    const ll_linear_ce_args *args = rows->args;
    struct lli_ref_totals totals = {0};
    for (int64_t i = 0; i < rows->call->n_tokens; ++i) {
        if (rows->rows[i].target >= 0) {
            widen_row(ref, &args->x, i);
            for (int64_t v = 0; v < rows->V; ++v) {
                rows->z[v] = logit(ref, lli_row(&args->w, v), args->w.dtype, v).z;
            }
        }
        (void)lli_ref_forward_row(rows, i, &totals);
    }
    lli_ref_forward_end(rows, &totals);
}

/* ---- Gradients ---------------------------------------------------------------------------------- */

/* A row of zeros where nothing flows (ignored token, padded column); accumulation leaves it as it is. */
static void write_zero_row(const ll_view *view, int64_t r, bool accumulate) {
    for (int64_t c = 0; c < view->cols && !accumulate; ++c) lli_ref_write(view, r, c, false, 0.0L);
}

static void grad_w_and_bias(struct ref_call *ref) {
    const ll_linear_ce_args *args = ref->rows.args;
    const ll_view *grad_w = &args->grad_w, *grad_bias = &args->grad_bias;
    bool add_w = args->accumulate & LL_ACCUMULATE_W, add_bias = args->accumulate & LL_ACCUMULATE_BIAS;
    for (int64_t v = 0; v < ref->rows.problem->v_local; ++v) {
        if (v >= ref->rows.V) {
            if (grad_w->data) write_zero_row(grad_w, v, add_w);
            if (grad_bias->data) write_zero_row(grad_bias, v, add_bias);
            continue;
        }
        long double bias_sum = 0.0L;
        widen_row(ref, &args->w, v);
        for (int64_t k = 0; k < ref->D; ++k) ref->sum[k] = 0.0L;
        for (int64_t i = 0; i < ref->rows.call->n_tokens; ++i) {
            if (ref->rows.rows[i].target < 0) continue;
            const char *x_row = lli_row(&args->x, i);
            struct lli_ref_logit at = logit(ref, x_row, args->x.dtype, v);
            long double dr = lli_ref_dz(&ref->rows, &ref->rows.rows[i], v, at.z) * at.slope;
            bias_sum += dr;
            for (int64_t k = 0; k < ref->D && grad_w->data; ++k)
                ref->sum[k] += dr * lli_load(x_row, args->x.dtype, k);
        }
        for (int64_t k = 0; k < ref->D && grad_w->data; ++k) lli_ref_write(grad_w, v, k, add_w, ref->sum[k]);
        if (grad_bias->data) lli_ref_write(grad_bias, v, 0, add_bias, bias_sum);
    }
}

static void grad_x(struct ref_call *ref) {
    const ll_linear_ce_args *args = ref->rows.args;
    bool add = args->accumulate & LL_ACCUMULATE_X;
    for (int64_t i = 0; i < ref->rows.call->n_tokens; ++i) {
        if (ref->rows.rows[i].target < 0) {
            write_zero_row(&args->grad_x, i, add);
            continue;
        }
        widen_row(ref, &args->x, i);
        for (int64_t k = 0; k < ref->D; ++k) ref->sum[k] = 0.0L;
        for (int64_t v = 0; v < ref->rows.V; ++v) {
            const char *w_row = lli_row(&args->w, v);
            struct lli_ref_logit at = logit(ref, w_row, args->w.dtype, v);
            long double dr = lli_ref_dz(&ref->rows, &ref->rows.rows[i], v, at.z) * at.slope;
            for (int64_t k = 0; k < ref->D; ++k) ref->sum[k] += dr * lli_load(w_row, args->w.dtype, k);
        }
        for (int64_t k = 0; k < ref->D; ++k) lli_ref_write(&args->grad_x, i, k, add, ref->sum[k]);
    }
}

/* ---- The kernel --------------------------------------------------------------------------------- */

static ll_status ref_run(const ll_plan *plan, const lli_call *call) {
    const ll_linear_ce_args *args = call->args;
    struct ref_call ref = {.D = plan->problem.n_hidden};
    lli_arena arena = {.base = args->workspace};
    carve(&plan->problem, &arena, &ref);
    lli_ref_begin(&plan->problem, call, &ref.rows);
    if (call->pass == LL_PASS_BACKWARD) {
        lli_ref_load_saved(&ref.rows);
    } else {
        forward(&ref);
    }
    if (call->pass != LL_PASS_FORWARD) {
        lli_ref_spread(&ref.rows);
        if (args->grad_w.data || args->grad_bias.data) grad_w_and_bias(&ref);
        if (args->grad_x.data) grad_x(&ref);
    }
    lli_arena_release(&arena);
    return LL_STATUS_OK;
}

static size_t ref_workspace(const lli_kernel *kernel, const lli_problem *problem, const lli_config *config,
                            ll_pass pass) {
    (void)kernel;
    struct ref_call ref;
    lli_arena arena = {0};
    (void)config;
    (void)pass;
    return carve(problem, &arena, &ref);
}

static ll_status ref_configure(const lli_kernel *kernel, const lli_problem *problem, const lli_config *agreed,
                               lli_config *config) {
    (void)agreed;
    size_t needed = ref_workspace(kernel, problem, config, LL_PASS_FORWARD);
    *config = (lli_config){0};
    LLI_REQUIRE(problem->budget_bytes == 0 || needed <= problem->budget_bytes, LL_STATUS_WORKSPACE,
                "workspace_budget_bytes: %zu, but linear_ce_ref needs at least %zu", problem->budget_bytes,
                needed);
    return LL_STATUS_OK;
}

const lli_kernel lli_linear_ce_ref = {
    .name = "linear_ce_ref",
    .numerics = "ref-f64-v1",
    .backend = LL_BACKEND_REF,
    .machine_ok = lli_ref_machine_ok,
    .accepts = lli_ref_accepts,
    .configure = ref_configure,
    .workspace = ref_workspace,
    .run = ref_run,
};
