/* Forward on the CPU: the logits of a block of columns against a chunk of tokens live in a tile, their
 * statistics go into integer sums by thread, and the rows are finished when every column has been seen.
 *
 *   pack tokens -> [ pack block of w -> products, slab by slab -> statistics ] for every block -> finish rows
 */
#include "core/dtype.h"
#include "cpu/run.h"

#include <math.h>
#include <string.h>

void lli_tasks(const lli_worker *worker, int64_t n_tasks, lli_task *task, const void *context) {
    lli_run *run = worker->run;
    for (;;) {
        long long next = atomic_fetch_add_explicit(&run->next_task, 1, memory_order_relaxed);
        if (next >= n_tasks) break;
        task(worker, context, next);
    }
    lli_team_barrier(worker->team);
    if (worker->thread == 0) atomic_store_explicit(&run->next_task, 0, memory_order_relaxed);
    lli_team_barrier(worker->team); /* nobody may take the next phase's tasks before the reset */
}

enum { kRowsMax = 32, kColsMax = 64 }; /* of a panel, for any instruction set */

static void pack_tokens_task(const lli_worker *worker, const void *context, int64_t panel) {
    lli_run *run = worker->run;
    const lli_chunk *chunk = context;
    const void *rows[kRowsMax];
    int64_t mr = run->cut.mr, first = panel * mr, n = lli_min(mr, chunk->count - first);
    for (int64_t r = 0; r < n; r++) rows[r] = lli_x_row(run, chunk->begin + first + r);
    run->micro->pack(run->pieces.x_panels + first * run->cut.d, mr, rows, n, run->problem->x_dtype, 0,
                     run->cut.d);
}

void lli_pack_tokens(const lli_worker *worker, const lli_chunk *chunk) {
    int64_t mr = worker->run->cut.mr;
    lli_tasks(worker, (chunk->count + mr - 1) / mr, pack_tokens_task, chunk);
}

/* ---- Logits ------------------------------------------------------------------------------------- */

/* The columns and token groups of form_task. */
typedef struct form_work {
    const lli_chunk *chunk;
    int64_t v_begin, n_cols;
    int64_t n_parts, groups_per_part; /* token groups are split where there are few column blocks */
    bool keep, gather;
} form_work;

/* Rows of w behind nr columns from v on; how many are inside the vocabulary. */
static int64_t panel_rows(const lli_run *run, int64_t v, const void *rows[kColsMax]) {
    const int64_t n = lli_max(0, lli_min(run->cut.nr, run->cut.v_end - v));
    for (int64_t r = 0; r < n; r++) rows[r] = lli_w_row(run, v + r);
    return n;
}

static void pack_columns(const lli_worker *worker, int64_t v0, int64_t n_cols) {
    const lli_run *run = worker->run;
    for (int64_t first = 0; first < n_cols; first += run->cut.nr) {
        const void *rows[kColsMax];
        const int64_t n = panel_rows(run, v0 + first, rows);
        run->micro->pack(worker->scratch->w_panels + first * run->cut.d, run->cut.nr, rows, n,
                         run->problem->w_dtype, 0, run->cut.d);
    }
}

/* The logits of at most kDirectTokens tokens. */
static void form_few(const lli_worker *worker, int64_t n_rows, int64_t v0, int64_t n_cols, float *logits,
                     int64_t stride) {
    const lli_run *run = worker->run;
    for (int64_t first = 0; first < n_cols; first += run->cut.nr) {
        const void *rows[kColsMax];
        const int64_t n = panel_rows(run, v0 + first, rows);
        run->micro->direct(n_rows, run->cut.d, run->pieces.x_panels, rows, n, run->problem->w_dtype,
                           logits + first, stride);
    }
}

/* logits[row, 0 .. n_cols) of the group's rows: slabs of the contraction outside, so that a slab of w stays
 * in L1 and one of the group in L2; each element's chain goes on from slab to slab. */
static void form_group(const lli_worker *worker, int64_t row0, int64_t n_rows, int64_t n_cols, float *logits,
                       int64_t stride) {
    const lli_run *run = worker->run;
    const int64_t mr = run->cut.mr, nr = run->cut.nr, d = run->cut.d;
    for (int64_t k = 0; k < d; k += kSlab) {
        const int64_t n_k = lli_min(kSlab, d - k);
        for (int64_t v = 0; v < n_cols; v += nr) {
            const float *b = worker->scratch->w_panels + v * d + k * nr;
            for (int64_t i = 0; i < n_rows; i += mr) {
                const float *a = run->pieces.x_panels + (row0 + i) * d + k * mr;
                run->micro->gemm(lli_min(mr, n_rows - i), nr, n_k, a, b, logits + i * stride + v, stride,
                                 k == 0 ? LLI_GEMM_SET : LLI_GEMM_CONTINUE);
            }
        }
    }
}

/* A tile that another rank shares: its logits are kept until the ranks have met (exchange.h). */
static void keep_edge(const lli_worker *worker, int64_t row, int side, int64_t v0, const float *raw) {
    const lli_run *run = worker->run;
    const int64_t column = run->cut.base + v0;
    float *z = run->pieces.edges + (2 * row + side) * kTileCols;
    lli_row_sums *sums = &worker->scratch->sums[row];
    run->micro->logits(&run->transform, raw, run->pieces.bias ? run->pieces.bias + v0 : NULL, z);
    for (int64_t v = 0; v < kTileCols; v++) {
        if (v0 + v < run->cut.lead || v0 + v >= run->cut.v_end) z[v] = -INFINITY;
    }
    for (int64_t v = 0; (run->want & LLI_WANT_ARGMAX) && v < kTileCols; v++) {
        const bool own = v0 + v >= run->cut.lead && v0 + v < run->cut.v_end;
        if (own && z[v] == z[v] && (z[v] > sums->max || sums->argmax < 0)) {
            sums->max = z[v];
            sums->argmax = column + v;
        }
    }
}

static void gather_row(const lli_worker *worker, const lli_chunk *chunk, int64_t row, int64_t v0,
                       int64_t n_cols, const float *raw) {
    const lli_run *run = worker->run;
    const float *class_weight = run->call->args->class_weight;
    const lli_shards *shards = run->exchange.shards;
    const int64_t last_tile = run->cut.v_cols - kTileCols;
    int64_t begin = v0, end = lli_min(v0 + n_cols, run->cut.v_end);
    if (shards && shards->first_shared >= 0 && v0 == 0) {
        keep_edge(worker, row, 0, 0, raw);
        begin = kTileCols;
    }
    const bool last_here =
        shards && shards->last_shared >= 0 && begin <= last_tile && last_tile < v0 + n_cols;
    if (last_here) end = last_tile;
    if (begin < end) {
        const lli_stretch stretch = {
            .raw = raw + (begin - v0),
            .bias = run->pieces.bias ? run->pieces.bias + begin : NULL,
            .class_weight = class_weight ? class_weight + run->cut.base + begin : NULL,
            .column = run->cut.base + begin,
            .n_cols = end - begin,
            .target = lli_target(run, chunk->begin + row),
        };
        run->micro->stats(&run->transform, &stretch, run->want, &worker->scratch->sums[row],
                          &run->pieces.targets[row],
                          worker->scratch->soft ? &worker->scratch->soft[row] : NULL);
    }
    if (last_here) keep_edge(worker, row, 1, last_tile, raw + (last_tile - v0));
}

static void form_task(const lli_worker *worker, const void *context, int64_t task) {
    const form_work *work = context;
    const lli_run *run = worker->run;
    const int64_t block = task / work->n_parts, part = task % work->n_parts;
    const int64_t offset = block * run->cut.block_cols, v0 = work->v_begin + offset;
    const int64_t n_cols = lli_min(run->cut.block_cols, work->n_cols - offset);
    const int64_t group_rows = kGroupPanels * run->cut.mr;
    const int64_t first = part * work->groups_per_part * group_rows;
    const int64_t last = lli_min(work->chunk->count, first + work->groups_per_part * group_rows);
    const bool few = work->chunk->count <= kDirectTokens;
    if (!few) pack_columns(worker, v0, n_cols);
    for (int64_t row = first; row < last; row += group_rows) {
        const int64_t n_rows = lli_min(group_rows, last - row);
        float *logits = worker->scratch->tile;
        int64_t stride = run->cut.block_cols;
        if (work->keep) {
            stride = run->cut.grad_cols;
            logits = run->pieces.logits + row * stride + offset;
        }
        if (few) {
            form_few(worker, n_rows, v0, n_cols, logits, stride);
        } else {
            form_group(worker, row, n_rows, n_cols, logits, stride);
        }
        for (int64_t i = 0; work->gather && i < n_rows; i++) {
            gather_row(worker, work->chunk, row + i, v0, n_cols, logits + i * stride);
        }
    }
}

void lli_form_logits(const lli_worker *worker, const lli_chunk *chunk, int64_t v_begin, int64_t n_cols,
                     bool keep, bool gather) {
    const lli_cut *cut = &worker->run->cut;
    if (n_cols == 0 || chunk->count == 0) return;
    const int64_t n_blocks = (n_cols + cut->block_cols - 1) / cut->block_cols;
    const int64_t group_rows = kGroupPanels * cut->mr,
                  n_groups = (chunk->count + group_rows - 1) / group_rows;
    const int64_t wanted = lli_max(1, 4 * (int64_t)lli_team_size(worker->team) / n_blocks);
    const int64_t per_part = (n_groups + lli_min(wanted, n_groups) - 1) / lli_min(wanted, n_groups);
    const form_work work = {chunk,    v_begin, n_cols, (n_groups + per_part - 1) / per_part,
                            per_part, keep,    gather};
    lli_tasks(worker, n_blocks * work.n_parts, form_task, &work);
}

/* ---- Finishing rows ----------------------------------------------------------------------------- */

lli_row_part lli_row_merge(const lli_worker *worker, const lli_chunk *chunk, int64_t row) {
    const lli_run *run = worker->run;
    const lli_row_target *target = &run->pieces.targets[row];
    lli_row_part part = {.whole = target->whole,
                         .rest = target->rest,
                         .z = target->z,
                         .max = -INFINITY,
                         .argmax = -1,
                         .has_target = target->mine};
    for (int32_t thread = 0; thread < lli_team_size(worker->team); thread++) {
        const lli_scratch *scratch = &run->pieces.scratch[thread];
        const lli_row_sums *sums = &scratch->sums[row];
        lli_softmax_merge(&part.whole, &sums->others);
        lli_softmax_merge(&part.rest, &sums->others);
        if (scratch->soft) lli_exact_merge(&part.soft, &scratch->soft[row]);
        if (sums->argmax >= 0 && (part.argmax < 0 || sums->max > part.max ||
                                  (sums->max == part.max && sums->argmax < part.argmax))) {
            part.max = sums->max;
            part.argmax = sums->argmax;
        }
    }
    if (!run->cut.has_edges) return part;
    const int64_t column = lli_target(run, chunk->begin + row) - run->cut.base;
    const int64_t starts[2] = {0, run->cut.v_cols - kTileCols};
    for (int side = 0; side < 2; side++) {
        part.edges[side] = run->pieces.edges + (2 * row + side) * kTileCols;
        const bool shared =
            (side ? run->exchange.shards->last_shared : run->exchange.shards->first_shared) >= 0;
        const bool own = column >= run->cut.lead && column < run->cut.v_end;
        if (shared && own && column >= starts[side] && column < starts[side] + kTileCols) {
            const bool one_tile = side == 1 && starts[1] == 0; /* kept once, as the first */
            part.z = part.edges[one_tile ? 0 : side][column - starts[side]];
            part.has_target = 1;
        }
    }
    return part;
}

/* The whole row's part, over threads and ranks. */
static lli_row_part whole_row(const lli_worker *worker, const lli_chunk *chunk, int64_t row) {
    const lli_run *run = worker->run;
    if (!run->group) return lli_row_merge(worker, chunk, row);
    lli_row_part part;
    lli_exchange_row(&run->exchange, run->pieces.max + row * run->cut.n_max,
                     run->pieces.sum + row * run->cut.n_sum, lli_target(run, chunk->begin + row), &part);
    const bool none = !run->call->want_argmax || run->pieces.index[row] == lli_softmax_key_none;
    part.argmax = none ? -1 : -(int64_t)run->pieces.index[row];
    return part;
}

static void finish_row(const lli_worker *worker, const lli_chunk *chunk, int64_t row) {
    lli_run *run = worker->run;
    const int64_t i = run->pieces.rows[chunk->begin + row], y = lli_target(run, chunk->begin + row);
    const lli_finish finish = lli_run_finish(run);
    const lli_row_part part = whole_row(worker, chunk, row);
    const lli_row_result result = lli_finish_row(&finish, &part, i, y, &worker->scratch->finished);
    if (run->pieces.grads) {
        const lli_row_result saved = lli_finish_saved(&result);
        run->pieces.grads[chunk->begin + row] = lli_row_gradient(&run->terms, &saved, i, y);
    }
}

static void finish_task(const lli_worker *worker, const void *context, int64_t task) {
    const lli_chunk *chunk = context;
    const int64_t last = lli_min(chunk->count, (task + 1) * kFinishRows);
    for (int64_t row = task * kFinishRows; row < last; row++) finish_row(worker, chunk, row);
}

bool lli_forward_chunk(const lli_worker *worker, const lli_chunk *chunk, bool keep) {
    lli_scratch *scratch = worker->scratch;
    for (int64_t row = 0; row < chunk->count; row++) {
        scratch->sums[row] = (lli_row_sums){.max = -INFINITY, .argmax = -1};
        lli_softmax_clear(&scratch->sums[row].others);
        if (scratch->soft) scratch->soft[row] = (lli_exact){0};
    }
    for (int64_t row = 0; worker->thread == 0 && row < chunk->count; row++) { /* seen by all after packing */
        lli_row_target *target = &worker->run->pieces.targets[row];
        *target = (lli_row_target){0};
        lli_softmax_clear(&target->whole);
        lli_softmax_clear(&target->rest);
    }
    lli_pack_tokens(worker, chunk);
    lli_form_logits(worker, chunk, 0, worker->run->cut.v_cols, keep, true);
    if (worker->run->group && !lli_exchange_chunk(worker, chunk)) return false;
    lli_tasks(worker, (chunk->count + kFinishRows - 1) / kFinishRows, finish_task, chunk);
    return true;
}
