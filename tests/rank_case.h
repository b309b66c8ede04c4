/* A problem on one rank, and the same over ranks beside it. A difference is printed and counted in the case.
 */
#ifndef LL_TESTS_RANK_CASE_H
#define LL_TESTS_RANK_CASE_H

#include "core/expect.h"
#include "rank_run.h"

struct rank_case {
    struct problem problem;
    struct operands operands;
    struct results want; /* forward_backward on one rank */
    struct expectation expect;
    const char *kernel;
    int64_t failed, checked;
    struct expect_stats stats;
};

/* The problem of this text and its operands; the test fails where there are none. */
void rank_case_open(const char *text, struct rank_case *c);
/* The bounds too. */
void rank_case_expect(struct rank_case *c);
/* c->want, by c->kernel. */
void rank_case_want(struct rank_case *c);
/* Frees what rank_case_open and rank_case_expect took; the test fails where an input changed. */
void rank_case_close(struct rank_case *c);

void rank_case_results(const struct rank_case *c, struct results *results);

/* One pass over the ranks of a run; `what` names it where it fails. */
bool rank_case_run(struct rank_case *c, struct rank_run *rank_run, const struct results *results,
                   ll_pass pass, const char *what);
/* Compares fields by bits. */
void rank_case_same(struct rank_case *c, const struct rank_cut *cut, const char *what,
                    const struct results *got, const struct results *want, int32_t fields);
/* forward_backward, and forward followed by backward: equal to each other, and to one rank but for `sums`,
 * which lie within the bounds of any kernel. */
void rank_case_cut(struct rank_case *c, const struct rank_cut *cut, const ll_comm_double *script,
                   int32_t sums);

#endif
