/* Special registers, read anew at every call: the compiler keeps threadIdx and what follows from it in
 * registers, which a warpgroup that is full of sums does not have. One instruction a function, named after
 * it. */
#ifndef LLI_CUDA_PTX_SPECIAL_CUH
#define LLI_CUDA_PTX_SPECIAL_CUH

#include <stdint.h>

static __device__ inline uint32_t ptx_tid_x(void) {
    uint32_t value;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(value));
    return value;
}

static __device__ inline uint32_t ptx_ctaid_x(void) {
    uint32_t value;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(value));
    return value;
}

#endif
