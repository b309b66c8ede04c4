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

typedef int part_fn(int argc, char **argv);

static int bits_part(int argc, char **argv) {
    return (void)argc, (void)argv, cuda_bits_main();
}
static int calls_part(int argc, char **argv) {
    return (void)argc, (void)argv, cuda_calls_main();
}
static int large_part(int argc, char **argv) {
    return (void)argc, (void)argv, cuda_large_main();
}
static int fused_part(int argc, char **argv) {
    return (void)argc, (void)argv, cuda_fused_main();
}
static int kernels_part(int argc, char **argv) {
    return (void)argc, (void)argv, kernels_main();
}
static int kernel_bits_part(int argc, char **argv) {
    return (void)argc, (void)argv, kernel_bits_main();
}

static const struct {
    const char *name;
    part_fn *run;
} parts[] = {
    {"fused", fused_part},           {"bits", bits_part},         {"calls", calls_part},
    {"kernels", kernels_part},       {"sizes", sizes_main},       {"targets", targets_main},
    {"options", options_main},       {"numerics", numerics_main}, {"gradients", gradients_main},
    {"invariance", invariance_main}, {"large", large_part},       {"kernel_bits", kernel_bits_part},
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
        const int code = parts[part].run(1, no_filter);
        printf("part %-12s %s in %.1f s\n", parts[part].name, code ? "FAILED" : "passed", seconds() - begin);
        fflush(stdout);
        failed += code != 0;
    }
    return failed ? 1 : 0;
}
