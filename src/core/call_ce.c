/* Checks of a call of ce beyond those in call.c: its logits, their gradient and whether it may lie over them,
 * ids, the top, and the caller's note of what the logits are. */
#include "core/dtype.h"
#include "core/problem.h"

#define BAD(...) return lli_call_bad(call, __VA_ARGS__)

ll_linear_ce_args lli_ce_row_args(const ll_ce_args *args) {
    ll_linear_ce_args rows = LL_LINEAR_CE_ARGS_INIT;
    rows.target = args->target;
    rows.class_weight = args->class_weight;
    rows.token_weight = args->token_weight;
    rows.divisor = args->divisor;
    rows.loss = args->loss;
    rows.nll = args->nll;
    rows.lse = args->lse;
    rows.lse_lo = args->lse_lo;
    rows.entropy = args->entropy;
    rows.z_loss = args->z_loss;
    rows.argmax = args->argmax;
    rows.sums = args->sums;
    rows.up_loss = args->up_loss;
    rows.up_nll = args->up_nll;
    rows.up_lse = args->up_lse;
    rows.up_entropy = args->up_entropy;
    rows.workspace = args->workspace;
    rows.workspace_bytes = args->workspace_bytes;
    rows.bad_targets = args->bad_targets;
    return rows;
}

/* ---- The gradient's memory ---------------------------------------------------------------------- */

static bool same_view(const ll_view *a, const ll_view *b) {
    return a->data == b->data && a->rows == b->rows && a->cols == b->cols && a->row_stride == b->row_stride &&
           a->dtype == b->dtype;
}

/* True where two matrices of equally many rows may have a byte in common. Rows of equal distance may lie
 * between each other (halves of one buffer): then only where a row meets a row. */
static bool overlap(const ll_view *a, const ll_view *b) {
    if (a->rows == 0 || a->cols == 0 || b->rows == 0 || b->cols == 0) return false;
    const uint64_t a_bytes = lli_dtype_bytes(a->dtype), b_bytes = lli_dtype_bytes(b->dtype);
    const uint64_t a_step = (uint64_t)a->row_stride * a_bytes, b_step = (uint64_t)b->row_stride * b_bytes;
    const uint64_t a_row = (uint64_t)a->cols * a_bytes, b_row = (uint64_t)b->cols * b_bytes;
    const uint64_t a0 = (uintptr_t)a->data, b0 = (uintptr_t)b->data;
    if (a0 + (uint64_t)(a->rows - 1) * a_step + a_row <= b0) return false;
    if (b0 + (uint64_t)(b->rows - 1) * b_step + b_row <= a0) return false;
    if (a_step != b_step) return true;
    const uint64_t apart = (b0 >= a0 ? b0 - a0 : a_step - (a0 - b0) % a_step) % a_step;
    return apart < a_row || apart + b_row > a_step;
}

static ll_status check_gradient(const lli_problem *problem, const lli_call *call) {
    const ll_ce_args *args = call->ce;
    const bool same = same_view(&args->logits, &args->grad_logits);
    if (!lli_view_given(&args->grad_logits)) BAD("grad_logits", "not given", "the gradient's memory");
    LLI_TRY(lli_view_check(call, "grad_logits", &args->grad_logits, call->n_tokens, problem->v_local, false,
                           problem->grad_logits_dtype));
    if (args->in_place) {
        if (!same) {
            BAD("grad_logits", "another view than logits (data, strides or dtype)",
                "the same, because in_place is 1");
        }
        if (!args->state) BAD("state", "NULL", "the logits' own, because in_place is 1");
    } else if (overlap(&args->logits, &args->grad_logits)) {
        BAD("grad_logits", "in the memory of logits",
            same ? "in_place 1 for a gradient over the logits" : "memory of its own");
    }
    return LL_STATUS_OK;
}

/* ---- The caller's note -------------------------------------------------------------------------- */

static ll_status check_state(const lli_call *call) {
    const ll_ce_args *args = call->ce;
    const ll_ce_state *state = args->state;
    if (!state) return LL_STATUS_OK;
    LLI_REQUIRE(state->struct_bytes >= sizeof *state && state->struct_bytes <= 65536, LL_STATUS_INVALID_ARG,
                "%s: state: struct_bytes is %zu, want at least %zu (set by LL_CE_STATE_INIT)", call->name,
                state->struct_bytes, sizeof *state);
    if (state->reserved) BAD("state.reserved", "set", "0");
    if (call->pass != LL_PASS_BACKWARD) return LL_STATUS_OK;
    if (!state->intact) {
        BAD("state",
            "of logits that are gone: a gradient has been written over them, or no forward was given it",
            "a forward over the logits first");
    }
    LLI_REQUIRE(
        state->logits == args->logits.data && state->n_tokens == call->n_tokens, LL_STATUS_INVALID_ARG,
        "%s: state is that of the logits at %p with %lld rows, want the state of those at %p with %lld rows",
        call->name, state->logits, (long long)state->n_tokens, args->logits.data, (long long)call->n_tokens);
    return LL_STATUS_OK;
}

void lli_ce_state_begin(const lli_call *call) {
    if (!call->ce || !call->ce->in_place) return;
    ll_ce_state *state = call->ce->state;
    state->logits = call->ce->logits.data;
    state->n_tokens = call->n_tokens;
    state->intact = 0; /* whatever becomes of the pass: a part may be overwritten */
}

void lli_ce_state_end(const lli_call *call) {
    if (!call->ce || !call->ce->state || call->ce->in_place || call->pass == LL_PASS_BACKWARD) return;
    ll_ce_state *state = call->ce->state;
    state->logits = call->ce->logits.data;
    state->n_tokens = call->n_tokens;
    state->intact = 1;
}

/* ---- Ids and the top ---------------------------------------------------------------------------- */

static ll_status check_ids_view(const lli_problem *problem, const lli_call *call) {
    const ll_ce_args *args = call->ce;
    if (!lli_view_given(&args->ids)) {
        if (args->id_logp || args->id_rank)
            BAD("ids", "not given", "the columns that id_logp and id_rank are of");
        return LL_STATUS_OK;
    }
    if (args->ids.dtype != LL_DTYPE_I32 && args->ids.dtype != LL_DTYPE_I64) {
        BAD("ids' dtype", ll_dtype_name((ll_dtype)args->ids.dtype), "i32 or i64");
    }
    LLI_REQUIRE(args->ids.cols >= 1 && args->ids.cols <= problem->n_ids, LL_STATUS_INVALID_ARG,
                "%s: ids has %lld columns, want 1 .. %d (the plan's n_ids)", call->name,
                (long long)args->ids.cols, problem->n_ids);
    return lli_view_check(call, "ids", &args->ids, call->n_tokens, args->ids.cols, false, args->ids.dtype);
}

ll_status lli_call_check_ids(const lli_problem *problem, const lli_call *call) {
    const ll_view *ids = &call->ce->ids;
    for (int64_t i = 0; i < ids->rows; i++) {
        if (lli_id(&call->ce->target, i) == problem->loss.ignore_index) continue;
        for (int64_t j = 0; j < ids->cols; j++) {
            const int64_t id = lli_id_at(ids, i, j);
            LLI_REQUIRE((id >= 0 && id < problem->v_total) || id == problem->loss.ignore_index,
                        LL_STATUS_INVALID_ARG,
                        "%s: ids[%lld, %lld] is %lld, want 0 .. %lld or ignore_index %lld", call->name,
                        (long long)i, (long long)j, (long long)id, (long long)(problem->v_total - 1),
                        (long long)problem->loss.ignore_index);
        }
    }
    return LL_STATUS_OK;
}

/* ---- The call ----------------------------------------------------------------------------------- */

ll_status lli_call_check_ce(const lli_problem *problem, lli_call *call) {
    const ll_ce_args *args = call->ce;
    const bool other_output = args->id_logp || args->id_rank || args->top_ids || args->top_logp;
    LLI_TRY(lli_call_check_rows(problem, call, "logits", args->logits.rows));
    LLI_TRY(lli_view_check(call, "logits", &args->logits, call->n_tokens, problem->v_local, false,
                           problem->logits_dtype));
    LLI_TRY(lli_call_check_target(call));
    if (args->reserved) BAD("reserved", "set", "0");
    if (args->in_place != 0 && args->in_place != 1) BAD("in_place", "neither", "0 or 1");
    if (call->pass == LL_PASS_FORWARD) {
        if (lli_view_given(&args->grad_logits) || args->in_place) {
            BAD("an upstream or gradient", "given", "all zeros in a forward pass");
        }
    } else {
        LLI_TRY(check_gradient(problem, call));
    }
    if (call->pass == LL_PASS_BACKWARD && (other_output || lli_view_given(&args->ids))) {
        BAD("an output of the forward (ids, id_logp, id_rank, top_ids, top_logp)", "given", "NULL");
    }
    LLI_TRY(lli_call_check_results(call, other_output));
    LLI_TRY(check_ids_view(problem, call));
    if ((args->top_ids || args->top_logp) && problem->n_top == 0) {
        BAD("top_ids or top_logp", "given", "NULL, because the plan's n_top is 0");
    }
    call->want_rank = args->id_rank;
    call->want_top = args->top_ids || args->top_logp;
    return check_state(call);
}
