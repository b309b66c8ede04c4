/* Clusters and registers of a role. One instruction a function, named after it. sm_90; setmaxnreg: sm_90a. */
#ifndef LLI_CUDA_PTX_CLUSTER_CUH
#define LLI_CUDA_PTX_CLUSTER_CUH

#include <stdint.h>

static __device__ inline uint32_t ptx_cluster_ctarank(void) {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

static __device__ inline void ptx_barrier_cluster_arrive(void) {
    asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
}

static __device__ inline void ptx_barrier_cluster_wait(void) {
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

/* Every warp of a warpgroup must come here. */
template <int kRegisters> static __device__ inline void ptx_setmaxnreg_inc(void) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters> static __device__ inline void ptx_setmaxnreg_dec(void) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

#endif
