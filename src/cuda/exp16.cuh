/* A power p = 2^d, d <= 0, in 16 bits, as a pass keeps those of its logits for their gradients: without a
 * sign, 6 bits of exponent, 10 of mantissa.
 *
 *   code   [ x: 6 ][ m: 10 ]        (1 + m 2^-10) 2^(x - 63);   x = 0:  m 2^-72
 *   0xfc00 is 1, the largest; 0 is 0
 *
 * Relative error at most 2^-11 from 2^-62 up, where a bf16 has 2^-8 and an f16 reaches down to 2^-14 only;
 * below, absolute error at most 2^-63. A code is a slice of an f32: bits 13 to 28 of p 2^-64. So a pair costs
 * three instructions to make, and a shift and a mask to read, beside the multiplication by 2^64 that the
 * reader's factor takes in. All kernels that make gradients of logits from bf16 operands round p to it,
 * whether it is kept or not: the same bits of dz everywhere. */
#ifndef LLI_CUDA_EXP16_CUH
#define LLI_CUDA_EXP16_CUH

#include <stdint.h>

/* What a reader's factor takes in. */
#define EXP16_UNIT 0x1p64f

enum { kExp16Bits = 0x1fffe000 }; /* where the code is in what follows */

/* Of 2^30 p, p >= 2^-63: bits 13 to 28, rounded to nearest; the rest is left over. */
static __device__ inline uint32_t exp16_of(float scaled) {
    return __float_as_uint(scaled) - ((30u + 64u) << 23) + (1u << 12);
}

/* Two of them, the first in the low half. */
static __device__ inline uint32_t exp16_pair(uint32_t low, uint32_t high) {
    return __byte_perm(low << 3, high << 3, 0x7632);
}

/* p 2^-64, from a pair and from what was not packed. */
static __device__ inline float exp16_low(uint32_t pair) {
    return __uint_as_float(pair << 13 & kExp16Bits);
}
static __device__ inline float exp16_high(uint32_t pair) {
    return __uint_as_float(pair >> 3 & kExp16Bits);
}
static __device__ inline float exp16_value(uint32_t bits) {
    return __uint_as_float(bits & kExp16Bits);
}

#endif
