/* The row state of softmax.h: adding tiles, merging, and the results. */
#include "core/softmax.h"
#include "core/dtype.h"
#include "core/math64.h"

#include <math.h>

/* `top` of rows whose largest logit is beyond LLI_Z_DOUBLE: kTopWide + (bits of |z| - bits of the limit),
 * negated for negative logits. Finite floats end below 2^31 - 1, so LLI_TOP_NAN stays apart. */
enum { kTopWide = 1 << 30 };

LLI_LOCAL int32_t wide_top(float z) {
    int32_t offset = (int32_t)(lli_bits(fabsf(z)) - lli_bits(LLI_Z_DOUBLE));
    return z > 0.0f ? kTopWide + offset : -kTopWide - 1 - offset;
}

LLI_LOCAL double wide_logit(int32_t top) {
    int32_t offset = top > 0 ? top - kTopWide : -kTopWide - 1 - top;
    double z = (double)lli_float(lli_bits(LLI_Z_DOUBLE) + (uint32_t)offset);
    return top > 0 ? z : -z;
}

LLI_LOCAL int is_wide(int32_t top) {
    return top >= kTopWide || top < -kTopWide;
}

/* Hangs the window one limb higher; the lowest falls out. Indices are constants: see shared.h. */
LLI_LOCAL void hang_higher(lli_softmax *row) {
    row->s[0] = row->s[1];
    row->u[0] = row->u[1] + 32 * row->s[0];
    row->s[1] = row->s[2];
    row->u[1] = row->u[2] + 32 * row->s[1];
    row->s[2] = 0;
    row->u[2] = 0;
}

LLI_SHARED void lli_softmax_merge(lli_softmax *row, const lli_softmax *other) {
    if (other->top == LLI_TOP_EMPTY || row->top == LLI_TOP_NAN) return;
    if (row->top == LLI_TOP_EMPTY || other->top == LLI_TOP_NAN) {
        *row = *other;
        return;
    }
    const int64_t rise = (int64_t)other->top - row->top;
    lli_softmax addend = *other;
    if (rise > 0) row->top = other->top;
    for (int64_t n = rise < 3 ? rise : 3; n > 0; n--) hang_higher(row);
    for (int64_t n = -rise < 3 ? -rise : 3; n > 0; n--) hang_higher(&addend);
    row->s[0] += addend.s[0];
    row->s[1] += addend.s[1];
    row->s[2] += addend.s[2];
    row->u[0] += addend.u[0];
    row->u[1] += addend.u[1];
    row->u[2] += addend.u[2];
}

LLI_SHARED void lli_softmax_add(lli_softmax *row, int32_t k, int64_t s, int64_t u) {
    const lli_softmax tile = lli_softmax_of_tile(k, s, u);
    lli_softmax_merge(row, &tile);
}

/* 2^30 p and 2^30 p (-d) of one logit, rounded to nearest even; the float formula. The kernels' vector
 * code does the same operations in the same order. */
LLI_LOCAL void grid_float(float z, float k, int64_t *s, int64_t *u) {
    float d = fmaf(z, LLI_LOG2E_LO, fmaf(z, LLI_LOG2E_HI, -k));
    d = d > -64.0f ? d : -64.0f;
    float n = rintf(d), f = d - n;
    float q = LLI_EXP2_C5;
    q = fmaf(q, f, LLI_EXP2_C4);
    q = fmaf(q, f, LLI_EXP2_C3);
    q = fmaf(q, f, LLI_EXP2_C2);
    q = fmaf(q, f, LLI_EXP2_C1);
    q = fmaf(q, f, LLI_EXP2_C0);
    float p = fmaf(q, f, 1.0f) * lli_float((uint32_t)((int32_t)n + 127 + kGridBits) << 23);
    *s += (int64_t)rintf(p);
    *u += (int64_t)rintf(p * -d);
}

LLI_LOCAL void grid_double(float z, double k, int64_t *s, int64_t *u) {
    double d = (double)z * LLI_LOG2E - k;
    if (!(d > -64.0)) return;
    double p = lli_exp(d * LLI_LN2) * 0x1p30;
    *s += (int64_t)rint(p);
    *u += (int64_t)rint(p * -d);
}

LLI_SHARED void lli_softmax_tile_sums(const float *z, int n, float zmax, int64_t *s, int64_t *u) {
    *s = *u = 0;
    if (!(fabsf(zmax) < INFINITY)) return;
    if (fabsf(zmax) < LLI_Z_FLOAT) {
        float k = lli_softmax_anchor(zmax);
        for (int v = 0; v < n; v++) grid_float(z[v], k, s, u);
    } else if (fabsf(zmax) < LLI_Z_DOUBLE) {
        double k = ceil((double)zmax * LLI_LOG2E);
        for (int v = 0; v < n; v++) grid_double(z[v], k, s, u);
    } else {
        for (int v = 0; v < n; v++) *s += z[v] == zmax;
    }
}

LLI_SHARED void lli_softmax_tile_add(lli_softmax *row, float zmax, int64_t s, int64_t u) {
    if (zmax == -INFINITY) return;
    if (!(zmax < INFINITY)) {
        row->top = LLI_TOP_NAN;
    } else if (fabsf(zmax) < LLI_Z_FLOAT) {
        lli_softmax_add(row, (int32_t)lli_softmax_anchor(zmax), s, u);
    } else if (fabsf(zmax) < LLI_Z_DOUBLE) {
        lli_softmax_add(row, (int32_t)ceil((double)zmax * LLI_LOG2E), s, u);
    } else {
        const lli_softmax tile = {.s = {0, 0, s}, .top = wide_top(zmax)};
        lli_softmax_merge(row, &tile);
    }
}

LLI_SHARED void lli_softmax_tile(lli_softmax *row, const float *z, int n, float zmax) {
    int64_t s, u;
    lli_softmax_tile_sums(z, n, zmax, &s, &u);
    lli_softmax_tile_add(row, zmax, s, u);
}

LLI_SHARED int32_t lli_softmax_key(float z) {
    if (z != z) return INT32_MAX;
    const uint32_t bits = lli_bits(z == 0.0f ? 0.0f : z);
    return bits >> 31 ? (int32_t) ~(bits ^ 0x80000000u) : (int32_t)bits;
}

LLI_SHARED float lli_softmax_key_value(int32_t key) {
    if (key == INT32_MAX) return NAN;
    return lli_float(key < 0 ? ~(uint32_t)key ^ 0x80000000u : (uint32_t)key);
}

LLI_SHARED void lli_softmax_raise(lli_softmax *row, int32_t top) {
    lli_softmax raised = {.top = top};
    if (top != LLI_TOP_EMPTY && top != LLI_TOP_NAN) lli_softmax_merge(&raised, row);
    *row = raised;
}

/* x[0] + 2^32 x[1] + 2^64 x[2], non-negative, rounded once. */
LLI_LOCAL double limbs(const int64_t x[3]) {
    __extension__ typedef unsigned __int128 u128;
    return (double)(((u128)(uint64_t)x[2] << 64) + ((u128)(uint64_t)x[1] << 32) + (u128)(uint64_t)x[0]);
}

LLI_WAITED double lli_softmax_lse(const lli_softmax *row) {
    if (row->top == LLI_TOP_EMPTY) return -INFINITY;
    if (row->top == LLI_TOP_NAN) return NAN;
    if (is_wide(row->top)) return wide_logit(row->top) + lli_log((double)row->s[2]);
    double exponent = 32.0 * (row->top - 1.0) - kGridBits;
    return exponent * LLI_LN2 + lli_log(limbs(row->s));
}

LLI_SHARED double lli_softmax_entropy(const lli_softmax *row) {
    if (row->top == LLI_TOP_EMPTY || row->top == LLI_TOP_NAN) return NAN;
    if (is_wide(row->top)) return lli_log((double)row->s[2]);
    /* H / ln 2 = log2 sum - mean(z log2 e), and the mean is 32 (top + 1) - U / S: the offset cancels. */
    double s = limbs(row->s), bits = limbs(row->u) / s - (32.0 * 2 + kGridBits) + lli_log(s) * LLI_LOG2E;
    return bits > 0.0 ? bits * LLI_LN2 : 0.0;
}
