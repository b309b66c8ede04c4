/* Given logits in the CPU micro-kernels: between their dtype and f32, the largest, and counting, written once
 * over a vector vocabulary and built per instruction set; included after micro_row.h. */
#ifndef LLI_CPU_MICRO_GIVEN_H
#define LLI_CPU_MICRO_GIVEN_H

#include "core/dtype.h"

#include <string.h>

static void widen(const void *from, int32_t dtype, int64_t n, float *to) {
    const uint16_t *half = from;
    int64_t v = 0;
    if (dtype == LL_DTYPE_F32) {
        memcpy(to, from, sizeof(float) * (size_t)n);
        return;
    }
    if (dtype == LL_DTYPE_BF16) {
        for (; v + kLanes <= n; v += kLanes) v_store(to + v, v_load_bf16(half + v));
    } else {
        for (; v + kLanes <= n; v += kLanes) v_store(to + v, v_load_f16(half + v));
    }
    for (; v < n; v++) to[v] = lli_load(from, dtype, v);
}

static void narrow(const float *from, int64_t n, void *to, int32_t dtype) {
    uint16_t *half = to;
    int64_t v = 0;
    if (dtype == LL_DTYPE_F32) {
        memcpy(to, from, sizeof(float) * (size_t)n);
        return;
    }
    if (dtype == LL_DTYPE_BF16) {
        for (; v + kLanes <= n; v += kLanes) v_store_bf16(half + v, v_load(from + v));
    } else {
        for (; v + kLanes <= n; v += kLanes) v_store_f16(half + v, v_load(from + v));
    }
    for (; v < n; v++) lli_store(to, dtype, v, from[v]);
}

static int64_t count_greater(const float *z, int64_t n, float than) {
    const vf limit = v_set(than);
    int64_t count = 0, v = 0;
    for (; v + kLanes <= n; v += kLanes) count += v_count_gt(v_load(z + v), limit);
    for (; v < n; v++) count += z[v] > than;
    return count;
}

#endif
