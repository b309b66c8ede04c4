/* What a right kernel may return for a problem: the reference's results, and for every element how far an f32
 * kernel may be from them. */
#ifndef LL_TESTS_CORE_EXPECT_H
#define LL_TESTS_CORE_EXPECT_H

#include "core/compare.h"

/* Where a kernel rounds more than f32 chains do; all zeros: it does not. dr is that of the raw logits.
 *
 *   logit    E is that many times larger: tensor cores cut off what they add up, where a chain rounds
 *   dr       relative rounding of dr before it enters grad_x and grad_w (2^-8 bf16, 2^-11 f16)
 *   p        relative rounding of the exponentials that dr is made of; of entropy's gradient p ln p too
 *   floor    as a part of the token's upstreams: what falls off below a row's range (f16)
 *   x        absolute rounding of x, where rows of small tokens share a range with large ones (f16) */
struct expect_rounding {
    double logit, dr, p, floor, x;
};

/* Of the backend under test (LL_TEST_BACKEND). */
struct expect_rounding expect_rounding_here(const struct problem *problem);

/* Bounds, u = 2^-24, E[i] the error of a logit of row i after an f32 chain of n_hidden products:
 *
 *   E        u (2 + 4 sqrt(d)) (|x w|_2 + |b|) / T + 4 u |z|, largest over v; rounding errors of a chain walk
 *            randomly, 4 sqrt(d) is four times their spread
 *   lse      5e-7 + u 2 |lse| + E             5e-7: the integer softmax's own bound
 *   nll      5e-7 + u 2 |nll| + 2 E
 *   entropy  1e-6 + u 2 H + 4 E (1 + ln V)
 *   dr[i,v]  (2^-21 + 4 E (1 + ln V)) (|dr| + A p / T) + smoothing's cancellation,
 *            A[i] the sum of the token's upstreams
 *   grad_x   sum_v err(dr) |w| + u (4 + sqrt(V)) sum_v |dr w|, and one rounding to the output's dtype;
 *            grad_w and grad_bias likewise over the tokens */
struct expectation {
    const struct problem *problem;
    struct expect_rounding rounding;
    const struct operands *operands;
    struct results want;
    double *z;                              /* [n, V] logits in double */
    double *allowed[kFields];               /* per element, row-major; NULL where checked otherwise */
    double allowed_loss_sum, allowed_z_sum; /* of sums.loss and sums.z_loss */
};

/* How the errors of one kernel lie: printed, not judged. */
struct expect_stats {
    int64_t checked, failed, warned;
    int32_t printed;       /* failures of the problem at hand; the caller resets it */
    double worst[kFields]; /* error / allowed */
};

bool expectation_create(const struct problem *problem, const struct operands *operands,
                        struct expectation *expect);
bool expectation_create_for(const struct problem *problem, const struct operands *operands,
                            const struct expect_rounding *rounding, struct expectation *expect);
void expectation_destroy(struct expectation *expect);

/* Checks the chosen fields; prints at most three failures with coordinates, got, want and the bound. */
void expectation_check(const struct expectation *expect, const char *kernel, const char *what,
                       const struct results *got, int32_t fields, struct expect_stats *stats);

#endif
