/* A problem on one rank, to be compared with the same on several ranks of one GPU. */
#ifndef LL_TESTS_CUDA_RANK_CASE_H
#define LL_TESTS_CUDA_RANK_CASE_H

#include "core/expect.h"
#include "cuda/image.h"
#include "kernel_run.h"
#include "rank_run.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

static const char *const kernels[] = {"linear_ce_cuda", "linear_ce_cuda_sm90"};
enum { kKernels = 2 };

struct group_case {
    struct problem problem;
    struct operands operands;
    struct results want; /* forward_backward on one rank */
    struct expectation expect;
    const char *kernel;
    int64_t failed, checked;
    struct expect_stats stats;
};

/* Ranks [0, edges[0]), [edges[0], edges[1]), ...; edges beyond the rows are the rows. */
static inline struct rank_cut cut_at(int64_t n_rows, int32_t n_edges, const int64_t *edges) {
    struct rank_cut cut = {.n = n_edges + 1};
    int64_t begin = 0;
    for (int32_t r = 0; r <= n_edges; r++) {
        const int64_t end = r == n_edges || edges[r] > n_rows ? n_rows : edges[r];
        cut.begin[r] = begin;
        cut.count[r] = end - begin;
        begin = end;
    }
    return cut;
}

static inline void case_open(const char *text, struct group_case *c) {
    *c = (struct group_case){0};
    const char *why = problem_parse(text, &c->problem);
    if (why) fail_msg("%s: %s", text, why);
    if (!operands_create(&c->problem, &c->operands)) fail_msg("out of memory");
}

static inline void new_results(const struct group_case *c, struct results *results) {
    if (!results_create(&c->problem, results)) fail_msg("out of memory");
}

#endif
