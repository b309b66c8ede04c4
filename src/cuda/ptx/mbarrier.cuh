/* Barriers in shared memory that count arrivals and bytes. One instruction a function, named after it; an
 * address is of the shared::cta window, which also names the own block within shared::cluster. sm_90. */
#ifndef LLI_CUDA_PTX_MBARRIER_CUH
#define LLI_CUDA_PTX_MBARRIER_CUH

#include <stdint.h>

static __device__ inline void ptx_mbarrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/* Makes initialised barriers visible to the cluster and to the copy engine. */
static __device__ inline void ptx_fence_mbarrier_init(void) {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

static __device__ inline void ptx_mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

static __device__ inline void ptx_mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* True once the phase of this parity is complete; waits a while before it says false. */
static __device__ inline bool ptx_mbarrier_try_wait_parity(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n"
                 "}\n"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done != 0;
}

/* The address of the same variable in another block of the cluster. */
static __device__ inline uint32_t ptx_mapa(uint32_t address, uint32_t cta) {
    uint32_t mapped;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(cta));
    return mapped;
}

/* `barrier` from ptx_mapa. Released to the own block only: what the arrival says to the peer is that reads
 * are over, and no data. With .release.cluster every arrival would be preceded by a fence of the whole GPU.
 */
static __device__ inline void ptx_mbarrier_arrive_cluster(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* Four bytes into the shared memory of a block of the cluster, counted by a barrier there; both from
 * ptx_mapa. */
static __device__ inline void ptx_st_async_b32(uint32_t to, uint32_t value, uint32_t barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
                 "r"(value), "r"(barrier)
                 : "memory");
}

#endif
