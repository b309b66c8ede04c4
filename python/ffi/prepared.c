/* Calls prepared once and run with other memory: what a call from Python costs is reading its tensors, and
 * the tensors of a loss in a training loop differ from step to step in nothing but their addresses and number
 * of tokens.
 *
 *   prepare(op, pass, plan, flags, operand 0, operand 1, ...) -> call
 *   run(call, stream, n_tokens, workspace, workspace bytes, address, address, ...)
 *
 * prepare reads tensors or None as a pass does (operands.h), checks and all, and keeps the argument struct.
 * run takes an address for each operand that was given to prepare, in their order. Who runs a prepared call
 * answers for that: the memory has the dtypes, strides, device and sizes of the tensors that prepare saw, but
 * for n_tokens rows. The library checks the rest as ever. A prepared call is immutable: any threads may run
 * it. */
#include "operands.h"

#include <stdlib.h>

typedef struct ffi_prepared {
    const ffi_plan *plan;
    const ffi_operation *operation;
    ll_pass pass;
    int32_t flags;
    int32_t n_given;
    uint8_t given[FFI_OPERANDS_MAX]; /* indices of operands, ascending */
    ffi_args_struct args;            /* addresses and rows are those of the run */
} ffi_prepared;

static ffi_prepared *prepared_of(ffi_args *args) {
    return (ffi_prepared *)(intptr_t)ffi_int(args, "call"); /* NOLINT(performance-no-int-to-ptr) */
}

/* op: an ll_op; pass: an ll_pass. */
FFI_EXPORT int __tvm_ffi_prepare(void *self, const TVMFFIAny *at, int32_t n, TVMFFIAny *result) {
    (void)self;
    ffi_args args;
    /* The operation says how many arguments there are, so it is looked at before they are counted. */
    const bool ce = n > 0 && at[0].type_index == kTVMFFIInt && at[0].v_int64 == LL_OP_CE;
    const ffi_operation *operation = ce ? &ffi_ce : &ffi_linear_ce;
    if (!ffi_args_begin(&args, "prepare", at, n, 4 + operation->n_operands)) return -1;
    (void)ffi_int(&args, "op");
    const int64_t pass = ffi_int(&args, "pass");
    const ffi_plan *plan = (const ffi_plan *)(intptr_t)ffi_int(&args, "plan"); /* NOLINT */
    const int64_t flags = ffi_int(&args, "flags");
    if (args.failed) return -1;
    if (pass < LL_PASS_FORWARD || pass > LL_PASS_FORWARD_BACKWARD) {
        return ffi_fail(LL_STATUS_INVALID_ARG, "prepare: pass is %lld, want 0 .. 2", (long long)pass);
    }
    args.function = operation->names[pass];
    ffi_prepared *prepared = calloc(1, sizeof *prepared);
    if (!prepared) return ffi_fail(LL_STATUS_MEMORY, "prepare: no memory for the call");
    prepared->plan = plan;
    prepared->operation = operation;
    prepared->pass = (ll_pass)pass;
    prepared->flags = (int32_t)flags;
    bool given[FFI_OPERANDS_MAX];
    if (ffi_read_operands(&args, operation, plan, &prepared->args, given) != 0) {
        free(prepared);
        return -1;
    }
    for (int32_t i = 0; i < operation->n_operands; i++) {
        if (given[i]) prepared->given[prepared->n_given++] = (uint8_t)i;
    }
    ffi_give_int((int64_t)(intptr_t)prepared, result);
    return 0;
}

static void put(const ffi_operand *operand, ffi_args_struct *args, char *address, int64_t n_tokens) {
    void *field = (char *)args + operand->offset;
    if (operand->shape <= FFI_VECTOR) {
        ll_view *view = field;
        view->data = address;
        if (operand->shape <= FFI_TOKEN_VECTOR) view->rows = n_tokens;
        return;
    }
    char **pointer = field;
    pointer[0] = address;
    if (operand->shape == FFI_ROWS) {
        const int64_t row_bytes = n_tokens * operand->bits / 8;
        pointer[1] = address ? address + row_bytes : NULL;
        pointer[2] = address ? address + 2 * row_bytes : NULL;
    }
}

FFI_EXPORT int __tvm_ffi_run(void *self, const TVMFFIAny *at, int32_t n, TVMFFIAny *result) {
    (void)self;
    (void)result;
    ffi_args args = {.function = "run", .at = at, .n = n};
    const ffi_prepared *prepared = prepared_of(&args);
    if (!prepared) return ffi_fail(LL_STATUS_INVALID_ARG, "run: no call");
    if (!ffi_args_begin(&args, prepared->operation->names[prepared->pass], at, n, 5 + prepared->n_given))
        return -1;
    (void)prepared_of(&args);
    const int64_t stream = ffi_int(&args, "stream"), n_tokens = ffi_int(&args, "n_tokens");
    const int64_t workspace = ffi_int(&args, "workspace"), bytes = ffi_int(&args, "workspace bytes");
    ffi_args_struct to = prepared->args;
    for (int32_t i = 0; i < prepared->n_given; i++) {
        const ffi_operand *operand = &prepared->operation->operands[prepared->given[i]];
        put(operand, &to, (char *)(intptr_t)ffi_int(&args, operand->name), n_tokens); /* NOLINT */
    }
    if (args.failed) return -1;
    ffi_call call = {.plan = prepared->plan, .flags = prepared->flags};
    if (prepared->plan->device.device_type == kDLCUDA) call.stream = (ll_stream)(intptr_t)stream; /* NOLINT */
    ffi_call_workspace(&call, (uintptr_t)workspace, bytes);
    return ffi_run(prepared->operation, prepared->pass, &call, &to);
}

/* run may not be in flight; the plan may be gone already. */
FFI_EXPORT int __tvm_ffi_prepared_destroy(void *self, const TVMFFIAny *at, int32_t n, TVMFFIAny *result) {
    (void)self;
    (void)result;
    ffi_args args;
    if (!ffi_args_begin(&args, "prepared_destroy", at, n, 1)) return -1;
    ffi_prepared *prepared = prepared_of(&args);
    if (args.failed) return -1;
    free(prepared);
    return 0;
}
