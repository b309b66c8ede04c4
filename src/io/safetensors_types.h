/* The element types of the .safetensors format, shared by its reader and its writer. */
#ifndef LLI_IO_SAFETENSORS_TYPES_H
#define LLI_IO_SAFETENSORS_TYPES_H

#include <logitless/logitless.h>

typedef struct lli_safetensors_type {
    const char *name;
    ll_dtype dtype;       /* NONE: legal in a file, not used here */
    int32_t element_bits; /* F4 and F6 pack; a tensor is whole bytes all the same */
} lli_safetensors_type;

static const lli_safetensors_type lli_safetensors_types[] = {
    {"F32", LL_DTYPE_F32, 32},         {"BF16", LL_DTYPE_BF16, 16},   {"F16", LL_DTYPE_F16, 16},
    {"I32", LL_DTYPE_I32, 32},         {"I64", LL_DTYPE_I64, 64},     {"F64", LL_DTYPE_NONE, 64},
    {"C64", LL_DTYPE_NONE, 64},        {"U64", LL_DTYPE_NONE, 64},    {"U32", LL_DTYPE_NONE, 32},
    {"I16", LL_DTYPE_NONE, 16},        {"U16", LL_DTYPE_NONE, 16},    {"I8", LL_DTYPE_NONE, 8},
    {"U8", LL_DTYPE_NONE, 8},          {"BOOL", LL_DTYPE_NONE, 8},    {"F8_E4M3", LL_DTYPE_NONE, 8},
    {"F8_E5M2", LL_DTYPE_NONE, 8},     {"F8_E8M0", LL_DTYPE_NONE, 8}, {"F8_E4M3FNUZ", LL_DTYPE_NONE, 8},
    {"F8_E5M2FNUZ", LL_DTYPE_NONE, 8}, {"F6_E2M3", LL_DTYPE_NONE, 6}, {"F6_E3M2", LL_DTYPE_NONE, 6},
    {"F4", LL_DTYPE_NONE, 4},
};
enum { kSafetensorsTypes = sizeof lli_safetensors_types / sizeof *lli_safetensors_types };

#endif
