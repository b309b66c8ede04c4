/* The CPU micro-kernels of micro_product.h, micro_row.h and micro_given.h in AVX-512. */
#include "cpu/simd_avx512.h"

#define LLI_GEMM_ROWS     14                       /* kGemmRows, for the preprocessor */
#define LLI_UNROLL_SQUARE _Pragma("GCC unroll 32") /* a square in registers has no index at run time */
#include "cpu/micro_product.h"
#include "cpu/micro_row.h"
#include "cpu/micro_given.h"

_Static_assert(LLI_GEMM_ROWS == kGemmRows, "LLI_GEMM_ROWS must be kGemmRows");

const lli_micro lli_micro_avx512 = {
    .rows = kGemmRows,
    .cols = kGemmCols,
    .pack = pack,
    .copy = copy,
    .gemm = gemm,
    .direct = direct,
    .stats = stats,
    .logits = logits,
    .gradient = gradient,
    .widen = widen,
    .narrow = narrow,
    .count_greater = count_greater,
    .peak = peak,
};
