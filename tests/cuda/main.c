/* cuda_tests [PART...]: everything that is tested on a GPU, in one program. Exit code 77 where there is none.
 * The problems and reported faults of the other backends run here too, their operands moved by host_call.c.
 */
#define _POSIX_C_SOURCE 200809L
#include "cuda/cuda_tests.h"
#include "cuda/image.h"

#include <logitless/logitless.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* A part is the main of a file, with arguments or without. */
static const struct {
    const char *name;
    int (*plain)(void);
    int (*filtered)(int argc, char **argv);
} parts[] = {
    {"fused", cuda_fused_main, NULL},
    {"bits", cuda_bits_main, NULL},
    {"calls", cuda_calls_main, NULL},
    {"kernels", kernels_main, NULL},
    {"sizes", NULL, sizes_main},
    {"targets", NULL, targets_main},
    {"options", NULL, options_main},
    {"numerics", NULL, numerics_main},
    {"gradients", NULL, gradients_main},
    {"invariance", NULL, invariance_main},
    {"large", cuda_large_main, NULL},
    {"ranks", cuda_ranks_main, NULL},
    {"rank_calls", cuda_rank_calls_main, NULL},
    {"rank_faults", NULL, ranks_main},
    {"rank_groups", NULL, group_main},
    {"nccl", cuda_nccl_main, NULL},
    {"kernel_bits", kernel_bits_main, NULL},
    {"ce", cuda_given_main, NULL},
    {"ce_kernels", given_kernels_main, NULL},
    {"ce_ranks", given_ranks_main, NULL},
    {"ce_faults", given_faults_main, NULL},
    {"ce_sizes", given_sizes_main, NULL},
    {"ce_numerics", given_numerics_main, NULL},
};
enum { kParts = sizeof parts / sizeof parts[0] };

static bool wanted(const char *name, int argc, char **argv) {
    for (int a = 1; a < argc; a++) {
        if (strcmp(argv[a], name) == 0) return true;
    }
    return argc == 1;
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int main(int argc, char **argv) {
    int failed = 0;
    char *no_filter[] = {argv[0], NULL};
    int runnable = 0;
    ll_kernel_info info = {0};
    setenv("LL_TEST_BACKEND", "cuda", 1);
    for (int32_t i = 0; ll_kernel_get(i, &info) == LL_STATUS_OK; i++) {
        if (strcmp(info.backend, "cuda") != 0) continue;
        if (info.why_not[0]) {
            printf("SKIP %s: %s\n", info.name, info.why_not);
            continue;
        }
        printf("%s, numerics %s, %d devices\n", info.name, info.numerics, device_count());
        runnable++;
    }
    if (!runnable) return 77;
    for (int part = 0; part < kParts; part++) {
        if (!wanted(parts[part].name, argc, argv)) continue;
        const double begin = seconds();
        const int code = parts[part].plain ? parts[part].plain() : parts[part].filtered(1, no_filter);
        printf("part %-12s %s in %.1f s\n", parts[part].name, code ? "FAILED" : "passed", seconds() - begin);
        fflush(stdout);
        failed += code != 0;
    }
    return failed ? 1 : 0;
}
