#ifndef LL_CLI_BENCH_CE_GPU_H
#define LL_CLI_BENCH_CE_GPU_H

#include "core/backends.h"

typedef struct ce_gpu {
    const lli_device_memory *memory;
    void *taken[20];
    int count;
} ce_gpu;

ll_status ce_gpu_open(ce_gpu *gpu);
void ce_gpu_close(ce_gpu *gpu);
/* *device: the host's call with everything that it points to copied to the GPU. Once for a ce_gpu. */
ll_status ce_gpu_bind(ce_gpu *gpu, const ll_ce_args *host, int64_t v_total, bool loss_by_token,
                      ll_ce_args *device);
/* Waits for what is queued; *loss: the first loss of the bound call, left alone if it asked for none. */
ll_status ce_gpu_loss(const ce_gpu *gpu, const ll_ce_args *device, float *loss);

#endif
