/* What the parts of `logitless bench` share: kernels beside the machine's peaks (bench.c, bench_ce.c), and
 * the vocabulary over ranks beside one rank (bench_ranks.c). */
#ifndef LL_CLI_BENCH_H
#define LL_CLI_BENCH_H

#include "cut.h"
#include "problems.h"

enum { kMinRepeats = 3, kMaxRepeats = 1000, kTextBytes = sizeof((struct problem *)0)->text };

typedef struct bench_options {
    int32_t n_threads; /* 0: the library's default */
    double seconds;
    bool json;
    cli_cut_options cut;
    const char *backend;
} bench_options;

typedef struct bench_row {
    char problem[kTextBytes];
    char kernel[64];
    double median_ms, gflops, gbytes_per_s, peak_part, workspace_mb, loss;
    int repeats;
} bench_row;

/* Calls until `seconds` are over, at least kMinRepeats times after one that warms caches and clock; sets
 * median_ms and repeats. */
typedef ll_status bench_call(void *context);
ll_status bench_time(bench_call *call, void *context, double seconds, bench_row *row);

/* A problem of ce (bench_ce.c); sets the row but for its names. An exit code. */
int bench_ce(const struct problem *problem, const ll_plan *plan, double seconds, bench_row *row);

/* CLI_EXIT_OK, or the exit code of a reported error. */
int bench_parse(const char *text, struct problem *problem);

/* What a call gives to someone who trains: loss, and the saved values that the backward needs. */
ll_linear_ce_args bench_args(const struct problem *problem, const struct operands *operands,
                             const struct results *results, ll_pass pass);

/* Sorts. count >= 1. */
double bench_median(double *times, int count);

/* Every problem over the ranks of options->cut; an exit code. */
int bench_ranks(const bench_options *options, const char *const *texts, int count);

#endif
