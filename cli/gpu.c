/* See gpu.h. A slot of device memory for each argument, as large as the largest call so far. */
#include "gpu.h"

#include "core/backends.h"
#include "core/dtype.h"

#include <stdlib.h>
#include <string.h>

typedef enum slot_name {
    SLOT_X,
    SLOT_W,
    SLOT_BIAS,
    SLOT_TARGET,
    SLOT_CLASS_WEIGHT,
    SLOT_DIVISOR,
    SLOT_ARGMAX,
    SLOT_SUMS,
    SLOT_GRAD_X,
    SLOT_GRAD_W,
    SLOT_GRAD_BIAS,
    SLOT_FLOATS,
    kSlots = SLOT_FLOATS + 11
} slot_name;

typedef struct slot {
    void *device;
    size_t room_bytes;
    const void *seen; /* host memory that is on the device already */
    void *result;     /* where the bound call wants its result; NULL: an input, or not given */
    size_t result_bytes;
} slot;

struct cli_gpu {
    const lli_device_memory *memory;
    int64_t v_total, ignore_index;
    bool loss_by_token;
    void *workspace;
    size_t workspace_bytes;
    slot slots[kSlots];
};

bool cli_gpu_wanted(const ll_plan *plan) {
    static const char prefix[] = "linear_ce_cuda";
    return strncmp(ll_plan_kernel(plan), prefix, sizeof prefix - 1) == 0;
}

ll_status cli_gpu_use(int32_t rank) {
    char why[200];
    const lli_backend_library *library = lli_cuda_library(why, sizeof why);
    LLI_REQUIRE(library, LL_STATUS_UNSUPPORTED, "the GPU: %s", why);
    const int32_t count = library->memory->count();
    return count ? library->memory->use(rank % count) : LL_STATUS_OK; /* the plan says that there is none */
}

ll_status cli_gpu_open(const ll_plan_desc *desc, size_t workspace_bytes, cli_gpu **result) {
    char why[200];
    const lli_backend_library *library = lli_cuda_library(why, sizeof why);
    *result = NULL;
    LLI_REQUIRE(library, LL_STATUS_UNSUPPORTED, "the GPU: %s", why);
    cli_gpu *gpu = calloc(1, sizeof *gpu);
    LLI_REQUIRE(gpu, LL_STATUS_MEMORY, "out of memory for the GPU's operands");
    gpu->memory = library->memory;
    gpu->v_total = desc->v_total;
    gpu->ignore_index = desc->loss ? desc->loss->ignore_index : -100;
    gpu->loss_by_token = desc->loss && desc->loss->reduction == LL_REDUCTION_NONE;
    gpu->workspace_bytes = workspace_bytes;
    const ll_status status = gpu->memory->take(workspace_bytes, &gpu->workspace);
    if (status != LL_STATUS_OK) {
        cli_gpu_close(gpu);
        return status;
    }
    *result = gpu;
    return LL_STATUS_OK;
}

void cli_gpu_close(cli_gpu *gpu) {
    if (!gpu) return;
    for (int i = 0; i < kSlots; i++) gpu->memory->release(gpu->slots[i].device);
    gpu->memory->release(gpu->workspace);
    free(gpu);
}

/* Room of at least `bytes` in a slot. */
static ll_status reserve(cli_gpu *gpu, slot *s, size_t bytes) {
    if (s->device && bytes <= s->room_bytes) return LL_STATUS_OK;
    gpu->memory->release(s->device);
    *s = (slot){0};
    LLI_TRY(gpu->memory->take(bytes, &s->device));
    s->room_bytes = bytes;
    return LL_STATUS_OK;
}

/* An input; `keeps`: what lies there does not change while its address stays. */
static ll_status put_input(cli_gpu *gpu, int name, const void *host, size_t bytes, bool keeps,
                           void **device) {
    slot *s = &gpu->slots[name];
    s->result = NULL;
    *device = NULL;
    if (!host) return LL_STATUS_OK;
    LLI_TRY(reserve(gpu, s, bytes));
    *device = s->device;
    if (keeps && s->seen == host) return LL_STATUS_OK;
    s->seen = keeps ? host : NULL;
    return bytes ? gpu->memory->to_device(s->device, host, bytes) : LL_STATUS_OK;
}

/* A result; copied in first, because it may be added to, and because the gaps between rows come back too. */
static ll_status put_result(cli_gpu *gpu, int name, void *host, size_t bytes, void **device) {
    LLI_TRY(put_input(gpu, name, host, bytes, false, device));
    gpu->slots[name].result = host;
    gpu->slots[name].result_bytes = bytes;
    return LL_STATUS_OK;
}

static size_t view_bytes(const ll_view *view) {
    if (!view->data || view->rows == 0) return 0;
    return (size_t)((view->rows - 1) * view->row_stride + view->cols) * ll_dtype_bytes((ll_dtype)view->dtype);
}

static ll_status check_targets(const cli_gpu *gpu, const ll_view *target) {
    for (int64_t i = 0; target->data && i < target->rows; i++) {
        const int64_t y = lli_id(target, i);
        LLI_REQUIRE(y == gpu->ignore_index || (y >= 0 && y < gpu->v_total), LL_STATUS_INVALID_ARG,
                    "target[%lld] is %lld, want 0 .. %lld or ignore_index %lld", (long long)i, (long long)y,
                    (long long)(gpu->v_total - 1), (long long)gpu->ignore_index);
    }
    return LL_STATUS_OK;
}

/* Arrays of one f32 a token. The saved results are inputs of a backward, which asks for gradients alone. */
static ll_status bind_floats(cli_gpu *gpu, const ll_linear_ce_args *host, ll_linear_ce_args *device) {
    const size_t n = (size_t)host->x.rows * sizeof(float);
    const size_t n_loss = gpu->loss_by_token ? n : sizeof(float);
    const struct {
        const float *host;
        void **device;
        size_t bytes;
        bool result;
    } floats[] = {
        {host->loss, (void **)&device->loss, n_loss, true},
        {host->nll, (void **)&device->nll, n, true},
        {host->lse, (void **)&device->lse, n, true},
        {host->lse_lo, (void **)&device->lse_lo, n, true},
        {host->entropy, (void **)&device->entropy, n, true},
        {host->z_loss, (void **)&device->z_loss, n, true},
        {host->token_weight, (void **)&device->token_weight, n, false},
        {host->up_loss, (void **)&device->up_loss, n_loss, false},
        {host->up_nll, (void **)&device->up_nll, n, false},
        {host->up_lse, (void **)&device->up_lse, n, false},
        {host->up_entropy, (void **)&device->up_entropy, n, false},
    };
    for (int i = 0; i < kSlots - SLOT_FLOATS; i++) {
        void *to = (void *)(uintptr_t)floats[i].host;
        const int name = SLOT_FLOATS + i;
        if (floats[i].result) {
            LLI_TRY(put_result(gpu, name, to, floats[i].bytes, floats[i].device));
        } else {
            LLI_TRY(put_input(gpu, name, to, floats[i].bytes, false, floats[i].device));
        }
    }
    return LL_STATUS_OK;
}

ll_status cli_gpu_bind(cli_gpu *gpu, const ll_linear_ce_args *host, ll_linear_ce_args *device) {
    const size_t n = (size_t)host->x.rows;
    void *data;
    *device = *host;
    LLI_TRY(check_targets(gpu, &host->target));
    LLI_TRY(put_input(gpu, SLOT_X, host->x.data, view_bytes(&host->x), false, &device->x.data));
    LLI_TRY(put_input(gpu, SLOT_W, host->w.data, view_bytes(&host->w), true, &device->w.data));
    LLI_TRY(put_input(gpu, SLOT_BIAS, host->bias.data, view_bytes(&host->bias), true, &device->bias.data));
    LLI_TRY(put_input(gpu, SLOT_TARGET, host->target.data, view_bytes(&host->target), false,
                      &device->target.data));
    LLI_TRY(put_input(gpu, SLOT_CLASS_WEIGHT, host->class_weight, (size_t)gpu->v_total * sizeof(float), true,
                      &data));
    device->class_weight = data;
    LLI_TRY(put_input(gpu, SLOT_DIVISOR, host->divisor, sizeof(double), false, &data));
    device->divisor = data;
    LLI_TRY(put_result(gpu, SLOT_ARGMAX, host->argmax, n * sizeof(int64_t), &data));
    device->argmax = data;
    LLI_TRY(put_result(gpu, SLOT_SUMS, host->sums, sizeof(ll_sums), &data));
    device->sums = data;
    LLI_TRY(put_result(gpu, SLOT_GRAD_X, host->grad_x.data, view_bytes(&host->grad_x), &device->grad_x.data));
    LLI_TRY(put_result(gpu, SLOT_GRAD_W, host->grad_w.data, view_bytes(&host->grad_w), &device->grad_w.data));
    LLI_TRY(put_result(gpu, SLOT_GRAD_BIAS, host->grad_bias.data, view_bytes(&host->grad_bias),
                       &device->grad_bias.data));
    LLI_TRY(bind_floats(gpu, host, device));
    device->workspace = gpu->workspace;
    device->workspace_bytes = gpu->workspace_bytes;
    return LL_STATUS_OK;
}

ll_status cli_gpu_wait(const cli_gpu *gpu) {
    return gpu->memory->wait();
}

ll_status cli_gpu_fetch(cli_gpu *gpu) {
    LLI_TRY(gpu->memory->wait());
    for (int i = 0; i < kSlots; i++) {
        const slot *s = &gpu->slots[i];
        if (!s->result || !s->result_bytes) continue;
        LLI_TRY(gpu->memory->to_host(s->result, s->device, s->result_bytes));
    }
    return LL_STATUS_OK;
}

ll_status cli_gpu_run(cli_gpu *gpu, const ll_plan *plan, ll_pass pass, const ll_linear_ce_args *host) {
    static ll_status (*const passes[])(const ll_plan *, const ll_linear_ce_args *, ll_stream) = {
        ll_linear_ce_forward, ll_linear_ce_backward, ll_linear_ce_forward_backward};
    ll_linear_ce_args device;
    LLI_TRY(cli_gpu_bind(gpu, host, &device));
    LLI_TRY(passes[pass](plan, &device, NULL));
    return cli_gpu_fetch(gpu);
}
