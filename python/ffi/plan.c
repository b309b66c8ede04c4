/* Plans through apache-tvm-ffi: made from numbers in the order of ll_plan_desc and ll_loss, handed out as an
 * integer. Python keeps them in a cache (python/logitless/_ffi.py) and destroys those that leave it. */
#include "ffi.h"

#include <stdlib.h>
#include <string.h>

enum { kDescribeBytes = 4096, kPlanArgs = 31 };

static int give_text(const char *text, TVMFFIAny *result) {
    const TVMFFIByteArray bytes = {text, strlen(text)};
    return TVMFFIStringFromByteArray(&bytes, result);
}

static ffi_plan *plan_of(ffi_args *args) {
    return (ffi_plan *)(intptr_t)ffi_int(args, "plan"); /* NOLINT(performance-no-int-to-ptr) */
}

/* plan_create(device_type, device_id, backend, n_tokens_max, n_hidden, v_begin, v_local, v_total, x_dtype,
 * w_dtype, bias_dtype, grad_x_dtype, grad_w_dtype, grad_bias_dtype, frozen, n_threads,
 * workspace_budget_bytes, ignore_index, temperature, softcap, label_smoothing, z_loss, smoothing_rule,
 * reduction, token_scaling, op,
 * logits_dtype, grad_logits_dtype, n_ids, n_top, comm)
 * -> plan. Device: DLPack's numbers, that of all tensors of the calls. comm: address of an ll_comm, or 0. */
FFI_EXPORT int __tvm_ffi_plan_create(void *self, const TVMFFIAny *at, int32_t n, TVMFFIAny *result) {
    (void)self;
    ffi_args args;
    if (!ffi_args_begin(&args, "plan_create", at, n, kPlanArgs)) return -1;
    ll_plan_desc desc = LL_PLAN_DESC_INIT;
    ll_loss loss = LL_LOSS_INIT;
    DLDevice device;
    device.device_type = (DLDeviceType)ffi_int(&args, "device_type");
    device.device_id = (int32_t)ffi_int(&args, "device_id");
    desc.backend = (int32_t)ffi_int(&args, "backend");
    desc.n_tokens_max = ffi_int(&args, "n_tokens_max");
    desc.n_hidden = ffi_int(&args, "n_hidden");
    desc.v_begin = ffi_int(&args, "v_begin");
    desc.v_local = ffi_int(&args, "v_local");
    desc.v_total = ffi_int(&args, "v_total");
    desc.x_dtype = (int32_t)ffi_int(&args, "x_dtype");
    desc.w_dtype = (int32_t)ffi_int(&args, "w_dtype");
    desc.bias_dtype = (int32_t)ffi_int(&args, "bias_dtype");
    desc.grad_x_dtype = (int32_t)ffi_int(&args, "grad_x_dtype");
    desc.grad_w_dtype = (int32_t)ffi_int(&args, "grad_w_dtype");
    desc.grad_bias_dtype = (int32_t)ffi_int(&args, "grad_bias_dtype");
    desc.frozen = (int32_t)ffi_int(&args, "frozen");
    desc.n_threads = (int32_t)ffi_int(&args, "n_threads");
    desc.workspace_budget_bytes = (size_t)ffi_int(&args, "workspace_budget_bytes");
    loss.ignore_index = ffi_int(&args, "ignore_index");
    loss.temperature = (float)ffi_float(&args, "temperature");
    loss.softcap = (float)ffi_float(&args, "softcap");
    loss.label_smoothing = (float)ffi_float(&args, "label_smoothing");
    loss.z_loss = (float)ffi_float(&args, "z_loss");
    loss.smoothing_rule = (int32_t)ffi_int(&args, "smoothing_rule");
    loss.reduction = (int32_t)ffi_int(&args, "reduction");
    loss.token_scaling = (int32_t)ffi_int(&args, "token_scaling");
    desc.op = (int32_t)ffi_int(&args, "op");
    desc.logits_dtype = (int32_t)ffi_int(&args, "logits_dtype");
    desc.grad_logits_dtype = (int32_t)ffi_int(&args, "grad_logits_dtype");
    desc.n_ids = (int32_t)ffi_int(&args, "n_ids");
    desc.n_top = (int32_t)ffi_int(&args, "n_top");
    desc.comm = (const struct ll_comm *)(intptr_t)ffi_int(&args, "comm"); /* NOLINT */
    desc.loss = &loss;
    if (args.failed) return -1;

    ffi_plan *plan = malloc(sizeof *plan);
    if (!plan) return ffi_fail(LL_STATUS_MEMORY, "plan_create: no memory for the plan");
    *plan = (ffi_plan){.device = device, .v_total = desc.v_total, .n_top = desc.n_top};
    const ll_status status = ll_plan_create(&desc, &plan->plan);
    if (status != LL_STATUS_OK) {
        free(plan);
        return ffi_fail_last(status);
    }
    ffi_give_int((int64_t)(intptr_t)plan, result);
    return 0;
}

/* plan_destroy(plan): no call may be in flight, and the number means nothing afterwards. */
FFI_EXPORT int __tvm_ffi_plan_destroy(void *self, const TVMFFIAny *at, int32_t n, TVMFFIAny *result) {
    (void)self;
    (void)result;
    ffi_args args;
    if (!ffi_args_begin(&args, "plan_destroy", at, n, 1)) return -1;
    ffi_plan *plan = plan_of(&args);
    if (args.failed) return -1;
    if (plan) ll_plan_destroy(plan->plan);
    free(plan);
    return 0;
}

/* plan_workspace(plan, pass) -> bytes; pass: an ll_pass. */
FFI_EXPORT int __tvm_ffi_plan_workspace(void *self, const TVMFFIAny *at, int32_t n, TVMFFIAny *result) {
    (void)self;
    ffi_args args;
    if (!ffi_args_begin(&args, "plan_workspace", at, n, 2)) return -1;
    const ffi_plan *plan = plan_of(&args);
    const int64_t pass = ffi_int(&args, "pass");
    if (args.failed) return -1;
    size_t bytes;
    const ll_status status = ll_plan_workspace(plan->plan, (ll_pass)pass, &bytes);
    if (status != LL_STATUS_OK) return ffi_fail_last(status);
    ffi_give_int((int64_t)bytes, result);
    return 0;
}

/* plan_describe(plan) -> text: what was asked and chosen, and why better kernels refused. */
FFI_EXPORT int __tvm_ffi_plan_describe(void *self, const TVMFFIAny *at, int32_t n, TVMFFIAny *result) {
    (void)self;
    ffi_args args;
    char text[kDescribeBytes];
    if (!ffi_args_begin(&args, "plan_describe", at, n, 1)) return -1;
    const ffi_plan *plan = plan_of(&args);
    if (args.failed) return -1;
    const ll_status status = ll_plan_describe(plan->plan, text, sizeof text);
    return status == LL_STATUS_OK ? give_text(text, result) : ffi_fail_last(status);
}

/* plan_numerics(plan) -> the id of its arithmetic. */
FFI_EXPORT int __tvm_ffi_plan_numerics(void *self, const TVMFFIAny *at, int32_t n, TVMFFIAny *result) {
    (void)self;
    ffi_args args;
    if (!ffi_args_begin(&args, "plan_numerics", at, n, 1)) return -1;
    const ffi_plan *plan = plan_of(&args);
    return args.failed ? -1 : give_text(ll_plan_numerics(plan->plan), result);
}

/* version() -> "MAJOR.MINOR.PATCH" of the library. */
FFI_EXPORT int __tvm_ffi_version(void *self, const TVMFFIAny *at, int32_t n, TVMFFIAny *result) {
    (void)self;
    ffi_args args;
    return ffi_args_begin(&args, "version", at, n, 0) ? give_text(ll_version(), result) : -1;
}

/* kernel_count() -> kernels of this build. */
FFI_EXPORT int __tvm_ffi_kernel_count(void *self, const TVMFFIAny *at, int32_t n, TVMFFIAny *result) {
    (void)self;
    ffi_args args;
    ll_kernel_info info;
    if (!ffi_args_begin(&args, "kernel_count", at, n, 0)) return -1;
    int32_t count = 0;
    while (ll_kernel_get(count, &info) == LL_STATUS_OK) count++;
    ffi_give_int(count, result);
    return 0;
}

/* kernel_field(index, field) -> name (0), backend (1), numerics (2) or why it cannot run here (3, "" if it
 * can). */
FFI_EXPORT int __tvm_ffi_kernel_field(void *self, const TVMFFIAny *at, int32_t n, TVMFFIAny *result) {
    (void)self;
    ffi_args args;
    if (!ffi_args_begin(&args, "kernel_field", at, n, 2)) return -1;
    const int64_t index = ffi_int(&args, "index"), field = ffi_int(&args, "field");
    if (args.failed) return -1;
    ll_kernel_info info;
    const ll_status status = ll_kernel_get((int32_t)index, &info);
    if (status != LL_STATUS_OK) return ffi_fail_last(status);
    const char *const fields[] = {info.name, info.backend, info.numerics, info.why_not};
    if (field < 0 || field > 3)
        return ffi_fail(LL_STATUS_INVALID_ARG, "kernel_field: field is %lld, want 0 .. 3", (long long)field);
    return give_text(fields[field] ? fields[field] : "", result);
}
