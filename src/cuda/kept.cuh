/* Exponentials of a canonical tile relative to its anchor (fused.h, lli_cuda_kept), and where they are kept.
 */
#ifndef LLI_CUDA_KEPT_CUH
#define LLI_CUDA_KEPT_CUH

#include "cuda/device.cuh"
#include "cuda/exp16.cuh"
#include "cuda/fused.h"

enum { kAnchorLimit = 1 << 24 }; /* anchors that are bits of a logit are beyond */

/* The anchor of the float formula; beyond it, where its sums are not used, any. */
static __device__ inline float bounded_anchor(float max) {
    return lli_softmax_anchor(fminf(fmaxf(max, -LLI_Z_FLOAT), LLI_Z_FLOAT));
}

static __device__ inline bool beyond_float(float max) {
    return !(fabsf(max) < LLI_Z_FLOAT) && max != -INFINITY;
}

/* Of a tile with the largest logit `max`. -inf, a tile that adds nothing, counts as -2^22. */
static __device__ inline int32_t kept_anchor(float max) {
    return beyond_float(max) ? (int32_t)__float_as_uint(max) : (int32_t)bounded_anchor(max);
}

static __device__ inline bool anchor_is_logit(int32_t anchor) {
    return anchor >= kAnchorLimit || anchor <= -kAnchorLimit;
}

/* e^(z - max) as exp16_of gives it, in a tile beyond the float formula; 0 where that is no number. */
static __device__ __noinline__ uint32_t exp16_of_wide(float z, float max) {
    const double p = lli_exp((double)z - (double)max);
    return p >= 0x1p-63 ? exp16_of((float)(p * 0x1p30)) : 0u;
}

/* Rows of the canonical tile; NULL: it is not kept. */
static __device__ inline uint16_t *kept_tile(const lli_cuda_kept *kept, int32_t tile) {
    const int64_t tile_codes = kept->n_rows * kTileCols;
    if (tile < kept->sum_end) return kept->in_sum + tile * tile_codes;
    if (tile < kept->w_end) return kept->in_w + (tile - kept->sum_end) * kept->w_stride;
    return tile < kept->n_tiles ? kept->in_work + (tile - kept->w_end) * tile_codes : NULL;
}

/* Where in its row the code of column c, 0 to 63, is. */
static __device__ inline int kept_place(int c) {
    return 16 * (c % 8 / 2) + 2 * (c / 8) + c % 2;
}

#endif
