/* The end of a row and of a call, for both operations: from the whole row's sums to what the caller gets. */
#ifndef LLI_CPU_FINISH_H
#define LLI_CPU_FINISH_H

#include "core/exchange.h"
#include "core/loss.h"

typedef struct lli_finish {
    const lli_problem *problem;
    const lli_call *call;
    const lli_loss_terms *terms;
    int32_t want; /* LLI_WANT_ bits of the statistics */
} lli_finish;

/* What a thread adds up over its rows. */
typedef struct lli_finish_sums {
    lli_exact loss, z_loss;
} lli_finish_sums;

/* Writes the results of token i with target y from the whole row's part and adds its loss up. NaN rows have
 * an lse of NaN. */
lli_row_result lli_finish_row(const lli_finish *finish, const lli_row_part *part, int64_t i, int64_t y,
                              lli_finish_sums *sums);
/* Those results as a backward would find them saved in f32. */
lli_row_result lli_finish_saved(const lli_row_result *result);
/* What the caller saved of token i. */
lli_row_result lli_finish_load(const ll_linear_ce_args *args, int64_t i);

/* Results of an ignored token. */
void lli_finish_ignored(const lli_finish *finish, int64_t i);
/* The reduced loss and the sums, from all threads' sums. */
void lli_finish_call(const lli_finish *finish, const lli_finish_sums *sums);
void lli_finish_merge(lli_finish_sums *sums, const lli_finish_sums *other);

#endif
