/* Queues the gradients' products on Hopper (fused.h): which ones the kernel takes, and how the copy engine
 * finds their operands. What it does not take goes to cuBLASLt (gradient.c): the same bits. */
#include "cuda/fused.h"
#include "cuda/run.h"

enum {
    kLeastTokens = 256, /* fewer fill a part of a tile's rows only */
    kCountLimit = 1 << 30,
    kRowGroup = 4 /* 1024 rows or columns of dz: 16 MiB over 8192 of k, which the L2 cache keeps */
};

/* Rows of k one behind the other, `cols` elements of the other index along each. */
static bool turned(const lli_cuda_run *run, const void *data, int64_t k, int64_t cols, int64_t row_stride,
                   uint32_t box_k, uint32_t box_cols, CUtensorMap *map) {
    const lli_cuda_box of = {.data = data,
                             .rank = 3,
                             .sizes = {kGradBlock, (uint64_t)k, (uint64_t)cols / kGradBlock},
                             .strides = {(uint64_t)row_stride * 2, (uint64_t)kGradBlock * 2},
                             .box = {kGradBlock, box_k, box_cols / kGradBlock}};
    return lli_cuda_map(run->device, &of, map);
}

static bool straight(const lli_cuda_run *run, const void *data, int64_t rows, int64_t k, int64_t row_stride,
                     CUtensorMap *map) {
    const lli_cuda_box of = {.data = data,
                             .rank = 2,
                             .sizes = {(uint64_t)k, (uint64_t)rows},
                             .strides = {(uint64_t)row_stride * 2},
                             .box = {kGradBlock, kFusedMapRows}};
    return lli_cuda_map(run->device, &of, map);
}

static bool set_products(const lli_cuda_run *run, const lli_cuda_grad_job *job,
                         lli_cuda_grad_products *products) {
    const ll_view *w = &run->call->args->w;
    const int64_t rows = lli_round_up(job->chunk->count, kGradBlock), dz_ld = run->cut.dz_cols;
    const int64_t group = (job->chunk->count + kFusedRows - 1) / kFusedRows;
    lli_cuda_grad_product *x = &products->of[0], *of_w = &products->of[1];
    *x = (lli_cuda_grad_product){.c = job->grad_x,
                                 .c_ld = run->cut.d_padded,
                                 .n_rows = job->chunk->count,
                                 .group_rows = (uint32_t)lli_min(group, kRowGroup),
                                 .form = job->add_x ? kGradAdd : kGradOverwrite};
    *of_w = (lli_cuda_grad_product){.c = job->grad_w,
                                    .c_ld = job->grad_w_ld,
                                    .n_rows = job->count,
                                    .group_rows = kRowGroup,
                                    .form = job->form_w};
    return (!job->grad_x || (straight(run, run->pieces.dz, rows, dz_ld, dz_ld, &x->a) &&
                             turned(run, lli_row(w, job->begin), job->count, run->cut.d, w->row_stride,
                                    kGradHalfDepth, kFusedCols, &x->b))) &&
           (!job->grad_w ||
            (turned(run, run->pieces.dz, rows, dz_ld, dz_ld, kGradBlock, kFusedMapRows, &of_w->a) &&
             turned(run, run->pieces.x_copy, rows, run->cut.d, run->cut.d_padded, kGradHalfDepth, kFusedCols,
                    &of_w->b)));
}

/* False where tiles, their stages or the warps that write them would not be counted in 32 bits. */
static bool set_blocks(const lli_cuda_run *run, const lli_cuda_grad_job *job,
                       lli_cuda_grad_products *products) {
    const int64_t n = job->chunk->count, d = run->cut.d, blocks = (job->count + kSumCols - 1) / kSumCols;
    const int64_t rest = job->count - (blocks - 1) * kSumCols, ready = (job->ready + kSumCols - 1) / kSumCols;
    const lli_cuda_grad_block *block = &products->block, *last = &products->last;
    products->block = lli_cuda_grad_block_of(n, kSumCols, d, job->grad_x != NULL, job->grad_w != NULL);
    products->last = lli_cuda_grad_block_of(n, rest, d, job->grad_x != NULL, job->grad_w != NULL);
    const int64_t deepest = lli_max(block->depth[0], block->depth[1]);
    const int64_t tiles = (blocks - 1) * block->tiles + last->tiles;
    products->n_blocks = (uint32_t)blocks;
    products->ready = (uint32_t)(job->kept ? lli_min(ready, blocks) : blocks);
    products->clusters = (uint32_t)lli_min(run->device->clusters, tiles);
    return tiles > 0 && tiles * lli_max(deepest, kGradTileWarps) <= kCountLimit &&
           blocks * (int64_t)block->pieces <= kCountLimit;
}

bool lli_cuda_grad_takes(const lli_cuda_run *run, const lli_cuda_grad_job *job,
                         lli_cuda_grad_products *products) {
    const ll_view *w = &run->call->args->w;
    *products = (lli_cuda_grad_products){.queue = &run->pieces.totals->queue, .dz = job->dz};
    if (job->kept) products->kept = *job->kept;
    return run->device->clusters > 0 && job->chunk->count >= kLeastTokens && run->cut.d % kGradBlock == 0 &&
           job->count > 0 &&
           (job->count <= kSumCols || run->cut.dz_cols >= 2 * (int64_t)kSumCols ||
            run->cut.dz_cols >= job->count) &&
           (!job->grad_x || lli_cuda_readable(w->data, w->row_stride)) && set_blocks(run, job, products) &&
           set_products(run, job, products);
}

ll_status lli_cuda_grad_multiply(const lli_cuda_run *run, const lli_cuda_grad_products *products) {
    LLI_LAUNCH(run, "the gradients' products", lli_cuda_grad_launch(products, run->stream));
    return LL_STATUS_OK;
}
