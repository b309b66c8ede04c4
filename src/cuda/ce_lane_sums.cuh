/* The row state of core/softmax.h in a lane's registers: what adds to it makes no calls, since a call that
 * takes it by address would put it into local memory, and wait for it there. */
#ifndef LLI_CUDA_CE_LANE_SUMS_CUH
#define LLI_CUDA_CE_LANE_SUMS_CUH

#include "cuda/device.cuh"

/* A lane's sums of its tiles: lli_softmax, but for u where nobody asks for the entropy: registers are what
 * this kernel has fewest of. */
template <bool kEntropy> struct lane_sums {
    int64_t s[3], u[kEntropy ? 3 : 1];
    int32_t top;

    __device__ inline lli_softmax whole() const {
        lli_softmax row = {.top = top};
#pragma unroll
        for (int i = 0; i < 3; i++) {
            row.s[i] = s[i];
            if (kEntropy) row.u[i] = u[i];
        }
        return row;
    }
    __device__ inline void set(const lli_softmax &row) {
#pragma unroll
        for (int i = 0; i < 3; i++) {
            s[i] = row.s[i];
            if (kEntropy) u[i] = row.u[i];
        }
        top = row.top;
    }
    /* Hangs the window one limb higher (core/softmax.c). */
    __device__ inline void hang_higher() {
        s[0] = s[1];
        s[1] = s[2];
        s[2] = 0;
        if (!kEntropy) return;
        u[0] = u[1] + 32 * s[0];
        u[1] = u[2] + 32 * s[1];
        u[2] = 0;
    }
    /* A tile of the float formula: lli_softmax_add without calls, whose arguments would lie in memory. */
    __device__ inline void add_tile(int32_t k, int64_t tile_s, int64_t tile_u) {
        const lli_softmax tile = lli_softmax_of_tile(k, tile_s, tile_u);
        const int32_t tile_top = tile.top;
        int32_t drop = 0; /* limbs by which the tile hangs lower than the row */
        if (top != tile_top) {
            if (top == LLI_TOP_NAN) return;
            if (top != LLI_TOP_EMPTY) {
                for (int32_t n = tile_top - top < 3 ? tile_top - top : 3; n > 0; n--) hang_higher();
                drop = top > tile_top ? top - tile_top : 0;
            }
            top = top > tile_top ? top : tile_top;
        }
        const int64_t low = tile.s[1], high = tile.s[2];
        const int64_t u_low = tile.u[1] + 32 * drop * low, u_high = tile.u[2] + 32 * drop * high;
        if (drop == 0) {
            s[1] += low;
            s[2] += high;
            if (kEntropy) u[1] += u_low, u[2] += u_high;
        } else if (drop == 1) {
            s[0] += low;
            s[1] += high;
            if (kEntropy) u[0] += u_low, u[1] += u_high;
        } else if (drop == 2) {
            s[0] += high;
            if (kEntropy) u[0] += u_high;
        }
    }
};

#endif
