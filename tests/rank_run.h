/* Runs a call of one rank as a call of several: the operands of the whole are cut at the shards, every rank
 * is a thread with a plan of its own. Rank 0 writes the results of the whole; the other ranks write copies,
 * which must have the same bits; every rank writes its rows of grad_w and grad_bias of the whole. */
#ifndef LL_TESTS_RANK_RUN_H
#define LL_TESTS_RANK_RUN_H

#include <logitless/comm.h>

#include <stdbool.h>

enum { kRanksMax = 16, kRankTextBytes = 512 };

/* Rank r holds the rows [begin[r], begin[r] + count[r]) of w. */
struct rank_cut {
    int32_t n;
    int64_t begin[kRanksMax], count[kRanksMax];
};

enum rank_cut_kind {
    CUT_EVEN,    /* the remainder on the low ranks */
    CUT_UNEVEN,  /* at random columns */
    CUT_EMPTY,   /* every second rank holds nothing, the others as uneven */
    CUT_TINY,    /* all but the last rank hold one column */
    CUT_PERMUTED /* uneven, the shards in a random order of ranks */
};

struct rank_cut rank_cut_make(enum rank_cut_kind kind, int32_t n, int64_t n_rows, uint64_t seed);
/* "[0,3) [3,7) ..." */
const char *rank_cut_text(const struct rank_cut *cut);

/* What a rank does differently; all zeros: nothing. Called on the rank's own thread. */
struct rank_run {
    const struct rank_cut *cut;
    int32_t timeout_ms;
    const ll_comm_double *script; /* NULL, or a test double around every rank's communicator */
    void (*change)(void *context, int32_t rank, ll_plan_desc *desc, ll_linear_ce_args *args);
    bool (*stay_away)(void *context, int32_t rank); /* after ll_plan_create, before the pass */
    /* Another communicator over the rank's own, `threads`; NULL: that one. */
    ll_status (*join)(void *context, int32_t rank, const ll_comm *threads, ll_comm *comm);
    void *context;
    /* Out. */
    ll_status status[kRanksMax];
    char sentence[kRanksMax][kRankTextBytes];
    ll_comm_counts counts[kRanksMax]; /* with a script */
    double seconds[kRanksMax];        /* of the pass */
    char difference[kRankTextBytes];  /* "", or where a rank's results differ from rank 0's */
};

/* LL_STATUS_OK if every rank returned it and all have the same bits; else rank 0's status, or the first other
 * than OK, or INTERNAL with run->difference. desc and args: of the whole, workspace not set. */
ll_status ranks_run(struct rank_run *run, const ll_plan_desc *desc, const ll_linear_ce_args *args,
                    ll_pass pass);

#endif
