/* The vector vocabulary of the CPU kernels in AVX-512 (F, BW, DQ, VL). simd_plain.h defines what each
 * operation means; all three headers give the same bits. */
#ifndef LLI_CPU_SIMD_AVX512_H
#define LLI_CPU_SIMD_AVX512_H

#include <immintrin.h>
#include <stdint.h>

enum { kLanes = 16, kGemmRows = 14, kGemmVectors = 2 };

typedef __m512 vf;
typedef __m512i vi;

static inline vf v_set(float x) {
    return _mm512_set1_ps(x);
}
static inline vf v_load(const float *p) {
    return _mm512_loadu_ps(p);
}
static inline void v_store(float *p, vf x) {
    _mm512_storeu_ps(p, x);
}
static inline vf v_load_bf16(const uint16_t *p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
static inline vf v_load_pairs(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_loadu_si512(p));
}
static inline vf v_even_bf16(vf pairs) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pairs), 16));
}
static inline vf v_odd_bf16(vf pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(pairs), _mm512_set1_epi32(-65536)));
}
static inline vf v_load_f16(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
static inline void v_store_bf16(uint16_t *p, vf a) {
    const __m512i bits = _mm512_castps_si512(a), high = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    const __m512i words = _mm512_mask_or_epi32(rounded, nan, high, _mm512_set1_epi32(0x40));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(words));
}
static inline void v_store_f16(uint16_t *p, vf a) {
    /* vcvtps2ph keeps the payload of a NaN: only its sign is kept here */
    const __m512i sign = _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(INT32_MIN));
    const __m512i nan = _mm512_or_si512(sign, _mm512_set1_epi32(0x7fc00000));
    a = _mm512_mask_mov_ps(a, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), _mm512_castsi512_ps(nan));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
static inline vf v_add(vf a, vf b) {
    return _mm512_add_ps(a, b);
}
static inline vf v_sub(vf a, vf b) {
    return _mm512_sub_ps(a, b);
}
static inline vf v_mul(vf a, vf b) {
    return _mm512_mul_ps(a, b);
}
static inline vf v_div(vf a, vf b) {
    return _mm512_div_ps(a, b);
}
static inline vf v_fma(vf a, vf b, vf c) {
    return _mm512_fmadd_ps(a, b, c);
}
static inline vf v_max(vf a, vf b) {
    return _mm512_max_ps(a, b);
}
static inline vf v_rint(vf a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static inline vf v_abs(vf a) {
    return _mm512_abs_ps(a);
}
static inline vf v_copysign(vf magnitude, vf sign) {
    const vf bit = _mm512_set1_ps(-0.0f);
    return _mm512_or_ps(_mm512_andnot_ps(bit, magnitude), _mm512_and_ps(bit, sign));
}
static inline vf v_keep_ge(vf a, vf limit, vf x) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, limit, _CMP_GE_OQ), x);
}
static inline vf v_keep_nonzero(vf a, vf x) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_NEQ_UQ), x);
}
static inline int v_any_nan(vf a, vf b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q) != 0;
}
static inline int v_count_gt(vf a, vf b) {
    return __builtin_popcount(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ));
}
static inline float v_hmax(vf a) {
    return _mm512_reduce_max_ps(a);
}
static inline vf v_pow2(vf n) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
static inline vi v_to_int(vf a) {
    return _mm512_cvtps_epi32(a);
}
static inline vf v_exponent_add(vf a, vf shifted) {
    return _mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_castps_si512(a), _mm512_slli_epi32(_mm512_castps_si512(shifted), 23)));
}
static inline vi vi_zero(void) {
    return _mm512_setzero_si512();
}
static inline vi vi_add(vi a, vi b) {
    return _mm512_add_epi32(a, b);
}
typedef __m512i vw;
static inline vw vw_zero(void) {
    return _mm512_setzero_si512();
}
static inline vw vw_add_unsigned(vw sum, vi a) {
    const vw even = _mm512_and_si512(a, _mm512_set1_epi64(0xffffffff)), odd = _mm512_srli_epi64(a, 32);
    return _mm512_add_epi64(_mm512_add_epi64(sum, even), odd);
}
static inline int64_t vw_sum(vw sum) {
    return _mm512_reduce_add_epi64(sum);
}
static inline int64_t vi_sum_signed(vi a) {
    return _mm512_reduce_add_epi64(
        _mm512_add_epi64(_mm512_srai_epi64(_mm512_slli_epi64(a, 32), 32), _mm512_srai_epi64(a, 32)));
}

/* 16 x 16 transpose in four rounds of pairwise exchanges: 1, 2, 4, 8 lanes apart. */
static inline void v_transpose(vf r[kLanes]) {
    vf t[kLanes];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(t[i]), _mm512_castps_pd(t[i + 2])));
        r[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(t[i]), _mm512_castps_pd(t[i + 2])));
        r[i + 2] =
            _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(t[i + 1]), _mm512_castps_pd(t[i + 3])));
        r[i + 3] =
            _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(t[i + 1]), _mm512_castps_pd(t[i + 3])));
    }
    /* now r[4 g + j] holds column j of each 128-bit lane, rows 4 g .. 4 g + 3 */
    for (int j = 0; j < 4; j++) {
        t[j] = _mm512_shuffle_f32x4(r[j], r[4 + j], 0x88);
        t[4 + j] = _mm512_shuffle_f32x4(r[j], r[4 + j], 0xdd);
        t[8 + j] = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0x88);
        t[12 + j] = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0xdd);
    }
    for (int j = 0; j < 4; j++) {
        r[j] = _mm512_shuffle_f32x4(t[j], t[8 + j], 0x88);
        r[8 + j] = _mm512_shuffle_f32x4(t[j], t[8 + j], 0xdd);
        r[4 + j] = _mm512_shuffle_f32x4(t[4 + j], t[12 + j], 0x88);
        r[12 + j] = _mm512_shuffle_f32x4(t[4 + j], t[12 + j], 0xdd);
    }
}

#endif
