/* Packing, products and the ceiling of the CPU micro-kernels, written once over a vector vocabulary
 * (simd_<isa>.h, included before this file) and built per instruction set by micro_<isa>.c.
 *
 * gemm: kGemmRows x (kGemmVectors * kLanes) accumulators in registers, AVX-512 14 x 32 (28 of 32 registers),
 * AVX2 6 x 16 (12 of 16); one element of a is broadcast to kGemmVectors products.
 *
 * direct: for few tokens, no packed operand; squares of w are transposed in registers and used at once. */
#ifndef LLI_CPU_MICRO_PRODUCT_H
#define LLI_CPU_MICRO_PRODUCT_H

#include "core/dtype.h"
#include "cpu/micro.h"

#include <string.h>

enum { kGemmCols = kGemmVectors * kLanes };

#define LLI_INLINE static inline __attribute__((always_inline))

/* ---- Packing ------------------------------------------------------------------------------------ */

LLI_INLINE vf load_lanes(const void *row, int32_t dtype, int64_t k) {
    if (dtype == LL_DTYPE_F32) return v_load((const float *)row + k);
    if (dtype == LL_DTYPE_BF16) return v_load_bf16((const uint16_t *)row + k);
    return v_load_f16((const uint16_t *)row + k);
}

LLI_INLINE const void *load_address(const void *row, int32_t dtype, int64_t k) {
    return dtype == LL_DTYPE_F32 ? (const void *)((const float *)row + k)
                                 : (const void *)((const uint16_t *)row + k);
}

/* kLanes f32, or 2 kLanes bf16 in pairs: what one register of a transpose takes from a row. */
LLI_INLINE vf load_square(const void *row, int32_t dtype, int64_t k) {
    return dtype == LL_DTYPE_BF16 ? v_load_pairs((const uint16_t *)row + k) : load_lanes(row, dtype, k);
}
LLI_INLINE int64_t square_steps(int32_t dtype) {
    return dtype == LL_DTYPE_BF16 ? 2 * kLanes : kLanes;
}

/* kLanes rows at a time through registers. When width is no multiple of kLanes the last group's stores run
 * into the next step's place, which is written after; so the last step of a panel goes element by element. */
LLI_INLINE void pack_as(float *panel, int64_t width, const void *const *rows, int64_t n_rows,
                        const int32_t dtype, int64_t k0, int64_t n_k) {
    for (int64_t first = 0; first < width; first += kLanes) {
        int64_t n_here = n_rows - first, k = 0;
        const int64_t step = square_steps(dtype), spare = width - first >= kLanes ? 0 : 1;
        if (n_here > kLanes) n_here = kLanes;
        for (; n_here > 0 && k + step + spare <= n_k; k += step) {
            vf block[kLanes];
            for (int r = 0; r < kLanes; r++) {
                block[r] = r < n_here ? load_square(rows[first + r], dtype, k0 + k) : v_set(0.0f);
            }
            v_transpose(block);
            for (int64_t j = 0; j < kLanes; j++) {
                float *to = panel + k * width + first;
                if (dtype == LL_DTYPE_BF16) {
                    v_store(to + 2 * j * width, v_even_bf16(block[j]));
                    v_store(to + (2 * j + 1) * width, v_odd_bf16(block[j]));
                } else {
                    v_store(to + j * width, block[j]);
                }
            }
        }
        for (; k < n_k; k++) {
            for (int64_t r = 0; r < kLanes && first + r < width; r++) {
                panel[k * width + first + r] = r < n_here ? lli_load(rows[first + r], dtype, k0 + k) : 0.0f;
            }
        }
    }
}

static void pack(float *panel, int64_t width, const void *const *rows, int64_t n_rows, int32_t dtype,
                 int64_t k0, int64_t n_k) {
    if (dtype == LL_DTYPE_F32) {
        pack_as(panel, width, rows, n_rows, LL_DTYPE_F32, k0, n_k);
    } else if (dtype == LL_DTYPE_BF16) {
        pack_as(panel, width, rows, n_rows, LL_DTYPE_BF16, k0, n_k);
    } else {
        pack_as(panel, width, rows, n_rows, LL_DTYPE_F16, k0, n_k);
    }
}

/* Row by row, so that memory is read in order. */
static void copy(float *panels, int64_t width, int64_t panel_stride, const void *const *rows, int64_t n_k,
                 int32_t dtype, int64_t c0, int64_t n_cols) {
    for (int64_t k = 0; k < n_k; k++) {
        for (int64_t first = 0; first < n_cols; first += width) {
            float *to = panels + first / width * panel_stride + k * width;
            int64_t c = 0, n = n_cols - first < width ? n_cols - first : width;
            if (!rows[k]) n = 0;
            for (; c + kLanes <= n; c += kLanes) v_store(to + c, load_lanes(rows[k], dtype, c0 + first + c));
            for (; c < n; c++) to[c] = lli_load(rows[k], dtype, c0 + first + c);
            for (; c < width; c++) to[c] = 0.0f;
        }
    }
}

/* ---- Product ------------------------------------------------------------------------------------ */

/* m and mode are constants where this is inlined, so the accumulators stay in registers. */
LLI_INLINE void gemm_rows(const int m, int64_t n_k, const float *restrict a, const float *restrict b,
                          float *restrict c, int64_t ldc, const lli_gemm_mode mode) {
    vf acc[kGemmRows][kGemmVectors];
#pragma GCC unroll 16
    for (int i = 0; i < m; i++) {
#pragma GCC unroll 4
        for (int64_t j = 0; j < kGemmVectors; j++) {
            acc[i][j] = mode == LLI_GEMM_CONTINUE ? v_load(c + i * ldc + j * kLanes) : v_set(0.0f);
            if (mode == LLI_GEMM_ADD) __builtin_prefetch(c + i * ldc + j * kLanes, 1);
        }
    }
    for (int64_t k = 0; k < n_k; k++, a += kGemmRows, b += kGemmCols) {
        vf bk[kGemmVectors];
#pragma GCC unroll 4
        for (int64_t j = 0; j < kGemmVectors; j++) bk[j] = v_load(b + j * kLanes);
#pragma GCC unroll 16
        for (int i = 0; i < m; i++) {
            vf ak = v_set(a[i]);
#pragma GCC unroll 4
            for (int64_t j = 0; j < kGemmVectors; j++) acc[i][j] = v_fma(ak, bk[j], acc[i][j]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < m; i++) {
#pragma GCC unroll 4
        for (int64_t j = 0; j < kGemmVectors; j++) {
            float *to = c + i * ldc + j * kLanes;
            v_store(to, mode == LLI_GEMM_ADD ? v_add(v_load(to), acc[i][j]) : acc[i][j]);
        }
    }
}

LLI_INLINE void gemm_mode(int64_t m, int64_t n_k, const float *a, const float *b, float *c, int64_t ldc,
                          const lli_gemm_mode mode) {
    switch (m) {
    case 1:
        gemm_rows(1, n_k, a, b, c, ldc, mode);
        break;
    case 2:
        gemm_rows(2, n_k, a, b, c, ldc, mode);
        break;
    case 3:
        gemm_rows(3, n_k, a, b, c, ldc, mode);
        break;
    case 4:
        gemm_rows(4, n_k, a, b, c, ldc, mode);
        break;
#if LLI_GEMM_ROWS > 4
    case 5:
        gemm_rows(5, n_k, a, b, c, ldc, mode);
        break;
    case 6:
        gemm_rows(6, n_k, a, b, c, ldc, mode);
        break;
#endif
#if LLI_GEMM_ROWS > 6
    case 7:
        gemm_rows(7, n_k, a, b, c, ldc, mode);
        break;
    case 8:
        gemm_rows(8, n_k, a, b, c, ldc, mode);
        break;
    case 9:
        gemm_rows(9, n_k, a, b, c, ldc, mode);
        break;
    case 10:
        gemm_rows(10, n_k, a, b, c, ldc, mode);
        break;
    case 11:
        gemm_rows(11, n_k, a, b, c, ldc, mode);
        break;
    case 12:
        gemm_rows(12, n_k, a, b, c, ldc, mode);
        break;
    case 13:
        gemm_rows(13, n_k, a, b, c, ldc, mode);
        break;
    case 14:
        gemm_rows(14, n_k, a, b, c, ldc, mode);
        break;
#endif
    default:
        break;
    }
}

static void gemm_whole(int64_t m, int64_t n_k, const float *a, const float *b, float *c, int64_t ldc,
                       lli_gemm_mode mode) {
    switch (mode) {
    case LLI_GEMM_SET:
        gemm_mode(m, n_k, a, b, c, ldc, LLI_GEMM_SET);
        break;
    case LLI_GEMM_CONTINUE:
        gemm_mode(m, n_k, a, b, c, ldc, LLI_GEMM_CONTINUE);
        break;
    case LLI_GEMM_ADD:
        gemm_mode(m, n_k, a, b, c, ldc, LLI_GEMM_ADD);
        break;
    }
}

/* Results narrower than a panel go through a buffer, because rows of c end where other data begins. */
static void gemm(int64_t m, int64_t n, int64_t n_k, const float *a, const float *b, float *c, int64_t ldc,
                 lli_gemm_mode mode) {
    if (n == kGemmCols) {
        gemm_whole(m, n_k, a, b, c, ldc, mode);
        return;
    }
    float edge[kGemmRows * kGemmCols];
    for (int64_t i = 0; i < m; i++) {
        memset(edge + i * kGemmCols, 0, sizeof(float) * kGemmCols);
        if (mode != LLI_GEMM_SET) memcpy(edge + i * kGemmCols, c + i * ldc, sizeof(float) * (size_t)n);
    }
    gemm_whole(m, n_k, a, b, edge, kGemmCols, mode);
    for (int64_t i = 0; i < m; i++) memcpy(c + i * ldc, edge + i * kGemmCols, sizeof(float) * (size_t)n);
}

/* kLanes columns at a time: a square of w is turned in registers and used at once. */
LLI_INLINE void direct_rows(const int m, int64_t n_k, const float *a, const void *const *rows, int64_t n_rows,
                            const int32_t dtype, float *c, int64_t ldc) {
    const int64_t step = square_steps(dtype);
    for (int64_t first = 0; first < kGemmCols; first += kLanes) {
        vf acc[kDirectTokens], block[kLanes];
        const int64_t n_here = n_rows - first;
        int64_t k = 0;
#pragma GCC unroll 4
        for (int i = 0; i < m; i++) acc[i] = v_set(0.0f);
        for (; n_here > 0 && k + step <= n_k; k += step) {
            for (int r = 0; r < kLanes; r++) {
                if (r >= n_here) {
                    block[r] = v_set(0.0f);
                    continue;
                }
                /* 16 streams at once are more than the hardware follows; into the L2, because rows a power of
                 * two apart share a set of the L1. 512 bytes ahead: 79 ms for 2.5 GB against 95 without. */
                __builtin_prefetch((const char *)load_address(rows[first + r], dtype, k) + 512, 0, 2);
                block[r] = load_square(rows[first + r], dtype, k);
            }
            v_transpose(block);
            LLI_UNROLL_SQUARE
            for (int64_t j = 0; j < step; j++) {
                vf column = dtype != LL_DTYPE_BF16 ? block[j]
                            : j % 2                ? v_odd_bf16(block[j / 2])
                                                   : v_even_bf16(block[j / 2]);
#pragma GCC unroll 4
                for (int i = 0; i < m; i++) acc[i] = v_fma(v_set(a[(k + j) * kGemmRows + i]), column, acc[i]);
            }
        }
        for (; n_here > 0 && k < n_k; k++) {
            float column[kLanes];
            for (int r = 0; r < kLanes; r++)
                column[r] = r < n_here ? lli_load(rows[first + r], dtype, k) : 0.0f;
#pragma GCC unroll 4
            for (int i = 0; i < m; i++) acc[i] = v_fma(v_set(a[k * kGemmRows + i]), v_load(column), acc[i]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < m; i++) v_store(c + i * ldc + first, acc[i]);
    }
}

LLI_INLINE void direct_as(int64_t m, int64_t n_k, const float *a, const void *const *rows, int64_t n_rows,
                          const int32_t dtype, float *c, int64_t ldc) {
    switch (m) {
    case 1:
        direct_rows(1, n_k, a, rows, n_rows, dtype, c, ldc);
        break;
    case 2:
        direct_rows(2, n_k, a, rows, n_rows, dtype, c, ldc);
        break;
    case 3:
        direct_rows(3, n_k, a, rows, n_rows, dtype, c, ldc);
        break;
    case 4:
        direct_rows(4, n_k, a, rows, n_rows, dtype, c, ldc);
        break;
    default:
        break;
    }
}

static void direct(int64_t m, int64_t n_k, const float *a, const void *const *rows, int64_t n_rows,
                   int32_t dtype, float *c, int64_t ldc) {
    if (dtype == LL_DTYPE_F32) {
        direct_as(m, n_k, a, rows, n_rows, LL_DTYPE_F32, c, ldc);
    } else if (dtype == LL_DTYPE_BF16) {
        direct_as(m, n_k, a, rows, n_rows, LL_DTYPE_BF16, c, ldc);
    } else {
        direct_as(m, n_k, a, rows, n_rows, LL_DTYPE_F16, c, ldc);
    }
}

/* ---- Ceiling ------------------------------------------------------------------------------------ */

static double peak(int64_t steps, float *sink) {
    enum { kChains = 12 }; /* more than latency times issue rate of any current core */
    vf acc[kChains], a = v_set(0.999f), b = v_set(1e-3f);
#pragma GCC unroll 12
    for (int i = 0; i < kChains; i++) acc[i] = v_set(1.0f + (float)i);
    for (int64_t step = 0; step < steps; step++) {
#pragma GCC unroll 12
        for (int i = 0; i < kChains; i++) acc[i] = v_fma(acc[i], a, b);
    }
#pragma GCC unroll 12
    for (int i = 1; i < kChains; i++) acc[0] = v_add(acc[0], acc[i]);
    float lanes[kLanes];
    v_store(lanes, acc[0]);
    *sink = lanes[0];
    return 2.0 * kChains * kLanes * (double)steps;
}

#endif
