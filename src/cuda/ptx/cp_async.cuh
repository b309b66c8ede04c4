/* Copies of 16 bytes from global into shared memory, in groups. One instruction a function, named after it.
 * sm_80.
 */
#ifndef LLI_CUDA_PTX_CP_ASYNC_CUH
#define LLI_CUDA_PTX_CP_ASYNC_CUH

#include <stdint.h>

/* The first `bytes` of 16, and zeros. Both addresses on 16 bytes. */
static __device__ inline void ptx_cp_async_cg_16(uint32_t to, const void *from, uint32_t bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

/* The thread's copies since the last group are a group, an empty one too. */
static __device__ inline void ptx_cp_async_commit_group(void) {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits for all of the thread's groups but the last kLater. */
template <int kLater> static __device__ inline void ptx_cp_async_wait_group(void) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
}

#endif
