/* ce on the CPU: cross-entropy over given logits, a row at a time by one thread each.
 *
 *   one rank    for each row: statistics -> results -> gradient       the row stays in L2 between
 *   group       for each chunk of rows: statistics -> max over ranks -> sum over ranks -> results -> gradient
 *
 *   logits of a row, by blocks of kBlockCols: widened to f32 in L1 (f32 lies there already) -> tiles of 64
 *   gradient of a row, by the same blocks: widened again, turned into dz in L1, narrowed into its place
 *
 * A row is converted twice rather than kept in f32: for 16-bit logits that halves what L2 has to hold. */
#ifndef LLI_CPU_CE_H
#define LLI_CPU_CE_H

#include "core/dtype.h"
#include "core/integers.h"
#include "core/plan.h"
#include "core/pool.h"
#include "cpu/finish.h"
#include "cpu/micro.h"

#include <stdatomic.h>

enum { kBlockCols = 1024 }; /* a multiple of 64; 4 KB of f32 */

/* Columns are counted from the start of the shard's first canonical tile, as in cut.h: element c - lead of a
 * row of logits is column c, the global column base + c. */
typedef struct lli_ce_cut {
    int64_t base, lead, v, v_end, v_cols;
    int64_t whole_begin, whole_end; /* columns of the tiles that are this rank's alone */
    int64_t chunk;                  /* rows that the ranks exchange at a time; 0 without a group */
    int64_t n_tokens_max, n_threads, n_ids, n_top;
    int64_t n_max, n_sum;       /* of core/exchange.h, a row */
    int64_t max_room, sum_room; /* with keys of ids, their counts and every rank's top */
    bool forward, smoothing, in_group, has_edges;
} lli_ce_cut;

/* What a thread needs for a row's ids and top. */
typedef struct lli_ce_scratch {
    int64_t *top; /* [n_top] packed, largest first */
    lli_finish_sums finished;
} lli_ce_scratch;

/* Of a group's chunk, by row. */
typedef struct lli_ce_pieces {
    lli_row_part *parts;
    float *edges; /* 2 x 64: the shard's first and last tile where shared */
    int32_t *max; /* exchange.h's | keys of ids */
    int64_t *sum; /* exchange.h's | counts of ids | top of rank 0, 1, ... */
    int32_t *index;
    int64_t *top;            /* n_top of this rank, until they go into sum */
    lli_ce_scratch *scratch; /* by thread */
} lli_ce_pieces;

typedef struct lli_ce_run {
    const lli_problem *problem;
    const lli_call *call;
    const lli_micro *micro;
    lli_ce_cut cut;
    lli_ce_pieces pieces;
    lli_loss_terms terms;
    lli_transform transform;
    lli_finish finish;
    int64_t n_ids;     /* of this call */
    int64_t task_rows; /* rows that a thread takes at a time */
    atomic_llong next_task;
    lli_group *group; /* NULL: one rank */
    lli_exchange exchange;
    ll_status status; /* of the operations with other ranks; written by thread 0 before a barrier */
} lli_ce_run;

typedef struct lli_ce_worker {
    lli_ce_run *run;
    const lli_team *team;
    lli_ce_scratch *scratch;
    int32_t thread;
} lli_ce_worker;

/* ---- Cutting (ce_cut.c) ------------------------------------------------------------------------- */

lli_ce_cut lli_ce_cut_make(const lli_problem *problem, const lli_config *config, ll_pass pass);
size_t lli_ce_workspace(const lli_problem *problem, const lli_config *config, ll_pass pass);
ll_status lli_ce_configure(const lli_problem *problem, const lli_config *agreed, lli_config *config);
void lli_ce_carve(const lli_ce_cut *cut, lli_arena *arena, lli_ce_pieces *pieces);

/* ---- A row (ce_row.c) --------------------------------------------------------------------------- */

static inline bool lli_ce_ignored(const lli_ce_run *run, int64_t i) {
    return lli_id(&run->call->args->target, i) == run->problem->loss.ignore_index;
}
static inline int64_t lli_ce_target(const lli_ce_run *run, int64_t i) {
    return lli_id(&run->call->args->target, i);
}

/* Logits to be ranked: how many are greater than raw[j] is added to greater[j]. */
typedef struct lli_ce_count {
    int64_t n;
    const float *raw;
    int64_t *greater;
} lli_ce_count;

/* The row's part from this rank's columns, and its largest logits into top[0..n_top) and counts on the way
 * (NULL: not wanted). edges: 2 x 64 floats where the shard has shared tiles, whose columns are not counted.
 */
lli_row_part lli_ce_gather(const lli_ce_run *run, int64_t i, float *edges, int64_t *top,
                           const lli_ce_count *count);
/* Counts in all of this rank's columns. */
void lli_ce_count_row(const lli_ce_run *run, int64_t i, const lli_ce_count *count);

/* Raw logit of a global column of this rank; false: another rank's. */
bool lli_ce_raw(const lli_ce_run *run, int64_t i, int64_t column, float *raw);

/* Merges another rank's top into the sorted top[0..n_top). */
void lli_ce_top_merge(int64_t *top, int64_t n_top, const int64_t *from);

/* Row i's ids and top, from raw logits and counts of greater ones, or where it is ignored. */
void lli_ce_write_ids(const lli_ce_run *run, int64_t i, double lse, const float *raw, const int64_t *greater);
void lli_ce_write_top(const lli_ce_run *run, int64_t i, double lse, const int64_t *top);
void lli_ce_write_ignored(const lli_ce_run *run, int64_t i);

/* The row of grad_logits; saved: as a backward finds its results. */
void lli_ce_gradient(const lli_ce_run *run, int64_t i, const lli_row_result *saved);
/* The whole row 0. */
void lli_ce_gradient_zero(const lli_ce_run *run, int64_t i);

/* ---- Over ranks (ce_group.c) -------------------------------------------------------------------- */

/* All rows, chunk by chunk; run->status says whether the ranks could meet. */
void lli_ce_group_job(const lli_ce_worker *worker);

/* Takes the next rows [begin, end) of n; false when there are none. */
static inline bool lli_ce_next(lli_ce_run *run, int64_t n, int64_t *begin, int64_t *end) {
    const int64_t step = run->task_rows;
    *begin = step * atomic_fetch_add_explicit(&run->next_task, 1, memory_order_relaxed);
    *end = lli_min(n, *begin + step);
    return *begin < n;
}

#endif
