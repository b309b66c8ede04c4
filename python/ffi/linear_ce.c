/* The three passes through apache-tvm-ffi: linear_ce_forward, linear_ce_backward, linear_ce_forward_backward.
 *
 *   pass(plan, stream, accumulate, workspace, x, w, bias, ..., bad_targets)         tensors or None, in the
 * order of `operands` below stream: a cudaStream_t as an integer, or -1 for the stream that the tensors'
 * framework has told the FFI. The library gets pointers without lengths for most operands, so what it cannot
 * see is checked here: device, dtype, size, contiguity. Everything else is its business, its sentence
 * included. */
#include "ffi.h"

#include <stddef.h>
#include <tvm/ffi/extra/c_env_api.h>

typedef enum shape {
    kMatrix, /* ll_view, two dimensions */
    kVector, /* ll_view, one dimension, any step */
    kTokens, /* pointer, one element a token */
    kLoss,   /* pointer, one element, or one a token */
    kWords,  /* pointer, one element a word of the vocabulary */
    kOne,    /* pointer, one element */
    kSums    /* pointer, the bytes of ll_sums */
} shape;

#define AT(field) offsetof(ll_linear_ce_args, field)
static const struct {
    const char *name;
    size_t offset;
    shape shape;
    uint8_t code, bits; /* DLPack's dtype; code 0 and bits 0 for views, whose dtype the library checks */
} operands[] = {
    {"x", AT(x), kMatrix, 0, 0},
    {"w", AT(w), kMatrix, 0, 0},
    {"bias", AT(bias), kVector, 0, 0},
    {"target", AT(target), kVector, 0, 0},
    {"class_weight", AT(class_weight), kWords, kDLFloat, 32},
    {"token_weight", AT(token_weight), kTokens, kDLFloat, 32},
    {"divisor", AT(divisor), kOne, kDLFloat, 64},
    {"loss", AT(loss), kLoss, kDLFloat, 32},
    {"nll", AT(nll), kTokens, kDLFloat, 32},
    {"lse", AT(lse), kTokens, kDLFloat, 32},
    {"lse_lo", AT(lse_lo), kTokens, kDLFloat, 32},
    {"entropy", AT(entropy), kTokens, kDLFloat, 32},
    {"z_loss", AT(z_loss), kTokens, kDLFloat, 32},
    {"argmax", AT(argmax), kTokens, kDLInt, 64},
    {"sums", AT(sums), kSums, kDLUInt, 8},
    {"up_loss", AT(up_loss), kLoss, kDLFloat, 32},
    {"up_nll", AT(up_nll), kTokens, kDLFloat, 32},
    {"up_lse", AT(up_lse), kTokens, kDLFloat, 32},
    {"up_entropy", AT(up_entropy), kTokens, kDLFloat, 32},
    {"grad_x", AT(grad_x), kMatrix, 0, 0},
    {"grad_w", AT(grad_w), kMatrix, 0, 0},
    {"grad_bias", AT(grad_bias), kVector, 0, 0},
    {"bad_targets", AT(bad_targets), kOne, kDLInt, 64},
};
enum { kOperands = sizeof operands / sizeof operands[0], kWorkspaceAlign = 64 };

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

/* 0, or -1 with the error set. */
static int check_pointer(const char *function, int32_t index, const DLTensor *t, const ffi_plan *plan,
                         int64_t n_tokens) {
    const char *name = operands[index].name;
    if (t->dtype.code != operands[index].code || t->dtype.bits != operands[index].bits ||
        t->dtype.lanes != 1) {
        return ffi_fail(LL_STATUS_INVALID_ARG,
                        "%s: %s has %d-bit elements of DLPack type %d, want %d-bit of type %d", function,
                        name, t->dtype.bits, t->dtype.code, operands[index].bits, operands[index].code);
    }
    if (!contiguous(t)) return ffi_fail(LL_STATUS_INVALID_ARG, "%s: %s is not contiguous", function, name);
    const int64_t found = elements(t), one = operands[index].shape == kLoss && found == 1;
    int64_t want = n_tokens;
    if (operands[index].shape == kWords) want = plan->v_total;
    if (operands[index].shape == kOne || one) want = 1;
    if (operands[index].shape == kSums) want = (int64_t)sizeof(ll_sums);
    if (found == want) return 0;
    return ffi_fail(LL_STATUS_INVALID_ARG, "%s: %s has %lld elements, want %lld", function, name,
                    (long long)found, (long long)want);
}

/* Fills one operand in; 0, or -1 with the error set. */
static int fill(const char *function, int32_t index, const DLTensor *t, const ffi_plan *plan,
                ll_linear_ce_args *out) {
    void *at = (char *)out + operands[index].offset;
    const char *name = operands[index].name;
    if (t->device.device_type != plan->device.device_type || t->device.device_id != plan->device.device_id) {
        return ffi_fail(LL_STATUS_INVALID_ARG,
                        "%s: %s is on device %d:%d, want %d:%d like the plan (1: CPU, 2: CUDA)", function,
                        name, (int)t->device.device_type, t->device.device_id, (int)plan->device.device_type,
                        plan->device.device_id);
    }
    if (operands[index].shape == kMatrix || operands[index].shape == kVector) {
        const int32_t want = operands[index].shape == kMatrix ? 2 : 1;
        if (t->ndim != want) {
            return ffi_fail(LL_STATUS_INVALID_ARG, "%s: %s has %d dimensions, want %d", function, name,
                            t->ndim, want);
        }
        *(ll_view *)at = view_of(t);
        return 0;
    }
    if (check_pointer(function, index, t, plan, out->x.rows) != 0) return -1;
    *(void **)at = data_of(t);
    return 0;
}

typedef ll_status pass_fn(const ll_plan *plan, const ll_linear_ce_args *args, ll_stream stream);

static int run(pass_fn *pass, const char *function, const TVMFFIAny *at, int32_t n) {
    ffi_args args;
    if (!ffi_args_begin(&args, function, at, n, 4 + kOperands)) return -1;
    const ffi_plan *plan = (const ffi_plan *)(intptr_t)ffi_int(&args, "plan"); /* NOLINT */
    const int64_t stream = ffi_int(&args, "stream");
    ll_linear_ce_args call = LL_LINEAR_CE_ARGS_INIT;
    call.accumulate = (int32_t)ffi_int(&args, "accumulate");
    const DLTensor *workspace = ffi_tensor(&args, "workspace");
    for (int32_t i = 0; i < kOperands; i++) {
        const DLTensor *tensor = ffi_tensor(&args, operands[i].name);
        if (args.failed) return -1;
        if (tensor && fill(function, i, tensor, plan, &call) != 0) return -1;
    }
    if (args.failed) return -1;
    if (workspace) {
        /* NumPy's memory is aligned to 16 bytes only, so Python gives kWorkspaceAlign more than needed. */
        const uintptr_t start = (uintptr_t)data_of(workspace);
        const uintptr_t aligned = (start + kWorkspaceAlign - 1) / kWorkspaceAlign * kWorkspaceAlign;
        const int64_t bytes = elements(workspace) * workspace->dtype.bits / 8 - (int64_t)(aligned - start);
        if (workspace->device.device_type != plan->device.device_type ||
            workspace->device.device_id != plan->device.device_id || !contiguous(workspace)) {
            return ffi_fail(LL_STATUS_INVALID_ARG, "%s: workspace is not contiguous on the plan's device",
                            function);
        }
        call.workspace = (void *)aligned; /* NOLINT */
        call.workspace_bytes = bytes > 0 ? (size_t)bytes : 0;
    }
    ll_stream queue = NULL;
    if (plan->device.device_type == kDLCUDA) {
        queue = stream == -1 ? TVMFFIEnvGetStream(kDLCUDA, plan->device.device_id)
                             : (ll_stream)(intptr_t)stream; /* NOLINT */
    }
    const ll_status status = pass(plan->plan, &call, queue);
    return status == LL_STATUS_OK ? 0 : ffi_fail_last(status);
}

FFI_EXPORT int __tvm_ffi_linear_ce_forward(void *self, const TVMFFIAny *at, int32_t n, TVMFFIAny *result) {
    (void)self;
    (void)result;
    return run(ll_linear_ce_forward, "linear_ce_forward", at, n);
}

FFI_EXPORT int __tvm_ffi_linear_ce_backward(void *self, const TVMFFIAny *at, int32_t n, TVMFFIAny *result) {
    (void)self;
    (void)result;
    return run(ll_linear_ce_backward, "linear_ce_backward", at, n);
}

FFI_EXPORT int __tvm_ffi_linear_ce_forward_backward(void *self, const TVMFFIAny *at, int32_t n,
                                                    TVMFFIAny *result) {
    (void)self;
    (void)result;
    return run(ll_linear_ce_forward_backward, "linear_ce_forward_backward", at, n);
}
