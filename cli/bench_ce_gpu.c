/* Operands of a ce call on the GPU, for logitless bench: copied there once, results stay there but for the
 * loss. */
#include "bench_ce_gpu.h"

#include "core/status.h"

#include <string.h>

ll_status ce_gpu_open(ce_gpu *gpu) {
    char why[200];
    const lli_backend_library *library = lli_cuda_library(why, sizeof why);
    *gpu = (ce_gpu){0};
    LLI_REQUIRE(library, LL_STATUS_UNSUPPORTED, "the GPU: %s", why);
    gpu->memory = library->memory;
    return LL_STATUS_OK;
}

void ce_gpu_close(ce_gpu *gpu) {
    for (int i = 0; i < gpu->count; i++) gpu->memory->release(gpu->taken[i]);
    gpu->count = 0;
}

/* *device = a copy of the host's bytes; NULL for NULL. */
static ll_status copy(ce_gpu *gpu, const void *host, size_t bytes, void **device) {
    *device = NULL;
    if (!host) return LL_STATUS_OK;
    LLI_TRY(gpu->memory->take(bytes, device));
    gpu->taken[gpu->count++] = *device;
    return bytes ? gpu->memory->to_device(*device, host, bytes) : LL_STATUS_OK;
}

static ll_status copy_view(ce_gpu *gpu, ll_view *view) {
    const size_t elems = view->rows > 0 ? (size_t)((view->rows - 1) * view->row_stride + view->cols) : 0;
    return copy(gpu, view->data, elems * ll_dtype_bytes((ll_dtype)view->dtype), &view->data);
}

ll_status ce_gpu_bind(ce_gpu *gpu, const ll_ce_args *host, int64_t v_total, bool loss_by_token,
                      ll_ce_args *device) {
    const size_t n = (size_t)host->logits.rows, f = sizeof(float), n_loss = loss_by_token ? n : 1;
    *device = *host;
    const struct {
        const void *host;
        void *device; /* the address of a pointer in *device */
        size_t bytes;
    } arrays[] = {
        {host->class_weight, &device->class_weight, (size_t)v_total * f},
        {host->token_weight, &device->token_weight, n * f},
        {host->divisor, &device->divisor, sizeof(double)},
        {host->loss, &device->loss, n_loss * f},
        {host->nll, &device->nll, n * f},
        {host->lse, &device->lse, n * f},
        {host->lse_lo, &device->lse_lo, n * f},
        {host->entropy, &device->entropy, n * f},
        {host->up_loss, &device->up_loss, n_loss * f},
        {host->up_nll, &device->up_nll, n * f},
        {host->up_lse, &device->up_lse, n * f},
        {host->up_entropy, &device->up_entropy, n * f},
        {host->id_logp, &device->id_logp, n * (size_t)host->ids.cols * f},
        {host->id_rank, &device->id_rank, n * (size_t)host->ids.cols * sizeof(int64_t)},
        {host->workspace, &device->workspace, host->workspace_bytes},
    };
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) {
        void *data;
        LLI_TRY(copy(gpu, arrays[i].host, arrays[i].bytes, &data));
        memcpy(arrays[i].device, &data, sizeof data);
    }
    LLI_TRY(copy_view(gpu, &device->logits));
    LLI_TRY(copy_view(gpu, &device->target));
    LLI_TRY(copy_view(gpu, &device->ids));
    return copy_view(gpu, &device->grad_logits);
}

ll_status ce_gpu_loss(const ce_gpu *gpu, const ll_ce_args *device, float *loss) {
    LLI_TRY(gpu->memory->wait());
    return device->loss ? gpu->memory->to_host(loss, device->loss, sizeof *loss) : LL_STATUS_OK;
}
