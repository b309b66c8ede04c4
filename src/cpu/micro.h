/* What the CPU driver (linear_ce_cpu.c) asks of an instruction set. micro_product.h and micro_row.h
 * implement it once over the vector vocabulary; micro_<isa>.c builds them.
 *
 * Panel: a block of `width` rows (or columns) of a matrix, interleaved along the contraction:
 *
 *   panel[k * width + r] = row r, element k          r < width; rows beyond the matrix are zeros
 *
 * so that step k of a product reads `width` neighbouring floats. Panels are `rows` (mr) wide on the side
 * whose elements are broadcast and `cols` (nr) wide on the side that fills vectors. */
#ifndef LLI_CPU_MICRO_H
#define LLI_CPU_MICRO_H

#include "core/exact_sum.h"
#include "core/loss.h"
#include "core/softmax.h"

/* What a product does with the old contents of its result. */
typedef enum lli_gemm_mode {
    LLI_GEMM_SET = 0,      /* c = chain from 0 */
    LLI_GEMM_CONTINUE = 1, /* c = chain that goes on from c: the chain over all of k, cut in pieces */
    LLI_GEMM_ADD = 2       /* c = c + chain from 0 */
} lli_gemm_mode;

/* Raw logit to logit: z = softcap(raw) / T. */
typedef struct lli_transform {
    float softcap, temperature; /* 0: none; 1: none */
} lli_transform;

/* What the statistics of a row gather, by one thread. */
typedef struct lli_row_sums {
    lli_softmax others; /* every tile but the target's */
    float max;          /* largest logit and its lowest column; -inf and -1 before the first */
    int32_t reserved;
    int64_t argmax;
} lli_row_sums;

/* The target's tile, whole and without the target, and the target's logit. Written by the thread that
 * meets the target. */
typedef struct lli_row_target {
    lli_softmax whole, rest;
    float z;
    int32_t mine; /* 0: the target's tile is not among those gathered here */
} lli_row_target;

/* One row's stretch of raw logits. */
typedef struct lli_stretch {
    const float *raw;          /* without the bias; readable up to the next multiple of 64 columns */
    const float *bias;         /* f32, as long as raw, or NULL */
    const float *class_weight; /* of these columns, as long as n_cols, or NULL */
    int64_t column;            /* of raw[0], a multiple of 64 */
    int64_t n_cols;
    int64_t target; /* column of the row's target, anywhere */
} lli_stretch;

enum { LLI_WANT_ENTROPY = 1, LLI_WANT_ARGMAX = 2, LLI_WANT_SOFT_SUM = 4 };

enum { kDirectTokens = 4 }; /* the most tokens that `direct` takes */

typedef struct lli_micro {
    int32_t rows, cols; /* mr, nr */

    /* panel[k * width + r] = rows[r][k0 + k] for r < n_rows, k < n_k; zeros for n_rows <= r < width. */
    void (*pack)(float *panel, int64_t width, const void *const *rows, int64_t n_rows, int32_t dtype,
                 int64_t k0, int64_t n_k);
    /* Columns c0 .. c0 + n_cols of n_k rows into ceil(n_cols / width) panels, panel_stride floats apart:
     * panels[p * panel_stride + k * width + c] = rows[k][c0 + p * width + c]; zeros beyond n_cols; a NULL
     * row counts as zeros. */
    void (*copy)(float *panels, int64_t width, int64_t panel_stride, const void *const *rows, int64_t n_k,
                 int32_t dtype, int64_t c0, int64_t n_cols);
    /* c[i * ldc + j] (i < m <= rows, j < n <= cols) by `mode` from a: n_k steps of a rows-wide panel and b:
     * of a cols-wide panel. Each element is one f32 fused multiply-add chain in ascending k. */
    void (*gemm)(int64_t m, int64_t n, int64_t n_k, const float *a, const float *b, float *c, int64_t ldc,
                 lli_gemm_mode mode);
    /* c[i * ldc + j] = sum_k rows[j][k] a[k * rows + i] for i < m <= kDirectTokens, j < n_rows, and 0 for
     * n_rows <= j < cols: the same chains as gemm without a packed b, for calls of few tokens, where packing
     * would cost more than the product. */
    void (*direct)(int64_t m, int64_t n_k, const float *a, const void *const *rows, int64_t n_rows,
                   int32_t dtype, float *c, int64_t ldc);
    /* Adds a stretch's tiles to sums (and target, soft_sum: sum_v cw[v] z_v). `want`: LLI_WANT_ bits. */
    void (*stats)(const lli_transform *transform, const lli_stretch *stretch, int32_t want,
                  lli_row_sums *sums, lli_row_target *target, lli_exact *soft_sum);
    /* z[0..64) = softcap(raw + bias) / T; bias f32 or NULL. */
    void (*logits)(const lli_transform *transform, const float *raw, const float *bias, float *z);
    /* Replaces a stretch's raw logits, in place, by the gradient with respect to them. */
    void (*gradient)(const lli_transform *transform, const lli_stretch *stretch, const lli_row_grad *grad,
                     float *raw);
    /* Given logits to f32, exactly; and f32 to a gradient's dtype, rounded to nearest even. */
    void (*widen)(const void *from, int32_t dtype, int64_t n, float *to);
    void (*narrow)(const float *from, int64_t n, void *to, int32_t dtype);
    /* How many of z[0..n) are greater; NaN is not. */
    int64_t (*count_greater)(const float *z, int64_t n, float than);
    /* Runs `steps` steps of independent fused multiply-adds; returns how many f32 operations that was. */
    double (*peak)(int64_t steps, float *sink);
} lli_micro;

extern const lli_micro lli_micro_plain;
extern const lli_micro lli_micro_avx2;
extern const lli_micro lli_micro_avx512;

#endif
