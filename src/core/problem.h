/* From what the caller wrote to what is sound: the checks of descriptions and of calls. */
#ifndef LLI_CORE_PROBLEM_H
#define LLI_CORE_PROBLEM_H

#include "core/plan.h"

/* Copies min(sizes) of a caller's struct over zeros; refuses a size below `least` and non-zero bytes
 * that this library does not know. `what` names the struct. */
ll_status lli_struct_copy(void *to, size_t to_bytes, const void *from, size_t least, const char *what);

/* Checks a description and fills in defaults. */
ll_status lli_problem_check(const ll_plan_desc *desc, lli_problem *problem);

/* Names of the functions that run a pass, by ll_pass: the first words of their error sentences. */
extern const char *const lli_pass_names[3];

/* Checks every argument of a call before anything is written, by what the host knows: pointers, shapes,
 * dtypes, strides, workspace. `args` is the complete struct. */
ll_status lli_call_check(const lli_problem *problem, ll_pass pass, const ll_linear_ce_args *args,
                         size_t workspace_bytes, lli_call *call);

/* Then, where operands lie in host memory: targets, weights and the divisor. */
ll_status lli_call_check_contents(const lli_problem *problem, lli_call *call);

#endif
