/* Integer softmax: the sums of a row's softmax as integers, so that they do not depend on order.
 *
 * The vocabulary is cut into canonical tiles of 64 columns on the global index. Per row and tile, with
 * zmax the tile's largest logit and log2 e = L_hi + L_lo in two floats:
 *
 *   k   = the least integer with d(zmax) <= 0            d(z) = fma(z, L_lo, fma(z, L_hi, -k))
 *   p_v = 2^d(z_v) in (0, 1]
 *   S   = sum_v round(p_v 2^30)    U = sum_v round(p_v (-d_v) 2^30)           S <= 2^36, U < 2^36
 *
 * A row adds its tiles in a window of three 32-bit limbs that hangs on the largest anchor seen:
 *
 *   top = max over tiles of floor(k / 32)
 *   s[i], i = 0..2: weight 2^(32 (top - 1 + i) - 30);   S 2^(k mod 32) of a tile covers limbs
 *   floor(k/32) and floor(k/32) + 1, each limb an int64 without carries;   limbs below top - 1 are dropped
 *   u[i]: the same for sum_v p_v (32 (top + 1) - z_v log2 e)
 *
 * What a limb holds in the end depends on the set of tiles only: a limb inside the final window was
 * inside every earlier window. So merging is associative and commutative, and any order, chunk or
 * partition over ranks gives the same bits. What is dropped is below 2^-62 of the row's sum. At
 * V = 2^20 (2^14 tiles) a limb of s stays below 2^50 and one of u below 2^57.
 *
 * Logits too large for the float formula (|zmax| >= 2^22) take d from double arithmetic; from 2^29 on,
 * where neighbouring floats are 32 nats and more apart, p is 1 for logits equal to zmax and 0 for others
 * (`top` then encodes zmax itself). So every finite logit has its right softmax. */
#ifndef LLI_CORE_SOFTMAX_H
#define LLI_CORE_SOFTMAX_H

#include "core/shared.h"

#include <math.h>
#include <stdint.h>

enum { kTileCols = 64, kGridBits = 30 };

#define LLI_LOG2E_HI 0x1.715476p+0f
#define LLI_LOG2E_LO 0x1.4ae0cp-26f /* log2 e - LLI_LOG2E_HI */
#define LLI_Z_FLOAT  0x1p22f        /* |zmax| below this: the float formula */
#define LLI_Z_DOUBLE 0x1p29f        /* below this: d in double */

/* 2^f = 1 + f (c0 + f (c1 + ...)), |f| <= 1/2: minimax, relative error below 4e-9 before rounding. */
#define LLI_EXP2_C0 0x1.62e430p-1f
#define LLI_EXP2_C1 0x1.ebfbe0p-3f
#define LLI_EXP2_C2 0x1.c6af6cp-5f
#define LLI_EXP2_C3 0x1.3b29e4p-7f
#define LLI_EXP2_C4 0x1.5f0896p-10f
#define LLI_EXP2_C5 0x1.446c82p-13f

/* The anchor k of a tile, |zmax| < LLI_Z_FLOAT: an integer below 2^23 in magnitude. */
LLI_LOCAL inline float lli_softmax_anchor(float zmax) {
    float k = ceilf(zmax * LLI_LOG2E_HI);
    return fmaf(zmax, LLI_LOG2E_LO, fmaf(zmax, LLI_LOG2E_HI, -k)) > 0.0f ? k + 1.0f : k;
}

enum { LLI_TOP_EMPTY = INT32_MIN, LLI_TOP_NAN = INT32_MAX };

typedef struct lli_softmax {
    int64_t s[3], u[3];
    int32_t top; /* LLI_TOP_EMPTY: no finite logit yet; LLI_TOP_NAN: the row is NaN */
    int32_t reserved;
} lli_softmax;

LLI_LOCAL inline void lli_softmax_clear(lli_softmax *row) {
    *row = (lli_softmax){.top = LLI_TOP_EMPTY};
}

/* A tile of the float formula as a row of its own, and row += it. */
LLI_LOCAL inline lli_softmax lli_softmax_of_tile(int32_t k, int64_t s, int64_t u) {
    const int32_t shift = k & 31;
    u += (32 - shift) * s; /* now relative to 32 (top + 1) */
    return (lli_softmax){
        .s = {0, (int64_t)(((uint64_t)s << shift) & 0xffffffffu), s >> (32 - shift)},
        .u = {0, (int64_t)(((uint64_t)u << shift) & 0xffffffffu), u >> (32 - shift)},
        .top = (k - shift) / 32,
    };
}
LLI_SHARED void lli_softmax_add(lli_softmax *row, int32_t k, int64_t s, int64_t u);
/* The same, without a call where the window hangs at the tile's own limb already: nearly always, since a limb
 * is 22 nats wide. */
LLI_LOCAL inline void lli_softmax_add_tile(lli_softmax *row, int32_t k, int64_t s, int64_t u) {
    const int32_t shift = k & 31, top = (k - shift) / 32;
    if (row->top != top) { /* by a copy: a row whose address is known elsewhere would not stay in registers */
        lli_softmax other = *row;
        lli_softmax_add(&other, k, s, u);
        *row = other;
        return;
    }
    u += (32 - shift) * s;
    row->s[1] += (int64_t)(((uint64_t)s << shift) & 0xffffffffu);
    row->s[2] += s >> (32 - shift);
    row->u[1] += (int64_t)(((uint64_t)u << shift) & 0xffffffffu);
    row->u[2] += u >> (32 - shift);
}
/* row += other. */
LLI_SHARED void lli_softmax_merge(lli_softmax *row, const lli_softmax *other);
/* row += the tile z[0..n), n <= 64, of any range (-inf, +inf and NaN too); zmax is its maximum, NaN if
 * a logit is. The definition in scalar code; kernels call it for |zmax| >= LLI_Z_FLOAT. */
LLI_SHARED void lli_softmax_tile(lli_softmax *row, const float *z, int n, float zmax);

/* The same in two steps, for a tile whose columns lie on several ranks: each sums its own columns against
 * the maximum of them all (0 where that is not finite), the integers are added over ranks, and the tile is
 * added once. */
LLI_SHARED void lli_softmax_tile_sums(const float *z, int n, float zmax, int64_t *s, int64_t *u);
LLI_SHARED void lli_softmax_tile_add(lli_softmax *row, float zmax, int64_t s, int64_t u);

/* Integers in the order of floats, so that a maximum over ranks is one of int32: -0 counts as 0, NaN is the
 * largest. lli_softmax_key_none is below every key. */
enum { lli_softmax_key_none = INT32_MIN };
LLI_SHARED int32_t lli_softmax_key(float z);
LLI_SHARED float lli_softmax_key_value(int32_t key);

/* Hangs the window at `top`, at or above row->top: the limbs are then those of the group's sum. */
LLI_SHARED void lli_softmax_raise(lli_softmax *row, int32_t top);

/* ln sum exp z (-inf when empty) and the entropy in nats (>= 0); NaN for a NaN row. */
LLI_WAITED double lli_softmax_lse(const lli_softmax *row);
LLI_SHARED double lli_softmax_entropy(const lli_softmax *row);

#endif
