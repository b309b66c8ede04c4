/* Counts in global memory by which blocks of a launch wait for one another. One instruction a function, named
 * after it. sm_70. */
#ifndef LLI_CUDA_PTX_COUNTER_CUH
#define LLI_CUDA_PTX_COUNTER_CUH

#include <stdint.h>

/* What was written before the addition is there for who acquires the count. */
static __device__ inline void ptx_red_release_gpu_add_u32(uint32_t *count, uint32_t n) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(count), "r"(n) : "memory");
}

static __device__ inline uint32_t ptx_ld_acquire_gpu_u32(const uint32_t *count) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(count) : "memory");
    return value;
}

#endif
