/* What the two halves of `logitless bench` share: kernels beside the machine's peaks (bench.c), and the
 * vocabulary over ranks beside one rank (bench_ranks.c). */
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
