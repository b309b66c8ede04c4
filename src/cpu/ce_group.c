/* ce over the ranks of a group: chunk by chunk, two operations each, three with argmax. Thread 0 meets the
 * other ranks while the team waits.
 *
 *   gather, pack max -> max over ranks -> pack sum -> sum over ranks
 *                       [ -> pack index -> max over ranks ] -> rows
 *
 * What ids and the top add to a row's integers:
 *
 *   max   | of exchange.h | key of id 0, 1, ...       by the id's rank; none from the others
 *   sum   | of exchange.h | columns greater than id 0, 1, ... | top of rank 0 | top of rank 1 | ...
 *
 * A rank's own part of the sum is zeros where it is another's turn, so the sum over ranks puts them side by
 * side. The sizes depend on shapes alone: rows that are ignored go along as nothing. */
#include "cpu/ce.h"

#include <math.h>
#include <string.h>

/* Rows [begin, begin + count) of the call. */
typedef struct ce_chunk {
    int64_t begin, count;
    int64_t n_max, n_sum; /* integers a row in this call */
    int64_t n_counts, n_top;
} ce_chunk;

typedef void phase(const lli_ce_worker *worker, const ce_chunk *chunk, int64_t r);

/* Every row of the chunk, then waits for all. */
static void each_row(const lli_ce_worker *worker, const ce_chunk *chunk, phase *phase) {
    int64_t begin, end;
    while (lli_ce_next(worker->run, chunk->count, &begin, &end)) {
        for (int64_t r = begin; r < end; r++) phase(worker, chunk, r);
    }
    lli_team_barrier(worker->team);
    if (worker->thread == 0) atomic_store_explicit(&worker->run->next_task, 0, memory_order_relaxed);
    lli_team_barrier(worker->team); /* nobody may take the next phase's rows before the reset */
}

static bool stopped(const lli_ce_worker *worker) {
    lli_team_barrier(worker->team); /* thread 0 has written the status, and what the ranks have agreed on */
    return worker->run->status != LL_STATUS_OK;
}

static int32_t *max_of(const lli_ce_run *run, const ce_chunk *chunk, int64_t r) {
    return run->pieces.max + r * chunk->n_max;
}
static int64_t *sum_of(const lli_ce_run *run, const ce_chunk *chunk, int64_t r) {
    return run->pieces.sum + r * chunk->n_sum;
}

/* Raw logits of the row's ids, once the ranks have met. */
static void agreed_ids(const lli_ce_run *run, const int32_t *max, float *raw) {
    for (int64_t j = 0; j < run->n_ids; j++) raw[j] = lli_softmax_key_value(max[run->cut.n_max + j]);
}

static void pack_max(const lli_ce_worker *worker, const ce_chunk *chunk, int64_t r) {
    const lli_ce_run *run = worker->run;
    const int64_t i = chunk->begin + r;
    int32_t *max = max_of(run, chunk, r);
    for (int64_t k = 0; k < chunk->n_max; k++) max[k] = lli_softmax_key_none;
    if (lli_ce_ignored(run, i)) return;
    lli_row_part *part = &run->pieces.parts[r];
    *part = lli_ce_gather(run, i, run->pieces.edges ? run->pieces.edges + r * 2 * kTileCols : NULL,
                          chunk->n_top ? run->pieces.top + r * chunk->n_top : NULL, NULL);
    lli_exchange_max(&run->exchange, part, lli_ce_target(run, i), max);
    for (int64_t j = 0; j < run->n_ids; j++) {
        float raw;
        if (lli_ce_raw(run, i, lli_id_at(&run->call->ce->ids, i, j), &raw)) {
            max[run->cut.n_max + j] = lli_softmax_key(raw);
        }
    }
}

static void pack_sum(const lli_ce_worker *worker, const ce_chunk *chunk, int64_t r) {
    const lli_ce_run *run = worker->run;
    const int64_t i = chunk->begin + r;
    const int32_t *max = max_of(run, chunk, r);
    int64_t *sum = sum_of(run, chunk, r), *counts = sum + run->cut.n_sum;
    memset(sum, 0, sizeof *sum * (size_t)chunk->n_sum);
    if (lli_ce_ignored(run, i)) return;
    lli_exchange_sum(&run->exchange, &run->pieces.parts[r], lli_ce_target(run, i), max, sum);
    if (chunk->n_counts) {
        float raw[LL_CE_IDS_MAX];
        agreed_ids(run, max, raw);
        lli_ce_count_row(run, i, &(lli_ce_count){chunk->n_counts, raw, counts});
    }
    if (chunk->n_top) {
        memcpy(counts + chunk->n_counts + run->exchange.shards->rank * chunk->n_top,
               run->pieces.top + r * chunk->n_top, sizeof *sum * (size_t)chunk->n_top);
    }
}

static void pack_index(const lli_ce_worker *worker, const ce_chunk *chunk, int64_t r) {
    const lli_ce_run *run = worker->run;
    run->pieces.index[r] = lli_ce_ignored(run, chunk->begin + r)
                               ? lli_softmax_key_none
                               : lli_exchange_index(&run->pieces.parts[r], max_of(run, chunk, r));
}

static bool meet(const lli_ce_worker *worker, const ce_chunk *chunk) {
    lli_ce_run *run = worker->run;
    const bool first = worker->thread == 0;
    each_row(worker, chunk, pack_max);
    if (first) run->status = lli_group_max(run->group, run->pieces.max, chunk->count * chunk->n_max, NULL);
    if (stopped(worker)) return false;
    each_row(worker, chunk, pack_sum);
    if (first) run->status = lli_group_sum(run->group, run->pieces.sum, chunk->count * chunk->n_sum, NULL);
    if (stopped(worker)) return false;
    if (!run->call->want_argmax) return true;
    each_row(worker, chunk, pack_index);
    if (first) run->status = lli_group_max(run->group, run->pieces.index, chunk->count, NULL);
    return !stopped(worker);
}

static void write_top(const lli_ce_worker *worker, const ce_chunk *chunk, int64_t i, double lse,
                      const int64_t *tops) {
    int64_t *top = worker->scratch->top;
    memcpy(top, tops, sizeof *top * (size_t)chunk->n_top);
    for (int32_t rank = 1; rank < worker->run->exchange.shards->n_ranks; rank++) {
        lli_ce_top_merge(top, chunk->n_top, tops + rank * chunk->n_top);
    }
    lli_ce_write_top(worker->run, i, lse, top);
}

static void finish(const lli_ce_worker *worker, const ce_chunk *chunk, int64_t r) {
    const lli_ce_run *run = worker->run;
    const bool gradient = run->call->pass == LL_PASS_FORWARD_BACKWARD;
    const int64_t i = chunk->begin + r, y = lli_ce_target(run, i);
    const int32_t *max = max_of(run, chunk, r);
    const int64_t *counts = sum_of(run, chunk, r) + run->cut.n_sum;
    if (lli_ce_ignored(run, i)) {
        lli_ce_write_ignored(run, i);
        if (gradient) lli_ce_gradient_zero(run, i);
        return;
    }
    lli_row_part whole;
    lli_exchange_row(&run->exchange, max, sum_of(run, chunk, r), y, &whole);
    const bool none = !run->call->want_argmax || run->pieces.index[r] == lli_softmax_key_none;
    whole.argmax = none ? -1 : -(int64_t)run->pieces.index[r];
    const lli_row_result result = lli_finish_row(&run->finish, &whole, i, y, &worker->scratch->finished);
    if (run->n_ids) {
        float raw[LL_CE_IDS_MAX];
        agreed_ids(run, max, raw);
        lli_ce_write_ids(run, i, result.lse, raw, counts);
    }
    if (chunk->n_top) write_top(worker, chunk, i, result.lse, counts + chunk->n_counts);
    if (gradient) {
        const lli_row_result saved = lli_finish_saved(&result);
        lli_ce_gradient(run, i, &saved);
    }
}

void lli_ce_group_job(const lli_ce_worker *worker) {
    const lli_ce_run *run = worker->run;
    const int64_t n = run->call->n_tokens;
    ce_chunk chunk = {.n_counts = run->call->want_rank ? run->n_ids : 0,
                      .n_top = run->call->want_top ? run->cut.n_top : 0};
    chunk.n_max = run->cut.n_max + run->n_ids;
    chunk.n_sum = run->cut.n_sum + chunk.n_counts + run->exchange.shards->n_ranks * chunk.n_top;
    for (chunk.begin = 0; chunk.begin < n; chunk.begin += run->cut.chunk) {
        chunk.count = lli_min(run->cut.chunk, n - chunk.begin);
        if (!meet(worker, &chunk)) return;
        each_row(worker, &chunk, finish);
    }
}
