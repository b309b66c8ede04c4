/* Bulk copies and stores to other blocks' shared memory. One instruction a function, named after it. sm_90.
 */
#ifndef LLI_CUDA_PTX_BULK_CUH
#define LLI_CUDA_PTX_BULK_CUH

#include <stdint.h>

/* `bytes` (a multiple of 16) from global into the own block's shared memory, both on 16 bytes; `barrier`
 * counts them. */
static __device__ inline void ptx_cp_async_bulk(uint32_t to, const void *from, uint32_t bytes,
                                                uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

/* 16 bytes into another block's shared memory, counted by a barrier of that block; both addresses from
 * ptx_mapa. */
static __device__ inline void ptx_st_async_v4(uint32_t to, uint4 value, uint32_t barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
            to),
        "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(barrier)
        : "memory");
}

#endif
