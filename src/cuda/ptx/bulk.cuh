/* Bulk copies and stores to other blocks' shared memory. One instruction a function, named after it. sm_90. */
#ifndef LLI_CUDA_PTX_BULK_CUH
#define LLI_CUDA_PTX_BULK_CUH

#include <stdint.h>

/* `bytes` (a multiple of 16) from global into the own block's shared memory, both on 16 bytes; `barrier` counts
 * them. */
static __device__ inline void ptx_cp_async_bulk(uint32_t to, const void *from, uint32_t bytes,
                                                uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

/* `to` from ptx_mapa. */
static __device__ inline void ptx_st_shared_cluster_u32(uint32_t to, uint32_t value) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

#endif
