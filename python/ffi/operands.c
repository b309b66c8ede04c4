/* Reading the tensors of a call (operands.h). */
#include "operands.h"

#include <tvm/ffi/extra/c_env_api.h>

enum { kWorkspaceAlign = 64 };

static ll_dtype dtype_of(DLDataType dtype) {
    if (dtype.lanes != 1) return LL_DTYPE_NONE;
    if (dtype.code == kDLFloat && dtype.bits == 32) return LL_DTYPE_F32;
    if (dtype.code == kDLFloat && dtype.bits == 16) return LL_DTYPE_F16;
    if (dtype.code == kDLBfloat && dtype.bits == 16) return LL_DTYPE_BF16;
    if (dtype.code == kDLInt && dtype.bits == 32) return LL_DTYPE_I32;
    if (dtype.code == kDLInt && dtype.bits == 64) return LL_DTYPE_I64;
    return LL_DTYPE_NONE;
}

static void *data_of(const DLTensor *tensor) {
    return tensor->data ? (char *)tensor->data + tensor->byte_offset : NULL;
}

/* strides may be NULL (contiguous), and mean nothing along a dimension of one element. */
static ll_view view_of(const DLTensor *t) {
    const int64_t rows = t->shape[0], cols = t->ndim == 2 ? t->shape[1] : 1;
    ll_view view = {data_of(t), rows, cols, cols, 1, (int32_t)dtype_of(t->dtype), 0};
    if (t->strides && rows > 1) view.row_stride = t->strides[0];
    if (t->strides && t->ndim == 2 && cols > 1) view.col_stride = t->strides[1];
    return view;
}

static int64_t elements(const DLTensor *t) {
    int64_t n = 1;
    for (int32_t i = 0; i < t->ndim; i++) n *= t->shape[i];
    return n;
}

static bool contiguous(const DLTensor *t) {
    int64_t step = 1;
    if (elements(t) == 0) return true;
    for (int32_t i = t->ndim - 1; t->strides && i >= 0; i--) {
        if (t->shape[i] != 1 && t->strides[i] != step) return false;
        step *= t->shape[i];
    }
    return true;
}

static bool on_device(const DLTensor *t, DLDevice device) {
    return t->device.device_type == device.device_type && t->device.device_id == device.device_id;
}

/* 0, or -1 with the error set. */
static int check_pointer(const char *function, const ffi_operand *operand, const DLTensor *t,
                         const ffi_plan *plan, int64_t n_tokens, int64_t ids_columns) {
    const char *name = operand->name;
    if (t->dtype.code != operand->code || t->dtype.bits != operand->bits || t->dtype.lanes != 1) {
        return ffi_fail(LL_STATUS_INVALID_ARG,
                        "%s: %s has %d-bit elements of DLPack type %d, want %d-bit of type %d", function,
                        name, t->dtype.bits, t->dtype.code, operand->bits, operand->code);
    }
    if (!contiguous(t)) return ffi_fail(LL_STATUS_INVALID_ARG, "%s: %s is not contiguous", function, name);
    const int64_t found = elements(t);
    int64_t want = operand->shape == FFI_ROWS ? 3 * n_tokens : n_tokens;
    if (operand->shape == FFI_IDS) want = n_tokens * ids_columns;
    if (operand->shape == FFI_TOP) want = n_tokens * plan->n_top;
    if (operand->shape == FFI_WORDS) want = plan->v_total;
    if (operand->shape == FFI_ONE || (operand->shape == FFI_LOSS && found == 1)) want = 1;
    if (operand->shape == FFI_BYTES) want = (int64_t)operand->bytes;
    if (found == want) return 0;
    return ffi_fail(LL_STATUS_INVALID_ARG, "%s: %s has %lld elements, want %lld", function, name,
                    (long long)found, (long long)want);
}

/* Fills one operand in; 0, or -1 with the error set. */
static int fill(const char *function, const ffi_operand *operand, const DLTensor *t, const ffi_plan *plan,
                int64_t n_tokens, int64_t ids_columns, void *at) {
    const char *name = operand->name;
    const DLDevice device = operand->host ? (DLDevice){kDLCPU, 0} : plan->device;
    if (!on_device(t, device)) {
        return ffi_fail(LL_STATUS_INVALID_ARG,
                        "%s: %s is on device %d:%d, want %d:%d like the plan (1: CPU, 2: CUDA)", function,
                        name, (int)t->device.device_type, t->device.device_id, (int)device.device_type,
                        device.device_id);
    }
    if (operand->shape <= FFI_VECTOR) {
        const int32_t want = operand->shape == FFI_TOKEN_MATRIX || operand->shape == FFI_MATRIX ? 2 : 1;
        if (t->ndim != want) {
            return ffi_fail(LL_STATUS_INVALID_ARG, "%s: %s has %d dimensions, want %d", function, name,
                            t->ndim, want);
        }
        *(ll_view *)at = view_of(t);
        return 0;
    }
    if (check_pointer(function, operand, t, plan, n_tokens, ids_columns) != 0) return -1;
    void **pointer = at;
    *pointer = data_of(t);
    if (operand->shape == FFI_ROWS && *pointer) {
        const int64_t row_bytes = n_tokens * operand->bits / 8;
        pointer[1] = (char *)pointer[0] + row_bytes;
        pointer[2] = (char *)pointer[1] + row_bytes;
    }
    return 0;
}

int ffi_read_operands(ffi_args *from, const ffi_operation *operation, const ffi_plan *plan,
                      ffi_args_struct *to, bool *given) {
    int64_t n_tokens = 0;
    ffi_operation_init(operation, to);
    for (int32_t i = 0; i < operation->n_operands; i++) {
        const ffi_operand *operand = &operation->operands[i];
        const DLTensor *tensor = ffi_tensor(from, operand->name);
        if (from->failed) return -1;
        void *field = (char *)to + operand->offset;
        const int64_t ids_columns = operation == &ffi_ce ? to->ce.ids.cols : 0;
        if (tensor && fill(from->function, operand, tensor, plan, n_tokens, ids_columns, field) != 0)
            return -1;
        if (i == 0) n_tokens = ((const ll_view *)field)->rows;
        given[i] = tensor != NULL;
    }
    return 0;
}

void ffi_call_workspace(ffi_call *call, uintptr_t start, int64_t bytes) {
    /* NumPy's memory is aligned to 16 bytes only, so Python gives kWorkspaceAlign more than needed. */
    const uintptr_t aligned = (start + kWorkspaceAlign - 1) / kWorkspaceAlign * kWorkspaceAlign;
    bytes -= (int64_t)(aligned - start);
    call->workspace = (void *)aligned;
    call->workspace_bytes = bytes > 0 ? (size_t)bytes : 0;
}

void ffi_operation_init(const ffi_operation *operation, ffi_args_struct *args) {
    if (operation == &ffi_ce) {
        args->ce = (ll_ce_args)LL_CE_ARGS_INIT;
    } else {
        args->linear_ce = (ll_linear_ce_args)LL_LINEAR_CE_ARGS_INIT;
    }
}

static ll_status run_ce(ll_pass pass, const ffi_call *call, ll_ce_args *args) {
    if (args->state) args->state->struct_bytes = sizeof *args->state;
    args->in_place = call->flags;
    args->workspace = call->workspace;
    args->workspace_bytes = call->workspace_bytes;
    if (pass == LL_PASS_FORWARD) return ll_ce_forward(call->plan->plan, args, call->stream);
    if (pass == LL_PASS_BACKWARD) return ll_ce_backward(call->plan->plan, args, call->stream);
    return ll_ce_forward_backward(call->plan->plan, args, call->stream);
}

static ll_status run_linear_ce(ll_pass pass, const ffi_call *call, ll_linear_ce_args *args) {
    args->accumulate = call->flags;
    args->workspace = call->workspace;
    args->workspace_bytes = call->workspace_bytes;
    if (pass == LL_PASS_FORWARD) return ll_linear_ce_forward(call->plan->plan, args, call->stream);
    if (pass == LL_PASS_BACKWARD) return ll_linear_ce_backward(call->plan->plan, args, call->stream);
    return ll_linear_ce_forward_backward(call->plan->plan, args, call->stream);
}

int ffi_run(const ffi_operation *operation, ll_pass pass, const ffi_call *call, ffi_args_struct *args) {
    const ll_status status =
        operation == &ffi_ce ? run_ce(pass, call, &args->ce) : run_linear_ce(pass, call, &args->linear_ce);
    return status == LL_STATUS_OK ? 0 : ffi_fail_last(status);
}

int ffi_pass(const ffi_operation *operation, ll_pass pass, const TVMFFIAny *at, int32_t n) {
    ffi_args args;
    ffi_args_struct to;
    bool given[FFI_OPERANDS_MAX];
    const char *function = operation->names[pass];
    if (!ffi_args_begin(&args, function, at, n, 4 + operation->n_operands)) return -1;
    ffi_call call = {.plan = (const ffi_plan *)(intptr_t)ffi_int(&args, "plan")};
    const int64_t stream = ffi_int(&args, "stream");
    call.flags = (int32_t)ffi_int(&args, "flags");
    const DLTensor *workspace = ffi_tensor(&args, "workspace");
    if (args.failed) return -1;
    if (workspace) {
        if (!on_device(workspace, call.plan->device) || !contiguous(workspace)) {
            return ffi_fail(LL_STATUS_INVALID_ARG, "%s: workspace is not contiguous on the plan's device",
                            function);
        }
        ffi_call_workspace(&call, (uintptr_t)data_of(workspace),
                           elements(workspace) * workspace->dtype.bits / 8);
    }
    if (ffi_read_operands(&args, operation, call.plan, &to, given) != 0) return -1;
    if (call.plan->device.device_type == kDLCUDA) {
        call.stream = stream == -1 ? TVMFFIEnvGetStream(kDLCUDA, call.plan->device.device_id)
                                   : (ll_stream)(intptr_t)stream;
    }
    return ffi_run(operation, pass, &call, &to);
}
