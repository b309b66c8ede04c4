/* From what the caller wrote to what is sound: the checks of descriptions and of calls. */
#ifndef LLI_CORE_PROBLEM_H
#define LLI_CORE_PROBLEM_H

#include "core/plan.h"

/* Copies min(sizes) of a caller's struct over zeros; refuses a size below `least` and non-zero bytes
 * that this library does not know. `what` names the struct. */
ll_status lli_struct_copy(void *to, size_t to_bytes, const void *from, size_t least, const char *what);

/* Checks a description and fills in defaults. */
ll_status lli_problem_check(const ll_plan_desc *desc, lli_problem *problem);

/* Names of the functions that run a pass, by 3 ll_op + ll_pass. */
extern const char *const lli_pass_names[6];

/* Checks every argument of a call before anything is written, by what the host knows: pointers, shapes,
 * dtypes, strides, workspace. call->args, ce, name and pass are set. */
ll_status lli_call_check(const lli_problem *problem, size_t workspace_bytes, lli_call *call);

/* Then, where operands lie in host memory: targets, ids, weights and the divisor. */
ll_status lli_call_check_contents(const lli_problem *problem, lli_call *call);

/* ---- Of both operations (call.c) ---------------------------------------------------------------- */

/* INVALID_ARG: "<pass>: <name> is <found>, want <wanted>". */
ll_status lli_call_bad(const lli_call *call, const char *name, const char *found, const char *wanted);
bool lli_view_given(const ll_view *view);
/* A matrix [rows, cols] with unit column stride, or (vector) rows elements any step apart. */
ll_status lli_view_check(const lli_call *call, const char *name, const ll_view *view, int64_t rows,
                         int64_t cols, bool vector, int32_t dtype);
/* Sets n_tokens to the rows of the operand `name`. */
ll_status lli_call_check_rows(const lli_problem *problem, lli_call *call, const char *name, int64_t rows);
ll_status lli_call_check_target(const lli_call *call);
/* Row outputs and upstreams by pass; other_output: one of the operation's own is given. */
ll_status lli_call_check_results(const lli_call *call, bool other_output);

/* ---- Of ce (call_ce.c) -------------------------------------------------------------------------- */

/* The row part of ce's arguments as linear_ce has it, for what serves both. */
ll_linear_ce_args lli_ce_row_args(const ll_ce_args *args);
ll_status lli_call_check_ce(const lli_problem *problem, lli_call *call);
ll_status lli_call_check_ids(const lli_problem *problem, const lli_call *call);
/* What a pass says in the caller's state: before it runs, and once it has. */
void lli_ce_state_begin(const lli_call *call);
void lli_ce_state_end(const lli_call *call);

#endif
