/* Forward: logits of a chunk of tokens and a block of columns, small enough for the L2 cache, and their
 * statistics, block after block, or all in one kernel (fused.h); then the rows are finished. */
#include "cuda/fused.h"
#include "cuda/ranks.h"

enum { kEvenCols = 8 }; /* cuBLASLt's products on sm_90 have a multiple of this many columns */

bool lli_cuda_aligned(const ll_view *view) {
    const int64_t bytes = (int64_t)lli_dtype_bytes(view->dtype);
    return (uintptr_t)view->data % 16 == 0 && view->row_stride * bytes % 16 == 0 &&
           view->cols * bytes % 16 == 0;
}

/* Products of one slice, whose operands have their rows on 16 bytes. */
static ll_status form_slice(const lli_cuda_run *run, const lli_cuda_chunk *chunk, const lli_cuda_block *block,
                            int64_t column, int64_t n_cols, const void *w, int64_t w_ld) {
    const ll_view *x = &run->call->args->x;
    const bool aligned = lli_cuda_aligned(x);
    const int64_t step = aligned ? chunk->count : run->cut.x_pack_rows;
    for (int64_t r = 0; r < chunk->count; r += step) {
        const int64_t n = lli_min(step, chunk->count - r);
        lli_gemm g = {.rows = n,
                      .cols = n_cols,
                      .k = run->cut.d_padded,
                      .a = lli_row(x, chunk->first + r),
                      .a_ld = x->row_stride,
                      .b = w,
                      .b_ld = w_ld,
                      .c = block->logits + r * block->ld + column,
                      .c_ld = block->ld};
        if (!aligned) {
            const lli_cuda_pack pack = {.from = g.a,
                                        .to = run->pieces.x_pack,
                                        .from_ld = x->row_stride,
                                        .to_ld = run->cut.d_padded,
                                        .n_rows = n,
                                        .n_cols = run->cut.d,
                                        .padded_rows = n,
                                        .padded_cols = run->cut.d_padded,
                                        .dtype = x->dtype};
            LLI_LAUNCH(run, "packing x", lli_cuda_pack_launch(&pack, run->stream));
            g.a = run->pieces.x_pack;
            g.a_ld = run->cut.d_padded;
        }
        LLI_TRY(lli_gemm_run(run->device, LLI_GEMM_LOGITS, &g, run->pass, run->stream));
    }
    return LL_STATUS_OK;
}

ll_status lli_cuda_form_logits(const lli_cuda_run *run, const lli_cuda_chunk *chunk,
                               const lli_cuda_block *block) {
    const ll_view *w = &run->call->args->w;
    const bool aligned = lli_cuda_aligned(w);
    const int64_t row_bytes = run->cut.d_padded * run->cut.element_bytes;
    /* No operand of one product beyond 2^30 elements: 32-bit offsets inside a kernel stay enough. */
    const int64_t most =
        aligned ? ((int64_t)1 << 30) / w->row_stride : (int64_t)run->cut.scratch_bytes / row_bytes;
    const int64_t step = lli_max(kTileCols, most / kTileCols * kTileCols);
    for (int64_t c = 0, n; c < block->count; c += n) {
        n = lli_min(step, block->count - c);
        const void *rows = lli_row(w, block->begin + c);
        int64_t ld = w->row_stride, n_cols = n;
        const bool odd = n % kEvenCols != 0;
        if (aligned && odd && n > kEvenCols) {
            n = n_cols = n / kEvenCols * kEvenCols; /* what is left comes round as a slice of its own */
        } else if (!aligned || odd) {
            n_cols = lli_round_up(n, kEvenCols);
            const lli_cuda_pack pack = {.from = rows,
                                        .to = run->pieces.scratch,
                                        .from_ld = ld,
                                        .to_ld = run->cut.d_padded,
                                        .n_rows = n,
                                        .n_cols = run->cut.d,
                                        .padded_rows = n_cols,
                                        .padded_cols = run->cut.d_padded,
                                        .dtype = w->dtype};
            LLI_LAUNCH(run, "packing w", lli_cuda_pack_launch(&pack, run->stream));
            rows = run->pieces.scratch;
            ld = run->cut.d_padded;
        }
        LLI_TRY(form_slice(run, chunk, block, c, n_cols, rows, ld));
    }
    return LL_STATUS_OK;
}

ll_status lli_cuda_gather(const lli_cuda_run *run, const lli_cuda_chunk *chunk, const lli_cuda_block *block,
                          int32_t parts, bool fresh) {
    if (fresh && run->pieces.soft) {
        LLI_LAUNCH(
            run, "clearing sums",
            (int)cudaMemsetAsync(run->pieces.soft, 0, (size_t)chunk->count * sizeof(lli_exact), run->stream));
    }
    const lli_cuda_stats stats = {.logits = block->logits,
                                  .ld = block->ld,
                                  .n_rows = chunk->count,
                                  .n_cols = block->count,
                                  .column = run->column + block->begin,
                                  .first = chunk->first,
                                  .targets = run->targets,
                                  .transform = run->transform,
                                  .bias = run->pieces.bias ? run->pieces.bias + block->begin : NULL,
                                  .class_weight = run->call->args->class_weight,
                                  .rows = run->pieces.rows,
                                  .row_stride = chunk->count,
                                  .parts = parts,
                                  .fresh = fresh,
                                  .soft = run->pieces.soft,
                                  .want_entropy = run->call->want_entropy,
                                  .want_argmax = run->call->want_argmax};
    LLI_LAUNCH(run, "the statistics of logits", lli_cuda_stats_launch(&stats, run->stream));
    return LL_STATUS_OK;
}

/* What finishing rows and preparing gradients are told alike. */
static lli_cuda_finish finish_args(const lli_cuda_run *run, const lli_cuda_chunk *chunk) {
    const lli_cuda_finish finish = {.call = *run->call->args,
                                    .terms = run->terms,
                                    .totals = run->pieces.totals,
                                    .targets = run->targets,
                                    .transform = run->transform,
                                    .first = chunk->first,
                                    .n_rows = chunk->count,
                                    .rows = run->pieces.rows,
                                    .row_stride = chunk->count,
                                    .soft = run->pieces.soft,
                                    .grads = run->pieces.grads,
                                    .smoothing = run->cut.smoothing,
                                    .want_entropy = run->call->want_entropy,
                                    .scaled = run->cut.scaled};
    return finish;
}

ll_status lli_cuda_finish_rows(const lli_cuda_run *run, const lli_cuda_chunk *chunk, int32_t parts) {
    if (run->group) {
        LLI_TRY(lli_cuda_exchange_chunk(run, chunk, parts));
        parts = 1;
    }
    lli_cuda_finish finish = finish_args(run, chunk);
    finish.parts = parts;
    LLI_LAUNCH(run, "finishing rows", lli_cuda_finish_launch(&finish, run->stream));
    return LL_STATUS_OK;
}

ll_status lli_cuda_prepare(const lli_cuda_run *run) {
    const lli_cuda_chunk all = {0, run->call->n_tokens};
    const lli_cuda_finish finish = finish_args(run, &all);
    if (all.count == 0) return LL_STATUS_OK;
    LLI_LAUNCH(run, "preparing gradients", lli_cuda_prepare_launch(&finish, run->stream));
    return LL_STATUS_OK;
}

ll_status lli_cuda_forward(const lli_cuda_run *run) {
    const int64_t n = run->call->n_tokens;
    lli_cuda_fused fused;
    for (int64_t first = 0; first < n; first += run->cut.forward_tokens) {
        const lli_cuda_chunk chunk = {first, lli_min(run->cut.forward_tokens, n - first)};
        if (lli_cuda_fused_takes(run, &chunk, NULL, &fused)) {
            LLI_TRY(lli_cuda_fused_gather(run, &fused));
            LLI_TRY(lli_cuda_finish_rows(run, &chunk, 1));
            continue;
        }
        const int64_t cols = lli_cuda_block_cols(&run->cut, chunk.count);
        const int32_t parts = lli_cuda_parts(&run->cut, chunk.count, cols);
        for (int64_t c = 0; c < run->cut.v; c += cols) {
            const lli_cuda_block block = {c, lli_min(cols, run->cut.v - c), run->pieces.logits, cols};
            LLI_TRY(lli_cuda_form_logits(run, &chunk, &block));
            LLI_TRY(lli_cuda_gather(run, &chunk, &block, parts, c == 0));
        }
        LLI_TRY(lli_cuda_finish_rows(run, &chunk, parts));
    }
    return LL_STATUS_OK;
}
