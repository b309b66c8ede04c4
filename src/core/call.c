/* Checks of one call's arguments before anything is written: shapes first, then, on a CPU, what targets,
 * weights and divisor hold. Here what both operations share and what is linear_ce's; call_ce.c has ce's. */
#include "core/dtype.h"
#include "core/exact_sum.h"
#include "core/problem.h"

#include <math.h>

const char *const lli_pass_names[6] = {
    "ll_linear_ce_forward", "ll_linear_ce_backward", "ll_linear_ce_forward_backward",
    "ll_ce_forward",        "ll_ce_backward",        "ll_ce_forward_backward"};

/* Every check of this file leaves by this sentence. */
#define BAD(...) return lli_call_bad(call, __VA_ARGS__)

ll_status lli_call_bad(const lli_call *call, const char *name, const char *found, const char *wanted) {
    return lli_fail(LL_STATUS_INVALID_ARG, "%s: %s is %s, want %s", call->name, name, found, wanted);
}

bool lli_view_given(const ll_view *view) {
    return view->data || view->rows || view->cols || view->row_stride || view->col_stride || view->dtype ||
           view->reserved;
}

ll_status lli_view_check(const lli_call *call, const char *name, const ll_view *view, int64_t rows,
                         int64_t cols, bool vector, int32_t dtype) {
    const char *pass = call->name;
    const size_t element_bytes = ll_dtype_bytes((ll_dtype)view->dtype);
    LLI_REQUIRE(view->reserved == 0, LL_STATUS_INVALID_ARG, "%s: %s.reserved is %d, want 0", pass, name,
                view->reserved);
    LLI_REQUIRE(view->dtype == dtype, LL_STATUS_INVALID_ARG, "%s: %s has dtype %s, want %s (the plan's)",
                pass, name, ll_dtype_name((ll_dtype)view->dtype), ll_dtype_name((ll_dtype)dtype));
    LLI_REQUIRE(view->rows == rows && view->cols == cols, LL_STATUS_INVALID_ARG,
                "%s: %s has shape [%lld, %lld], want [%lld, %lld]", pass, name, (long long)view->rows,
                (long long)view->cols, (long long)rows, (long long)cols);
    LLI_REQUIRE(view->col_stride == 1 || vector, LL_STATUS_INVALID_ARG,
                "%s: %s has column stride %lld, want 1 (make it contiguous along its rows)", pass, name,
                (long long)view->col_stride);
    LLI_REQUIRE(view->row_stride >= (vector ? 1 : cols) && view->row_stride <= (int64_t)1 << 40,
                LL_STATUS_INVALID_ARG, "%s: %s has row stride %lld, want at least %lld", pass, name,
                (long long)view->row_stride, (long long)(vector ? 1 : cols));
    if (rows == 0 || cols == 0) return LL_STATUS_OK;
    LLI_REQUIRE(rows <= (INT64_MAX >> 4) / view->row_stride, LL_STATUS_INVALID_ARG,
                "%s: %s has %lld rows %lld elements apart, more than memory can hold", pass, name,
                (long long)rows, (long long)view->row_stride);
    LLI_REQUIRE(view->data, LL_STATUS_INVALID_ARG, "%s: %s.data is NULL", pass, name);
    LLI_REQUIRE((uintptr_t)view->data % element_bytes == 0, LL_STATUS_INVALID_ARG,
                "%s: %s.data is %p, want an address aligned to its %zu-byte elements", pass, name, view->data,
                element_bytes);
    return LL_STATUS_OK;
}

ll_status lli_call_check_rows(const lli_problem *problem, lli_call *call, const char *name, int64_t rows) {
    call->n_tokens = rows;
    LLI_REQUIRE(rows >= 0 && rows <= problem->n_tokens_max, LL_STATUS_INVALID_ARG,
                "%s: %s has %lld rows, want 0 .. %lld (the plan's n_tokens_max)", call->name, name,
                (long long)rows, (long long)problem->n_tokens_max);
    return LL_STATUS_OK;
}

ll_status lli_call_check_target(const lli_call *call) {
    const ll_view *target = &call->args->target;
    if (target->dtype != LL_DTYPE_I32 && target->dtype != LL_DTYPE_I64) {
        BAD("target's dtype", ll_dtype_name((ll_dtype)target->dtype), "i32 or i64");
    }
    return lli_view_check(call, "target", target, call->n_tokens, 1, true, target->dtype);
}

static ll_status check_inputs(const lli_problem *problem, lli_call *call) {
    const ll_linear_ce_args *args = call->args;
    LLI_TRY(lli_call_check_rows(problem, call, "x", args->x.rows));
    LLI_TRY(lli_view_check(call, "x", &args->x, call->n_tokens, problem->n_hidden, false, problem->x_dtype));
    LLI_TRY(
        lli_view_check(call, "w", &args->w, problem->v_local, problem->n_hidden, false, problem->w_dtype));
    if (problem->bias_dtype != LL_DTYPE_NONE) {
        LLI_TRY(lli_view_check(call, "bias", &args->bias, problem->v_local, 1, true, problem->bias_dtype));
    } else if (lli_view_given(&args->bias)) {
        BAD("bias", "given", "all zeros, because the plan's bias_dtype is none");
    }
    return lli_call_check_target(call);
}

static ll_status check_weights(const lli_problem *problem, const lli_call *call) {
    const ll_linear_ce_args *args = call->args;
    for (int64_t v = 0; args->class_weight && v < problem->v_total; v++) {
        float weight = args->class_weight[v];
        LLI_REQUIRE(weight >= 0.0f && weight <= 3.402823466e38f, LL_STATUS_INVALID_ARG,
                    "%s: class_weight[%lld] is %g, want >= 0 and finite", call->name, (long long)v,
                    (double)weight);
    }
    for (int64_t i = 0; args->token_weight && i < call->n_tokens; i++) {
        LLI_REQUIRE(isfinite(args->token_weight[i]), LL_STATUS_INVALID_ARG,
                    "%s: token_weight[%lld] is %g, want a finite number", call->name, (long long)i,
                    (double)args->token_weight[i]);
    }
    return LL_STATUS_OK;
}

/* Counts valid tokens and sums their class weights; names the row of a target outside the vocabulary. */
static ll_status check_targets(const lli_problem *problem, lli_call *call) {
    const ll_linear_ce_args *args = call->args;
    lli_exact weight = {0};
    for (int64_t i = 0; i < call->n_tokens; i++) {
        int64_t target = lli_id(&args->target, i);
        if (target == problem->loss.ignore_index) continue;
        LLI_REQUIRE(target >= 0 && target < problem->v_total, LL_STATUS_INVALID_ARG,
                    "%s: target[%lld] is %lld, want 0 .. %lld or ignore_index %lld", call->name, (long long)i,
                    (long long)target, (long long)(problem->v_total - 1),
                    (long long)problem->loss.ignore_index);
        call->n_valid++;
        if (args->class_weight) lli_exact_add_f32(&weight, args->class_weight[target]);
    }
    call->weight = args->class_weight ? lli_exact_value(&weight) : (double)call->n_valid;
    call->divisor = 1.0;
    if (problem->loss.reduction == LL_REDUCTION_MEAN) {
        call->divisor = args->divisor ? *args->divisor : call->weight;
    }
    return LL_STATUS_OK;
}

ll_status lli_call_check_contents(const lli_problem *problem, lli_call *call) {
    const ll_linear_ce_args *args = call->args;
    if (args->bad_targets) BAD("bad_targets", "given", "NULL on a CPU, where a call refuses such targets");
    if (args->divisor) {
        LLI_REQUIRE(*args->divisor > 0.0 && isfinite(*args->divisor), LL_STATUS_INVALID_ARG,
                    "%s: divisor is %g, want > 0 and finite", call->name, *args->divisor);
    }
    LLI_TRY(check_weights(problem, call));
    LLI_TRY(check_targets(problem, call));
    return call->ce ? lli_call_check_ids(problem, call) : LL_STATUS_OK;
}

/* What a backward needs of the forward, and what it does not take. */
static ll_status check_saved(const lli_call *call) {
    const ll_linear_ce_args *args = call->args;
    if (args->loss || args->z_loss || args->argmax || args->sums) {
        BAD("an output of the forward (loss, z_loss, argmax, sums)", "given", "NULL");
    }
    if (call->n_tokens == 0) return LL_STATUS_OK;
    if (!args->lse) BAD("lse", "NULL", "the forward's");
    if (!args->nll && (args->up_nll || args->up_loss)) BAD("nll", "NULL", "the forward's");
    if (!args->entropy && args->up_entropy) BAD("entropy", "NULL", "the forward's");
    return LL_STATUS_OK;
}

static bool any_row_output(const ll_linear_ce_args *args) {
    return args->loss || args->nll || args->lse || args->lse_lo || args->entropy || args->z_loss ||
           args->argmax || args->sums;
}

ll_status lli_call_check_results(const lli_call *call, bool other_output) {
    const ll_linear_ce_args *args = call->args;
    const bool any_upstream = args->up_loss || args->up_nll || args->up_lse || args->up_entropy;
    if (call->pass == LL_PASS_FORWARD) {
        if (any_upstream) BAD("an upstream or gradient", "given", "all zeros in a forward pass");
        if (!other_output && !any_row_output(args)) {
            BAD("every output", "NULL",
                call->ce ? "at least one of loss, nll, lse, lse_lo, entropy, z_loss, argmax, sums, id_logp, "
                           "id_rank, top_ids, top_logp"
                         : "at least one of loss, nll, lse, lse_lo, entropy, z_loss, argmax, sums");
        }
        return LL_STATUS_OK;
    }
    if (!any_upstream) BAD("every upstream", "NULL", "at least one of up_loss, up_nll, up_lse, up_entropy");
    return call->pass == LL_PASS_BACKWARD ? check_saved(call) : LL_STATUS_OK;
}

static ll_status check_grad(const lli_problem *problem, const lli_call *call, const char *name,
                            const ll_view *view, int64_t rows, int64_t cols, int32_t dtype, int32_t bit) {
    if (!lli_view_given(view)) {
        LLI_REQUIRE(!(call->args->accumulate & bit), LL_STATUS_INVALID_ARG,
                    "%s: accumulate asks for %s, which is not given", call->name, name);
        return LL_STATUS_OK;
    }
    LLI_REQUIRE(!(problem->frozen & bit), LL_STATUS_INVALID_ARG,
                "%s: %s is given, but the plan has it frozen", call->name, name);
    return lli_view_check(call, name, view, rows, cols, cols == 1 && bit == LL_FROZEN_BIAS, dtype);
}

static ll_status check_grads(const lli_problem *problem, const lli_call *call) {
    const ll_linear_ce_args *args = call->args;
    const bool any_grad =
        lli_view_given(&args->grad_x) || lli_view_given(&args->grad_w) || lli_view_given(&args->grad_bias);
    if (call->pass == LL_PASS_FORWARD) {
        if (any_grad || args->accumulate) {
            BAD("an upstream or gradient", "given", "all zeros in a forward pass");
        }
        return LL_STATUS_OK;
    }
    if (!any_grad) BAD("every gradient", "not given", "at least one of grad_x, grad_w, grad_bias");
    if (args->accumulate & ~(LL_ACCUMULATE_X | LL_ACCUMULATE_W | LL_ACCUMULATE_BIAS)) {
        BAD("accumulate", "an unknown bit", "LL_ACCUMULATE_ bits");
    }
    LLI_TRY(check_grad(problem, call, "grad_x", &args->grad_x, call->n_tokens, problem->n_hidden,
                       problem->grad_x_dtype, LL_ACCUMULATE_X));
    LLI_TRY(check_grad(problem, call, "grad_w", &args->grad_w, problem->v_local, problem->n_hidden,
                       problem->grad_w_dtype, LL_ACCUMULATE_W));
    if (problem->bias_dtype == LL_DTYPE_NONE && lli_view_given(&args->grad_bias)) {
        BAD("grad_bias", "given", "all zeros, because the plan's bias_dtype is none");
    }
    return check_grad(problem, call, "grad_bias", &args->grad_bias, problem->v_local, 1,
                      problem->grad_bias_dtype, LL_ACCUMULATE_BIAS);
}

static ll_status check_linear_ce(const lli_problem *problem, lli_call *call) {
    LLI_TRY(check_inputs(problem, call));
    LLI_TRY(lli_call_check_results(call, false));
    LLI_TRY(check_grads(problem, call));
    if (call->args->reserved) BAD("reserved", "set", "0");
    return LL_STATUS_OK;
}

static ll_status check_workspace(const lli_call *call, size_t workspace_bytes) {
    const ll_linear_ce_args *args = call->args;
    LLI_REQUIRE(args->workspace_bytes >= workspace_bytes, LL_STATUS_WORKSPACE,
                "%s: workspace has %zu bytes, want %zu (ll_plan_workspace)", call->name,
                args->workspace_bytes, workspace_bytes);
    LLI_REQUIRE(args->workspace || workspace_bytes == 0, LL_STATUS_WORKSPACE,
                "%s: workspace is NULL, want %zu bytes (ll_plan_workspace)", call->name, workspace_bytes);
    LLI_REQUIRE((uintptr_t)args->workspace % kWorkspaceAlign == 0, LL_STATUS_WORKSPACE,
                "%s: workspace is %p, want an address aligned to %d bytes", call->name, args->workspace,
                kWorkspaceAlign);
    return LL_STATUS_OK;
}

ll_status lli_call_check(const lli_problem *problem, size_t workspace_bytes, lli_call *call) {
    const ll_linear_ce_args *args = call->args;
    call->want_entropy = args->entropy || (args->up_entropy && call->pass == LL_PASS_FORWARD_BACKWARD);
    call->want_argmax = args->argmax;
    LLI_TRY(call->ce ? lli_call_check_ce(problem, call) : check_linear_ce(problem, call));
    if (args->divisor) {
        if (problem->loss.reduction != LL_REDUCTION_MEAN) {
            BAD("divisor", "given", "NULL, because only the mean is divided");
        }
    }
    return check_workspace(call, workspace_bytes);
}
