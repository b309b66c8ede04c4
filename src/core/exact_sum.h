/* Exact, order-free sums: a fixed-point accumulator wide enough for every f32.
 *
 *   value = sum_i limb[i] * 2^(32 i - 192),  i = 0 .. 12        limb: int64, carries not propagated
 *
 * An addend m * 2^e (m an integer) is split over three limbs, so adding is exact integer arithmetic and
 * any order, grouping or partition gives the same limbs. Each add puts less than 2^32 into a limb;
 * lli_exact_carry must run at least every 2^30 adds (lli_exact_add_f32 counts). Method: small
 * superaccumulator after Kulisch; see Neal, "Fast exact summation using small and large
 * superaccumulators" (2015). */
#ifndef LLI_CORE_EXACT_SUM_H
#define LLI_CORE_EXACT_SUM_H

#include "core/shared.h"

#include <stdint.h>

enum { kExactLimbs = 13, kExactBias = 192, kExactCarryEvery = 1 << 30 };

enum { LLI_EXACT_NAN = 1, LLI_EXACT_POS_INF = 2, LLI_EXACT_NEG_INF = 4 };

typedef struct lli_exact {
    int64_t limb[kExactLimbs];
    int32_t flags;
    int32_t adds; /* since the last carry */
} lli_exact;

/* An addend's three parts; they go into limbs [limb, limb + 3). For accumulators that several threads add to.
 */
typedef struct lli_exact_parts {
    int64_t part[3];
    int32_t limb;
    int32_t flags; /* of an infinity or NaN, which has no parts */
} lli_exact_parts;
LLI_SHARED lli_exact_parts lli_exact_split(int64_t m, int32_t exponent);
LLI_SHARED lli_exact_parts lli_exact_split_f32(float value);

/* acc += m * 2^exponent, |m| < 2^62, -192 <= exponent <= 128. */
LLI_SHARED void lli_exact_add(lli_exact *acc, int64_t m, int32_t exponent);
/* acc += value; infinities and NaN become flags. */
LLI_SHARED void lli_exact_add_f32(lli_exact *acc, float value);
/* acc += other. */
LLI_SHARED void lli_exact_merge(lli_exact *acc, const lli_exact *other);
/* The value, rounded once to nearest even; NaN or infinite by the flags. */
LLI_SHARED double lli_exact_value(const lli_exact *acc);

#endif
