/* ce_ref: loss, log-probabilities, entropy, ids, the top and the gradient of given logits, straight from the
 * formulas of logitless.h. Like linear_ce_ref it shares no arithmetic with the kernels that are tested
 * against it.
 *
 *   forward    row by row: z[0..V) -> row results (rows.h), ids by counting, the top by looking
 *              for the largest
 *   gradient   element by element; in place an element is read before it is written */
#include "ref/ref.h"
#include "core/dtype.h"
#include "ref/rows.h"

#include <math.h>

static double given(const struct lli_ref_rows *ref, int64_t i, int64_t v) {
    const ll_view *logits = &ref->call->ce->logits;
    return (double)lli_load(lli_row(logits, i), logits->dtype, v);
}

static struct lli_ref_logit logit(const struct lli_ref_rows *ref, int64_t i, int64_t v) {
    return lli_ref_logit(&ref->problem->loss, given(ref, i, v));
}

/* ---- Forward ------------------------------------------------------------------------------------ */

/* log p of a column; the row's lse is no smaller than its logit. */
static float log_p(const struct lli_ref_result *row, double z) {
    return (float)fmin(0.0, z - row->lse);
}

static void write_id(const struct lli_ref_rows *ref, int64_t i, int64_t j, float logp, int64_t rank) {
    const ll_ce_args *args = ref->call->ce;
    const int64_t at = i * args->ids.cols + j;
    if (args->id_logp) args->id_logp[at] = logp;
    if (args->id_rank) args->id_rank[at] = rank;
}

static void row_ids(const struct lli_ref_rows *ref, int64_t i, const struct lli_ref_result *row) {
    const ll_view *ids = &ref->call->ce->ids;
    for (int64_t j = 0; j < ids->cols; ++j) {
        if (ref->rows[i].target < 0) {
            write_id(ref, i, j, 0.0f, 0);
            continue;
        }
        const int64_t id = lli_id_at(ids, i, j);
        if (id < 0 || id >= ref->V) { /* ignore_index */
            write_id(ref, i, j, 0.0f, 0);
        } else if (row->argmax < 0) {
            write_id(ref, i, j, NAN, 0);
        } else {
            int64_t rank = 1;
            for (int64_t v = 0; v < ref->V; ++v) rank += given(ref, i, v) > given(ref, i, id);
            write_id(ref, i, j, log_p(row, ref->z[id]), rank);
        }
    }
}

/* Is column a before column b in the top? */
static bool before(const struct lli_ref_rows *ref, int64_t i, int64_t a, int64_t b) {
    const double left = given(ref, i, a), right = given(ref, i, b);
    return left > right || (left == right && a < b);
}

static void row_top(const struct lli_ref_rows *ref, int64_t i, const struct lli_ref_result *row) {
    const ll_ce_args *args = ref->call->ce;
    const int32_t n_top = ref->problem->n_top;
    const bool ignored = ref->rows[i].target < 0, none = row->argmax < 0;
    int64_t last = -1; /* the column found before */
    if (!args->top_ids && !args->top_logp) return;
    for (int32_t k = 0; k < n_top; ++k) {
        int64_t best = -1;
        for (int64_t v = 0; v < ref->V && !none; ++v) {
            if (last >= 0 && !before(ref, i, last, v)) continue;
            if (best < 0 || before(ref, i, v, best)) best = v;
        }
        last = best;
        if (args->top_ids) args->top_ids[i * n_top + k] = best;
        if (args->top_logp) {
            args->top_logp[i * n_top + k] = none ? (ignored ? 0.0f : NAN) : log_p(row, ref->z[best]);
        }
    }
}

static void forward(struct lli_ref_rows *ref) {
    struct lli_ref_totals totals = {0};
    for (int64_t i = 0; i < ref->call->n_tokens; ++i) {
        for (int64_t v = 0; ref->rows[i].target >= 0 && v < ref->V; ++v) ref->z[v] = logit(ref, i, v).z;
        const struct lli_ref_result row = lli_ref_forward_row(ref, i, &totals);
        row_ids(ref, i, &row);
        row_top(ref, i, &row);
    }
    lli_ref_forward_end(ref, &totals);
}

/* ---- Gradient ----------------------------------------------------------------------------------- */

static void gradient(const struct lli_ref_rows *ref) {
    const ll_view *grad = &ref->call->ce->grad_logits;
    for (int64_t i = 0; i < ref->call->n_tokens; ++i) {
        for (int64_t v = 0; v < grad->cols; ++v) {
            long double dr = 0.0L;
            if (ref->rows[i].target >= 0 && v < ref->V) {
                const struct lli_ref_logit at = logit(ref, i, v);
                dr = (long double)lli_ref_dz(ref, &ref->rows[i], v, at.z) * at.slope;
            }
            lli_ref_write(grad, i, v, false, dr);
        }
    }
}

/* ---- The kernel --------------------------------------------------------------------------------- */

static ll_status run(const ll_plan *plan, const lli_call *call) {
    struct lli_ref_rows ref;
    lli_arena arena = {.base = call->args->workspace};
    lli_ref_carve(&plan->problem, &arena, &ref);
    lli_ref_begin(&plan->problem, call, &ref);
    if (call->pass == LL_PASS_BACKWARD) {
        lli_ref_load_saved(&ref);
    } else {
        forward(&ref);
    }
    if (call->pass != LL_PASS_FORWARD) {
        lli_ref_spread(&ref);
        gradient(&ref);
    }
    lli_arena_release(&arena);
    return LL_STATUS_OK;
}

static size_t workspace(const lli_kernel *kernel, const lli_problem *problem, const lli_config *config,
                        ll_pass pass) {
    struct lli_ref_rows ref;
    lli_arena arena = {0};
    (void)kernel;
    (void)config;
    (void)pass;
    lli_ref_carve(problem, &arena, &ref);
    return arena.used;
}

static ll_status configure(const lli_kernel *kernel, const lli_problem *problem, const lli_config *agreed,
                           lli_config *config) {
    (void)agreed;
    size_t needed = workspace(kernel, problem, config, LL_PASS_FORWARD);
    *config = (lli_config){0};
    LLI_REQUIRE(problem->budget_bytes == 0 || needed <= problem->budget_bytes, LL_STATUS_WORKSPACE,
                "workspace_budget_bytes: %zu, but ce_ref needs at least %zu", problem->budget_bytes, needed);
    return LL_STATUS_OK;
}

const lli_kernel lli_ce_ref = {
    .name = "ce_ref",
    .numerics = "ref-f64-v1",
    .op = LL_OP_CE,
    .backend = LL_BACKEND_REF,
    .machine_ok = lli_ref_machine_ok,
    .accepts = lli_ref_accepts,
    .configure = configure,
    .workspace = workspace,
    .run = run,
};
