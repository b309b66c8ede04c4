/* exp, expm1, log and log1p in double from +, -, *, / alone, so that the per-row results have the same bits
 * with every C library and, later, on a GPU. Relative error below 4e-16 in the ranges stated (tests/core);
 * compile without contraction (-ffp-contract=off). */
#ifndef LLI_CORE_MATH64_H
#define LLI_CORE_MATH64_H

#include "core/shared.h"

#include <stdint.h>
#include <string.h>

#define LLI_LN2_HI 0x1.62e42fefa3800p-1 /* 42 bits: k * LN2_HI is exact for |k| < 2^11 */
#define LLI_LN2_LO 0x1.ef35793c76730p-45
#define LLI_LN2    0x1.62e42fefa39efp-1
#define LLI_LOG2E  0x1.71547652b82fep+0

LLI_LOCAL inline double lli_pow2(int64_t n) { /* -1022 <= n <= 1023 */
    uint64_t bits = (uint64_t)(n + 1023) << 52;
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* e^r - 1 for |r| <= 0.36: Taylor to r^14, remainder below 2^-60 |r|. */
LLI_MATH double lli_expm1_small(double r) {
    double p = 1.0 / 87178291200.0;
    p = p * r + 1.0 / 6227020800.0;
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    return r + r * r * p;
}

/* e^x; 0 below -745, +inf above 710, NaN for NaN. */
LLI_MATH double lli_exp(double x) {
    if (x != x) return x;
    if (x < -745.0) return 0.0;
    if (x > 710.0) return 1e308 * 1e308;
    double scaled = x * LLI_LOG2E;
    int64_t k = (int64_t)(scaled + (scaled < 0 ? -0.5 : 0.5));
    double r = (x - (double)k * LLI_LN2_HI) - (double)k * LLI_LN2_LO;
    double value = 1.0 + lli_expm1_small(r);
    int64_t half = k / 2;
    return value * lli_pow2(half) * lli_pow2(k - half);
}

/* e^x - 1 for x <= 0. */
LLI_LOCAL inline double lli_expm1(double x) {
    return x > -0.34 ? lli_expm1_small(x) : lli_exp(x) - 1.0;
}

/* ln x for normal finite x > 0; -inf for 0, x itself for +inf and NaN. */
LLI_MATH double lli_log(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x == 0.0) return -1e308 * 1e308;
    if (bits >> 52 >= 0x7ff) return x;
    int64_t e = (int64_t)(bits >> 52) - 1023;
    bits = (bits & 0xfffffffffffffu) | (UINT64_C(1023) << 52);
    double m;
    memcpy(&m, &bits, sizeof m);
    if (m > 0x1.6a09e667f3bcdp+0) {
        m *= 0.5;
        e++;
    }
    /* ln m = 2 artanh(s), |s| <= 0.1716: the next term is below 2^-62 of the first */
    double s = (m - 1.0) / (m + 1.0), t = s * s, p = 1.0 / 23.0;
    p = p * t + 1.0 / 21.0;
    p = p * t + 1.0 / 19.0;
    p = p * t + 1.0 / 17.0;
    p = p * t + 1.0 / 15.0;
    p = p * t + 1.0 / 13.0;
    p = p * t + 1.0 / 11.0;
    p = p * t + 1.0 / 9.0;
    p = p * t + 1.0 / 7.0;
    p = p * t + 1.0 / 5.0;
    p = p * t + 1.0 / 3.0;
    double tail = 2.0 * s * (t * p);
    return (double)e * LLI_LN2_HI + ((double)e * LLI_LN2_LO + tail + 2.0 * s);
}

/* ln(1 + x) for x >= 0. Kahan's correction: log(u) x / (u - 1) with u = 1 + x rounded. */
LLI_MATH double lli_log1p(double x) {
    double u = 1.0 + x;
    if (u == 1.0 || x > 1e300 || x != x) return u == 1.0 ? x : lli_log(x);
    return lli_log(u) * (x / (u - 1.0));
}

#endif
