/* The passes of linear_ce through apache-tvm-ffi (operands.h says how they are called); flags: LL_ACCUMULATE_
 * bits. */
#include "operands.h"

#include <assert.h>
#include <stddef.h>

#define AT(field) offsetof(ll_linear_ce_args, field)
static const ffi_operand operands[] = {
    {"x", AT(x), FFI_TOKEN_MATRIX, 0, 0, 0, false},
    {"w", AT(w), FFI_MATRIX, 0, 0, 0, false},
    {"bias", AT(bias), FFI_VECTOR, 0, 0, 0, false},
    {"target", AT(target), FFI_TOKEN_VECTOR, 0, 0, 0, false},
    {"class_weight", AT(class_weight), FFI_WORDS, kDLFloat, 32, 0, false},
    {"token_weight", AT(token_weight), FFI_TOKENS, kDLFloat, 32, 0, false},
    {"divisor", AT(divisor), FFI_ONE, kDLFloat, 64, 0, false},
    {"loss", AT(loss), FFI_LOSS, kDLFloat, 32, 0, false},
    {"rows", AT(nll), FFI_ROWS, kDLFloat, 32, 0, false}, /* nll, lse, lse_lo; or one by one: */
    {"nll", AT(nll), FFI_TOKENS, kDLFloat, 32, 0, false},
    {"lse", AT(lse), FFI_TOKENS, kDLFloat, 32, 0, false},
    {"lse_lo", AT(lse_lo), FFI_TOKENS, kDLFloat, 32, 0, false},
    {"entropy", AT(entropy), FFI_TOKENS, kDLFloat, 32, 0, false},
    {"z_loss", AT(z_loss), FFI_TOKENS, kDLFloat, 32, 0, false},
    {"argmax", AT(argmax), FFI_TOKENS, kDLInt, 64, 0, false},
    {"sums", AT(sums), FFI_BYTES, kDLUInt, 8, sizeof(ll_sums), false},
    {"up_loss", AT(up_loss), FFI_LOSS, kDLFloat, 32, 0, false},
    {"up_nll", AT(up_nll), FFI_TOKENS, kDLFloat, 32, 0, false},
    {"up_lse", AT(up_lse), FFI_TOKENS, kDLFloat, 32, 0, false},
    {"up_entropy", AT(up_entropy), FFI_TOKENS, kDLFloat, 32, 0, false},
    {"grad_x", AT(grad_x), FFI_TOKEN_MATRIX, 0, 0, 0, false},
    {"grad_w", AT(grad_w), FFI_MATRIX, 0, 0, 0, false},
    {"grad_bias", AT(grad_bias), FFI_VECTOR, 0, 0, 0, false},
    {"bad_targets", AT(bad_targets), FFI_ONE, kDLInt, 64, 0, false},
};
static_assert(AT(lse) == AT(nll) + sizeof(void *) && AT(lse_lo) == AT(lse) + sizeof(void *), "rows");
enum { kOperands = sizeof operands / sizeof operands[0] };
static_assert((int)kOperands <= (int)FFI_OPERANDS_MAX, "more operands than a call has room for");

const ffi_operation ffi_linear_ce = {
    {"linear_ce_forward", "linear_ce_backward", "linear_ce_forward_backward"}, operands, kOperands};

FFI_EXPORT int __tvm_ffi_linear_ce_forward(void *self, const TVMFFIAny *at, int32_t n, TVMFFIAny *result) {
    (void)self;
    (void)result;
    return ffi_pass(&ffi_linear_ce, LL_PASS_FORWARD, at, n);
}

FFI_EXPORT int __tvm_ffi_linear_ce_backward(void *self, const TVMFFIAny *at, int32_t n, TVMFFIAny *result) {
    (void)self;
    (void)result;
    return ffi_pass(&ffi_linear_ce, LL_PASS_BACKWARD, at, n);
}

FFI_EXPORT int __tvm_ffi_linear_ce_forward_backward(void *self, const TVMFFIAny *at, int32_t n,
                                                    TVMFFIAny *result) {
    (void)self;
    (void)result;
    return ffi_pass(&ffi_linear_ce, LL_PASS_FORWARD_BACKWARD, at, n);
}
