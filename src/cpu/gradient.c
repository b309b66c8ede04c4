/* Gradients on the CPU from a chunk's raw logits, in two phases with a barrier between:
 *
 *   grad_w phase    columns shared out in tasks: logits -> dz in place; grad_w += dz^T x, grad_bias += sum dz
 *   grad_x phase    tokens and hidden columns shared out: grad_x += dz w, blocks of kSumCols columns
 * ascending
 *
 * one pass: the logits of a whole chunk x vocabulary come from the forward (3 GEMMs in all).
 * recompute: for each stretch of columns, for each chunk of tokens, the logits are formed again (4 GEMMs);
 * grad_w is then complete, and rounded, after the stretch's last chunk, and grad_x after the last stretch.
 * Left out: columns beyond the vocabulary and tokens that are ignored take no part in any product. */
#include "core/dtype.h"
#include "cpu/run.h"

#include <string.h>

/* A chunk of tokens against a stretch of columns, with what came before and what comes after. */
typedef struct grad_work {
    const lli_chunk *chunk;
    int64_t v_begin, first, n_cols; /* the shard's own columns are [v_begin + first, v_begin + n_cols) */
    bool first_chunk, last_chunk;
    bool first_cols;
    int64_t acc_row; /* row of acc_x for the chunk's first token */
} grad_work;

/* ---- Tokens in columns panels ------------------------------------------------------------------- */

static void pack_x_cols_task(const lli_worker *worker, const void *context, int64_t block) {
    const lli_run *run = worker->run;
    const lli_chunk *chunk = context;
    const void *rows[kSumTokens];
    int64_t first = block * kSumTokens, n = lli_min(kSumTokens, chunk->count - first);
    for (int64_t r = 0; r < n; r++) { /* a dead row's x may hold NaN, which 0 would not stop */
        rows[r] = run->pieces.grads[chunk->begin + first + r].dead ? NULL
                                                                   : lli_x_row(run, chunk->begin + first + r);
    }
    run->micro->copy(run->pieces.x_cols + first * run->cut.d_cols, run->cut.nr,
                     run->cut.block_tokens * run->cut.nr, rows, n, run->problem->x_dtype, 0, run->cut.d);
}

/* ---- grad_w and grad_bias ----------------------------------------------------------------------- */

/* Logits to dz, in place, for n columns from c (of the stretch) and tokens [first, first + n_tokens). */
static void to_gradients(const lli_run *run, const grad_work *work, int64_t first, int64_t n_tokens,
                         int64_t c, int64_t n) {
    const int64_t v0 = work->v_begin + c;
    const float *class_weight = run->call->args->class_weight;
    for (int64_t t = first; t < first + n_tokens; t++) {
        float *raw = run->pieces.logits + t * run->cut.grad_cols + c;
        const lli_stretch stretch = {
            .raw = raw,
            .bias = run->pieces.bias ? run->pieces.bias + v0 : NULL,
            .class_weight = class_weight ? class_weight + run->cut.base + v0 : NULL,
            .column = run->cut.base + v0,
            .n_cols = n,
            .target = lli_target(run, work->chunk->begin + t),
        };
        run->micro->gradient(&run->transform, &stretch, &run->pieces.grads[work->chunk->begin + t], raw);
    }
}

static void add_bias(const lli_run *run, const grad_work *work, int64_t first, int64_t n_tokens, int64_t c,
                     int64_t n) {
    float *acc = run->pieces.acc_bias + work->v_begin + c, sum[kGradCols];
    memset(sum, 0, sizeof sum);
    for (int64_t t = first; t < first + n_tokens; t++) {
        const float *dz = run->pieces.logits + t * run->cut.grad_cols + c;
        for (int64_t v = 0; v < n; v++) sum[v] += dz[v];
    }
    if (work->first_chunk && first == 0) {
        memcpy(acc, sum, sizeof(float) * (size_t)n);
    } else {
        for (int64_t v = 0; v < n; v++) acc[v] += sum[v];
    }
}

/* acc[v, :] (+)= dz^T x over one block of tokens. */
static void add_w(const lli_worker *worker, int64_t first, int64_t n_tokens, int64_t c, int64_t n, float *acc,
                  int64_t stride, lli_gemm_mode mode) {
    const lli_run *run = worker->run;
    const int64_t mr = run->cut.mr, nr = run->cut.nr, depth = run->cut.block_tokens;
    const void *rows[kSumTokens];
    for (int64_t t = 0; t < n_tokens; t++) rows[t] = run->pieces.logits + (first + t) * run->cut.grad_cols;
    run->micro->copy(worker->scratch->dz_panels, mr, depth * mr, rows, n_tokens, LL_DTYPE_F32, c, n);
    const float *x_cols = run->pieces.x_cols + first * run->cut.d_cols;
    for (int64_t slab = 0; slab < run->cut.d; slab += kSlabCols) {
        const int64_t slab_end = lli_min(run->cut.d, slab + kSlabCols);
        for (int64_t v = 0; v < n; v += mr) {
            for (int64_t j = slab; j < slab_end; j += nr) {
                run->micro->gemm(lli_min(mr, n - v), lli_min(nr, slab_end - j), n_tokens,
                                 worker->scratch->dz_panels + v * depth, x_cols + j * depth,
                                 acc + v * stride + j, stride, mode);
            }
        }
    }
}

/* out[0 .. n) (+)= sum, rounded once. */
static void emit(void *out, int32_t dtype, int64_t step, const float *sum, int64_t n, bool accumulate) {
    if (accumulate) {
        for (int64_t j = 0; j < n; j++)
            lli_store(out, dtype, j * step, lli_load(out, dtype, j * step) + sum[j]);
    } else if (dtype == LL_DTYPE_BF16 && step == 1) {
        for (int64_t j = 0; j < n; j++) ((uint16_t *)out)[j] = lli_f32_to_bf16(sum[j]);
    } else {
        for (int64_t j = 0; j < n; j++) lli_store(out, dtype, j * step, sum[j]);
    }
}

static void grad_w_task(const lli_worker *worker, const void *context, int64_t task) {
    const grad_work *work = context;
    const lli_run *run = worker->run;
    const ll_linear_ce_args *args = run->call->args;
    const int64_t c = work->first + task * kGradCols, n = lli_min(kGradCols, work->n_cols - c);
    const int64_t v0 = work->v_begin + c, w_row = v0 - run->cut.lead;
    const bool with_w = args->grad_w.data != NULL, with_bias = args->grad_bias.data != NULL;
    const bool accumulate = args->accumulate & LL_ACCUMULATE_W;
    float *acc = NULL;
    int64_t stride = run->cut.d_cols;
    if (with_w && run->cut.w_direct) {
        acc = (float *)args->grad_w.data + w_row * args->grad_w.row_stride;
        stride = args->grad_w.row_stride;
    } else if (with_w) {
        acc = run->cut.keep_acc_w ? run->pieces.acc_w + c * stride : worker->scratch->acc_w;
    }
    for (int64_t first = 0; first < work->chunk->count; first += kSumTokens) {
        const int64_t n_tokens = lli_min(kSumTokens, work->chunk->count - first);
        const bool fresh = work->first_chunk && first == 0 && !(run->cut.w_direct && accumulate);
        to_gradients(run, work, first, n_tokens, c, n);
        if (with_bias) add_bias(run, work, first, n_tokens, c, n);
        if (with_w) add_w(worker, first, n_tokens, c, n, acc, stride, fresh ? LLI_GEMM_SET : LLI_GEMM_ADD);
    }
    if (!work->last_chunk) return;
    for (int64_t v = 0; with_w && !run->cut.w_direct && v < n; v++) {
        emit((void *)lli_row(&args->grad_w, w_row + v), args->grad_w.dtype, 1, acc + v * stride, run->cut.d,
             accumulate);
    }
    if (with_bias) {
        emit((void *)lli_row(&args->grad_bias, w_row), args->grad_bias.dtype, args->grad_bias.row_stride,
             run->pieces.acc_bias + v0, n, args->accumulate & LL_ACCUMULATE_BIAS);
    }
}

/* ---- grad_x ------------------------------------------------------------------------------------- */

/* Shares panels of tokens and panels of hidden columns out over the team: each thread packs its tokens' dz
 * for all columns and its columns of w for all its tokens, so the cut that repeats the least packing wins. */
static void share_out(const lli_worker *worker, int64_t n_rows, int64_t *row_begin, int64_t *row_end,
                      int64_t *col_begin, int64_t *col_end) {
    const lli_cut *cut = &worker->run->cut;
    const int64_t team = lli_team_size(worker->team);
    const int64_t row_panels = (n_rows + cut->mr - 1) / cut->mr, col_panels = cut->d_cols / cut->nr;
    int64_t best = 1, best_cost = INT64_MAX;
    for (int64_t parts = 1; parts <= team; parts++) { /* of rows */
        const int64_t col_parts = team / parts;
        const int64_t share = ((row_panels + parts - 1) / parts) * ((col_panels + col_parts - 1) / col_parts);
        /* products of the busiest thread, then packing: 1 step an element of dz against half a step of w */
        const int64_t cost = share * cut->mr * cut->nr + 8 * (n_rows / parts) + 4 * (cut->d / col_parts);
        if (cost < best_cost) {
            best_cost = cost;
            best = parts;
        }
    }
    const int64_t col_parts = team / best, part = worker->thread / col_parts,
                  col_part = worker->thread % col_parts;
    const bool idle = part >= best;
    *row_begin = idle ? 0 : lli_min(n_rows, row_panels * part / best * cut->mr);
    *row_end = idle ? 0 : lli_min(n_rows, row_panels * (part + 1) / best * cut->mr);
    *col_begin = col_panels * col_part / col_parts * cut->nr;
    *col_end = col_panels * (col_part + 1) / col_parts * cut->nr;
}

/* acc_x[rows, columns] (+)= dz w over one block of at most kSumCols columns of the vocabulary. */
static void add_x(const lli_worker *worker, const grad_work *work, int64_t c, int64_t n, int64_t row_begin,
                  int64_t row_end, int64_t col_begin, int64_t col_end) {
    const lli_run *run = worker->run;
    const int64_t mr = run->cut.mr, nr = run->cut.nr, logits_stride = run->cut.grad_cols;
    const lli_gemm_mode mode = work->first_cols && c == work->first ? LLI_GEMM_SET : LLI_GEMM_ADD;
    const void *rows[kSumCols];
    for (int64_t row = row_begin; row < row_end; row += mr) {
        const int64_t n_rows = lli_min(mr, row_end - row);
        for (int64_t r = 0; r < n_rows; r++) rows[r] = run->pieces.logits + (row + r) * logits_stride;
        run->micro->pack(worker->scratch->dz_panels + (row - row_begin) * n, mr, rows, n_rows, LL_DTYPE_F32,
                         c, n);
    }
    for (int64_t v = 0; v < n; v++) rows[v] = lli_w_row(run, work->v_begin + c + v);
    for (int64_t slab = col_begin; slab < col_end; slab += kSlabCols) {
        const int64_t n_slab = lli_min(kSlabCols, col_end - slab);
        run->micro->copy(worker->scratch->w_panels, nr, n * nr, rows, n, run->problem->w_dtype, slab,
                         lli_min(n_slab, run->cut.d - slab));
        for (int64_t row = row_begin; row < row_end; row += mr) {
            float *acc = run->pieces.acc_x + (work->acc_row + row) * run->cut.d_cols + slab;
            for (int64_t j = 0; j < n_slab; j += nr) {
                run->micro->gemm(lli_min(mr, row_end - row), nr, n,
                                 worker->scratch->dz_panels + (row - row_begin) * n,
                                 worker->scratch->w_panels + j * n, acc + j, run->cut.d_cols, mode);
            }
        }
    }
}

static void emit_x_task(const lli_worker *worker, const void *context, int64_t row) {
    const lli_run *run = worker->run;
    const grad_work *work = context;
    const ll_view *grad_x = &run->call->args->grad_x;
    const bool accumulate = run->call->args->accumulate & LL_ACCUMULATE_X;
    void *out = (void *)lli_row(grad_x, run->pieces.rows[work->chunk->begin + row]);
    const int64_t stride = run->group ? run->cut.d : run->cut.d_cols; /* ranks add up without gaps */
    if (!run->pieces.grads[work->chunk->begin + row].dead) {
        emit(out, grad_x->dtype, 1, run->pieces.acc_x + (work->acc_row + row) * stride, run->cut.d,
             accumulate);
    } else if (!accumulate) { /* exactly 0, even against an infinite w */
        memset(out, 0, (size_t)run->cut.d * ll_dtype_bytes((ll_dtype)grad_x->dtype));
    }
}

/* ---- Both phases, and the two orders of going over them ----------------------------------------- */

static void gradient_of(const lli_worker *worker, const grad_work *work) {
    const lli_run *run = worker->run;
    lli_tasks(worker, (work->n_cols - work->first + kGradCols - 1) / kGradCols, grad_w_task, work);
    if (run->call->args->grad_x.data) {
        int64_t row_begin, row_end, col_begin, col_end;
        share_out(worker, work->chunk->count, &row_begin, &row_end, &col_begin, &col_end);
        for (int64_t block = 0; row_begin < row_end && block < work->n_cols; block += kSumCols) {
            const int64_t c = lli_max(block, work->first), end = lli_min(block + kSumCols, work->n_cols);
            add_x(worker, work, c, end - c, row_begin, row_end, col_begin, col_end);
        }
        lli_team_barrier(worker->team); /* before the logits are overwritten and grad_x is read */
    }
}

static void pack_x_cols(const lli_worker *worker, const lli_chunk *chunk) {
    if (worker->run->call->args->grad_w.data) {
        lli_tasks(worker, (chunk->count + kSumTokens - 1) / kSumTokens, pack_x_cols_task, chunk);
    }
}

/* Adds grad_x up over ranks where there are several, and writes it. */
static bool finish_x(const lli_worker *worker, const lli_chunk *chunk) {
    const lli_run *run = worker->run;
    if (!run->call->args->grad_x.data) return true;
    if (run->group && !lli_exchange_grad_x(worker, chunk)) return false;
    const grad_work work = {.chunk = chunk};
    lli_tasks(worker, chunk->count, emit_x_task, &work);
    return true;
}

void lli_gradient_one_pass(const lli_worker *worker) {
    const lli_run *run = worker->run;
    const int64_t n = run->call->n_valid, end = lli_rounds_end(run);
    for (int64_t begin = 0; begin < end; begin += run->cut.grad_tokens) {
        const lli_chunk chunk = lli_chunk_at(run, begin, run->cut.grad_tokens);
        const grad_work work = {.chunk = &chunk,
                                .first = run->cut.lead,
                                .n_cols = run->cut.v_end,
                                .first_chunk = begin == 0,
                                .last_chunk = begin + chunk.count == n,
                                .first_cols = true};
        if (!lli_forward_chunk(worker, &chunk, true)) return;
        if (run->cut.v > 0 && chunk.count > 0) {
            pack_x_cols(worker, &chunk);
            gradient_of(worker, &work);
        }
        if (!finish_x(worker, &chunk)) return;
    }
}

/* One chunk of tokens against one stretch of columns. */
static void recompute(const lli_worker *worker, const lli_chunk *chunk, int64_t v, int64_t acc_row) {
    const lli_run *run = worker->run;
    const grad_work work = {.chunk = chunk,
                            .v_begin = v,
                            .first = v == 0 ? run->cut.lead : 0,
                            .n_cols = lli_min(run->cut.grad_cols, run->cut.v_end - v),
                            .first_chunk = chunk->begin == 0,
                            .last_chunk = chunk->begin + chunk->count == run->call->n_valid,
                            .first_cols = v == 0,
                            .acc_row = acc_row};
    lli_form_logits(worker, chunk, v, lli_round_up(work.n_cols, kTileCols), true, false);
    gradient_of(worker, &work);
}

/* All stretches of columns against the tokens [all.begin, + all.count), chunk by chunk. */
static void recompute_all(const lli_worker *worker, const lli_chunk *all) {
    const lli_run *run = worker->run;
    const int64_t step = run->cut.grad_tokens, end = all->begin + all->count;
    for (int64_t v = 0; v < run->cut.v_cols; v += run->cut.grad_cols) {
        for (int64_t begin = all->begin; begin < end; begin += step) {
            const lli_chunk chunk = {begin, lli_min(step, end - begin)};
            if (v == 0 || all->count > step) { /* a single chunk stays packed */
                lli_pack_tokens(worker, &chunk);
                pack_x_cols(worker, &chunk);
            }
            recompute(worker, &chunk, v, begin - all->begin);
        }
    }
}

void lli_gradient_recompute(const lli_worker *worker) {
    const lli_run *run = worker->run;
    const int64_t end = lli_rounds_end(run), step = run->cut.tokens_outside ? run->cut.grad_tokens : end;
    for (int64_t begin = 0; begin < end; begin += step) {
        const lli_chunk all = lli_chunk_at(run, begin, step);
        recompute_all(worker, &all);
        if (!finish_x(worker, &all)) return;
    }
}

static void prepare_task(const lli_worker *worker, const void *context, int64_t row) {
    (void)context;
    const lli_run *run = worker->run;
    const int64_t i = run->pieces.rows[row];
    const lli_row_result saved = lli_finish_load(run->call->args, i);
    run->pieces.grads[row] = lli_row_gradient(&run->terms, &saved, i, lli_target(run, row));
}

void lli_backward_prepare(const lli_worker *worker) {
    lli_tasks(worker, worker->run->call->n_valid, prepare_task, NULL);
}
