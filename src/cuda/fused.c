/* Queues the forward without logits in memory (fused.h): the shape of its grid, and how the copy engine finds
 * the operands. */
#include "cuda/fused.h"
#include "cuda/run.h"

#include <string.h>

enum {
    kMapBoxLimit = 256,
    kStepLimit = 1 << 30,
    kGroupRows =
        8 /* 2048 rows of x: 16 MiB at n_hidden 4096, which the L2 cache keeps beside the columns at hand */
};

/* cuTensorMapEncodeTiled, found at run time: the library does not link the driver. */
typedef CUresult encode_fn(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                           const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                           CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

_Static_assert((int)kFusedMapRows <= (int)kMapBoxLimit && (int)kFusedMapCols <= (int)kMapBoxLimit,
               "a box has at most 256 rows");

ll_status lli_cuda_fused_open(lli_cuda_device *device) {
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    int multiprocessors = 0;
    int status =
        (int)cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device->device);
    if (!status) {
        status = (int)cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &device->encode_map, 12000,
                                                       cudaEnableDefault, &found);
    }
    if (!status) status = lli_cuda_load_fused();
    if (!status) status = lli_cuda_load_fused_dz();
    if (!status) status = lli_cuda_load_kept_dz();
    if (!status) status = lli_cuda_load_grad();
    if (status) return lli_cuda_fail(status, "ll_plan_create", "loading the kernels for sm_90a");
    LLI_REQUIRE(found == cudaDriverEntryPointSuccess && device->encode_map, LL_STATUS_UNSUPPORTED,
                "ll_plan_create: the driver has no cuTensorMapEncodeTiled");
    device->clusters = multiprocessors / 2;
    return LL_STATUS_OK;
}

/* ---- Shape -------------------------------------------------------------------------------------- */

static int64_t common_divisor(int64_t a, int64_t b) {
    while (b) {
        const int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* Tiles of n_rows by n_cols on so many clusters. False where stages would not be counted in 32 bits. */
static bool set_tiles(const lli_cuda_run *run, int64_t n_rows, int64_t n_cols, lli_cuda_tiles *tiles) {
    const int64_t rows = (n_rows + kFusedRows - 1) / kFusedRows,
                  cols = (n_cols + kFusedCols - 1) / kFusedCols;
    tiles->row_blocks = (uint32_t)rows;
    tiles->col_blocks = (uint32_t)cols;
    tiles->depth_blocks = (uint32_t)((run->cut.d + kFusedMapDepth - 1) / kFusedMapDepth);
    tiles->group_rows = (uint32_t)lli_min(rows, kGroupRows);
    tiles->clusters = (uint32_t)lli_min(run->device->clusters, rows * cols);
    return rows * cols * tiles->depth_blocks <= kStepLimit;
}

/* As many clusters as have slots. */
static bool set_slots(const lli_cuda_run *run, lli_cuda_fused *fused) {
    lli_cuda_tiles *tiles = &fused->tiles;
    const int64_t last_block = (int64_t)((tiles->row_blocks - 1) / tiles->group_rows) * tiles->group_rows;
    const int64_t last_row = last_block * kFusedRows;
    for (; tiles->clusters > 0; tiles->clusters--) {
        const int64_t workers = 2 * (int64_t)tiles->clusters;
        const int64_t stride = common_divisor(workers, tiles->group_rows);
        const int64_t last_stride = common_divisor(workers, tiles->row_blocks - last_block);
        const int64_t parts = workers / stride, last_parts = workers / last_stride;
        const int64_t slots = parts * last_row + last_parts * (fused->n_rows - last_row);
        if (slots * (int64_t)sizeof(lli_cuda_slot) > run->cut.block_elems * (int64_t)sizeof(float)) continue;
        fused->stride = (uint32_t)stride;
        fused->last_stride = (uint32_t)last_stride;
        fused->parts = (int32_t)parts;
        fused->last_parts = (int32_t)last_parts;
        fused->last_row = last_row;
        return true;
    }
    return false;
}

/* ---- Operands ----------------------------------------------------------------------------------- */

bool lli_cuda_readable(const void *data, int64_t row_stride) {
    const int64_t row_bytes = row_stride * 2;
    return (uintptr_t)data % 16 == 0 && row_bytes % 16 == 0 && row_bytes > 0 && row_bytes < (int64_t)1 << 40;
}

bool lli_cuda_map(const lli_cuda_device *device, const lli_cuda_box *of, CUtensorMap *map) {
    const uint32_t steps[3] = {1, 1, 1};
    encode_fn *encode;
    memcpy(&encode, &device->encode_map, sizeof encode);
    /* the address is only read from; the driver's type has no const */
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, of->rank, (void *)(uintptr_t)of->data, of->sizes,
                  of->strides, of->box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

static bool describe(const lli_cuda_run *run, const void *rows, int64_t n_rows, int64_t row_stride,
                     uint32_t box_rows, CUtensorMap *map) {
    const lli_cuda_box of = {.data = rows,
                             .rank = 2,
                             .sizes = {(uint64_t)run->cut.d, (uint64_t)n_rows},
                             .strides = {(uint64_t)row_stride * 2},
                             .box = {kFusedMapDepth, box_rows}};
    return lli_cuda_map(run->device, &of, map);
}

/* The operands of the chunk's tokens and of columns [begin, begin + count). */
static bool set_operands(const lli_cuda_run *run, const lli_cuda_chunk *chunk, int64_t begin, int64_t count,
                         lli_cuda_tiles *tiles) {
    const ll_view *x = &run->call->args->x, *w = &run->call->args->w;
    return run->device->clusters > 0 && count > 0 && lli_cuda_readable(x->data, x->row_stride) &&
           lli_cuda_readable(w->data, w->row_stride) && set_tiles(run, chunk->count, count, tiles) &&
           describe(run, lli_row(x, chunk->first), chunk->count, x->row_stride, kFusedMapRows, &tiles->x) &&
           describe(run, lli_row(w, begin), count, w->row_stride, kFusedMapCols, &tiles->w);
}

bool lli_cuda_fused_takes(const lli_cuda_run *run, const lli_cuda_chunk *chunk, const lli_cuda_kept *kept,
                          lli_cuda_fused *fused) {
    *fused = (lli_cuda_fused){.first = chunk->first,
                              .n_rows = chunk->count,
                              .n_cols = run->cut.v,
                              .column = run->column,
                              .targets = run->targets,
                              .temperature = run->transform.temperature,
                              .bias = run->pieces.bias,
                              .slots = (lli_cuda_slot *)(void *)run->pieces.logits,
                              .rows = run->pieces.rows,
                              .want_argmax = run->call->want_argmax};
    if (kept) fused->kept = *kept;
    return set_operands(run, chunk, 0, run->cut.v, &fused->tiles) && set_slots(run, fused);
}

ll_status lli_cuda_fused_gather(const lli_cuda_run *run, const lli_cuda_fused *fused) {
    LLI_LAUNCH(run, "products and statistics", lli_cuda_fused_launch(fused, run->stream));
    return LL_STATUS_OK;
}

bool lli_cuda_fused_dz_takes(const lli_cuda_run *run, const lli_cuda_chunk *chunk, const lli_cuda_dz *dz,
                             lli_cuda_fused_dz *fused) {
    const bool plain = lli_cuda_dz_plain(dz) && !dz->bias_parts;
    *fused = (lli_cuda_fused_dz){.dz = *dz, .want_gamma = run->call->args->up_entropy != NULL};
    return plain && set_operands(run, chunk, dz->column - run->column, dz->n_cols, &fused->tiles);
}

ll_status lli_cuda_fused_form_dz(const lli_cuda_run *run, const lli_cuda_fused_dz *fused) {
    LLI_LAUNCH(run, "products and the gradients of logits", lli_cuda_fused_dz_launch(fused, run->stream));
    return LL_STATUS_OK;
}
