/* What the tests of ranks on one GPU share. */
#ifndef LL_TESTS_CUDA_RANKS_H
#define LL_TESTS_CUDA_RANKS_H

#include "cuda/image.h"
#include "kernel_run.h"
#include "rank_case.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

static const char *const kernels[] = {"linear_ce_cuda", "linear_ce_cuda_sm90"};
enum { kKernels = 2 };

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

#endif
