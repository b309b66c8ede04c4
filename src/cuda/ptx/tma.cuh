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

/* How long the L2 cache is to keep what a load brings. */
static __device__ inline uint64_t ptx_createpolicy_evict_first(void) {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

static __device__ inline uint64_t ptx_createpolicy_evict_last(void) {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

/* Between accesses by the copy engine and by ordinary instructions, of memory that both use. */
static __device__ inline void ptx_fence_proxy_async(void) {
    asm volatile("fence.proxy.async;" ::: "memory");
}

static __device__ inline void ptx_tma_load_2d(uint32_t to, const CUtensorMap *map, int32_t inner,
                                              int32_t outer, uint32_t barrier, uint64_t policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
                 "l"(map), "r"(inner), "r"(outer), "r"(barrier), "l"(policy)
                 : "memory");
}

/* The same box into every block of the cluster whose bit is set, each at the same offset and counted by the
 * barrier at the same offset. */
static __device__ inline void ptx_tma_load_2d_multicast(uint32_t to, const CUtensorMap *map, int32_t inner,
                                                        int32_t outer, uint32_t barrier, uint16_t ctas,
                                                        uint64_t policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(to),
                 "l"(map), "r"(inner), "r"(outer), "r"(barrier), "h"(ctas), "l"(policy)
                 : "memory");
}

static __device__ inline void ptx_tma_load_3d(uint32_t to, const CUtensorMap *map, int32_t inner,
                                              int32_t middle, int32_t outer, uint32_t barrier,
                                              uint64_t policy) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
                 "l"(map), "r"(inner), "r"(middle), "r"(outer), "r"(barrier), "l"(policy)
                 : "memory");
}

static __device__ inline void ptx_tma_load_3d_multicast(uint32_t to, const CUtensorMap *map, int32_t inner,
                                                        int32_t middle, int32_t outer, uint32_t barrier,
                                                        uint16_t ctas, uint64_t policy) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6, %7;" ::"r"(to),
                 "l"(map), "r"(inner), "r"(middle), "r"(outer), "r"(barrier), "h"(ctas), "l"(policy)
                 : "memory");
}

#endif
