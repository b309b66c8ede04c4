/* Barriers of a block that are named by a number. One instruction a function, named after it. */
#ifndef LLI_CUDA_PTX_NAMED_BARRIER_CUH
#define LLI_CUDA_PTX_NAMED_BARRIER_CUH

/* Arrives and waits until `threads` have arrived. */
static __device__ inline void ptx_barrier_sync(int name, int threads) {
    asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

/* Arrives and goes on. */
static __device__ inline void ptx_barrier_arrive(int name, int threads) {
    asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

#endif
