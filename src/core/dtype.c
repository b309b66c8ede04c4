/* Names and sizes of element types. */
#include "core/dtype.h"

size_t ll_dtype_bytes(ll_dtype dtype) {
    switch (dtype) {
    case LL_DTYPE_F32:
    case LL_DTYPE_I32:
        return 4;
    case LL_DTYPE_BF16:
    case LL_DTYPE_F16:
        return 2;
    case LL_DTYPE_I64:
        return 8;
    case LL_DTYPE_NONE:
        break;
    }
    return 0;
}

const char *ll_dtype_name(ll_dtype dtype) {
    static const char *const names[] = {"none", "f32", "bf16", "f16", "i32", "i64"};
    return (int)dtype >= 0 && (size_t)dtype < sizeof names / sizeof *names ? names[dtype] : "unknown";
}
