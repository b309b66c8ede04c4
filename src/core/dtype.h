/* Element types: widening to f32 (exact) and narrowing from f32 (round to nearest even, NaN kept). */
#ifndef LLI_CORE_DTYPE_H
#define LLI_CORE_DTYPE_H

#include "core/shared.h"

#include <logitless/logitless.h>
#include <string.h>

LLI_LOCAL inline uint32_t lli_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

LLI_LOCAL inline float lli_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

LLI_LOCAL inline float lli_bf16_to_f32(uint16_t h) {
    return lli_float((uint32_t)h << 16);
}

LLI_LOCAL inline uint16_t lli_f32_to_bf16(float value) {
    uint32_t bits = lli_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40u); /* quiet NaN */
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

LLI_LOCAL inline float lli_f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, magnitude = h & 0x7fffu;
    if (magnitude >= 0x7c00u) return lli_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    if (magnitude < 0x400u) { /* subnormal: magnitude * 2^-24, exact */
        float value = (float)magnitude * 0x1p-24f;
        return sign ? -value : value;
    }
    return lli_float(sign | ((magnitude << 13) + (112u << 23)));
}

LLI_LOCAL inline uint16_t lli_f32_to_f16(float value) {
    uint32_t bits = lli_bits(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* >= 65520 rounds to infinity */
    if (magnitude < 0x38800000u) { /* below 2^-14: adding 0.5 leaves the multiple of 2^-24 in the low bits */
        return (uint16_t)(sign | (lli_bits(lli_float(magnitude) + 0.5f) - 0x3f000000u));
    }
    return (uint16_t)(sign | ((magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
}

/* ll_dtype_bytes of an element type that is known to be one. */
LLI_LOCAL inline size_t lli_dtype_bytes(int32_t dtype) {
    return dtype == LL_DTYPE_I64 ? 8 : dtype == LL_DTYPE_F32 || dtype == LL_DTYPE_I32 ? 4 : 2;
}

/* Element i of an f32, bf16 or f16 array. */
LLI_LOCAL inline float lli_load(const void *data, int32_t dtype, int64_t i) {
    if (dtype == LL_DTYPE_F32) return ((const float *)data)[i];
    uint16_t h = ((const uint16_t *)data)[i];
    return dtype == LL_DTYPE_BF16 ? lli_bf16_to_f32(h) : lli_f16_to_f32(h);
}

LLI_LOCAL inline void lli_store(void *data, int32_t dtype, int64_t i, float value) {
    if (dtype == LL_DTYPE_F32) {
        ((float *)data)[i] = value;
    } else {
        ((uint16_t *)data)[i] = dtype == LL_DTYPE_BF16 ? lli_f32_to_bf16(value) : lli_f32_to_f16(value);
    }
}

/* Start of row r of a matrix view, element i of a vector of token ids. */
LLI_LOCAL inline const char *lli_row(const ll_view *view, int64_t r) {
    return (const char *)view->data + (size_t)(r * view->row_stride) * lli_dtype_bytes(view->dtype);
}

LLI_LOCAL inline int64_t lli_id(const ll_view *view, int64_t i) {
    return view->dtype == LL_DTYPE_I64 ? ((const int64_t *)view->data)[i * view->row_stride]
                                       : (int64_t)((const int32_t *)view->data)[i * view->row_stride];
}

/* Element (r, c) of a matrix of token ids. */
LLI_LOCAL inline int64_t lli_id_at(const ll_view *view, int64_t r, int64_t c) {
    const int64_t at = r * view->row_stride + c;
    return view->dtype == LL_DTYPE_I64 ? ((const int64_t *)view->data)[at]
                                       : (int64_t)((const int32_t *)view->data)[at];
}

#endif
