/* Reading arguments and setting errors (ffi.h). */
#include "ffi.h"

#include <stdarg.h>
#include <stdio.h>

int ffi_fail(ll_status status, const char *format, ...) {
    char sentence[1024];
    va_list list;
    va_start(list, format);
    vsnprintf(sentence, sizeof sentence, format, list);
    va_end(list);
    TVMFFIErrorSetRaisedFromCStr(ll_status_name(status), sentence);
    return -1;
}

int ffi_fail_last(ll_status status) {
    return ffi_fail(status, "%s", ll_last_error());
}

void ffi_give_int(int64_t value, TVMFFIAny *result) {
    result->type_index = kTVMFFIInt;
    result->zero_padding = 0;
    result->v_int64 = value;
}

bool ffi_args_begin(ffi_args *args, const char *function, const TVMFFIAny *at, int32_t given, int32_t n) {
    *args = (ffi_args){.function = function, .at = at, .n = n, .failed = given != n};
    if (args->failed)
        ffi_fail(LL_STATUS_INVALID_ARG, "%s: found %d arguments, wanted %d", function, given, n);
    return !args->failed;
}

static const TVMFFIAny *next(ffi_args *args) {
    if (args->failed || args->next >= args->n) return NULL;
    return &args->at[args->next++];
}

static void refuse(ffi_args *args, const char *name, const char *wanted) {
    args->failed = true;
    ffi_fail(LL_STATUS_INVALID_ARG, "%s: %s is not %s", args->function, name, wanted);
}

int64_t ffi_int(ffi_args *args, const char *name) {
    const TVMFFIAny *value = next(args);
    if (!value) return 0;
    if (value->type_index == kTVMFFIInt || value->type_index == kTVMFFIBool) return value->v_int64;
    refuse(args, name, "an integer");
    return 0;
}

double ffi_float(ffi_args *args, const char *name) {
    const TVMFFIAny *value = next(args);
    if (!value) return 0;
    if (value->type_index == kTVMFFIFloat) return value->v_float64;
    if (value->type_index == kTVMFFIInt) return (double)value->v_int64;
    refuse(args, name, "a number");
    return 0;
}

const DLTensor *ffi_tensor(ffi_args *args, const char *name) {
    const TVMFFIAny *value = next(args);
    if (!value || value->type_index == kTVMFFINone) return NULL;
    if (value->type_index == kTVMFFIDLTensorPtr) return value->v_ptr;
    /* A tensor object is its header with the DLTensor behind it. */
    if (value->type_index == kTVMFFITensor) {
        return (const DLTensor *)(const void *)((const char *)value->v_ptr + sizeof(TVMFFIObject));
    }
    refuse(args, name, "a tensor or None");
    return NULL;
}
