/* Gradients: which chunks of tokens and blocks of columns are done in which order. Of each (grad_step.c),
 * from f32 logits or their exponentials,
 *
 *   logits -> dz (and its column sums) -> grad_x of the chunk += dz w, grad_w of the block += dz^T x
 *
 * grad_x is a sum over blocks of kSumCols columns whatever the budget, of which the block at hand has one or
 * two. */
#include "cuda/grad_step.h"
#include "cuda/ranks.h"

ll_status lli_cuda_clear_rest(const lli_cuda_run *run) {
    const ll_linear_ce_args *args = run->call->args;
    const int64_t v = run->call->n_tokens ? run->cut.v_real : 0, v_local = run->problem->v_local;
    if (args->grad_w.data && !(args->accumulate & LL_ACCUMULATE_W)) {
        LLI_LAUNCH(run, "clearing grad_w", lli_cuda_clear_launch(&args->grad_w, v, v_local, run->stream));
    }
    if (args->grad_bias.data && !(args->accumulate & LL_ACCUMULATE_BIAS)) {
        LLI_LAUNCH(run, "clearing grad_bias",
                   lli_cuda_clear_launch(&args->grad_bias, v, v_local, run->stream));
    }
    return LL_STATUS_OK;
}

/* grad_bias from its sums. */
static ll_status emit_bias(const lli_cuda_run *run) {
    const ll_linear_ce_args *args = run->call->args;
    const int64_t v = run->call->n_tokens ? run->cut.v : 0;
    if (!args->grad_bias.data) return LL_STATUS_OK;
    const lli_cuda_emit emit = {.sum = run->pieces.acc_bias,
                                .out = args->grad_bias.data,
                                .out_step = args->grad_bias.row_stride,
                                .n_rows = 1,
                                .n_cols = v,
                                .dtype = args->grad_bias.dtype,
                                .accumulate = (args->accumulate & LL_ACCUMULATE_BIAS) != 0};
    LLI_LAUNCH(run, "writing grad_bias", lli_cuda_emit_launch(&emit, run->stream));
    return LL_STATUS_OK;
}

static ll_status end_gradients(const lli_cuda_run *run) {
    LLI_TRY(emit_bias(run));
    for (int32_t i = 0; i < run->n_edges; i++) LLI_TRY(emit_bias(&run->edges[i].run));
    return LL_STATUS_OK;
}

/* ---- Orders ------------------------------------------------------------------------------------- */

/* Columns [begin, begin + count) of the chunk; first_block: of all that are added up in acc_x. kept: the
 * chunk's exponentials, or NULL. */
static lli_cuda_grad_step step_of(const lli_cuda_run *run, const lli_cuda_chunk *chunk, int64_t begin,
                                  int64_t count, bool first_block, float *acc_x, const lli_cuda_kept *kept) {
    return (lli_cuda_grad_step){.chunk = chunk,
                                .begin = begin,
                                .count = count,
                                .first_block = first_block,
                                .first_chunk = chunk->first == 0,
                                .last_chunk = chunk->first + chunk->count == run->call->n_tokens,
                                .acc_x = acc_x,
                                .kept = kept};
}

/* Of the block at c. */
static ll_status gradients_of(const lli_cuda_run *run, const lli_cuda_chunk *chunk, int64_t c,
                              bool first_block, float *acc_x, const lli_cuda_kept *kept) {
    const int64_t count = lli_min(run->cut.dz_cols, run->cut.v - c);
    const lli_cuda_grad_step step = step_of(run, chunk, c, count, first_block, acc_x, kept);
    return lli_cuda_take_step(run, &step);
}

/* Of a chunk: the blocks of the columns, and in a group the edges. */
static ll_status chunk_gradients(const lli_cuda_run *run, const lli_cuda_chunk *chunk) {
    for (int64_t c = 0; c < run->cut.v; c += run->cut.dz_cols) {
        LLI_TRY(gradients_of(run, chunk, c, c == 0, run->pieces.acc_x, NULL));
    }
    for (int32_t i = 0; i < run->n_edges; i++) {
        const bool first = run->cut.v == 0 && i == 0;
        LLI_TRY(gradients_of(&run->edges[i].run, chunk, 0, first, run->pieces.acc_x, NULL));
    }
    return LL_STATUS_OK;
}

/* The chunk's forward, whose logits stay for columns below kept_cols. */
static ll_status forward_kept(const lli_cuda_run *run, const lli_cuda_chunk *chunk) {
    const int64_t cols = lli_cuda_block_cols(&run->cut, chunk->count);
    const int32_t parts = lli_cuda_parts(&run->cut, chunk->count, cols);
    for (int64_t c = 0, n; c < run->cut.v; c += n) {
        const bool kept = c < run->cut.kept_cols;
        n = lli_min(cols, (kept ? lli_min(run->cut.kept_cols, run->cut.v) : run->cut.v) - c);
        const lli_cuda_block block = {c, n, kept ? run->pieces.kept + c : run->pieces.logits,
                                      kept ? run->cut.kept_cols : cols};
        LLI_TRY(lli_cuda_form_logits(run, chunk, &block));
        LLI_TRY(lli_cuda_gather(run, chunk, &block, parts, c == 0));
    }
    return lli_cuda_finish_rows(run, chunk, parts);
}

ll_status lli_cuda_one_pass(const lli_cuda_run *run) {
    const int64_t n = run->call->n_tokens, tokens = run->cut.grad_tokens;
    for (int64_t first = 0; first < n; first += tokens) {
        const lli_cuda_chunk chunk = {first, lli_min(tokens, n - first)};
        LLI_TRY(forward_kept(run, &chunk));
        LLI_TRY(lli_cuda_copy_x(run, &chunk));
        LLI_TRY(chunk_gradients(run, &chunk));
        LLI_TRY(lli_cuda_emit_x(run, &chunk, run->pieces.acc_x));
    }
    return end_gradients(run);
}

/* ---- One pass by exponentials ------------------------------------------------------------------- */

/* The memory of grad_w is free until its first sums are written: the first chunk's exponentials go there. */
static bool may_use_grad_w(const lli_cuda_run *run) {
    const ll_view *out = &run->call->args->grad_w;
    return out->data && !(run->call->args->accumulate & LL_ACCUMULATE_W) && lli_cuda_aligned(out) &&
           out->row_stride == run->cut.d && out->cols == run->cut.d;
}

/* And that of a chunk's rows of grad_x until they are written, at its end: its copy of x goes there. */
static bool may_use_grad_x(const lli_cuda_run *run, const lli_cuda_chunk *chunk) {
    const ll_view *out = &run->call->args->grad_x;
    return out->data && !(run->call->args->accumulate & LL_ACCUMULATE_X) && lli_cuda_aligned(out) &&
           out->row_stride == run->cut.d && out->cols == run->cut.d &&
           lli_cuda_padded_rows(chunk) * run->cut.element_bytes <=
               chunk->count * (int64_t)lli_dtype_bytes(out->dtype);
}

/* A chunk with a workspace cut for it. */
static lli_cuda_run run_of_chunk(const lli_cuda_run *run, const lli_cuda_chunk *chunk, bool in_w) {
    const lli_cuda_lent lent = {.w = in_w, .x = may_use_grad_x(run, chunk)};
    lli_cuda_run of_chunk = *run;
    of_chunk.cut = lli_cuda_cut_chunk(run->problem, run->config, lent);
    (void)lli_cuda_cut_carve(&of_chunk.cut, run->call->args->workspace, &of_chunk.pieces);
    if (lent.x) of_chunk.pieces.x_copy = (void *)lli_row(&run->call->args->grad_x, chunk->first);
    return of_chunk;
}

static lli_cuda_kept kept_of_chunk(const lli_cuda_run *run, int64_t n_tokens) {
    const lli_cuda_places places = lli_cuda_cut_places(run->problem, &run->cut, n_tokens);
    const ll_view *grad_w = &run->call->args->grad_w;
    return (lli_cuda_kept){.in_sum = (void *)run->pieces.acc_x,
                           .in_w = run->cut.lent.w ? (void *)lli_row(grad_w, places.w_row) : NULL,
                           .in_work = run->pieces.codes,
                           .anchors = run->pieces.anchors,
                           .w_stride = places.w_stride_bytes / (int64_t)sizeof(uint16_t),
                           .sum_end = (int32_t)places.sum_end,
                           .w_end = (int32_t)places.w_end,
                           .n_tiles = (int32_t)places.n_tiles,
                           .n_rows = n_tokens};
}

/* The chunk that starts at token `first`: the first one as large as it may be, others of about equal size, a
 * multiple of a cluster's tokens. */
static lli_cuda_chunk chunk_at(const lli_cuda_run *run, int64_t first, bool in_w) {
    const int64_t left = run->call->n_tokens - first, most = run->config->one_pass_tokens;
    const int64_t chunks = (left + most - 1) / most;
    const int64_t even = lli_min(most, lli_round_up((left + chunks - 1) / chunks, kFusedRows));
    return (lli_cuda_chunk){first, lli_min(left, in_w ? run->config->first_tokens : even)};
}

bool lli_cuda_keeps(const lli_cuda_run *run) {
    const lli_config *config = run->config;
    if (run->call->pass != LL_PASS_FORWARD_BACKWARD || !config->exponentials || !run->call->n_tokens) {
        return false;
    }
    const bool in_w = may_use_grad_w(run);
    const lli_cuda_chunk chunk = chunk_at(run, 0, in_w);
    const lli_cuda_run of_chunk = run_of_chunk(run, &chunk, in_w);
    const lli_cuda_kept kept = kept_of_chunk(&of_chunk, chunk.count);
    lli_cuda_fused fused;
    return lli_cuda_fused_takes(&of_chunk, &chunk, &kept, &fused);
}

static ll_status kept_chunk(const lli_cuda_run *run, const lli_cuda_chunk *chunk) {
    const lli_cuda_kept kept = kept_of_chunk(run, chunk->count);
    lli_cuda_fused fused;
    LLI_REQUIRE(lli_cuda_fused_takes(run, chunk, &kept, &fused), LL_STATUS_INTERNAL,
                "%s: tokens from %lld on are not taken as those before were", run->pass,
                (long long)chunk->first);
    LLI_TRY(lli_cuda_fused_gather(run, &fused));
    LLI_TRY(lli_cuda_finish_rows(run, chunk, 1));
    LLI_TRY(lli_cuda_copy_x(run, chunk));
    const lli_cuda_grad_step all = step_of(run, chunk, 0, run->cut.v, true, run->pieces.acc_x, &kept);
    bool taken;
    LLI_TRY(lli_cuda_take_all_steps(run, &all, &taken));
    for (int64_t c = 0; !taken && c < run->cut.v; c += run->cut.dz_cols) {
        LLI_TRY(gradients_of(run, chunk, c, c == 0, run->pieces.acc_x, &kept));
    }
    return lli_cuda_emit_x(run, chunk, run->pieces.acc_x);
}

ll_status lli_cuda_one_pass_kept(const lli_cuda_run *run) {
    const int64_t n = run->call->n_tokens;
    for (int64_t first = 0, count; first < n; first += count) {
        const bool in_w = first == 0 && may_use_grad_w(run);
        const lli_cuda_chunk chunk = chunk_at(run, first, in_w);
        const lli_cuda_run of_chunk = run_of_chunk(run, &chunk, in_w);
        count = chunk.count;
        LLI_TRY(kept_chunk(&of_chunk, &chunk));
    }
    return end_gradients(run);
}

/* ---- By forming the logits again ---------------------------------------------------------------- */

static ll_status tokens_outside(const lli_cuda_run *run) {
    const int64_t n = run->call->n_tokens, tokens = run->cut.grad_tokens;
    for (int64_t first = 0; first < n; first += tokens) {
        const lli_cuda_chunk chunk = {first, lli_min(tokens, n - first)};
        LLI_TRY(lli_cuda_copy_x(run, &chunk));
        LLI_TRY(chunk_gradients(run, &chunk));
        LLI_TRY(lli_cuda_emit_x(run, &chunk, run->pieces.acc_x));
    }
    return LL_STATUS_OK;
}

/* A block of columns and all chunks of tokens. */
static ll_status block_gradients(const lli_cuda_run *run, int64_t c, bool first_block) {
    const int64_t n = run->call->n_tokens, tokens = run->cut.grad_tokens;
    for (int64_t first = 0; first < n; first += tokens) {
        const lli_cuda_chunk chunk = {first, lli_min(tokens, n - first)};
        LLI_TRY(lli_cuda_copy_x(run, &chunk));
        LLI_TRY(
            gradients_of(run, &chunk, c, first_block, run->pieces.acc_x + first * run->cut.d_padded, NULL));
    }
    return LL_STATUS_OK;
}

static ll_status columns_outside(const lli_cuda_run *run) {
    for (int64_t c = 0; c < run->cut.v; c += run->cut.dz_cols) LLI_TRY(block_gradients(run, c, c == 0));
    for (int32_t i = 0; i < run->n_edges; i++) {
        LLI_TRY(block_gradients(&run->edges[i].run, 0, run->cut.v == 0 && i == 0));
    }
    const lli_cuda_chunk all = {0, run->call->n_tokens};
    return all.count ? lli_cuda_emit_x(run, &all, run->pieces.acc_x) : LL_STATUS_OK;
}

ll_status lli_cuda_recompute(const lli_cuda_run *run) {
    LLI_TRY(run->cut.columns_outside ? columns_outside(run) : tokens_outside(run));
    return end_gradients(run);
}
