/* A chunk's rows over the ranks of a group, on the CPU: two or three operations a chunk for the statistics,
 * one for grad_x. Thread 0 meets the other ranks while the team waits; the integers are packed by all.
 *
 *   pack max -> max over ranks -> pack sum -> sum over ranks [ -> pack index -> max over ranks ]
 *
 * Packing merges the threads' sums of a row anew in each phase instead of keeping them: that is a few
 * additions, and memory for whole rows is not needed. */
#include "cpu/run.h"

#include <string.h>

static bool stopped(const lli_worker *worker) {
    lli_team_barrier(worker->team); /* thread 0 has written the status, and what the ranks have agreed on */
    return worker->run->status != LL_STATUS_OK;
}

/* Rows of a task. */
static int64_t last_row(const lli_chunk *chunk, int64_t task) {
    return lli_min(chunk->count, (task + 1) * kFinishRows);
}

static void pack_max_task(const lli_worker *worker, const void *context, int64_t task) {
    const lli_run *run = worker->run;
    const lli_chunk *chunk = context;
    for (int64_t row = task * kFinishRows; row < last_row(chunk, task); row++) {
        const lli_row_part part = lli_row_merge(worker, chunk, row);
        lli_exchange_max(&run->exchange, &part, lli_target(run, chunk->begin + row),
                         run->pieces.max + row * run->cut.n_max);
    }
}

static void pack_sum_task(const lli_worker *worker, const void *context, int64_t task) {
    const lli_run *run = worker->run;
    const lli_chunk *chunk = context;
    for (int64_t row = task * kFinishRows; row < last_row(chunk, task); row++) {
        const lli_row_part part = lli_row_merge(worker, chunk, row);
        lli_exchange_sum(&run->exchange, &part, lli_target(run, chunk->begin + row),
                         run->pieces.max + row * run->cut.n_max, run->pieces.sum + row * run->cut.n_sum);
    }
}

static void pack_index_task(const lli_worker *worker, const void *context, int64_t task) {
    const lli_run *run = worker->run;
    const lli_chunk *chunk = context;
    for (int64_t row = task * kFinishRows; row < last_row(chunk, task); row++) {
        const lli_row_part part = lli_row_merge(worker, chunk, row);
        run->pieces.index[row] = lli_exchange_index(&part, run->pieces.max + row * run->cut.n_max);
    }
}

bool lli_exchange_chunk(const lli_worker *worker, const lli_chunk *chunk) {
    lli_run *run = worker->run;
    const int64_t n_tasks = (chunk->count + kFinishRows - 1) / kFinishRows;
    lli_tasks(worker, n_tasks, pack_max_task, chunk);
    if (worker->thread == 0) {
        run->status = lli_group_max(run->group, run->pieces.max, chunk->count * run->cut.n_max, NULL);
    }
    if (stopped(worker)) return false;
    lli_tasks(worker, n_tasks, pack_sum_task, chunk);
    if (worker->thread == 0) {
        run->status = lli_group_sum(run->group, run->pieces.sum, chunk->count * run->cut.n_sum, NULL);
    }
    if (stopped(worker)) return false;
    if (!run->call->want_argmax) return true;
    lli_tasks(worker, n_tasks, pack_index_task, chunk);
    if (worker->thread == 0) run->status = lli_group_max(run->group, run->pieces.index, chunk->count, NULL);
    return !stopped(worker);
}

/* Rows of acc_x next to each other: how far they are padded is each rank's own affair. */
static void close_gaps(const lli_run *run, int64_t n_rows) {
    const int64_t d = run->cut.d, stride = run->cut.d_cols;
    for (int64_t row = 1; d != stride && row < n_rows; row++) {
        memmove(run->pieces.acc_x + row * d, run->pieces.acc_x + row * stride, sizeof(float) * (size_t)d);
    }
}

bool lli_exchange_grad_x(const lli_worker *worker, const lli_chunk *chunk) {
    lli_run *run = worker->run;
    if (worker->thread == 0) {
        const int64_t n = chunk->count * run->cut.d;
        if (run->cut.v == 0) {
            memset(run->pieces.acc_x, 0, sizeof(float) * (size_t)n);
        } else {
            close_gaps(run, chunk->count);
        }
        run->status = lli_group_sum_f32(run->group, run->pieces.acc_x, n, NULL);
    }
    return !stopped(worker);
}
