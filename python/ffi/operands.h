/* operands.h: tensors of a call, checked and put into the argument struct of a pass.
 *
 * The library gets pointers without lengths for most operands, so what it cannot see is checked here: device,
 * dtype, size, contiguity. Everything else is its business, its sentence included.
 *
 *   pass(plan, stream, flags, workspace, operand 0, operand 1, ...)      tensors or None, in the order of the
 * table
 *
 * stream: a cudaStream_t as an integer, or -1 for the stream that the tensors' framework has told the FFI.
 *
 * A call that comes again with other memory need not be read again: prepared.c. */
#ifndef LOGITLESS_FFI_OPERANDS_H
#define LOGITLESS_FFI_OPERANDS_H

#include "ffi.h"

typedef enum ffi_shape {
    FFI_TOKEN_MATRIX, /* ll_view, two dimensions, a row a token; operand 0 is one: its rows are the call's */
    FFI_TOKEN_VECTOR, /* ll_view, one dimension, any step, an element a token */
    FFI_MATRIX,       /* ll_view, two dimensions */
    FFI_VECTOR,       /* ll_view, one dimension, any step; views end here */
    FFI_TOKENS,       /* pointer, one element a token */
    FFI_IDS,          /* pointer, one element for each of the ids that `ids` has */
    FFI_TOP,          /* pointer, n_top of the plan for each token */
    FFI_ROWS,         /* three such pointers, neighbours in the struct, from one tensor [3, tokens] */
    FFI_LOSS,         /* pointer, one element, or one a token */
    FFI_WORDS,        /* pointer, one element a word of the vocabulary */
    FFI_ONE,          /* pointer, one element */
    FFI_BYTES         /* pointer to a struct, its bytes */
} ffi_shape;

typedef struct ffi_operand {
    const char *name;
    size_t offset; /* in the argument struct */
    ffi_shape shape;
    uint8_t code, bits; /* DLPack's dtype of a pointer; 0 for views, whose dtype the library checks */
    size_t bytes;       /* of FFI_BYTES */
    bool host;          /* host memory, whatever the plan's device */
} ffi_operand;

enum { FFI_OPERANDS_MAX = 32 };

/* An operation of the library: its passes and what they are called with. */
typedef struct ffi_operation {
    const char *names[3]; /* of the passes, by ll_pass */
    const ffi_operand *operands;
    int32_t n_operands;
} ffi_operation;
extern const ffi_operation ffi_linear_ce, ffi_ce;

/* The argument struct of any operation, and what it is with nothing given. */
typedef union ffi_args_struct {
    ll_linear_ce_args linear_ce;
    ll_ce_args ce;
} ffi_args_struct;
void ffi_operation_init(const ffi_operation *operation, ffi_args_struct *args);

/* What every pass is called with beside its operands. */
typedef struct ffi_call {
    const ffi_plan *plan;
    ll_stream stream;
    int32_t flags; /* what the pass makes of it */
    void *workspace;
    size_t workspace_bytes;
} ffi_call;

/* Reads the operands of a call into *to, which is initialised; given[i]: operand i was a tensor. 0, or -1
 * with the error set. */
int ffi_read_operands(ffi_args *from, const ffi_operation *operation, const ffi_plan *plan,
                      ffi_args_struct *to, bool *given);
/* Workspace from `start`, of which `bytes` are usable, as the library wants it. */
void ffi_call_workspace(ffi_call *call, uintptr_t start, int64_t bytes);
/* The pass itself. 0, or -1 with the error set. */
int ffi_run(const ffi_operation *operation, ll_pass pass, const ffi_call *call, ffi_args_struct *args);
/* A pass as a function of the module: reads, and runs. */
int ffi_pass(const ffi_operation *operation, ll_pass pass, const TVMFFIAny *at, int32_t n);

#endif
