/* Every test for every kernel that this machine runs. */
#define _DEFAULT_SOURCE
#include "harness.h"

#include <stdio.h>

enum { kKernelsMax = 16, kCasesMax = 512, kNameBytes = 96 };

static int force_kernel(void **state) {
    return setenv("LL_KERNEL", (const char *)*state, 1);
}

static int is_reference(const ll_kernel_info *kernel) {
    return strcmp(kernel->backend, "ref") == 0 || strstr(kernel->name, "ref") != NULL;
}

/* The reference never, plain C only where nothing better runs. */
static int is_fast(const ll_kernel_info *kernel, int is_best) {
    return !is_reference(kernel) &&
           (is_best || strstr(kernel->name, "avx") != NULL || strstr(kernel->name, "cuda") != NULL);
}

/* CUDA's operands lie in device memory: tests/cuda moves them there, sets LL_TEST_BACKEND and has it alone.
 * These tests are of linear_ce. */
static int is_tested(const ll_kernel_info *kernel) {
    const char *only = getenv("LL_TEST_BACKEND");
    if (strncmp(kernel->name, "linear_ce_", 10) != 0) return 0;
    return only ? strcmp(kernel->backend, only) == 0 : strcmp(kernel->backend, "cuda") != 0;
}

int on_slow_kernel(void) {
    const char *kernel = getenv("LL_KERNEL");
    return !strstr(kernel, "avx") && !strstr(kernel, "cuda");
}

int on_gpu(void) {
    const char *kernel = getenv("LL_KERNEL");
    return kernel && strstr(kernel, "cuda") != NULL;
}

double dz_rounding(ll_dtype operands) {
    if (!on_gpu()) return 0;
    return operands == LL_DTYPE_BF16 ? 0x1p-8 : operands == LL_DTYPE_F16 ? 0x1p-11 : 0;
}

int faults_main(const char *group, const fault_test *tests, size_t n_tests, int argc, char **argv) {
    static struct CMUnitTest cases[kCasesMax];
    static char names[kCasesMax][kNameBytes];
    static ll_kernel_info kernels[kKernelsMax];
    size_t n_cases = 0;
    int n_kernels = 0;
    for (int32_t i = 0; n_kernels < kKernelsMax; i++) {
        ll_kernel_info *kernel = &kernels[n_kernels];
        if (ll_kernel_get(i, kernel) != LL_STATUS_OK) break;
        if (!is_tested(kernel)) {
            continue;
        }
        if (kernel->why_not[0]) {
            print_message("%s is left out: %s\n", kernel->name, kernel->why_not);
            continue;
        }
        int fast = is_fast(kernel, n_kernels == 0);
        n_kernels++;
        for (size_t t = 0; t < n_tests; t++) {
            if (tests[t].kernels == FAULT_FAST && !fast) continue;
            if (tests[t].kernels == FAULT_IN_GROUP && is_reference(kernel)) continue;
            if (n_cases == kCasesMax) return 1;
            snprintf(names[n_cases], kNameBytes, "%s [%s]", tests[t].name, kernel->name);
            cases[n_cases] = (struct CMUnitTest){names[n_cases], tests[t].run, force_kernel, NULL,
                                                 (void *)(uintptr_t)kernel->name};
            n_cases++;
        }
    }
    if (n_kernels == 0) {
        print_error("no kernel of this build runs here\n");
        return 1;
    }
    if (n_cases == 0) return 77; /* all heavy and no fast kernel: skipped */
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return _cmocka_run_group_tests(group, cases, n_cases, NULL, NULL);
}
