/* Gradients of a chunk of tokens and a block of columns: dz, then both products (grad_step.h). */
#include "cuda/grad_step.h"
#include "cuda/ranks.h"

ll_status lli_cuda_copy_x(const lli_cuda_run *run, const lli_cuda_chunk *chunk) {
    const ll_view *x = &run->call->args->x;
    const lli_cuda_grad *grads = run->pieces.grads + chunk->first;
    if (!run->call->args->grad_w.data) return LL_STATUS_OK;
    if (run->cut.scaled) {
        LLI_LAUNCH(run, "scaling",
                   lli_cuda_chunk_scale_launch(grads, chunk->count, run->pieces.totals, run->stream));
    }
    const lli_cuda_pack pack = {.from = lli_row(x, chunk->first),
                                .to = run->pieces.x_copy,
                                .from_ld = x->row_stride,
                                .to_ld = run->cut.d_padded,
                                .n_rows = chunk->count,
                                .n_cols = run->cut.d,
                                .padded_rows = lli_cuda_padded_rows(chunk),
                                .padded_cols = run->cut.d_padded,
                                .dtype = x->dtype,
                                .grads = grads,
                                .totals = run->pieces.totals};
    LLI_LAUNCH(run, "copying x", lli_cuda_pack_launch(&pack, run->stream));
    return LL_STATUS_OK;
}

/* What dz of a piece of the block is made of. */
static lli_cuda_dz dz_args(const lli_cuda_run *run, const lli_cuda_grad_step *step,
                           const lli_cuda_block *piece) {
    const int64_t offset = piece->begin - step->begin;
    return (lli_cuda_dz){.logits = piece->logits,
                         .ld = piece->ld,
                         .n_rows = step->chunk->count,
                         .n_cols = piece->count,
                         .column = run->column + piece->begin,
                         .first = step->chunk->first,
                         .targets = run->targets,
                         .transform = run->transform,
                         .bias = run->pieces.bias ? run->pieces.bias + piece->begin : NULL,
                         .class_weight = run->call->args->class_weight,
                         .smoothing = run->cut.smoothing,
                         .grads = run->pieces.grads + step->chunk->first,
                         .dz = (char *)run->pieces.dz + offset * run->cut.element_bytes,
                         .dz_ld = run->cut.dz_cols,
                         .padded_rows = lli_cuda_padded_rows(step->chunk),
                         .padded_cols = lli_round_up(piece->count, kTileCols),
                         .dtype = run->device->dtype,
                         .bias_parts =
                             run->call->args->grad_bias.data ? run->pieces.bias_parts + offset : NULL};
}

/* dz of the block, piece by piece, from exponentials or logits that were kept, or from logits that are formed
 * again, in memory or not; and its column sums. */
static ll_status form_dz(const lli_cuda_run *run, const lli_cuda_grad_step *step) {
    const int64_t end = step->begin + step->count, cols = lli_cuda_block_cols(&run->cut, step->chunk->count);
    const int64_t exponentials = step->kept ? step->kept->n_tiles * (int64_t)kTileCols : 0;
    for (int64_t c = step->begin, n; c < end; c += n) {
        lli_cuda_block piece = {.begin = c, .count = end - c};
        if (c < exponentials) piece.count = n = lli_min(end, exponentials) - c;
        lli_cuda_dz dz = dz_args(run, step, &piece);
        lli_cuda_fused_dz fused;
        if (c < exponentials) {
            LLI_LAUNCH(run, "the gradients of logits", lli_cuda_kept_dz_launch(step->kept, &dz, run->stream));
            continue;
        }
        if (c >= run->cut.kept_cols && lli_cuda_fused_dz_takes(run, step->chunk, &dz, &fused)) {
            LLI_TRY(lli_cuda_fused_form_dz(run, &fused));
            break;
        }
        LLI_REQUIRE(!step->kept, LL_STATUS_INTERNAL,
                    "%s: columns from %lld on are not taken as all were by the forward", run->pass,
                    (long long)c);
        if (c < run->cut.kept_cols) {
            n = lli_min(end, run->cut.kept_cols) - c;
            piece.logits = run->pieces.kept + c;
            piece.ld = run->cut.kept_cols;
            piece.count = n;
        } else {
            n = lli_min(end - c, cols);
            piece.logits = run->pieces.logits;
            piece.ld = cols;
            piece.count = n;
            LLI_TRY(lli_cuda_form_logits(run, step->chunk, &piece));
        }
        dz = dz_args(run, step, &piece);
        LLI_LAUNCH(run, "the gradients of logits", lli_cuda_dz_launch(&dz, run->stream));
    }
    if (!run->call->args->grad_bias.data) return LL_STATUS_OK;
    LLI_LAUNCH(run, "adding up grad_bias",
               lli_cuda_bias_add_launch(run->pieces.bias_parts,
                                        (step->chunk->count + kBiasRows - 1) / kBiasRows, step->count,
                                        run->pieces.acc_bias + step->begin, step->first_chunk, run->stream));
    return LL_STATUS_OK;
}

/* ---- grad_x ------------------------------------------------------------------------------------- */

/* acc_x[:, from ... + n_cols) (+)= dz[:, offset ... + k) w, w packed where it must be: `k` real rows of it.
 */
static ll_status add_x(const lli_cuda_run *run, const lli_cuda_grad_step *step, int64_t offset, int64_t k,
                       bool packed, bool add) {
    const ll_view *w = &run->call->args->w;
    const char *rows = lli_row(w, step->begin + offset);
    const int64_t e = run->cut.element_bytes, k_padded = lli_round_up(k, kTailCols);
    const int64_t fits = (int64_t)run->cut.scratch_bytes / (k_padded * e) / 8 * 8;
    const int64_t slice = packed ? lli_min(fits, run->cut.d_padded) : run->cut.d_padded;
    for (int64_t h = 0; h < run->cut.d_padded; h += slice) {
        const int64_t n = lli_min(slice, run->cut.d_padded - h);
        lli_gemm g = {.rows = step->chunk->count,
                      .cols = n,
                      .k = packed ? k_padded : k,
                      .a = (char *)run->pieces.dz + offset * e,
                      .a_ld = run->cut.dz_cols,
                      .b = rows,
                      .b_ld = w->row_stride,
                      .c = step->acc_x + h,
                      .c_ld = run->cut.d_padded,
                      .add = add};
        if (packed) {
            const lli_cuda_pack pack = {.from = rows + h * e,
                                        .to = run->pieces.scratch,
                                        .from_ld = w->row_stride,
                                        .to_ld = n,
                                        .n_rows = k,
                                        .n_cols = lli_max(0, lli_min(n, run->cut.d - h)),
                                        .padded_rows = k_padded,
                                        .padded_cols = n,
                                        .dtype = w->dtype};
            LLI_LAUNCH(run, "packing w", lli_cuda_pack_launch(&pack, run->stream));
            g.b = run->pieces.scratch;
            g.b_ld = n;
        }
        const lli_gemm_kind kind = g.rows > kFewRows ? LLI_GEMM_GRAD_X : LLI_GEMM_GRAD_X_FEW;
        LLI_TRY(lli_gemm_run(run->device, kind, &g, run->pass, run->stream));
    }
    return LL_STATUS_OK;
}

/* Blocks of kSumCols columns: each one's whole tiles, then what is left, padded by zeros. The same sums
 * wherever w lies. */
static ll_status grad_x(const lli_cuda_run *run, const lli_cuda_grad_step *step) {
    if (!run->call->args->grad_x.data) return LL_STATUS_OK;
    const bool aligned = lli_cuda_aligned(&run->call->args->w);
    for (int64_t at = 0, n; at < step->count; at += n) {
        n = lli_min(kSumCols, step->count - at);
        const int64_t whole = n / kTailCols * kTailCols, tail = n - whole;
        const bool first = step->first_block && at == 0;
        if (whole) LLI_TRY(add_x(run, step, at, whole, !aligned, !first));
        if (tail) LLI_TRY(add_x(run, step, at + whole, tail, true, !first || whole));
    }
    return LL_STATUS_OK;
}

ll_status lli_cuda_emit_x(const lli_cuda_run *run, const lli_cuda_chunk *chunk, float *acc_x) {
    const ll_view *out = &run->call->args->grad_x;
    if (!out->data) return LL_STATUS_OK;
    if (run->group) LLI_TRY(lli_cuda_sum_over_ranks(run, acc_x, chunk->count * run->cut.d_padded));
    const lli_cuda_emit emit = {.sum = acc_x,
                                .out = (void *)lli_row(out, chunk->first),
                                .sum_ld = run->cut.d_padded,
                                .out_ld = out->row_stride,
                                .out_step = 1,
                                .n_rows = chunk->count,
                                .n_cols = run->cut.d,
                                .dtype = out->dtype,
                                .accumulate = (run->call->args->accumulate & LL_ACCUMULATE_X) != 0,
                                .grads = run->pieces.grads + chunk->first};
    LLI_LAUNCH(run, "writing grad_x", lli_cuda_emit_launch(&emit, run->stream));
    return LL_STATUS_OK;
}

/* ---- grad_w ------------------------------------------------------------------------------------- */

/* n_rows rows of the block's grad_w (+)= dz^T x, into c: f32, or w's dtype. */
static ll_status multiply_w(const lli_cuda_run *run, const lli_cuda_grad_step *step, int64_t offset,
                            int64_t n_rows, bool narrow, void *c, int64_t c_ld, bool add) {
    lli_gemm g = {.rows = n_rows,
                  .cols = run->cut.d_padded,
                  .k = lli_cuda_padded_rows(step->chunk),
                  .a = (char *)run->pieces.dz + offset * run->cut.element_bytes,
                  .a_ld = run->cut.dz_cols,
                  .b = run->pieces.x_copy,
                  .b_ld = run->cut.d_padded,
                  .c = c,
                  .c_ld = c_ld,
                  .add = add};
    if (run->cut.scaled) {
        g.alpha = &run->pieces.totals->alpha;
        g.zero = &run->pieces.totals->zero;
        g.one = &run->pieces.totals->one;
    }
    const lli_gemm_kind kind = narrow           ? LLI_GEMM_GRAD_W_NARROW
                               : add            ? LLI_GEMM_GRAD_W_ADD
                               : g.k > kFewRows ? LLI_GEMM_GRAD_W_LONG
                                                : LLI_GEMM_GRAD_W;
    return lli_gemm_run(run->device, kind, &g, run->pass, run->stream);
}

/* Where grad_w of the step is multiplied to, whole. */
typedef struct w_place {
    void *c;
    int64_t ld;
    int32_t form;
    bool emit; /* f32 sums of the block, of which grad_w is made after the last chunk */
} w_place;

/* Into grad_w itself where the products can; into f32 sums of the block where a narrow grad_w has several
 * chunks. False: by slices. */
static bool place_w(const lli_cuda_run *run, const lli_cuda_grad_step *step, w_place *place) {
    const ll_view *out = &run->call->args->grad_w;
    const bool accumulate = run->call->args->accumulate & LL_ACCUMULATE_W;
    const bool f32 = out->dtype == LL_DTYPE_F32, alone = step->first_chunk && step->last_chunk;
    const int32_t sum = step->first_chunk && !(accumulate && f32) ? kGradOverwrite : kGradAdd;
    if (lli_cuda_aligned(out) && run->cut.d == run->cut.d_padded && (f32 || (alone && !accumulate))) {
        *place =
            (w_place){(void *)lli_row(out, step->begin), out->row_stride, f32 ? sum : kGradNarrow, false};
        return true;
    }
    *place = (w_place){run->pieces.acc_w, run->cut.d_padded, sum, true};
    return !f32 && !alone;
}

static ll_status emit_w(const lli_cuda_run *run, const float *sum, int64_t row, int64_t n_rows,
                        bool accumulate) {
    const ll_view *out = &run->call->args->grad_w;
    const lli_cuda_emit emit = {.sum = sum,
                                .out = (void *)lli_row(out, row),
                                .sum_ld = run->cut.d_padded,
                                .out_ld = out->row_stride,
                                .out_step = 1,
                                .n_rows = n_rows,
                                .n_cols = run->cut.d,
                                .dtype = out->dtype,
                                .accumulate = accumulate};
    LLI_LAUNCH(run, "writing grad_w", lli_cuda_emit_launch(&emit, run->stream));
    return LL_STATUS_OK;
}

static ll_status end_w(const lli_cuda_run *run, const lli_cuda_grad_step *step, const w_place *place) {
    const bool accumulate = run->call->args->accumulate & LL_ACCUMULATE_W;
    if (!place->emit || !step->last_chunk) return LL_STATUS_OK;
    return emit_w(run, place->c, step->begin, step->count, accumulate);
}

/* By cuBLASLt. */
static ll_status grad_w(const lli_cuda_run *run, const lli_cuda_grad_step *step) {
    const bool accumulate = run->call->args->accumulate & LL_ACCUMULATE_W;
    w_place place;
    if (!run->call->args->grad_w.data) return LL_STATUS_OK;
    if (place_w(run, step, &place)) {
        LLI_TRY(multiply_w(run, step, 0, step->count, place.form == kGradNarrow, place.c, place.ld,
                           place.form == kGradAdd));
        return end_w(run, step, &place);
    }
    const int64_t slice = (int64_t)run->cut.scratch_bytes / (run->cut.d_padded * 4) / kTileCols * kTileCols;
    for (int64_t c = 0; c < step->count; c += slice) {
        const int64_t n = lli_min(slice, step->count - c);
        LLI_TRY(multiply_w(run, step, c, n, false, run->pieces.scratch, run->cut.d_padded, false));
        LLI_TRY(emit_w(run, run->pieces.scratch, step->begin + c, n, !step->first_chunk || accumulate));
    }
    return LL_STATUS_OK;
}

/* ---- Both, in one launch ------------------------------------------------------------------------ */

static bool takes_both(const lli_cuda_run *run, const lli_cuda_grad_step *step, int64_t ready,
                       lli_cuda_grad_products *products, w_place *place) {
    const ll_linear_ce_args *args = run->call->args;
    const lli_cuda_block all = {.begin = step->begin, .count = step->count};
    *place = (w_place){0};
    if (args->grad_w.data && !place_w(run, step, place)) return false;
    const lli_cuda_grad_job job = {.chunk = step->chunk,
                                   .begin = step->begin,
                                   .count = step->count,
                                   .grad_x = args->grad_x.data ? step->acc_x : NULL,
                                   .add_x = !step->first_block,
                                   .grad_w = place->c,
                                   .grad_w_ld = place->ld,
                                   .form_w = place->form,
                                   .kept = ready < step->count ? step->kept : NULL,
                                   .dz = dz_args(run, step, &all),
                                   .ready = ready};
    return lli_cuda_grad_takes(run, &job, products);
}

/* What is left of grad_x: the columns beyond the last multiple of 64, whose dz lie in the last block's half.
 */
static ll_status multiply_both(const lli_cuda_run *run, const lli_cuda_grad_step *step,
                               const lli_cuda_grad_products *products, const w_place *place) {
    const int64_t tail = step->count % kTailCols, whole = step->count - tail;
    const int64_t before = (int64_t)(products->n_blocks - 1) / 2 * 2 * kSumCols; /* whose halves are reused */
    lli_cuda_grad_step last = *step;
    LLI_TRY(lli_cuda_grad_multiply(run, products));
    if (place->c) LLI_TRY(end_w(run, step, place));
    if (!tail || !run->call->args->grad_x.data) return LL_STATUS_OK;
    last.begin += before;
    last.count -= before;
    return add_x(run, &last, whole - before, tail, true, !step->first_block || whole);
}

/* ---- A step ------------------------------------------------------------------------------------- */

ll_status lli_cuda_take_step(const lli_cuda_run *run, const lli_cuda_grad_step *step) {
    lli_cuda_grad_products products;
    w_place place;
    LLI_TRY(form_dz(run, step));
    if (takes_both(run, step, step->count, &products, &place)) {
        return multiply_both(run, step, &products, &place);
    }
    LLI_TRY(grad_x(run, step));
    return grad_w(run, step);
}

ll_status lli_cuda_take_all_steps(const lli_cuda_run *run, const lli_cuda_grad_step *all, bool *taken) {
    const int64_t in_sums = lli_round_up(lli_max(1, all->kept->sum_end * (int64_t)kTileCols), kSumCols);
    lli_cuda_grad_step first = *all;
    lli_cuda_grad_products products;
    w_place place;
    first.count = lli_min(all->count, in_sums);
    *taken = all->kept->n_tiles * (int64_t)kTileCols >= all->count &&
             takes_both(run, all, first.count, &products, &place);
    if (!*taken) return LL_STATUS_OK;
    LLI_TRY(form_dz(run, &first));
    return multiply_both(run, all, &products, &place);
}
