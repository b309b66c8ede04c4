/* The passes of ce, the loss over given logits, through apache-tvm-ffi (operands.h says how they are called);
 * flags: 1 if grad_logits is the same memory as the logits. `state` is the bytes of an ll_ce_state, zeroed
 * once by who makes them. */
#include "operands.h"

#include <assert.h>
#include <stddef.h>

#define AT(field) offsetof(ll_ce_args, field)
static const ffi_operand operands[] = {
    {"logits", AT(logits), FFI_TOKEN_MATRIX, 0, 0, 0, false},
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
    {"grad_logits", AT(grad_logits), FFI_TOKEN_MATRIX, 0, 0, 0, false},
    {"state", AT(state), FFI_BYTES, kDLUInt, 8, sizeof(ll_ce_state), true},
    {"bad_targets", AT(bad_targets), FFI_ONE, kDLInt, 64, 0, false},
    {"ids", AT(ids), FFI_TOKEN_MATRIX, 0, 0, 0, false},
    {"id_logp", AT(id_logp), FFI_IDS, kDLFloat, 32, 0, false},
    {"id_rank", AT(id_rank), FFI_IDS, kDLInt, 64, 0, false},
    {"top_ids", AT(top_ids), FFI_TOP, kDLInt, 64, 0, false},
    {"top_logp", AT(top_logp), FFI_TOP, kDLFloat, 32, 0, false},
};
static_assert(AT(lse) == AT(nll) + sizeof(void *) && AT(lse_lo) == AT(lse) + sizeof(void *), "rows");
enum { kOperands = sizeof operands / sizeof operands[0] };
static_assert((int)kOperands <= (int)FFI_OPERANDS_MAX, "more operands than a call has room for");

const ffi_operation ffi_ce = {{"ce_forward", "ce_backward", "ce_forward_backward"}, operands, kOperands};

FFI_EXPORT int __tvm_ffi_ce_forward(void *self, const TVMFFIAny *at, int32_t n, TVMFFIAny *result) {
    (void)self;
    (void)result;
    return ffi_pass(&ffi_ce, LL_PASS_FORWARD, at, n);
}

FFI_EXPORT int __tvm_ffi_ce_backward(void *self, const TVMFFIAny *at, int32_t n, TVMFFIAny *result) {
    (void)self;
    (void)result;
    return ffi_pass(&ffi_ce, LL_PASS_BACKWARD, at, n);
}

FFI_EXPORT int __tvm_ffi_ce_forward_backward(void *self, const TVMFFIAny *at, int32_t n, TVMFFIAny *result) {
    (void)self;
    (void)result;
    return ffi_pass(&ffi_ce, LL_PASS_FORWARD_BACKWARD, at, n);
}
