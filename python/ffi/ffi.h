/* ffi.h: reading the arguments of a call that comes through apache-tvm-ffi, and failing with a sentence.
 *
 * A call is a row of tagged values, TVMFFIAny. `args` reads them in order; the first one that does not fit
 * sets the error, and from then on every read gives zero, so that a function checks once, at the end.
 *
 *   args   | tag 8 payload | tag 8 payload | ...        tag: None, Int, Float, DLTensor*, Tensor, ...
 *            ^ next
 */
#ifndef LOGITLESS_FFI_H
#define LOGITLESS_FFI_H

#include <dlpack/dlpack.h>
#include <logitless/logitless.h>
#include <stdbool.h>
#include <tvm/ffi/c_api.h>

/* A function that a module of apache-tvm-ffi offers under NAME is the symbol __tvm_ffi_NAME. */
#define FFI_EXPORT __attribute__((visibility("default")))

/* A plan as Python holds it: what a call's tensors are compared with before the library sees pointers. */
typedef struct ffi_plan {
    ll_plan *plan;
    DLDevice device;
    int64_t v_total, n_top;
} ffi_plan;

typedef struct ffi_args {
    const char *function;
    const TVMFFIAny *at;
    int32_t n, next;
    bool failed;
} ffi_args;

/* Sets the error that Python raises: kind names the class (python/logitless/_ffi.py registers one for every
 * ll_status), the sentence is made as by printf. Returns -1, what a failing function returns. */
int ffi_fail(ll_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* ll_last_error's sentence. */
int ffi_fail_last(ll_status status);

void ffi_give_int(int64_t value, TVMFFIAny *result);

/* False, and the error set, unless the call has n arguments. */
bool ffi_args_begin(ffi_args *args, const char *function, const TVMFFIAny *at, int32_t given, int32_t n);
int64_t ffi_int(ffi_args *args, const char *name);
double ffi_float(ffi_args *args, const char *name);
/* NULL for None. */
const DLTensor *ffi_tensor(ffi_args *args, const char *name);

#endif
