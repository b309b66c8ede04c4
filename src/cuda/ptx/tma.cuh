/* The bulk tensor copy engine: a box of a matrix from global into shared memory, completing on an mbarrier.
 * One instruction a function, named after it. `map` is a kernel parameter (__grid_constant__), coordinates
 * count elements, the inner one first. sm_90. */
#ifndef LLI_CUDA_PTX_TMA_CUH
#define LLI_CUDA_PTX_TMA_CUH

#include <cuda.h>
#include <stdint.h>

static __device__ inline void ptx_prefetch_tensormap(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

static __device__ inline void ptx_tma_load_2d(uint32_t to, const CUtensorMap *map, int32_t inner,
                                              int32_t outer, uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                 "l"(map), "r"(inner), "r"(outer), "r"(barrier)
                 : "memory");
}

/* The same box into every block of the cluster whose bit is set, each at the same offset and counted by the
 * barrier at the same offset. */
static __device__ inline void ptx_tma_load_2d_multicast(uint32_t to, const CUtensorMap *map, int32_t inner,
                                                        int32_t outer, uint32_t barrier, uint16_t ctas) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(inner), "r"(outer), "r"(barrier), "h"(ctas)
        : "memory");
}

#endif
