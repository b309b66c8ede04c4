/* The exact accumulator of exact_sum.h and the public sum over it. */
#include "core/exact_sum.h"
#include "core/dtype.h"

#include <math.h>
#ifndef __CUDACC__
#include "core/status.h"
#endif

/* Leaves every limb but the last in [0, 2^32): the last carries the sign. */
LLI_LOCAL void carry(lli_exact *acc) {
    for (int i = 0; i + 1 < kExactLimbs; i++) {
        int64_t low = acc->limb[i] & 0xffffffff;
        acc->limb[i + 1] += (acc->limb[i] - low) / ((int64_t)1 << 32); /* exact: low bits are gone */
        acc->limb[i] = low;
    }
    acc->adds = 0;
}

LLI_LOCAL void count_add(lli_exact *acc) {
    if (++acc->adds == kExactCarryEvery) carry(acc);
}

LLI_SHARED lli_exact_parts lli_exact_split(int64_t m, int32_t exponent) {
    int32_t position = exponent + kExactBias, shift = position & 31;
    int64_t sign = m < 0 ? -1 : 1;
    uint64_t magnitude = m < 0 ? 0u - (uint64_t)m : (uint64_t)m;
    uint64_t low = (magnitude & 0xffffffffu) << shift, high = (magnitude >> 32) << shift;
    uint64_t middle = (low >> 32) + (high & 0xffffffffu);
    lli_exact_parts parts = {{sign * (int64_t)(low & 0xffffffffu), sign * (int64_t)(middle & 0xffffffffu),
                              sign * (int64_t)((high >> 32) + (middle >> 32))},
                             position >> 5,
                             0};
    return parts;
}

LLI_SHARED lli_exact_parts lli_exact_split_f32(float value) {
    uint32_t bits = lli_bits(value), exponent = (bits >> 23) & 0xffu, mantissa = bits & 0x7fffffu;
    if (exponent == 0xffu) {
        lli_exact_parts none = {{0, 0, 0},
                                0,
                                mantissa     ? LLI_EXACT_NAN
                                : bits >> 31 ? LLI_EXACT_NEG_INF
                                             : LLI_EXACT_POS_INF};
        return none;
    }
    int64_t m = exponent ? (int64_t)(mantissa | 0x800000u) : (int64_t)mantissa;
    return lli_exact_split(bits >> 31 ? -m : m, (int32_t)(exponent ? exponent : 1u) - 150);
}

LLI_LOCAL void add_parts(lli_exact *acc, lli_exact_parts parts) {
    for (int i = 0; i < 3; i++) acc->limb[parts.limb + i] += parts.part[i];
    acc->flags |= parts.flags;
    count_add(acc);
}

LLI_SHARED void lli_exact_add(lli_exact *acc, int64_t m, int32_t exponent) {
    add_parts(acc, lli_exact_split(m, exponent));
}

LLI_SHARED void lli_exact_add_f32(lli_exact *acc, float value) {
    add_parts(acc, lli_exact_split_f32(value));
}

LLI_SHARED void lli_exact_merge(lli_exact *acc, const lli_exact *other) {
    lli_exact addend = *other;
    carry(&addend);
    for (int i = 0; i < kExactLimbs; i++) acc->limb[i] += addend.limb[i];
    acc->flags |= other->flags;
    count_add(acc);
}

LLI_SHARED double lli_exact_value(const lli_exact *acc) {
    int32_t infinities = acc->flags & (LLI_EXACT_POS_INF | LLI_EXACT_NEG_INF);
    if ((acc->flags & LLI_EXACT_NAN) || infinities == (LLI_EXACT_POS_INF | LLI_EXACT_NEG_INF)) return NAN;
    if (infinities) return infinities == LLI_EXACT_POS_INF ? INFINITY : -INFINITY;
    lli_exact sum = *acc;
    carry(&sum);
    int negative = sum.limb[kExactLimbs - 1] < 0;
    if (negative) {
        for (int i = 0; i < kExactLimbs; i++) sum.limb[i] = -sum.limb[i];
        carry(&sum);
    }
    int top = kExactLimbs - 1;
    while (top > 0 && sum.limb[top] == 0) top--;
    /* The leading 64 bits and a sticky bit for the rest: the conversion then rounds as the whole would. */
    uint64_t word = (uint64_t)sum.limb[top];
    int exponent = 32 * top - kExactBias, next = top - 1;
    for (; next >= 0 && word < (UINT64_C(1) << 32); next--, exponent -= 32) {
        word = word << 32 | (uint64_t)sum.limb[next];
    }
    if (next >= 0 && word < (UINT64_C(1) << 62)) {
        int room = 0;
        while (word << room < (UINT64_C(1) << 62)) room++;
        if (room > 32) room = 32;
        uint64_t limb = (uint64_t)sum.limb[next];
        word = word << room | limb >> (32 - room);
        exponent -= room;
        if (limb & ((UINT64_C(1) << (32 - room)) - 1)) word |= 1;
        next--;
    }
    for (; next >= 0; next--) {
        if (sum.limb[next]) word |= 1;
    }
    double value = ldexp((double)word, exponent);
    return negative ? -value : value;
}

#ifndef __CUDACC__
ll_status ll_sum_f32(const float *values, int64_t n, int64_t step, double *sum) {
    LLI_REQUIRE(sum, LL_STATUS_INVALID_ARG, "ll_sum_f32: sum is NULL");
    LLI_REQUIRE(n >= 0 && n <= (int64_t)1 << 40, LL_STATUS_INVALID_ARG,
                "ll_sum_f32: n is %lld, want 0 .. 2^40", (long long)n);
    LLI_REQUIRE(step >= 1, LL_STATUS_INVALID_ARG, "ll_sum_f32: step is %lld, want >= 1", (long long)step);
    LLI_REQUIRE(values || n == 0, LL_STATUS_INVALID_ARG, "ll_sum_f32: values is NULL");
    lli_exact acc = {0};
    for (int64_t i = 0; i < n; i++) lli_exact_add_f32(&acc, values[i * step]);
    *sum = lli_exact_value(&acc);
    return LL_STATUS_OK;
}
#endif
