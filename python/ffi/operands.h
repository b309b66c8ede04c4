/* operands.h: tensors of a call, checked and put into the argument struct of a pass.
 *
 * The library gets pointers without lengths for most operands, so what it cannot see is checked here: device,
 * dtype, size, contiguity. Everything else is its business, its sentence included.
 *
 *   pass(plan, stream, flags, workspace, operand 0, operand 1, ...)      tensors or None, in the order of the
 * table
 *
 * stream: a cudaStream_t as an integer, or -1 for the stream that the tensors' framework has told the FFI. */
#ifndef LOGITLESS_FFI_OPERANDS_H
#define LOGITLESS_FFI_OPERANDS_H

#include "ffi.h"

typedef enum ffi_shape {
    FFI_MATRIX, /* ll_view, two dimensions; operand 0 is one, and its rows are the tokens of the call */
    FFI_VECTOR, /* ll_view, one dimension, any step */
    FFI_TOKENS, /* pointer, one element a token */
    FFI_ROWS,   /* three such pointers, neighbours in the struct, from one tensor [3, tokens] */
    FFI_LOSS,   /* pointer, one element, or one a token */
    FFI_WORDS,  /* pointer, one element a word of the vocabulary */
    FFI_ONE,    /* pointer, one element */
    FFI_BYTES   /* pointer to a struct, its bytes */
} ffi_shape;

typedef struct ffi_operand {
    const char *name;
    size_t offset; /* in the argument struct */
    ffi_shape shape;
    uint8_t code, bits; /* DLPack's dtype of a pointer; 0 for views, whose dtype the library checks */
    size_t bytes;       /* of FFI_BYTES */
    bool host;          /* host memory, whatever the plan's device */
} ffi_operand;

/* What every pass is called with beside its operands. */
typedef struct ffi_call {
    const ffi_plan *plan;
    ll_stream stream;
    int32_t flags; /* what the pass makes of it */
    void *workspace;
    size_t workspace_bytes;
} ffi_call;

/* Reads the arguments of a pass: *call, and the operands into *args_struct. 0, or -1 with the error set. */
int ffi_read_call(const char *function, const TVMFFIAny *at, int32_t n, const ffi_operand *operands,
                  int32_t n_operands, ffi_call *call, void *args_struct);

#endif
