/* The vector vocabulary of the CPU kernels in AVX2, FMA and F16C. simd_plain.h defines what each operation
 * means; all three headers give the same bits. */
#ifndef LLI_CPU_SIMD_AVX2_H
#define LLI_CPU_SIMD_AVX2_H

#include <immintrin.h>
#include <stdint.h>

enum { kLanes = 8, kGemmRows = 6, kGemmVectors = 2 };

typedef __m256 vf;
typedef __m256i vi;

static inline vf v_set(float x) {
    return _mm256_set1_ps(x);
}
static inline vf v_load(const float *p) {
    return _mm256_loadu_ps(p);
}
static inline void v_store(float *p, vf x) {
    _mm256_storeu_ps(p, x);
}
static inline vf v_load_bf16(const uint16_t *p) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
static inline vf v_load_pairs(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_loadu_si256((const __m256i *)p));
}
static inline vf v_even_bf16(vf pairs) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs), 16));
}
static inline vf v_odd_bf16(vf pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(pairs), _mm256_set1_epi32(-65536)));
}
static inline vf v_load_f16(const uint16_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
static inline void v_store_bf16(uint16_t *p, vf a) {
    const __m256i bits = _mm256_castps_si256(a), high = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
    const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    const __m256i words = _mm256_blendv_epi8(rounded, quiet, nan);
    /* packus works inside 128-bit halves: the two quarters wanted are the first and the third */
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(packed));
}
static inline void v_store_f16(uint16_t *p, vf a) {
    /* vcvtps2ph keeps the payload of a NaN: only its sign is kept here */
    const vf sign = _mm256_and_ps(a, _mm256_set1_ps(-0.0f));
    const vf nan = _mm256_or_ps(sign, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)));
    a = _mm256_blendv_ps(a, nan, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
static inline vf v_add(vf a, vf b) {
    return _mm256_add_ps(a, b);
}
static inline vf v_sub(vf a, vf b) {
    return _mm256_sub_ps(a, b);
}
static inline vf v_mul(vf a, vf b) {
    return _mm256_mul_ps(a, b);
}
static inline vf v_div(vf a, vf b) {
    return _mm256_div_ps(a, b);
}
static inline vf v_fma(vf a, vf b, vf c) {
    return _mm256_fmadd_ps(a, b, c);
}
static inline vf v_max(vf a, vf b) {
    return _mm256_max_ps(a, b);
}
static inline vf v_rint(vf a) {
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static inline vf v_abs(vf a) {
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a);
}
static inline vf v_copysign(vf magnitude, vf sign) {
    const vf bit = _mm256_set1_ps(-0.0f);
    return _mm256_or_ps(_mm256_andnot_ps(bit, magnitude), _mm256_and_ps(bit, sign));
}
static inline vf v_keep_ge(vf a, vf limit, vf x) {
    return _mm256_and_ps(_mm256_cmp_ps(a, limit, _CMP_GE_OQ), x);
}
static inline vf v_keep_nonzero(vf a, vf x) {
    return _mm256_and_ps(_mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_NEQ_UQ), x);
}
static inline int v_any_nan(vf a, vf b) {
    return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)) != 0;
}
static inline int v_count_gt(vf a, vf b) {
    return __builtin_popcount((unsigned)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)));
}
static inline float v_hmax(vf a) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
static inline vf v_pow2(vf n) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
static inline vi v_to_int(vf a) {
    return _mm256_cvtps_epi32(a);
}
static inline vf v_exponent_add(vf a, vf shifted) {
    return _mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(_mm256_castps_si256(shifted), 23)));
}
static inline vi vi_zero(void) {
    return _mm256_setzero_si256();
}
static inline vi vi_add(vi a, vi b) {
    return _mm256_add_epi32(a, b);
}
static inline int64_t vi_sum_64(vi a) {
    __m128i x = _mm_add_epi64(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    return _mm_cvtsi128_si64(x) + _mm_extract_epi64(x, 1);
}
typedef __m256i vw;
static inline vw vw_zero(void) {
    return _mm256_setzero_si256();
}
static inline vw vw_add_unsigned(vw sum, vi a) {
    const vw even = _mm256_and_si256(a, _mm256_set1_epi64x(0xffffffff)), odd = _mm256_srli_epi64(a, 32);
    return _mm256_add_epi64(_mm256_add_epi64(sum, even), odd);
}
static inline int64_t vw_sum(vw sum) {
    return vi_sum_64(sum);
}
static inline int64_t vi_sum_signed(vi a) {
    return vi_sum_64(_mm256_add_epi64(_mm256_cvtepi32_epi64(_mm256_castsi256_si128(a)),
                                      _mm256_cvtepi32_epi64(_mm256_extracti128_si256(a, 1))));
}

static inline void v_transpose(vf r[kLanes]) {
    vf t[kLanes];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
        t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    }
    for (int i = 0; i < 8; i++) r[i] = t[i];
}

#endif
