/* Sums and maxima over the lanes of a warp. Integers, so the order does not matter. */
#ifndef LLI_CUDA_LANES_CUH
#define LLI_CUDA_LANES_CUH

#include "cuda/device.cuh"

static __device__ const unsigned kAllLanes = 0xffffffffu;

static __device__ inline int64_t sum_lanes(int64_t value) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
        value += (int64_t)__shfl_xor_sync(kAllLanes, (unsigned long long)value, mask);
    }
    return value;
}

/* Every lane gets the sum of all lanes' states: hung at one height, limbs add up. */
static __device__ inline void sum_states(bool entropy, lli_softmax *row) {
    lli_softmax_raise(row, __reduce_max_sync(kAllLanes, row->top));
#pragma unroll
    for (int i = 0; i < 3; i++) {
        row->s[i] = sum_lanes(row->s[i]);
        if (entropy) row->u[i] = sum_lanes(row->u[i]);
    }
}

/* Every lane gets the largest and, among equal ones, the lowest position; -1 is none. */
static __device__ inline void max_lanes(float *max, int32_t *at) {
    for (int mask = 16; mask > 0; mask /= 2) {
        const float other = __shfl_xor_sync(kAllLanes, *max, mask);
        const int32_t other_at = __shfl_xor_sync(kAllLanes, *at, mask);
        if (other_at >= 0 && (*at < 0 || other > *max || (other == *max && other_at < *at))) {
            *max = other;
            *at = other_at;
        }
    }
}

#endif
