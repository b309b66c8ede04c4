/* Statistics and gradient of a row of logits in the CPU micro-kernels, written once over a vector vocabulary
 * and built per instruction set; included after micro_product.h.
 *
 * stats: a canonical tile of 64 logits lies in a stack buffer of 256 bytes: transform, maximum, then 2^d on
 * the integer grid; the only horizontal steps are one maximum and one or two sums a tile.
 *
 * gradient: kLanes logits at a time, in place. */
#ifndef LLI_CPU_MICRO_ROW_H
#define LLI_CPU_MICRO_ROW_H

#include "core/dtype.h"
#include "cpu/micro.h"

#include <math.h>
#include <string.h>

enum { kTileVectors = kTileCols / kLanes };

/* ---- Powers of two and the softcap -------------------------------------------------------------- */

/* q with 2^f = 1 + f q, |f| <= 1/2. */
LLI_INLINE vf exp2_quotient(vf f) {
    vf q = v_set(LLI_EXP2_C5);
    q = v_fma(q, f, v_set(LLI_EXP2_C4));
    q = v_fma(q, f, v_set(LLI_EXP2_C3));
    q = v_fma(q, f, v_set(LLI_EXP2_C2));
    q = v_fma(q, f, v_set(LLI_EXP2_C1));
    return v_fma(q, f, v_set(LLI_EXP2_C0));
}

/* 2^d 2^grid_bits for d >= -64; one rounding for 1 + f q. */
LLI_INLINE vf exp2_grid(vf d, float grid_bits) {
    vf n = v_rint(d), f = v_sub(d, n);
    return v_mul(v_fma(exp2_quotient(f), f, v_set(1.0f)), v_pow2(v_add(n, v_set(grid_bits))));
}

/* The same for -64 <= d <= 0 and kGridBits, where every result is normal: d + 1.5 2^23 is rounded to an
 * integer as rint does, and its low bits go straight into the exponent. */
LLI_INLINE vf exp2_grid_normal(vf d) {
    const vf shift = v_set(0x1.8p23f + (float)kGridBits);
    vf shifted = v_add(d, shift), f = v_sub(d, v_sub(shifted, shift));
    return v_exponent_add(v_fma(exp2_quotient(f), f, v_set(1.0f)), shifted);
}

/* C tanh(raw / C), and its slope 1 - tanh^2 without cancellation:
 * with e = 2^d, d = -2 |raw / C| log2 e, e - 1 = m:   tanh = -m / (2 + m),   slope = 4 e / (2 + m)^2 */
LLI_INLINE vf softcap(vf raw, float cap, vf *slope) {
    vf u = v_div(raw, v_set(cap));
    vf d = v_max(v_set(-126.0f), v_mul(v_abs(u), v_set(-2.0f * LLI_LOG2E_HI)));
    vf n = v_rint(d), f = v_sub(d, n), scale = v_pow2(n);
    vf fraction = v_mul(exp2_quotient(f), f); /* 2^f - 1 in relative precision */
    vf m = v_fma(scale, fraction, v_sub(scale, v_set(1.0f))), e = v_fma(scale, fraction, scale);
    vf sum = v_add(v_set(2.0f), m);
    *slope = v_div(v_mul(v_set(4.0f), e), v_mul(sum, sum));
    return v_copysign(v_mul(v_set(cap), v_div(v_sub(v_set(0.0f), m), sum)), u);
}

LLI_INLINE vf transform_lanes(const lli_transform *transform, vf raw, vf *slope) {
    *slope = v_set(1.0f);
    if (transform->softcap != 0.0f) raw = softcap(raw, transform->softcap, slope);
    if (transform->temperature != 1.0f) raw = v_div(raw, v_set(transform->temperature));
    return raw;
}

/* ---- Statistics of a row ------------------------------------------------------------------------ */

/* row += the tile, all of whose logits are in z (-inf where there is no column). */
LLI_INLINE void tile_sums(const float *z, float zmax, const int want_entropy, lli_softmax *row) {
    if (zmax == -INFINITY) return;
    if (!(fabsf(zmax) < LLI_Z_FLOAT)) {
        lli_softmax_tile(row, z, kTileCols, zmax);
        return;
    }
    float k = lli_softmax_anchor(zmax);
    vf minus_k = v_set(-k), floor_d = v_set(-64.0f);
    vw s = vw_zero(), u = vw_zero();
    /* Two terms of at most 2^30 each stay inside 32 unsigned bits; four equal maxima would not. */
    for (int64_t i = 0; i < kTileVectors; i += 2) {
        vi s2 = vi_zero(), u2 = vi_zero();
        for (int64_t j = i; j < i + 2; j++) {
            vf x = v_load(z + j * kLanes);
            vf d = v_fma(x, v_set(LLI_LOG2E_LO), v_fma(x, v_set(LLI_LOG2E_HI), minus_k));
            d = v_max(d, floor_d);
            vf p = exp2_grid_normal(d);
            s2 = vi_add(s2, v_to_int(p));
            if (want_entropy) u2 = vi_add(u2, v_to_int(v_mul(p, v_sub(v_set(0.0f), d))));
        }
        s = vw_add_unsigned(s, s2);
        if (want_entropy) u = vw_add_unsigned(u, u2);
    }
    lli_softmax_add_tile(row, (int32_t)k, vw_sum(s), want_entropy ? vw_sum(u) : 0);
}

/* Largest logit of a tile; NaN if one is NaN. */
LLI_INLINE float tile_max(const float *z) {
    vf m = v_load(z);
    int nan = 0;
    for (int64_t j = 0; j < kTileVectors; j += 2) {
        vf x = v_load(z + j * kLanes), y = v_load(z + (j + 1) * kLanes);
        nan |= v_any_nan(x, y);
        m = v_max(m, v_max(x, y));
    }
    return nan ? NAN : v_hmax(m);
}

/* sum += sum_v cw[v] z_v on a grid 2^-30 of the tile's largest magnitude; cw = 0 takes the column out. */
static void tile_soft_sum(const float *z, const float *class_weight, int64_t n_cols, lli_exact *sum) {
    float x[kTileCols] = {0};
    for (int64_t v = 0; v < n_cols; v++) {
        float cw = class_weight ? class_weight[v] : 1.0f;
        x[v] = cw == 0.0f ? 0.0f : cw * z[v];
    }
    vf m = v_set(0.0f);
    for (int64_t j = 0; j < kTileVectors; j++) m = v_max(m, v_abs(v_load(x + j * kLanes)));
    float largest = v_hmax(m);
    if (largest == 0.0f) return;
    if (!(largest < INFINITY)) {
        for (int64_t v = 0; v < n_cols; v++) {
            if (!(fabsf(x[v]) < INFINITY)) lli_exact_add_f32(sum, x[v]);
        }
        return;
    }
    /* largest < 2^exponent; below 2^-90 the grid stops following */
    int32_t exponent = (int32_t)(lli_bits(largest) >> 23) - 126;
    if (exponent < -90) exponent = -90;
    /* 2^(30 - exponent) in two exact factors, since 30 - exponent may pass 127 (and -98 is fine) */
    int32_t half = (30 - exponent) / 2;
    vf low = v_pow2(v_set((float)half)), high = v_pow2(v_set((float)(30 - exponent - half)));
    int64_t total = 0;
    for (int64_t j = 0; j < kTileVectors; j++) {
        total += vi_sum_signed(v_to_int(v_mul(v_mul(v_load(x + j * kLanes), low), high)));
    }
    lli_exact_add(sum, total, exponent - 30);
}

LLI_INLINE void logits(const lli_transform *transform, const float *raw, const float *bias, float *z) {
    for (int64_t j = 0; j < kTileVectors; j++) {
        vf slope, x = v_load(raw + j * kLanes);
        if (bias) x = v_add(x, v_load(bias + j * kLanes));
        v_store(z + j * kLanes, transform_lanes(transform, x, &slope));
    }
}

LLI_INLINE void stats_as(const lli_transform *transform, const lli_stretch *stretch, int32_t want,
                         const int want_entropy, lli_row_sums *sums, lli_row_target *target,
                         lli_exact *soft_sum) {
    const int plain = !stretch->bias && transform->softcap == 0.0f && transform->temperature == 1.0f;
    for (int64_t first = 0; first < stretch->n_cols; first += kTileCols) {
        float buffer[kTileCols];
        const float *z = buffer;
        const int64_t n = stretch->n_cols - first < kTileCols ? stretch->n_cols - first : kTileCols;
        const int64_t column = stretch->column + first, at = stretch->target - column;
        const int has_target = at >= 0 && at < kTileCols;
        if (plain && n == kTileCols && !has_target) {
            z = stretch->raw + first; /* logits as they lie */
        } else {
            logits(transform, stretch->raw + first, stretch->bias ? stretch->bias + first : NULL, buffer);
            for (int64_t v = n; v < kTileCols; v++) buffer[v] = -INFINITY;
        }
        float zmax = tile_max(z);
        /* The strict > keeps the lowest column within a thread's ascending order. */
        if ((want & LLI_WANT_ARGMAX) && (zmax > sums->max || sums->argmax < 0) && zmax == zmax) {
            int64_t v = 0;
            while (z[v] != zmax) v++;
            sums->max = zmax;
            sums->argmax = column + v;
        }
        if (want & LLI_WANT_SOFT_SUM) {
            tile_soft_sum(z, stretch->class_weight ? stretch->class_weight + first : NULL, n, soft_sum);
        }
        if (!has_target) {
            tile_sums(z, zmax, want_entropy, &sums->others);
            continue;
        }
        lli_softmax_clear(&target->whole);
        lli_softmax_clear(&target->rest);
        target->mine = 1;
        target->z = z[at];
        tile_sums(z, zmax, want_entropy, &target->whole);
        buffer[at] = -INFINITY;
        tile_sums(z, tile_max(z), 0, &target->rest);
    }
}

static void stats(const lli_transform *transform, const lli_stretch *stretch, int32_t want,
                  lli_row_sums *sums, lli_row_target *target, lli_exact *soft_sum) {
    if (want & LLI_WANT_ENTROPY) {
        stats_as(transform, stretch, want, 1, sums, target, soft_sum);
    } else {
        stats_as(transform, stretch, want, 0, sums, target, soft_sum);
    }
}

/* ---- Gradient of a row -------------------------------------------------------------------------- */

/* (p (alpha + gamma (lse - H - z)) - epsilon cw) slope / T; d = (z - lse) log2 e carries lse - z. */
LLI_INLINE vf gradient_lanes(const lli_transform *transform, const lli_row_grad *grad, vf raw,
                             const float *cw) {
    vf slope, z = transform_lanes(transform, raw, &slope);
    vf d = v_fma(z, v_set(LLI_LOG2E_LO), v_fma(z, v_set(LLI_LOG2E_HI), v_set(-grad->k)));
    d = v_sub(d, v_set(grad->fraction));
    vf lowest = v_set(-126.0f), bounded = v_max(lowest, d);
    vf p = v_keep_ge(d, lowest, exp2_grid(bounded, 0.0f));
    vf dz = v_mul(p, v_set(grad->alpha));
    if (grad->gamma != 0.0f) {
        vf surprise = v_sub(v_mul(bounded, v_set(-0x1.62e430p-1f)), v_set(grad->entropy));
        dz = v_fma(v_mul(p, v_set(grad->gamma)), surprise, dz);
    }
    if (grad->epsilon != 0.0f) {
        vf epsilon = v_set(grad->epsilon);
        dz = v_sub(dz, cw ? v_mul(epsilon, v_load(cw)) : epsilon);
    }
    if (transform->softcap != 0.0f) dz = v_mul(dz, slope);
    if (transform->temperature != 1.0f) dz = v_div(dz, v_set(transform->temperature));
    return dz;
}

/* dz to d raw, one element. */
static float chain_rule(const lli_transform *transform, float raw, float dz) {
    float lanes[kLanes];
    vf slope;
    (void)transform_lanes(transform, v_set(raw), &slope);
    v_store(lanes, slope);
    if (transform->softcap != 0.0f) dz = dz * lanes[0];
    return transform->temperature != 1.0f ? dz / transform->temperature : dz;
}

static float raw_with_bias(const lli_stretch *stretch, int64_t v) {
    return stretch->bias ? stretch->raw[v] + stretch->bias[v] : stretch->raw[v];
}

/* Rows beyond the float formula: one logit at a time in double. */
static void gradient_wide(const lli_transform *transform, const lli_stretch *stretch,
                          const lli_row_grad *grad, float *raw) {
    for (int64_t v = 0; v < stretch->n_cols; v++) {
        float lanes[kLanes], value = raw_with_bias(stretch, v);
        vf slope;
        v_store(lanes, transform_lanes(transform, v_set(value), &slope));
        float cw = stretch->class_weight ? stretch->class_weight[v] : 1.0f;
        raw[v] = chain_rule(transform, value, lli_row_dz_wide(grad, lanes[0], cw));
    }
}

static void gradient(const lli_transform *transform, const lli_stretch *stretch, const lli_row_grad *grad,
                     float *raw) {
    const int64_t n = stretch->n_cols;
    if (grad->dead) {
        memset(raw, 0, sizeof(float) * (size_t)n);
        return;
    }
    const int64_t at = stretch->target - stretch->column;
    const int has_target = grad->has_target && at >= 0 && at < n;
    const float target_dz =
        has_target ? chain_rule(transform, raw_with_bias(stretch, at), grad->target_dz) : 0.0f;
    if (grad->wide) {
        gradient_wide(transform, stretch, grad, raw);
    } else {
        int64_t v = 0;
        for (; v + kLanes <= n; v += kLanes) {
            vf x = v_load(raw + v);
            if (stretch->bias) x = v_add(x, v_load(stretch->bias + v));
            const float *cw = stretch->class_weight ? stretch->class_weight + v : NULL;
            v_store(raw + v, gradient_lanes(transform, grad, x, cw));
        }
        if (v < n) { /* class weights end with the vocabulary: no reading past them */
            float x[kLanes] = {0}, cw[kLanes] = {0};
            for (int64_t l = 0; l < n - v; l++) {
                x[l] = raw_with_bias(stretch, v + l);
                cw[l] = stretch->class_weight ? stretch->class_weight[v + l] : 1.0f;
            }
            v_store(x, gradient_lanes(transform, grad, v_load(x), cw));
            memcpy(raw + v, x, sizeof(float) * (size_t)(n - v));
        }
    }
    if (has_target) raw[at] = target_dz;
}

#endif
