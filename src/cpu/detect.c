/* CPU detection and the measured peak. Built without instruction-set flags, so that it runs anywhere. The
 * compiler's __builtin_cpu_supports asks the operating system too (XGETBV) before it reports AVX state. */
#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#include "cpu/detect.h"
#include "core/pool.h"
#include "cpu/cpu.h"
#include "cpu/micro.h"

#include <stdio.h>
#include <time.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

bool lli_cpu_has_plain(char *why, size_t why_bytes) {
    (void)why;
    (void)why_bytes;
    return true;
}

#if defined(__x86_64__)
static bool missing(char *why, size_t why_bytes, const char *feature) {
    snprintf(why, why_bytes, "this CPU or operating system has no %s", feature);
    return false;
}

bool lli_cpu_has_avx2(char *why, size_t why_bytes) {
    if (!__builtin_cpu_supports("avx2")) return missing(why, why_bytes, "AVX2");
    if (!__builtin_cpu_supports("fma")) return missing(why, why_bytes, "FMA");
    /* clang has no name for F16C; its state is AVX's, which the checks above have seen enabled. */
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_F16C)) return missing(why, why_bytes, "F16C");
    return true;
}

bool lli_cpu_has_avx512(char *why, size_t why_bytes) {
    if (!lli_cpu_has_avx2(why, why_bytes)) return false;
    if (!__builtin_cpu_supports("avx512f")) return missing(why, why_bytes, "AVX-512 F");
    if (!__builtin_cpu_supports("avx512bw")) return missing(why, why_bytes, "AVX-512 BW");
    if (!__builtin_cpu_supports("avx512dq")) return missing(why, why_bytes, "AVX-512 DQ");
    if (!__builtin_cpu_supports("avx512vl")) return missing(why, why_bytes, "AVX-512 VL");
    return true;
}
#endif

static const lli_micro *widest(void) {
    char why[160];
    (void)why;
#ifdef LLI_HAVE_AVX512
    if (lli_cpu_has_avx512(why, sizeof why)) return &lli_micro_avx512;
#endif
#ifdef LLI_HAVE_AVX2
    if (lli_cpu_has_avx2(why, sizeof why)) return &lli_micro_avx2;
#endif
    return &lli_micro_plain;
}

typedef struct peak_run {
    const lli_micro *micro;
    double operations[kPoolMaxThreads];
} peak_run;

static void peak_job(void *context, int32_t thread, const lli_team *team) {
    (void)team;
    peak_run *run = context;
    float sink;
    run->operations[thread] = run->micro->peak(run->micro == &lli_micro_plain ? 50000 : 5000000, &sink);
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

double lli_cpu_fma_peak(int32_t n_threads) {
    lli_pool *pool;
    if (n_threads < 1 || n_threads > kPoolMaxThreads || lli_pool_create(n_threads, &pool) != LL_STATUS_OK)
        return 0.0;
    double best = 0.0;
    for (int repeat = 0; repeat < 20;
         repeat++) { /* the first ones wake cores and let the system spread threads */
        peak_run run = {.micro = widest()};
        double start = seconds(), operations = 0.0;
        lli_pool_run(pool, n_threads, peak_job, &run);
        double elapsed = seconds() - start;
        for (int32_t thread = 0; thread < n_threads; thread++) operations += run.operations[thread];
        if (operations / elapsed > best) best = operations / elapsed;
    }
    lli_pool_destroy(pool);
    return best * 1e-9;
}
