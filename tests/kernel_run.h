/* Runs one call of a problem on one kernel: plan, workspace, execute, destroy. Needs POSIX setenv: the
 * including file defines _POSIX_C_SOURCE first. */
#ifndef LL_TESTS_KERNEL_RUN_H
#define LL_TESTS_KERNEL_RUN_H

#include "problems.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* CUDA's kernel wants its operands in device memory, so tests leave it out; tests/cuda, which moves them
 * there, sets LL_TEST_BACKEND and then has it alone. */
static inline bool kernel_is_tested(const char *backend) {
    const char *only = getenv("LL_TEST_BACKEND");
    return only ? strcmp(backend, only) == 0 : strcmp(backend, "cuda") != 0;
}

/* The names of an operation's kernels start with its own: "linear_ce_", "ce_". */
static inline bool kernel_is_of(const char *kernel, const char *op_prefix) {
    return strncmp(kernel, op_prefix, strlen(op_prefix)) == 0;
}

/* Runnable kernels of an operation in this build and machine, in the table's order; the reference is the last
 * one. */
struct kernel_list {
    int32_t count;
    ll_kernel_info kernels[16];
};

static inline struct kernel_list kernels_of(const char *op_prefix) {
    struct kernel_list list = {0};
    ll_kernel_info info;
    for (int32_t index = 0; ll_kernel_get(index, &info) == LL_STATUS_OK && list.count < 16; ++index) {
        if (!kernel_is_tested(info.backend) || !kernel_is_of(info.name, op_prefix)) continue;
        if (info.why_not[0] == '\0') {
            list.kernels[list.count++] = info;
        } else {
            printf("SKIP %s: %s\n", info.name, info.why_not);
        }
    }
    return list;
}
static inline struct kernel_list kernels_here(void) {
    return kernels_of("linear_ce_");
}
/* Name of an operation's best kernel here */
static inline const char *best_kernel_of(const char *op_prefix) {
    const char *name = kernels_of(op_prefix).kernels[0].name;
    if (!name) abort(); /* plain C runs everywhere */
    return name;
}

static inline ll_status pass_run(const ll_plan *plan, ll_pass pass, ll_linear_ce_args args) {
    size_t bytes = 0;
    ll_status status = ll_plan_workspace(plan, pass, &bytes);
    if (status != LL_STATUS_OK) return status;
    size_t rounded = (bytes + 64) / 64 * 64;
    args.workspace = aligned_alloc(64, rounded);
    args.workspace_bytes = bytes;
    if (!args.workspace) return LL_STATUS_MEMORY;
    memset(args.workspace, 0xff, rounded); /* its contents must not matter */
    if (pass == LL_PASS_FORWARD) status = ll_linear_ce_forward(plan, &args, NULL);
    if (pass == LL_PASS_BACKWARD) status = ll_linear_ce_backward(plan, &args, NULL);
    if (pass == LL_PASS_FORWARD_BACKWARD) status = ll_linear_ce_forward_backward(plan, &args, NULL);
    free(args.workspace);
    return status;
}

/* False where the kernel says that the problem is not for it. */
static inline bool kernel_accepts(const char *kernel, const struct problem *problem) {
    ll_plan_desc desc;
    ll_plan *plan = NULL;
    problem_desc(problem, &desc);
    setenv("LL_KERNEL", kernel, 1);
    const ll_status status = ll_plan_create(&desc, &plan);
    unsetenv("LL_KERNEL");
    ll_plan_destroy(plan);
    return status != LL_STATUS_UNSUPPORTED;
}

/* kernel: its name. The sentence of a failure is printed. */
static inline ll_status kernel_run(const char *kernel, const struct problem *problem, ll_pass pass,
                                   const ll_linear_ce_args *args) {
    ll_plan_desc desc;
    ll_plan *plan = NULL;
    problem_desc(problem, &desc);
    setenv("LL_KERNEL", kernel, 1);
    ll_status status = ll_plan_create(&desc, &plan);
    unsetenv("LL_KERNEL");
    if (status == LL_STATUS_OK) status = pass_run(plan, pass, *args);
    if (status != LL_STATUS_OK) {
        printf("FAIL %s %s: %s: %s\n", problem->text, kernel, ll_status_name(status), ll_last_error());
    }
    ll_plan_destroy(plan);
    return status;
}

#endif
