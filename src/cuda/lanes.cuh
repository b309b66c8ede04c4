/* Sums and maxima over the lanes of a warp. Integers, so the order does not matter. */
#ifndef LLI_CUDA_LANES_CUH
#define LLI_CUDA_LANES_CUH

#include "cuda/device.cuh"

static __device__ const unsigned kAllLanes = 0xffffffffu;

/* sum_lanes for 0 <= value < 2^(20 kPieces). Sums of 20 bits, because the warp's adder takes 32 and is one
 * instruction, where shuffles are ten and as many additions. */
template <int kPieces> static __device__ inline int64_t sum_lanes_narrow(int64_t value) {
    int64_t sum = 0;
#pragma unroll
    for (int i = 0; i < kPieces; i++) {
        const uint32_t piece = (uint32_t)(value >> (20 * i)) & 0xfffffu;
        sum += (int64_t)__reduce_add_sync(kAllLanes, piece) << (20 * i);
    }
    return sum;
}

/* lli_softmax_raise for rows that lie in registers: no call. */
static __device__ inline void raise_in_line(lli_softmax *row, int32_t top) {
    if (row->top != LLI_TOP_EMPTY) { /* its limbs are 0 */
        const int64_t rise = (int64_t)top - row->top;
        for (int n = rise < 3 ? (int)rise : 3; n > 0; n--) hang_higher(row);
    }
    row->top = top;
}

/* sum_lanes_softmax of device.cuh for rows that lie in registers; limbs are below 2^60 at any vocabulary. */
static __device__ inline void sum_lanes_row(lli_softmax *row, bool entropy) {
    const int32_t top = __reduce_max_sync(kAllLanes, row->top);
    raise_in_line(row, top);
#pragma unroll
    for (int i = 0; i < 3; i++) {
        row->s[i] = sum_lanes_narrow<3>(row->s[i]);
        if (entropy) row->u[i] = sum_lanes_narrow<3>(row->u[i]);
    }
}

/* The larger of two and, if they are equal, the lower position; -1 is none. */
static __device__ inline void keep_larger(float *max, int32_t *at, float other, int32_t other_at) {
    if (other_at >= 0 && (*at < 0 || other > *max || (other == *max && other_at < *at))) {
        *max = other;
        *at = other_at;
    }
}

/* Every lane gets the largest of all lanes. */
static __device__ inline void max_lanes(float *max, int32_t *at) {
    for (int mask = 16; mask > 0; mask /= 2) {
        const float other = __shfl_xor_sync(kAllLanes, *max, mask);
        keep_larger(max, at, other, __shfl_xor_sync(kAllLanes, *at, mask));
    }
}

#endif
