/* The vector vocabulary of the CPU kernels in plain C: what every operation means. A compiler for a machine
 * with vectors and fused multiply-add (64-bit ARM, POWER, ...) turns the loops into them. Rounding is to
 * nearest even everywhere; fmaf is the correctly rounded fused operation on every machine. */
#ifndef LLI_CPU_SIMD_PLAIN_H
#define LLI_CPU_SIMD_PLAIN_H

#include "core/dtype.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { kLanes = 4, kGemmRows = 4, kGemmVectors = 4 }; /* 128-bit registers, which most machines have */

typedef struct vf {
    float x[kLanes];
} vf;
typedef struct vi {
    uint32_t x[kLanes];
} vi;

#define LLI_LANES for (int l = 0; l < kLanes; l++)

static inline vf v_set(float x) {
    vf r;
    LLI_LANES r.x[l] = x;
    return r;
}
static inline vf v_load(const float *p) {
    vf r;
    LLI_LANES r.x[l] = p[l];
    return r;
}
static inline void v_store(float *p, vf a) {
    LLI_LANES p[l] = a.x[l];
}
static inline vf v_load_bf16(const uint16_t *p) {
    vf r;
    LLI_LANES r.x[l] = lli_bf16_to_f32(p[l]);
    return r;
}
static inline uint16_t lli_even_half(float pair) { /* the one at the lower address */
    uint16_t halves[2];
    memcpy(halves, &pair, sizeof halves);
    return halves[0];
}
static inline uint16_t lli_odd_half(float pair) {
    uint16_t halves[2];
    memcpy(halves, &pair, sizeof halves);
    return halves[1];
}
/* 2 kLanes neighbouring bf16, two in a lane: only to be moved, and taken apart by the next two. */
static inline vf v_load_pairs(const uint16_t *p) {
    vf r;
    memcpy(r.x, p, sizeof r.x);
    return r;
}
/* The even, and the odd, ones of them. */
static inline vf v_even_bf16(vf pairs) {
    LLI_LANES pairs.x[l] = lli_bf16_to_f32(lli_even_half(pairs.x[l]));
    return pairs;
}
static inline vf v_odd_bf16(vf pairs) {
    LLI_LANES pairs.x[l] = lli_bf16_to_f32(lli_odd_half(pairs.x[l]));
    return pairs;
}
static inline vf v_load_f16(const uint16_t *p) {
    vf r;
    LLI_LANES r.x[l] = lli_f16_to_f32(p[l]);
    return r;
}
/* Rounded to nearest even; NaN as lli_f32_to_bf16 and lli_f32_to_f16 have it. */
static inline void v_store_bf16(uint16_t *p, vf a) {
    LLI_LANES p[l] = lli_f32_to_bf16(a.x[l]);
}
static inline void v_store_f16(uint16_t *p, vf a) {
    LLI_LANES p[l] = lli_f32_to_f16(a.x[l]);
}
static inline vf v_add(vf a, vf b) {
    LLI_LANES a.x[l] += b.x[l];
    return a;
}
static inline vf v_sub(vf a, vf b) {
    LLI_LANES a.x[l] -= b.x[l];
    return a;
}
static inline vf v_mul(vf a, vf b) {
    LLI_LANES a.x[l] *= b.x[l];
    return a;
}
static inline vf v_div(vf a, vf b) {
    LLI_LANES a.x[l] /= b.x[l];
    return a;
}
/* a b + c, rounded once */
static inline vf v_fma(vf a, vf b, vf c) {
    LLI_LANES a.x[l] = fmaf(a.x[l], b.x[l], c.x[l]);
    return a;
}
/* The larger; b where either is NaN. */
static inline vf v_max(vf a, vf b) {
    LLI_LANES a.x[l] = a.x[l] > b.x[l] ? a.x[l] : b.x[l];
    return a;
}
static inline vf v_rint(vf a) {
    LLI_LANES a.x[l] = rintf(a.x[l]);
    return a;
}
static inline vf v_abs(vf a) {
    LLI_LANES a.x[l] = fabsf(a.x[l]);
    return a;
}
static inline vf v_copysign(vf magnitude, vf sign) {
    LLI_LANES magnitude.x[l] = copysignf(magnitude.x[l], sign.x[l]);
    return magnitude;
}
/* x where a >= limit (false for NaN), else +0. */
static inline vf v_keep_ge(vf a, vf limit, vf x) {
    LLI_LANES x.x[l] = a.x[l] >= limit.x[l] ? x.x[l] : 0.0f;
    return x;
}
/* x where a is not 0 (true for NaN), else +0. */
static inline vf v_keep_nonzero(vf a, vf x) {
    LLI_LANES x.x[l] = a.x[l] != 0.0f ? x.x[l] : 0.0f;
    return x;
}
static inline int v_any_nan(vf a, vf b) {
    int any = 0;
    LLI_LANES any |= a.x[l] != a.x[l] || b.x[l] != b.x[l];
    return any;
}
/* The largest lane; no lane is NaN. */
static inline float v_hmax(vf a) {
    float m = a.x[0];
    LLI_LANES m = a.x[l] > m ? a.x[l] : m;
    return m;
}
/* Number of lanes with a > b. */
static inline int v_count_gt(vf a, vf b) {
    int n = 0;
    LLI_LANES n += a.x[l] > b.x[l];
    return n;
}
/* The nearest integer; INT32_MIN for NaN and what does not fit. */
static inline vi v_to_int(vf a) {
    vi r;
    LLI_LANES r.x[l] = fabsf(a.x[l]) < 0x1p31f ? (uint32_t)(int32_t)rintf(a.x[l]) : (uint32_t)INT32_MIN;
    return r;
}
/* 2^n for integral -126 <= n <= 127; anything for others. */
static inline vf v_pow2(vf n) {
    vi bits = v_to_int(n);
    vf r;
    LLI_LANES r.x[l] = lli_float((bits.x[l] + 127u) << 23);
    return r;
}
/* a 2^m, where shifted is 1.5 2^23 + m in each lane, a and the result normal. */
static inline vf v_exponent_add(vf a, vf shifted) {
    LLI_LANES a.x[l] = lli_float(lli_bits(a.x[l]) + (lli_bits(shifted.x[l]) << 23));
    return a;
}
static inline vi vi_zero(void) {
    vi r;
    LLI_LANES r.x[l] = 0;
    return r;
}
static inline vi vi_add(vi a, vi b) {
    LLI_LANES a.x[l] += b.x[l];
    return a;
}
/* Lanes of 32 unsigned bits added up in 64. */
typedef int64_t vw;
static inline vw vw_zero(void) {
    return 0;
}
static inline vw vw_add_unsigned(vw sum, vi a) {
    LLI_LANES sum += a.x[l];
    return sum;
}
static inline int64_t vw_sum(vw sum) {
    return sum;
}
static inline int64_t vi_sum_signed(vi a) {
    int64_t sum = 0;
    LLI_LANES sum += (int32_t)a.x[l];
    return sum;
}

/* r[i] lane j <-> r[j] lane i */
static inline void v_transpose(vf r[kLanes]) {
    for (int i = 0; i < kLanes; i++) {
        for (int j = 0; j < i; j++) {
            float t = r[i].x[j];
            r[i].x[j] = r[j].x[i];
            r[j].x[i] = t;
        }
    }
}

#endif
